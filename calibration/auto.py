"""`auto`: for each tensor the range that does least harm at the outputs, found by trying.

Let y_o(s) be output o of the float model on validation sample s, and y_o(s, a) the same with ranges
a. The error of a, and what sample s adds to it, are

    E(a) = mean over s of e_s(a),
    e_s(a) = sum over o of  |y_o(s, a) - y_o(s)|^2 / mean over s' of |y_o(s')|^2

so that E(a) is the sum over outputs of noise to signal: 10^(-SQNR_o / 10), each output counting for
itself whatever its unit. The candidates of a tensor are what the methods propose for it.

1. Each method alone, everywhere: of these the start.
2. Each tensor on its own, all other activations in floating point: the noise that it adds without
   that of the others, its sensitivity. Noises of tensors add up in good approximation, so one that
   adds little can gain little and is left as it is.
3. Tensor by tensor, the most sensitive first, all others held at their current choice: each other
   candidate.

Clipping harms few samples much, and rounding harms all of them a little; and data to come hold
values that the validation samples do not. So a wider range takes the place of a narrower one where
E is less, but a narrower one only where that is more than chance, with d_s the differences over n
samples, and m and v their mean and variance:

    m < 0   and   m^2 > z^2 v / n,   z = 2

The same rule chooses the start, from the method with the widest ranges to that with the narrowest.
A few samples are asked before all others, half of them those with the largest errors, and a
candidate that is no better there is dropped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.errors import CalibrationError
from calibration.trials import (
    LEAST_QUICK,
    QUICK_SHARE,
    Errors,
    Progress,
    Trials,
    decibels,
    mean_of,
    surely_less,
)

MAX_TRIALS = 120
"""How often the model is run over all validation samples at most; parts count as parts."""
PROVEN = 2.0
"""z by which a narrower range must be better."""
NEGLIGIBLE = 0.01
"""Tensors that add less than this share of E on their own are left as they are."""

SAME = 0.01
"""Candidates of a tensor that differ by less than this share are tried once: rounding noise goes
with the square of the range, so theirs differ by less than 0.1 dB. Histogram bins are narrower."""


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """What was chosen for a tensor; `sensitivity`: E of it on its own, with the range that the
    search began with, on the samples that are asked first."""

    tensor: str
    amax: float
    method: str
    sensitivity: float


@dataclass(frozen=True, slots=True)
class AutoResult:
    """`amax` by tensor, and why: `error` is E of it, `single` E of each method everywhere.

    `choices` come the most sensitive first. `trials` were run; `complete` is False where
    `max_trials` ended the search early. `start` names the method that the search began with.
    """

    amax: Mapping[str, float]
    choices: tuple[TensorChoice, ...]
    error: float
    single: Mapping[str, float]
    trials: int
    complete: bool
    start: str

    @property
    def gain_db(self) -> Mapping[str, float]:
        """By how many dB the noise is less than with each method alone.

        Negative where a narrower method did better on these samples, but not by more than chance.
        """
        return {name: decibels(error, self.error) for name, error in self.single.items()}


def choose_ranges(
    candidates: Mapping[str, Mapping[str, float]],
    errors: Errors,
    own_errors: Errors | None = None,
    *,
    single: Mapping[str, NDArray[np.float64]] | None = None,
    start: str | None = None,
    max_trials: int = MAX_TRIALS,
    on_progress: Progress | None = None,
) -> AutoResult:
    """Choose an amax for each tensor among those of its methods.

    `candidates`: tensor -> method -> amax, the same methods for each. `errors` measures against
    the float model; `own_errors`, for one tensor at a time, against the model whose activations
    are all float (its weights may be INT8), None: `errors` does for both. At most `max_trials`
    calls of the two. `single`: e_s of each method everywhere, None: to be measured. `start`: the
    method to begin with, None: by the rule above.

    Raises CalibrationError: candidates are missing or no ranges, or there are too few trials.
    """
    methods = _methods(candidates)
    if max_trials < len(methods):
        raise CalibrationError(
            f"max_trials is {max_trials}, but each of the {len(methods)} methods has to be tried "
            f"once: allow at least {len(methods)}"
        )
    search = Trials(errors, max_trials, on_progress)
    if single is None:
        single = {
            method: search.measure({tensor: found[method] for tensor, found in candidates.items()})
            for method in methods
        }
    begin = start or best_single(candidates, single)
    choice = {tensor: found[begin] for tensor, found in candidates.items()}
    now = single[begin] if start is None else search.measure(choice)
    options = {tensor: _distinct(found, choice[tensor]) for tensor, found in candidates.items()}
    first = _telling(now)
    sensitivity = _on_their_own(search, choice, options, first, own_errors or errors)
    least = NEGLIGIBLE * mean_of(now[first])
    order = [tensor for tensor, noise in sensitivity.items() if noise >= least and options[tensor]]
    search.expect(sum(len(options[tensor]) for tensor in order))
    for tensor in sorted(order, key=lambda tensor: -sensitivity[tensor]):
        for amax in options[tensor]:
            if search.spent:
                break
            found = _measured(search, {**choice, tensor: amax}, now, first)
            if found is not None and takes_over(found, now, narrower=amax < choice[tensor]):
                choice[tensor], now = amax, found
    return AutoResult(
        amax=choice,
        choices=_choices(candidates, choice, begin, sensitivity),
        error=mean_of(now),
        single={method: mean_of(found) for method, found in single.items()},
        trials=search.trials,
        complete=not search.refused,
        start=begin,
    )


def widest_first(candidates: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
    """The methods by the geometric mean of their ranges, the largest first."""
    methods = _methods(candidates)
    width = {name: sum(math.log(found[name]) for found in candidates.values()) for name in methods}
    return tuple(sorted(methods, key=lambda name: -width[name]))


def best_single(
    candidates: Mapping[str, Mapping[str, float]], single: Mapping[str, NDArray[np.float64]]
) -> str:
    """The method that no wider one beats, and that beats wider ones by more than chance."""
    best, *others = widest_first(candidates)
    for method in others:
        if takes_over(single[method], single[best], narrower=True):
            best = method
    return best


def takes_over(found: NDArray[np.float64], now: NDArray[np.float64], *, narrower: bool) -> bool:
    """Whether ranges with the errors `found` take the place of those with the errors `now`."""
    return surely_less(found, now, PROVEN) if narrower else mean_of(found) < mean_of(now)


def _telling(errors: NDArray[np.float64]) -> NDArray[np.intp]:
    """A quarter of the samples: those with the largest errors, and as many spread evenly."""
    count = min(errors.size, max(LEAST_QUICK, errors.size // QUICK_SHARE))
    worst = np.argsort(-errors, kind="stable")
    spread = worst[np.arange(count - count // 2) * errors.size // (count - count // 2)]
    chosen: NDArray[np.intp] = np.unique(np.concatenate((worst[: count // 2], spread)))
    return chosen


def _on_their_own(
    search: Trials,
    choice: Mapping[str, float],
    options: Mapping[str, Sequence[float]],
    first: NDArray[np.intp],
    errors: Errors,
) -> dict[str, float]:
    """E of each tensor that has a choice while all other activations are float; 0 of the others."""
    search.expect(search.trials + len(options))
    return {
        tensor: mean_of(search.measure({tensor: amax}, first, errors))
        if options[tensor] and not search.spent
        else 0.0
        for tensor, amax in choice.items()
    }


def _measured(
    search: Trials,
    assignment: Mapping[str, float],
    now: NDArray[np.float64],
    first: NDArray[np.intp],
) -> NDArray[np.float64] | None:
    """Errors on all samples; None if they are no less on the first of them."""
    quick = search.measure(assignment, first)
    if mean_of(quick) >= mean_of(now[first]):
        return None
    found = np.empty_like(now)
    rest = np.setdiff1d(np.arange(now.size), first)
    found[first] = quick
    if rest.size:
        found[rest] = search.measure(assignment, rest)
    return found


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


def _distinct(found: Mapping[str, float], start: float) -> tuple[float, ...]:
    """The candidates, without those that are the same as `start` or as one before."""
    kept = [start]
    for amax in found.values():
        if all(abs(amax - other) > SAME * max(amax, other) for other in kept):
            kept.append(amax)
    return tuple(kept[1:])


def _choices(
    candidates: Mapping[str, Mapping[str, float]],
    choice: Mapping[str, float],
    start: str,
    sensitivity: Mapping[str, float],
) -> tuple[TensorChoice, ...]:
    rows = []
    for tensor, amax in choice.items():
        found = candidates[tensor]
        # Methods often agree: the one that the search began with, or the first that proposes it.
        method = next(name for name in (start, *found) if found[name] == amax)
        rows.append(TensorChoice(tensor, amax, method, sensitivity[tensor]))
    return tuple(sorted(rows, key=lambda row: -row.sensitivity))
