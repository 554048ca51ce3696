"""Recordings: stock readers agree, files rotate, a kill leaves all up to the last whole chunk."""

import json
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import pytest
from click.testing import CliRunner
from mcap.exceptions import McapError
from mcap.reader import make_reader
from mcap.records import Message
from mcap.stream_reader import StreamReader
from mcap.writer import Writer
from mcap_ros2.reader import read_ros2_messages
from process_lines import next_line
from rosbags.highlevel import AnyReader
from sink_fixtures import detections, result
from video_fixtures import COLOUR_TOML, LABELS, PATIENCE_S, colour_model, scene, wait_for

from device.errors import PipelineError, SourceError
from device.protocol.messages import Stats
from pipelines.config import SourceConfig
from pipelines.frame import Frame
from pipelines.pictures import decode_picture
from pipelines.ros2.cdr import encode
from pipelines.sink_config import McapSink
from pipelines.sinks import mcap_file
from pipelines.sinks.files import OutputFiles
from pipelines.sinks.mcap_finish import finish_recording
from pipelines.sinks.recording import PICTURES, TOPICS
from pipelines.sinks.table import FrameResult, SinkContext, open_sink
from pipelines.sources.batching import read_frames
from pipelines.sources.recording import messages_in
from toolkit.build import BuildOptions, build_engine
from toolkit.cli.main import tandem

STATS = Stats(
    frames=30, fps=29.9, latency_p50_ms=5.0, latency_p99_ms=9.0, stage_p50_ms={},
    stage_p99_ms={}, dropped={"late": 2}, processors={"dla0": 30},
)  # fmt: skip


def record(
    path: Path, results: list[FrameResult], pause_s: float = 0.002, **config: object
) -> dict[str, int]:
    """Record results; return what was dropped."""
    context = SinkContext(LABELS, about={"pipeline": "door", "predicted_us dla0": "812.5"})
    with open_sink(McapSink(path=str(path), **config), context) as sink:  # type: ignore[arg-type]
        for one in results:
            sink.write(one)
            time.sleep(pause_s)
            wait_for(lambda: len(sink._queue) < 4, PATIENCE_S, "a busy machine writes")
        sink.take_stats(STATS)  # type: ignore[attr-defined]
    return dict(sink.dropped)


def results_of_square(count: int) -> list[FrameResult]:
    """A square that moves to the right, found in each frame."""
    return [
        result(
            seq,
            scene(seq % 8, 2),
            detections(([8 * (seq % 8), 16, 8 * (seq % 8) + 8, 24], 0.9, 0)),
        )
        for seq in range(count)
    ]


def test_stock_readers_find_pictures_detections_and_figures(tmp_path: Path) -> None:
    path, written = tmp_path / "a.mcap", results_of_square(20)
    assert record(path, written) == {}
    with path.open("rb") as file:
        reader = make_reader(file)
        assert reader.get_header().profile == "ros2"
        summary = reader.get_summary()
        (about,) = [one for one in reader.iter_metadata() if one.name == "tandem"]
    assert summary is not None
    assert summary.statistics.message_count == 4 * 20 + 1
    assert all(one.compression == "zstd" for one in summary.chunk_indexes)
    assert about.metadata == {"pipeline": "door", "predicted_us dla0": "812.5"}
    seen: dict[str, list] = {}
    for one in read_ros2_messages(str(path)):
        seen.setdefault(one.channel.topic, []).append(one.ros_msg)
    with AnyReader([path]) as bag:
        connections = [one for one in bag.connections if one.topic == "/detections"]
        theirs = [
            (stamp, bag.deserialize(raw, connection.msgtype))
            for connection, stamp, raw in bag.messages(connections)
        ]
    for frame, (stamp, actual) in zip(written, theirs, strict=True):
        assert stamp == frame.event.t_capture_ns
        center = actual.detections[0].bbox.center.position
        assert (center.x, center.y) == (8 * (frame.frame.seq % 8) + 4, 20)
    for frame, picture, actual, text in zip(
        written, seen["/image/compressed"], seen["/detections"], seen["/result"], strict=True
    ):
        pixels = decode_picture(bytes(picture.data)).astype(int)
        assert picture.format == "jpeg"
        assert np.abs(pixels - frame.frame.image).mean() < 5
        (one,) = actual.detections
        assert one.results[0].hypothesis.class_id == "red"
        assert one.results[0].hypothesis.score == pytest.approx(0.9)
        stamp = actual.header.stamp
        assert stamp.sec * 1_000_000_000 + stamp.nanosec == frame.event.t_capture_ns
        assert json.loads(text.data) == json.loads(frame.payload)
    assert len(seen["/annotations"]) == 20
    (health,) = seen["/diagnostics"]
    values = {pair.key: pair.value for row in health.status for pair in row.values}
    assert values["dropped late"] == "2"


