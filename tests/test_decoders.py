"""Each family of decoders agrees with a reference that goes through its numbers one at a time."""

import json

import decoder_references as ref
import numpy as np
import pytest

from pipelines.config import PreprocessConfig
from pipelines.decode_config import (
    BoxesScores,
    BoxScoreRows,
    Centernet,
    ClassRows,
    Depth,
    DetectnetV2,
    Detr,
    Finished,
    Heatmaps,
    Movenet,
    Rows,
    Scrfd,
    Segmentation,
    Simcc,
    TextDetection,
    TextRecognition,
    UltralyticsDetect,
    UltralyticsObb,
    UltralyticsPose,
    UltralyticsSegment,
    Yolov5,
    Yolox,
    Yunet,
)
from pipelines.results import DepthMap, Detections, SegmentationMap, Texts, text_of
from pipelines.stages.decode import View, decode, view_of
from pipelines.stages.decoders.masks import with_masks
from pipelines.stages.decoders.rotated import corners_of_rotated
from pipelines.stages.mask_pixels import mask_bits, mask_polygons
from pipelines.stages.nms import MAX_LISTED, suppress, suppress_rotated
from pipelines.stages.preprocess import fit
from scripts import bench_decoders

WIDTH, HEIGHT = 64, 32
CELLS = 8 * 4 + 4 * 2 + 2 * 1
SEEDS = range(3)


def view(resize="letterbox", frame=(75, 110)):
    preprocess = PreprocessConfig(width=WIDTH, height=HEIGHT, resize=resize)
    return view_of(fit(*frame, preprocess), (*frame, 3), preprocess)


@pytest.fixture(params=SEEDS)
def rng(request):
    return np.random.default_rng(request.param)


def centres(rng, count):
    """Boxes of centre, width and height in pixels of the input, [count, 4]."""
    centre = rng.uniform(0, [WIDTH, HEIGHT], (count, 2))
    return np.concatenate([centre, rng.uniform(2, 30, (count, 2))], axis=1).astype(np.float32)


def probabilities(rng, *shape):
    return (rng.random(shape) ** 2).astype(np.float32)


def agree(found, expected, *, least=3):
    """Compare detections with the objects of a reference."""
    assert isinstance(found, Detections)
    assert len(expected) >= least
    np.testing.assert_allclose(found.boxes, [item["box"] for item in expected], atol=2e-3)
    np.testing.assert_allclose(found.scores, [item["score"] for item in expected], atol=1e-5)
    assert found.class_ids.tolist() == [item["class"] for item in expected]
    assert (found.boxes.dtype, found.scores.dtype) == (np.float32, np.float32)
    assert found.class_ids.dtype == np.int64


@pytest.mark.parametrize("resize", ["letterbox", "stretch", "centre-crop"])
def test_ultralytics_detect(rng, resize):
    head = np.concatenate([centres(rng, CELLS).T, probabilities(rng, 5, CELLS)])
    here = view(resize)
    found = decode({"output0": head[None]}, UltralyticsDetect(iou_threshold=0.4), here)
    agree(found, ref.placed(ref.ultralytics(head, 0.25), here, 0.4))


def test_ultralytics_in_half_precision(rng):
    head = np.concatenate([centres(rng, CELLS).T, probabilities(rng, 5, CELLS)])
    half = head.astype(np.float16)
    found = decode({"output0": half[None]}, UltralyticsDetect(), view())
    agree(found, ref.placed(ref.ultralytics(half.astype(np.float32), 0.25), view(), 0.7))


@pytest.mark.parametrize("values", [2, 3])
def test_ultralytics_pose(rng, values):
    points = rng.uniform(0, 60, (4 * values, CELLS)).astype(np.float32)
    head = np.concatenate([centres(rng, CELLS).T, probabilities(rng, 1, CELLS), points])
    config = UltralyticsPose(keypoints=4, keypoint_values=values, iou_threshold=0.4)
    found = decode({"output0": head[None]}, config, view())
    expected = ref.placed(ref.ultralytics(head, 0.25, 4 * values), view(), 0.4)
    agree(found, expected)
    for person, item in zip(found.keypoints.tolist(), expected, strict=True):
        for number, (x, y, score) in enumerate(person):
            point = item["rest"][values * number :][:values]
            assert [x, y] == pytest.approx(ref.to_frame(point[:2] * 2, view())[:2], abs=2e-3)
            assert score == pytest.approx(point[2] if values == 3 else 1.0)


