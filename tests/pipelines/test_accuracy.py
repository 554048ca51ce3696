"""Mean average precision against hand-computed cases and an independent brute force."""

import numpy as np
import pytest

from pipelines.results import Detections
from pipelines.stages.accuracy import Truth, iou_matrix, mean_average_precision

HERE, THERE, ELSEWHERE = [0, 0, 10, 10], [50, 50, 60, 60], [90, 90, 99, 99]


def detected(*rows):
    boxes = np.array([r[0] for r in rows], np.float32).reshape(-1, 4)
    return Detections(
        boxes, np.array([r[1] for r in rows], np.float32), np.array([r[2] for r in rows], np.int64)
    )


def truth(*rows):
    boxes = np.array([r[0] for r in rows], np.float32).reshape(-1, 4)
    return Truth(boxes, np.array([r[1] for r in rows], np.int64))


def test_perfect_detections_give_one():
    result = mean_average_precision(
        [detected((HERE, 0.9, 0), (THERE, 0.8, 1))], [truth((HERE, 0), (THERE, 1))]
    )
    assert result.map50 == 1.0
    assert result.by_class == {0: 1.0, 1: 1.0}


def test_no_detections_give_zero():
    assert mean_average_precision([detected()], [truth((HERE, 0))]).map50 == 0.0


def test_a_better_ranked_miss_halves_the_precision():
    predictions = [detected((ELSEWHERE, 0.9, 0), (HERE, 0.8, 0))]
    assert mean_average_precision(predictions, [truth((HERE, 0))]).map50 == pytest.approx(0.5)


def test_a_worse_ranked_miss_costs_nothing():
    predictions = [detected((HERE, 0.9, 0), (ELSEWHERE, 0.8, 0))]
    assert mean_average_precision(predictions, [truth((HERE, 0))]).map50 == 1.0


def test_hand_computed_curve_with_envelope():
    # hit, miss, hit, over 3 objects: precision 1, 1/2, 2/3; the envelope lifts 1/2 to 2/3.
    predictions = [detected((HERE, 0.9, 0), (ELSEWHERE, 0.8, 0), (THERE, 0.7, 0))]
    truths = [truth((HERE, 0), (THERE, 0), ([200, 0, 210, 10], 0))]
    expected = 1 / 3 * 1.0 + 1 / 3 * 2 / 3
    assert mean_average_precision(predictions, truths).map50 == pytest.approx(expected)


def test_second_detection_of_one_object_is_a_miss():
    predictions = [detected((HERE, 0.9, 0), ([0, 0, 10, 9], 0.8, 0), (THERE, 0.7, 0))]
    result = mean_average_precision(predictions, [truth((HERE, 0), (THERE, 0))])
    assert result.map50 == pytest.approx(0.5 * 1.0 + 0.5 * 2 / 3)


def test_ranking_covers_all_images():
    predictions = [detected((ELSEWHERE, 0.5, 0)), detected((HERE, 0.9, 0))]
    assert mean_average_precision(predictions, [truth(), truth((HERE, 0))]).map50 == 1.0
    predictions = [detected((ELSEWHERE, 0.95, 0)), detected((HERE, 0.9, 0))]
    assert mean_average_precision(predictions, [truth(), truth((HERE, 0))]).map50 == 0.5


def test_classes_do_not_mix_and_absent_ones_do_not_count():
    predictions = [detected((HERE, 0.9, 1), (THERE, 0.8, 2))]
    result = mean_average_precision(predictions, [truth((HERE, 0), (THERE, 2))])
    assert result.by_class == {0: 0.0, 2: 1.0}
    assert result.map50 == 0.5


def test_iou_threshold_is_inclusive():
    half = [0, 0, 10, 5]
    predictions = [detected((half, 0.9, 0))]
    assert mean_average_precision(predictions, [truth((HERE, 0))]).map50 == 1.0
    assert mean_average_precision(predictions, [truth((HERE, 0))], 0.51).map50 == 0.0


def test_iou_of_empty_and_touching_boxes_is_zero():
    boxes = np.array([[0, 0, 0, 0], [10, 0, 20, 10]], np.float32)
    matrix = iou_matrix(boxes, np.array([[0, 0, 10, 10], [0, 0, 0, 0]], np.float32))
    assert matrix.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def brute_force(predictions, truths, class_id):
    """Average precision from its definition: for each recall, the best precision at or above."""
    rows = [
        (float(p.scores[i]), n, p.boxes[i].tolist())
        for n, p in enumerate(predictions)
        for i in range(len(p.boxes))
        if p.class_ids[i] == class_id
    ]
    rows.sort(key=lambda row: -row[0])
    expected = [
        [t.boxes[i].tolist() for i in range(len(t.boxes)) if t.class_ids[i] == class_id]
        for t in truths
    ]
    total = sum(map(len, expected))
    taken, points, hits = set(), [], 0
    for rank, (_, n, box) in enumerate(rows, 1):
        overlaps = [_iou(box, second) for second in expected[n]]
        best = max(range(len(overlaps)), key=overlaps.__getitem__, default=None)
        if best is not None and overlaps[best] >= 0.5 and (n, best) not in taken:
            taken.add((n, best))
            hits += 1
        points.append((hits / total, hits / rank))
    value, last = 0.0, 0.0
    for recall in sorted({r for r, _ in points if r > 0}):
        value += (recall - last) * max(p for r, p in points if r >= recall)
        last = recall
    return value


def _iou(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    sizes = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return width * height / (sum(sizes) - width * height)


@pytest.mark.parametrize("seed", range(5))
def test_random_scenes_equal_the_brute_force(seed):
    rng = np.random.default_rng(seed)
    predictions, truths = [], []
    for _ in range(12):
        corners = rng.uniform(0, 60, (6, 2))
        boxes = np.concatenate([corners, corners + rng.uniform(10, 30, (6, 2))], 1)
        classes = rng.integers(0, 3, 6)
        noisy = np.repeat(boxes, 2, 0) + rng.normal(0, 3.0, (12, 4))
        shown = np.where(rng.random(12) < 0.8, np.repeat(classes, 2), rng.integers(0, 3, 12))
        scores = rng.permutation(12) / 12 + rng.random() / 100
        truths.append(Truth(boxes.astype(np.float32), classes))
        predictions.append(Detections(noisy.astype(np.float32), scores.astype(np.float32), shown))
    result = mean_average_precision(predictions, truths)
    assert 0.1 < result.map50 < 0.9
    for class_id, value in result.by_class.items():
        assert value == pytest.approx(brute_force(predictions, truths, class_id), abs=1e-9)