def test_the_next_file_begins_at_a_size_and_after_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcap_file, "CHUNK_BYTES", 1 << 16)
    noise = np.random.default_rng(1).integers(0, 255, (600, 600, 3), np.uint8)
    record(tmp_path / "big.mcap", [result(seq, noise) for seq in range(8)], 0.05, max_mb=1)
    parts = sorted(path.name for path in tmp_path.glob("big*"))
    assert len(parts) > 1
    assert parts[0] == "big-0001.mcap"
    assert parts[-1] == "big.mcap"
    sizes = [(tmp_path / name).stat().st_size for name in parts]
    assert max(sizes) < 2 << 20
    record(tmp_path / "long.mcap", results_of_square(8), 0.1, max_s=0.3)
    parts = sorted(tmp_path.glob("long*"))
    assert len(parts) in (2, 3)
    # A folder of parts is one recording, in the order of time.
    (tmp_path / "parts").mkdir()
    for part in parts:
        part.rename(tmp_path / "parts" / part.name)
    assert [one.seq for one in frames_of(f"mcap://{tmp_path}/parts")] == list(range(8))


def test_a_frame_that_fills_a_file_leaves_the_order_as_it_was(tmp_path: Path) -> None:
    """Its picture is the last one of run.mcap, and what was found in it begins run-0001.mcap."""
    first, second = results_of_square(2)
    for name, written in (("run.mcap", [first]), ("run-0001.mcap", [first, second])):
        (tmp_path / name).touch()
        file = mcap_file.McapFile(tmp_path / name, {})
        for one in written:
            for topic, (kind, make) in TOPICS.items():
                if (name == "run.mcap") == (topic == PICTURES) or one is second:
                    message = encode(kind, make(one, McapSink(path="")))
                    stamp = one.frame.t_capture.wall_ns
                    file.put(topic, kind, message, stamp, one.frame.seq)
        file.close()
    assert [one.seq for one in frames_of(f"mcap://{tmp_path}")] == [0, 1]


def frames_of(uri: str, **source: object) -> list[Frame]:
    config = SourceConfig(uri=uri, **{"realtime": False, **source})  # type: ignore[arg-type]
    with read_frames(config) as frames:
        return list(frames)


def test_a_recording_is_a_source_with_its_numbers_and_times(tmp_path: Path) -> None:
    written = results_of_square(10)
    record(tmp_path / "a.mcap", written)
    frames = frames_of(f"mcap://{tmp_path}/a.mcap?topic=/image/compressed")
    assert [one.seq for one in frames] == list(range(10))
    for one, was in zip(frames, written, strict=True):
        assert one.t_capture.wall_ns == was.frame.t_capture.wall_ns
        assert np.abs(one.image.astype(int) - was.frame.image).mean() < 5
    gaps = np.diff([one.t_capture.mono_ns for one in frames])
    np.testing.assert_array_equal(gaps, np.diff([one.frame.t_capture.wall_ns for one in written]))


