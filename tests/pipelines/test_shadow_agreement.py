"""Shadow mode in one process: how results agree, how they travel, what the running loop pays."""

import io
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from video_fixtures import SIZE, ColourDetector, colour_pipeline, frame_of, scene

from device.errors import PipelineError
from device.protocol.messages import Shadow
from pipelines.config import PipelineConfig
from pipelines.frame import Frame, Nv12
from pipelines.results import (
    ClassScores,
    Decoded,
    DepthMap,
    Detections,
    SegmentationMap,
    Texts,
    no_detections,
)
from pipelines.runtime.lanes import Model
from pipelines.shadow.agreement import Agreement, compare
from pipelines.shadow.compare import Candidate, Limits, check_comparable, check_task, compare_live
from pipelines.shadow.tap import Tap
from pipelines.shadow.wire import ASK, Hello, Sample, encode, read_hello, read_sample

WAIT_S = 30.0
REGION = (0.0, 0.0, 8.0, 8.0)


def objects(*rows: tuple[float, float, float, float, int]) -> Detections:
    """Detections of boxes with their classes."""
    boxes = np.array([row[:4] for row in rows], np.float32).reshape(-1, 4)
    classes = np.array([row[4] for row in rows], np.int64)
    return Detections(boxes, np.full(len(rows), 0.9, np.float32), classes)


def classes(*class_ids: int) -> ClassScores:
    scores = np.linspace(1.0, 0.5, len(class_ids), dtype=np.float32)
    return ClassScores(scores, np.array(class_ids, np.int64))


def segments(*points: int) -> SegmentationMap:
    return SegmentationMap(np.array([points], np.int64), REGION)


def depth(*points: float) -> DepthMap:
    return DepthMap(np.array([points], np.float32), REGION, metric=False)


def texts(*lines: tuple[int, ...]) -> Texts:
    return Texts(lines, np.ones(len(lines), np.float32))


@pytest.mark.parametrize(
    ("old", "new", "agreeing", "counted"),
    [
        (no_detections(), no_detections(), 0.0, 0.0),  # proves nothing
        (objects((0, 0, 10, 10, 1)), no_detections(), 0.0, 1.0),
        (objects((0, 0, 10, 10, 1)), objects((0, 0, 10, 10, 1)), 2.0, 2.0),
        (objects((0, 0, 10, 10, 1)), objects((0, 0, 10, 10, 2)), 0.0, 2.0),
        (objects((0, 0, 10, 10, 1)), objects((0, 0, 5, 10, 1)), 2.0, 2.0),  # IoU 0.5
        (objects((0, 0, 10, 10, 1)), objects((0, 0, 4.9, 10, 1)), 0.0, 2.0),
        # One object is not two, whichever comes first.
        (objects((0, 0, 10, 10, 1)), objects((0, 0, 9, 10, 1), (0, 0, 10, 10, 1)), 2.0, 3.0),
        # The best pairs first: the first old box must not take the second one's partner.
        (
            objects((0, 0, 10, 10, 1), (2, 0, 12, 10, 1)),
            objects((2, 0, 12, 10, 1), (0, 0, 10, 10, 1)),
            4.0,
            4.0,
        ),
        (classes(3, 1), classes(3, 2), 1.0, 1.0),
        (classes(3, 1), classes(1, 3), 0.0, 1.0),
        (classes(), classes(1), 0.0, 1.0),
        (segments(1, 1, 2, 2), segments(1, 1, 2, 3), 0.75, 1.0),
        (segments(1, 2), segments(1, 1, 2, 2), 1.0, 1.0),  # another resolution
        (depth(0.0, 50.0, 100.0), depth(0.0, 52.0, 100.0), 1.0, 1.0),  # 2 % of the range
        (depth(0.0, 50.0, 100.0), depth(0.0, 52.1, 100.0), 2 / 3, 1.0),
        (texts((1, 2), (3,)), texts((3,), (4,)), 2.0, 4.0),
        (texts((1,), (1,)), texts((1,)), 2.0, 3.0),
    ],
)
def test_what_agrees_is_counted_as_its_task_does(
    old: Decoded, new: Decoded, agreeing: float, counted: float
) -> None:
    assert compare(old, new) == pytest.approx((agreeing, counted))
    assert compare(new, old)[1] == counted


