"""Draw zones and lines on an image, with what is inside and what has crossed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PipelineConfig
from pipelines.frame import Image
from pipelines.stages.zones import ZoneFrame, polygon_px
from pipelines.track_config import LineConfig, Point, Units, ZoneConfig
from pipelines.vision import cv2

EMPTY, OCCUPIED = (200, 200, 200), (60, 60, 235)  # BGR, of a zone's outline
LINE = (60, 220, 230)
ARROW = 0.25  # of a line's length: points to where `in` leads
_FONT = cv2.FONT_HERSHEY_SIMPLEX


@dataclass(frozen=True, slots=True)
class Places:
    """The zones and lines of a pipeline."""

    zones: tuple[ZoneConfig, ...] = ()
    lines: tuple[LineConfig, ...] = ()

    def draw(self, canvas: Image, counts: ZoneFrame) -> None:
        """Draw them on an image, uint8 [H, W, 3] BGR; `counts`: those of its frame."""
        height, width = canvas.shape[:2]
        for zone in self.zones:
            inside = sum(counts.inside.get(zone.name, {}).values())
            color = OCCUPIED if inside else EMPTY
            corners = _pixels(zone.polygon, zone.units, width, height)
            cv2.polylines(canvas, [corners], True, color, 2, cv2.LINE_AA)
            _write(
                canvas, f"{zone.name}: {inside}", corners[:, 0].min(), corners[:, 1].min(), color
            )
        for line in self.lines:
            crossed = counts.crossed.get(line.name, {})
            ends = _pixels((line.start, line.end), line.units, width, height)
            cv2.line(canvas, ends[0].tolist(), ends[1].tolist(), LINE, 2, cv2.LINE_AA)
            middle, along = ends.mean(axis=0), ends[1] - ends[0]
            right = np.array([-along[1], along[0]])  # as seen from its start; y points down
            tip = np.rint(middle + ARROW * right).astype(int)
            cv2.arrowedLine(canvas, np.rint(middle).astype(int).tolist(), tip.tolist(), LINE, 2)
            text = f"{line.name}: {crossed.get('in', 0)} in, {crossed.get('out', 0)} out"
            _write(canvas, text, ends[0, 0], ends[0, 1], LINE)


NO_PLACES = Places()


def places_of(config: PipelineConfig) -> Places:
    """Return the zones and lines of a pipeline."""
    return Places(config.zones, config.lines)


def _pixels(points: Sequence[Point], units: Units, width: int, height: int) -> NDArray[np.int32]:
    return np.rint(polygon_px(points, units, width, height)).astype(np.int32)


def _write(canvas: Image, text: str, x: int, y: int, color: tuple[int, int, int]) -> None:
    """Write with a dark edge, the lower left corner just above (x, y) and within the image."""
    at = (max(2, int(x)), max(14, int(y) - 5))
    cv2.putText(canvas, text, at, _FONT, 0.45, (0, 0, 0), 3, cv2.LINE_AA)
    cv2.putText(canvas, text, at, _FONT, 0.45, color, 1, cv2.LINE_AA)
