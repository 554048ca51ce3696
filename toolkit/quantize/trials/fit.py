"""Fit ranges to a graph, by one method or by `auto`, and measure INT8 at its outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.auto import MAX_TRIALS, AutoResult, choose_ranges, replaces, widest_first
from calibration.calibrate import Observation
from calibration.dataset import Sample
from calibration.observer import Histogram, merge
from calibration.progress import Progress
from calibration.threshold import amax_by_method
from calibration.trials import Assignment, SampleSelection, mean_of
from toolkit.quantize.loss.parts import bounded_tensors, output_tensors
from toolkit.quantize.quantize import with_operands
from toolkit.quantize.trials.effort import affordable_runs
from toolkit.quantize.trials.metrics import NO_NODES, AsJudged, OutputNoise
from toolkit.quantize.trials.trial import TrialModel

Outputs = Mapping[str, NDArray[Any]]
AUTO_METHODS = (
    "minmax", "percentile:99.999", "percentile", "percentile:99.9", "mse", "entropy"
)  # fmt: skip
"""The methods that `auto` chooses from."""
WIDEST = "minmax"
"""It clips nothing seen; `auto` does not lose clearly more."""
MIN_CHOOSERS = 8
CHANCE = 1.25
"""The ratio of two shares of a limit that few samples do not tell apart: 1 dB of an SQNR."""
MAX_CORRECTED_METHODS = 2
"""Number of methods tried with corrected biases, beside the one with the widest ranges."""


@dataclass(frozen=True)
class Halves:
    """Histograms of two parts of the samples: the ranges of each are judged on the other.

    `numbers`: indices of the validation samples in `held_out`. `both`: False if `held_out` is too
    small to give ranges; then the other samples are judged with those of all.
    """

    first: Mapping[str, Histogram]
    held_out: Mapping[str, Histogram]
    numbers: NDArray[np.intp]
    both: bool = True


@dataclass(frozen=True)
class Fit:
    """Ranges of a graph. `candidates`: method -> tensor -> amax; `amax`: the chosen ranges.

    `method`: the best single method. `sqnr_db`: SQNR by output with `amax` on the validation
    samples of `noise`. With `halves`: on the held-out samples, each judged with the ranges that the
    same methods give without it.
    """

    graph: ir.Model
    observation: Observation
    candidates: Mapping[str, Mapping[str, float]]
    trial: TrialModel
    noise: OutputNoise
    method: str
    amax: Mapping[str, float]
    sqnr_db: Mapping[str, float]
    halves: Halves | None = None
    auto: AutoResult | None = None

    @property
    def judges(self) -> NDArray[np.intp] | slice:
        """Indices of the validation samples that judge choices made on the others."""
        return slice(None) if self.halves is None else self.halves.numbers

    @property
    def choosers(self) -> NDArray[np.intp]:
        """Indices of the validation samples to choose by: not those that judge, if others exist.

        Samples whose ranges saw them too (`Halves.both` False) are too few to leave any out.
        """
        everything = np.arange(self.noise.count)
        if self.halves is None or not self.halves.both:
            return everything
        others = np.setdiff1d(everything, self.halves.numbers)
        return others if others.size else everything

    @property
    def range_choosers(self) -> NDArray[np.intp]:
        """`choosers`, or all samples where these are fewer than `MIN_CHOOSERS`.

        A range that fits six samples may fit them alone: measured on 12 samples, halving those that
        choose made `auto` worse than min-max on others.
        """
        choosers = self.choosers
        return choosers if choosers.size >= MIN_CHOOSERS else np.arange(self.noise.count)


def fit(
    graph: ir.Model,
    observation: Observation,
    methods: Sequence[str],
    validation: Sequence[Sample],
    *,
    exact: Sequence[Outputs] | None = None,
    halves: Halves | None = None,
    operands: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    on_progress: Progress = lambda done, total: None,
) -> Fit:
    """Try each method on all tensors, and choose the one whose worst output is best.

    `exact`: the float outputs to compare with, None: those of `graph`. `halves`: the parts of
    `observation`, None: samples are judged with ranges measured on them too. `operands`: as in
    `toolkit.quantize.quantize.quantize`.
    """
    candidates = _candidates(graph, observation.histograms, methods)
    trial = TrialModel(graph, operands=operands)
    as_judged = None if halves is None else _as_judged(graph, candidates, halves)
    noise = OutputNoise(trial, validation, exact, as_judged)
    observation = replace(observation, histograms=_filled(observation.histograms))
    unjudged = Fit(graph, observation, candidates, trial, noise, methods[0], {}, {}, halves)
    return best_method(unjudged, on_progress)


def best_method(fitted: Fit, on_progress: Progress = lambda done, total: None) -> Fit:
    """Choose the single method whose worst output is best."""
    figures, amax_of = {}, {}
    for done, (method, amax) in enumerate(fitted.candidates.items()):
        on_progress(done, len(fitted.candidates))
        amax_of[method] = with_operands(fitted.graph, amax)
        ranges = trial_ranges(fitted.trial, amax_of[method])
        figures[method] = fitted.noise.sqnr_db(ranges, NO_NODES, fitted.judges)
    best = max(figures, key=lambda method: min(figures[method].values(), default=0.0))
    return replace(fitted, method=best, amax=amax_of[best], sqnr_db=figures[best])


def with_float(fitted: Fit, nodes: frozenset[str]) -> Fit:
    """Keep nodes in floating point in all that is measured from here on."""
    if nodes == fitted.noise.always_float:
        return fitted
    return best_method(replace(fitted, noise=fitted.noise.with_float(nodes)))


def _candidates(
    graph: ir.Model, histograms: Mapping[str, Histogram], methods: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Method -> tensor -> amax; what the graph puts out is not clipped by any method.

    Scores are peaked: nearly all are zero, and the few that are large are what they are for. A
    method that weighs elements by their number clips just these, and no later layer makes up for
    it. Where scores lie in [0, 1] by their operator, samples without a large one say nothing about
    the range. Tensors that were empty in every sample get none.
    """
    histograms = _filled(histograms)
    outputs = [name for name in output_tensors(graph) if name in histograms]
    unclipped = amax_by_method({name: histograms[name] for name in outputs}, ["minmax"])["minmax"]
    unclipped |= {name: 1.0 for name in bounded_tensors(graph) if name in histograms}
    by_method = amax_by_method(histograms, methods)
    return {method: {**amax_of, **unclipped} for method, amax_of in by_method.items()}


