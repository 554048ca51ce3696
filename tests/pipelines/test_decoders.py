"""Each family of decoders agrees with a reference that goes through its numbers one at a time."""

import decoder_references as ref
import numpy as np
import pytest
from decoder_references import HEIGHT, WIDTH, frame_view

from device.errors import PipelineError
from pipelines.config import PreprocessConfig
from pipelines.decode_config import (
    Blazeface,
    BoxesScores,
    BoxScoreRows,
    Centernet,
    ClassRows,
    DetectnetV2,
    Detr,
    Finished,
    Heatmaps,
    Movenet,
    RetinaFace,
    Rows,
    Scrfd,
    TextDetection,
    UltralyticsDetect,
    UltralyticsObb,
    UltralyticsPose,
    UltralyticsSegment,
    YoloAnchors,
    Yolov5,
    Yolox,
    Yunet,
)
from pipelines.results import Detections
from pipelines.stages.decode import View, decode, view_of
from pipelines.stages.decoders.faces import anchor_count
from pipelines.stages.decoders.rotated import corners_of_rotated
from pipelines.stages.decoders.table import DECODERS
from pipelines.stages.preprocess import fit

CELLS = 8 * 4 + 4 * 2 + 2 * 1
SEEDS = range(3)


@pytest.fixture(params=SEEDS)
def rng(request):
    return np.random.default_rng(request.param)


def centres(rng, count):
    """Boxes of centre, width and height in pixels of the input, [count, 4]."""
    centre = rng.uniform(0, [WIDTH, HEIGHT], (count, 2))
    return np.concatenate([centre, rng.uniform(2, 30, (count, 2))], axis=1).astype(np.float32)


def probabilities(rng, *shape):
    return (rng.random(shape) ** 2).astype(np.float32)


def agree(result, expected, *, least=3):
    """Compare detections with the objects of a reference."""
    assert isinstance(result, Detections)
    assert len(expected) >= least
    np.testing.assert_allclose(result.boxes, [item["box"] for item in expected], atol=2e-3)
    np.testing.assert_allclose(result.scores, [item["score"] for item in expected], atol=1e-5)
    assert result.class_ids.tolist() == [item["class"] for item in expected]
    assert (result.boxes.dtype, result.scores.dtype) == (np.float32, np.float32)
    assert result.class_ids.dtype == np.int64


@pytest.mark.parametrize("resize", ["letterbox", "stretch", "centre-crop"])
def test_ultralytics_detect(rng, resize):
    head = np.concatenate([centres(rng, CELLS).T, probabilities(rng, 5, CELLS)])
    here = frame_view(resize)
    result = decode({"output0": head[None]}, UltralyticsDetect(iou_threshold=0.4), here)
    agree(result, ref.placed(ref.ultralytics(head, 0.25), here, 0.4))


def test_ultralytics_in_half_precision(rng):
    head = np.concatenate([centres(rng, CELLS).T, probabilities(rng, 5, CELLS)])
    half = head.astype(np.float16)
    result = decode({"output0": half[None]}, UltralyticsDetect(), frame_view())
    agree(result, ref.placed(ref.ultralytics(half.astype(np.float32), 0.25), frame_view(), 0.7))


@pytest.mark.parametrize("values", [2, 3])
def test_ultralytics_pose(rng, values):
    points = rng.uniform(0, 60, (4 * values, CELLS)).astype(np.float32)
    head = np.concatenate([centres(rng, CELLS).T, probabilities(rng, 1, CELLS), points])
    config = UltralyticsPose(keypoints=4, keypoint_values=values, iou_threshold=0.4)
    result = decode({"output0": head[None]}, config, frame_view())
    expected = ref.placed(ref.ultralytics(head, 0.25, 4 * values), frame_view(), 0.4)
    agree(result, expected)
    for person, item in zip(result.keypoints.tolist(), expected, strict=True):
        for number, (x, y, score) in enumerate(person):
            point = item["rest"][values * number :][:values]
            at = np.clip(ref.to_frame(point[:2] * 2, frame_view())[:2], 0, [110, 75])
            assert [x, y] == pytest.approx(at.tolist(), abs=2e-3)
            assert score == pytest.approx(point[2] if values == 3 else 1.0)


