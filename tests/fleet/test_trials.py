"""Trials through a real broker on real agent processes: what is live, rolled back or postponed."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mqtt_fixtures import DEVICE, WAIT_S, AgentBox, Mosquitto, Watcher, make_bundle

from device.protocol.documents import PipelineReport
from toolkit.fleet.brokers.address import BrokerAddress
from toolkit.fleet.transports.deploy import DeployOptions, deploy_bundle
from toolkit.fleet.transports.deployment import DeployProgress


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    mosquitto = Mosquitto(tmp_path)
    yield mosquitto
    mosquitto.close()


@pytest.fixture
def board(tmp_path: Path, broker: Mosquitto) -> Iterator[AgentBox]:
    box = AgentBox(tmp_path, broker.port)
    yield box
    box.close()


def address(port: int) -> BrokerAddress:
    return BrokerAddress("127.0.0.1", port)


def test_a_rolled_back_release_stays_known_over_restarts_and_other_releases(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    board.start()
    good, bad = make_bundle(tmp_path / "good"), make_bundle(tmp_path / "bad", "fails")
    newer = make_bundle(tmp_path / "newer", version="2")
    port = address(broker.port)
    assert deploy_bundle(good, (DEVICE,), port, DeployOptions(WAIT_S))[0].live
    assert deploy_bundle(bad, (DEVICE,), port, DeployOptions(WAIT_S))[0].phase == "rolled_back"
    board.kill()
    board.start()
    assert deploy_bundle(newer, (DEVICE,), port, DeployOptions(WAIT_S))[0].live
    runs = len(board.runs())
    refused = deploy_bundle(bad, (DEVICE,), port, DeployOptions(WAIT_S))[0]
    assert (refused.phase, refused.sent_bytes) == ("rolled_back", 0)
    assert "camera /dev/video9 does not exist" in refused.reason
    assert len(board.runs()) == runs  # the live release was not even interrupted


def test_a_release_that_dies_after_its_first_frame_is_not_live(
    tmp_path: Path, broker: Mosquitto
) -> None:
    box = AgentBox(tmp_path, broker.port, confirm_after_s=8.0)
    box.start()
    try:
        result = deploy_bundle(
            make_bundle(tmp_path / "in", "dies"),
            (DEVICE,),
            address(broker.port),
            DeployOptions(WAIT_S),
        )[0]
    finally:
        box.close()
    assert result.phase == "rolled_back"
    assert "ended with status 4" in result.reason


def test_a_release_that_crashes_in_a_loop_after_its_trial_goes_back(
    tmp_path: Path, broker: Mosquitto
) -> None:
    box = AgentBox(tmp_path, broker.port, confirm_after_s=0.2, max_crashes=2)
    box.start()
    good, bad = make_bundle(tmp_path / "good"), make_bundle(tmp_path / "bad", "crashes")
    port = address(broker.port)
    try:
        assert deploy_bundle(good, (DEVICE,), port, DeployOptions(WAIT_S))[0].live
        with Watcher(broker.port) as watcher:
            assert deploy_bundle(bad, (DEVICE,), port, DeployOptions(WAIT_S))[0].live
            report = watcher.wait_report("rolled_back", pipeline=PipelineReport(status="running"))
            assert report.running is not None
            assert report.running.name == "good"
            assert "it crashed 2 times within 300 s (max_crashes)" in report.update.reason
        again = deploy_bundle(bad, (DEVICE,), port, DeployOptions(WAIT_S))[0]
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


def test_many_frames_that_fail_end_a_trial(tmp_path: Path, broker: Mosquitto) -> None:
    box = AgentBox(tmp_path, broker.port)
    box.start()
    try:
        result = deploy_bundle(
            make_bundle(tmp_path / "in", "errs"),
            (DEVICE,),
            address(broker.port),
            DeployOptions(WAIT_S),
        )[0]
    finally:
        box.close()
    assert result.phase == "rolled_back"
    said = r"3 of 1\d frames failed, a trial allows 10% \(max_error_rate\)"
    assert re.search(said, result.reason), result.reason


def test_a_trial_without_a_source_is_postponed_until_a_source_works(
    tmp_path: Path, broker: Mosquitto
) -> None:
    box = AgentBox(tmp_path, broker.port, trial_timeout_s=1.0)
    box.start()
    camera = tmp_path / "camera"  # the double has frames while this file is there
    camera.touch()
    port = address(broker.port)
    phases = []

    def on_progress(progress: DeployProgress) -> None:
        if not phases or phases[-1] != progress.phase:
            phases.append(progress.phase)
        if progress.phase == "postponed":
            camera.touch()

    try:
        old = make_bundle(tmp_path / "old", "waits")
        new = make_bundle(tmp_path / "new", "waits", version="2")
        assert deploy_bundle(old, (DEVICE,), port, DeployOptions(WAIT_S))[0].live
        camera.unlink()
        result = deploy_bundle(
            new, (DEVICE,), port, DeployOptions(WAIT_S), on_progress=on_progress
        )[0]
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
        result = deploy_bundle(
            make_bundle(tmp_path / "in", "waits"),
            (DEVICE,),
            address(broker.port),
            DeployOptions(WAIT_S),
            on_progress=on_progress,
        )[0]
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
    port = address(broker.port)
    waiting = make_bundle(tmp_path / "waiting", "waits")
    try:
        # Long enough for a busy machine to start the pipeline.
        first = deploy_bundle(waiting, (DEVICE,), port, DeployOptions(5.0))[0]
        again = deploy_bundle(waiting, (DEVICE,), port, DeployOptions(5.0))[0]
        newer = deploy_bundle(
            make_bundle(tmp_path / "good"), (DEVICE,), port, DeployOptions(WAIT_S)
        )[0]
    finally:
        box.close()
    for result in (first, again):
        assert result.phase == "timeout"
        assert "in the phase postponed: its source gave no frame for 0.5 s" in result.reason
    assert newer.live