def test_a_recording_keeps_its_pace_or_runs_as_fast_as_it_can(tmp_path: Path) -> None:
    written = []
    for seq in range(5):
        written.append(result(seq))
        time.sleep(0.1)
    record(tmp_path / "a.mcap", written)
    uri = f"mcap://{tmp_path}/a.mcap"
    begin_s = time.monotonic()
    assert len(frames_of(uri, realtime=True)) == 5
    assert time.monotonic() - begin_s >= 0.38
    durations_s = []
    for _ in range(3):  # the least: another process may hold this one up
        begin_s = time.monotonic()
        assert len(frames_of(uri)) == 5
        durations_s.append(time.monotonic() - begin_s)
    assert min(durations_s) < 0.3


def test_a_replay_finds_again_what_was_recorded(tmp_path: Path) -> None:
    model = colour_model(tmp_path / "c.onnx")
    build_engine(model, "laptop", tmp_path / "c.engine", BuildOptions(precision="fp32"))
    (tmp_path / "labels.txt").write_text("\n".join(LABELS))
    for seq in range(8):
        cv2.imwrite(str(tmp_path / f"{seq}.png"), scene(seq, 2))
    for several in (False, True):
        text = COLOUR_TOML.format(uri=tmp_path, source="", sinks="")
        if several:
            one = f'[[sources]]\nid = "{{}}"\nuri = "{tmp_path}"\n'
            source = text[text.index("[source]") : text.index("[preprocess]")]
            text = text.replace(source, one.format("left") + one.format("right-2"))
        path = tmp_path / f"{several}.toml"
        path.write_text('engine = "c.engine"\nlabels = "labels.txt"\n' + text)
        recording, lines = tmp_path / f"{several}.mcap", []
        for words in (["record"], ["replay", "--fast"]):
            jsonl = tmp_path / f"{several}{words[0]}.jsonl"
            done = CliRunner().invoke(
                tandem, [*words, str(path), str(recording), "--jsonl", str(jsonl)]
            )
            assert done.exit_code == 0, done.output
            events = [json.loads(line) for line in jsonl.read_text().splitlines()]
            lines.append(
                sorted(
                    (
                        one.get("camera", ""), one["seq"], one["t_capture_ns"],
                        [(row["label"], row["box"]) for row in one["detections"]],
                    )
                    for one in events
                )
            )  # fmt: skip
        assert len(lines[0]) == (16 if several else 8)
        assert lines[0] == lines[1]
        assert all(len(one[-1]) == 1 for one in lines[0])
    with (tmp_path / "False.mcap").open("rb") as file:
        (about,) = make_reader(file).iter_metadata()
    assert float(about.metadata["model predicted_us cpu"]) > 0
    assert len(about.metadata["model engine_sha256"]) == 64


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("mcap://", "names no file"),
        ("mcap://{folder}/none.mcap", "no such file"),
        ("mcap://{folder}/a.mcap?topic=/nothing", "use one of /image/compressed"),
        ("mcap://{folder}/a.mcap?topics=/x", "unknown option 'topics'"),
        ("mcap://{folder}/text.mcap", "record pictures, too"),
    ],
)
def test_an_address_without_pictures_is_an_error(tmp_path: Path, address: str, says: str) -> None:
    record(tmp_path / "a.mcap", results_of_square(2))
    (tmp_path / "text.mcap").write_text("this is no recording")
    with pytest.raises(SourceError, match=says):
        frames_of(address.format(folder=tmp_path))


def counts(path: Path) -> dict[str, int]:
    """The messages of each topic by a stock reader, which needs the index."""
    with AnyReader([path]) as bag:
        return {one.topic: one.msgcount for one in bag.connections}


