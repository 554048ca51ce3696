"""Exported Q/DQ models: the formulas of INT8, the rules of TensorRT, and the engine's own run."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from model_fixtures import prepared, save, small_convnet
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from calibration.table import CalibrationTable
from device.runtime.exact_products import exact_session
from device.runtime.session import open_session
from pipelines.sources.files import read_image
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import BuildError
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.qdq.check import RULES, check_qdq
from toolkit.quantize.qdq.export import TARGETS, export_qdq
from toolkit.quantize.quantize import calibrated_tensors

BOTH = sorted(TARGETS)
CONFIGS = Path(__file__).parents[2] / "configs"


def observed_amax(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, float]:
    activations = ActivationRunner(model, calibrated_tensors(model))(feeds)
    return {name: float(np.abs(array).max()) or 1.0 for name, array in activations.items()}


def exported(path: Path, amax: dict[str, float], target: str = "tensorrt-gpu") -> onnx.ModelProto:
    return ir.to_proto(export_qdq(prepared(path), amax, target))


def detector() -> tuple[ir.Model, dict[str, np.ndarray]]:
    """The shipped detector and an image for it."""
    image = read_image(CONFIGS / "scenes" / "calibration" / "000.jpg")
    assert image is not None
    channels_first = image[:320, :320, ::-1].transpose(2, 0, 1)[None].astype(np.float32) / 255
    feeds = {"images": np.ascontiguousarray(channels_first)}
    return prepared(CONFIGS / "models" / "robot-objects.onnx"), feeds


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    data = model.SerializeToString()
    session = exact_session(data, options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def readers(model: onnx.ModelProto, op: str) -> dict[str, list[str]]:
    """Node -> names of its operands."""
    return {node.name: list(node.input) for node in model.graph.node if node.op_type == op}


def rounded(x: np.ndarray, scale: np.ndarray | float, least: int = -128) -> np.ndarray:
    """On the INT8 grid, by the formula."""
    steps = np.clip(np.rint(x / np.float32(scale)), least, 127)
    return (steps * np.float32(scale)).astype(np.float32)


def convnet(path: Path, rng: np.random.Generator) -> Path:
    """x -> Conv, Relu -> Conv, Relu -> their sum -> ConvTranspose -> pool -> Gemm -> y."""
    c = 8
    weights = {
        "w0": rng.normal(size=(c, 3, 3, 3)),
        "b0": rng.normal(size=c),
        "w1": rng.normal(size=(c, c, 3, 3)),
        "w2": rng.normal(size=(c, c, 2, 2)),
        "w3": rng.normal(size=(10, c)),
        "b3": rng.normal(size=10),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["c0"], name="conv0", pads=[1] * 4),
        helper.make_node("Relu", ["c0"], ["r0"], name="relu0"),
        helper.make_node("Conv", ["r0", "w1"], ["c1"], name="conv1", pads=[1] * 4),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        helper.make_node("Add", ["r0", "r1"], ["a"], name="add"),
        helper.make_node("ConvTranspose", ["a", "w2"], ["t"], name="up", strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["t"], ["g"], name="pool"),
        helper.make_node("Flatten", ["g"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["y"], name="fc", transB=1),
    ]
    arrays = {name: array.astype(np.float32) for name, array in weights.items()}
    return save(path, nodes, {"x": [1, 3, 16, 16]}, {"y": [1, 10]}, arrays)


def engine_run(
    path: Path, amax: dict[str, float], feeds: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The outputs of the engine that a build makes of the same model and ranges."""
    table = CalibrationTable(
        method="minmax", samples=1, data_sha256="0" * 64, model_sha256="0" * 64, tensors=amax
    )
    options = BuildOptions(precision="int8", table=table)
    result = build_engine(path, "laptop", path.with_suffix(".engine"), options)
    with open_session(result.path) as session:
        return session.infer(feeds)


@pytest.mark.parametrize("target", BOTH)
def test_an_export_runs_within_one_step_of_the_engine(
    tmp_path: Path, rng: np.random.Generator, target: str
) -> None:
    path = convnet(tmp_path / "m.onnx", rng)
    feeds = {"x": rng.normal(size=(1, 3, 16, 16)).astype(np.float32)}
    amax = observed_amax(prepared(path), feeds)
    # As the scale rules of the DLA have it: what is only moved or rectified keeps its range.
    amax.update({"c0": amax["r0"], "c1": amax["r1"], "f": amax["g"]})
    actual = run(exported(path, amax, target), feeds)["y"]
    assert np.abs(actual - engine_run(path, amax, feeds)["y"]).max() <= amax["y"] / 127
    exact = run(onnx.load(path), feeds)["y"]
    assert 0 < np.linalg.norm(actual - exact) / np.linalg.norm(exact) < 0.1


