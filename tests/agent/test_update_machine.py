"""The machine of the board: its table, and properties over random histories."""

import random
from collections import deque
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as altered

from device.agent.updater import EFFECTS, LEVELS
from device.protocol.documents import BlobSpec, Desired, InstallPolicy, ReleaseSpec
from device.trust.exchange import TRUSTED, Refused, Unverified
from device.update import events as v
from device.update import slots
from device.update.admission import BoardState
from device.update.decisions import update_of
from device.update.liveness import Liveness, PipelineHealth
from device.update.machine import (
    CHECKS,
    DECISIONS,
    HANDLERS,
    NOTICES,
    ON_TRIAL,
    REFUSALS,
    RESTING,
    STEPS,
    Word,
    step,
)
from device.update.slots import SlotRecord
from device.update.trial import Environment, Trial
from device.update.update_table import UpdateTable

SETUP = v.Setup("p", UpdateTable(max_crashes=2, trial_timeout_s=5.0, confirm_after_s=1.0))
# stage -> what may be reported in it while the machine waits for an event from outside
PHASES: dict[v.Stage, set[str]] = {
    "idle": {"idle", "live", "rolled_back", "refused"},
    "failed": {"rolled_back", "refused"},
    "verifying": {"verifying"},
    "live": {"live"},
    "downloading": {"downloading"},
    "unread": {"postponed"},
    "postponed": {"postponed"},
    "window": {"postponed"},
    "preparing": {"staging"},
    "golden": {"staging"},
    "shadow": {"staging"},
    "trial": {"trial", "postponed"},
    "unstarted": {"postponed"},
    "resuming": {"staging"},
}
ANSWERED: set[v.Stage] = {
    "unpacking",
    "checking",
    "shadow_attempt",
    "trial_attempt",
}  # before the next event


def test_every_word_has_a_row_or_is_refused_by_name_in_every_stage() -> None:
    stages, words = set(get_args(v.Stage)), set(get_args(Word))
    assert {*RESTING, *ON_TRIAL} == stages == set(PHASES) | ANSWERED
    assert {word for _stage, word in STEPS} == words
    refused = {word for stage, word in product(stages, words) if (stage, word) not in STEPS}
    assert refused == set(REFUSALS)
    assert all(REFUSALS.values())


def test_every_stage_is_reached_and_left() -> None:
    for stage in get_args(v.Stage):
        reached, new = set(), {"idle"}
        while new:
            reached |= new
            new = {to for (source, _word), to in STEPS.items() if source in new} - reached
        assert stage in reached
        assert {to for (source, _word), to in STEPS.items() if source == stage} != {stage}


def test_no_live_stage_is_reached_without_a_commit() -> None:
    """Only a trial that the disk has recorded as over is live, or what is active already."""
    rows = {(stage, word) for (stage, word), to in STEPS.items() if to == "live" != stage}
    decided = {(stage, "live") for stage in RESTING if stage != "live"}
    assert rows == {("trial", "recorded"), *decided}
    assert DECISIONS["live"] == "live"


def test_no_event_and_no_effect_is_without_a_row() -> None:
    assert set(NOTICES) == set(get_args(v.NoticeWord))
    assert set(HANDLERS) == {*get_args(v.Event)} - {v.Notice}
    assert set(CHECKS) == set(get_args(v.Checked.__annotations__["check"]))
    assert set(EFFECTS) | set(LEVELS) == set(get_args(v.DoWord))


# -- single steps


UNREAD_A: frozenset[slots.Slot] = frozenset("a")


def release_of(number: str, *, retry: bool = False) -> Desired:
    """The release of this number, asked for by the request of the same."""
    blob = BlobSpec(sha256=number * 64, bytes=10, chunk_bytes=4096, index_sha256="c" * 64)
    release = ReleaseSpec(name="n", version=number, profile="p", blob=blob)
    return Desired(format=2, request=number, release=release, retry=retry)


def record(number: str) -> SlotRecord:
    return SlotRecord(sha256=number * 64, bytes=10, name="n", version=number, request=number)


def live_a() -> slots.SlotState:
    """Release 0 is live in slot a."""
    return slots.confirm(slots.begin_trial(slots.stage(slots.SlotState(), record("0")), "0"))


