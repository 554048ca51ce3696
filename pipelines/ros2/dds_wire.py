"""ROS 2 over DDS with Cyclone DDS: topics and types named as rmw names them, in XCDR1.

Samples pass Cyclone as the bytes that `pipelines.ros2.cdr` writes and reads.
"""

import logging
import os
import threading
from functools import cache
from typing import Any
from xml.sax.saxutils import quoteattr

import cyclonedds.qos
from cyclonedds.core import DDSException
from cyclonedds.domain import Domain, DomainParticipant
from cyclonedds.idl import make_idl_struct, types
from cyclonedds.pub import DataWriter
from cyclonedds.qos import Policy
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic
from cyclonedds.util import duration

from device.errors import PipelineError
from pipelines.ros2.messages import Field, fields_of
from pipelines.ros2.type_hash import type_hash
from pipelines.ros2.wire import DEPTHS, Answer, Node, OnData, dds_type
from pipelines.sink_config import Ros2Qos

MULTICAST = "multicast"
LOOPBACK = ("localhost", "127.0.0.1")
POLL_S = 0.2  # how soon a reader ends
BLOCK_S = 0.1  # how long a full history of a slow reader holds a reliable writer
_PRIMITIVES: dict[str, object] = {
    "bool": bool, "byte": types.uint8, "string": str,
    **{one: getattr(types, one) for one in (
        "uint8", "int32", "uint32", "int64", "uint64", "uint16", "float32", "float64"
    )},
}  # fmt: skip

_domains: dict[int, tuple[tuple[str, ...], Domain]] = {}  # a process sets a domain up once
_log = logging.getLogger(__name__)


def open_node(node: Node) -> "DdsNode":
    """Join a domain."""
    try:
        if node.domain not in _domains:
            _domains[node.domain] = (node.connect, Domain(node.domain, _config(node.connect)))
        if _domains[node.domain][0] != node.connect:
            raise PipelineError(
                f"DDS domain {node.domain} has connect = {list(_domains[node.domain][0])} in this"
                f" process already, and {list(node.connect)} here: write the same for all."
            )
        return DdsNode(DomainParticipant(node.domain), node)
    except DDSException as error:
        raise PipelineError(
            f"DDS domain {node.domain} cannot be joined ({error}): check `connect` and the"
            " variable CYCLONEDDS_URI."
        ) from error


def _config(connect: tuple[str, ...]) -> str:
    """Return Cyclone's configuration; what CYCLONEDDS_URI says comes first."""
    peers = [one for one in connect if one != MULTICAST]
    multicast = "true" if not connect or MULTICAST in connect else "false"
    addresses = "".join(f"<Peer Address={quoteattr(one)}/>" for one in peers)
    local = "<Interfaces><NetworkInterface address='127.0.0.1'/></Interfaces>"
    only_local = bool(peers) and all(one in LOOPBACK for one in peers) and multicast == "false"
    own = (
        f"<CycloneDDS><Domain><General><AllowMulticast>{multicast}</AllowMulticast>"
        f"{local if only_local else ''}</General><Discovery>"
        "<ParticipantIndex>auto</ParticipantIndex>"
        f"<MaxAutoParticipantIndex>120</MaxAutoParticipantIndex><Peers>{addresses}</Peers>"
        "</Discovery></Domain></CycloneDDS>"
    )
    return ",".join(one for one in (os.environ.get("CYCLONEDDS_URI"), own) if one)