def test_a_fused_add_is_nearer_to_the_engine_than_quantization_is_to_float(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    feeds = {"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)}
    amax = observed_amax(prepared(path), feeds)
    actual, exact = run(exported(path, amax), feeds)["y"], run(onnx.load(path), feeds)["y"]
    engine = engine_run(path, amax, feeds)["y"]
    assert np.linalg.norm(actual - engine) < 2 * np.linalg.norm(engine - exact)
    assert np.linalg.norm(actual - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("op", "attributes", "x", "y", "weight", "axis"),
    [
        ("Conv", {"group": 2}, (1, 8, 9, 9), (1, 6, 7, 7), (6, 4, 3, 3), 0),
        ("ConvTranspose", {}, (1, 4, 5, 5), (1, 6, 7, 7), (4, 6, 3, 3), 1),
        ("Gemm", {"transB": 1}, (3, 6), (3, 5), (5, 6), 0),
        ("Gemm", {"alpha": 0.5}, (3, 6), (3, 5), (6, 5), 1),
        ("MatMul", {}, (2, 3, 6), (2, 3, 5), (6, 5), 1),
        ("MatMul", {}, (2, 3, 6), (2, 3, 5), (2, 6, 5), None),
    ],
)
def test_products_compute_with_the_scales_of_the_formulas(
    tmp_path: Path,
    rng: np.random.Generator,
    op: str,
    attributes: dict[str, float],
    x: tuple[int, ...],
    y: tuple[int, ...],
    weight: tuple[int, ...],
    axis: int | None,
) -> None:
    w = (rng.normal(size=weight) * rng.uniform(0.01, 10, size=weight)).astype(np.float32)
    data = rng.normal(size=x).astype(np.float32)
    bias = {} if op == "MatMul" else {"b": rng.normal(size=y[1]).astype(np.float32)}
    nodes = [helper.make_node(op, ["x", "w", *bias], ["y"], name="layer", **attributes)]
    path = save(tmp_path / "m.onnx", nodes, {"x": x}, {"y": y}, {"w": w, **bias})
    others = tuple(i for i in range(w.ndim) if i != axis)
    scale = np.abs(w).max(axis=others, keepdims=True) / 127
    plain = onnx.load(path)
    plain.graph.initializer[0].CopyFrom(numpy_helper.from_array(rounded(w, scale, -127), "w"))
    amax = {"x": 1.5, "y": 1.0}
    expected = ReferenceEvaluator(plain).run(None, {"x": rounded(data, 1.5 / 127)})[0]
    actual = ReferenceEvaluator(exported(path, amax)).run(None, {"x": data})[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    for target in BOTH:
        assert check_qdq(export_qdq(prepared(path), amax, target), target) == ()


@pytest.mark.parametrize("target", BOTH)
def test_the_shipped_detector_keeps_every_rule_and_runs(target: str) -> None:
    model, feeds = detector()
    quantized = export_qdq(model, observed_amax(model, feeds), target)
    assert check_qdq(quantized, target) == ()
    proto = ir.to_proto(quantized)
    onnx.checker.check_model(proto, full_check=True)
    expected = run(ir.to_proto(model), feeds)
    for name, array in run(proto, feeds).items():
        noise = np.linalg.norm(array - expected[name]) / np.linalg.norm(expected[name])
        assert 0 < noise < 0.2


def test_weights_stay_float_and_biases_are_not_quantized(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    model = prepared(path)
    amax = dict.fromkeys(calibrated_tensors(model), 1.0)
    proto = exported(path, amax)
    arrays = constants(proto)
    assert {str(array.dtype) for array in arrays.values()} == {"float32", "int8"}
    assert all(not array.any() for array in arrays.values() if array.dtype == np.int8)
    np.testing.assert_array_equal(arrays["w0"], model.graph.initializers["w0"].const_value.numpy())
    (conv,) = (n for n in proto.graph.node if n.name == "conv0")
    assert conv.input[2] == "b0"
    assert arrays["w0_scale"].shape == (16,)
    assert arrays["x_scale"].shape == ()


def test_one_pair_serves_all_readers(tmp_path: Path, rng: np.random.Generator) -> None:
    w = rng.normal(size=(4, 3, 1, 1)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="one"),
        helper.make_node("Conv", ["x", "w"], ["b"], name="two"),
        helper.make_node("Sigmoid", ["x"], ["c"], name="s"),
    ]
    outputs = {"a": [1, 4, 5, 5], "b": [1, 4, 5, 5], "c": [1, 3, 5, 5]}
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 5, 5]}, outputs, {"w": w})
    proto = exported(path, {"x": 1.0})
    assert len(readers(proto, "QuantizeLinear")) == 2
    one, two = readers(proto, "Conv").values()
    assert one == two
    assert readers(proto, "Sigmoid")["s"] == ["x"]


