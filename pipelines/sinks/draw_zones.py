"""Draw zones and lines on an image, with what is inside and what has crossed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PipelineConfig
from pipelines.frame import Image
from pipelines.sinks.labels import BGR, Label, Rectangle, scale_of
from pipelines.stages.zones import ZoneFrame, polygon_px
from pipelines.track_config import LineConfig, Point, Units, ZoneConfig
from pipelines.vision import cv2

EMPTY, OCCUPIED = (200, 200, 200), (60, 60, 235)  # BGR, of a zone's outline
LINE = (60, 220, 230)
ARROW = 0.25  # of a line's length: points to where `in` leads
EDGE = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Places:
    """The zones and lines of a pipeline."""

    zones: tuple[ZoneConfig, ...] = ()
    lines: tuple[LineConfig, ...] = ()

    def draw(self, canvas: Image, counts: ZoneFrame) -> list[Label]:
        """Draw them on an image, uint8 [H, W, 3] BGR; return their labels.

        `counts`: those of its frame.
        """
        height, width = canvas.shape[:2]
        labels = []
        for zone in self.zones:
            inside = sum(counts.inside.get(zone.name, {}).values())
            color = OCCUPIED if inside else EMPTY
            corners = _pixels(zone.polygon, zone.units, width, height)
            outline(canvas, corners, color)
            labels.append(Label(f"{zone.name}: {inside}", _around(corners), color))
        for line in self.lines:
            crossed = counts.crossed.get(line.name, {})
            ends = _pixels((line.start, line.end), line.units, width, height)
            outline(canvas, ends, LINE, closed=False)
            middle, along = ends.mean(axis=0), ends[1] - ends[0]
            right = np.array([-along[1], along[0]])  # as seen from its start; y points down
            _arrow(canvas, middle, middle + ARROW * right)
            text = f"{line.name}: {crossed.get('in', 0)} in, {crossed.get('out', 0)} out"
            labels.append(Label(text, _around(ends), LINE))
        return labels


NO_PLACES = Places()


def places_of(config: PipelineConfig) -> Places:
    """Return the zones and lines of a pipeline."""
    return Places(config.zones, config.lines)


def _pixels(points: Sequence[Point], units: Units, width: int, height: int) -> NDArray[np.int32]:
    return np.rint(polygon_px(points, units, width, height)).astype(np.int32)


def outline(canvas: Image, points: NDArray[Any], color: BGR, *, closed: bool = True) -> None:
    """Draw a line through points [N, 2] with dark edges, so that it is seen on every ground."""
    thick = round(2 * scale_of(canvas))
    rounded = [np.rint(points).astype(np.int32)]
    cv2.polylines(canvas, rounded, closed, EDGE, thick + 2)
    cv2.polylines(canvas, rounded, closed, color, thick)


def _arrow(canvas: Image, start: NDArray[Any], tip: NDArray[Any]) -> None:
    """Draw an arrow of a line's colour."""
    thick = round(2 * scale_of(canvas))
    first, last = (np.rint(end).astype(int).tolist() for end in (start, tip))
    cv2.arrowedLine(canvas, first, last, EDGE, thick + 2, cv2.LINE_AA)
    cv2.arrowedLine(canvas, first, last, LINE, thick, cv2.LINE_AA)


def _around(points: NDArray[np.int32]) -> Rectangle:
    (x1, y1), (x2, y2) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
    return x1, y1, x2, y2