def test_ultralytics_segment(rng):
    prototypes = rng.normal(size=(3, 8, 16)).astype(np.float32)
    coefficients = rng.normal(size=(3, CELLS)).astype(np.float32)
    head = np.concatenate([centres(rng, CELLS).T, probabilities(rng, 4, CELLS), coefficients])
    outputs = {"output0": head[None], "output1": prototypes[None]}
    found = decode(outputs, UltralyticsSegment(iou_threshold=0.4), view("stretch"))
    expected = ref.placed(ref.ultralytics(head, 0.25, 3), view("stretch"), 0.4)
    agree(found, expected)
    for row, item in enumerate(expected):
        whole = sum(c * p for c, p in zip(item["rest"], prototypes, strict=True))
        crop, region = found.masks.crops[row], found.masks.regions[row]
        x, y = round(region[0] / 110 * 16), round(region[1] / 75 * 8)
        part = whole[y : y + crop.shape[0], x : x + crop.shape[1]]
        np.testing.assert_allclose(crop, part, atol=1e-5)
        inside = [region[0] <= item["box"][0] + 1e-3, region[3] >= item["box"][3] - 1e-3]
        assert all(inside)


def rotated_items(rows, classes, scores, threshold, here):
    """Rotated boxes [cx, cy, w, h, angle] under one scale: to the frame, and suppressed."""
    scale, items = here.geometry.scale_x, []
    for row, class_id, score in zip(rows.tolist(), classes, scores, strict=True):
        x, y = ref.to_frame([*row[:2]] * 2, here)[:2]
        items.append({"rotated": [x, y, row[2] / scale, row[3] / scale, row[4]],
                      "class": int(class_id), "score": float(score)})  # fmt: skip

    def overlaps(a, b):
        return ref.probabilistic_overlap(a["rotated"], b["rotated"])

    return ref.greedy(items, overlaps, threshold)


def same_rectangle(found, expected):
    """Angles may differ by half a turn."""
    np.testing.assert_allclose(found[:4], expected[:4], atol=2e-3)
    assert abs(np.sin(found[4] - expected[4])) < 1e-4


def test_ultralytics_oriented_boxes(rng):
    boxes = centres(rng, CELLS)
    boxes[:, :2] = rng.uniform([20, 10], [44, 22], (CELLS, 2))
    angles = rng.uniform(-9, 9, (1, CELLS)).astype(np.float32)  # YOLO26 does not bound them
    scores = probabilities(rng, 2, CELLS)
    head = np.concatenate([boxes.T, scores, angles])
    here = view("letterbox", (64, 128))  # scale 0.5 in x and in y
    found = decode({"output0": head[None]}, UltralyticsObb(iou_threshold=0.3), here)
    keep = scores.max(axis=0) >= 0.25
    rows = np.concatenate([boxes, angles.T], axis=1)[keep]
    items = rotated_items(rows, scores.argmax(0)[keep], scores.max(0)[keep], 0.3, here)
    assert len(found) == len(items) > 3
    assert found.class_ids.tolist() == [item["class"] for item in items]
    for row, item, upright in zip(found.rotated, items, found.boxes, strict=True):
        same_rectangle(row, item["rotated"])
        assert -np.pi / 2 <= row[4] <= np.pi / 2
        corners = corners_of_rotated(row[None])[0]
        frame = np.clip([*corners.min(axis=0), *corners.max(axis=0)], 0, [128, 64, 128, 64])
        np.testing.assert_allclose(upright, frame, atol=2e-3)


