"""Tracks: assignment and motion against references, numbers that stay, scores of whole scenes."""

import warnings

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from pipelines.results import NO_TRACK, Detections
from pipelines.stages import track_kalman as kalman
from pipelines.stages.track import Tracker, iou_matrix
from pipelines.stages.track_assign import assign
from pipelines.track_config import TrackerConfig

CONFIG = TrackerConfig()


def seen(*rows):
    """Detections of (x, y, score, class): boxes of 40 x 80 pixels."""
    place = np.array([row[:2] for row in rows], np.float32).reshape(-1, 2)
    return Detections(
        np.concatenate([place, place + np.float32([40, 80])], axis=1),
        np.array([row[2] for row in rows], np.float32),
        np.array([row[3] for row in rows], np.int64),
    )


# --- assignment


@pytest.mark.parametrize("least", [0.0, 0.3])
@pytest.mark.parametrize("empty", [0.0, 0.4, 0.8])
def test_the_sum_of_weights_is_the_largest_that_there_is(least, empty):
    rng = np.random.default_rng()
    for case in range(150):
        weights = rng.random(rng.integers(1, 15, 2)).astype(np.float32)
        weights[rng.random(weights.shape) < empty] = 0.0
        if case % 3 == 0:
            weights = np.round(weights * 4) / 4  # ties
        rows, columns = assign(weights, least)
        assert len(set(rows.tolist())) == len(set(columns.tolist())) == len(rows)
        assert (weights[rows, columns] > least).all()
        gains = np.maximum(weights.astype(np.float64) - least, 0.0)
        best = gains[linear_sum_assignment(gains, maximize=True)].sum()
        assert gains[rows, columns].sum() == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_nothing_is_assigned_to_nothing(shape):
    rows, columns = assign(np.zeros(shape, np.float32), 0.1)
    assert len(rows) == len(columns) == 0


# --- motion


def dense_filter(boxes, steps):
    """The same filter with 8 x 8 matrices, one box at a time; a row of `boxes` a measurement."""
    size = np.maximum(boxes[0][[2, 3, 2, 3]], 1.0)
    mean = np.concatenate([boxes[0], np.zeros(4)])
    variance = np.concatenate([(2 * size / 20) ** 2, (10 * size / 160) ** 2])
    covariance = np.diag(variance)
    see = np.eye(4, 8)
    for box, step in zip(boxes[1:], steps, strict=True):
        size = np.maximum(mean[[2, 3, 2, 3]], 1.0)
        move = np.eye(8)
        move[:4, 4:] = step * np.eye(4)
        noise = step * np.diag(np.concatenate([(size / 20) ** 2, (size / 160) ** 2]))
        mean, covariance = move @ mean, move @ covariance @ move.T + noise
        size = np.maximum(mean[[2, 3, 2, 3]], 1.0)
        innovation = see @ covariance @ see.T + np.diag((size / 20) ** 2)
        gain = covariance @ see.T @ np.linalg.inv(innovation)
        mean = mean + gain @ (box - see @ mean)
        covariance = covariance - gain @ innovation @ gain.T
    return mean, covariance


def test_four_small_filters_are_the_one_large_one():
    rng = np.random.default_rng()
    boxes = rng.uniform(30, 300, (6, 7, 4))  # six measurements of seven tracks
    steps = rng.uniform(0.5, 4.0, 5)
    states = kalman.start(boxes[0])
    for measured, step in zip(boxes[1:], steps, strict=True):
        states = kalman.update(kalman.predict(states, step * kalman.STEP_S), measured)
    for track in range(7):
        mean, covariance = dense_filter(boxes[:, track], steps)
        np.testing.assert_allclose(states[:2, track].ravel(), mean, rtol=1e-9, atol=1e-9)
        ours = states[[kalman.VAR_P, kalman.COV_PV, kalman.VAR_V], track]
        dense = [np.diag(covariance)[:4], np.diag(covariance, 4), np.diag(covariance)[4:]]
        np.testing.assert_allclose(ours, dense, rtol=1e-9, atol=1e-9)


def test_overlaps_are_those_of_a_picture():
    rng = np.random.default_rng()
    start = rng.integers(0, 30, (8, 2))
    boxes = np.concatenate([start, start + rng.integers(1, 30, (8, 2))], axis=1)
    painted = np.zeros((8, 60, 60), bool)
    for mask, (x1, y1, x2, y2) in zip(painted, boxes, strict=True):
        mask[y1:y2, x1:x2] = True
    pixels = painted.reshape(8, -1).astype(np.int64)
    shared = pixels @ pixels.T
    union = pixels.sum(1)[:, None] + pixels.sum(1) - shared
    ious = iou_matrix(boxes.astype(np.float32), boxes.astype(np.float32))
    np.testing.assert_allclose(ious, shared / union, atol=1e-6)


# --- numbers


