"""Files of pictures -> pixels. The header says the size before any pixel is decoded.

A file of some hundred bytes can announce gigabytes of pixels, or ask for minutes of work: what the
header says is compared with limits first. A format without a row in `FORMATS` is refused.
"""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from device.errors import SourceError
from pipelines.frame import Image
from pipelines.vision import MAX_PIXELS, cv2

MAX_FLOAT_PIXELS = MAX_PIXELS // 4  # OpenCV decodes these to 12 bytes a pixel first
# A text line has up to 128. A centre crop makes the shorter side as long as the input is.
MAX_ASPECT = 256
# Each scan of a progressive JPEG visits every pixel; encoders write 10 to 20.
MAX_SCANNED_PIXELS = 20 * MAX_PIXELS
MAX_FILE_BYTES = 8 * MAX_PIXELS  # 16 bits in four channels, not compressed
MAX_CHUNKS = 100_000  # of a PNG; libpng writes 8 KiB of packed pixels into each

_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length
_JPEG_NO_FRAME = frozenset({0xC4, 0xC8, 0xCC})  # of 0xC0 to 0xCF, those that are no SOF
_WEBP_ANIMATED = 0x02  # OpenCV keeps several frames of such ones
_TIFF_KINDS = {1: "B", 3: "H", 4: "I"}  # BYTE, SHORT, LONG of TIFF 6.0
_BIG_TIFF_KINDS = {**_TIFF_KINDS, 16: "Q"}  # LONG8; elsewhere it stands behind an offset
_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_TILE_WIDTH, _TIFF_TILE_HEIGHT = 256, 257, 322, 323

# Comments end at a carriage return, too, and begin after white space, in which each number ends.
_PNM_GAP = rb"\s(?:\s|#[^\r\n]*[\r\n])*"
_PNM_SIZE = re.compile(_PNM_GAP + rb"([^\s#]+)" + _PNM_GAP + rb"([^\s#]+)\s")
_HDR_LINE = 120  # OpenCV reads lines of 127 bytes, and what is left as another line


class PictureError(SourceError):
    """These bytes are no picture that may be decoded."""


@dataclass(frozen=True, slots=True)
class PictureSize:
    """Width and height in pixels; `scans`: how often the decoder visits all of them."""

    width: int
    height: int
    scans: int = 1


def _jpeg_size(data: bytes) -> PictureSize:
    """ITU-T T.81, annex B: the segments up to the first frame header (SOF)."""
    at = 2
    while data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # fill bytes
            at += 1
            continue
        at += 2
        if marker in _JPEG_ALONE:
            continue
        (length,) = struct.unpack_from(">H", data, at)
        if 0xC0 <= marker <= 0xCF and marker not in _JPEG_NO_FRAME:
            height, width = struct.unpack_from(">HH", data, at + 3)
            return PictureSize(width, height, data.count(b"\xff\xda", at))
        if marker in (0xD9, 0xDA):
            break
        at += length
    raise ValueError("it has no frame header")


def _png_size(data: bytes) -> PictureSize:
    """PNG (ISO/IEC 15948), 11.2.2: IHDR is the first chunk. OpenCV keeps several frames of APNG."""
    if data[12:16] != b"IHDR":
        raise ValueError("its first chunk is not IHDR")
    size = PictureSize(*struct.unpack_from(">II", data, 16))
    at = 8
    for _ in range(MAX_CHUNKS):
        kind, length = data[at + 4 : at + 8], int.from_bytes(data[at : at + 4], "big")
        at += 12 + length
        if kind == b"acTL":
            raise ValueError("it is animated")
        if at > len(data):  # OpenCV takes the memory of a chunk, up to 4 GiB, before it reads it
            raise ValueError(f"its chunk {kind!r} of {length} bytes is not whole")
        if kind == b"IEND":
            return size
    raise ValueError(f"it has more than {MAX_CHUNKS} chunks")


def _bmp_size(data: bytes) -> PictureSize:
    """BITMAPCOREHEADER has 16-bit sizes, all later ones 32; rows from the top have height < 0."""
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    if header_bytes == 12:
        return PictureSize(*struct.unpack_from("<HH", data, 18))
    width, height = struct.unpack_from("<ii", data, 18)
    return PictureSize(width, abs(height))


