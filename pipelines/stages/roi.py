"""The region of interest: the network sees the part of the frame that matters, and nothing else
counts.

With `crop` the rectangle around the polygon is cut out before preprocessing, which costs nothing,
as it is a view; results are moved back into the frame. What lies in the rectangle but not in the
polygon is dropped by its anchor.
"""

from dataclasses import replace

import numpy as np

from device.errors import PipelineError
from pipelines.frame import Image
from pipelines.results import Decoded, DepthMap, Detections, SegmentationMap
from pipelines.stages.zones import anchors_within, inside_polygon, polygon_px
from pipelines.track_config import RoiConfig


class Roi:
    """The [roi] of a pipeline."""

    def __init__(self, config: RoiConfig) -> None:
        self._config = config

    def crop(self, image: Image) -> tuple[Image, int, int]:
        """Return the part of a frame that the network sees, and its upper left corner.

        Raises PipelineError: nothing of the polygon is within the frame.
        """
        height, width = image.shape[:2]
        polygon = polygon_px(self._config.polygon, self._config.units, width, height)
        first = np.maximum(np.floor(polygon.min(axis=0)), 0).astype(int).tolist()
        last = np.minimum(np.ceil(polygon.max(axis=0)), (width, height)).astype(int).tolist()
        if last[0] - first[0] < 2 or last[1] - first[1] < 2:
            raise PipelineError(
                f"[roi] leaves {max(0, last[0] - first[0])} x {max(0, last[1] - first[1])} pixels"
                f" of a frame of {width} x {height}: correct its polygon, or `units`"
                f" ({self._config.units}), in pipeline.toml."
            )
        if not self._config.crop:
            return image, 0, 0
        return image[first[1] : last[1], first[0] : last[0]], first[0], first[1]

    def keep(self, decoded: Decoded, width: int, height: int) -> Decoded:
        """Return what is inside the polygon; maps of the whole crop stay as they are."""
        if not isinstance(decoded, Detections):
            return decoded
        return self.keep_detections(decoded, width, height)

    def keep_detections(self, detections: Detections, width: int, height: int) -> Detections:
        """Return the detections whose anchor is inside the polygon."""
        if not len(detections):
            return detections
        polygon = polygon_px(self._config.polygon, self._config.units, width, height)
        points = anchors_within(detections.boxes, self._config.anchor, width, height)
        inside = inside_polygon(points, polygon)
        return detections if inside.all() else detections[inside]


def shifted(decoded: Decoded, x: int, y: int) -> Decoded:
    """Return results of a crop in pixels of the frame; (x, y) is the crop's upper left corner."""
    if isinstance(decoded, (SegmentationMap, DepthMap)):
        x1, y1, x2, y2 = decoded.region
        return replace(decoded, region=(x1 + x, y1 + y, x2 + x, y2 + y))
    if not isinstance(decoded, Detections):
        return decoded
    box = np.array([x, y, x, y], np.float32)
    point = np.array([x, y, 0], np.float32)
    turned = np.array([x, y, 0, 0, 0], np.float32)
    masks, keypoints, rotated = decoded.masks, decoded.keypoints, decoded.rotated
    return replace(
        decoded,
        boxes=decoded.boxes + box,
        keypoints=None if keypoints is None else keypoints + point,
        rotated=None if rotated is None else rotated + turned,
        masks=None if masks is None else replace(masks, regions=masks.regions + box),
    )
