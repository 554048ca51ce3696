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
from board_fixtures import PATIENCE_S, Board, colour_bundle, command_line, start_kept
from mqtt_fixtures import AgentBox
from video_fixtures import RtspServer, rtsp_server, wait_for

from device.start.keeper import end_keepers, keeper_command, mark_of
from device.start.process_tree import descendants

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
    assert len(before) == 4  # with the keeper
    os.kill(board.pipeline_pid(), signal.SIGKILL)
    wait_for(lambda: not before & set(board.processes()), PATIENCE_S, "they have ended")
    camera.thaw()
    board.wait_status("running")


@pytest.mark.slow
def test_videos_that_were_cut_off_by_a_kill_can_be_played(board: Board) -> None:
    """Encoders are let finish: after a kill, and at the agent's end."""
    board.wait_status("running")
    wait_for(lambda: read_bytes(board.processes("seen")) > FRAMES_BYTES, PATIENCE_S, "a video")
    first = set(board.processes())
    os.kill(board.pipeline_pid(), signal.SIGKILL)
    wait_for(lambda: first.isdisjoint(board.processes()), PATIENCE_S, "the encoder has finished")
    board.wait_status("running")
    wait_for(lambda: read_bytes(board.processes("seen")) > FRAMES_BYTES, PATIENCE_S, "a video")
    board.box.terminate()
    wait_for(lambda: not board.processes(), PATIENCE_S, "the second encoder has finished")
    videos = sorted(board.box.state_dir.glob("data/*/seen*.mp4"))
    assert len(videos) >= 2  # one for each start, none of which replaced another one
    frames = [cv2.VideoCapture(str(path)).get(cv2.CAP_PROP_FRAME_COUNT) for path in videos]
    assert min(frames) >= 5
    board.box.start()
    board.wait_status("running")


def test_leftovers_of_an_earlier_agent_are_ended_at_the_start(tmp_path: Path) -> None:
    """Known by the mark of their keeper."""
    (tmp_path / "other").mkdir()
    box = AgentBox(tmp_path, 1)
    box.state_dir.mkdir()
    leftover = start_kept(mark_of(box.state_dir))
    of_another_agent = start_kept(mark_of(tmp_path / "other"))
    of_nobody = subprocess.Popen(("sleep", "600"))
    stopped = start_kept(mark_of(box.state_dir))
    stopped.send_signal(signal.SIGSTOP)
    try:
        box.start()
        assert leftover.wait(PATIENCE_S) == -signal.SIGKILL
        assert stopped.wait(PATIENCE_S) == -signal.SIGKILL
        wait_for(lambda: "ended 2 pipelines" in box.log(), PATIENCE_S, "the log says so")
        assert of_another_agent.poll() is None
        assert of_nobody.poll() is None
    finally:
        box.close()
        for process in (leftover, of_another_agent, of_nobody, stopped):
            process.kill()
            process.wait()


# Starts a process that leaves its session, its parent and its environment, as a daemon does.
LOST = (
    "import os, sys, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork():\n"
    "        os._exit(0)\n"
    "    code = 'import os, signal, sys, time; '\n"
    "    code += '[signal.signal(n, signal.SIG_IGN) for n in (1, 15)]; '\n"
    "    code += 'open(sys.argv[1], \"w\").write(str(os.getpid())); time.sleep(600)'\n"
    "    os.execve(sys.executable, [sys.executable, '-c', code, {file!r}], {{}})\n"
    "os.wait()\n"
    "while not os.path.exists({file!r}) or not open({file!r}).read():\n"
    "    time.sleep(0.01)\n"
)
ENDS = {
    "by itself": lambda keeper: None,
    "asked to": lambda keeper: keeper.send_signal(signal.SIGTERM),
    "killed": lambda keeper: os.kill(descendants(keeper.pid)[0].pid, signal.SIGKILL),
    "of memory": lambda keeper: keeper.send_signal(signal.SIGUSR1),
    "by the next agent": lambda keeper: end_keepers("mark-of-a-test"),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_lost_session_parent_and_environment_ends_with_its_pipeline(
    tmp_path: Path, end: str
) -> None:
    file = str(tmp_path / "pid")
    code = LOST.format(file=file) + ("" if end == "by itself" else "time.sleep(600)\n")
    process = start_kept("mark-of-a-test", f"exec({code!r})")
    try:
        wait_for(lambda: read_number(file) > 0, PATIENCE_S, "the lost process runs")
        lost = read_number(file)
        if end != "by itself":
            assert lost in [row.pid for row in descendants(process.pid)]
        ENDS[end](process)
        status = process.wait(PATIENCE_S)
        assert status == {"by itself": 0, "asked to": -signal.SIGTERM}.get(end, -signal.SIGKILL)
        assert not Path(f"/proc/{lost}").exists()
    finally:
        process.kill()
        process.wait()


def test_what_is_kept_ends_with_the_process_that_started_its_keeper(tmp_path: Path) -> None:
    file = str(tmp_path / "pid")
    code = LOST.format(file=file) + "time.sleep(600)\n"
    parent = (
        "import subprocess, sys, time\n"
        "from device.start.keeper import keeper_command\n"
        f"command = keeper_command((sys.executable, '-c', {code!r}), 'm')\n"
        "subprocess.Popen(command, start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", parent], cwd=Path(__file__).parents[2])
    wait_for(lambda: read_number(file) > 0, PATIENCE_S, "the lost process runs")
    lost = read_number(file)
    kept_pids = [row.pid for row in descendants(agent.pid)]
    assert lost in kept_pids
    agent.kill()
    agent.wait()
    have_ended = lambda: not any(Path(f"/proc/{pid}").exists() for pid in kept_pids)  # noqa: E731
    wait_for(have_ended, PATIENCE_S, "nothing is left")


def test_an_encoder_that_is_about_to_end_is_let_do_so(tmp_path: Path) -> None:
    file = tmp_path / "video"
    late = f"import time; time.sleep(0.4); open({str(file)!r}, 'w').write('whole')"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {late!r}])"
    process = start_kept("", code)
    assert process.wait(PATIENCE_S) == 0
    assert file.read_text() == "whole"


def test_a_command_that_cannot_be_started_is_said() -> None:
    done = subprocess.run(
        keeper_command(("/no/such",), ""), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        127, "cannot start /no/such: No such file or directory\n"
    )  # fmt: skip


def read_number(path: str) -> int:
    try:
        return int(Path(path).read_text() or 0)
    except OSError:
        return 0


def test_marks_tell_folders_of_one_path_apart(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    first = mark_of(folder)
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    assert mark_of(folder) != first


def test_child_of_a_parent_that_ended_before_it_began_does_not_run(tmp_path: Path) -> None:
    """Between the start of a process and its request to the kernel the parent may end."""
    code = (
        "import os, subprocess, sys\n"
        "from device.start.child import guarded\n"
        f"command = guarded(('touch', '{tmp_path}/ran'))\n"
        "subprocess.Popen(['sh', '-c', 'sleep 0.3; exec \"$@\"', 'sh', *command])\n"
    )
    root = Path(__file__).parents[2]
    # Returns when the last holder of the pipe has ended, the child included.
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, capture_output=True)
    assert not (tmp_path / "ran").exists()