def _filled(histograms: Mapping[str, Histogram]) -> dict[str, Histogram]:
    return {name: histogram for name, histogram in histograms.items() if histogram.elements}


def merge_observations(first: Observation, held_out: Observation) -> Observation:
    """Merge the observations of both halves."""
    histograms = {
        name: merge(histogram, held_out.histograms[name])
        for name, histogram in first.histograms.items()
    }
    return replace(first, histograms=histograms, samples=first.samples + held_out.samples)


def _as_judged(
    graph: ir.Model, candidates: Mapping[str, Mapping[str, float]], halves: Halves
) -> AsJudged:
    """Judge each sample with the range that the same method gives on the part without it."""
    held_out = frozenset(halves.numbers.tolist())

    @cache  # a calibration by one method judges the held-out samples alone
    def table_of(part: Literal["first", "held_out"]) -> dict[tuple[str, float | None], float]:
        histograms = halves.first if part == "first" else halves.held_out
        table: dict[tuple[str, float | None], float] = {}
        for method, amax_of in _candidates(graph, histograms, tuple(candidates)).items():
            requested = with_operands(graph, candidates[method])
            for tensor, amax in with_operands(graph, amax_of).items():
                table.setdefault((tensor, requested[tensor]), amax)
        return table

    def as_judged(assignment: Assignment, number: int) -> Assignment:
        if number not in held_out and not halves.both:
            return assignment
        table = table_of("first" if number in held_out else "held_out")
        return {name: table.get((name, amax), amax) for name, amax in assignment.items()}

    return as_judged