def test_a_rolled_back_trial_has_the_disk_read_the_next_release_once() -> None:
    """Where nothing prepares, the answer for the active slot comes before the comparison."""
    b_on_trial = slots.begin_trial(slots.stage(live_a(), record("1")), "1")
    state = v.State(
        b_on_trial, "trial", desired=release_of("1", retry=True), preparing="0" * 64,
        trial=Trial(0.0),
    )  # fmt: skip
    state, effects = step(SETUP, state, v.Notice("failure", "no camera"), v.Moment())
    assert [v.Do("prepare", slot="a"), v.Do("compare")] == list(effects[-2:])
    _state, effects = step(SETUP, state, v.Checked("preparation"), v.Moment())
    assert v.Do("compare") not in effects


def test_a_slot_that_the_disk_gives_at_the_second_look_is_tried() -> None:
    state = v.State(slots.stage(live_a(), record("1")), "checking", desired=release_of("1"))
    for notice in (v.Notice("unread", "the disk is slow"), v.Notice("whole")):
        state, effects = step(SETUP, state, notice, v.Moment())
    assert state.stage == "preparing"
    assert v.Do("prepare", slot="b") in effects


def test_the_other_slot_is_left_alone_while_the_active_one_is_judged() -> None:
    state = slots.begin_trial(slots.stage(live_a(), record("1")), "1")
    state = slots.postpone(state, "no frames")
    waits, moment = v.State(state, "postponed", desired=release_of("1")), v.Moment(unread=UNREAD_A)
    health = PipelineHealth("failed", 0, 0, None, 0.0, Liveness(0.0, 0.0))
    _state, effects = step(SETUP, waits, v.Observed(health), moment)
    assert effects == (v.Do("check_active"),)


def test_a_trial_runs_on_while_the_disk_does_not_give_the_active_slot() -> None:
    state = v.State(
        slots.begin_trial(slots.stage(live_a(), record("1")), "1"), "trial",
        desired=release_of("1"), trial=Trial(0.0),
    )  # fmt: skip
    health = PipelineHealth("running", 9, 0, None, 0.0, Liveness(0.0, 0.0))
    after, effects = step(SETUP, state, v.Observed(health), v.Moment(unread=UNREAD_A))
    assert v.Do("check_active") not in effects
    assert after.judge_at_s is not None
    assert step(SETUP, state, v.Compared(BoardState()), v.Moment()) == (state, ())


def test_the_live_release_runs_again_where_it_is_asked_for_in_place_of_a_waiting_trial() -> None:
    state = v.State(
        slots.begin_trial(slots.stage(live_a(), record("1")), "1"), "trial",
        desired=release_of("1"), trial=Trial(0.0),
    )  # fmt: skip
    state, effects = step(SETUP, state, v.Notice("not_started", "no memory"), v.Moment())
    assert [one.word for one in effects if isinstance(one, v.Do)] == ["error"]
    _state, effects = step(SETUP, state, v.DesiredSet(release_of("0"), TRUSTED, False), v.Moment())
    words = [one.word for one in effects if isinstance(one, v.Do)]
    assert words == ["stop", "active", "compare"]


@pytest.mark.parametrize(("asked", "rolls_back"), [("1", True), ("2", False)])
def test_a_cancelled_release_ends_no_trial_of_another(asked: str, rolls_back: bool) -> None:
    state = v.State(
        slots.begin_trial(slots.stage(live_a(), record("1")), "1"), "trial",
        desired=release_of(asked), trial=Trial(0.0),
    )  # fmt: skip
    after, effects = step(SETUP, state, v.Notice("cancel", asked), v.Moment())
    words = [effect.word for effect in effects if isinstance(effect, v.Do)]
    assert ("stop" in words) == rolls_back
    assert after.on_trial != rolls_back
    assert after.desired is None


def in_shadow(desired: Desired) -> v.State:
    """Release 1 runs beside the live one."""
    state = slots.begin_shadow(slots.stage(live_a(), record("1")), desired.request)
    return v.State(state, "shadow", desired=desired, shadow=desired.request, prepared="1" * 64)


