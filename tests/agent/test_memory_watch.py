"""Pipelines are held to their memory limit by what they have in memory."""

import mmap
import os
import queue
import subprocess
import sys
from pathlib import Path

import pytest
from board_fixtures import Board, colour_bundle
from video_fixtures import rtsp_server

from device.agent.pipeline_process import PipelineExited, PipelineProcess
from device.start import memory_watch
from device.start.child import guarded
from device.start.memory_watch import default_limit_bytes, group_limits, used_bytes

PATIENCE_S = 60.0
MIB = 2**20
LIMIT = 120 * MIB
ALLOCATE = "held = bytearray(b'x') * (400 << 20); import time; time.sleep(600)"
IN_A_CHILD = (
    "import subprocess, sys; "
    f"subprocess.Popen([sys.executable, '-c', {ALLOCATE!r}], "
    "start_new_session=True, env={}).wait()"
)
# CUDA reserves hundreds of GB of addresses and uses few of them.
RESERVE = (
    "import mmap; m = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)"
    '; m[0] = 1; print(\'{"kind":"result","seq":1,"latency_ms":0}\', flush=True)'
    "; import time; time.sleep(1.5)"
)


def run(code: str, tmp_path: Path) -> str:
    """Run code as a pipeline with a limit and return why it ended."""
    events: queue.Queue[object] = queue.Queue()
    child = PipelineProcess(events.put, 0.2, "", LIMIT)
    child.start((sys.executable, "-c", code), {})
    while not isinstance(event := events.get(timeout=PATIENCE_S), PipelineExited):
        pass
    child.stop()
    return event.reason


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(ALLOCATE, id="itself"),
        pytest.param(IN_A_CHILD, id="what it started"),
    ],
)
def test_pipeline_over_its_limit_is_ended_with_the_reason(tmp_path: Path, code: str) -> None:
    reason = run(code, tmp_path)
    assert "MiB of memory and may hold 120 MiB (memory_mb in agent.toml)" in reason


@pytest.mark.slow
def test_reserved_addresses_are_not_memory(tmp_path: Path) -> None:
    assert "by itself" in run(RESERVE, tmp_path)


def test_pages_of_mapped_files_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    path.write_bytes(os.urandom(MIB) * 64)
    before = used_bytes([os.getpid()])
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert len({mapped[i] for i in range(0, 64 * MIB, 4096)}) > 1  # each page is in memory
        assert used_bytes([os.getpid()]) - before < 8 * MIB


def test_memory_of_a_process_that_ended_is_none() -> None:
    process = subprocess.Popen(("true",))
    process.wait()
    assert used_bytes([process.pid]) == 0


def test_board_that_declares_nothing_keeps_a_quarter_for_the_rest() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    groups = Path("/proc/self/cgroup").read_text()
    limits = group_limits(groups, Path("/sys/fs/cgroup"))
    assert default_limit_bytes() == pytest.approx(0.75 * min([total, *limits]), rel=0.01)


def test_a_board_without_control_groups_has_a_limit_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_watch, "_CGROUPS", tmp_path)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert default_limit_bytes() == pytest.approx(0.75 * total, rel=0.01)


@pytest.mark.parametrize(
    ("groups", "limits"),
    [
        ("0::/system.slice/tandem.service\n", [2000, 9000]),
        ("4:memory:/service\n1:cpu,cpuacct:/x\n0::/\n", [3000]),
        ("9:name=systemd:/\n", []),
        ("0::/gone\n", []),
    ],
    ids=["version 2", "version 1", "no memory", "gone"],
)
def test_limits_of_control_groups_count_with_those_above(
    tmp_path: Path, groups: str, limits: list[int]
) -> None:
    for path, text in {
        "memory.txt": "",
        "system.slice/memory.max": "9000",
        "system.slice/tandem.service/memory.max": "2000",
        "memory/service/memory.limit_in_bytes": "3000",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert group_limits(groups, tmp_path) == limits


def test_kernel_takes_a_pipeline_before_the_agent() -> None:
    done = subprocess.run(
        guarded(("cat", "/proc/self/oom_score_adj")), capture_output=True, text=True, check=True
    )
    agent_score = int(Path("/proc/self/oom_score_adj").read_text())
    assert int(done.stdout) == 500 >= agent_score


@pytest.mark.slow
def test_release_that_takes_too_much_memory_fails_its_trial(tmp_path: Path) -> None:
    with rtsp_server() as camera:
        board = Board(tmp_path, camera.url, "memory_mb = 24")  # Python and NumPy take more
        try:
            result = board.deploy(colour_bundle(tmp_path / "release"))
        finally:
            board.close()
    assert result.phase == "rolled_back"
    assert "may hold 24 MiB (memory_mb in agent.toml)" in result.reason
