"""Faults of all kinds at once: schedules by seed, and short and long runs of `scripts/chaos.py`."""

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

from device.agent.pipeline_process import PIPELINE
from device.protocol.documents import Desired, PipelineReport, Reported, Running, Update, decode
from device.protocol.mqtt_client import MAX_PACKET_BYTES
from device.start.child import guarded
from device.start.command import module_command
from pipelines.sources.gst import CHILD
from scripts.chaos import TOPICS, Chaos, bytes_below
from scripts.chaos_checks import (
    CHECKS,
    Observation,
    camera_away_is_said,
    hung_pipeline_is_killed,
    no_orphans,
    report_is_true,
    runs_or_says_why,
)
from scripts.chaos_parts import Process
from scripts.chaos_schedule import FAULTS, INVARIANTS, STALL_S, schedule

ROOT = Path(__file__).parents[2]
AGENT = Process(10, 1, ("python", "start", "device.agent"), "S", 1 << 20)


def pipeline(pid: int, parent: int, bundle: Path = Path("/nowhere")) -> Process:
    command = ("python", "start", PIPELINE.prefix[-1], "--bundle", str(bundle))
    return Process(pid, parent, command, "S", 1)


def reported(status: str, reason: str = "", name: str = "one") -> Reported:
    return Reported(
        agent="1", profile="laptop", dev=True, warning="", session=1,
        running=Running(slot="a", sha256="0" * 64, name=name, version="1"),
        pipeline=PipelineReport(status=status, reason=reason),
        update=Update(phase="live"),
    )  # fmt: skip


def sight(report: Reported | None, *rows: Process, camera_up: bool = True) -> Observation:
    table = {row.pid: row for row in (AGENT, *rows)}
    return Observation(
        table, AGENT.pid, report, online=True, camera_up=camera_up, state_bytes=0, slots=2
    )


def test_a_seed_always_gives_the_same_faults() -> None:
    assert schedule(7, 600) == schedule(7, 600)
    assert schedule(7, 600)[: len(schedule(7, 300))] == schedule(7, 300)
    assert schedule(7, 600) != schedule(8, 600)
    assert all(one.at_s < two.at_s for one, two in pairwise(schedule(7, 600)))
    reached = {(step.part, step.action) for seed in range(20) for step in schedule(seed, 600)}
    assert reached == {(fault.part, fault.action) for fault in FAULTS}


def test_every_invariant_has_a_check() -> None:
    assert {row.name for row in INVARIANTS} == set(CHECKS)


def test_freezes_of_a_pipeline_are_long_enough_to_be_noticed() -> None:
    grace_s = {row.name: row.grace_s for row in INVARIANTS}["hung-pipeline-is-killed"]
    freeze = next(row for row in FAULTS if (row.part, row.action) == ("pipeline", "freeze"))
    assert STALL_S < grace_s < freeze.seconds[1]


def test_a_pipeline_that_is_gone_must_be_explained() -> None:
    assert runs_or_says_why(sight(reported("running")))
    assert not runs_or_says_why(sight(reported("restarting", "it exited with status 1")))
    assert not runs_or_says_why(sight(reported("running"), pipeline(11, 10)))


def test_a_report_of_what_is_not_there_is_false(tmp_path: Path) -> None:
    (tmp_path / "pipeline.toml").write_text('name = "one"\n')
    running = pipeline(11, 10, tmp_path)
    assert not report_is_true(sight(reported("running"), running))
    assert report_is_true(sight(reported("running")))
    assert report_is_true(sight(reported("failed", "why"), running))
    assert report_is_true(sight(reported("running", name="two"), running))


def test_what_outlives_its_agent_is_an_orphan() -> None:
    agents_pipeline, child = pipeline(11, 10), Process(12, 11, module_command(CHILD, "11"), "S", 1)
    assert not no_orphans(sight(None, agents_pipeline, child), lambda row: row.is_camera_reader)
    assert no_orphans(sight(None, child), lambda row: row.is_camera_reader)
    assert no_orphans(sight(None, pipeline(11, 1)), lambda row: row.is_pipeline)


def test_a_process_that_is_about_to_become_a_pipeline_is_none_yet() -> None:
    command = tuple(guarded(pipeline(11, 10).command))
    assert not Process(11, 10, command, "S", 1).is_pipeline


def test_a_camera_that_is_away_must_be_said() -> None:
    assert not camera_away_is_said(sight(reported("running")))
    assert camera_away_is_said(sight(reported("running"), camera_up=False))
    assert not camera_away_is_said(sight(reported("degraded", "why"), camera_up=False))


def test_a_frozen_pipeline_must_not_stay() -> None:
    running = pipeline(11, 10)
    frozen = Process(running.pid, running.parent, running.command, "T", 1)
    assert not hung_pipeline_is_killed(sight(reported("running"), running))
    assert hung_pipeline_is_killed(sight(reported("running"), frozen))
    assert not hung_pipeline_is_killed(sight(reported("starting"), frozen))


def test_every_fault_can_be_done() -> None:
    assert [fault for fault in FAULTS if not hasattr(Chaos, f"_{fault.action}")] == []


def test_a_folder_that_goes_while_its_bytes_are_counted_has_none(tmp_path: Path) -> None:
    state, elsewhere = tmp_path / "state", tmp_path / "elsewhere"
    for folder in (state / "slot", state / "kept"):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"12345")
    scan = os.scandir

    def remove_before_scan(path: str) -> object:
        if Path(path).name == "slot":  # as the agent does between a listing and a look
            (state / "slot").rename(elsewhere)
        return scan(path)

    with mock.patch("os.scandir", remove_before_scan):
        assert bytes_below(state) == 5


def test_hostile_messages_go_to_topics_of_the_board() -> None:
    chaos = Chaos.__new__(Chaos)  # nothing is started
    chaos._watcher = mock.Mock()
    for action in ("garbage", "giant"):
        getattr(chaos, f"_{action}")(schedule(1, 60)[0])
    (desired, garbage), (chunk, giant) = [
        call.args for call in chaos._watcher.publish.call_args_list
    ]
    assert desired == TOPICS.desired
    with pytest.raises(ValueError, match="request"):
        decode(garbage, Desired)
    assert chunk.startswith(TOPICS.chunks.partition("+")[0])
    assert len(giant) > MAX_PACKET_BYTES


def run_chaos(folder: Path, seed: int, seconds: int) -> dict[str, object]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "scripts.chaos", "--json", "--seed", str(seed)),
            *("--seconds", str(seconds), "--patience", "6", "--keep", str(folder / "run")),
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_a_board_holds_its_promises_under_faults(tmp_path: Path) -> None:
    result = run_chaos(tmp_path, seed=4, seconds=6)
    assert result["broken"] == []
    assert result["ticks"] > 5


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_board_holds_its_promises_for_half_an_hour(tmp_path: Path) -> None:
    result = run_chaos(tmp_path, seed=time.time_ns() % 10**6, seconds=1800)
    assert result["broken"] == []