def _webp_size(data: bytes) -> PictureSize:
    """RFC 9649, sections 2.5 to 2.7, and RFC 6386, 9.1."""
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = data[24:27], data[27:30]
        if len(height) < 3:
            raise ValueError("its header ends early")
        if data[20] & _WEBP_ANIMATED:
            raise ValueError("it is animated")
        return PictureSize(
            int.from_bytes(width, "little") + 1, int.from_bytes(height, "little") + 1
        )
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return PictureSize((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return PictureSize(width & 0x3FFF, height & 0x3FFF)
    raise ValueError(f"its first chunk is {kind!r}")


def _tiff_size(data: bytes) -> PictureSize:
    """TIFF 6.0, sections 2 and 15: the tags of the first directory. A tile is decoded whole."""
    order = "<" if data[:2] == b"II" else ">"
    big = struct.unpack_from(order + "H", data, 2)[0] == 43  # BigTIFF
    (at,) = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
    (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, at)
    entry_bytes, value_at = (20, 12) if big else (12, 8)
    kinds = _BIG_TIFF_KINDS if big else _TIFF_KINDS
    tags: dict[int, int] = {}
    first = at + (8 if big else 2)
    for entry in range(first, first + count * entry_bytes, entry_bytes):
        tag, kind = struct.unpack_from(order + "HH", data, entry)
        if tag in (_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_TILE_WIDTH, _TIFF_TILE_HEIGHT):
            code = kinds.get(kind)
            if code is None:
                raise ValueError(f"the type of its tag {tag} is {kind}")
            if tag in tags:  # libtiff takes the first one
                raise ValueError(f"it has two tags {tag}")
            (tags[tag],) = struct.unpack_from(order + code, data, entry + value_at)
    if _TIFF_WIDTH not in tags or _TIFF_HEIGHT not in tags:
        raise ValueError("its first directory does not say its size")
    return PictureSize(
        max(tags[_TIFF_WIDTH], tags.get(_TIFF_TILE_WIDTH, 0)),
        max(tags[_TIFF_HEIGHT], tags.get(_TIFF_TILE_HEIGHT, 0)),
    )


def _pnm_size(data: bytes) -> PictureSize:
    """Netpbm's pbm, pgm and ppm: numbers between white space, and comments to the end of a line."""
    sizes = _PNM_SIZE.match(data, 2, 4096)
    if sizes is None:
        raise ValueError("its first 4096 bytes do not say its size")
    return PictureSize(_number(sizes[1]), _number(sizes[2]))


def _hdr_size(data: bytes) -> PictureSize:
    """Radiance's .hdr: lines up to an empty one, then `-Y height +X width`."""
    head, _, rest = data[: 64 << 10].partition(b"\n\n")
    line, end, _ = rest.partition(b"\n")
    words = line.split()
    if not end or len(words) != 4 or (words[0], words[2]) != (b"-Y", b"+X"):
        raise ValueError("its header does not end in -Y height +X width")
    if any(len(one) > _HDR_LINE for one in head.split(b"\n")):
        raise ValueError(f"its header has a line of more than {_HDR_LINE} bytes")
    return PictureSize(_number(words[3]), _number(words[1]))


def _number(word: bytes) -> int:
    if not word.isdigit() or len(word) > 9:
        raise ValueError(f"{word[:20]!r} is no size")
    return int(word)


@dataclass(frozen=True, slots=True)
class Format:
    """A format of pictures: how its files begin, and where they say their size."""

    name: str
    begins: Callable[[bytes], bool]
    size: Callable[[bytes], PictureSize]
    max_pixels: int = MAX_PIXELS


# OpenCV decodes more: GIF, JPEG 2000, OpenEXR, AVIF, Sun raster, PAM, PFM. No camera sends them.
FORMATS = (
    Format("JPEG", lambda data: data[:3] == b"\xff\xd8\xff", _jpeg_size),
    Format("PNG", lambda data: data[:8] == b"\x89PNG\r\n\x1a\n", _png_size),
    Format("BMP", lambda data: data[:2] == b"BM", _bmp_size),
    Format("WebP", lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP", _webp_size),
    Format(
        "TIFF",
        lambda data: data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
        _tiff_size,
    ),
    Format("PNM", lambda data: data[:1] == b"P" and data[1:2] in b"123456", _pnm_size),
    Format(
        "HDR",
        lambda data: data[:7] == b"#?RGBE\n" or data[:11] == b"#?RADIANCE\n",
        _hdr_size,
        MAX_FLOAT_PIXELS,
    ),
)  # fmt: skip


def picture_size(data: bytes) -> PictureSize:
    """Return the size that the header of a picture says.

    Raises PictureError: no format of `FORMATS`, a damaged header, or a size beyond the limits.
    """
    kind = next((one for one in FORMATS if one.begins(data)), None)
    if kind is None:
        known = ", ".join(one.name for one in FORMATS)
        raise PictureError(f"{len(data)} bytes are no picture of {known}")
    try:
        size = kind.size(data)
    except (IndexError, struct.error) as error:
        raise PictureError(f"a {kind.name} picture ends within its header") from error
    except ValueError as error:
        raise PictureError(f"a {kind.name} picture is damaged: {error}") from error
    why = _why_too_large(size, kind.max_pixels)
    if why is not None:
        raise PictureError(f"a {kind.name} picture {why}")
    return size


def _why_too_large(size: PictureSize, max_pixels: int) -> str | None:
    width, height = size.width, size.height
    if width < 1 or height < 1:
        return f"of {width}x{height} has no pixels"
    if width * height > max_pixels:
        return f"of {width}x{height} has more than {max_pixels} pixels"
    if max(width, height) > MAX_ASPECT * min(width, height):
        return f"of {width}x{height} has one side more than {MAX_ASPECT} times the other"
    if size.scans * width * height > MAX_SCANNED_PIXELS:
        return f"of {width}x{height} has {size.scans} scans, more than it may have at its size"
    return None


def decode_picture(data: bytes) -> Image:
    """Return a picture, uint8 [H, W, 3] BGR. Raises PictureError."""
    size = picture_size(data)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise PictureError(f"OpenCV cannot decode a picture: {error.err}") from error
    if image is None:
        raise PictureError(f"a picture of {size.width}x{size.height} is damaged")
    return np.asarray(image, np.uint8)


def read_picture(path: Path) -> Image:
    """Return the picture in a file, uint8 [H, W, 3] BGR. Raises PictureError and OSError."""
    if not path.is_file():
        raise PictureError("it is no file")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise PictureError(f"{size} bytes are more than a picture may have ({MAX_FILE_BYTES})")
    return decode_picture(path.read_bytes())