def test_ultralytics_segment(rng):
    prototypes = rng.normal(size=(3, 8, 16)).astype(np.float32)
    coefficients = rng.normal(size=(3, CELLS)).astype(np.float32)
    head = np.concatenate([centres(rng, CELLS).T, probabilities(rng, 4, CELLS), coefficients])
    outputs = {"output0": head[None], "output1": prototypes[None]}
    result = decode(outputs, UltralyticsSegment(iou_threshold=0.4), frame_view("stretch"))
    expected = ref.placed(ref.ultralytics(head, 0.25, 3), frame_view("stretch"), 0.4)
    agree(result, expected)
    for row, item in enumerate(expected):
        whole = sum(c * p for c, p in zip(item["rest"], prototypes, strict=True))
        crop, region = result.masks.crops[row], result.masks.regions[row]
        x, y = round(region[0] / 110 * 16), round(region[1] / 75 * 8)
        part = whole[y : y + crop.shape[0], x : x + crop.shape[1]]
        np.testing.assert_allclose(crop, part, atol=1e-5)
        inside = [region[0] <= item["box"][0] + 1e-3, region[3] >= item["box"][3] - 1e-3]
        assert all(inside)


def rotated_items(rows, classes, scores, threshold, here):
    """Rotated boxes [cx, cy, w, h, angle] under one scale: suppressed, and in the frame."""
    scale, items = here.geometry.scale_x, []
    for row, class_id, score in zip(rows.tolist(), classes, scores, strict=True):
        x, y = ref.to_frame([*row[:2]] * 2, here)[:2]
        items.append({"rotated": [x, y, row[2] / scale, row[3] / scale, row[4]],
                      "class": int(class_id), "score": float(score)})  # fmt: skip

    def overlaps(a, b):
        return ref.probabilistic_overlap(a["rotated"], b["rotated"])

    return ref.fast(items, overlaps, threshold)


def same_rectangle(result, expected):
    """Angles may differ by half a turn."""
    np.testing.assert_allclose(result[:4], expected[:4], atol=2e-3)
    assert abs(np.sin(result[4] - expected[4])) < 1e-4


def test_ultralytics_oriented_boxes(rng):
    boxes = centres(rng, CELLS)
    boxes[:, :2] = rng.uniform([20, 10], [44, 22], (CELLS, 2))
    angles = rng.uniform(-9, 9, (1, CELLS)).astype(np.float32)  # YOLO26 does not bound them
    scores = probabilities(rng, 2, CELLS)
    head = np.concatenate([boxes.T, scores, angles])
    here = frame_view("letterbox", (64, 128))  # scale 0.5 in x and in y
    result = decode({"output0": head[None]}, UltralyticsObb(iou_threshold=0.3), here)
    keep = scores.max(axis=0) >= 0.25
    rows = np.concatenate([boxes, angles.T], axis=1)[keep]
    items = rotated_items(rows, scores.argmax(0)[keep], scores.max(0)[keep], 0.3, here)
    assert len(result) == len(items) > 3
    assert result.class_ids.tolist() == [item["class"] for item in items]
    for row, item, upright in zip(result.rotated, items, result.boxes, strict=True):
        same_rectangle(row, item["rotated"])
        assert -np.pi / 2 <= row[4] <= np.pi / 2
        corners = corners_of_rotated(row[None])[0]
        frame = np.clip([*corners.min(axis=0), *corners.max(axis=0)], 0, [128, 64, 128, 64])
        np.testing.assert_allclose(upright, frame, atol=2e-3)


def test_a_rotated_box_under_two_scales_keeps_the_direction_of_its_width():
    config = Rows(output="o", columns=("cx", "cy", "w", "h", "score", "class", "angle"))
    row = np.array([[[32, 16, 10, 4, 0.9, 1, np.pi / 4]]], np.float32)
    result = decode({"o": row}, config, View(fit(64, 64, PREPROCESS), 64, 64, WIDTH, HEIGHT))
    x, y, width, height, angle = result.rotated[0].tolist()
    side = 10 / np.sqrt(2)
    assert (x, y) == (32, 32)
    assert width == pytest.approx(np.hypot(side, 2 * side), rel=1e-5)
    assert angle == pytest.approx(np.arctan2(2, 1), rel=1e-5)
    assert height == pytest.approx(np.hypot(4 / np.sqrt(2), 8 / np.sqrt(2)), rel=1e-5)


PREPROCESS = PreprocessConfig(width=WIDTH, height=HEIGHT, resize="stretch")


