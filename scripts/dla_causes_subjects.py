"""The detectors of `scripts.dla_causes`, their data, and how many points a way to run them gets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from msgspec import structs
from numpy.typing import NDArray

import configs
from pipelines.config import load_labels, load_model
from pipelines.decode_config import LtrbGrid
from pipelines.stages.accuracy import mean_average_precision
from pipelines.stages.decode import decode, view_of
from pipelines.stages.preprocess import preprocess
from pipelines.vision import cv2
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.trials.score import HeldOut, load_held_out

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Infer = Callable[[Arrays], Arrays]
SUBJECTS = ("robot-objects", "nudenet-320n")
PICTURES = ("astronaut", "coffee", "chelsea", "camera")
SIDE = 320
LEAST_SCORE, IOU = 0.1, 0.5
STRICT = np.arange(0.5, 0.96, 0.05)  # the IoUs of COCO's mAP50-95


@dataclass(frozen=True)
class Subject:
    """A detector: its graph, the samples for ranges, and the points of a way to run it, 0..100."""

    graph: ir.Model
    data: tuple[dict[str, Array], ...]
    metric: str
    points: Callable[[Infer], float]


def open_subject(name: str, samples: int, judged: int, yolo: Path) -> Subject:
    """Return a row of SUBJECTS; `yolo` is the file of nudenet-320n."""
    return _robot(samples, judged) if name == "robot-objects" else _yolo(yolo, samples, judged)


def _robot(samples: int, judged: int) -> Subject:
    file = configs.ROOT / "models" / "robot-objects.toml"
    model = load_model(file)
    pictures = sorted((file.parent / model.calibration).glob("*.jpg"))[:samples]
    data = tuple(
        {"images": preprocess(cv2.imread(str(one)), model.preprocess)[0].copy()} for one in pictures
    )
    whole = load_held_out(load_labels(file.parent / model.labels))
    held_out = HeldOut(whole.pictures[:judged], whole.truths[:judged])

    assert isinstance(model.decode, LtrbGrid)
    settings = structs.replace(model.decode, score_threshold=0.01, max_detections=300)

    def points(infer: Infer) -> float:
        detections = []
        for picture in held_out.pictures:
            blob, geometry = preprocess(picture, model.preprocess)
            view = view_of(geometry, picture.shape, model.preprocess)
            detections.append(decode(infer({"images": blob}), settings, view))
        by_iou = [
            mean_average_precision(detections, held_out.truths, float(iou)).map50 for iou in STRICT
        ]
        return 100 * float(np.mean(by_iou))

    graph, _ = run_passes(import_model(file.parent / model.file).model)
    return Subject(graph, data, f"mAP50-95 on {len(held_out.pictures)} scenes", points)


def _yolo(path: Path, samples: int, judged: int) -> Subject:
    graph, _ = run_passes(import_model(path, shapes={"images": (1, 3, SIDE, SIDE)}).model)
    rng = np.random.default_rng(3)
    data, unseen = _crops(samples, rng), _crops(judged, rng)
    expected: list[Detections] = []

    def points(infer: Infer) -> float:
        detections = [_detections(infer(sample)["output0"]) for sample in unseen]
        if not expected:  # FP32 comes first
            expected.extend(detections)
        return 100 * _f1(expected, detections)

    return Subject(graph, data, f"F1 against FP32 on {judged} crops", points)


@dataclass(frozen=True)
class Detections:
    """Boxes as left, top, right, bottom, [n, 4], their scores and classes, best first."""

    boxes: Array
    scores: Array
    classes: Array


def _crops(count: int, rng: np.random.Generator) -> tuple[dict[str, Array], ...]:
    """Squares of 40 to 100 % of the photographs in turn, RGB [1, 3, 320, 320], 0 to 1."""
    folder = configs.ROOT / "scenes" / "backgrounds"
    pictures = [cv2.imread(str(folder / f"{name}.jpg"))[:, :, ::-1] for name in PICTURES]
    samples = []
    for number in range(count):
        picture = pictures[number % len(pictures)]
        side = int(rng.uniform(0.4, 1.0) * min(picture.shape[:2]))
        top, left = (int(rng.integers(length - side + 1)) for length in picture.shape[:2])
        crop = np.ascontiguousarray(picture[top : top + side, left : left + side])
        resized = cv2.resize(crop, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
        blob = resized.astype(np.float32).transpose(2, 0, 1)[None] / 255
        samples.append({"images": np.ascontiguousarray(blob)})
    return tuple(samples)


def _detections(output: Array) -> Detections:
    """Return what an output [1, 4 + classes, cells] of a YOLOv8 says, after suppression."""
    x, y, width, height = output[0, :4]
    scores, classes = output[0, 4:].max(axis=0), output[0, 4:].argmax(axis=0)
    order = [int(i) for i in np.argsort(-scores) if scores[i] >= LEAST_SCORE]
    boxes = np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=1)
    chosen: list[int] = []
    for i in order:
        if all(classes[i] != classes[j] or overlap(boxes[i], boxes[j]) < IOU for j in chosen):
            chosen.append(i)
    return Detections(boxes[chosen], scores[chosen], classes[chosen])


def overlap(one: Array, second: Array) -> float:
    """Return the intersection of two boxes over their union."""
    sides = np.minimum(one[2:], second[2:]) - np.maximum(one[:2], second[:2])
    common = float(np.prod(np.maximum(sides, 0)))
    areas = float(np.prod(one[2:] - one[:2]) + np.prod(second[2:] - second[:2]))
    return common / (areas - common) if areas > common else 0.0


def _f1(expected: Sequence[Detections], actual: Sequence[Detections]) -> float:
    """Return 2 matches / (expected + found); a match has the same class and an IoU of 0.5."""
    matches = total = 0
    for truth, seen in zip(expected, actual, strict=True):
        total += len(truth.scores) + len(seen.scores)
        free = set(range(len(truth.scores)))
        for box, kind in zip(seen.boxes, seen.classes, strict=True):
            near = [i for i in free if truth.classes[i] == kind]
            best = max(near, key=lambda i: overlap(truth.boxes[i], box), default=None)
            if best is not None and overlap(truth.boxes[best], box) >= IOU:
                free.discard(best)
                matches += 1
    return 2 * matches / total if total else 1.0
