"""Detections on a serial line, always of the latest frame.

A thread writes, so that a slow line holds nothing up: while it is busy with one frame, of those
that come meanwhile the last one stays. A port that goes away is opened again when it is back.
"""

import logging
import termios
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from device.errors import PipelineError
from device.install_advice import pip_install
from pipelines.rate import RateLimit
from pipelines.results import Decoded, Detections, label_of
from pipelines.sink_config import SerialSink
from pipelines.sinks.autopilot import Autopilot
from pipelines.sinks.records import NO_NUMBER, Target, cobs_frame, nmea_lines
from pipelines.sinks.result import FrameResult, SinkContext

if TYPE_CHECKING:
    from serial import Serial

RETRY_S = (0.25, 0.5, 1.0, 2.0)
IDLE_S = 0.05  # without a frame, what the other side says is read so often
DRAIN_S = 0.001
CLOSE_S = 1.0

# What pyserial raises when a port goes away: SerialException is an OSError, termios.error is not.
GONE = (OSError, termios.error)

_log = logging.getLogger(__name__)


class Dialect(Protocol):
    """How frames are written, and what is said beside them."""

    def frame(self, result: FrameResult, targets: Sequence[Target]) -> bytes:
        """Return the bytes of a frame."""

    def periodic(self, now_s: float) -> bytes:
        """Return what is due at a time."""

    def received(self, data: bytes) -> bytes:
        """Take what the other side wrote; return the answer."""


