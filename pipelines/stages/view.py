"""Where an image lies in the network input, and the way back to pixels of the frame.

It needs no OpenCV.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.results import Region

Boxes = NDArray[np.float32]  # [N, 4]: x1, y1, x2, y2
Points = NDArray[np.float32]  # [..., 2]: x, y


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the image lies in the network input: `scale_x` and `scale_y` times its size, put at
    (`pad_x`, `pad_y`), which are below zero where it is cropped. A letterbox has two scales too:
    its sides are whole pixels."""

    scale_x: float
    scale_y: float
    pad_x: int = 0
    pad_y: int = 0

    def to_frame(self, boxes: Boxes) -> Boxes:
        """Return boxes [N, 4] in frame pixels for boxes in network-input pixels."""
        pad = np.array([self.pad_x, self.pad_y] * 2, np.float32)
        scale = np.array([self.scale_x, self.scale_y] * 2, np.float32)
        return np.asarray((boxes - pad) / scale, np.float32)

    def points_to_frame(self, points: NDArray[Any]) -> Points:
        """Return points [..., 2] in frame pixels for points in network-input pixels."""
        pad = np.array([self.pad_x, self.pad_y], np.float32)
        scale = np.array([self.scale_x, self.scale_y], np.float32)
        return np.asarray((points - pad) / scale, np.float32)


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


def input_area(view: View) -> tuple[float, float, float, float]:
    """Return the part of the input that shows the frame: x1, y1, x2, y2 in input pixels."""
    geometry = view.geometry
    return (
        max(geometry.pad_x, 0.0),
        max(geometry.pad_y, 0.0),
        min(geometry.pad_x + geometry.scale_x * view.frame_width, view.input_width),
        min(geometry.pad_y + geometry.scale_y * view.frame_height, view.input_height),
    )


def region_of(view: View, area: Sequence[float]) -> Region:
    """Return an area of the input, in input pixels, as a region of the frame."""
    x1, y1, x2, y2 = view.geometry.to_frame(np.array([area], np.float32))[0].tolist()
    return x1, y1, x2, y2