def finished_rows(rng, count=40):
    xy = centres(rng, count)
    corners = np.array([ref.corners(*row) for row in xy.tolist()], np.float32)
    scores = np.sort(probabilities(rng, count))[::-1]
    return corners, scores, rng.integers(0, 6, count)


def row_items(corners, scores, classes, threshold=0.25):
    return [
        {"box": box, "score": float(score), "class": int(class_id)}
        for box, score, class_id in zip(corners.tolist(), scores, classes, strict=True)
        if score >= threshold and class_id >= 0
    ]


ORDERS = {
    "nms-free": ("x1", "y1", "x2", "y2", "score", "class"),
    "yolov7": ("batch", "x1", "y1", "x2", "y2", "class", "score"),
    "pp-yoloe": ("class", "score", "x1", "y1", "x2", "y2"),
    "rt-detr": ("cx", "cy", "w", "h", "score", "class"),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("suppressed", [False, True])
def test_rows_of_any_order(rng, order, suppressed):
    corners, scores, classes = finished_rows(rng)
    classes[3] = -1  # YOLO-NAS marks what is unused so
    unit = "fraction" if order == "rt-detr" else "pixels"
    boxes = corners / ([WIDTH, HEIGHT] * 2 if unit == "fraction" else 1)
    values = dict(zip(("x1", "y1", "x2", "y2"), boxes.T, strict=True))
    values |= {"cx": (boxes[:, 0] + boxes[:, 2]) / 2, "cy": (boxes[:, 1] + boxes[:, 3]) / 2,
               "w": boxes[:, 2] - boxes[:, 0], "h": boxes[:, 3] - boxes[:, 1],
               "score": scores, "class": classes, "batch": np.zeros(40)}  # fmt: skip
    rows = np.stack([values[name] for name in ORDERS[order]], axis=1).astype(np.float32)
    config = Rows(output="o", columns=ORDERS[order], unit=unit, suppress=suppressed)
    result = decode({"o": rows if order == "yolov7" else rows[None]}, config, frame_view())
    items = row_items(corners, scores, classes)
    if suppressed:
        items = ref.inside_input(items, (WIDTH, HEIGHT), least=1.0)
    agree(result, ref.placed(items, frame_view(), 0.5 if suppressed else None))


@pytest.mark.parametrize("suppressed", [False, True])
def test_rows_with_all_classes(rng, suppressed):
    boxes, scores = centres(rng, 40), probabilities(rng, 40, 5)
    rows = np.concatenate([boxes / ([WIDTH, HEIGHT] * 2), scores], axis=1).astype(np.float32)
    result = decode({"output0": rows[None]}, ClassRows(suppress=suppressed), frame_view())
    head = np.concatenate([boxes, scores], axis=1).T
    iou = 0.5 if suppressed else None
    agree(result, ref.placed(ref.ultralytics(head, 0.25), frame_view(), iou))


def test_no_rows_at_all_are_no_detections():
    config = Rows(output="o", columns=ORDERS["yolov7"])
    assert len(decode({"o": np.zeros((0, 7), np.float32)}, config, frame_view())) == 0


def test_rows_with_keypoints_and_masks(rng):
    corners, scores, classes = finished_rows(rng)
    points = rng.uniform(0, 30, (40, 6)).astype(np.float32)
    base = np.column_stack([corners, scores, classes]).astype(np.float32)
    posed = np.concatenate([base, points], axis=1)
    result = decode({"output0": posed[None]}, Rows(keypoints=2), frame_view())
    items = ref.placed(row_items(corners, scores, classes), frame_view(), None)
    agree(result, items)
    first = int(np.flatnonzero(scores >= 0.25)[0])
    expected = np.clip(ref.to_frame([*points[first, :2]] * 2, frame_view())[:2], 0, [110, 75])
    np.testing.assert_allclose(result.keypoints[0, 0, :2], expected, atol=2e-3)
    prototypes = rng.normal(size=(6, 8, 16)).astype(np.float32)
    result = decode({"output0": posed[None], "p": prototypes[None]}, Rows(masks="p"), frame_view())
    assert len(result.masks) == len(result)


@pytest.mark.parametrize("masks", [False, True])
def test_yolov5(rng, masks):
    scores = np.sqrt(probabilities(rng, 90, 5))
    extras = rng.normal(size=(90, 3 * masks)).astype(np.float32)
    rows = np.concatenate([centres(rng, 90), scores, extras], axis=1)
    outputs = {"output0": rows[None], "p": rng.normal(size=(1, 3, 8, 16)).astype(np.float32)}
    result = decode(outputs, Yolov5(masks="p" if masks else ""), frame_view())
    agree(result, ref.placed(ref.yolov5(rows, 0.25, 3 * masks), frame_view(), 0.45))
    assert (result.masks is not None) == masks


def test_yolox(rng):
    box = np.concatenate([rng.uniform(-1, 2, (CELLS, 2)), rng.uniform(-1, 1.5, (CELLS, 2))], 1)
    rows = np.concatenate([box, np.sqrt(probabilities(rng, CELLS, 5))], axis=1).astype(np.float32)
    result = decode({"output": rows[None]}, Yolox(), frame_view())
    agree(result, ref.placed(ref.yolox(rows, (8, 16, 32), WIDTH, HEIGHT, 0.25), frame_view(), 0.45))
    decoded = np.concatenate([centres(rng, CELLS), rows[:, 4:]], axis=1)
    result = decode({"output": decoded[None]}, Yolox(decoded=True), frame_view())
    agree(result, ref.placed(ref.yolov5(decoded, 0.25), frame_view(), 0.45))


@pytest.mark.parametrize("background", ["none", "first", "last"])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("unit", ["pixels", "fraction"])
def test_boxes_beside_scores(rng, background, axis, unit):
    corners = finished_rows(rng, 60)[0]
    scores = probabilities(rng, 60, 4)
    known = scores[:, {"none": slice(None), "first": slice(1, None), "last": slice(3)}[background]]
    boxes = corners / ([WIDTH, HEIGHT] * 2 if unit == "fraction" else 1)
    outputs = {"boxes": boxes[None].astype(np.float32),
               "scores": (scores.T if axis == 1 else scores)[None]}  # fmt: skip
    config = BoxesScores(background=background, class_axis=axis, unit=unit)
    items = row_items(corners, known.max(axis=1), known.argmax(axis=1))
    agree(decode(outputs, config, frame_view()), ref.placed(items, frame_view(), 0.5))


@pytest.mark.parametrize("batch", [True, False])
def test_efficient_nms_reads_only_the_rows_that_count(rng, batch):
    corners, scores, classes = finished_rows(rng)
    arrays = {"b": corners, "s": scores, "c": classes.astype(np.int32)}
    outputs = {name: array[None] if batch else array for name, array in arrays.items()}
    outputs["n"] = np.array([[12]], np.int32)
    config = Finished(boxes="b", scores="s", classes="c", count="n")
    items = row_items(corners[:12], scores[:12], classes[:12])
    agree(decode(outputs, config, frame_view()), ref.placed(items, frame_view(), None))


def test_tensorflow_counts_from_one_and_gives_y_first(rng):
    corners, scores, classes = finished_rows(rng)
    boxes = corners[:, [1, 0, 3, 2]] / ([HEIGHT, WIDTH] * 2)
    outputs = {"b": boxes[None].astype(np.float32), "s": scores[None],
               "c": (classes + 1)[None].astype(np.float32), "n": np.full(1, 40.0)}  # fmt: skip
    config = Finished(boxes="b", scores="s", classes="c", count="n", format="corners_y_first",
                      unit="fraction", first_class=1)  # fmt: skip
    items = row_items(corners, scores, classes)
    agree(decode(outputs, config, frame_view()), ref.placed(items, frame_view(), None))


def test_mask_and_keypoint_rcnn(rng):
    corners, scores, classes = finished_rows(rng)
    masks = rng.random((40, 1, HEIGHT, WIDTH)).astype(np.float32)
    points = rng.uniform(0, 30, (40, 17, 3)).astype(np.float32)
    outputs = {"b": corners, "s": scores, "c": classes + 1, "m": masks, "k": points}
    config = Finished(boxes="b", scores="s", classes="c", first_class=1, masks="m", keypoints="k")
    result = decode(outputs, config, frame_view("stretch"))
    agree(result, ref.placed(row_items(corners, scores, classes), frame_view("stretch"), None))
    region = result.masks.regions[0] * np.array([WIDTH / 110, HEIGHT / 75] * 2)
    x1, y1, x2, y2 = region.round().astype(int).tolist()
    row = next(r for r in range(40) if scores[r] == result.scores[0])
    np.testing.assert_allclose(result.masks.crops[0], masks[row, 0, y1:y2, x1:x2] - 0.5, atol=1e-6)
    np.testing.assert_allclose(result.keypoints[0, :, 2], points[row, :, 2])


def test_mmdeploy(rng):
    corners, scores, classes = finished_rows(rng)
    outputs = {"dets": np.column_stack([corners, scores])[None].astype(np.float32),
               "labels": classes[None]}  # fmt: skip
    items = row_items(corners, scores, classes)
    agree(decode(outputs, BoxScoreRows(), frame_view()), ref.placed(items, frame_view(), None))


@pytest.mark.parametrize(
    ("activation", "background"),
    [("sigmoid", "none"), ("sigmoid", "first"), ("sigmoid", "last"), ("softmax", "last")],
)
def test_transformers(rng, activation, background):
    boxes = centres(rng, 20)
    logits = rng.normal(0, 2, (20, 4)).astype(np.float32)
    outputs = {"logits": logits[None], "pred_boxes": boxes[None] / ([WIDTH, HEIGHT] * 2)}
    config = Detr(activation=activation, background=background)
    items, known = [], {"none": range(4), "first": range(1, 4), "last": range(3)}[background]
    for row, box in zip(logits.tolist(), boxes.tolist(), strict=True):
        if activation == "softmax":
            total = sum(np.exp(row))
            class_id, score = ref.best_class([np.exp(row[c]) / total for c in known])
            pairs = [(class_id, score)]
        else:  # every class of a query may be an object
            pairs = [(number, ref.logistic(row[c])) for number, c in enumerate(known)]
        items += [
            {"box": ref.corners(*box), "score": score, "class": class_id}
            for class_id, score in pairs
            if score >= 0.5
        ]
    agree(decode(outputs, config, frame_view()), ref.placed(items, frame_view(), None))


def test_detectnet(rng):
    preprocess = PreprocessConfig(width=160, height=96, resize="stretch")
    here = view_of(fit(200, 300, preprocess), (200, 300, 3), preprocess)
    coverage = probabilities(rng, 3, 6, 10)
    boxes = rng.uniform(-0.2, 1.0, (12, 6, 10)).astype(np.float32)
    config = DetectnetV2(coverage="c", boxes="b")
    result = decode({"c": coverage[None], "b": boxes[None]}, config, here)
    items = ref.inside_input(ref.detectnet(coverage, boxes, 0.4), (160, 96), last=1.0)
    agree(result, ref.placed(items, here, 0.5))


def test_centernet(rng):
    heat = rng.normal(-1, 1.5, (2, 8, 16)).astype(np.float32)
    sizes = rng.uniform(0.5, 4, (2, 8, 16)).astype(np.float32)
    offsets = rng.uniform(0, 1, (2, 8, 16)).astype(np.float32)
    outputs = {"hm": heat[None], "wh": sizes[None], "reg": offsets[None]}
    expected = ref.placed(ref.centernet(heat, sizes, offsets, 0.25), frame_view(), None)
    agree(decode(outputs, Centernet(), frame_view()), expected)


def test_yunet(rng):
    shapes = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}
    outputs = {}
    for stride, cells in ((8, 32), (16, 8), (32, 2)):
        for name, columns in shapes.items():
            values = rng.uniform(-0.5, 1.5, (1, cells, columns))
            outputs[f"{name}_{stride}"] = values.astype(np.float32)
    result = decode(outputs, Yunet(iou_threshold=0.6), frame_view())
    items = ref.yunet(outputs, (8, 16, 32), WIDTH, HEIGHT, 0.6)
    expected = ref.placed(items, frame_view(), 0.6, compared=ref.whole_numbers)
    agree(result, expected)
    for face, item in zip(result.keypoints, expected, strict=True):
        points = np.array(item["rest"]).reshape(5, 2)
        frame = [ref.to_frame([*point] * 2, frame_view())[:2] for point in points]
        np.testing.assert_allclose(face[:, :2], frame, atol=2e-3)


