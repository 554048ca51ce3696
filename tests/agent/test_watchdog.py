"""The watchdog on a real board: pipelines that hang or die, and cameras that are away."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import cv2
import pytest
from board_fixtures import PATIENCE_S, Board, colour_bundle
from msgspec.structs import replace
from video_fixtures import (
    LABELS,
    ColourDetector,
    RtspServer,
    colour_pipeline,
    rtsp_server,
    scene,
    wait_for,
    write_video,
)

from device.agent.config import AgentConfig, BrokerTable, PipelineTable
from device.agent.pipeline_process import PIPELINE, PipelineExited, PipelineOutput
from device.agent.pipeline_runner import PipelineRunner
from device.agent.silence import NOBODY, Heard
from device.protocol.messages import (
    ChildMessage,
    Heartbeat,
    Ready,
    Result,
    Stats,
    decode_message,
)
from device.update.liveness import FRAME_GAP_S, PipelineHealth
from pipelines.runtime.batch import Model
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.sink_config import JsonlSink
from pipelines.sources.live import BACKOFF_LAST_S


@dataclass
class Scene:
    """A board that runs a release on an RTSP camera."""

    board: Board
    camera: RtspServer


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("board")
    bundle = colour_bundle(folder / "release")
    with rtsp_server() as camera:
        board = Board(folder, camera.url, "stall_s = 2.0")
        try:
            assert board.deploy(bundle).live
            yield Scene(board, camera)
        finally:
            board.close()


def test_camera_that_freezes_is_reported_and_so_is_its_return(live: Scene) -> None:
    live.board.wait_status("running")
    pid = live.board.pipeline_pid()
    live.camera.freeze()
    report = live.board.wait_status("degraded")
    live.camera.thaw()
    assert f"{live.camera.port}/cam" in report.pipeline.reason
    assert report.pipeline.since.endswith("Z")
    live.board.wait_status("running")
    assert live.board.pipeline_pid() == pid  # the pipeline was not at fault


@pytest.mark.slow
def test_camera_that_is_switched_off_is_reported_with_the_reason(live: Scene) -> None:
    live.board.wait_status("running")
    live.camera.kill()
    report = live.board.wait_status("degraded")
    since = report.pipeline.since
    while "nothing answers there" not in report.pipeline.reason:
        assert live.board.watcher.take(PATIENCE_S), report
        report = live.board.watcher.seen.reports[-1]
    assert report.pipeline.since == since
    live.camera.start()
    live.board.wait_status("running")


def test_pipeline_that_hangs_is_killed_and_started_again(live: Scene) -> None:
    live.board.wait_status("running")
    pid = live.board.pipeline_pid()
    os.kill(pid, signal.SIGSTOP)
    report = live.board.wait_status("stalled")
    assert "no sign of life for 1 s, as a signal has stopped it" in report.pipeline.reason
    live.board.wait_status("running")
    assert live.board.pipeline_pid() != pid
    assert len(live.board.processes("gst_process")) == 1
    assert report.update.phase == "live"


@pytest.mark.slow
def test_camera_that_is_absent_at_the_start_is_waited_for(live: Scene) -> None:
    live.board.wait_status("running")
    live.camera.kill()
    live.board.box.kill()
    live.board.box.start()
    report = live.board.wait_status("degraded")
    pid = live.board.pipeline_pid()
    time.sleep(2.0)  # longer than the first back-offs: a pipeline that died would be another one
    live.camera.start()
    live.board.wait_status("running")
    assert live.board.pipeline_pid() == pid, report


def test_local_camera_that_is_absent_does_not_end_the_pipeline(tmp_path: Path) -> None:
    messages: list[ChildMessage] = []
    stop = threading.Event()
    runner = threading.Thread(
        target=run_pipeline,
        args=(
            colour_pipeline("v4l2:///dev/video77"),
            Model(ColourDetector(), LABELS, ""),
            RunOptions(emit=messages.append, stop=stop, patient=True),
        ),
    )
    runner.start()
    try:
        wait_for(lambda: any_degraded(messages), PATIENCE_S, "the camera is away")
        assert runner.is_alive()
    finally:
        stop.set()
        runner.join(PATIENCE_S)
    (reason,) = {m.reason for m in messages if isinstance(m, Heartbeat) and m.reason}
    assert "camera /dev/video77 is not there" in reason
    assert BACKOFF_LAST_S <= 5.0


def any_degraded(messages: list[ChildMessage]) -> bool:
    return any(isinstance(m, Heartbeat) and m.state == "degraded" for m in list(messages))


def test_heartbeats_count_frames_and_faults(tmp_path: Path) -> None:
    for i in range(3):
        cv2.imwrite(str(tmp_path / f"{i}.png"), scene(i, 0))
    (tmp_path / "-.png").write_bytes(b"broken")  # the first by name
    messages: list[ChildMessage] = []
    run_pipeline(
        colour_pipeline(tmp_path), Model(ColourDetector(), LABELS, ""),
        RunOptions(emit=messages.append),
    )  # fmt: skip
    beats = [m for m in messages if isinstance(m, Heartbeat)]
    assert [(b.state, b.frames, b.errors) for b in beats[:2]] == [
        ("starting", 0, 0),
        ("running", 1, 1),
    ]
    assert isinstance(messages[0], Ready)
    assert messages[0].warm_up_s >= 0.0


def test_a_slow_first_inference_does_not_make_a_freeze_last_longer(tmp_path: Path) -> None:
    """The agent waits for a multiple of `warm_up_s`: initialization is no part of it."""

    class Initializing(ColourDetector):
        is_slow = True

        def infer(self, inputs):
            if self.is_slow:
                time.sleep(0.5)
            self.is_slow = False
            return super().infer(inputs)

    cv2.imwrite(str(tmp_path / "0.png"), scene(0, 0))
    messages: list[ChildMessage] = []
    run_pipeline(
        colour_pipeline(tmp_path),
        Model(Initializing(), LABELS, ""),
        RunOptions(emit=messages.append),
    )  # fmt: skip
    (ready,) = [m for m in messages if isinstance(m, Ready)]
    assert ready.warm_up_s < 0.5


@pytest.mark.parametrize(("path", "errors"), [("/dev/full", 0), ("/dev/null", 1)])
def test_a_full_disk_is_no_fault_of_a_release(
    tmp_path: Path, path: str, errors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "/dev/null":  # a disk that fails otherwise
        real = os.write

        def write(handle: int, data: bytes) -> int:
            if b'"detections"' in data:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(handle, data)

        monkeypatch.setattr(os, "write", write)
    cv2.imwrite(str(tmp_path / "0.png"), scene(0, 0))
    messages: list[ChildMessage] = []
    config = replace(colour_pipeline(tmp_path), sinks=(JsonlSink(path=path),))
    run_pipeline(
        config, Model(ColourDetector(), LABELS, ""),
        RunOptions(emit=messages.append),
    )  # fmt: skip
    beat, _end = (m for m in messages if isinstance(m, Heartbeat) and m.state == "running")
    assert (beat.frames, beat.errors) == (1, errors)


class Hangs(ColourDetector):
    """Infers a few frames, then never returns until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = threading.Event()
        self.go_on = threading.Event()
        self._left = 4

    def infer(self, feeds):  # type: ignore[no-untyped-def]
        self._left -= 1
        if self._left < 0:
            self.hangs.set()
            self.go_on.wait()
        return super().infer(feeds)


