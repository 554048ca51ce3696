"""`auto`: for each tensor the range that does least harm at the outputs, found by trying.

Let y_o(s) be output o of the float model on validation sample s, and y_o(s, a) the same with ranges
a. The error of a, and what sample s adds to it, are

    E(a) = mean over s of e_s(a),
    e_s(a) = sum over o of  |y_o(s, a) - y_o(s)|^2 / mean over s' of |y_o(s')|^2

so that E(a) is the sum over outputs of noise to signal: 10^(-SQNR_o / 10), each output counting for
itself whatever its unit. The candidates of a tensor are what the methods propose for it.

1. Each method alone, everywhere: the one with the least E is the start.
2. Each candidate of each tensor on its own, all other activations in floating point: the noise that
   it adds, without that of the others. Noises of tensors add up in good approximation, so the best
   candidates taken together are the second start. How far its candidates lie apart is the tensor's
   sensitivity. A quarter of the samples tells which candidates are worth the others.
3. From the better start, tensor by tensor, the most sensitive first, all others held at their
   current choice.

A candidate takes the place of the current choice only where it is better by more than chance, with
d_s the differences over n samples, and m and v their mean and variance:

    m < 0   and   m^2 > z^2 v / n,   z = 1

Without it the search would learn the rounding of these very samples. The last word is a comparison
with the best single method, which is left only if the whole choice passes the same test with z = 2
and is better in the first half of the samples as well as in the second: a gain that comes from some
samples alone will not be there on others. So no single method is better than the result on the
validation samples.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calibration.errors import CalibrationError
from calibration.trials import (
    Assignment,
    Errors,
    Progress,
    Trials,
    decibels,
    mean_of,
    surely_less,
)

MAX_TRIALS = 1000
"""How often the model is run over all validation samples at most; parts count as parts."""
HOPELESS = 2.0
"""z by which a candidate is dropped that is worse on the first samples."""
PROVEN = 2.0
"""z by which the whole choice must be better than the best single method."""
NEGLIGIBLE = 0.01
"""Tensors whose candidates differ by less than this share of E are not tried a second time."""

SAME = 0.01
"""Candidates of a tensor that differ by less than this share are tried once: rounding noise goes
with the square of the range, so theirs differ by less than 0.1 dB. Histogram bins are narrower."""


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """What was chosen for a tensor; `sensitivity`: E of its worst candidate minus E of its best,
    both on their own."""

    tensor: str
    amax: float
    method: str
    sensitivity: float


@dataclass(frozen=True, slots=True)
class AutoResult:
    """`amax` by tensor, and why: `error` is E of it, `single` E of each method everywhere.

    `choices` come the most sensitive first. `trials` were run; `complete` is False where
    `max_trials` ended the search early. `fallback` names the single method that was taken whole.
    """

    amax: Mapping[str, float]
    choices: tuple[TensorChoice, ...]
    error: float
    single: Mapping[str, float]
    trials: int
    complete: bool
    fallback: str | None

    @property
    def best_single(self) -> str:
        """The method with the least error of its own."""
        return min(self.single, key=lambda name: self.single[name])

    @property
    def gain_db(self) -> Mapping[str, float]:
        """By how many dB the noise is less than with each method alone, >= 0."""
        return {name: decibels(error, self.error) for name, error in self.single.items()}


def choose_ranges(
    candidates: Mapping[str, Mapping[str, float]],
    errors: Errors,
    own_errors: Errors | None = None,
    *,
    max_trials: int = MAX_TRIALS,
    sweeps: int = 1,
    on_progress: Progress | None = None,
) -> AutoResult:
    """Choose an amax for each tensor among those of its methods.

    `candidates`: tensor -> method -> amax, the same methods for each. `errors` measures against
    the float model; `own_errors`, for one tensor at a time, against the model whose activations
    are all float (its weights may be INT8), None: `errors` does for both. At most `max_trials`
    calls of the two, `sweeps` passes of step 3.

    Raises CalibrationError: candidates are missing or no ranges, or there are too few trials.
    """
    methods = _methods(candidates)
    if max_trials < len(methods):
        raise CalibrationError(
            f"max_trials is {max_trials}, but each of the {len(methods)} methods has to be tried "
            f"once: allow at least {len(methods)}"
        )
    options = {tensor: _distinct(found) for tensor, found in candidates.items()}
    search = Trials(errors, max_trials, on_progress)
    single = {
        method: search.measure({tensor: found[method] for tensor, found in candidates.items()})
        for method in methods
    }
    best = min(methods, key=lambda method: mean_of(single[method]))
    start = {tensor: found[best] for tensor, found in candidates.items()}
    open_tensors = {tensor: found for tensor, found in options.items() if len(found) > 1}
    search.expect(sum(map(len, open_tensors.values())) * (2 if sweeps else 1) + 1)
    error = mean_of(single[best])
    least = NEGLIGIBLE * error if math.isfinite(error) else 0.0
    own = _on_their_own(search, open_tensors, start, least, own_errors or errors)
    together = start | own.chosen
    choice, now = start, single[best]
    if together != start and not search.spent:
        found_together = search.measure(together)
        if mean_of(found_together) < mean_of(now):
            choice, now = together, found_together
    for _ in range(sweeps):
        before = choice
        choice, now = _sweep(search, open_tensors, own.sensitivity, choice, now)
        if choice == before:
            break
    if not _is_proven(now, single[best]):
        choice, now = start, single[best]
    return AutoResult(
        amax=choice,
        choices=_choices(candidates, choice, own.sensitivity),
        error=mean_of(now),
        single={method: mean_of(found) for method, found in single.items()},
        trials=search.trials,
        complete=not search.refused,
        fallback=best if choice == start else None,
    )


@dataclass(slots=True)
class _Own:
    """What the tensors do on their own."""

    chosen: dict[str, float] = field(default_factory=dict)
    sensitivity: dict[str, float] = field(default_factory=dict)


def _on_their_own(
    search: Trials,
    options: Mapping[str, Sequence[float]],
    start: Mapping[str, float],
    least: float,
    errors: Errors,
) -> _Own:
    """The best candidate of each tensor while all other activations are float.

    Where candidates lie apart by less than `least`, the one of `start` stays.
    """
    own = _Own(sensitivity=dict.fromkeys(options, 0.0))
    for tensor, amounts in options.items():
        if search.spent:
            return own
        found = {amax: search.measure({tensor: amax}, search.first, errors) for amax in amounts}
        own.sensitivity[tensor] = _spread(found.values())
        if own.sensitivity[tensor] < least:
            continue
        kept = _nearest(amounts, start[tensor])
        found = _finish(search, tensor, found, kept, errors)
        best = _best(found)
        if best != kept and surely_less(found[best], found[kept]):
            own.chosen[tensor] = best
    return own


def _finish(
    search: Trials,
    tensor: str,
    first: Mapping[float, NDArray[np.float64]],
    kept: float,
    errors: Errors,
) -> dict[float, NDArray[np.float64]]:
    """Errors on all samples of `kept` and of the candidates that may still win."""
    best = first[_best(first)]
    rest = slice(best.size, None)
    if best.size == search.samples:
        return dict(first)
    return {
        amax: np.concatenate([found, search.measure({tensor: amax}, rest, errors)])
        for amax, found in first.items()
        if amax == kept or not surely_less(best, found, HOPELESS)
    }


def _sweep(
    search: Trials,
    options: Mapping[str, Sequence[float]],
    sensitivity: Mapping[str, float],
    choice: Mapping[str, float],
    now: NDArray[np.float64],
) -> tuple[dict[str, float], NDArray[np.float64]]:
    """Try the other candidates of each tensor while all others keep their choice."""
    choice = dict(choice)
    for tensor in sorted(options, key=lambda tensor: -sensitivity[tensor]):
        if sensitivity[tensor] < NEGLIGIBLE * mean_of(now):
            break
        kept = _nearest(options[tensor], choice[tensor])
        for amax in options[tensor]:
            if amax == kept:
                continue
            if search.spent:
                return choice, now
            found = _better(search, {**choice, tensor: amax}, now)
            if found is not None:
                choice[tensor], now = amax, found
    return choice, now


def _better(
    search: Trials, assignment: Assignment, now: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Errors on all samples if they are surely less than `now`."""
    found = search.measure(assignment, search.first)
    if surely_less(now[search.first], found, HOPELESS):
        return None
    if found.size < now.size:
        found = np.concatenate([found, search.measure(assignment, slice(found.size, None))])
    return found if surely_less(found, now) else None


