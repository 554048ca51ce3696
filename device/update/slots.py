"""The two slots of a device as a pure state machine: values in, values out.

One slot is active, the other takes the next release. A release runs on trial before it becomes
active; the number of its attempts is stored before each start, so that an agent that dies during a
trial tries once more after its restart and then rolls back. An orderly stop during a trial is no
attempt. `device.update.slot_store` stores the state on the disk.
"""

from typing import Literal

import msgspec

SLOT_FORMAT = 1
MAX_ATTEMPTS = 2
MAX_REASON = 2000  # characters: a pipeline's last words must not outgrow the state file
SLOTS: tuple["Slot", "Slot"] = ("a", "b")

Slot = Literal["a", "b"]


class SlotRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The release in a slot; `good`: it has passed a trial."""

    sha256: str
    bytes: int
    name: str
    version: str
    request: str
    good: bool = False


class SlotFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last release that failed; it is not tried again for the same request."""

    sha256: str
    request: str
    phase: Literal["rolled_back", "refused"]
    reason: str


class SlotState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state that must survive a power cut. `generation` counts the writes."""

    format: int = SLOT_FORMAT
    generation: int = 0
    active: Slot | None = None
    trial: Slot | None = None
    attempts: int = 0
    a: SlotRecord | None = None
    b: SlotRecord | None = None
    failure: SlotFailure | None = None

    def record(self, slot: Slot | None) -> SlotRecord | None:
        """The release in a slot, None for an empty one."""
        return {"a": self.a, "b": self.b, None: None}[slot]

    @property
    def idle(self) -> Slot:
        """The slot that takes the next release."""
        return "b" if self.active == "a" else "a"


def clear(state: SlotState) -> SlotState:
    """Forget what is in the idle slot, before its folder is overwritten."""
    _require(state.trial is None, "a slot is on trial")
    return _with_record(state, state.idle, None)


def stage(state: SlotState, record: SlotRecord) -> SlotState:
    """Record a whole, verified release in the idle slot."""
    _require(state.trial is None, "a slot is on trial")
    return _with_record(state, state.idle, msgspec.structs.replace(record, good=False))


def begin_trial(state: SlotState, request: str) -> SlotState:
    """Count the first attempt of the release in the idle slot, before it is started."""
    _require(state.trial is None, "a slot is on trial")
    record = state.record(state.idle)
    if record is None:
        raise ValueError("there is nothing to try")
    state = _with_record(state, state.idle, msgspec.structs.replace(record, request=request))
    return msgspec.structs.replace(state, trial=state.idle, attempts=1)


def confirm(state: SlotState) -> SlotState:
    """Commit the trial: its slot becomes active."""
    slot, record = _on_trial(state)
    state = _with_record(state, slot, msgspec.structs.replace(record, good=True))
    return msgspec.structs.replace(state, active=slot, trial=None, attempts=0, failure=None)


def roll_back(state: SlotState, reason: str) -> SlotState:
    """End the trial: back to the active slot, with the failed release and its reason recorded."""
    slot, record = _on_trial(state)
    failure = SlotFailure(
        sha256=record.sha256,
        request=record.request,
        phase="rolled_back",
        reason=reason[:MAX_REASON],
    )
    state = _with_record(state, slot, None)
    return msgspec.structs.replace(state, trial=None, attempts=0, failure=failure)


def refuse(state: SlotState, failure: SlotFailure) -> SlotState:
    """Record a release that was refused without a trial."""
    short = msgspec.structs.replace(failure, reason=failure.reason[:MAX_REASON])
    return msgspec.structs.replace(state, failure=short)


def interrupted(state: SlotState) -> SlotState:
    """Return the state for an agent that boots during a trial: one more attempt, or a rollback."""
    if state.trial is None:
        return state
    if state.attempts < MAX_ATTEMPTS:
        return msgspec.structs.replace(state, attempts=state.attempts + 1)
    return roll_back(
        state,
        f"the agent died in {state.attempts} of {MAX_ATTEMPTS} attempts to start this release, "
        "so it went back to the previous one; see the log of the board for the cause",
    )


def suspend(state: SlotState) -> SlotState:
    """Take the attempt back: an orderly stop during a trial does not count."""
    if state.trial is None:
        return state
    return msgspec.structs.replace(state, attempts=max(0, state.attempts - 1))


def lose_active(state: SlotState) -> SlotState:
    """Give up the active slot, whose files are damaged, for the idle one if that was good."""
    idle = state.record(state.idle)
    state = _with_record(state, state.active, None) if state.active else state
    good = state.idle if idle is not None and idle.good else None
    return msgspec.structs.replace(state, active=good)


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