@pytest.mark.parametrize(
    ("left", "right", "float_operand"),
    [
        ("conv", "input", 0),
        ("input", "conv", 1),
        ("conv", "conv", 1),  # the later product; the earlier is the shortcut
        ("relu", "input", None),
        ("shared", "input", None),
        ("conv", "constant", None),
    ],
)
def test_an_add_quantizes_its_residual_operand_on_the_gpu(
    tmp_path: Path,
    rng: np.random.Generator,
    left: str,
    right: str,
    float_operand: int | None,
) -> None:
    w = rng.normal(size=(3, 3, 1, 1)).astype(np.float32)
    constants = {"w": w}
    nodes: list[onnx.NodeProto] = []
    outputs: dict[str, list[int]] = {"y": [1, 3, 4, 4]}

    def operand(kind: str, name: str) -> str:
        if kind == "input":
            return "x"
        if kind == "constant":
            constants["c"] = np.ones((1, 3, 1, 1), np.float32)
            return "c"
        nodes.append(helper.make_node("Conv", ["x", "w"], [name], name=name))
        if kind == "shared":
            outputs[name] = [1, 3, 4, 4]
        if kind == "relu":
            nodes.append(helper.make_node("Relu", [name], [f"{name}_r"], name=f"{name}_r"))
            return f"{name}_r"
        return name

    operands = [operand(left, "left"), operand(right, "right")]
    nodes.append(helper.make_node("Add", operands, ["y"], name="add"))
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 4, 4]}, outputs, constants)
    amax = dict.fromkeys(calibrated_tensors(prepared(path)), 1.0)
    plain = [
        not name.endswith("dequantized") for name in readers(exported(path, amax), "Add")["add"]
    ]
    expected = [index == float_operand for index in (0, 1)]
    if right == "constant":
        expected[1] = True
    assert plain == expected
    dla = readers(exported(path, amax, "tensorrt-dla"), "Add")["add"]
    assert all(name.endswith("dequantized") for name in dla if name != "c")


def test_the_dla_gets_q_and_dq_on_every_tensor_and_the_gpu_does_not(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Sigmoid", ["c"], ["s"], name="sigmoid"),
        helper.make_node("Mul", ["c", "s"], ["m"], name="mul"),
        helper.make_node("Shape", ["m"], ["n"], name="shape"),
        helper.make_node("Relu", ["m"], ["y"], name="relu"),
    ]
    w = rng.normal(size=(3, 3, 1, 1)).astype(np.float32)
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 4, 4]}, {"y": [1, 3, 4, 4]}, {"w": w})
    amax = dict.fromkeys(("x", "c", "s", "m"), 1.0)
    gpu, dla = (exported(path, amax, target) for target in ("tensorrt-gpu", "tensorrt-dla"))
    assert readers(gpu, "Mul")["mul"] == ["c", "s"]
    assert readers(dla, "Mul")["mul"] == ["c_dequantized", "s_dequantized"]
    assert readers(dla, "Relu")["relu"] == ["m_dequantized"]
    assert [o.name for o in dla.graph.output] == ["y"]
    result = check_qdq(ir.from_proto(gpu), "tensorrt-dla")
    assert all(text.startswith("every-tensor: ") for text in result)
    assert len(result) == 4
    # Nodes on the GPU, and those in floating point, may read floats.
    result = check_qdq(ir.from_proto(gpu), "tensorrt-dla", in_int8=frozenset({"relu"}))
    assert [text.partition(" (")[0] for text in result] == ["every-tensor: node 'relu'"]
    assert check_qdq(ir.from_proto(gpu), "tensorrt-dla", in_int8=frozenset()) == ()


def test_nodes_that_stay_in_float_read_no_int8(tmp_path: Path, rng: np.random.Generator) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    model = prepared(path)
    amax = dict.fromkeys(calibrated_tensors(model), 1.0)
    name = next(
        str(n.name) for n in model.graph if n.inputs[0].name == "r0" and n.op_type == "Conv"
    )
    for target in BOTH:
        export = export_qdq(model, amax, target, keep_float=frozenset({name}))
        (conv,) = (node for node in export.graph if node.name == name)
        assert [str(value.name) for value in conv.inputs][:2] == ["r0", "w1"]
        assert "w1_scale" not in export.graph.initializers


