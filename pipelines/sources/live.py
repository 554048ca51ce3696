"""Cameras and streams: a reader thread, a slot for the latest frame, reconnection with back-off.

A consumer slower than the camera sees young frames and a count of dropped ones, never a backlog.
One that waits is called back all the while, and can ask whether the camera is away.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Literal, Protocol

import numpy as np

from device.errors import SourceError
from pipelines.config import SourceConfig
from pipelines.frame import Away, Frame, Image, Nv12, Stamp
from pipelines.vision import cv2

BACKOFF_FIRST_S = 0.25
BACKOFF_LAST_S = 5.0
GOOD_S = 10.0  # after frames for so long, the back-off starts at its first delay again
QUEUE_FRAMES = 32  # the bound of the queue for frames = "every" and "bounded"
FIRST_FRAME_S = 10.0  # a camera that has given none by then is away, however patient stall_s is
JOIN_S = 3.0
MAX_DAMAGED = 30  # damaged frames in a row; then the camera is opened again
BAD_S = 1.0  # a camera that gave none but damaged or old frames for so long is away
RECENT = 9  # frames of which the usual gap is known
DAMAGE_LOG_S = 60.0  # between two lines of the log on damaged frames

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class RawFrame:
    """Pixels as the capture gives them, converted only if somebody takes the frame.

    `pixels`: uint8 [H, W, 3] BGR, or [H * 3 / 2, stride] NV12 of which `width` x `height` counts.
    `fps`: the rate of the source, where it says so.
    """

    pixels: Image
    layout: Literal["bgr", "nv12"]
    width: int
    height: int
    t_capture: Stamp
    t_recv: Stamp
    fps: float | None = None

    def to_bgr(self) -> Image:
        """Return the image, uint8 [H, W, 3], BGR."""
        if self.layout == "bgr":
            return self.pixels
        image = np.asarray(cv2.cvtColor(self.pixels, cv2.COLOR_YUV2BGR_NV12), np.uint8)
        return image[: self.height, : self.width]


Ended = Callable[[], bool]
"""Returns whether a wait for frames must end now."""


class FrameError(SourceError):
    """One frame is damaged; the connection holds, and the next one may be good."""


class Capture(Protocol):
    """One opened connection to a camera or stream."""

    def read(self) -> RawFrame:
        """Wait for the next frame; raise FrameError if it is damaged, another SourceError once the
        camera is lost or stalls."""

    def close(self) -> None:
        """Close the camera."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """How a consumer waits for frames.

    `stop` ends its iteration. `tick` is called in its thread, at least twice a second while it
    waits. `patient`: a camera that is away at the start is waited for, and not an error. `arrived`
    is notified by every source that has a new frame.
    """

    stop: threading.Event
    tick: Callable[[], None] = lambda: None
    patient: bool = False
    arrived: threading.Condition = field(default_factory=threading.Condition)


class LiveSource:
    """Frames of a camera or stream; see the module. A capture gets `Ended` from its opener."""

    def __init__(
        self,
        name: str,
        opener: Callable[[Ended], Capture],
        config: SourceConfig,
        waiting: Waiting,
    ) -> None:
        """An open camera without a frame for half of `config.stall_s` is called away; a slow one,
        for twice its usual gap."""
        self.name = name
        self.config = config
        self.reopened = 0
        self.ended = False  # a camera that is away is waited for
        self._opener = opener
        self._waiting = waiting
        self._stop = waiting.stop
        self._quiet_s = config.stall_s / 2.0
        self._fault: str | None = None
        self._damage: str | None = None  # of the frames since the last good one
        self._damage_logged_s = -inf
        self._alive_s = time.monotonic()  # of the last frame, or of the start
        self._gaps_s: deque[float] = deque(maxlen=RECENT)
        self._stale_s: float | None = None  # since when all frames are too old
        self._closing = threading.Event()
        self._slot: deque[tuple[int, RawFrame]] = deque()
        self._room = QUEUE_FRAMES if config.frames in ("bounded", "every") else 1
        bounded = config.frames == "bounded"
        self._max_age_ns = config.max_age_ms * 1e6 if bounded else float("inf")
        self._arrived = waiting.arrived
        self._dropped: Counter[str] = Counter()
        self._seq = 0
        self._thread: threading.Thread | None = None

    @property
    def dropped(self) -> Mapping[str, int]:
        """Frames dropped so far; "busy": a newer frame came before the old one was taken;
        "stale": older than `max_age_ms` when it could have been taken; "damaged": no picture,
        which is the camera's fault and not the release's."""
        return dict(self._dropped)

    @property
    def gap_s(self) -> float:
        """How far apart its frames may be: after longer it is away."""
        if not self._seq:
            return FIRST_FRAME_S
        return max(self._quiet_s, 2.0 * median(tuple(self._gaps_s) or (0.0,)))

    @property
    def due_s(self) -> float:
        """Now, if a frame is there; otherwise `arrived` tells."""
        return -inf if self._slot else inf

    @property
    def away(self) -> Away | None:
        """Why and since when there are no frames; None while they come or may still begin to."""
        with self._arrived:
            fault, damage, alive_s = self._fault, self._damage, self._alive_s
            stale_s, limit_s = self._stale_s, self.gap_s
        if fault is not None:
            return Away(fault, alive_s)
        now_s = time.monotonic()
        if stale_s is not None and now_s - stale_s > BAD_S:
            age_ms = self.config.max_age_ms
            return Away(f"{self.name} gives no frame younger than max_age_ms, {age_ms:g}", stale_s)
        silent_s = now_s - alive_s
        if damage is not None and silent_s > BAD_S:
            return Away(f"{self.name} gives damaged frames: {damage}", alive_s)
        if silent_s > limit_s:
            return Away(f"{self.name} has given no frame for {limit_s:g} s", alive_s)
        return None

    def __enter__(self) -> "LiveSource":
        """Open the camera and wait for its first frame, so that a wrong address fails at once.

        A patient consumer waits for it in the iteration.
        """
        if self._waiting.patient:
            self._start_reader(None)
            return self
        capture = self._opener(self._ended)
        try:
            self._take(capture)
        except BaseException as error:
            capture.close()
            if isinstance(error, SourceError) and self._stop.is_set():
                return self  # stopped before the first frame
            raise
        self._start_reader(capture)
        return self

    def _start_reader(self, capture: Capture | None) -> None:
        self._thread = threading.Thread(
            target=self._read_frames, args=(capture,), name="source", daemon=True
        )
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Stop the reader and close the camera."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def poll(self) -> Frame | None:
        """Return the oldest frame that is there and not too old, or None."""
        with self._arrived:
            while self._slot:
                seq, raw = self._slot.popleft()
                if time.monotonic_ns() - raw.t_capture.mono_ns <= self._max_age_ns:
                    self._stale_s = None
                    break
                self._dropped["stale"] += 1
                self._stale_s = self._stale_s or time.monotonic()
            else:
                self._check_reader()
                return None
        nv12 = Nv12(raw.pixels, raw.width, raw.height) if raw.layout == "nv12" else None
        return Frame(
            picture=raw.to_bgr,
            seq=seq,
            t_capture=raw.t_capture,
            t_recv=raw.t_recv,
            source=self.name,
            camera=self.config.id,
            nv12=nv12,
            fps=raw.fps,
        )

    def _check_reader(self) -> None:
        if not self._ended() and (self._thread is None or not self._thread.is_alive()):
            raise SourceError(
                f"{self.name} has no running reader: the log above says why it ended."
            )

    def _ended(self) -> bool:
        return self._stop.is_set() or self._closing.is_set()

    def _put(self, raw: RawFrame) -> None:
        with self._arrived:
            if len(self._slot) == self._room:
                self._slot.popleft()
                self._dropped["busy"] += 1
            self._slot.append((self._seq, raw))
            now_s = time.monotonic()
            if self._seq:
                self._gaps_s.append(now_s - self._alive_s)
            self._seq += 1
            self._fault = self._damage = None
            self._alive_s = now_s
            self._arrived.notify_all()  # a thread that reads ahead may wait there, too

    def _read_frames(self, first: Capture | None) -> None:
        capture = first
        backoff = BACKOFF_FIRST_S
        while not self._ended():
            opened = time.monotonic()
            try:
                if capture is None:
                    again = self._seq > 0
                    capture = self._opener(self._ended)
                    self._take(capture)
                    if again:
                        self.reopened += 1
                        _log.info("%s gives frames again", self.name)
                while not self._ended():
                    self._take(capture)
            except SourceError as error:
                self._note_fault(str(error))
            except Exception as error:  # noqa: BLE001  (no picture may end a release)
                _log.debug("the reader of %s failed", self.name, exc_info=True)
                self._note_fault(
                    f"{self.name} gives what cannot be read ({type(error).__name__}: {error}): it"
                    " is opened again"
                )
            finally:
                if capture is not None:
                    capture.close()
            capture = None
            backoff = BACKOFF_FIRST_S if time.monotonic() - opened > GOOD_S else backoff
            self._closing.wait(backoff)
            backoff = min(backoff * 2, BACKOFF_LAST_S)

    def _take(self, capture: Capture) -> None:
        """Put the next good frame. Raises SourceError after too many damaged ones."""
        for _ in range(MAX_DAMAGED):
            try:
                self._put(capture.read())
            except FrameError as error:
                self._note_damage(str(error))
            else:
                return
        raise SourceError(
            f"{self.name} gave {MAX_DAMAGED} damaged frames in a row, the last: {self._damage}"
        )

    def _note_damage(self, damage: str) -> None:
        """Count a damaged frame; log the first, and one a minute."""
        with self._arrived:
            self._dropped["damaged"] += 1
            self._damage = damage
        now_s = time.monotonic()
        if now_s - self._damage_logged_s > DAMAGE_LOG_S and not self._ended():
            self._damage_logged_s = now_s
            _log.warning("%s gave a damaged frame, which is dropped: %s", self.name, damage)

    def _note_fault(self, fault: str) -> None:
        """Keep why the camera is away; log it once."""
        with self._arrived:
            news, self._fault = fault != self._fault, fault
        if news and not self._ended():
            _log.warning("%s", fault)
