"""The scenes of the demo detector, and the files that ship with it."""

import json
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest

from scripts.training_scenes import CALIBRATION_SEED, HELD_OUT_SEED, draw_scene
from toolkit.demo.scenes.backgrounds import HELD_OUT_PHOTOGRAPHS, load_backgrounds
from toolkit.demo.scenes.canvas import Canvas
from toolkit.demo.scenes.drawing import draw, pick_lamp
from toolkit.demo.scenes.geometry import Pose
from toolkit.demo.scenes.moving import Scene, moving_scene
from toolkit.demo.scenes.objects import CLASSES, pick_figure, pick_pose

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PHOTOGRAPHS = CONFIGS / "scenes" / "backgrounds"
MODEL = CONFIGS / "models" / "robot-objects.onnx"


@pytest.fixture(scope="module")
def photos():
    return load_backgrounds(PHOTOGRAPHS, held_out=False)


@pytest.fixture(scope="module")
def drawn(photos):
    return [draw_scene(7, index, photos) for index in range(60)]


@pytest.fixture(scope="module")
def truth():
    return json.loads((CONFIGS / "scenes" / "heldout.json").read_text())


def overlap(a, b):
    width = min(a.x2, b.x2) - max(a.x1, b.x1)
    height = min(a.y2, b.y2) - max(a.y1, b.y1)
    shared = max(width, 0) * max(height, 0)
    areas = [(box.x2 - box.x1) * (box.y2 - box.y1) for box in (a, b)]
    return shared / (sum(areas) - shared)


def test_a_scene_depends_on_seed_and_index_alone(photos, drawn):
    again = draw_scene(7, 31, photos)
    assert np.array_equal(again.image, drawn[31].image)
    assert again.boxes == drawn[31].boxes
    assert not np.array_equal(draw_scene(8, 31, photos).image, drawn[31].image)


def test_drawing_leaves_the_photographs_alone(photos):
    before = [photo.copy() for photo in photos]
    for index in range(20):
        draw_scene(9, index, photos)
    assert all(np.array_equal(a, b) for a, b in zip(before, photos, strict=True))


def test_images_have_the_asked_size(photos, drawn):
    assert {scene.image.shape for scene in drawn} == {(320, 320, 3)}
    assert {scene.image.dtype for scene in drawn} == {np.dtype(np.uint8)}
    assert draw_scene(7, 0, photos, size=416).image.shape == (416, 416, 3)


def test_boxes_lie_inside_and_are_not_empty(drawn):
    for scene in drawn:
        for box in scene.boxes:
            assert 0 <= box.x1 < box.x2 <= 320
            assert 0 <= box.y1 < box.y2 <= 320


def test_every_class_appears_and_some_images_are_empty(drawn):
    classes = [box.class_id for scene in drawn for box in scene.boxes]
    assert set(classes) == set(range(len(CLASSES)))
    assert any(not scene.boxes for scene in drawn)


def paint_one(class_id, place, seed=0):
    """Paint one object on plain grey and return the scene."""
    rng = np.random.default_rng([seed, class_id])
    canvas = Canvas(np.full((200, 200, 3), 128, np.uint8))
    figure, pose = pick_figure(rng, class_id), pick_pose(rng, class_id)
    canvas.paint(draw(figure, pose, pick_lamp(rng), place), class_id)
    return Scene(canvas.image, canvas.boxes())


@pytest.mark.parametrize("class_id", range(len(CLASSES)), ids=CLASSES)
@pytest.mark.parametrize("place", [(100.0, 100.0, 120.0), (61.3, 90.8, 24.0), (10.0, 100.0, 90.0)])
def test_a_box_is_tight(class_id, place):
    scene = paint_one(class_id, place)
    (box,) = scene.boxes
    changed = np.abs(scene.image.astype(int) - 128).max(axis=2) > 8
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    edges = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
    # One pixel of slack: the rim is a blend, and the box ends where the object covers half.
    assert np.allclose((box.x1, box.y1, box.x2, box.y2), edges, atol=1.5)