def test_the_same_model_gives_the_same_bytes(tmp_path: Path, rng: np.random.Generator) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    amax = dict.fromkeys(calibrated_tensors(prepared(path)), 1.0)
    one, second = (exported(path, amax).SerializeToString(deterministic=True) for _ in range(2))
    assert one == second


def test_names_of_the_model_are_left_to_it(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = {
        "w": rng.normal(size=(3, 3, 1, 1)).astype(np.float32),
        "w_scale": rng.normal(size=(1, 3, 1, 1)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["x_quantized"], name="QuantizeLinear_x"),
        helper.make_node("Mul", ["x_quantized", "w_scale"], ["y"], name="m"),
    ]
    shape = {"x": [1, 3, 4, 4]}
    path = save(tmp_path / "m.onnx", nodes, shape, {"y": [1, 3, 4, 4]}, weights)
    x = rng.normal(size=(1, 3, 4, 4)).astype(np.float32)
    proto = exported(path, {"x": float(np.abs(x).max())})
    expected = run(onnx.load(path), {"x": x})["y"]
    actual = run(proto, {"x": x})["y"]
    assert np.linalg.norm(actual - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("size", [1e-22, 1e-36, 1e-42, 0.0])
def test_a_channel_that_is_switched_off_runs(
    tmp_path: Path, rng: np.random.Generator, size: float
) -> None:
    w = rng.normal(size=(4, 3, 1, 1)).astype(np.float32)
    w[2] *= size
    bias = np.array([0.1, -0.2, 50.0, 0.0], np.float32)
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["y"], name="conv")]
    weights = {"w": w, "b": bias}
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 4, 4]}, {"y": [1, 4, 4, 4]}, weights)
    x = rng.uniform(-1, 1, (1, 3, 4, 4)).astype(np.float32)
    actual = run(exported(path, {"x": 1.0}), {"x": x})["y"]
    np.testing.assert_allclose(actual[:, 2], 50.0, rtol=1e-5)


def broken(change: Callable[[onnx.ModelProto], None], tmp_path: Path) -> tuple[str, ...]:
    """What the check finds in an exported model after a change."""
    rng = np.random.default_rng(0)
    path = small_convnet(tmp_path / "m.onnx", rng)
    amax = dict.fromkeys(calibrated_tensors(prepared(path)), 1.0)
    proto = exported(path, amax)
    assert check_qdq(ir.from_proto(proto), "tensorrt-gpu") == ()
    change(proto)
    return check_qdq(ir.from_proto(proto), "tensorrt-gpu")


def put(proto: onnx.ModelProto, name: str, array: np.ndarray) -> None:
    tensor = next(t for t in proto.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(array, name))


def node_of(proto: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in proto.graph.node if node.name == name)


def _asymmetric(proto: onnx.ModelProto) -> None:
    put(proto, "x_zero", np.array(3, np.int8))


def _unsigned(proto: onnx.ModelProto) -> None:
    put(proto, "x_zero", np.array(0, np.uint8))


def _implicitly_unsigned(proto: onnx.ModelProto) -> None:
    for name in ("QuantizeLinear_x", "DequantizeLinear_x"):
        del node_of(proto, name).input[2:]


def _activation_per_channel(proto: onnx.ModelProto) -> None:
    put(proto, "x_zero", np.zeros(3, np.int8))
    put(proto, "x_scale", np.full(3, 0.1, np.float32))


def _bias(proto: onnx.ModelProto) -> None:
    for name, array in (("bq", np.ones(16, np.int32)), ("bs", np.ones(16, np.float32))):
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    dequantize = helper.make_node("DequantizeLinear", ["bq", "bs"], ["b"], name="bias", axis=0)
    proto.graph.node.insert(0, dequantize)
    node_of(proto, "conv0").input[2] = "b"


def _wrong_axis(proto: onnx.ModelProto) -> None:
    for op in ("QuantizeLinear", "DequantizeLinear"):
        node_of(proto, f"{op}_w1").attribute[0].i = 1


def _weight_per_tensor(proto: onnx.ModelProto) -> None:
    put(proto, "w0_zero", np.array(0, np.int8))
    put(proto, "w0_scale", np.array(0.1, np.float32))


def _unequal_pair(proto: onnx.ModelProto) -> None:
    proto.graph.initializer.append(numpy_helper.from_array(np.array(9, np.float32), "other"))
    node_of(proto, "DequantizeLinear_x").input[1] = "other"


def _zero_scale(proto: onnx.ModelProto) -> None:
    put(proto, "x_scale", np.array(0, np.float32))


