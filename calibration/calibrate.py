"""One pass over the data: run the model, observe its tensors, choose an amax for each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from calibration.dataset import Dataset, Sample, Skipped
from calibration.errors import CalibrationError
from calibration.observer import Histogram, merge, observe
from calibration.table import CalibrationTable
from calibration.threshold import choose_amax, method_named

Run = Callable[[Sample], Mapping[str, NDArray[Any]]]
"""Feeds of one sample -> the arrays of (at least) the asked tensors."""
Progress = Callable[[int, int], None]
"""Called after each sample with (samples run, samples expected)."""


@dataclass(frozen=True)
class Observation:
    """What one pass saw. `histograms`: one per tensor, in the order asked for.

    `asked` samples were expected and `samples` were run; `skipped` says what could not be read.
    """

    histograms: Mapping[str, Histogram]
    asked: int
    samples: int
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class CalibrationResult:
    """The table and what the user should know about how it came about.

    `dead`: tensors that were zero in every sample; their amax is `threshold.DEAD_AMAX`.
    `constant`: other tensors that held one single number in every sample.
    `samples` may be less than `asked`; `skipped` says why.
    """

    table: CalibrationTable
    asked: int
    samples: int
    skipped: tuple[Skipped, ...]
    dead: tuple[str, ...]
    constant: tuple[str, ...]


def calibrate(
    run: Run,
    samples: Dataset,
    tensors: Sequence[str],
    method: str = "entropy",
    on_progress: Progress | None = None,
    *,
    model_sha256: str,
) -> CalibrationResult:
    """Run every sample once and give each of `tensors` an amax by `method` (a row of METHODS).

    Memory: one sample, the tensors that `run` returns for it and 32 KiB for each tensor.
    """
    method_named(method)  # refused before hours of running
    seen = observe_tensors(run, samples, tensors, on_progress)
    histograms = seen.histograms
    table = CalibrationTable(
        method=method,
        samples=seen.samples,
        data_sha256=samples.sha256(),
        model_sha256=model_sha256,
        tensors={name: _amax(name, histogram, method) for name, histogram in histograms.items()},
    )
    dead = tuple(name for name, histogram in histograms.items() if histogram.dead)
    constant = tuple(
        name for name, histogram in histograms.items() if histogram.constant and not histogram.dead
    )
    return CalibrationResult(table, seen.asked, seen.samples, seen.skipped, dead, constant)


def observe_tensors(
    run: Run, samples: Dataset, tensors: Sequence[str], on_progress: Progress | None = None
) -> Observation:
    """Run every sample once and merge the histograms of each of `tensors`."""
    if not tensors:
        raise CalibrationError(
            "no tensors to calibrate were named: name at least one floating point tensor"
        )
    histograms = dict.fromkeys(tensors, Histogram())
    done, expected = 0, len(samples)
    for number, sample in enumerate(samples):
        found = run(sample)
        for name, before in histograms.items():
            histograms[name] = merge(before, observe(name, _tensor(found, name, number), number))
        done = number + 1
        if on_progress is not None:
            on_progress(done, expected)
    if done == 0:
        raise CalibrationError("the calibration data held no sample: give at least one")
    return Observation(histograms, samples.asked, done, samples.skipped)


def _tensor(found: Mapping[str, NDArray[Any]], name: str, sample: int) -> NDArray[Any]:
    if name not in found:
        raise CalibrationError(
            f"the model gave no tensor '{name}' in sample {sample}, only {len(found)} others: "
            "name tensors of this model"
        )
    return found[name]


def _amax(name: str, histogram: Histogram, method: str) -> float:
    if histogram.elements == 0:
        raise CalibrationError(
            f"tensor '{name}' was empty in every sample, so it has no range: give samples that "
            "fill it or leave it out"
        )
    return choose_amax(histogram, method)
