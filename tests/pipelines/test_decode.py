"""Network outputs become detections, compared with a brute-force reference."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.errors import PipelineError
from pipelines.config import PreprocessConfig
from pipelines.decode_config import Classification, LtrbGrid
from pipelines.results import ClassScores, Detections
from pipelines.stages.decode import View, decode
from pipelines.stages.nms import CHUNK, suppress
from pipelines.stages.preprocess import fit
from pipelines.stages.view import Geometry

GRID = LtrbGrid(boxes="boxes", scores="scores", strides=(8, 16))
VIEW = View(Geometry(1.0, 1.0), 64, 32, 64, 32)
CELLS = 4 * 8 + 2 * 4


def area(box):
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def overlap(a, b):
    shared = area([max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])])
    union = area(a) + area(b) - shared
    return shared / union if union > 0 else 0.0


def brute_force_nms(boxes, scores, classes, threshold):
    picked = []
    for i in sorted(range(len(boxes)), key=lambda i: -scores[i]):
        rivals = (k for k in picked if classes[k] == classes[i])
        if all(overlap(boxes[i], boxes[k]) <= threshold for k in rivals):
            picked.append(i)
    return picked


def brute_force_grid(boxes, scores, config, view):
    """One cell at a time, in plain Python, from the definition in LtrbGrid."""
    detections, cell = [], 0
    for stride in config.strides:
        for row in range(view.input_height // stride):
            for column in range(view.input_width // stride):
                x, y = (column + 0.5) * stride, (row + 0.5) * stride
                left, top, right, bottom = (float(v) * stride for v in boxes[0, :, cell])
                class_id = int(scores[0, :, cell].argmax())
                score = float(scores[0, class_id, cell])
                box = view.geometry.to_frame(
                    np.array([[x - left, y - top, x + right, y + bottom]], np.float32)
                )[0].tolist()
                if score >= config.score_threshold and box[0] < box[2] and box[1] < box[3]:
                    detections.append((box, score, class_id))
                cell += 1
    survivors = brute_force_nms(
        [f[0] for f in detections],
        [f[1] for f in detections],
        [f[2] for f in detections],
        config.iou_threshold,
    )
    limits = (view.frame_width, view.frame_height) * 2
    placed = []
    for box, score, class_id in (detections[k] for k in survivors[: config.max_detections]):
        cut = [min(max(v, 0.0), limit) for v, limit in zip(box, limits, strict=True)]
        if cut[0] < cut[2] and cut[1] < cut[3]:
            placed.append((cut, score, class_id))
    return placed


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("resize", ["letterbox", "stretch"])
def test_grid_equals_the_cell_by_cell_reference(seed, resize):
    rng = np.random.default_rng(seed)
    preprocess = PreprocessConfig(width=64, height=32, resize=resize)
    view = View(fit(75, 110, preprocess), 110, 75, 64, 32)
    boxes = rng.uniform(-0.5, 3.0, (1, 4, CELLS)).astype(np.float32)
    scores = rng.uniform(0.0, 1.0, (1, 3, CELLS)).astype(np.float32)
    detections = decode({"boxes": boxes, "scores": scores}, GRID, view)
    expected = brute_force_grid(boxes, scores, GRID, view)
    assert isinstance(detections, Detections)
    assert len(expected) > 3
    np.testing.assert_allclose(detections.boxes, [w[0] for w in expected], atol=1e-3)
    np.testing.assert_allclose(detections.scores, [w[1] for w in expected], atol=1e-6)
    assert detections.class_ids.tolist() == [w[2] for w in expected]


def test_cells_go_level_by_level_and_row_by_row():
    boxes = np.full((1, 4, CELLS), 0.25, np.float32)
    scores = np.zeros((1, 2, CELLS), np.float32)
    scores[0, 1, 8 + 3] = 0.9  # stride 8: row 1, column 3
    scores[0, 0, 32 + 4 + 2] = 0.8  # stride 16: row 1, column 2
    detections = decode({"boxes": boxes, "scores": scores}, GRID, VIEW)
    assert detections.boxes.tolist() == [[26, 10, 30, 14], [36, 20, 44, 28]]
    assert detections.class_ids.tolist() == [1, 0]


def test_boxes_are_clipped_to_the_frame_and_those_outside_go():
    boxes = np.full((1, 4, CELLS), 9.0, np.float32)
    scores = np.zeros((1, 1, CELLS), np.float32)
    scores[0, 0, 0] = 0.9
    view = View(Geometry(1.0, 1.0, 0, 8), 64, 16, 64, 32)
    detections = decode({"boxes": boxes, "scores": scores}, GRID, view)
    assert detections.boxes.tolist() == [[0, 0, 64, 16]]
    boxes[0, :, 0] = 0.1  # now it lies in the padding above the picture
    assert len(decode({"boxes": boxes, "scores": scores}, GRID, view).boxes) == 0


def test_damaged_numbers_give_no_detections():
    boxes = np.full((1, 4, CELLS), np.nan, np.float32)
    scores = np.full((1, 2, CELLS), 0.9, np.float32)
    assert len(decode({"boxes": boxes, "scores": scores}, GRID, VIEW).boxes) == 0
    boxes[:], scores[:] = 1.0, np.nan
    assert len(decode({"boxes": boxes, "scores": scores}, GRID, VIEW).boxes) == 0


def test_no_object_gives_empty_arrays_of_the_right_kind():
    outputs = {
        "boxes": np.ones((1, 4, CELLS), np.float32),
        "scores": np.zeros((1, 2, CELLS), np.float32),
    }
    detections = decode(outputs, GRID, VIEW)
    assert (detections.boxes.shape, detections.boxes.dtype) == ((0, 4), np.float32)
    assert (detections.scores.shape, detections.class_ids.shape) == ((0,), (0,))


def test_of_very_many_candidates_the_best_survive():
    config = LtrbGrid(boxes="boxes", scores="scores", strides=(1,), score_threshold=0.1)
    view = View(Geometry(1.0, 1.0), 64, 64, 64, 64)
    scores = np.linspace(0.2, 0.9, 4096, dtype=np.float32).reshape(1, 1, -1)
    boxes = np.full((1, 4, 4096), 0.4, np.float32)
    detections = decode({"boxes": boxes, "scores": scores}, config, view)
    assert CHUNK < 4096
    np.testing.assert_array_equal(detections.scores, scores[0, 0, ::-1][: config.max_detections])
    config = msgspec.structs.replace(config, max_detections=1024)
    detections = decode({"boxes": boxes, "scores": scores}, config, view)
    np.testing.assert_array_equal(detections.scores, scores[0, 0, ::-1][:1024])


@st.composite
def box_sets(draw):
    count = draw(st.integers(0, 25))
    number = st.integers(0, 40)
    boxes = []
    for _ in range(count):
        x, y = draw(number), draw(number)
        boxes.append([x, y, x + draw(st.integers(1, 20)), y + draw(st.integers(1, 20))])
    classes = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    order = draw(st.permutations(range(count)))
    return boxes, [(i + 1) / 32 for i in order], classes


@settings(max_examples=200, deadline=None)
@given(box_sets(), st.sampled_from([0.31, 0.5, 0.77]))
def test_nms_equals_the_pairwise_reference(boxes, threshold):
    corners, scores, classes = boxes
    survivors = suppress(
        np.array(corners, np.float32).reshape(-1, 4),
        np.array(scores, np.float32),
        np.array(classes, np.int64),
        threshold,
        100,
    )
    # Two boxes exactly at the threshold may round either way.
    close = any(
        abs(overlap(a, b) - threshold) < 1e-6 for a in corners for b in corners if a is not b
    )
    if not close:
        assert survivors.tolist() == brute_force_nms(corners, scores, classes, threshold)


def test_nms_keeps_fractions_of_far_classes_apart():
    box = [[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 10.2]]
    classes = np.array([900, 900], np.int64)
    survivors = suppress(
        np.array(box, np.float32), np.array([0.9, 0.8], np.float32), classes, 0.99, 9
    )
    assert survivors.tolist() == [0, 1]  # IoU is 0.980
    survivors = suppress(
        np.array(box, np.float32), np.array([0.9, 0.8], np.float32), classes, 0.97, 9
    )
    assert survivors.tolist() == [0]


def test_classification_gives_the_best_classes_with_probabilities():
    logits = np.array([[1.0, 3.0, 2.0, -5.0]], np.float32)
    detections = decode({"s": logits}, Classification(scores="s", top=2), VIEW)
    assert isinstance(detections, ClassScores)
    powers = np.exp([3.0, 2.0, 1.0, -5.0])
    assert detections.class_ids.tolist() == [1, 2]
    np.testing.assert_allclose(detections.scores, powers[:2] / powers.sum(), rtol=1e-6)


def test_classification_leaves_probabilities_of_the_model_alone():
    outputs = {"s": np.array([[0.25, 0.75]], np.float32)}
    detections = decode(outputs, Classification(scores="s", softmax=False), VIEW)
    assert detections.scores.tolist() == [0.75, 0.25]


def test_large_logits_do_not_overflow():
    detections = decode({"s": np.array([[1e4, 0.0]], np.float32)}, Classification(scores="s"), VIEW)
    assert detections.scores.tolist() == [1.0, 0.0]


def test_missing_output_is_named_with_those_that_exist():
    with pytest.raises(PipelineError, match=r"no output 'boxes' \(it has p, scores\)"):
        decode({"p": np.zeros(1), "scores": np.zeros((1, 2, CELLS), np.float32)}, GRID, VIEW)