def test_scrfd(rng):
    strides, cells = (8, 16, 32), (32, 8, 2)
    scores = [probabilities(rng, 2 * count, 1) for count in cells]
    boxes = [rng.uniform(0, 2, (2 * c, 4)).astype(np.float32) for c in cells]
    points = [rng.uniform(-1, 1, (2 * c, 10)).astype(np.float32) for c in cells]
    outputs = {f"s{i}": v for i, v in enumerate(scores)}
    outputs |= {f"b{i}": v for i, v in enumerate(boxes)}
    outputs |= {f"k{i}": v[None] for i, v in enumerate(points)}  # newer files have a batch axis
    config = Scrfd(scores=("s0", "s1", "s2"), boxes=("b0", "b1", "b2"),
                   keypoints=("k0", "k1", "k2"))  # fmt: skip
    result = decode(outputs, config, frame_view())
    items = ref.scrfd(scores, boxes, points, strides, WIDTH, 0.5)
    expected = ref.placed(items, frame_view(), 0.4, compared=ref.inclusive(frame_view()))
    agree(result, expected)
    assert result.keypoints.shape == (len(expected), 5, 3)


def test_yolo_with_anchors_outside_the_file(rng):
    strides = (8, 16, 32)
    heads = [rng.normal(-1, 2, (3, HEIGHT // s, WIDTH // s, 5 + 4)).astype(np.float32)
             for s in strides]  # fmt: skip
    names = ("classes", "boxes", "516")  # as YOLOv7 names them
    config = YoloAnchors(outputs=names, max_detections=500)
    outputs = {name: head[None] for name, head in zip(names, heads, strict=True)}
    result = decode(outputs, config, frame_view())
    items = ref.yolo_anchors(heads, strides, config.anchors, 0.25)
    agree(result, ref.placed(items, frame_view(), 0.45))
    assert len(result) > 10


def test_retinaface(rng):
    strides, count = (8, 16, 32), 2 * CELLS
    priors = RetinaFace(boxes="b", scores="s").priors
    boxes = rng.normal(0, 1.5, (count, 4)).astype(np.float32)
    scores = probabilities(rng, count, 2)
    points = rng.normal(0, 2, (count, 10)).astype(np.float32)
    outputs = {"b": boxes[None], "s": scores[None], "k": points[None]}
    result = decode(outputs, RetinaFace(boxes="b", scores="s", keypoints="k"), frame_view())
    items = ref.retinaface(boxes, scores, points, strides, priors, (WIDTH, HEIGHT), 0.5)
    expected = ref.placed(items, frame_view(), 0.4, compared=ref.inclusive(frame_view()))
    agree(result, expected)
    for face, item in zip(result.keypoints, expected, strict=True):
        frame = [ref.to_frame([*point] * 2, frame_view())[:2]
                 for point in np.array(item["rest"]).reshape(5, 2)]  # fmt: skip
        np.testing.assert_allclose(face[:, :2], frame, atol=2e-3)


def test_blazeface(rng):
    config = Blazeface(max_detections=500)
    count = anchor_count(config.strides, config.anchors, WIDTH, HEIGHT)
    rows = rng.normal(0, 12, (count, 16)).astype(np.float32)
    rows[:, 2:4] = np.abs(rows[:, 2:4]) + 4
    logits = rng.normal(-1, 3, count).astype(np.float32)
    outputs = {"regressors": rows[None], "classificators": logits[None, :, None]}
    result = decode(outputs, config, frame_view())
    items = ref.blazeface(rows, logits, config.strides, config.anchors, (WIDTH, HEIGHT), 0.5)
    items = [item for item in items if ref.area(item["box"]) > 0]
    expected = ref.placed(ref.weighted(items, 0.3), frame_view(), None)
    agree(result, expected)
    for face, item in zip(result.keypoints, expected, strict=True):
        frame = [ref.to_frame([*point] * 2, frame_view())[:2]
                 for point in np.array(item["rest"]).reshape(6, 2)]  # fmt: skip
        np.testing.assert_allclose(face[:, :2], frame, atol=2e-3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Blazeface(anchors=(2,)), "1 numbers of anchors for 2 strides"),
        (YoloAnchors(outputs=("a", "b", "c"), anchors=((1, 2),) * 8), "8 anchors for 3 strides"),
        (RetinaFace(boxes="b", scores="s", priors=(16, 32)), "2 priors for 3 strides"),
    ],
)
def test_anchors_that_do_not_fit_the_strides_are_refused(config, message):
    with pytest.raises(PipelineError, match=message):
        DECODERS[type(config)].outputs(config, PreprocessConfig(width=WIDTH, height=HEIGHT))


