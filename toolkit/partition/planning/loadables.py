"""DLA memory limits of a plan (rules G6, G8 and G9), and the memory of its loadables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from device.engine.manifest import Precision
from device.profile import Profile
from toolkit.dla.rules.memory import CORE_RULES, LOADABLE_RULES, Loadable
from toolkit.dla.rules.rule import AtMost, Rule, S_contra, Situation
from toolkit.dla.rules.verdicts import situation_of
from toolkit.graph.node_view import NodeView
from toolkit.graph.segment import PlannedSegment
from toolkit.partition.solver.assess import intermediate_bytes
from toolkit.partition.solver.problem import Limits, Network

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True)
class DlaMemory:
    """The loadables of a plan beside the limits that they keep; `sram_kib` is that of a core, or
    of both where they share it (NvInfer.h 8.5).
    """

    loadables: tuple[Loadable, ...]
    limits: Limits
    sram_kib: int
    sram_shared: bool


def limits_of(
    profile: Profile, tensorrt: str | None, precision: Precision, max_crossings: int | None
) -> Limits:
    """Return the limits of a plan: the rows of the rules for its DLA and TensorRT, and its own.

    No smallest segment is documented: starting one costs, and what costs more than it brings is
    not done.
    """
    if profile.dla is None:
        return Limits(max_crossings=max_crossings)
    situation = situation_of(profile.dla, tensorrt, precision)
    rule, loadables = _largest_allowed(CORE_RULES, "G6", situation)
    # The solver's limits of bytes are those to stay below, the rules' the largest to be reached.
    return Limits(
        max_crossings=max_crossings,
        max_loadables=loadables,
        loadables_rule=rule,
        weight_bytes=_largest_allowed(LOADABLE_RULES, "G9", situation)[1] + 1,
        intermediate_bytes=_largest_allowed(LOADABLE_RULES, "G8", situation)[1] + 1,
    )


def memory_of(
    profile: Profile,
    limits: Limits,
    network: Network,
    segments: Sequence[PlannedSegment],
    tasks: Mapping[str, Sequence[NodeView]],
) -> DlaMemory | None:
    """Return the memory of the DLA segments; None where the profile has no DLA."""
    if profile.dla is None:
        return None
    on_dla = [segment for segment in segments if segment.processor.startswith("dla")]
    number_of = {name: number for number, segment in enumerate(on_dla) for name in segment.nodes}
    pieces: list[list[int]] = [[] for _ in on_dla]
    for index, task in enumerate(network.tasks):
        number = number_of.get(tasks[task.name][0].name)
        if number is not None:
            pieces[number].append(index)
    intermediates = intermediate_bytes(network, pieces)
    loadables = []
    for segment, piece, inside in zip(on_dla, pieces, intermediates, strict=True):
        members = [network.tasks[index] for index in piece]
        loadables.append(
            Loadable(
                name=segment.name,
                batches=tuple(sorted({int(t.lane) for t in members if t.lane.isdigit()})),
                weight_bytes=sum(task.weight_bytes for task in members),
                intermediate_bytes=inside,
            )
        )
    return DlaMemory(
        tuple(loadables), limits, profile.dla.sram_kib.value, profile.dla.generation == "v1"
    )


def memory_text(memory: DlaMemory) -> list[str]:
    """Return the memory of each loadable beside its limit."""
    limits = memory.limits
    lines = [
        f"DLA memory: {len(memory.loadables)} of {limits.max_loadables} loadables a core "
        f"({limits.loadables_rule}), {memory.sram_kib} KiB of SRAM "
        f"{'for both cores' if memory.sram_shared else 'a core'}"
    ]
    for row in memory.loadables:
        lines.append(
            f"  {row.name}: weights {_mib(row.weight_bytes)} of {_mib(limits.weight_bytes)} MiB "
            f"(G9), intermediates {_mib(row.intermediate_bytes)} of "
            f"{_mib(limits.intermediate_bytes)} MiB (G8)"
        )
    return lines


def _mib(count: int) -> str:
    return f"{count / MIB:.3g}" if count < 100 * MIB else f"{count / MIB:.0f}"


def _largest_allowed(
    rules: Sequence[Rule[S_contra]], family: str, situation: Situation
) -> tuple[str, int]:
    """Return the row of a family of rules that holds, and the largest number that it allows."""
    for row in rules:
        if row.id.partition(".")[0] == family and not row.why_inactive(situation):
            assert isinstance(row.allowed, AtMost)
            return row.id, int(row.allowed.high)
    # FP32: no row holds, for nothing may run there; the strictest row is as good as any.
    row = next(row for row in rules if row.id.partition(".")[0] == family)
    assert isinstance(row.allowed, AtMost)
    return row.id, int(row.allowed.high)
