"""How far what two releases say of one frame agrees: pure functions.

Each task counts what can agree: objects of detectors, the best class of classifiers, the points of
maps as one share a frame, the lines of readers. The shadow's agreement is the sum of what agrees
over the sum of what was counted, so that frames in which neither release sees anything prove
nothing for or against the new one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.runtime.golden import share_within
from pipelines.results import (
    ClassScores,
    Decoded,
    DepthMap,
    Detections,
    SegmentationMap,
    Texts,
)
from pipelines.stages.accuracy import iou_matrix

MIN_IOU = 0.5  # of two boxes of one class that are the same object
DEPTH_TOLERANCE = 0.02  # of the range of a depth map, as golden inputs have it


@dataclass(frozen=True, slots=True)
class Agreement:
    """The frames that were compared: `agreeing` of `counted` things agree."""

    frames: int = 0
    agreeing: float = 0.0
    counted: float = 0.0

    @property
    def share(self) -> float:
        """The share of what was counted that agrees; 1 if there was nothing."""
        return self.agreeing / self.counted if self.counted else 1.0

    def compared(self, old: Decoded, new: Decoded) -> "Agreement":
        """Return the value after one more frame, of whose results the tasks are the same."""
        agreeing, counted = compare(old, new)
        return Agreement(self.frames + 1, self.agreeing + agreeing, self.counted + counted)


def compare(old: Decoded, new: Decoded) -> tuple[float, float]:
    """Return how much agrees of one frame, and how much was counted.

    Raises TypeError: the results are of different tasks.
    """
    if isinstance(old, Detections) and isinstance(new, Detections):
        return 2.0 * matches(old, new), float(len(old) + len(new))
    if isinstance(old, ClassScores) and isinstance(new, ClassScores):
        return _top_1(old, new), 1.0
    if isinstance(old, SegmentationMap) and isinstance(new, SegmentationMap):
        known = _resampled(old.class_ids, new.class_ids.shape)
        return float(np.mean(known == new.class_ids)), 1.0
    if isinstance(old, DepthMap) and isinstance(new, DepthMap):
        known = _resampled(old.depth, new.depth.shape)
        return share_within([new.depth], [known], DEPTH_TOLERANCE), 1.0
    if isinstance(old, Texts) and isinstance(new, Texts):
        return 2.0 * _equal_lines(old, new), float(len(old.lines) + len(new.lines))
    raise TypeError(f"{type(old).__name__} and {type(new).__name__} cannot be compared")


def matches(old: Detections, new: Detections) -> int:
    """Return how many objects both see: boxes of one class that overlap by MIN_IOU, each taken
    once, the pair that overlaps most first."""
    if not len(old) or not len(new):
        return 0
    overlaps = iou_matrix(old.boxes, new.boxes)
    overlaps[old.class_ids[:, None] != new.class_ids[None, :]] = 0.0
    count = 0
    for place in np.argsort(-overlaps, axis=None, kind="stable").tolist():
        row, column = divmod(place, overlaps.shape[1])
        if overlaps[row, column] >= MIN_IOU:
            count += 1
            overlaps[row, :] = overlaps[:, column] = 0.0
    return count


def _top_1(old: ClassScores, new: ClassScores) -> float:
    if not len(old.class_ids) or not len(new.class_ids):
        return float(len(old.class_ids) == len(new.class_ids))
    return float(old.class_ids[0] == new.class_ids[0])


def _resampled(points: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the nearest point of a map [h, w] for each point of another resolution."""
    if points.shape == shape or not points.size:
        return points
    rows, columns = (
        (np.arange(count) * 2 + 1) * known // (2 * count)
        for count, known in zip(shape, points.shape, strict=True)
    )
    nearest: NDArray[Any] = points[rows[:, None], columns[None, :]]
    return nearest


def _equal_lines(old: Texts, new: Texts) -> int:
    """Return how many lines both read, each taken once."""
    rest = list(new.lines)
    count = 0
    for line in old.lines:
        if line in rest:
            rest.remove(line)
            count += 1
    return count
