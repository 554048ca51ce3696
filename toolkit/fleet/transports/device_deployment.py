"""The deployment of a release to one device: what its messages mean.

It neither connects nor waits: `toolkit.fleet.transports.deploy` passes it messages and the time.
"""

from dataclasses import dataclass, replace
from typing import Literal

from device.protocol.documents import (
    AgentState,
    BlobGet,
    Desired,
    StateDocument,
    Update,
    decode,
)
from device.protocol.mqtt import Message
from device.protocol.signed import open_desired, open_reported
from device.protocol.topics import Topics
from toolkit.fleet.bundles.blob import Blob

ResultPhase = Literal["live", "rolled_back", "refused", "superseded", "timeout", "trial"]


@dataclass(frozen=True, slots=True)
class DeployProgress:
    """Progress of a deployment to one device.

    `phase` is the device's, "waiting" before its first report, or that of the result.
    """

    device: str
    phase: str
    received_bytes: int
    total_bytes: int
    sent_chunks: int


@dataclass(frozen=True, slots=True)
class DeployResult:
    """Result on one device; `reason` is empty for "live" and a sentence otherwise."""

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


@dataclass(frozen=True, slots=True)
class Before:
    """What was known of a device before a deployment: payloads of its retained topics, or b""."""

    device: str
    desired: bytes
    reported: bytes


class Deployment:
    """A deployment to one device. `result` is None until the device has said how it ended.

    `published`: the device may know of it. `before`: what was retained then.
    """

    def __init__(
        self, blob: Blob, desired: Desired, device: str, *, timeout_s: float, now_s: float
    ) -> None:
        self.topics = Topics(device)
        self.result: DeployResult | None = None
        self.published = False
        self.before = Before(device, b"", b"")
        self._blob = blob
        self._desired = desired
        self._timeout_s = timeout_s
        self._update: Update | None = None
        self._problems: tuple[str, ...] = ()
        self._device_state: AgentState | None = None
        self._down_reason = ""
        self.echoed = False  # our desired document came back: a later one supersedes it
        self._sent_chunks = 0
        self._sent_bytes = 0
        self._started_s = now_s
        self._heard_s = now_s

    @property
    def peer(self) -> str:
        """The name by which the device asks this server."""
        return self._desired.request[:8]

    @property
    def desired(self) -> Desired:
        """What is published, without what binds it to one device."""
        return self._desired

    @property
    def named(self) -> str:
        """Name and version of the release, for sentences."""
        return f"{self._desired.release.name} {self._desired.release.version}"

    @property
    def phase(self) -> str:
        """The device's, "waiting" before its first report, or that of the result."""
        if self.result is not None:
            return self.result.phase
        return "waiting" if self._update is None else self._update.phase

    @property
    def subscriptions(self) -> tuple[str, ...]:
        """The topics whose messages are for this device."""
        topics = self.topics
        return topics.reported, topics.state, topics.desired, topics.blob_get

    @property
    def progress(self) -> DeployProgress:
        """How far the device is."""
        update = self._update
        return DeployProgress(
            device=self.topics.device,
            phase=self.phase,
            received_bytes=0 if update is None else update.received_bytes,
            total_bytes=self._blob.spec.bytes,
            sent_chunks=self._sent_chunks,
        )

    @property
    def deadline_s(self) -> float:
        """When the device has been silent for too long."""
        return self._heard_s + self._timeout_s

    def advance(self, now_s: float) -> None:
        """Give up if the device has been silent for too long."""
        if now_s >= self.deadline_s:
            self._end("timeout", self._silence(), now_s)

    def on_link_up(self) -> None:
        """A connection begins, and the document is published: what is retained comes again."""
        self.published, self.echoed, self._down_reason = True, False, ""

    def on_link_down(self, reason: str) -> None:
        """The connection was lost."""
        self._down_reason = reason

    def on_message(self, message: Message, now_s: float) -> bool:
        """Take what the device says, or is told; return whether it reported or ended. Requests for
        chunks are for `on_request`.

        Raises ValueError: it is not understood.
        """
        if not message.payload or self.result is not None:
            return False
        if message.topic == self.topics.reported:
            return self._on_report(message.payload, now_s)
        if message.topic == self.topics.state:
            self._device_state = decode(message.payload, StateDocument).state
        elif message.topic == self.topics.desired:
            self._on_desired(message.payload, now_s)
        return self.result is not None

    def on_request(self, payload: bytes, now_s: float) -> bool:
        """Whether a request for chunks is for those of this release, and for this server.

        Raises ValueError: it is not understood.
        """
        request = decode(payload, BlobGet)
        is_ours = request.peer in ("", self.peer) and bool(self._blob.parts_of(request))
        if is_ours:
            self._heard_s = now_s
        return is_ours

    def count_sent(self, size: int, *, is_chunk: bool) -> None:
        """Count a part that was sent: a chunk, or the index."""
        self._sent_bytes += size
        self._sent_chunks += is_chunk

    def _on_report(self, payload: bytes, now_s: float) -> bool:
        report = open_reported(payload)
        self._problems = report.problems
        if report.update.request != self._desired.request:
            self.before = replace(self.before, reported=payload)
            return False
        self._heard_s = now_s
        self._update = report.update
        for phase in ("live", "rolled_back", "refused"):
            if report.update.phase == phase:
                self._end(phase, report.update.reason, now_s)
        if report.update.waits_for_commit:
            self._end("trial", report.update.reason, now_s)
        return True

    def _on_desired(self, payload: bytes, now_s: float) -> None:
        try:
            desired = open_desired(payload)[0]
        except ValueError:
            if not self.echoed:  # of a newer host
                self.before = replace(self.before, desired=payload)
            raise
        if desired.request == self._desired.request:
            self.echoed = True
        elif self.echoed:
            newer = desired.release
            reason = f"another deployment ({newer.name} {newer.version}) took its place"
            self._end("superseded", reason, now_s)
        else:
            self.before = replace(self.before, desired=payload)

    def _silence(self) -> str:
        """Return why the device is silent, as far as it is known."""
        device, for_s = self.topics.device, f"for {self._timeout_s:g} s"
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
        reasons = [*self._problems]
        if self._update is not None and self._update.reason:
            reasons.append(self._update.reason)
        why = "; ".join(reasons) or "see its log"
        return f"the agent of {device} said nothing {for_s} in the phase {phase}: {why}"

    def _end(self, phase: ResultPhase, reason: str, now_s: float) -> None:
        release = self._desired.release
        self.result = DeployResult(
            device=self.topics.device,
            name=release.name,
            version=release.version,
            sha256=release.blob.sha256,
            phase=phase,
            reason=reason,
            total_bytes=release.blob.bytes,
            sent_bytes=self._sent_bytes,
            duration_s=round(now_s - self._started_s, 3),
        )
