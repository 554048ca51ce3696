"""The lines that the agent keeps and publishes: no secrets, bounded, rate-limited."""

import logging
import threading
import time
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from device.agent.config import AgentConfig, BrokerTable, LogTable
from device.agent.log_lines import (
    BURST,
    LOOK_S,
    MAX_LINES,
    MAX_TEXT,
    Line,
    LogHandler,
    LogLines,
    LogStream,
    redacted,
)
from device.agent.remote import Remote
from device.agent.smp_lines import LogTail
from device.protocol.documents import LogLine
from device.protocol.topics import Topics


@pytest.mark.parametrize(
    ("line", "line_kept"),
    [
        (
            "open rtsp://admin:hunter2@10.0.0.4/cam: refused",
            "open rtsp://***@10.0.0.4/cam: refused",
        ),
        ("open rtsp://10.0.0.4/cam@2", "open rtsp://10.0.0.4/cam@2"),
        ("password=hunter2 user=bob", "password=*** user=bob"),
        ('{"token": "abc", "x": 1}', '{"token": ***, "x": 1}'),
        ("passphrase = 'two words' x", "passphrase = *** x"),
        (r'password="a \" quote" x', "password=*** x"),
        ("open rtsp://admin:p@ss@10.0.0.4/cam", "open rtsp://***@10.0.0.4/cam"),
        ("GET /x?access_token=abc HTTP/1.1", "GET /x?access_token=*** HTTP/1.1"),
        ("DB_PASSWORD=hunter2", "DB_PASSWORD=***"),
        ("API-Key: abc", "API-Key: ***"),
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer ***"),
        ("the broker said s3cret-word", "the broker said ***"),
        ("12 tokens were read", "12 tokens were read"),
    ],
)
def test_secrets_are_not_kept(line: str, line_kept: str) -> None:
    assert redacted(line, ("s3cret-word",)) == line_kept
    lines = LogLines(("s3cret-word", None))
    lines.add("pipeline", line)
    assert [row.text for row in lines.after(0)] == [line_kept]


def test_what_is_kept_is_bounded() -> None:
    lines = LogLines()
    for number in range(MAX_LINES + 5):
        lines.add("agent", f"{number} " + "x" * MAX_TEXT)
    rows = lines.after(0)
    assert len(rows) == MAX_LINES
    assert rows[0].text.startswith("5 ")
    assert all(len(row.text) == MAX_TEXT for row in rows)


def test_the_last_lines_fit_their_number_and_size() -> None:
    lines = LogLines()
    for number in range(10):
        lines.add("agent" if number % 2 else "pipeline", str(number))
    assert [row.text for row in lines.last(3, "all", 10_000)] == ["7", "8", "9"]
    assert [row.text for row in lines.last(3, "pipeline", 10_000)] == ["4", "6", "8"]
    size = len('"9"') + len(lines.after(9)[0].at) + 64
    assert len(lines.last(10, "all", 2 * size)) == 2
    assert len(lines.last(10, "all", 2 * size - 1)) == 1


def test_the_last_lines_fit_a_message_whatever_they_hold() -> None:
    """Unprintable characters take six bytes in JSON; a broker ends a connection that says more."""
    lines = LogLines()
    for _ in range(MAX_LINES):
        lines.add("pipeline", "\x1b" * MAX_TEXT)
    rows = [msgspec.structs.asdict(document_of(line)) for line in lines.last(2000, "all", 262_144)]
    assert rows
    assert len(msgspec.json.encode(rows)) <= 262_144 + 64 * len(rows)


def document_of(line: Line) -> LogLine:
    return LogLine(at=line.at, level=line.level, text=line.text)


def test_the_log_that_a_cable_gives_has_no_secrets_either() -> None:
    tail = LogTail(("s3cret-word", None))
    logger = logging.Logger("test")
    logger.addHandler(tail)
    logger.warning("open %s with s3cret-word", "rtsp://admin:hunter2@10.0.0.4/cam")
    logger.info("%d", "no number")  # the logger's own fault must not end the agent
    (line,) = tail.read().decode().splitlines()
    assert line.endswith("open rtsp://***@10.0.0.4/cam with ***")


