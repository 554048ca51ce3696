"""The slots: the rules of the state machine, and a disk that is cut off at every step."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqtt_fixtures import make_bundle

from device import slot_store, slots
from device.bundle import BundleInfo, extract_bundle
from device.errors import BundleError, ConfigError
from device.slot_store import SlotStore
from device.slots import SlotRecord, SlotState


def record(name: str) -> SlotRecord:
    return SlotRecord(sha256=name * 64, bytes=1, name=name, version="1", request=f"r-{name}")


def live(name: str, state: SlotState = SlotState()) -> SlotState:  # noqa: B008  (frozen)
    staged = slots.stage(slots.clear(state), record(name))
    return slots.confirm(slots.begin_trial(staged, f"r-{name}"))


def on_trial(name: str, state: SlotState) -> SlotState:
    return slots.begin_trial(slots.stage(slots.clear(state), record(name)), f"r-{name}")


def test_releases_take_turns_in_the_slots() -> None:
    one = live("1")
    two = live("2", one)
    three = live("3", two)
    assert [state.active for state in (one, two, three)] == ["a", "b", "a"]
    assert three.b is not None
    assert (three.b.name, three.b.good) == ("2", True)


def test_a_roll_back_keeps_the_active_slot_and_remembers_why() -> None:
    state = slots.roll_back(on_trial("2", live("1")), "it did not start")
    assert (state.active, state.trial, state.attempts, state.b) == ("a", None, 0, None)
    assert state.failure is not None
    assert (state.failure.sha256, state.failure.request) == ("2" * 64, "r-2")
    assert state.failure.reason == "it did not start"


def test_a_confirmed_release_clears_the_failure() -> None:
    failed = slots.roll_back(on_trial("2", live("1")), "x")
    assert live("3", failed).failure is None


def test_an_agent_that_dies_in_a_trial_tries_once_more_then_goes_back() -> None:
    first = on_trial("2", live("1"))
    second = slots.interrupted(first)
    third = slots.interrupted(second)
    assert (first.attempts, second.attempts, second.trial) == (1, 2, "b")
    assert (third.trial, third.active) == (None, "a")
    assert third.failure is not None
    assert "died in 2 of 2 attempts" in third.failure.reason


def test_orderly_stops_are_not_counted_as_failures() -> None:
    state = on_trial("2", live("1"))
    for _ in range(10):
        state = slots.interrupted(slots.suspend(state))
    assert (state.trial, state.attempts) == ("b", 1)


def test_without_a_trial_a_start_changes_nothing() -> None:
    state = live("1")
    assert slots.interrupted(state) is state
    assert slots.suspend(state) is state


def test_a_damaged_active_slot_gives_way_to_a_good_one_only() -> None:
    two = live("2", live("1"))
    assert slots.lose_active(two).active == "a"
    untried = slots.stage(slots.clear(two), record("3"))
    assert slots.lose_active(untried).active is None


@pytest.mark.parametrize(
    "act",
    [slots.confirm, lambda s: slots.roll_back(s, ""), lambda s: slots.begin_trial(s, "r")],
)
def test_events_out_of_place_are_programming_errors(
    act: Callable[[SlotState], SlotState],
) -> None:
    with pytest.raises(ValueError, match=r"try|trial"):
        act(live("1"))


@given(st.lists(st.sampled_from(["new", "confirm", "fail", "crash", "stop"]), max_size=40))
def test_no_sequence_of_events_loses_the_good_release(events: list[str]) -> None:
    """Once a release was good, a good one is active for ever, and trials end after two crashes."""
    state = live("1")
    crashes = 0
    for number, event in enumerate(events):
        if state.trial is None:
            if event == "new":
                state, crashes = on_trial(str(number % 10), state), 0
        elif event == "confirm":
            state = slots.confirm(state)
        elif event == "fail":
            state = slots.roll_back(state, "x")
        elif event == "crash":
            crashes += 1
            state = slots.interrupted(state)
            assert (state.trial is None) == (crashes >= slots.MAX_ATTEMPTS)
        elif event == "stop":
            state = slots.interrupted(slots.suspend(state))
        active = state.record(state.active)
        assert active is not None
        assert active.good
        assert state.trial != state.active


# -- the disk


def test_the_state_comes_back(tmp_path: Path) -> None:
    store = SlotStore(tmp_path)
    saved = store.save(live("1"))
    store.close()
    again = SlotStore(tmp_path)
    assert again.load() == saved
    again.close()


@pytest.mark.parametrize("damage", [b"", b"\0" * 300, b"00000000\n{}", "half", "flip"])
def test_a_torn_newest_copy_falls_back_to_the_one_before(
    tmp_path: Path, damage: bytes | str
) -> None:
    store = SlotStore(tmp_path)
    before = store.save(live("1"))
    newest = store.save(on_trial("2", before))
    path = tmp_path / f"slots.{newest.generation % 2}"
    whole = path.read_bytes()
    if damage == "half":
        damage = whole[: len(whole) // 2]
    elif damage == "flip":
        damage = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    assert isinstance(damage, bytes)
    path.write_bytes(damage)
    assert store.load() == before
    store.close()


def test_endless_last_words_do_not_cost_the_state(tmp_path: Path) -> None:
    store = SlotStore(tmp_path)
    state = on_trial("2", live("1"))
    for _ in range(2):  # both copies
        saved = store.save(slots.roll_back(state, "é" * 1_000_000))
        state = on_trial("2", saved)
    assert store.load() == saved
    store.close()


def test_a_disk_that_takes_nothing_is_one_sentence(tmp_path: Path) -> None:
    store = SlotStore(tmp_path)
    (tmp_path / "slots.1.tmp").mkdir()  # root may write everywhere, but not over a folder
    with pytest.raises(ConfigError, match="cannot write the state of the slots"):
        store.save(live("1"))
    store.close()


def test_two_agents_on_one_state_directory_are_refused(tmp_path: Path) -> None:
    store = SlotStore(tmp_path)
    code = (
        "import sys; from pathlib import Path; from device.slot_store import SlotStore\n"
        "SlotStore(Path(sys.argv[1]))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert "another agent already uses state_dir" in other.stderr
    store.close()
    SlotStore(tmp_path).close()  # the file that stays behind blocks nobody


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use state_dir"):
        SlotStore(tmp_path / "file" / "state")


class _PowerCut(BaseException):
    """The board loses power; nothing in the program may handle it."""


def _update(store: SlotStore, bundle: Path, name: str) -> None:
    """What the agent does with a bundle that was fetched, up to the confirmed trial."""
    state = store.save(slots.clear(store.load()))
    info = store.populate(state.idle, bundle)
    staged = msgspec.structs.replace(record("0"), name=info.name, sha256=name * 64)
    state = store.save(slots.stage(state, staged))
    state = store.save(slots.begin_trial(state, "r"))
    store.save(slots.confirm(state))


CUT_CALLS = (
    (os, "fsync"),
    (os, "replace"),
    (os, "rename"),
    (slot_store.shutil, "rmtree"),
)


def _cut_at(monkeypatch: pytest.MonkeyPatch, step: int, *, after: bool) -> None:
    """Cut the power before or after the given file system call (a double of the power switch)."""
    counter = itertools.count()

    def wrap(original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            now = next(counter)
            if now == step and not after:
                raise _PowerCut
            result = original(*arguments, **options)
            if now == step:
                raise _PowerCut
            return result

        return call

    for module, name in CUT_CALLS:
        monkeypatch.setattr(module, name, wrap(getattr(module, name)))


@pytest.mark.parametrize("after", [False, True])
def test_a_power_cut_at_any_step_leaves_a_verified_slot_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, after: bool
) -> None:
    assert _cut_everywhere(tmp_path, monkeypatch, after=after) > 15


def test_the_checker_notices_a_state_that_is_not_cleared_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "clear", lambda state: state)
    with pytest.raises(BundleError):
        _cut_everywhere(tmp_path, monkeypatch, after=True)


def test_the_checker_notices_a_trial_that_is_confirmed_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SlotStore.populate

    def too_early(store: SlotStore, slot: slots.Slot, bundle: Path) -> BundleInfo:
        state = store.load()
        store.save(slots.confirm(slots.begin_trial(slots.stage(state, record("3")), "r")))
        return original(store, slot, bundle)

    monkeypatch.setattr(SlotStore, "populate", too_early)
    with pytest.raises((BundleError, AssertionError)):
        _cut_everywhere(tmp_path, monkeypatch, after=True)


def _cut_everywhere(folder: Path, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> int:
    """Update with a power cut at every step in turn and check each; returns the steps."""
    bundles = [make_bundle(folder / v, version=v, engine_bytes=5000) for v in ("1", "2", "3")]
    ready = SlotStore(folder / "ready")
    _prepare(ready, bundles)
    ready.close()
    for step in itertools.count():
        root = folder / f"cut-{step}"
        shutil.copytree(folder / "ready", root)
        store = SlotStore(root)
        with monkeypatch.context() as patch:
            _cut_at(patch, step, after=after)
            try:
                _update(store, bundles[2], "3")
                finished = True
            except _PowerCut:
                finished = False
        store.close()
        _check_boots(root, bundles[2])
        shutil.rmtree(root)
        if finished:
            return step
    raise AssertionError("itertools.count ended")


def _prepare(store: SlotStore, bundles: list[Path]) -> None:
    """Two releases in the slots, the second active, written without the store's own order."""
    for slot, bundle in zip(slots.SLOTS, bundles, strict=False):
        extract_bundle(bundle, store.slot_folder(slot))
    good = [msgspec.structs.replace(record(name), good=True) for name in ("1", "2")]
    store.save(SlotState(active="b", a=good[0], b=good[1]))


def _check_boots(root: Path, bundle: Path) -> None:
    """Recover as the agent does: an active slot is whole, and the update can be done again."""
    store = SlotStore(root)
    state = slots.interrupted(store.load())
    store.clean(state)
    assert state.active is not None
    for slot in slots.SLOTS:
        if state.record(slot) is not None:  # what the state promises is there and whole
            assert store.verify(slot).name == "good"
    if state.trial is not None:
        state = store.save(slots.roll_back(state, "x"))
    active = state.record(state.active)
    assert active is not None
    if active.sha256 != "3" * 64:
        store.save(state)
        _update(store, bundle, "3")
    final = store.load()
    assert final.active is not None
    assert store.verify(final.active).version == "3"
    store.close()


def test_a_half_written_slot_is_not_verified(tmp_path: Path) -> None:
    store = SlotStore(tmp_path / "state")
    _update(store, make_bundle(tmp_path / "in"), "1")
    engine = store.slot_folder("a") / "model.engine"
    os.truncate(engine, 1000)
    with pytest.raises(BundleError):
        store.verify("a")
    store.close()
