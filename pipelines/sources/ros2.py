"""Pictures that a ROS 2 node publishes: sensor_msgs/Image and CompressedImage, over Zenoh or DDS.

The capture time is that of `header.stamp`; a stamp that this computer's clock has not seen in the
last minute, as of a simulation, is replaced by the time of arrival.
"""

import queue
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from device.errors import PipelineError, SourceError
from pipelines.frame import Image, Stamp
from pipelines.pictures import PictureError, decode_picture
from pipelines.ros2.cdr import decode
from pipelines.ros2.messages import COMPRESSED_IMAGE, IMAGE
from pipelines.ros2.wire import Node, open_wire
from pipelines.sources.live import Ended, FrameError, RawFrame
from pipelines.sources.uri import Ros2Topic
from pipelines.vision import MAX_PIXELS, cv2

OLDEST_NS = 60 * 1_000_000_000
QUEUED = 2  # messages; the reader takes them at once, and drops none but its own
POLL_S = 0.1
KINDS = (IMAGE, COMPRESSED_IMAGE)

# Encoding (sensor_msgs/image_encodings) -> bytes of a pixel, and how it becomes BGR.
ENCODINGS: dict[str, tuple[int, str | None]] = {
    "bgr8": (3, None),
    "rgb8": (3, "COLOR_RGB2BGR"),
    "mono8": (1, "COLOR_GRAY2BGR"),
    "8UC1": (1, "COLOR_GRAY2BGR"),
    "8UC3": (3, None),
    "bgra8": (4, "COLOR_BGRA2BGR"),
    "rgba8": (4, "COLOR_RGBA2BGR"),
    "yuv422": (2, "COLOR_YUV2BGR_UYVY"),
    "uyvy": (2, "COLOR_YUV2BGR_UYVY"),
    "yuv422_yuy2": (2, "COLOR_YUV2BGR_YUY2"),
    "yuyv": (2, "COLOR_YUV2BGR_YUY2"),
    "bayer_rggb8": (1, "COLOR_BayerBG2BGR"),
    "bayer_bggr8": (1, "COLOR_BayerRG2BGR"),
    "bayer_gbrg8": (1, "COLOR_BayerGR2BGR"),
    "bayer_grbg8": (1, "COLOR_BayerGB2BGR"),
}


class Ros2Capture:
    """A subscription to one topic."""

    def __init__(self, name: str, topic: Ros2Topic, stall_s: float, ended: Ended) -> None:
        self._name = name
        self._stall_s = stall_s
        self._ended = ended
        self._arrived: queue.Queue[tuple[str, bytes, Stamp]] = queue.Queue(QUEUED)
        node = Node(topic.node, domain=topic.domain, connect=topic.connect)
        try:
            self._wire = open_wire(topic.wire, node)
            self._wire.subscribe(topic.topic, KINDS, topic.qos, self._put)
        except PipelineError as error:
            raise SourceError(f"{name}: {error}") from error

    def _put(self, kind: str, data: bytes) -> None:
        one = (kind, data, Stamp.now())
        while True:
            try:
                self._arrived.put_nowait(one)
            except queue.Full:
                try:
                    self._arrived.get_nowait()  # the newest is wanted
                except queue.Empty:
                    continue
            else:
                return

    def read(self) -> RawFrame:
        """Wait for a picture; SourceError after `stall_s` without one."""
        due_s = time.monotonic() + self._stall_s
        while True:
            try:
                kind, data, received = self._arrived.get(timeout=POLL_S)
                break
            except queue.Empty:
                if time.monotonic() >= due_s or self._ended():
                    raise SourceError(
                        f"{self._name} gave no picture for {self._stall_s:g} s: check that a node"
                        " publishes sensor_msgs/Image or CompressedImage there, in this domain."
                    ) from None
        try:
            message = decode(kind, data)
            pixels = DECODERS[kind](message)
        except (PipelineError, PictureError) as error:
            raise FrameError(f"{self._name}: {error}") from error
        captured = capture_stamp(message["header"]["stamp"], received)
        height, width = pixels.shape[:2]
        return RawFrame(pixels, "bgr", width, height, t_capture=captured, t_recv=received)

    def close(self) -> None:
        """Leave the network."""
        self._wire.close()


def capture_stamp(time_of: dict[str, int], received: Stamp) -> Stamp:
    """Return the moment of a builtin_interfaces/Time."""
    age_ns = received.wall_ns - (time_of["sec"] * 1_000_000_000 + time_of["nanosec"])
    return received.earlier(age_ns) if 0 <= age_ns <= OLDEST_NS else received


def _from_image(message: dict[str, Any]) -> Image:
    height, width, step = (message[key] for key in ("height", "width", "step"))
    encoding = message["encoding"]
    if encoding not in ENCODINGS:
        raise PictureError(
            f"an Image has the encoding {encoding!r}, which is none of {', '.join(ENCODINGS)}"
        )
    size, conversion = ENCODINGS[encoding]
    data = message["data"]
    if not 0 < height * width <= MAX_PIXELS or step < width * size or len(data) < height * step:
        raise PictureError(
            f"an Image of {width} x {height} {encoding} has {len(data)} bytes in rows of {step}"
        )
    rows = np.frombuffer(data, np.uint8, height * step).reshape(height, step)
    pixels = rows[:, : width * size].reshape(height, width, size)
    if conversion is None:
        return np.array(pixels, np.uint8, order="C")  # writable, without padding
    try:
        return np.asarray(cv2.cvtColor(pixels, getattr(cv2, conversion)), np.uint8)
    except cv2.error as error:  # an odd width of a format with half of the colours
        raise PictureError(f"an Image of {width} x {height} is no {encoding} ({error})") from error


def _from_compressed(message: dict[str, Any]) -> Image:
    return decode_picture(bytes(message["data"]))


DECODERS: dict[str, Callable[[dict[str, Any]], Image]] = {
    IMAGE: _from_image,
    COMPRESSED_IMAGE: _from_compressed,
}
