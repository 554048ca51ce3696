"""Bounded queues with a sender thread in front of the device's MQTT link.

Frames go out in order, the oldest are dropped first. Words (status, events, answers) are few and
go before them.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkSettings, LinkUp, Message, Will

QUEUED = 64  # two seconds at 30 Hz; with a slow broker the oldest are dropped
QUEUED_WORDS = 256
CLOSE_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message to publish."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    lost_as: str = ""  # the cause that counts it if the broker is away; empty: it is said again


class MqttPublisher:
    """Publishes messages; `put` and `say` never block."""

    def __init__(
        self,
        settings: LinkSettings,
        *,
        on_up: Callable[[], None],
        on_message: Callable[[Message], None],
        will: Will,
    ) -> None:
        """`on_up` is called at each connection, `on_message` with what the subscriptions bring;
        both from another thread."""
        self._link = Link(settings, self._note, lambda session: will)
        self._on_up = on_up
        self._on_message = on_message
        self._dropped: Counter[str] = Counter()
        self._frames: deque[Outgoing] = deque()
        self._words: deque[Outgoing] = deque()
        self._filled = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._send_all, name="mqtt-sink", daemon=True)

    @property
    def dropped(self) -> Mapping[str, int]:
        """mqtt_queue: the broker was too slow; mqtt_offline: it was not connected; mqtt_events: an
        event was lost by one of these."""
        return dict(self._dropped)

    def start(self) -> None:
        """Begin to connect, without waiting."""
        self._link.start()
        self._thread.start()

    def put(self, frame: Outgoing) -> None:
        """Queue a frame's message; drop the oldest if the queue is full."""
        self._append(self._frames, frame, QUEUED, "mqtt_queue")

    def say(self, word: Outgoing) -> None:
        """Queue a message that goes before all frames."""
        self._append(self._words, word, QUEUED_WORDS, "mqtt_events")

    def close(self) -> None:
        """Send the queues for a short time, then disconnect."""
        with self._filled:
            self._closing = True
            self._filled.notify()
        self._thread.join(CLOSE_S)
        # With a frozen broker a clean disconnect takes longer than the agent's grace period.
        goodbye = threading.Thread(target=self._link.close, name="mqtt-goodbye", daemon=True)
        goodbye.start()
        goodbye.join(CLOSE_S)

    def _append(self, queue: deque[Outgoing], message: Outgoing, limit: int, cause: str) -> None:
        with self._filled:
            if len(queue) == limit and queue.popleft().lost_as:
                self._dropped[cause] += 1
            queue.append(message)
            self._filled.notify()

    def _send_all(self) -> None:
        while (message := self._next()) is not None:
            if not self._send(message) and message.lost_as:
                self._dropped[message.lost_as] += 1

    def _next(self) -> Outgoing | None:
        with self._filled:
            while not self._words and not self._frames and not self._closing:
                self._filled.wait()
            queue = self._words or self._frames
            return queue.popleft() if queue else None

    def _send(self, message: Outgoing) -> bool:
        if message.qos == 0 and not message.retain:
            return self._link.publish_bulk(message.topic, message.payload)
        # At the end, what is retained must be out before the connection is closed.
        wait_s = CLOSE_S if self._closing and message.retain else 0.0
        return self._link.publish(
            message.topic, message.payload, qos=message.qos, retain=message.retain, wait_s=wait_s
        )

    def _note(self, event: LinkEvent) -> None:
        if isinstance(event, LinkUp):
            _log.info("mqtt sink connected (MQTT %s)", event.mqtt_version)
            self._on_up()
        elif isinstance(event, LinkDown):
            _log.warning("mqtt sink: %s", event.reason)
        else:
            self._on_message(event)
