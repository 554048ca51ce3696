"""Prepares a graph for planning: applies the rewrites that move nodes onto the DLA.

All rewrites are made and planned; those that the plan leaves on the GPU are undone, and all of them
if the plan is hardly better with them: what a rewrite makes may run slower on the GPU than what was
there.
This comes before calibration, because new tensors need ranges of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from device.engine.manifest import Processor
from device.profile import Profile
from toolkit.dla.legalize.legalize import legalize
from toolkit.dla.legalize.rewrite import Applied, Cut, Declined, Legalized
from toolkit.partition.planning.forced import ALL
from toolkit.partition.planning.objectives import DEFAULT, MAKESPAN
from toolkit.partition.planning.placement import Effort, Trial
from toolkit.partition.planning.plan import Model, PlanOptions, try_model
from toolkit.partition.solver.problem import Placement
from toolkit.quantize.qdq.infer_ranges import infer_ranges
from toolkit.quantize.quantize import calibrated_tensors

TRIAL_GAP = 0.001  # of the value
_TRIAL = "trial"
TRIAL_SHARE = 0.4  # of the plan's own search time: trials only tell which rewrites are of use


@dataclass(frozen=True, slots=True)
class Prepared:
    """A graph to plan, with the rewrites applied to it.

    `ranges`: those given, and those of new tensors that follow from them. `unused` rewrites were
    possible, but the plan is better without; `declined` ones were not possible. `gain`: the share
    of the objective that those applied save the model alone, None where there are none.
    `placement` of its kernels is the one of the trial, a start for the plan.
    """

    model: ir.Model
    ranges: Mapping[str, float]
    applied: tuple[Applied, ...] = ()
    unused: tuple[Applied, ...] = ()
    declined: tuple[Declined, ...] = ()
    cuts: tuple[Cut, ...] = ()
    gain: float | None = None
    placement: Mapping[str, Processor] = field(default_factory=dict)


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
    named = {*options.forced.dla} - {ALL}
    forced = {row.node for row in legal.applied if named & {row.node, *row.replaced}}
    gain, placement = None, dict[str, Processor]()
    if legal.applied:
        trial = _trial(legal, profile, options)
        useful = useful & _on_dla(legal, trial) | forced
        if useful and useful != {row.node for row in legal.applied}:
            legal = rewrite(frozenset(useful))
            trial = _trial(legal, profile, options, trial.solution.placement)
        plain = rewrite(frozenset(forced))
        start = trial.solution.placement
        without = _trial(plain, profile, options, start) if useful else None
        value, before = trial.solution.value, without.solution.value if without else 0.0
        if before * (1 - trial.min_gain) < (1 - TRIAL_GAP) * value:
            legal, trial = plain, without or trial
        elif before > 0:
            gain = max(0.0, 1 - value / before)
        placement = dict(trial.solution.placement[_TRIAL])
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
        placement=placement,
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


def _trial(
    legal: Legalized, profile: Profile, options: PlanOptions, start: Placement | None = None
) -> Trial:
    model = Model(_TRIAL, legal.model.graph, cuts=legal.cuts, rewrites=legal.applied)
    starts = () if start is None else (start,)
    effort = Effort(
        TRIAL_SHARE * options.seconds, TRIAL_GAP, starts=starts, min_gain=options.min_gain
    )
    if options.objective == MAKESPAN:  # of several models: what balances the processors helps
        options = replace(options, objective=DEFAULT)
    return try_model(model, profile, options, effort)


def _on_dla(legal: Legalized, trial: Trial) -> set[str]:
    """Return the rewrites with a node on the DLA in the trial."""
    placed = trial.processors[_TRIAL]
    there = {name for name, processor in placed.items() if processor.startswith("dla")}
    return {row.node for row in legal.applied if there.intersection(row.nodes)}
