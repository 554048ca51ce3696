"""GStreamer Data Protocol 1.0, as `gdppay` writes it: raw frames with their size and time.

A packet is a 62-byte header, then its payload. Caps say how large the frames are, buffers are the
frames; everything else (events) is skipped.
"""

import re
import struct
from dataclasses import dataclass
from typing import Literal

from device.errors import SourceError

HEADER_BYTES = 62
MAX_PAYLOAD = 128 << 20  # an 8K NV12 frame is 48 MiB; more is a damaged stream

_FIELDS = struct.Struct(">BBBxHIQ")  # version major, minor, flags, kind, length, pts in ns
_NO_PTS = (1 << 64) - 1
_KINDS: dict[int, Literal["buffer", "caps"]] = {1: "buffer", 2: "caps"}


@dataclass(frozen=True, slots=True)
class Packet:
    """The header of a packet; `pts_ns` is None where GStreamer gave no time."""

    kind: Literal["buffer", "caps", "other"]
    length: int
    pts_ns: int | None


@dataclass(frozen=True, slots=True)
class Nv12Layout:
    """The layout of an NV12 frame in GStreamer's memory: rows are padded to four bytes.

    `fps`: frames a second, where the stream says so.
    """

    width: int
    height: int
    fps: float | None = None

    @property
    def stride(self) -> int:
        """Bytes of a row."""
        return (self.width + 3) & ~3

    @property
    def rows(self) -> int:
        """Rows of the luma plane, padded to an even number."""
        return (self.height + 1) & ~1

    @property
    def size(self) -> int:
        """Bytes of a frame: the luma plane and half as much chroma."""
        return self.stride * self.rows * 3 // 2


def parse_header(header: bytes | bytearray) -> Packet:
    """Read a 62-byte header; raise SourceError if it is not one."""
    major, minor, _, kind, length, pts = _FIELDS.unpack_from(header)
    if (major, minor) != (1, 0) or length > MAX_PAYLOAD:
        raise SourceError(
            f"the GStreamer process sent something that is not a frame (protocol {major}.{minor},"
            f" {length} bytes; 1.0 and at most {MAX_PAYLOAD} expected): check what else writes to"
            " its standard output."
        )
    return Packet(_KINDS.get(kind, "other"), length, None if pts == _NO_PTS else pts)


def parse_caps(payload: bytes | bytearray) -> Nv12Layout:
    """Read size and rate from `video/x-raw, format=(string)NV12, width=(int)640, ...`."""
    text = bytes(payload).rstrip(b"\0").decode("utf-8", "replace")
    fields = {
        key: match[1]
        for key, pattern in (
            ("width", r"\bwidth=\(int\)(\d+)"),
            ("height", r"\bheight=\(int\)(\d+)"),
            ("format", r"\bformat=\(string\)NV12()"),
        )
        if (match := re.search(pattern, text))
    }
    if len(fields) != 3 or not (0 < int(fields["width"]) <= 16384 >= int(fields["height"]) > 0):
        raise SourceError(f"the GStreamer process sent frames that are not NV12: {text[:200]}.")
    rate = re.search(r"\bframerate=\(fraction\)([1-9]\d*)/([1-9]\d*)", text)  # 0/1: unknown
    fps = int(rate[1]) / int(rate[2]) if rate else None
    return Nv12Layout(int(fields["width"]), int(fields["height"]), fps)
