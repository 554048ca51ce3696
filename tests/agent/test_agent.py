"""The agent as a process: what it says, what it survives, and what it never imports."""

import contextlib
import ctypes
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast, get_args

import msgspec
import pytest
from deploy_fixtures import deploy
from mqtt_fixtures import DEVICE, WAIT_S, AgentBox, Mosquitto, Watcher, make_bundle

from device.agent.agent import HANDLERS, IDLE_WAIT_S, Agent, Event, _Stop
from device.agent.config import load_agent_config
from device.agent.figures import Latest
from device.agent.pipeline_process import (
    MAX_RESTARTS,
    PIPELINE,
    RESTART_WINDOW_S,
    PipelineExited,
    PipelineOutput,
    PipelineProcess,
    Restarts,
    describe_exit,
)
from device.agent.pipeline_runner import PipelineRunner
from device.protocol.documents import (
    Desired,
    PipelineReport,
    Reported,
    StateDocument,
    decode,
    encode,
)
from device.protocol.messages import Result
from device.protocol.mqtt import Link, LinkSettings, LinkUp, queue_putter
from device.protocol.topics import Topics
from device.update.trial import Environment
from toolkit.fleet.transports.device_deployment import DeployProgress, DeployResult

TOPICS = Topics(DEVICE)


@pytest.fixture
def publish(broker: Mosquitto) -> Iterator[Callable[[str, bytes], None]]:
    """Publish retained, and return when the broker has it."""
    events: queue.Queue[object] = queue.Queue()
    ended = threading.Event()
    link = Link(LinkSettings("127.0.0.1", broker.port, "publisher"), queue_putter(events, ended))
    link.start()
    assert isinstance(events.get(timeout=WAIT_S), LinkUp)

    def send(topic: str, payload: bytes) -> None:
        assert link.publish(topic, payload, qos=1, retain=True, wait_s=WAIT_S)

    yield send
    ended.set()
    link.close()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """For what only a file shows: look again until it does."""
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, f"never: {what}"
        threading.Event().wait(0.02)


def test_the_agent_imports_nothing_that_can_take_it_down() -> None:
    code = (
        "import sys, device.agent.agent\n"
        "heavy = {'numpy', 'cv2', 'onnx', 'onnxruntime', 'safetensors', 'toolkit', 'rich'}\n"
        "found = heavy & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_its_state_is_online_then_lost_then_online_then_stopped(
    broker: Mosquitto, board: AgentBox
) -> None:
    with Watcher(broker.port) as watcher:
        board.start()
        watcher.wait_state("online")
        board.kill()
        watcher.wait_state("lost")
        board.start()
        watcher.wait_state("online")
        assert board.terminate() == 0
        watcher.wait_state("stopped")
        sessions = [int(state.split(b":")[-1].strip(b"}")) for state in watcher.seen.states]
        assert sessions == sorted(sessions)
        assert len(set(sessions)) == 2


def test_a_signal_that_does_not_end_the_wait_ends_the_agent(
    broker: Mosquitto, board: AgentBox
) -> None:
    """One that another thread gets, or that comes as the wait begins, wakes no main thread."""
    with Watcher(broker.port) as watcher:
        board.start()
        watcher.wait_state("online")
        assert board.process is not None
        pid = board.process.pid
        threads = {int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()}
        second = min(threads - {pid})
        assert ctypes.CDLL(None).tgkill(pid, second, signal.SIGTERM) == 0
        assert board.process.wait(WAIT_S) == 0
        board.process = None
        watcher.wait_state("stopped")


