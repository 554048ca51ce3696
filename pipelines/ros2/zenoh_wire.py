"""ROS 2 over Zenoh, as rmw_zenoh does it: keys, liveliness tokens and attachments.

Source: ros2/rmw_zenoh docs/design.md, and the tokens that its nodes declare.
"""

import itertools
import json
import logging
import struct
import time
from collections.abc import Callable
from typing import Any

import xxhash
import zenoh
import zenoh.ext

from device.errors import PipelineError
from pipelines.ros2.type_hash import type_hash
from pipelines.ros2.wire import (
    DEPTHS,
    MAX_REQUEST,
    NO_HASH,
    Answer,
    Node,
    OnData,
    dds_type,
    ros_type,
)
from pipelines.sink_config import Ros2Qos

ROUTER = "tcp/localhost:7447"  # where rmw_zenoh's nodes look for one
MULTICAST = "multicast"
RETRY_MS = 1000
# Sequence number, ns since 1970, length and bytes of the sender's id.
ATTACHMENT = struct.Struct("<qqB16s")
# How rmw_zenoh writes profiles into tokens: what is its default is left out.
_TOKENS: dict[Ros2Qos, str] = {"sensor_data": "2:", "reliable": ":", "transient_local": ":1"}

_log = logging.getLogger(__name__)


def open_node(node: Node) -> "ZenohNode":
    """Open a session, whether or not a router answers yet, and say that the node is there."""
    config = zenoh.Config()
    connect = tuple(one for one in node.connect if one != MULTICAST) or (
        () if MULTICAST in node.connect else (ROUTER,)
    )
    settings: dict[str, object] = {
        "mode": "peer",
        "connect/endpoints": connect,
        "connect/timeout_ms": -1,  # a router that is away is looked for in the background
        "connect/exit_on_failure": False,
        "connect/retry": {
            "period_init_ms": RETRY_MS,
            "period_max_ms": RETRY_MS,
            "period_increase_factor": 1,
        },
        "scouting/multicast/enabled": MULTICAST in node.connect,
        "transport/shared_memory/enabled": False,
        "timestamping/enabled": True,  # caches of late subscribers need it
    }
    try:
        for key, value in settings.items():
            config.insert_json5(key, json.dumps(value))
        session = zenoh.open(config)
    except zenoh.ZError as error:
        raise PipelineError(
            f"Zenoh does not open with connect = {list(connect)} ({error}): write locators such as"
            f" {ROUTER!r}."
        ) from error
    return ZenohNode(session, node)


