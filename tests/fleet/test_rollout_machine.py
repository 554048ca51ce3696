"""The rollout machine: tables at their limits, and properties over random histories."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.protocol.documents import BlobSpec, InstallPolicy, Measured, ReleaseSpec
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.gates import parse_gates
from toolkit.fleet.rollout.machine import DEVICE_STEPS, STATUS_STEPS, accepts, due_s, replay, step
from toolkit.fleet.rollout.rates import parse_rate
from toolkit.fleet.rollout.routing import may_join, owners, taken_over

NEW, OLD = "a" * 64, "b" * 64
BLOB = BlobSpec(sha256=NEW, bytes=10, chunk_bytes=65536, index_sha256="c" * 64)
RELEASE = ReleaseSpec(name="n", version="2", profile="p", blob=BLOB)
SPEC = v.RolloutSpec(key="k", release=RELEASE, groups=("canary", "rest"), timeout_s=100.0)


def started(*sizes: int, at_s: float = 0.0, previous: str = OLD) -> v.Started:
    """Groups of devices d0, d1, ... in order."""
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    members = [
        v.Member(device=f"d{n}", group=group, previous=previous) for n, group in enumerate(groups)
    ]
    return v.Started(at_s=at_s, members=tuple(members))


def measured(**figures: object) -> Measured:
    return msgspec.convert({"sha256": NEW, "frames": 100, **figures}, Measured)


class Run:
    """A rollout that is driven by hand, a tick after each call."""

    def __init__(self, spec: v.RolloutSpec, *sizes: int) -> None:
        self.spec, self.state, self.now_s = spec, v.RolloutState(), 0.0
        self.log: list[v.Event] = []
        self.sent = self.do(started(*sizes))

    def do(self, *events: v.Event) -> list[str]:
        """Apply events and a tick; return the devices that were sent to."""
        batch = [*events, v.Tick(at_s=self.now_s)]
        self.log += batch
        self.state, actions = step(self.spec, self.state, batch)
        return [action.device for action in actions if isinstance(action, v.Send)]

    def answer(self, live: bool, *devices: str, **rest: object) -> list[str]:
        return self.do(
            *(
                msgspec.convert(
                    {"event": "answered", "at_s": self.now_s, "device": d, "live": live, **rest},
                    v.Answered,
                )
                for d in devices
            )
        )

    def order(self, order: str) -> list[str]:
        return self.do(
            msgspec.convert({"event": "ordered", "at_s": self.now_s, "order": order}, v.Ordered)
        )

    def wait(self, seconds: float) -> list[str]:
        self.now_s += seconds
        return self.do()

    def phases(self) -> dict[str, str]:
        return {device: state.phase for device, state in self.state.devices.items()}


def spec(**changes: object) -> v.RolloutSpec:
    return msgspec.structs.replace(SPEC, **changes)


def test_the_next_group_begins_when_enough_of_the_first_is_live() -> None:
    run = Run(spec(success=0.9), 10, 3)
    assert run.sent == [f"d{n}" for n in range(10)]
    assert run.answer(True, *(f"d{n}" for n in range(8))) == []
    assert run.answer(True, "d8") == ["d10", "d11", "d12"]  # 9 of 10, the last one does not block
    run.answer(True, "d10", "d11", "d12")
    assert run.state.status == "finished"


@pytest.mark.parametrize(("failed", "status"), [(1, "running"), (2, "paused")])
def test_a_percentage_of_failures_may_be_reached_but_not_exceeded(failed: int, status: str) -> None:
    run = Run(spec(max_failures=v.Limit(percent=10.0)), 10, 1)
    run.answer(False, *(f"d{n}" for n in range(failed)), reason="it broke")
    assert run.state.status == status
    if failed == 2:
        assert run.state.reason == (
            "2 of 10 devices of the group canary failed (20 %), at most 10 % may"
        )


@pytest.mark.parametrize(("failed", "status"), [(3, "running"), (4, "paused")])
def test_a_number_of_failures_counts_over_all_groups(failed: int, status: str) -> None:
    run = Run(spec(max_failures=v.Limit(count=3), success=0.5), 4, 20)
    run.answer(False, "d0", "d1")
    run.answer(True, "d2", "d3")
    run.answer(False, *(f"d{n}" for n in range(4, 2 + failed)))
    assert run.state.status == status


def test_a_device_that_says_nothing_blocks_no_longer_than_its_time_out() -> None:
    run = Run(spec(success=0.5, max_failures=v.Limit(percent=50.0)), 2, 2)
    run.answer(False, "d0")
    assert run.wait(99.0) == []
    assert run.phases()["d1"] == "sent"
    run.wait(1.0)
    assert run.phases()["d1"] == "timed_out"
    assert run.state.status == "paused"  # none of two is live
    run.answer(True, "d1")
    assert run.phases()["d1"] == "live"  # late, but it counts
    assert run.order("resume") == ["d2", "d3"]


def test_the_wait_for_a_window_is_on_top_of_the_time_out() -> None:
    night = InstallPolicy(not_before="22:00", not_after="04:00")
    run = Run(spec(policy=night), 1)
    run.wait(18 * 3600.0 + 99.0)
    assert run.phases()["d0"] == "sent"
    run.wait(1.0)
    assert run.phases()["d0"] == "timed_out"


def test_a_group_that_ends_below_its_threshold_pauses_and_resume_accepts_it() -> None:
    run = Run(spec(success=1.0, max_failures=v.Limit(percent=100.0)), 3, 2)
    run.answer(True, "d0", "d1")
    run.answer(False, "d2")
    assert (run.state.status, run.state.cause) == ("paused", "group")
    assert "ended with 2 of 3 devices live (66.7 %), at least 100 % must be" in run.state.reason
    assert run.order("resume") == ["d3", "d4"]


def test_resume_tolerates_the_failures_so_far_and_no_more() -> None:
    run = Run(spec(max_failures=v.Limit(count=0)), 5, 1)
    run.answer(False, "d0")
    assert run.state.status == "paused"
    run.order("resume")
    assert run.state.status == "running"
    run.answer(False, "d1")
    assert run.state.reason == "1 devices failed, at most 0 may"


def test_a_rollback_sends_all_that_got_the_release_to_the_one_before() -> None:
    run = Run(spec(on_failure="rollback"), 3, 4)
    run.answer(True, "d0")
    _, actions = step(
        run.spec, run.state, [v.Answered(at_s=1.0, device="d1", live=False), v.Tick(at_s=1.0)]
    )
    assert actions == tuple(v.Revert(device=f"d{n}", sha256=OLD) for n in range(3))
    run.answer(False, "d1")
    assert run.state.status == "rolling_back"
    assert run.phases()["d3"] == "skipped"
    run.answer(True, "d0", "d1", "d2", undo=True)
    assert run.state.status == "rolled_back"
    assert set(run.phases().values()) == {"undone", "skipped"}


def test_a_device_without_a_release_before_is_said_and_does_not_block_the_rollback() -> None:
    run = Run(SPEC, 1)
    run.state, _ = step(SPEC, v.RolloutState(), [started(1, previous=""), v.Tick(at_s=0.0)])
    run.order("rollback")
    assert run.state.status == "rolled_back"
    assert run.state.devices["d0"].reason == "it ran no release of this fleet before"


def test_gates_wait_for_figures_and_then_judge_them() -> None:
    run = Run(spec(gates=parse_gates("p95_latency_ms<30")), 2, 1)
    assert run.answer(True, "d0", "d1") == []
    assert run.state.reason == "the group canary has not measured p95_latency_ms of d0, d1"
    run.do(
        *(v.Figures(at_s=0.0, device=d, measured=measured(latency_p95_ms=20.0)) for d in ("d0",))
    )
    assert run.state.reason.endswith("of d1")
    slow = measured(latency_p95_ms=30.0)
    run.do(v.Figures(at_s=0.0, device="d1", measured=slow))
    assert run.state.status == "paused"
    assert "p95_latency_ms is 30 on d1, not p95_latency_ms<30" in run.state.reason


def test_figures_that_never_come_pause_the_rollout() -> None:
    run = Run(spec(gates=parse_gates("fps>1")), 1, 1)
    run.answer(True, "d0")
    run.wait(99.0)
    assert run.state.status == "running"
    run.wait(1.0)
    assert run.state.reason == "the group canary has not measured fps of d0 within 100 s"


def test_a_time_in_which_nobody_was_heard_makes_no_device_late() -> None:
    run = Run(spec(on_failure="rollback"), 2, 1)
    run.now_s = 1000.0  # the server was away, or its broker
    run.do(v.Reconnected(at_s=1000.0))
    assert run.phases()["d0"] == "sent"
    assert run.state.status == "running"
    run.wait(99.0)
    assert run.phases()["d0"] == "sent"
    run.wait(1.0)
    assert run.state.status == "rolling_back"


def test_a_pause_of_the_operator_takes_no_time_from_figures_that_are_waited_for() -> None:
    run = Run(spec(gates=parse_gates("p95_latency_ms<30"), on_failure="rollback"), 1, 1)
    run.answer(True, "d0")
    run.order("pause")
    run.wait(1000.0)
    run.order("resume")
    assert run.state.status == "running"
    run.do(v.Figures(at_s=run.now_s, device="d0", measured=measured(latency_p95_ms=20.0)))
    assert run.phases()["d1"] == "sent"


def test_approval_is_asked_for_after_each_group_but_the_last() -> None:
    run = Run(spec(approval=True), 1, 1)
    assert run.answer(True, "d0") == []
    assert run.state.status == "approval"
    assert run.order("resume") == []
    assert run.order("approve") == ["d1"]
    run.answer(True, "d1")
    assert run.state.status == "finished"


def test_who_resumes_a_rollout_does_not_approve_it() -> None:
    run = Run(spec(approval=True, max_failures=v.Limit(percent=100.0)), 2, 1)
    run.answer(True, "d0")
    run.answer(False, "d1")
    assert (run.state.status, run.state.cause) == ("paused", "group")
    assert run.order("resume") == []
    assert run.state.status == "approval"
    assert run.order("approve") == ["d2"]


def test_a_group_that_has_passed_is_watched_before_the_next_begins() -> None:
    run = Run(spec(soak_s=1800.0), 1, 1)
    assert run.answer(True, "d0") == []
    assert (
        run.state.reason == "the group canary has passed and is watched until 1970-01-01 00:30 UTC"
    )
    assert run.wait(1799.0) == []
    assert run.wait(1.0) == ["d1"]
    run.answer(True, "d1")
    assert run.state.status == "finished"  # nothing comes after the last group


# What happens in the middle of 1800 s, and how long after it the next group begins (None: never).
SOAKS: tuple[tuple[tuple[v.Event, ...], float | None], ...] = (
    ((), 900.0),
    ((v.Ordered(at_s=900.0, order="pause"), v.Ordered(at_s=900.0, order="resume")), 900.0),
    ((v.Reconnected(at_s=900.0),), 1800.0),  # nobody was heard: nobody was watched
    ((v.Silent(at_s=900.0, devices=("d0",), heard_s=1.0), v.Tick(at_s=900.0),
      v.Answered(at_s=900.0, device="d0", live=True)), 1800.0),  # from when it is live again
    ((v.Answered(at_s=900.0, device="d0", live=False),), None),  # it crashed too often
    ((v.Ordered(at_s=900.0, order="abort"),), None),
)  # fmt: skip


@pytest.mark.parametrize(("events", "after_s"), SOAKS)
def test_a_watch_is_without_a_break(events: tuple[v.Event, ...], after_s: float | None) -> None:
    run = Run(spec(soak_s=1800.0), 1, 1)
    run.answer(True, "d0")
    run.wait(900.0)
    assert run.do(*events) == []
    if after_s is None:
        assert run.wait(10_000.0) == []
        assert run.state.status in ("paused", "aborted")
    else:
        assert run.wait(after_s - 1.0) == []
        assert run.wait(1.0) == ["d1"]


def test_a_watch_stops_while_the_rollout_is_paused() -> None:
    run = Run(spec(soak_s=1800.0), 1, 1)
    run.answer(True, "d0")
    for _ in range(2):
        run.wait(600.0)
        run.order("pause")
        assert run.wait(10_000.0) == []
        assert run.order("resume") == []
    assert run.wait(599.0) == []
    assert run.wait(1.0) == ["d1"]


def test_approval_is_asked_for_when_the_watch_is_over() -> None:
    run = Run(spec(soak_s=60.0, approval=True), 1, 1)
    run.answer(True, "d0")
    assert run.state.status == "running"
    run.wait(60.0)
    assert run.state.status == "approval"
    assert run.order("approve") == ["d1"]


def test_nothing_is_sent_before_the_start() -> None:
    run = Run(spec(start_s=3600.0), 1, 1)
    assert (run.sent, run.state.status) == ([], "scheduled")
    assert run.state.reason == "it begins at 1970-01-01 01:00 UTC"
    assert run.order("pause") == []
    assert run.order("resume") == []  # before its time
    assert run.state.status == "scheduled"
    assert run.do(v.Joined(at_s=run.now_s, device="late")) == []
    assert run.wait(3599.0) == []
    assert run.wait(1.0) == ["d0"]
    assert (run.state.status, run.state.reason) == ("running", "")


def test_a_rollout_that_was_paused_past_its_start_begins_when_it_is_resumed() -> None:
    run = Run(spec(start_s=60.0), 1, 1)
    run.order("pause")
    assert run.wait(120.0) == []
    assert run.order("resume") == ["d0"]


def test_a_device_that_leaves_the_fleet_is_not_waited_for_and_may_come_again() -> None:
    run = Run(SPEC, 2, 1)
    run.answer(True, "d0")
    run.do(v.Decommissioned(at_s=run.now_s, devices=("d1", "stranger")))
    assert run.phases() == {"d0": "live", "d1": "decommissioned", "d2": "sent"}
    assert run.state.groups[0].size == 1
    assert run.answer(True, "d1") == []  # it is not heard any more
    assert may_join(1, SPEC, run.state, "d1", None)
    assert run.do(v.Joined(at_s=run.now_s, device="d1")) == ["d1"]
    assert run.state.groups[0].counts == {"live": 1}
    assert run.state.groups[1].counts == {"sent": 2}
    run.answer(True, "d1", "d2")
    assert run.state.status == "finished"
    run.do(v.Decommissioned(at_s=run.now_s, devices=("d0", "d1", "d2")))
    assert run.state.status == "finished"
    assert set(run.phases().values()) == {"decommissioned"}
    assert not any(group.open for group in run.state.groups)


def test_a_late_joiner_enters_the_last_group_and_reopens_a_finished_rollout() -> None:
    run = Run(SPEC, 1, 1)
    assert run.do(v.Joined(at_s=0.0, device="late")) == []  # its group has not begun
    run.answer(True, "d0")
    run.answer(True, "d1", "late")
    assert run.state.status == "finished"
    assert run.do(v.Joined(at_s=0.0, device="later")) == ["later"]
    run.answer(True, "later")
    assert run.state.status == "finished"
    assert run.do(v.Joined(at_s=0.0, device="d0")) == []  # it was here before


def test_rates_are_held() -> None:
    run = Run(spec(rate=parse_rate("60/min"), groups=("rest",)), 10)
    assert run.sent == ["d0"]
    assert [run.wait(0.5), run.wait(0.5), run.wait(3.0)] == [[], ["d1"], ["d2"]]  # no saving up
    grown = Run(spec(rate=parse_rate("60/min,x10/2,max=300"), groups=("rest",)), 50)
    grown.answer(True, *grown.wait(1.0), "d0")
    assert len(grown.wait(1.0)) == 5  # 300 a minute


def test_a_newer_rollout_takes_devices_over_and_keeps_them() -> None:
    first, second = Run(SPEC, 1, 2), v.RolloutState()
    second, _ = step(SPEC, second, [started(1, 1)])
    states = {1: first.state, 2: second}
    lost = taken_over(states, 2, ["d0", "d1"], 5.0)
    assert lost == {1: v.Superseded(at_s=5.0, devices=("d0", "d1"), by=2)}
    first.do(lost[1])
    states = {1: first.state, 2: second}
    assert owners(states) == {"d0": 2, "d1": 2, "d2": 1}
    assert first.sent == ["d0"]
    assert first.answer(True, "d2") == []
    assert not may_join(1, SPEC, first.state, "d0", 2)
    assert may_join(2, SPEC, second, "d2", 1)
    assert not may_join(2, spec(groups=("a", "5%")), second, "d2", 1)


@pytest.mark.parametrize("status", sorted(set(v.STATUSES) - {"running", "rolling_back"}))
def test_orders_that_mean_nothing_in_a_status_have_no_row(status: v.Status) -> None:
    rows = {
        "scheduled": {"pause", "abort"},
        "paused": {"resume", "abort", "rollback"},
        "approval": {"approve", "pause", "abort", "rollback"},
        "aborted": {"rollback"},
        "finished": {"rollback"},
        "rolled_back": set(),
    }
    orders = ("pause", "resume", "approve", "abort", "rollback")
    assert {order for order in orders if accepts(status, order)} == rows[status]


def test_the_tables_lead_out_of_every_open_phase() -> None:
    for phase in v.OPEN:
        ends = {end for (begin, _word), end in DEVICE_STEPS.items() if begin == phase}
        assert ends - v.OPEN, phase
    for status in ("running", "scheduled", "paused", "approval", "rolling_back"):
        assert {end for (begin, _word), end in STATUS_STEPS.items() if begin == status} & v.ENDED


# -- properties over random histories

DEVICES = [f"d{n}" for n in range(12)]
PROPERTY = settings(max_examples=40, deadline=None)
ORDERS = ("pause", "resume", "approve", "abort", "rollback")


@st.composite
def specs(draw: st.DrawFn) -> v.RolloutSpec:
    return spec(
        groups=("a", "b", "rest"),
        success=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        max_failures=draw(
            st.sampled_from([v.Limit(percent=0.0), v.Limit(percent=40.0), v.Limit(count=1)])
        ),
        on_failure=draw(st.sampled_from(["pause", "rollback"])),
        rate=draw(st.sampled_from([None, parse_rate("120/min"), parse_rate("6/min,x2/2,max=600")])),
        gates=draw(st.sampled_from([(), parse_gates("fps>1")])),
        approval=draw(st.booleans()),
        soak_s=draw(st.sampled_from([0.0, 0.0, 30.0])),
        start_s=draw(st.sampled_from([0.0, 0.0, 61.0])),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[v.Event]:
    size_a, size_b = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    at_s, events = 0.0, [started(size_a, size_b, 8 - size_b)]
    for _ in range(draw(st.integers(0, 40))):
        at_s += draw(st.sampled_from([0.0, 0.1, 1.0, 60.0]))
        device = st.sampled_from([*DEVICES, "stranger"])
        kind = draw(
            st.sampled_from(
                ["tick"] * 4 + ["answer"] * 6 + ["figures", "order", "join", "reconnect", "leave"]
            )
        )
        if kind == "tick":
            events.append(v.Tick(at_s=at_s))
        elif kind == "answer":
            live, undo = draw(st.booleans()), draw(st.booleans())
            events.append(v.Answered(at_s=at_s, device=draw(device), live=live, undo=undo))
        elif kind == "figures":
            fps = measured(fps=draw(st.sampled_from([0.5, 2.0])))
            events.append(v.Figures(at_s=at_s, device=draw(device), measured=fps))
        elif kind == "order":
            events.append(v.Ordered(at_s=at_s, order=draw(st.sampled_from(ORDERS))))
        elif kind == "leave":
            events.append(v.Decommissioned(at_s=at_s, devices=(draw(device),)))
        elif kind == "reconnect":
            events.append(v.Reconnected(at_s=at_s))
        elif draw(st.booleans()):
            events.append(v.Joined(at_s=at_s, device=draw(device)))
        else:
            events.append(v.Superseded(at_s=at_s, devices=(draw(device),), by=9))
    return events


def history(spec: v.RolloutSpec, events: Sequence[v.Event]) -> list[tuple[v.RolloutState, tuple]]:
    """The state after each event, and what it sent."""
    state, rows = v.RolloutState(), []
    for event in events:
        state, actions = step(spec, state, [event])
        rows.append((state, actions))
    return rows


@PROPERTY
@given(specs(), histories(), st.integers(1, 7))
def test_replay_gives_the_same_state_in_any_batches(
    spec: v.RolloutSpec, events: list[v.Event], size: int
) -> None:
    rows = history(spec, events)
    text = [msgspec.json.encode(event) for event in events]
    assert replay(spec, [v.EVENTS.decode(row) for row in text]) == rows[-1][0]
    state, actions = v.RolloutState(), []
    for begin in range(0, len(events), size):
        state, new = step(spec, state, events[begin : begin + size])
        actions += new
    assert state == rows[-1][0]
    assert actions == [action for _, row in rows for action in row]


@PROPERTY
@given(specs(), histories())
def test_ticks_that_changed_nothing_may_be_left_out(
    spec: v.RolloutSpec, events: list[v.Event]
) -> None:
    states = [v.RolloutState(), *(state for state, _ in history(spec, events))]
    remaining = [
        event
        for event, before, after in zip(events, states, states[1:], strict=False)
        if before != after or not isinstance(event, v.Tick)
    ]
    assert replay(spec, remaining) == states[-1]
    for event, before, after in zip(events, states, states[1:], strict=False):
        if isinstance(event, v.Tick) and before == after:  # until it is due nothing happens
            until_s = min(due_s(spec, after), event.at_s + 1e6)
            early = v.Tick(at_s=event.at_s + 0.999 * max(0.0, until_s - event.at_s))
            assert step(spec, after, [early]) == (after, ())


@PROPERTY
@given(specs(), histories())
def test_sends_keep_to_groups_limits_and_pauses(spec: v.RolloutSpec, events: list[v.Event]) -> None:
    state, sent, undone = v.RolloutState(), set(), set()
    for event in events:
        before, (state, actions) = state, step(spec, state, [event])
        for group, row in enumerate(state.groups):
            recount = Counter(d.phase for d in state.devices.values() if d.group == group)
            assert dict(row.counts) == recount
        sends = [action.device for action in actions if isinstance(action, v.Send)]
        if sends:  # only a running rollout sends, at ticks alone, and in the order of its groups
            assert isinstance(event, v.Tick)
            assert before.status in ("running", "scheduled")
            assert state.status == "running"
            assert event.at_s >= spec.start_s
            assert all(state.devices[device].group <= state.group for device in sends)
        assert not sent & set(sends)  # each device once
        assert not undone & set(sends)  # none gets the release back after its rollback
        sent.update(sends)
        undos = {action.device for action in actions if isinstance(action, v.Revert)}
        assert undos <= sent
        undone |= undos
        if state.status == "running" and isinstance(event, v.Tick):  # else it had to stop
            failures = [group.failures - group.tolerated for group in state.groups]
            begun = state.groups[: state.group + 1]
            if spec.max_failures.count is not None:
                assert sum(failures[: state.group + 1]) <= spec.max_failures.count
            else:
                assert all(
                    100.0 * (g.failures - g.tolerated) <= spec.max_failures.percent * max(1, g.size)
                    for g in begun
                )


@PROPERTY
@given(specs(), histories())
def test_every_device_ends_when_all_answer_or_time_out(
    spec: v.RolloutSpec, events: list[v.Event]
) -> None:
    state = replay(spec, events)
    at_s = events[-1].at_s
    for _ in range(200):
        if state.status in v.ENDED:
            break
        at_s += 150.0
        order = {"paused": "resume", "approval": "approve"}.get(state.status)
        orders = [v.Ordered(at_s=at_s, order=order)] if order else []  # type: ignore[arg-type]
        state, _ = step(spec, state, [*orders, v.Tick(at_s=at_s)])
    for _ in range(2):
        at_s += 150.0
        state, _ = step(spec, state, [v.Tick(at_s=at_s)])
    assert state.status in v.ENDED
    assert not [d for d, row in state.devices.items() if row.phase in v.OPEN]
