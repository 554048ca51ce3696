"""The machine: (spec, state, events) -> (state, actions). It is a pure function, without a clock.

`DEVICE_STEPS` and `STATUS_STEPS` are all transitions that there are; `HANDLERS` says what each
event does. Events note what has happened; the machine decides and sends at ticks alone. Replaying
the events of a rollout, in any batches, gives the same state and the same actions. Ticks that
changed nothing may be left out.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, get_args

from msgspec.structs import replace

from device.protocol.documents import Measured
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.judge import Fails, Passes, Undecided, judge_group, too_many_failures
from toolkit.fleet.rollout.policy import longest_wait_s
from toolkit.fleet.rollout.waits import utc_minute

DeviceWord = Literal[
    "send", "skip", "live", "silent", "failed", "timeout", "supersede", "decommission",
    "undo", "undone", "undo_failed",
]  # fmt: skip
StatusWord = Literal[
    "pause",
    "resume",
    "approve",
    "abort",
    "rollback",
    "hold",
    "ask",
    "finish",
    "join",
    "schedule",
    "begin",
]

# (phase, word) -> phase of a device. What has no row changes nothing.
DEVICE_STEPS: Mapping[tuple[v.DevicePhase, DeviceWord], v.DevicePhase] = {
    ("pending", "send"): "sent",
    ("pending", "skip"): "skipped",
    ("pending", "supersede"): "superseded",
    ("sent", "live"): "live",
    ("sent", "failed"): "failed",
    ("sent", "timeout"): "timed_out",
    ("sent", "undo"): "undoing",
    ("sent", "supersede"): "superseded",
    ("timed_out", "live"): "live",  # late, but live
    ("timed_out", "failed"): "failed",
    ("timed_out", "undo"): "undoing",
    ("timed_out", "supersede"): "superseded",
    ("live", "failed"): "failed",  # it crashed too often and was rolled back
    ("live", "silent"): "silent",
    ("live", "undo"): "undoing",
    ("live", "supersede"): "superseded",
    ("silent", "live"): "live",  # it is heard again, and runs the release
    ("silent", "failed"): "failed",
    ("silent", "timeout"): "timed_out",
    ("silent", "undo"): "undoing",
    ("silent", "supersede"): "superseded",
    ("failed", "undo"): "undoing",
    ("failed", "supersede"): "superseded",
    ("undoing", "undone"): "undone",
    ("undoing", "undo_failed"): "undo_failed",
    ("undoing", "timeout"): "undo_failed",
    ("undoing", "supersede"): "superseded",
    ("undo_failed", "undone"): "undone",
    ("undo_failed", "supersede"): "superseded",
    ("undone", "supersede"): "superseded",
    # A device may leave the fleet in every phase.
    **{
        (phase, "decommission"): "decommissioned"
        for phase in get_args(v.DevicePhase)
        if phase not in v.GONE
    },
}

# (status, word) -> status of a rollout. The first five words are orders of the operator; hold: a
# limit was exceeded, ask: a group has passed and approval is needed, join: a device came late,
# schedule: its time has not come, begin: it has.
STATUS_STEPS: Mapping[tuple[v.Status, StatusWord], v.Status] = {
    ("running", "pause"): "paused",
    ("running", "abort"): "aborted",
    ("running", "rollback"): "rolling_back",
    ("running", "hold"): "paused",
    ("running", "ask"): "approval",
    ("running", "finish"): "finished",
    ("running", "join"): "running",
    ("running", "schedule"): "scheduled",
    ("scheduled", "begin"): "running",
    ("scheduled", "pause"): "paused",
    ("scheduled", "abort"): "aborted",
    ("scheduled", "join"): "scheduled",
    ("paused", "resume"): "running",
    ("paused", "abort"): "aborted",
    ("paused", "rollback"): "rolling_back",
    ("paused", "join"): "paused",
    ("approval", "approve"): "running",
    ("approval", "pause"): "paused",
    ("approval", "abort"): "aborted",
    ("approval", "rollback"): "rolling_back",
    ("approval", "join"): "approval",
    ("finished", "rollback"): "rolling_back",
    ("finished", "join"): "running",
    ("aborted", "rollback"): "rolling_back",
    ("rolling_back", "finish"): "rolled_back",
}

NO_PREVIOUS = "it ran no release of this fleet before"


def step(
    spec: v.RolloutSpec, state: v.RolloutState, events: Iterable[v.Event]
) -> tuple[v.RolloutState, tuple[v.Action, ...]]:
    """Apply events, in their order; return the new state and what is to be sent."""
    draft = _Draft(spec, state)
    for event in events:
        HANDLERS[type(event)](draft, event)
    return draft.frozen(), tuple(draft.actions)


def replay(spec: v.RolloutSpec, events: Iterable[v.Event]) -> v.RolloutState:
    """Return the state after all events of a rollout."""
    return step(spec, v.RolloutState(), events)[0]


def accepts(status: v.Status, order: str) -> bool:
    """Whether an order of the operator does something in a status."""
    return any(row == (status, order) for row in STATUS_STEPS)


def due_s(spec: v.RolloutSpec, state: v.RolloutState) -> float:
    """Return when a tick may change something again, after one that has changed nothing."""
    limits_s = _limits_s(spec)
    times = [
        device.since_s + limits_s[device.phase]
        for device in state.devices.values()
        if device.phase in limits_s
    ]
    if state.status == "scheduled":
        times.append(spec.start_s)
    if state.status == "running":
        group = state.groups[state.group]
        if group.passed_s is not None:
            times.append(group.passed_s + spec.soak_s - group.soaked_s)
        if group.full_s is not None:
            times.append(group.full_s + spec.timeout_s)
        if spec.rate is not None and state.credit_s is not None:
            live = sum(one.counts.get("live", 0) for one in state.groups)
            wait_s = 60.0 * (1.0 - state.credit) / spec.rate.per_minute(live)
            begun = state.groups[: state.group + 1]
            times += [state.credit_s + wait_s] if any("pending" in g.counts for g in begun) else []
    return min(times, default=math.inf)


class _Draft:
    """A state that is being changed; what it was made from stays as it is."""

    def __init__(self, spec: v.RolloutSpec, state: v.RolloutState) -> None:
        self.spec = spec
        self.state = state
        self.groups = list(state.groups)
        self.devices: Mapping[str, v.DeviceState] = state.devices
        self.counts = [dict(group.counts) for group in state.groups]
        self.actions: list[v.Action] = []
        self._own: dict[str, v.DeviceState] | None = None

    def frozen(self) -> v.RolloutState:
        """Return the state as a value."""
        return replace(self.current(), devices=self.devices)

    def current(self) -> v.RolloutState:
        """Return the state with the groups as they are now."""
        groups = tuple(
            replace(group, counts=counts)
            for group, counts in zip(self.groups, self.counts, strict=True)
        )
        return replace(self.state, groups=groups)

    def group(self, number: int) -> v.GroupState:
        """Return a group as it is now."""
        return replace(self.groups[number], counts=self.counts[number])

    def add(self, device: str, state: v.DeviceState) -> None:
        """Add a device."""
        self.put(device, state)
        counts = self.counts[state.group]
        counts[state.phase] = counts.get(state.phase, 0) + 1

    def put(self, device: str, state: v.DeviceState) -> None:
        """Set a device's row. The rows are copied at the first change alone: a tick that changes
        nothing costs nothing."""
        if self._own is None:
            self._own = dict(self.devices)
            self.devices = self._own
        self._own[device] = state

    def count_out(self, state: v.DeviceState) -> None:
        """Take a device out of the counts of its group."""
        counts = self.counts[state.group]
        counts[state.phase] -= 1
        if not counts[state.phase]:
            del counts[state.phase]

    def move(self, device: str, word: DeviceWord, at_s: float, reason: str = "") -> bool:
        """Take a device one step; False if the word means nothing in its phase."""
        state = self.devices.get(device)
        phase = None if state is None else DEVICE_STEPS.get((state.phase, word))
        if state is None or phase is None:
            return False
        self.count_out(state)
        counts = self.counts[state.group]
        counts[phase] = counts.get(phase, 0) + 1
        self.put(device, replace(state, phase=phase, since_s=at_s, reason=reason))
        return True

    def turn(self, word: StatusWord, reason: str = "", cause: v.Cause = "") -> bool:
        """Take the rollout one step; False if the word means nothing in its status."""
        status = STATUS_STEPS.get((self.state.status, word))
        if status is None:
            return False
        self.state = replace(self.state, status=status, reason=reason, cause=cause)
        return True

    def in_phases(self, *phases: v.DevicePhase) -> list[str]:
        """Return the devices in some phases."""
        if not any(counts.get(phase) for counts in self.counts for phase in phases):
            return []
        return [device for device, state in self.devices.items() if state.phase in phases]


def _on_started(draft: _Draft, event: v.Started) -> None:
    queues: list[list[str]] = [[] for _ in draft.spec.groups]
    for member in event.members:
        queues[member.group].append(member.device)
    rows = zip(draft.spec.groups, queues, strict=True)
    draft.groups = [v.GroupState(name=name, queue=tuple(queue)) for name, queue in rows]
    draft.counts = [{} for _ in draft.groups]
    for member in event.members:
        state = v.DeviceState(group=member.group, previous=member.previous, since_s=event.at_s)
        draft.add(member.device, state)
    waits = draft.spec.start_s > event.at_s
    draft.state = replace(draft.state, started_by=event.by, waits=waits)


def _on_begun(draft: _Draft, event: v.Begun) -> None:
    """What devices run that another rollout has changed meanwhile is what they go back to."""
    for device, previous in event.previous.items():
        state = draft.devices.get(device)
        if state is not None and state.phase == "pending":
            draft.put(device, replace(state, previous=previous))


def _on_joined(draft: _Draft, event: v.Joined) -> None:
    """A late joiner enters the last group. A device that was here before never comes again, but one
    that has left the fleet may under the same id."""
    known = draft.devices.get(event.device)
    if not draft.spec.late_joiners or not (known is None or known.phase == "decommissioned"):
        return
    if not draft.turn("join", draft.state.reason, draft.state.cause):
        return
    if known is not None:
        draft.count_out(known)
    last = len(draft.groups) - 1
    state = v.DeviceState(group=last, previous=event.previous, since_s=event.at_s)
    draft.add(event.device, state)
    draft.groups[last] = replace(
        draft.groups[last], queue=(*draft.groups[last].queue, event.device)
    )


def _on_answered(draft: _Draft, event: v.Answered) -> None:
    words: Mapping[tuple[bool, bool], DeviceWord] = {
        (False, True): "live",
        (False, False): "failed",
        (True, True): "undone",
        (True, False): "undo_failed",
    }
    word = words[event.undo, event.live]
    if draft.move(event.device, word, event.at_s, event.reason) and event.measured is not None:
        _keep(draft, event.device, event.measured)


def _on_figures(draft: _Draft, event: v.Figures) -> None:
    state = draft.devices.get(event.device)
    if state is not None and state.phase == "live":
        _keep(draft, event.device, event.measured)


def _keep(draft: _Draft, device: str, measured: Measured) -> None:
    draft.put(device, replace(draft.devices[device], measured=measured))


def _on_silent(draft: _Draft, event: v.Silent) -> None:
    """What is not heard is not believed to be live; what has ended stays as it ended."""
    if draft.state.status in v.ENDED:
        return
    for device in event.devices:
        draft.move(device, "silent", event.at_s, "it is not heard any more")


def _on_superseded(draft: _Draft, event: v.Superseded) -> None:
    """A newer rollout takes devices. One that has ended keeps the figures that it ended with."""
    for device in event.devices:
        before = draft.devices.get(device)
        reason = f"rollout {event.by} took it over"
        if not draft.move(device, "supersede", event.at_s, reason) or before is None:
            continue
        if draft.state.status in v.ENDED:
            group = draft.groups[before.group]
            taken = {**group.taken, before.phase: group.taken.get(before.phase, 0) + 1}
            draft.groups[before.group] = replace(group, taken=taken)
            by = draft.state.taken_by
            counted = {**by, event.by: by.get(event.by, 0) + 1}
            draft.state = replace(draft.state, taken_by=counted)


def _on_decommissioned(draft: _Draft, event: v.Decommissioned) -> None:
    for device in event.devices:
        draft.move(device, "decommission", event.at_s, "it left the fleet")


def _on_ordered(draft: _Draft, event: v.Ordered) -> None:
    cause = draft.state.cause
    who = f" by {event.by}" if event.by else ""
    reason = f"paused{who}" if event.order == "pause" else ""
    if not draft.turn(event.order, reason, "operator" if event.order == "pause" else ""):
        return
    if event.order == "pause":
        _interrupt_soak(draft, event.at_s)
    if event.order in ("abort", "rollback"):
        _skip_pending(draft, event.at_s, f"the rollout was ended{who} before its turn")
    if event.order == "rollback":
        _undo_all(draft, event.at_s)
    elif event.order == "approve":
        number = draft.state.group
        draft.groups[number] = replace(draft.groups[number], accepted=True, approved=True)
    elif event.order == "resume":
        _wait_anew_for_figures(draft)
        if cause in ("failures", "group"):
            _accept(draft, cause)


def _accept(draft: _Draft, cause: v.Cause) -> None:
    """The operator goes on although a limit was exceeded: what has failed so far is tolerated."""
    for number in range(draft.state.group + 1):
        group = draft.group(number)
        draft.groups[number] = replace(
            group,
            tolerated=group.failures,
            accepted=group.accepted or cause == "group" or group.open == 0,
        )


def _on_reconnected(draft: _Draft, event: v.Reconnected) -> None:
    """Nobody could be heard: no device is late for that, nor are its figures; and no group was
    watched."""
    for device in draft.in_phases("sent", "silent", "undoing"):
        draft.put(device, replace(draft.devices[device], since_s=event.at_s))
    _wait_anew_for_figures(draft)
    draft.groups = [
        group if group.passed_s is None else replace(group, passed_s=event.at_s, soaked_s=0.0)
        for group in draft.groups
    ]


def _wait_anew_for_figures(draft: _Draft) -> None:
    draft.groups = [
        group if group.full_s is None else replace(group, full_s=None) for group in draft.groups
    ]


def _skip_pending(draft: _Draft, at_s: float, reason: str) -> None:
    for device in draft.in_phases("pending"):
        draft.move(device, "skip", at_s, reason)


def _undo_all(draft: _Draft, at_s: float) -> None:
    """Send every device that got the release back to the one before."""
    release = draft.spec.release.blob.sha256
    draft.groups = [replace(group, taken={}) for group in draft.groups]
    for device in draft.in_phases("live", "silent", "sent", "failed", "timed_out"):
        draft.move(device, "undo", at_s)
        previous = draft.devices[device].previous
        if not previous:
            draft.move(device, "undo_failed", at_s, NO_PREVIOUS)
        elif previous == release:
            draft.move(device, "undone", at_s, "it ran this release before")
        else:
            draft.actions.append(v.Revert(device=device, sha256=previous))


def _on_tick(draft: _Draft, event: v.Tick) -> None:
    """Time out, judge, send: in this order, so that nothing is sent past a limit."""
    _time_out(draft, event.at_s)
    _keep_to_start(draft, event.at_s)
    if draft.state.status == "rolling_back":
        if not draft.in_phases("undoing"):
            draft.turn("finish")
    elif draft.state.status == "running":
        _judge(draft, event.at_s)
        if draft.state.status == "running":
            _send(draft, event.at_s)


def _keep_to_start(draft: _Draft, at_s: float) -> None:
    start_s = draft.spec.start_s
    if at_s >= start_s and draft.state.status in ("scheduled", "running"):
        draft.turn("begin")
        if draft.state.waits:
            draft.state = replace(draft.state, waits=False)
    elif at_s < start_s and draft.state.status == "running":
        draft.turn("schedule", f"it begins at {utc_minute(start_s)}")


def _time_out(draft: _Draft, at_s: float) -> None:
    limits_s = _limits_s(draft.spec)
    for device in draft.in_phases(*limits_s):
        state = draft.devices[device]
        limit_s = limits_s[state.phase]
        if at_s - state.since_s >= limit_s:
            what = "not heard for" if state.phase == "silent" else "no final answer within"
            draft.move(device, "timeout", at_s, f"{what} {limit_s:g} s")


def _limits_s(spec: v.RolloutSpec) -> Mapping[v.DevicePhase, float]:
    """Return for how long a device may be in a phase that times out."""
    limit_s = spec.timeout_s
    sent_s = limit_s + longest_wait_s(spec.policy)
    return {"sent": sent_s, "silent": limit_s, "undoing": limit_s}


def _judge(draft: _Draft, at_s: float) -> None:
    """Stop at a limit of failures; else begin the next groups as far as they pass."""
    spec = draft.spec
    if reason := too_many_failures(spec, draft.current().groups, draft.state.group):
        _fail(draft, at_s, reason, "failures")
        return
    while True:
        number = draft.state.group
        last = number == len(draft.groups) - 1
        group = draft.group(number)
        verdict = judge_group(spec, group, draft.devices, number, last=last)
        if not isinstance(verdict, Passes) and (group.passed_s is not None or group.soaked_s):
            draft.groups[number] = replace(draft.groups[number], passed_s=None, soaked_s=0.0)
        if isinstance(verdict, Undecided):
            _wait(draft, number, verdict, at_s)
            return
        if isinstance(verdict, Fails):
            _fail(draft, at_s, verdict.reason, "group")
            return
        if last:
            draft.turn("finish")
            return
        if _soaks(draft, number, at_s):
            return
        if spec.approval and not group.approved and group.size > 0:
            draft.turn("ask", f"the group {group.name} has passed: approve it to go on")
            return
        draft.state = replace(draft.state, group=number + 1, reason="")


def _soaks(draft: _Draft, number: int, at_s: float) -> bool:
    """Whether a group that has passed has to show for longer that it does."""
    group, soak_s = draft.group(number), draft.spec.soak_s
    if not soak_s or group.accepted or group.size == 0:
        return False
    if group.passed_s is None:
        group = replace(group, passed_s=at_s)
        draft.groups[number] = group
    until_s = (group.passed_s or 0.0) + soak_s - group.soaked_s
    if at_s >= until_s:
        return False
    reason = f"the group {group.name} has passed and is watched until {utc_minute(until_s)}"
    if draft.state.reason != reason:
        draft.state = replace(draft.state, reason=reason)
    return True


def _interrupt_soak(draft: _Draft, at_s: float) -> None:
    """While a rollout is paused, no group is judged: it soaks on once it is resumed."""
    for number, group in enumerate(draft.groups):
        if group.passed_s is not None:
            soaked_s = group.soaked_s + at_s - group.passed_s
            draft.groups[number] = replace(group, passed_s=None, soaked_s=soaked_s)


def _wait(draft: _Draft, number: int, verdict: Undecided, at_s: float) -> None:
    """Note what a group waits for; figures that do not come are waited for no longer than answers
    are."""
    if draft.state.reason != verdict.missing:
        draft.state = replace(draft.state, reason=verdict.missing)
    group = draft.groups[number]
    if not verdict.missing:
        if group.full_s is not None:
            draft.groups[number] = replace(group, full_s=None)
    elif group.full_s is None:
        draft.groups[number] = replace(group, full_s=at_s)
    elif at_s - group.full_s >= draft.spec.timeout_s:
        _fail(draft, at_s, f"{verdict.missing} within {draft.spec.timeout_s:g} s", "group")


def _fail(draft: _Draft, at_s: float, reason: str, cause: v.Cause) -> None:
    if draft.spec.on_failure == "pause":
        draft.turn("hold", reason, cause)
        _interrupt_soak(draft, at_s)
        return
    draft.turn("rollback", reason, cause)
    _skip_pending(draft, at_s, "the rollout was rolled back before its turn")
    _undo_all(draft, at_s)


def _send(draft: _Draft, at_s: float) -> None:
    """Send to the devices whose turn it is, as far as the rate allows."""
    begun = draft.state.group + 1
    if not any(counts.get("pending") for counts in draft.counts[:begun]):
        return
    credit = _credit(draft, at_s)
    for number in range(begun):
        queue = draft.groups[number].queue
        taken = 0
        for device in queue:
            if draft.devices[device].phase == "pending":
                if credit is not None and credit < 1.0:
                    break
                draft.move(device, "send", at_s)
                draft.actions.append(v.Send(device=device))
                credit = None if credit is None else credit - 1.0
            taken += 1
        if taken:
            draft.groups[number] = replace(draft.groups[number], queue=queue[taken:])
            if credit is not None:
                draft.state = replace(draft.state, credit=credit, credit_s=at_s)


def _credit(draft: _Draft, at_s: float) -> float | None:
    """Return how many devices the rate allows now, None: as many as there are."""
    rate = draft.spec.rate
    if rate is None:
        return None
    succeeded = sum(counts.get("live", 0) for counts in draft.counts)
    burst = rate.burst(succeeded)
    if draft.state.credit_s is None:
        return burst
    elapsed_s = max(0.0, at_s - draft.state.credit_s)
    return min(burst, draft.state.credit + rate.per_minute(succeeded) / 60.0 * elapsed_s)


HANDLERS: Mapping[type[v.Event], Callable[..., None]] = {
    v.Started: _on_started,
    v.Begun: _on_begun,
    v.Joined: _on_joined,
    v.Answered: _on_answered,
    v.Figures: _on_figures,
    v.Silent: _on_silent,
    v.Superseded: _on_superseded,
    v.Decommissioned: _on_decommissioned,
    v.Ordered: _on_ordered,
    v.Reconnected: _on_reconnected,
    v.Tick: _on_tick,
}