def test_a_rotated_box_under_two_scales_keeps_the_direction_of_its_width():
    config = Rows(output="o", columns=("cx", "cy", "w", "h", "score", "class", "angle"))
    row = np.array([[[32, 16, 10, 4, 0.9, 1, np.pi / 4]]], np.float32)
    found = decode({"o": row}, config, View(fit(64, 64, PREPROCESS), 64, 64, WIDTH, HEIGHT))
    x, y, width, height, angle = found.rotated[0].tolist()
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
    found = decode({"o": rows if order == "yolov7" else rows[None]}, config, view())
    iou = 0.5 if suppressed else None
    agree(found, ref.placed(row_items(corners, scores, classes), view(), iou))


@pytest.mark.parametrize("suppressed", [False, True])
def test_rows_with_all_classes(rng, suppressed):
    boxes, scores = centres(rng, 40), probabilities(rng, 40, 5)
    rows = np.concatenate([boxes / ([WIDTH, HEIGHT] * 2), scores], axis=1).astype(np.float32)
    found = decode({"output0": rows[None]}, ClassRows(suppress=suppressed), view())
    head = np.concatenate([boxes, scores], axis=1).T
    iou = 0.5 if suppressed else None
    agree(found, ref.placed(ref.ultralytics(head, 0.25), view(), iou))


def test_no_rows_at_all_are_no_detections():
    config = Rows(output="o", columns=ORDERS["yolov7"])
    assert len(decode({"o": np.zeros((0, 7), np.float32)}, config, view())) == 0


def test_rows_with_keypoints_and_masks(rng):
    corners, scores, classes = finished_rows(rng)
    points = rng.uniform(0, 30, (40, 6)).astype(np.float32)
    base = np.column_stack([corners, scores, classes]).astype(np.float32)
    posed = np.concatenate([base, points], axis=1)
    found = decode({"output0": posed[None]}, Rows(keypoints=2), view())
    items = ref.placed(row_items(corners, scores, classes), view(), None)
    agree(found, items)
    first = int(np.flatnonzero(scores >= 0.25)[0])
    expected = ref.to_frame([*points[first, :2]] * 2, view())[:2]
    np.testing.assert_allclose(found.keypoints[0, 0, :2], expected, atol=2e-3)
    prototypes = rng.normal(size=(6, 8, 16)).astype(np.float32)
    found = decode({"output0": posed[None], "p": prototypes[None]}, Rows(masks="p"), view())
    assert len(found.masks) == len(found)


@pytest.mark.parametrize("masks", [False, True])
def test_yolov5(rng, masks):
    scores = np.sqrt(probabilities(rng, 90, 5))
    extras = rng.normal(size=(90, 3 * masks)).astype(np.float32)
    rows = np.concatenate([centres(rng, 90), scores, extras], axis=1)
    outputs = {"output0": rows[None], "p": rng.normal(size=(1, 3, 8, 16)).astype(np.float32)}
    found = decode(outputs, Yolov5(masks="p" if masks else ""), view())
    agree(found, ref.placed(ref.yolov5(rows, 0.25, 3 * masks), view(), 0.45))
    assert (found.masks is not None) == masks


def test_yolox(rng):
    box = np.concatenate([rng.uniform(-1, 2, (CELLS, 2)), rng.uniform(-1, 1.5, (CELLS, 2))], 1)
    rows = np.concatenate([box, np.sqrt(probabilities(rng, CELLS, 5))], axis=1).astype(np.float32)
    found = decode({"output": rows[None]}, Yolox(), view())
    agree(found, ref.placed(ref.yolox(rows, (8, 16, 32), WIDTH, HEIGHT, 0.25), view(), 0.45))
    decoded = np.concatenate([centres(rng, CELLS), rows[:, 4:]], axis=1)
    found = decode({"output": decoded[None]}, Yolox(decoded=True), view())
    agree(found, ref.placed(ref.yolov5(decoded, 0.25), view(), 0.45))


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
    agree(decode(outputs, config, view()), ref.placed(items, view(), 0.5))


