"""What a release must fulfil before it is fetched, and show before it is live."""

from dataclasses import replace
from pathlib import Path

import pytest
from fleet_fixtures import Fleet

from device.protocol.documents import (
    DOCUMENT_FORMAT,
    BlobSpec,
    Desired,
    DeviceFacts,
    InstallPolicy,
    ReleaseSpec,
)
from device.trust.exchange import Trusted
from device.update import slots
from device.update.admission import BoardState, Room, unmet, waits_for_window
from device.update.bundle import BundleFacts, write_bundle
from device.update.decisions import Decision, decide
from device.update.liveness import Liveness, PipelineHealth
from device.update.slots import SlotRecord, SlotState
from device.update.trial import (
    Environment,
    Trial,
    TrialLimits,
    judge,
    trial_limits,
)
from device.update.update_table import UpdateTable
from device.update.versions import is_older, version_key

MIB = 1024**2
BLOB = BlobSpec(sha256="a" * 64, bytes=10 * MIB, chunk_bytes=65536, index_sha256="b" * 64)
LIMITS = TrialLimits(timeout_s=30.0, confirm_after_s=10.0, confirm_frames=5, max_error_rate=0.1)


def works(at_s: float) -> PipelineHealth:
    """A pipeline that gives frames at this time."""
    return PipelineHealth("running", 100 + int(at_s), 0, None, 0.0, Liveness(at_s, at_s))


def desired(version: str = "1.0", policy: InstallPolicy | None = None) -> Desired:
    release = ReleaseSpec(name="person", version=version, profile="p", blob=BLOB)
    return Desired(
        format=DOCUMENT_FORMAT, request="r", release=release, policy=policy or InstallPolicy()
    )


def decision_of(desired: Desired, board: BoardState, **custom: object) -> Decision:
    decision = decide(
        desired, SlotState(), profile="p", verdict=Trusted(custom=custom), board=board
    )
    assert decision.word in ("fetch", "refused")
    return decision


# -- versions


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("1.9", "1.10"),
        ("1.10-rc1", "1.10"),
        ("1.10-rc1", "1.10-rc2"),
        ("1.10", "1.10.1"),
        ("", "0.1"),
        ("v1.2", "1.3"),
        ("10.3.0", "10.13"),
    ],
)
def test_versions_are_compared_number_by_number(older: str, newer: str) -> None:
    assert is_older(older, newer)
    assert not is_older(newer, older)


@pytest.mark.parametrize(("one", "same"), [("1.0", "1.0.0"), ("v2", "2"), ("1.0+cuda12", "1.0")])
def test_the_same_version_may_be_written_in_several_ways(one: str, same: str) -> None:
    assert version_key(one) == version_key(same)


# -- before a download


@pytest.mark.parametrize(("version", "taken"), [("1.4.9", False), ("1.5", True), ("2.0", True)])
def test_a_version_below_the_floor_is_refused(version: str, taken: bool) -> None:
    decision = decision_of(desired(version), BoardState(floors={"person": "1.5", "car": "9"}))
    assert decision.word == ("fetch" if taken else "refused")
    if decision.word == "refused":
        assert "person 1.4.9 is older than 1.5, the version floor" in decision.reason


def test_a_release_that_goes_live_raises_the_floor_and_none_lowers_it() -> None:
    state = SlotState()
    for version, floor, expected in (("1.0", "", {}), ("2.0", "1.5", {"person": "1.5"}),
                                     ("2.1", "1.2", {"person": "1.5"})):  # fmt: skip
        record = SlotRecord(sha256=version, bytes=1, name="person", version=version, request="r")
        state = slots.stage(slots.clear(state), record)
        on_trial = slots.begin_trial(state, "r", floor=floor)
        assert on_trial.floors == state.floors  # a trial alone raises nothing
        state = slots.confirm(on_trial)
        assert state.floors == expected


