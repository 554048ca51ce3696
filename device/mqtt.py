"""A connection to the broker that comes back by itself: a thin adapter over paho-mqtt.

What happens is put on a queue as values (`LinkUp`, `LinkDown`, `Message`); nothing calls back into
the program. Each connection is a fresh paho client with a clean session: nothing that was queued
before a break comes out after it. What must be known is said again at each `LinkUp`.
"""

import logging
import queue
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from device.mqtt_version import FIXED_VERSIONS, VERSION_NAMES, probe_version

LOG = logging.getLogger(__name__)
BACKOFF_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0)
CONNECT_TIMEOUT_S = 5.0
MAX_QUEUED_MESSAGES = 256
MAX_UNSENT_BULK = 64


@dataclass(frozen=True, slots=True)
class Will:
    """What the broker publishes, retained, when the connection breaks."""

    topic: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Where to connect, who as, and what to subscribe to. The password is not in its repr."""

    host: str
    port: int
    client_id: str
    subscriptions: tuple[tuple[str, int], ...] = ()
    mqtt_version: str = "auto"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    keepalive_s: int = 30


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Connected and subscribed. `session` rises with each connection."""

    session: int
    mqtt_version: str


@dataclass(frozen=True, slots=True)
class LinkDown:
    """A connection was lost or could not be made; the next try comes by itself."""

    reason: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a subscribed topic."""

    topic: str
    payload: bytes


LinkEvent = LinkUp | LinkDown | Message


class Link:
    """Keeps one connection up in a thread of its own."""

    def __init__(
        self,
        settings: LinkSettings,
        put: Callable[[LinkEvent], None],
        make_will: Callable[[int], Will] | None = None,
    ) -> None:
        """`put` takes the events, from another thread; `make_will` gets the session number."""
        self._settings = settings
        self._put = put
        self._make_will = make_will
        self._version = FIXED_VERSIONS[settings.mqtt_version]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mqtt-link", daemon=True)
        self._current: _Connection | None = None
        self._session = 0

    def start(self) -> None:
        """Begin to connect; returns at once."""
        self._thread.start()

    def publish(
        self, topic: str, payload: bytes, *, qos: int, retain: bool = False, wait_s: float = 0.0
    ) -> bool:
        """Hand a message to the connection; False if it is down or does not take more.

        `wait_s`: wait so long for the broker's answer (QoS 1) or the socket (QoS 0).
        """
        connection = self._current
        return connection is not None and connection.publish(topic, payload, qos, retain, wait_s)

    def publish_bulk(self, topic: str, payload: bytes) -> bool:
        """Publish with QoS 0, waiting while too much is unsent (what keeps the memory bounded)."""
        connection = self._current
        return connection is not None and connection.publish_bulk(topic, payload)

    def close(self) -> None:
        """Say goodbye to the broker (no will is published) and stop."""
        self._stopping.set()
        connection = self._current
        if connection is not None:
            connection.close()
        self._thread.join(CONNECT_TIMEOUT_S + 1.0)

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            # Rises from process to process too, as long as the clock does not jump back.
            self._session = max(self._session + 1, time.time_ns() // 1_000_000)
            was_up, reason = self._hold()
            if self._stopping.is_set():
                return
            failures = 0 if was_up else failures + 1
            self._put(LinkDown(reason))
            pause_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            self._stopping.wait(pause_s * random.uniform(0.5, 1.0))

    def _hold(self) -> tuple[bool, str]:
        """Connect and stay connected; returns whether the broker took us and why it ended."""
        settings = self._settings
        try:
            version = self._version or probe_version(settings.host, settings.port)
            connection = _Connection(settings, self._put, version, self._session)
            self._current = connection
            if self._stopping.is_set():  # close() may have looked before the line above
                return False, ""
            reason = connection.hold(self._make_will)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error) or "no answer"
            return False, f"cannot reach the broker at {settings.host}:{settings.port}: {why}"
        finally:
            self._current = None
        # Remembered only while it works: the broker may be another one after an update.
        fixed = FIXED_VERSIONS[settings.mqtt_version]
        self._version = version if connection.was_up else fixed
        return connection.was_up, reason


class _Connection:
    """One paho client from connect to disconnect."""

    def __init__(
        self,
        settings: LinkSettings,
        put: Callable[[LinkEvent], None],
        version: MQTTProtocolVersion,
        session: int,
    ) -> None:
        self.was_up = False  # the broker accepted us
        self._settings = settings
        self._put = put
        self._version = version
        self._session = session
        self._reason = ""
        self._ended = threading.Event()
        self._unsent: deque[paho.MQTTMessageInfo] = deque()
        self._client = self._make_client()

    def hold(self, make_will: Callable[[int], Will] | None) -> str:
        """Run until the connection ends and return why; OSError if it cannot be made."""
        host, port = self._settings.host, self._settings.port
        if make_will is not None:
            will = make_will(self._session)
            self._client.will_set(will.topic, will.payload, qos=1, retain=True)
        self._client.connect(host, port, keepalive=self._settings.keepalive_s)
        self._client.loop_start()
        self._ended.wait()
        self._client.loop_stop()
        return self._reason or f"the connection to the broker at {host}:{port} was lost"

    def publish(self, topic: str, payload: bytes, qos: int, retain: bool, wait_s: float) -> bool:
        if not self.was_up or self._ended.is_set():
            return False
        info = self._client.publish(topic, payload, qos=qos, retain=retain)
        if info.rc != MQTTErrorCode.MQTT_ERR_SUCCESS:
            return False
        return wait_s <= 0.0 or self._await_sent(info, wait_s)

    def publish_bulk(self, topic: str, payload: bytes) -> bool:
        while self._unsent and (len(self._unsent) >= MAX_UNSENT_BULK or self._is_sent()):
            if not self._await_sent(self._unsent[0], 1.0):
                if self._ended.is_set():
                    return False
                continue
            self._unsent.popleft()
        if not self.was_up or self._ended.is_set():
            return False
        info = self._client.publish(topic, payload, qos=0)
        self._unsent.append(info)
        return info.rc == MQTTErrorCode.MQTT_ERR_SUCCESS

    def close(self) -> None:
        self._client.disconnect()
        self._ended.set()

    def _is_sent(self) -> bool:
        try:
            return self._unsent[0].is_published()
        except (RuntimeError, ValueError):  # paho: the connection ended before it was sent
            return True

    def _await_sent(self, info: paho.MQTTMessageInfo, wait_s: float) -> bool:
        try:
            info.wait_for_publish(wait_s)
            return info.is_published()
        except (RuntimeError, ValueError):  # paho: the connection ended before it was sent
            return not self._ended.is_set()

    def _make_client(self) -> paho.Client:
        settings = self._settings
        clean = None if self._version == MQTTProtocolVersion.MQTTv5 else True
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=settings.client_id,
            clean_session=clean,
            protocol=self._version,
            reconnect_on_failure=False,
        )
        client.connect_timeout = CONNECT_TIMEOUT_S
        client.max_queued_messages_set(MAX_QUEUED_MESSAGES)
        if settings.username is not None:
            client.username_pw_set(settings.username, settings.password)
        client.on_socket_open = _no_delay
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_message = self._on_message
        client.on_disconnect = self._on_disconnect
        return client

    def _on_connect(
        self,
        client: paho.Client,
        _userdata: object,
        _flags: paho.ConnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if reason.is_failure:
            where = f"{self._settings.host}:{self._settings.port}"
            self._reason = f"the broker at {where} refused the connection: {reason}"
        elif self._settings.subscriptions:
            client.subscribe(list(self._settings.subscriptions))
        else:
            self._up()

    def _on_subscribe(
        self,
        _client: paho.Client,
        _userdata: object,
        _mid: int,
        reasons: list[ReasonCode],
        _properties: Properties | None,
    ) -> None:
        for (topic, _qos), reason in zip(self._settings.subscriptions, reasons, strict=False):
            if reason.is_failure:
                LOG.error("the broker refused the subscription of %s: %s", topic, reason)
        self._up()

    def _up(self) -> None:
        self.was_up = True
        self._put(LinkUp(self._session, VERSION_NAMES[self._version]))

    def _on_message(
        self, _client: paho.Client, _userdata: object, message: paho.MQTTMessage
    ) -> None:
        self._put(Message(message.topic, bytes(message.payload)))

    def _on_disconnect(
        self,
        _client: paho.Client,
        _userdata: object,
        _flags: paho.DisconnectFlags,
        _reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        self._ended.set()


def _no_delay(_client: paho.Client, _userdata: object, sock: object) -> None:
    # Nagle's algorithm and delayed acknowledgements together cost a factor of 35 here.
    if isinstance(sock, socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def queue_putter(events: "queue.Queue[Any]", stopped: threading.Event) -> Callable[[object], None]:
    """Return a put that waits while the queue is full (so TCP slows the sender), but not for ever.

    After `stopped` is set nobody takes events any more, and they are dropped.
    """

    def put(event: object) -> None:
        while not stopped.is_set():
            try:
                return events.put(event, timeout=0.5)
            except queue.Full:
                continue
        return None

    return put
