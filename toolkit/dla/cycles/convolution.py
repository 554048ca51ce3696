"""A convolution as hardware layers: clocks and bytes of each plan.

The hardware of v1 has no groups: a grouped or depthwise layer runs densely with zeros, or as
several hardware layers. The compiler chooses; `conv_plans` lists the plans.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from toolkit.dla.cycles import buffer, conv_modes, post_processing, sequence
from toolkit.dla.cycles.configurations import BYTES_PER_ELEMENT, Config
from toolkit.dla.cycles.layers import ConvLayer
from toolkit.dla.cycles.result import LayerPlan, LayerWork
from toolkit.dla.cycles.standalone_layers import pool_work

PARAMETER_BYTES = 4  # per output channel: bias and scale, operands of 16 bits (sdp_x)
WEIGHT_UNIT_BYTES = 128  # alignment of weights in memory (ConvCoreNode.cpp, format of weights)


def conv_plans(layer: ConvLayer, config: Config) -> Iterator[LayerPlan]:
    """Yield each plan by which this DLA can compute the layer.

    Raises LayerError: the DLA has no unit that a fused operation needs.
    """
    if layer.groups > 1:
        yield from _grouped(layer, config)
        return
    for mode in conv_modes.conv_modes(layer, config):
        parts = _frames(layer, mode, config, batch=layer.batch)
        yield LayerPlan(mode=mode.name, parts=parts, macs=layer.macs)
    if _may_share_weights(layer, config):
        yield _shared_weights(layer, config)


def _frames(
    layer: ConvLayer,
    mode: conv_modes.ConvMode,
    config: Config,
    *,
    batch: int,
    frames_per_pass: int = 1,
) -> tuple[LayerWork, ...]:
    """Return the work of `batch` passes of `frames_per_pass` frames each, in one mode."""
    split = buffer.split(layer, config, mode.entries, mode.taps)
    pool_on_the_fly = _pool_on_the_fly(layer, split, config)
    runs = Counter(chunk.out_rows for chunk in split.chunks)
    output = frames_per_pass * sum(
        post_processing.conv_output_cycles(layer, rows, config, flying=pool_on_the_fly) * count
        for rows, count in runs.items()
    )
    weight_bytes = _weight_bytes(layer, mode.taps)
    weight_reads = split.weight_reads(batch)
    input_bytes = sum(chunk.in_rows for chunk in split.chunks) * mode.row_bytes * batch
    input_bytes_once = mode.row_bytes * layer.height * batch
    frames = batch * frames_per_pass
    extra_bytes = PARAMETER_BYTES * layer.kernels * len(split.chunks) * batch
    if layer.eltwise:
        extra_bytes += _output_bytes(layer, config, pooled=False) * frames
    output_bytes = _output_bytes(layer, config, pooled=pool_on_the_fly) * frames
    work = LayerWork(
        sequence=sequence.total_of(
            mode.run(rows).times(count * batch) for rows, count in runs.items()
        ),
        output=output * batch,
        read=input_bytes + weight_bytes * weight_reads + extra_bytes,
        written=output_bytes,
        fill=input_bytes,
        refetch=input_bytes - input_bytes_once + weight_bytes * (weight_reads - 1),
        layers=len(split.chunks) * batch,
        chunks=len(split.chunks),
        weight_mode=split.weight_mode,
    )
    if layer.pool is None or pool_on_the_fly:
        return (work,)
    return (work, pool_work(replace(layer.pool, batch=batch * frames_per_pass), config))


def _may_share_weights(layer: ConvLayer, config: Config) -> bool:
    """Return True if frames can share weights: one output each, all of them in the buffer."""
    size = min(layer.batch, config.max_batch)
    if size == 1 or layer.out_height * layer.out_width > 1:
        return False
    mode = conv_modes.direct(layer, config, size)
    split = buffer.split(layer, config, mode.entries, mode.taps)
    return split.fits and len(split.chunks) == 1


def _shared_weights(layer: ConvLayer, config: Config) -> LayerPlan:
    """Return a fully connected layer whose frames share each package of weights."""
    size = min(layer.batch, config.max_batch)
    passes, rest = divmod(layer.batch, size)
    parts = _frames(
        layer,
        conv_modes.direct(layer, config, size),
        config,
        batch=passes,
        frames_per_pass=size,
    )
    if rest:
        mode = conv_modes.direct(layer, config, rest)
        parts += _frames(layer, mode, config, batch=1, frames_per_pass=rest)
    return LayerPlan(mode=f"direct, {size} frames together", parts=parts, macs=layer.macs)


def _grouped(layer: ConvLayer, config: Config) -> Iterator[LayerPlan]:
    """Yield the plans of a grouped layer: dense, as slices of whole atoms, group by group.

    Group by group needs the channels of every group in separate atoms, which adds bytes.
    """
    channels, kernels = layer.channels // layer.groups, layer.kernels // layer.groups
    if config.depthwise_channels and channels == 1:
        mode = conv_modes.depthwise(layer, config)
        parts = _frames(layer, mode, config, batch=layer.batch)
        yield LayerPlan(mode=mode.name, parts=parts, macs=layer.macs)
    atom = config.memory_atom_bytes // BYTES_PER_ELEMENT[layer.precision]
    aligned = math.lcm(atom // math.gcd(atom, channels), atom // math.gcd(atom, kernels))
    sizes = {min(aligned, layer.groups): "slices", 1: "group by group", layer.groups: "dense"}
    for size, name in sizes.items():
        count, rest = divmod(layer.groups, size)
        parts = tuple(work.times(count) for work in _slice(layer, size, config))
        if rest:
            parts += _slice(layer, rest, config)
        yield LayerPlan(mode=name, parts=parts, macs=layer.macs)


def _slice(layer: ConvLayer, groups: int, config: Config) -> tuple[LayerWork, ...]:
    """Return `groups` groups as one dense convolution."""
    kernels = layer.kernels // layer.groups * groups
    part = replace(
        layer,
        channels=layer.channels // layer.groups * groups,
        kernels=kernels,
        groups=1,
        image=False,
        pool=replace(layer.pool, channels=kernels) if layer.pool else None,
    )
    return _frames(part, conv_modes.direct(part, config), config, batch=layer.batch)


def _pool_on_the_fly(layer: ConvLayer, split: buffer.BufferSplit, config: Config) -> bool:
    """Return True if pooling runs on the fly: not after a split layer, not too wide."""
    pool = layer.pool
    return (
        pool is not None
        and len(split.chunks) == 1
        and post_processing.pool_parts(pool, config) == 1
    )


def _weight_bytes(layer: ConvLayer, taps: int) -> int:
    size = (
        layer.kernels * layer.channels // layer.groups * taps * BYTES_PER_ELEMENT[layer.precision]
    )
    return -(-size // WEIGHT_UNIT_BYTES) * WEIGHT_UNIT_BYTES


def _output_bytes(layer: ConvLayer, config: Config, *, pooled: bool) -> int:
    """Return the bytes of a frame's output, before or after its pooling."""
    last = layer.pool if layer.pool and pooled else layer
    return post_processing.tensor_bytes(
        layer.kernels, last.out_height, last.out_width, config, layer.precision
    )