def _computed_scale(proto: onnx.ModelProto) -> None:
    proto.graph.node.insert(0, helper.make_node("Abs", ["x_scale"], ["s"], name="abs"))
    node_of(proto, "QuantizeLinear_x").input[1] = "s"


def _float_weight(proto: onnx.ModelProto) -> None:
    node_of(proto, "conv0").input[1] = "w0"


def _float_data(proto: onnx.ModelProto) -> None:
    node_of(proto, "conv0").input[0] = "x"


def _integers_read(proto: onnx.ModelProto) -> None:
    node = helper.make_node("Reshape", ["x_quantized", "shape"], ["r"], name="reshape")
    shape = np.array([-1], np.int64)
    proto.graph.initializer.append(numpy_helper.from_array(shape, "shape"))
    proto.graph.node.append(node)


def _qlinear(proto: onnx.ModelProto) -> None:
    node_of(proto, "add1").op_type = "QLinearAdd"


def _old_opset(proto: onnx.ModelProto) -> None:
    proto.opset_import[0].version = 12


@pytest.mark.parametrize(
    ("change", "rule", "message"),
    [
        (_asymmetric, "symmetric", "'QuantizeLinear_x' has the zero point 3"),
        (_unsigned, "signed", "'QuantizeLinear_x' has UINT8"),
        (_implicitly_unsigned, "signed", "'QuantizeLinear_x' has UINT8"),
        (_activation_per_channel, "per-tensor", "gives an activation 3 scales"),
        (_bias, "signed", "'bias' has INT32, as of a bias"),
        (_wrong_axis, "weight", "(Conv) has its scales along axis 1"),
        (_weight_per_tensor, "weight", "one scale for its 16 channels"),
        (_unequal_pair, "pair", "their scales differ"),
        (_zero_scale, "scale", "not positive and finite"),
        (_computed_scale, "scale", "computes its scale"),
        (_float_weight, "weight", "'conv0' reads INT8, but its weight has no Q/DQ"),
        (_float_data, "weight", "'conv0' has an INT8 weight, but reads floating point"),
        (_integers_read, "pair", "'reshape' (Reshape) reads INT8"),
        (_qlinear, "integer-operator", "QLinearAdd"),
        (_old_opset, "opset", "opset 12, but TensorRT 8.0 wants 13"),
    ],
)
def test_the_check_finds_what_tensorrt_refuses(
    tmp_path: Path, change: Callable[[onnx.ModelProto], None], rule: str, message: str
) -> None:
    result = broken(change, tmp_path)
    assert any(text.startswith(f"{rule}: ") and message in text for text in result), result
    assert {text.partition(":")[0] for text in result} == {rule}


def test_every_rule_has_a_name_of_its_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)


def _simple(tmp_path: Path, opset: int = 19) -> ir.Model:
    w = np.ones((3, 3, 1, 1), np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="conv")]
    shapes = {"x": [1, 3, 4, 4]}, {"y": [1, 3, 4, 4]}
    path = save(tmp_path / "m.onnx", nodes, *shapes, {"w": w}, opset=opset)
    return ir.from_proto(onnx.load(path))


def test_models_and_tables_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = _simple(tmp_path)
    quantized = export_qdq(model, {"x": 1.0})
    for call, message in (
        (lambda: export_qdq(model, {"x": 1.0}, "tensorrt"), "no Q/DQ target 'tensorrt'"),
        (lambda: check_qdq(model, "gpu"), "no Q/DQ target 'gpu'"),
        (lambda: export_qdq(model, {"y": 1.0}), "Tensor 'x', read by node 'conv'"),
        (lambda: export_qdq(model, {"x": 1e42}), "'x' has the range 1e"),
        (lambda: export_qdq(model, {"x": 0.0}), "'x' has the range 0.0"),
        (lambda: export_qdq(quantized, {"x": 1.0}), "quantized already"),
        (
            lambda: export_qdq(model, {"x": 1.0}, keep_float=frozenset({"convv"})),
            "no node 'convv'",
        ),
        (
            lambda: export_qdq(_simple(tmp_path, 18), {"x": 1.0}, "tensorrt-dla"),
            "opset 18, but Q/DQ for tensorrt-dla .* need 19",
        ),
    ):
        with pytest.raises(BuildError, match=message):
            call()
    export_qdq(_simple(tmp_path, 18), {"x": 1.0}, "tensorrt-gpu")


def test_other_types_are_left_alone(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "x"], ["y"], name="m")]
    shapes = {"x": [3, 3]}, {"y": [3, 3]}
    path = save(tmp_path / "m.onnx", nodes, *shapes, dtype=TensorProto.DOUBLE)
    assert readers(exported(path, {}), "MatMul")["m"] == ["x", "x"]
