"""Decoders do what their families' own code does, said again with operators of PyTorch.

Sources: ultralytics `utils/nms.py`, `utils/ops.py` and the predictors of its tasks; YOLOX
`utils/boxes.py`; insightface `detection/scrfd` and Pytorch_Retinaface `py_cpu_nms.py`. `nms` and
the others on boxes are those that torchvision documents: its own need a torch of the same build.
"""

import numpy as np
import pytest

from pipelines.config import PreprocessConfig
from pipelines.decode_config import (
    Blazeface,
    Scrfd,
    UltralyticsDetect,
    UltralyticsObb,
    UltralyticsPose,
    Yolov5,
    Yolox,
)
from pipelines.stages.decode import decode, view_of
from pipelines.stages.decoders.candidates import cells_of
from pipelines.stages.preprocess import fit

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
SIDE, FRAME = 640, (1080, 810)  # of the input; height and width of the frame: bus.jpg
CELLS = 8400
MAX_WH = 7680  # Ultralytics moves classes apart by it


def frame_view():
    preprocess = PreprocessConfig(width=SIDE, height=SIDE)
    return view_of(fit(*FRAME, preprocess), (*FRAME, 3), preprocess)


def crowd(rng, classes):
    """A head as a trained one gives it: clusters around objects, a third of them at the border."""
    objects = rng.uniform(40, 600, (60, 2))
    objects[:20, 0] = rng.choice([82.0, 558.0], 20)  # the frame is from 80 to 560
    centre = objects[rng.integers(0, 60, CELLS)] + rng.normal(0, 6, (CELLS, 2))
    sides = rng.uniform(60, 140, (60, 2))[rng.integers(0, 60, CELLS)]
    scores = rng.random((CELLS, classes)) ** 12
    return np.concatenate([centre, sides, scores], axis=1).astype(np.float32)


def corners(boxes):
    return torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)


def clip(boxes):
    x, y = (boxes[..., axis::2].clamp(0, limit) for axis, limit in ((0, FRAME[1]), (1, FRAME[0])))
    return torch.stack([x, y], -1).reshape(boxes.shape)


def nms(boxes, scores, threshold, limit=300):
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    order, picked = scores.argsort(descending=True, stable=True), []
    while len(order) and len(picked) < limit:
        best, order = order[0], order[1:]
        picked.append(best)
        shared = torch.minimum(boxes[best, 2:], boxes[order, 2:])
        shared = (shared - torch.maximum(boxes[best, :2], boxes[order, :2])).clamp(0).prod(1)
        order = order[shared / (area[best] + area[order] - shared) <= threshold]
    return torch.stack(picked)


def apart(boxes, classes):
    return boxes + classes[:, None] * MAX_WH


