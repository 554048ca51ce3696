"""Deploy a bundle: publish the desired release, serve its chunks, wait for the result.

The device drives: it compares the retained `desired` document with its slots and requests the
chunks that it lacks. After a restart of the device or the broker the transfer resumes by itself.
"""

import hashlib
import os
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from device.errors import BrokerError, BundleError, DeployError
from device.protocol.documents import (
    CHUNK_BYTES,
    DOCUMENT_FORMAT,
    MAX_CHUNKS_A_REQUEST,
    AgentState,
    BlobGet,
    BlobSpec,
    Desired,
    ReleaseSpec,
    Reported,
    StateDocument,
    Update,
    decode,
    encode,
)
from device.protocol.mqtt import (
    Link,
    LinkDown,
    LinkEvent,
    LinkSettings,
    LinkUp,
    Message,
    queue_putter,
)
from device.protocol.topics import DeviceId, Topics
from device.update.bundle import BundleInfo, read_bundle_info

DEFAULT_PORT = 1883
MAX_EVENTS = 1024
INDEX_PART = "index"

ResultPhase = Literal["live", "rolled_back", "refused", "superseded", "timeout"]


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where the broker is and how to log in; the password is not in its repr."""

    host: str
    port: int = DEFAULT_PORT
    username: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class DeployProgress:
    """Progress of a deployment; `phase` is the device's, or "waiting" before its first report."""

    phase: str
    received_bytes: int
    total_bytes: int
    sent_chunks: int


@dataclass(frozen=True, slots=True)
class DeployResult:
    """Result of a deployment; `reason` is empty for "live" and a sentence otherwise."""

    device: str
    name: str
    version: str
    sha256: str
    phase: ResultPhase
    reason: str
    total_bytes: int
    sent_bytes: int
    duration_s: float

    @property
    def live(self) -> bool:
        """Whether the device runs the release now."""
        return self.phase == "live"