def test_a_shadow_ends_before_the_trial_that_begins_without_a_live_release() -> None:
    state = in_shadow(altered(release_of("1"), policy=InstallPolicy(shadow_s=5.0)))
    lost = slots.SlotState(active=None, a=state.slots.b)
    state = replace(state, slots=lost, golden_of="1" * 64)
    state, effects = step(SETUP, state, v.Checked("golden"), v.Moment())
    assert v.Do("stop_shadow") in effects
    assert (state.stage, state.shadow) == ("trial_attempt", "")
    on_trial = replace(state, slots=slots.begin_trial(lost, "1"), stage="trial", shadow="1")
    _state, effects = step(SETUP, on_trial, v.Notice("shut_down"), v.Moment())
    assert v.Do("stop_shadow") in effects


def test_a_shadow_tells_nothing_while_signatures_are_verified() -> None:
    state = replace(in_shadow(release_of("1")), stage="verifying")
    after, _effects = step(SETUP, state, v.Notice("shadowing", "so far"), v.Moment())
    assert after == state


def test_a_release_that_is_asked_for_again_is_prepared_for_the_newer_request() -> None:
    again = altered(release_of("1"), request="2")
    state = v.State(
        slots.stage(live_a(), record("1")), "checking", desired=again, preparing="1" * 64,
        update=update_of(release_of("1"), "staging"),
    )  # fmt: skip
    after, _effects = step(SETUP, state, v.Notice("whole"), v.Moment())
    assert (after.stage, after.update.phase, after.update.request) == ("preparing", "staging", "2")


def test_the_log_says_which_version_waits_for_its_window() -> None:
    desired = altered(release_of("1"), policy=InstallPolicy(not_before="22:00", not_after="23:00"))
    state = v.State(slots.stage(live_a(), record("1")), "checking", desired=desired)
    _state, effects = step(SETUP, state, v.Notice("whole"), v.Moment(hour=12))
    assert [one.text[:5] for one in effects if isinstance(one, v.Do)] == ["n 1: "]


# -- histories


def desired(chance: random.Random) -> Desired:
    number = chance.randrange(3)
    sha256 = str(number) * 64
    blob = BlobSpec(sha256=sha256, bytes=10, chunk_bytes=4096, index_sha256="c" * 64)
    profile = chance.choice("ppppq")
    release = ReleaseSpec(name="n", version=str(number), profile=profile, blob=blob)
    policy = InstallPolicy(
        shadow_s=chance.choice((0.0, 5.0)),
        min_golden_agreement=chance.choice((None, 0.9)),
        min_shadow_agreement=None,
        not_before=chance.choice(("", "22:00")),
        manual=chance.random() < 0.2,
    )
    return Desired(
        format=2, request=str(chance.randrange(4)), release=release, policy=policy,
        retry=chance.random() < 0.5,
    )  # fmt: skip


FALL_BACK = v.Notice("fall_back")
ANSWERS: dict[str, tuple[v.Event | None, ...]] = {
    "compare": (v.Compared(BoardState()),),
    "fetch": (v.Fetched(5), v.Fetched(5), v.Notice("no_fetch", "no room")),
    "unpack": (*(v.Notice("unpacked"),) * 9, v.Notice("fetch_failed", "it is damaged")),
    "verify": (*(v.Notice("whole"),) * 3, v.Notice("damaged", "x"), v.Notice("unread", "x")),
    "fall_back": (None, FALL_BACK),
    "prepare": (v.Notice("preparation_runs"), v.Checked("preparation")),
    "golden": (*(None, v.Checked("golden")) * 3, v.Checked("golden", "it has none")),
    "trial": (*(None,) * 9, v.Notice("not_started", "no process can be started")),
    "trial_again": (None, v.Notice("not_started", "no process can be started")),
}


