"""The kinds of [[sinks]] in pipeline.toml.

`models` of a sink: those of several whose results it takes.
"""

from typing import Annotated, Literal, Union
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pipelines.value import Fraction, Name, Positive, PositiveFloat, Value

Byte = Annotated[int, Meta(ge=1, le=255)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Format = Literal["tandem", "ros2"]
Ros2Wire = Literal["zenoh", "dds"]
Ros2Qos = Literal["sensor_data", "reliable", "transient_local"]
Ros2Distro = Literal["humble", "jazzy", "kilted"]
Ros2Topic = Literal[
    "detections", "detections_3d", "annotations", "overlay", "labels", "diagnostics"
]
RosName = Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]


class MqttSink(Value, frozen=True, kw_only=True, tag="mqtt", tag_field="kind"):
    """Publish each frame's detections, at most `max_hz`, and with a tracker the lives of objects.

    `format`: "ros2" writes detections as vision_msgs/Detection2DArray. `events`: publish new,
    update and end of objects. `stats_s` > 0: publish figures so often; on a board the agent does.
    `controls`: messages may pause detection and raise the threshold.
    """

    max_hz: PositiveFloat = 30.0
    qos: Literal[0, 1] = 0
    format: Format = "tandem"
    events: bool = True
    stats_s: Annotated[float, Meta(ge=0.0)] = 0.0
    controls: bool = False
    models: tuple[str, ...] = ()


class JsonlSink(Value, frozen=True, kw_only=True, tag="jsonl", tag_field="kind"):
    """Append each frame's detections to a file, one JSON object a line."""

    path: str
    format: Format = "tandem"
    models: tuple[str, ...] = ()


class VideoSink(Value, frozen=True, kw_only=True, tag="video", tag_field="kind"):
    """Write an annotated video; of several sources one each, as STEM-ID.SUFFIX.

    `fps`: unset, it is the rate of the source, or 15 where the source does not say it.
    """

    path: str
    fps: PositiveFloat | UnsetType = UNSET
    models: tuple[str, ...] = ()


class SnapshotSink(Value, frozen=True, kw_only=True, tag="snapshot", tag_field="kind"):
    """Write a JPEG of the best sight of each tracked object when it has gone.

    `path`: the folder. `margin`: how much more than the box is shown, as a fraction of its sides.
    """

    path: str
    classes: tuple[str, ...] = ()
    min_score: Fraction = 0.5
    margin: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.25
    quality: Annotated[int, Meta(ge=1, le=100)] = 85


class SerialSink(Value, frozen=True, kw_only=True, tag="serial", tag_field="kind"):
    """Write the best detections of the latest frame to a serial port.

    `camera`: the source whose frames are sent, where there are several. `dialect`: "mavlink" for
    autopilots, "cobs" and "nmea" for microcontrollers. `hfov_deg`: the camera's horizontal field of
    view. `heights_m`: the true height of objects by label, from which distances follow.
    """

    port: str
    camera: Name = ""
    baud: Positive = 115200
    dialect: Literal["mavlink", "cobs", "nmea"] = "nmea"
    max_hz: PositiveFloat = 30.0
    max_targets: Annotated[int, Meta(ge=1, le=16)] = 8
    classes: tuple[str, ...] = ()
    write_timeout_s: PositiveFloat = 0.5
    system_id: Byte = 1
    component_id: Byte = 191
    hfov_deg: Annotated[float, Meta(gt=0.0, lt=180.0)] = 60.0
    heights_m: dict[str, float] = msgspec.field(default_factory=dict)
    models: tuple[str, ...] = ()


class PrometheusSink(Value, frozen=True, kw_only=True, tag="prometheus", tag_field="kind"):
    """Serve the figures of the pipeline at http://HOST:PORT/metrics; port 0 takes a free one."""

    port: Port = 9108
    host: str = "127.0.0.1"


class McapSink(Value, frozen=True, kw_only=True, tag="mcap", tag_field="kind"):
    """Record pictures, results and figures as messages of ROS 2 in MCAP files.

    `quality`: of the JPEG pictures. `max_mb` and `max_s`: then the next file is begun.
    """

    path: str
    quality: Annotated[int, Meta(ge=1, le=100)] = 85
    max_mb: Positive = 1024
    max_s: PositiveFloat = 600.0
    models: tuple[str, ...] = ()


class FoxgloveSink(Value, frozen=True, kw_only=True, tag="foxglove", tag_field="kind"):
    """Serve pictures, results and figures to Foxglove at ws://HOST:PORT; port 0 takes a free one.

    `quality`: of the JPEG pictures, which are made while somebody looks.
    """

    port: Port = 8765
    host: str = "127.0.0.1"
    quality: Annotated[int, Meta(ge=1, le=100)] = 85
    models: tuple[str, ...] = ()

    @property
    def link(self) -> str:
        """The address that opens Foxglove on this server, as foxglove-sdk gives it."""
        address = quote(f"ws://{self.host}:{self.port}", safe="")
        return f"https://app.foxglove.dev?ds=foxglove-websocket&ds.url={address}"


class Ros2Sink(Value, frozen=True, kw_only=True, tag="ros2", tag_field="kind"):
    """Publish results as messages of ROS 2, without ROS.

    `connect`: for Zenoh locators of routers and peers, for DDS addresses of computers; "multicast"
    among them finds others that are near. `distro`: the release of ROS 2 on the other side.
    `frame_id`, `camera_info`: `{camera}` in them is the id of the source. `camera_info`: the file
    of a calibration, as ROS 2's camera_calibration writes it. `controls`: parameters of the node
    may pause detection and raise the threshold.
    """

    wire: Ros2Wire = "zenoh"
    topics: tuple[Ros2Topic, ...] = ("detections",)
    node: RosName = "tandem"
    namespace: Annotated[str, Meta(pattern="^(/[A-Za-z_][A-Za-z0-9_]*)*$")] = ""
    domain: Annotated[int, Meta(ge=0, le=232)] = 0
    distro: Ros2Distro = "jazzy"
    connect: tuple[str, ...] = ()
    qos: Ros2Qos = "sensor_data"
    max_hz: PositiveFloat = 30.0
    frame_id: str = ""
    camera_info: str = ""
    controls: bool = False
    models: tuple[str, ...] = ()


SinkConfig = Union[  # noqa: UP007  (read by msgspec on 3.10)
    MqttSink,
    JsonlSink,
    VideoSink,
    SnapshotSink,
    SerialSink,
    PrometheusSink,
    McapSink,
    FoxgloveSink,
    Ros2Sink,
]


def resource_of(config: SinkConfig) -> tuple[str, object] | None:
    """Return what one sink alone can have; None: any number of them go together."""
    match config:
        case MqttSink():
            return "broker's topics", ""
        case PrometheusSink() | FoxgloveSink():
            return ("port", config.port) if config.port else None
        case SerialSink():
            return "serial port", config.port
        case JsonlSink() | VideoSink() | McapSink():
            return "file", config.path
        case Ros2Sink():
            return "ROS 2 node", (config.wire, config.domain, config.namespace, config.node)
        case SnapshotSink():
            return None
