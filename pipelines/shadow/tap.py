"""Hands out frames of a running pipeline, with what it saw in them, to a shadow process.

The loop of the pipeline only copies a frame, and only after a shadow has asked for one: a thread
sends it. A shadow that is slow, hangs or dies costs the pipeline nothing more than that copy.
"""

import contextlib
import logging
import queue
import select
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from device.protocol.control import listen
from pipelines.frame import Frame
from pipelines.results import Decoded
from pipelines.shadow.wire import Hello, Sample, encode

SEND_S = 10.0  # a shadow that takes nothing for so long is cut off
LOOK_S = 0.5  # between two looks whether a shadow that waits for a frame is still there

_log = logging.getLogger(__name__)


class Tap:
    """Listens on a Unix socket of its owner alone, for one shadow at a time.

    A pipeline whose socket cannot be opened runs without it, and says so in its log.
    """

    def __init__(
        self, path: Path, *, pipeline: str, labels: Sequence[str], cameras: Sequence[str]
    ) -> None:
        hello = Hello(pipeline=pipeline, labels=tuple(labels), cameras=tuple(cameras))
        self._path = path
        self._hello = msgspec.json.encode(hello) + b"\n"
        self._requested = threading.Event()
        self._samples: queue.SimpleQueue[list[bytes | memoryview]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._listener: socket.socket | None = None

    def __enter__(self) -> "Tap":
        """Listen."""
        try:
            self._listener = listener = listen(self._path.parent, self._path.name)
            threading.Thread(
                target=self._accept, args=(listener,), name="shadow-tap", daemon=True
            ).start()
        except (OSError, RuntimeError) as error:
            self._close()
            _log.warning("no release can run in the shadow of this one: %s", error)
        return self

    def __exit__(self, *_: object) -> None:
        """Listen no more."""
        self._closing.set()
        self._close()

    def _close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            with contextlib.suppress(OSError):
                self._path.unlink()

    def offer(self, frame: Frame, decoded: Callable[[], Decoded]) -> None:
        """Take a copy of a frame and its result, if a shadow waits for one."""
        if not self._requested.is_set():
            return
        self._requested.clear()
        self._samples.put(encode(Sample(frame, decoded())))

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with connection:
                try:
                    connection.settimeout(SEND_S)
                    self._serve(connection)
                except OSError as error:
                    _log.info("the shadow has gone: %s", error)
            self._requested.clear()

    def _serve(self, connection: socket.socket) -> None:
        """Send a sample for each byte that is received, until the shadow closes. Raises OSError."""
        connection.sendall(self._hello)
        while not self._closing.is_set():
            if not _is_readable(connection, LOOK_S):
                continue
            if not connection.recv(1):
                return
            with contextlib.suppress(queue.Empty):
                while True:
                    self._samples.get_nowait()  # one that an earlier shadow asked for
            self._requested.set()
            sample = self._await_sample(connection)
            if sample is None:
                return
            for part in sample:
                connection.sendall(part)

    def _await_sample(self, connection: socket.socket) -> list[bytes | memoryview] | None:
        """Return the next sample; None: the shadow or the pipeline ends."""
        while not self._closing.is_set():
            with contextlib.suppress(queue.Empty):
                return self._samples.get(timeout=LOOK_S)
            if _is_readable(connection, 0.0):  # it asks for nothing before it has an answer
                return None
        return None


def _is_readable(connection: socket.socket, wait_s: float) -> bool:
    return bool(select.select([connection], [], [], wait_s)[0])