def test_loop_that_hangs_gives_no_heartbeat_though_its_figures_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.runtime.pipeline.STATS_S", 0.3)
    monkeypatch.setattr("pipelines.runtime.heartbeat.HEARTBEAT_S", 0.1)
    path = write_video(tmp_path / "v.mp4", [scene(1, 1)] * 10, fps=20.0)
    messages: list[ChildMessage] = []
    stop, session = threading.Event(), Hangs()
    runner = threading.Thread(
        target=run_pipeline,
        args=(
            colour_pipeline(path, loop=True),
            Model(session, LABELS, ""),
            RunOptions(emit=messages.append, stop=stop),
        ),
    )
    runner.start()
    try:
        wait_for(session.hangs.is_set, PATIENCE_S, "it hangs")
        beats, stats = count(messages, Heartbeat), count(messages, Stats)
        assert beats >= 2
        wait_for(lambda: count(messages, Stats) >= stats + 2, PATIENCE_S, "time for six")
        assert count(messages, Heartbeat) == beats
    finally:
        stop.set()
        session.go_on.set()
        runner.join(PATIENCE_S)


def count(messages: list[ChildMessage], kind: type[ChildMessage]) -> int:
    return sum(isinstance(message, kind) for message in list(messages))


@pytest.mark.slow
def test_slow_video_gives_heartbeats_between_its_frames(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.avi", [scene(1, 1)] * 2, fps=0.5, fourcc="MJPG")
    messages: list[ChildMessage] = []
    run_pipeline(
        colour_pipeline(path), Model(ColourDetector(), LABELS, ""),
        RunOptions(emit=messages.append),
    )  # fmt: skip
    assert count(messages, Heartbeat) >= 4  # starting, running, and in the two seconds between


# --- decisions of the agent, with a clock that is given


class FakeProcess:
    """In place of the child: when it was last alive, and whether it was killed."""

    def __init__(self) -> None:
        self.run = 1
        self.heard = Heard(0.0, beating=True, started_s=0.0)
        self.kills = 0
        self.stops = 0

    def kill(self) -> None:
        self.kills += 1

    def stop(self) -> None:
        self.stops += 1
        self.heard = NOBODY

    def activity(self) -> None:
        """Nothing is known, as where there is no /proc."""


@pytest.fixture
def runner(tmp_path: Path) -> PipelineRunner:
    config = AgentConfig(
        device="d", profile="laptop", state_dir=str(tmp_path), broker=BrokerTable(host="h"),
        pipeline=PipelineTable(stall_s=10.0, start_s=100.0),
    )  # fmt: skip
    pipeline_runner = PipelineRunner(config, "t", PIPELINE, lambda _event: None)
    pipeline_runner._process = FakeProcess()  # type: ignore[assignment]
    pipeline_runner._set("starting")
    return pipeline_runner


def look(runner: PipelineRunner, until_s: float, from_s: float = 0.0) -> int:
    """Look once a second, as the agent does; return how often the pipeline was killed."""
    for second in range(int(from_s), int(until_s) + 1):
        runner.watch(float(second))
    return runner._process.kills  # type: ignore[attr-defined,no-any-return]


def say(runner: PipelineRunner, message: ChildMessage) -> ChildMessage | None:
    return runner.on_message(PipelineOutput(1, message))


@pytest.mark.parametrize(
    ("beating", "until_s", "kills"),
    [(True, 10, 0), (True, 11, 1), (False, 100, 0), (False, 101, 1)],
)
def test_silence_up_to_the_limit_is_let_pass(
    runner: PipelineRunner, beating: bool, until_s: int, kills: int
) -> None:
    runner._process.heard = Heard(0.0, beating, 0.0)  # type: ignore[misc]
    assert look(runner, until_s) == kills
    assert (runner.health().state == "stalled") == (kills == 1)


def test_slow_inference_has_the_time_of_three(runner: PipelineRunner) -> None:
    say(runner, Ready(pipeline="p", engine_sha256="", warm_up_s=20.0))
    assert look(runner, 60) == 0
    assert look(runner, 61, 61) == 1


def test_time_in_which_the_agent_was_held_up_does_not_count(runner: PipelineRunner) -> None:
    assert look(runner, 8) == 0
    runner.watch(40.0)  # it unpacked a large release, or the machine was suspended
    assert look(runner, 50, 41) == 0
    assert look(runner, 51, 51) == 1


def test_health_follows_heartbeats(runner: PipelineRunner) -> None:
    assert say(runner, Result(seq=0, latency_ms=1.0)) is not None
    assert say(runner, beat("running", 5)) is None
    assert runner.health().state == "running"
    say(runner, beat("degraded", 5, reason="the camera is away", since_s=77.0))
    say(runner, beat("degraded", 5, reason="still away", since_s=78.0))
    health = runner.health()
    assert health == PipelineHealth("degraded", 5, 1, "still away", 77.0, health.signs)
    assert runner.report.status == "degraded"
    say(runner, beat("running", 6))
    assert runner.health().state == "running"
    assert runner.report.reason == runner.report.since == ""


@pytest.mark.parametrize("since_s", [1e300, 1e11, -1e300, -1e11])
def test_a_moment_that_cannot_be_costs_no_report(runner: PipelineRunner, since_s: float) -> None:
    message = beat("degraded", 5, reason="the camera is away", since_s=since_s)
    runner.on_message(PipelineOutput(1, message, now_s := time.monotonic()))
    assert 0.0 <= runner.health().since <= now_s
    since = datetime.fromisoformat(runner.report.since.replace("Z", "+00:00"))
    assert since <= datetime.now(timezone.utc)


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"heartbeat","frames":9007199254740992,"errors":0,"state":"running"}',
        b'{"kind":"ready","pipeline":"p","engine_sha256":"","warm_up_s":1e300}',
        b'{"kind":"ready","pipeline":"p","engine_sha256":"","warm_up_s":-1.0}',
    ],
)
def test_a_count_or_time_beyond_all_bounds_is_no_message(line: bytes) -> None:
    assert decode_message(line) is None


