"""A release is prepared before its trial: it waits, it is refused with a reason, or it runs."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from mqtt_fixtures import make_bundle
from updater_fixtures import UpdaterBoard

from device.agent import preparation as module
from device.agent.pipeline_process import PipelineOutput
from device.agent.preparation import (
    Preparation,
    PreparationEnded,
    PreparationEvent,
    Preparing,
    Row,
    built_now,
    refusal,
)
from device.protocol.messages import Ready
from device.trust.exchange import TRUSTED, Unverified
from device.update import slots
from device.update.bundle import extract_bundle

PATIENCE_S = 30.0
READY = Row(segment="dla0.0", cached=False)
OTHER = Row(segment="dla0.0", problem="it crashed", others=("cuda", "portable"))
STUCK = Row(segment="dla0.0", problem="it crashed")


def slot(folder: Path) -> Path:
    """Return the folder of an unpacked release."""
    extract_bundle(make_bundle(folder / "release", engine_bytes=100), folder / "slot")
    return folder / "slot"


class Prepared:
    """A board whose TensorRT answers as it is told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "find_spec", lambda _: object())
        self.events: list[PreparationEvent] = []
        self.answer = folder / "answer"
        self.calls = folder / "calls"
        script = (
            "import pathlib, sys, time\n"
            f"answer = pathlib.Path({str(self.answer)!r})\n"
            f"calls = pathlib.Path({str(self.calls)!r})\n"
            "calls.open('a').write(' '.join(sys.argv[1:]) + chr(10))\n"
            'print(\'{"segment": "dla0.0", "seconds": 3.0}\', flush=True)\n'
            "while not answer.exists(): time.sleep(0.02)\n"
            "print(answer.read_text(), flush=True)\n"
        )
        self.preparation = Preparation(
            self.events.append,
            folder / "state",
            timeout_s=60.0,
            memory_mb=512,
            total_timeout_s=900.0,
            command=(sys.executable, "-c", script),
        )
        self.board = UpdaterBoard(folder, self.preparation)

    def say(self, *rows: Row) -> None:
        text = msgspec.json.encode({"rows": rows}).decode()
        self.answer.with_suffix(".new").write_text(text)
        self.answer.with_suffix(".new").rename(self.answer)

    def pump(self, done: Callable[[], bool]) -> None:
        """Give the updater the events until something holds."""
        end_s = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < end_s, "it did not happen"
            while self.events:
                event = self.events.pop(0)
                if isinstance(event, Preparing):
                    self.board.updater.on_preparing(event)
                else:
                    self.board.updater.on_prepared(event)
            time.sleep(0.01)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prepared]:
    prepared = Prepared(tmp_path, monkeypatch)
    yield prepared
    prepared.board.close()


def test_a_trial_waits_for_the_preparation_and_says_what_it_does(prepared: Prepared) -> None:
    board = prepared.board
    board.deliver_all()
    board.updater.advance(0.0)
    assert board.updater.update.phase == "staging"
    assert board.updater.state.trial is None
    prepared.pump(lambda: "3 s so far" in board.updater.update.reason)
    prepared.say(READY)
    prepared.pump(lambda: board.updater.update.phase == "trial")
    assert board.updater.state.trial == "a"
    command = prepared.calls.read_text()
    assert "--timeout-s 60 --total-timeout-s 900 --max-memory-mb 512 --events" in command
    assert str(prepared.preparation.plans) in command


@pytest.mark.parametrize(("row", "phase"), [(OTHER, "trial"), (STUCK, "refused")])
def test_a_refusal_of_tensorrt_ends_a_release_that_cannot_run_otherwise(
    row: Row, phase: str, prepared: Prepared
) -> None:
    board = prepared.board
    board.deliver_all()
    board.updater.advance(0.0)
    prepared.say(row)
    prepared.pump(lambda: board.updater.update.phase == phase)
    if phase == "refused":
        assert "segment dla0.0 cannot run on this board: it crashed" in board.updater.update.reason
        assert board.updater.state.trial is None
        assert board.pipeline.report.status == "stopped"
        board.updater.on_desired(board.desired("first"), TRUSTED)  # asked for again: still refused
        assert board.updater.update.phase == "refused"


def test_a_prepared_release_is_not_tried_for_a_document_that_nobody_has_checked(
    prepared: Prepared,
) -> None:
    board = prepared.board
    board.deliver_all()
    board.updater.advance(0.0)
    board.updater.on_desired(board.desired("other"), Unverified(reason="no server"))
    prepared.say(READY)
    prepared.pump(lambda: not prepared.preparation.running)
    assert board.updater.update.phase == "verifying"
    assert board.updater.state.trial is None
    board.updater.on_desired(board.desired("other"), TRUSTED)
    prepared.pump(lambda: board.updater.update.phase == "trial")


def test_a_preparation_that_dies_leaves_the_judgement_to_the_trial(
    prepared: Prepared,
) -> None:
    board = prepared.board
    board.deliver_all()
    board.updater.advance(0.0)
    prepared.answer.write_text("no JSON")
    prepared.pump(lambda: board.updater.update.phase == "trial")


