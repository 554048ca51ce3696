"""A convolution as hardware layers: what each way of computing it costs in clocks and bytes.

The hardware of v1 knows no groups: a grouped or depthwise layer runs densely with zeros, or as
several hardware layers. Which of these a compiler takes is its choice; `conv_plans` lists them.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from toolkit.dla.cycles import buffer, post, sequence, ways
from toolkit.dla.cycles.configurations import BYTES_PER_ELEMENT, Config
from toolkit.dla.cycles.engines import pool_work
from toolkit.dla.cycles.layers import ConvLayer
from toolkit.dla.cycles.result import Plan, Work

PARAMETER_BYTES = 4  # of an output channel: bias and scale, operands of 16 bits (sdp_x)
WEIGHT_UNIT_BYTES = 128  # weights in memory end at a multiple (ConvCoreNode.cpp, format of weights)


@dataclass(frozen=True, slots=True)
class Residency:
    """Which tensors of a layer lie in the SRAM instead of DRAM."""

    input: bool = False
    output: bool = False
    weights: bool = False


IN_DRAM = Residency()


def conv_plans(layer: ConvLayer, config: Config, residency: Residency = IN_DRAM) -> Iterator[Plan]:
    """Yield each way in which this DLA can compute the layer.

    Raises LayerError: the DLA has no unit that a fused operation needs.
    """
    if layer.groups > 1:
        yield from _grouped(layer, config, residency)
        return
    for way in ways.ways(layer, config):
        parts = _frames(layer, way, config, residency, batch=layer.batch)
        yield Plan(mode=way.mode, parts=parts, macs=layer.macs)
    if _may_share_weights(layer, config):
        yield _together(layer, config, residency)


def _frames(
    layer: ConvLayer,
    way: ways.Way,
    config: Config,
    inside: Residency,
    *,
    batch: int,
    together: int = 1,
) -> tuple[Work, ...]:
    """Return the work of `batch` turns of `together` frames each, all computed in this way."""
    split = buffer.split(layer, config, way.entries, way.taps)
    flies = _pool_flies(layer, split, config)
    runs = Counter(chunk.out_rows for chunk in split.chunks)
    output = together * sum(
        post.conv_output_cycles(layer, rows, config, flying=flies) * count
        for rows, count in runs.items()
    )
    weights = _weight_bytes(layer, way.taps)
    loads = split.weight_reads(batch)
    picture = sum(chunk.in_rows for chunk in split.chunks) * way.row_bytes * batch
    once = way.row_bytes * layer.height * batch
    frames = batch * together
    extra = PARAMETER_BYTES * layer.kernels * len(split.chunks) * batch
    if layer.eltwise:
        extra += _made_bytes(layer, config, pooled=False) * frames
    made = _made_bytes(layer, config, pooled=flies) * frames
    work = Work(
        sequence=sequence.added(way.run(rows).times(count * batch) for rows, count in runs.items()),
        output=output * batch,
        read=picture * (not inside.input) + weights * loads * (not inside.weights) + extra,
        written=made * (not inside.output),
        fill=picture * (not inside.input),
        refetch=(picture - once) * (not inside.input)
        + weights * (loads - 1) * (not inside.weights),
        sram=picture * inside.input + weights * loads * inside.weights + made * inside.output,
        sram_fill=picture * inside.input,
        layers=len(split.chunks) * batch,
        chunks=len(split.chunks),
        weight_mode=split.weight_mode,
    )
    if layer.pool is None or flies:
        return (work,)
    return (work, pool_work(replace(layer.pool, batch=batch * together), config))


def _may_share_weights(layer: ConvLayer, config: Config) -> bool:
    """Return whether frames can share weights: one output each, all of them in the buffer."""
    size = min(layer.batch, config.max_batch)
    if size == 1 or layer.out_height * layer.out_width > 1:
        return False
    way = ways.direct(layer, config, size)
    split = buffer.split(layer, config, way.entries, way.taps)
    return split.fits and len(split.chunks) == 1


def _together(layer: ConvLayer, config: Config, residency: Residency) -> Plan:
    """Return a fully connected layer whose frames share each package of weights."""
    size = min(layer.batch, config.max_batch)
    turns, rest = divmod(layer.batch, size)
    parts = _frames(
        layer, ways.direct(layer, config, size), config, residency, batch=turns, together=size
    )
    if rest:
        way = ways.direct(layer, config, rest)
        parts += _frames(layer, way, config, residency, batch=1, together=rest)
    return Plan(mode=f"direct, {size} frames together", parts=parts, macs=layer.macs)


def _grouped(layer: ConvLayer, config: Config, residency: Residency) -> Iterator[Plan]:
    """Yield a layer with groups: dense, as slices of whole atoms, group by group.

    Group by group wants every group's channels in atoms of their own, as the bytes show.
    """
    channels, kernels = layer.channels // layer.groups, layer.kernels // layer.groups
    if config.depthwise_channels and channels == 1:
        way = ways.depthwise(layer, config)
        parts = _frames(layer, way, config, residency, batch=layer.batch)
        yield Plan(mode=way.mode, parts=parts, macs=layer.macs)
    atom = config.memory_atom_bytes // BYTES_PER_ELEMENT[layer.precision]
    aligned = math.lcm(atom // math.gcd(atom, channels), atom // math.gcd(atom, kernels))
    sizes = {min(aligned, layer.groups): "slices", 1: "group by group", layer.groups: "dense"}
    for size, name in sizes.items():
        count, rest = divmod(layer.groups, size)
        parts = tuple(work.times(count) for work in _slice(layer, size, config, residency))
        if rest:
            parts += _slice(layer, rest, config, residency)
        yield Plan(mode=name, parts=parts, macs=layer.macs)


def _slice(layer: ConvLayer, groups: int, config: Config, residency: Residency) -> tuple[Work, ...]:
    """Return so many groups as one dense convolution, without the others."""
    kernels = layer.kernels // layer.groups * groups
    part = replace(
        layer,
        channels=layer.channels // layer.groups * groups,
        kernels=kernels,
        groups=1,
        image=False,
        pool=replace(layer.pool, channels=kernels) if layer.pool else None,
    )
    return _frames(part, ways.direct(part, config), config, residency, batch=layer.batch)


def _pool_flies(layer: ConvLayer, split: buffer.Split, config: Config) -> bool:
    """Return whether pooling follows without memory: not behind a split layer, not too wide."""
    pool = layer.pool
    return pool is not None and len(split.chunks) == 1 and post.pool_parts(pool, config) == 1


def _weight_bytes(layer: ConvLayer, taps: int) -> int:
    size = (
        layer.kernels * layer.channels // layer.groups * taps * BYTES_PER_ELEMENT[layer.precision]
    )
    return -(-size // WEIGHT_UNIT_BYTES) * WEIGHT_UNIT_BYTES


def _made_bytes(layer: ConvLayer, config: Config, *, pooled: bool) -> int:
    """Return the bytes of a frame's output, before or behind its pooling."""
    last = layer.pool if layer.pool and pooled else layer
    return post.tensor_bytes(
        layer.kernels, last.out_height, last.out_width, config, layer.precision
    )
