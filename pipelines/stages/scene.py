"""What a pipeline knows of one camera from frame to frame: its region, its tracks, its zones."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import UNSET

from device.errors import PipelineError
from pipelines.config import PipelineConfig
from pipelines.decode_config import BOXLESS, DecodeConfig, UltralyticsDetect
from pipelines.frame import Frame, Image
from pipelines.results import Decoded, Detections
from pipelines.sink_config import SnapshotSink
from pipelines.stages.decoders.candidates import Outputs, output_of
from pipelines.stages.native import NativeTracker, new_tracker
from pipelines.stages.roi import Roi, shifted
from pipelines.stages.track import Tracker
from pipelines.stages.view import View
from pipelines.stages.zones import NO_ZONES, ZoneFrame, Zones, check_places


class Scene:
    """The steps around the decoder that need memory; one for each camera."""

    def __init__(self, config: PipelineConfig, labels: Sequence[str]) -> None:
        self._labels = labels
        self._every_nth = 1
        self._tracker: Tracker | None = None
        self._first_id = 1  # of the next tracker: a number is never given twice in a run
        self._roi: Roi | None = None
        self._zones: Zones | None = None
        self.change(config)
        self._frames = 0
        self._size: tuple[int, int] | None = None  # height and width of the last frame

    def check(self, config: PipelineConfig) -> None:
        """Raise PipelineError if the last frame has no pixel in the region of a configuration."""
        if config.roi is not UNSET and self._size is not None:
            Roi(config.roi).crop(np.broadcast_to(np.uint8(0), (*self._size, 3)))

    def change(self, config: PipelineConfig) -> None:
        """Go on with another region, tracker, zones and lines; tracks stay, and what is known of
        zones and lines that are as before."""
        tracker = None if config.tracker is UNSET else config.tracker
        self._every_nth = 1 if tracker is None else tracker.every_nth
        if tracker is None:
            self._first_id = self._next_id()
            self._tracker = None
        elif self._tracker is None:
            self._tracker = new_tracker(tracker, self._first_id)
        else:
            self._tracker.config = tracker
        self._roi = None if config.roi is UNSET else Roi(config.roi)
        if not (config.zones or config.lines):
            self._zones = None
        elif self._zones is None:
            self._zones = Zones(config.zones, config.lines, self._labels, config.lost_s)
        else:
            self._zones.change(config.zones, config.lines)

    def is_due(self) -> bool:
        """Count a frame; return whether the engine sees it (`every_nth` of [tracker])."""
        self._frames += 1
        return (self._frames - 1) % self._every_nth == 0

    def picture(self, frame: Frame) -> tuple[Image | Frame, int, int]:
        """Return what the networks see of a frame, the whole of it or a part, and its upper left
        corner."""
        self._size = frame.size
        return (frame, 0, 0) if self._roi is None else self._roi.crop(frame.image)

    def follow(self, decoded: Decoded, frame: Frame, x: int, y: int) -> tuple[Decoded, ZoneFrame]:
        """Return the results of a crop at (x, y) in the frame's pixels, with tracks and zones."""
        decoded = self.placed(decoded, frame, x, y)
        if self._tracker is None:
            return decoded, NO_ZONES
        assert isinstance(decoded, Detections)  # `check_scene`
        tracked = self._tracker.update(decoded, frame.t_capture.mono_ns / 1e9)
        return tracked, self._in_zones(tracked, frame)

    def follow_head(
        self, outputs: Outputs, config: DecodeConfig, view: View, frame: Frame
    ) -> tuple[Detections, ZoneFrame, int] | None:
        """Return what `follow` gives for the outputs of an engine that saw the whole frame, decoded
        and tracked by one call of libtandem, and when they were decoded, in ns of
        `time.monotonic()`. None where that does not run: nothing has changed."""
        tracker = self._tracker
        if (
            self._roi is not None
            or not isinstance(tracker, NativeTracker)
            or not tracker.can_follow
            or not isinstance(config, UltralyticsDetect)
        ):
            return None
        head, taken_s = output_of(outputs, config.output)[0], frame.t_capture.mono_ns / 1e9
        followed = tracker.follow(head, len(head) - 4, config, view, taken_s)
        if followed is None:
            return None
        return followed[0], self._in_zones(followed[0], frame), followed[1]

    def placed(self, decoded: Decoded, frame: Frame, x: int, y: int) -> Decoded:
        """Return the results of a crop at (x, y) in the frame's pixels, within the region."""
        if self._roi is None:
            return decoded
        height, width = frame.size
        return self._roi.keep(shifted(decoded, x, y), width, height)

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

    def _next_id(self) -> int:
        return self._first_id if self._tracker is None else self._tracker.next_id

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
    decode = config.followed.reading
    if config.tracker is not UNSET and isinstance(decode, BOXLESS):
        raise PipelineError(
            f"pipeline {config.name!r} has [tracker], which follows boxes, and its decoder"
            f" {decode.__struct_config__.tag!r} gives none: remove [tracker], [[zones]] and"
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
