"""What a pipeline knows from frame to frame: regions, tracks, zones, and results one by one."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_type_hints

import cv2
import msgspec
import numpy as np
import pytest
import supervision
from msgspec import UNSET
from video_fixtures import (
    COLOUR_TOML,
    LABELS,
    ColourDetector,
    colour_model,
    colour_pipeline,
    scene,
)

from device.errors import PipelineError
from device.update.bundle import write_bundle
from pipelines.config import load_pipeline
from pipelines.decode_config import BOXLESS, Classification
from pipelines.frame import Frame, Stamp
from pipelines.load_config import LoadConfig, LoadStep
from pipelines.results import ClassScores, Detections, Masks, no_detections
from pipelines.run import Pipeline
from pipelines.runtime.batch import Model
from pipelines.runtime.load_control import LoadControl
from pipelines.runtime.pipeline import RunOptions, iter_results, run_pipeline
from pipelines.runtime.trace import TraceWriter
from pipelines.sink_config import JsonlSink, SerialSink, SnapshotSink
from pipelines.sinks.events import make_event
from pipelines.sinks.files import OutputFiles, check_release
from pipelines.sinks.result import FrameResult
from pipelines.stages.decoders.table import ROWS
from pipelines.stages.roi import Roi, shifted
from pipelines.stages.scene import Scene, check_scene
from pipelines.track_config import LineConfig, RoiConfig, TrackerConfig, ZoneConfig

DETECTOR = Model(ColourDetector(), LABELS, "0" * 64)
LEFT_HALF = ((0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.0, 1.0))
TRACKER = TrackerConfig(confirm_frames=2, new_score=0.3, high_score=0.3)


def write_images(folder, *cells):
    folder.mkdir()
    for i, (column, row, colour) in enumerate(cells):
        cv2.imwrite(str(folder / f"{i:03}.png"), scene(column, row, colour))
    return folder


def walking(tmp_path, **options):
    """A red square that walks two cells right of the middle, and stays there."""
    cells = [(2, 4, "red")] * 4 + [(6, 4, "red")] * 4
    config = colour_pipeline(write_images(tmp_path / "in", *cells))
    return msgspec.structs.replace(config, **options)


def run_all(config, **options):
    results = []
    run_pipeline(
        config,
        DETECTOR,
        RunOptions(**options),
        watch=results.append,
    )
    return results


# --- regions


def test_a_crop_is_the_rectangle_around_the_polygon():
    image = np.arange(60 * 80 * 3, dtype=np.uint8).reshape(60, 80, 3)
    roi = Roi(RoiConfig(polygon=((10, 5), (50.5, 5), (30, 40.2)), units="px"))
    part, x, y = roi.crop(image)
    assert (x, y) == (10, 5)
    assert np.array_equal(part, image[5:41, 10:51])
    assert np.shares_memory(part, image)


@pytest.mark.parametrize("crop", [True, False])
def test_a_region_beside_the_frame_is_refused(crop):
    roi = Roi(RoiConfig(polygon=((100, 0), (200, 0), (200, 50)), units="px", crop=crop))
    with pytest.raises(PipelineError, match="leaves 0 x 50 pixels of a frame of 80 x 60"):
        roi.crop(np.zeros((60, 80, 3), np.uint8))


def test_an_object_that_the_border_cuts_off_is_in_a_region_that_ends_there():
    roi = Roi(RoiConfig(polygon=((0, 0), (1, 0), (1, 1), (0, 1)), anchor="bottom"))
    detections = Detections(np.float32([[10, 20, 30, 60]]), np.float32([0.5]), np.int64([0]))
    assert len(roi.keep(detections, 80, 60)) == 1


def test_results_of_a_crop_are_moved_with_all_their_parts():
    detections = Detections(
        np.float32([[1, 2, 3, 4]]),
        np.float32([0.5]),
        np.int64([0]),
        keypoints=np.float32([[[1, 2, 0.5]]]),
        masks=Masks((np.ones((2, 2), np.float32),), np.float32([[1, 2, 3, 4]])),
        rotated=np.float32([[2, 3, 2, 2, 0.1]]),
    )
    moved = shifted(detections, 10, 20)
    assert moved.boxes.tolist() == [[11, 22, 13, 24]]
    assert moved.keypoints[0, 0].tolist() == [11, 22, 0.5]
    assert moved.masks.regions.tolist() == [[11, 22, 13, 24]]
    np.testing.assert_allclose(moved.rotated, [[12, 23, 2, 2, 0.1]], rtol=1e-6)


@pytest.mark.parametrize("crop", [True, False])
def test_only_what_is_in_the_region_is_seen_where_it_is(tmp_path, crop):
    folder = write_images(tmp_path / "in", (2, 4, "red"), (6, 4, "red"))
    config = msgspec.structs.replace(
        colour_pipeline(folder), roi=RoiConfig(polygon=LEFT_HALF, crop=crop)
    )
    inside, outside = run_all(config)
    assert [one.label for one in inside.event.detections] == ["red"]
    box = np.array(inside.event.detections[0].box)
    assert np.abs(box - [16, 32, 24, 40]).max() <= 5  # the crop is enlarged, cells are 8 pixels
    assert outside.event.detections == ()


# --- tracks and zones


def test_zones_and_lines_are_in_what_sinks_write(tmp_path):
    zone = ZoneConfig(name="left", polygon=LEFT_HALF, inertia_frames=2)
    line = LineConfig(name="gate", start=(0.5, 1.0), end=(0.5, 0.0))
    path = tmp_path / "out.jsonl"
    sinks = (JsonlSink(path=str(path)),)
    run_all(walking(tmp_path, tracker=TRACKER, zones=(zone,), lines=(line,), sinks=sinks))
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert events[0]["zones"] == {"left": {}}
    assert events[3]["zones"] == {"left": {"red": 1}}
    assert events[2]["zone_events"] == [
        {"kind": "enter", "place": "left", "track_id": 1, "label": "red"}
    ]
    assert events[-1]["lines"] == {"gate": {"in": 0, "out": 0}}
    assert set(events[0]["latency_ms"]) >= {"decode", "track"}


def test_zones_of_a_walker(tmp_path):
    zone = ZoneConfig(name="left", polygon=LEFT_HALF, inertia_frames=2)
    results = run_all(walking(tmp_path, tracker=TRACKER, zones=(zone,)))
    ids = [result.detections.track_ids.tolist() for result in results]
    assert ids[:4] == [[-1], [1], [1], [1]]
    entered = [(i, e.kind) for i, one in enumerate(results) for e in one.zones.events]
    assert entered[0] == (2, "enter")
    assert results[2].event.zones == {"left": {"red": 1}}
    assert results[2].event.zone_events[0].track_id == 1


def test_the_engine_sees_every_nth_frame_and_tracks_fill_in(tmp_path):
    runs = []

    class Counting(ColourDetector):
        def infer(self, feeds):
            runs.append(1)
            return super().infer(feeds)

    folder = write_images(tmp_path / "in", *[(2, 4, "red")] * 9)
    config = msgspec.structs.replace(
        colour_pipeline(folder), tracker=msgspec.structs.replace(TRACKER, every_nth=3)
    )
    results = list(
        iter_results(
            config,
            Model(Counting(), LABELS, ""),
            RunOptions(),
        )
    )
    assert len(runs) == 2 + 3  # two to warm up
    assert [result.event.predicted for result in results] == [UNSET, True, True] * 3
    assert [len(result.event.detections) for result in results] == [1, 0, 0, 1, 1, 1, 1, 1, 1]
    assert results[4].event.processors == ()
    assert results[4].event.t_infer_begin_ns is UNSET
    np.testing.assert_allclose(results[4].detections.boxes, results[3].detections.boxes, atol=0.5)


def test_a_result_says_when_and_where_it_was_made(tmp_path):
    (result, *_) = run_all(walking(tmp_path))
    event = result.event
    assert event.t_recv_ns <= event.t_infer_begin_ns <= event.t_infer_end_ns <= event.t_result_ns
    assert event.processors == ("cpu",)
    assert event.age_ms == pytest.approx((event.t_result_ns - event.t_capture_ns) / 1e6, abs=50)
    assert event.dropped == {}
    assert event.zones is UNSET


def test_zones_without_a_tracker_are_refused(tmp_path):
    config = walking(tmp_path, zones=(ZoneConfig(name="a", polygon=LEFT_HALF),))
    with pytest.raises(PipelineError, match=r"no \[tracker\]"):
        check_scene(config, LABELS)


def test_a_tracker_needs_boxes(tmp_path):
    config = walking(tmp_path, tracker=TRACKER)
    config = msgspec.structs.replace(config, decode=Classification(scores="scores"))
    with pytest.raises(PipelineError, match="decoder 'classification' gives none"):
        check_scene(config, LABELS)


def test_the_decoders_without_boxes_are_those_that_give_no_detections():
    gives = {row.kind: get_type_hints(row.decode)["return"] for row in ROWS}
    boxless = {kind.__struct_config__.tag for kind in BOXLESS}
    assert {kind for kind, value in gives.items() if value is not Detections} == boxless


def test_snapshots_without_a_tracker_are_refused(tmp_path):
    config = walking(tmp_path, sinks=(SnapshotSink(path="seen"),))
    with pytest.raises(PipelineError, match=r"a snapshot sink and no \[tracker\]"):
        check_scene(config, LABELS)


def test_the_tables_of_a_pipeline_are_read(tmp_path):
    path = tmp_path / "pipeline.toml"
    path.write_text(
        COLOUR_TOML.format(uri="x.mp4", source="", sinks="")
        + """