@pytest.mark.parametrize("batch", [True, False])
def test_efficient_nms_reads_only_the_rows_that_count(rng, batch):
    corners, scores, classes = finished_rows(rng)
    arrays = {"b": corners, "s": scores, "c": classes.astype(np.int32)}
    outputs = {name: array[None] if batch else array for name, array in arrays.items()}
    outputs["n"] = np.array([[12]], np.int32)
    config = Finished(boxes="b", scores="s", classes="c", count="n")
    items = row_items(corners[:12], scores[:12], classes[:12])
    agree(decode(outputs, config, view()), ref.placed(items, view(), None))


def test_tensorflow_counts_from_one_and_gives_y_first(rng):
    corners, scores, classes = finished_rows(rng)
    boxes = corners[:, [1, 0, 3, 2]] / ([HEIGHT, WIDTH] * 2)
    outputs = {"b": boxes[None].astype(np.float32), "s": scores[None],
               "c": (classes + 1)[None].astype(np.float32), "n": np.full(1, 40.0)}  # fmt: skip
    config = Finished(boxes="b", scores="s", classes="c", count="n", format="corners_y_first",
                      unit="fraction", first_class=1)  # fmt: skip
    items = row_items(corners, scores, classes)
    agree(decode(outputs, config, view()), ref.placed(items, view(), None))


def test_mask_and_keypoint_rcnn(rng):
    corners, scores, classes = finished_rows(rng)
    masks = rng.random((40, 1, HEIGHT, WIDTH)).astype(np.float32)
    points = rng.uniform(0, 30, (40, 17, 3)).astype(np.float32)
    outputs = {"b": corners, "s": scores, "c": classes + 1, "m": masks, "k": points}
    config = Finished(boxes="b", scores="s", classes="c", first_class=1, masks="m", keypoints="k")
    found = decode(outputs, config, view("stretch"))
    agree(found, ref.placed(row_items(corners, scores, classes), view("stretch"), None))
    region = found.masks.regions[0] * np.array([WIDTH / 110, HEIGHT / 75] * 2)
    x1, y1, x2, y2 = region.round().astype(int).tolist()
    row = next(r for r in range(40) if scores[r] == found.scores[0])
    np.testing.assert_allclose(found.masks.crops[0], masks[row, 0, y1:y2, x1:x2] - 0.5, atol=1e-6)
    np.testing.assert_allclose(found.keypoints[0, :, 2], points[row, :, 2])


def test_mmdeploy(rng):
    corners, scores, classes = finished_rows(rng)
    outputs = {"dets": np.column_stack([corners, scores])[None].astype(np.float32),
               "labels": classes[None]}  # fmt: skip
    items = row_items(corners, scores, classes)
    agree(decode(outputs, BoxScoreRows(), view()), ref.placed(items, view(), None))


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
    agree(decode(outputs, config, view()), ref.placed(items, view(), None))


def test_detectnet(rng):
    preprocess = PreprocessConfig(width=160, height=96, resize="stretch")
    here = view_of(fit(200, 300, preprocess), (200, 300, 3), preprocess)
    coverage = probabilities(rng, 3, 6, 10)
    boxes = rng.uniform(-0.2, 1.0, (12, 6, 10)).astype(np.float32)
    config = DetectnetV2(coverage="c", boxes="b")
    found = decode({"c": coverage[None], "b": boxes[None]}, config, here)
    agree(found, ref.placed(ref.detectnet(coverage, boxes, 0.4), here, 0.5))


def test_centernet(rng):
    heat = rng.normal(-1, 1.5, (2, 8, 16)).astype(np.float32)
    sizes = rng.uniform(0.5, 4, (2, 8, 16)).astype(np.float32)
    offsets = rng.uniform(0, 1, (2, 8, 16)).astype(np.float32)
    outputs = {"hm": heat[None], "wh": sizes[None], "reg": offsets[None]}
    expected = ref.placed(ref.centernet(heat, sizes, offsets, 0.25), view(), None)
    agree(decode(outputs, Centernet(), view()), expected)