def _is_proven(found: NDArray[np.float64], than: NDArray[np.float64]) -> bool:
    """Whether errors are surely less, and less in each half of the samples."""
    half = found.size // 2
    halves = ((found[part], than[part]) for part in (slice(half), slice(half, None)))
    everywhere = all(mean_of(one) < mean_of(other) for one, other in halves if one.size)
    return everywhere and surely_less(found, than, PROVEN)


def _best(found: Mapping[float, NDArray[np.float64]]) -> float:
    return min(found, key=lambda amax: (mean_of(found[amax]), amax))


def _nearest(amounts: Sequence[float], to: float) -> float:
    """The candidate that stands for `to`: itself, or one within a bin of it."""
    return min(amounts, key=lambda amax: abs(amax - to))


def _spread(found: Iterable[NDArray[np.float64]]) -> float:
    """The worst E minus the best."""
    means = [mean_of(errors) for errors in found]
    return max(means) - min(means) if math.isfinite(min(means)) else math.inf


def _methods(candidates: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
    """The methods, which must be the same for each tensor."""
    if not candidates:
        raise CalibrationError("no tensors were given to choose ranges for: give at least one")
    methods = tuple(next(iter(candidates.values())))
    for tensor, found in candidates.items():
        if set(found) != set(methods) or not methods:
            raise CalibrationError(
                f"tensor '{tensor}' has candidates by {', '.join(found) or 'no method'}, others by "
                f"{', '.join(methods) or 'no method'}: give each tensor one by each method"
            )
        wrong = next((name for name, amax in found.items() if not 0.0 < amax < math.inf), None)
        if wrong is not None:
            raise CalibrationError(
                f"method {wrong} proposes amax {found[wrong]} for tensor '{tensor}', but it must "
                "be positive and finite: calibrate again"
            )
    return methods


def _distinct(found: Mapping[str, float]) -> tuple[float, ...]:
    """The candidates, without those that are the same as one before."""
    kept: list[float] = []
    for amax in found.values():
        if all(abs(amax - other) > SAME * max(amax, other) for other in kept):
            kept.append(amax)
    return tuple(kept)


def _choices(
    candidates: Mapping[str, Mapping[str, float]],
    choice: Mapping[str, float],
    sensitivity: Mapping[str, float],
) -> tuple[TensorChoice, ...]:
    rows = []
    for tensor, amax in choice.items():
        found = candidates[tensor]
        # The first that proposes it: methods often agree.
        method = next(name for name in found if found[name] == amax)
        rows.append(TensorChoice(tensor, amax, method, sensitivity.get(tensor, 0.0)))
    return tuple(sorted(rows, key=lambda row: -row.sensitivity))
