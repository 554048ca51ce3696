"""The updater by itself: what it does when it is asked, and what only when time advances."""

import hashlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mqtt_fixtures import PROFILE, make_bundle

from device.agent.config import AgentConfig, BrokerTable
from device.agent.pipeline_process import PipelineEvent, ProcessRow
from device.agent.pipeline_runner import PipelineRunner
from device.agent.preparation import Preparation
from device.agent.updater import Updater
from device.protocol.documents import DOCUMENT_FORMAT, BlobSpec, Desired, ReleaseSpec
from device.protocol.messages import Failure
from device.update.slot_store import SlotStore

CHUNK_BYTES = 64 * 1024
SLEEPER = ProcessRow("pipeline", (sys.executable, "-c", "import time; time.sleep(60)"), ())


class Board:
    """An updater on a real state directory, and a bundle whose parts it is given."""

    def __init__(self, folder: Path, preparation: Preparation | None = None) -> None:
        config = AgentConfig(
            device="dev1",
            profile=PROFILE,
            state_dir=str(folder / "state"),
            dev=True,
            broker=BrokerTable(host="127.0.0.1"),
        )
        data = make_bundle(folder / "bundle").read_bytes()
        self.chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        self.index = b"".join(hashlib.sha256(chunk).digest() for chunk in self.chunks)
        self.blob = BlobSpec(
            sha256=hashlib.sha256(data).hexdigest(),
            bytes=len(data),
            chunk_bytes=CHUNK_BYTES,
            index_sha256=hashlib.sha256(self.index).hexdigest(),
        )
        self.store = SlotStore(folder / "state")
        self.events: list[PipelineEvent] = []
        self.pipeline = PipelineRunner(config, "", SLEEPER, self.events.append)
        self.updater = Updater(config, self.store, self.pipeline, lambda: None, preparation)
        self.updater.boot()
        release = ReleaseSpec(name="good", version="1", profile=PROFILE, blob=self.blob)
        self.updater.on_desired(Desired(format=DOCUMENT_FORMAT, request="first", release=release))

    def deliver_all(self) -> None:
        self.updater.on_part(self.blob.sha256, "index", self.index, 0.0)
        for number, chunk in enumerate(self.chunks):
            self.updater.on_part(self.blob.sha256, str(number), chunk, 0.0)

    def close(self) -> None:
        self.updater.shut_down()
        self.store.close()


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    board = Board(tmp_path)
    yield board
    board.close()


def test_a_complete_download_is_tried_by_advance_and_not_by_a_query(board: Board) -> None:
    request = board.updater.next_request(0.0)
    assert request is not None
    assert request.index
    board.deliver_all()
    assert board.updater.next_request(0.0) is None
    assert board.updater.update.phase == "downloading"
    assert board.updater.state.trial is None
    assert board.pipeline.report.status == "stopped"
    board.updater.advance(0.0)
    assert board.updater.update.phase == "trial"
    assert board.updater.state.trial == "a"
    assert board.pipeline.report.status == "starting"


def test_advance_reports_progress(board: Board) -> None:
    board.updater.on_part(board.blob.sha256, "index", board.index, 0.0)
    board.updater.on_part(board.blob.sha256, "0", board.chunks[0], 0.0)
    board.updater.advance(0.0)
    assert board.updater.update.received_bytes == len(board.chunks[0])


def test_a_trial_that_fails_is_rolled_back_with_its_reason(board: Board) -> None:
    board.deliver_all()
    board.updater.advance(0.0)
    board.updater.on_pipeline_message(Failure(message="the camera is gone"))
    assert board.updater.update.phase == "rolled_back"
    assert board.updater.update.reason == "the camera is gone"
    assert board.updater.state.trial is None
    assert board.pipeline.report.status == "stopped"


def test_an_agent_that_stood_still_does_not_blame_the_release(board: Board) -> None:
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
