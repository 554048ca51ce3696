"""Layers that run without the MAC array: output stage, pooling and normalisation on their own."""

from toolkit.dla.cycles import post
from toolkit.dla.cycles.configurations import Config
from toolkit.dla.cycles.layers import Lrn, Pointwise, Pool
from toolkit.dla.cycles.result import Work


def pointwise_work(layer: Pointwise, config: Config) -> Work:
    """Return the work of the output stage on `operands` tensors; see `Pointwise`.

    Raises LayerError: this DLA has no last unit, and the layer needs it.
    """
    channels = post.padded_channels(layer.channels, config, layer.precision)
    elements = channels * layer.height * layer.width * layer.batch
    size = layer.batch * post.tensor_bytes(
        layer.channels, layer.height, layer.width, config, layer.precision
    )
    return Work(
        output=post.sdp_cycles(elements, layer.stage, config),
        read=size * layer.operands,
        written=size,
    )


def pool_work(pool: Pool, config: Config) -> Work:
    """Return the work of a pooling that reads its input once, columns at cuts twice.

    Its unit takes so many input elements a clock, however the windows overlap.
    """
    channels = post.padded_channels(pool.channels, config, pool.precision)
    width = post.pool_in_width(pool, config)
    read = post.tensor_bytes(pool.channels, pool.height, width, config, pool.precision)
    once = post.tensor_bytes(pool.channels, pool.height, pool.width, config, pool.precision)
    made = post.tensor_bytes(pool.channels, pool.out_height, pool.out_width, config, pool.precision)
    elements = channels * pool.height * width
    return Work(
        output=elements / post.pdp_rate(config, pool.precision) * pool.batch,
        read=read * pool.batch,
        written=made * pool.batch,
        refetch=(read - once) * pool.batch,
        layers=post.pool_parts(pool, config) * pool.batch,
    )


def lrn_work(layer: Lrn, config: Config) -> Work:
    """Return the work of a response normalisation."""
    channels = post.padded_channels(layer.channels, config, layer.precision)
    elements = channels * layer.height * layer.width * layer.batch
    size = layer.batch * post.tensor_bytes(
        layer.channels, layer.height, layer.width, config, layer.precision
    )
    return Work(
        output=elements / post.cdp_rate(config, layer.precision),
        read=size,
        written=size,
        layers=layer.batch,
    )
