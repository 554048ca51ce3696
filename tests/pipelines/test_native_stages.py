"""libtandem's stages give the bits of the Python reference, on whatever comes."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from native_fixtures import compiled_stages
from stages_by_pipe import AARCH64, StagesByPipe, compiled_program

from device.engine.manifest import TensorInfo
from pipelines.config import PipelineConfig, PreprocessConfig, SourceConfig
from pipelines.decode_config import UltralyticsDetect, UltralyticsPose
from pipelines.frame import Frame, Nv12, Stamp
from pipelines.model_config import PipelineModel
from pipelines.results import Detections
from pipelines.runtime.batch import BatchRunner, Model
from pipelines.runtime.feed import HostFeed
from pipelines.sinks.controls import Controls
from pipelines.sources.live import RawFrame
from pipelines.stages import native, preprocess
from pipelines.stages.decode import decode
from pipelines.stages.decoders import candidates, ultralytics
from pipelines.stages.native import NativePlanes, NativeStages, NativeTracker
from pipelines.stages.preprocess import Preprocessor
from pipelines.stages.track import Tracker, Tracks
from pipelines.stages.view import Geometry, View
from pipelines.track_config import RoiConfig, TrackerConfig, ZoneConfig
from pipelines.vision import cv2

SEEDS = st.integers(0, 2**32 - 1)
FLAGS = os.environ.get("STAGES_FLAGS", "-O3").split()  # of the compiler


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeStages]:
    stages = NativeStages(str(compiled_stages(tmp_path_factory, *FLAGS)))
    if "STAGES_ON_AARCH64" not in os.environ:
        yield stages
        return
    with StagesByPipe(compiled_program(tmp_path_factory.mktemp("aarch64"))) as others:
        for name in ("planes", "planes_nv12", "_decode", "track", "follow"):
            setattr(stages, name, getattr(others, name.lstrip("_")))
        yield stages


@contextmanager
def running(stages: NativeStages | None) -> Iterator[None]:
    with (
        patch.object(native, "native_stages", lambda: stages),
        patch.object(ultralytics, "native_stages", lambda: stages),
        patch.object(preprocess, "native_stages", lambda: stages),
    ):
        yield


def assert_same(first: object, second: object, names: list[str]) -> None:
    """The arrays of two values are the same bytes."""
    for name in names:
        one, another = getattr(first, name), getattr(second, name)
        assert (one is None) == (another is None), name
        if one is not None:
            assert one.dtype == another.dtype
            assert one.shape == another.shape
            assert one.tobytes() == another.tobytes(), name


DETECTED = ["boxes", "scores", "class_ids", "track_ids", "keypoints"]
TRACKED = [field.name for field in fields(Tracks)]

# --- decoding


def a_head(rng: np.random.Generator, classes: int, cells: int, extras: int) -> np.ndarray:
    """Boxes that crowd, some of no area or no number, and scores with ties, NaN and infinity."""
    head = rng.uniform(0.0, 1.0, (4 + classes + extras, cells)).astype(np.float32)
    head[:2] *= rng.choice([10, 100, 640])
    head[2:4] *= rng.choice([5, 80])
    if rng.random() < 0.5:  # ties of places and scores, and overlaps of whole numbers
        head[:4] = np.round(head[:4] / 4) * 4
        head[4:] = np.round(head[4:] * 4) / 4
    for values, share in (((np.nan, np.inf, -np.inf, 0.0, 1e30, -5.0), 0.02), ((0.25, 0.5), 0.05)):
        there = rng.random(head.shape) < share * rng.integers(0, 2)
        head[there] = rng.choice(np.array(values, np.float32), there.sum())
    return head


def a_view(rng: np.random.Generator) -> View:
    geometry = Geometry(*rng.uniform(0.1, 3.0, 2).tolist(), *rng.integers(-40, 40, 2).tolist())
    return View(geometry, *rng.integers(1, 700, 4).tolist())


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_heads_are_decoded_to_the_same_bits(stages: NativeStages, seed: int) -> None:
    rng = np.random.default_rng(seed)
    config = UltralyticsPose(
        keypoints=2,
        keypoint_values=3,
        score_threshold=float(rng.choice([0.0, 0.25, 0.5, 0.9])),
        iou_threshold=float(rng.choice([0.0, 0.25, 0.5, 0.7, 1.0])),
        max_detections=int(rng.choice([1, 7, 100])),
    )
    head = a_head(rng, int(rng.integers(1, 10)), int(rng.choice([0, 1, 5, 60, 900])), 6)
    view, outputs = a_view(rng), {"output0": head[None]}
    with np.errstate(all="ignore"):
        assert stages.decode(head, len(head) - 10, config, view) is not None
    with running(None):
        expected = decode(outputs, config, view)
    with running(stages):
        assert_same(decode(outputs, config, view), expected, DETECTED)


def test_a_head_of_the_usual_size_is_decoded_to_the_same_bits(stages: NativeStages) -> None:
    rng = np.random.default_rng()
    head = rng.uniform(0.0, 0.5, (84, 8400)).astype(np.float32)
    head[:4] *= 200
    view = View(Geometry(0.5, 0.5, 0, 10), 800, 600, 640, 640)
    config = UltralyticsDetect(score_threshold=0.49)
    with running(None):
        expected = decode({"output0": head[None]}, config, view)
    decoded = stages.decode(head, 80, config, view)
    assert decoded is not None
    assert_same(decoded.detections, expected, DETECTED)
    assert len(decoded.detections) > 10


def test_heads_that_the_library_leaves_to_the_reference(stages: NativeStages) -> None:
    config, view = UltralyticsDetect(), a_view(np.random.default_rng(0))
    crowd = np.full((5, candidates.MAX_CANDIDATES + 1), 0.9, np.float32)
    assert stages.decode(crowd, 1, config, view) is None
    assert stages.decode(crowd[:, :-1].copy(), 1, config, view) is not None
    assert stages.decode(crowd[:, :-1], 1, config, view) is None
    assert stages.decode(crowd.astype(np.float64), 1, config, view) is None
    assert stages.decode(np.zeros((4, 9), np.float32), 0, config, view) is None


def test_suppression_can_be_off(stages: NativeStages) -> None:
    class Unsuppressed(UltralyticsDetect, frozen=True, kw_only=True, tag="unsuppressed"):
        @property
        def max_iou(self) -> float | None:
            return None

    rng = np.random.default_rng()
    head, view = a_head(rng, 3, 200, 0), a_view(rng)
    with running(None), np.errstate(all="ignore"):
        expected, boxes, cells = ultralytics._detect(head, 0, Unsuppressed(), view)
    decoded = stages.decode(head, 3, Unsuppressed(), view)
    assert decoded is not None
    assert_same(decoded.detections, expected, DETECTED)
    assert decoded.input_boxes.tobytes() == boxes.tobytes()
    assert decoded.cells.tobytes() == cells.tobytes()


# --- inputs


@settings(max_examples=60, deadline=None)
@given(
    SEEDS,
    st.sampled_from(["rgb", "bgr"]),
    st.sampled_from(["letterbox", "stretch", "centre-crop"]),
    st.booleans(),
)
def test_inputs_are_the_same_bits(
    stages: NativeStages, seed: int, color: Any, resize: Any, centred: bool
) -> None:
    rng = np.random.default_rng(seed)
    config = PreprocessConfig(
        width=int(rng.integers(1, 70)),
        height=int(rng.integers(1, 70)),
        color=color,
        resize=resize,
        scale=float(rng.choice([1.0, 1 / 255])),
        mean=tuple(rng.uniform(0.0, 1.0, 3).tolist()) if centred else (0.0, 0.0, 0.0),
        std=tuple(rng.uniform(0.1, 2.0, 3).tolist()),
    )
    image = rng.integers(0, 256, (*rng.integers(2, 80, 2), 3), np.uint8)
    part = image[:, : int(rng.integers(1, image.shape[1] + 1))]
    with running(None):
        expected, _ = Preprocessor(config).run(part)
    with running(stages):
        assert Preprocessor(config).run(part)[0].tobytes() == expected.tobytes()


def test_arrays_of_another_order_are_left_to_the_reference(stages: NativeStages) -> None:
    pixels, out = np.zeros((4, 5, 3), np.uint8), np.zeros((3, 4, 5), np.float32)
    rows = np.zeros((6, 8), np.uint8)
    picture, numbers = Nv12(rows, 5, 4), (1.0, 1.0, 1.0)
    planes = NativePlanes(stages, out, numbers, numbers, reverse=False)
    assert planes.write(pixels)
    assert (out == -1.0).all()
    assert planes.write_nv12(picture)
    odd = np.ndarray((3, 4, 5), np.float32, bytes(300), strides=(87, 21, 4))  # rows of 5 1/4 floats
    for target in (out[..., ::-1], out[:, ::-1], odd):
        unsupported = NativePlanes(stages, target, numbers, numbers, reverse=False)
        assert not unsupported.write(pixels)
        assert not unsupported.write_nv12(picture)
    for image in (pixels[::-1], pixels[..., ::-1], pixels[:3]):
        assert not planes.write(image)
    for others in (
        Nv12(rows, 4, 4), Nv12(rows, 5, 3), Nv12(rows[::-1], 5, 4), Nv12(rows[:, ::-1], 5, 4),
        Nv12(rows[:5], 5, 4), Nv12(rows[:3], 5, 4), Nv12(rows[:, :5], 5, 4),
    ):  # fmt: skip
        assert not planes.write_nv12(others)


def echo(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    return feeds


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(["rgb", "bgr"]), st.sampled_from(["letterbox", "centre-crop"]))
def test_inputs_of_a_cameras_picture_are_the_same_bits(
    stages: NativeStages, seed: int, color: Any, resize: Any
) -> None:
    rng = np.random.default_rng(seed)
    width, height = (int(size) for size in rng.integers(1, 60, 2))
    luma_rows, stride = height + height % 2, (width + 3) // 4 * 4
    pixels = rng.integers(0, 256, (luma_rows // 2 * 3, stride), np.uint8)
    now = Stamp.now()
    raw = RawFrame(pixels, "nv12", width, height, now, now)
    frame = Frame(raw.to_bgr, 0, now, now, "test://", nv12=Nv12(pixels, width, height))
    config = PreprocessConfig(
        width=max(width, int(rng.integers(1, 70))), height=height, color=color, resize=resize,
        crop_fraction=float(rng.choice([0.5, 1.0])) if resize == "centre-crop" else 1.0,
        mean=tuple(rng.uniform(0.0, 1.0, 3).tolist()),
    )  # fmt: skip
    feeds = []
    for library in (None, stages):
        with running(library):
            feed = HostFeed(config, echo, "x", 1, {})
            feeds.append((feed.put(0, frame), feed.infer(1)["x"]))
    (expected_place, expected), (place, given) = feeds
    assert given.tobytes() == expected.tobytes()
    assert place == expected_place


def test_a_picture_that_need_not_be_resized_is_not_converted_first(stages: NativeStages) -> None:
    def convert() -> Any:
        raise AssertionError("the picture was converted")

    now = Stamp.now()
    rows = np.random.default_rng(0).integers(0, 256, (9, 8), np.uint8)
    frame = Frame(convert, 0, now, now, "test://", nv12=Nv12(rows, 8, 6))
    with running(stages):
        feed = HostFeed(PreprocessConfig(width=8, height=8), echo, "x", 1, {})
        assert feed.put(0, frame).geometry == Geometry(1.0, 1.0, 0, 1)
        with pytest.raises(AssertionError, match="was converted"):
            HostFeed(PreprocessConfig(width=4, height=4), echo, "x", 1, {}).put(0, frame)


def test_every_colour_is_the_one_that_opencv_gives(stages: NativeStages) -> None:
    rows = np.empty((384, 512), np.uint8)  # all values of luma and, side by side, of u
    rows[:256], rows[256:, ::2] = np.arange(256)[:, None], np.arange(256)
    out, none, ones = np.empty((3, 256, 512), np.float32), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    planes = NativePlanes(stages, out, ones, none, reverse=False)
    for v in range(256):
        rows[256:, 1::2] = v
        assert planes.write_nv12(Nv12(rows, 512, 256))
        expected = cv2.cvtColor(rows, cv2.COLOR_YUV2BGR_NV12).transpose(2, 0, 1)
        assert (out == expected).all()


# --- tracks


def a_frame(rng: np.random.Generator, objects: np.ndarray) -> Detections:
    """Detections [N, 4] of objects that move and crowd, some missing, some of nothing."""
    objects[:, :2] += rng.normal(0.0, 3.0, (len(objects), 2))
    boxes = objects[rng.random(len(objects)) < 0.9]
    boxes = np.concatenate([boxes, rng.uniform(0, 60, (int(rng.integers(0, 3)), 4))])
    boxes = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    scores = rng.uniform(0.0, 1.0, len(boxes))
    if rng.random() < 0.4:  # ties, and boxes without an area
        boxes, scores = np.round(boxes / 8) * 8, np.round(scores * 4) / 4
    return Detections(
        boxes.astype(np.float32), scores.astype(np.float32), rng.integers(0, 2, len(boxes))
    )


def a_tracker_config(rng: np.random.Generator) -> TrackerConfig:
    high_score = float(rng.choice([0.0, 0.3, 0.5]))
    return TrackerConfig(
        high_score=high_score,
        low_score=float(rng.choice([0.0, min(0.1, high_score)])),
        new_score=float(rng.choice([0.0, 0.6])),
        iou=float(rng.choice([0.0, 0.1, 0.5])),
        confirm_frames=int(rng.integers(1, 4)),
        lost_s=float(rng.choice([0.05, 1.0])),
        same_class=bool(rng.integers(0, 2)),
    )


def spoilt(frame: Detections) -> Detections:
    """The frame with a box without end, which no decoder gives, and which is no object."""
    boxes, scores = frame.boxes.copy(), frame.scores.copy()
    boxes[-1:, 2:], scores[-1:] = np.inf, -1.0
    return replace(frame, boxes=boxes, scores=scores)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_tracks_are_the_same_bits(stages: NativeStages, seed: int) -> None:
    rng = np.random.default_rng(seed)
    config, first_id = a_tracker_config(rng), int(rng.integers(1, 1000))
    trackers = Tracker(config, first_id), NativeTracker(config, first_id, stages)
    spread = rng.choice([20, 100, 400])
    objects = rng.uniform((0, 0, 5, 5), (spread, spread, 60, 60), (int(rng.integers(0, 40)), 4))
    time_s = float(rng.choice([0.0, 1e6]))
    for number in range(12):
        time_s += float(rng.choice([0.0, 1 / 30, 0.2, 3.0], p=[0.1, 0.7, 0.15, 0.05]))
        frame = a_frame(rng, objects)
        if rng.random() < 0.05:
            frame = spoilt(frame)
        if number == 6:
            config = a_tracker_config(rng)
            for one in trackers:
                one.config = config
        with np.errstate(all="ignore"):
            if rng.random() < 0.2:
                reference, ours = (one.predict(time_s) for one in trackers)
            else:
                reference, ours = (one.update(frame, time_s) for one in trackers)
        assert_same(ours, reference, DETECTED)
        assert_same(trackers[1].tracks, trackers[0].tracks, TRACKED)
        assert trackers[0].next_id == trackers[1].next_id


def test_a_frame_that_is_no_number_is_left_to_the_reference(stages: NativeStages) -> None:
    rng = np.random.default_rng()
    frame = a_frame(rng, rng.uniform(5, 60, (30, 4)))
    settings_of = native._settings_of(TrackerConfig())
    tracker = NativeTracker(TrackerConfig(), 1, stages)
    tracker.update(frame, 0.0)
    call = tracker._call
    before = [getattr(tracker.tracks, name).tobytes() for name in TRACKED]
    for name, value in (("boxes", np.nan), ("scores", np.nan), ("boxes", np.inf)):
        values = {key: getattr(frame, key).copy() for key in ("boxes", "scores", "class_ids")}
        values[name][-1] = value
        ids, stays = np.zeros(len(frame), np.int64), np.zeros(len(frame), bool)
        pointers = (array.ctypes.data for array in values.values())
        count = stages.track(
            ctypes.byref(call), ctypes.byref(settings_of), *pointers, len(frame), 1.0,
            ids.ctypes.data, stays.ctypes.data,
        )  # fmt: skip
        assert count == -1
        assert before == [getattr(tracker.tracks, name).tobytes() for name in TRACKED]


def test_many_tracks_that_overlap_are_the_same_bits(stages: NativeStages) -> None:
    rng = np.random.default_rng()
    trackers = Tracker(TrackerConfig()), NativeTracker(TrackerConfig(), 1, stages)
    objects = rng.uniform((0, 0, 30, 30), (300, 300, 60, 60), (200, 4))
    for number in range(8):
        frame = a_frame(rng, objects)
        reference, ours = (one.update(frame, number / 30) for one in trackers)
        assert_same(ours, reference, DETECTED)
        assert_same(trackers[1].tracks, trackers[0].tracks, TRACKED)


def test_tracks_that_were_read_stay_as_they_were(stages: NativeStages) -> None:
    tracker = NativeTracker(TrackerConfig(), 1, stages)
    boxes, scores = np.array([[9, 9, 30, 30]], np.float32), np.array([0.9], np.float32)
    frame = Detections(boxes, scores, np.zeros(1, np.int64))
    tracker.update(frame, 0.0)
    tracks = tracker.tracks
    before = tracks.states.tobytes()
    tracker.update(frame, 1.0)
    assert tracks.states.tobytes() == before != tracker.tracks.states.tobytes()


# --- a frame in one call


def a_wide_view(rng: np.random.Generator) -> View:
    geometry = Geometry(*rng.uniform(0.3, 3.0, 2).tolist(), *rng.integers(-20, 9, 2).tolist())
    return View(geometry, *rng.integers(300, 900, 4).tolist())


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_frames_in_one_call_are_the_same_bits(stages: NativeStages, seed: int) -> None:
    rng = np.random.default_rng(seed)
    config, first_id = a_tracker_config(rng), int(rng.integers(1, 1000))
    reference, tracker = Tracker(config, first_id), NativeTracker(config, first_id, stages)
    decoder = UltralyticsDetect(
        score_threshold=float(rng.choice([0.05, 0.25, 0.6])),
        max_detections=int(rng.choice([1, 30, 100])),
    )
    head, view = a_head(rng, 3, int(rng.choice([0, 9, 60, 400])), 0), a_wide_view(rng)
    for number in range(8):
        head[:2] += rng.normal(0.0, 2.0, head[:2].shape).astype(np.float32)
        time_s = number / 30
        with running(None), np.errstate(all="ignore"):
            decoded = decode({"output0": head[None]}, decoder, view)
            assert isinstance(decoded, Detections)
            expected = reference.update(decoded, time_s)
        if rng.random() < 0.2:  # what the library leaves to others in between
            followed = tracker.update(decoded, time_s)
        else:
            ours = tracker.follow(head, 3, decoder, view, time_s)
            followed = tracker.update(decoded, time_s) if ours is None else ours[0]
        assert_same(followed, expected, DETECTED)
        assert_same(tracker.tracks, reference.tracks, TRACKED)
        assert tracker.next_id == reference.next_id


def a_plain_head(rng: np.random.Generator, objects: int, cells: int = 2000) -> np.ndarray:
    """A head [7, A] with objects far apart, at the same places each time, of changing scores."""
    head = np.zeros((7, cells), np.float32)
    at = np.arange(objects)
    head[0, at], head[1, at] = 20 + at % 20 * 40, 20 + at // 20 * 40
    head[2:4, at] = 20
    head[4, at] = rng.uniform(0.3, 0.9, objects)
    return head


def test_a_frame_in_one_call_tells_when_it_was_decoded(stages: NativeStages) -> None:
    rng, view = np.random.default_rng(), View(Geometry(1.0, 1.0), 800, 800, 800, 800)
    tracker = NativeTracker(TrackerConfig(), 1, stages)
    begin_ns = time.monotonic_ns()
    followed = tracker.follow(a_plain_head(rng, 20), 3, UltralyticsDetect(), view, 0.0)
    assert followed is not None
    assert begin_ns < followed[1] < time.monotonic_ns()
    boxes = followed[0].boxes.copy()
    tracker.follow(a_plain_head(rng, 0), 3, UltralyticsDetect(), view, 0.1)
    assert len(boxes) > 5
    assert (followed[0].boxes == boxes).all()  # a sink may have kept them


def test_a_frame_that_one_call_does_not_take_leaves_the_tracks(stages: NativeStages) -> None:
    rng, view = np.random.default_rng(), View(Geometry(1.0, 1.0), 800, 800, 800, 800)
    config, tracker = UltralyticsDetect(), NativeTracker(TrackerConfig(), 1, stages)
    head = a_plain_head(rng, 20)
    assert tracker.follow(head, 3, config, view, 0.0) is not None
    before = [getattr(tracker.tracks, name).tobytes() for name in TRACKED]
    crowd = np.full((7, candidates.MAX_CANDIDATES + 1), 0.9, np.float32)
    for refused in (head[:, ::2], head.astype(np.float64), crowd):
        assert tracker.follow(refused, 3, config, view, 1 / 30) is None
        assert before == [getattr(tracker.tracks, name).tobytes() for name in TRACKED]


class HeadDouble:
    """An engine of a batch, whose frames have other objects each time."""

    reports = ()
    dims = ()

    def __init__(self, seed: int, batch: int = 1) -> None:
        self.inputs = (TensorInfo(name="images", dtype="float32", shape=(batch, 3, 64, 64)),)
        self.outputs = (TensorInfo(name="output0", dtype="float32", shape=(batch, 7, 40)),)
        self._rng = np.random.default_rng(seed)
        self._heads = np.full((batch, 7, 40), 7.0, np.float32)
        self._heads[:, 0] = 4 + np.arange(40) % 8 * 8
        self._heads[:, 1] = 8 + np.arange(40) // 8 * 12

    def infer(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        moves = self._rng.normal(0.0, 1.0, self._heads[:, :2].shape)
        self._heads[:, :2] += moves.astype(np.float32)
        self._heads[:, 4:] = self._rng.uniform(0.0, 0.9, self._heads[:, 4:].shape)
        return {"output0": self._heads.copy()}


def results_of(
    config: PipelineConfig, seed: int, library: NativeStages | None, change: Any = None
) -> tuple[list[tuple[Any, ...]], int]:
    """What a pipeline says of twelve frames a camera, and how many of them one call did."""
    names = [model.name for model in config.networks]
    cameras = [camera.id for camera in config.cameras]
    with running(library), patch.object(NativeTracker, "follow", autospec=True) as follow:
        answers: list[Any] = []

        def call(*arguments: Any) -> Any:
            answers.append(FOLLOW(*arguments))
            return answers[-1]

        follow.side_effect = call
        controls = Controls()
        first, *others = (
            Model(HeadDouble(seed + i, len(cameras)), ("a", "b", "c"), "")
            for i in range(len(names))
        )
        runner = BatchRunner(config, first, controls, dict(zip(names[1:], others, strict=True)))
        results = []
        for number in range(12):
            if number == 6 and change is not None:
                change(runner, controls)
            at = Stamp(number * 33_000_000, 0)
            batch = [
                Frame(np.zeros((64, 64, 3), np.uint8), number, at, at, "test://", camera)
                for camera in cameras
            ]
            for result in runner.run(batch, ()):
                event = result.event
                assert ("track" in event.latency_ms) == (config.tracker is not UNSET)
                results.append((event.detections, event.zones, event.lines, event.zone_events))
        runner.close()
    return results, sum(answer is not None for answer in answers)


FOLLOW = NativeTracker.follow
PART = RoiConfig(polygon=((0.1, 0.1), (0.9, 0.1), (0.9, 0.9)))


class SeeingTap:
    def offer(self, frame: Frame, decoded: Any) -> None:
        decoded()


DECODE = UltralyticsDetect(score_threshold=0.1)
SQUARE = PreprocessConfig(width=64, height=64)
TWO_CAMERAS = (SourceConfig(uri="test://", id="cam"), SourceConfig(uri="test://", id="yard"))
ZONE = ZoneConfig(name="z", polygon=((0.2, 0.2), (0.8, 0.2), (0.5, 0.9)))
FIRST = PipelineModel(name="first", engine="a", labels="a", preprocess=SQUARE, decode=DECODE)
SECOND = msgspec.structs.replace(FIRST, name="second", engine="b")


@pytest.mark.parametrize(
    ("tables", "change", "at_once"),
    [
        pytest.param({}, None, 12, id="all"),
        pytest.param({"zones": (ZONE,)}, None, 12, id="zones"),
        pytest.param({"roi": PART}, None, 0, id="region"),
        pytest.param({"tracker": UNSET}, None, 0, id="untracked"),
        pytest.param({"tracker": TrackerConfig(every_nth=3)}, None, 4, id="predicted between"),
        pytest.param({"sources": TWO_CAMERAS}, None, 24, id="batch of cameras"),
        pytest.param(
            {"sources": TWO_CAMERAS, "zones": (ZONE,), "tracker": TrackerConfig(every_nth=2)},
            None, 12, id="predicted between, of two cameras",
        ),
        pytest.param(
            {"models": (FIRST, msgspec.structs.replace(SECOND, every_nth=3))},
            None, 8, id="second model on some frames",
        ),
        pytest.param(
            {"models": (FIRST, SECOND), "tracker": TrackerConfig(model="second")},
            None, 0, id="second model followed",
        ),
        pytest.param(
            {}, lambda runner, controls: controls.set_least_score("cam", 0.5), 6, id="least score"
        ),
        pytest.param(
            {}, lambda runner, controls: setattr(runner, "tap", SeeingTap()), 6, id="tapped"
        ),
    ],
)  # fmt: skip
def test_pipelines_say_the_same_with_and_without_the_library(
    stages: NativeStages, tables: dict[str, Any], change: Any, at_once: int
) -> None:
    one_model = {} if "models" in tables else {"preprocess": SQUARE, "decode": DECODE}
    config = PipelineConfig(
        name="p",
        **{
            "sources": (SourceConfig(uri="test://", id="cam"),),
            "tracker": TrackerConfig(),
            **one_model,
            **tables,
        },
    )
    seed = int(np.random.default_rng().integers(2**32))
    results, number = results_of(config, seed, stages, change)
    assert results == results_of(config, seed, None, change)[0], seed
    assert number == at_once
    assert sum(len(objects) for objects, *_ in results) > 60


# --- which one runs


def test_the_log_says_which_one_runs(
    stages: NativeStages, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    for library, sentence in (
        ("libnowhere.so.1", "run in Python: libnowhere.so.1: "),
        (stages.path, f"run in {stages.path}"),
    ):
        monkeypatch.setattr(native, "LIBRARY", library)
        native.native_stages.cache_clear()
        tracker = native.new_tracker(TrackerConfig(), 1)
        assert isinstance(tracker, NativeTracker) == (library == stages.path)
        assert f"decoding and tracking {sentence}" in caplog.messages[-1]
    native.native_stages.cache_clear()


def test_a_library_of_another_version_is_not_used(
    stages: NativeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    with pytest.raises(OSError, match=r"libstages.so: its stages have version 1, not 2"):
        NativeStages(stages.path)
    with pytest.raises(OSError, match=r"its stages have version 0"):
        NativeStages("libc.so.6")


@pytest.mark.slow
def test_sanitizers_find_nothing() -> None:
    """AddressSanitizer and UBSan on all of the above, in a process that has loaded them first."""
    runtime = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = os.environ | {
        "STAGES_FLAGS": "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover",
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    }
    run_all(environment)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stages_on_aarch64_give_the_same_bits() -> None:
    """All of the above by stages that are compiled for aarch64 and run below qemu."""
    if not all(map(shutil.which, AARCH64)):
        pytest.skip(f"{' or '.join(AARCH64)} is not installed")
    run_all(os.environ | {"STAGES_ON_AARCH64": "1"})


def run_all(environment: dict[str, str]) -> None:
    """Run the tests of this file that are not slow in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-m", "not slow"]
    run = subprocess.run(
        [*command, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert " passed" in run.stdout


def test_a_library_without_a_function_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, library = tmp_path / "part.c", tmp_path / "libpart.so"
    source.write_text(f"int tandem_stages_version(void) {{ return {native.VERSION}; }}")
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    monkeypatch.setattr(native, "LIBRARY", str(library))
    native.native_stages.cache_clear()
    assert native.native_stages() is None
    native.native_stages.cache_clear()


def test_a_library_of_1_0_0_runs_what_it_has(tmp_path: Path) -> None:
    source, library = tmp_path / "old.c", tmp_path / "libold.so"
    names = ("planes", "decode", "track")
    source.write_text(
        f"int tandem_stages_version(void) {{ return {native.VERSION}; }}\n"
        + "".join(f"void tandem_stages_{name}(void) {{}}\n" for name in names)
    )
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    old = NativeStages(str(library))
    out = np.zeros((3, 4, 6), np.float32)
    planes = NativePlanes(old, out, (1.0,) * 3, (0.0,) * 3, reverse=False)
    assert not planes.write_nv12(Nv12(np.zeros((6, 6), np.uint8), 6, 4))
    assert planes.write(np.zeros((4, 6, 3), np.uint8))
    head, view = np.zeros((7, 9), np.float32), View(Geometry(1.0, 1.0), 9, 9, 9, 9)
    tracker = NativeTracker(TrackerConfig(), 1, old)
    assert tracker.follow(head, 3, UltralyticsDetect(), view, 0.0) is None


def test_arrays_that_disagree_on_the_number_of_objects_are_refused(stages: NativeStages) -> None:
    tracker = NativeTracker(TrackerConfig(), 1, stages)
    boxes = np.tile(np.array([0, 0, 9, 9], np.float32), (50, 1))
    scores, class_ids = np.full(50, 0.9, np.float32), np.zeros(1, np.int64)
    with pytest.raises((IndexError, ValueError)):
        tracker.update(Detections(boxes, scores, class_ids), 0.0)
