"""Fit the intervals of predictions to the errors of held-out rows, for `scripts/fit_costs.py`.

Conformal prediction: quantiles of errors of rows that their prediction did not know; of the GPU,
of rows like the figure. Rows of one source on one board at one precision are alike: together they
weigh as the square root of their number.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from device.profile import load_profile
from scripts.cost_result import Prediction
from scripts.cost_rows import Case
from toolkit.partition.costs.errors import (
    TAIL,
    Distance,
    ErrorRow,
    ErrorRows,
    Errors,
    ErrorScale,
    Part,
    Spread,
    distances,
    weighted_quantile,
    widening,
)
from toolkit.partition.costs.gpu import Array, TimeShares

PARTS_OF: dict[str, Part] = {"gpu": "gpu", "dla0": "dla", "2dla": "dla"}
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
    shares: TimeShares | None = None

    @property
    def network(self) -> str:
        """The network that the row's network or part of one belongs to."""
        return self.case.network.partition(":")[0]

    @property
    def row(self) -> ErrorRow:
        """A row of the GPU as it is compared."""
        assert self.shares is not None
        sm = _sm(self.case.device) or 0
        return ErrorRow(sm, self.case.precision, "batch" in self.apart, self.shares)

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
    if part != "gpu":
        return Error(part, case, frozenset(), left_out, case.value / value)
    apart = distances(
        case.precision,
        batch=case.batch > 1,
        board_fitted=case.device in fitted,
        generation_fitted=_sm(case.device) in {_sm(device) for device in fitted},
        network_fitted=left_out != "model",
    )
    return Error(part, case, apart, left_out, case.value / value, row.shares)


@cache
def _sm(device: str) -> int | None:
    return load_profile(device).sm


def errors_file(errors: Sequence[Error]) -> Errors:
    """Return the errors of all parts, as they are kept."""
    return Errors(
        gpu=tuple(gpu_rows(_of("gpu", errors))),
        dla=_scale(_of("dla", errors)),
        power=_scale(_of("power", errors)),
    )


def _of(part: Part, errors: Sequence[Error]) -> list[Error]:
    return [error for error in errors if error.part == part]


def gpu_rows(errors: Sequence[Error]) -> Iterator[ErrorRow]:
    """Yield rows of the GPU with their errors and weights."""
    for error, weight in zip(errors, _weights(errors), strict=True):
        row = error.row
        shares = TimeShares(*(round(share, 3) for share in row.shares))
        size = round(float(np.log(error.ratio)) / widening(error.apart), 4)
        yield ErrorRow(row.sm, row.precision, row.batch, shares, size, round(weight, 4))


def _weights(errors: Sequence[Error]) -> list[float]:
    count = Counter(error.cluster for error in errors)
    return [float(count[error.cluster] ** -0.5) for error in errors]


def _scale(errors: Sequence[Error]) -> ErrorScale:
    logs: Array = np.log([error.ratio for error in errors])
    weights = np.array(_weights(errors))
    scale = float(np.average(np.abs(logs), weights=weights))
    scaled = logs / scale
    boards = {}
    for board in sorted({error.case.device for error in errors}):
        board_errors = np.abs(scaled[[error.case.device == board for error in errors]])
        boards[board] = max(
            1.0, (OWN_ROWS + float(np.sum(board_errors))) / (OWN_ROWS + len(board_errors))
        )
    return ErrorScale(
        rows=len(errors),
        scale=round(scale, 4),
        low=round(weighted_quantile(scaled, weights, TAIL), 3),
        high=round(weighted_quantile(scaled, weights, 1 - TAIL), 3),
        boards={board: round(factor, 3) for board, factor in boards.items()},
    )


Judged = tuple[Error, Spread]


def without_boards(errors: Sequence[Error]) -> Iterator[Judged]:
    """Yield rows of the GPU with intervals that know nothing of their board."""
    rows = _of("gpu", errors)
    for board in sorted({error.case.device for error in rows}):
        others = ErrorRows(list(gpu_rows([e for e in rows if e.case.device != board])))
        for error in rows:
            if error.case.device == board and error.left_out != "model":
                yield error, others.spread(error.row, error.apart | {"board"})


def without_networks(errors: Sequence[Error]) -> Iterator[Judged]:
    """Yield rows of time with intervals that know nothing of their network."""
    unknown: frozenset[Distance] = frozenset({"network"})
    for network in sorted({error.network for error in errors}):
        network_errors = [e for e in errors if e.network == network and e.left_out != "device"]
        others = [error for error in errors if error.network != network]
        rows, scale = ErrorRows(list(gpu_rows(_of("gpu", others)))), _scale(_of("dla", others))
        for error in network_errors:
            if error.part == "gpu":
                yield error, rows.spread(error.row, error.apart | unknown)
            elif error.part == "dla":
                yield error, scale.spread(error.case.device)