@pytest.mark.parametrize("class_id", range(len(CLASSES)), ids=CLASSES)
def test_the_longer_side_is_the_asked_size(class_id):
    (box,) = paint_one(class_id, (100.0, 100.0, 120.0)).boxes
    assert max(box.x2 - box.x1, box.y2 - box.y1) == pytest.approx(120, abs=2)
    assert ((box.x1 + box.x2) / 2, (box.y1 + box.y2) / 2) == pytest.approx((100, 100), abs=2)


def test_what_is_hidden_too_much_is_refused_and_has_no_box():
    rng = np.random.default_rng(0)
    canvas = Canvas(np.full((200, 200, 3), 128, np.uint8))
    ball = pick_figure(rng, CLASSES.index("ball"))
    pose, lamp = Pose(0, 0, 0, 0), pick_lamp(rng)
    canvas.paint(draw(ball, pose, lamp, (100.0, 100.0, 60.0)), 1)
    cover = draw(ball, pose, lamp, (104.0, 100.0, 60.0))
    assert not canvas.fits(cover)
    assert canvas.fits(draw(ball, pose, lamp, (150.0, 100.0, 60.0)))
    assert not canvas.fits(draw(ball, pose, lamp, (-25.0, 100.0, 60.0)))
    canvas.paint(cover, None)
    assert canvas.boxes() == ()


def test_a_box_covers_only_what_can_be_seen():
    rng = np.random.default_rng(0)
    canvas = Canvas(np.full((200, 200, 3), 128, np.uint8))
    ball, lamp = pick_figure(rng, CLASSES.index("ball")), pick_lamp(rng)
    for x in (80.0, 120.0):
        canvas.paint(draw(ball, Pose(0, 0, 0, 0), lamp, (x, 100.0, 80.0)), 1)
    first, second = canvas.boxes()
    assert (first.x1, second.x1, second.x2) == pytest.approx((40, 80, 160), abs=1)
    assert first.x2 < 105  # the second ball hides the right side of the first


def test_a_moving_scene_is_smooth(photos):
    film = list(moving_scene(4, 40, photos, 640, 480))
    assert [scene.image.shape for scene in film] == [(480, 640, 3)] * 40
    steps = [np.abs(b.image.astype(int) - a.image).mean() for a, b in pairwise(film)]
    assert max(steps) < 25
    for before, after in pairwise(film):
        near = [max((overlap(a, b) for b in after.boxes), default=0) for a in before.boxes]
        assert sum(value > 0.6 for value in near) >= len(near) - 1  # one may have gone into hiding


def test_a_moving_scene_shows_every_class_and_repeats(photos):
    film = list(moving_scene(4, 3, photos, 320, 240))
    again = list(moving_scene(4, 3, photos, 320, 240))
    assert np.array_equal(film[2].image, again[2].image)
    assert {box.class_id for scene in film for box in scene.boxes} == set(range(len(CLASSES)))


def test_held_out_photographs_are_apart():
    every, ours, theirs = (len(load_backgrounds(PHOTOGRAPHS, h)) for h in (None, True, False))
    assert ours == len(HELD_OUT_PHOTOGRAPHS)
    assert every == ours + theirs


def test_a_folder_without_photographs_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=tmp_path.name):
        load_backgrounds(tmp_path)


def test_every_photograph_has_a_licence():
    licences = (CONFIGS / "scenes" / "LICENSES.md").read_text()
    assert all(f"`{path.name}`" in licences for path in PHOTOGRAPHS.glob("*.jpg"))


def difference(a, b):
    """Mean difference in grey levels, but for the noise, which JPEG changes."""
    a, b = (cv2.GaussianBlur(image, (0, 0), 3).astype(int) for image in (a, b))
    return np.abs(a - b).mean()


def test_shipped_held_out_images_are_the_scenes_they_claim_to_be(truth):
    folder, photos = CONFIGS / "scenes", load_backgrounds(PHOTOGRAPHS, held_out=True)
    files = [picture["file"] for picture in truth["pictures"]]
    assert files == sorted(f"heldout/{path.name}" for path in (folder / "heldout").glob("*.jpg"))
    assert tuple(truth["classes"]) == CLASSES
    for index in range(0, len(files), 9):
        scene = draw_scene(HELD_OUT_SEED, index, photos)
        written = cv2.imread(str(folder / files[index]))
        assert difference(written, scene.image) < 3
        labels = [(CLASSES[b.class_id], [b.x1, b.y1, b.x2, b.y2]) for b in scene.boxes]
        assert labels == [(b["label"], b["box"]) for b in truth["pictures"][index]["boxes"]]


