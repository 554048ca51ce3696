"""The cycles of one layer on one DLA: the front of the package."""

import math
from collections.abc import Iterator
from dataclasses import replace

from toolkit.dla_cycles.configurations import Config
from toolkit.dla_cycles.convolution import IN_DRAM, Residency, conv_works
from toolkit.dla_cycles.engines import lrn_work, pointwise_work, pool_work
from toolkit.dla_cycles.layers import ConvLayer, Deconvolution, Layer, Pointwise, Pool
from toolkit.dla_cycles.post import tensor_bytes
from toolkit.dla_cycles.result import Cycles, Work, joined, to_cycles


def estimate(
    layer: Layer,
    config: Config,
    *,
    bytes_per_clock: float = math.inf,
    sram_bytes_per_clock: float = math.inf,
    residency: Residency = IN_DRAM,
) -> Cycles:
    """Return the cycles of the layer in the cheapest way that this DLA can compute it.

    bytes_per_clock: what memory gives this DLA, in bytes per clock of the DLA (GB/s x 1000 / MHz);
    never more than its port takes. sram_bytes_per_clock: likewise. residency: which tensors of a
    convolution lie in the SRAM. Raises LayerError: this DLA cannot compute the layer.
    """
    return min(
        each_way(
            layer,
            config,
            bytes_per_clock=bytes_per_clock,
            sram_bytes_per_clock=sram_bytes_per_clock,
            residency=residency,
        ),
        key=lambda cycles: cycles.total,
    )


def each_way(
    layer: Layer,
    config: Config,
    *,
    bytes_per_clock: float = math.inf,
    sram_bytes_per_clock: float = math.inf,
    residency: Residency = IN_DRAM,
) -> list[Cycles]:
    """Return the cycles of every way to compute the layer, named by `mode`; see `estimate`."""
    return [
        to_cycles(work, config, bytes_per_clock, sram_bytes_per_clock)
        for work in _works(layer, config, residency)
    ]


def _works(layer: Layer, config: Config, residency: Residency) -> Iterator[Work]:
    if isinstance(layer, ConvLayer):
        yield from conv_works(layer, config, residency)
    elif isinstance(layer, Deconvolution):
        yield from _deconvolution_works(layer, config, residency)
    elif isinstance(layer, Pointwise):
        yield pointwise_work(layer, config)
    elif isinstance(layer, Pool):
        yield pool_work(layer, config)
    else:
        yield lrn_work(layer, config)


def _deconvolution_works(
    layer: Deconvolution, config: Config, residency: Residency
) -> Iterator[Work]:
    """Yield a deconvolution: one convolution for each phase of its stride, then interleaving.

    Each phase makes one output for every input position, with the kernel's weights of that phase.
    """
    rows, columns = layer.stride
    kernel = (-(-layer.kernel[0] // rows), -(-layer.kernel[1] // columns))
    phase = ConvLayer(
        channels=layer.channels,
        height=layer.height,
        width=layer.width,
        kernels=layer.kernels,
        kernel=kernel,
        pads=(kernel[0] - 1, kernel[1] - 1, 0, 0),
        groups=layer.groups,
        batch=layer.batch,
        precision=layer.precision,
    )
    size = (
        tensor_bytes(layer.kernels, layer.height, layer.width, config, layer.precision)
        * layer.batch
        * rows
        * columns
    )
    contract = Work(mode="contract", read=size, written=size)
    for work in conv_works(phase, config, residency):
        parts = [work.times(rows * columns)]
        if rows * columns > 1:
            parts.append(contract)
        yield replace(joined(f"{rows * columns} phases, {work.mode}", parts), macs=layer.macs)
