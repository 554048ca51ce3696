"""`auto`: choose for each tensor the range with the least error at the outputs, by trials.

Let y_o(s) be output o of the float model on validation sample s, and y_o(s, a) the same with ranges
a. The error of a, and what sample s adds to it, are

    E(a) = mean over s of e_s(a),
    e_s(a) = sum over o of  |y_o(s, a) - y_o(s)|^2 / mean over s' of |y_o(s')|^2

so that E(a) is the sum over outputs of the noise to signal ratio, 10^(-SQNR_o / 10), whatever their
units. The candidates of a tensor are the ranges that the methods propose for it.

1. Try each method for all tensors; the best is the start.
2. Measure each tensor alone on a few samples, with all other activations in floating point: its
   sensitivity. Noises of tensors are nearly additive, so a tensor with little noise has little to
   gain and is skipped. Most of the trials are left for step 3; where there are too few for that,
   the start is the answer.
3. Try the other candidates tensor by tensor, the most sensitive first, with all others at their
   current choice.

Clipping harms few samples much, rounding harms all a little, and future data hold values beyond
the validation samples. So a wider range replaces a narrower one if E is less; a narrower one only
if the gain is significant, with d_s the differences over n samples, m and v their mean and
variance:

    m < 0   and   m^2 > z^2 v / n,   z = 2

The same rule chooses the start, from the method with the widest ranges to the narrowest. A few
samples are tried first, half of them those with the largest errors; a candidate that is no better
on them is dropped.

E weighs all elements of an output alike, though a few may be all that counts. So whoever knows what
the outputs are for may forbid a choice (`allowed`), which is asked about all tensors together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.errors import CalibrationError
from calibration.progress import Progress
from calibration.trials import (
    MIN_QUICK,
    QUICK_SHARE,
    Errors,
    Trials,
    decibels,
    mean_of,
    significantly_less,
)

Allowed = Callable[[Mapping[str, float]], bool]
"""Whether the ranges of all tensors together may be chosen."""

MAX_TRIALS = 40
"""Maximum number of runs over all validation samples; partial runs count in part."""
SIGNIFICANT = 2.0
"""z at which a narrower range is significantly better."""
ALONE_SHARE = 0.75
"""The largest share of the trials that measure tensors alone."""
NEGLIGIBLE = 0.01
"""Tensors whose sensitivity is below this share of E are skipped."""

SAME = 0.01
"""Candidates that differ by less than this share are tried once: rounding noise is proportional to
the square of the range, so theirs differ by less than 0.1 dB. Histogram bins are narrower."""


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """The choice for a tensor; `sensitivity`: E of it alone, with its range at the start, on the
    samples that are tried first."""

    tensor: str
    amax: float
    method: str
    sensitivity: float


@dataclass(frozen=True, slots=True)
class AutoResult:
    """`amax` by tensor; `error`: its E; `single`: E of each method for all tensors.

    `choices`: the most sensitive first. `trials`: number of trials; `complete` is False if
    `max_trials` ended the search early. `start`: the method at the start.
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
        """Noise reduction in dB against each method alone.

        Negative if a narrower method was better on these samples, but not significantly.
        """
        return {name: decibels(error, self.error) for name, error in self.single.items()}


