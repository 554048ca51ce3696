"""What a pipeline knows of one camera from frame to frame: its region, its tracks, its zones."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import UNSET

from device.errors import PipelineError
from pipelines.config import PipelineConfig
from pipelines.decode_config import BOXLESS
from pipelines.frame import Frame, Image
from pipelines.results import Decoded, Detections
from pipelines.sink_config import SnapshotSink
from pipelines.stages.roi import Roi, shifted
from pipelines.stages.track import Tracker
from pipelines.stages.zones import NO_ZONES, ZoneFrame, Zones, check_places


class Scene:
    """The steps around the decoder that need memory; one for each camera."""

    def __init__(self, config: PipelineConfig, labels: Sequence[str]) -> None:
        tracker = None if config.tracker is UNSET else config.tracker
        self._every_nth = 1 if tracker is None else tracker.every_nth
        self._tracker = None if tracker is None else Tracker(tracker)
        self._roi = None if config.roi is UNSET else Roi(config.roi)
        self._zones: Zones | None = None
        if config.zones or config.lines:
            self._zones = Zones(config.zones, config.lines, labels, config.lost_s)
        self._frames = 0

    def is_due(self) -> bool:
        """Count a frame; return whether the engine sees it (`every_nth` of [tracker])."""
        self._frames += 1
        return (self._frames - 1) % self._every_nth == 0

    @property
    def crops(self) -> bool:
        """Whether the network sees a part of each frame."""
        return self._roi is not None

    def crop(self, image: Image) -> tuple[Image, int, int]:
        """Return what the network sees of a frame, and its upper left corner."""
        return (image, 0, 0) if self._roi is None else self._roi.crop(image)

    def follow(self, decoded: Decoded, frame: Frame, x: int, y: int) -> tuple[Decoded, ZoneFrame]:
        """Return the results of a crop at (x, y) in the frame's pixels, with tracks and zones."""
        height, width = frame.size
        if self._roi is not None:
            decoded = self._roi.keep(shifted(decoded, x, y), width, height)
        if self._tracker is None:
            return decoded, NO_ZONES
        assert isinstance(decoded, Detections)  # `check_scene`
        tracked = self._tracker.update(decoded, frame.t_capture.mono_ns / 1e9)
        return tracked, self._in_zones(tracked, frame)

    def predict(self, frame: Frame) -> tuple[Decoded, ZoneFrame]:
        """Return where the tracks are in a frame that the engine did not see, as far as they are
        within the frame and the region."""
        assert self._tracker is not None  # without one, every frame is due
        height, width = frame.size
        tracked = self._tracker.predict(frame.t_capture.mono_ns / 1e9)
        size = np.array([width, height, width, height], np.float32)
        boxes = np.clip(tracked.boxes, np.float32(0.0), size)
        visible = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(axis=1))
        tracked = replace(tracked, boxes=boxes)[visible]
        if self._roi is not None:
            tracked = self._roi.keep_detections(tracked, width, height)
        return tracked, self._in_zones(tracked, frame)

    def _in_zones(self, tracked: Detections, frame: Frame) -> ZoneFrame:
        if self._zones is None:
            return NO_ZONES
        height, width = frame.size
        return self._zones.update(tracked, frame.t_capture.mono_ns / 1e9, width, height)


def check_scene(config: PipelineConfig, labels: Sequence[str]) -> None:
    """Raise PipelineError unless `check_tracking` passes, and names and classes exist."""
    check_tracking(config)
    check_places(config.zones, config.lines, labels)


def check_tracking(config: PipelineConfig) -> None:
    """Raise PipelineError unless the tracker has boxes, and zones, lines and snapshots have it."""
    if config.tracker is not UNSET and isinstance(config.decode, BOXLESS):
        raise PipelineError(
            f"pipeline {config.name!r} has [tracker], which follows boxes, and its decoder"
            f" {config.decode.__struct_config__.tag!r} gives none: remove [tracker], [[zones]] and"
            " [[lines]], or use a detector."
        )
    if config.tracker is UNSET and any(isinstance(sink, SnapshotSink) for sink in config.sinks):
        raise PipelineError(
            f"pipeline {config.name!r} has a snapshot sink and no [tracker], which tells objects"
            " apart: add the table [tracker]; its keys have defaults."
        )
    if (config.zones or config.lines) and config.tracker is UNSET:
        raise PipelineError(
            f"pipeline {config.name!r} has [[zones]] or [[lines]] and no [tracker], which tells"
            " objects apart: add the table [tracker]; its keys have defaults."
        )
