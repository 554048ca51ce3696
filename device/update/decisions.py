"""The decision about a desired release, as a pure function."""

from dataclasses import dataclass
from typing import Literal

from device.protocol.documents import READABLE_FORMATS, Desired, Phase, Running, Update
from device.trust.exchange import Refused, Trusted, Unverified, Verdict
from device.update.admission import BoardState, no_room, refusal
from device.update.chunk_table import CHUNK_FORMATS
from device.update.slots import SlotRecord, SlotState
from device.update.versions import is_older, too_old

UNSIGNED = (
    "the release is not signed and this device takes only signed ones: deploy it with "
    "`tandem deploy --fleet`, or set dev = true in agent.toml of a board on a bench"
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a desired release, and why.

    `word`: what the report says of it; or that it is fetched, or tried without a download, as it is
    unpacked in the idle slot. rolled_back: it failed before and is not tried again. verifying:
    nothing is done before its signatures are known to fit. postponed: its source gave nothing in a
    trial.
    """

    word: Literal["live", "refused", "rolled_back", "verifying", "postponed", "try", "fetch"]
    reason: str = ""


def decide(
    desired: Desired,
    state: SlotState,
    *,
    profile: str,
    verdict: Verdict,
    board: BoardState | None = None,
    min_version: str = "",
) -> Decision:
    """Compare the desired release with the slots, none of which is on trial.

    `verdict`: what its signatures say. `min_version`: the oldest that is taken. A release that was
    refused is tried again for a new request, one that was rolled back only for a new request with
    `retry`. `board`: what the release is compared with before a download; None: with nothing.
    """
    sha256 = desired.release.blob.sha256
    if _holds(state.record(state.active), sha256):
        return Decision("live")
    obstacle = (
        _refusal(desired, profile, verdict, min_version)
        or _wrong_slot(desired, state)
        or _failed(desired, state)
    )
    if obstacle is not None:
        return obstacle
    custom = verdict.custom if isinstance(verdict, Trusted) else {}
    reason = None if board is None else refusal(desired, custom, board)
    if reason is not None:
        return Decision("refused", reason)
    if not _holds(state.record(state.idle), sha256):
        reason = None if board is None else no_room(desired.release, board.room)
        return Decision("fetch") if reason is None else Decision("refused", reason)
    waiting = state.postponed
    if waiting is not None and waiting.sha256 == sha256 and state.active is not None:
        return Decision("postponed", waiting.reason)
    return Decision("try")


def _failed(desired: Desired, state: SlotState) -> Decision | None:
    """Return the failure that keeps the release from being tried, or None."""
    failure = state.failure_of(desired.release.blob.sha256)
    if failure is None:
        return None
    if failure.request == desired.request:
        return Decision(failure.phase, failure.reason)
    if failure.phase == "refused" or desired.retry:
        return None
    when = f" at {failure.at}" if failure.at else ""
    return Decision(
        "rolled_back",
        f"this release was rolled back before{when}: {failure.reason}; `tandem deploy --retry` "
        "tries it again",
    )


def _refusal(desired: Desired, profile: str, verdict: Verdict, min_version: str) -> Decision | None:
    """Return why the release is refused, or not looked at yet, before a download."""
    release = desired.release
    if desired.format not in READABLE_FORMATS:
        return Decision(
            "refused",
            f"the desired document has format {desired.format}, this agent reads 1 to "
            f"{READABLE_FORMATS[-1]}: update the agent",
        )
    if release.blob.chunk_format not in CHUNK_FORMATS:
        return Decision(
            "refused",
            f"the release {release.name} {release.version} is cut by the chunk format "
            f"{release.blob.chunk_format}, this agent reads 1 to {CHUNK_FORMATS[-1]}: update the "
            "agent",
        )
    if release.profile != profile:
        return Decision(
            "refused", other_profile(release.name, release.version, release.profile, profile)
        )
    if min_version and is_older(release.version, min_version):
        return Decision("refused", too_old(release.name, release.version, min_version))
    if isinstance(verdict, Refused):
        return Decision("refused", verdict.reason)
    return Decision("verifying", verdict.reason) if isinstance(verdict, Unverified) else None


def other_profile(name: str, version: str, built_for: str, profile: str) -> str:
    """Return the sentence on a release for another module."""
    return (
        f"the release {name} {version} is built for {built_for}, this device is {profile}: build "
        f"an engine for {profile}"
    )


def _wrong_slot(desired: Desired, state: SlotState) -> Decision | None:
    slot = desired.policy.slot
    return None if slot in ("", state.idle) else Decision("refused", wrong_slot(slot, state.active))


def wrong_slot(slot: str, active: str | None) -> str:
    """Return the sentence on a release for the slot that is not idle."""
    if active is None:
        return f"nothing runs on this device, and its first release goes into slot a, not {slot}"
    return (
        f"slot {slot} runs and is never overwritten: name the other one, or no slot; `tandem-agent "
        "control rollback` changes which one runs"
    )


def update_of(desired: Desired, phase: Phase, received_bytes: int = 0, reason: str = "") -> Update:
    """Return the report on a desired release."""
    return Update(
        phase=phase,
        sha256=desired.release.blob.sha256,
        request=desired.request,
        received_bytes=received_bytes,
        total_bytes=desired.release.blob.bytes,
        reason=reason,
    )


def update_of_record(record: SlotRecord, phase: Phase, reason: str = "") -> Update:
    """Return the report on a release in a slot."""
    return Update(
        phase=phase,
        sha256=record.sha256,
        request=record.request,
        received_bytes=record.bytes,
        total_bytes=record.bytes,
        reason=reason,
    )


def update_of_slots(state: SlotState) -> Update:
    """Return the report by the slots alone, while no desired state is known."""
    trial, active = state.record(state.trial), state.record(state.active)
    failure = state.failure
    if trial is not None:
        return update_of_record(trial, "trial")
    if failure is not None:
        return Update(
            phase=failure.phase,
            sha256=failure.sha256,
            request=failure.request,
            reason=failure.reason,
        )
    return Update(phase="idle") if active is None else update_of_record(active, "live")


def running_of(state: SlotState) -> Running | None:
    """Return the active release for the report."""
    record = state.record(state.active)
    if state.active is None or record is None:
        return None
    return Running(
        slot=state.active, sha256=record.sha256, name=record.name, version=record.version
    )


def _holds(record: SlotRecord | None, sha256: str) -> bool:
    return record is not None and record.sha256 == sha256