def wakes(pid: int) -> int:
    """How often the threads of a process have waited."""
    statuses = []
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            statuses.append(path.read_text())
    return sum(int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", s, re.M)[0]) for s in statuses)


def test_an_agent_without_a_release_sleeps(broker: Mosquitto, board: AgentBox) -> None:
    with Watcher(broker.port) as watcher:
        board.start()
        watcher.wait_state("online")
        assert board.process is not None
        time.sleep(IDLE_WAIT_S)  # what a start leaves to do
        before = wakes(board.process.pid)
        time.sleep(3 * IDLE_WAIT_S)
        # Three for its own state; a look at the connection each second would add 9.
        assert 0 < wakes(board.process.pid) - before <= 8


@pytest.mark.parametrize(("on_trial", "looks"), [(True, [7.0]), (False, [])])
def test_sensors_are_read_for_a_trial_alone(on_trial: bool, looks: list[float]) -> None:
    read_at_s: list[float] = []

    def latest(now_s: float) -> Latest:
        read_at_s.append(now_s)
        return Latest(latency_p95_ms=5.0, temperature_c=60.0)

    agent = SimpleNamespace(
        _figures=SimpleNamespace(latest=latest),
        _updater=SimpleNamespace(on_trial=on_trial),
        _connection=SimpleNamespace(online=True),
    )
    environment = Agent._environment(cast("Agent", agent), 7.0)
    assert read_at_s == looks
    assert environment == (Environment(True, 5.0, 60.0) if on_trial else Environment(True))


def test_a_stale_will_is_answered(
    broker: Mosquitto, board: AgentBox, publish: Callable[[str, bytes], None]
) -> None:
    with Watcher(broker.port) as watcher:
        board.start()
        watcher.wait_state("online")
        publish(TOPICS.state, encode(StateDocument(state="lost", session=1)))
        watcher.wait_state("lost")
        watcher.wait_state("online")


def test_its_report_says_what_it_is_and_warns_of_dev(broker: Mosquitto, board: AgentBox) -> None:
    with Watcher(broker.port) as watcher:
        board.start()
        report = watcher.wait_report("idle")
    assert (report.profile, report.dev, report.running) == ("test-board", True, None)
    assert "unsigned" in report.warning
    assert "unsigned" in board.log()


def test_a_desired_document_that_is_not_one_changes_nothing(
    broker: Mosquitto,
    board: AgentBox,
    publish: Callable[[str, bytes], None],
    tmp_path: Path,
) -> None:
    board.start()
    with Watcher(broker.port) as watcher:
        watcher.wait_report("idle")
        for number, payload in enumerate((b"{", b"\xff\xfe", b"[" * 100_000, b'{"format":1}')):
            watcher.seen.reports.clear()
            publish(TOPICS.desired, payload)
            (problem,) = watcher.wait_problems()
            assert "the desired document is not understood and changes nothing" in problem
            assert deploy(broker.port, make_bundle(tmp_path / "in", version=str(number))).live
            watcher.wait_report("live", problems=())


def test_a_cleared_desired_document_leaves_the_release_running(
    broker: Mosquitto, board: AgentBox, publish: Callable[[str, bytes], None], tmp_path: Path
) -> None:
    board.start()
    assert deploy(broker.port, make_bundle(tmp_path / "in")).live
    with Watcher(broker.port) as watcher:
        publish(TOPICS.desired, b"")
        publish(TOPICS.state, encode(StateDocument(state="lost", session=1)))
        watcher.wait_state("lost")
        watcher.wait_state("online")  # the agent has handled both
        assert watcher.wait_report("live").running is not None
    assert len(board.runs()) == 1


def test_killed_in_a_trial_it_tries_once_more(
    broker: Mosquitto, board: AgentBox, tmp_path: Path
) -> None:
    board.start()
    with Watcher(broker.port) as watcher:
        result = deploy_and_kill_in_trial(broker, board, tmp_path, watcher, "hangs-1", kills=1)
    assert result.phase == "live", result
    assert [name for name, _pid in board.runs()] == ["hangs-1"] * 2


def test_killed_in_both_trials_it_goes_back(
    broker: Mosquitto, board: AgentBox, tmp_path: Path
) -> None:
    board.start()
    assert deploy(broker.port, make_bundle(tmp_path / "good")).live
    with Watcher(broker.port) as watcher:
        result = deploy_and_kill_in_trial(broker, board, tmp_path, watcher, "hangs", kills=2)
    assert result.phase == "rolled_back"
    assert "died in 2 of 2 attempts" in result.reason
    wait_for(lambda: len(board.runs()) == 4, "the good release runs again")
    assert [name for name, _pid in board.runs()] == ["good", "hangs", "hangs", "good"]


def deploy_and_kill_in_trial(
    broker: Mosquitto, board: AgentBox, folder: Path, watcher: Watcher, behaviour: str, kills: int
) -> DeployResult:
    bundle = make_bundle(folder / "trial", behaviour)
    before = len(board.runs())
    killed = 0

    def on_progress(progress: DeployProgress) -> None:
        nonlocal killed
        if progress.phase == "trial" and killed < kills:
            killed += 1
            wait_for(lambda: len(board.runs()) == before + killed, "the trial has started")
            board.kill()
            board.start()

    return deploy(broker.port, bundle, on_progress=on_progress)


def test_orderly_stops_in_a_trial_are_not_counted(
    broker: Mosquitto, board: AgentBox, tmp_path: Path
) -> None:
    board.start()
    stops = 0

    def on_progress(progress: DeployProgress) -> None:
        nonlocal stops
        if progress.phase == "trial" and stops < 3:  # as kills they would roll it back
            stops += 1
            wait_for(lambda: len(board.runs()) == stops, "the trial has started")
            assert board.terminate() == 0
            board.start()

    bundle = make_bundle(tmp_path / "in", "hangs-3")
    result = deploy(broker.port, bundle, on_progress=on_progress)
    assert (result.phase, stops) == ("live", 3)


def test_a_live_pipeline_that_dies_is_started_again(
    broker: Mosquitto, board: AgentBox, tmp_path: Path
) -> None:
    board.start()
    with Watcher(broker.port) as watcher:
        assert deploy(broker.port, make_bundle(tmp_path / "in", "crashes")).live
        restarting = PipelineReport(
            status="restarting",
            reason="the pipeline ended with status 4 and said nothing on stderr",
        )
        watcher.wait_report("live", pipeline=restarting)
        wait_for(lambda: len(board.runs()) >= 3, "the pipeline is started again")
        watcher.wait_report("live")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("freezes-1", "no sign of life for 1 s, as a signal has stopped it (SIGSTOP)"),
        ("floods-1", "no sign of life for 2 s"),
        ("empty", "no frame for 3 s (its source is there)"),
        ("silent", "no output, and used no processor and no disk, for 3 s as it started"),
        ("mute-1", "the pipeline gave no frame for 3 s (its source is there)"),
    ],
)
def test_a_release_that_gave_frames_and_stops_in_its_trial_is_not_live(
    broker: Mosquitto, tmp_path: Path, behaviour: str, reason: str
) -> None:
    box = AgentBox(tmp_path, broker.port, confirm_after_s=1.5)
    box.start()
    try:
        assert deploy(broker.port, make_bundle(tmp_path / "in")).live
        result = deploy(broker.port, make_bundle(tmp_path / "in", behaviour))
        assert result.phase == "rolled_back"
        assert reason in result.reason
        wait_for(lambda: len(box.runs()) == 3, "the release before runs")
    finally:
        box.close()


