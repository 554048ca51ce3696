"""A bounded queue with a sender thread in front of the device's MQTT link."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping

from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkSettings, LinkUp

QUEUED = 64  # two seconds at 30 Hz; with a slow broker the oldest are dropped
CLOSE_S = 1.0

_log = logging.getLogger(__name__)


class MqttPublisher:
    """Publishes payloads on one topic in order; `put` never blocks."""

    def __init__(self, settings: LinkSettings, topic: str, qos: int) -> None:
        self._link = Link(settings, self._note)
        self._topic = topic
        self._qos = qos
        self._dropped: Counter[str] = Counter()
        self._queue: deque[bytes] = deque()
        self._filled = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._send_all, name="mqtt-sink", daemon=True)

    @property
    def dropped(self) -> Mapping[str, int]:
        """mqtt_queue: the broker was too slow; mqtt_offline: it was not connected."""
        return dict(self._dropped)

    def start(self) -> None:
        """Begin to connect, without waiting."""
        self._link.start()
        self._thread.start()

    def put(self, payload: bytes) -> None:
        """Queue a payload; drop the oldest if the queue is full."""
        with self._filled:
            if len(self._queue) == QUEUED:
                self._queue.popleft()
                self._dropped["mqtt_queue"] += 1
            self._queue.append(payload)
            self._filled.notify()

    def close(self) -> None:
        """Send the queue for a short time, then disconnect."""
        with self._filled:
            self._closing = True
            self._filled.notify()
        self._thread.join(CLOSE_S)
        # With a frozen broker a clean disconnect takes longer than the agent's grace period.
        goodbye = threading.Thread(target=self._link.close, name="mqtt-goodbye", daemon=True)
        goodbye.start()
        goodbye.join(CLOSE_S)

    def _send_all(self) -> None:
        while (payload := self._next()) is not None:
            if not self._send(payload):
                self._dropped["mqtt_offline"] += 1

    def _next(self) -> bytes | None:
        with self._filled:
            while not self._queue and not self._closing:
                self._filled.wait()
            return self._queue.popleft() if self._queue else None

    def _send(self, payload: bytes) -> bool:
        if self._qos == 0:
            return self._link.publish_bulk(self._topic, payload)
        return self._link.publish(self._topic, payload, qos=self._qos)

    def _note(self, event: LinkEvent) -> None:
        if isinstance(event, LinkUp):
            _log.info("mqtt sink connected (MQTT %s)", event.mqtt_version)
        elif isinstance(event, LinkDown):
            _log.warning("mqtt sink: %s", event.reason)
