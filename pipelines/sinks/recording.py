"""Results as messages of ROS 2, for viewers and files alike.

The topics of one camera are `/image/compressed`, `/detections`, `/annotations` and `/result`, of
several `/ID/...`; `/diagnostics` is of the pipeline. `/result` is the payload of a frame as JSON.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence

from device.protocol.messages import Stats
from pipelines.ros2 import messages as kinds
from pipelines.ros2.cdr import Message
from pipelines.sink_config import FoxgloveSink, McapSink
from pipelines.sinks import ros2_messages as convert
from pipelines.sinks.result import FrameResult, SinkContext
from pipelines.sinks.ros2_queue import QueuedSink, check_names, topic_prefix
from pipelines.vision import cv2

QUEUED = 8  # frames that wait for the thread; then the newest is dropped
CLOSE_S = 10.0

PICTURES = "image/compressed"
DIAGNOSTICS = "/diagnostics"

Make = Callable[[FrameResult, McapSink | FoxgloveSink], Message | None]


def _picture(result: FrameResult, config: McapSink | FoxgloveSink) -> Message | None:
    done, jpeg = cv2.imencode(
        ".jpg", result.frame.image, [cv2.IMWRITE_JPEG_QUALITY, config.quality]
    )
    if not done:
        return None
    return convert.compressed_image(convert.header_of(result), jpeg.tobytes())


def _names(result: FrameResult, config: McapSink | FoxgloveSink) -> tuple[str, ...]:
    return config.models or (result.roles.followed,)


# Topic of a camera -> its type, and what makes a message of a result.
TOPICS: dict[str, tuple[str, Make]] = {
    PICTURES: (kinds.COMPRESSED_IMAGE, _picture),
    "detections": (
        kinds.DETECTIONS_2D,
        lambda result, config: convert.detections_2d(result, _names(result, config)),
    ),
    "annotations": (
        kinds.ANNOTATIONS,
        lambda result, config: convert.annotations(result, _names(result, config)),
    ),
    "result": (kinds.STRING, lambda result, config: {"data": result.payload.decode()}),
}


def topics_of(cameras: Sequence[str]) -> dict[str, list[tuple[str, str, Make]]]:
    """Return name, type and maker of the topics of each camera."""
    return {
        camera: [
            (topic_prefix(camera, cameras) + topic, kind, make)
            for topic, (kind, make) in TOPICS.items()
        ]
        for camera in cameras
    }


class RecordingOut(QueuedSink):
    """A sink with these topics, whose messages are given to `put`."""

    def __init__(self, kind: str, config: McapSink | FoxgloveSink, context: SinkContext) -> None:
        super().__init__(kind, QUEUED, "newest", CLOSE_S)
        check_names(context.cameras)
        self._config = config
        self._topics = topics_of(context.cameras)

    @abstractmethod
    def is_wanted(self, topic: str) -> bool:
        """Return whether anybody takes messages of a topic now."""

    @abstractmethod
    def put(self, topic: str, kind: str, message: Message, wall_ns: int, seq: int) -> None:
        """Write a message. Raises OSError."""

    def send(self, result: FrameResult) -> None:
        """Put the topics of a frame."""
        frame = result.frame
        for topic, kind, make in self._topics[frame.camera]:
            message = make(result, self._config) if self.is_wanted(topic) else None
            if message is not None:
                self.put(topic, kind, message, frame.t_capture.wall_ns, frame.seq)

    def send_stats(self, stats: Stats) -> None:
        """Put /diagnostics."""
        if self.is_wanted(DIAGNOSTICS):
            now_ns = time.time_ns()
            self.put(DIAGNOSTICS, kinds.DIAGNOSTICS, self.diagnostics(stats, now_ns), now_ns, 0)
