"""Text: where it is (DB, a map of probabilities) and what it says (CTC). PP-OCR."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import TextDetection, TextRecognition
from pipelines.results import SPACE, Detections, Texts
from pipelines.stages.decoders.candidates import Outputs, output_of
from pipelines.stages.decoders.expected import CLASSES, MAP_HEIGHT, MAP_WIDTH, Expected, Size
from pipelines.stages.decoders.rotated import rotated_detections
from pipelines.stages.view import View

BLANK = 0
MIN_SIDE = 3.0  # cells; what is thinner is noise
MIN_GROWN_SIDE = 5.0
MAX_REGIONS = 1000


def text_detection_outputs(
    config: TextDetection, preprocess: PreprocessConfig
) -> tuple[Expected, ...]:
    """Return the output of `text_detection`."""
    return (Expected("output", config.output, (1, 1, MAP_HEIGHT, MAP_WIDTH)),)


def text_recognition_outputs(
    config: TextRecognition, preprocess: PreprocessConfig
) -> tuple[Expected, ...]:
    """Return the output of `text_recognition`."""
    classes = Size((CLASSES,), plus=1 + int(config.space))
    return (Expected("output", config.output, (1, "steps", classes)),)


def decode_text_detection(outputs: Outputs, config: TextDetection, view: View) -> Detections:
    """Return a rotated box around each line of text.

    Regions above the threshold shrink text to its core (DB, arXiv 1911.08947): their rectangles
    grow by area * unclip / perimeter on every side. Sizes, scores and limits are PaddleOCR's.
    """
    probabilities = output_of(outputs, config.output)[0, 0]
    height, width = probabilities.shape
    cell = [view.input_width / width, view.input_height / height]
    rectangles, scores = _regions(probabilities, config)
    if rectangles.size:
        grown = rectangles[:, 2:4].prod(axis=1) * config.unclip
        grown /= 2.0 * rectangles[:, 2:4].sum(axis=1)
        rectangles[:, 2:4] += 2.0 * grown[:, None]
        large = rectangles[:, 2:4].min(axis=1) >= MIN_GROWN_SIDE
        rectangles, scores = rectangles[large], scores[large]
    rectangles[:, :4] *= np.array(cell * 2)
    return rotated_detections(rectangles, scores, np.zeros(len(scores), np.int64), config, view)[0]


def decode_text_recognition(outputs: Outputs, config: TextRecognition, view: View) -> Texts:
    """Return the line that was read: the best class of each step, without repeats and blanks."""
    steps = output_of(outputs, config.output)[0]  # [T, classes]
    best = steps.argmax(axis=1)
    new = np.concatenate([[True], best[1:] != best[:-1]]) & (best != BLANK)
    characters = best[new] - 1
    if config.space:
        characters[characters == steps.shape[1] - 2] = SPACE
    score = float(steps[new].max(axis=1).mean()) if new.any() else 0.0
    if not config.score_threshold <= score < np.inf or not len(characters):
        return Texts((), np.zeros(0, np.float32))
    return Texts((tuple(characters.tolist()),), np.array([score], np.float32))


def _regions(
    probabilities: NDArray[np.float32], config: TextDetection
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Return rectangles [N, 5] in cells around regions of text, and their mean probabilities."""
    from pipelines.vision import cv2

    core = (probabilities > config.threshold).astype(np.uint8)
    contours, _ = cv2.findContours(core, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    rectangles, scores = [], []
    for contour in contours[:MAX_REGIONS]:
        rectangle = cv2.minAreaRect(contour)
        (x, y), (width, height), degrees = rectangle
        if min(width, height) < MIN_SIDE:
            continue
        score = _mean_inside(probabilities, cv2.boxPoints(rectangle))
        if config.score_threshold <= score < np.inf:
            rectangles.append([x, y, width, height, np.radians(degrees)])
            scores.append(score)
    return np.array(rectangles, np.float64).reshape(-1, 5), np.array(scores, np.float32)


def _mean_inside(probabilities: NDArray[np.float32], corners: NDArray[Any]) -> float:
    """Return the mean of a map [h, w] inside a quadrangle [4, 2], its outline included."""
    from pipelines.vision import cv2

    last = np.array(probabilities.shape[::-1]) - 1
    left, top = np.clip(np.floor(corners.min(axis=0)), 0, last).astype(int).tolist()
    right, bottom = np.clip(np.ceil(corners.max(axis=0)), 0, last).astype(int).tolist()
    inside = np.zeros((bottom - top + 1, right - left + 1), np.uint8)
    cv2.fillPoly(inside, [(corners - [left, top]).astype(np.int32)], 1)
    part = np.ascontiguousarray(probabilities[top : bottom + 1, left : right + 1])
    return float(cv2.mean(part, inside)[0])