@pytest.mark.slow
def test_a_release_that_loads_slowly_and_says_nothing_is_live(
    broker: Mosquitto, board: AgentBox, tmp_path: Path
) -> None:
    board.start()
    assert deploy(broker.port, make_bundle(tmp_path / "in", "loads-8")).live
    assert len(board.runs()) == 1


def test_it_runs_its_release_without_a_broker_and_says_so_in_one_line(
    broker: Mosquitto, board: AgentBox, tmp_path: Path
) -> None:
    board.start()
    assert deploy(broker.port, make_bundle(tmp_path / "in")).live
    board.terminate()
    broker.kill()
    log_before = len(board.log())
    board.start()
    wait_for(lambda: len(board.runs()) == 2, "the release runs")
    wait_for(lambda: "cannot reach the broker" in board.log()[log_before:], "the sentence")
    broker.start()
    with Watcher(broker.port) as watcher:
        report = watcher.wait_report("live", pipeline=PipelineReport(status="running"))
    assert report.running is not None
    assert report.running.slot == "a"
    assert board.log()[log_before:].count("cannot reach the broker") == 1


def take_two_releases(broker: Mosquitto, board: AgentBox, folder: Path) -> None:
    board.start()
    for version in ("1", "2"):
        assert deploy(broker.port, make_bundle(folder / version, version=version)).live
    board.kill()
    broker.kill()  # nobody desires anything any more: the board is on its own