def test_shipped_calibration_images_are_the_scenes_they_claim_to_be(photos):
    files = sorted((CONFIGS / "scenes" / "calibration").glob("*.jpg"))
    assert len(files) == 64
    for index in range(0, len(files), 9):
        scene = draw_scene(CALIBRATION_SEED, index, photos)
        assert difference(cv2.imread(str(files[index])), scene.image) < 3


def test_the_model_keeps_its_promises():
    assert MODEL.stat().st_size <= 6_000_000
    model = onnx.load(str(MODEL))
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == 17
    assert sum(int(np.prod(weight.dims)) for weight in model.graph.initializer) <= 1_500_000
    assert {node.op_type for node in model.graph.node} <= {
        *("Conv", "Relu", "Add", "Concat", "Resize", "Sigmoid", "Reshape", "Constant")
    }
    session = onnxruntime.InferenceSession(str(MODEL), providers=["CPUExecutionProvider"])
    tensors = [*session.get_inputs(), *session.get_outputs()]
    assert {t.name: (t.type, t.shape) for t in tensors} == {
        "images": ("tensor(float)", [1, 3, 320, 320]),
        "boxes": ("tensor(float)", [1, 4, 2100]),
        "scores": ("tensor(float)", [1, len(CLASSES), 2100]),
    }
    assert MODEL.with_suffix(".labels.txt").read_text().split() == list(CLASSES)


def test_convolutions_suit_the_dla():
    model = onnx.load(str(MODEL))
    weights = {weight.name: weight.dims for weight in model.graph.initializer}
    convs = [node for node in model.graph.node if node.op_type == "Conv"]
    groups = [a.i for node in convs for a in node.attribute if a.name == "group"]
    assert set(groups) <= {1}
    shapes = [weights[node.input[1]] for node in convs]
    inner = [s[0] for s in shapes if s[0] not in (4, len(CLASSES))]  # but for the outputs
    inner += [s[1] for s in shapes if s[1] != 3]  # but for the picture
    assert all(count % 8 == 0 for count in inner)


def test_the_model_finds_what_was_drawn(truth):
    """A cell whose best score is sure must sit in an object of its class, nearly always."""
    session = onnxruntime.InferenceSession(str(MODEL), providers=["CPUExecutionProvider"])
    count = total = 0
    for picture in truth["pictures"][:30]:
        image = cv2.imread(str(CONFIGS / "scenes" / picture["file"]))[..., ::-1]
        tensor = np.ascontiguousarray(image.transpose(2, 0, 1)[None], np.float32) / 255
        boxes, scores = session.run(["boxes", "scores"], {"images": tensor})
        for box in picture["boxes"]:
            total += 1
            count += is_found(box, boxes[0], scores[0])
    assert count / total > 0.85


def is_found(truth, boxes, scores):
    """Say whether a cell with a score above 0.35 for the right class has IoU 0.5 or more."""
    centres, strides = [], []
    for stride in (8, 16, 32):
        y, x = np.mgrid[: 320 // stride, : 320 // stride] * stride + stride / 2
        centres.append(np.stack([x.ravel(), y.ravel()]))
        strides.append(np.full(x.size, stride))
    centre, reach = np.concatenate(centres, axis=1), np.maximum(boxes, 0) * np.concatenate(strides)
    low, high = centre - reach[:2], centre + reach[2:]
    x1, y1, x2, y2 = truth["box"]
    shared = np.clip(np.minimum(high, [[x2], [y2]]) - np.maximum(low, [[x1], [y1]]), 0, None)
    union = (high - low).prod(axis=0) + (x2 - x1) * (y2 - y1) - shared.prod(axis=0)
    iou = shared.prod(axis=0) / union
    return bool(np.any((iou >= 0.5) & (scores[CLASSES.index(truth["label"])] > 0.35)))