def to_frame(boxes):
    """`scale_boxes` without its clip: the padding off, then the gain."""
    gain = min(SIDE / FRAME[0], SIDE / FRAME[1])
    pad = [round((SIDE - side * gain) / 2 - 0.1) for side in (FRAME[1], FRAME[0])]
    return (boxes - torch.tensor(pad * (boxes.shape[-1] // 2))) / gain


def ultralytics_rows(rows, classes, conf, iou, max_det):
    """Return the rows [x1, y1, x2, y2, score, class, extras] that `non_max_suppression` gives."""
    rows = torch.from_numpy(rows)
    score, best = rows[:, 4 : 4 + classes].max(1)
    likely = score > conf
    box = corners(rows[likely, :4])
    score, best, extras = score[likely], best[likely], rows[likely, 4 + classes :]
    survivors = nms(apart(box, best), score, iou, max_det)
    return torch.cat([box, score[:, None], best[:, None].float(), extras], 1)[survivors]


@pytest.mark.parametrize("conf", [0.001, 0.25])
@pytest.mark.parametrize("seed", range(3))
def test_ultralytics_suppresses_before_it_cuts_boxes_at_the_frame(seed, conf):
    rows = crowd(np.random.default_rng(seed), 3)
    expected = ultralytics_rows(rows, 3, conf, 0.7, 300)
    boxes = clip(to_frame(expected[:, :4]))
    shown = ((boxes[:, 2:] - boxes[:, :2]) > 0).all(1)
    config = UltralyticsDetect(score_threshold=conf, iou_threshold=0.7, max_detections=300)
    result = decode({"output0": rows.T[None]}, config, frame_view())
    assert len(result) == int(shown.sum()) > 100
    np.testing.assert_allclose(result.boxes, boxes[shown], atol=5e-3)
    np.testing.assert_array_equal(result.scores, expected[shown, 4])
    np.testing.assert_array_equal(result.class_ids, expected[shown, 5])
    # The order matters: of boxes that are cut first, others stay.
    score, best = torch.from_numpy(rows[:, 4:]).max(1)
    cut = apart(clip(to_frame(corners(torch.from_numpy(rows[:, :4])))), best)
    wrong = nms(cut[score > conf], score[score > conf], 0.7)
    assert score[score > conf][wrong].tolist() != expected[:, 4].tolist()


def test_ultralytics_cuts_keypoints_at_the_frame():
    rng = np.random.default_rng(0)
    points = rng.uniform(-40, 700, (CELLS, 5, 3)).astype(np.float32)
    points[..., 2] = rng.random((CELLS, 5))
    rows = np.concatenate([crowd(rng, 1), points.reshape(CELLS, -1)], axis=1)
    expected = ultralytics_rows(rows, 1, 0.25, 0.7, 300)
    boxes = clip(to_frame(expected[:, :4]))
    shown = ((boxes[:, 2:] - boxes[:, :2]) > 0).all(1)
    places = expected[shown, 6:].reshape(-1, 5, 3)
    at = to_frame(places[..., :2])
    at = torch.stack([at[..., 0].clamp(0, FRAME[1]), at[..., 1].clamp(0, FRAME[0])], -1)
    config = UltralyticsPose(keypoints=5, max_detections=300)
    result = decode({"output0": rows.T[None]}, config, frame_view())
    np.testing.assert_allclose(result.keypoints[..., :2], at, atol=5e-3)
    np.testing.assert_array_equal(result.keypoints[..., 2], places[..., 2])
    assert (result.keypoints[..., 0] == FRAME[1]).any()


def probabilistic_overlaps(boxes):
    """`batch_probiou` of boxes with themselves, as published: Bhattacharyya's distance."""
    boxes = boxes.double()
    a, b = boxes[:, 2] ** 2 / 12, boxes[:, 3] ** 2 / 12
    cos, sin = boxes[:, 4].cos(), boxes[:, 4].sin()
    covariance = torch.stack(
        [
            a * cos**2 + b * sin**2,
            (a - b) * cos * sin,
            (a - b) * cos * sin,
            a * sin**2 + b * cos**2,
        ],
        -1,
    ).reshape(-1, 2, 2)
    mean = (covariance[:, None] + covariance[None]) / 2
    delta = (boxes[:, None, :2] - boxes[None, :, :2])[..., None]
    distance = (delta.transpose(-1, -2) @ torch.linalg.inv(mean) @ delta)[..., 0, 0] / 8
    determinants = torch.linalg.det(covariance)
    spread = torch.linalg.det(mean) / (determinants[:, None] * determinants[None]).sqrt()
    return 1 - (1 - torch.exp(-(distance + spread.log() / 2))).clamp(0).sqrt()


def test_ultralytics_suppresses_oriented_boxes_by_all_better_ones():
    rng = np.random.default_rng(1)
    rows = crowd(rng, 2)[:400]
    angles = rng.uniform(-np.pi, np.pi, (400, 1)).astype(np.float32)
    score, best = torch.from_numpy(rows[:, 4:]).max(1)
    order = score.argsort(descending=True)
    boxes = torch.from_numpy(np.concatenate([rows[:, :4], angles], axis=1))
    moved = boxes.clone()
    moved[:, :2] += best[:, None] * MAX_WH
    overlaps = probabilistic_overlaps(moved[order]).triu(diagonal=1)
    picked = order[(overlaps >= 0.4).sum(0) == 0]
    picked = picked[score[picked] > 0.01]
    head = np.concatenate([rows, angles], axis=1).T[None]
    config = UltralyticsObb(score_threshold=0.01, iou_threshold=0.4, max_detections=300)
    result = decode({"output0": head}, config, frame_view())
    np.testing.assert_array_equal(result.scores, score[picked])
    np.testing.assert_allclose(result.rotated[:, :2], to_frame(boxes[picked, :2]), atol=5e-3)
    assert 20 < len(picked) < 200


def test_yolov5_multiplies_by_the_objectness_before_it_suppresses():
    rng = np.random.default_rng(2)
    rows = crowd(rng, 3)
    objectness = rng.random((CELLS, 1)).astype(np.float32)
    whole = np.concatenate([rows[:, :4], objectness, rows[:, 4:]], axis=1)
    product = np.concatenate([rows[:, :4], rows[:, 4:] * objectness], axis=1)
    expected = ultralytics_rows(product, 3, 0.25, 0.45, 300)
    boxes = clip(to_frame(expected[:, :4]))
    shown = ((boxes[:, 2:] - boxes[:, :2]) > 0).all(1)
    result = decode({"output0": whole[None]}, Yolov5(max_detections=300), frame_view())
    np.testing.assert_allclose(result.boxes, boxes[shown], atol=5e-3)
    assert len(result) > 20


def test_yolox_suppresses_in_pixels_of_the_input():
    rng = np.random.default_rng(3)
    rows = np.concatenate(
        [rng.normal(0, 0.6, (CELLS, 2)), rng.normal(2, 0.4, (CELLS, 2)), rng.random((CELLS, 4))], 1
    ).astype(np.float32)
    points, strides = (torch.from_numpy(each) for each in cells_of((8, 16, 32), SIDE, SIDE, 0.0))
    centre = torch.from_numpy(rows[:, :2]) * strides[:, None] + points
    box = torch.cat([centre, torch.from_numpy(rows[:, 2:4]).exp() * strides[:, None]], 1)
    box = corners(box)
    score, best = (torch.from_numpy(rows[:, 5:]) * torch.from_numpy(rows[:, 4:5])).max(1)
    likely = score >= 0.5
    survivors = nms(apart(box[likely], best[likely]), score[likely], 0.45)
    boxes = clip(to_frame(box[likely][survivors]))
    shown = ((boxes[:, 2:] - boxes[:, :2]) > 0).all(1)
    config = Yolox(score_threshold=0.5, max_detections=300)
    result = decode({"output": rows[None]}, config, frame_view())
    np.testing.assert_array_equal(result.scores, score[likely][survivors][shown])
    np.testing.assert_allclose(result.boxes, boxes[shown], atol=5e-3)


def inclusive_nms(boxes, scores, threshold):
    """`py_cpu_nms`: the last pixel counts."""
    x1, y1, x2, y2 = boxes.T
    areas = (x2 - x1 + 1) * (y2 - y1 + 1)
    order, picked = scores.argsort(kind="stable")[::-1], []
    while order.size:
        best, rest = order[0], order[1:]
        picked.append(int(best))
        w = np.maximum(0.0, np.minimum(x2[best], x2[rest]) - np.maximum(x1[best], x1[rest]) + 1)
        h = np.maximum(0.0, np.minimum(y2[best], y2[rest]) - np.maximum(y1[best], y1[rest]) + 1)
        order = rest[w * h / (areas[best] + areas[rest] - w * h) <= threshold]
    return picked


def test_scrfd_counts_the_last_pixel_of_small_faces():
    rng = np.random.default_rng(4)
    cells = (SIDE // 8) ** 2 * 2
    scores = (rng.random((cells, 1)) ** 8).astype(np.float32)
    sides = rng.uniform(0.3, 0.9, (cells, 4)).astype(np.float32)  # faces of 5 to 14 pixels
    points, _ = cells_of((8,), SIDE, SIDE, 0.0, 2)
    boxes = np.concatenate([points - sides[:, :2] * 8, points + sides[:, 2:] * 8], 1)
    faces = np.flatnonzero(scores[:, 0] >= 0.6)
    frame = to_frame(torch.from_numpy(boxes[faces])).numpy()
    survivors = inclusive_nms(frame.astype(np.float64), scores[faces, 0], 0.4)
    cut = clip(torch.from_numpy(frame[survivors]))
    shown = ((cut[:, 2:] - cut[:, :2]) > 0).all(1).numpy()
    config = Scrfd(scores=("s",), boxes=("b",), strides=(8,), score_threshold=0.6,
                   max_detections=20_000)  # fmt: skip
    result = decode({"s": scores, "b": sides}, config, frame_view())
    np.testing.assert_array_equal(result.scores, scores[faces, 0][survivors][shown])
    exclusive = nms(torch.from_numpy(frame), torch.from_numpy(scores[faces, 0]), 0.4, 20_000)
    assert len(exclusive) != len(survivors)  # the pixel decides some


def test_blazeface_gives_the_mean_of_boxes_that_overlap():
    boxes = np.zeros((1, 32, 16), np.float32)
    boxes[0, :, 2:4] = 40
    logits = np.full((1, 32, 1), -9, np.float32)
    logits[0, 10:12, 0] = [2.0, 0.5]  # two anchors of one cell
    boxes[0, 11, :2] = 4
    boxes[0, 11, 4:] = 8
    config = Blazeface(strides=(16,), anchors=(2,))
    preprocess = PreprocessConfig(width=64, height=64)
    view = view_of(fit(64, 64, preprocess), (64, 64, 3), preprocess)
    result = decode({"regressors": boxes, "classificators": logits}, config, view)
    first, second = 1 / (1 + np.exp([-2.0, -0.5]))
    share = second / (first + second)
    centre = np.array([24.0, 24.0]) + 4 * share
    assert len(result) == 1
    np.testing.assert_allclose(result.boxes[0], [*(centre - 20), *(centre + 20)], atol=1e-4)
    np.testing.assert_allclose(result.keypoints[0, :, 0], 24 + 8 * share, atol=1e-4)
    np.testing.assert_allclose(result.scores, first, atol=1e-6)