class SerialOut:
    """Writes the targets of the latest frame."""

    def __init__(self, config: SerialSink, context: SinkContext) -> None:
        try:
            import serial
        except ImportError as error:
            raise PipelineError(
                f"the serial sink needs pyserial ({error}): {pip_install('serial')}."
            ) from error
        models = {name: context.models[name] for name in config.models}
        labels = [*chain(*(models.values() or (context.labels,)))]
        unknown = [name for name in (*config.classes, *config.heights_m) if name not in labels]
        if unknown:
            raise PipelineError(
                f"the serial sink names the class {unknown[0]!r}, which is none of the labels"
                f" ({', '.join(labels)}): correct `classes` or `heights_m` there."
            )
        self._serial = serial
        self._config = config
        self._labels = context.labels
        self._models = models
        self._dialect = _open_dialect(config)
        self._limit = RateLimit(config.max_hz)
        self._dropped: Counter[str] = Counter()
        self._latest: FrameResult | None = None
        self._filled = threading.Condition()
        self._closing = threading.Event()
        self._is_open = False
        self._thread = threading.Thread(target=self._run, name="serial-sink", daemon=True)

    @property
    def dropped(self) -> Mapping[str, int]:
        """serial_rate: over max_hz; serial_busy: the line was slower; serial_away: no port;
        serial_timeout: the other side took nothing for write_timeout_s."""
        return dict(self._dropped)

    def __enter__(self) -> "SerialOut":
        """Begin to open the port; the pipeline does not wait for it."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write what is there, then close the port."""
        self._closing.set()
        with self._filled:
            self._filled.notify()
        self._thread.join(CLOSE_S + self._config.write_timeout_s)

    def write(self, result: FrameResult) -> None:
        """Leave the result for the writer, in place of one that it did not come to; frames of other
        cameras than its own are none of its results."""
        if self._config.camera not in ("", result.frame.camera):
            return
        if not self._limit.allows(time.monotonic()):
            self._dropped["serial_rate"] += 1
            return
        with self._filled:
            if not self._is_open:
                self._dropped["serial_away"] += 1
                return
            if self._latest is not None:
                self._dropped["serial_busy"] += 1
            self._latest = result
            self._filled.notify()

    def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            try:
                port = self._serial.Serial(
                    self._config.port,
                    self._config.baud,
                    timeout=0,
                    write_timeout=self._config.write_timeout_s,
                    exclusive=True,
                )
            except (*GONE, ValueError) as error:  # a rate that the port does not have
                if not failures:
                    _log.warning("serial port %s cannot be opened: %s", self._config.port, error)
                self._closing.wait(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1
                continue
            failures = 0
            _log.info("serial port %s is open", self._config.port)
            self._set_open(True)
            with port:
                self._write_all(port)
            self._set_open(False)

    def _set_open(self, is_open: bool) -> None:
        with self._filled:
            self._is_open = is_open
            self._latest = None

    def _write_all(self, port: "Serial") -> None:
        """Write until the port goes away or the sink closes."""
        while True:
            result = self._next()
            try:
                heard = port.read(port.in_waiting) if port.in_waiting else b""
                data = self._dialect.received(heard) if heard else b""
                data += self._dialect.periodic(time.monotonic())
                if result is not None:
                    data += self._dialect.frame(result, self._targets(result))
                if data:
                    port.write(data)
                    self._drain(port)
            except GONE as error:
                if not isinstance(error, self._serial.SerialTimeoutException):
                    self._say_gone(error)
                    return
                self._dropped["serial_timeout"] += 1
                try:
                    port.reset_output_buffer()
                except GONE as failure:
                    self._say_gone(failure)
                    return
            if self._closing.is_set() and self._latest is None:
                return

    def _say_gone(self, error: BaseException) -> None:
        if not self._closing.is_set():
            _log.warning("serial port %s is gone: %s", self._config.port, error)

    def _next(self) -> FrameResult | None:
        with self._filled:
            if self._latest is None and not self._closing.is_set():
                self._filled.wait(IDLE_S)
            result, self._latest = self._latest, None
            return result

    def _drain(self, port: "Serial") -> None:
        """Wait until the line has taken the frame: no second one is queued behind it."""
        end_s = time.monotonic() + self._config.write_timeout_s
        while port.out_waiting:
            if time.monotonic() > end_s:
                raise self._serial.SerialTimeoutException("the line takes nothing")
            time.sleep(DRAIN_S)

    def _targets(self, result: FrameResult) -> list[Target]:
        """Return the best objects of a frame that may be sent."""
        targets: list[Target] = []
        seen = result.by_model
        first_class = 0  # of several models, each one's classes follow those of the one before
        for name, labels in (self._models or {result.roles.followed: self._labels}).items():
            if name in seen:
                targets += _targets_of(seen[name].decoded, labels, first_class)
            first_class += len(labels)
        chosen = self._config.classes
        allowed = [target for target in targets if not chosen or target.label in chosen]
        return sorted(allowed, key=lambda one: -one.score)[: self._config.max_targets]


def _targets_of(seen: Decoded, labels: Sequence[str], first_class: int) -> list[Target]:
    """Return the objects of one model."""
    if not isinstance(seen, Detections):
        return []
    tracks = [NO_NUMBER] * len(seen)
    if seen.track_ids is not None:
        tracks = [max(track, NO_NUMBER) for track in seen.track_ids.tolist()]
    rows = zip(
        seen.class_ids.tolist(), seen.scores.tolist(), seen.boxes.tolist(), tracks, strict=True
    )
    return [
        Target(first_class + class_id, label_of(labels, class_id), score, (x1, y1, x2, y2), track)
        for class_id, score, (x1, y1, x2, y2), track in rows
    ]


class _Records:
    """COBS frames; nothing is said beside them."""

    def frame(self, result: FrameResult, targets: Sequence[Target]) -> bytes:
        return cobs_frame(result.frame.seq, result.frame.t_capture.wall_ns // 10**6, targets)

    def periodic(self, now_s: float) -> bytes:
        return b""

    def received(self, data: bytes) -> bytes:
        return b""


class _Lines(_Records):
    """Lines like those of NMEA."""

    def frame(self, result: FrameResult, targets: Sequence[Target]) -> bytes:
        return nmea_lines(result.frame.seq, result.frame.t_capture.wall_ns // 10**6, targets)


class _Mavlink:
    """MAVLink 2, with the autopilot's clock."""

    def __init__(self, autopilot: Autopilot) -> None:
        self.periodic = autopilot.periodic
        self.received = autopilot.received
        self._autopilot = autopilot

    def frame(self, result: FrameResult, targets: Sequence[Target]) -> bytes:
        height, width = result.frame.size
        taken = result.frame.t_capture
        return self._autopilot.frame(taken.mono_ns, taken.wall_ns, targets, width, height)


def _open_dialect(config: SerialSink) -> Dialect:
    if config.dialect == "cobs":
        return _Records()
    if config.dialect == "nmea":
        return _Lines()
    return _Mavlink(
        Autopilot(config.hfov_deg, config.heights_m, config.system_id, config.component_id)
    )
