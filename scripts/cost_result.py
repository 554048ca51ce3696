"""The result of a fit of the cost model, and the file that keeps it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

import configs
from device.engine.manifest import Precision
from scripts.cost_fit import DlaFit, Fitted
from scripts.cost_rows import Case, UnusedRow
from toolkit.partition.costs.energy import EnergyParameters
from toolkit.partition.costs.errors import FEWEST, TAIL, ErrorRow, NetworkClass, Part, spread_of
from toolkit.partition.costs.gpu import GpuParameters

ERRORS_OF: dict[str, Part] = {"gpu": "gpu", "dla0": "dla", "2dla": "dla"}
PREDICTED = configs.ROOT / "predicted_figures.json"


@dataclass(frozen=True)
class Prediction:
    """A row and its prediction; `without_*`: fitted without its device or model."""

    case: Case
    predicted: float
    without_device: float | None = None
    without_model: float | None = None
    network: NetworkClass = "plain"

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.case.value


@dataclass(frozen=True)
class Application:
    """A published rate of a whole application, in frames a second, and what could bound it.

    `*_rate`: of the network alone, in INT8 and FP16 on both DLA cores and in INT8 on the GPU;
    `memory_share`: of the memory's peak, at the published rate.
    """

    case: Case
    published_rate: float
    dla_rate: float
    dla_fp16_rate: float
    gpu_rate: float
    memory_share: float


@dataclass(frozen=True)
class Everything:
    """The result of a fit: constants, errors and predictions."""

    gpu: GpuParameters
    gpu_fit: Fitted
    dla: DlaFit
    dla_fit: Fitted
    contention: tuple[float, float, float]
    contention_fit: Fitted
    contention_errors: tuple[float, ...]
    energy: EnergyParameters
    energy_fit: Fitted
    crossing_us: float
    crossings: tuple[tuple[int, float, float], ...]
    times: tuple[Prediction, ...]
    power: tuple[Prediction, ...]
    ratios: tuple[tuple[str, str, float, float], ...]
    checks: tuple[Prediction, ...]
    applications: tuple[Application, ...]
    unused: tuple[UnusedRow, ...]


@dataclass(frozen=True)
class Error:
    """Published over predicted of a row whose model or device the fit did not see."""

    part: Part
    case: Case
    network: NetworkClass
    fitted: bool
    ratio: float


def errors_of(
    times: Sequence[Prediction], checks: Sequence[Prediction], power: Sequence[Prediction]
) -> tuple[Error, ...]:
    """Return the errors of held-out rows; powers are few, and are those of the fit.

    Devices that are not in the fit: the rows that it has not seen, of two boards. No board has a
    generation of the DLA without rows: a DLA's device is always fitted.
    """
    fitted_devices = {row.case.device for row in times if row.case.engine == "gpu"}
    held_out = [
        (row, True, row.without_model)
        for row in times
        if row.case.engine in ERRORS_OF and row.without_model is not None
    ]
    held_out += [
        (row, row.case.engine != "gpu" or row.case.device in fitted_devices, row.predicted)
        for row in checks
    ]
    errors = [
        Error(ERRORS_OF[row.case.engine], row.case, row.network, fitted, row.case.value / value)
        for row, fitted, value in held_out
    ]
    errors += [Error("power", p.case, p.network, True, 1 / p.ratio) for p in power]
    return tuple(errors)


def error_rows(errors: Sequence[Error]) -> tuple[ErrorRow, ...]:
    """Return the bounds of every group of enough rows."""
    groups: dict[tuple[Part, Precision | None, NetworkClass | None, bool | None], list[float]]
    groups = defaultdict(list)
    for error in errors:
        precision, fitted = error.case.precision, error.fitted if error.part == "gpu" else None
        keys = {
            (error.part, None, None, None),
            (error.part, None, None, fitted),
            (error.part, precision, None, fitted),
            (error.part, precision, error.network, fitted),
        }
        for key in keys:
            groups[key].append(error.ratio)
    rows = []
    for (part, precision, network, fitted), ratios in sorted(groups.items(), key=str):
        if len(ratios) >= FEWEST:
            low, high = (float(q) for q in np.quantile(ratios, (TAIL, 1 - TAIL)))
            rows.append(
                ErrorRow(
                    part=part,
                    precision=precision,
                    network=network,
                    fitted=fitted,
                    rows=len(ratios),
                    low=round(low, 3),
                    high=round(high, 3),
                )
            )
    return tuple(rows)


def within(error: Error, rows: Sequence[ErrorRow]) -> bool:
    """Return True if a row is within the interval of its prediction."""
    spread = spread_of(rows, error.part, error.case.precision, error.network, fitted=error.fitted)
    return spread.low <= error.ratio <= spread.high


def without_model(errors: Sequence[Error]) -> Iterator[tuple[Error, tuple[ErrorRow, ...]]]:
    """Yield each error with the bounds of the rows of all other models."""
    models = {error: error.case.network.partition(":")[0] for error in errors}
    for model in sorted(set(models.values())):
        rows = error_rows([error for error in errors if models[error] != model])
        yield from ((error, rows) for error in errors if models[error] == model)


def read_fit(path: Path = PREDICTED) -> Everything:
    """Return the result that `write_fit` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Everything)


def write_fit(fit_run: Everything, path: Path = PREDICTED) -> None:
    """Write a result, a prediction a line."""
    encoded = msgspec.json.encode(fit_run, enc_hook=float)  # NumPy's numbers, too
    path.write_bytes(encoded.replace(b'{"case":', b'\n{"case":') + b"\n")
