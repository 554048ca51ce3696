"""The slots: the rules of the state machine, and what the disk has of them.

`test_crash_states` cuts the power at every step.
"""

import contextlib
import errno
import hashlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from crash_states import Link, Sync
from crash_states import record as recorded
from hypothesis import given
from hypothesis import strategies as st
from mqtt_fixtures import make_bundle
from slot_fixtures import bundle_of, live, populated, record

from device.errors import BundleError, StateError
from device.update import slot_store, slots, state_folder
from device.update.boot import boot_state
from device.update.slot_store import SlotStore
from device.update.slots import SlotFailure, SlotSeal, SlotState


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
    assert (state.active, state.trial, state.attempts) == ("a", None, 0)
    assert state.b is not None
    assert not state.b.good  # it stays in its slot, so that another try moves no bytes
    assert state.failure is not None
    assert (state.failure.sha256, state.failure.request) == ("2" * 64, "r-2")
    assert state.failure.reason == "it did not start"


def test_an_earlier_good_release_that_fails_its_new_trial_is_good_no_more() -> None:
    two = live("2", live("1"))
    assert two.a is not None
    assert two.a.good
    failed = slots.roll_back(slots.begin_trial(two, "back to 1"), "x")
    assert failed.a is not None
    assert not failed.a.good
    with pytest.raises(ValueError, match="no good release"):
        slots.give_up_active(failed, "it crashed")


def test_a_release_that_was_rolled_back_is_remembered_until_it_is_live() -> None:
    failed = slots.roll_back(on_trial("2", live("1")), "x")
    second = live("3", failed)
    assert second.failure is None  # nothing to report: another release is live
    known = second.failure_of("2" * 64)
    assert known is not None
    assert known.reason == "x"
    assert live("2", second).failure_of("2" * 64) is None


def test_so_many_failures_are_remembered() -> None:
    state = live("0")
    for number in range(slots.MAX_FAILURES + 1):
        release = msgspec.structs.replace(record("1"), sha256=f"{number:064x}")
        state = slots.roll_back(slots.begin_trial(slots.stage(state, release), "r"), "x")
    assert len(state.failures) == slots.MAX_FAILURES
    assert state.failure_of(f"{0:064x}") is None
    assert state.failure_of(f"{1:064x}") is not None


def test_a_live_release_is_given_up_for_a_good_one_only() -> None:
    two = live("2", live("1"))
    back = slots.give_up_active(two, "it crashed")
    assert back.active == "a"
    assert back.a is not None
    assert two.b is not None
    assert back.a.commit > two.b.commit  # a device that loses its state takes the last commit
    assert back.b is not None
    assert not back.b.good
    assert back.failure is not None
    assert (back.failure.sha256, back.failure.phase) == ("2" * 64, "rolled_back")
    with pytest.raises(ValueError, match="no good release"):
        slots.give_up_active(back, "it crashed too")


def test_a_postponed_release_waits_in_the_idle_slot() -> None:
    state = slots.postpone(on_trial("2", live("1")), "no camera")
    assert (state.active, state.trial, state.attempts) == ("a", None, 0)
    assert state.postponed is not None
    assert (state.postponed.count, state.failures) == (1, ())
    again = slots.postpone(slots.begin_trial(state, "r"), "no camera")
    assert again.postponed is not None
    assert again.postponed.count == 2
    assert slots.confirm(slots.begin_trial(state, "r")).postponed is None
    assert slots.clear(state).postponed is None


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
def test_events_in_the_wrong_state_are_programming_errors(
    act: Callable[[SlotState], SlotState],
) -> None:
    with pytest.raises(ValueError, match=r"try|trial"):
        act(live("1"))


@given(
    st.lists(st.sampled_from(["new", "confirm", "fail", "postpone", "crash", "stop"]), max_size=40)
)
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
        elif event == "postpone":
            state = slots.postpone(state, "x")
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
    loaded = store.load()
    generation = before.generation
    assert msgspec.structs.replace(loaded, recovery="", generation=generation) == before
    assert store.load() == loaded  # also after a restart, until the next release is live
    assert path.name in loaded.recovery
    (unreadable,) = tmp_path.glob(f"{path.name}.unreadable-*")
    assert unreadable.read_bytes() == damage
    store.close()