def parse_broker(
    text: str, username: str | None = None, password: str | None = None
) -> BrokerAddress:
    """Return the address in `host` or `host:port` ([...] around an IPv6 address)."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    if not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise BrokerError(f"the broker {text!r} is not host:port, for example 192.168.1.10:1883")
    return BrokerAddress(host.strip("[]"), int(port), username, password)


class Blob:
    """A file that is served in chunks."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise BundleError(f"cannot read {path}: {error.strerror}") from error
        whole, hashes = hashlib.sha256(), bytearray()
        size = 0
        while chunk := self._file.read(CHUNK_BYTES):
            whole.update(chunk)
            hashes += hashlib.sha256(chunk).digest()
            size += len(chunk)
        self.index = bytes(hashes)
        self.spec = BlobSpec(
            sha256=whole.hexdigest(),
            bytes=size,
            chunk_bytes=CHUNK_BYTES,
            index_sha256=hashlib.sha256(self.index).hexdigest(),
        )

    def read(self, part: int | str) -> bytes:
        """Return the bytes of a chunk, or of the index."""
        if isinstance(part, str):
            return self.index
        return os.pread(self._file.fileno(), CHUNK_BYTES, part * CHUNK_BYTES)

    def parts_of(self, request: BlobGet) -> tuple[int | str, ...]:
        """Return the existing parts that a request names; none if it is for another blob."""
        if request.sha256 != self.spec.sha256:
            return ()
        index: tuple[int | str, ...] = (INDEX_PART,) if request.index else ()
        chunks = request.chunks[:MAX_CHUNKS_A_REQUEST]
        return (*index, *(number for number in chunks if number < self.spec.chunks))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Deployment:
    """One deployment to one device: a single thread handles the events of a queue."""

    def __init__(
        self,
        info: BundleInfo,
        blob: Blob,
        *,
        device: str,
        broker: BrokerAddress,
        timeout_s: float,
        on_progress: Callable[[DeployProgress], None],
    ) -> None:
        self._blob = blob
        self._topics = Topics(device)
        self._desired = Desired(
            format=DOCUMENT_FORMAT,
            request=uuid.uuid4().hex,
            release=ReleaseSpec(
                name=info.name, version=info.version, profile=info.profile, blob=blob.spec
            ),
        )
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._events: queue.Queue[LinkEvent] = queue.Queue(MAX_EVENTS)
        self._ended = threading.Event()
        self._link = Link(self._settings(broker), queue_putter(self._events, self._ended))
        self._pending: deque[int | str] = deque()
        self._update: Update | None = None
        self._device_state: AgentState | None = None
        self._was_up = False
        self._down_reason = ""
        self._echoed = False  # our desired document came back: a later one supersedes it
        self._sent_chunks = 0
        self._sent_bytes = 0
        self._started_s = time.monotonic()
        self._heard_s = self._started_s

    def run(self) -> DeployResult:
        """Serve chunks until the device reports a result or is silent for too long."""
        self._link.start()
        try:
            while True:
                result = self._step()
                if result is not None:
                    return result
        finally:
            self._ended.set()
            self._link.close()

    def _settings(self, broker: BrokerAddress) -> LinkSettings:
        topics = self._topics
        subscribed = (topics.reported, topics.state, topics.desired, topics.blob_get)
        return LinkSettings(
            host=broker.host,
            port=broker.port,
            client_id=f"tandem-deploy-{self._desired.request[:8]}",
            subscriptions=tuple((topic, 1) for topic in subscribed),
            username=broker.username,
            password=broker.password,
        )

    def _step(self) -> DeployResult | None:
        """Handle one event; without events send one part; without parts wait."""
        remaining_s = self._heard_s + self._timeout_s - time.monotonic()
        if remaining_s <= 0.0:
            return self._result("timeout", self._silence())
        try:
            event = self._events.get(timeout=0.0 if self._pending else remaining_s)
        except queue.Empty:
            if self._pending:
                self._send(self._pending.popleft())
            return None
        return self._handle(event)

    def _handle(self, event: LinkEvent) -> DeployResult | None:
        if isinstance(event, LinkUp):
            self._was_up, self._echoed, self._down_reason = True, False, ""
            self._link.publish(self._topics.desired, encode(self._desired), qos=1, retain=True)
            self._report_progress()
        elif isinstance(event, LinkDown):
            if not self._was_up:
                raise BrokerError(f"{event.reason}: is it running, and is --broker right?")
            self._down_reason = event.reason
            self._pending.clear()
        else:
            try:
                return self._on_message(event)
            except ValueError:
                return None  # of a newer agent, or not of an agent at all
        return None

    def _on_message(self, message: Message) -> DeployResult | None:
        if not message.payload:
            return None
        if message.topic == self._topics.blob_get:
            self._on_request(decode(message.payload, BlobGet))
        elif message.topic == self._topics.reported:
            return self._on_report(decode(message.payload, Reported))
        elif message.topic == self._topics.state:
            self._device_state = decode(message.payload, StateDocument).state
        else:
            return self._on_desired(decode(message.payload, Desired))
        return None

    def _on_request(self, request: BlobGet) -> None:
        parts = self._blob.parts_of(request)
        if not parts:
            return
        self._heard_s = time.monotonic()
        waiting = set(self._pending)
        self._pending.extend(part for part in parts if part not in waiting)

    def _on_report(self, report: Reported) -> DeployResult | None:
        if report.update.request != self._desired.request:
            return None
        self._heard_s = time.monotonic()
        self._update = report.update
        self._report_progress()
        for phase in ("live", "rolled_back", "refused"):
            if report.update.phase == phase:
                return self._result(phase, report.update.reason)
        return None

    def _on_desired(self, desired: Desired) -> DeployResult | None:
        if desired.request == self._desired.request:
            self._echoed = True
        elif self._echoed:
            newer = desired.release
            reason = f"another deployment ({newer.name} {newer.version}) took its place"
            return self._result("superseded", reason)
        return None

    def _send(self, part: int | str) -> None:
        payload = self._blob.read(part)
        if self._link.publish_bulk(self._topics.chunk(self._blob.spec.sha256, part), payload):
            self._sent_bytes += len(payload)
            self._sent_chunks += part != INDEX_PART
            self._report_progress()

    def _report_progress(self) -> None:
        update = self._update
        self._on_progress(
            DeployProgress(
                phase="waiting" if update is None else update.phase,
                received_bytes=0 if update is None else update.received_bytes,
                total_bytes=self._blob.spec.bytes,
                sent_chunks=self._sent_chunks,
            )
        )

    def _silence(self) -> str:
        """Return why the device is silent, as far as it is known."""
        device, for_s = self._topics.device, f"for {self._timeout_s:g} s"
        if self._down_reason:
            return f"{self._down_reason} {for_s}"
        if self._device_state is None:
            return (
                f"no agent ever connected to this broker as {device}: compare the id with device "
                "in its agent.toml, and look whether tandem-agent runs"
            )
        if self._device_state != "online":
            return (
                f"the agent of {device} is {self._device_state}; the release stays desired and is "
                "taken by `tandem deploy` once it is back"
            )
        phase = "waiting" if self._update is None else self._update.phase
        return f"the agent of {device} said nothing {for_s} in the phase {phase}: see its log"

    def _result(self, phase: ResultPhase, reason: str) -> DeployResult:
        release = self._desired.release
        return DeployResult(
            device=self._topics.device,
            name=release.name,
            version=release.version,
            sha256=release.blob.sha256,
            phase=phase,
            reason=reason,
            total_bytes=release.blob.bytes,
            sent_bytes=self._sent_bytes,
            duration_s=round(time.monotonic() - self._started_s, 3),
        )


def _check_device(device: str) -> None:
    """Refuse an invalid device id: "+" or "#" would address the whole fleet."""
    try:
        msgspec.convert(device, DeviceId)
    except msgspec.ValidationError as error:
        raise DeployError(
            f"{device!r} is not the id of a device: that has 1 to 64 letters, digits, - and _, "
            "like device in its agent.toml"
        ) from error


def _no_progress(_: DeployProgress) -> None:
    """Discard progress."""


def deploy_bundle(
    bundle: Path,
    device: str,
    broker: BrokerAddress,
    *,
    timeout_s: float = 120.0,
    on_progress: Callable[[DeployProgress], None] = _no_progress,
) -> DeployResult:
    """Deploy a bundle and return the device's result.

    `timeout_s`: give up when the device is silent for this long. Raises BrokerError if the broker
    cannot be reached at the start (later interruptions are waited out), DeployError if `device` is
    no id.
    """
    _check_device(device)
    info = read_bundle_info(bundle)
    blob = Blob(bundle)
    try:
        deployment = _Deployment(
            info,
            blob,
            device=device,
            broker=broker,
            timeout_s=timeout_s,
            on_progress=on_progress,
        )
        return deployment.run()
    finally:
        blob.close()