def test_the_load_of_a_pipeline_is_reported_while_it_runs(runner: PipelineRunner) -> None:
    say(runner, beat("running", 5, load="step 1 of 1 (one frame of 2): hot"))
    assert runner.report.status == "running"
    assert runner.report.load == "step 1 of 1 (one frame of 2): hot"
    say(runner, beat("running", 6))
    assert runner.report.load == ""
    say(runner, beat("running", 7, load="hot"))
    runner.stop("another release")
    assert runner.report.load == ""


def test_a_first_result_that_comes_too_late_does_not_hide_the_stall(runner: PipelineRunner) -> None:
    runner._process.heard = Heard(0.0, True, 0.0)  # type: ignore[misc]
    assert look(runner, 11) == 1
    say(runner, Result(seq=0, latency_ms=1.0))
    assert runner.health().state == "stalled"
    reason = runner.on_exit(PipelineExited(1, "the pipeline was killed by SIGKILL"))
    assert reason is not None
    assert "no sign of life for 10 s" in reason


def test_heartbeats_of_an_earlier_run_change_nothing(runner: PipelineRunner) -> None:
    before = runner.health()
    assert runner.on_message(PipelineOutput(0, beat("degraded", 3))) is None
    assert runner.health() == before


def test_stalled_pipeline_stays_so_until_it_starts_again(runner: PipelineRunner) -> None:
    say(runner, Result(seq=0, latency_ms=1.0))
    look(runner, 11)
    say(runner, beat("running", 9))  # it was on the way
    reason = runner.on_exit(PipelineExited(1, "the pipeline was killed by SIGKILL"))
    assert reason == "the pipeline gave no sign of life for 10 s (stall_s): it was killed"
    assert (runner.health().state, runner.health().reason) == ("stalled", reason)
    assert runner.restart_at_s is not None


