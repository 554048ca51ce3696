"""Batches in flight: what overlaps, what stays in order, how old frames get, and how it ends."""

import gc
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from video_fixtures import (
    LABELS,
    PATIENCE_S,
    Blocks,
    ColourDetector,
    colour_pipeline,
    scene,
    wait_for,
)

from device.errors import SessionError, SourceError
from device.protocol.messages import ChildMessage, Heartbeat, Stats
from pipelines.config import PipelineConfig, SourceConfig
from pipelines.frame import Away, Frame, Image, Stamp
from pipelines.runtime.batch import BatchRunner, Model
from pipelines.runtime.in_flight import InFlightQueue, run_frames
from pipelines.runtime.lanes import SessionHandle
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.sinks.result import FrameResult
from pipelines.sources.batching import Pace
from pipelines.sources.live import LiveSource, RawFrame, Waiting

Feeds = Mapping[str, NDArray[np.float32]]
CELLS = 8  # of a row of `scene`


def place_of(seq: int) -> tuple[float, float]:
    """Where the red square of a frame is, as the detector says it."""
    return 8.0 * (seq % CELLS), 8.0 * (seq // CELLS % CELLS)


def picture_of(seq: int) -> Image:
    return np.asarray(scene(seq % CELLS, seq // CELLS % CELLS, "red"), np.uint8)


class Stills:
    """A source whose frames are there at once, numbered by where a red square is."""

    def __init__(
        self,
        count: int,
        camera: str = "",
        *,
        look: Callable[[int], None] = lambda seq: None,
        fault: SourceError | None = None,
    ) -> None:
        """`look` is called when a frame's picture is made; `fault` comes after the last frame."""
        self.name = camera or "stills"
        self.config = SourceConfig(uri="test://", id=camera, frames="every")
        self.dropped: Mapping[str, int] = {}
        self.away: Away | None = None
        self.due_s = float("-inf")
        self._count, self._seq = count, 0
        self._look, self._fault = look, fault

    @property
    def ended(self) -> bool:
        return self._seq == self._count and self._fault is None

    def poll(self) -> Frame | None:
        if self._seq == self._count:
            if self._fault is not None:
                raise self._fault
            return None
        seq, now = self._seq, Stamp.now()
        self._seq += 1

        def picture() -> Image:
            self._look(seq)
            return picture_of(seq)

        return Frame(picture, seq, now, now, self.name, self.config.id)

    def __enter__(self) -> "Stills":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""


class Watched(ColourDetector):
    """A detector that calls back when an inference begins, with its number and the place seen."""

    def __init__(self, begin: Callable[[int], None]) -> None:
        super().__init__()
        self._begin, self._count = begin, 0

    def infer(self, feeds: Feeds) -> dict[str, NDArray[np.float32]]:
        number, self._count = self._count, self._count + 1
        outputs = super().infer(feeds)  # the input is read before anything else can happen to it
        self._begin(number)
        return outputs


def config_of(*cameras: str) -> PipelineConfig:
    one = colour_pipeline("test://")
    sources = tuple(SourceConfig(uri="test://", id=camera) for camera in cameras)
    if not sources:
        return one
    return PipelineConfig(
        name=one.name, sources=sources, preprocess=one.preprocess, decode=one.decode
    )


class RecordingSink:
    """A sink that keeps what it is given."""

    def __init__(self, write: Callable[[FrameResult], None] = lambda result: None) -> None:
        self.results: list[FrameResult] = []
        self.dropped: Mapping[str, int] = {}
        self._write = write

    def write(self, result: FrameResult) -> None:
        self._write(result)
        self.results.append(result)

    def __enter__(self) -> "RecordingSink":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""


def run(
    sources: Sequence[Stills], runner: BatchRunner, sink: RecordingSink | None = None
) -> list[FrameResult]:
    sinks = () if sink is None else (sink,)
    try:
        waiting = Waiting(threading.Event())
        return list(run_frames(sources, waiting, runner, lambda: sinks))
    finally:
        runner.close()


def test_slow_sinks_are_no_part_of_the_time_of_an_engine() -> None:
    detector = Watched(lambda number: time.sleep(0.2))
    frame = Stills(1).poll()
    assert frame is not None
    runner = BatchRunner(config_of(), Model(detector, LABELS, ""))
    queue = InFlightQueue(runner, Waiting(threading.Event()))
    try:
        queue.start([frame])
        list(queue.finish([RecordingSink(lambda result: time.sleep(0.3))]))
    finally:
        runner.close()
    assert queue._costs.engines[1].value_s > 0.1


def engine_threads() -> int:
    return sum(thread.name.startswith("engine") for thread in threading.enumerate())


def assert_whole(results: Sequence[FrameResult], counts: Mapping[str, int]) -> None:
    """Every frame once, those of a camera in order, each with what its own picture shows."""
    for camera, count in counts.items():
        camera_results = [one for one in results if one.frame.camera == camera]
        assert [one.frame.seq for one in camera_results] == list(range(count))
    assert len(results) == sum(counts.values())
    for one in results:
        (detection,) = one.event.detections
        assert detection.box is not None
        assert detection.box[:2] == place_of(one.frame.seq)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames between which this process had no CPU look like those of a slow camera, which would be
    inferred one by one."""
    monkeypatch.setattr(Pace, "gap_s", lambda self: 0.0)


# --- what overlaps


@pytest.mark.usefixtures("hurried")
def test_the_next_input_is_made_and_the_last_result_given_while_the_engine_works() -> None:
    count, warm_up = 12, 4  # the first batches teach how long the engine takes
    looked = [threading.Event() for _ in range(count)]
    begun = [threading.Event() for _ in range(count)]
    together: Counter[str] = Counter()

    def begin(number: int) -> None:
        begun[number].set()
        time.sleep(0.03)  # what the engine usually takes
        if warm_up <= number < count - 1:
            together["input"] += looked[number + 1].wait(PATIENCE_S)

    def write(result: FrameResult) -> None:
        if warm_up <= result.frame.seq < count - 1:
            together["result"] += begun[result.frame.seq + 1].wait(PATIENCE_S)

    runner = BatchRunner(config_of(), Model(Watched(begin), LABELS, ""))
    stills = Stills(count, look=lambda seq: looked[seq].set())
    results = run([stills], runner, RecordingSink(write))
    assert_whole(results, {"": count})
    assert together == {"input": count - 1 - warm_up, "result": count - 1 - warm_up}


def test_a_camera_that_is_slower_than_all_that_is_done_with_a_frame_needs_no_second_thread() -> (
    None
):
    threads: list[int] = []
    stop = threading.Event()
    waiting = Waiting(stop)
    runner = BatchRunner(
        config_of(), Model(Watched(lambda _: threads.append(threading.get_ident())), LABELS, "")
    )
    config = SourceConfig(uri="test://")
    results = []
    with LiveSource("slow", lambda _: Ticking(0.2), config, waiting) as source:
        for result in run_frames([source], waiting, runner, lambda: (), frames=8):
            results.append(result)
    runner.close()
    assert threading.get_ident() in threads[2:]
    assert [one.frame.seq for one in results] == sorted(one.frame.seq for one in results)


# --- order


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_results_are_in_order_whatever_the_engines_take(lanes: int) -> None:
    rng = np.random.default_rng(lanes)

    def detector() -> ColourDetector:
        return Watched(lambda _: time.sleep(float(rng.choice([0.0, 0.001, 0.02]))))

    turns = tuple(SessionHandle(detector()) for _ in range(lanes - 1))
    runner = BatchRunner(config_of("a", "b"), Model(detector(), LABELS, "", turns=turns))
    results = run([Stills(60, "a"), Stills(45, "b")], runner)
    assert_whole(results, {"a": 60, "b": 45})
    assert engine_threads() == 0


class OnCore(ColourDetector):
    """A detector that says that it runs on a core, and waits there for the other one."""

    def __init__(self, core: str, meeting: threading.Barrier) -> None:
        super().__init__()
        self.reports = (Blocks(processor="dla0", runs_on=("gpu", core)),)
        self._meeting = meeting

    def infer(self, feeds: Feeds) -> dict[str, NDArray[np.float32]]:
        outputs = super().infer(feeds)
        self._meeting.wait()  # passes only while the other one is inside, too
        return outputs


@pytest.mark.usefixtures("hurried")
def test_sessions_that_take_turns_run_at_the_same_time_and_each_frame_says_where() -> None:
    meeting = threading.Barrier(2, timeout=PATIENCE_S)
    first, second = OnCore("dla0", meeting), OnCore("dla1", meeting)
    model = Model(first, LABELS, "", turns=(SessionHandle(second),))
    runner = BatchRunner(config_of(), model)
    results = run([Stills(20)], runner)
    assert_whole(results, {"": 20})
    assert [one.event.processors for one in results] == [("gpu", "dla0"), ("gpu", "dla1")] * 10
    assert runner.metrics.take({}).processors == {"gpu": 20, "dla0": 10, "dla1": 10}


# --- how old frames get


class Ticking:
    """A capture that gives a picture at a rate."""

    def __init__(self, period_s: float) -> None:
        self._period_s, self._seq = period_s, 0
        self._due_s = time.monotonic()

    def read(self) -> RawFrame:
        self._due_s += self._period_s
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        self._seq += 1
        now = Stamp.now()
        return RawFrame(picture_of(self._seq), "bgr", 64, 64, now, now)

    def close(self) -> None:
        """Nothing is open."""


def test_a_frame_is_taken_when_the_engine_is_about_to_be_free_and_no_sooner() -> None:
    engine_s, period_s = 0.08, 0.01
    stop = threading.Event()
    waiting = Waiting(stop)
    runner = BatchRunner(config_of(), Model(ColourDetector(engine_s), LABELS, ""))
    queued_ms: list[float] = []
    inferred_s: list[tuple[float, float]] = []
    with LiveSource("fast", lambda _: Ticking(period_s), SourceConfig(uri="test://"), waiting) as s:
        for result in run_frames([s], waiting, runner, lambda: (), frames=25):
            queued_ms.append(result.event.latency_ms["queue"])
            begin_ns, end_ns = result.runs[0].infer_ns
            inferred_s.append((begin_ns / 1e9, end_ns / 1e9))
    runner.close()
    # A frame that was taken as soon as the one before was with the engine would wait 80 ms.
    assert np.median(queued_ms[3:]) < 0.5e3 * engine_s
    idle_s = [after[0] - before[1] for before, after in pairwise(inferred_s[3:])]
    assert np.median(idle_s) < 0.3 * engine_s  # and yet the engine hardly waits


def test_no_frame_is_taken_while_two_batches_are_in_flight() -> None:
    release = threading.Event()
    runner = BatchRunner(config_of(), Model(Watched(lambda _: _wait(release)), LABELS, ""))
    flight = InFlightQueue(runner, Waiting(threading.Event()))
    stills = Stills(3)
    frames = [stills.poll() for _ in range(3)]
    assert flight.free_s == float("-inf")
    assert not flight.is_busy
    flight.start([frame for frame in frames[:1] if frame])
    assert flight.free_s == float("inf")  # how long the engine takes is not known yet
    flight.start([frame for frame in frames[1:2] if frame])
    assert flight.free_s == float("inf")
    assert not flight.has_results
    release.set()
    results = list(flight.finish_all(lambda: ()))
    runner.close()
    assert_whole(results, {"": 2})
    assert not flight.is_busy


def test_an_engine_with_fewer_sessions_than_the_one_before_is_known_to_be_busy() -> None:
    """A step of [load] may put another network in the place of one with a session for each core."""
    engine_s = 0.1
    second = SessionHandle(ColourDetector(engine_s))
    model = Model(ColourDetector(engine_s), LABELS, "", turns=(second,))
    runner = BatchRunner(config_of(), model)
    flight = InFlightQueue(runner, Waiting(threading.Event()))
    stills = Stills(6)

    def start_next() -> None:
        frame = stills.poll()
        assert frame is not None
        flight.start([frame])

    for _ in range(2):
        start_next()
        list(flight.finish(()))
    network = runner._first.network
    network.lanes, unused = network.lanes[:1], network.lanes[1:]
    start_next()
    start_next()
    (result,) = flight.finish(())
    assert flight.free_s > result.runs[0].infer_ns[1] / 1e9 + 0.5 * engine_s
    list(flight.finish_all(lambda: ()))
    for lane in unused:
        lane.close()
    runner.close()


def _wait(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


def test_what_a_batch_took_is_free_once_its_results_are_forgotten() -> None:
    """Outputs of a real engine are megabytes: they must not wait for the garbage collector."""
    outputs: list[weakref.ref[NDArray[np.float32]]] = []

    class Counted(Watched):
        def infer(self, feeds: Feeds) -> dict[str, NDArray[np.float32]]:
            result = super().infer(feeds)
            outputs.extend(map(weakref.ref, result.values()))
            return result

    engine = Counted(lambda _: time.sleep(0.005))
    runner = BatchRunner(config_of(), Model(engine, LABELS, ""))
    waiting = Waiting(threading.Event())
    most = 0
    gc.collect()
    gc.disable()
    try:
        for _ in run_frames([Stills(30)], waiting, runner, lambda: ()):
            most = max(most, sum(one() is not None for one in outputs))
    finally:
        gc.enable()
        runner.close()
    assert len(outputs) == 60
    assert most <= 3 * 2  # those of the batch whose results are given, and of two in flight


# --- how it ends


def test_an_engine_that_fails_ends_the_run_after_the_results_of_before() -> None:
    def begin(number: int) -> None:
        if number == 7:
            raise SessionError("segment gpu.0 failed: the driver says so")

    runner = BatchRunner(config_of(), Model(Watched(begin), LABELS, ""))
    sink = RecordingSink()
    with pytest.raises(SessionError, match=r"segment gpu\.0 failed"):
        run([Stills(20)], runner, sink)
    assert_whole(sink.results, {"": 7})
    assert engine_threads() == 0


def test_frames_before_a_source_that_fails_have_their_results() -> None:
    runner = BatchRunner(config_of(), Model(ColourDetector(0.01), LABELS, ""))
    sink = RecordingSink()
    with pytest.raises(SourceError, match="unplugged"):
        run([Stills(9, fault=SourceError("unplugged"))], runner, sink)
    assert_whole(sink.results, {"": 9})


@pytest.mark.parametrize("ends_by", ["stop", "frames", "close"])
def test_every_frame_that_was_taken_has_a_result(ends_by: str) -> None:
    stop = threading.Event()
    waiting = Waiting(stop)
    taken: deque[int] = deque()
    runner = BatchRunner(config_of(), Model(ColourDetector(0.005), LABELS, ""))
    source = Stills(1000, look=taken.append)
    frames = 20 if ends_by == "frames" else None
    results: list[FrameResult] = []
    for result in run_frames([source], waiting, runner, lambda: (), frames=frames):
        results.append(result)
        if len(results) == 20 and ends_by == "stop":
            stop.set()
        if len(results) == 20 and ends_by == "close":
            break  # the caller wants no more
    runner.close()
    assert engine_threads() == 0
    assert_whole(results, {"": len(results)})
    if ends_by == "close":
        assert len(results) == 20
    else:
        assert len(results) == len(taken)
    assert 20 <= len(taken) <= 22


def test_an_engine_that_hangs_gives_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The camera goes on giving frames, and the loop could turn: it must not look alive."""
    beats: list[int] = []
    messages: list[ChildMessage] = []
    results: list[FrameResult] = []

    def hang(number: int) -> None:
        time.sleep(0.02)  # as long as a period: in a thread of its own
        if number == 4:  # the third frame: the first two inferences warm up
            wait_for(lambda: len(results) == 2, PATIENCE_S, "results, which are signs of life")
            before = len(heartbeats(messages))
            time.sleep(1.5)  # three heartbeats
            beats.append(len(heartbeats(messages)) - before)

    config = colour_pipeline("test://?fps=50&width=64&height=64", frames="latest")
    run_pipeline(
        config,
        Model(Watched(hang), LABELS, ""),
        RunOptions(emit=messages.append, frames=6),
        watch=results.append,
    )
    assert beats == [0]
    assert len(heartbeats(messages)) >= 2  # before and after
    ran = [one.processors.get("cpu", 0) for one in messages if isinstance(one, Stats)]
    assert sum(ran) == 6  # each of Stats has those of its second


def heartbeats(messages: Sequence[ChildMessage]) -> list[Heartbeat]:
    return [one for one in messages if isinstance(one, Heartbeat)]
