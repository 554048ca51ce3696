"""Source addresses: which kind of source one names, its parts, and a form that may be logged."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from device.choices import list_choices
from device.errors import SourceError
from pipelines.sink_config import Ros2Qos, Ros2Sink, Ros2Wire

CAMERA_KEYS = ("width", "height", "fps", "format")
CAMERA_FORMATS = ("raw", "mjpg")
CSI_KEYS = ("width", "height", "fps", "flip")
CSI_SIZE = {"width": 1280, "height": 720, "fps": 30}
FLIPS = tuple(map(str, range(8)))  # of nvvidconv's flip-method
TEST_KEYS = ("width", "height", "fps")
IMAGE_KEYS = ("fps",)
MCAP_KEYS = ("topic",)
ROS2_KEYS = ("wire", "domain", "node", "connect", "qos")
LARGEST = 16384

# Greedy and across slashes: people write passwords with @ and / in them, and a path that holds an
# @ only loses the host in what is shown. One slash is a slip that must not show a password either.
_USER_INFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*:/+)[^\s]*@")
_SECRET = re.compile(r"(?P<key>[?&](?:\w*(?:pass\w*|pwd|token|secret|key|auth))=)[^&\s]*", re.I)
# Properties of GStreamer elements, such as `user-pw` of rtspsrc and `passphrase` of srtsrc.
_PROPERTY = re.compile(
    r"(?P<key>(?<![\w?&-])(?:[\w-]+-)?(?:pw|password|passphrase|token|access-key)=)"
    r"(?:\"[^\"]*\"|'[^']*'|\S+)",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Camera:
    """A V4L2 camera; None leaves the choice to the driver. `format`: raw or mjpg."""

    device: str
    width: int | None = None
    height: int | None = None
    fps: int | None = None
    format: str = "raw"


@dataclass(frozen=True, slots=True)
class CsiCamera:
    """A camera on the board's CSI port, through the board's image processor."""

    sensor: int
    width: int
    height: int
    fps: int
    flip: int = 0


@dataclass(frozen=True, slots=True)
class TestPattern:
    """A picture that moves, for pipelines without a camera."""

    __test__ = False  # not a test of pytest's

    width: int = 640
    height: int = 480
    fps: int = 30


@dataclass(frozen=True, slots=True)
class Ros2Topic:
    """A topic of ROS 2 and how it is reached; see `pipelines.ros2.wire.Node`."""

    topic: str
    wire: Ros2Wire
    domain: int
    node: str
    connect: tuple[str, ...]
    qos: Ros2Qos


def redact(text: str) -> str:
    """Return the text with user names, passwords and tokens in its URLs, and those that GStreamer's
    elements get, replaced by ***."""
    text = _SECRET.sub(r"\g<key>***", _USER_INFO.sub(r"\g<scheme>***@", text))
    return _PROPERTY.sub(r"\g<key>***", text)


def scheme_of(uri: str) -> str:
    """Return the scheme of a source address; a plain path is a "file"."""
    scheme, separator, _ = uri.partition("://")
    return scheme.lower() if separator else "file"


def file_path(uri: str) -> str:
    """Return the path in `file:///path` or a plain path."""
    return uri.partition("://")[2] if scheme_of(uri) == "file" and "://" in uri else uri


def parse_camera(uri: str) -> Camera:
    """Read `v4l2:///dev/video0?width=1280&height=720&fps=30&format=mjpg`."""
    device, options = _read_address(uri, "camera", CAMERA_KEYS, "v4l2:///dev/video0")
    if not device.startswith("/dev/"):
        raise SourceError(
            f"camera address {uri!r} names no device: write v4l2:///dev/video0, with three slashes."
        )
    form = options.pop("format", "raw")
    if form not in CAMERA_FORMATS:
        raise SourceError(
            f"camera address {uri!r} asks for format {form!r}: use one of"
            f" {list_choices(form, CAMERA_FORMATS)}."
        )
    numbers = {key: _positive(uri, "camera", key, value) for key, value in options.items()}
    return Camera(
        device, numbers.get("width"), numbers.get("height"), numbers.get("fps"), format=form
    )


def parse_csi(uri: str) -> CsiCamera:
    """Read `csi://0?width=1920&height=1080&fps=30&flip=2`."""
    sensor, options = _read_address(uri, "CSI camera", CSI_KEYS, "csi://0")
    if not (sensor.isascii() and sensor.isdigit()):
        raise SourceError(f"CSI camera address {uri!r} names no sensor: write csi://0.")
    flip = options.pop("flip", "0")
    if flip not in FLIPS:
        raise SourceError(
            f"CSI camera address {uri!r} has flip={flip!r}: use one of {list_choices(flip, FLIPS)}"
            " (2 turns the picture by 180 degrees)."
        )
    numbers = {key: _positive(uri, "CSI camera", key, value) for key, value in options.items()}
    return CsiCamera(int(sensor), flip=int(flip), **{**CSI_SIZE, **numbers})


def parse_test(uri: str) -> TestPattern:
    """Read `test://?width=640&height=480&fps=30`."""
    place, options = _read_address(uri, "test picture", TEST_KEYS, "test://")
    if place:
        raise SourceError(f"test picture address {uri!r} names {place!r}: write test://.")
    numbers = {key: _positive(uri, "test picture", key, value) for key, value in options.items()}
    return TestPattern(**numbers)


def parse_images(uri: str) -> tuple[str, float | None]:
    """Read `images:///data/pictures?fps=5`: the path, and images a second if it says so."""
    path, options = _read_address(uri, "image", IMAGE_KEYS, "images:///data/pictures")
    fps = options.get("fps")
    return path, None if fps is None else float(_positive(uri, "image", "fps", fps))


def parse_mcap(uri: str) -> tuple[str, str]:
    """Read `mcap://data/run.mcap?topic=/image/compressed`: the path, and the topic or ""."""
    # Not as a URL is read: names of files have `#`, `?` and brackets.
    path, separator, topic = uri.partition("://")[2].rpartition("?topic=")
    if not separator:
        path, topic = topic, ""
        if re.search(r"\?\w+=", path):
            _read_address(uri, "recording", MCAP_KEYS, "mcap://run.mcap")
    if not path:
        raise SourceError(f"recording address {uri!r} names no file: write mcap://run.mcap.")
    return path, unquote(topic)


def parse_ros2(uri: str) -> Ros2Topic:
    """Read `ros2://camera/image_raw?wire=zenoh&domain=0&connect=tcp/10.0.0.5:7447`."""
    topic, options = _read_address(uri, "ROS 2", ROS2_KEYS, "ros2://camera/image_raw")
    options.setdefault("node", "tandem_source")
    if not re.fullmatch(r"/?[A-Za-z_]\w*(/[A-Za-z_]\w*)*", topic, re.ASCII):
        raise SourceError(f"ROS 2 address {uri!r} names no topic: write ros2://camera/image_raw.")
    connect = tuple(one for one in options.pop("connect", "").split(",") if one)
    try:
        node: Ros2Sink = msgspec.convert({"kind": "ros2", **options}, Ros2Sink, strict=False)
    except msgspec.ValidationError as error:
        raise SourceError(f"ROS 2 address {uri!r} is none ({error}): correct it.") from error
    return Ros2Topic(f"/{topic.lstrip('/')}", node.wire, node.domain, node.node, connect, node.qos)


def check_host(uri: str) -> None:
    """Raise SourceError if an address of a network camera names no host, or no port that is one."""
    example = f"{scheme_of(uri)}://10.0.0.7/stream"
    # A password may hold what an address may not, and is of no interest here.
    start, _, rest = uri.partition("://")
    try:
        parts = urlsplit(f"{start}://{rest.rpartition('@')[2]}")
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise SourceError(
            f"source {redact(uri)!r} is no address ({error}): write {example}."
        ) from error
    if not host:
        raise SourceError(f"source {redact(uri)!r} names no host: write {example}.")


def _read_address(
    uri: str, what: str, keys: Sequence[str], example: str
) -> tuple[str, dict[str, str]]:
    """Return what an address names and its options; SourceError for an option not in `keys`."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise SourceError(f"{what} address {uri!r} is none ({error}): write {example}.") from error
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for key in options:
        if key not in keys:
            raise SourceError(
                f"{what} address {uri!r} has an unknown option {key!r}: use one of"
                f" {list_choices(key, keys)}."
            )
    return parts.netloc + parts.path, options


def _positive(uri: str, what: str, key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and 0 < int(value) <= LARGEST):
        raise SourceError(
            f"{what} address {uri!r} has {key}={value!r}: write a whole number from 1 to {LARGEST}."
        )
    return int(value)
