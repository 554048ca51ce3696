"""A connection to the broker that reconnects with back-off: a thin adapter over paho-mqtt.

What happens is put on a queue as values (`LinkUp`, `LinkDown`, `Message`); nothing calls back into
the program. Each connection is a fresh paho client with a clean session: nothing that was queued
before a break comes out after it. What must be known is said again at each `LinkUp`.
"""

import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from device.errors import BrokerError
from device.protocol.cloud_events import CloudEvent
from device.protocol.left_out import LeftOut
from device.protocol.mqtt_connection import (
    CLOSE_WAIT_S,
    Connection,
    LinkDown,
    LinkEvent,
    LinkSettings,
    LinkUp,
    Message,
    Receipt,
    Will,
)
from device.protocol.mqtt_version import FIXED_VERSIONS, probe_version
from device.protocol.tls import explain

__all__ = [
    "Link",
    "LinkDown",
    "LinkEvent",
    "LinkSettings",
    "LinkUp",
    "Message",
    "Receipt",
    "Will",
    "queue_putter",
]

LOG = logging.getLogger(__name__)
BACKOFF_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0)
# After handshakes that a broker did not finish: it has more to do than it can, and each costs it
# time in vain. So 100,000 devices come back to one core within five minutes (docs/fleet_scale.md).
CROWDED_S = (60.0, 200.0)
STEADY_S = 10.0  # a connection that lasts so long resets the back-off


def pause_s(failures: int, crowded: int, chance: float) -> float:
    """Return how long to wait before the next attempt, after so many failures in a row, the last
    `crowded` of them handshakes that took too long; `chance`: from 0 to 1, spreads clients."""
    if crowded:
        return CROWDED_S[min(crowded, len(CROWDED_S)) - 1] * chance
    return BACKOFF_S[min(failures, len(BACKOFF_S) - 1)] * (0.5 + 0.5 * chance)


class Link:
    """Keeps one connection up in a thread of its own. One thread at a time may publish."""

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
        self._current: Connection | None = None
        self._session = 0
        self._timed_out = False  # the last handshake
        self._left_out = LeftOut([topic for topic, _qos in settings.subscriptions])

    @property
    def left_out(self) -> tuple[str, ...]:
        """The subscriptions that the link does without: a message there is too large to take."""
        return self._left_out.names

    def start(self) -> None:
        """Begin to connect, without waiting."""
        self._thread.start()

    def publish(
        self, topic: str, payload: bytes, *, qos: int, retain: bool = False, wait_s: float = 0.0
    ) -> bool:
        """Hand a message to the connection; False if it is down or too much is unsent.

        `wait_s`: wait so long for the broker's answer (QoS 1) or the socket (QoS 0).
        """
        connection = self._current
        return connection is not None and connection.publish(topic, payload, qos, retain, wait_s)

    def tell(self, topic: str, event: CloudEvent) -> Receipt | None:
        """Publish an event with QoS 1; None if the connection is down."""
        connection = self._current
        return None if connection is None else connection.tell(topic, event)

    def publish_bulk(self, topic: str, payload: bytes, qos: int = 0) -> bool:
        """Publish, waiting while too much is unsent (backpressure)."""
        connection = self._current
        return connection is not None and connection.publish_bulk(topic, payload, qos)

    def close(self) -> None:
        """Disconnect (the broker publishes no will) and stop, within 2 s.

        A broker that does not take the goodbye in half of that loses the connection without it.
        """
        self._stopping.set()
        connection = self._current
        if connection is not None:
            connection.close()
        # Not longer: a pending connection attempt ends by itself.
        self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        failures = crowded = 0
        while not self._stopping.is_set():
            # Rises from process to process too, as long as the clock does not jump back.
            self._session = max(self._session + 1, time.time_ns() // 1_000_000)
            begun_s, self._timed_out = time.monotonic(), False
            was_up, reason = self._hold()
            if self._stopping.is_set():
                return
            # A broker that accepts and then drops connections is not asked four times a second.
            steady = was_up and time.monotonic() - begun_s >= STEADY_S
            failures = 0 if steady else failures + 1
            self._put(LinkDown(reason))
            crowded = crowded + 1 if self._timed_out else 0
            self._stopping.wait(pause_s(failures, crowded, random.random()))

    def _hold(self) -> tuple[bool, str]:
        """Connect and stay connected; returns whether the broker accepted and why it ended."""
        settings = self._settings
        where = f"the broker at {settings.host}:{settings.port}"
        try:
            context = None if settings.tls is None else settings.tls.context()
            version = self._version or probe_version(settings.host, settings.port, context)
            connection = Connection(
                settings, self._put, version, self._session, self._left_out, context=context
            )
            self._current = connection
            if self._stopping.is_set():  # close() may have looked before the line above
                return False, ""
            reason = connection.hold(self._make_will)
        except BrokerError as error:
            return False, str(error)
        except OSError as error:
            self._timed_out = "handshake operation timed out" in str(error)  # of TLS, by `ssl`
            return False, f"cannot reach {where}: {explain(error, settings.tls)}"
        except ValueError as error:
            return False, f"cannot reach {where}: {error}"
        finally:
            self._current = None
        if connection.giant_topic and self._left_out.ended(
            connection.giant_topic, time.monotonic()
        ):
            LOG.error("%s; this client does without %s", reason, ", ".join(self.left_out))
        # Remembered only while it works: the broker may be another one after an update.
        fixed = FIXED_VERSIONS[settings.mqtt_version]
        self._version = version if connection.was_up else fixed
        return connection.was_up, reason


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
