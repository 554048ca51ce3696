"""The mqtt sink: detections of each frame, the lives of objects, the pipeline's status, and what
may be changed while it runs. docs/mqtt.md has the topics and payloads."""

import logging
import os
import time
from collections.abc import Mapping

import msgspec

from device.errors import PipelineError
from device.protocol.messages import Reload, Stats
from device.protocol.mqtt import LinkSettings, Message, Will
from device.protocol.topics import PipelineTopics
from pipelines.rate import RateLimit
from pipelines.results import Detections
from pipelines.sink_config import MqttSink, SinkConfig
from pipelines.sinks.mqtt_queue import MqttPublisher, Outgoing
from pipelines.sinks.payloads import payload_of
from pipelines.sinks.result import Broker, FrameResult, SinkContext
from pipelines.sinks.track_lifecycle import ObjectEvent, TrackLifecycle

KEEPALIVE_S = 10
STATUS_S = 10.0  # the will of an earlier pipeline may come late: the status is said again
ONLINE, STOPPED, OFFLINE = b"online", b"stopped", b"offline"
SWITCH = {b"ON": True, b"OFF": False}

_log = logging.getLogger(__name__)
_ENCODER = msgspec.json.Encoder()


class MqttOut:
    """Publishes each result, at most `max_hz`; drops those that the broker does not take."""

    def __init__(self, config: MqttSink, context: SinkContext) -> None:
        if context.broker is None:
            raise PipelineError(
                "the pipeline has an mqtt sink but no broker was named: start `tandem-pipeline`"
                " with --mqtt-host and --topic-prefix, or remove the sink from pipeline.toml."
            )
        self._config = config
        self._controls = context.controls
        prefix = context.broker.topic_prefix
        self._topics = {camera: PipelineTopics(prefix, camera) for camera in context.cameras}
        self._status = PipelineTopics(prefix).status
        self._stats = PipelineTopics(prefix).stats
        self._reload = PipelineTopics(prefix).reload
        self._tracks = {
            camera: TrackLifecycle(camera, context.labels, context.lost_s)
            for camera in context.cameras
        }
        self._limits = {camera: RateLimit(config.max_hz) for camera in context.cameras}
        self._limited = 0
        self._refusals = RateLimit(1.0)
        self._stats_due_s = 0.0
        self._status_due_s = float("inf")
        self._publisher = MqttPublisher(
            self._settings(context.broker),
            on_up=self._greet,
            on_message=self._take,
            will=Will(self._status, OFFLINE),
        )

    @property
    def dropped(self) -> Mapping[str, int]:
        """mqtt_rate: over max_hz; mqtt_queue: broker too slow; mqtt_offline: not connected;
        mqtt_events: an event was lost by one of these."""
        limited = {"mqtt_rate": self._limited} if self._limited else {}
        return {**limited, **self._publisher.dropped}

    def __enter__(self) -> "MqttOut":
        """Begin to connect; the pipeline does not wait for the broker."""
        self._publisher.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the lives of all objects, send the queue for a short time, then disconnect."""
        for camera, lifecycle in self._tracks.items():
            self._say_events(camera, lifecycle.close())
        self._publisher.say(Outgoing(self._status, STOPPED, qos=1, retain=True))
        self._publisher.close()

    def write(self, result: FrameResult) -> None:
        """Queue what there is to say of a frame for the sender thread."""
        now_s = time.monotonic()
        camera = result.frame.camera
        if now_s >= self._status_due_s:
            self._say_status(now_s)
        if self._config.events and isinstance(followed := result.followed, Detections):
            taken_ns = result.frame.t_capture.wall_ns
            lifecycle = self._tracks[camera]
            self._say_events(camera, lifecycle.update(followed, result.zones, taken_ns))
        if not self._limits[camera].allows(now_s):
            self._limited += 1
            return
        payload = payload_of(result, self._config)
        topic = self._topics[camera].detections
        self._publisher.put(Outgoing(topic, payload, self._config.qos, lost_as="mqtt_offline"))

    def adjust(self, config: SinkConfig) -> bool:
        """Go on with another rate, format and so on; what is subscribed to needs a connection of
        its own."""
        if not isinstance(config, MqttSink) or config.controls != self._config.controls:
            return False
        if config.events != self._config.events:
            for camera, lifecycle in self._tracks.items():
                self._say_events(camera, lifecycle.close())
        if config.max_hz != self._config.max_hz:
            self._limits = {camera: RateLimit(config.max_hz) for camera in self._limits}
        self._config = config
        return True

    def take_reload(self, reload: Reload) -> None:
        """Publish what of a changed pipeline.toml was taken, or why nothing."""
        self._publisher.say(Outgoing(self._reload, _ENCODER.encode(reload), qos=1))

    def tick(self) -> None:
        """End the lives of objects whose camera gives no frames."""
        for camera, lifecycle in self._tracks.items():
            self._say_events(camera, lifecycle.expire(time.monotonic()))

    def take_stats(self, stats: Stats) -> None:
        """Publish figures, every `stats_s` seconds."""
        now_s = time.monotonic()
        if self._config.stats_s and now_s >= self._stats_due_s:
            self._stats_due_s = now_s + self._config.stats_s
            self._publisher.say(Outgoing(self._stats, _ENCODER.encode(stats)))

    def _settings(self, broker: Broker) -> LinkSettings:
        topics = [
            topic
            for one in self._topics.values()
            for topic in (one.detect_set, one.threshold_set)
            if self._config.controls
        ]
        return LinkSettings(
            host=broker.host,
            port=broker.port,
            # The process id keeps two pipelines of one device, old and new, from evicting each
            # other.
            client_id=f"tandem-{broker.topic_prefix.rpartition('/')[2]}-{os.getpid()}",
            subscriptions=tuple((topic, 1) for topic in topics),
            username=broker.username,
            password=broker.password,
            keepalive_s=KEEPALIVE_S,
            tls=broker.tls,
        )

    def _greet(self) -> None:
        """Say what is retained, at each connection."""
        self._say_status(time.monotonic())
        if self._config.controls:
            for camera in self._topics:
                self._say_controls(camera)

    def _say_status(self, now_s: float) -> None:
        self._status_due_s = now_s + STATUS_S
        self._publisher.say(Outgoing(self._status, ONLINE, qos=1, retain=True))

    def _say_events(self, camera: str, events: tuple[ObjectEvent, ...]) -> None:
        for event in events if self._config.events else ():
            topic, payload = self._topics[camera].events, _ENCODER.encode(event)
            self._publisher.say(Outgoing(topic, payload, qos=1, lost_as="mqtt_events"))

    def _say_controls(self, camera: str) -> None:
        topics = self._topics[camera]
        state = b"ON" if self._controls.is_on(camera) else b"OFF"
        least = f"{self._controls.least_score(camera):g}".encode()
        self._publisher.say(Outgoing(topics.detect_state, state, qos=1, retain=True))
        self._publisher.say(Outgoing(topics.threshold_state, least, qos=1, retain=True))

    def _take(self, message: Message) -> None:
        """Obey a message of a `set` topic and say what holds now; others are refused in the log."""
        for camera, topics in self._topics.items():
            if message.topic == topics.detect_set:
                on = SWITCH.get(message.payload.strip().upper())
                if on is None:
                    self._refuse(message, "ON or OFF")
                else:
                    self._controls.switch(camera, on=on)
                self._say_controls(camera)
            elif message.topic == topics.threshold_set:
                score = _fraction(message.payload)
                if score is None:
                    self._refuse(message, "0 to 1")
                else:
                    self._controls.set_least_score(camera, score)
                self._say_controls(camera)

    def _refuse(self, message: Message, takes: str) -> None:
        """Say it in the log, about once a second: others may send as many as they like."""
        if self._refusals.allows(time.monotonic()):
            _log.warning("%s takes %s, not %r", message.topic, takes, message.payload[:40])


def _fraction(payload: bytes) -> float | None:
    """Return a number of 0 to 1, or None."""
    try:
        number = float(payload)
    except ValueError:
        return None
    return number if 0.0 <= number <= 1.0 else None
