"""The slots: the rules of the state machine, and a disk that is cut off at every step."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Literal, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqtt_fixtures import make_bundle

from device.errors import BundleError, StateError
from device.update import bundle, slot_store, slots
from device.update.bundle import BundleInfo, extract_bundle
from device.update.slot_store import SlotStore
from device.update.slots import SlotRecord, SlotState


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
def test_events_in_the_wrong_state_are_programming_errors(
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
    with pytest.raises(StateError, match="cannot use state_dir"):
        SlotStore(tmp_path / "file" / "state")


class _PowerCut(BaseException):
    """The board loses power; nothing in the program may handle it."""


def _update(store: SlotStore, path: Path, name: str) -> None:
    """What the agent does with a bundle that was fetched, up to the confirmed trial."""
    state = store.save(slots.clear(store.load()))
    info = store.populate(state.idle, path)
    staged = msgspec.structs.replace(record("0"), name=info.name, sha256=name * 64)
    state = store.save(slots.stage(state, staged))
    state = store.save(slots.begin_trial(state, "r"))
    store.save(slots.confirm(state))


class _Power:
    """A double of the power switch and of a disk that forgets what was not synced.

    Every call that changes the disk is a step. From the cut on nothing happens any more, as the
    board is dark: clean-up code in the program does not run either.
    """

    CALLS = ("fsync", "replace", "rename", "unlink", "rmdir")

    def __init__(self, root: Path, step: int, *, after: bool) -> None:
        self._step, self._after, self._count = step, after, 0
        self._synced = {path.stat().st_ino for path in root.rglob("*")}
        self._renamed: list[tuple[Path, Path, bytes | None]] = []  # old name, new name, replaced
        self._root = root

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for name in self.CALLS:
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: Any, **options: Any) -> object:
            now, self._count = self._count, self._count + 1
            if now > self._step or (now == self._step and not self._after):
                raise _PowerCut
            before = self._before(name, *arguments[:2], **options)
            result = original(*arguments, **options)
            if before is not None:
                self._renamed.append(before)
            if now == self._step:
                raise _PowerCut
            return result

        return call

    def _before(
        self, name: str, first: Any, second: Any = None, dir_fd: int | None = None
    ) -> tuple[Path, Path, bytes | None] | None:
        if name == "fsync":
            self._synced.add(os.fstat(first).st_ino)
            synced = Path(os.readlink(f"/proc/self/fd/{first}"))
            self._renamed = [row for row in self._renamed if row[1].parent != synced]
        elif name == "unlink":  # its number may come back as that of another file
            self._synced.discard(os.stat(first, dir_fd=dir_fd).st_ino)
        elif name in ("replace", "rename"):
            old, new = Path(first), Path(second)
            if not new.is_file():
                return old, new, None
            self._synced.discard(new.stat().st_ino)
            return old, new, new.read_bytes()
        return None

    def lose_names(self) -> None:
        """Undo the renames that no sync of their folder made last."""
        for old, new, replaced in reversed(self._renamed):
            new.rename(old)
            if replaced is not None:
                new.write_bytes(replaced)
                self._synced.add(new.stat().st_ino)

    def lose_data(self) -> None:
        """Empty the files that were not synced."""
        for path in self._root.rglob("*"):
            if path.is_file() and path.stat().st_ino not in self._synced:
                os.truncate(path, 0)


Loss = Literal["nothing", "data", "names", "data and names"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("loss", get_args(Loss))
def test_a_power_cut_at_any_step_leaves_a_verified_slot_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Loss, *, after: bool
) -> None:
    assert _cut_everywhere(tmp_path, monkeypatch, loss, after=after) > 20


def test_the_checker_notices_a_state_that_is_not_cleared_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "clear", lambda state: state)
    with pytest.raises(BundleError):
        _cut_everywhere(tmp_path, monkeypatch, "nothing", after=True)


def test_the_checker_notices_a_trial_that_is_confirmed_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SlotStore.populate

    def too_early(store: SlotStore, slot: slots.Slot, path: Path) -> BundleInfo:
        state = store.load()
        store.save(slots.confirm(slots.begin_trial(slots.stage(state, record("3")), "r")))
        return original(store, slot, path)

    monkeypatch.setattr(SlotStore, "populate", too_early)
    with pytest.raises((BundleError, AssertionError)):
        _cut_everywhere(tmp_path, monkeypatch, "nothing", after=True)


def _write_unsynced(path: Path, parts: Iterable[bytes]) -> None:
    path.write_bytes(b"".join(parts))


@contextmanager
def _replace_unsynced(path: Path) -> Iterator[BinaryIO]:
    with path.with_suffix(".new").open("wb") as file:
        yield file
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize(
    ("module", "name", "mutant", "loss"),
    [
        (bundle, "write_synced", _write_unsynced, "data"),
        (slot_store, "replacing", _replace_unsynced, "data"),
        (slot_store, "sync_folder", lambda _folder: None, "names"),
    ],
)
def test_the_checker_notices_a_sync_that_is_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
    mutant: Callable[..., object],
    loss: Loss,
) -> None:
    monkeypatch.setattr(module, name, mutant)
    with pytest.raises((BundleError, AssertionError)):
        _cut_everywhere(tmp_path, monkeypatch, loss, after=True)


def _cut_everywhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, loss: Loss, *, after: bool
) -> int:
    """Update with a power cut at every step in turn and check each; returns the steps."""
    bundles = [make_bundle(folder / v, version=v, engine_bytes=5000) for v in ("1", "2", "3")]
    ready = SlotStore(folder / "ready")
    _prepare(ready, bundles)
    ready.close()
    for step in itertools.count():
        root = folder / f"cut-{step}"
        shutil.copytree(folder / "ready", root)
        store = SlotStore(root)
        power = _Power(root, step, after=after)
        with monkeypatch.context() as patch:
            power.watch(patch)
            try:
                _update(store, bundles[2], "3")
                finished = True
            except _PowerCut:
                finished = False
        store.close()
        if "names" in loss:
            power.lose_names()
        if "data" in loss:
            power.lose_data()
        _check_boots(root, bundles[2])
        assert not list(root.glob(".*.tmp")), "a torn write was left behind"
        shutil.rmtree(root)
        if finished:
            return step
    raise AssertionError("itertools.count ended")


def _prepare(store: SlotStore, bundles: list[Path]) -> None:
    """Two releases in the slots, the second active, written without the store's own order."""
    for slot, path in zip(slots.SLOTS, bundles, strict=False):
        extract_bundle(path, store.slot_folder(slot))
    good = [msgspec.structs.replace(record(name), good=True) for name in ("1", "2")]
    store.save(SlotState(active="b", a=good[0], b=good[1]))


def _check_boots(root: Path, newest: Path) -> None:
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
        _update(store, newest, "3")
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