def test_yunet(rng):
    shapes = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}
    outputs = {}
    for stride, cells in ((8, 32), (16, 8), (32, 2)):
        for name, columns in shapes.items():
            values = rng.uniform(-0.5, 1.5, (1, cells, columns))
            outputs[f"{name}_{stride}"] = values.astype(np.float32)
    found = decode(outputs, Yunet(iou_threshold=0.6), view())
    expected = ref.placed(ref.yunet(outputs, (8, 16, 32), WIDTH, HEIGHT, 0.6), view(), 0.6)
    agree(found, expected)
    for face, item in zip(found.keypoints, expected, strict=True):
        points = np.array(item["rest"]).reshape(5, 2)
        frame = [ref.to_frame([*point] * 2, view())[:2] for point in points]
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
    found = decode(outputs, config, view())
    expected = ref.placed(ref.scrfd(scores, boxes, points, strides, WIDTH, 0.5), view(), 0.4)
    agree(found, expected)
    assert found.keypoints.shape == (len(expected), 5, 3)


def test_movenet(rng):
    rows = rng.uniform(0.2, 0.9, (17, 3)).astype(np.float32)
    found = decode({"output_0": rows[None, None]}, Movenet(), view("stretch"))
    points = rows[:, [1, 0]] * np.array([110, 75])
    np.testing.assert_allclose(found.keypoints[0, :, :2], points, atol=1e-3)
    assert found.scores[0] == pytest.approx(rows[:, 2].mean(), abs=1e-6)
    seen = points[rows[:, 2] >= 0.25]
    np.testing.assert_allclose(found.boxes[0], [*seen.min(0), *seen.max(0)], atol=1e-3)
    rows[:, 2] = 0.1
    assert len(decode({"output_0": rows[None, None]}, Movenet(), view())) == 0


def test_simcc_and_heat_maps_find_the_peaks(rng):
    x, y = rng.integers(2, 2 * WIDTH - 2, 5), rng.integers(2, 2 * HEIGHT - 2, 5)
    maps_x = rng.random((1, 5, 2 * WIDTH)).astype(np.float32) * 0.5
    maps_y = rng.random((1, 5, 2 * HEIGHT)).astype(np.float32) * 0.5
    maps_x[0, range(5), x], maps_y[0, range(5), y] = 0.9, 0.8
    found = decode({"simcc_x": maps_x, "simcc_y": maps_y}, Simcc(), view("stretch"))
    scale = np.array([110 / WIDTH, 75 / HEIGHT])
    points = np.stack([x, y], 1) / 2 * scale
    np.testing.assert_allclose(found.keypoints[0, :, :2], points, atol=1e-3)
    np.testing.assert_allclose(found.keypoints[0, :, 2], 0.8)

    heat = rng.random((1, 5, 8, 16)).astype(np.float32) * 0.5
    columns, rows = rng.integers(1, 15, 5), rng.integers(1, 7, 5)
    heat[0, range(5), rows, columns] = 0.9
    found = decode({"heatmaps": heat}, Heatmaps(), view("stretch"))
    for k, (row, column) in enumerate(zip(rows, columns, strict=True)):
        one = heat[0, k]
        dx = 0.25 if one[row, column + 1] > one[row, column - 1] else -0.25
        dy = 0.25 if one[row + 1, column] > one[row - 1, column] else -0.25
        point = np.array([column + dx, row + dy]) * 4 * scale
        np.testing.assert_allclose(found.keypoints[0, k, :2], point, atol=1e-3)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_segmentation_takes_the_best_class_of_what_the_frame_covers(rng, layout):
    logits = rng.normal(size=(5, 8, 16)).astype(np.float32)
    output = logits if layout == "nchw" else logits.transpose(1, 2, 0)
    here = view("letterbox", (60, 60))  # 32x32 in the middle of 64x32
    found = decode({"o": output[None]}, Segmentation(output="o", layout=layout), here)
    assert isinstance(found, SegmentationMap)
    assert found.class_ids.tolist() == [
        [max(range(5), key=lambda c: logits[c, row, column]) for column in range(4, 12)]
        for row in range(8)
    ]
    assert found.region == pytest.approx((0, 0, 60, 60), abs=1e-3)


