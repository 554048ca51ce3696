"""Power cuts: every file that the agent writes is whole in every state that a cut can leave.

The runs are recorded from the agent's own code (`crash_states`); what is promised at each moment is
noted between its steps. Mutants of that code show that the checker can fail.
"""

import hashlib
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import pytest
from crash_fixtures import Clock, Pipeline
from crash_states import CrashState, Recording, record, states, write_tree
from mqtt_fixtures import PROFILE, make_bundle

from device import files
from device.agent.config import AgentConfig, BrokerTable
from device.agent.shadow_process import ShadowEnded, ShadowLimits
from device.agent.updater import Updater
from device.errors import TandemError
from device.protocol import messages
from device.protocol.documents import (
    DOCUMENT_FORMAT,
    BlobSpec,
    Desired,
    InstallPolicy,
    ReleaseSpec,
)
from device.runtime.cuda.facts import GpuFacts
from device.runtime.timing_cache import add_timings, read_timings
from device.trust.exchange import TRUSTED
from device.update import slot_store, slots
from device.update.bundle import hash_folder
from device.update.part_file import Fetch
from device.update.slot_store import SlotStore
from device.update.slots import SLOTS
from device.update.update_table import UpdateTable

CHUNK_BYTES = 4096


@dataclass
class Shadow:
    """A double of the shadow process: it compares nothing, and agrees as the test says."""

    running: bool = False
    started: Callable[[], None] = lambda: None
    number: int = 0

    def start(self, folder: Path, limits: ShadowLimits) -> None:
        self.running = True
        self.started()

    def stop(self) -> None:
        self.running = False

    def is_current(self, run: int) -> bool:
        return run == self.number

    def ended(self, run: int) -> bool:
        self.running = False
        return True


class CrashingBoard:
    """The agent's updater on a state directory; without processes and network."""

    def __init__(self, root: Path) -> None:
        config = AgentConfig(
            device="dev1",
            profile=PROFILE,
            state_dir=str(root),
            dev=True,
            broker=BrokerTable(host="127.0.0.1"),
            update=UpdateTable(confirm_after_s=1.0, trial_timeout_s=100.0, max_crashes=1),
        )
        self.store = SlotStore(root)
        self.pipeline = Pipeline()
        self.shadow = Shadow()
        self.updater = Updater(
            config,
            self.store,
            self.pipeline,
            lambda: None,
            shadow=self.shadow,  # type: ignore[arg-type]
        )
        self.updater.boot()

    def fetch(
        self,
        bundle: Path,
        *,
        retry: bool = False,
        policy: InstallPolicy | None = None,
        sideloaded: bool = False,
    ) -> str:
        """Take a bundle up to its trial, or to its shadow; return its hash.

        `sideloaded`: it lies in the inbox.
        """
        data = bundle.read_bytes()
        chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        index = b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
        blob = BlobSpec(
            sha256=hashlib.sha256(data).hexdigest(),
            bytes=len(data),
            chunk_bytes=CHUNK_BYTES,
            index_sha256=hashlib.sha256(index).hexdigest(),
        )
        release = ReleaseSpec(name="n", version="1", profile=PROFILE, blob=blob)
        request = os.urandom(4).hex()
        desired = Desired(
            format=DOCUMENT_FORMAT, request=request, release=release, retry=retry,
            policy=policy or InstallPolicy(),
        )  # fmt: skip
        self.desired = desired
        self.updater.on_desired(desired, TRUSTED)
        self.updater.downloads.take(blob.sha256, "index", index, 0.0)
        for number, chunk in enumerate(() if sideloaded else chunks):
            self.updater.downloads.take(blob.sha256, str(number), chunk, 0.0)
        self.updater.advance(Clock.now_s)
        return blob.sha256

    def run(self, state: str, for_s: float = 0.0) -> None:
        """Let the pipeline be in a state, with frames if it runs, and time pass."""
        self.pipeline.state = state
        self.pipeline.frames += state == "running"
        until_s = Clock.now_s + for_s
        self.updater.advance(Clock.now_s)
        while Clock.now_s < until_s:  # it looks at least once a second
            Clock.now_s = min(until_s, Clock.now_s + 1.0)
            self.updater.advance(Clock.now_s)

    @property
    def active(self) -> str | None:
        record = self.updater.state.record(self.updater.state.active)
        return None if record is None else record.sha256

    def close(self) -> None:
        self.store.close()


