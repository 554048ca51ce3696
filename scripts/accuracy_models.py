"""What INT8 costs public models with trained weights, by every calibration method.

    python tests/fixtures/foreign_models.py
    python scripts/accuracy_models.py [MODEL...] [--methods minmax,auto] [--pictures FOLDER...]
    python scripts/accuracy_models.py lraspp.onnx --profile orin-nx-16gb

The models are those of `tests/fixtures/foreign_models.py`, `configs/models/robot-objects.onnx`, and
files of `scripts/export_models.py`. An input
that is a picture gets crops of the pictures in the folders, scaled to the range of the input;
others get draws from that range. Ranges come from `--samples` of them, and INT8 is judged on
`--judges` others, which no range has seen, by the metrics of `toolkit.quantize.loss.metrics`. All
activations that Tandem quantizes on a CPU are INT8; no shared scales of a DLA. With `--profile` an
engine is built instead and run here, with the placement and the shared scales of that board.

Rows appear as they are measured; `--append FILE` keeps them as JSON lines, and `--table FILE`
prints the table of such a file.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))

from foreign_models import BY_NAME, Input

import configs
from device.errors import TandemError
from device.session import open_session
from pipelines.vision import cv2
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.loss.judge import Judgement, judge
from toolkit.quantize.loss.metrics import SQNR
from toolkit.quantize.loss.parts import split_outputs
from toolkit.quantize.ranges.measure import RangeOptions, measure_ranges
from toolkit.quantize.trials.trial import TrialModel

METHODS = ("minmax", "percentile", "mse", "entropy", "auto")
OWN = "robot-objects"
NORMALIZED = (-2.1, 2.6)  # pixels by ImageNet's mean and deviation, as of export_models.py
SCENES = (configs.ROOT / "scenes" / "calibration", configs.ROOT / "scenes" / "heldout")
SMALLEST_CROP = 0.4  # of the shorter side
SEED = 20

Sample = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with its inputs."""

    name: str
    path: Path
    inputs: tuple[Input, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A model by a method. `sqnr_db`: of the worst output; `task`: metric -> value of the worst.

    `beyond`: the metrics beyond their limits. `kept`: share of the multiplications in floating
    point. `error`: why there are no figures.
    """

    model: str
    method: str
    sqnr_db: float = 0.0
    task: tuple[tuple[str, float], ...] = ()
    beyond: tuple[str, ...] = ()
    cpu_s: float = 0.0
    kept: float = 0.0
    error: str = ""


def main() -> None:
    """Measure, and print the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="[default: all]")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--pictures", type=Path, nargs="*", default=list(SCENES))
    parser.add_argument("--profile", help="judge an engine for this board")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--judges", type=int, default=8)
    parser.add_argument("--append", type=Path, help="JSON lines, one for each row")
    parser.add_argument("--table", type=Path, help="print the table of --append and end")
    arguments = parser.parse_args()
    if arguments.table is not None:
        rows = [Row(**json.loads(line)) for line in arguments.table.read_text().splitlines()]
        print("\n".join(table(rows)))
        return
    pictures = read_pictures(arguments.pictures)
    rows = []
    for subject in subjects(arguments.models):
        samples = draw(subject.inputs, pictures, arguments.samples + arguments.judges)
        calibration, judges = samples[: arguments.samples], samples[arguments.samples :]
        methods = arguments.methods.split(",")
        if arguments.profile is None:
            rows_of = measure(subject, methods, calibration, judges)
        else:
            rows_of = measure_engines(subject, arguments.profile, methods, calibration, judges)
        for row in rows_of:
            rows.append(row)
            print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
            if arguments.append is not None:
                with arguments.append.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    print("\n".join(table(rows)))


def subjects(names: Sequence[str]) -> Iterator[Subject]:
    """The named models, or all."""
    for name in names or (OWN, *BY_NAME):
        if name == OWN:
            path = configs.ROOT / "models" / f"{OWN}.onnx"
            shape = import_model(path).model.graph.inputs[0].shape
            size = tuple(int(dim) for dim in shape or () if isinstance(dim, int))
            yield Subject(OWN, path, (Input("images", size, 0, 1),))
        elif name.endswith(".onnx"):
            yield Subject(Path(name).stem, Path(name), _exported_inputs(Path(name)))
        elif name not in BY_NAME:
            sys.exit(f"there is no model {name}: take one of {', '.join((OWN, *BY_NAME))}")
        else:
            model = BY_NAME[name]
            path = model.folder / model.path
            if not path.exists():
                sys.exit(f"{path} is missing: run `python tests/fixtures/foreign_models.py`")
            yield Subject(name, path, model.inputs)