def test_endless_last_output_does_not_cost_the_state(tmp_path: Path) -> None:
    store = SlotStore(tmp_path)
    state = on_trial("2", live("1"))
    for _ in range(2):  # both copies
        saved = store.save(slots.roll_back(state, "é" * 1_000_000))
        state = on_trial("2", saved)
    assert store.load() == saved
    store.close()


def test_a_disk_that_takes_nothing_is_one_sentence(tmp_path: Path) -> None:
    store = SlotStore(tmp_path)
    (tmp_path / "slots.1").mkdir()  # root may write everywhere, but not over a folder
    with pytest.raises(StateError, match="cannot write the state of the slots"):
        store.save(live("1"))
    store.close()


def test_two_agents_on_one_state_directory_are_refused(tmp_path: Path) -> None:
    store = SlotStore(tmp_path)
    code = (
        "import sys; from pathlib import Path; from device.update.slot_store import SlotStore\n"
        "SlotStore(Path(sys.argv[1]))"
    )
    second = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert "another agent already uses state_dir" in second.stderr
    store.close()
    SlotStore(tmp_path).close()  # the file that stays behind blocks nobody


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot use state_dir"):
        SlotStore(tmp_path / "file" / "state")


# -- a state that is lost


def sealed(body: dict[str, Any]) -> bytes:
    blob = json.dumps(body).encode()
    return b"%08x\n" % zlib.crc32(blob) + blob