@pytest.mark.parametrize(
    ("free_mib", "idle_mib", "taken", "sentence"),
    [
        (36, 0, True, ""),
        (35, 0, False, "needs 36 MiB of room"),
        (26, 10, True, ""),  # the idle slot is emptied before the release is unpacked
        (26, 9, False, "needs 36 MiB of room"),
        (25, 100, False, "needs 26 MiB of free room for the download"),  # but not before
    ],
)
def test_a_release_without_room_is_refused_before_the_download(
    free_mib: int, idle_mib: int, taken: bool, sentence: str
) -> None:
    room = Room(free_mib * MIB, idle_mib * MIB)
    decision = decision_of(desired(), BoardState(room=room))
    assert decision.word == ("fetch" if taken else "refused")
    if decision.word == "refused":
        assert sentence in decision.reason


FACTS = DeviceFacts(jetpack="6.2", tensorrt="10.3.0", dla_cores=2, memory_mb=15656)


@pytest.mark.parametrize(
    ("requires", "reason"),
    [
        ({"tensorrt": "10.3", "jetpack": "6.2", "dla_cores": "2", "memory_mb": "15656"}, ""),
        ({"tensorrt": "10.4"}, "needs TensorRT 10.4 or more, this board has 10.3.0"),
        ({"jetpack": "7.0"}, "needs JetPack 7.0 or more, this board has 6.2"),
        ({"memory_mb": "15657"}, "needs MB of memory 15657 or more, this board has 15656"),
        ({"tpu": "1"}, "requires tpu 1, which this agent cannot judge"),
    ],
)
def test_what_a_release_requires_is_compared_with_the_board(
    requires: dict[str, str], reason: str
) -> None:
    decision = decision_of(desired(), BoardState(FACTS), requires=requires)
    assert decision.word == ("refused" if reason else "fetch")
    if decision.word == "refused":
        assert reason in decision.reason


def test_a_board_that_does_not_say_what_it_has_is_not_taken_to_have_it() -> None:
    assert "none that is known" in (unmet({"tensorrt": "8.5"}, DeviceFacts()) or "")
    assert unmet({"dla_cores": "0"}, DeviceFacts()) is None


# -- the maintenance window


@pytest.mark.parametrize(
    ("window", "hour", "minute", "waits"),
    [
        (("", ""), 12, 0, False),
        (("22:00", "05:00"), 21, 59, True),
        (("22:00", "05:00"), 22, 0, False),
        (("22:00", "05:00"), 4, 59, False),
        (("22:00", "05:00"), 5, 0, True),
        (("02:00", "04:00"), 3, 0, False),
        (("02:00", "04:00"), 4, 0, True),
        (("02:00", ""), 23, 59, False),
        (("02:00", ""), 1, 59, True),
        (("", "04:00"), 0, 0, False),
        (("", "24:00"), 12, 0, False),
    ],
)
def test_a_trial_waits_for_its_window(
    window: tuple[str, str], hour: int, minute: int, waits: bool
) -> None:
    policy = InstallPolicy(not_before=window[0], not_after=window[1])
    reason = waits_for_window(policy, hour, minute)
    assert (reason is not None) == waits
    if reason is not None:
        assert f"where it is {hour:02}:{minute:02}" in reason


@pytest.mark.parametrize("text", ["25:00", "12", "12:60", "ab:cd", "-1:00"])
def test_a_window_that_is_no_time_is_refused(text: str) -> None:
    decision = decision_of(desired(policy=InstallPolicy(not_before=text)), BoardState())
    assert decision.word == "refused"
    assert "is no time of day: write it as 22:30" in decision.reason


def test_a_limit_on_live_frames_that_are_never_compared_is_refused() -> None:
    decision = decision_of(desired(policy=InstallPolicy(min_shadow_agreement=0.9)), BoardState())
    assert decision.word == "refused"
    assert "does not say how long both engines shall run (shadow_s)" in decision.reason
    both = InstallPolicy(min_shadow_agreement=0.9, shadow_s=60.0)
    assert decision_of(desired(policy=both), BoardState()).word != "refused"


# -- the trial


def looked(environment: Environment, until_s: float, was_online: bool = True) -> Trial:
    """A trial that has worked since 0 s, looked at each second."""
    trial = Trial(frame_s=0.0, was_online=was_online)
    for second in range(int(until_s) + 1):
        trial = trial.observed(works(second), float(second), environment)
    return trial


