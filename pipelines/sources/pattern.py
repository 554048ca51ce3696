"""A moving test picture: colour bars, a ball and the number of the frame."""

import time

import numpy as np

from pipelines.frame import Image, Stamp
from pipelines.sources.live import Ended, RawFrame
from pipelines.sources.uri import TestPattern
from pipelines.vision import cv2

BARS = ((255, 255, 255), (0, 255, 255), (255, 255, 0), (0, 255, 0), (255, 0, 255), (0, 0, 255))
PERIOD = 90  # frames until the ball is back


class PatternCapture:
    """Draws a frame each time that one is due, on the clock of `fps`."""

    def __init__(self, pattern: TestPattern, ended: Ended) -> None:
        self._pattern = pattern
        self._ended = ended
        self._background = _bars(pattern.width, pattern.height)
        self._start_s = time.monotonic()
        self._count = 0

    def read(self) -> RawFrame:
        """Wait until the next frame is due and draw it."""
        due_s = self._start_s + self._count / self._pattern.fps
        while (wait_s := due_s - time.monotonic()) > 0.0 and not self._ended():
            time.sleep(min(wait_s, 0.1))
        image = draw_pattern(self._background, self._count)
        self._count += 1
        now = Stamp.now()
        height, width = image.shape[:2]
        fps = float(self._pattern.fps)
        return RawFrame(image, "bgr", width, height, t_capture=now, t_recv=now, fps=fps)

    def close(self) -> None:
        """Nothing is open."""


def draw_pattern(background: Image, number: int) -> Image:
    """Return a frame, uint8 [H, W, 3]: the background, the ball where it is by now, the number."""
    image: Image = background.copy()
    height, width = image.shape[:2]
    radius = max(2, height // 12)
    angle = 2.0 * np.pi * number / PERIOD
    x = round((0.5 + 0.35 * np.cos(angle)) * width)
    y = round((0.5 + 0.35 * np.sin(angle)) * height)
    cv2.circle(image, (x, y), radius, (0, 140, 255), thickness=-1)
    size = height / 480.0
    cv2.putText(image, str(number), (8, height - 8), cv2.FONT_HERSHEY_SIMPLEX, size, (0, 0, 0), 2)
    return image


def _bars(width: int, height: int) -> Image:
    columns = np.arange(width) * len(BARS) // width
    row = np.array(BARS, np.uint8)[columns]
    bars: Image = np.tile(row, (height, 1, 1))
    return bars