def test_frames_without_objects_do_not_hide_those_that_disagree() -> None:
    agreement = Agreement()
    for _ in range(99):
        agreement = agreement.compared(no_detections(), no_detections())
    assert agreement.share == 1.0
    agreement = agreement.compared(objects((0, 0, 9, 9, 0)), no_detections())
    assert (agreement.frames, agreement.share) == (100, 0.0)


def test_other_tasks_are_refused_with_both_names() -> None:
    with pytest.raises(PipelineError, match="gives detections, the new one classes"):
        check_task(no_detections(), classes(1))
    with pytest.raises(TypeError):
        compare(no_detections(), classes(1))


# -- on the wire


def through(sample: Sample) -> Sample:
    return read_sample(io.BytesIO(b"".join(bytes(part) for part in encode(sample))))


@pytest.mark.parametrize(
    "decoded",
    [objects((1, 2, 3, 4, 5)), no_detections(), classes(2, 1), segments(1, 2), depth(1, 2),
     texts((1, -1, 2))],
    ids=["detections", "nothing", "classes", "segments", "depth", "texts"],
)  # fmt: skip
def test_a_sample_arrives_as_it_was_sent(decoded: Decoded) -> None:
    frame = replace(frame_of(scene(1, 2)), camera="front")
    arrived = through(Sample(frame, decoded))
    assert np.array_equal(arrived.frame.image, frame.image)
    assert (arrived.frame.camera, arrived.frame.t_capture) == ("front", frame.t_capture)
    assert type(arrived.decoded) is type(decoded)
    agreeing, counted = compare(decoded, arrived.decoded)
    assert agreeing == counted


def test_a_picture_in_nv12_arrives_as_such() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (36, 32), np.uint8)
    frame = replace(frame_of(scene(0, 0)), nv12=Nv12(rows, 30, 24), picture=scene(0, 0))
    arrived = through(Sample(frame, no_detections())).frame
    assert arrived.nv12 is not None
    assert np.array_equal(arrived.nv12.rows, rows)
    assert arrived.size == (24, 30)
    assert arrived.image.shape == (24, 30, 3)


def test_garbled_samples_never_do_more_than_fail() -> None:
    rng = random.Random(5)
    whole = b"".join(
        bytes(p) for p in encode(Sample(frame_of(scene(1, 1)), objects((1, 2, 3, 4, 0))))
    )
    line = whole.index(b"\n")
    for _ in range(2000):
        garbled = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            garbled[rng.randrange(line + 20)] = rng.randrange(256)
        cut = rng.randrange(len(garbled)) if rng.random() < 0.3 else len(garbled)
        try:
            read_sample(io.BytesIO(bytes(garbled[:cut])))
        except (ValueError, EOFError):
            continue


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "poems"}, "unknown task 'poems'"),
        ({"arrays": []}, "has no pixels"),
        ({"arrays": [{"dtype": "|O", "shape": [1]}]}, "is not taken"),
        ({"arrays": [{"dtype": "|u1", "shape": [2**31, 2**31, 3]}]}, "is not taken"),
        ({"nv12": [4000, 4000]}, "are not NV12"),
    ],
)
def test_a_sample_that_makes_no_sense_is_refused(changes: dict[str, object], words: str) -> None:
    head, *bodies = encode(Sample(frame_of(scene(1, 1)), no_detections()))
    line = msgspec.json.encode({**msgspec.json.decode(head), **changes}) + b"\n"
    with pytest.raises(ValueError, match=words):
        read_sample(io.BytesIO(line + b"".join(bytes(body) for body in bodies)))


# -- tap and candidate


def candidate(labels: tuple[str, ...] = ("red", "green"), camera: str = "") -> Candidate:
    config: PipelineConfig = colour_pipeline("/nonexistent")
    if camera:
        assert not isinstance(config.source, msgspec.UnsetType)
        source = msgspec.structs.replace(config.source, id=camera)
        config = msgspec.structs.replace(config, source=source)
    return Candidate(config, Model(ColourDetector(), labels, "0" * 64))


@pytest.mark.parametrize(
    ("labels", "cameras", "words"),
    [
        (("red", "blue"), ("front",), r"2 classes \(red, blue\), the new one 2 classes \(red, gre"),
        (("red", "green"), ("rear",), "has the cameras rear, the new one front"),
    ],
)
def test_releases_that_cannot_be_compared_are_refused(
    labels: tuple[str, ...], cameras: tuple[str, ...], words: str
) -> None:
    hello = Hello(pipeline="p", labels=labels, cameras=cameras)
    with pytest.raises(PipelineError, match=words):
        check_comparable(hello, candidate(camera="front"))
    check_comparable(Hello(pipeline="p", labels=("red", "green"), cameras=("front",)),
        candidate(camera="front"))  # fmt: skip


