"""Messages of the library name its arguments, those of a command its options."""

import inspect
import re

import numpy as np
import onnx
import pytest
from advice_fixtures import OPTION, imports, product_texts
from onnx import TensorProto, helper

import tandem
import toolkit.engine.argument_names as names
from calibration.table import CalibrationTable
from device.argument_names import with_arguments
from toolkit.build import build, calibrate, plan
from toolkit.gpu.schedule.tactics import TacticOptions
from toolkit.partition.planning.forced import Forced
from toolkit.quantize.preprocess.decide import StatedPreprocessing

FUNCTIONS = {"build": build, "plan": plan, "calibrate": calibrate}
ARGUMENTS = {"build": names.BUILD, "plan": names.PLAN, "calibrate": names.CALIBRATE}
CLASSES = {
    one.__name__: one
    for one in (
        tandem.BuildOptions, tandem.PlanOptions, tandem.RangeOptions, tandem.ModelPath,
        tandem.DimRange, TacticOptions, Forced, StatedPreprocessing,
    )
}  # fmt: skip
# Commands that are named as a whole: they are run beside a script.
WHOLE = {"--nodes", "--trtexec", "--plain", "--keep-float"}
# trtexec, a venv, NVIDIA's translator
FOREIGN = {"--onnx", "--layerPrecisions", "--add_unary_ew_scales_for_dla"}


def library_texts():
    graph = imports()
    modules = graph.find_upstream_modules("toolkit.build") | {"toolkit.build"}
    return [
        text
        for text in product_texts()
        if text.module in modules and text.module.startswith(("toolkit", "calibration"))
    ]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_message_of_the_library_names_an_option(function):
    texts = library_texts()
    assert len(texts) > 50
    for text in texts:
        message = with_arguments(" ".join(text.text.split()), ARGUMENTS[function])
        assert not set(OPTION.findall(message)) - WHOLE - FOREIGN, (str(text), message)
        changed = message != text.text or set(OPTION.findall(text.text)) <= WHOLE | FOREIGN
        assert changed, (str(text), message)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_arguments_that_are_named_exist(function):
    parameters = inspect.signature(FUNCTIONS[function]).parameters
    for row in ARGUMENTS[function]:
        if not isinstance(row.words, str):
            continue
        words = row.words.strip("`")
        calls = re.findall(r"(\w+)\((?:path, )?(\w+)=", words)
        for name, argument in calls:
            fields = inspect.signature({**FUNCTIONS, **CLASSES}[name]).parameters
            assert argument in fields, words
        if not calls and words not in ("jetpack", r"scale=\1"):
            first = words.partition("=")[0]
            assert first in parameters or first in ("precision",), words


def test_a_shape_is_shown_as_the_function_takes_it():
    text = "fix it, such as --shape x=1x3x8, or give its range with"
    text += " `tandem build --dim h=MIN:OPT:MAX`."
    assert with_arguments(text, names.PLAN) == (
        "fix it, such as `shapes={'x': (1, 3, 8)}`, or give its range with "
        '`BuildOptions(dims=(DimRange(name="h", min=MIN, opt=OPT, max=MAX),))`.'
    )
    assert "`BuildOptions(shapes={'y': (4,)})`" in with_arguments("--shape y=4", names.BUILD)


def dynamic_model(path):
    value = helper.make_tensor_value_info
    weights = np.ones((4, 3, 3, 3), np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3])],
        "main_graph",
        [value("x", TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [value("y", TensorProto.FLOAT, ["n", 4, "a", "b"])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def test_a_model_of_dynamic_sizes_is_planned_and_calibrated_with_shapes(tmp_path):
    model = dynamic_model(tmp_path / "m.onnx")
    shapes = {"x": (1, 3, 16, 24)}
    result = tandem.plan(model, profile="orin-nano-8gb", shapes=shapes)
    assert result.name == "m"
    samples = [np.random.default_rng(0).random(shapes["x"], np.float32) for _ in range(2)]
    table = tandem.calibrate(model, samples, shapes=shapes, method="minmax", accept_loss=True)
    assert isinstance(table, CalibrationTable)
    for function, call in (
        ("plan", lambda: tandem.plan(model, profile="orin-nano-8gb")),
        ("calibrate", lambda: tandem.calibrate(model, samples)),
        ("build", lambda: tandem.build(model)),
    ):
        with pytest.raises(tandem.TandemError, match="dimension 2 is dynamic") as error:
            call()
        words = "BuildOptions(shapes={" if function == "build" else "such as `shapes={"
        assert words in str(error.value)
        assert not OPTION.findall(str(error.value))
    with pytest.raises(tandem.TandemError, match=r"correct the name given with `shapes`\."):
        tandem.plan(model, profile="orin-nano-8gb", shapes={"images": (1, 3, 8, 8)})


def test_a_plan_takes_data_as_a_build_does_and_nothing_that_contradicts_them(tmp_path):
    model, shapes = dynamic_model(tmp_path / "m.onnx"), {"x": (1, 3, 16, 24)}
    samples = [np.random.default_rng(at).random(shapes["x"], np.float32) for at in range(2)]
    options = {"profile": "orin-nano-8gb", "shapes": shapes}
    assert tandem.plan(model, data=samples, **options).name == "m"
    for extra in (
        {"precision": "fp16"},
        {
            "table": tandem.calibrate(
                model, samples, shapes=shapes, method="minmax", accept_loss=True
            )
        },
        {"options": tandem.PlanOptions(max_latency_ms=5.0)},
    ):
        with pytest.raises(tandem.TandemError, match="data calibrates INT8 as a build does"):
            tandem.plan(model, data=samples, **options, **extra)


def test_notes_and_the_report_of_a_build_name_arguments(tmp_path):
    model = dynamic_model(tmp_path / "m.onnx")
    options = tandem.BuildOptions(dims=tuple(
        tandem.DimRange(name=name, min=8, opt=16, max=32) for name in ("h", "w")
    ))  # fmt: skip
    result = tandem.build(model, options=options, profile="laptop")
    (note,) = [note for note in result.notes if "frozen to 1" in note]
    assert 'DimRange(name="n", min=MIN' in note
    assert not OPTION.findall(note + result.report)


def test_a_pipeline_names_its_own_arguments(tmp_path):
    folder = tmp_path / "p"
    folder.mkdir()
    with pytest.raises(tandem.TandemError) as error:
        list(tandem.Pipeline(folder).results())
    assert not OPTION.findall(str(error.value))