@dataclass(frozen=True)
class Promise:
    """Which releases may run after a cut, and which ones are known to be bad."""

    active: frozenset[str | None]
    failed: frozenset[str] = frozenset()
    attempts: int = 0  # to run the release in the idle slot in shadow: those that had begun


@dataclass
class Story:
    """A run of a board, with what it promises at each moment."""

    board: CrashingBoard
    recording: Recording
    chance: random.Random
    bundles: Iterator[Path]
    failed: set[str] = field(default_factory=set)

    def promise(self, *active: str | None, attempts: int = 0) -> None:
        self.recording.mark(Promise(frozenset(active), frozenset(self.failed), attempts))

    def new_release(self) -> None:
        before = self.board.active
        sha256 = self.board.fetch(next(self.bundles))
        self.promise(before, sha256)
        self.board.run("running", 1.0)
        assert self.board.updater.update.phase == "live"
        self.promise(sha256)

    def sideloaded_release(self) -> None:
        """One that somebody brought: its file is the download, too, and goes when it is live."""
        before, bundle = self.board.active, next(self.bundles)
        inbox = self.board.store.root / "inbox"
        files.make_folder(inbox)
        sha256 = hashlib.sha256(bundle.read_bytes()).hexdigest()
        brought = inbox / f"{sha256}.bundle"
        if not brought.exists():
            files.write_synced(brought, [bundle.read_bytes()])
        files.sync_folder(inbox)
        self.promise(before, sha256)
        assert self.board.fetch(bundle, sideloaded=True) == sha256
        self.board.run("running", 1.0)
        assert self.board.active == sha256
        self.promise(sha256)
        os.unlink(brought)

    def bad_release(self) -> None:
        before = self.board.active
        sha256 = self.board.fetch(next(self.bundles))
        self.board.updater.ask("crashed", "it died")
        assert self.board.updater.update.phase == "rolled_back"
        self.failed.add(sha256)
        self.promise(before)

    def crash_loop(self) -> None:
        before = self.board.active
        state = self.board.updater.state
        second = state.record(state.idle)
        back_to = second.sha256 if second is not None and second.good else before
        self.promise(before, back_to)
        self.board.updater.ask("crashed", "it died")
        if back_to != before:
            assert before is not None
            self.failed.add(before)
        assert self.board.active == back_to
        self.promise(back_to)

    def postponed_release(self) -> None:
        before = self.board.active
        sha256 = self.board.fetch(next(self.bundles))
        self.board.run("degraded", 100.0)
        assert self.board.updater.update.phase == "postponed"
        self.board.run("running")
        assert self.board.updater.update.phase == "trial"
        self.promise(before, sha256)
        self.board.run("running", 1.0)
        assert self.board.active == sha256
        self.promise(sha256)

    def shadowed_release(self) -> None:
        """A release that agrees is tried; nothing but the one before runs until then."""
        before, board = self.board.active, self.board
        board.shadow.started = lambda: self.promise(before, attempts=1)
        sha256 = board.fetch(next(self.bundles), policy=InstallPolicy(shadow_s=1.0))
        assert board.shadow.running
        self.promise(before, sha256, attempts=0)
        result = messages.Shadow(frames=99, agreement=1.0, counted=99, done=True)
        board.updater.on_shadow(ShadowEnded(0, result))
        assert board.updater.update.phase == "trial"
        self.promise(before, sha256)
        board.run("running", 1.0)
        assert board.active == sha256
        self.promise(sha256)

    def killed_shadow(self) -> None:
        """An agent that dies in mid-shadow each time gives the release up."""
        before = self.board.active
        bundle, policy = next(self.bundles), InstallPolicy(shadow_s=1.0)
        self.board.shadow.started = lambda: self.promise(before, attempts=1)
        self.board.fetch(bundle, policy=policy)
        desired = self.board.desired
        for attempt in (2, 3):
            self.board.close()  # nothing else is put in order
            self.board = CrashingBoard(self.board.store.root)
            self.board.shadow.started = lambda number=attempt: self.promise(before, attempts=number)
            self.board.updater.on_desired(desired, TRUSTED)
        assert not self.board.shadow.running
        assert self.board.updater.update.phase == "refused"
        self.promise(before)

    def restart(self) -> None:
        self.board.close()
        self.board = CrashingBoard(self.board.store.root)