def content(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(path.read_bytes().split(b"\n", 1)[1])
    return body


def wrong_types(path: Path) -> bytes:
    return sealed(content(path) | {"format": 9, "active": 1})


def contradiction(path: Path) -> bytes:
    return sealed(content(path) | {"trial": "b", "active": "b"})


@pytest.mark.parametrize(
    "damage",
    [
        lambda _path: b"",
        lambda _path: b"\0" * 300,
        lambda path: path.read_bytes()[:-5],
        lambda _path: sealed({})[:9] + b"{",
        lambda _path: sealed({"a": {"sha256": 1}}),
        lambda _path: b"0" * 1_000_000,
        wrong_types,
        contradiction,
        None,  # no file at all
    ],
)
def test_a_state_that_cannot_be_read_costs_no_slot(
    tmp_path: Path, damage: Callable[[Path], bytes] | None
) -> None:
    store = populated(tmp_path / "state", tmp_path)
    before = store.load()
    for number in (0, 1):
        path = tmp_path / "state" / f"slots.{number}"
        path.unlink() if damage is None else path.write_bytes(damage(path))
    state = store.load()
    store.clean()
    assert state.active == before.active == "b"
    assert (state.a, state.b) == (before.a, before.b)
    assert state.generation >= before.b.commit if before.b else False
    for slot in slots.SLOTS:
        store.verify(slot)
    assert "The slots were read instead: slot a: good 1, live since 2026" in state.recovery
    assert len(list((tmp_path / "state").glob("slots.?.unreadable-*"))) == (damage is not None) * 2
    assert store.load() == state  # it is on the disk again
    assert slots.confirm(slots.begin_trial(state, "r")).recovery == ""
    store.close()


def test_a_state_of_a_newer_format_is_read_and_its_keys_are_kept(tmp_path: Path) -> None:
    store = populated(tmp_path / "state", tmp_path)
    before = store.load()
    for number in (0, 1):
        path = tmp_path / "state" / f"slots.{number}"
        body = content(path)
        body |= {"format": 7, "owner": {"name": "x"}}
        for slot in ("a", "b"):
            body[slot] = body[slot] and body[slot] | {"signed_by": ["k"]}
        path.write_bytes(sealed(body))
    state = store.load()
    assert (state.active, state.format, state.recovery) == ("b", 7, "")
    assert state.b is not None
    assert before.b is not None
    assert state.b.sha256 == before.b.sha256
    saved = store.save(slots.refuse(state, failure_of("f")))
    written = content(tmp_path / "state" / f"slots.{saved.generation % 2}")
    assert (written["format"], written["owner"]) == (7, {"name": "x"})
    assert written["b"]["signed_by"] == ["k"]
    assert store.load() == saved
    store.close()


def failure_of(name: str) -> SlotFailure:
    return SlotFailure(sha256=name * 64, request="r", phase="refused", reason="x")


def test_the_older_copy_gives_way_to_what_the_slots_know_better(tmp_path: Path) -> None:
    store = populated(tmp_path / "state", tmp_path)
    before = store.load()
    newest = tmp_path / "state" / f"slots.{before.generation % 2}"
    newest.write_bytes(b"")  # that of the commit; the older one says that b is on trial
    state = store.load()
    assert (state.active, state.trial) == ("b", None)
    assert "The other copy of the state is used" in state.recovery
    # And a slot that was overwritten is not what an older copy says.
    second = {"a": SlotSeal(record=record("9"))}
    assert slots.agreeing(state, second).a is None  # type: ignore[arg-type]
    assert slots.agreeing(slots.lose_active(state), {}).active == "a"
    store.close()


def test_a_trial_whose_files_are_damaged_is_no_failure_of_the_release(tmp_path: Path) -> None:
    store = populated(tmp_path / "state", tmp_path)
    state = store.load()
    store.populate("a", make_bundle(tmp_path / "3", version="3"), record("3"))
    state = store.save(slots.begin_trial(slots.stage(state, record("3")), "r"))
    os.truncate(store.slot_folder("a") / "model.engine", 100)
    booted, saved = boot_state(store)
    assert saved
    assert (booted.active, booted.trial, booted.a, booted.failures) == ("b", None, None, ())
    store.close()


@contextmanager
def failing_reads(number: int, *names: str, times: int = 1000) -> Iterator[None]:
    """Let the disk refuse to open the files of these names, so many times."""
    remaining = iter(range(times))
    honest = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).name in names and next(remaining, None) is not None:
            raise OSError(number, os.strerror(number))
        return honest(path, *arguments, **options)

    with mock.patch("os.open", refuse):
        yield


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM, errno.EMFILE, errno.EACCES])
def test_a_slot_that_the_disk_does_not_give_is_kept(tmp_path: Path, number: int) -> None:
    store = populated(tmp_path / "state", tmp_path)
    state = store.load()
    assert state.active == "b"
    with failing_reads(number, "model.engine"):
        assert boot_state(store) == (state, True)
        assert os.strerror(number) in store.unread["b"]
        for copy in (0, 1):
            (tmp_path / "state" / f"slots.{copy}").write_bytes(b"")
        recovered = store.load()  # by the seals alone
        assert (recovered.active, recovered.a, recovered.b) == ("b", state.a, state.b)
    assert boot_state(store) == (recovered, True)
    assert set(store.unread) == {"a"}
    store.verify("a")
    assert not store.unread
    store.close()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EISDIR])
def test_a_slot_whose_files_are_gone_is_damaged(tmp_path: Path, number: int) -> None:
    store = populated(tmp_path / "state", tmp_path)
    engine = store.slot_folder("b") / "model.engine"
    engine.unlink()
    if number == errno.EISDIR:
        engine.mkdir()
    booted, _saved = boot_state(store)
    assert (booted.active, booted.b) == ("a", None)
    assert not store.unread
    store.close()


def test_a_trial_that_the_disk_does_not_give_waits(tmp_path: Path) -> None:
    store = populated(tmp_path / "state", tmp_path)
    store.populate("a", make_bundle(tmp_path / "3", version="3"), record("3"))
    store.save(slots.begin_trial(slots.stage(store.load(), record("3")), "r-3"))
    with failing_reads(errno.EIO, "bundle.json", times=1):
        booted, saved = boot_state(store)
    assert saved
    assert (booted.active, booted.trial, booted.a) == ("b", None, record("3"))
    assert booted.postponed is not None
    assert "Input/output error" in booted.postponed.reason
    store.close()


