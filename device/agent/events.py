"""The events of an agent: how an update ended, and each change of the pipeline's status.

Pure: two reports in, events out. The id of an event follows from what it says, so that one that is
told again after a crash is known to be the same.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from device.protocol.cloud_events import CloudEvent
from device.protocol.documents import Phase, Reported

FINAL: tuple[Phase, ...] = ("live", "rolled_back", "refused")
UPDATE_TYPE = "edge.tandem.update."  # and the phase
PIPELINE_TYPE = "edge.tandem.pipeline."  # and the status


@dataclass(frozen=True, slots=True)
class Told:
    """An event with the last part of its topic. `final`: it must not be lost."""

    topic: str
    event: CloudEvent
    final: bool


class UpdateEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The data of an event about an update; `reason` is empty for `live`."""

    phase: Phase
    request: str
    sha256: str
    reason: str


def events_of(before: Reported | None, now: Reported, *, source: str, at: str) -> Iterator[Told]:
    """Yield what a report says that the one before did not.

    `before`: None for the first report of a process, whose update may have ended in the last one.
    """
    update = now.update
    if update.phase in FINAL and update.request and (before is None or before.update != update):
        ended = UpdateEnded(
            phase=update.phase, request=update.request, sha256=update.sha256, reason=update.reason
        )
        name = f"{source} {update.request} {update.phase} {update.sha256}"
        event = _event(name, UPDATE_TYPE + update.phase, ended, source, at)
        yield Told("update", event, final=True)
    if before is not None and before.pipeline.status != now.pipeline.status:
        status = now.pipeline
        name = f"{source} {now.session} {status.status} {at}"
        yield Told(
            "pipeline", _event(name, PIPELINE_TYPE + status.status, status, source, at), False
        )


def _event(name: str, kind: str, data: msgspec.Struct, source: str, at: str) -> CloudEvent:
    """Return an event whose id follows from its name."""
    return CloudEvent(
        id=hashlib.sha256(name.encode()).hexdigest()[:32],
        source=source,
        type=kind,
        time=at,
        data=msgspec.Raw(msgspec.json.encode(data)),
    )
