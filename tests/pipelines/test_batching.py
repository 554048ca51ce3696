"""Frames of several sources: turns, batches, and how long a batch waits."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import cv2
import msgspec
import numpy as np
import pytest
from video_fixtures import (
    LABELS,
    SIZE,
    ColourDetector,
    colour_pipeline,
    scene,
)

from device.engine.manifest import DimRange, TensorInfo
from device.errors import ConfigError, PipelineError, SourceError
from pipelines.config import PipelineConfig, SourceConfig, load_pipeline
from pipelines.frame import Away, Frame, Stamp
from pipelines.rate import FrameRate
from pipelines.runtime.batch import Model
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.sinks.table import FrameResult
from pipelines.sources.batching import Admission, IdleEngines, Pace, batches_of
from pipelines.sources.live import Waiting

IMAGE = np.zeros((4, 4, 3), np.uint8)


class Scripted:
    """A source whose frames are due at given times after the start, in seconds."""

    def __init__(self, camera: str, due: list[float], *, away: bool = False) -> None:
        self.name = camera
        self.config = SourceConfig(uri="test://", id=camera)
        self.dropped: Mapping[str, int] = {}
        self.away = Away("unplugged", 0.0) if away else None
        self._due = deque(due)
        self._start_s = time.monotonic()
        self._seq = 0

    @property
    def ended(self) -> bool:
        return not self._due and self.away is None

    @property
    def due_s(self) -> float:
        return self._start_s + self._due[0] if self._due else float("inf")

    def poll(self) -> Frame | None:
        if time.monotonic() < self.due_s:
            return None
        self._due.popleft()
        now = Stamp.now()
        self._seq += 1
        return Frame(IMAGE, self._seq - 1, now, now, self.name, self.name)

    def __enter__(self) -> "Scripted":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is open."""


def batches(sources: list[Scripted], room: int, most: int = 99) -> list[list[tuple[str, int]]]:
    stop = threading.Event()
    taken = []
    for batch in batches_of(sources, Waiting(stop), room, Pace()):
        taken.append([(frame.camera, frame.seq) for frame in batch])
        if len(taken) == most:
            stop.set()
    return taken


def test_sources_take_turns_and_keep_their_order() -> None:
    sources = [Scripted("a", [0.0] * 4), Scripted("b", [0.0] * 2), Scripted("c", [0.0] * 3)]
    taken = [frame for batch in batches(sources, 1) for frame in batch]
    assert [camera for camera, _ in taken] == ["a", "b", "c", "a", "b", "c", "a", "c", "a"]
    for camera in "abc":
        numbers = [seq for name, seq in taken if name == camera]
        assert numbers == sorted(numbers)


def test_a_batch_has_a_frame_of_each_camera_that_gives_one_in_time() -> None:
    sources = [Scripted("a", [0.0, 0.3]), Scripted("b", [0.0, 0.3])]
    assert [sorted(batch) for batch in batches(sources, 2)] == [
        [("a", 0), ("b", 0)],
        [("a", 1), ("b", 1)],
    ]


def test_a_batch_does_not_wait_for_a_camera_that_is_away() -> None:
    sources = [Scripted("a", [0.0, 0.0]), Scripted("b", [], away=True)]
    start_s = time.monotonic()
    assert batches(sources, 2, most=1) == [[("a", 0), ("a", 1)]]
    assert time.monotonic() - start_s < 5.0


class LongWindow(Pace):
    """A pace at which a batch waits so long for the rest that a test sees it."""

    def window_s(self) -> float:
        return 20.0


@pytest.mark.parametrize(
    ("due", "admission"),
    [
        ([30.0], Admission(expects=lambda camera: camera == "a")),  # paused
        ([0.0, 30.0], Admission(admits=lambda frame: frame.camera == "a")),  # its frame is left out
    ],
)
def test_a_batch_does_not_wait_for_a_camera_whose_frames_are_not_run(
    due: list[float], admission: Admission
) -> None:
    sources = [Scripted("a", [0.0, 40.0]), Scripted("b", due)]
    start_s = time.monotonic()
    first = next(batches_of(sources, Waiting(threading.Event()), 2, LongWindow(), admission))
    assert [(frame.camera, frame.seq) for frame in first] == [("a", 0)]
    assert time.monotonic() - start_s < 15.0


def test_a_batch_waits_for_a_camera_whose_frame_before_was_left_out() -> None:
    sources = [Scripted("a", [0.0, 0.2]), Scripted("b", [0.0, 0.4])]
    admission = Admission(admits=lambda frame: frame.seq > 0)
    first = next(batches_of(sources, Waiting(threading.Event()), 2, LongWindow(), admission))
    assert [(frame.camera, frame.seq) for frame in first] == [("a", 1), ("b", 1)]


def test_a_batch_waits_no_longer_than_its_window() -> None:
    sources = [Scripted("a", [0.0]), Scripted("b", [3.0])]
    start_s = time.monotonic()
    assert batches(sources, 2, most=1) == [[("a", 0)]]
    assert time.monotonic() - start_s < 2.0


