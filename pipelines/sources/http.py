"""Network cameras that send JPEG pictures over HTTP: MJPEG streams and single pictures.

A part is complete with its last byte. FFmpeg, and GStreamer's multipartdemux where a camera gives
no length, wait for the boundary of the next part, which is one frame later.
"""

import http.client
import io
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from http import HTTPStatus
from typing import IO, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from device.errors import LONGEST_QUOTE, SourceError
from pipelines.frame import Stamp
from pipelines.pictures import PictureError, decode_picture
from pipelines.sources.live import Ended, FrameError, RawFrame
from pipelines.sources.uri import redact

OPEN_S = 8.0
LINE_BYTES = 8192  # of a part's header
PART_BYTES = 64 << 20  # more is no picture of a camera
LENGTH_DIGITS = 12  # of Content-Length
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
        self._wait = _Wait(stall_s, ended)
        self._opener, self._uri = _opener_for(uri, self._wait)
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
        # ValueError: of http.client, which reads numbers of any length
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SourceError(f"{self._name} {_why(error, self._stall_s)}.") from error
        received = Stamp.now()
        try:
            pixels = decode_picture(data)
        except PictureError as error:
            raise FrameError(str(error)) from error
        return RawFrame(pixels, "bgr", pixels.shape[1], pixels.shape[0], received, received)

    def close(self) -> None:
        """Close the connection."""
        self._response.close()

    def _open(self, timeout_s: float) -> http.client.HTTPResponse:
        self._wait.begin(timeout_s)
        try:
            response = self._opener.open(self._uri, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            meaning = STATUSES.get(error.code, f"answers {error.code} {_one_line(error.reason)}")
            error.close()
            raise SourceError(f"{self._name} {meaning}.") from error
        except urllib.error.URLError as error:
            reason = error.reason if isinstance(error.reason, OSError) else error
            raise SourceError(f"{self._name} {_why(reason, timeout_s)}.") from error
        # LookupError: of urllib, which reads a challenge
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            raise SourceError(f"{self._name} {_why(error, timeout_s)}.") from error
        assert isinstance(response, http.client.HTTPResponse)
        return response

    def _next_picture(self) -> bytes:
        while (wait_s := self._due_s - time.monotonic()) > 0.0 and not self._ended():
            time.sleep(min(wait_s, 0.1))
        self._due_s = time.monotonic() + 1.0 / PICTURES_HZ
        if self._response.isclosed():
            self._response = self._open(self._stall_s)
        self._wait.begin(self._stall_s)
        data = self._response.read(PART_BYTES)
        self._response.close()
        return data

    def _next_part(self) -> bytes:
        self._wait.begin(self._stall_s)
        length = self._skip_header()
        if length is None:
            return self._read_to_boundary()
        data = bytearray()
        while len(data) < length:
            piece = self._response.read1(length - len(data))
            if not piece:
                raise ConnectionResetError("the stream ended")
            data += piece
        return bytes(data)

    def _skip_header(self) -> int | None:
        """Read to the end of the next part's header; return its length if the camera says it."""
        length, began = None, False
        while True:
            self._wait.check()
            line = self._response.readline(LINE_BYTES)
            if not line:
                raise ConnectionResetError("the stream ended")
            text = line.strip()
            if began and not text:
                return length
            name, _, value = text.lower().partition(b":")
            if name == b"content-length" and value.strip().isdigit():
                digits = value.strip().decode()
                if len(digits) > LENGTH_DIGITS or int(digits) > PART_BYTES:
                    raise SourceError(
                        f"{self._name} announces a picture of {digits[:LENGTH_DIGITS]} bytes or"
                        f" more, over the limit of {PART_BYTES}: choose a smaller size in the"
                        " camera."
                    )
                length = int(digits)
            began = began or text.startswith(b"--") or bool(value)

    def _read_to_boundary(self) -> bytes:
        data = bytearray()
        while True:
            self._wait.check()
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


class _Wait:
    """The deadline of one answer or part: a limit for each wait alone lets bytes drip for ever."""

    def __init__(self, seconds: float, ended: Ended) -> None:
        self._ended = ended
        self.begin(seconds)

    def begin(self, seconds: float) -> None:
        """Let all that is read from now on take so long."""
        self._deadline_s = time.monotonic() + seconds

    def check(self) -> float:
        """Return the seconds that are left; raise TimeoutError if there are none."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0.0 or self._ended():
            raise TimeoutError
        return left_s


class _Bytes(io.RawIOBase):
    """The bytes of a socket until the end of a wait."""

    def __init__(self, connection: socket.socket, wait: _Wait) -> None:
        self._connection = connection
        self._file = connection.makefile("rb", buffering=0)  # keeps the socket open
        self._wait = wait

    def readable(self) -> bool:
        """It can be read."""
        return True

    def readinto(self, buffer: Any) -> int | None:  # noqa: ANN401  (any buffer)
        """See `io.RawIOBase`; raises TimeoutError."""
        self._connection.settimeout(self._wait.check())
        return self._file.readinto(buffer)

    def close(self) -> None:
        """Give the socket up."""
        self._file.close()
        super().close()


class _Pieces(io.BufferedReader):
    """Bytes in pieces that are counted: a chunk of size -1 means all that ever comes."""

    def read(self, size: int | None = -1, /) -> bytes:
        """See `io.BufferedReader`; raises ValueError."""
        if size is None or not 0 <= size <= PART_BYTES:
            raise ValueError(f"it announces a piece of {size} bytes")
        return super().read(size)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """To http:// and https:// alone; what a redirect says besides is not read."""

    def redirect_request(  # noqa: PLR0917  (of urllib)
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """See `urllib.request.HTTPRedirectHandler`, which reads all of `fp` after it."""
        fp.close()
        scheme = urlsplit(newurl).scheme
        if scheme not in ("http", "https"):
            raise ValueError(f"it redirects to {scheme}://")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _response_type(wait: _Wait) -> type[http.client.HTTPResponse]:
    class Response(http.client.HTTPResponse):
        """An answer that is read, from its first header on, until the end of a wait."""

        def __init__(
            self,
            sock: socket.socket,
            debuglevel: int = 0,
            method: str | None = None,
            url: str | None = None,
        ) -> None:
            super().__init__(sock, debuglevel, method, url)
            self.fp.close()
            self.fp = _Pieces(_Bytes(sock, wait))

    return Response


class _WaitingHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """http:// and https:// with such answers."""

    def __init__(self, wait: _Wait) -> None:
        super().__init__()
        self._response_type = _response_type(wait)

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """See `urllib.request.HTTPHandler`."""
        return self.do_open(self._connector(http.client.HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """See `urllib.request.HTTPSHandler`."""
        return self.do_open(self._connector(http.client.HTTPSConnection), request)

    def _connector(
        self, kind: type[http.client.HTTPConnection]
    ) -> Callable[..., http.client.HTTPConnection]:
        def connect(
            host: str,
            /,
            *,
            port: int | None = None,
            timeout: float = OPEN_S,
            source_address: tuple[str, int] | None = None,
        ) -> http.client.HTTPConnection:
            connection = kind(host, port, timeout=timeout, source_address=source_address)
            connection.response_class = self._response_type
            return connection

        return connect


def _boundary(headers: Message) -> bytes:
    name = headers.get_param("boundary")
    text = name if isinstance(name, str) else ""
    return b"--" + text.removeprefix("--").encode()


def _opener_for(uri: str, wait: _Wait) -> tuple[urllib.request.OpenerDirector, str]:
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
    ways = _WaitingHandler(wait)
    if parts.username is None:
        return urllib.request.build_opener(ways, _Redirects), plain
    passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
    passwords.add_password(None, plain, unquote(parts.username), unquote(parts.password or ""))
    basic = urllib.request.HTTPBasicAuthHandler(passwords)
    digest = urllib.request.HTTPDigestAuthHandler(passwords)
    return urllib.request.build_opener(ways, _Redirects, basic, digest), plain


def _why(error: object, limit_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"gave no picture for {limit_s:g} s: check the camera and its network"
    if isinstance(error, ConnectionRefusedError):
        return "does not answer: check host and port, and that it is switched on"
    if isinstance(error, socket.gaierror):
        return "has a host that is not known: check the address"
    return f"gives no pictures ({_one_line(error)}): check the camera and its network"


def _one_line(answer: object) -> str:
    """Return what a camera has said as a part of a sentence: it may send anything."""
    text = " ".join("".join(mark if mark.isprintable() else " " for mark in str(answer)).split())
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."
