"""Network outputs become detections or class scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.errors import PipelineError
from pipelines.config import Classification, DecodeConfig, LtrbGrid, PreprocessConfig
from pipelines.results import ClassScores, Decoded, Detections
from pipelines.stages.nms import suppress
from pipelines.stages.preprocess import Geometry

CANDIDATES = 512  # the best of these go to NMS; it costs 0.1 ms at that number

Outputs = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class View:
    """How a frame was put into the network: what decoding needs to go back to frame pixels."""

    geometry: Geometry
    frame_width: int
    frame_height: int
    input_width: int
    input_height: int


def view_of(geometry: Geometry, frame_shape: Sequence[int], preprocess: PreprocessConfig) -> View:
    """Return the view for a frame of shape [H, W, ...] that was preprocessed so."""
    return View(geometry, frame_shape[1], frame_shape[0], preprocess.width, preprocess.height)


def decode(outputs: Outputs, config: DecodeConfig, view: View) -> Decoded:
    """Return what the outputs of one inference say about the frame."""
    return DECODERS[type(config)](outputs, config, view)


def _decode_ltrb_grid(outputs: Outputs, config: LtrbGrid, view: View) -> Detections:
    scores = _output(outputs, config.scores)[0]  # [C, A]
    distances = _output(outputs, config.boxes)[0]  # [4, A]
    centers, strides = _cells(config.strides, view.input_width, view.input_height)
    best = scores.max(axis=0)
    keep = np.flatnonzero(best >= config.score_threshold)  # false for NaN: those cells are dropped
    if len(keep) > CANDIDATES:
        keep = keep[np.argpartition(best[keep], -CANDIDATES)[-CANDIDATES:]]
    class_ids = scores[:, keep].argmax(axis=0)
    sides = distances[:, keep].T * strides[keep, None]
    center = centers[keep]
    boxes = np.concatenate([center - sides[:, :2], center + sides[:, 2:]], axis=1)
    boxes = view.geometry.to_frame(boxes.astype(np.float32, copy=False))
    size = np.array([view.frame_width, view.frame_height] * 2, np.float32)
    boxes = np.clip(boxes, np.float32(0.0), size)
    solid = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)  # inverted, empty and NaN boxes go
    boxes, class_ids, chosen = boxes[solid], class_ids[solid], best[keep][solid]
    kept = suppress(boxes, chosen, class_ids, config.iou_threshold, config.max_detections)
    return Detections(boxes[kept], chosen[kept].astype(np.float32), class_ids[kept])


def _decode_classification(outputs: Outputs, config: Classification, view: View) -> ClassScores:
    scores = _output(outputs, config.scores).reshape(-1).astype(np.float64)
    if config.softmax:
        powers = np.exp(scores - scores.max())
        scores = powers / powers.sum()
    order = np.argsort(-scores, kind="stable")[: config.top]
    return ClassScores(scores[order].astype(np.float32), order.astype(np.int64))


def _output(outputs: Outputs, name: str) -> NDArray[Any]:
    if name not in outputs:
        raise PipelineError(
            f"the engine has no output {name!r} (it has {', '.join(outputs)}): correct the name in"
            " [decode] of pipeline.toml."
        )
    return outputs[name]


@lru_cache(maxsize=8)
def _cells(
    strides: tuple[int, ...], width: int, height: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the centres [A, 2] and strides [A] of all cells, level by level, row by row."""
    centers, sizes = [], []
    for stride in strides:
        rows, columns = np.mgrid[0 : -(-height // stride), 0 : -(-width // stride)]
        level = (np.stack([columns, rows], axis=-1).reshape(-1, 2) + 0.5) * stride
        centers.append(level.astype(np.float32))
        sizes.append(np.full(len(level), stride, np.float32))
    return np.concatenate(centers), np.concatenate(sizes)


DECODERS: dict[type[DecodeConfig], Callable[[Outputs, Any, View], Decoded]] = {
    LtrbGrid: _decode_ltrb_grid,
    Classification: _decode_classification,
}
