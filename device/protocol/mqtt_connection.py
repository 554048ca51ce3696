"""One connection to the broker, from connect to disconnect, and the values that it speaks in."""

import contextlib
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import paho.mqtt.client as paho
from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from device.errors import BrokerError
from device.protocol.cloud_events import DATA_TYPE, CloudEvent, properties_of, structured
from device.protocol.left_out import LeftOut
from device.protocol.mqtt_client import MAX_MESSAGE_BYTES, MAX_PACKET_BYTES, Client
from device.protocol.mqtt_version import VERSION_NAMES
from device.protocol.tls import TlsFiles, explain

LOG = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 5.0
CLOSE_WAIT_S = 1.0
RENEWAL_S = 10.0  # between two looks whether a certificate was renewed
MAX_QUEUED_MESSAGES = 256
MAX_UNSENT = 64  # QoS 0, and without an acknowledgement


@dataclass(frozen=True, slots=True)
class Will:
    """The will: the broker publishes it, retained, when the connection breaks."""

    topic: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Where to connect, who as, and what to subscribe to. The password is not in its repr.

    Without `tls` the connection is plain.
    """

    host: str
    port: int
    client_id: str
    subscriptions: tuple[tuple[str, int], ...] = ()
    mqtt_version: str = "auto"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    keepalive_s: int = 30
    tls: TlsFiles | None = None


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Connected and subscribed. `session` rises with each connection."""

    session: int
    mqtt_version: str


@dataclass(frozen=True, slots=True)
class LinkDown:
    """A connection was lost or failed; the next attempt follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a subscribed topic. `retained`: the broker has kept it since an earlier time."""

    topic: str
    payload: bytes
    retained: bool = False


LinkEvent = LinkUp | LinkDown | Message


@dataclass(frozen=True, slots=True)
class Receipt:
    """Whether the broker has acknowledged a message."""

    _info: paho.MQTTMessageInfo

    @property
    def acknowledged(self) -> bool:
        """False also if the connection ended before."""
        try:
            return self._info.is_published()
        except (RuntimeError, ValueError):  # paho: the connection ended before
            return False