def test_a_recording_cut_anywhere_is_read_to_its_last_whole_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcap_file, "CHUNK_BYTES", 8000)
    record(tmp_path / "a.mcap", results_of_square(20))
    data = (tmp_path / "a.mcap").read_bytes()
    with (tmp_path / "a.mcap").open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    chunks = [
        (one.chunk_start_offset + one.chunk_length, one.message_index_length)
        for one in summary.chunk_indexes
    ]
    assert len(chunks) > 4
    messages = list(messages_in(tmp_path / "a.mcap"))
    seed = random.randrange(1 << 30)
    print("seed", seed)
    pick = random.Random(seed)
    places = {end + more for end, _ in chunks for more in (-1, 0, 1)}
    places |= {end + pick.randrange(1, length) for end, length in chunks}
    places |= {pick.randrange(len(data)) for _ in range(30)}
    path = tmp_path / "cut.mcap"
    for place in sorted(places):
        path.write_bytes(data[:place])
        whole = sum(end <= place for end, _ in chunks)
        before = list(messages_in(path))
        if whole:
            assert finish_recording(path), place
            with path.open("rb") as file:
                actual = make_reader(file).get_summary()
            assert actual is not None
            assert actual.statistics.chunk_count == whole, place
            assert sum(counts(path).values()) == len(before)
            assert list(messages_in(path)) == before == messages[: len(before)]
            with AnyReader([path]) as bag:  # by the index of each chunk
                assert sum(1 for _ in bag.messages()) == len(before)
            assert not finish_recording(path)


def recorder(path: Path) -> "subprocess.Popen[bytes]":
    """A process that records until it is killed; it says so when a chunk is on the disk."""
    root = Path(__file__).parents[2]
    source = f"""
import sys, time
sys.path[:0] = [{str(root)!r}, {str(root / "tests/fixtures")!r}]
from sink_fixtures import result
from video_fixtures import LABELS
from pipelines.ros2.cdr import encode
from pipelines.sink_config import McapSink
from pipelines.sinks import mcap_file
from pipelines.sinks.table import SinkContext, open_sink
mcap_file.CHUNK_BYTES, mcap_file.SYNC_BYTES, mcap_file.CHUNK_S = 1 << 15, 1, 0.05
sink = mcap_file.McapOut(McapSink(path={str(path)!r}, max_s=0.4), SinkContext(LABELS))
sync = mcap_file.os.fdatasync
def say(fd):
    sync(fd)
    print("chunk", flush=True)
mcap_file.os.fdatasync = say
with sink:
    for seq in range(100_000):
        sink.write(result(seq))
        time.sleep(0.002)
        while len(sink._queue) > 4:  # else a slow machine drops frames
            time.sleep(0.002)
"""
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)


def whole_chunks(data: bytes) -> int:
    """Count the chunks that a file has to their last byte, by the format's text alone."""
    at, count = 8, 0
    while at + 9 <= len(data):
        opcode, length = struct.unpack_from("<BQ", data, at)
        at += 9 + length
        count += opcode == 6 and at <= len(data)
    return count


def messages_of(path: Path) -> int:
    """Count the messages that MCAP's own reader of streams gives until the file ends."""
    count = 0
    with path.open("rb") as file, suppress(McapError):
        for record in StreamReader(file).records:
            count += isinstance(record, Message)
    return count


def kill_and_check(folder: Path, seed: int) -> None:
    pick = random.Random(seed)
    process = recorder(folder / "a.mcap")
    assert process.stdout is not None
    synced = pick.randrange(1, 12)
    for _ in range(synced):
        assert next_line(process) == b"chunk\n"
    time.sleep(pick.random() * 0.1)
    process.send_signal(signal.SIGKILL)
    synced += process.stdout.read().count(b"chunk")
    process.wait()
    frames = frames_of(f"mcap://{folder}")
    assert [one.seq for one in frames] == list(range(len(frames))), seed
    parts = list(folder.glob("a*.mcap"))
    assert sum(whole_chunks(part.read_bytes()) for part in parts) >= synced
    before = {part: messages_of(part) for part in parts}
    assert [finish_recording(part) for part in parts].count(True) <= 1
    begun = [part for part in parts if before[part]]
    assert sum(counts(part).get("/image/compressed", 0) for part in begun) == len(frames)
    for part in begun:
        with part.open("rb") as file:
            assert sum(1 for _ in make_reader(file).iter_messages()) == before[part], seed


