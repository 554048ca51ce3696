"""Rewrites that move nodes onto the DLA: which of them a graph keeps.

All rewrites are made and planned; those that the plan leaves on the GPU are undone, and all of them
if the plan is hardly better with them: what a rewrite makes may run slower on the GPU than what was
there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from device.profile import Profile
from toolkit.dla.legalize.legalize import as_it_is, legalize
from toolkit.dla.legalize.rewrite import Legalized
from toolkit.partition.planning.forced import ALL, Forced
from toolkit.partition.planning.objectives import DEFAULT, MAKESPAN
from toolkit.partition.planning.placement import Candidate, Effort, Trial
from toolkit.partition.planning.plan import Model, PlanOptions, candidate_of, try_candidate
from toolkit.partition.prepared import Prepared
from toolkit.partition.solver.problem import Placement
from toolkit.quantize.loss.parts import mixing_concats
from toolkit.quantize.qdq.infer_ranges import infer_ranges
from toolkit.quantize.quantize import calibrated_tensors

TRIAL_GAP = 0.001  # of the value
_TRIAL = "trial"
TRIAL_SHARE = 0.4  # of the plan's own search time: trials only tell which rewrites are of use


def keep_useful(
    model: ir.Model,
    profile: Profile,
    options: PlanOptions,
    ranges: Mapping[str, float] | None,
    keep_float: frozenset[str],
) -> Prepared:
    """Return the graph with the rewrites that pay; as `prepare_graph`, for a profile with a DLA."""
    dla, known = profile.dla, dict(ranges or {})
    assert dla is not None  # `prepare_graph` asks

    def rewrite(only: frozenset[str] | None) -> Legalized:
        if only is not None and not only:
            return as_it_is(model, dla, options.tensorrt, options.precision)
        return legalize(model, dla, options.tensorrt, options.precision, only)

    trials = _Trials(profile, options, ranges, keep_float)
    legal = every = rewrite(None)
    if options.precision == "int8":
        refused = {row.node for row in every.applied if keep_float & {row.node, *row.replaced}}
        refused |= _without_ranges(legal, known) if ranges is not None else set()
        if refused:
            legal = rewrite(frozenset(row.node for row in every.applied) - refused)
    forced = _forced(legal, options.forced)
    choice = _choose(legal, rewrite, trials, forced) if legal.applied else _Choice(legal)
    legal = choice.legal
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
        gain=choice.gain if legal.applied else None,
        trial=choice.trial,
    )


@dataclass(frozen=True, slots=True)
class _Choice:
    """The graph with the rewrites that are kept; `gain` and `trial` as in `Prepared`."""

    legal: Legalized
    gain: float | None = None
    trial: Trial | None = None


def _choose(
    legal: Legalized,
    rewrite: Callable[[frozenset[str]], Legalized],
    trials: "_Trials",
    forced: set[str],
) -> _Choice:
    """Keep the rewrites whose nodes are on the DLA in a trial, if that pays, and `forced` ones."""
    trial = trials.run(legal)
    useful = _on_dla(legal, trial) | forced
    if useful and useful != {row.node for row in legal.applied}:
        legal = rewrite(frozenset(useful))
        trial = trials.run(legal, trial.solution.placement)
    gain = None
    if not useful:
        legal = rewrite(frozenset())
    elif useful != forced:
        plain = rewrite(frozenset(forced))
        before = trials.without(plain, trial)
        if _is_enough(before, trial):
            legal, trial = plain, before
        elif before.solution.value > 0:
            gain = max(0.0, 1 - trial.solution.value / before.solution.value)
    return _Choice(legal, gain, trial)


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


def _forced(legal: Legalized, forced: Forced) -> set[str]:
    """Return the rewrites of nodes that must run on the DLA."""
    if ALL in forced.dla:
        return {row.node for row in legal.applied}
    named = {*forced.dla}
    return {row.node for row in legal.applied if named & {row.node, *row.replaced}}


def _enough(trial: Trial) -> float:
    """Return the value from which a plan without the rewrites is as good, by the least gain."""
    return (1 - TRIAL_GAP) * trial.solution.value / max(1e-9, 1 - trial.min_gain)


def _is_enough(before: Trial, trial: Trial) -> bool:
    return before.solution.value < _enough(trial)


@dataclass(frozen=True, slots=True)
class _Trials:
    """Places rewritten graphs, to tell which rewrites are of use."""

    profile: Profile
    options: PlanOptions
    ranges: Mapping[str, float] | None
    keep_float: frozenset[str]

    def run(self, legal: Legalized, start: Placement | None = None) -> Trial:
        """Return a placement of a graph, improved from `start`."""
        return self._place(self._candidate(legal), start)

    def without(self, plain: Legalized, trial: Trial) -> Trial:
        """Return a placement without the rewrites of a trial: one that is enough, or the best."""
        candidate, start = self._candidate(plain), trial.solution.placement
        quick = self._place(candidate, start, _enough(trial))
        if _is_enough(quick, trial) or quick.solution.gap <= TRIAL_GAP:
            return quick
        return self._place(candidate, start)

    def _candidate(self, legal: Legalized) -> Candidate:
        graph, options = legal.model.graph, self._aim()
        model = Model(_TRIAL, graph, cuts=legal.cuts, rewrites=legal.applied)
        if options.precision == "int8":
            model = replace(model, keep_float=self.keep_float | {*mixing_concats(legal.model)})
            if self.ranges is not None:
                known = infer_ranges(graph, self.ranges)[0]
                model = replace(model, has_scale=known.__contains__)
        return candidate_of(model, self.profile, options)

    def _place(
        self, candidate: Candidate, start: Placement | None, enough: float | None = None
    ) -> Trial:
        """Return a placement, improved from `start` until it is `enough`."""
        options = self._aim()
        effort = Effort(
            TRIAL_SHARE * options.seconds,
            TRIAL_GAP,
            enough=enough,
            starts=() if start is None else (start,),
            min_gain=options.min_gain,
        )
        return try_candidate(candidate, self.profile, options, effort)

    def _aim(self) -> PlanOptions:
        if self.options.objective == MAKESPAN:  # of several models: balanced processors help
            return replace(self.options, objective=DEFAULT)
        return self.options


def _on_dla(legal: Legalized, trial: Trial) -> set[str]:
    """Return the rewrites with a node on the DLA in the trial."""
    there = {name for name, on in trial.processors[_TRIAL].items() if on.startswith("dla")}
    return {row.node for row in legal.applied if there.intersection(row.nodes)}
