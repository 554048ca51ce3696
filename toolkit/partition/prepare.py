"""Prepares a graph for planning: applies the rewrites that move nodes onto the DLA.

All rewrites are made and planned; those that the plan leaves on the GPU are undone, and all of them
if the plan is hardly better with them: what a rewrite makes may run slower on the GPU than what was
there.
This comes before calibration, because new tensors need ranges of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from device.profile import Profile
from toolkit.dla.legalize.legalize import legalize
from toolkit.dla.legalize.rewrite import Applied, Cut, Declined, Legalized
from toolkit.partition.planning.plan import Model, Plan, PlanOptions, make_plan
from toolkit.quantize.qdq.infer_ranges import infer_ranges
from toolkit.quantize.quantize import calibrated_tensors

TRIAL_SHARE = 0.4  # of the plan's own search time: trials only tell which rewrites are of use


@dataclass(frozen=True, slots=True)
class Prepared:
    """A graph to plan, with the rewrites applied to it.

    `ranges`: those given, and those of new tensors that follow from them. `unused` rewrites were
    possible, but the plan is better without; `declined` ones were not possible. `gain`: the share
    of the objective that those applied save the model alone, None where there are none.
    """

    model: ir.Model
    ranges: Mapping[str, float]
    applied: tuple[Applied, ...] = ()
    unused: tuple[Applied, ...] = ()
    declined: tuple[Declined, ...] = ()
    cuts: tuple[Cut, ...] = ()
    gain: float | None = None


def prepare(
    model: ir.Model,
    profile: Profile,
    options: PlanOptions,
    ranges: Mapping[str, float] | None = None,
) -> Prepared:
    """Return the graph to plan; `model` has gone through the passes.

    `ranges` None: they will be measured on the result. With ranges, rewrites whose new tensors
    would have none are left out.
    """
    known = dict(ranges or {})
    dla = profile.dla
    if profile.gpu is None or dla is None or options.precision == "fp32":
        return Prepared(model, known)

    def rewrite(only: frozenset[str] | None) -> Legalized:
        return legalize(model, dla, options.tensorrt, options.precision, only)

    legal = every = rewrite(None)
    useful = {row.node for row in every.applied}
    if ranges is not None and options.precision == "int8":
        useful -= _without_ranges(legal, known)
        legal = rewrite(frozenset(useful))
    gain = None
    if legal.applied:
        trial = _trial(legal, profile, options)
        useful &= _on_dla(legal, trial)
        if useful and useful != {row.node for row in legal.applied}:
            legal = rewrite(frozenset(useful))
            trial = _trial(legal, profile, options)
        plain = rewrite(frozenset())
        before = _trial(plain, profile, options).search.value if useful else 0.0
        if before * (1 - trial.search.min_gain) < trial.search.value:
            legal = plain
        elif before > 0:
            gain = 1 - trial.search.value / before
    applied = {row.node for row in legal.applied}
    if ranges is not None:
        known = infer_ranges(legal.model.graph, known)[0]
    return Prepared(
        model=legal.model,
        ranges=known,
        applied=legal.applied,
        unused=tuple(row for row in every.applied if row.node not in applied),
        declined=every.refused,
        cuts=legal.cuts,
        gain=gain if legal.applied else None,
    )


def _without_ranges(legal: Legalized, known: Mapping[str, float]) -> set[str]:
    """Return the rewrites that add tensors whose range is neither known nor inferred."""
    ranges = infer_ranges(legal.model.graph, known)[0]
    missing = set(calibrated_tensors(legal.model)) - set(ranges)
    outputs_of = {
        str(node.name): {str(value.name) for value in node.outputs} for node in legal.model.graph
    }
    return {
        row.node
        for row in legal.applied
        if any(outputs_of.get(n, set()) & missing for n in row.nodes)
    }


def _trial(legal: Legalized, profile: Profile, options: PlanOptions) -> Plan:
    model = Model("trial", legal.model.graph, cuts=legal.cuts)
    return make_plan(model, profile, replace(options, seconds=TRIAL_SHARE * options.seconds))


def _on_dla(legal: Legalized, trial: Plan) -> set[str]:
    """Return the rewrites with a node on the DLA in the trial plan."""
    there = {row.node for row in trial.placements if row.processor.startswith("dla")}
    return {row.node for row in legal.applied if there.intersection(row.nodes)}
