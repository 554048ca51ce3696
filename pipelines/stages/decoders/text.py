"""Text: where it is (DB, a map of probabilities) and what it says (CTC). PP-OCR."""

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
    grow by area * unclip / perimeter on every side.
    """
    probabilities = output_of(outputs, config.output)[0, 0]
    height, width = probabilities.shape
    cell = [view.input_width / width, view.input_height / height]
    rectangles, scores = _regions(probabilities, config)
    if rectangles.size:
        grown = rectangles[:, 2:4].prod(axis=1) * config.unclip
        grown /= 2.0 * rectangles[:, 2:4].sum(axis=1)
        rectangles[:, 2:4] += 2.0 * grown[:, None]
    rectangles[:, :4] *= np.array(cell * 2)
    return rotated_detections(
        rectangles,
        scores,
        np.zeros(len(scores), np.int64),
        view,
        max_detections=config.max_detections,
        iou_threshold=None,
    )[0]


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
    for contour in contours:
        (x, y), (width, height), degrees = cv2.minAreaRect(contour)
        if min(width, height) < MIN_SIDE:
            continue
        left, top, columns, rows = cv2.boundingRect(contour)
        inside = np.zeros((rows, columns), np.uint8)
        cv2.drawContours(inside, [contour], -1, 1, cv2.FILLED, offset=(-left, -top))
        part = probabilities[top : top + rows, left : left + columns]
        score = float(part[inside.astype(bool)].mean())
        if config.score_threshold <= score < np.inf:
            rectangles.append([x + 0.5, y + 0.5, width + 1.0, height + 1.0, np.radians(degrees)])
            scores.append(score)
    return np.array(rectangles, np.float64).reshape(-1, 5), np.array(scores, np.float32)