class ModelBoard:
    """Stands between the machine and a disk, a network and processes that chance decides on."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.state = v.State()
        self.at = v.Moment()
        self.seen: set[str] = set()  # stages

    def take(self, event: v.Event) -> None:
        events = deque([event])
        while events:
            event = events.popleft()
            before = self.state.slots
            state, effects = step(SETUP, self.state, event, self.at)
            assert (state, effects) == step(SETUP, self.state, event, self.at)
            self.state = state
            self.seen.add(state.stage)
            for effect in effects:
                answer = self.save(effect) if isinstance(effect, v.Save) else self.do(effect)
                events.extend([] if answer is None else [answer])
            self.check(event, before)

    def check(self, event: v.Event, before: slots.SlotState) -> None:
        state = self.state.slots
        assert slots.inconsistency(state) is None
        if state.active != before.active and state.active is not None:
            record = state.record(state.active)
            assert record is not None
            assert record.good
            committed = isinstance(event, v.Observed) and self.state.stage == "trial"
            assert committed or (isinstance(event, v.Notice) and event.word == "fall_back")

    def save(self, effect: v.Save) -> v.Event | None:
        if effect.first and self.chance.random() < 0.1:
            return v.Notice("not_recorded", "the disk is full")
        self.state = replace(self.state, slots=effect.slots)
        return v.Notice("recorded") if effect.first else None

    def do(self, effect: v.Do) -> v.Event | None:
        if effect.word in ("trial", "trial_again"):
            assert effect.slot == self.state.slots.trial
            assert self.state.slots.attempts >= 1  # it was counted first
        if effect.word == "unpack":
            self.unpack()
        answers = ANSWERS.get(effect.word, (None,))
        answer = self.chance.choice(answers)
        return v.Notice("fall_back", effect.text) if answer == FALL_BACK else answer

    def unpack(self) -> None:
        desired = self.state.desired
        assert desired is not None
        record = SlotRecord(
            sha256=desired.release.blob.sha256, bytes=10, name="n",
            version=desired.release.version, request=desired.request,
        )  # fmt: skip
        self.state = replace(self.state, slots=slots.stage(self.state.slots, record))

    def looked(self, state: str) -> v.Event:
        now_s = self.at.now_s
        return v.Observed(PipelineHealth(state, 100, 0, None, 0.0, Liveness(now_s, now_s)))

    def happens(self) -> v.Event:
        """Return what comes from outside."""
        chance = self.chance
        verdict = chance.choice(
            (TRUSTED, TRUSTED, TRUSTED, Unverified(reason="x"), Refused(reason="x"))
        )
        events = (
            v.DesiredSet(chance.choice((desired(chance), desired(chance), self.state.desired)),
                         verdict, chance.random() < 0.5),
            *(self.looked(chance.choice(("running", "starting", "degraded", "failed"))),) * 2,
            *(v.Notice("complete"),) * 2,
            v.Notice(chance.choice(("cancel", "accept", "restart", "stop", "go_back", "exited")),
                     chance.choice("0123")),
            v.Notice(chance.choice(("failure", "crashed", "restart_due", "active_changed"))),
            v.Notice(chance.choice(("shadowing", "preparing", "fetch_failed")), "so far"),
            v.Fetched(7),
            *(v.Checked("preparation", chance.choice((None, None, "it crashed")), built=True),) * 2,
            *(v.Checked("golden", chance.choice((None, None, "it differs")), False, 1.0),) * 2,
            *(v.Checked("shadow", chance.choice((None, None, "it differs")), False, 1.0, 9),) * 2,
        )  # fmt: skip
        if chance.random() < 0.02:
            self.state = replace(self.state, slots=slots.interrupted(self.state.slots))
            return v.Notice("boot")
        return chance.choice(events)


def live_through(seed: int, events: int) -> ModelBoard:
    chance = random.Random(seed)
    board = ModelBoard(chance)
    board.take(v.Notice("boot"))
    for _ in range(events):
        board.at = v.Moment(
            now_s=board.at.now_s + chance.choice((0.1, 0.5, 2.0)),
            hour=chance.choice((12, 23)),
            environment=Environment(online=chance.random() < 0.9),
            unread=frozenset(chance.choice(((), (), (), ("a",), ("b",)))),
            stopped=chance.random() < 0.5,
        )
        board.take(board.happens())
        calm = chance.choice(("running", "running", "degraded"))
        for _ in range(chance.choice((0, 0, 0, 12))):  # nothing else happens for a while
            board.at = replace(board.at, now_s=board.at.now_s + 0.5)
            board.take(board.looked(calm))
        state = board.state
        assert (state.slots.trial is not None) == (state.stage in ON_TRIAL)
        assert (state.trial is not None) == (state.stage == "trial")
        assert state.stage not in ANSWERED
        assert state.update.phase in PHASES[state.stage], state.stage
    return board


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_any_history_keeps_the_slots_whole_and_commits_before_it_is_live(seed: int) -> None:
    live_through(seed, 60)


def test_histories_come_through_every_stage() -> None:
    seen: set[str] = set()
    for seed in range(300):
        seen |= live_through(seed, 300).seen
        if seen == set(get_args(v.Stage)):
            return
    pytest.fail(f"never: {set(get_args(v.Stage)) - seen}")