@pytest.mark.parametrize("kind", ["yolox", "yolo_anchors"])
def test_boxes_of_a_letterbox_with_its_corner_at_the_picture_s(kind, rng):
    view = frame_view("letterbox-corner")
    assert (view.geometry.pad_x, view.geometry.pad_y) == (0, 0)
    if kind == "yolox":
        rows = np.concatenate([centres(rng, CELLS), np.sqrt(probabilities(rng, CELLS, 5))], axis=1)
        rows = rows.astype(np.float32)
        result = decode({"output": rows[None]}, Yolox(decoded=True), view)
        agree(result, ref.placed(ref.yolov5(rows, 0.25), view, 0.45))
        return
    heads = [rng.normal(-1, 2, (3, HEIGHT // s, WIDTH // s, 6)).astype(np.float32) for s in (8,)]
    config = YoloAnchors(outputs=("a",), strides=(8,), anchors=((12, 16), (19, 36), (40, 28)))
    result = decode({"a": heads[0][None]}, config, view)
    agree(result, ref.placed(ref.yolo_anchors(heads, (8,), config.anchors, 0.25), view, 0.45))


DAMAGED = {
    "ultralytics_obb": (UltralyticsObb(), {"output0": (1, 8, CELLS)}),
    "ultralytics_segment": (UltralyticsSegment(), {"output0": (1, 10, CELLS),
                                                   "output1": (1, 3, 8, 16)}),
    "ultralytics_pose": (UltralyticsPose(keypoints=2), {"output0": (1, 11, CELLS)}),
    "rows": (Rows(suppress=True), {"output0": (1, 30, 6)}),
    "yolov5": (Yolov5(), {"output0": (1, 60, 9)}),
    "yolox": (Yolox(), {"output": (1, CELLS, 9)}),
    "yolo_anchors": (YoloAnchors(outputs=("a",), strides=(8,), anchors=((9, 9),) * 3),
                     {"a": (1, 3, 4, 8, 9)}),
    "retinaface": (RetinaFace(boxes="b", scores="s", keypoints="k", strides=(8,), priors=(16, 32)),
                   {"b": (1, 64, 4), "s": (1, 64, 2), "k": (1, 64, 10)}),
    "blazeface": (Blazeface(strides=(8,), anchors=(2,)),
                  {"regressors": (1, 64, 16), "classificators": (1, 64, 1)}),
    "boxes_scores": (BoxesScores(), {"boxes": (1, 50, 4), "scores": (1, 50, 3)}),
    "finished": (Finished(count="n"), {"det_boxes": (1, 9, 4), "det_scores": (1, 9),
                                       "det_classes": (1, 9), "n": (1, 1)}),
    "box_score_rows": (BoxScoreRows(), {"dets": (1, 9, 5), "labels": (1, 9)}),
    "detr": (Detr(), {"logits": (1, 9, 3), "pred_boxes": (1, 9, 4)}),
    "detectnet_v2": (DetectnetV2(coverage="c", boxes="b"),
                     {"c": (1, 2, 2, 4), "b": (1, 8, 2, 4)}),
    "centernet": (Centernet(), {"hm": (1, 3, 8, 16), "wh": (1, 2, 8, 16), "reg": (1, 2, 8, 16)}),
    "scrfd": (Scrfd(scores=("s",), boxes=("b",), keypoints=("k",), strides=(8,)),
              {"s": (64, 1), "b": (64, 4), "k": (64, 10)}),
    "movenet": (Movenet(), {"output_0": (1, 1, 17, 3)}),
    "heatmaps": (Heatmaps(), {"heatmaps": (1, 4, 8, 16)}),
    "text_detection": (TextDetection(output="o"), {"o": (1, 1, HEIGHT, WIDTH)}),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_damaged_numbers_give_finite_detections(kind, number, rng):
    """Some numbers, then all of them, are no numbers: whatever comes out can be published."""
    config, shapes = DAMAGED[kind]
    outputs = {name: rng.uniform(0, 20, shape).astype(np.float32) for name, shape in shapes.items()}
    for share in (0.05, 1.0):
        for array in outputs.values():
            array[rng.random(array.shape) < share] = number
        result = decode(outputs, config, frame_view())
        assert np.isfinite(result.boxes).all()
        assert np.isfinite(result.scores).all()
        assert (result.boxes[:, 2:] > result.boxes[:, :2]).all()
        assert (result.boxes <= [110, 75, 110, 75]).all()
        assert (result.class_ids >= 0).all()
        for extra in (result.keypoints, result.rotated):
            assert extra is None or np.isfinite(extra).all()
