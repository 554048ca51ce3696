"""What carries messages of ROS 2: one protocol for Zenoh (rmw_zenoh) and DDS (rmw_fastrtps,
rmw_cyclonedds), each loaded when it is asked for."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from device.errors import PipelineError
from pipelines.sink_config import Ros2Distro, Ros2Qos, Ros2Wire

NO_HASH = "TypeHashNotSupported"  # of Humble, whose types have no hash

# ROS 2's profiles: what a late subscriber gets, and how many messages wait for a slow one.
DEPTHS: dict[Ros2Qos, int] = {"sensor_data": 5, "reliable": 10, "transient_local": 1}
MAX_REQUEST = 65536  # bytes of a request to a service; parameters take some hundred

OnData = Callable[[str, bytes], None]
Answer = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of ROS 2 and the network that it is in.

    `namespace`: such as `/robot1`, or empty. `connect`: for Zenoh locators of routers and peers,
    for DDS addresses of computers; `multicast` among them finds others that are near. Empty: for
    Zenoh the router on this machine, for DDS multicast.
    """

    name: str
    namespace: str = ""
    domain: int = 0
    distro: Ros2Distro = "jazzy"
    connect: tuple[str, ...] = ()

    def full_name(self, topic: str) -> str:
        """Return a topic or service with its namespace: `/robot1/detections`; one that begins with
        `/` stays as it is."""
        return topic if topic.startswith("/") else f"{self.namespace}/{topic}"


class Publisher(Protocol):
    """One topic."""

    def put(self, data: bytes, wall_ns: int) -> None:
        """Send a message in CDR; `wall_ns`: when, in ns since 1970. Raises PipelineError."""


class Wire(Protocol):
    """A node in its network."""

    def publish(self, topic: str, kind: str, qos: Ros2Qos) -> Publisher:
        """Begin to publish messages of one type."""

    def subscribe(self, topic: str, kinds: tuple[str, ...], qos: Ros2Qos, on_data: OnData) -> None:
        """Have `on_data` called, from another thread, with the type and CDR of each message."""

    def serve(self, service: str, kind: str, answer: Answer) -> None:
        """Answer requests of a service, both in CDR; `answer` is called from another thread."""

    def close(self) -> None:
        """Leave the network."""


# wire -> its module, the package that it needs, the extra that has it, and what to know.
WIRES: dict[Ros2Wire, tuple[str, str, str, str]] = {
    "zenoh": ("pipelines.ros2.zenoh_wire", "eclipse-zenoh", "ros2", ""),
    "dds": (
        "pipelines.ros2.dds_wire", "cyclonedds", "dds",
        ' It has wheels for x86-64 alone: on a Jetson take wire = "zenoh", or build Cyclone DDS'
        " first, as docs/ros2.md says.",
    ),
}  # fmt: skip


def open_wire(name: Ros2Wire, node: Node) -> Wire:
    """Join a network. Raises PipelineError: its package is missing, or an address is none."""
    module, package, extra, note = WIRES[name]
    try:
        wire: Callable[[Node], Wire] = importlib.import_module(module).open_node
    except ImportError as error:
        raise PipelineError(
            f'wire = "{name}" needs the package {package} ({error}): install it with'
            f" pip install 'tandem-edge[{extra}]'.{note}"
        ) from error
    return wire(node)


def dds_type(kind: str) -> str:
    """Return `vision_msgs/msg/Detection2DArray` as `vision_msgs::msg::dds_::Detection2DArray_`."""
    package, group, name = kind.split("/")
    return f"{package}::{group}::dds_::{name}_"


def ros_type(kind: str) -> str:
    """Return the name that `dds_type` was made of."""
    package, group, _, name = kind.split("::")
    return f"{package}/{group}/{name.removesuffix('_')}"
