"""Where each node runs: the rules say what may, the costs say what pays.

Nodes that no rule refuses form islands on the DLA. An island that breaks a limit of one loadable,
or that does not pay for its two crossings, goes to the GPU as a whole; of the rest the largest
stay. Each step only takes nodes off the DLA, so the steps end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from device.manifest import Precision, Processor
from device.profile import Dla, Profile
from toolkit.planning.costs import crossing_us, predicted_us, tensor_bytes
from toolkit.planning.dla_checks import batch_of
from toolkit.planning.dla_rules import judge
from toolkit.planning.node_view import NodeView, TensorView
from toolkit.planning.rule import Verdict
from toolkit.planning.segments import Lane, PlannedSegment, Step, cut

DLA: Processor = "dla0"
LOADABLES = 16  # per core, rule G6
MAX_ISLANDS = 4  # the target: few large loadables, well below the limit
WEIGHT_LIMIT = 512 * 2**20  # per loadable, rule G9
INTERMEDIATE_LIMIT = 2**30  # per loadable, rule G8

# The limits that need more than one node to judge.
_POLICY = {
    "K1": "nodes kept in floating point run on the GPU",
    "S1": "INT8 on the DLA needs a scale on every input and output",
    "G6": f"a core holds {LOADABLES} loadables",
    "G8": "the intermediates of a loadable must be below 1 GiB",
    "G9": "the weights of a loadable must be below 512 MiB",
    "P2": "an island must relieve the GPU of more time than its crossings cost",
}

HasScale = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one node runs and why; `rule` is "" where no rule kept it off the DLA."""

    node: str
    op: str
    processor: Processor
    rule: str
    reason: str
    hint: str
    predicted_us: float


@dataclass(frozen=True, slots=True)
class Island:
    """A segment on the DLA with what decides about it: sizes, and the times on both sides."""

    nodes: tuple[str, ...]
    weight_bytes: int
    intermediate_bytes: int
    gpu_us: float
    crossing_us: float


def place(
    views: Sequence[NodeView],
    profile: Profile,
    precision: Precision,
    tensorrt: str | None,
    has_scale: HasScale,
    *,
    keep_float: frozenset[str] = frozenset(),
    max_islands: int = MAX_ISLANDS,
) -> tuple[Placement, ...]:
    """Return the placement of every node, in the order of `views`.

    `keep_float`: nodes that INT8 would cost too much accuracy.
    """
    refused: dict[str, Verdict]
    home: Processor = "cpu" if profile.gpu is None else "gpu"
    if profile.gpu is None or profile.dla is None:
        missing = "GPU" if profile.gpu is None else "DLA"
        refused = {v.name: _verdict(v.name, "", f"profile has no {missing}") for v in views}
    else:
        refused = _refused_by_rules(views, profile.dla, precision, tensorrt, has_scale)
        reason = "kept in floating point, where INT8 costs too much accuracy"
        refused |= {v.name: _verdict(v.name, "K1", reason) for v in views if v.name in keep_float}
        while True:
            islands = _islands(views, refused, profile, precision)
            demoted = _demoted(islands, max_islands)
            if not demoted:
                break
            refused |= demoted
    return tuple(_placement(v, refused.get(v.name), home, profile, precision) for v in views)


def steps_of(views: Sequence[NodeView], processors: Sequence[Processor]) -> tuple[Step, ...]:
    """Return the nodes as the cut reads them; on the DLA one batch is one lane (rule G7)."""
    return tuple(
        Step(
            view.name,
            view.reads,
            tuple(tensor.name for tensor in view.outputs),
            Lane(processor, _batch_lane(view) if processor.startswith("dla") else ""),
        )
        for view, processor in zip(views, processors, strict=True)
    )


def _batch_lane(view: NodeView) -> str:
    return str(batch_of(view.outputs[0])) if view.outputs else ""


def _refused_by_rules(
    views: Sequence[NodeView],
    dla: Dla,
    precision: Precision,
    tensorrt: str | None,
    has_scale: HasScale,
) -> dict[str, Verdict]:
    refused = {}
    for view in views:
        verdicts = judge(view, dla, tensorrt, precision)
        if precision == "int8":
            verdicts += _missing_scales(view, has_scale)
        if verdicts:
            refused[view.name] = verdicts[0]
    return refused


