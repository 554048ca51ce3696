"""Results as messages of ROS 2 for viewers and files: topics, and a thread that makes them.

The topics of one camera are `/image/compressed`, `/detections`, `/annotations` and `/result`, of
several `/ID/...`; `/diagnostics` is of the pipeline. `/result` is the payload of a frame as JSON.
"""

import logging
import threading
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from device.board_files import hottest_c
from device.protocol.messages import Stats
from pipelines.ros2 import messages as kinds
from pipelines.ros2.cdr import Message
from pipelines.sink_config import FoxgloveSink, McapSink
from pipelines.sinks import ros2_messages as convert
from pipelines.sinks.result import FrameResult, SinkContext
from pipelines.sinks.ros2 import check_names, clock_text, ros_name
from pipelines.vision import cv2

QUEUED = 8  # frames that wait for the thread; then the newest is dropped
CLOSE_S = 10.0

PICTURES = "/image/compressed"
DIAGNOSTICS = "/diagnostics"

_log = logging.getLogger(__name__)

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
    "/detections": (
        kinds.DETECTIONS_2D,
        lambda result, config: convert.detections_2d(result, _names(result, config)),
    ),
    "/annotations": (
        kinds.ANNOTATIONS,
        lambda result, config: convert.annotations(result, _names(result, config)),
    ),
    "/result": (kinds.STRING, lambda result, config: {"data": result.payload.decode()}),
}


def topic_prefix(camera: str, cameras: Sequence[str]) -> str:
    """Return what comes before the topics of a camera: nothing if it is the only one."""
    return f"/{ros_name(camera)}" if len(cameras) > 1 else ""


class RecordingOut(AbstractContextManager["RecordingOut"]):
    """A sink whose messages are made and given to `put` by a thread of its own."""

    kind: str

    def __init__(self, config: McapSink | FoxgloveSink, context: SinkContext) -> None:
        check_names(context.cameras)
        self._config = config
        self._topics = {
            camera: [
                (topic_prefix(camera, context.cameras) + topic, kind, make)
                for topic, (kind, make) in TOPICS.items()
            ]
            for camera in context.cameras
        }
        self._pipeline = ""
        self._ages_ms: dict[str, float] = {}
        self._runs: dict[str, str] = {}
        self._dropped: Counter[str] = Counter()
        self._queue: deque[FrameResult | Stats] = deque()
        self._filled = threading.Condition()
        self._closing = False
        self._error_said = False
        self._thread = threading.Thread(target=self._run, name=f"{self.kind} sink", daemon=True)

    @property
    def dropped(self) -> Mapping[str, int]:
        """KIND_queue: frames come faster than they are encoded and written; KIND_error: a message
        could not be made or written; what the sink adds."""
        return dict(self._dropped)

    @abstractmethod
    def is_wanted(self, topic: str) -> bool:
        """Return whether anybody takes messages of a topic now."""

    @abstractmethod
    def put(self, topic: str, kind: str, message: Message, wall_ns: int, seq: int) -> None:
        """Write a message. Raises OSError."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left, and close the output; in the thread."""

    def idle(self) -> None:
        """Do what is due without frames; in the thread, at least once a second."""

    def __enter__(self) -> "RecordingOut":
        """Begin to write."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write the queue and close."""
        with self._filled:
            self._closing = True
            self._filled.notify()
        self._thread.join(CLOSE_S)

    def write(self, result: FrameResult) -> None:
        """Queue a result."""
        self._pipeline = result.event.pipeline
        # New mappings each time: the thread reads the old ones.
        self._ages_ms = {**self._ages_ms, result.frame.camera: result.event.age_ms}
        self._runs = {**self._runs, **{run.model: ", ".join(run.processors) for run in result.runs}}
        self._append(result)

    def take_stats(self, stats: Stats) -> None:
        """Queue the figures of the last second."""
        self._append(stats)

    def _append(self, one: FrameResult | Stats) -> None:
        with self._filled:
            if len(self._queue) >= QUEUED:
                self._dropped[f"{self.kind}_queue"] += 1
                return
            self._queue.append(one)
            self._filled.notify()

    def _next(self) -> FrameResult | Stats | None:
        with self._filled:
            if not self._queue and not self._closing:
                self._filled.wait(1.0)
            return self._queue.popleft() if self._queue else None

    def _run(self) -> None:
        while True:
            one = self._next()
            if one is None and self._closing:
                break
            self._guarded(self.idle if one is None else partial(self._put_all, one))
        self._guarded(self.close)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001  (no message may end a pipeline)
            if not self._error_said:
                _log.exception("the %s sink drops a frame: %s", self.kind, error)
            self._error_said = True
            self._dropped[f"{self.kind}_error"] += 1

    def _put_all(self, one: FrameResult | Stats) -> None:
        if isinstance(one, Stats):
            now_ns = time.time_ns()
            if self.is_wanted(DIAGNOSTICS):
                message = convert.diagnostics(
                    now_ns,
                    self._pipeline,
                    one,
                    ages_ms=self._ages_ms,
                    runs=self._runs,
                    heat_c=hottest_c(Path("/sys")),
                    clock=clock_text(),
                )
                self.put(DIAGNOSTICS, kinds.DIAGNOSTICS, message, now_ns, 0)
            return
        frame = one.frame
        for topic, kind, make in self._topics[frame.camera]:
            if self.is_wanted(topic):
                made = make(one, self._config)
                if made is not None:
                    self.put(topic, kind, made, frame.t_capture.wall_ns, frame.seq)