def test_a_damaged_active_release_gives_way_to_the_one_before(
    broker: Mosquitto, board: AgentBox, tmp_path: Path
) -> None:
    take_two_releases(broker, board, tmp_path)
    os.truncate(board.state_dir / "slots" / "b" / "model.engine", 10)
    broker.start()
    with Watcher(broker.port) as watcher:
        board.start()
        report = watcher.wait_report("live", pipeline=PipelineReport(status="running"))
    assert report.running is not None
    assert (report.running.slot, report.running.version) == ("a", "1")
    assert report.update.sha256 == report.running.sha256


def test_output_of_the_pipeline_is_passed_on(
    broker: Mosquitto, board: AgentBox, tmp_path: Path
) -> None:
    with Watcher(broker.port) as watcher:
        board.start()
        assert deploy(broker.port, make_bundle(tmp_path / "in")).live
        watcher.wait_report("live", pipeline=PipelineReport(status="running"))
        until = time.monotonic() + WAIT_S
        while not any(b'"kind":"stats"' in stats for stats in watcher.seen.stats):
            assert time.monotonic() < until
            watcher.take(1.0)
        assert b'"kind":"ready"' in watcher.seen.stats[0]


# -- disks that fail


def test_a_disk_that_fills_in_a_download_costs_the_download_only(
    broker: Mosquitto, board: AgentBox, tmp_path: Path
) -> None:
    board.start()
    assert deploy(broker.port, make_bundle(tmp_path / "1")).live

    def on_progress(progress: DeployProgress) -> None:
        if progress.sent_chunks == 1:
            board.fill_disk()

    newer = make_bundle(tmp_path / "2", version="2", engine_bytes=3_000_000)
    with Watcher(broker.port) as watcher:
        refused = deploy(broker.port, newer, on_progress=on_progress)
        running = watcher.wait_report("refused").running
    assert refused.phase == "refused"
    assert "the disk failed" in refused.reason
    assert running is not None
    assert running.version == "1"
    assert len(board.runs()) == 1  # the live release was not even interrupted
    board.fill_disk(full=False)
    assert deploy(broker.port, newer).live


def test_a_disk_that_fills_in_a_trial_does_not_keep_it_from_going_back(
    broker: Mosquitto, tmp_path: Path
) -> None:
    board = AgentBox(tmp_path, broker.port, trial_timeout_s=2.0)
    board.start()
    try:
        assert deploy(broker.port, make_bundle(tmp_path / "1")).live

        def on_progress(progress: DeployProgress) -> None:
            if progress.phase == "trial":
                board.fill_disk()

        worse = make_bundle(tmp_path / "2", "hangs", version="2")
        with Watcher(broker.port) as watcher:
            result = deploy(broker.port, worse, on_progress=on_progress)
            report = watcher.wait_report("rolled_back", pipeline=PipelineReport(status="running"))
        assert result.phase == "rolled_back"
        assert report.running is not None
        assert report.running.version == "1"
        assert board.terminate() == 0
    finally:
        board.close()


