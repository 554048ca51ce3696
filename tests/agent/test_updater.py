"""The updater by itself: what it does when it is asked, and what only when time advances."""

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from mqtt_fixtures import PROFILE
from updater_fixtures import UpdaterBoard

from device.agent.agent import Agent
from device.agent.pipeline_process import PipelineExited
from device.protocol.documents import DOCUMENT_FORMAT, Desired, ReleaseSpec
from device.trust.exchange import TRUSTED, Refused, Unverified, Verdict
from device.update import slots
from device.update.machine import READ_AGAIN_S


@pytest.fixture
def board(tmp_path: Path) -> Iterator[UpdaterBoard]:
    board = UpdaterBoard(tmp_path)
    yield board
    board.close()


def test_a_complete_download_is_tried_by_advance_and_not_by_a_query(board: UpdaterBoard) -> None:
    request = board.updater.downloads.next_request(0.0)
    assert request is not None
    assert request.index
    board.deliver_all()
    assert board.updater.downloads.next_request(0.0) is None
    assert board.updater.update.phase == "downloading"
    assert board.updater.state.trial is None
    assert board.pipeline.report.status == "stopped"
    board.updater.advance(0.0)
    assert board.updater.update.phase == "trial"
    assert board.updater.state.trial == "a"
    assert board.pipeline.report.status == "starting"


def test_advance_reports_progress(board: UpdaterBoard) -> None:
    board.updater.downloads.take(board.blob.sha256, "index", board.index, 0.0)
    board.updater.downloads.take(board.blob.sha256, "0", board.chunks[0], 0.0)
    board.updater.advance(0.0)
    assert board.updater.update.received_bytes == len(board.chunks[0])


@pytest.mark.parametrize("verdict", [Unverified(reason="no server"), Refused(reason="a stranger")])
def test_a_document_whose_signatures_do_not_fit_stops_the_download_and_starts_nothing(
    board: UpdaterBoard, verdict: Verdict
) -> None:
    phase = "verifying" if isinstance(verdict, Unverified) else "refused"
    board.updater.on_desired(board.desired("other"), verdict)
    board.deliver_all()
    board.updater.advance(0.0)
    assert (board.updater.update.phase, board.updater.update.reason) == (phase, verdict.reason)
    assert board.updater.downloads.next_request(0.0) is None
    assert board.updater.state.trial is None
    board.updater.on_desired(board.desired("other"), TRUSTED)  # they do now
    board.deliver_all()
    board.updater.advance(0.0)
    assert board.updater.update.phase == "trial"


def test_a_trial_that_fails_is_rolled_back_with_its_reason(board: UpdaterBoard) -> None:
    board.deliver_all()
    board.updater.advance(0.0)
    board.updater.ask("failure", "the camera is gone")
    assert board.updater.update.phase == "rolled_back"
    assert board.updater.update.reason == "the camera is gone"
    assert board.updater.state.trial is None
    assert board.pipeline.report.status == "stopped"


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_trial_that_the_system_cannot_start_is_tried_again(
    board: UpdaterBoard, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    board.deliver_all()
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", refuse)
        for second in range(0, 600, 60):  # for longer than any limit of a trial
            board.updater.advance(time.monotonic() + second)
            assert board.updater.update.phase == "postponed"
            assert board.updater.state.attempts == 0  # a kill of the agent meanwhile blames nobody
        assert f"cannot be started: {os.strerror(number)}" in board.updater.update.reason
        assert not board.updater.state.failures
    board.updater.advance(time.monotonic() + 600.0)
    assert board.updater.update.phase == "trial"
    assert board.updater.state.attempts == 1
    assert board.pipeline.report.status == "starting"


def test_a_pipeline_that_cannot_be_watched_is_not_started(
    board: UpdaterBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    board.deliver_all()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        board.updater.advance(0.0)
    assert board.updater.update.phase == "postponed"
    assert "can't start new thread" in board.updater.update.reason
    board.updater.advance(time.monotonic() + 10.0)
    assert board.updater.update.phase == "trial"


def test_a_trial_that_waits_for_the_system_gives_way_to_another_release(
    board: UpdaterBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.deliver_all()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    board.updater.advance(0.0)
    assert board.updater.update.phase == "postponed"
    blob = msgspec.structs.replace(board.blob, sha256="0" * 64)
    release = ReleaseSpec(name="next", version="2", profile=PROFILE, blob=blob)
    board.updater.on_desired(
        Desired(format=DOCUMENT_FORMAT, request="second", release=release), TRUSTED
    )
    assert board.updater.update.phase == "downloading"
    assert board.updater.state.trial is None


def test_a_release_in_a_slot_that_cannot_be_read_waits_for_the_disk(
    board: UpdaterBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.deliver_all()
    board.updater.advance(0.0)
    board.updater.ask("failure", "the camera is gone")
    desired = board.desired("second", retry=True)
    with monkeypatch.context() as broken:
        broken.setattr("device.files.open_regular", refuse_to_open)
        board.updater.on_desired(desired, TRUSTED)
        now_s = time.monotonic()
        board.updater.advance(now_s)
    assert board.updater.update.phase == "postponed"
    assert "it waits for the disk" in board.updater.update.reason
    assert "Input/output error" in board.updater.problems[0]
    board.updater.advance(now_s + READ_AGAIN_S)
    assert board.updater.update.phase == "trial"
    assert not board.updater.problems


def refuse_to_open(_path: Path, *_arguments: object, **_options: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_live_release_that_cannot_be_read_runs_until_it_is_known_to_be_damaged(
    board: UpdaterBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.deliver_all()
    board.updater.advance(0.0)
    board.updater._slots.note(slots.confirm(board.updater.state))
    board.updater.boot()
    engine = board.store.slot_folder("a") / "model.engine"
    with monkeypatch.context() as broken:
        broken.setattr("device.files.open_regular", refuse_to_open)
        board.updater.ask("restart")
        assert board.pipeline.report.status == "starting"
        assert "slot a cannot be judged" in board.updater.problems[0]
    os.truncate(engine, 100)
    board.updater.advance(time.monotonic())
    assert board.updater.state.active is None
    assert "was changed or damaged" in board.updater.problems[0]


def test_an_agent_that_stood_still_does_not_blame_the_release(board: UpdaterBoard) -> None:
    board.deliver_all()
    board.updater.advance(0.0)
    awake_s = time.monotonic() + 100.0  # frozen, for longer than trial_timeout_s
    for second in range(30):
        board.updater.advance(awake_s + second)
        assert board.updater.update.phase == "trial"
    for second in range(30, 33):
        board.updater.advance(awake_s + second)
    assert board.updater.update.phase == "rolled_back"
    assert "no result within 30 s" in board.updater.update.reason


def test_the_log_names_the_live_release_that_crashes_in_a_loop(
    board: UpdaterBoard, caplog: pytest.LogCaptureFixture
) -> None:
    board.deliver_all()
    board.updater.advance(0.0)
    board.updater._slots.note(slots.confirm(board.updater.state))
    board.updater.boot()
    event = PipelineExited(run=1, reason="it died", crashed=True)
    runner = SimpleNamespace(on_exit=lambda event: event.reason)
    agent = SimpleNamespace(_pipeline=runner, _updater=board.updater)
    for _ in range(board.updater._config.max_crashes):
        Agent._on_exited(agent, event)  # type: ignore[arg-type]
    assert "good crashes in a loop and stays: there is no release" in caplog.text
