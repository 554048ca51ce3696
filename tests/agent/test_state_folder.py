"""The state folder, each of whose files may be anything: a named pipe, a folder, noise, or away."""

import contextlib
import os
import random
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import pytest
from slot_fixtures import populated

from device.agent.command_journal import CommandJournal
from device.agent.outbox import Outbox
from device.errors import TrustError
from device.protocol.cloud_events import CloudEvent
from device.trust.journal import Counter, Journal
from device.update.boot import boot_state
from device.update.bundle import hash_folder
from device.update.slot_store import SlotStore
from device.update.state_folder import ASIDE

HANG_S = 20.0
EVENT = CloudEvent(id="1", source="s", type="t", time="now", data=b"1")  # type: ignore[arg-type]


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "in it").write_text("x")


def _socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as one:
        here = os.open(path.parent, os.O_RDONLY)
        one.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def _link_to(target: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        path.symlink_to(path if target == "itself" else target)

    return damage


def _write(content: Callable[[int], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(content(path.stat().st_size))

    return damage


def _sparse(path: Path) -> None:
    os.truncate(path, 1 << 34)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(8):
        if data:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: os.truncate(path, 0),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped bits": _flip,
    "noise": _write(lambda _size: os.urandom(3000)),
    "zeros": _write(bytes),
    "no text": _write(lambda _size: b'{"id": "\xff", "versions": {"\xff": 1}}'),
    "nested": _write(lambda _size: b'{"id": ' + b"[" * 60_000),
    "sparse and huge": _sparse,
    "no rights": lambda path: path.chmod(0),
    "named pipe": _fifo,
    "folder": _folder,
    "socket": _socket,
    "link to itself": _link_to("itself"),
    "link to nothing": _link_to("nowhere"),
    "link to a device": _link_to("/dev/zero"),
    "link outside": _link_to("/etc/passwd"),
}


@contextmanager
def no_hang() -> Iterator[None]:
    """Raise where the code waits for something that never comes."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"it hung for {HANG_S:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    whole_test = signal.setitimer(signal.ITIMER_REAL, HANG_S)  # pytest-timeout's, if it has one
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *whole_test)


def use(root: Path, folder: Path) -> None:
    """Leave a state folder as a board has it after two releases, events and commands."""
    store = populated(root, folder)
    store.reserve()
    (store.downloads / f"{'0' * 64}.part").write_bytes(b"x" * 5000)
    (store.downloads / f"{'0' * 64}.index").write_bytes(b"x" * 64)
    store.close()
    outbox = Outbox(root / "outbox.db")
    outbox.add("update", EVENT, final=True)
    outbox.close()
    for end in ("-journal", "-wal", "-shm"):
        (root / f"outbox.db{end}").write_bytes(os.urandom(512))
    CommandJournal(root).note(1, "restart", "c1")
    Journal(root / "trust").note(counter=Counter(3, "p", "k"))


def open_all(root: Path) -> str:
    """Open all that an agent opens at its boot; return the hash of what runs, "" if nothing."""
    store = SlotStore(root)
    try:
        state, _saved = boot_state(store)
        outbox = Outbox(root / "outbox.db")
        outbox.add("update", msgspec.structs.replace(EVENT, id="2"), final=True)
        assert outbox.waiting(9)
        outbox.close()
        CommandJournal(root).note(5, "restart", "c5")
        with contextlib.suppress(TrustError):  # it may not go on without it, and says so
            Journal(root / "trust")
        if state.active is None:
            return ""
        store.reserve()
        store.save(state)
        return hash_folder(store.slot_folder(state.active))[1]
    finally:
        store.close()


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are many folders, and none is to outlive a power cut."""
    monkeypatch.setattr("os.fsync", lambda _handle: None)


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("used")
    use(folder / "state", folder)
    return folder / "state"


def files_of(root: Path) -> list[str]:
    return sorted(str(one.relative_to(root)) for one in root.rglob("*") if one.is_file())


def test_the_files_of_a_used_folder_are_these(used: Path) -> None:
    expected = {"agent.lock", "slots.0", "slots.1", "reserve", "outbox.db", "commands.json"}
    expected |= {
        "outbox.db-journal",
        "outbox.db-wal",
        "outbox.db-shm",
        "trust/journal.json",
        "slots/a/seal.json",
        "slots/b/seal.json",
    }
    assert expected <= set(files_of(used))


EACH = 3  # a quick test damages one of so many files, in each way others; the slow ones the rest


@pytest.mark.parametrize(
    ("kind", "turn"),
    [
        pytest.param(
            kind,
            turn,
            id=kind if turn == 0 else f"{kind}-{turn}",
            marks=[pytest.mark.slow] * (turn > 0),
        )
        for kind in DAMAGES
        for turn in range(EACH)
    ],
)
def test_no_file_of_the_state_folder_holds_up_or_ends_the_agent(
    used: Path, tmp_path: Path, kind: str, turn: int
) -> None:
    random.seed(kind)
    first = (list(DAMAGES).index(kind) + turn) % EACH
    for number, name in enumerate(files_of(used)[first::EACH]):
        root = tmp_path / str(number)
        shutil.copytree(used, root)
        releases = {hash_folder(root / "slots" / slot)[1] for slot in "ab"}
        DAMAGES[kind](root / name)
        with no_hang():
            try:
                assert open_all(root) in releases
                if number % 4 == 0:  # and once more, as the first one left it
                    assert open_all(root) in releases
            except Exception as error:
                raise AssertionError(f"{name}: {kind}: {error!r}") from error
        shutil.rmtree(root)


@pytest.mark.parametrize("name", ["slots", "slots/a", "slots/b", "download", "trust"])
@pytest.mark.parametrize("kind", ["named pipe", "file", "link to itself", "socket"])
def test_no_folder_of_the_state_folder_ends_the_agent(
    used: Path, tmp_path: Path, name: str, kind: str
) -> None:
    root = tmp_path / "state"
    shutil.copytree(used, root)
    shutil.rmtree(root / name)
    (root / name).write_text("x")
    if kind != "file":
        DAMAGES[kind](root / name)
    with no_hang():
        runs = open_all(root)
        assert bool(runs) == (name != "slots")
        assert list((root / name).parent.glob(f"{Path(name).name}{ASIDE}*"))


def test_a_folder_on_another_disk_stays_there(used: Path, tmp_path: Path) -> None:
    root = tmp_path / "state"
    shutil.copytree(used, root)
    (root / "slots").rename(tmp_path / "elsewhere")
    (root / "slots").symlink_to(tmp_path / "elsewhere")
    (root / "lost+found").mkdir()
    root.chmod(0o755)
    assert open_all(root) == hash_folder(tmp_path / "elsewhere" / "b")[1]
    assert root.stat().st_mode & 0o777 == 0o700


def test_what_was_put_aside_is_said(used: Path, tmp_path: Path) -> None:
    root = tmp_path / "state"
    shutil.copytree(used, root)
    DAMAGES["named pipe"](root / "commands.json")
    store = SlotStore(root)
    (problem,) = store.odd
    assert problem.startswith(
        "commands.json is a named pipe, which has no place there, and is kept"
    )
    store.close()
    again = SlotStore(root)
    assert again.odd == ()
    again.close()


def test_the_state_folder_is_for_its_user_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mask = os.umask(0o022)
    try:
        use(tmp_path / "state", tmp_path)
        made_here = [f"download/{'0' * 64}.{end}" for end in ("index", "part")]
        made_here += [f"outbox.db-{end}" for end in ("journal", "shm", "wal")]
        assert set(_open_to_others(tmp_path / "state")) <= set(made_here)
        for path in [tmp_path / "state", *(tmp_path / "state").rglob("*")]:
            path.chmod(0o755)
        SlotStore(tmp_path / "state").close()
    finally:
        os.umask(mask)
    assert _open_to_others(tmp_path / "state") == []
    assert "were open to other users" in caplog.text


def test_what_is_not_the_agents_is_left_alone(tmp_path: Path) -> None:
    for place in ("", "photos"):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "mine.sh").write_text("#!/bin/sh")
        (tmp_path / place).chmod(0o755)
        (tmp_path / place / "mine.sh").chmod(0o755)
    os.mkfifo(tmp_path / "pipe", 0o644)
    (tmp_path / "slots").mkdir(0o755)
    SlotStore(tmp_path).close()
    mine = [".", "mine.sh", "photos", "photos/mine.sh", "pipe"]
    assert _open_to_others(tmp_path) == mine


def _open_to_others(root: Path) -> list[str]:
    names = [root, *sorted(root.rglob("*"))]
    return [str(one.relative_to(root)) for one in names if one.lstat().st_mode & 0o077]