def test_segmentation_enlarges_logits_before_it_chooses():
    logits = np.zeros((1, 2, 8, 16), np.float32)
    logits[0, 1, :, 8:] = 3.0  # class 1 is 3 on the right, and class 0 is 1 everywhere
    logits[0, 0] = 1.0
    found = decode({"o": logits}, Segmentation(output="o", full_size=True), view("stretch"))
    # Between the cells 7 (0) and 8 (3) the line passes 1 at 7.33: at pixel 31.3 of 64.
    assert found.class_ids.shape == (HEIGHT, WIDTH)
    assert [int(row.argmax()) for row in found.class_ids] == [31] * HEIGHT


def test_maps_of_classes_and_of_one_channel(rng):
    classes = rng.integers(0, 9, (1, HEIGHT, WIDTH))
    config = Segmentation(output="o", values="classes")
    found = decode({"o": classes}, config, view("stretch"))
    np.testing.assert_array_equal(found.class_ids, classes[0])
    one = rng.random((1, 1, HEIGHT, WIDTH)).astype(np.float32)
    found = decode({"o": one}, Segmentation(output="o", values="binary"), view("stretch"))
    np.testing.assert_array_equal(found.class_ids, one[0, 0] > 0.5)


@pytest.mark.parametrize("channel", [True, False])
def test_depth(rng, channel):
    depth = rng.random((1, HEIGHT, WIDTH)).astype(np.float32)
    depth[0, 3, 4] = np.nan
    output = depth[:, None] if channel else depth
    found = decode({"predicted_depth": output}, Depth(), view("stretch"))
    assert isinstance(found, DepthMap)
    np.testing.assert_array_equal(found.depth, np.nan_to_num(depth[0]))


def test_text_regions_become_rotated_boxes_that_grow():
    plain = np.zeros((1, 1, HEIGHT, WIDTH), np.float32)
    plain[0, 0, 10:16, 20:50] = 0.9
    plain[0, 0, 25:27, 2:4] = 0.9  # too small
    plain[0, 0, 22:30, 40:50] = 0.35  # above the threshold, but not sure
    here = View(fit(HEIGHT, WIDTH, PREPROCESS), WIDTH, HEIGHT, WIDTH, HEIGHT)
    found = decode({"o": plain}, TextDetection(output="o"), here)
    grown = 30 * 6 * 1.6 / (2 * (30 + 6))
    expected = [20 - grown, 10 - grown, 50 + grown, 16 + grown]
    np.testing.assert_allclose(found.boxes, [expected], atol=1e-3)
    np.testing.assert_allclose(found.scores, [0.9], atol=1e-6)


def test_text_is_read_without_blanks_and_repeats(rng):
    alphabet = [chr(ord("a") + n) for n in range(20)]
    steps = rng.random((60, 22)).astype(np.float32) ** 4
    steps[::3, 0] = 1.5
    steps[10:13] = steps[10]
    found = decode({"o": steps[None]}, TextRecognition(output="o"), view())
    assert isinstance(found, Texts)
    (line,) = found.lines
    assert text_of(line, alphabet) == ref.ctc(steps, [*alphabet, " "])
    assert len(decode({"o": np.eye(1, 22)[None]}, TextRecognition(output="o"), view()).lines) == 0