class DdsNode:
    """A participant."""

    def __init__(self, participant: DomainParticipant, node: Node) -> None:
        self._participant = participant
        self._node = node
        self._topics: dict[tuple[str, str], Any] = {}
        self._publishers: list[DdsPublisher] = []
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def publish(self, topic: str, kind: str, qos: Ros2Qos) -> "DdsPublisher":
        """See `Wire`."""
        policies = _policies(qos)
        if self._node.distro != "humble":
            policies.append(Policy.Userdata(f"typehash={type_hash(kind)};".encode()))
        writer = DataWriter(
            self._participant, self._topic(topic, kind), cyclonedds.qos.Qos(*policies)
        )
        self._publishers.append(DdsPublisher(writer, _sample_type(kind)))
        return self._publishers[-1]

    def subscribe(self, topic: str, kinds: tuple[str, ...], qos: Ros2Qos, on_data: OnData) -> None:
        """See `Wire`."""
        for kind in kinds:
            policies = cyclonedds.qos.Qos(*_policies(qos))
            reader = DataReader(self._participant, self._topic(topic, kind), policies)
            thread = threading.Thread(
                target=self._read, args=(reader, kind, on_data), name="dds-reader", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def serve(self, service: str, kind: str, answer: Answer) -> None:
        """Raises PipelineError: requests of ROS 2 over DDS are told apart by ids of the protocol,
        which Cyclone's package for Python does not give."""
        raise PipelineError(f'{service} is no service over DDS: use wire = "zenoh" for `controls`.')

    def close(self) -> None:
        """See `Wire`."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for publisher in self._publishers:
            publisher.close()  # Cyclone deletes what nothing refers to
        self._topics.clear()
        del self._participant

    def _topic(self, topic: str, kind: str) -> Any:  # noqa: ANN401  (of Cyclone, without types)
        key = (f"rt{self._node.full_name(topic)}", kind)
        if key not in self._topics:
            self._topics[key] = Topic(self._participant, key[0], _sample_type(kind))
        return self._topics[key]

    def _read(self, reader: Any, kind: str, on_data: OnData) -> None:  # noqa: ANN401
        while not self._closing.is_set():
            for sample in reader.take_iter(timeout=duration(seconds=POLL_S)):
                cdr = getattr(sample, "cdr", None)  # none: the writer has gone
                if cdr is not None:
                    on_data(kind, cdr)
                if self._closing.is_set():
                    return


class DdsPublisher:
    """One topic."""

    def __init__(self, writer: Any, sample_type: Any) -> None:  # noqa: ANN401
        self._writer = writer
        self._type = sample_type

    def close(self) -> None:
        """Give the writer up."""
        self._writer = None

    def put(self, data: bytes, wall_ns: int) -> None:
        """See `Publisher`."""
        if self._writer is None:
            return
        sample = self._type.__new__(self._type)
        sample.cdr = data
        try:
            self._writer.write(sample, wall_ns)
        except DDSException as error:
            raise PipelineError(f"DDS takes no message ({error})") from error


def _policies(qos: Ros2Qos) -> list[Any]:
    """Return ROS 2's profile in Cyclone's words."""
    reliable = Policy.Reliability.Reliable(max_blocking_time=duration(seconds=BLOCK_S))
    late = Policy.Durability.TransientLocal if qos == "transient_local" else None
    return [
        Policy.Reliability.BestEffort if qos == "sensor_data" else reliable,
        late or Policy.Durability.Volatile,
        Policy.History.KeepLast(DEPTHS[qos]),
        Policy.DataRepresentation(use_cdrv0_representation=True),
    ]


@cache
def _idl_type(kind: str) -> Any:  # noqa: ANN401
    return _make_type(kind)


def _make_type(kind: str) -> Any:  # noqa: ANN401
    """Return a message as Cyclone describes types, so that both sides may compare them."""
    fields = {field.name: _idl_field(field) for field in fields_of(kind)}
    return make_idl_struct(kind.rpartition("/")[2], dds_type(kind).replace("::", "."), fields)


def _idl_field(field: Field) -> Any:  # noqa: ANN401
    one: Any = _idl_type(field.type) if field.nested else _PRIMITIVES[field.type]
    array: Any = types.array
    sequence: Any = types.sequence
    if field.count is not None:
        return array[one, field.count]
    if field.bound is None:
        return one
    return sequence[one, field.bound] if field.bound else sequence[one]


@cache
def _sample_type(kind: str) -> Any:  # noqa: ANN401
    """Return the type whose samples are given and taken as CDR."""
    sample_type = _make_type(kind)

    def serialize(self: Any, **_: object) -> bytes:  # noqa: ANN401
        cdr: bytes = self.cdr
        return cdr

    def deserialize(data: bytes, **_: object) -> Any:  # noqa: ANN401
        sample = sample_type.__new__(sample_type)
        sample.cdr = data
        return sample

    sample_type.serialize = serialize
    sample_type.deserialize = staticmethod(deserialize)
    return sample_type
