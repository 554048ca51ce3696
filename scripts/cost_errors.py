"""Fit the intervals of predictions to the errors of held-out rows, for `scripts/fit_costs.py`.

Normalised conformal prediction: errors divided by a scale have quantiles; the scale is log-linear
in the distances from the fit. Rows of one source on one board at one precision are alike: together
they weigh as the square root of their number.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy.optimize import minimize  # type: ignore[import-untyped]

from device.profile import load_profile
from scripts.cost_result import Prediction
from scripts.cost_rows import Case
from toolkit.partition.costs.errors import Distance, ErrorScale, Part, distances, spread_of
from toolkit.partition.costs.gpu import Array

PARTS_OF: dict[str, Part] = {"gpu": "gpu", "dla0": "dla", "2dla": "dla"}
DISTANCES: tuple[Distance, ...] = get_args(Distance)
# The share of rows beyond each bound. Below a tenth: boards and networks that are left out of the
# bounds, too, have their own offsets (tests/partition/test_cost_errors.py).
TAIL = 0.08
RIDGE = 1.0  # keeps factors of few rows near 1
LARGEST = 2.0  # of the logarithm of a factor
# A board, and a precision that is not FP16, count at least this, whatever the few rows show.
FARTHER = 1.1
AT_LEAST: frozenset[Distance] = frozenset({"board", "generation", "int8", "int8_elsewhere", "fp32"})
OWN_ROWS = 10  # of a board, that weigh as much as all others do

Left = Literal["model", "device", "all"]


@dataclass(frozen=True)
class Error:
    """Published over predicted of a row, and what the prediction's fit did not have."""

    part: Part
    case: Case
    apart: frozenset[Distance]
    left_out: Left
    ratio: float

    @property
    def cluster(self) -> tuple[str, ...]:
        """Rows that are alike."""
        return self.part, self.case.device, self.case.family, self.case.precision, self.left_out


def errors_of(
    times: Sequence[Prediction], checks: Sequence[Prediction], power: Sequence[Prediction]
) -> tuple[Error, ...]:
    """Return the errors of held-out rows; powers are few, and are those of the fit.

    A row of the GPU counts twice: predicted without its model, and without its board.
    """
    fitted = {row.case.device for row in times if row.case.engine == "gpu"}
    errors = [_error(row, row.without_model, "model", fitted) for row in times]
    errors += [
        _error(row, row.without_device, "device", fitted - {row.case.device})
        for row in times
        if row.case.engine == "gpu"
    ]
    errors += [_error(row, row.predicted, "all", fitted) for row in checks]
    powers = [Error("power", p.case, frozenset(), "all", 1 / p.ratio) for p in power]
    return (*(error for error in errors if error is not None), *powers)


def _error(row: Prediction, value: float | None, left_out: Left, fitted: set[str]) -> Error | None:
    case = row.case
    part = PARTS_OF.get(case.engine)
    if part is None or value is None:
        return None
    apart = distances(
        row.kinds,
        case.precision,
        board_fitted=case.device in fitted,
        generation_fitted=_sm(case.device) in {_sm(device) for device in fitted},
    )
    return Error(part, case, apart if part == "gpu" else frozenset(), left_out, case.value / value)


def _sm(device: str) -> int | None:
    return load_profile(device).sm


def error_scales(errors: Sequence[Error]) -> dict[Part, ErrorScale]:
    """Return the scales of all parts."""
    parts = sorted({error.part for error in errors})
    return {part: _scale([error for error in errors if error.part == part]) for part in parts}


def _scale(errors: Sequence[Error]) -> ErrorScale:
    logs = np.log([error.ratio for error in errors])
    count = Counter(error.cluster for error in errors)
    weight = np.array([count[error.cluster] ** -0.5 for error in errors])
    present = [d for d in DISTANCES if any(d in error.apart for error in errors)]
    design = np.array([[1.0, *(d in error.apart for d in present)] for error in errors])
    fitted = _log_linear(design, np.abs(logs), weight / np.mean(weight), present)
    scaled = logs * np.exp(-(design @ fitted))
    low, high = (_quantile(scaled, weight, tail) for tail in (TAIL, 1 - TAIL))
    usual = float(np.average(np.abs(scaled), weights=weight))
    boards = {}
    for board in sorted({error.case.device for error in errors}):
        own = np.abs(scaled[[error.case.device == board for error in errors]]) / usual
        boards[board] = max(1.0, (OWN_ROWS + float(np.sum(own))) / (OWN_ROWS + len(own)))
    return ErrorScale(
        rows=len(errors),
        scale=round(float(np.exp(fitted[0])), 4),
        low=round(low, 3),
        high=round(high, 3),
        factors={d: round(float(np.exp(f)), 3) for d, f in zip(present, fitted[1:], strict=True)},
        boards={board: round(factor, 3) for board, factor in boards.items()},
    )


def _log_linear(design: Array, sizes: Array, weight: Array, names: Sequence[Distance]) -> Array:
    """Return the logarithm of the scale and of the factors: likeliest for Laplace errors."""

    def cost(values: Array) -> tuple[float, Array]:
        log_scale = design @ values
        scaled = sizes * np.exp(-log_scale)
        slope = design.T @ (weight * (1 - scaled))
        slope[1:] += 4 * RIDGE * values[1:]
        total = np.sum(weight * (log_scale + scaled)) + 2 * RIDGE * np.sum(values[1:] ** 2)
        return float(total), slope

    least = [np.log(FARTHER) if name in AT_LEAST else 0.0 for name in names]
    start = np.array([np.log(np.mean(sizes)), *least])
    bounds = [(None, None), *((low, LARGEST) for low in least)]
    return np.asarray(minimize(cost, start, jac=True, bounds=bounds, method="L-BFGS-B").x)


def _quantile(values: Array, weight: Array, share: float) -> float:
    order = np.argsort(values)
    below = np.cumsum(weight[order]) - weight[order] / 2
    return float(np.interp(share, below / np.sum(weight), values[order]))


def bounds_of(error: Error, scales: dict[Part, ErrorScale]) -> tuple[float, float]:
    """Return the interval of a row's prediction, as published over predicted."""
    spread = spread_of(scales[error.part], error.case.device, error.apart)
    return spread.low, spread.high


def cross_validated(
    errors: Sequence[Error], group: Callable[[Error], str]
) -> Iterator[tuple[Error, float, float]]:
    """Yield each row with its interval from the rows of all other groups."""
    groups = {error: group(error) for error in errors}
    for name in sorted(set(groups.values())):
        scales = error_scales([error for error in errors if groups[error] != name])
        for error in errors:
            if groups[error] == name and error.part in scales:
                yield error, *bounds_of(error, scales)


def without_boards(errors: Sequence[Error]) -> Iterator[tuple[Error, float, float]]:
    """Yield rows of the GPU with intervals that know nothing of their board."""
    gpu = [error for error in errors if error.part == "gpu"]
    rows = cross_validated(gpu, lambda error: error.case.device)
    return (row for row in rows if row[0].left_out != "model")


def without_networks(errors: Sequence[Error]) -> Iterator[tuple[Error, float, float]]:
    """Yield rows of time with intervals that know nothing of their network."""
    timed = [error for error in errors if error.part != "power"]
    rows = cross_validated(timed, lambda error: error.case.network.partition(":")[0])
    return (row for row in rows if row[0].left_out != "device")