def test_a_state_that_the_disk_does_not_give_for_a_moment_is_read_again(tmp_path: Path) -> None:
    store = populated(tmp_path / "state", tmp_path)
    state = store.load()
    with failing_reads(errno.EIO, "slots.0", "slots.1", times=slot_store.READ_TRIES - 1):
        assert store.load() == state
    assert not list((tmp_path / "state").glob("*.unreadable-*"))
    store.close()


def test_a_trial_that_cannot_be_counted_waits(tmp_path: Path) -> None:
    store = populated(tmp_path / "state", tmp_path)
    state = store.load()
    store.populate("a", make_bundle(tmp_path / "3", version="3"), record("3"))
    state = store.save(slots.begin_trial(slots.stage(state, record("3")), "r"))
    older = tmp_path / "state" / f"slots.{(state.generation + 1) % 2}"
    older.unlink()
    older.mkdir()  # root may write everywhere, but not over a folder
    (older / "x").write_text("")
    with mock.patch.object(slot_store, "set_aside", return_value=None):
        booted, saved = boot_state(store)
    assert not saved
    assert (booted.active, booted.trial, booted.failures) == ("b", None, ())
    assert booted.postponed is not None
    assert "cannot write the state of the slots" in booted.postponed.reason
    store.close()


STATES, MARKS = "slots.?", "slots/*/live-*"
SEALS, SEAL_A, SEAL_B = "slots/*/seal.json", "slots/a/seal.json", "slots/b/seal.json"


@pytest.mark.parametrize(
    ("lost", "newest"),
    [
        ((SEALS,), "a"),
        ((SEALS,), "b"),  # the clock of the board was wrong
        ((SEAL_A,), "a"),
        ((SEAL_B,), "a"),
        ((MARKS,), "b"),
        ((MARKS, SEAL_A), "b"),
        ((MARKS, SEALS), "a"),  # nothing but the times is left
    ],
)
@pytest.mark.parametrize("kind", ["gone", "torn"])
def test_without_states_and_seals_the_release_that_was_live_runs(
    tmp_path: Path, lost: tuple[str, ...], newest: str, kind: str
) -> None:
    """b is live; a had a good release, and has one on trial now."""
    store = populated(tmp_path / "state", tmp_path)
    path, third = bundle_of(tmp_path, "3")
    state = store.save(slots.clear(store.load()))
    store.populate("a", path, third)
    store.save(slots.begin_trial(slots.stage(state, third), "r-3"))
    for slot in slots.SLOTS:
        os.utime(store.slot_folder(slot) / "bundle.json", (1e9 + (slot == newest),) * 2)
    for pattern in (STATES, *lost):
        for file in filter(Path.is_file, (tmp_path / "state").glob(pattern)):
            file.unlink() if kind == "gone" or pattern == MARKS else os.truncate(file, 9)
    after = store.load()
    assert after.active == "b"
    assert after.a is not None
    assert not after.a.good
    store.close()


def test_a_release_that_was_given_up_has_no_mark(tmp_path: Path) -> None:
    store = populated(tmp_path / "state", tmp_path)
    store.save(slots.give_up_active(store.load(), "it crashed"))
    for pattern in (STATES, SEALS):
        for file in (tmp_path / "state").glob(pattern):
            file.unlink()
    state = store.load()
    assert (state.active, state.a and state.a.good, state.b and state.b.good) == ("a", True, False)
    assert "slot a: good 1, without a seal, marked as live" in state.recovery
    store.close()


def test_a_damaged_slot_is_not_taken_for_the_best_one(tmp_path: Path) -> None:
    store = populated(tmp_path / "state", tmp_path)
    os.truncate(store.slot_folder("b") / "model.engine", 100)
    for number in (0, 1):
        (tmp_path / "state" / f"slots.{number}").write_bytes(b"")
    state = store.load()
    assert (state.active, state.b) == ("a", None)
    assert "slot b: no whole release" in state.recovery
    assert store.slot_folder("b").exists()
    store.close()


