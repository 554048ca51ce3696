"""Recordings and their sink survive damage: of files, of chunks, of the disk."""

import fcntl
import time
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from mcap.data_stream import RecordBuilder
from mcap.reader import make_reader
from mcap.records import Chunk
from sink_fixtures import result
from video_fixtures import LABELS, PATIENCE_S

from pipelines.ros2.chunks import MAX_CHUNK_BYTES, unpack_chunk
from pipelines.ros2.messages import STRING
from pipelines.sink_config import McapSink
from pipelines.sinks import mcap_file, mcap_finish
from pipelines.sinks.mcap_finish import finish_recording
from pipelines.sinks.table import SinkContext, open_sink
from pipelines.sources.recording import messages_in
from pipelines.sources.uri import parse_mcap


def sink_at(path: Path) -> mcap_file.McapOut:
    sink = open_sink(McapSink(path=str(path)), SinkContext(LABELS))
    assert isinstance(sink, mcap_file.McapOut)
    return sink


def put(sink: mcap_file.McapOut, seq: int) -> None:
    sink.put("/text", STRING, {"data": "x"}, seq + 1, seq)


def count(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in make_reader(file).iter_messages())


def unended(path: Path, *chunks: Chunk) -> Path:
    """A recording of one message, and the chunks, as a power cut leaves it."""
    path.touch()
    file = mcap_file.McapFile(path, {})
    file.put("/text", STRING, b"\0\1\0\0\2\0\0\0x\0", 1, 0)
    file._writer.flush()
    file.close(whole=False)
    builder = RecordBuilder()
    for chunk in chunks:
        chunk.write(builder)
    path.write_bytes(path.read_bytes() + builder.end())
    return path


def chunk(data: bytes, size: int, compression: str = "zstd") -> Chunk:
    return Chunk(
        compression=compression, data=data, message_end_time=0, message_start_time=0,
        uncompressed_crc=0, uncompressed_size=size,
    )  # fmt: skip


def fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_recording_resumes_after_an_error_though_frames_keep_coming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcap_file, "RETRY_S", 0.2)
    monkeypatch.setattr(mcap_file, "CHUNK_S", 100.0)
    sink = sink_at(tmp_path / "a.mcap")
    for seq in range(3):
        put(sink, seq)
    with monkeypatch.context() as patch:
        patch.setattr(mcap_file.McapFile, "sync", fail)
        with pytest.raises(OSError, match="No space"):
            put(sink, 3)
    assert sink.dropped == {"mcap_error": 3}  # the fourth is counted by who calls
    end_s = time.monotonic() + PATIENCE_S
    while sink._file is None and time.monotonic() < end_s:
        time.sleep(0.01)
        try:
            put(sink, 4)
        except OSError as error:
            assert "tried again" in str(error)  # noqa: PT017
    sink._end_file()
    assert count(tmp_path / "a-0001.mcap") == 1


def test_a_file_that_stayed_empty_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcap_file, "RETRY_S", 0.0)
    monkeypatch.setattr(mcap_file, "LOCK_S", 0.1)
    sink = sink_at(tmp_path / "a.mcap")
    with (tmp_path / "a.mcap").open("r+b") as second:
        fcntl.flock(second, fcntl.LOCK_EX)
        with pytest.raises(OSError, match=r"another program has locked the file.*a\.mcap"):
            put(sink, 0)
    put(sink, 1)
    sink._end_file()
    assert [path.name for path in tmp_path.iterdir()] == ["a.mcap"]
    assert count(tmp_path / "a.mcap") == 1


def test_the_next_file_takes_a_free_number(tmp_path: Path) -> None:
    (tmp_path / "a-0001.mcap").write_text("mine")
    sink = sink_at(tmp_path / "a.mcap")
    put(sink, 0)
    sink._end_file()
    put(sink, 1)
    sink._end_file()
    assert (tmp_path / "a-0001.mcap").read_text() == "mine"
    assert count(tmp_path / "a-0002.mcap") == 1