def test_a_release_is_live_only_once_the_disk_has_it(broker: Mosquitto, tmp_path: Path) -> None:
    board = AgentBox(tmp_path, broker.port, confirm_after_s=1.0)
    board.start()
    try:
        assert deploy(broker.port, make_bundle(tmp_path / "1")).live
        seen: set[str] = set()

        def on_progress(progress: DeployProgress) -> None:
            if progress.phase == "trial" and "trial" not in seen:
                board.fill_disk()
            seen.add(progress.phase)

        newer = make_bundle(tmp_path / "2", version="2")
        with Watcher(broker.port) as watcher:
            thread = threading.Thread(
                target=lambda: results.append(deploy(broker.port, newer, on_progress=on_progress))
            )
            results: list[DeployResult] = []
            thread.start()
            while True:
                report = watcher.wait_report("trial")
                if "is live once the disk has recorded it" in report.update.reason:
                    break
                assert watcher.take(WAIT_S)
            assert report.running is not None
            assert report.running.version == "1"  # what starts after a power cut
            board.fill_disk(full=False)
            live = watcher.wait_report("live")
            thread.join()
        assert results[0].live
        assert live.running is not None
        assert live.running.version == "2"
        board.kill()
        board.start()
        with Watcher(broker.port) as watcher:
            again = watcher.wait_report("live", pipeline=PipelineReport(status="running"))
            assert again.running is not None
            assert again.running.version == "2"
    finally:
        board.close()


def test_a_disk_that_is_full_at_the_confirm_has_room_for_it(
    broker: Mosquitto, tmp_path: Path
) -> None:
    board = AgentBox(tmp_path, broker.port, confirm_after_s=1.0)
    board.state_dir.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=24m", "tandem-test", str(board.state_dir))
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount")
    filler = board.state_dir / "filler"

    def fill(progress: DeployProgress) -> None:
        if progress.phase == "trial" and not filler.exists():
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass

    try:
        board.start()
        assert deploy(broker.port, make_bundle(tmp_path / "1")).live
        newer = make_bundle(tmp_path / "2", version="2")
        result = deploy(broker.port, newer, on_progress=fill)
        assert result.live
        assert os.statvfs(board.state_dir).f_bavail * 4096 < 2 * 1024**2
        board.kill()
        broker.kill()  # nobody desires anything any more: the board is on its own
        broker.start()
        board.start()
        with Watcher(broker.port) as watcher:
            report = watcher.wait_report("live", pipeline=PipelineReport(status="running"))
        assert report.running is not None
        assert report.running.version == "2"
    finally:
        board.close()
        subprocess.run(("umount", "--lazy", str(board.state_dir)), check=True)


@pytest.mark.parametrize("damage", [b"", None])
def test_a_board_that_lost_its_state_runs_its_best_release_and_says_so(
    broker: Mosquitto, board: AgentBox, tmp_path: Path, damage: bytes | None
) -> None:
    take_two_releases(broker, board, tmp_path)
    for number in (0, 1):
        path = board.state_dir / f"slots.{number}"
        path.unlink() if damage is None else path.write_bytes(damage)
    broker.start()
    with Watcher(broker.port) as watcher:
        board.start()
        report = watcher.wait_report("live", pipeline=PipelineReport(status="running"))
        assert report.running is not None
        assert (report.running.slot, report.running.version) == ("b", "2")
        (problem,) = report.problems
        assert "The slots were read instead: slot a: good 1, live since" in problem
        assert sorted(path.name for path in (board.state_dir / "slots").iterdir()) == ["a", "b"]
        assert deploy(broker.port, make_bundle(tmp_path / "3", version="3")).live
        watcher.wait_report("live", problems=())