def _exported_inputs(path: Path) -> tuple[Input, ...]:
    """The inputs of a file of `scripts/export_models.py`: normalised pictures."""
    inputs = import_model(path).model.graph.inputs
    sizes = [
        tuple(int(dim) for dim in value.shape or () if isinstance(dim, int)) for value in inputs
    ]
    return tuple(
        Input(str(value.name), size, *NORMALIZED) for value, size in zip(inputs, sizes, strict=True)
    )


def read_pictures(folders: Sequence[Path]) -> list[NDArray[np.uint8]]:
    """The pictures of all folders, RGB uint8 [H, W, 3]."""
    files = sorted(file for folder in folders for file in folder.glob("*.*"))
    pictures = [cv2.imread(str(file), cv2.IMREAD_COLOR) for file in files]
    rgb = [picture[:, :, ::-1] for picture in pictures if picture is not None]
    if not rgb:
        sys.exit(f"no picture in {', '.join(map(str, folders))}: name a folder with some")
    return rgb


def draw(
    inputs: Sequence[Input], pictures: Sequence[NDArray[np.uint8]], count: int, seed: int = SEED
) -> list[Sample]:
    """Make samples: crops of the pictures in turn, or draws where an input is no picture."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(pictures))
    samples = []
    for number in range(count):
        picture = pictures[order[number % len(order)]]
        samples.append({item.name: _input(item, picture, rng) for item in inputs})
    return samples


def _input(item: Input, picture: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[Any]:
    shape = item.shape
    if len(shape) != 4 or not {shape[1], shape[3]} & {1, 3}:
        return np.asarray(item.draw(rng))
    last = shape[3] in (1, 3)
    channels, height, width = (shape[3], *shape[1:3]) if last else shape[1:]
    crops = [_crop(picture, height, width, channels, rng) for _ in range(shape[0])]
    blob = np.stack(crops if last else [crop.transpose(2, 0, 1) for crop in crops])
    scaled = item.low + (item.high - item.low) * blob
    return np.ascontiguousarray(scaled, item.dtype)


def _crop(
    picture: NDArray[np.uint8], height: int, width: int, channels: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """A crop of the aspect ratio of the input, mirrored half of the time, 0 to 1."""
    share = rng.uniform(SMALLEST_CROP, 1.0)
    fit = min(picture.shape[0] / height, picture.shape[1] / width)
    rows, columns = max(1, int(share * fit * height)), max(1, int(share * fit * width))
    top = int(rng.integers(picture.shape[0] - rows + 1))
    left = int(rng.integers(picture.shape[1] - columns + 1))
    crop = picture[top : top + rows, left : left + columns]
    if rng.random() < 0.5:
        crop = crop[:, ::-1]
    resized = cv2.resize(np.ascontiguousarray(crop), (width, height), interpolation=cv2.INTER_AREA)
    array = np.asarray(resized, np.float64) / 255.0
    return array.mean(axis=2, keepdims=True) if channels == 1 else array


def measure(
    subject: Subject, methods: Sequence[str], calibration: list[Sample], judges: list[Sample]
) -> Iterator[Row]:
    """The rows of one model."""
    try:
        imported = import_model(
            subject.path, shapes={item.name: item.shape for item in subject.inputs}
        )
        graph, _ = run_passes(imported.model)
        feeds = {str(value.name) for value in graph.graph.inputs}
    except TandemError as err:
        yield Row(subject.name, "all", error=str(err))
        return
    plain = TrialModel(graph)
    fed, unseen = ([_only(sample, feeds) for sample in part] for part in (calibration, judges))
    with tempfile.TemporaryDirectory() as folder:
        for method in methods:
            # The state keeps what was observed for the next method.
            options = RangeOptions(method, resume=Path(folder, "observed.state"))
            start = time.process_time()
            try:
                ranges = measure_ranges(graph, fed, imported.sha256, options, _silent)
            except TandemError as err:
                yield Row(subject.name, method, error=str(err))
                continue
            cpu_s = time.process_time() - start
            exact = [_run(plain, {}, sample, frozenset(plain.nodes)) for sample in unseen]
            fit = ranges.fit
            actual = [_run(fit.trial, fit.ranges, sample, fit.keep_float) for sample in unseen]
            judgement = judge(plain.parts, exact, actual, basis="held out")
            float_share = 0.0 if ranges.float_nodes is None else ranges.float_nodes.float_share
            yield replace(_row(subject.name, method, judgement, cpu_s), kept=round(float_share, 3))


def measure_engines(
    subject: Subject,
    profile: str,
    methods: Sequence[str],
    calibration: list[Sample],
    judges: list[Sample],
) -> Iterator[Row]:
    """The rows of engines for a board, run on this machine."""
    title = f"{subject.name}, {profile}"
    shapes = {item.name: item.shape for item in subject.inputs}
    plain = TrialModel(run_passes(import_model(subject.path, shapes=shapes).model)[0])
    exact = [_run(plain, {}, sample, frozenset(plain.nodes)) for sample in judges]
    with tempfile.TemporaryDirectory() as folder:
        for method in methods:
            options = BuildOptions(
                data=calibration, shapes=shapes, ranges=RangeOptions(method), kernels=False,
                accept_loss=True,
            )  # fmt: skip
            start = time.process_time()
            try:
                result = build_engine(subject.path, profile, Path(folder, "m.engine"), options)
            except TandemError as err:
                yield Row(title, method, error=str(err))
                continue
            cpu_s = time.process_time() - start
            with open_session(result.path) as session:
                actual = [split_outputs(plain.parts, session.infer(sample)) for sample in judges]
            judgement = judge(plain.parts, exact, actual, basis="engine")
            floats = None if result.calibration is None else result.calibration.float_nodes
            share = 0.0 if floats is None else round(floats.float_share, 3)
            yield replace(_row(title, method, judgement, cpu_s), kept=share)


def _row(model: str, method: str, judgement: Judgement, cpu_s: float) -> Row:
    sqnr = [loss.value for loss in judgement.losses if loss.metric.unit == "dB"]
    worst: dict[str, float] = {}
    for loss in judgement.losses:
        if loss.metric.unit == "dB":
            continue
        choose = min if loss.metric.larger_is_better else max
        name = loss.metric.name
        worst[name] = choose(worst.get(name, loss.value), loss.value)
    beyond = tuple(dict.fromkeys(loss.metric.name for loss in judgement.broken))
    task = tuple((name, round(value, 4)) for name, value in worst.items())
    return Row(model, method, round(min(sqnr), 2), task, beyond, round(cpu_s, 1))


def _run(
    trial: TrialModel, ranges: Mapping[str, float], sample: Sample, keep_float: frozenset[str]
) -> Sample:
    """The outputs of a sample by part."""
    return split_outputs(trial.parts, trial(ranges, sample, keep_float))


def _only(sample: Sample, names: set[str]) -> Sample:
    """Passes remove inputs that nothing reads."""
    return {name: array for name, array in sample.items() if name in names}


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of a Markdown table: a row for each model, a column for each method."""
    methods = [method for method in METHODS if any(row.method == method for row in rows)]
    lines = [
        f"| model | judged by | {' | '.join(methods)} |",
        f"|---|---|{'--:|' * len(methods)}",
    ]
    for model in dict.fromkeys(row.model for row in rows):
        by_method = {row.method: row for row in rows if row.model == model}
        errors = {row.error for row in by_method.values() if row.error}
        if errors:
            lines.append(f"| {model} | not measured: {min(errors)[:90]} |{' |' * len(methods)}")
            continue
        figures = [_cell(by_method.get(method)) for method in methods]
        lines.append(f"| {model} | SQNR dB | {' | '.join(figures)} |")
        names = dict.fromkeys(name for row in by_method.values() for name, _ in row.task)
        for name in names:
            cells = [_cell(by_method.get(method), name) for method in methods]
            lines.append(f"| | {name} | {' | '.join(cells)} |")
        if any(row.kept for row in by_method.values()):
            shares = [by_method[method].kept if method in by_method else 0.0 for method in methods]
            cells = [f"{100 * share:.1f} %" if share else "-" for share in shares]
            lines.append(f"| | multiplications kept in float | {' | '.join(cells)} |")
    return lines


def _cell(row: Row | None, metric: str = "") -> str:
    if row is None:
        return "-"
    if not metric:
        return f"**{row.sqnr_db:.1f}**" if SQNR.name in row.beyond else f"{row.sqnr_db:.1f}"
    value = dict(row.task).get(metric)
    if value is None:
        return "-"
    return f"**{value:.3f}**" if metric in row.beyond else f"{value:.3f}"


def _silent(step: str, share: float) -> None:
    """Discard progress."""


if __name__ == "__main__":
    main()
