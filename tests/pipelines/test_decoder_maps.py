"""Poses, maps, texts, masks and suppression agree with references that use one number at a time."""

import decoder_references as ref
import numpy as np
import pytest
from decoder_references import HEIGHT, WIDTH, frame_view

from pipelines.config import PreprocessConfig
from pipelines.decode_config import (
    Depth,
    Heatmaps,
    Movenet,
    Segmentation,
    Simcc,
    TextDetection,
    TextRecognition,
)
from pipelines.results import DepthMap, Detections, SegmentationMap, Texts, text_of
from pipelines.stages import nms
from pipelines.stages.decode import View, decode
from pipelines.stages.decoders.masks import with_masks
from pipelines.stages.mask_pixels import mask_bits, mask_polygons
from pipelines.stages.nms import suppress, suppress_rotated
from pipelines.stages.preprocess import fit

PREPROCESS = PreprocessConfig(width=WIDTH, height=HEIGHT, resize="stretch")


@pytest.fixture(params=range(3))
def rng(request):
    return np.random.default_rng(request.param)


def test_movenet(rng):
    rows = rng.uniform(0.2, 0.9, (17, 3)).astype(np.float32)
    result = decode({"output_0": rows[None, None]}, Movenet(), frame_view("stretch"))
    points = rows[:, [1, 0]] * np.array([110, 75])
    np.testing.assert_allclose(result.keypoints[0, :, :2], points, atol=1e-3)
    assert result.scores[0] == pytest.approx(rows[:, 2].mean(), abs=1e-6)
    seen = points[rows[:, 2] >= 0.25]
    np.testing.assert_allclose(result.boxes[0], [*seen.min(0), *seen.max(0)], atol=1e-3)
    rows[:, 2] = 0.1
    assert len(decode({"output_0": rows[None, None]}, Movenet(), frame_view())) == 0


def test_simcc_and_heat_maps_find_the_peaks(rng):
    x, y = rng.integers(2, 2 * WIDTH - 2, 5), rng.integers(2, 2 * HEIGHT - 2, 5)
    maps_x = rng.random((1, 5, 2 * WIDTH)).astype(np.float32) * 0.5
    maps_y = rng.random((1, 5, 2 * HEIGHT)).astype(np.float32) * 0.5
    maps_x[0, range(5), x], maps_y[0, range(5), y] = 0.9, 0.8
    result = decode({"simcc_x": maps_x, "simcc_y": maps_y}, Simcc(), frame_view("stretch"))
    scale = np.array([110 / WIDTH, 75 / HEIGHT])
    points = np.stack([x, y], 1) / 2 * scale
    np.testing.assert_allclose(result.keypoints[0, :, :2], points, atol=1e-3)
    np.testing.assert_allclose(result.keypoints[0, :, 2], 0.8)

    heat = rng.random((1, 5, 8, 16)).astype(np.float32) * 0.5
    columns, rows = rng.integers(1, 15, 5), rng.integers(1, 7, 5)
    heat[0, range(5), rows, columns] = 0.9
    result = decode({"heatmaps": heat}, Heatmaps(), frame_view("stretch"))
    for k, (row, column) in enumerate(zip(rows, columns, strict=True)):
        one = heat[0, k]
        dx = 0.25 if one[row, column + 1] > one[row, column - 1] else -0.25
        dy = 0.25 if one[row + 1, column] > one[row - 1, column] else -0.25
        point = np.array([column + dx, row + dy]) * 4 * scale
        np.testing.assert_allclose(result.keypoints[0, k, :2], point, atol=1e-3)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_segmentation_takes_the_best_class_of_what_the_frame_covers(rng, layout):
    logits = rng.normal(size=(5, 8, 16)).astype(np.float32)
    output = logits if layout == "nchw" else logits.transpose(1, 2, 0)
    here = frame_view("letterbox", (60, 60))  # 32x32 in the middle of 64x32
    result = decode({"o": output[None]}, Segmentation(output="o", layout=layout), here)
    assert isinstance(result, SegmentationMap)
    assert result.class_ids.tolist() == [
        [max(range(5), key=lambda c: logits[c, row, column]) for column in range(4, 12)]
        for row in range(8)
    ]
    assert result.region == pytest.approx((0, 0, 60, 60), abs=1e-3)


def test_segmentation_enlarges_logits_before_it_chooses():
    logits = np.zeros((1, 2, 8, 16), np.float32)
    logits[0, 1, :, 8:] = 3.0  # class 1 is 3 on the right, and class 0 is 1 everywhere
    logits[0, 0] = 1.0
    result = decode({"o": logits}, Segmentation(output="o", full_size=True), frame_view("stretch"))
    # Between the cells 7 (0) and 8 (3) the line passes 1 at 7.33: at pixel 31.3 of 64.
    assert result.class_ids.shape == (HEIGHT, WIDTH)
    assert [int(row.argmax()) for row in result.class_ids] == [31] * HEIGHT


def test_maps_of_classes_and_of_one_channel(rng):
    classes = rng.integers(0, 9, (1, HEIGHT, WIDTH))
    config = Segmentation(output="o", values="classes")
    result = decode({"o": classes}, config, frame_view("stretch"))
    np.testing.assert_array_equal(result.class_ids, classes[0])
    one = rng.random((1, 1, HEIGHT, WIDTH)).astype(np.float32)
    result = decode({"o": one}, Segmentation(output="o", values="binary"), frame_view("stretch"))
    np.testing.assert_array_equal(result.class_ids, one[0, 0] > 0.5)