def test_an_agent_lives_on_with_pipes_and_folders_in_its_files_and_says_so(
    broker: Mosquitto, board: AgentBox, tmp_path: Path
) -> None:
    take_two_releases(broker, board, tmp_path)
    state = board.state_dir
    for name in ("agent.lock", "outbox.db", "commands.json", "slots/a/bundle.json", "reserve"):
        (state / name).unlink(missing_ok=True)
        os.mkfifo(state / name)
    for name in ("outbox.db-journal", "report_counter", "slots.0"):
        (state / name).unlink(missing_ok=True)
        (state / name).mkdir()
    for path in (state, *state.iterdir()):
        path.chmod(0o755)
    broker.start()
    with Watcher(broker.port) as watcher:
        board.start()
        watcher.wait_report("live", pipeline=PipelineReport(status="running"))
        report = wait_problems(watcher, "which a rollback needs, is damaged")
        assert report.running is not None
        assert (report.running.slot, report.running.version) == ("b", "2")
        message = " ".join(report.problems)
        assert "outbox.db is a named pipe, which has no place there, and is kept as" in message
        assert "outbox.db-journal is a folder" in message
        assert "slots.0 could not be read (it is not a regular file but a folder)" in message
        assert len(list(state.glob("*.unreadable-*"))) == 7  # the lock is of the agent before
        files = [state, *(path for path in state.iterdir() if "unreadable" not in path.name)]
        assert [path.name for path in files if path.lstat().st_mode & 0o077] == []
        assert deploy(broker.port, make_bundle(tmp_path / "3", version="3")).live
        wait_problems(watcher, "which a rollback needs", absent=True)


def wait_problems(watcher: Watcher, text: str, *, absent: bool = False) -> Reported:
    """Return the first report whose problems say this, or do not."""
    until = time.monotonic() + WAIT_S
    while not watcher.seen.reports or absent == (text in str(watcher.seen.reports[-1].problems)):
        assert time.monotonic() < until, watcher.seen.reports[-1:]
        watcher.take(1.0)
    return watcher.seen.reports[-1]


def test_a_state_directory_that_became_read_only_still_gives_the_live_release(
    broker: Mosquitto, board: AgentBox, tmp_path: Path
) -> None:
    board.start()
    assert deploy(broker.port, make_bundle(tmp_path / "in")).live
    board.kill()
    mount = ("mount", "--bind", "-o", "ro", str(board.state_dir), str(board.state_dir))
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount")
    try:
        with Watcher(broker.port) as watcher:
            board.start()
            report = watcher.wait_report("live", pipeline=PipelineReport(status="running"))
            assert report.running is not None
            refused = deploy(broker.port, make_bundle(tmp_path / "2", version="2"))
            wait_problems(watcher, f"state_dir {board.state_dir} is read-only")
        assert (refused.phase, "the disk failed" in refused.reason) == ("refused", True)
        board.close()
    finally:
        subprocess.run(("umount", "--lazy", str(board.state_dir)), check=True)


# -- the pipeline process


def test_a_log_that_takes_nothing_does_not_stop_the_pipeline() -> None:
    code = (
        "import queue, sys\n"
        "from device.agent.pipeline_process import PipelineProcess, PipelineOutput\n"
        "events = queue.Queue()\n"
        "child = PipelineProcess(events.put, grace_s=0.2)\n"
        'loud = (\'import sys; print("x" * 1000000, "\\\\n" * 99, file=sys.stderr);\'\n'
        '        \'print(\\\'{"kind":"result","seq":1,"latency_ms":0}\\\')\')\n'
        "child.start((sys.executable, '-c', loud), {})\n"
        f"assert isinstance(events.get(timeout={WAIT_S}), PipelineOutput)\n"
        f"assert 'by itself' in events.get(timeout={WAIT_S}).reason\n"
    )
    with Path("/dev/full").open("w") as full:
        subprocess.run([sys.executable, "-c", code], stderr=full, check=True, timeout=60)


def test_a_system_without_room_for_a_process_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = AgentBox(tmp_path, 1)
    runner = PipelineRunner(load_agent_config(box.config), "t", PIPELINE, lambda _event: None)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert not runner.start(tmp_path, fresh=True)
    reason = "the pipeline cannot be started: No such file or directory"
    assert runner.report == PipelineReport(status="restarting", reason=reason)
    assert runner.restart_at_s is not None
    runner.stop("the end of the test")