@dataclass(frozen=True)
class Start:
    """A method on all tensors. `noise`: of the graph as it is, or with corrected biases.

    `error`: e_s of the samples that compare starts. `spent`: the largest share of a limit that a
    loss spends (`toolkit.quantize.loss.judge`), on the samples that judge and on all.
    """

    method: str
    noise: OutputNoise
    error: NDArray[np.float64]
    spent: tuple[float, float]

    def replaces(self, current: "Start", widest: "Start") -> bool:
        """True if this start is better than `current`, and loses no more than the widest.

        The loss decides where `current` is beyond a limit, else the error.
        """
        if not loses_no_more(self.spent, widest.spent):
            return False
        if max(current.spent) > 1.0:
            return max(self.spent) < max(current.spent)
        return replaces(self.error, current.error, narrower=True)


def loses_no_more(spent: tuple[float, float], limit: tuple[float, float]) -> bool:
    """True if no share of the limits that is spent is larger by more than `CHANCE`."""
    return all(share <= CHANCE * most for share, most in zip(spent, limit, strict=True))


def spent_shares(fitted: Fit, noise: OutputNoise, assignment: Assignment) -> tuple[float, float]:
    """Share of the limits that is spent, on the samples held out and on all."""
    held_out = noise.judged(assignment, samples=fitted.judges)
    return held_out.certain_spent, noise.judged(assignment).certain_spent


def search_ranges(
    fitted: Fit,
    correct: Callable[[Fit], ir.Model] | None,
    on_start: Progress,
    on_progress: Progress,
) -> Fit:
    """Choose for each tensor the candidate that adds the least error, where scores stay.

    No choice loses more than the widest ranges do; where the samples cannot tell, these stay.
    Ranges are chosen on `Fit.range_choosers`. `correct` returns the graph with biases corrected for
    the ranges of a fit; None: unchanged. `on_start` reports methods tried on all tensors,
    `on_progress` trials of single tensors.
    """
    trial = fitted.trial
    if not trial.tensors:
        return fitted
    by_tensor = {
        tensor: {
            method: with_operands(fitted.graph, amax)[tensor]
            for method, amax in fitted.candidates.items()
        }
        for tensor in trial.tensors
    }
    widest_ranges = {tensor: amax_of[WIDEST] for tensor, amax_of in by_tensor.items()}
    widest = fitted.noise.judged(widest_ranges)
    if widest.nothing_to_lose or not any(loss.judged for loss in widest.losses):
        return widest_fit(fitted)
    choosers = fitted.range_choosers
    start, single = _start(fitted, by_tensor, correct, on_start)
    noise = start.noise
    limit = spent_shares(fitted, fitted.noise, widest_ranges)
    auto = choose_ranges(
        by_tensor,
        lambda ranges, samples: noise.errors(ranges, choosers[samples]),
        lambda ranges, samples: noise.own_errors(ranges, choosers[samples]),
        single=single,
        start=start.method,
        max_trials=_max_trials(fitted, choosers.size),
        allowed=lambda ranges: loses_no_more(spent_shares(fitted, noise, ranges), limit),
        on_progress=on_progress,
    )
    return _chosen(fitted, start.method, auto)


