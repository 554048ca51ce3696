"""The result of the cycle functions: work of a plan -> cycles -> time."""

from dataclasses import dataclass, fields, replace
from typing import Literal

from toolkit.dla.cycles.configurations import Config
from toolkit.dla.cycles.sequence import NOTHING, MacSequence

Bound = Literal["MACs", "weights streaming", "buffer", "output stage", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The work of hardware layers, independent of memory bandwidth.

    `refetch`: bytes read that a larger buffer would save; `fill`: bytes that must be in the buffer
    before the array starts. `layers`: hardware layers.
    """

    sequence: MacSequence = NOTHING
    output: float = 0.0
    read: int = 0
    written: int = 0
    fill: int = 0
    refetch: int = 0
    layers: int = 1
    chunks: int = 1
    weight_mode: str = ""

    def times(self, count: int) -> "LayerWork":
        """Return the work of `count` such layers one after another."""
        scaled = {name: getattr(self, name) * count for name in _SCALED}
        return replace(self, sequence=self.sequence.times(count), **scaled)


_SCALED = ("output", "read", "written", "fill", "refetch", "layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles:
    """Clocks of one layer by unit, and its memory traffic.

    mac: the array's sequence (`data` of it with data on the array, `weights` what the weights
    alone would need from the buffer). fill: reading the input, which comes first. output_stage:
    scaling, activation, pooling. memory: all traffic. overhead: start and drain of the hardware
    layers. `optimistic`: all units overlap; `pessimistic`: the buffer is filled first; `total` is
    between them by the configuration's `overlap`. bound_by: the bottleneck. mode: that of the
    array; weight_mode: the weights in the buffer ("" without weights). macs: of the layer as
    written. chunks: parts along the height. hardware_layers: with groups and frames.
    """

    mode: str
    weight_mode: str
    mac: float
    data: int
    weights: int
    fill: float
    output_stage: float
    memory: float
    overhead: int
    optimistic: float
    pessimistic: float
    total: float
    bound_by: Bound
    bytes_read: int
    bytes_written: int
    bytes_refetched: int
    chunks: int
    hardware_layers: int
    macs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One way to compute a layer: work whose parts wait for each other. macs: of the layer."""

    mode: str
    parts: tuple[LayerWork, ...]
    macs: int = 0


def plan_cycles(plan: LayerPlan, config: Config, bytes_per_clock: float) -> Cycles:
    """Return the cycles of a plan at a memory bandwidth in bytes per clock of the DLA."""
    parts = [_part_cycles(part, config, bytes_per_clock) for part in plan.parts]
    return _one_after_another(plan, parts)


def _part_cycles(work: LayerWork, config: Config, bytes_per_clock: float) -> Cycles:
    """Return the cycles of work at a memory bandwidth in bytes per clock of the DLA."""
    rate = min(bytes_per_clock, config.port_bytes) * config.memory_efficiency
    moved = work.read + work.written
    memory = moved / rate
    mac = work.sequence.cycles / config.mac_efficiency
    fill = work.fill / rate
    behind_fill = (moved - work.fill) / rate
    overhead = config.layer_overhead * work.layers
    optimistic = max(mac, work.output, memory) + overhead
    pessimistic = max(optimistic, fill + max(mac, work.output, behind_fill) + overhead)
    once = (moved - work.refetch) / rate
    return Cycles(
        mode="",
        weight_mode=work.weight_mode,
        mac=mac,
        data=work.sequence.data,
        weights=work.sequence.weights,
        fill=fill,
        output_stage=work.output,
        memory=memory,
        overhead=overhead,
        optimistic=optimistic,
        pessimistic=pessimistic,
        total=pessimistic - config.overlap * (pessimistic - optimistic),
        bound_by=_bound(work, mac, memory, once),
        bytes_read=work.read,
        bytes_written=work.written,
        bytes_refetched=work.refetch,
        chunks=work.chunks,
        hardware_layers=work.layers,
        macs=0,
    )


def _one_after_another(plan: LayerPlan, parts: list[Cycles]) -> Cycles:
    """Return the sum of the plan's parts; the longest gives the bottleneck."""
    return replace(
        max(parts, key=lambda part: part.total),
        mode=plan.mode,
        weight_mode=parts[0].weight_mode,
        chunks=max(part.chunks for part in parts),
        macs=plan.macs,
        **{name: sum(getattr(part, name) for part in parts) for name in _SUMMED},
    )


_APART = {"mode", "weight_mode", "bound_by", "chunks", "macs"}  # what parts do not add up
_SUMMED = tuple(field.name for field in fields(Cycles) if field.name not in _APART)


def _bound(work: LayerWork, mac: float, memory: float, memory_once: float) -> Bound:
    """Return the bottleneck; "buffer" if memory is the bottleneck only because of refetches."""
    if memory > max(mac, work.output):
        return "memory" if memory_once > max(mac, work.output) else "buffer"
    if work.output > mac:
        return "output stage"
    return "weights streaming" if work.sequence.weights > work.sequence.data else "MACs"