@pytest.mark.parametrize("channel", [True, False])
def test_depth(rng, channel):
    depth = rng.random((1, HEIGHT, WIDTH)).astype(np.float32)
    depth[0, 3, 4] = np.nan
    output = depth[:, None] if channel else depth
    result = decode({"predicted_depth": output}, Depth(), frame_view("stretch"))
    assert isinstance(result, DepthMap)
    np.testing.assert_array_equal(result.depth, np.nan_to_num(depth[0]))


def test_text_regions_become_rotated_boxes_that_grow():
    plain = np.zeros((1, 1, HEIGHT, WIDTH), np.float32)
    plain[0, 0, 10:16, 20:50] = 0.9
    plain[0, 0, 25:27, 2:4] = 0.9  # too small
    plain[0, 0, 22:30, 40:50] = 0.35  # above the threshold, but not sure
    here = View(fit(HEIGHT, WIDTH, PREPROCESS), WIDTH, HEIGHT, WIDTH, HEIGHT)
    result = decode({"o": plain}, TextDetection(output="o"), here)
    grown = 29 * 5 * 1.6 / (2 * (29 + 5))  # between centres of points, as OpenCV's contours
    expected = [20 - grown, 10 - grown, 49 + grown, 15 + grown]
    np.testing.assert_allclose(result.boxes, [expected], atol=1e-3)
    np.testing.assert_allclose(result.scores, [0.9], atol=1e-6)


def test_text_is_read_without_blanks_and_repeats(rng):
    alphabet = [chr(ord("a") + n) for n in range(20)]
    steps = rng.random((60, 22)).astype(np.float32) ** 4
    steps[::3, 0] = 1.5
    steps[10:13] = steps[10]
    result = decode({"o": steps[None]}, TextRecognition(output="o"), frame_view())
    assert isinstance(result, Texts)
    (line,) = result.lines
    assert text_of(line, alphabet) == ref.ctc(steps, [*alphabet, " "])
    assert (
        len(decode({"o": np.eye(1, 22)[None]}, TextRecognition(output="o"), frame_view()).lines)
        == 0
    )


def test_masks_are_enlarged_to_the_pixels_of_their_box():
    here = View(fit(HEIGHT * 4, WIDTH * 4, PREPROCESS), WIDTH * 4, HEIGHT * 4, WIDTH, HEIGHT)
    whole = np.full((HEIGHT, WIDTH), -1.0, np.float32)
    whole[8:20, 10:30] = 1.0
    box = np.array([[6, 6, 40, 24]], np.float32)
    result = Detections(box * 4, np.ones(1, np.float32), np.zeros(1, np.int64))
    result = with_masks(
        result, box, lambda _, rows, columns: whole[rows, columns], whole.shape, here
    )
    bits, x, y = mask_bits(result, 0)
    assert (x, y, bits.shape) == (24, 24, (72, 136))
    rows, columns = np.flatnonzero(bits.any(axis=1)), np.flatnonzero(bits.any(axis=0))
    assert [rows[0] + y, rows[-1] + 1 + y] == [32, 80]  # 8 and 20, four times as large
    assert [columns[0] + x, columns[-1] + 1 + x] == [40, 120]
    (outline,) = mask_polygons(result, 0)
    assert [*outline.min(axis=0), *outline.max(axis=0)] == [40, 32, 119, 79]


@pytest.mark.parametrize("chunk", [nms.CHUNK, 40])
def test_suppression_of_few_and_of_very_many_boxes(rng, chunk, monkeypatch):
    monkeypatch.setattr(nms, "CHUNK", chunk)
    count = 150
    corners = rng.uniform(0, 300, (count, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(5, 40, (count, 2))], 1)
    boxes, scores = boxes.astype(np.float32), rng.permutation(count).astype(np.float32) + 1
    classes = rng.integers(0, 3, count)
    survivors = suppress(boxes, scores, classes, 0.45, 200)
    items = [
        {"box": b, "score": s, "class": c, "row": row}
        for row, (b, s, c) in enumerate(zip(boxes.tolist(), scores, classes, strict=True))
    ]
    expected = ref.greedy(items, lambda a, b: ref.overlap(a["box"], b["box"]), 0.45)
    assert survivors.tolist() == [item["row"] for item in expected][:200]


@pytest.mark.parametrize("chunk", [nms.ROTATED_CHUNK, 7])
def test_rotated_suppression_agrees_with_the_matrix_form(rng, chunk, monkeypatch):
    monkeypatch.setattr(nms, "ROTATED_CHUNK", chunk)
    rotated = np.column_stack(
        [rng.uniform(0, 40, (60, 2)), rng.uniform(2, 30, (60, 2)), rng.uniform(-4, 4, 60)]
    ).astype(np.float32)
    scores, classes = rng.permutation(60).astype(np.float32), rng.integers(0, 2, 60)
    survivors = suppress_rotated(rotated, scores, classes, 0.3, 100)
    items = [
        {"rotated": r, "score": s, "class": c, "row": row}
        for row, (r, s, c) in enumerate(zip(rotated.tolist(), scores, classes, strict=True))
    ]
    expected = ref.fast(
        items, lambda a, b: ref.probabilistic_overlap(a["rotated"], b["rotated"]), 0.3
    )
    assert 3 < len(survivors) < 60
    assert survivors.tolist() == [item["row"] for item in expected]


def test_rows_of_detections_are_taken_together():
    count = np.arange(4)
    result = Detections(
        boxes=np.tile(count[:, None], (1, 4)).astype(np.float32),
        scores=count.astype(np.float32),
        class_ids=count,
        track_ids=count + 10,
        keypoints=np.zeros((4, 2, 3), np.float32),
        rotated=np.zeros((4, 5), np.float32),
    )
    some = result[np.array([2, 0])]
    assert (some.class_ids.tolist(), some.track_ids.tolist()) == ([2, 0], [12, 10])
    assert len(result[count > 1]) == 2
    assert result[count > 1].masks is None
