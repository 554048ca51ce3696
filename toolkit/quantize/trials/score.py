"""mAP50 on the held-out scenes, the engine's and the plain model's."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pipelines.config import ModelConfig
from pipelines.decode_config import Scored
from pipelines.results import Detections
from pipelines.stages.accuracy import Accuracy, Truth, mean_average_precision
from pipelines.stages.decode import decode, view_of
from pipelines.stages.preprocess import preprocess
from pipelines.vision import cv2
from toolkit.errors import BuildError
from toolkit.importers.formats import format_of
from toolkit.importers.onnx import onnx_bytes
from toolkit.shipped import demo_file

Infer = Callable[[NDArray[np.float32]], Mapping[str, NDArray[Any]]]

# Average precision integrates over all scores, so low scores are kept.
SCORE_THRESHOLD = 0.01
MAX_DETECTIONS = 300


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Images, BGR uint8, with their ground truth."""

    pictures: tuple[NDArray[np.uint8], ...]
    truths: tuple[Truth, ...]


def load_held_out(labels: tuple[str, ...]) -> HeldOut:
    """Read the scenes that ship with Tandem; class ids are indices into `labels`."""
    truth = demo_file("scenes/heldout.json")
    folder = truth.parent
    entries = json.loads(truth.read_text())["pictures"]
    pictures, truths = [], []
    for entry in entries:
        picture = cv2.imread(str(folder / entry["file"]), cv2.IMREAD_COLOR)
        if picture is None:
            raise BuildError(f"{folder / entry['file']} cannot be read; install Tandem again.")
        unknown = {item["label"] for item in entry["boxes"]} - set(labels)
        if unknown:
            raise BuildError(
                f"The held-out scenes show {', '.join(sorted(unknown))}, which the model's labels "
                f"({', '.join(labels)}) lack; the demo scores models of the shipped classes only."
            )
        pictures.append(np.asarray(picture, np.uint8))
        boxes = np.array([item["box"] for item in entry["boxes"]], np.float32).reshape(-1, 4)
        ids = np.array([labels.index(item["label"]) for item in entry["boxes"]], np.int64)
        truths.append(Truth(boxes, ids))
    return HeldOut(tuple(pictures), tuple(truths))


def score(
    infer: Infer, model: ModelConfig, held_out: HeldOut, on_progress: Callable[[float], None]
) -> Accuracy:
    """Return mAP50 of `infer` (network input -> outputs by name) over the held-out scenes."""
    if not isinstance(model.decode, Scored):
        raise BuildError(
            f"{model.name} gives no boxes; the demo scores detectors: give a detector's model.toml."
        )
    settings = replace(model.decode, score_threshold=SCORE_THRESHOLD, max_detections=MAX_DETECTIONS)
    predictions = []
    for number, picture in enumerate(held_out.pictures):
        blob, geometry = preprocess(picture, model.preprocess)
        view = view_of(geometry, picture.shape, model.preprocess)
        detections = decode(infer(blob), settings, view)
        assert isinstance(detections, Detections)  # the settings are a detector's
        predictions.append(detections)
        on_progress((number + 1) / len(held_out.pictures))
    return mean_average_precision(predictions, held_out.truths)


def plain_model(path: Path) -> Infer:
    """The FP32 model itself in onnxruntime, without any of Tandem's steps."""
    import onnxruntime as ort

    is_onnx = format_of(path) is None  # whose weights may be in a file beside it
    session = ort.InferenceSession(
        str(path) if is_onnx else onnx_bytes(path), providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    image = session.get_inputs()[0].name

    def infer(blob: NDArray[np.float32]) -> Mapping[str, NDArray[Any]]:
        return dict(zip(names, session.run(names, {image: blob}), strict=True))

    return infer