DAMAGED = {
    "ultralytics_obb": (UltralyticsObb(), {"output0": (1, 8, CELLS)}),
    "ultralytics_segment": (UltralyticsSegment(), {"output0": (1, 10, CELLS),
                                                   "output1": (1, 3, 8, 16)}),
    "ultralytics_pose": (UltralyticsPose(keypoints=2), {"output0": (1, 11, CELLS)}),
    "rows": (Rows(suppress=True), {"output0": (1, 30, 6)}),
    "yolov5": (Yolov5(), {"output0": (1, 60, 9)}),
    "yolox": (Yolox(), {"output": (1, CELLS, 9)}),
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
        found = decode(outputs, config, view())
        assert np.isfinite(found.boxes).all()
        assert np.isfinite(found.scores).all()
        assert (found.boxes[:, 2:] > found.boxes[:, :2]).all()
        assert (found.boxes <= [110, 75, 110, 75]).all()
        assert (found.class_ids >= 0).all()
        for extra in (found.keypoints, found.rotated):
            assert extra is None or np.isfinite(extra).all()


def test_masks_are_enlarged_to_the_pixels_of_their_box():
    here = View(fit(HEIGHT * 4, WIDTH * 4, PREPROCESS), WIDTH * 4, HEIGHT * 4, WIDTH, HEIGHT)
    whole = np.full((HEIGHT, WIDTH), -1.0, np.float32)
    whole[8:20, 10:30] = 1.0
    box = np.array([[6, 6, 40, 24]], np.float32)
    found = Detections(box * 4, np.ones(1, np.float32), np.zeros(1, np.int64))
    found = with_masks(found, box, lambda _, rows, columns: whole[rows, columns], whole.shape, here)
    bits, x, y = mask_bits(found, 0)
    assert (x, y, bits.shape) == (24, 24, (72, 136))
    rows, columns = np.flatnonzero(bits.any(axis=1)), np.flatnonzero(bits.any(axis=0))
    assert [rows[0] + y, rows[-1] + 1 + y] == [32, 80]  # 8 and 20, four times as large
    assert [columns[0] + x, columns[-1] + 1 + x] == [40, 120]
    (outline,) = mask_polygons(found, 0)
    assert [*outline.min(axis=0), *outline.max(axis=0)] == [40, 32, 119, 79]


@pytest.mark.parametrize("count", [50, MAX_LISTED + 100])
def test_suppression_of_few_and_of_very_many_boxes(rng, count):
    corners = rng.uniform(0, 300, (count, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(5, 40, (count, 2))], 1)
    boxes, scores = boxes.astype(np.float32), rng.permutation(count).astype(np.float32) + 1
    classes = rng.integers(0, 3, count)
    kept = suppress(boxes, scores, classes, 0.45, 200)
    items = [
        {"box": b, "score": s, "class": c, "row": row}
        for row, (b, s, c) in enumerate(zip(boxes.tolist(), scores, classes, strict=True))
    ]
    expected = ref.greedy(items, lambda a, b: ref.overlap(a["box"], b["box"]), 0.45)
    assert kept.tolist() == [item["row"] for item in expected][:200]


def test_rotated_suppression_agrees_with_the_matrix_form(rng):
    rotated = np.column_stack(
        [rng.uniform(0, 40, (60, 2)), rng.uniform(2, 30, (60, 2)), rng.uniform(-4, 4, 60)]
    ).astype(np.float32)
    scores, classes = rng.permutation(60).astype(np.float32), rng.integers(0, 2, 60)
    kept = suppress_rotated(rotated, scores, classes, 0.3, 100)
    items = [
        {"rotated": r, "score": s, "class": c, "row": row}
        for row, (r, s, c) in enumerate(zip(rotated.tolist(), scores, classes, strict=True))
    ]
    expected = ref.greedy(
        items, lambda a, b: ref.probabilistic_overlap(a["rotated"], b["rotated"]), 0.3
    )
    assert 3 < len(kept) < 60
    assert kept.tolist() == [item["row"] for item in expected]


def test_rows_of_detections_are_taken_together():
    count = np.arange(4)
    found = Detections(
        boxes=np.tile(count[:, None], (1, 4)).astype(np.float32),
        scores=count.astype(np.float32),
        class_ids=count,
        track_ids=count + 10,
        keypoints=np.zeros((4, 2, 3), np.float32),
        rotated=np.zeros((4, 5), np.float32),
    )
    some = found[np.array([2, 0])]
    assert (some.class_ids.tolist(), some.track_ids.tolist()) == ([2, 0], [12, 10])
    assert len(found[count > 1]) == 2
    assert found[count > 1].masks is None


def test_the_script_that_times_decoders(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_decoders", "--runs", "1", "--json"])
    bench_decoders.main()
    rows = {row["decoder"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["ultralytics_detect"]["goal_ms"] == 0.43
    assert all(row["ms"] > 0 for row in rows.values())
    assert rows["ultralytics_detect"]["results"] > 30
