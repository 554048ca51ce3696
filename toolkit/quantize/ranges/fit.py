"""A graph with ranges, by one method or by `auto`, and what INT8 then costs at its outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.auto import AutoResult, best_single, choose_ranges, takes_over, widest_first
from calibration.calibrate import Observation
from calibration.dataset import Sample
from calibration.observer import Histogram, merge
from calibration.threshold import amax_by_method
from calibration.trials import Assignment, mean_of
from toolkit.quantize.quantize import with_operands
from toolkit.quantize.trials.metrics import AsJudged, OutputNoise
from toolkit.quantize.trials.trial import TrialModel

Outputs = Mapping[str, NDArray[Any]]
NOTHING: frozenset[str] = frozenset()
AUTO_METHODS = (
    "minmax", "percentile:99.999", "percentile", "percentile:99.9", "mse", "entropy"
)  # fmt: skip
"""What `auto` chooses among; the methods by their own names and steps between them."""
MOST_CORRECTED = 2
"""Of the methods so many are tried with corrected biases too, and the one with widest ranges."""


@dataclass(frozen=True)
class Halves:
    """What two parts of the samples showed: the ranges of each are judged on the other.

    `first`, `held`: their histograms. `numbers`: which of the validation samples are in `held`.
    """

    first: Mapping[str, Histogram]
    held: Mapping[str, Histogram]
    numbers: NDArray[np.intp]


@dataclass(frozen=True)
class Fit:
    """`candidates`: method -> tensor -> amax; `amax` what was taken of them.

    `method`: the best of them for all tensors alike. `sqnr_db`: SQNR by output with `amax`, on the
    validation samples of `noise`; where there are `halves`, on those that steps are judged by, each
    with the ranges that the same methods find without it.
    """

    graph: ir.Model
    seen: Observation
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
        """The validation samples that may judge what the others made."""
        return slice(None) if self.halves is None else self.halves.numbers


def fit(
    graph: ir.Model,
    seen: Observation,
    methods: Sequence[str],
    validation: Sequence[Sample],
    *,
    exact: Sequence[Outputs] | None = None,
    halves: Halves | None = None,
    operands: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Fit:
    """Try each method for all tensors alike, and take the one whose worst output is best.

    `exact`: the float outputs to compare with, None: those of `graph`. `halves`: the parts of
    `seen`, None: samples are judged with ranges that they had a part in. `operands`: what nodes
    read in INT8, as of `toolkit.quantize.quantize.quantize`.
    """
    candidates = amax_by_method(seen.histograms, methods)
    trial = TrialModel(graph, operands=operands)
    judged = None if halves is None else _as_judged(graph, candidates, halves)
    noise = OutputNoise(trial, validation, exact, judged)
    judges = slice(None) if halves is None else halves.numbers
    whole = {method: with_operands(graph, found) for method, found in candidates.items()}
    figures = {
        method: noise.sqnr_db(of_trial(trial, found), NOTHING, judges)
        for method, found in whole.items()
    }
    best = max(methods, key=lambda method: min(figures[method].values()))
    return Fit(graph, seen, candidates, trial, noise, best, whole[best], figures[best], halves)


def joined(first: Observation, held: Observation) -> Observation:
    """What both parts of the samples showed."""
    histograms = {name: merge(one, held.histograms[name]) for name, one in first.histograms.items()}
    return replace(first, histograms=histograms, samples=first.samples + held.samples)


def _as_judged(
    graph: ir.Model, candidates: Mapping[str, Mapping[str, float]], halves: Halves
) -> AsJudged:
    """Give each sample the range that the same method finds in the part without it."""
    held = frozenset(halves.numbers.tolist())
    tables: list[dict[tuple[str, float | None], float]] = []
    for part in (halves.first, halves.held):
        table: dict[tuple[str, float | None], float] = {}
        for method, found in amax_by_method(part, tuple(candidates)).items():
            asked = with_operands(graph, candidates[method])
            for tensor, amax in with_operands(graph, found).items():
                table.setdefault((tensor, asked[tensor]), amax)
        tables.append(table)

    def as_judged(assignment: Assignment, number: int) -> Assignment:
        table = tables[0 if number in held else 1]
        return {name: table.get((name, amax), amax) for name, amax in assignment.items()}

    return as_judged


def searched(
    found: Fit,
    correct: Callable[[Fit], ir.Model] | None,
    on_progress: Callable[[int, int], None],
) -> Fit:
    """Take of the candidates what does least harm, tensor by tensor.

    `correct` makes the graph with the biases that suit the ranges of a fit, None: they stay.
    """
    trial = found.trial
    by_tensor = {
        tensor: {
            method: with_operands(found.graph, amax)[tensor]
            for method, amax in found.candidates.items()
        }
        for tensor in trial.tensors
    }
    single = {
        method: found.noise.errors({tensor: by_tensor[tensor][method] for tensor in trial.tensors})
        for method in found.candidates
    }
    start, noise = _start(found, by_tensor, single, correct)
    auto = choose_ranges(
        by_tensor, noise.errors, noise.own_errors,
        single=single, start=start, on_progress=on_progress,
    )  # fmt: skip
    amax = with_operands(found.graph, {**found.candidates[start], **auto.amax})
    figures = found.noise.sqnr_db(of_trial(trial, amax), NOTHING, found.judges)
    return replace(found, method=start, amax=amax, sqnr_db=figures, auto=auto)


def _start(
    found: Fit,
    by_tensor: Mapping[str, Mapping[str, float]],
    single: Mapping[str, NDArray[np.float64]],
    correct: Callable[[Fit], ir.Model] | None,
) -> tuple[str, OutputNoise]:
    """The method to begin with, and what measures it: with corrected biases if they help."""
    if correct is None:
        return best_single(by_tensor, single), found.noise
    order = widest_first(by_tensor)
    least = sorted(order, key=lambda method: mean_of(single[method]))[:MOST_CORRECTED]
    best, noise, error = order[0], found.noise, single[order[0]][found.judges]
    for method in order:
        plain = single[method][found.judges]
        if method != best and takes_over(plain, error, narrower=True):
            best, noise, error = method, found.noise, plain
        if method in (order[0], *least):
            whole = with_operands(found.graph, found.candidates[method])
            graph = correct(replace(found, method=method, amax=whole))
            tried = found.noise.of_model(TrialModel(graph, operands=found.trial.operands))
            other = tried.errors(of_trial(found.trial, whole), found.judges)
            if takes_over(other, error, narrower=True):
                best, noise, error = method, tried, other
    return best, noise


def of_trial(trial: TrialModel, amax: Mapping[str, float]) -> dict[str, float]:
    """The ranges of the tensors that a trial quantizes."""
    return {name: amax[name] for name in trial.tensors}
