"""Deploy a bundle: publish the desired release, serve its chunks, wait for the results.

The devices drive: each compares its retained `desired` document with its slots and requests the
chunks that it lacks. After a restart of a device or the broker the transfer resumes by itself.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from device.errors import BrokerError, DeployError
from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkUp, Message, queue_putter
from device.protocol.topics import PREFIX, DeviceId
from toolkit.fleet.brokers.address import BrokerAddress
from toolkit.fleet.bundles.blob import INDEX_PART
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.device_deployment import Deployment, DeployProgress, DeployResult
from toolkit.fleet.transports.withdrawal import Withdrawal

if TYPE_CHECKING:
    from toolkit.fleet.bundles.library import Library
    from toolkit.fleet.server.metadata import MetadataServer

MAX_EVENTS = 1024


class _Deployments:
    """The deployments of one release over one connection: one thread handles all events.

    `library`: the bundle, and those that a chunk may be sent as a difference from.
    """

    def __init__(
        self,
        delivery: Delivery,
        devices: Sequence[str],
        broker: BrokerAddress,
        library: "Library",
        *,
        timeout_s: float,
        on_progress: Callable[[DeployProgress], None],
    ) -> None:
        from toolkit.fleet.server.chunks import ChunkServer  # it needs numpy, for differences

        self._documents = {device: delivery.desired(device) for device in devices}
        self._metadata = _metadata_server(delivery.fleet)
        self._fleet, self._desired = delivery.fleet, delivery.document
        now_s = time.monotonic()
        self._deployments = [
            Deployment(delivery.blob, self._desired, device, timeout_s=timeout_s, now_s=now_s)
            for device in devices
        ]
        self._by_topic = {
            topic: deployment
            for deployment in self._deployments
            for topic in deployment.subscriptions
        }
        self._by_device = {d.topics.device: d for d in self._deployments}
        self._chunks = ChunkServer(library, self._send, self._deployments[0].peer)
        self._on_progress = on_progress
        self._events: queue.Queue[LinkEvent] = queue.Queue(MAX_EVENTS)
        self._ended = threading.Event()
        client_id = f"tandem-deploy-{self._desired.request[:8]}"
        settings = broker.link_settings(client_id, *self._topics())
        self._link = Link(settings, queue_putter(self._events, self._ended))
        self._was_up = False

    def run(self, *, withdraw: bool) -> tuple[DeployResult, ...]:
        """Serve chunks until every device has reported a result or is silent for too long.

        `withdraw`: take the release back at Ctrl-C.
        """
        self._link.start()
        try:
            while running := [d for d in self._deployments if d.result is None]:
                self._step(running)
        except KeyboardInterrupt:
            if not withdraw:
                raise
            raise KeyboardInterrupt(self._withdraw()) from None
        finally:
            self._ended.set()
            self._link.close()
        return tuple(d.result for d in self._deployments if d.result is not None)

    def _withdraw(self) -> str:
        """Take the release back; return what has become of it. Ctrl-C ends that at once."""
        try:
            return "; ".join(filter(None, map(self._withdraw_one, self._deployments)))
        except KeyboardInterrupt:
            release = self._desired.release
            devices = ", ".join(self._documents)
            return (
                f"{release.name} {release.version} may still be desired of {devices}, and be "
                "installed: flash the release before"
            )

    def _withdraw_one(self, deployment: Deployment) -> str:
        self._on_progress(replace(deployment.progress, phase="withdrawing"))
        return Withdrawal(
            deployment,
            self._link,
            self._events,
            ours=self._documents[deployment.topics.device],
            fleet=self._fleet,
            serve=self._serve_metadata,
        ).run()

    def _serve_metadata(self, message: Message) -> bool:
        return self._metadata is not None and self._metadata.handle(self._link, message)

    def _topics(self) -> tuple[str, ...]:
        """Return what this side listens to."""
        if self._metadata is None:
            return tuple(self._by_topic)
        return (*self._by_topic, *(d.topics.tuf_get for d in self._deployments))

    def _step(self, running: Sequence[Deployment]) -> None:
        """Handle one event; without events send a part; without parts wait."""
        pending = self._chunks.pending
        remaining_s = min(d.deadline_s for d in running) - time.monotonic()
        try:
            event = self._events.get(timeout=0.0 if pending else max(0.0, remaining_s))
        except queue.Empty:
            if pending:
                self._chunks.send_next()
        else:
            self._handle(event)
        for deployment in running:
            if deployment.result is None:
                deployment.advance(time.monotonic())
                if deployment.result is not None:
                    self._on_progress(deployment.progress)

    def _handle(self, event: LinkEvent) -> None:
        if isinstance(event, LinkUp):
            self._was_up = True
            for deployment in self._deployments:
                if deployment.result is None:
                    self._publish(deployment)
        elif isinstance(event, LinkDown):
            if not self._was_up:
                raise BrokerError(f"{event.reason}: is it running, and is its address right?")
            for deployment in self._deployments:
                deployment.on_link_down(event.reason)
            self._chunks.forget()
        else:
            self._on_message(event)

    def _publish(self, deployment: Deployment) -> None:
        deployment.on_link_up()
        document = self._documents[deployment.topics.device]
        self._link.publish(deployment.topics.desired, document, qos=1, retain=True)
        self._on_progress(deployment.progress)

    def _on_message(self, message: Message) -> None:
        if self._serve_metadata(message):
            return
        deployment = self._by_topic[message.topic]
        now_s = time.monotonic()
        with contextlib.suppress(ValueError):  # of a newer agent, or not of an agent at all
            if message.topic == deployment.topics.blob_get:
                if deployment.result is None and deployment.on_request(message.payload, now_s):
                    self._chunks.on_message(message)
            elif deployment.on_message(message, now_s):
                self._on_progress(deployment.progress)

    def _send(self, topic: str, payload: bytes) -> bool:
        """Send a part that `ChunkServer` answers with."""
        device, _blob, _sha256, name, _peer = topic.removeprefix(f"{PREFIX}/").split("/")
        deployment = self._by_device[device]
        if deployment.result is not None:
            return False
        sent = self._link.publish_bulk(topic, payload)
        if sent:
            deployment.count_sent(len(payload), is_chunk=name != INDEX_PART)
            self._on_progress(deployment.progress)
        return sent


@dataclass(frozen=True, slots=True)
class DeployOptions:
    """How a release is deployed.

    `timeout_s`: give a device up when it is silent for this long. `retry`: try the release also on
    devices that have rolled it back before. `fleet`: the folder of a fleet, whose keys sign; the
    bundle is published there if it is not. A device that runs a bundle of the fleet, or of the
    folder `earlier`, gets the differences from it where those are smaller.
    """

    timeout_s: float = 120.0
    retry: bool = False
    fleet: Path | None = None
    earlier: Path | None = None


def _check_devices(devices: Sequence[str]) -> None:
    """Refuse a device named twice, and an invalid id: "+" or "#" would address the whole fleet."""
    for device in devices:
        try:
            msgspec.convert(device, DeviceId)
        except msgspec.ValidationError as error:
            raise DeployError(
                f"{device!r} is not the id of a device: that has 1 to 64 letters, digits, - and _, "
                "like device in its agent.toml"
            ) from error
        if devices.count(device) > 1:
            raise DeployError(f"the device {device} is named twice: name each once")


def _no_progress(_: DeployProgress) -> None:
    """Discard progress."""


def deploy_bundle(
    bundle: Path,
    devices: Sequence[str],
    broker: BrokerAddress,
    options: DeployOptions = DeployOptions(),
    on_progress: Callable[[DeployProgress], None] = _no_progress,
) -> tuple[DeployResult, ...]:
    """Deploy a bundle to all devices at once and return their results; see `deploy`.

    The bundle is not compared with its hashes: the devices do that. Raises DeployError if a device
    is no id, or named twice, or the bundle is one of the agent, TrustError if it cannot be signed.
    """
    _check_devices(devices)
    delivery = Delivery(bundle, options.fleet, retry=options.retry, compare_hashes=False)
    with contextlib.closing(delivery):
        if delivery.info.agent is not None:
            raise DeployError(
                f"{bundle} is a release of the agent: `tandem fleet rollout start --agent` sends it"
            )
        return deploy(delivery, devices, broker, options, on_progress=on_progress)


def deploy(
    delivery: Delivery,
    devices: Sequence[str],
    broker: BrokerAddress,
    options: DeployOptions,
    *,
    withdraw: bool = False,
    on_progress: Callable[[DeployProgress], None],
) -> tuple[DeployResult, ...]:
    """Deliver a release to all devices at once; return their results, in the same order.

    `withdraw`: Ctrl-C takes the release back where its trial has not begun (`withdrawal.py`), and
    the text of KeyboardInterrupt says what has become of it; without, it stays desired.

    Raises BrokerError if the broker cannot be reached at the start (later interruptions are waited
    out).
    """
    from toolkit.fleet.bundles.library import Library

    published = None if delivery.fleet is None else delivery.fleet / "repository" / "targets"
    folders = (folder for folder in (published, options.earlier) if folder is not None)
    with contextlib.closing(Library(*folders, opened=(delivery.blob,))) as library:
        deployments = _Deployments(
            delivery,
            devices,
            broker,
            library,
            timeout_s=options.timeout_s,
            on_progress=on_progress,
        )
        return deployments.run(withdraw=withdraw)


def _metadata_server(fleet: Path | None) -> "MetadataServer | None":
    """Return what answers for signatures; None without a fleet."""
    if fleet is None:
        return None
    from toolkit.fleet.server.metadata import MetadataServer

    return MetadataServer(fleet / "repository")
