"""Draw detections on an image."""

from collections.abc import Sequence

import numpy as np

from pipelines.frame import Image
from pipelines.results import ClassScores, Decoded
from pipelines.sinks.events import label_of
from pipelines.vision import cv2

# BGR, told apart on bright and dark images; classes take them in turn.
COLORS = (
    (72, 174, 255),
    (90, 200, 90),
    (235, 130, 60),
    (180, 105, 255),
    (60, 220, 230),
    (230, 200, 70),
    (110, 110, 240),
    (200, 160, 160),
)
_FONT = cv2.FONT_HERSHEY_SIMPLEX


def annotate(
    image: Image, decoded: Decoded, labels: Sequence[str], latency_ms: float | None = None
) -> Image:
    """Return a copy of an image, uint8 [H, W, 3] BGR, with boxes, labels and scores."""
    canvas: Image = np.array(image, order="C")
    if isinstance(decoded, ClassScores):
        for row, (score, class_id) in enumerate(
            zip(decoded.scores.tolist(), decoded.class_ids.tolist(), strict=True)
        ):
            _tag(canvas, f"{label_of(labels, class_id)} {score:.2f}", 4, 34 + 18 * row, class_id)
    else:
        for box, score, class_id in zip(
            decoded.boxes.tolist(), decoded.scores.tolist(), decoded.class_ids.tolist(), strict=True
        ):
            x1, y1, x2, y2 = (round(value) for value in box)
            cv2.rectangle(canvas, (x1, y1), (x2, y2), _color(class_id), 2)
            _tag(canvas, f"{label_of(labels, class_id)} {score:.2f}", x1, y1, class_id)
    if latency_ms is not None:
        text = f"{latency_ms:.1f} ms"
        cv2.putText(canvas, text, (4, 14), _FONT, 0.45, (0, 0, 0), 3, cv2.LINE_AA)
        cv2.putText(canvas, text, (4, 14), _FONT, 0.45, (255, 255, 255), 1, cv2.LINE_AA)
    return canvas


def _color(class_id: int) -> tuple[int, int, int]:
    return COLORS[class_id % len(COLORS)]


def _tag(canvas: Image, text: str, x: int, y: int, class_id: int) -> None:
    """Write black text on the class's colour with its lower left corner at (x, y)."""
    (width, height), _ = cv2.getTextSize(text, _FONT, 0.45, 1)
    y = max(y, height + 6)  # a box at the upper edge keeps its label visible
    cv2.rectangle(canvas, (x, y - height - 6), (x + width + 4, y), _color(class_id), cv2.FILLED)
    cv2.putText(canvas, text, (x + 2, y - 4), _FONT, 0.45, (0, 0, 0), 1, cv2.LINE_AA)