def choose_ranges(
    candidates: Mapping[str, Mapping[str, float]],
    errors: Errors,
    own_errors: Errors | None = None,
    *,
    single: Mapping[str, NDArray[np.float64]] | None = None,
    start: str | None = None,
    allowed: Allowed = lambda assignment: True,
    max_trials: int = MAX_TRIALS,
    on_progress: Progress | None = None,
) -> AutoResult:
    """Choose an amax for each tensor among those of its methods.

    `candidates`: tensor -> method -> amax, the same methods for each. `errors` measures against
    the float model; `own_errors`, for one tensor at a time, against the model whose activations
    are all float (its weights may be INT8), None: `errors`. At most `max_trials` calls of the
    two. `single`: e_s of each method for all tensors, None: measure it. `start`: the first method,
    None: by the rule above. `allowed`: asked before a tensor is given another range.

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
            method: search.measure(
                {tensor: amax_of[method] for tensor, amax_of in candidates.items()}
            )
            for method in methods
        }
    first_method = start or best_single(candidates, single)
    choice = {tensor: amax_of[first_method] for tensor, amax_of in candidates.items()}
    current = single[first_method] if start is None else search.measure(choice)
    options = {tensor: _distinct(amax_of, choice[tensor]) for tensor, amax_of in candidates.items()}
    search.samples = current.size
    quick = _spread_samples(current, max(MIN_QUICK, current.size // QUICK_SHARE))
    sensitivity, order = _most_sensitive(search, choice, options, current, own_errors or errors)
    search.expect(sum(len(options[tensor]) for tensor in order))
    ordered = {tensor: options[tensor] for tensor in order}
    current = _improve(search, choice, ordered, current, quick, allowed=allowed)
    return AutoResult(
        amax=choice,
        choices=_choices(candidates, choice, first_method, sensitivity),
        error=mean_of(current),
        single={method: mean_of(method_errors) for method, method_errors in single.items()},
        trials=search.trials,
        complete=not search.refused,
        start=first_method,
    )


def _most_sensitive(
    search: Trials,
    choice: Mapping[str, float],
    options: Mapping[str, Sequence[float]],
    current: NDArray[np.float64],
    errors: Errors,
) -> tuple[dict[str, float], list[str]]:
    """The sensitivity of each tensor; and those to try other ranges for, the most sensitive first.

    Both tell nothing where too few trials are left to try ranges afterwards.
    """
    tensors = sum(bool(amax_of) for amax_of in options.values())
    most_runs = int(ALONE_SHARE * search.remaining)
    count = min(MIN_QUICK, most_runs // tensors) if tensors else MIN_QUICK
    if not count:
        search.refused = True
        return dict.fromkeys(choice, 0.0), []
    few = _spread_samples(current, count)
    sensitivity = _sensitivities(search, choice, options, few, errors)
    negligible = NEGLIGIBLE * mean_of(current[few])
    order = [
        tensor for tensor, noise in sensitivity.items() if noise >= negligible and options[tensor]
    ]
    return sensitivity, sorted(order, key=lambda tensor: -sensitivity[tensor])


def _improve(
    search: Trials,
    choice: dict[str, float],
    options: Mapping[str, Sequence[float]],
    current: NDArray[np.float64],
    quick: NDArray[np.intp],
    *,
    allowed: Allowed,
) -> NDArray[np.float64]:
    """Try the candidates of each tensor in order, update `choice`; return its errors."""
    for tensor, candidates in options.items():
        for amax in candidates:
            if search.spent:
                break
            ranges = {**choice, tensor: amax}
            candidate = _measure(search, ranges, current, quick)
            if candidate is None:
                continue
            narrower = amax < choice[tensor]
            if replaces(candidate, current, narrower=narrower) and allowed(ranges):
                choice[tensor], current = amax, candidate
    return current


def widest_first(candidates: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
    """The methods by the geometric mean of their ranges, in descending order."""
    methods = _methods(candidates)
    width = {
        name: sum(math.log(amax_of[name]) for amax_of in candidates.values()) for name in methods
    }
    return tuple(sorted(methods, key=lambda name: -width[name]))


def best_single(
    candidates: Mapping[str, Mapping[str, float]], single: Mapping[str, NDArray[np.float64]]
) -> str:
    """The method that is significantly better than wider ones."""
    best, *narrower_methods = widest_first(candidates)
    for method in narrower_methods:
        if replaces(single[method], single[best], narrower=True):
            best = method
    return best


def replaces(
    candidate: NDArray[np.float64], current: NDArray[np.float64], *, narrower: bool
) -> bool:
    """True if ranges with the errors `candidate` replace those with the errors `current`."""
    return (
        significantly_less(candidate, current, SIGNIFICANT)
        if narrower
        else mean_of(candidate) < mean_of(current)
    )


def _spread_samples(errors: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Indices of `count` samples: half with the largest errors, half spread evenly."""
    count = min(errors.size, count)
    worst = np.argsort(-errors, kind="stable")
    spread = worst[np.arange(count - count // 2) * errors.size // (count - count // 2)]
    chosen: NDArray[np.intp] = np.unique(np.concatenate((worst[: count // 2], spread)))
    return chosen


def _sensitivities(
    search: Trials,
    choice: Mapping[str, float],
    options: Mapping[str, Sequence[float]],
    few: NDArray[np.intp],
    errors: Errors,
) -> dict[str, float]:
    """The sensitivity of each tensor that has a choice, on a few samples; 0 for the others."""
    search.expect(search.trials + len(options))
    return {
        tensor: mean_of(search.measure({tensor: amax}, few, errors))
        if options[tensor] and not search.spent
        else 0.0
        for tensor, amax in choice.items()
    }


def _measure(
    search: Trials,
    assignment: Mapping[str, float],
    current: NDArray[np.float64],
    quick_samples: NDArray[np.intp],
) -> NDArray[np.float64] | None:
    """Errors on all samples; None if they are no less on the samples that are tried first."""
    quick_errors = search.measure(assignment, quick_samples)
    if mean_of(quick_errors) >= mean_of(current[quick_samples]):
        return None
    errors = np.empty_like(current)
    rest = np.setdiff1d(np.arange(current.size), quick_samples)
    errors[quick_samples] = quick_errors
    if rest.size:
        errors[rest] = search.measure(assignment, rest)
    return errors


def _methods(candidates: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
    """Return the methods; raise CalibrationError if tensors differ in them."""
    if not candidates:
        raise CalibrationError("no tensors were given to choose ranges for: give at least one")
    methods = tuple(next(iter(candidates.values())))
    for tensor, amax_of in candidates.items():
        if set(amax_of) != set(methods) or not methods:
            raise CalibrationError(
                f"tensor '{tensor}' has candidates by {', '.join(amax_of) or 'no method'}, others "
                f"by {', '.join(methods) or 'no method'}: give each tensor one by each method"
            )
        invalid = next((name for name, amax in amax_of.items() if not 0.0 < amax < math.inf), None)
        if invalid is not None:
            raise CalibrationError(
                f"method {invalid} proposes amax {amax_of[invalid]} for tensor '{tensor}', but it "
                "must be positive and finite: calibrate again"
            )
    return methods


def _distinct(amax_of: Mapping[str, float], start: float) -> tuple[float, ...]:
    """The candidates that differ from `start` and from earlier ones."""
    distinct = [start]
    for amax in amax_of.values():
        if all(abs(amax - known) > SAME * max(amax, known) for known in distinct):
            distinct.append(amax)
    return tuple(distinct[1:])


def _choices(
    candidates: Mapping[str, Mapping[str, float]],
    choice: Mapping[str, float],
    start: str,
    sensitivity: Mapping[str, float],
) -> tuple[TensorChoice, ...]:
    rows = []
    for tensor, amax in choice.items():
        amax_of = candidates[tensor]
        # Methods often agree: name the start, or the first method that proposes the range.
        method = next(name for name in (start, *amax_of) if amax_of[name] == amax)
        rows.append(TensorChoice(tensor, amax, method, sensitivity[tensor]))
    return tuple(sorted(rows, key=lambda row: -row.sensitivity))
