"""Layers without the MAC array: output stage, pooling and normalisation alone."""

from toolkit.dla.cycles import post_processing
from toolkit.dla.cycles.configurations import Config
from toolkit.dla.cycles.layers import Lrn, Pointwise, Pool
from toolkit.dla.cycles.result import LayerWork


def pointwise_work(layer: Pointwise, config: Config) -> LayerWork:
    """Return the work of the output stage on `operands` tensors; see `Pointwise`.

    Raises LayerError: this DLA has no last unit, and the layer needs it.
    """
    elements, size = _input(layer, config)
    return LayerWork(
        output=post_processing.sdp_cycles(elements, layer.stage, config),
        read=size * layer.operands,
        written=size,
    )


def pool_work(pool: Pool, config: Config) -> LayerWork:
    """Return the work of a pooling; it reads its input once, columns at splits twice.

    The rate is in input elements per clock, whatever the overlap of windows.
    """
    channels = post_processing.padded_channels(pool.channels, config, pool.precision)
    width = post_processing.pool_in_width(pool, config)
    read = post_processing.tensor_bytes(pool.channels, pool.height, width, config, pool.precision)
    once = post_processing.tensor_bytes(
        pool.channels, pool.height, pool.width, config, pool.precision
    )
    written = post_processing.tensor_bytes(
        pool.channels, pool.out_height, pool.out_width, config, pool.precision
    )
    elements = channels * pool.height * width
    return LayerWork(
        output=elements / post_processing.pdp_rate(config, pool.precision) * pool.batch,
        read=read * pool.batch,
        written=written * pool.batch,
        refetch=(read - once) * pool.batch,
        layers=post_processing.pool_parts(pool, config) * pool.batch,
    )


def lrn_work(layer: Lrn, config: Config) -> LayerWork:
    """Return the work of a response normalisation."""
    elements, size = _input(layer, config)
    return LayerWork(
        output=elements / post_processing.cdp_rate(config, layer.precision),
        read=size,
        written=size,
        layers=layer.batch,
    )


def _input(layer: Pointwise | Lrn, config: Config) -> tuple[int, int]:
    """Return the elements of an input, with padding, and its bytes."""
    channels = post_processing.padded_channels(layer.channels, config, layer.precision)
    elements = channels * layer.height * layer.width * layer.batch
    size = layer.batch * post_processing.tensor_bytes(
        layer.channels, layer.height, layer.width, config, layer.precision
    )
    return elements, size