class Loop:
    """The loop of a running pipeline that offers each frame, as fast as it can."""

    def __init__(self, tap: Tap, decoded: Callable[[Frame], Decoded]) -> None:
        self.frames = 0
        self._tap, self._decoded = tap, decoded
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Loop":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            frame = frame_of(scene(self.frames % 8, 1), self.frames)
            self._tap.offer(frame, lambda frame=frame: self._decoded(frame))
            self.frames += 1


def tap_at(folder: Path) -> Tap:
    return Tap(folder / "tap", pipeline="p", labels=("red", "green"), cameras=("",))


def truth(frame: Frame) -> Detections:
    """What the detector of colours sees in `scene(n, 1)`."""
    column = frame.seq % 8
    left = column * SIZE / 8
    return objects((left, 8, left + 8, 16, 0))


def test_both_releases_see_the_same_frames_at_a_bounded_rate(tmp_path: Path) -> None:
    reports: list[Shadow] = []
    with tap_at(tmp_path) as tap, Loop(tap, truth) as loop:
        begin_s = time.monotonic()
        agreement = compare_live(candidate(), tmp_path / "tap", Limits(1.0, 3, WAIT_S, 20.0),
            reports.append)  # fmt: skip
        took_s = time.monotonic() - begin_s
        assert agreement.share == 1.0
        assert agreement.counted >= 2 * agreement.frames
        assert 3 <= agreement.frames <= 20 * took_s + 1
        assert loop.frames > agreement.frames


def test_a_release_that_sees_something_else_does_not_agree(tmp_path: Path) -> None:
    with tap_at(tmp_path) as tap, Loop(tap, lambda frame: objects((0, 40, 9, 50, 1))):
        agreement = compare_live(candidate(), tmp_path / "tap", Limits(0.1, 5, WAIT_S, 100.0),
            lambda message: None)  # fmt: skip
    assert agreement.frames >= 5
    assert agreement.share == 0.0


def test_a_pipeline_without_frames_is_waited_for_no_longer_than_the_limit(tmp_path: Path) -> None:
    limits = Limits(0.2, 5, 0.2, 10.0)
    with tap_at(tmp_path):  # it offers nothing
        assert compare_live(candidate(), tmp_path / "tap", limits, lambda message: None).frames == 0
    assert compare_live(candidate(), tmp_path / "none", limits, lambda message: None).frames == 0


def test_a_pipeline_that_starts_again_is_found_again(tmp_path: Path) -> None:
    results: list[Agreement] = []
    first, second = tap_at(tmp_path), tap_at(tmp_path)
    thread = threading.Thread(target=lambda: results.append(
        compare_live(candidate(), tmp_path / "tap", Limits(0.1, 20, WAIT_S, 1000.0),
            lambda message: None)))  # fmt: skip
    thread.start()
    with first, Loop(first, truth) as loop:
        while loop.frames < 5:
            time.sleep(0.01)
    with second, Loop(second, truth):
        thread.join(WAIT_S)
    assert results
    assert results[0].frames >= 20
    assert results[0].share == 1.0


def test_a_shadow_that_hangs_or_goes_does_not_hold_the_loop(tmp_path: Path) -> None:
    with tap_at(tmp_path) as tap, Loop(tap, truth) as loop:
        hung = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        hung.connect(str(tmp_path / "tap"))
        hung.sendall(ASK)  # and reads nothing
        seen = loop.frames
        until_s = time.monotonic() + WAIT_S
        while loop.frames < seen + 100:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        hung.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as after:
            after.settimeout(WAIT_S)
            after.connect(str(tmp_path / "tap"))
            stream = after.makefile("rb")
            assert read_hello(stream).labels == ("red", "green")
            after.sendall(ASK)
            assert len(read_sample(stream).decoded) == 1  # type: ignore[arg-type]


def test_a_pipeline_runs_without_a_socket_that_cannot_be_opened(tmp_path: Path) -> None:
    tap = Tap(tmp_path / "missing" / "tap", pipeline="p", labels=(), cameras=())
    with tap:
        tap.offer(frame_of(scene(0, 0)), no_detections)