def test_frames_that_wait_fill_a_batch() -> None:
    assert batches([Scripted("a", [0.0] * 5)], 3) == [
        [("a", 0), ("a", 1), ("a", 2)],
        [("a", 3), ("a", 4)],
    ]


@pytest.mark.parametrize(
    ("periods_ms", "batch_ms", "window_ms"),
    [
        ([33.0], 10.0, 23.0),
        ([66.0, 33.0], 10.0, 23.0),  # the fastest camera decides
        ([33.0], 40.0, 2.0),  # the engine is busy: nothing is gained by a wait
        ([500.0], 10.0, 100.0),
        ([], 10.0, 2.0),  # nothing is known yet
    ],
)
def test_a_batch_waits_until_the_fastest_camera_would(
    periods_ms: list[float], batch_ms: float, window_ms: float
) -> None:
    pace = Pace()
    for number, period_ms in enumerate(periods_ms):
        for seq in range(80):
            stamp = Stamp(int(seq * period_ms * 1e6), 0)
            pace.arrived(Frame(IMAGE, seq, stamp, stamp, "", str(number)))
    pace.ran(batch_ms / 1e3)
    assert pace.window_s() * 1e3 == pytest.approx(window_ms, abs=0.01)


def test_the_gap_between_frames_is_the_shortest_of_late_and_none_of_several_cameras() -> None:
    pace = Pace()
    assert pace.gap_s() == 0.0
    for seq, at_ms in ((0, 0), (1, 40), (2, 60), (5, 150)):  # two were dropped
        stamp = Stamp(at_ms * 1_000_000, 0)
        pace.arrived(Frame(IMAGE, seq, stamp, stamp, "a", "a"))
    assert pace.gap_s() == 0.02
    pace.arrived(Frame(IMAGE, 0, stamp, stamp, "b", "b"))
    assert pace.gap_s() == 0.0


def test_what_is_gathered_when_a_run_stops_is_the_last_batch() -> None:
    stop, engines = threading.Event(), IdleEngines()

    def admits(frame: Frame) -> bool:
        engines.has_results = True  # of a batch before
        return True

    sources = [Scripted("a", [0.0, 60.0]), Scripted("b", [60.0])]
    taken = batches_of(sources, Waiting(stop), 2, LongWindow(), Admission(admits), engines=engines)
    assert next(taken) == []
    stop.set()
    assert [[frame.camera for frame in batch] for batch in taken] == [["a"]]


class Broken(Scripted):
    """A source that fails."""

    def poll(self) -> Frame | None:
        raise SourceError("unplugged")


def test_what_is_gathered_when_a_source_fails_is_the_last_batch() -> None:
    sources = [Scripted("a", [0.0, 60.0]), Broken("b", [0.0])]
    taken = batches_of(sources, Waiting(threading.Event()), 2, LongWindow())
    assert [frame.camera for frame in next(taken)] == ["a"]
    with pytest.raises(SourceError, match="unplugged"):
        next(taken)


def test_lost_frames_do_not_make_a_camera_look_slower() -> None:
    pace = Pace()
    for seq in range(0, 200, 3):
        stamp = Stamp(int(seq * 20e6), 0)
        pace.arrived(Frame(IMAGE, seq, stamp, stamp, "", "a"))
    assert pace.window_s() == pytest.approx(0.02)


# --- in a pipeline