def test_stalled_pipeline_that_does_not_even_die_is_given_up(runner: PipelineRunner) -> None:
    look(runner, 11)
    assert runner.restart_at_s is None
    look(runner, 16, 12)
    assert runner.restart_at_s is not None
    assert runner._process.stops == 1  # type: ignore[attr-defined]


# What the heart says of its times, then heartbeats as (state, frames), or (state, frames, taken),
# once a second; when it is killed.
RUNS = [("running", 1), ("running", 2)]
SILENT = [("running", 2)]
AWAY = [("degraded", 2)]
FRAMELESS = [
    ({}, RUNS + SILENT * 9, 2 + FRAME_GAP_S),
    ({"gap_s": 6.0}, RUNS + SILENT * 9, 8),
    ({"gap_s": 20.0}, RUNS + SILENT * 9, None),
    ({"quiet_s": 6.0}, RUNS + SILENT * 9, 8),  # its frames take long
    ({}, [("running", count) for count in range(1, 12)], None),
    ({}, [("running", count // 2) for count in range(2, 13)], None),  # a frame each two seconds
    ({}, [("starting", 0)] * 11, 1 + FRAME_GAP_S),  # it never gives any
    ({"gap_s": 6.0}, [("starting", 0)] * 11, 7),  # its camera has just been opened
    ({}, [("loading", 0)] * 11, None),
    ({}, RUNS + AWAY * 9, None),  # the source is not its fault
    ({}, RUNS + AWAY * 3 + SILENT * 6, 5 + FRAME_GAP_S),
    ({}, RUNS + (AWAY + SILENT) * 5, 8),  # absence does not count, the rest does
    ({}, [("running", 9), *[("running", 5)] * 10], 1 + FRAME_GAP_S),  # a count that falls
    # frames that are left out, or lost to errors, are dealt with, too
    ({}, [("running", 2, count) for count in range(11)], None),
    ({}, [("running", 2, 2 + count // 2) for count in range(11)], None),
    ({}, [("running", 2, min(count, 3)) for count in range(11)], 4 + FRAME_GAP_S),
]


@pytest.mark.parametrize(("says", "beats", "killed_s"), FRAMELESS)
def test_a_heart_without_frames_is_not_enough(
    runner: PipelineRunner,
    says: dict[str, float],
    beats: list[tuple[str, int] | tuple[str, int, int]],
    killed_s: float | None,
) -> None:
    kills = []
    for second, (state, frames, *taken) in enumerate(beats, 1):
        runner._process.heard = Heard(float(second), True, 0.0)  # type: ignore[misc]
        runner.watch(second - 0.01)
        message = replace(beat(state, frames), taken=sum(taken), **says)
        runner.on_message(PipelineOutput(1, message, float(second)))
        runner.watch(second + 0.01)
        kills += [second] * (runner._process.kills - len(kills))  # type: ignore[attr-defined]
    assert kills == ([] if killed_s is None else [killed_s])
    if kills:
        assert "no frame for" in str(runner.health().reason)


def test_frames_that_are_lost_to_errors_are_no_freeze(runner: PipelineRunner) -> None:
    for second in range(1, 20):
        message = replace(beat("running", 2), errors=second)
        runner.on_message(PipelineOutput(1, message, float(second)))
        runner._process.heard = Heard(float(second), True, 0.0)  # type: ignore[misc]
        runner.watch(float(second))
    assert runner._process.kills == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(("quiet_s", "until_s"), [(0.0, 11), (8.0, 11), (30.0, 31)])
def test_a_loop_that_says_so_may_be_silent_for_longer(
    runner: PipelineRunner, quiet_s: float, until_s: int
) -> None:
    say(runner, replace(beat("running", 1), quiet_s=quiet_s, gap_s=300.0))
    assert look(runner, until_s - 1) == 0
    assert look(runner, until_s, until_s) == 1


def beat(
    state: str, frames: int, reason: str = "", since_s: float = 0.0, load: str = ""
) -> Heartbeat:
    return Heartbeat(
        frames=frames,
        errors=1,
        state=state,
        reason=reason,
        since_s=since_s,  # type: ignore[arg-type]
        load=load,
    )


@pytest.mark.slow
def test_a_source_with_a_frame_each_five_seconds_is_tried_and_kept(tmp_path: Path) -> None:
    video = write_video(tmp_path / "slow.avi", [scene(1, 1)] * 3, fps=0.2, fourcc="MJPG")
    bundle = colour_bundle(tmp_path / "release", source="loop = true\n")
    board = Board(tmp_path, str(video))
    try:
        assert board.deploy(bundle).live
        pid = board.pipeline_pid()
        time.sleep(12.0)  # two frames, and four times what a pipeline that says nothing may take
        assert board.pipeline_pid() == pid
        reports = board.watcher.drain().reports
        assert {report.pipeline.status for report in reports} <= {"stopped", "starting", "running"}
    finally:
        board.close()


@dataclass
class Unharmed:
    """A board with a good release on a picture that moves."""

    board: Board
    pid: int

    def check(self, for_s: float) -> None:
        """Check that the pipeline goes on, works and is not called anything else."""
        self.board.watcher.drain()
        time.sleep(for_s)
        self.board.wait_status("running")
        assert self.board.pipeline_pid() == self.pid
        reports = self.board.watcher.seen.reports
        assert not [one for one in reports if one.pipeline.status in ("stalled", "restarting")]


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unharmed]:
    folder = tmp_path_factory.mktemp("kept")
    bundle = colour_bundle(folder / "release")
    board = Board(folder, "test://?width=64&height=64&fps=20")
    try:
        assert board.deploy(bundle).live
        yield Unharmed(board, board.pipeline_pid())
    finally:
        board.close()


@pytest.mark.slow
@pytest.mark.parametrize("for_s", [0.7, 3.0, 10.0])
def test_an_agent_that_stood_still_kills_no_good_pipeline(unharmed: Unharmed, for_s: float) -> None:
    agent = unharmed.board.box.process.pid
    os.kill(agent, signal.SIGSTOP)
    time.sleep(for_s)
    os.kill(agent, signal.SIGCONT)
    unharmed.check(4.0)


@pytest.mark.slow
def test_a_board_that_is_stopped_as_a_whole_goes_on(unharmed: Unharmed) -> None:
    pids = (unharmed.board.box.process.pid, unharmed.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5.0)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)  # the agent wakes first
    unharmed.check(4.0)


@pytest.mark.slow
def test_a_loaded_machine_kills_no_good_pipeline(unharmed: Unharmed) -> None:
    command = [sys.executable, "-c", "while True: pass"]
    spinners = [subprocess.Popen(command) for _ in range(12 * (os.cpu_count() or 1))]
    try:
        unharmed.check(20.0)
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
