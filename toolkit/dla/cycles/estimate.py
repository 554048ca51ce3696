"""The cycles of one layer on one DLA: the entry point of the package."""

import math
from collections.abc import Iterator

from toolkit.dla.cycles.configurations import Config
from toolkit.dla.cycles.convolution import conv_plans
from toolkit.dla.cycles.layers import (
    ConvLayer,
    Deconvolution,
    Layer,
    LayerError,
    Pointwise,
    Pool,
)
from toolkit.dla.cycles.post_processing import tensor_bytes
from toolkit.dla.cycles.result import Cycles, LayerPlan, LayerWork, plan_cycles
from toolkit.dla.cycles.standalone_layers import lrn_work, pointwise_work, pool_work


def estimate(
    layer: Layer,
    config: Config,
    *,
    bytes_per_clock: float = math.inf,
) -> Cycles:
    """Return the cycles of the layer in the cheapest mode of this DLA.

    bytes_per_clock: memory bandwidth of this DLA in bytes per clock of the DLA (GB/s x 1000 / MHz),
    limited by its port. Raises LayerError: this DLA cannot compute the layer.
    """
    modes = all_modes(layer, config, bytes_per_clock=bytes_per_clock)
    return min(modes, key=lambda cycles: cycles.total)


def all_modes(
    layer: Layer,
    config: Config,
    *,
    bytes_per_clock: float = math.inf,
) -> list[Cycles]:
    """Return the cycles of every mode of the layer; see `estimate`."""
    if not config.kernels_at_once(layer.precision):
        raise LayerError(f"{config.name} has no {layer.precision} arithmetic; use int8.")
    if bytes_per_clock <= 0:
        raise LayerError(f"Memory gives {bytes_per_clock} bytes a clock; it must be above 0.")
    return [plan_cycles(plan, config, bytes_per_clock) for plan in _plans(layer, config)]


def _plans(layer: Layer, config: Config) -> Iterator[LayerPlan]:
    if isinstance(layer, ConvLayer):
        yield from conv_plans(layer, config)
    elif isinstance(layer, Deconvolution):
        yield from _deconvolution_plans(layer, config)
    elif isinstance(layer, Pointwise):
        yield LayerPlan(mode="output stage", parts=(pointwise_work(layer, config),))
    elif isinstance(layer, Pool):
        yield LayerPlan(mode="pooling", parts=(pool_work(layer, config),))
    else:
        yield LayerPlan(mode="normalisation", parts=(lrn_work(layer, config),))


def _deconvolution_plans(layer: Deconvolution, config: Config) -> Iterator[LayerPlan]:
    """Yield a deconvolution: one convolution for each phase of its stride, then interleaving.

    Each phase computes one output for every input position, with its part of the kernel.
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
    interleave = (LayerWork(read=size, written=size),) if rows * columns > 1 else ()
    for plan in conv_plans(phase, config):
        parts = tuple(work.times(rows * columns) for work in plan.parts)
        mode = f"{plan.mode}, {rows * columns} phases"
        yield LayerPlan(mode=mode, parts=parts + interleave, macs=layer.macs)