@pytest.mark.parametrize("number", range(2))
def test_a_killed_recorder_leaves_all_that_was_on_the_disk(tmp_path: Path, number: int) -> None:
    kill_and_check(tmp_path, random.randrange(1 << 30))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_recorder_is_killed_a_hundred_times(tmp_path: Path) -> None:
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        kill_and_check(folder, random.randrange(1 << 30))


def test_a_release_ends_at_its_next_start_what_a_power_cut_left(tmp_path: Path) -> None:
    record(tmp_path / "a.mcap", results_of_square(5))
    whole = (tmp_path / "a.mcap").read_bytes()
    with (tmp_path / "a.mcap").open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    last = summary.chunk_indexes[-1]
    (tmp_path / "a.mcap").write_bytes(whole[: last.chunk_start_offset + last.chunk_length])
    context = SinkContext(LABELS, files=OutputFiles(tmp_path, quota_bytes=1 << 30))
    with open_sink(McapSink(path="a.mcap"), context) as sink:
        sink.write(results_of_square(1)[0])
    assert counts(tmp_path / "a.mcap")["/detections"] == 5
    assert counts(tmp_path / "a-1.mcap")["/detections"] == 1


def test_a_recording_that_another_program_writes_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "a.mcap").open("wb") as file:
        writer = Writer(file)
        writer.start("ros2", "another")
        file.flush()
        before = (tmp_path / "a.mcap").read_bytes()
        assert not finish_recording(tmp_path / "a.mcap")
    assert (tmp_path / "a.mcap").read_bytes() == before


def test_a_full_disk_costs_frames_and_not_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcap_file, "RETRY_S", 0.05)
    monkeypatch.setattr(mcap_file, "CHUNK_S", 0.0)
    full = [True]
    sync: Callable[[int], None] = mcap_file.os.fdatasync

    def fail(fd: int) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        sync(fd)

    monkeypatch.setattr(mcap_file.os, "fdatasync", fail)
    with open_sink(McapSink(path=str(tmp_path / "a.mcap")), SinkContext(LABELS)) as sink:
        sink.write(result(0))
        wait_for(lambda: sink.dropped.get("mcap_error"), PATIENCE_S, "a frame is dropped")
        full[0] = False
        time.sleep(0.1)
        sink.write(result(1))
    assert counts(tmp_path / "a-0001.mcap")["/detections"] == 1


def test_nothing_is_recorded_beyond_the_quota(tmp_path: Path) -> None:
    context = SinkContext(LABELS, files=OutputFiles(tmp_path, quota_bytes=1))
    with open_sink(McapSink(path="a.mcap"), context) as sink:
        sink.write(result(0))
    assert sink.dropped == {"mcap_quota": 4}


def test_a_recording_of_others_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.mcap").write_text("mine")
    with pytest.raises(PipelineError, match="does not overwrite"):
        open_sink(McapSink(path=str(tmp_path / "a.mcap")), SinkContext(LABELS))
    assert (tmp_path / "a.mcap").read_text() == "mine"


def test_viewers_and_recorders_are_loaded_when_a_sink_asks_for_them() -> None:
    source = """
import sys
import pipelines.runtime.pipeline
heavy = {"mcap", "foxglove", "zstandard", "lz4"}
assert not heavy & {*sys.modules}, heavy & {*sys.modules}
sys.modules["mcap"] = sys.modules["foxglove"] = None
from device.errors import TandemError
from pipelines.config import SourceConfig
from pipelines.sink_config import FoxgloveSink, McapSink
from pipelines.sinks.table import SinkContext, open_sink
from pipelines.sources.live import Waiting
from pipelines.sources.table import open_source
import threading
for act in (
    lambda: open_sink(McapSink(path="a.mcap"), SinkContext(())),
    lambda: open_sink(FoxgloveSink(), SinkContext(())),
    lambda: open_source(SourceConfig(uri="mcap://a.mcap"), Waiting(threading.Event())),
):
    try:
        act()
    except TandemError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.count("tandem-edge[mcap]") == 2
    assert done.stdout.count("tandem-edge[foxglove]") == 1
