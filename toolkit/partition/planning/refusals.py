"""Finds the nodes that may not run on the DLA: limits of one node, scales, choices.

What needs more than one node (loadables, sizes, whether it pays) is the solver's.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from device.engine.manifest import Precision
from device.profile import Dla, Profile
from toolkit.dla.legalize.rewrite import Cut
from toolkit.dla.rules.ops import COMPARE
from toolkit.dla.rules.rule import Verdict
from toolkit.dla.rules.verdicts import judge
from toolkit.graph.node_view import NodeView

HasScale = Callable[[str], bool]

# The limits that are no property of the DLA's layers.
POLICY = {
    "": "the profile has a GPU and a DLA",
    "compare.pair": "a comparison and the Cast behind it run together",
    "G4.cut": "what follows a tensor too large for the DLA stays with it on the GPU",
    "K1": "nodes kept in floating point run on the GPU",
    "K2": "nodes whose values FP16 does not hold run on the GPU",
    "S1": "INT8 on the DLA needs a scale on every input and output",
}


def refusals(
    views: Sequence[NodeView],
    profile: Profile,
    precision: Precision,
    tensorrt: str | None,
    *,
    has_scale: HasScale,
    keep_float: frozenset[str] = frozenset(),
    beyond_half: Mapping[str, str] = MappingProxyType({}),
    cuts: Sequence[Cut] = (),
    chosen: Mapping[str, Verdict] | None = None,
) -> dict[str, Verdict]:
    """Return the first verdict against each node that no DLA takes.

    `keep_float`: nodes that INT8 would cost too much accuracy; `beyond_half`: nodes of an FP16 plan
    with values that FP16 does not hold, and which; `cuts`: where heads leave the DLA; `chosen`:
    verdicts against nodes that the user keeps on the GPU.
    """
    if profile.gpu is None or profile.dla is None:
        missing = "GPU" if profile.gpu is None else "DLA"
        return {v.name: _verdict(v.name, "", f"profile has no {missing}") for v in views}
    verdicts = {
        node: _verdict(node, "G4.cut", f"the head is cut at '{cut.node}', above it")
        for cut in cuts
        for node in (cut.node, *cut.below)
    }
    for view in views:
        verdict = _first(
            view, profile.dla, precision, tensorrt, has_scale=has_scale, keep_float=keep_float
        )
        if verdict is not None:
            verdicts[view.name] = verdict
    for node, why in beyond_half.items():
        verdicts.setdefault(node, _verdict(node, "K2", f"{why}, but {POLICY['K2']}"))
    verdicts = {**(chosen or {}), **verdicts}
    return verdicts | _parted(views, verdicts)


def _parted(views: Sequence[NodeView], verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """Return verdicts against comparisons and Casts whose other half no DLA takes."""
    producer = {tensor.name: view for view in views for tensor in view.outputs}
    parted: dict[str, Verdict] = {}
    for cast in views:
        compared = producer.get(cast.reads[0]) if cast.op == "Cast" and cast.reads else None
        if compared is None or compared.op not in COMPARE:
            continue
        for half, partner in ((cast, compared), (compared, cast)):
            if partner.name in verdicts and half.name not in verdicts:
                reason = f"'{partner.name}' stays on the GPU, but {POLICY['compare.pair']}"
                parted[half.name] = _verdict(half.name, "compare.pair", reason)
    return parted


def _first(
    view: NodeView,
    dla: Dla,
    precision: Precision,
    tensorrt: str | None,
    *,
    has_scale: HasScale,
    keep_float: frozenset[str],
) -> Verdict | None:
    if view.name in keep_float:
        reason = "kept in floating point, where INT8 costs too much accuracy"
        return _verdict(view.name, "K1", reason)
    if verdicts := judge(view, dla, tensorrt, precision):
        return verdicts[0]
    if precision == "int8":
        for tensor in view.flowing:
            if tensor.is_float and not has_scale(tensor.name):
                reason = f"no scale for '{tensor.name}', but {POLICY['S1']}"
                return _verdict(view.name, "S1", reason, "calibrate with this tensor in the table")
    return None


def _verdict(node: str, rule: str, reason: str, hint: str = "") -> Verdict:
    limit, actual = POLICY[rule], reason.partition(", but")[0]
    return Verdict(rule=rule, node=node, limit=limit, actual=actual, reason=reason, hint=hint)
