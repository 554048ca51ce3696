"""A graph with ranges, by one method or by `auto`, and what INT8 then costs at its outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from calibration.auto import AutoResult, choose_ranges
from calibration.calibrate import Observation
from calibration.dataset import Sample
from calibration.observer import merge
from calibration.threshold import amax_by_method
from toolkit.int8.metrics import OutputNoise
from toolkit.int8.quantize import with_operands
from toolkit.int8.trial import TrialModel

Outputs = Mapping[str, NDArray[Any]]
NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Fit:
    """`candidates`: method -> tensor -> amax; `amax` what was taken of them.

    `method`: the best of them for all tensors alike. `sqnr_db`: SQNR by output with `amax`, on the
    validation samples of `noise`.
    """

    graph: ir.Model
    seen: Observation
    candidates: Mapping[str, Mapping[str, float]]
    trial: TrialModel
    noise: OutputNoise
    method: str
    amax: Mapping[str, float]
    sqnr_db: Mapping[str, float]
    auto: AutoResult | None = None


def fit(
    graph: ir.Model,
    seen: Observation,
    methods: Sequence[str],
    validation: Sequence[Sample],
    exact: Sequence[Outputs] | None = None,
) -> Fit:
    """Try each method for all tensors alike, and take the one whose worst output is best.

    `exact`: the float outputs to compare with, None: those of `graph`.
    """
    candidates = amax_by_method(seen.histograms, methods)
    trial = TrialModel(graph)
    noise = OutputNoise(trial, validation, exact)
    whole = {method: with_operands(graph, found) for method, found in candidates.items()}
    figures = {
        method: noise.sqnr_db(of_trial(trial, found), NOTHING) for method, found in whole.items()
    }
    best = max(methods, key=lambda method: min(figures[method].values()))
    return Fit(graph, seen, candidates, trial, noise, best, whole[best], figures[best])


def searched(found: Fit, on_progress: Callable[[int, int], None]) -> Fit:
    """Take of the candidates what does least harm, tensor by tensor."""
    by_tensor = {
        tensor: {method: amax[tensor] for method, amax in found.candidates.items()}
        for tensor in found.trial.tensors
    }
    auto = choose_ranges(
        by_tensor, found.noise.errors, found.noise.own_errors, on_progress=on_progress
    )
    amax = with_operands(found.graph, {**found.candidates[auto.best_single], **auto.amax})
    figures = found.noise.sqnr_db(of_trial(found.trial, amax), NOTHING)
    return replace(found, method=auto.best_single, amax=amax, sqnr_db=figures, auto=auto)


def refitted(found: Fit, more: Observation) -> Fit:
    """The same choice of methods, with ranges from the samples of `more` as well."""
    histograms = {
        name: merge(one, more.histograms[name]) for name, one in found.seen.histograms.items()
    }
    candidates = amax_by_method(histograms, tuple(found.candidates))
    choices = found.auto.choices if found.auto is not None else ()
    chosen = {choice.tensor: choice.method for choice in choices}
    taken = {name: candidates[chosen.get(name, found.method)][name] for name in histograms}
    amax = with_operands(found.graph, taken)
    samples = found.seen.samples + more.samples
    seen = replace(found.seen, histograms=histograms, samples=samples)
    figures = found.noise.sqnr_db(of_trial(found.trial, amax), NOTHING)
    return replace(found, seen=seen, candidates=candidates, amax=amax, sqnr_db=figures)


def of_trial(trial: TrialModel, amax: Mapping[str, float]) -> dict[str, float]:
    """The ranges of the tensors that a trial quantizes."""
    return {name: amax[name] for name in trial.tensors}
