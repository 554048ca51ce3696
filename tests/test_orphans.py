"""Whatever is killed, nothing of a pipeline is left behind; and no command line has a password."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import pytest
from board_fixtures import PATIENCE_S, Board, colour_bundle, command_line, start_marked
from mqtt_fixtures import AgentBox
from video_fixtures import RtspServer, rtsp_server, wait_for

from device.agent.process_tree import end_marked, mark_of, marked

SECRET = "s3cret-of-the-camera"
FRAMES_BYTES = 20 * 320 * 180 * 3
VIDEO = '[[sinks]]\nkind = "video"\npath = "seen.mp4"'


@pytest.fixture(scope="module")
def camera() -> Iterator[RtspServer]:
    with rtsp_server(login=("viewer", SECRET)) as server:
        yield server


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory, camera: RtspServer) -> Iterator[Board]:
    folder = tmp_path_factory.mktemp("board")
    source = camera.url.replace("://", f"://viewer:{SECRET}@")
    board = Board(folder, source, "stall_s = 60.0")
    try:
        assert board.deploy(colour_bundle(folder / "release", sinks=VIDEO)).live
        yield board
    finally:
        board.close()


def running_with_a_silent_camera(board: Board, camera: RtspServer) -> None:
    """Wait until the whole tree runs, then let the camera say nothing while it stays connected."""
    camera.thaw()
    board.wait_status("running")
    wait_for(lambda: bool(board.processes("gst_process")), PATIENCE_S, "the camera's process")
    wait_for(lambda: read_bytes(board.processes("seen")) > FRAMES_BYTES, PATIENCE_S, "a video")
    camera.freeze()


def read_bytes(pids: list[int]) -> int:
    """How much processes have read."""
    try:
        return sum(int(Path(f"/proc/{pid}/io").read_text().split()[1]) for pid in pids)
    except OSError:
        return 0


def test_no_command_line_has_the_password_of_the_camera(board: Board, camera: RtspServer) -> None:
    camera.thaw()
    board.wait_status("running")
    wait_for(lambda: bool(board.processes("gst_process")), PATIENCE_S, "the camera's process")
    server = re.escape(str(camera.port))
    readers = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    telling = [entry.name for entry in readers if SECRET in command_line(int(entry.name))]
    # The server of this test has its password on its own command line.
    assert [pid for pid in telling if not re.search(server, command_line(int(pid)))] == []
    for pid in board.processes():
        assert Path(f"/proc/{pid}/environ").stat().st_mode & 0o077 == 0
    (gst,) = board.processes("gst_process")
    assert SECRET.encode() not in Path(f"/proc/{gst}/environ").read_bytes()
    assert SECRET not in board.box.log()


def test_agent_that_is_killed_leaves_nothing_behind(board: Board, camera: RtspServer) -> None:
    running_with_a_silent_camera(board, camera)
    board.box.kill()
    wait_for(lambda: not board.processes(), PATIENCE_S, "all processes of the pipeline have ended")
    camera.thaw()
    board.box.start()
    board.wait_status("running")


def test_pipeline_that_is_killed_leaves_no_process_behind(board: Board, camera: RtspServer) -> None:
    running_with_a_silent_camera(board, camera)
    before = set(board.processes())
    assert len(before) == 3
    os.kill(board.pipeline_pid(), signal.SIGKILL)
    wait_for(lambda: not before & set(board.processes()), PATIENCE_S, "they have ended")
    camera.thaw()
    board.wait_status("running")


@pytest.mark.slow
def test_videos_that_were_cut_off_by_a_kill_can_be_played(board: Board) -> None:
    """Encoders are let finish: those of the kills before have done so."""
    wait_for(lambda: read_bytes(board.processes("seen")) > FRAMES_BYTES, PATIENCE_S, "a video")
    board.box.terminate()
    wait_for(lambda: not board.processes(), PATIENCE_S, "the encoder has finished")
    videos = sorted(board.box.state_dir.glob("data/*/seen*.mp4"))
    assert len(videos) >= 3  # one for each start, none of which replaced another one
    frames = [cv2.VideoCapture(str(path)).get(cv2.CAP_PROP_FRAME_COUNT) for path in videos]
    assert min(frames) >= 5
    board.box.start()
    board.wait_status("running")


def test_leftovers_of_an_earlier_agent_are_ended_at_the_start(tmp_path: Path) -> None:
    """Known by their mark, in whatever session, and not by their name."""
    (tmp_path / "other").mkdir()
    box = AgentBox(tmp_path, 1)
    box.state_dir.mkdir()
    leftover = start_marked(mark_of(box.state_dir))
    of_another_agent = start_marked(mark_of(tmp_path / "other"))
    of_nobody = subprocess.Popen(("sleep", "600"))
    stopped = start_marked(mark_of(box.state_dir))
    stopped.send_signal(signal.SIGSTOP)
    try:
        box.start()
        assert leftover.wait(PATIENCE_S) == -signal.SIGKILL
        assert stopped.wait(PATIENCE_S) == -signal.SIGKILL
        wait_for(lambda: "ended 2 processes" in box.log(), PATIENCE_S, "the log says so")
        assert of_another_agent.poll() is None
        assert of_nobody.poll() is None
    finally:
        box.close()
        for process in (leftover, of_another_agent, of_nobody, stopped):
            process.kill()
            process.wait()


def test_a_process_that_is_about_to_end_is_let_do_so(tmp_path: Path) -> None:
    process = start_marked(mark_of(tmp_path))
    process.terminate()
    assert end_marked(mark_of(tmp_path), PATIENCE_S) == 0
    assert process.wait(PATIENCE_S) == -signal.SIGTERM


def test_marks_tell_folders_of_one_path_apart(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    first = mark_of(folder)
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    assert mark_of(folder) != first
    assert marked(first) == []


def test_child_of_a_parent_that_ended_before_it_began_does_not_run(tmp_path: Path) -> None:
    """Between the start of a process and its request to the kernel the parent may end."""
    code = (
        "import os, subprocess, sys\n"
        "from device.start.child import guarded\n"
        f"command = guarded(('touch', '{tmp_path}/ran'))\n"
        "subprocess.Popen(['sh', '-c', 'sleep 0.3; exec \"$@\"', 'sh', *command])\n"
    )
    root = Path(__file__).parents[1]
    # Returns when the last holder of the pipe has ended, the child included.
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, capture_output=True)
    assert not (tmp_path / "ran").exists()