def test_what_runs_is_prepared_at_the_start_and_runs_again_with_new_plans(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = prepared.board
    board.deliver_all()
    prepared.say(READY)
    board.updater.advance(0.0)
    prepared.pump(lambda: board.updater.state.trial == "a")
    board.updater._slots.save(slots.confirm(board.updater.state))
    assert board.updater.state.active == "a"
    starts: list[Path] = []
    start = board.pipeline.start

    def watched(folder: Path, *, fresh: bool) -> bool:
        starts.append(folder)
        return start(folder, fresh=fresh)

    monkeypatch.setattr(board.pipeline, "start", watched)
    for row, count in ((READY, 2), (Row(segment="dla0.0"), 1)):
        starts.clear()
        prepared.say(row)
        board.updater.boot()
        assert len(starts) == 1  # it does not wait for TensorRT
        prepared.pump(lambda: not prepared.preparation.running)
        assert len(starts) == count
        board.pipeline.stop("the test")


def on_trial(prepared: Prepared) -> None:
    """Bring a release on trial, and stop the agent during it."""
    board = prepared.board
    board.deliver_all()
    prepared.say(READY)
    board.updater.advance(0.0)
    prepared.pump(lambda: board.updater.update.phase == "trial")
    board.updater.shut_down()
    prepared.answer.unlink()


@pytest.mark.parametrize(("row", "phase"), [(READY, "trial"), (STUCK, "rolled_back")])
def test_a_trial_that_is_resumed_is_prepared_first(
    row: Row, phase: str, prepared: Prepared
) -> None:
    on_trial(prepared)
    updater = prepared.board.updater
    updater.boot()
    prepared.pump(lambda: "3 s so far" in updater.update.reason)
    assert (updater.state.trial, updater.update.phase) == ("a", "staging")
    assert prepared.board.pipeline.report.status == "stopped"
    assert updater.state.attempts == 0  # it has not begun
    prepared.say(row)
    prepared.pump(lambda: updater.update.phase == phase)
    if phase == "trial":
        assert updater.state.attempts == 1
        assert prepared.board.pipeline.report.status == "starting"
    else:
        assert "segment dla0.0 cannot run on this board: it crashed" in updater.update.reason
        assert updater.state.trial is None


def test_what_ran_before_runs_while_a_resumed_trial_is_prepared(prepared: Prepared) -> None:
    on_trial(prepared)
    updater, pipeline = prepared.board.updater, prepared.board.pipeline
    record = updater.state.record("a")
    assert record is not None
    good = msgspec.structs.replace(updater.state, b=record, active="b")
    updater._slots.save(good)
    folder = prepared.board.store.slot_folder("b")
    shutil.copytree(prepared.board.store.slot_folder("a"), folder, dirs_exist_ok=True)
    updater.boot()
    prepared.pump(lambda: pipeline.report.status == "starting")
    assert updater.update.phase == "staging"
    # What happens to it is not the trial's.
    updater.ask("failure", "the camera is gone")
    assert updater.state.trial == "a"
    prepared.say(READY)
    prepared.pump(lambda: updater.update.phase == "trial")
    prepared.calls.unlink()
    updater.ask("failure", "the camera is gone")
    assert updater.state.trial is None
    prepared.pump(lambda: not prepared.preparation.running)
    assert str(folder) in prepared.calls.read_text()  # it may be of before an update of JetPack


def test_an_agent_that_stops_while_a_trial_is_prepared_counts_no_attempt(
    prepared: Prepared,
) -> None:
    on_trial(prepared)
    updater = prepared.board.updater
    for _ in range(3):
        updater.boot()
        assert updater.update.phase == "staging"
        updater.shut_down()
        assert updater.state.attempts == 0


def test_a_preparation_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    events: list[PreparationEvent] = []
    preparation = Preparation(
        events.append,
        tmp_path,
        timeout_s=60.0,
        memory_mb=None,
        total_timeout_s=0.5,
        grace_s=0.5,
        command=(sys.executable, "-c", "import time; time.sleep(600)"),
    )
    assert preparation.start(slot(tmp_path))
    end_s = time.monotonic() + PATIENCE_S
    while not events and time.monotonic() < end_s:
        time.sleep(0.01)
    (event,) = events
    assert isinstance(event, PreparationEnded)
    assert event.rows is None
    assert "the limit total_timeout_s of [prepare] in agent.toml" in event.problem


def test_without_tensorrt_nothing_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    events: list[PreparationEvent] = []
    preparation = Preparation(events.append, tmp_path, timeout_s=1.0, memory_mb=None)
    assert not preparation.start(tmp_path)
    assert not preparation.running


def test_a_preparation_that_cannot_be_watched_is_not_started(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        assert not prepared.preparation.start(slot(prepared.answer.parent))
    assert not prepared.preparation.running  # ended, not left behind


@pytest.mark.parametrize(
    ("rows", "refused", "built"),
    [
        ((), False, False),
        ((Row(segment="a"),), False, False),
        ((READY,), False, True),
        ((Row(segment="gpu.0", cached=False, kernels_run=True),), False, False),
        ((OTHER,), False, False),
        ((READY, STUCK), True, True),
    ],
)
def test_rows_decide(rows: tuple[Row, ...], refused: bool, built: bool) -> None:
    assert (refusal(rows) is not None) == refused
    assert built_now(rows) == built


def test_the_report_says_which_segments_left_the_dla(prepared: Prepared) -> None:
    board, runner = prepared.board, prepared.board.pipeline
    prepared.say(OTHER)
    board.deliver_all()
    board.updater.advance(0.0)
    prepared.pump(lambda: board.updater.update.phase == "trial")
    reason = "segment dla0.0 runs as cuda, not on the DLA: tensorrt: it crashed"
    ready = Ready(pipeline="p", engine_sha256="0", degraded=(reason,))
    runner.on_message(PipelineOutput(run=runner._process.run, message=ready))
    assert runner.report.degraded == (reason,)
    assert runner.report.status == "starting"
    runner.stop("the test")
    assert runner.report.degraded == ()
