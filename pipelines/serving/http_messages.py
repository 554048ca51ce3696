"""Heads of HTTP requests, bodies in chunks, and answers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pipelines.serving.protocol import (
    Refusal,
    Status,
    refuse,
)

MAX_HEADERS = 100
HEADER_LENGTH = "inference-header-content-length"
PHRASES = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found",
    405: "Method Not Allowed", 413: "Content Too Large", 421: "Misdirected Request",
    429: "Too Many Requests", 431: "Request Header Fields Too Large",
    500: "Internal Server Error", 501: "Not Implemented", 503: "Service Unavailable",
    504: "Gateway Timeout",
}  # fmt: skip
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\0\r\n]")


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request; header names in lower case. `size`: of a body that is not `chunked`;
    `header_length`: of the JSON before binary tensors."""

    method: str
    path: str
    headers: Mapping[str, str]
    keeps_open: bool
    chunked: bool
    size: int | None
    header_length: int | None


class Answer(msgspec.Struct, frozen=True):
    """What is sent back: `parts` of the body, and headers beside their length."""

    parts: Sequence[bytes | memoryview] = ()
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)


def parse_head(blob: bytes) -> Head:
    """Return a head. Raises Refusal."""
    first, *lines = blob.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        refuse(f"{first[:100]!r} is no request line of HTTP/1.1")
    if len(lines) > MAX_HEADERS:
        refuse(
            f"the request has {len(lines)} headers; this server takes {MAX_HEADERS}",
            Status.HEADER_TOO_LARGE,
        )
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _HEADER.fullmatch(name) or _CONTROL.search(value):
            refuse(f"{line[:100]!r} is no header")
        name, value = name.lower(), value.strip()
        if name in headers:
            if name in {"content-length", "transfer-encoding", "host", HEADER_LENGTH}:
                refuse(f"the header {name!r} is given twice")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    connection = headers.get("connection", "").lower()
    keeps_open = "close" not in connection and (
        words[2] != "HTTP/1.0" or "keep-alive" in connection
    )
    size = _length_of(headers, "content-length")
    encoding = headers.get("transfer-encoding", "").lower()
    if encoding not in {"", "chunked"}:
        refuse(f"the transfer-encoding is {encoding!r}: this server takes 'chunked' alone")
    if encoding and size is not None:  # it does not count, and what follows is not read:
        keeps_open = False  # RFC 9112, 6.3
    return Head(
        words[0], words[1].partition("?")[0], headers, keeps_open, bool(encoding), size,
        _length_of(headers, HEADER_LENGTH),
    )  # fmt: skip


def _length_of(headers: Mapping[str, str], name: str) -> int | None:
    """Return a header that is a length. Raises Refusal."""
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        refuse(f"the header {name!r} is {text[:100]!r}: give a whole number of bytes, 0 or more")
    return int(text)


class Chunks:
    """A body in chunks."""

    def __init__(self, limit: int) -> None:
        self.body = bytearray()
        self.done = False
        self._limit = limit
        self._missing = 0  # of the chunk and the line end behind it
        self._trailer = False

    def feed(self, data: memoryview) -> int:
        """Take what has come; return how many bytes of it are used. Raises Refusal."""
        used = 0
        while not self.done:
            if self._missing > 2:
                part = data[used : used + self._missing - 2]
                if not part:
                    return used
                self.body += part
                self._missing -= len(part)
                used += len(part)
                continue
            end = bytes(data[used : used + 1024]).find(b"\r\n")
            if end < 0:
                if len(data) - used > 512:
                    refuse("a chunk's size is a line of more than 512 bytes")
                return used
            self._take_line(bytes(data[used : used + end]))
            used += end + 2
        return used

    def _take_line(self, line: bytes) -> None:
        if self._missing == 2:
            if line:
                refuse("a chunk is longer than its size says")
            self._missing = 0
            return
        if self._trailer:
            self.done = not line
            return
        text = line.partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", text):
            refuse(f"{line[:40]!r} is no size of a chunk")
        size = int(text, 16)
        if len(self.body) + size > self._limit:
            refuse(
                f"the request has {len(self.body) + size} bytes or more; this server takes"
                f" {self._limit}",
                Status.TOO_LARGE,
            )
        self._missing, self._trailer = (size + 2, False) if size else (0, True)


def refused(refusal: Refusal) -> Answer:
    """Return the answer that says why."""
    body = msgspec.json.encode({"error": str(refusal)})
    return Answer((body,), refusal.status.value[0])