class Connection:
    """One paho client from connect to disconnect."""

    def __init__(
        self,
        settings: LinkSettings,
        put: Callable[[LinkEvent], None],
        version: MQTTProtocolVersion,
        session: int,
        left_out: LeftOut,
        *,
        context: ssl.SSLContext | None,
    ) -> None:
        self.was_up = False  # the broker accepted us
        self._settings = settings
        self._put = put
        self._version = version
        self._session = session
        self._left_out = left_out
        self._pending_subscribes: dict[
            int, list[tuple[str, int]]
        ] = {}  # what each SUBSCRIBE named, by its id
        self._reason = ""
        self._closing = False
        self._unsent: deque[paho.MQTTMessageInfo] = deque()
        self._stamp = None if settings.tls is None else settings.tls.stamp()
        self._client = self._make_client(context)
        self._ended = self._client.ended

    @property
    def giant_topic(self) -> str:
        """The topic of the message that was too large, empty if there was none."""
        return self._client.giant_topic

    def hold(self, make_will: Callable[[int], Will] | None) -> str:
        """Run until the connection ends and return why; OSError if it cannot be made."""
        host, port = self._settings.host, self._settings.port
        if make_will is not None:
            will = make_will(self._session)
            self._client.will_set(will.topic, will.payload, qos=1, retain=True)
        limit = None
        if self._version == MQTTProtocolVersion.MQTTv5:
            limit = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            limit.MaximumPacketSize = MAX_MESSAGE_BYTES
        self._client.connect(host, port, self._settings.keepalive_s, properties=limit)
        if self._closing:  # closed meanwhile
            self._client.disconnect()
            return ""
        self._client.loop_start()
        while not self._ended.wait(self._due_in_s()):
            if self.was_up:
                self._subscribe(self._left_out.due(time.monotonic()))
                self._end_if_renewed()
        self._client.loop_stop()
        where = f"the broker at {host}:{port}"
        if self._client.failure:
            return f"{where} sent what is not MQTT ({self._client.failure})"
        if self._client.giant_bytes:
            return (
                f"{where} sent a packet of {self._client.giant_bytes} bytes, the limit is "
                f"{MAX_PACKET_BYTES}: clear the retained message on the topic {self.giant_topic!r}"
            )
        if self._client.tls_error is not None:
            why = explain(self._client.tls_error, self._settings.tls)
            return f"{where} ended the connection: {why}"
        return self._reason or f"the connection to {where} was lost"

    def publish(
        self,
        topic: str,
        payload: bytes,
        qos: int,
        retain: bool,
        wait_s: float,
        *,
        bulk: bool = False,
    ) -> bool:
        """Publish; return False if it was not sent within `wait_s`, 0 for no wait.

        QoS 0 is refused while too much waits to be sent.
        """
        if not self.was_up or self._ended.is_set():
            return False
        if qos == 0 and not self._has_room():
            return False
        info = self._client.publish(topic, payload, qos=qos, retain=retain)
        if info.rc != MQTTErrorCode.MQTT_ERR_SUCCESS:
            return False
        if qos == 0 or bulk:
            self._unsent.append(info)
        return wait_s <= 0.0 or self._await_sent(info, wait_s)

    def tell(self, topic: str, event: CloudEvent) -> Receipt | None:
        """Publish a CloudEvent with QoS 1: its attributes in the properties, or, before MQTT 5, in
        the payload. None: not connected."""
        if not self.was_up or self._ended.is_set():
            return None
        if self._version == MQTTProtocolVersion.MQTTv5:
            attributes = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
            attributes.ContentType = DATA_TYPE
            attributes.UserProperty = list(properties_of(event))
            info = self._client.publish(topic, bytes(event.data), 1, properties=attributes)
        else:
            info = self._client.publish(topic, structured(event), 1)
        return Receipt(info) if info.rc == MQTTErrorCode.MQTT_ERR_SUCCESS else None

    def publish_bulk(self, topic: str, payload: bytes, qos: int) -> bool:
        """Publish when there is room; blocks until then."""
        while not self._has_room() and not self._ended.is_set():
            self._await_sent(self._unsent[0], 1.0)
        return self.publish(topic, payload, qos, retain=False, wait_s=0.0, bulk=True)

    def close(self) -> None:
        """Disconnect; after CLOSE_WAIT_S without an answer close the socket."""
        self._closing = True
        self._client.disconnect()
        if self.was_up and not self._ended.wait(CLOSE_WAIT_S):
            sock = self._client.socket()
            if isinstance(sock, socket.socket):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _has_room(self) -> bool:
        """Whether fewer than MAX_UNSENT messages with QoS 0 wait for the socket."""
        while self._unsent and self._is_sent(self._unsent[0]):
            self._unsent.popleft()
        return len(self._unsent) < MAX_UNSENT

    @staticmethod
    def _is_sent(info: paho.MQTTMessageInfo) -> bool:
        try:
            return info.is_published()
        except (RuntimeError, ValueError):  # paho: the connection ended before it was sent
            return True

    def _await_sent(self, info: paho.MQTTMessageInfo, wait_s: float) -> bool:
        try:
            info.wait_for_publish(wait_s)
            return info.is_published()
        except (RuntimeError, ValueError):  # paho: the connection ended before it was sent
            return not self._ended.is_set()

    def _make_client(self, context: ssl.SSLContext | None) -> Client:
        settings = self._settings
        client = Client(self._version, settings.client_id, self._take_message)
        if context is not None:
            client.tls_set_context(context)
        client.connect_timeout = CONNECT_TIMEOUT_S
        client.max_queued_messages_set(MAX_QUEUED_MESSAGES)
        client.max_inflight_messages_set(MAX_UNSENT)
        if settings.username is not None:
            client.username_pw_set(settings.username, settings.password)
        client.on_socket_open = _no_delay
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_disconnect = self._on_disconnect
        return client

    def _on_connect(
        self,
        _client: paho.Client,
        _userdata: object,
        _flags: paho.ConnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if reason.is_failure:
            where = f"{self._settings.host}:{self._settings.port}"
            self._reason = f"the broker at {where} refused the connection: {reason}"
        elif not self._subscribe(self._left_out.connect(time.monotonic())):
            self._up()

    def _subscribe(self, names: tuple[str, ...]) -> bool:
        """Subscribe to some of the subscriptions; False: to none."""
        rows = [row for row in self._settings.subscriptions if row[0] in names]
        if rows:
            self._ask(rows)
        return bool(rows)

    def _ask(self, rows: list[tuple[str, int]]) -> None:
        _code, message_id = self._client.subscribe(rows)
        if message_id is not None:
            self._pending_subscribes[message_id] = rows

    def _due_in_s(self) -> float | None:
        """Return how long to wait for a subscription or a look at the files; None: for ever."""
        due_s = self._left_out.due_s
        wait_s = None if due_s is None else max(0.1, due_s - time.monotonic())
        if self._settings.tls is None:
            return wait_s
        return RENEWAL_S if wait_s is None else min(RENEWAL_S, wait_s)

    def _end_if_renewed(self) -> None:
        """Disconnect in good order once the files of TLS are new and fit each other."""
        tls = self._settings.tls
        if tls is None or tls.stamp() == self._stamp:
            return
        self._stamp = tls.stamp()
        try:
            tls.context()
        except BrokerError as error:  # half of the files are written, or they are wrong
            LOG.error("%s; the connection stays as it is", error)
            return
        LOG.info("the certificate was renewed: the connection is made again with it")
        self._reason = "the certificate was renewed"
        self._client.disconnect()

    def _on_subscribe(
        self,
        _client: paho.Client,
        _userdata: object,
        message_id: int,
        reasons: list[ReasonCode],
        _properties: Properties | None,
    ) -> None:
        rows = self._pending_subscribes.pop(message_id, [])
        for (topic, _qos), reason in zip(rows, reasons, strict=False):
            if reason.is_failure:
                LOG.error("the broker refused the subscription of %s: %s", topic, reason)
        if not self.was_up:
            self._up()

    def _up(self) -> None:
        self.was_up = True
        self._put(LinkUp(self._session, VERSION_NAMES[self._version]))

    def _take_message(self, topic: bytes, payload: bytes, retained: bool) -> None:
        if len(payload) > MAX_MESSAGE_BYTES:
            LOG.warning("dropped a message of %d bytes", len(payload))
            return
        with contextlib.suppress(UnicodeDecodeError):  # not a subscribed topic
            self._put(Message(topic.decode(), payload, retained))

    def _on_disconnect(
        self,
        _client: paho.Client,
        _userdata: object,
        flags: paho.DisconnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if flags.is_disconnect_packet_from_server:  # MQTT 5 only
            where = f"{self._settings.host}:{self._settings.port}"
            self._reason = f"the broker at {where} ended the connection: {reason}"
            if reason == "Session taken over":
                self._reason += f", as another client calls itself {self._settings.client_id}"


def _no_delay(_client: paho.Client, _userdata: object, sock: object) -> None:
    # Nagle's algorithm and delayed acknowledgements together cost a factor of 35 here.
    if isinstance(sock, socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