class BatchDetector(ColourDetector):
    """The detector with the batches that it is asked for."""

    def __init__(self, size: int | str, dims: tuple[DimRange, ...] = ()) -> None:
        super().__init__()
        self.inputs = (TensorInfo(name="images", dtype="float32", shape=(size, 3, SIZE, SIZE)),)
        self.outputs = (
            TensorInfo(name="boxes", dtype="float32", shape=(size, 4, 64)),
            TensorInfo(name="scores", dtype="float32", shape=(size, 2, 64)),
        )
        self.dims = dims
        self.batches: list[int] = []

    def infer(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.batches.append(len(feeds["images"]))
        return super().infer(feeds)


def two_cameras(folder: Path) -> PipelineConfig:
    """A pipeline over two folders: red squares in one, green squares in the other."""
    for name, colour in (("left", "red"), ("right", "green")):
        (folder / name).mkdir()
        for i in range(3):
            cv2.imwrite(str(folder / name / f"{i}.png"), scene(i, 2, colour))
    one = colour_pipeline(folder)
    sources = tuple(SourceConfig(uri=str(folder / name), id=name) for name in ("left", "right"))
    return msgspec.structs.replace(one, source=msgspec.UNSET, sources=sources)


@pytest.mark.parametrize(
    ("detector", "sizes"),
    [
        (BatchDetector(1), {1}),
        (BatchDetector(2), {2}),
        (BatchDetector(4), {4}),  # the rest is padding
        (BatchDetector("n", (DimRange(name="n", min=1, opt=2, max=8),)), {2}),
    ],
    ids=["1", "2", "4", "dynamic"],
)
def test_cameras_share_a_model_and_keep_their_results_apart(
    tmp_path: Path, detector: BatchDetector, sizes: set[int]
) -> None:
    results: list[FrameResult] = []
    count = run_pipeline(
        two_cameras(tmp_path),
        Model(detector, LABELS, ""),
        RunOptions(),
        watch=results.append,
    )
    assert count == 6
    assert set(detector.batches) == sizes
    for camera, label in (("left", "red"), ("right", "green")):
        events = [result.event for result in results if result.event.camera == camera]
        assert [event.seq for event in events] == [0, 1, 2]
        seen = [[(d.label, d.box) for d in event.detections] for event in events]
        assert seen == [[(label, (i * 8.0, 16.0, i * 8.0 + 8.0, 24.0))] for i in range(3)]


def test_an_output_that_mixes_the_images_of_a_batch_is_refused(tmp_path: Path) -> None:
    detector = BatchDetector(2)
    detector.outputs = (
        *detector.outputs,
        TensorInfo(name="rows", dtype="float32", shape=(None, 7)),
    )
    with pytest.raises(PipelineError, match=r"output 'rows' \[None, 7\] does not say which image"):
        run_pipeline(
            two_cameras(tmp_path),
            Model(detector, LABELS, ""),
            RunOptions(),
        )


def test_an_engine_whose_outputs_tell_no_images_apart_gets_one_at_a_time(tmp_path: Path) -> None:
    detector = BatchDetector("n", (DimRange(name="n", min=1, opt=2, max=8),))
    detector.outputs = ColourDetector.outputs
    run_pipeline(
        two_cameras(tmp_path),
        Model(detector, LABELS, ""),
        RunOptions(),
    )
    assert set(detector.batches) == {1}


TOML = """
name = "yard"
{sources}
[preprocess]
width = 64
height = 64
[decode]
kind = "ltrb_grid"
boxes = "b"
scores = "s"
strides = [8]
"""
LEFT = '[[sources]]\nuri = "a.mp4"\nid = "left"\n'
RIGHT = '[[sources]]\nuri = "b.mp4"\nid = "right"\n'


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ("", r"write one \[source\], or \[\[sources\]\] for several"),
        (LEFT + '[source]\nuri = "c"\n', r"write one \[source\], or \[\[sources\]\] for several"),
        (LEFT + LEFT, "needs an `id` of its own"),
        (LEFT + '[[sources]]\nuri = "b"\n', "needs an `id` of its own"),
        ('[[sources]]\nuri = "b"\nid = "a/b"\n', "sources.*id is wrong"),
    ],
)
def test_sources_that_contradict_each_other_are_refused(
    tmp_path: Path, sources: str, says: str
) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(TOML.format(sources=sources))
    with pytest.raises(ConfigError, match=says):
        load_pipeline(path)


SERIAL = '[[sinks]]\nkind = "serial"\nport = "/dev/ttyS9"\n'


@pytest.mark.parametrize(
    ("sinks", "says"),
    [
        (SERIAL, "needs `camera`, the id of one source"),
        (SERIAL + 'camera = "c"\n', "needs `camera`, the id of one source"),
        ('[[sinks]]\nkind = "mqtt"\n' * 2, "one .*sinks.* of kind .mqtt."),
    ],
)
def test_sinks_that_mix_cameras_or_topics_are_refused(
    tmp_path: Path, sinks: str, says: str
) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(TOML.format(sources=LEFT + RIGHT) + sinks)
    with pytest.raises(ConfigError, match=says):
        load_pipeline(path)
    path.write_text(TOML.format(sources=LEFT + RIGHT) + SERIAL + 'camera = "right"\n')
    load_pipeline(path)


def test_the_command_line_replaces_one_source_of_several(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(TOML.format(sources=LEFT + RIGHT))
    config = load_pipeline(path)
    assert [c.uri for c in config.with_source("right=x.mp4?a=b").cameras] == ["a.mp4", "x.mp4?a=b"]
    with pytest.raises(ConfigError, match="has 2 sources: write ID=URI with one of left, right"):
        config.with_source("x.mp4")


def test_a_board_names_each_of_several_sources(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(TOML.format(sources=LEFT + RIGHT))
    config = load_pipeline(path)
    here = config.with_sources({"right": "r.mp4", "left": "l=1.mp4"})
    assert [camera.uri for camera in here.cameras] == ["l=1.mp4", "r.mp4"]
    assert config.with_sources({}) == config
    with pytest.raises(ConfigError, match="has no source 'rigth': its ids are right, left"):
        config.with_sources({"rigth": "r.mp4"})


def test_a_source_with_a_rate_lets_no_more_frames_in() -> None:
    rate = FrameRate([SourceConfig(uri="test://", id="a", max_hz=10.0)])
    start = Stamp.now().mono_ns
    admitted = []
    for i in range(100):  # a second and two thirds at 60 frames a second
        moment = Stamp(start + i * 16_666_667, 0)
        if rate.admits(Frame(IMAGE, i, moment, moment, "s", "a")):
            admitted.append(i)
        assert rate.admits(Frame(IMAGE, i, moment, moment, "s", "b"))
    assert 17 <= len(admitted) <= 19  # 10 a second, and two at the start
    assert rate.dropped == {"rate": 100 - len(admitted)}