def test_restarts_back_off_then_wait_a_minute() -> None:
    restarts, now_s, delays = Restarts(), 100.0, []
    for _ in range(MAX_RESTARTS + 2):
        restarts = restarts.died(now_s)
        assert restarts.at_s is not None
        delays.append(restarts.at_s - now_s)
        now_s = restarts.at_s
        restarts = restarts.started()
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, RESTART_WINDOW_S, RESTART_WINDOW_S]
    assert restarts.failed
    assert not restarts.worked().failed


def test_rare_deaths_are_restarted_at_once() -> None:
    restarts = Restarts()
    for hour in range(20):
        restarts = restarts.died(hour * 3600.0)
        assert restarts.at_s == hour * 3600.0 + 0.5
        assert not restarts.failed


@pytest.mark.parametrize(
    ("status", "tail", "sentence"),
    [
        (3, ("a", "b", "c", "d"), "the pipeline ended with status 3: b | c | d"),
        (2, (), "the pipeline ended with status 2 and said nothing on stderr"),
        (0, ("INFO x",), "the pipeline ended by itself: its source has no more frames"),
        (-11, ("x",), "the pipeline was killed by SIGSEGV: x"),
    ],
)
def test_exits_are_described_in_a_sentence(
    status: int, tail: tuple[str, ...], sentence: str
) -> None:
    assert describe_exit(status, tail).startswith(sentence)


def test_stopping_ends_all_that_the_pipeline_started() -> None:
    events: queue.Queue[object] = queue.Queue()
    child = PipelineProcess(events.put, grace_s=0.2)
    code = (
        "import json, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print('\\xff{', flush=True)\n"
        "print(json.dumps({'kind': 'result', 'seq': p.pid, 'latency_ms': 0.0}), flush=True)\n"
        "signal.pause()\n"
    )
    run = child.start((sys.executable, "-c", code), {})
    event = events.get(timeout=WAIT_S)
    assert isinstance(event, PipelineOutput)
    assert isinstance(event.message, Result)
    watch = os.pidfd_open(event.message.seq)
    child.stop()
    ready, _, _ = select.select([watch], [], [], WAIT_S)
    os.close(watch)
    assert ready, "a grandchild still runs"
    ended = events.get(timeout=WAIT_S)
    assert isinstance(ended, PipelineExited)
    assert ended.run == run != child.run


def test_a_command_that_cannot_start_is_named() -> None:
    events: queue.Queue[object] = queue.Queue()
    child = PipelineProcess(events.put, grace_s=0.2)
    child.start(("/nowhere/python",), {})
    ended = events.get(timeout=WAIT_S)
    assert isinstance(ended, PipelineExited)
    assert "cannot start /nowhere/python: No such file" in ended.reason
    child.stop()


@pytest.mark.parametrize(
    ("field", "value"), [("name", "n\n"), ("version", "1\x1b[2J"), ("sha256", "0" * 64 + "\n")]
)
def test_what_would_break_a_log_or_a_file_name_is_not_taken(field: str, value: str) -> None:
    blob = {"sha256": "0" * 64, "bytes": 1, "chunk_bytes": 65536, "index_sha256": "0" * 64}
    release = {"name": "n", "version": "1", "profile": "p", "blob": blob}
    document = {"format": 1, "request": "r", "release": release}
    assert decode(msgspec.json.encode(document), Desired).release.name == "n"
    (blob if field in blob else release)[field] = value
    with pytest.raises(ValueError, match=field):
        decode(msgspec.json.encode(document), Desired)


def test_desired_documents_of_a_newer_host_are_read() -> None:
    document = {
        "format": 1,
        "request": "r",
        "signature": "of a later version",
        "release": {
            "name": "n",
            "version": "1",
            "profile": "p",
            "blob": {
                "sha256": "0" * 64,
                "bytes": 1,
                "chunk_bytes": 65536,
                "index_sha256": "0" * 64,
                "mirror": "new",
            },
        },
    }
    assert msgspec.json.decode(msgspec.json.encode(document), type=Desired).request == "r"


def test_every_event_of_the_agent_has_a_handler() -> None:
    assert set(HANDLERS) == {*get_args(Event)} - {_Stop}
