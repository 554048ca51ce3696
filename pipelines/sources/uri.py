"""Source addresses: which kind of source one names, its parts, and a form that may be logged."""

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from device.choices import list_choices
from device.errors import SourceError

CAMERA_KEYS = ("width", "height", "fps", "format")
CAMERA_FORMATS = ("raw", "mjpg")

# Greedy and across slashes: people write passwords with @ and / in them, and a path that holds an
# @ only loses the host in what is shown. One slash is a slip that must not show a password either.
_USER_INFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*:/+)[^\s]*@")
_SECRET = re.compile(r"(?P<key>[?&](?:\w*(?:pass\w*|pwd|token|secret|key|auth))=)[^&\s]*", re.I)


@dataclass(frozen=True, slots=True)
class Camera:
    """A V4L2 camera; None leaves the choice to the driver. `format`: raw or mjpg."""

    device: str
    width: int | None = None
    height: int | None = None
    fps: int | None = None
    format: str = "raw"


def redact(text: str) -> str:
    """Return the text with user names, passwords and tokens in its URLs replaced by ***."""
    return _SECRET.sub(r"\g<key>***", _USER_INFO.sub(r"\g<scheme>***@", text))


def scheme_of(uri: str) -> str:
    """Return the scheme of a source address; a plain path is a "file"."""
    scheme, separator, _ = uri.partition("://")
    return scheme.lower() if separator else "file"


def file_path(uri: str) -> str:
    """Return the path in `file:///path` or a plain path."""
    return uri.partition("://")[2] if scheme_of(uri) == "file" and "://" in uri else uri


def parse_camera(uri: str) -> Camera:
    """Read `v4l2:///dev/video0?width=1280&height=720&fps=30&format=mjpg`."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise SourceError(
            f"camera address {uri!r} is none ({error}): write v4l2:///dev/video0."
        ) from error
    device = parts.netloc + parts.path
    if not device.startswith("/dev/"):
        raise SourceError(
            f"camera address {uri!r} names no device: write v4l2:///dev/video0, with three slashes."
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for key in options:
        if key not in CAMERA_KEYS:
            raise SourceError(
                f"camera address {uri!r} has an unknown option {key!r}: use one of"
                f" {list_choices(key, CAMERA_KEYS)}."
            )
    form = options.pop("format", "raw")
    if form not in CAMERA_FORMATS:
        raise SourceError(
            f"camera address {uri!r} asks for format {form!r}: use one of"
            f" {list_choices(form, CAMERA_FORMATS)}."
        )
    numbers = {key: _positive(uri, key, value) for key, value in options.items()}
    return Camera(
        device, numbers.get("width"), numbers.get("height"), numbers.get("fps"), format=form
    )


def _positive(uri: str, key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise SourceError(
            f"camera address {uri!r} has {key}={value!r}: write a whole number above zero."
        )
    return int(value)
