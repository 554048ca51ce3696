"""How images become inputs: stated, known or assumed; stored, shown and compared."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_double
import cv2
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from docs_fixtures import ROOT
from foreign_models import foreign_model
from model_fixtures import save
from onnx import helper

import configs
from calibration.arrays import InputSpec
from calibration.errors import CalibrationError
from calibration.table import CalibrationTable, decode_table, encode_table, fingerprint, read_table
from device.engine.file import open_engine
from device.engine.preprocessing import Preprocessing, describe, differences
from device.errors import BundleError, PipelineError, TandemError
from pipelines.config import PipelineConfig, PreprocessConfig, SourceConfig
from pipelines.decode_config import Classification
from pipelines.stages.fit import check_preprocessing
from toolkit.cli.main import tandem
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import BuildError
from toolkit.importers.onnx import import_model
from toolkit.importers.origin import ModelOrigin, model_origin
from toolkit.quantize.preprocess.decide import ASSUMED, FROM_INPUT, StatedPreprocessing, decide
from toolkit.quantize.preprocess.known import KNOWN, known_preprocessing
from toolkit.quantize.preprocess.presets import PRESETS
from toolkit.quantize.ranges.data import input_specs, open_data
from toolkit.quantize.ranges.first_layer import BIAS, NORM, Fit, first_layer, fit_of, remark
from toolkit.quantize.ranges.measure import RangeOptions
from toolkit.quantize.ranges.report_text import assumed_lines

NCHW = [InputSpec("images", (1, 3, 32, 48))]
NHWC = [InputSpec("images", (1, 32, 48, 3))]
GREY = [InputSpec("images", (1, 1, 32, 48))]
BYTES = [InputSpec("images", (1, 32, 48, 3), "uint8")]
ULTRALYTICS = {"author": "Ultralytics", "stride": "32", "names": "{0: 'cat'}", "task": "detect"}
RESNET = "torchvision.models.resnet.ResNet"


# What is known of models.


@pytest.mark.parametrize(
    ("name", "origin", "preset", "words"),
    [
        ("best.onnx", ModelOrigin(metadata=ULTRALYTICS), "yolo", "Ultralytics metadata, task det"),
        ("a.onnx", ModelOrigin(metadata={**ULTRALYTICS, "task": "pose"}), "yolo", "task pose"),
        ("a.onnx", ModelOrigin(metadata={**ULTRALYTICS, "task": "classify"}), "yolo-classify",
         "task classify"),
        ("a.onnx", ModelOrigin(metadata={**ULTRALYTICS, "description": "Ultralytics rt-detr-l"}),
         "rtdetr", "task detect"),
        ("a.onnx", ModelOrigin(metadata={"stride": "32", "names": "['a']"}), "yolo", "YOLOv5"),
        ("a.onnx", ModelOrigin(classes=frozenset({RESNET})), "imagenet", RESNET),
        ("a.onnx", ModelOrigin(classes=frozenset({"torchvision.models.detection.ssd.SSD"})), "unit",
         "ssd.SSD"),
        ("a.onnx", ModelOrigin(classes=frozenset({"timm.models.resnet.ResNet"})), "timm", "timm."),
        ("vit_base_patch16_224.onnx",
         ModelOrigin(classes=frozenset({"timm.models.vision_transformer.VisionTransformer"})),
         "timm-half", "VisionTransformer"),
        ("vit_small_patch16_224.dino.onnx",
         ModelOrigin(classes=frozenset({"timm.models.vision_transformer.VisionTransformer"})),
         "timm", "VisionTransformer"),
        ("resnet50-v1-7.onnx", ModelOrigin(), "imagenet", "a guess from the file name 'resnet50-v"),
        ("mobilenet_v2.onnx", ModelOrigin("pytorch"), "imagenet", "(torchvision)"),
        ("yolov8n.onnx", ModelOrigin(), "yolo", "a guess from the file name"),
        ("resnet50.a1_in1k.onnx", ModelOrigin(), "timm", "(timm)"),
        ("tf_efficientnet_b0.ap_in1k.onnx", ModelOrigin(), "timm-half", "(timm)"),
        ("vit_base_patch32_clip_224.openai.onnx", ModelOrigin(), "clip", "(timm)"),
    ],
)  # fmt: skip
def test_known_models_suggest_their_preprocessing(
    name: str, origin: ModelOrigin, preset: str, words: str
) -> None:
    hint = known_preprocessing(name, origin)
    assert hint is not None
    assert hint.preset.name == preset
    assert words in hint.origin


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("robot-objects.onnx", ModelOrigin("pytorch")),
        ("ssd_resnet50.onnx", ModelOrigin()),  # a detector with a backbone of that name
        ("MobileNetV2.onnx", ModelOrigin("keras2onnx")),
        ("yolox_s.onnx", ModelOrigin()),  # 0 to 255, BGR
        ("a.onnx", ModelOrigin(metadata={**ULTRALYTICS, "task": "other"})),
        ("a.onnx", ModelOrigin(metadata={"stride": "32", "names": "[]", "more": "1"})),
    ],
)
def test_other_models_suggest_nothing(name: str, origin: ModelOrigin) -> None:
    assert known_preprocessing(name, origin) is None


def test_every_row_of_known_models_names_a_preset() -> None:
    assert {row.preset for row in KNOWN} <= PRESETS.keys()


def test_a_model_of_ultralytics_is_known_by_its_own_metadata() -> None:
    imported = import_model(foreign_model("nudenet-320n"), shapes={"images": (1, 3, 320, 320)})
    hint = known_preprocessing(imported.name, imported.origin)
    assert hint is not None
    assert hint.preset.name == "yolo"


def test_the_exporters_class_hierarchy_is_read() -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    entry = node.metadata_props.add()
    entry.key = "pkg.torch.onnx.class_hierarchy"
    entry.value = f"['{RESNET}', 'torch.nn.modules.activation.ReLU', 'aten.relu.default']"
    graph = helper.make_graph([node], "g", [], [])
    model = helper.make_model(graph, producer_name="pytorch")
    assert model_origin(model) == ModelOrigin("pytorch", {}, frozenset({RESNET}))


# What is decided, and from what.


def test_nothing_said_is_assumed_and_shown() -> None:
    decision = decide(None, None, NCHW)
    assert decision is not None
    assert decision.config == PreprocessConfig(width=48, height=32)
    assert decision.origins["mean"] == ASSUMED
    assert decision.origins["layout"] == FROM_INPUT
    assert "ASSUMED" in decision.lines()[1]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (NHWC, PreprocessConfig(width=48, height=32, layout="nhwc")),
        (GREY, PreprocessConfig(width=48, height=32, color="grey")),
        (BYTES, PreprocessConfig(width=48, height=32, layout="nhwc", dtype="uint8", scale=1.0)),
        ([InputSpec("x", (8, 3, 32, 48), "float16")],
         PreprocessConfig(width=48, height=32, dtype="float16")),
    ],
)  # fmt: skip
def test_the_input_gives_layout_channels_and_dtype(
    inputs: list[InputSpec], expected: PreprocessConfig
) -> None:
    decision = decide(None, None, inputs)
    assert decision is not None
    assert decision.config == expected


@pytest.mark.parametrize(
    "inputs",
    [
        [InputSpec("x", (1, 7))],
        [InputSpec("x", (1, 4, 32, 32))],
        [InputSpec("x", (1, 3, None, 32))],
        [InputSpec("x", (1, 3, 32, 32), "int64")],
        [*NCHW, *NCHW],
    ],
)
def test_inputs_that_are_no_images_have_no_preprocessing(inputs: list[InputSpec]) -> None:
    assert decide(None, None, inputs) is None
    with pytest.raises(CalibrationError, match="says mean, but the model has no single image"):
        decide(StatedPreprocessing(values={"mean": (0.5,)}), None, inputs)


def test_single_values_go_before_a_preset_and_a_preset_before_the_model() -> None:
    hint = known_preprocessing("resnet18.onnx", ModelOrigin())
    known = decide(None, hint, NCHW)
    assert known is not None
    assert known.config.mean == (0.485, 0.456, 0.406)
    assert "resnet18" in known.origins["mean"]
    stated = StatedPreprocessing(PRESETS["raw"].values, "--preprocess raw", {"color": "bgr"})
    decision = decide(stated, hint, NCHW)
    assert decision is not None
    assert decision.value == Preprocessing(resize="stretch", color="bgr", scale=1.0)
    assert decision.origins["scale"] == "--preprocess raw"
    assert decision.origins["color"] == "--colour"


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("inputs", [NCHW, NHWC])
def test_every_preset_can_be_decided(name: str, inputs: list[InputSpec]) -> None:
    decision = decide(StatedPreprocessing(PRESETS[name].values, name), None, inputs)
    assert decision is not None
    assert decision.config.input_shape == inputs[0].shape


def test_recipes_of_colours_leave_grey_models_to_the_user() -> None:
    hint = known_preprocessing("resnet18.onnx", ModelOrigin())
    decision = decide(None, hint, GREY)
    assert decision is not None
    assert (decision.config.mean, decision.config.resize) == ((0.0,), "centre-crop")
    assert decision.origins["mean"] == ASSUMED


@pytest.mark.parametrize(
    ("stated", "inputs", "message"),
    [
        ({"mean": (123.7, 116.3, 103.5)}, NCHW, "the mean is 123.7, but scaled pixels end at 1 "),
        ({"layout": "nhwc"}, NCHW, r"\[1, 32, 48, 3\].*takes float32 of shape \[1, 3, 32, 48\]"),
        ({"color": "grey"}, NCHW, r"\[1, 1, 32, 48\]"),
        ({"mean": (0.1, 0.2, 0.3)}, GREY, "mean has 3 numbers, but grey has 1"),
        ({"scale": 0.5}, BYTES, "uint8 input takes pixels"),
    ],
)
def test_values_that_do_not_fit_the_model_are_refused(
    stated: dict[str, object], inputs: list[InputSpec], message: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        decide(StatedPreprocessing(values=stated), None, inputs)


def test_a_mean_in_pixels_is_taken_with_a_scale_of_1() -> None:
    stated = StatedPreprocessing(values={"mean": (123.7, 116.3, 103.5), "scale": 1.0})
    assert decide(stated, None, NCHW) is not None


# Words and differences.


@pytest.mark.parametrize(
    ("preprocessing", "text"),
    [
        (Preprocessing(), "letterbox (padding 114), RGB, NCHW float32, pixel / 255"),
        (Preprocessing(resize="stretch", color="bgr", scale=1.0, mean=(103.0, 116.0, 123.0)),
         "stretch, BGR, NCHW float32, pixel - [103, 116, 123]"),
        (Preprocessing(resize="centre-crop", crop_fraction=0.875, layout="nhwc", scale=1 / 127.5,
                       mean=(1.0,), std=(0.5,)),
         "centre-crop (0.875 of the shorter side), RGB, NHWC float32, "
         "(pixel * 0.00784314 - 1) / 0.5"),
    ],
)  # fmt: skip
def test_a_preprocessing_in_words(preprocessing: Preprocessing, text: str) -> None:
    assert describe(preprocessing) == text


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, set()),
        ({"scale": 0.003921}, set()),  # 1 / 255 as people write it
        ({"scale": 0.0039}, {"scale"}),
        ({"mean": (0.0, 0.0, 0.01)}, {"mean"}),
        ({"color": "bgr"}, {"color"}),
        ({"interpolation": "linear"}, set()),  # as without it
        ({"interpolation": "pillow-bicubic"}, {"interpolation"}),
        ({"pad_value": 0}, {"pad_value"}),
        ({"pad_value": 0, "resize": "stretch"}, {"resize"}),
        ({"dtype": "float16", "layout": "nhwc"}, {"dtype", "layout"}),
    ],
)
def test_preprocessings_differ_in_the_fields_that_matter(
    changes: dict[str, object], names: set[str]
) -> None:
    second = msgspec.structs.replace(Preprocessing(), **changes)
    assert differences(Preprocessing(), second).keys() == names


def _pipeline(**changes: object) -> PipelineConfig:
    return PipelineConfig(
        name="door",
        source=SourceConfig(uri="x.mp4"),
        preprocess=PreprocessConfig(width=8, height=8, **changes),  # type: ignore[arg-type]
        decode=Classification(scores="s"),
    )


def test_a_pipeline_that_fits_its_engine_says_nothing() -> None:
    assert check_preprocessing(_pipeline(), Preprocessing()) is None
    assert check_preprocessing(_pipeline(color="bgr"), msgspec.UNSET) is None  # not recorded


def test_another_geometry_than_the_engines_is_a_warning() -> None:
    warning = check_preprocessing(_pipeline(resize="stretch"), Preprocessing())
    assert warning is not None
    assert "[preprocess] of pipeline 'door'" in warning
    assert "resize = letterbox, not stretch" in warning


@pytest.mark.parametrize("changes", [{"color": "bgr"}, {"mean": (0.5,)}, {"scale": 1.0}])
def test_other_numbers_than_the_engines_are_refused(changes: dict[str, object]) -> None:
    (name,) = changes
    with pytest.raises(PipelineError, match=f"which has {name} = .*: set it so, or calibrate"):
        check_preprocessing(_pipeline(**changes, resize="stretch"), Preprocessing(resize="stretch"))


# Tables.


def _table(**changes: object) -> CalibrationTable:
    values = {"method": "minmax", "samples": 1, "data_sha256": "0" * 64, "model_sha256": "1" * 64}
    return CalibrationTable(tensors={"x": 1.0}, **{**values, **changes})  # type: ignore[arg-type]


def test_a_table_holds_its_preprocessing_exactly() -> None:
    preprocessing = Preprocessing(mean=(0.1, 0.2, 1 / 3), color="bgr")
    table = _table(format=3, preprocessing=preprocessing)
    assert decode_table(encode_table(table), "t") == table
    assert fingerprint(table) != fingerprint(_table())
    second = msgspec.structs.replace(preprocessing, color="rgb")
    assert fingerprint(table) != fingerprint(_table(format=3, preprocessing=second))


def test_tables_of_older_formats_are_read_as_not_recorded() -> None:
    text = encode_table(_table())
    assert b"preprocessing" not in text
    assert decode_table(text, "t").preprocessing is msgspec.UNSET


# The first layer.


def _convnet(path: Path, rng: np.random.Generator, *, norm: bool, layout: str = "nchw") -> Path:
    """A convolution whose statistics are those of ImageNet-normalised noise, then a classifier."""
    weight = rng.normal(size=(16, 3, 3, 3)).astype(np.float32)
    bias = np.zeros(16, np.float32)
    noise = (rng.integers(0, 256, (4, 3, 32, 32)) / 255 - 0.45) / 0.225
    windows = np.lib.stride_tricks.sliding_window_view(noise, (3, 3), axis=(2, 3))
    results = np.einsum("nchwij,ocij->onhw", windows, weight).reshape(16, -1)
    mean, variance = results.mean(axis=1), results.var(axis=1)
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2])]
    if layout == "nchw":
        nodes = [helper.make_node("Identity", ["x"], ["t"])]
    weights = {"w": weight, "b": bias, "s": np.ones(16, np.float32), "z": bias,
               "m": mean.astype(np.float32), "v": variance.astype(np.float32),
               "g": rng.normal(size=(10, 16)).astype(np.float32)}  # fmt: skip
    if norm:
        norms = ["c", "s", "z", "m", "v"]
        nodes += [helper.make_node("Conv", ["t", "w", "b"], ["c"], name="conv"),
                  helper.make_node("BatchNormalization", norms, ["n"])]  # fmt: skip
    else:  # as an exporter fuses it
        scale = 1 / np.sqrt(variance)
        weights["w"] = (weight * scale[:, None, None, None]).astype(np.float32)
        weights["b"] = (1.0 - mean * scale).astype(np.float32)
        nodes += [helper.make_node("Conv", ["t", "w", "b"], ["n"], name="conv")]
    nodes += [helper.make_node("Relu", ["n"], ["r"]),
              helper.make_node("GlobalAveragePool", ["r"], ["p"]),
              helper.make_node("Flatten", ["p"], ["f"]),
              helper.make_node("Gemm", ["f", "g"], ["y"], transB=1, name="head")]  # fmt: skip
    read = {name for node in nodes for name in node.input}
    shape = [1, 3, 32, 32] if layout == "nchw" else [1, 32, 32, 3]
    read_weights = {name: array for name, array in weights.items() if name in read}
    return save(path, nodes, {"x": shape}, {"y": [1, 10]}, read_weights)


def _inputs(rng: np.random.Generator, scale: float, shift: float) -> list[dict[str, np.ndarray]]:
    pixels = rng.integers(0, 256, (6, 1, 3, 32, 32)) / 255
    return [{"x": (array * scale - shift).astype(np.float32)} for array in pixels]


IMAGENET = (1 / 0.225, 0.45 / 0.225)


@pytest.mark.parametrize(
    ("norm", "numbers", "fits"),
    [
        (True, IMAGENET, True),
        (True, (2.0, 1.0), True),  # -1 to 1 instead: too near to tell
        (True, (1.0, 0.0), False),  # 0 to 1
        (True, (255.0, 0.0), False),
        (False, IMAGENET, True),
        (False, (1.0, 0.0), True),  # the bias tells factors of 50 and more
        (False, (255.0, 0.0), False),
    ],
)
def test_inputs_are_compared_with_the_first_layer(
    norm: bool, numbers: tuple[float, float], fits: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)  # one layer in some hundreds tells nothing
    layer = first_layer(import_model(_convnet(tmp_path / "m.onnx", rng, norm=norm)).model)
    assert layer is not None
    assert layer.basis == (NORM if norm else BIAS)
    sentence = remark(layer, _inputs(rng, *numbers))
    assert (sentence is None) == fits
    if sentence:
        assert layer.basis.name in sentence


def test_the_right_inputs_have_no_shift_and_a_spread_of_1(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    layer = first_layer(import_model(_convnet(tmp_path / "m.onnx", rng, norm=True)).model)
    assert layer is not None
    fit = fit_of(layer, _inputs(rng, *IMAGENET))
    assert fit.shift < 0.1
    assert fit.spread == pytest.approx(1.0, abs=0.05)
    twice = fit_of(layer, _inputs(rng, 2 * IMAGENET[0], 2 * IMAGENET[1]))
    assert twice.spread == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(
    ("fit", "holds"),
    [
        (Fit(1.5, 1.0), True),
        (Fit(1.51, 1.0), False),
        (Fit(0.0, 3.0), True),
        (Fit(0.0, 3.01), False),
        (Fit(0.0, 1 / 3), True),
        (Fit(0.0, 0.33), False),
    ],
)
def test_the_limits_of_a_batch_normalization(fit: Fit, holds: bool) -> None:
    assert fit.holds(NORM) == holds


@pytest.mark.parametrize(
    ("spread", "holds"), [(50.0, True), (50.1, False), (0.02, True), (0.0199, False)]
)
def test_the_limits_of_a_bias(spread: float, holds: bool) -> None:
    assert Fit(1e9, spread).holds(BIAS) == holds


def test_a_model_without_a_convolution_has_no_first_layer(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 3, 8, 8]})
    assert first_layer(import_model(path).model) is None


@pytest.mark.parametrize(
    ("preset", "fits"), [("segmentation", True), ("unit", False), ("raw", False)]
)
def test_a_model_of_others_fits_its_own_statistics_alone(preset: str, fits: bool) -> None:
    imported = import_model(foreign_model("ppocr-v4-det"), shapes={"x": (1, 3, 160, 160)})
    stated = StatedPreprocessing(PRESETS[preset].values, preset)
    specs = input_specs(imported.model)
    decision = decide(stated, None, specs)
    assert decision is not None
    scenes = configs.ROOT / "scenes" / "calibration"
    samples = list(open_data(scenes, specs, decision.config, limit=6))
    assert (remark(first_layer(imported.model), samples) is None) == fits


# The commands.


@pytest.fixture
def images(tmp_path: Path, rng: np.random.Generator) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        pixels = rng.integers(0, 256, (48, 40, 3), np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), pixels)
    return folder


def _run(*arguments: object) -> Result:
    result = CliRunner().invoke(tandem, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def _calibrate(model: Path, data: Path, *arguments: object) -> Result:
    given = ("--method", "minmax", "--accept-loss", *arguments)
    result = _run("calibrate", model, "--data", data, *given)
    assert result.exit_code == 0, result.output
    return result


def test_calibrate_says_and_stores_the_preprocessing(
    tmp_path: Path, rng: np.random.Generator, images: Path
) -> None:
    model = _convnet(tmp_path / "m.onnx", rng, norm=True)
    assumed = _calibrate(model, images)
    assert "letterbox (padding 114), RGB, NCHW float32, pixel / 255" in assumed.output
    assert "ASSUMED" in assumed.output
    assert "REMARK: the inputs, from 0" in assumed.output
    assert "do not fit the statistics of the first batch normalization" in assumed.output
    first = read_table(tmp_path / "m.calib.json")
    assert first.preprocessing == Preprocessing()
    stated = _calibrate(model, images, "--preprocess", "imagenet", "--resize", "stretch", "--json")
    second = read_table(tmp_path / "m.calib.json")
    printed = json.loads(stated.stdout)
    assert printed["remarks"] == []
    assert printed["preprocessing"]["mean"] == [0.485, 0.456, 0.406]
    assert printed["preprocessing"]["origins"]["mean"] == "--preprocess imagenet"
    assert printed["preprocessing"]["origins"]["resize"] == "--resize"
    assert printed["fingerprint"] == fingerprint(second) != fingerprint(first)
    assert second.data_sha256 != first.data_sha256  # the same images, other inputs


def test_a_channels_last_model_is_calibrated_on_images(
    tmp_path: Path, rng: np.random.Generator, images: Path
) -> None:
    model = _convnet(tmp_path / "m.onnx", rng, norm=True, layout="nhwc")
    output = _calibrate(model, images, "--preprocess", "imagenet", "--colour", "bgr").output
    assert "BGR, NHWC float32" in output
    assert "REMARK" not in output


def test_the_commands_of_the_page_run(
    tmp_path: Path, rng: np.random.Generator, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "preprocessing.md").read_text()
    commands = [line for line in page.splitlines() if line.startswith("tandem ")]
    assert commands
    for command in commands:
        model = Path(command.split()[2])
        _convnet(model, rng, norm=True)
        if command.split()[1] == "build":
            with cuda_double.interpreted_cubins():  # to compile them takes long
                result = _run(*command.split()[1:])
            assert result.exit_code == 0, result.output
            with open_engine(model.with_suffix(".engine")) as engine:
                assert [row.pixels for row in engine.manifest.frames or ()] == ["bgr", "nv12"]
            continue
        result = _run(*command.split()[1:], "--accept-loss")
        assert result.exit_code == 0, result.output
        assert model.with_suffix(".calib.json").exists()


def test_of_arrays_only_what_is_stated_is_recorded(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = _convnet(tmp_path / "m.onnx", rng, norm=True)
    np.save(tmp_path / "x.npy", rng.normal(size=(4, 1, 3, 32, 32)).astype(np.float32))
    assert "preprocessing: not recorded" in _calibrate(model, tmp_path / "x.npy").output
    assert read_table(tmp_path / "m.calib.json").format == 1
    output = _calibrate(model, tmp_path / "x.npy", "--preprocess", "imagenet").output
    assert "as stated: the samples are arrays" in output
    table = read_table(tmp_path / "m.calib.json")
    assert table.preprocessing
    assert table.preprocessing.crop_fraction == 0.875


def test_a_resumed_calibration_refuses_images_prepared_otherwise(
    tmp_path: Path, rng: np.random.Generator, images: Path
) -> None:
    model = _convnet(tmp_path / "m.onnx", rng, norm=True)
    _calibrate(model, images, "--resume", tmp_path / "state")
    with pytest.raises(CalibrationError, match="state"):
        _calibrate(model, images, "--resume", tmp_path / "state", "--preprocess", "imagenet")


def test_an_engine_records_the_preprocessing_of_its_ranges(
    tmp_path: Path, rng: np.random.Generator, images: Path
) -> None:
    model = _convnet(tmp_path / "m.onnx", rng, norm=True)
    _calibrate(model, images, "--preprocess", "imagenet")
    table = ("--table", tmp_path / "m.calib.json")
    built = _run("build", model, *table)
    assert built.exit_code == 0, built.output
    text = "preprocessing: centre-crop (0.875 of the shorter side), pillow-bilinear, RGB"
    assert text in built.output
    assert text in _run("inspect", tmp_path / "m.engine").output
    with open_engine(tmp_path / "m.engine") as engine:
        assert engine.manifest.preprocessing == read_table(tmp_path / "m.calib.json").preprocessing
    assert _run("build", model, *table, "--std", "0.229,0.224,0.225").exit_code == 0  # as it says
    with pytest.raises(BuildError, match=r"another preprocessing.*stated: color rgb, not bgr;"):
        _run("build", model, *table, "--colour", "bgr")
    with pytest.raises(BuildError, match=r"stated: resize centre-crop, not stretch, crop_fraction"):
        _run("build", model, *table, "--preprocess", "raw")


def test_an_engine_without_ranges_records_what_is_stated_alone(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = _convnet(tmp_path / "resnet18.onnx", rng, norm=True)
    plain = _run("build", model, "--precision", "fp32")
    assert "preprocessing: not recorded" in plain.output
    with open_engine(tmp_path / "resnet18.engine") as engine:
        assert engine.manifest.preprocessing is msgspec.UNSET
    assert b'"preprocessing"' not in (tmp_path / "resnet18.engine").read_bytes()
    stated = _run("build", model, "--precision", "fp32", "--preprocess", "unit")
    assert "preprocessing: stretch, RGB, NCHW float32, pixel / 255" in stated.output
    # Data that nothing is measured on do not hide it.
    options = BuildOptions("fp32", data=[], ranges=RangeOptions(preprocess=Preprocessing()))
    built = build_engine(model, "laptop", tmp_path / "d.engine", options)
    assert built.manifest.preprocessing == Preprocessing()


def test_a_bundle_of_a_pipeline_with_other_numbers_is_refused(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = _convnet(tmp_path / "m.onnx", rng, norm=True)
    _run("build", model, "--precision", "fp32", "--preprocess", "imagenet")
    (tmp_path / "labels.txt").write_text("".join(f"class {n}\n" for n in range(10)))
    pipeline = tmp_path / "pipeline.toml"
    text = (
        'name = "door"\n[source]\nuri = "x.mp4"\n[preprocess]\nwidth = 32\nheight = 32\n{}'
        '[decode]\nkind = "classification"\nscores = "y"\n'
    )
    files = ("--pipeline", pipeline, "--labels", tmp_path / "labels.txt")
    arguments = ("bundle", tmp_path / "m.engine", *files, "-o", tmp_path / "m.bundle")
    pipeline.write_text(text.format(""))
    with pytest.raises(BundleError, match=r"mean = \[0.485, 0.456, 0.406\], not 0"):
        _run(*arguments)
    pipeline.write_text(text.format("mean = [0.485, 0.456, 0.406]\nstd = [0.229, 0.224, 0.225]\n"))
    bundled = _run(*arguments)
    assert bundled.exit_code == 0, bundled.output
    assert "resize = centre-crop, not letterbox" in bundled.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preprocess", "imagnet"), "'imagnet' is no file and none of yolo,"),
        (("--mean", "1,2"), "has 2 numbers; give 1 or 3"),
        (("--mean", "a,b,c"), "is not a number for each channel"),
        (("--resize", "stretch:0.5"), "is not one of letterbox, letterbox-corner, stretch"),
        (("--resize", "centre-crop:1.5"), "is not one of letterbox"),
        (("--scale", "0"), "--scale"),
    ],
)
def test_options_that_cannot_be_read_are_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = _run("calibrate", "m.onnx", "--data", tmp_path, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_what_is_assumed_stands_at_the_end_and_strict_refuses_it(
    tmp_path: Path, rng: np.random.Generator, images: Path
) -> None:
    model = _convnet(tmp_path / "unknown.onnx", rng, norm=True)
    data = ("--data", images, "--method", "minmax", "--accept-loss")
    built = _run("build", model, *data)
    assert built.exit_code == 0, built.output
    *_, engine, last = built.output.strip().splitlines()
    assert engine.startswith("engine: ")
    assert last.startswith("WARNING: nothing says how the model's images are prepared, so resize,")
    assert "are ASSUMED (letterbox (padding 114), RGB, NCHW float32, pixel / 255)" in last
    assert "`tandem build --preprocess` states it" in last
    for command in ("build", "calibrate"):
        says = "nothing says resize, padding, interpolation, colour, scale, mean and std of the"
        with pytest.raises(TandemError, match=says):
            _run(command, model, *data, "--strict")
    for stated in (("--preprocess", "imagenet"), ("--preprocess", "yolo")):
        built = _run("build", model, *data, "--strict", *stated)
        assert built.exit_code == 0, built.output
        assert "ASSUMED" not in built.output
    calibrated = _run("calibrate", model, *data)
    assert calibrated.output.strip().splitlines()[-1].startswith("WARNING: nothing says how")
    spaced = model.rename(tmp_path / "un known.onnx")
    beside = tmp_path / "un known.toml"
    beside.touch()
    for command in ("build", "calibrate"):
        output = _run(command, spaced, *data).output
        assert f"`tandem build --preprocess '{beside}'` states it" in output


def test_a_folder_without_a_name_has_no_file_beside_it() -> None:
    preprocessing = SimpleNamespace(assumed=("mean",), in_words="RGB")
    ranges: Any = SimpleNamespace(preprocessing=preprocessing)
    (line,) = assumed_lines(ranges, Path("."))
    assert "`tandem build --preprocess`" in line
