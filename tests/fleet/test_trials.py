"""Trials through a real broker on real agent processes: what is live, rolled back or postponed."""

import contextlib
import re
from pathlib import Path

import pytest
from deploy_fixtures import deploy
from mqtt_fixtures import WAIT_S, AgentBox, Mosquitto, Watcher, make_bundle

from device.protocol.documents import PipelineReport
from toolkit.fleet.transports.deploy import DeployOptions
from toolkit.fleet.transports.device_deployment import DeployProgress


def test_a_rolled_back_release_stays_known_over_restarts_and_other_releases(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    board.start()
    good, bad = make_bundle(tmp_path / "good"), make_bundle(tmp_path / "bad", "fails")
    newer = make_bundle(tmp_path / "newer", version="2")
    assert deploy(broker.port, good).live
    assert deploy(broker.port, bad).phase == "rolled_back"
    board.kill()
    board.start()
    assert deploy(broker.port, newer).live
    runs = len(board.runs())
    refused = deploy(broker.port, bad)
    assert (refused.phase, refused.sent_bytes) == ("rolled_back", 0)
    assert "camera /dev/video9 does not exist" in refused.reason
    assert len(board.runs()) == runs  # the live release was not even interrupted


@pytest.mark.parametrize(
    ("behaviour", "confirm_after_s", "says"),
    [
        pytest.param("dies", 8.0, "ended with status 4", id="after its first frame"),
        pytest.param(
            "errs", 0.3, r"3 of 1\d frames failed, a trial allows 10% \(max_error_rate\)",
            id="many frames fail",
        ),
    ],
)  # fmt: skip
def test_a_release_that_fails_in_its_trial_is_not_live(
    behaviour: str, confirm_after_s: float, says: str, tmp_path: Path, broker: Mosquitto
) -> None:
    with contextlib.closing(
        AgentBox(tmp_path, broker.port, confirm_after_s=confirm_after_s)
    ) as box:
        box.start()
        result = deploy(broker.port, make_bundle(tmp_path / "in", behaviour))
    assert result.phase == "rolled_back"
    assert re.search(says, result.reason), result.reason


def test_a_release_that_crashes_in_a_loop_after_its_trial_goes_back(
    tmp_path: Path, broker: Mosquitto
) -> None:
    box = AgentBox(tmp_path, broker.port, confirm_after_s=0.2, max_crashes=2)
    box.start()
    good, bad = make_bundle(tmp_path / "good"), make_bundle(tmp_path / "bad", "crashes")
    try:
        assert deploy(broker.port, good).live
        with Watcher(broker.port) as watcher:
            assert deploy(broker.port, bad).live
            report = watcher.wait_report("rolled_back", pipeline=PipelineReport(status="running"))
            assert report.running is not None
            assert report.running.name == "good"
            assert "it crashed 2 times within 300 s (max_crashes)" in report.update.reason
        again = deploy(broker.port, bad)
        assert (again.phase, again.sent_bytes) == ("rolled_back", 0)
        box.kill()
        box.start()
        with Watcher(broker.port) as watcher:
            while len(box.runs()) < 5:
                assert watcher.take(WAIT_S)
            report = watcher.wait_report("rolled_back", pipeline=PipelineReport(status="running"))
            assert report.running is not None
            assert report.running.name == "good"
    finally:
        box.close()
    names = [name for name, _pid in box.runs()]
    assert names == ["good", *["crashes"] * 2, "good", "good"]


def test_a_trial_without_a_source_is_postponed_until_a_source_works(
    tmp_path: Path, broker: Mosquitto
) -> None:
    box = AgentBox(tmp_path, broker.port, trial_timeout_s=1.0)
    box.start()
    camera = tmp_path / "camera"  # the double has frames while this file is there
    camera.touch()
    phases = []

    def on_progress(progress: DeployProgress) -> None:
        if not phases or phases[-1] != progress.phase:
            phases.append(progress.phase)
        if progress.phase == "postponed":
            camera.touch()

    try:
        old = make_bundle(tmp_path / "old", "waits")
        new = make_bundle(tmp_path / "new", "waits", version="2")
        assert deploy(broker.port, old).live
        camera.unlink()
        result = deploy(broker.port, new, on_progress=on_progress)
    finally:
        box.close()
    assert result.phase == "live", result
    assert "postponed" in phases
    assert len(box.runs()) == 4  # old, new, old while the source was away, new


def test_a_first_release_without_a_source_waits_for_it(tmp_path: Path, broker: Mosquitto) -> None:
    box = AgentBox(tmp_path, broker.port, trial_timeout_s=0.5)
    box.start()
    reasons = []

    def on_progress(progress: DeployProgress) -> None:
        if progress.phase == "postponed":
            reasons.append(progress.phase)
            (tmp_path / "camera").touch()

    try:
        result = deploy(broker.port, make_bundle(tmp_path / "in", "waits"), on_progress=on_progress)
    finally:
        box.close()
    assert result.phase == "live", result
    assert reasons
    assert len(box.runs()) == 1  # it was not even restarted


def test_a_first_release_that_waits_gives_way_to_a_newer_one(
    tmp_path: Path, broker: Mosquitto
) -> None:
    box = AgentBox(tmp_path, broker.port, trial_timeout_s=0.5)
    box.start()
    waiting = make_bundle(tmp_path / "waiting", "waits")
    try:
        # Long enough for a busy machine to start the pipeline.
        first = deploy(broker.port, waiting, DeployOptions(5.0))
        again = deploy(broker.port, waiting, DeployOptions(5.0))
        newer = deploy(broker.port, make_bundle(tmp_path / "good"))
    finally:
        box.close()
    for result in (first, again):
        assert result.phase == "timeout"
        assert "in the phase postponed: its source gave no frame for 0.5 s" in result.reason
    assert newer.live