def test_a_track_has_no_number_until_it_is_confirmed():
    tracker = Tracker(TrackerConfig(confirm_frames=3))
    ids = [tracker.update(seen((100 + 2 * i, 50, 0.9, 0)), i / 30).track_ids for i in range(4)]
    assert [one.tolist() for one in ids] == [[NO_TRACK], [NO_TRACK], [1], [1]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_left_out_and_the_others_keep_their_numbers(value):
    tracker = Tracker(CONFIG)
    tracker.update(seen((100, 50, 0.9, 0), (300, 50, 0.9, 0)), 0.0)
    frame = seen((100, 50, 0.9, 0), (300, 50, 0.9, 0), (500, 50, 0.9, 0), (700, 50, 0.9, 0))
    frame.boxes[2, 2] = value
    frame.scores[3] = value
    tracked = tracker.update(frame, 1 / 30)
    assert tracked.boxes.tolist() == frame.boxes[:2].tolist()
    assert tracked.track_ids.tolist() == [1, 2]


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_boxes_beyond_float32_are_tracks_of_their_own():
    tracker = Tracker(CONFIG)
    for number in range(3):
        frame = seen((100, 50, 0.9, 0), (0, 0, 0.9, 0), (1e30, 1e30, 0.8, 0))
        frame.boxes[1:, 2:] = 3e38
        tracked = tracker.update(frame, number / 30)
    assert tracked.track_ids[0] == 1
    assert len(tracked) == 3


def test_what_was_seen_once_uses_up_no_number():
    tracker = Tracker(CONFIG)
    for i in range(5):
        tracker.update(seen((300 * i, 50, 0.9, 0)), i / 30)
    assert len(tracker.tracks) == 1
    for i in range(5, 8):
        tracked = tracker.update(seen((1500, 50, 0.9, 0)), i / 30)
    assert tracked.track_ids.tolist() == [1]


@pytest.mark.parametrize(("gap_s", "number"), [(0.9, 1), (1.1, 2)])
def test_a_track_waits_seconds_not_frames(gap_s, number):
    tracker = Tracker(TrackerConfig(lost_s=1.0))
    for i in range(10):
        tracker.update(seen((100, 50, 0.9, 0)), i / 30)
    back_s = 9 / 30 + gap_s
    for i in range(3):  # one frame in between or none: the same
        tracked = tracker.update(seen((100, 50, 0.9, 0)), back_s + i / 30)
    assert tracked.track_ids.tolist() == [number]


def test_a_walker_is_found_behind_dropped_frames():
    tracker = Tracker(CONFIG)
    for i in [*range(20), 35, 36, 50]:  # 6 px a frame: 90 px further on, more than its width
        tracked = tracker.update(seen((100 + 6 * i, 50, 0.9, 0)), i / 30)
    assert tracked.track_ids.tolist() == [1]


def test_weak_detections_extend_tracks_and_start_none():
    tracker = Tracker(CONFIG)
    for i in range(3):
        tracker.update(seen((100, 50, 0.9, 0)), i / 30)
    tracked = tracker.update(seen((100, 50, 0.2, 0), (600, 50, 0.45, 0)), 0.1)
    assert tracked.track_ids.tolist() == [1]
    assert tracked.scores.tolist() == [np.float32(0.2)]


def test_detections_between_the_limits_stay_without_a_track():
    tracker = Tracker(TrackerConfig(high_score=0.5, new_score=0.6))
    for i in range(3):
        tracked = tracker.update(seen((100, 50, 0.55, 0)), i / 30)
    assert tracked.track_ids.tolist() == [NO_TRACK]
    assert len(tracker.tracks) == 0


@pytest.mark.parametrize(("same_class", "number"), [(True, NO_TRACK), (False, 1)])
def test_a_track_keeps_its_class_unless_it_may_change(same_class, number):
    tracker = Tracker(TrackerConfig(same_class=same_class))
    for i in range(3):
        tracker.update(seen((100, 50, 0.9, 0)), i / 30)
    assert tracker.update(seen((100, 50, 0.9, 1)), 0.1).track_ids.tolist() == [number]


def test_crossing_objects_keep_their_numbers():
    tracker = Tracker(CONFIG)
    for i in range(60):
        tracked = tracker.update(seen((100 + 5 * i, 50, 0.9, 0), (400 - 5 * i, 90, 0.9, 0)), i / 30)
        if i == 5:
            before = tracked.track_ids.tolist()
    assert tracked.track_ids.tolist() == before


def test_between_two_runs_of_the_engine_tracks_move_on():
    tracker = Tracker(CONFIG)
    for i in range(0, 30, 2):
        tracker.update(seen((100 + 6 * i, 50, 0.8, 2)), i / 30)
    between = tracker.predict(29 / 30)
    assert between.track_ids.tolist() == [1]
    assert between.class_ids.tolist() == [2]
    assert between.scores.tolist() == [np.float32(0.8)]
    np.testing.assert_allclose(between.boxes, seen((100 + 6 * 29, 50, 0.8, 2)).boxes, atol=1.0)
    tracker.update(seen(), 1.0)
    assert len(tracker.predict(31 / 30)) == 0  # it was not seen in the last frame


def test_a_frame_without_objects_is_a_frame():
    tracker = Tracker(CONFIG)
    assert tracker.update(seen(), 0.0).track_ids.tolist() == []
    assert len(tracker.predict(0.1)) == 0


# --- whole scenes


@pytest.mark.parametrize(
    ("objects", "share", "mota", "idf1"), [(20, 1.0, 0.94, 0.94), (20, 1 / 3, 0.90, 0.84)]
)
def test_scenes_score_as_high_as_they_did(objects, share, mota, idf1):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # motmetrics speaks to an older pandas
        from scripts.bench_tracker import measure, ours

        score = measure("tandem", ours, objects, 150, share)
    assert score.mota >= mota
    assert score.idf1 >= idf1
