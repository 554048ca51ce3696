"""What the whole frame shows: its classes, or a map of the class of each point (segmentation) or of
its depth.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import Classification, Depth, Segmentation
from pipelines.results import ClassScores, DepthMap, Region, SegmentationMap
from pipelines.stages.decoders.candidates import Outputs, output_of
from pipelines.stages.decoders.expected import (
    CLASSES,
    INTEGERS,
    MAP_HEIGHT,
    MAP_WIDTH,
    Axis,
    Expected,
)
from pipelines.stages.view import View, input_area, region_of


def segmentation_outputs(
    config: Segmentation, preprocess: PreprocessConfig
) -> tuple[Expected, ...]:
    """Return the output of `segmentation`."""
    if config.values == "classes":
        axes: tuple[Axis, ...] = (1, MAP_HEIGHT, MAP_WIDTH)
        return (Expected("output", config.output, axes, INTEGERS),)
    channels = 1 if config.values == "binary" else CLASSES
    axes = (1, channels, MAP_HEIGHT, MAP_WIDTH)
    if config.layout == "nhwc":
        axes = (1, MAP_HEIGHT, MAP_WIDTH, channels)
    return (Expected("output", config.output, axes),)


def depth_outputs(config: Depth, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the output of `depth`."""
    axes = (1, 1, MAP_HEIGHT, MAP_WIDTH)
    return (Expected("output", config.output, axes, leading_one=True),)


def decode_segmentation(outputs: Outputs, config: Segmentation, view: View) -> SegmentationMap:
    """Return the class of each point of the frame."""
    values = output_of(outputs, config.output)[0]
    if config.values == "classes":
        classes, region = _shown(values, view)
        return SegmentationMap(classes, region)
    if config.layout == "nhwc":
        values = values.transpose(2, 0, 1)
    if config.values == "binary":
        classes, region = _shown(values[0] > config.threshold, view)
        return SegmentationMap(classes.astype(np.uint8), region)
    planes, region = _shown(values, view)
    enlarge = (view.input_width / values.shape[2], view.input_height / values.shape[1])
    if not config.full_size or enlarge == (1.0, 1.0):
        return SegmentationMap(planes.argmax(axis=0).astype(_type_of(planes)), region)
    return SegmentationMap(_best_enlarged(planes, enlarge), region)


def decode_depth(outputs: Outputs, config: Depth, view: View) -> DepthMap:
    """Return the depth of each point of the frame; what is no number becomes 0."""
    values = output_of(outputs, config.output)
    depth, region = _shown(values.reshape(values.shape[-2:]), view)
    finite = np.nan_to_num(depth.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    return DepthMap(finite, region, config.metric)


def _best_enlarged(planes: NDArray[Any], factors: tuple[float, float]) -> NDArray[Any]:
    """Return the best class of each point once the scores are enlarged, one plane at a time."""
    from pipelines.vision import cv2

    size = (round(planes.shape[2] * factors[0]), round(planes.shape[1] * factors[1]))
    best: NDArray[Any] | None = None
    classes = np.zeros(size[::-1], _type_of(planes))
    for number, plane in enumerate(planes):
        large = cv2.resize(np.ascontiguousarray(plane), size, interpolation=cv2.INTER_LINEAR)
        if best is None:
            best = np.array(large)
            continue
        np.copyto(classes, number, where=large > best, casting="unsafe")
        np.maximum(best, large, out=best)
    return classes


def _type_of(planes: NDArray[Any]) -> type[np.unsignedinteger[Any]]:
    """Return the smallest integers that hold the numbers of all planes."""
    return np.uint8 if len(planes) <= 256 else np.uint16


def _shown(values: NDArray[Any], view: View) -> tuple[NDArray[Any], Region]:
    """Return the part of maps [..., h, w] that shows the frame, without padding, and its region."""
    height, width = values.shape[-2:]
    cell_x, cell_y = view.input_width / width, view.input_height / height
    x1, y1, x2, y2 = input_area(view)
    left, right = _cells(x1 / cell_x, x2 / cell_x, width)
    top, bottom = _cells(y1 / cell_y, y2 / cell_y, height)
    area = (left * cell_x, top * cell_y, right * cell_x, bottom * cell_y)
    return values[..., top:bottom, left:right], region_of(view, area)


def _cells(start: float, end: float, count: int) -> tuple[int, int]:
    """Return the whole cells nearest to an interval, at least one."""
    first = min(max(round(start), 0), count - 1)
    return first, min(max(round(end), first + 1), count)


def classification_outputs(
    config: Classification, preprocess: PreprocessConfig
) -> tuple[Expected, ...]:
    """Return the output of `classification`."""
    return (Expected("scores", config.scores, (1, CLASSES), more_ones=True),)


def decode_classification(outputs: Outputs, config: Classification, view: View) -> ClassScores:
    """Return the best classes; those whose score is no number go."""
    scores = output_of(outputs, config.scores).reshape(-1).astype(np.float64)
    if config.softmax:
        powers = np.exp(scores - scores.max())
        scores = powers / powers.sum()
    order = np.argsort(-scores, kind="stable")[: config.top]  # NaN is last
    order = order[np.isfinite(scores[order])]
    return ClassScores(scores[order].astype(np.float32), order.astype(np.int64))
