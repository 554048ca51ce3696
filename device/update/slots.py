"""The two slots of a device as a pure state machine: values in, values out.

One slot is active, the other takes the next release. A release runs on trial before it becomes
active; the number of its attempts is stored before each start, so that an agent that dies during a
trial tries once more after its restart and then rolls back. An orderly stop during a trial is no
attempt. A release that was rolled back is remembered by its hash. `device.update.slot_store` stores
the state on the disk.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from device.protocol.documents import InstallPolicy
from device.update.records import Record
from device.update.versions import is_older

SLOT_FORMAT = 2  # 1: one failure, no numbers of commits
MAX_ATTEMPTS = 2
MAX_POSTPONED = 2
MAX_FAILURES = 16  # releases that are remembered as rolled back or refused
MAX_REASON = 2000  # characters: a pipeline's last words must not outgrow the state file
SLOTS: tuple["Slot", "Slot"] = ("a", "b")

Slot = Literal["a", "b"]


class SlotRecord(Record, frozen=True, kw_only=True):
    """The release in a slot.

    `good`: it has passed a trial and was not rolled back since. `commit`: a number that rises with
    each release that becomes active, 0 before; `committed_at`: the time of it, UTC. `policy`: what
    its trial must show; `began_online`: the broker was reachable when that began; `sideloaded`:
    somebody brought the release to the board, which may have no broker. `floor`: the oldest version
    of this name that may run here once it was live. Agreements: what was measured here of its
    golden inputs and live frames, these for `shadow_request`; `shadow_attempts`: how often that was
    begun.
    """

    sha256: str
    bytes: int
    name: str
    version: str
    request: str
    good: bool = False
    commit: int = 0
    committed_at: str = ""
    policy: InstallPolicy = InstallPolicy()
    began_online: bool = False
    sideloaded: bool = msgspec.field(default=False, name="carried")  # as older agents call it
    floor: str = ""
    golden_agreement: float | None = None
    shadow_agreement: float | None = None
    shadow_frames: int = 0
    shadow_request: str = ""
    shadow_attempts: int = 0


class SlotFailure(Record, frozen=True, kw_only=True):
    """A release that failed; it is not tried again for the same request.

    One that was rolled back is tried again only if the request says so. `commit`: that of the
    release that ran on.
    """

    sha256: str
    request: str
    phase: Literal["rolled_back", "refused"]
    reason: str
    at: str = ""
    commit: int = 0


class Postponed(Record, frozen=True, kw_only=True):
    """A release in the idle slot whose source gave nothing in `count` trials.

    `broker`: the broker was out of reach in the last one.
    """

    sha256: str
    count: int
    reason: str
    broker: bool = False


class SlotState(Record, frozen=True, kw_only=True):
    """The state that must survive a power cut. `generation` counts the writes.

    `recovery`: how the state was made anew after its loss; kept until the next commit. `floors`:
    the oldest version that is taken, by the name of the release.
    """

    format: int = SLOT_FORMAT
    generation: int = 0
    active: Slot | None = None
    trial: Slot | None = None
    attempts: int = 0
    a: SlotRecord | None = None
    b: SlotRecord | None = None
    failures: tuple[SlotFailure, ...] = ()
    postponed: Postponed | None = None
    recovery: str = ""
    floors: dict[str, str] = msgspec.field(default_factory=dict)

    def record(self, slot: Slot | None) -> SlotRecord | None:
        """The release in a slot, None for an empty one."""
        return {"a": self.a, "b": self.b, None: None}[slot]

    @property
    def idle(self) -> Slot:
        """The slot that takes the next release."""
        return "b" if self.active == "a" else "a"

    @property
    def failure(self) -> SlotFailure | None:
        """The last failure, None if another release has become active since."""
        active = self.record(self.active)
        last = self.failures[-1] if self.failures else None
        return None if last and active and last.commit < active.commit else last

    def failure_of(self, sha256: str) -> SlotFailure | None:
        """How the release of this hash failed."""
        return next((failure for failure in self.failures if failure.sha256 == sha256), None)


class SlotSeal(Record, frozen=True, kw_only=True):
    """What a slot's own folder says of it, for a device that has lost its state.

    `failure`: the release was rolled back.
    """

    format: int = 1
    record: SlotRecord
    failure: SlotFailure | None = None


def inconsistency(state: SlotState) -> str | None:
    """Return what contradicts itself in a state, None if nothing does."""
    for role, slot in (("active", state.active), ("on trial", state.trial)):
        if slot is not None and state.record(slot) is None:
            return f"slot {slot} is {role} and empty"
    if state.trial is not None and state.trial == state.active:
        return f"slot {state.trial} is both active and on trial"
    return None


def clear(state: SlotState) -> SlotState:
    """Forget what is in the idle slot, before its folder is overwritten."""
    _require(state.trial is None, "a slot is on trial")
    return msgspec.structs.replace(_with_record(state, state.idle, None), postponed=None)


def stage(state: SlotState, record: SlotRecord) -> SlotState:
    """Record a whole, verified release in the idle slot."""
    _require(state.trial is None, "a slot is on trial")
    record = msgspec.structs.replace(record, good=False, commit=0, committed_at="")
    return msgspec.structs.replace(_with_record(state, state.idle, record), postponed=None)


def begin_shadow(state: SlotState, request: str) -> SlotState:
    """Count an attempt to run the release in the idle slot beside the active one, before it starts.

    Those of another request are forgotten.
    """
    record = _in_shadow(state)
    attempts = record.shadow_attempts if record.shadow_request == request else 0
    return _with_shadow(state, shadow_request=request, shadow_attempts=attempts + 1)


def suspend_shadow(state: SlotState) -> SlotState:
    """Take the attempt back: it ended in good order, without a result."""
    return _with_shadow(state, shadow_attempts=max(0, _in_shadow(state).shadow_attempts - 1))


def end_shadow(state: SlotState, agreement: float, frames: int) -> SlotState:
    """Record how far the release in the idle slot agreed with the active one on live frames."""
    return _with_shadow(state, shadow_agreement=agreement, shadow_frames=frames, shadow_attempts=0)


def begin_trial(
    state: SlotState,
    request: str,
    policy: InstallPolicy | None = None,
    *,
    floor: str = "",
    online: bool = False,
    sideloaded: bool = False,
    golden_agreement: float | None = None,
) -> SlotState:
    """Count the first attempt of the release in the idle slot, before it is started.

    All but the state are kept in its record.
    """
    _require(state.trial is None, "a slot is on trial")
    record = state.record(state.idle)
    if record is None:
        raise ValueError("there is nothing to try")
    if record.shadow_request != request:
        record = msgspec.structs.replace(record, shadow_agreement=None, shadow_frames=0)
    record = msgspec.structs.replace(
        record,
        request=request,
        policy=policy or InstallPolicy(),
        floor=floor,
        began_online=online,
        sideloaded=sideloaded,
        golden_agreement=golden_agreement,
    )
    state = _with_record(state, state.idle, record)
    return msgspec.structs.replace(state, trial=state.idle, attempts=1)


def ask_again(state: SlotState, request: str) -> SlotState:
    """Let the trial be that of a newer request for the same release."""
    slot, record = _on_trial(state)
    return _with_record(state, slot, msgspec.structs.replace(record, request=request))


def accept(state: SlotState) -> SlotState:
    """Let the trial end as every other one: somebody has said that its release stays."""
    slot, record = _on_trial(state)
    policy = msgspec.structs.replace(record.policy, manual=False)
    return _with_record(state, slot, msgspec.structs.replace(record, policy=policy))


def confirm(state: SlotState, at: str = "") -> SlotState:
    """Commit the trial: its slot becomes active. What is known of its failures is forgotten."""
    slot, record = _on_trial(state)
    state = _committed(state, slot, at)
    failures = tuple(failure for failure in state.failures if failure.sha256 != record.sha256)
    floors = _floors(state.floors, record)
    state = msgspec.structs.replace(state, trial=None, attempts=0, floors=floors)
    return msgspec.structs.replace(state, failures=failures, postponed=None, recovery="")


def roll_back(state: SlotState, reason: str, at: str = "") -> SlotState:
    """End the trial: back to the active slot, with the failed release and its reason recorded.

    A release that was live before is good no more: nothing goes back to it by itself.
    """
    slot, record = _on_trial(state)
    state = _with_record(state, slot, msgspec.structs.replace(record, good=False))
    state = msgspec.structs.replace(state, trial=None, attempts=0, postponed=None)
    return _with_failure(state, _rolled_back(record, reason, at))


def postpone(state: SlotState, reason: str, *, broker: bool = False) -> SlotState:
    """End the trial without a verdict: the release waits in the idle slot.

    `broker`: it waits for the broker.
    """
    _slot, record = _on_trial(state)
    earlier = state.postponed
    count = earlier.count if earlier is not None and earlier.sha256 == record.sha256 else 0
    postponed = Postponed(
        sha256=record.sha256, count=count + 1, reason=reason[:MAX_REASON], broker=broker
    )
    return msgspec.structs.replace(state, trial=None, attempts=0, postponed=postponed)


def give_up_active(state: SlotState, reason: str, at: str = "", *, request: str = "") -> SlotState:
    """Go back from the active release, which keeps failing, to the good one in the idle slot.

    `request`: the one that asked for it last, if not the first.
    """
    earlier, failed = state.record(state.idle), state.record(state.active)
    if state.active is None or failed is None or earlier is None or not earlier.good:
        raise ValueError("there is no good release to go back to")
    _require(state.trial is None, "a slot is on trial")
    state = _with_record(state, state.active, msgspec.structs.replace(failed, good=False))
    state = _committed(state, state.idle, at)
    failed = msgspec.structs.replace(failed, request=request or failed.request)
    return _with_failure(state, _rolled_back(failed, reason, at))


def refuse(state: SlotState, failure: SlotFailure) -> SlotState:
    """Record a release that was refused without a trial."""
    return _with_failure(state, failure)


def interrupted(state: SlotState, at: str = "") -> SlotState:
    """Return the state for an agent that boots during a trial: one more attempt, or a rollback."""
    record = state.record(state.trial)
    if state.trial is None or record is None:
        return state
    if record.policy.manual:
        return roll_back(state, "it was not committed before the agent was started again", at)
    if state.attempts < MAX_ATTEMPTS:
        return msgspec.structs.replace(state, attempts=state.attempts + 1)
    return roll_back(
        state,
        f"the agent died in {state.attempts} of {MAX_ATTEMPTS} attempts to start this release, "
        "so it went back to the previous one; see the log of the board for the cause",
        at,
    )


def suspend(state: SlotState) -> SlotState:
    """Take the attempt back: an orderly stop during a trial does not count."""
    if state.trial is None:
        return state
    return msgspec.structs.replace(state, attempts=max(0, state.attempts - 1))


def resume(state: SlotState) -> SlotState:
    """Count the attempt again that `suspend` took back, before the trial is started."""
    _on_trial(state)
    return msgspec.structs.replace(state, attempts=state.attempts + 1)


def lose_active(state: SlotState) -> SlotState:
    """Give up the active slot, whose files are damaged, for the idle one if that was good."""
    idle = state.record(state.idle)
    state = _with_record(state, state.active, None) if state.active else state
    good = state.idle if idle is not None and idle.good else None
    return msgspec.structs.replace(state, active=good)


def agreeing(state: SlotState, seals: Mapping[Slot, SlotSeal]) -> SlotState:
    """Return the older of two copies of the state, after the loss of the newer one, with what the
    slots know better: that one holds another release, or that the one on trial was confirmed.
    """
    for slot, seal in seals.items():
        record = state.record(slot)
        if record is None or record.sha256 == seal.record.sha256:
            continue
        if slot in (state.active, state.trial):  # neither is ever overwritten: the seal is wrong
            continue
        state = _with_record(state, slot, None)
    confirmed = None if state.trial is None else seals.get(state.trial)
    if confirmed is not None and confirmed.record.good:
        return confirm(state, confirmed.record.committed_at)
    return state


def recovered(
    seals: Mapping[Slot, SlotSeal], unsealed: Mapping[Slot, SlotRecord], recovery: str
) -> SlotState:
    """Return a state made of what the slots themselves say, after the loss of the state.

    `seals`: of the slots whose bundle is whole and the one that was sealed. `unsealed`: whole
    bundles without a seal, the oldest first. The good release that was committed last is active.
    Where none is good an unsealed one is; one that is sealed and never passed a trial is not run.
    """
    records = {slot: seal.record for slot, seal in seals.items()} | dict(unsealed)
    good = [slot for slot, record in records.items() if record.good]
    good.sort(key=lambda slot: records[slot].commit)
    failures = [seal.failure for seal in seals.values() if seal.failure is not None]
    return SlotState(
        generation=max((record.commit for record in records.values()), default=0),
        active=good[-1] if good else next(iter(unsealed), None),
        a=records.get("a"),
        b=records.get("b"),
        failures=tuple(sorted(failures, key=lambda failure: failure.at)),
        recovery=recovery,
        floors=_floors({}, *(records[slot] for slot in good)),
    )


def _floors(floors: Mapping[str, str], *records: SlotRecord) -> dict[str, str]:
    """Return the version floors, raised by those that these releases set."""
    raised = dict(floors)
    for record in records:
        if record.floor and is_older(raised.get(record.name, ""), record.floor):
            raised[record.name] = record.floor
    return raised


def _committed(state: SlotState, slot: Slot, at: str) -> SlotState:
    record = state.record(slot)
    assert record is not None
    commit = 1 + max(state.generation, *(one.commit for one in (state.a, state.b) if one))
    record = msgspec.structs.replace(record, good=True, commit=commit, committed_at=at)
    return msgspec.structs.replace(_with_record(state, slot, record), active=slot)


def _rolled_back(record: SlotRecord, reason: str, at: str) -> SlotFailure:
    return SlotFailure(
        sha256=record.sha256, request=record.request, phase="rolled_back", reason=reason, at=at
    )


def _with_failure(state: SlotState, failure: SlotFailure) -> SlotState:
    """Add a failure as the last one, in place of an earlier one of the same release."""
    active = state.record(state.active)
    commit = 0 if active is None else active.commit
    short = msgspec.structs.replace(failure, reason=failure.reason[:MAX_REASON], commit=commit)
    others = tuple(one for one in state.failures if one.sha256 != failure.sha256)
    return msgspec.structs.replace(state, failures=(*others, short)[-MAX_FAILURES:])


def _in_shadow(state: SlotState) -> SlotRecord:
    _require(state.trial is None, "a slot is on trial")
    record = state.record(state.idle)
    if record is None:
        raise ValueError("there is nothing to run in shadow")
    return record


def _with_shadow(
    state: SlotState,
    *,
    shadow_request: str | None = None,
    shadow_attempts: int,
    shadow_agreement: float | None = None,
    shadow_frames: int = 0,
) -> SlotState:
    record = _in_shadow(state)
    record = msgspec.structs.replace(
        record,
        shadow_request=record.shadow_request if shadow_request is None else shadow_request,
        shadow_attempts=shadow_attempts,
        shadow_agreement=shadow_agreement,
        shadow_frames=shadow_frames,
    )
    return _with_record(state, state.idle, record)


def _on_trial(state: SlotState) -> tuple[Slot, SlotRecord]:
    record = state.record(state.trial)
    if state.trial is None or record is None:
        raise ValueError("no slot is on trial")
    return state.trial, record


def _with_record(state: SlotState, slot: Slot, record: SlotRecord | None) -> SlotState:
    if slot == "a":
        return msgspec.structs.replace(state, a=record)
    return msgspec.structs.replace(state, b=record)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