def test_slots_without_seals_are_read_by_their_bundles(tmp_path: Path) -> None:
    """As an agent left them that did not seal them."""
    store = populated(tmp_path / "state", tmp_path)
    for slot in slots.SLOTS:
        for file in (
            store.slot_folder(slot) / slot_store.SEAL,
            *store.slot_folder(slot).glob("live-*"),
        ):
            file.unlink()
    os.utime(store.slot_folder("b") / "bundle.json", (1, 1))  # the other one may be a trial's
    for number in (0, 1):
        (tmp_path / "state" / f"slots.{number}").write_bytes(b"")
    state = store.load()
    assert state.active == "b"
    assert state.b is not None
    whole = (tmp_path / "2" / "good-2.bundle").read_bytes()
    assert (state.b.sha256, state.b.bytes) == (hashlib.sha256(whole).hexdigest(), len(whole))
    assert not state.b.good
    store.close()


@pytest.mark.parametrize(
    ("goods", "commits", "active"),
    [
        ((True, True), (3, 7), "b"),
        ((True, True), (8, 7), "a"),
        ((True, False), (3, 7), "a"),  # b was given up, or never confirmed
        ((False, False), (0, 0), None),  # nothing has passed a trial: nothing runs unasked
    ],
)
def test_the_good_release_that_was_committed_last_runs(
    goods: tuple[bool, bool], commits: tuple[int, int], active: str | None
) -> None:
    seals = {
        slot: SlotSeal(record=msgspec.structs.replace(record("1"), good=good, commit=commit))
        for slot, good, commit in zip(slots.SLOTS, goods, commits, strict=True)
    }
    state = slots.recovered(seals, {}, "why")
    assert (state.active, state.recovery) == (active, "why")
    assert state.generation == max(commits)


def test_a_rolled_back_release_is_known_without_the_state(tmp_path: Path) -> None:
    store = populated(tmp_path / "state", tmp_path)
    given_up = store.save(slots.give_up_active(store.load(), "it crashed", "t"))
    for number in (0, 1):
        (tmp_path / "state" / f"slots.{number}").write_bytes(b"")
    state = store.load()
    assert state.active == given_up.active == "a"
    assert given_up.b is not None
    known = state.failure_of(given_up.b.sha256)
    assert known is not None
    assert (known.phase, known.reason) == ("rolled_back", "it crashed")
    store.close()


def test_unreadable_states_do_not_fill_the_disk(tmp_path: Path) -> None:
    store = populated(tmp_path / "state", tmp_path)
    for _ in range(state_folder.MAX_ASIDE + 3):
        newest = store.load().generation % 2
        (tmp_path / "state" / f"slots.{newest}").write_bytes(b"x")
        store.save(store.load())
    unreadable = list((tmp_path / "state").glob("slots.?.unreadable-*"))
    assert len(unreadable) == state_folder.MAX_ASIDE
    store.close()


def test_the_name_of_the_state_folder_is_on_the_disk(tmp_path: Path) -> None:
    root = tmp_path / "new" / "state"
    with recorded(tmp_path) as recording:
        SlotStore(root).close()
    synced = [one.node for one in recording.operations if isinstance(one, Sync)]
    links = {one.name: one for one in recording.operations if isinstance(one, Link)}
    for name in ("new", "state", "slots", "download"):
        assert links[name].folder in synced


def test_a_full_disk_has_room_for_the_state_while_it_is_reserved(tmp_path: Path) -> None:
    mount = ("mount", "-t", "tmpfs", "-o", "size=4m", "tandem-test", str(tmp_path))
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount")
    try:
        store = SlotStore(tmp_path)
        state = store.save(live("1"))
        store.reserve()
        with contextlib.suppress(OSError), (tmp_path / "full").open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        saved = store.save(slots.confirm(on_trial("2", state)))
        assert store.load() == saved
        with pytest.raises(StateError, match="has no room for the 1024 KiB that a trial must"):
            store.reserve()
        (tmp_path / "full").unlink()
        store.reserve()
        store.close()
    finally:
        subprocess.run(("umount", "--lazy", str(tmp_path)), check=True)


def test_a_half_written_slot_is_not_verified(tmp_path: Path) -> None:
    store = SlotStore(tmp_path / "state")
    store.populate("a", make_bundle(tmp_path / "in"))
    engine = store.slot_folder("a") / "model.engine"
    os.truncate(engine, 1000)
    with pytest.raises(BundleError):
        store.verify("a")
    store.close()