def _max_trials(fitted: Fit, samples: int) -> int:
    """The runs over all `samples` that may choose ranges; each method is tried once."""
    runs = affordable_runs(fitted.graph, MAX_TRIALS * samples)
    return max(len(fitted.candidates), runs // samples)


def widest_fit(fitted: Fit) -> Fit:
    """The fit with the widest ranges, as `auto` puts it."""
    widest_ranges = trial_ranges(fitted.trial, fitted.candidates[WIDEST])
    by_tensor = {tensor: {WIDEST: amax} for tensor, amax in widest_ranges.items()}
    single = {WIDEST: fitted.noise.errors(widest_ranges, fitted.range_choosers)}
    return _chosen(fitted, WIDEST, choose_ranges(by_tensor, fitted.noise.errors, single=single))


def _chosen(fitted: Fit, method: str, auto: AutoResult) -> Fit:
    amax = with_operands(fitted.graph, {**fitted.candidates[method], **auto.amax})
    figures = fitted.noise.sqnr_db(trial_ranges(fitted.trial, amax), NO_NODES, fitted.judges)
    return replace(fitted, method=method, amax=amax, sqnr_db=figures, auto=auto)


def _start(
    fitted: Fit,
    by_tensor: Mapping[str, Mapping[str, float]],
    correct: Callable[[Fit], ir.Model] | None,
    on_progress: Progress,
) -> tuple[Start, dict[str, NDArray[np.float64]]]:
    """The best start, and e_s of each method on the samples that choose.

    A model with corrected biases is tried for the widest ranges and the methods of least error. It
    learned from the samples that choose, so that the others compare the starts then.
    """
    compared = fitted.range_choosers if correct is None else fitted.judges
    order = widest_first(by_tensor)
    single: dict[str, NDArray[np.float64]] = {}
    starts: dict[str, Start] = {}
    for done, method in enumerate(order):
        on_progress(done, 2 * len(order))
        ranges = {tensor: amax_of[method] for tensor, amax_of in by_tensor.items()}
        single[method] = fitted.noise.errors(ranges, fitted.range_choosers)
        starts[method] = _start_of(fitted, method, fitted.noise, ranges, compared)
    least = sorted(order, key=lambda method: mean_of(single[method]))[:MAX_CORRECTED_METHODS]
    best = widest = starts[WIDEST]
    for done, method in enumerate(order):
        on_progress(len(order) + done, 2 * len(order))
        if starts[method].replaces(best, widest):
            best = starts[method]
        if correct is not None and method in (WIDEST, *least):
            corrected = _corrected(fitted, method, correct)
            if corrected.replaces(best, widest):
                best = corrected
    return best, single


def _start_of(
    fitted: Fit, method: str, noise: OutputNoise, ranges: Assignment, samples: SampleSelection
) -> Start:
    error = noise.errors(ranges, samples)
    return Start(method, noise, error, spent_shares(fitted, noise, ranges))


def _corrected(fitted: Fit, method: str, correct: Callable[[Fit], ir.Model]) -> Start:
    """A method with biases corrected for its ranges."""
    complete = with_operands(fitted.graph, fitted.candidates[method])
    graph = correct(replace(fitted, method=method, amax=complete))
    noise = fitted.noise.of_model(TrialModel(graph, operands=fitted.trial.operands))
    ranges = trial_ranges(fitted.trial, complete)
    return _start_of(fitted, method, noise, ranges, fitted.judges)


def trial_ranges(trial: TrialModel, amax: Mapping[str, float]) -> dict[str, float]:
    """Select the ranges of the tensors that a trial quantizes."""
    return {name: amax[name] for name in trial.tensors}


@dataclass(frozen=True)
class FinalFit:
    """The result of calibration: graph, ranges of quantized tensors, nodes kept in float, and SQNR.

    `changes`: node -> values added to its bias. `sqnr_db`: by output, on the samples of `noise`.
    """

    graph: ir.Model
    trial: TrialModel
    ranges: Mapping[str, float]
    keep_float: frozenset[str]
    noise: OutputNoise
    sqnr_db: Mapping[str, float]
    changes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def final_fit(fit: Fit, keep_float: frozenset[str]) -> FinalFit:
    """A fit with some nodes in floating point."""
    ranges = trial_ranges(fit.trial, fit.amax)
    figures = fit.sqnr_db
    if keep_float:
        figures = fit.noise.sqnr_db(ranges, keep_float, fit.judges)
    return FinalFit(fit.graph, fit.trial, ranges, keep_float, fit.noise, figures)