def test_the_policy_is_above_agent_toml() -> None:
    table = UpdateTable(confirm_after_s=7.0, max_error_rate=0.2)
    assert trial_limits(table).confirm_after_s == 7.0
    limits = trial_limits(table, InstallPolicy(confirm_after_s=60.0, max_error_rate=0.0))
    assert (limits.confirm_after_s, limits.max_error_rate) == (60.0, 0.0)


@pytest.mark.parametrize(("latency_ms", "good"), [(30.0, True), (30.1, False)])
def test_the_latency_is_judged_at_the_limit(latency_ms: float, good: bool) -> None:
    limits = replace(LIMITS, max_latency_p95_ms=30.0)
    verdict = judge(looked(Environment(latency_p95_ms=latency_ms), 10), limits, 10.0)
    assert verdict.word == ("confirm" if good else "roll_back")
    if verdict.word == "roll_back":
        assert "took up to 30.1 ms, the policy allows 30 ms" in verdict.reason


def test_a_latency_that_is_never_measured_does_not_pass() -> None:
    limits = replace(LIMITS, max_latency_p95_ms=30.0)
    assert judge(looked(Environment(), 10), limits, 10.0).word == "wait"
    assert judge(looked(Environment(), 40), limits, 40.0).word == "roll_back"


@pytest.mark.parametrize(("temperature_c", "good"), [(85.0, True), (85.1, False), (None, False)])
def test_a_board_that_gets_too_hot_ends_the_trial_at_once(
    temperature_c: float | None, good: bool
) -> None:
    limits = replace(LIMITS, max_temperature_c=85.0)
    verdict = judge(looked(Environment(temperature_c=temperature_c), 1), limits, 1.0)
    assert verdict.word == ("wait" if good else "roll_back")


def test_a_release_that_cuts_the_device_off_gives_way() -> None:
    offline = Environment(online=False)
    assert judge(looked(Environment(), 10), LIMITS, 10.0).word == "confirm"
    wait = judge(looked(offline, 299), LIMITS, 299.0)
    assert wait.word == "wait"
    assert not wait.endless
    verdict = judge(looked(offline, 300), LIMITS, 300.0)
    assert verdict.word == "postpone"
    assert verdict.broker
    assert "not for the last 300 s of it (broker_timeout_s)" in verdict.reason


def test_an_outage_that_began_before_the_trial_neither_commits_nor_ends_it() -> None:
    trial = looked(Environment(online=False), 5000, was_online=False)
    wait = judge(trial, LIMITS, 5000.0)
    assert wait.word == "wait"
    assert wait.endless
    back = trial.observed(works(5001.0), 5001.0, Environment())
    assert judge(back, LIMITS, 5001.0).word == "confirm"
    # From then on it was reachable: what cuts it off again is the release, or an accident.
    cut = back.observed(works(5002.0), 5002.0, Environment(online=False))
    assert judge(replace(cut, frame_s=5302.0), LIMITS, 5302.0).word == "postpone"


# -- from the bundle to the board


def test_what_a_bundle_says_of_itself_reaches_the_board_signed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    for name in ("e", "p", "l"):
        (tmp_path / name).write_text(name)
    bundle = tmp_path / "b.bundle"
    facts = BundleFacts(
        requires={"memory_mb": "8000"}, min_version_floor="1.5", metrics={"map50": 0.41}
    )
    write_bundle(
        bundle,
        engine=tmp_path / "e",
        pipeline=tmp_path / "p",
        labels=tmp_path / "l",
        name="person",
        version="2.0",
        profile="p",
        facts=facts,
    )
    fleet.release = fleet.publish(bundle)
    desired = fleet.desired()
    verdict = fleet.verify(fleet.signed(desired))
    assert isinstance(verdict, Trusted)
    assert verdict.custom["metrics"] == {"map50": "0.41"}
    assert verdict.custom["min_version_floor"] == "1.5"
    small = BoardState(DeviceFacts(memory_mb=4000))
    decision = decide(desired, SlotState(), profile="p", verdict=verdict, board=small)
    assert decision.word == "refused"
    assert "needs MB of memory 8000 or more, this board has 4000" in decision.reason