[roi]
polygon = [[0, 0], [1, 0], [1, 1]]
[tracker]
lost_s = 2.5
[[zones]]
name = "door"
polygon = [[0.1, 0.1], [0.9, 0.1], [0.5, 0.9]]
loitering_s = 10
[[lines]]
name = "gate"
start = [0, 100]
end = [640, 100]
units = "px"
[[sinks]]
kind = "serial"
port = "/dev/ttyUSB0"
dialect = "mavlink"
heights_m = { red = 0.5 }
[[sinks]]
kind = "snapshot"
path = "seen"
[[sinks]]
kind = "prometheus"
"""
    )
    config = load_pipeline(path)
    assert config.lost_s == 2.5
    assert config.zones[0].loitering_s == 10.0
    assert config.lines[0].end == (640.0, 100.0)
    assert config.sinks[0].heights_m == {"red": 0.5}
    check_release(config)
    outside = msgspec.structs.replace(config, sinks=(SnapshotSink(path="/tmp/x"),))
    with pytest.raises(PipelineError, match="a release writes only in its own"):
        check_release(outside)
    port = SerialSink(port="/dev/../etc/passwd")
    with pytest.raises(PipelineError, match="name a port of the board"):
        check_release(msgspec.structs.replace(config, sinks=(port,)))


def test_the_load_of_a_board_is_judged_by_frames_that_the_engine_saw(tmp_path, monkeypatch):
    judged = []
    monkeypatch.setattr(LoadControl, "frame_done", lambda self, ms: judged.append(round(ms, 2)))
    load = LoadConfig(slow_ms=1e9, steps=(LoadStep(every_nth=2),))
    tracker = msgspec.structs.replace(TRACKER, every_nth=4)
    results = run_all(walking(tmp_path, tracker=tracker, load=load))
    seen = [one.event for one in results if one.event.predicted is UNSET]
    assert (len(results), len(seen)) == (8, 2)
    assert judged == [event.latency_ms["total"] for event in seen]


def frame_at(seconds):
    taken = Stamp(int(seconds * 1e9), int(seconds * 1e9))
    return Frame(np.zeros((64, 64, 3), np.uint8), 0, taken, taken, "test")


@pytest.mark.parametrize(
    ("roi", "start", "steps", "boxes"),
    [
        (UNSET, 10, 1, [[50.0, 20.0, 64.0, 40.0]]),  # a part of it is out of the frame
        (UNSET, 10, 9, []),
        (RoiConfig(polygon=LEFT_HALF, crop=False), -18, 1, [[22.0, 20.0, 42.0, 40.0]]),
        (RoiConfig(polygon=LEFT_HALF, crop=False), -18, 3, []),  # its centre has left the region
    ],
)
def test_a_filled_in_frame_shows_what_is_within_it(tmp_path, roi, start, steps, boxes):
    tracker = TrackerConfig(confirm_frames=1, every_nth=2, lost_s=9.0, iou=0.01)
    tracks = Scene(walking(tmp_path, tracker=tracker, roi=roi), LABELS)
    for i in range(20):  # 2 pixels a frame, to the right
        box = np.float32([[2 * i + start, 20, 2 * i + start + 20, 40]])
        seen = Detections(box, np.float32([0.9]), np.int64([0]))
        tracks.follow(seen, frame_at(i / 30.0), 0, 0)
    filled, _ = tracks.predict(frame_at((19 + steps) / 30.0))
    assert filled.boxes.round().tolist() == boxes


def test_a_tracker_that_comes_back_gives_no_number_again(tmp_path):
    tracked, plain = walking(tmp_path, tracker=TrackerConfig(confirm_frames=1)), UNSET
    tracks = Scene(tracked, LABELS)
    ids = []
    for number in range(3):
        seen = Detections(np.float32([[20, 20, 40, 40]]), np.float32([0.9]), np.int64([0]))
        objects, _ = tracks.follow(seen, frame_at(float(number)), 0, 0)
        ids += objects.track_ids.tolist()
        tracks.change(msgspec.structs.replace(tracked, tracker=plain))
        tracks.change(msgspec.structs.replace(tracked, tracker=plain))  # again: nothing to forget
        tracks.change(tracked)
    assert ids == [1, 2, 3]


def test_a_picture_is_made_once_however_many_threads_look_at_it():
    values = []
    both = threading.Barrier(2)

    def picture():
        values.append(threading.get_ident())
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # passes if the other thread makes one, too
        return np.zeros((4, 4, 3), np.uint8)

    frame = Frame(picture, 0, Stamp.now(), Stamp.now(), "test")
    with ThreadPoolExecutor(2) as threads:
        images = list(threads.map(lambda _: frame.image, range(2)))
    assert len(values) == 1
    assert images[0] is images[1]


# --- snapshots


def test_the_best_sight_of_an_object_is_written_when_it_has_gone(tmp_path):
    sinks = (SnapshotSink(path=str(tmp_path / "seen"), margin=0.0, min_score=0.1, quality=100),)
    run_all(walking(tmp_path, tracker=TRACKER, sinks=sinks))
    pictures = sorted((tmp_path / "seen").iterdir())
    assert [path.name.rpartition("-")[2] for path in pictures] == ["red.jpg"] * 2
    picture = cv2.imread(str(pictures[0]))
    assert picture.shape == (8, 8, 3)
    assert picture[4, 4, 2] > 180  # red
    assert picture[4, 4, 0] < 80


def test_a_full_folder_takes_no_snapshot_and_counts_it(tmp_path):
    files = OutputFiles(tmp_path / "data", quota_bytes=10)
    sinks = (SnapshotSink(path="seen", min_score=0.1),)
    run_all(walking(tmp_path, tracker=TRACKER, sinks=sinks), files=files)
    assert list((tmp_path / "data" / "seen").iterdir()) == []


# --- results one by one, traces


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    from toolkit.engine.build import BuildOptions, build_engine

    folder = tmp_path_factory.mktemp("bundle")
    model = colour_model(folder / "m.onnx")
    engine = folder / "m.engine"
    build_engine(model, "laptop", engine, BuildOptions(precision="fp32"))
    (folder / "pipeline.toml").write_text(COLOUR_TOML.format(uri="none", source="", sinks=""))
    (folder / "labels.txt").write_text("red\ngreen\n")
    write_bundle(
        folder / "b.bundle",
        engine=engine,
        pipeline=folder / "pipeline.toml",
        labels=folder / "labels.txt",
        name="b",
        version="1",
        profile="laptop",
    )
    return folder / "b.bundle"


def test_results_come_one_by_one(bundle, tmp_path):
    folder = write_images(tmp_path / "in", *[(3, 4, "red")] * 5)
    seen = []
    for result in Pipeline(bundle, source=str(folder)).results():
        seen.append(result.detections.boxes.round().tolist())
        if len(seen) == 3:
            break
    assert seen == [[[24, 32, 32, 40]]] * 3
    assert not [one for one in threading.enumerate() if one.name == "stats"]


def test_a_result_converts_to_supervision(tmp_path):
    (_, result, *_) = run_all(walking(tmp_path, tracker=TRACKER))
    converted = result.to_supervision()
    assert isinstance(converted, supervision.Detections)
    assert converted.xyxy.tolist() == result.detections.boxes.tolist()
    assert converted.tracker_id.tolist() == [1]
    assert converted.data["class_name"].tolist() == ["red"]
    objects = result.detections
    pairs = [
        (converted.xyxy, objects.boxes),
        (converted.confidence, objects.scores),
        (converted.class_id, objects.class_ids),
        (converted.tracker_id, objects.track_ids),
    ]
    assert all(np.shares_memory(theirs, ours) for theirs, ours in pairs)


def test_masks_and_key_points_convert_to_supervision(tmp_path):
    (result, *_) = run_all(walking(tmp_path))
    full = np.ones((4, 4), np.float32)
    box = np.float32([[8, 16, 24, 32]])
    points = np.float32([[[9, 17, 0.75], [20, 30, 0.5]]])
    objects = replace(
        result.detections, boxes=box, masks=Masks((full * [1, 1, -1, -1],), box), keypoints=points
    )
    result = replace(result, decoded=objects)
    mask = result.to_supervision().mask
    height, width = result.frame.size
    assert (mask.shape, mask.dtype) == ((1, height, width), np.bool_)
    expected = np.zeros((height, width), bool)
    expected[16:32, 8:16] = True  # the left half of the box
    assert np.array_equal(mask[0], expected)
    converted = result.to_supervision_keypoints()
    assert isinstance(converted, supervision.KeyPoints)
    assert converted.xy.tolist() == [[[9, 17], [20, 30]]]
    assert converted.data["class_name"].tolist() == ["red"]
    assert np.shares_memory(converted.xy, points)
    assert np.shares_memory(converted.keypoint_confidence, points)
    with pytest.raises(TypeError, match="no key points"):
        replace(result, decoded=replace(objects, keypoints=None)).to_supervision_keypoints()


def test_a_result_converts_to_pandas_without_copies(tmp_path):
    (_, result, *_) = run_all(walking(tmp_path, tracker=TRACKER))
    table = result.to_pandas()
    assert [*table] == ["x1", "y1", "x2", "y2", "score", "class_id", "track_id", "label"]
    objects = result.detections
    assert table[["x1", "y1", "x2", "y2"]].to_numpy().tolist() == objects.boxes.tolist()
    assert table["label"].tolist() == ["red"]
    numbers = {"x1": objects.boxes, "score": objects.scores, "track_id": objects.track_ids}
    assert all(np.shares_memory(table[key].to_numpy(), ours) for key, ours in numbers.items())
    event = msgspec.structs.replace(result.event, detections=())
    assert len(replace(result, decoded=no_detections(), event=event).to_pandas()) == 0


def test_a_result_without_objects_says_what_it_is(tmp_path):
    (result, *_) = run_all(walking(tmp_path))
    scores = ClassScores(np.float32([0.5]), np.int64([0]))
    with pytest.raises(TypeError, match="ClassScores"):
        _ = replace(result, decoded=scores).detections


def test_a_trace_has_the_stages_of_every_frame_in_order(tmp_path):
    path = tmp_path / "t.json"
    config = walking(tmp_path, tracker=TRACKER)
    with TraceWriter(path) as trace:
        run_pipeline(
            config,
            DETECTOR,
            RunOptions(),
            watch=trace.add,
        )
    events = json.loads(path.read_text())["traceEvents"]
    bars = [one for one in events if one["ph"] == "X"]
    stages = ["transport", "wait", "preprocess", "queue", "infer", "collect", "decode", "track"]
    stages.append("sinks")
    rows = {one["tid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    camera = [one for one in bars if rows[one["tid"]] != "cpu"]
    assert [one["name"] for one in camera] == stages * 8
    for one, after in pairwise(camera[:9]):
        assert after["ts"] >= one["ts"] + one["dur"] - 20.0  # stages are rounded to 10 us
    assert [one["args"]["seq"] for one in bars if rows[one["tid"]] == "cpu"] == list(range(8))
    for row in rows:  # bars of a row do not overlap
        spans = [(one["ts"], one["ts"] + one["dur"]) for one in bars if one["tid"] == row]
        assert all(begin >= end - 20.0 for (_, end), (begin, _) in pairwise(spans))
    assert bars[0]["args"]["seq"] == 0
    with pytest.raises(PipelineError, match="is there already"):
        TraceWriter(path)


def test_a_full_disk_ends_the_trace_and_not_the_run(caplog):
    frame = Frame(np.zeros((4, 4, 3), np.uint8), 0, Stamp.now(), Stamp.now(), "test")
    event = make_event("p", frame, no_detections(), [], {"infer": 1.0})
    with TraceWriter(Path("/dev/full"), overwrite=True) as trace:
        for _ in range(500):  # more than the file's buffer holds
            trace.add(FrameResult(frame, no_detections(), event))
    assert caplog.text.count("the trace /dev/full is not complete: ") == 1
