"""ROS 2 over DDS with Cyclone DDS: topics and types named as rmw names them, in XCDR1.

Samples pass Cyclone as the bytes that `pipelines.ros2.cdr` writes and reads. A participant says on
`ros_discovery_info` which node its endpoints are of. Services are those of rmw_cyclonedds: request
and answer begin with the client's id and number. rmw_fastrtps has both in headers of RTPS, which
Cyclone does not give: it refuses their requests. Sources: ros2/rmw_cyclonedds rmw_node.cpp,
ros2/rmw_dds_common.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
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
from pipelines.ros2.cdr import HEAD, Message, encode
from pipelines.ros2.messages import ENTITIES, HUMBLE_ENTITIES, Field, fields_of
from pipelines.ros2.type_hash import type_hash
from pipelines.ros2.wire import DEPTHS, MAX_REQUEST, Answer, Node, OnData, dds_type
from pipelines.sink_config import Ros2Qos

MULTICAST = "multicast"
LOOPBACK = ("localhost", "127.0.0.1")
POLL_S = 0.2  # how soon a reader ends
BLOCK_S = 0.1  # how long a full history of a slow reader holds a reliable writer
MATCH_S = 0.1  # for a client whose reader of answers is not found yet, as rmw_cyclonedds waits
CLIENT_ID = {"client": types.uint64, "number": types.int64}  # before a request and its answer
ID_BYTES = 16
_PRIMITIVES: dict[str, object] = {
    "bool": bool, "byte": types.uint8, "string": str,
    **{one: getattr(types, one) for one in (
        "uint8", "int32", "uint32", "int64", "uint64", "uint16", "float32", "float64"
    )},
}  # fmt: skip

ENCLAVE = Policy.Userdata(b"enclave=/;")  # by which participants of ROS 2 are known

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
        return DdsNode(DomainParticipant(node.domain, cyclonedds.qos.Qos(ENCLAVE)), node)
    except DDSException as error:
        raise PipelineError(
            f"DDS domain {node.domain} cannot be joined ({error}): check `connect` and the"
            " variable CYCLONEDDS_URI."
        ) from error


def _config(connect: tuple[str, ...]) -> str:
    """Return Cyclone's configuration; what CYCLONEDDS_URI says comes first."""
    peers = [one for one in connect if one != MULTICAST]
    multicast = "true" if not connect or MULTICAST in connect else "false"
    addresses = "".join(f"<Peer Address={quoteattr(peer)}/>" for peer in peers)
    local = "<Interfaces><NetworkInterface address='127.0.0.1'/></Interfaces>"
    only_local = bool(peers) and all(peer in LOOPBACK for peer in peers) and multicast == "false"
    defaults = (
        f"<CycloneDDS><Domain><General><AllowMulticast>{multicast}</AllowMulticast>"
        f"{local if only_local else ''}</General><Discovery>"
        "<ParticipantIndex>auto</ParticipantIndex>"
        f"<MaxAutoParticipantIndex>120</MaxAutoParticipantIndex><Peers>{addresses}</Peers>"
        "</Discovery></Domain></CycloneDDS>"
    )
    return ",".join(one for one in (os.environ.get("CYCLONEDDS_URI"), defaults) if one)