EVENTS = (
    Story.new_release,
    Story.sideloaded_release,
    Story.bad_release,
    Story.crash_loop,
    Story.postponed_release,
    Story.shadowed_release,
    Story.killed_shadow,
    Story.restart,
)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return [make_bundle(folder / str(n), version=str(n), engine_bytes=500) for n in range(12)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder for the states: in memory where there is room, as there are many."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_store, "RESERVE_BYTES", CHUNK_BYTES)


def tell(root: Path, chance: random.Random, bundles: list[Path], events: int) -> Recording:
    """Record a run: a first release before the recording, then so many events."""
    with mock.patch("time.monotonic", Clock.read):
        shuffled = itertools.cycle(chance.sample(bundles, len(bundles)))
        first = CrashingBoard(root)
        first.fetch(next(shuffled))
        first.run("running", 1.0)
        active = first.active
        first.close()
        with record(root) as recording:
            story = Story(CrashingBoard(root), recording, chance, shuffled)
            story.promise(active)
            Story.new_release(story)
            Story.sideloaded_release(story)
            for _ in range(events):
                chance.choice(EVENTS)(story)
            story.board.close()
    return recording


def check_board(state: CrashState, root: Path) -> None:
    """A whole release runs that was promised, no bad one is forgotten, an update works."""
    promise: Promise = state.claim
    if promise is None:
        return
    write_tree(state.tree, root)
    _boots(root, promise)
    # The same disk, and its state is gone as well: the slots know themselves.
    shutil.rmtree(root)
    lost = {path: content for path, content in state.tree.items() if path[:6] != "slots."}
    write_tree(lost, root)
    _boots(root, promise, trial=False)


def _boots(root: Path, promise: Promise, *, trial: bool = True) -> None:
    board = CrashingBoard(root)
    try:
        assert trial or board.updater.state.trial is None
        if board.updater.state.trial is not None:
            assert board.pipeline.folder is not None
            hash_folder(board.pipeline.folder)
            board.updater.ask("crashed", "x")
        assert board.active in promise.active
        assert board.pipeline.folder is not None
        assert hash_folder(board.pipeline.folder)[1] == board.active
        state = board.updater.state
        for slot in SLOTS:  # what the state says of the slots is true
            release = state.record(slot)
            if release is not None:
                assert hash_folder(board.store.slot_folder(slot))[1] == release.sha256
                assert not release.good or release.sha256 not in promise.failed - promise.active
        if trial and promise.attempts:
            waiting = state.record(state.idle)
            assert waiting is not None
            assert waiting.shadow_attempts >= promise.attempts
        if trial:
            assert promise.failed <= {one.sha256 for one in state.failures}
        torn = [path for path in root.rglob(".*.tmp") if path.parent.name != "download"]
        assert not torn  # the next download removes those of the last
    finally:
        board.close()


def check_all(
    recording: Recording,
    check: Callable[[CrashState, Path], None],
    disk: Path,
    chance: random.Random,
    most_subsets: int = 64,
    *,
    in_order: bool = True,
) -> tuple[int, int]:
    """Check each state, equal ones once; return how many there were, and how many differ."""
    checked: set[Any] = set()
    count = 0
    with (
        mock.patch("os.fsync"),
        mock.patch("time.monotonic", Clock.read),
        mock.patch("logging.Logger._log"),
    ):
        for state in states(recording, chance, most_subsets, in_order=in_order):
            count += 1
            key = state.key, state.claim
            if key in checked:
                continue
            checked.add(key)
            try:
                check(state, disk / "crashed")
            except (AssertionError, OSError, TandemError, ValueError) as error:
                raise AssertionError(
                    f"cut after operation {state.cut}, lost {state.lost}, torn {state.torn}: "
                    f"{error!r}"
                ) from error
            finally:
                shutil.rmtree(disk / "crashed", ignore_errors=True)
    return count, len(checked)


def test_a_board_survives_a_power_cut_at_any_step(
    tmp_path: Path, disk: Path, bundles: list[Path]
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    recording = tell(tmp_path / "state", chance, bundles, events=2)
    try:
        count, _different = check_all(recording, check_board, disk, chance, most_subsets=4)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    assert count > 200  # the shortest stories have about 250


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_power_cuts(tmp_path: Path, disk: Path, bundles: list[Path]) -> None:
    count = different = 0
    for run in itertools.count():
        seed = random.randrange(2**32)
        chance = random.Random(seed)
        recording = tell(tmp_path / f"state-{run}", chance, bundles, events=4)
        try:
            one = check_all(recording, check_board, disk, chance, most_subsets=4096)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        count, different = count + one[0], different + one[1]
        print(f"seed {seed}: {count} states, {different} different", flush=True)
        if count >= 1_000_000:
            return


# -- mutants: what the checker must not let pass


def _sync_no_file(real: Callable[[int], None]) -> Callable[[int], None]:
    def fsync(handle: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{handle}")).is_dir():
            real(handle)

    return fsync


def _sync_no_folder(real: Callable[[int], None]) -> Callable[[int], None]:
    def fsync(handle: int) -> None:
        if not Path(os.readlink(f"/proc/self/fd/{handle}")).is_dir():
            real(handle)

    return fsync


@contextmanager
def _written_in_place(path: Path, _mode: int = 0o666) -> Iterator[BinaryIO]:
    with path.open("wb") as file:
        yield file
        os.fsync(file.fileno())
    files.sync_folder(path.parent)


@contextmanager
def mutant(name: str) -> Iterator[None]:
    """Break the code that writes files. Enter it within a recording."""
    if name == "in place":
        with (
            mock.patch.object(slot_store, "replacing", _written_in_place),
            mock.patch.object(files, "replacing", _written_in_place),
            # Two copies in turn survive even that.
            mock.patch.object(SlotStore, "_copy", lambda store, _number: store.root / "slots.0"),
        ):
            yield
        return
    if name == "not cleared":
        with mock.patch.object(slots, "clear", lambda state: state):
            yield
        return
    wrap = {"no fsync": _sync_no_file, "no fsync of folders": _sync_no_folder}[name]
    with mock.patch("os.fsync", wrap(os.fsync)):
        yield


MUTANTS = ("no fsync", "no fsync of folders", "in place")


@pytest.mark.parametrize("name", [*MUTANTS, "not cleared"])
def test_the_checker_notices_a_board_that(
    tmp_path: Path, disk: Path, bundles: list[Path], name: str
) -> None:
    chance = random.Random(1)
    with mock.patch("time.monotonic", Clock.read):
        first = CrashingBoard(tmp_path / "state")
        for bundle in bundles[:2]:
            first.fetch(bundle)
            first.run("running", 1.0)
        active = first.active
        first.close()
        with record(tmp_path / "state") as recording, mutant(name):
            story = Story(CrashingBoard(tmp_path / "state"), recording, chance, iter(bundles[2:]))
            story.promise(active)
            Story.new_release(story)
            story.board.close()
    with pytest.raises(AssertionError, match="cut after operation"):
        check_all(recording, check_board, disk, chance, most_subsets=4, in_order=False)


# -- files that are replaced


def _no_mutant() -> Any:
    return mock.patch("os.fsync", os.fsync)


def replacements(root: Path, write: Callable[[Path, int], None], mutated: str = "") -> Recording:
    """Record a file that is written again and again; the claim is what it holds at the least."""
    path = root / "file"
    with record(root) as recording, mutant(mutated) if mutated else _no_mutant():
        for number in range(4):
            recording.mark((number - 1, number))
            write(path, number)
            recording.mark((number, number))
    return recording


def _write_bytes(path: Path, number: int) -> None:
    with files.replacing(path) as file:
        file.write(b"%d" % number * 100)


def _check_bytes(state: CrashState, root: Path) -> None:
    write_tree(state.tree, root)
    earliest, latest = state.claim or (-1, 0)
    path = root / "file"
    allowed = [b"%d" % number * 100 for number in range(max(0, earliest), latest + 1)]
    assert (not path.exists() and earliest < 0) or path.read_bytes() in allowed


def _write_timings(path: Path, number: int) -> None:
    with mock.patch("device.runtime.timing_cache.replacing", files.replacing):
        add_timings(path, GPU, {f"kernel-{number}": 1.5})


def _check_timings(state: CrashState, root: Path) -> None:
    write_tree(state.tree, root)
    earliest, latest = state.claim or (-1, 0)
    known = len(read_timings(root / "file").times_us(GPU)) - 1
    assert earliest <= known <= latest


GPU = GpuFacts(
    name="g",
    sm=87,
    sm_count=8,
    sm_mhz=1,
    memory_mhz=1,
    l2_bytes=1,
    cuda="1",
    driver="",
    power_mode="",
)
FILES = {"any file": (_write_bytes, _check_bytes), "timings": (_write_timings, _check_timings)}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_replaced_is_the_old_or_the_new_one(
    tmp_path: Path, disk: Path, kind: str
) -> None:
    write, check = FILES[kind]
    (tmp_path / "state").mkdir()
    recording = replacements(tmp_path / "state", write)
    count, _different = check_all(recording, check, disk, random.Random(1))
    assert count > 50


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_checker_notices_a_file_that_is_written(
    tmp_path: Path, disk: Path, kind: str, name: str
) -> None:
    write, check = FILES[kind]
    (tmp_path / "state").mkdir()
    recording = replacements(tmp_path / "state", write, name)
    with pytest.raises(AssertionError, match="cut after operation"):
        check_all(recording, check, disk, random.Random(1))


# -- downloads


BLOB = random.Random(5).randbytes(7 * CHUNK_BYTES + 100)
CHUNKS = [BLOB[i : i + CHUNK_BYTES] for i in range(0, len(BLOB), CHUNK_BYTES)]
INDEX = b"".join(hashlib.sha256(chunk).digest() for chunk in CHUNKS)
SPEC = BlobSpec(
    sha256=hashlib.sha256(BLOB).hexdigest(),
    bytes=len(BLOB),
    chunk_bytes=CHUNK_BYTES,
    index_sha256=hashlib.sha256(INDEX).hexdigest(),
)


def _fetch(folder: Path, recording: Recording, chance: random.Random) -> None:
    fetch = Fetch(folder, SPEC, 64)
    fetch.on_part("index", INDEX, 0.0)
    numbers = chance.sample(range(len(CHUNKS)), len(CHUNKS))
    for done, number in enumerate(numbers, 1):
        fetch.on_part(str(number), CHUNKS[number], 0.0)
        recording.mark(frozenset(numbers[: done - done % 2]))  # synced with each second one
    fetch.file.finish()
    fetch.file.close()
    recording.mark(frozenset(numbers))


def _check_download(state: CrashState, root: Path) -> None:
    write_tree(state.tree, root)
    fetch = Fetch(root, SPEC, 64)
    try:
        if fetch.download.table is not None:
            present = set(fetch.file.present(fetch.download.table))
            assert state.claim is None or state.claim <= present
        else:
            assert state.claim is None
            fetch.on_part("index", INDEX, 0.0)
        while (request := fetch.download.next_request(0.0)) is not None:
            for number in request.chunks:
                fetch.on_part(str(number), CHUNKS[number], 0.0)
        fetch.file.finish()
        assert fetch.file.path.read_bytes() == BLOB
    finally:
        fetch.file.close()


def _recorded_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutated: str = ""
) -> Recording:
    monkeypatch.setattr("device.update.part_file.SYNC_BYTES", 2 * CHUNK_BYTES - 4000)
    (tmp_path / "state").mkdir()
    chance = random.Random()
    with record(tmp_path / "state") as recording, mutant(mutated) if mutated else _no_mutant():
        _fetch(tmp_path / "state", recording, chance)
    return recording


def test_the_checker_notices_a_download_that_is_not_synced(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = _recorded_download(tmp_path, monkeypatch, "no fsync")
    with pytest.raises(AssertionError, match="cut after operation"):
        check_all(recording, _check_download, disk, random.Random(1), 16)


def test_a_download_goes_on_after_a_power_cut(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = _recorded_download(tmp_path, monkeypatch)
    count, _different = check_all(recording, _check_download, disk, random.Random(1), 16)
    assert count > 100