class Away:
    """A connection that the test makes and ends."""

    online = False

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, topic: str, payload: bytes) -> None:
        self.sent.append(topic)

    def retain(self, topic: str, payload: bytes) -> bool:
        return self.online


def test_lines_wait_for_the_connection_and_do_not_keep_the_agent_busy(tmp_path: Path) -> None:
    lines, connection = LogLines(), Away()
    config = AgentConfig(
        device="board-1", state_dir=str(tmp_path), profile="p", broker=BrokerTable(host="h"),
        log=LogTable(publish=True),
    )  # fmt: skip
    remote = Remote(
        config, Topics("board-1"), lines=lines, updater=mock.Mock(),
        connection=connection,  # type: ignore[arg-type]
        report=dict, pipeline=mock.Mock(), put=lambda _event: None,
    )  # fmt: skip
    lines.add("agent", "first")
    now_s = time.monotonic()
    remote.advance(now_s)
    assert remote.due_s(now_s) == (None, None)  # else the loop would not wait
    connection.online = True
    assert remote.due_s(now_s)[1] is not None
    remote.advance(now_s)
    assert connection.sent == ["fleet/v1/board-1/log/agent"]


def test_what_the_agent_logs_is_kept_and_debugging_is_not() -> None:
    lines = LogLines()
    logger = logging.Logger("test")
    logger.addHandler(LogHandler(lines))
    logger.warning("%d frames lost", 3)
    logger.debug("noise")
    logger.info("%d", "no number")  # the logger's own fault must not end the agent
    assert [(row.source, row.level, row.text) for row in lines.after(0)] == [
        ("agent", "warning", "3 frames lost")
    ]


def test_lines_are_published_only_while_they_are_followed() -> None:
    lines = LogLines()
    stream = LogStream(lines, always=False, max_per_s=20.0)
    lines.add("agent", "before")
    assert stream.take(0.0) == []
    assert stream.due_s(0.0) is None
    stream.follow(0.0, 10.0)
    assert stream.take(1.0) == []  # what was before is asked for by the command log
    lines.add("pipeline", "now")
    assert stream.due_s(2.0) is not None
    ((source, line),) = stream.take(2.0)
    assert (source, line.text, line.left_out) == ("pipeline", "now", 0)
    lines.add("agent", "too late")
    assert stream.take(10.0) == []
    stream.follow(11.0, 20.0)
    stream.follow(11.0, 0.0)  # 0 seconds end it
    lines.add("agent", "nobody hears")
    assert stream.take(12.0) == []


def test_agent_toml_may_publish_always() -> None:
    lines = LogLines()
    stream = LogStream(lines, always=True, max_per_s=20.0)
    lines.add("agent", "first")
    assert [line.text for _, line in stream.take(0.0)] == ["first"]


def test_a_flood_is_cut_and_counted() -> None:
    lines = LogLines()
    stream = LogStream(lines, always=True, max_per_s=10.0)
    for number in range(BURST + 50):
        lines.add("pipeline", str(number))
    assert len(stream.take(0.0)) == BURST
    assert stream.take(LOOK_S / 2) == []  # not due
    lines.add("pipeline", "after")
    ((_, line),) = stream.take(1.0)
    assert (line.text, line.left_out) == ("after", 50)
    for number in range(MAX_LINES + 7):  # more than are kept
        lines.add("pipeline", str(number))
    rows = stream.take(2.0)
    assert rows[0][1].left_out == 7
    assert len(rows) <= 20


def test_threads_may_add_at_the_same_time() -> None:
    lines = LogLines()
    threads = [
        threading.Thread(target=lambda: [lines.add("agent", "x") for _ in range(200)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lines.count == 1600
    assert [row.number for row in lines.after(0)] == list(range(1, 1601))
