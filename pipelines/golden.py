"""Golden inputs by task: whether a release still sees on this board what it saw on the host.

`python -m pipelines.golden FOLDER` runs the golden inputs of an unpacked bundle, decodes what was
recorded and what the engines give here, and counts what agrees: objects that overlap with the same
class, the best class, points of maps, lines of text. Beside that every output must be near enough
to what was recorded, in dB. It prints a `TaskResult` as one line.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from device import error_figures
from device.errors import BundleError, TandemError
from device.runtime.golden import GoldenRun, garbage_in, run_golden
from device.runtime.session import open_session
from device.update.bundle import PIPELINE, BundleModel, GoldenLimit, read_folder_info
from pipelines.config import load_pipeline
from pipelines.model_config import PipelineModel
from pipelines.results import ClassScores, DepthMap, Detections, SegmentationMap, Texts
from pipelines.shadow.agreement import Agreement
from pipelines.stages.decode import decode
from pipelines.stages.view import Geometry, View

Outputs = Mapping[str, NDArray[Any]]
MAX_SQNR_DB = 200.0  # of outputs that are equal
# What is counted of each kind of result.
TASKS: Mapping[type, str] = {
    Detections: "objects",
    ClassScores: "best classes",
    SegmentationMap: "points",
    DepthMap: "depths",
    Texts: "lines",
}


@dataclass(frozen=True, slots=True)
class Compared:
    """What was counted of one model, the share that agrees, and its noisiest output."""

    task: str
    agreement: float
    sqnr_db: float
    noisiest: str


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `device.agent.golden_check.Result` reads. `worst`, `task`, `agreement` and
    `min_agreement` are of the model that agrees least for its limit, `noisiest`, `sqnr_db` and
    `min_sqnr_db` of the output that is noisiest for its own. `garbage`: what shows that a model
    gives no results at all; the other figures are of this model then."""

    samples: int
    agreement: float
    worst: str
    latency_p95_ms: float
    task: str
    min_agreement: float
    sqnr_db: float
    min_sqnr_db: float
    noisiest: str
    garbage: str = ""


def compare_outputs(
    model: PipelineModel, recorded: Sequence[Outputs], actual: Sequence[Outputs]
) -> Compared:
    """Compare the outputs of samples, by their names, as the model's own task."""
    size = model.feeding
    view = View(Geometry(1.0, 1.0), size.width, size.height, size.width, size.height)
    counted, task = Agreement(), ""
    for before, after in zip(recorded, actual, strict=True):
        old, new = (decode(outputs, model.reading, view) for outputs in (before, after))
        counted, task = counted.compared(old, new), TASKS[type(old)]
    ratios = {
        name: sqnr_db([row[name] for row in recorded], [row[name] for row in actual])
        for name in recorded[0]
    }
    noisiest = min(ratios, key=lambda name: ratios[name])
    return Compared(task, counted.share, ratios[noisiest], noisiest)


def sqnr_db(recorded: Sequence[NDArray[Any]], actual: Sequence[NDArray[Any]]) -> float:
    """Return 10 log10 of the power of what was recorded over that of its difference from `actual`.

    It is between -MAX_SQNR_DB and MAX_SQNR_DB. Values that are not finite must be equal.
    """
    signal = noise = 0.0
    for known, value in zip(recorded, actual, strict=True):
        if known.shape != value.shape:
            return -MAX_SQNR_DB
        first, second = known.astype(np.float64), value.astype(np.float64)
        finite = np.isfinite(first) & np.isfinite(second)
        if not np.array_equal(first[~finite], second[~finite], equal_nan=True):
            return -MAX_SQNR_DB
        with np.errstate(over="ignore"):  # it becomes inf, which is the answer
            signal += float(np.sum(first[finite] ** 2))
            noise += float(np.sum((second[finite] - first[finite]) ** 2))
    return max(-MAX_SQNR_DB, min(MAX_SQNR_DB, error_figures.sqnr_db(signal, noise)))


def check_folder(
    folder: Path, plans: Path | None = None, min_agreement: float | None = None
) -> TaskResult:
    """Run the golden inputs of an unpacked bundle whose limits are known.

    `min_agreement`: of every model, in place of its own. Raises TandemError.
    """
    info = read_folder_info(folder)
    if info.golden is None or not info.golden.limits:
        raise BundleError(f"{folder} has no golden inputs with limits: pack it with --golden")
    config = load_pipeline(folder / PIPELINE)
    networks = {network.name: network for network in config.networks}
    compared: dict[str, tuple[Compared, GoldenLimit]] = {}
    samples, latency_p95_ms = 0, 0.0
    for run in info.runs:
        model = networks.get(run.name) if run.name else config.first
        if model is None:
            raise BundleError(f"{folder} has a model {run.name!r}, which {PIPELINE} does not name")
        ran = _run(folder, run, plans)
        garbage = garbage_in(ran.recorded, ran.actual)
        if garbage:
            return _no_results(run.name, garbage, ran)
        limit = info.golden.limits[run.name]
        if min_agreement is not None:
            limit = msgspec.structs.replace(limit, min_agreement=min_agreement)
        compared[run.name] = compare_outputs(model, ran.recorded, ran.actual), limit
        samples += len(ran.recorded)
        latency_p95_ms = max(latency_p95_ms, ran.latency_p95_ms)
    return worst_for_limits(compared, samples, latency_p95_ms)


def _no_results(name: str, garbage: str, ran: GoldenRun) -> TaskResult:
    """Return what is said of outputs that no decoder should see."""
    return TaskResult(
        samples=len(ran.recorded),
        agreement=0.0,
        worst=name,
        latency_p95_ms=ran.latency_p95_ms,
        task="values",
        min_agreement=1.0,
        sqnr_db=-MAX_SQNR_DB,
        min_sqnr_db=MAX_SQNR_DB,
        noisiest=name,
        garbage=f"{name}: {garbage}" if name else garbage,
    )


def _run(folder: Path, run: BundleModel, plans: Path | None) -> GoldenRun:
    """Run the golden inputs of one model; of several its name begins what goes wrong."""
    try:
        with open_session(folder / run.engine, plans=plans) as session:
            return run_golden(session, folder / run.golden)
    except TandemError as error:
        if not run.name:
            raise
        raise BundleError(f"{run.name}: {error}") from error


def worst_for_limits(
    compared: Mapping[str, tuple[Compared, GoldenLimit]], samples: int, latency_p95_ms: float
) -> TaskResult:
    """Return what models have measured together: of each limit that which is nearest to it, or
    farthest beyond."""
    name, (least, its_limit) = min(
        compared.items(), key=lambda row: row[1][0].agreement - row[1][1].min_agreement
    )
    noisy_name, (noisy, noisy_limit) = min(
        compared.items(), key=lambda row: row[1][0].sqnr_db - row[1][1].min_sqnr_db
    )
    return TaskResult(
        samples=samples,
        agreement=least.agreement,
        worst=name or least.noisiest,
        latency_p95_ms=latency_p95_ms,
        task=least.task,
        min_agreement=its_limit.min_agreement,
        sqnr_db=noisy.sqnr_db,
        min_sqnr_db=noisy_limit.min_sqnr_db,
        noisiest=f"{noisy_name}: {noisy.noisiest}" if noisy_name else noisy.noisiest,
    )


def main() -> int:
    """Check one bundle; the exit status is 1 if that is not possible."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.golden")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plans", type=Path)
    parser.add_argument("--min-agreement", type=float)
    arguments = parser.parse_args()
    try:
        result = check_folder(arguments.folder, arguments.plans, arguments.min_agreement)
    except TandemError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