def test_a_failed_sync_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcap_file, "CHUNK_S", 0.0)
    monkeypatch.setattr("os.fdatasync", fail)
    sink = sink_at(tmp_path / "a.mcap")
    put(sink, 0)
    with pytest.raises(OSError, match="No space"):
        sink._end_file()
    assert count(tmp_path / "a.mcap") == 1


@pytest.mark.parametrize("error", [IndexError, MemoryError, OverflowError, UnicodeDecodeError])
def test_an_earlier_file_that_cannot_be_ended_is_a_line_of_the_log(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
) -> None:
    def damaged(*_: object) -> None:
        raise error("utf-8", b"", 0, 1, "x") if error is UnicodeDecodeError else error("x")

    unended(tmp_path / "a-old.mcap")
    monkeypatch.setattr(mcap_finish, "_finish", damaged)
    with sink_at(tmp_path / "a.mcap") as sink:
        sink.write(result(0))
    assert count(tmp_path / "a.mcap") == 4
    assert caplog.text.count("was not ended, and cannot be now") == 1


def test_earlier_files_are_ended_while_frames_come(tmp_path: Path) -> None:
    earlier = unended(tmp_path / "a-old.mcap")
    with sink_at(tmp_path / "a.mcap") as sink:
        end_s = time.monotonic() + PATIENCE_S
        while earlier.read_bytes()[-8:-5] != b"\x89MC" and time.monotonic() < end_s:
            sink.write(result(0))
            time.sleep(0.01)
        assert count(earlier) == 1


def test_a_chunk_is_unpacked_within_its_limit(tmp_path: Path) -> None:
    bomb = zstandard.compress(bytes(MAX_CHUNK_BYTES + 1))
    with pytest.raises(ValueError, match="may have"):
        unpack_chunk(chunk(bomb, MAX_CHUNK_BYTES + 1))
    for size in (1, 1000):
        with pytest.raises(ValueError, match=f"says that it has {size}"):
            unpack_chunk(chunk(bomb if size == 1 else b"", size))
    path = unended(tmp_path / "a.mcap", chunk(bomb, MAX_CHUNK_BYTES + 1))
    assert len(list(messages_in(path))) == 1


@pytest.mark.parametrize("data", [b"\5" + b"\0" * 30, b"\5" + b"\xff" * 8 + bytes(60), b"\5\0"])
def test_a_damaged_chunk_ends_a_recording(tmp_path: Path, data: bytes) -> None:
    path = unended(tmp_path / "a.mcap", chunk(data, len(data), ""))
    assert len(list(messages_in(path))) == 1


def test_a_last_chunk_that_is_damaged_is_cut_off_and_no_other(tmp_path: Path) -> None:
    damaged = chunk(b"no zstd", 100)
    path = unended(tmp_path / "a.mcap", damaged)
    assert finish_recording(path)
    assert count(path) == 1
    path = unended(tmp_path / "b.mcap", damaged, replace(damaged, data=b"more"))
    before = path.read_bytes()
    assert not finish_recording(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["run#1.mcap", "run[1].mcap", "run?.mcap", "[x]/a?topic=b.mcap"])
def test_names_of_recordings_are_no_urls(name: str) -> None:
    assert parse_mcap(f"mcap://{name}?topic=/image") == (name, "/image")
    assert parse_mcap(f"mcap://{name}?topic=") == (name, "")


def test_a_name_with_brackets_finds_its_earlier_files(tmp_path: Path) -> None:
    earlier = unended(tmp_path / "run[1].mcap").rename(tmp_path / "run[1]-0001.mcap")
    with sink_at(tmp_path / "run[1].mcap") as sink:
        sink.write(result(0))
    assert count(earlier) == 1


def test_ages_and_runs_are_new_mappings(tmp_path: Path) -> None:
    sink = sink_at(tmp_path / "a.mcap")
    before = sink._ages_ms, sink._runs
    sink.write(result(0))
    assert before == ({}, {})
    assert sink._ages_ms
