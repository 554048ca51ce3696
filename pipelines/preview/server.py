"""Serves the preview page, the pictures of each camera as MJPEG, and the figures as JSON.

Pictures are drawn and encoded for a browser that watches, in its own thread: a pipeline without
a viewer pays one reference a frame.
"""

import logging
import re
import socket
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import msgspec

from device.errors import PipelineError
from device.protocol.messages import ChildMessage, Ready, Stats
from pipelines.host_header import answers
from pipelines.preview.page import PAGE
from pipelines.sinks.draw_result import draw_result
from pipelines.sinks.table import FrameResult
from pipelines.vision import cv2

LOOPBACK = "127.0.0.1"
MAX_HZ = 15.0  # of each stream
JPEG_QUALITY = 80
WIDTH = 960  # wider frames are scaled down
BOUNDARY = "tandem-frame"
MAX_STREAMS = 16  # each draws and encodes: more viewers would slow the pipeline down
REPEAT_S = 5.0  # a picture that stays is sent again, so that viewers who have gone are noticed

_log = logging.getLogger(__name__)


class CameraStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The latest frame of one camera; `age_ms`: since it was captured."""

    id: str
    source: str
    seq: int
    detections: int
    age_ms: float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What `status.json` holds; `stats` is null before the first figures."""

    pipeline: str
    cameras: tuple[CameraStatus, ...]
    stats: Stats | None


def parse_address(text: str) -> tuple[str, int]:
    """Read `:8090`, `8090` or `0.0.0.0:8090`; without a host this machine alone sees the page.

    Raises PipelineError: it is none of them.
    """
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise PipelineError(f"preview address {text!r} has no port: write :8090 or 0.0.0.0:8090.")
    return host.strip("[]") or LOOPBACK, int(port)


class Preview:
    """The latest result of each camera, served over HTTP while the `with` block is open."""

    def __init__(self, address: str) -> None:
        self._changed = threading.Condition()
        self._latest: dict[str, FrameResult] = {}
        self._stats: Stats | None = None
        self._pipeline = ""
        self._closed = False
        self.streams = threading.BoundedSemaphore(MAX_STREAMS)
        host, port = parse_address(address)
        kind = _Server6 if ":" in host else ThreadingHTTPServer
        try:
            self._server = kind((host, port), partial(_Handler, self))
        except (OSError, UnicodeError) as error:
            raise PipelineError(
                f"the preview cannot listen on {address} ({getattr(error, 'strerror', error)}):"
                " give another host or port."
            ) from error
        self._server.daemon_threads = True
        self.host = host
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="preview", daemon=True
        )

    @property
    def url(self) -> str:
        """Where a browser on this machine finds the page."""
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{LOOPBACK if name == '0.0.0.0' else name}:{port}/"

    def __enter__(self) -> "Preview":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all streams and close the port."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def on_message(self, message: ChildMessage) -> None:
        """Take the name and the figures of the pipeline."""
        if isinstance(message, Ready):
            self._pipeline = message.pipeline
        elif isinstance(message, Stats):
            self._stats = message

    def on_result(self, result: FrameResult) -> None:
        """Take the latest result of a camera."""
        with self._changed:
            self._latest[result.frame.camera] = result
            self._changed.notify_all()

    def status(self) -> Status:
        """Return the latest frame of each camera and the latest figures."""
        with self._changed:
            latest = sorted(self._latest.items())
        now_ns = time.monotonic_ns()
        return Status(
            pipeline=self._pipeline,
            stats=self._stats,
            cameras=tuple(
                CameraStatus(
                    id=camera,
                    source=result.frame.source,
                    seq=result.frame.seq,
                    detections=sum(len(result.rows_of(name)) for name in result.by_model),
                    age_ms=(now_ns - result.frame.t_capture.mono_ns) / 1e6,
                )
                for camera, result in latest
            ),
        )

    def wait_for(self, camera: str, after: FrameResult | None) -> FrameResult | None:
        """Return a camera's latest result once it is not `after`, or after REPEAT_S; None when the
        preview closes."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._latest.get(camera, after) is not after, REPEAT_S
            )
            return None if self._closed else self._latest[camera]

    def knows(self, camera: str) -> bool:
        """Whether a camera has given a result."""
        with self._changed:
            return camera in self._latest

    def picture(self, result: FrameResult) -> bytes:
        """Return a result as JPEG, with what was found drawn on it."""
        image = draw_result(result)
        height, width = image.shape[:2]
        if width > WIDTH:
            size = (WIDTH, max(1, height * WIDTH // width))
            scaled = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
        else:
            scaled = image
        _, data = cv2.imencode(".jpg", scaled, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
        return data.tobytes()


class _Server6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    """Answers GET; each stream has a thread of its own."""

    timeout = 10.0  # a viewer that takes nothing for so long is dropped

    def __init__(
        self,
        preview: Preview,
        request: socket.socket,
        client_address: tuple[str, int],
        server: ThreadingHTTPServer,
    ) -> None:
        self._preview = preview
        super().__init__(request, client_address, server)

    def do_GET(self) -> None:
        """Answer with the page, the figures, or a stream."""
        path = unquote(self.path.partition("?")[0])
        if not answers(self._preview.host, self.headers.get("Host", "")):
            self.send_error(421, "this page is for this machine alone")
        elif path == "/":
            self._send("text/html; charset=utf-8", PAGE.encode())
        elif path == "/status.json":
            self._send("application/json", msgspec.json.encode(self._preview.status()))
        elif path.startswith("/stream/") and self._preview.knows(path.removeprefix("/stream/")):
            self._stream(path.removeprefix("/stream/"))
        else:
            self.send_error(404, "there are /, /status.json and /stream/CAMERA")

    def log_message(self, *args: object) -> None:
        """Say nothing: a page asks twice a second."""

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, camera: str) -> None:
        if not self._preview.streams.acquire(blocking=False):
            self.send_error(503, f"{MAX_STREAMS} pictures are watched already: close some of them")
            return
        try:
            self._send_pictures(camera)
        finally:
            self._preview.streams.release()

    def _send_pictures(self, camera: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", f"multipart/x-mixed-replace; boundary={BOUNDARY}")
        self.send_header("Cache-Control", "no-store")
        last: FrameResult | None = None
        try:
            self.end_headers()
            while (last := self._preview.wait_for(camera, last)) is not None:
                started_s = time.monotonic()
                data = self._preview.picture(last)
                head = f"Content-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
                self.wfile.write(f"--{BOUNDARY}\r\n{head}".encode() + data + b"\r\n")
                time.sleep(max(0.0, started_s + 1.0 / MAX_HZ - time.monotonic()))
        except OSError as error:
            _log.debug("a viewer of %s has gone: %s", camera, error)