class DdsNode:
    """A participant."""

    def __init__(self, participant: DomainParticipant, node: Node) -> None:
        self._participant = participant
        self._node = node
        self._topics: dict[tuple[str, str], Any] = {}
        self._publishers: list[DdsPublisher] = []
        self._gids: dict[str, list[bytes]] = {"reader_gid_seq": [], "writer_gid_seq": []}
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._entities_type = HUMBLE_ENTITIES if node.distro == "humble" else ENTITIES
        self._entities = self._writer("ros_discovery_info", self._entities_type, "transient_local")
        self._tell_entities()

    def publish(self, topic: str, kind: str, qos: Ros2Qos) -> "DdsPublisher":
        """See `Wire`."""
        publisher = self._writer(f"rt{self._node.full_name(topic)}", kind, qos)
        self._tell_entities()
        return publisher

    def subscribe(self, topic: str, kinds: tuple[str, ...], qos: Ros2Qos, on_data: OnData) -> None:
        """See `Wire`."""
        name = f"rt{self._node.full_name(topic)}"

        def listen(kind: str) -> None:
            reader = self._reader(name, kind, qos)
            self._listen(reader, lambda sample: on_data(kind, sample.cdr))

        for kind in kinds:
            listen(kind)
        self._tell_entities()

    def serve(self, service: str, kind: str, answer: Answer) -> None:
        """See `Wire`; clients are nodes of rmw_cyclonedds."""
        name = self._node.full_name(service)
        service_id = f"serviceid={uuid.uuid4().hex};"
        replies = self._writer(f"rr{name}Reply", f"{kind}_Response", "reliable", service_id)
        requests = self._reader(f"rq{name}Request", f"{kind}_Request", "reliable", service_id)

        def on_request(sample: Any) -> None:  # noqa: ANN401
            start, end = len(HEAD), len(HEAD) + ID_BYTES
            size = len(sample.cdr) - ID_BYTES
            if size > MAX_REQUEST:
                _log.warning(
                    "a request of %s is not answered: it has %d bytes, more than %d",
                    name, size, MAX_REQUEST,
                )  # fmt: skip
                return
            try:
                reply = answer(sample.cdr[:start] + sample.cdr[end:])
            except PipelineError as error:
                _log.warning("a request of %s is not answered: %s", name, error)
                return
            client = requests.get_matched_publication_data(sample.sample_info.publication_handle)
            if client is not None:
                replies.wait_for_reader(_user_data(client).get("clientid", ""))
                replies.put(HEAD + sample.cdr[start:end] + reply[start:], time.time_ns())

        self._listen(requests, on_request)
        self._tell_entities()

    def close(self) -> None:
        """See `Wire`."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for publisher in self._publishers:
            publisher.close()  # Cyclone deletes what nothing refers to
        self._topics.clear()
        del self._participant

    def _writer(self, name: str, kind: str, qos: Ros2Qos, about: str = "") -> "DdsPublisher":
        policies = self._policies(kind, qos, about)
        writer = DataWriter(self._participant, self._topic(name, kind), policies)
        self._gids["writer_gid_seq"].append(writer.guid.bytes)
        self._publishers.append(DdsPublisher(writer, _sample_type(kind)))
        return self._publishers[-1]

    def _reader(self, name: str, kind: str, qos: Ros2Qos, about: str = "") -> Any:  # noqa: ANN401
        policies = self._policies(kind, qos, about)
        reader = DataReader(self._participant, self._topic(name, kind), policies)
        self._gids["reader_gid_seq"].append(reader.guid.bytes)
        return reader

    def _policies(self, kind: str, qos: Ros2Qos, about: str) -> cyclonedds.qos.Qos:
        """Return a profile, and what ROS 2 says of an endpoint beside it."""
        text = about + ("" if self._node.distro == "humble" else f"typehash={type_hash(kind)};")
        return cyclonedds.qos.Qos(*_policies(qos), Policy.Userdata(text.encode()))

    def _topic(self, name: str, kind: str) -> Any:  # noqa: ANN401  (of Cyclone, without types)
        if (name, kind) not in self._topics:
            self._topics[name, kind] = Topic(self._participant, name, _sample_type(kind))
        return self._topics[name, kind]

    def _tell_entities(self) -> None:
        """Say which endpoints the node has, so that tools show its name for them."""
        size = 24 if self._entities_type == HUMBLE_ENTITIES else 16

        def gid(guid: bytes) -> Message:
            return {"data": guid.ljust(size, b"\0")}

        node = {
            "node_namespace": self._node.namespace or "/",
            "node_name": self._node.name,
            **{role: [gid(one) for one in guids] for role, guids in self._gids.items()},
        }
        message = {"gid": gid(self._participant.guid.bytes), "node_entities_info_seq": [node]}
        self._entities.put(encode(self._entities_type, message), time.time_ns())

    def _listen(self, reader: Any, on_sample: Callable[[Any], None]) -> None:  # noqa: ANN401
        """Call `on_sample` with each sample of a reader, in a thread."""
        thread = threading.Thread(
            target=self._read, args=(reader, on_sample), name="dds-reader", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _read(self, reader: Any, on_sample: Callable[[Any], None]) -> None:  # noqa: ANN401
        while not self._closing.is_set():
            try:
                for sample in reader.take_iter(timeout=duration(seconds=POLL_S)):
                    if hasattr(sample, "cdr"):  # none: the writer has gone
                        _guarded(on_sample, sample)
                    if self._closing.is_set():
                        return
            except Exception as error:  # noqa: BLE001  (a reader lasts as long as its node)
                _log.exception("a reader of DDS takes no sample: %s", error)
                self._closing.wait(POLL_S)


class DdsPublisher:
    """One topic."""

    def __init__(self, writer: Any, sample_type: Any) -> None:  # noqa: ANN401
        self._writer = writer
        self._type = sample_type

    def close(self) -> None:
        """Give the writer up."""
        self._writer = None

    def wait_for_reader(self, client: str) -> None:
        """Wait, not for long, until the reader of a client of ROS 2 is found; "" waits for none."""
        end_s = time.monotonic() + MATCH_S
        while client and time.monotonic() < end_s:
            handles = self._writer.get_matched_subscriptions()
            readers = map(self._writer.get_matched_subscription_data, handles)
            if any(reader and _user_data(reader).get("clientid") == client for reader in readers):
                return
            time.sleep(0.01)

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


def _guarded(on_sample: Callable[[Any], None], sample: Any) -> None:  # noqa: ANN401
    try:
        on_sample(sample)
    except Exception as error:  # noqa: BLE001  (the next sample is to be read)
        _log.exception("a sample of DDS is dropped: %s", error)


def _user_data(endpoint: Any) -> dict[str, str]:  # noqa: ANN401
    """Return what `key=value;` says in the user data of an endpoint."""
    policy = endpoint.qos[Policy.Userdata]
    parts = (
        (part.partition("=") for part in policy.data.decode("latin1").split(";")) if policy else ()
    )
    return {key: value for key, _, value in parts}


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
    return _make_type(kind, {})


def _make_type(kind: str, head: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return a message as Cyclone describes types, so that both sides may compare them, with the
    fields `head` before its own. Cyclone sends and takes what is such a message."""
    fields = {**head, **{field.name: _idl_field(field) for field in fields_of(kind)}}
    name = dds_type(kind.removesuffix("24")).replace("::", ".")  # of Humble: the name is the same
    return make_idl_struct(kind.rpartition("/")[2], name, fields)


def _idl_field(field: Field) -> Any:  # noqa: ANN401
    one: Any = _idl_type(field.type) if field.nested else _PRIMITIVES[field.type]
    bounded: Any = types.bounded_str
    if field.length:
        one = bounded[field.length]
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
    sample_type = _make_type(kind, CLIENT_ID if "/srv/" in kind else {})

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
