"""A convolution as hardware layers: what each way of computing it costs in clocks and bytes.

The hardware of v1 knows no groups: a grouped or depthwise layer runs densely with zeros, or as
several hardware layers. Which of these a compiler takes is its choice; `conv_works` lists them.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from toolkit.dla_cycles import buffer, post, sequence, ways
from toolkit.dla_cycles.configurations import BYTES_PER_ELEMENT, Config
from toolkit.dla_cycles.engines import pool_work
from toolkit.dla_cycles.layers import ConvLayer, LayerError, Pool
from toolkit.dla_cycles.result import Work, joined

PARAMETER_BYTES = 4  # of an output channel: bias and scale, operands of 16 bits (sdp_x)
WEIGHT_UNIT_BYTES = 128  # weights in memory end at a multiple (ConvCoreNode.cpp, format of weights)


@dataclass(frozen=True, slots=True)
class Residency:
    """Which tensors of a layer lie in the SRAM instead of DRAM."""

    input: bool = False
    output: bool = False
    weights: bool = False


IN_DRAM = Residency()


def conv_works(layer: ConvLayer, config: Config, residency: Residency = IN_DRAM) -> Iterator[Work]:
    """Yield the work of each way in which this DLA can compute the layer.

    Raises LayerError: the DLA has no FP16, or no unit that a fused operation needs.
    """
    if not config.kernels_at_once(layer.precision):
        raise LayerError(f"{config.name} has no {layer.precision} arithmetic; use int8.")
    if layer.groups > 1:
        yield from _grouped(layer, config, residency)
        return
    for way in ways.ways(layer, config):
        yield _frames(layer, way, config, residency, batch=layer.batch)
    if min(layer.batch, config.max_batch) > 1 and layer.out_height * layer.out_width == 1:
        yield _together(layer, config, residency)


def _frames(
    layer: ConvLayer,
    way: ways.Way,
    config: Config,
    residency: Residency,
    *,
    batch: int,
    together: int = 1,
) -> Work:
    """Return the work of `batch` turns of `together` frames each, all computed in this way."""
    split = buffer.split(layer, config, way.entries, way.taps)
    flies = _pool_flies(layer, split, config)
    runs = Counter(chunk.out_rows for chunk in split.chunks)
    output = together * sum(
        post.conv_output_cycles(layer, rows, config, flying=flies) * count
        for rows, count in runs.items()
    )
    weights = _weight_bytes(layer, way.taps)
    loads = 1 if split.weight_mode == "all weights" else len(split.chunks) * batch
    picture = sum(chunk.in_rows for chunk in split.chunks) * way.row_bytes * batch
    made = _made(layer, config) * together * batch
    pooled = _pooled(layer.pool, config) * together * batch if layer.pool and flies else made
    operand = made if layer.eltwise else 0
    parameters = PARAMETER_BYTES * layer.kernels * len(split.chunks) * batch
    once = way.row_bytes * layer.height * batch
    inputs, weights_in, results = residency.input, residency.weights, residency.output
    work = Work(
        mode=way.mode,
        sequence=sequence.added(way.run(rows).times(count) for rows, count in runs.items()).times(
            batch
        ),
        output=output * batch,
        read=(0 if inputs else picture)
        + (0 if weights_in else weights * loads)
        + operand
        + parameters,
        written=0 if results else pooled,
        fill=0 if inputs else picture,
        refetch=(0 if inputs else picture - once) + (0 if weights_in else weights * (loads - 1)),
        sram=inputs * picture + weights_in * weights * loads + results * pooled,
        sram_fill=picture if inputs else 0,
        layers=len(split.chunks) * batch,
        chunks=len(split.chunks),
        weight_mode=split.weight_mode,
        macs=layer.macs // layer.batch * batch * together,
    )
    if layer.pool is None or flies:
        return work
    behind = replace(layer.pool, batch=batch * together)
    return joined(work.mode, [work, pool_work(behind, config)])


def _together(layer: ConvLayer, config: Config, residency: Residency) -> Work:
    """Return a fully connected layer whose frames share each package of weights."""
    size = min(layer.batch, config.max_batch)
    turns, rest = divmod(layer.batch, size)
    parts = [
        _frames(
            layer, ways.direct(layer, config, size), config, residency, batch=turns, together=size
        )
    ]
    if rest:
        parts.append(
            _frames(
                layer, ways.direct(layer, config, rest), config, residency, batch=1, together=rest
            )
        )
    return joined(parts[0].mode, parts)


def _grouped(layer: ConvLayer, config: Config, residency: Residency) -> Iterator[Work]:
    """Yield a layer with groups: dense, as slices of whole atoms, group by group.

    Group by group wants every group's channels in atoms of their own, as the bytes show.
    """
    channels, kernels = layer.channels // layer.groups, layer.kernels // layer.groups
    if config.depthwise_channels and channels == 1:
        yield _frames(layer, ways.depthwise(layer, config), config, residency, batch=layer.batch)
    atom = config.memory_atom_bytes // BYTES_PER_ELEMENT[layer.precision]
    aligned = math.lcm(atom // math.gcd(atom, channels), atom // math.gcd(atom, kernels))
    sizes = {layer.groups: "dense", min(aligned, layer.groups): "slices", 1: "group by group"}
    for size, name in sizes.items():
        count, rest = divmod(layer.groups, size)
        parts = [_slice(layer, size, config, residency).times(count)]
        if rest:
            parts.append(_slice(layer, rest, config, residency))
        yield replace(joined(f"{name}, direct", parts), macs=layer.macs)


def _slice(layer: ConvLayer, groups: int, config: Config, residency: Residency) -> Work:
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


def _made(layer: ConvLayer, config: Config) -> int:
    return post.tensor_bytes(
        layer.kernels, layer.out_height, layer.out_width, config, layer.precision
    )


def _pooled(pool: Pool, config: Config) -> int:
    return post.tensor_bytes(pool.channels, pool.out_height, pool.out_width, config, pool.precision)
