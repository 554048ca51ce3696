"""Network cameras that send JPEG pictures over HTTP: MJPEG streams and single pictures.

A part is complete with its last byte. FFmpeg, and GStreamer's multipartdemux where a camera gives
no length, wait for the boundary of the next part, which is one frame later.
"""

import http.client
import socket
import time
import urllib.error
import urllib.request
from email.message import Message
from http import HTTPStatus
from urllib.parse import unquote, urlsplit, urlunsplit

import numpy as np

from device.errors import SourceError
from pipelines.frame import Stamp
from pipelines.sources.live import Ended, RawFrame
from pipelines.sources.uri import redact
from pipelines.vision import cv2

OPEN_S = 8.0
LINE_BYTES = 8192  # of a part's header
PART_BYTES = 64 << 20  # more is no picture of a camera
PICTURES_HZ = 5.0  # how often a camera that sends single pictures is asked
END_OF_IMAGE = b"\xff\xd9"
STREAM = "multipart/x-mixed-replace"

# HTTP status -> what it means and what to do.
STATUSES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "refused the credentials: check the user and password in the address",
    HTTPStatus.FORBIDDEN: "refuses this user: give the user the right to watch, in the camera",
    HTTPStatus.NOT_FOUND: "has no such stream: check the path in the address",
}


class HttpCapture:
    """One connection to a camera; what it sends, a stream or one picture, it says itself."""

    def __init__(self, uri: str, stall_s: float, ended: Ended) -> None:
        self._name = redact(uri)
        self._stall_s = stall_s
        self._ended = ended
        self._opener, self._uri = _opener_for(uri)
        self._response = self._open(OPEN_S)
        kind = self._response.headers.get_content_type()
        if kind != STREAM and not kind.startswith("image/"):
            self.close()
            raise SourceError(
                f"{self._name} sends {kind!r}, neither MJPEG ({STREAM}) nor a picture (image/...):"
                " use the camera's rtsp:// address, or a gst:// pipeline for this format."
            )
        self._stream = kind == STREAM
        self._boundary = _boundary(self._response.headers)
        self._due_s = time.monotonic()

    def read(self) -> RawFrame:
        """Wait for a picture; raise SourceError at the end, an error or a stall."""
        try:
            data = self._next_part() if self._stream else self._next_picture()
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(f"{self._name} {_why(error, self._stall_s)}.") from error
        received = Stamp.now()
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if data else None
        if image is None:
            raise SourceError(
                f"{self._name} sent {len(data)} bytes that are no picture: it is opened again."
            )
        pixels = np.asarray(image, np.uint8)
        return RawFrame(pixels, "bgr", pixels.shape[1], pixels.shape[0], received, received)

    def close(self) -> None:
        """Close the connection."""
        self._response.close()

    def _open(self, timeout_s: float) -> http.client.HTTPResponse:
        try:
            response = self._opener.open(self._uri, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            meaning = STATUSES.get(error.code, f"answers {error.code} {error.reason}")
            error.close()
            raise SourceError(f"{self._name} {meaning}.") from error
        except urllib.error.URLError as error:
            reason = error.reason if isinstance(error.reason, OSError) else error
            raise SourceError(f"{self._name} {_why(reason, timeout_s)}.") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SourceError(f"{self._name} {_why(error, timeout_s)}.") from error
        assert isinstance(response, http.client.HTTPResponse)
        _set_timeout(response, self._stall_s)
        return response

    def _next_picture(self) -> bytes:
        while (wait_s := self._due_s - time.monotonic()) > 0.0 and not self._ended():
            time.sleep(min(wait_s, 0.1))
        self._due_s = time.monotonic() + 1.0 / PICTURES_HZ
        if self._response.isclosed():
            self._response = self._open(self._stall_s)
        data = self._response.read(PART_BYTES)
        self._response.close()
        return data

    def _next_part(self) -> bytes:
        deadline_s = time.monotonic() + self._stall_s
        length = self._skip_header(deadline_s)
        if length is None:
            return self._read_to_boundary(deadline_s)
        data = bytearray()
        while len(data) < length:
            self._check(deadline_s)
            piece = self._response.read1(length - len(data))
            if not piece:
                raise ConnectionResetError("the stream ended")
            data += piece
        return bytes(data)

    def _skip_header(self, deadline_s: float) -> int | None:
        """Read to the end of the next part's header; return its length if the camera says it."""
        length, began = None, False
        while True:
            self._check(deadline_s)
            line = self._response.readline(LINE_BYTES)
            if not line:
                raise ConnectionResetError("the stream ended")
            text = line.strip()
            if began and not text:
                return length
            name, _, value = text.lower().partition(b":")
            if name == b"content-length" and value.strip().isdigit():
                length = int(value)
                if length > PART_BYTES:
                    raise SourceError(
                        f"{self._name} announces a picture of {length} bytes, more than"
                        f" {PART_BYTES}: choose a smaller size in the camera."
                    )
            began = began or text.startswith(b"--") or bool(value)

    def _read_to_boundary(self, deadline_s: float) -> bytes:
        data = bytearray()
        while True:
            self._check(deadline_s)
            line = self._response.readline(PART_BYTES)
            if not line:
                raise ConnectionResetError("the stream ended")
            if line.startswith(self._boundary) and END_OF_IMAGE in data[-8:]:
                return bytes(data)
            data += line
            if len(data) > PART_BYTES:
                raise SourceError(
                    f"{self._name} sends a picture of more than {PART_BYTES} bytes: choose a"
                    " smaller size in the camera."
                )

    def _check(self, deadline_s: float) -> None:
        if self._ended() or time.monotonic() > deadline_s:
            raise TimeoutError


def _boundary(headers: Message) -> bytes:
    name = headers.get_param("boundary")
    text = name if isinstance(name, str) else ""
    return b"--" + text.removeprefix("--").encode()


def _opener_for(uri: str) -> tuple[urllib.request.OpenerDirector, str]:
    """Return an opener with the user and password of an address, and the address without them."""
    try:
        parts = urlsplit(uri)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        place = host if parts.port is None else f"{host}:{parts.port}"
    except ValueError as error:
        raise SourceError(f"{redact(uri)} is no address ({error}): correct it.") from error
    if not parts.hostname:
        raise SourceError(f"{redact(uri)} names no host: write http://host:port/path.")
    plain = urlunsplit((parts.scheme, str(place), parts.path, parts.query, ""))
    if parts.username is None:
        return urllib.request.build_opener(), plain
    passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
    passwords.add_password(None, plain, unquote(parts.username), unquote(parts.password or ""))
    basic = urllib.request.HTTPBasicAuthHandler(passwords)
    digest = urllib.request.HTTPDigestAuthHandler(passwords)
    return urllib.request.build_opener(basic, digest), plain


def _set_timeout(response: http.client.HTTPResponse, seconds: float) -> None:
    """Limit each wait for bytes of an answer, whatever the limit was while it was opened."""
    raw = getattr(response.fp, "raw", None)
    connection = getattr(raw, "_sock", None)
    if isinstance(connection, socket.socket):
        connection.settimeout(seconds)


def _why(error: object, limit_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"gave no picture for {limit_s:g} s: check the camera and its network"
    if isinstance(error, ConnectionRefusedError):
        return "does not answer: check host and port, and that it is switched on"
    if isinstance(error, socket.gaierror):
        return "has a host that is not known: check the address"
    return f"gives no pictures ({error}): check the camera and its network"