class ZenohNode:
    """A node in a session of its own."""

    def __init__(self, session: zenoh.Session, node: Node) -> None:
        self._session = session
        self._node = node
        self._ids = itertools.count(1)
        self._declared: list[Any] = []
        # Node 0 of the session, which is entity 0.
        self._prefix = f"@ros2_lv/{node.domain}/{session.zid()}/0"
        self._owner = f"%/{_mangle(node.namespace)}/{node.name}"
        self._declare(f"{self._prefix}/0/NN/{self._owner}")

    def publish(self, topic: str, kind: str, qos: Ros2Qos) -> "ZenohPublisher":
        """See `Wire`."""
        name = self._node.full_name(topic)
        gid = self._token("MP", name, kind, qos)
        options: dict[str, Any] = {
            "congestion_control": zenoh.CongestionControl.DROP
            if qos == "sensor_data"
            else zenoh.CongestionControl.BLOCK,
            "express": True,  # a message is not held back for others
        }
        key = self._key(name, kind)
        if qos == "transient_local":
            publisher: Any = zenoh.ext.declare_advanced_publisher(
                self._session,
                key,
                cache=zenoh.ext.CacheConfig(DEPTHS[qos]),
                publisher_detection=True,
                **options,
            )
        else:
            publisher = self._session.declare_publisher(key, **options)
        self._declared.append(publisher)
        return ZenohPublisher(publisher.put, gid)

    def subscribe(self, topic: str, kinds: tuple[str, ...], qos: Ros2Qos, on_data: OnData) -> None:
        """See `Wire`; any hash of the types is taken, so that every release of ROS 2 is heard."""
        name = self._node.full_name(topic)

        def on_sample(sample: zenoh.Sample) -> None:
            kind = ros_type(str(sample.key_expr).rsplit("/", 2)[1])
            on_data(kind, sample.payload.to_bytes())

        for kind in kinds:
            self._token("MS", name, kind, qos)
            key = f"{self._node.domain}{name}/{dds_type(kind)}/*"
            if qos == "transient_local":
                subscriber: Any = zenoh.ext.declare_advanced_subscriber(
                    self._session,
                    key,
                    on_sample,
                    history=zenoh.ext.HistoryConfig(detect_late_publishers=True),
                )
            else:
                subscriber = self._session.declare_subscriber(key, on_sample)
            self._declared.append(subscriber)

    def serve(self, service: str, kind: str, answer: Answer) -> None:
        """See `Wire`."""
        name = self._node.full_name(service)
        self._token("SS", name, kind, "reliable")

        def on_query(query: zenoh.Query) -> None:
            with query:
                if query.payload is None or query.attachment is None:
                    return
                if len(query.payload) > MAX_REQUEST:
                    _log.warning(
                        "a request of %s is not answered: it has %d bytes, more than %d",
                        name, len(query.payload), MAX_REQUEST,
                    )  # fmt: skip
                    return
                try:
                    sequence, _, size, gid = ATTACHMENT.unpack(query.attachment.to_bytes())
                    reply = answer(query.payload.to_bytes())
                except (PipelineError, struct.error) as error:
                    _log.warning("a request of %s is not answered: %s", name, error)
                    return
                head = ATTACHMENT.pack(sequence, time.time_ns(), size, gid)
                query.reply(query.key_expr, reply, attachment=head)

        queryable = self._session.declare_queryable(self._key(name, kind), on_query, complete=True)
        self._declared.append(queryable)

    def close(self) -> None:
        """See `Wire`."""
        while self._declared:
            self._declared.pop().undeclare()
        self._session.close()  # type: ignore[no-untyped-call]

    def _key(self, name: str, kind: str) -> str:
        return f"{self._node.domain}{name}/{dds_type(kind)}/{self._hash(kind)}"

    def _hash(self, kind: str) -> str:
        return NO_HASH if self._node.distro == "humble" else type_hash(kind)

    def _token(self, role: str, name: str, kind: str, qos: Ros2Qos) -> bytes:
        """Say that an endpoint is there; return its id, the hash of the token."""
        place = f"{self._prefix}/{next(self._ids)}/{role}/{self._owner}/{_mangle(name)}"
        profile = f"{_TOKENS[qos]}:,{DEPTHS[qos]}:,:,:,,"
        return self._declare(f"{place}/{dds_type(kind)}/{self._hash(kind)}/{profile}")

    def _declare(self, token: str) -> bytes:
        self._declared.append(self._session.liveliness().declare_token(token))
        return xxhash.xxh3_128_intdigest(token.encode()).to_bytes(16, "little")


class ZenohPublisher:
    """One topic; messages are numbered from 1."""

    def __init__(self, put: Callable[..., None], gid: bytes) -> None:
        self._put = put
        self._gid = gid
        self._numbers = itertools.count(1)

    def put(self, data: bytes, wall_ns: int) -> None:
        """See `Publisher`."""
        head = ATTACHMENT.pack(next(self._numbers), wall_ns, len(self._gid), self._gid)
        try:
            self._put(data, attachment=head)
        except zenoh.ZError as error:
            raise PipelineError(f"Zenoh takes no message ({error})") from error


def _mangle(name: str) -> str:
    return name.replace("/", "%") or "%"
