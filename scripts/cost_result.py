"""The result of a fit of the cost model, and the file that keeps it."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

import configs
from scripts.cost_fit import DlaFit, Fitted
from scripts.cost_rows import Case, UnusedRow
from toolkit.partition.costs.energy import EnergyParameters
from toolkit.partition.costs.gpu import GpuParameters, TimeShares

PREDICTED = configs.ROOT / "predicted_figures.json"


@dataclass(frozen=True)
class Prediction:
    """A row and its prediction; `without_*`: fitted without its device or model.

    `shares`: of a row of the GPU.
    """

    case: Case
    predicted: float
    without_device: float | None = None
    without_model: float | None = None
    shares: TimeShares | None = None

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


def read_fit(path: Path = PREDICTED) -> Everything:
    """Return the result that `write_fit` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Everything)


def write_fit(fit_run: Everything, path: Path = PREDICTED) -> None:
    """Write a result, a prediction a line."""
    encoded = msgspec.json.encode(fit_run, enc_hook=float)  # NumPy's numbers, too
    path.write_bytes(encoded.replace(b'{"case":', b'\n{"case":') + b"\n")
