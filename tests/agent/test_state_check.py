"""What a board falls back on is looked at before it is needed: the other slot, and the disk."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mqtt_fixtures import WAIT_S
from slot_fixtures import bundle_of, populated

from device.agent import state_check
from device.agent.state_check import SHARE, StateCheck, paced
from device.update import slots
from device.update.slots import SlotState
from device.update.state_folder import disk_problem


def problems_of(check: StateCheck, state: SlotState) -> tuple[str, ...]:
    """Return the problems once the slots were read."""
    others = set(threading.enumerate())
    check.advance(time.monotonic(), state)
    for thread in set(threading.enumerate()) - others:
        thread.join(WAIT_S)
    check.advance(time.monotonic(), state)
    return check.problems(state)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("slot", "good", "expected"),
    [
        ("a", True, "which a rollback needs, is damaged"),
        ("a", False, "it is fetched again before it is tried"),
        ("b", True, "which runs, is damaged"),
    ],
)
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.engine", lambda path: os.truncate(path, 4000)),
        ("model.engine", lambda path: path.write_bytes(bytes(path.stat().st_size))),
        ("model.engine", lambda path: os.truncate(path, 1 << 30)),
        ("bundle.json", _fifo),
        ("labels.txt", lambda path: path.unlink()),
    ],
)
def test_a_damaged_slot_is_told(
    tmp_path: Path,
    slot: slots.Slot,
    good: bool,
    expected: str,
    file: str,
    damage: Callable[[Path], None],
) -> None:
    store = populated(tmp_path / "state", tmp_path)
    state = store.load()
    if not good:
        state = slots.stage(state, bundle_of(tmp_path, "1")[1])
    check = StateCheck(store)
    assert problems_of(check, state) == ()
    damage(store.slot_folder(slot) / file)
    assert problems_of(check, state) == ()  # not looked at again yet
    (problem,) = problems_of(StateCheck(store), state)
    assert problem.startswith(f"slot {slot} with good ")
    assert expected in problem
    store.close()


def test_damage_is_told_until_the_next_release_takes_the_slot(tmp_path: Path) -> None:
    store = populated(tmp_path / "state", tmp_path)
    state, check = store.load(), StateCheck(store)
    os.truncate(store.slot_folder("a") / "model.engine", 0)
    assert len(problems_of(check, state)) == 1
    assert check.problems(slots.clear(state)) == ()
    path, release = bundle_of(tmp_path, "3")
    store.populate("a", path, release)
    state = slots.stage(state, release)
    assert check.problems(state) == ()
    os.truncate(store.slot_folder("b") / "model.engine", 0)
    assert (
        "which runs" in problems_of(check, state)[0]
    )  # what was installed is looked at, with the other
    store.close()


def test_a_damaged_slot_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = populated(tmp_path / "state", tmp_path)
    state, check = store.load(), StateCheck(store)
    engine = store.slot_folder("a") / "model.engine"
    whole = engine.read_bytes()
    engine.write_bytes(b"x")
    monkeypatch.setattr(state_check, "AGAIN_S", 0.0)
    assert len(problems_of(check, state)) == 1
    engine.write_bytes(whole)
    deadline_s = time.monotonic() + WAIT_S
    while problems_of(check, state) and time.monotonic() < deadline_s:
        pass  # a look that began before the file was whole again
    assert problems_of(check, state) == ()
    store.close()


def test_the_slots_are_read_in_a_fraction_of_the_time() -> None:
    pause, begun_s = paced(threading.Event()), time.monotonic()
    busy_s = 0.0
    for _ in range(3):
        work_s = time.monotonic()
        while time.monotonic() - work_s < 0.01:
            pass
        busy_s += time.monotonic() - work_s
        pause()
    assert time.monotonic() - begun_s >= 0.9 * busy_s / SHARE


def test_a_check_that_waits_ends_with_the_agent(tmp_path: Path) -> None:
    store = populated(tmp_path / "state", tmp_path)
    engine = store.slot_folder("a") / "model.engine"
    engine.write_bytes(b"x")
    check = StateCheck(store)
    check.stop()
    assert problems_of(check, store.load()) == ()  # it ended before it had an answer
    store.close()


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    mount = ("mount", *options, str(folder))
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount")
    try:
        yield
    finally:
        subprocess.run(("umount", "--lazy", str(folder)), check=True)


def test_a_disk_that_takes_nothing_is_told_while_it_does(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with mounted(folder, "-t", "tmpfs", "-o", "size=24m", "tandem-test"):
        assert disk_problem(folder) == ""
        (folder / "filler").write_bytes(bytes(9 << 20))
        assert "is full, with less than 16 MiB free" in disk_problem(folder)
        (folder / "filler").unlink()
        assert disk_problem(folder) == ""
        subprocess.run(("mount", "-o", "remount,ro", str(folder)), check=True)
        assert "is read-only" in disk_problem(folder)
        subprocess.run(("mount", "-o", "remount,rw", str(folder)), check=True)
        assert disk_problem(folder) == ""
    with mounted(folder, "-t", "tmpfs", "-o", "size=24m,nr_inodes=5", "tandem-test"):
        with contextlib.suppress(OSError):
            for number in range(9):
                (folder / str(number)).touch()
        assert "takes no more files" in disk_problem(folder)
    assert "does not answer: No such file" in disk_problem(tmp_path / "gone")