def _missing_scales(view: NodeView, has_scale: HasScale) -> tuple[Verdict, ...]:
    for tensor in view.flowing:
        if tensor.is_float and not has_scale(tensor.name):
            reason = f"no scale for '{tensor.name}', but {_POLICY['S1']}"
            return (_verdict(view.name, "S1", reason, "calibrate with this tensor in the table"),)
    return ()


def _islands(
    views: Sequence[NodeView],
    refused: dict[str, Verdict],
    profile: Profile,
    precision: Precision,
) -> tuple[Island, ...]:
    steps = steps_of(views, ["gpu" if v.name in refused else DLA for v in views])
    by_name = {view.name: view for view in views}
    return tuple(
        _island(segment, by_name, profile, precision)
        for segment in cut(steps)
        if segment.processor == DLA
    )


def _island(
    segment: PlannedSegment,
    by_name: dict[str, NodeView],
    profile: Profile,
    precision: Precision,
) -> Island:
    inside = [by_name[name] for name in segment.nodes]
    made = {tensor.name: tensor for view in inside for tensor in view.outputs}
    read = {tensor.name: tensor for view in inside for tensor in view.activations}
    outside = {
        name for view in by_name.values() if view.name not in segment.nodes for name in view.reads
    }
    entering = [tensor for name, tensor in read.items() if name not in made]
    leaving = [t for name, t in made.items() if name in outside or name not in read]
    kept = [t for name, t in made.items() if name in read and name not in outside]
    return Island(
        nodes=segment.nodes,
        weight_bytes=sum(_bytes(view.constants, precision) for view in inside),
        intermediate_bytes=_bytes(kept, precision),
        gpu_us=sum(predicted_us(view, "gpu", profile, precision) for view in inside),
        crossing_us=crossing_us(_bytes(entering, precision), profile)
        + crossing_us(_bytes(leaving, precision), profile),
    )


def _bytes(tensors: Sequence[TensorView], precision: Precision) -> int:
    return sum(tensor_bytes(tensor, precision) or 0 for tensor in tensors)


def _demoted(islands: Sequence[Island], max_islands: int) -> dict[str, Verdict]:
    """Return the nodes that leave the DLA next: too large, then not paying, then too many."""
    for find in (_too_large, _not_paying):
        found = [(island, text) for island in islands if (text := find(island)) is not None]
        if found:
            return {n: _verdict(n, *text) for island, text in found for n in island.nodes}
    most = min(max_islands, LOADABLES)
    ranked = sorted(islands, key=lambda island: -island.gpu_us)
    return {
        node: _verdict(
            node,
            "G6",
            f"its island is number {place} of {len(ranked)} by GPU time ({island.gpu_us:.0f} us), "
            f"but at most {most} are made, and a core holds {LOADABLES} loadables",
        )
        for place, island in enumerate(ranked[most:], start=most + 1)
        for node in island.nodes
    }


def _too_large(island: Island) -> tuple[str, str] | None:
    if island.weight_bytes >= WEIGHT_LIMIT:
        size = island.weight_bytes / 2**20
        return "G9", f"its island holds {size:.0f} MiB of weights, but {_POLICY['G9']}"
    if island.intermediate_bytes >= INTERMEDIATE_LIMIT:
        size = island.intermediate_bytes / 2**20
        return "G8", f"its island holds {size:.0f} MiB of intermediates, but {_POLICY['G8']}"
    return None


def _not_paying(island: Island) -> tuple[str, str, str] | None:
    if island.gpu_us > island.crossing_us:
        return None
    count = len(island.nodes)
    return (
        "P2",
        f"its island of {count} node{'s' if count > 1 else ''} would relieve the GPU of "
        f"{island.gpu_us:.0f} us, but its two crossings cost {island.crossing_us:.0f} us",
        "make the neighbouring nodes fit the DLA, so that the island grows",
    )


def _verdict(node: str, rule: str, reason: str, hint: str = "") -> Verdict:
    limit, actual = _POLICY.get(rule, ""), reason.partition(", but")[0]
    return Verdict(rule=rule, node=node, limit=limit, actual=actual, reason=reason, hint=hint)


def _placement(
    view: NodeView,
    verdict: Verdict | None,
    home: Processor,
    profile: Profile,
    precision: Precision,
) -> Placement:
    processor = DLA if verdict is None else home
    return Placement(
        node=view.name,
        op=view.op,
        processor=processor,
        rule="" if verdict is None else verdict.rule,
        reason="no rule of the DLA refuses it" if verdict is None else verdict.reason,
        hint="" if verdict is None else verdict.hint,
        predicted_us=predicted_us(view, processor, profile, precision),
    )
