"""A file that is read by a thread of its own: one over a network may answer late, or never.

The loop goes on meanwhile, gives its heartbeats and can say that the source is away. Frames keep
their order and their pace; none is dropped here.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from math import inf

from pipelines.config import SourceConfig
from pipelines.frame import Away, Frame
from pipelines.sources.files import VideoFile
from pipelines.sources.live import Waiting

AHEAD = 4  # frames that wait to be taken, of "every"; else one, so that it stays young
JOIN_S = 3.0
_WAIT_S = 0.1
_log = logging.getLogger(__name__)


class ReadAhead:
    """Frames of a video file, read ahead by a thread."""

    def __init__(self, file: VideoFile, config: SourceConfig, waiting: Waiting) -> None:
        self.name = file.name
        self.config = config
        self.ended = False
        self._file = file
        self._arrived = waiting.arrived
        self._room = 1 if config.frames in ("bounded", "latest") else AHEAD
        self._closing = threading.Event()
        self._frames: deque[Frame] = deque()
        self._error: Exception | None = None
        self._file_ended = False
        self._alive_s = time.monotonic()
        self._thread = threading.Thread(target=self._read, name="read ahead", daemon=True)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Frames that the file dropped, by cause."""
        return self._file.dropped

    @property
    def gap_s(self) -> float:
        """How far apart its frames may be: after longer it is away."""
        return self._file.gap_s + self.config.stall_s

    @property
    def due_s(self) -> float:
        """Now, if a frame is there; otherwise `arrived` tells."""
        return -inf if self._frames or self._error else inf

    @property
    def away(self) -> Away | None:
        """Why and since when the file gives nothing; None while it does."""
        with self._arrived:
            alive_s, idle = self._alive_s, not self._frames and not self._file_ended
        if idle and time.monotonic() - alive_s > self.config.stall_s:
            return Away(f"{self.name} has given no frame for {self.config.stall_s:g} s", alive_s)
        return None

    def __enter__(self) -> "ReadAhead":
        """Open the file, so that a wrong address fails at once."""
        self._file.__enter__()
        self._alive_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop the thread and close the file, unless it does not answer even now."""
        self._closing.set()
        with self._arrived:
            self._arrived.notify_all()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            _log.warning("%s does not answer; it is left open", self.name)
            return
        self._file.__exit__(*raised)

    def poll(self) -> Frame | None:
        """Return the next frame, or None if there is none now; raise what reading raised."""
        with self._arrived:
            if self._frames:
                frame = self._frames.popleft()
                self.ended = self._file_ended and not self._frames
                self._arrived.notify_all()  # there is room
                return frame
            if self._error is not None:
                raise self._error
        return None

    def _read(self) -> None:
        while not self._closing.is_set():
            wait_s = self._file.due_s - time.monotonic()
            if wait_s > 0.0:
                self._alive_s = time.monotonic()  # a frame that is not due yet is not missing
                self._closing.wait(min(wait_s, _WAIT_S))
                continue
            try:
                frame = self._file.poll()
            except Exception as error:  # noqa: BLE001  (`poll` raises it)
                self._finish(error)
                return
            if self._file.ended:
                self._finish(None)
                return
            if frame is not None:
                self._put(frame)

    def _put(self, frame: Frame) -> None:
        with self._arrived:
            self._alive_s = time.monotonic()
            while len(self._frames) >= self._room and not self._closing.is_set():
                self._arrived.wait(_WAIT_S)
            self._alive_s = time.monotonic()
            self._frames.append(frame)
            self._arrived.notify_all()

    def _finish(self, error: Exception | None) -> None:
        with self._arrived:
            self._error, self._file_ended = error, error is None
            self.ended = self._file_ended and not self._frames
            self._arrived.notify_all()
