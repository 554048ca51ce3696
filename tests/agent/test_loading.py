"""A pipeline beats while it loads, whatever it waits for, until its loop does."""

import queue
import sys
import threading
import time
from pathlib import Path

import pytest

from device.agent.pipeline_process import PipelineEvent, PipelineExited, PipelineProcess
from device.protocol.messages import ChildMessage, Heartbeat, Ready
from pipelines import message_channel

PATIENCE_S = 60.0


def test_it_beats_until_the_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_channel, "BEAT_S", 0.01)
    messages: queue.Queue[ChildMessage] = queue.Queue()
    threads = threading.active_count()
    with message_channel.loading(messages.put) as emit:
        for _ in range(3):  # it waits for something
            beat = messages.get(timeout=PATIENCE_S)
            assert isinstance(beat, Heartbeat)
            assert (beat.state, beat.frames) == ("loading", 0)
        emit(Ready(pipeline="p", engine_sha256=""))
        while not isinstance(messages.get(timeout=PATIENCE_S), Ready):
            """Beats go on."""
        assert isinstance(messages.get(timeout=PATIENCE_S), Heartbeat)
        emit(Heartbeat(frames=0, errors=0, state="starting"))
        until_s = time.monotonic() + PATIENCE_S
        while threading.active_count() > threads:
            assert time.monotonic() < until_s
            time.sleep(0.01)
    assert threading.active_count() == threads


def test_one_that_cannot_load_beats_no_longer() -> None:
    threads = threading.active_count()
    with (
        pytest.raises(ValueError, match="no engine"),
        message_channel.loading(lambda _message: None),
    ):
        raise ValueError("no engine")
    assert threading.active_count() == threads


WAITS = """
import time
from pipelines.message_channel import claim_stdout, loading

with loading(claim_stdout(lambda: None)):
    time.sleep(600)  # a driver, a name server
"""


def test_one_that_waits_without_work_beats_and_its_loop_has_not_begun(tmp_path: Path) -> None:
    events: queue.Queue[PipelineEvent] = queue.Queue()
    child = PipelineProcess(events.put, 0.2)
    child.start((sys.executable, "-c", WAITS), {})
    try:
        for _ in range(3):
            event = events.get(timeout=PATIENCE_S)
            assert not isinstance(event, PipelineExited), event.reason
            assert isinstance(event.message, Heartbeat)
            assert event.message.state == "loading"
        heard = child.heard
        assert not heard.beating
        assert heard.alive_s - heard.started_s >= 0.9
    finally:
        child.stop()
