"""Q/DQ models become plain models with ranges: exact round trips, models of others, refusals."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fixtures import prepared, small_convnet
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType
from qdq_fixtures import by_onnxruntime, steps_apart

from device.runtime.exact_products import exact_session
from toolkit.errors import ImportModelError
from toolkit.graph.passes import run_passes
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.qdq.export import TARGETS, export_qdq
from toolkit.quantize.qdq.importer import PlainModel, import_qdq
from toolkit.quantize.quantize import calibrated_tensors, quantize, with_operands


def run(model: ir.Model | onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    options = ort.SessionOptions()
    options.log_severity_level = 3
    data = proto.SerializeToString()
    session = exact_session(data, options)
    result: np.ndarray = session.run(None, {"x": x})[0]
    return result


def noise(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def weights(model: ir.Model) -> list[np.ndarray]:
    """The float constants in the order in which nodes read them."""
    results = []
    for node in model.graph:
        for value in node.inputs:
            if value is not None and value.const_value is not None:
                results.append(value.const_value.numpy())
    return results


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_an_export_comes_back_as_it_was(
    tmp_path: Path, rng: np.random.Generator, target: str
) -> None:
    model = prepared(small_convnet(tmp_path / "m.onnx", rng))
    amax = {name: float(rng.uniform(0.01, 100)) for name in calibrated_tensors(model)}
    amax = with_operands(model, amax)
    imported = import_qdq(export_qdq(model, amax, target))
    assert imported.notes == ()
    assert imported.float_nodes == ()
    stated = {name: limit for name, limit in imported.amax.items() if name not in imported.inferred}
    assert stated
    for name, limit in stated.items():
        assert limit == 127 * float(np.float32(amax[name] / 127))
    if target == "tensorrt-dla":
        assert set(stated) == set(amax) - {"y"}
    assert [str(node.name) for node in imported.model.graph] == [str(n.name) for n in model.graph]
    for mine, original in zip(weights(imported.model), weights(model), strict=True):
        np.testing.assert_array_equal(mine, original)
    again = export_qdq(imported.model, imported.amax, target)
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    np.testing.assert_array_equal(run(again, x), run(export_qdq(model, amax, target), x))


@settings(max_examples=60)
@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_any_range_that_a_scale_can_say_comes_back_exactly(scale: float) -> None:
    imported = import_qdq(ir.from_proto(pair_model(scale)))
    assert imported.amax["x"] == 127 * scale
    assert float(np.float32(imported.amax["x"] / 127)) == scale


def pair_model(scale: float, zero: np.ndarray | None = None) -> onnx.ModelProto:
    """A rectifier behind a Q/DQ pair."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantize"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="dequantize"),
        helper.make_node("Relu", ["d"], ["y"], name="relu"),
    ]
    constants = {"s": np.array(scale, np.float32), "z": np.int8(0) if zero is None else zero}
    return small(nodes, constants, {"x": [2, 3]}, {"y": [2, 3]})


def small(
    nodes: list[onnx.NodeProto],
    constants: dict[str, np.ndarray],
    inputs: dict[str, list[int]],
    outputs: dict[str, list[int]],
) -> onnx.ModelProto:
    def infos(shapes: dict[str, list[int]]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]

    arrays = [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "test", infos(inputs), infos(outputs), arrays)
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def segment_model() -> ir.Model:
    """A rectifier between INT8 borders, whose result leaves in floating point too."""
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s", "z"], ["d"], name="restore"),
        helper.make_node("Relu", ["d"], ["y"], name="relu"),
        helper.make_node("QuantizeLinear", ["y", "s", "z"], ["y_int8"], name="store"),
    ]
    constants = {"s": np.array(0.5, np.float32), "z": np.int8(0)}
    proto = small(nodes, constants, {"x": [2, 3]}, {"y": [2, 3], "y_int8": [2, 3]})
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.INT8
    proto.graph.output[1].type.tensor_type.elem_type = TensorProto.INT8
    return ir.from_proto(proto)


def test_int8_borders_become_floats_under_their_names() -> None:
    imported = import_qdq(segment_model(), int8_borders=True)
    graph = imported.model.graph
    borders = {str(value.name): value.dtype for value in (*graph.inputs, *graph.outputs)}
    assert borders == dict.fromkeys(("x", "y", "y_int8"), ir.DataType.FLOAT)
    assert [node.op_type for node in graph] == ["Relu", "Identity"]
    assert {imported.amax[name] for name in ("x", "y")} == {127 * 0.5}


def test_int8_borders_of_a_model_are_refused() -> None:
    model = segment_model()
    with pytest.raises(ImportModelError, match="gives integers to the model's output"):
        import_qdq(model)
    model.graph.outputs.pop(1)
    with pytest.raises(ImportModelError, match="'x', made by an input of the model"):
        import_qdq(model)


def test_an_int8_border_without_a_scale_is_refused() -> None:
    model = segment_model()
    model.graph.outputs[0].dtype = ir.DataType.INT8
    model.graph.outputs.pop(1)
    with pytest.raises(ImportModelError, match="scale of the INT8 tensor 'y'"):
        import_qdq(model, int8_borders=True)


@pytest.mark.parametrize("activations", [QuantType.QInt8, QuantType.QUInt8])
def test_a_model_of_onnxruntimes_quantizer_is_taken(
    tmp_path: Path, rng: np.random.Generator, activations: QuantType
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    samples = [rng.normal(size=(1, 3, 32, 32)).astype(np.float32) for _ in range(4)]
    proto, model = by_onnxruntime(path, samples, activations)
    assert any(node.op_type == "DequantizeLinear" for node in proto.graph.node)
    zeros = {
        int(numpy_helper.to_array(t))
        for t in proto.graph.initializer
        if t.data_type == 2 and not t.dims
    }
    if zeros - {128}:  # onnxruntime up to 1.23 puts the middle of UINT8 at 127
        with pytest.raises(ImportModelError, match="zero point 127"):
            import_qdq(model)
        return
    imported = import_qdq(model)
    assert imported.float_nodes == ()
    assert imported.unranged == ()
    assert not any(node.op_type.endswith("Linear") for node in imported.model.graph)
    for x in samples[:2]:
        exact, theirs = run(onnx.load(path), x), run(proto, x)
        assert noise(run(imported.model, x), exact) < 0.03  # the weights were rounded, no more
        assert noise(run(imported.model, x), theirs) < 0.05
        plain = prepared_again(imported)
        ours = export_qdq(plain, imported.amax, "tensorrt-dla")
        common = {n: a for n, a in imported.amax.items() if n in names(model) & names(ours)}
        assert {"x", "r0", "r1", "y"} <= common.keys()
        for steps in steps_apart(model, ours, common, {"x": x}).values():
            assert steps.max() < 1.001


def names(model: ir.Model) -> set[str]:
    inputs = {str(value.name) for value in model.graph.inputs}
    return inputs | {str(value.name) for node in model.graph for value in node.outputs}


def prepared_again(actual: PlainModel) -> ir.Model:
    return run_passes(actual.model)[0]


def test_integer_weights_and_scales_of_others_are_kept_to_the_bit(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    proto, model = by_onnxruntime(path, [rng.normal(size=(1, 3, 32, 32)).astype(np.float32)])
    imported = import_qdq(model)
    arrays = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    (conv,) = (n for n in imported.model.graph if n.op_type == "Conv" and n.inputs[0].name == "x")
    q, s = arrays["w0_quantized"], arrays["w0_scale"]
    assert conv.inputs[1].const_value is not None
    restored = conv.inputs[1].const_value.numpy()
    np.testing.assert_array_equal(restored, q.astype(np.float32) * s.reshape(-1, 1, 1, 1))
    assert imported.amax["x"] == 127 * float(arrays["x_scale"])
    assert imported.amax["y"] == 127 * float(arrays["y_scale"])


def test_the_engines_own_graph_is_taken(tmp_path: Path, rng: np.random.Generator) -> None:
    model = prepared(small_convnet(tmp_path / "m.onnx", rng))
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    tensors = calibrated_tensors(model)
    seen = ActivationRunner(model, tensors)({"x": x})
    amax = {name: float(np.abs(array).max()) for name, array in seen.items()}
    segments = {str(node.name): "cpu.0" for node in model.graph}
    engine = quantize(model, amax, segments, frozenset()).model  # UINT8 with zero point 128
    imported = import_qdq(engine)
    assert {"x", "r0", "r1"} <= set(imported.amax)
    assert imported.amax["r0"] == 127 * float(np.float32(amax["r0"] / 127))
    assert noise(run(imported.model, x), run(model, x)) < 0.02


def test_asymmetric_models_of_onnxruntime_are_refused(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    samples = [rng.uniform(0, 1, (1, 3, 32, 32)).astype(np.float32)]
    _, model = by_onnxruntime(path, samples, symmetric=False)
    with pytest.raises(ImportModelError, match=r"zero point -?\d+ in INT8, but the symmetric"):
        import_qdq(model)


def test_an_output_keeps_its_name_and_range(rng: np.random.Generator) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["inner"], name="relu"),
        helper.make_node("QuantizeLinear", ["inner", "s", "z"], ["q"], name="quantize"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="dequantize"),
    ]
    constants = {"s": np.float32(0.5), "z": np.int8(0)}
    imported = import_qdq(ir.from_proto(small(nodes, constants, {"x": [4]}, {"y": [4]})))
    assert [value.name for value in imported.model.graph.outputs] == ["y"]
    assert imported.amax["y"] == 63.5
    x = rng.normal(size=4).astype(np.float32)
    np.testing.assert_array_equal(run(imported.model, x), np.maximum(x, 0))


def test_an_input_that_is_an_output_gets_an_identity(rng: np.random.Generator) -> None:
    proto = pair_model(0.5)
    del proto.graph.node[2]
    proto.graph.output[0].name = "d"
    imported = import_qdq(ir.from_proto(proto))
    assert [value.name for value in imported.model.graph.outputs] == ["d"]
    assert imported.amax["x"] == 63.5
    x = rng.normal(size=(2, 3)).astype(np.float32)
    np.testing.assert_array_equal(run(imported.model, x), x)


def quantized_by(value: str, scale: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("QuantizeLinear", [value, scale], [f"{value}{scale}q"], output_dtype=3),
        helper.make_node("DequantizeLinear", [f"{value}{scale}q", scale], [f"{value}{scale}"]),
    ]


def test_missing_ranges_are_carried_forward_then_backward() -> None:
    nodes = [
        *quantized_by("x", "s"),
        helper.make_node("MaxPool", ["xs"], ["m"], name="pool", kernel_shape=[2, 2]),
        helper.make_node("Flatten", ["m"], ["f"], name="flatten"),
        *quantized_by("v", "t"),
        helper.make_node("Concat", ["f", "vt"], ["c"], name="concat", axis=1),
        helper.make_node("Sigmoid", ["c"], ["g"], name="sigmoid"),
        helper.make_node("Exp", ["g"], ["e"], name="exp"),
        helper.make_node("Relu", ["e"], ["r"], name="relu"),
        helper.make_node("Concat", ["r", "r"], ["k"], name="last", axis=1),
        *quantized_by("k", "t"),
        helper.make_node("Relu", ["kt"], ["y"], name="end"),
    ]
    constants = {"s": np.float32(0.5), "t": np.float32(2.0)}
    inputs = {"x": [1, 1, 3, 3], "v": [1, 2]}
    proto = small(nodes, constants, inputs, {"y": [1, 12]})
    proto.opset_import[0].version = 21
    for index, node in enumerate(proto.graph.node):
        node.name = node.name or f"node{index}"
    imported = import_qdq(ir.from_proto(proto))
    assert dict(imported.amax) == {
        "x": 63.5,
        "m": 63.5,
        "f": 63.5,
        "v": 254.0,
        "c": 254.0,  # the larger operand's
        "k": 254.0,
        "y": 254.0,
        "r": 254.0,  # backward
        "e": 254.0,
    }
    assert set(imported.inferred) == {"m", "f", "c", "y", "r", "e"}
    assert imported.float_nodes == ("exp", "relu", "last")


def test_nodes_without_q_and_dq_are_listed(tmp_path: Path, rng: np.random.Generator) -> None:
    model = prepared(small_convnet(tmp_path / "m.onnx", rng))
    amax = dict.fromkeys(calibrated_tensors(model), 1.0)
    weight = next(
        str(n.name) for n in model.graph if n.op_type == "Conv" and n.inputs[0].name == "r0"
    )
    imported = import_qdq(export_qdq(model, amax, keep_float=frozenset({weight})))
    assert weight in imported.float_nodes
    assert not {"conv0", "relu0", "pool", "fc"} & set(imported.float_nodes)


def test_two_ranges_of_one_tensor_give_the_larger_and_a_note() -> None:
    nodes = [*quantized_by("x", "s"), *quantized_by("x", "t")]
    nodes.append(helper.make_node("Add", ["xs", "xt"], ["y"], name="add"))
    constants = {"s": np.float32(0.5), "t": np.float32(2.0)}
    proto = small(nodes, constants, {"x": [4]}, {"y": [4]})
    proto.opset_import[0].version = 21
    imported = import_qdq(ir.from_proto(proto))
    assert imported.amax["x"] == 254.0
    (note,) = imported.notes
    assert "tensor 'x' has the ranges 63.5 and 254.0" in note


@pytest.mark.parametrize("stored", ["int8", "float"])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_checked_along_their_output_channels(
    rng: np.random.Generator, stored: str, transposed: bool
) -> None:
    w = rng.normal(size=(6, 5)).astype(np.float32)  # [in, out]
    w = w.T.copy() if transposed else w
    axis = 0 if transposed else 1
    scale = np.abs(w).max(axis=1 - axis) / np.float32(127)
    column = np.expand_dims(scale, 1 - axis)
    proto = product_model(w, scale, axis, stored=stored, transposed=transposed)
    imported = import_qdq(ir.from_proto(proto))
    constant = weights(imported.model)[0]
    expected = w if stored == "float" else np.rint(w / column).astype(np.int8) * column
    np.testing.assert_array_equal(constant, expected.astype(np.float32))
    x = rng.uniform(-1, 1, (3, 6)).astype(np.float32)
    product = x @ (constant.T if transposed else constant)
    np.testing.assert_allclose(run(imported.model, x), product, rtol=1e-5, atol=1e-5)
    clipped = scale.copy()
    clipped[2] *= 0.9
    model = ir.from_proto(product_model(w, clipped, axis, stored=stored, transposed=transposed))
    if stored == "float":
        with pytest.raises(ImportModelError, match=r"node 'm' has the scale .* in channel 2"):
            import_qdq(model)
        imported = import_qdq(model, any_weight_scale=True)
        (note,) = imported.notes
        assert "(1 of 5 channels differ)" in note
        column = np.expand_dims(clipped, 1 - axis)
        on_grid = np.clip(np.rint(w / column), -128, 127).astype(np.float32) * column
        np.testing.assert_array_equal(weights(imported.model)[0], on_grid)


def product_model(
    w: np.ndarray, scale: np.ndarray, axis: int, *, stored: str = "int8", transposed: bool = False
) -> onnx.ModelProto:
    """x @ w, or x @ w.T, with Q/DQ on both."""
    constants: dict[str, np.ndarray] = {"xs": np.float32(1 / 127), "xz": np.int8(0)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"], name="xQ"),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"], name="xD"),
    ]
    constants |= {"s": scale, "z": np.zeros(scale.shape, np.int8)}
    if stored == "float":
        constants["w"] = w
        nodes.append(
            helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q"], name="wQ", axis=axis)
        )
    else:
        column = scale if scale.ndim == 0 else np.expand_dims(scale, 1 - axis)
        constants["q"] = np.clip(np.rint(w / column), -127, 127).astype(np.int8)
    nodes.append(
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["wd"], name="wD", axis=axis)
    )
    if transposed:
        nodes.append(helper.make_node("Transpose", ["wd"], ["wt"], name="t", perm=[1, 0]))
    nodes.append(helper.make_node("MatMul", ["xd", "wt" if transposed else "wd"], ["y"], name="m"))
    return small(nodes, constants, {"x": [3, 6]}, {"y": [3, 5]})


def _put(proto: onnx.ModelProto, name: str, array: object) -> None:
    tensor = next(t for t in proto.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(array), name))


def _node(proto: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in proto.graph.node if node.name == name)


def _wrong_axis(proto: onnx.ModelProto) -> None:
    _put(proto, "s", np.full(6, 0.1, np.float32))
    _put(proto, "z", np.zeros(6, np.int8))
    _node(proto, "wD").attribute[0].i = 0


def _unequal(proto: onnx.ModelProto) -> None:
    proto.graph.initializer.append(numpy_helper.from_array(np.float32(0.25).reshape(()), "o"))
    _node(proto, "xD").input[1] = "o"


def _activation_per_channel(proto: onnx.ModelProto) -> None:
    _put(proto, "xs", np.full(6, 0.1, np.float32))
    _put(proto, "xz", np.zeros(6, np.int8))


def _integers_pooled(proto: onnx.ModelProto) -> None:
    _node(proto, "xD").input[0] = "p"
    proto.graph.node.insert(1, helper.make_node("Identity", ["xq"], ["p"], name="pool"))


def _integer_operator(proto: onnx.ModelProto) -> None:
    _node(proto, "m").op_type = "MatMulInteger"


def _computed(proto: onnx.ModelProto) -> None:
    proto.graph.node.insert(0, helper.make_node("ReduceMax", ["x"], ["r"], name="r", keepdims=0))
    _node(proto, "xQ").input[1] = "r"


def _plain(proto: onnx.ModelProto) -> None:
    del proto.graph.node[:3]
    _node(proto, "m").input[:] = ["x", "q"]


def _no_fit(proto: onnx.ModelProto) -> None:
    _put(proto, "s", np.full(4, 0.1, np.float32))
    _put(proto, "z", np.zeros(4, np.int8))


def _from_outside(proto: onnx.ModelProto) -> None:
    proto.graph.input.append(helper.make_tensor_value_info("i", TensorProto.INT8, [3, 6]))
    _node(proto, "xD").input[0] = "i"


def _blocked(proto: onnx.ModelProto) -> None:
    proto.opset_import[0].version = 21
    _node(proto, "wD").attribute.append(helper.make_attribute("block_size", 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: _put(p, "xz", np.int8(3)), r"'xD' .* zero point 3 in INT8"),
        (lambda p: _put(p, "xz", np.uint8(0)), r"'xD' .* zero point 0 in UINT8"),
        (lambda p: _put(p, "xz", np.uint8(127)), r"'xD' .* zero point 127 in UINT8"),
        (lambda p: _put(p, "xz", np.int16(0)), "'xD' .* stores INT16"),
        (lambda p: _put(p, "xs", np.float32(0)), "'xD' .* has the scale 0.0"),
        (lambda p: _put(p, "xs", np.float32(np.nan)), "'xD' .* has the scale nan"),
        (lambda p: _put(p, "q", np.full((6, 5), 100, np.int8)), "'m' has the scale .* channel 0"),
        (_wrong_axis, r"'wD' scales the weight of 'm' \(MatMul\) along axis 0"),
        (_unequal, "'xQ' and 'xD' are a pair, but their scales are"),
        (_activation_per_channel, "'xQ' gives the activation 'x' 6 scales"),
        (_integers_pooled, r"'xQ' .* gives integers to node 'pool' \(Identity\)"),
        (_integer_operator, "'m' is MatMulInteger"),
        (_computed, "'xQ' .* computes its scale"),
        (_plain, "is plain already"),
        (_no_fit, r"'wD' has scales of shape \[4\] along axis 1"),
        (_from_outside, "'xD' .* reads 'i', made by an input of the model"),
        (_blocked, r"'wD' has scales of shape \[5\] along axis 1"),
    ],
)
def test_what_has_no_plain_equivalent_is_refused(
    rng: np.random.Generator, change: Callable[[onnx.ModelProto], None], message: str
) -> None:
    w = rng.normal(size=(6, 5)).astype(np.float32)
    proto = product_model(w, np.abs(w).max(axis=0) / np.float32(127), 1)
    import_qdq(ir.from_proto(proto))
    change(proto)
    with pytest.raises(ImportModelError, match=message) as caught:
        import_qdq(ir.from_proto(proto))
    assert "\n" not in str(caught.value)


def test_one_scale_for_a_whole_weight_is_taken_only_when_asked_for(
    rng: np.random.Generator,
) -> None:
    w = (rng.normal(size=(6, 5)) * np.geomspace(0.1, 10, 5)).astype(np.float32)
    scale = np.asarray(np.abs(w).max() / np.float32(127))
    model = ir.from_proto(product_model(w, scale, 1))
    with pytest.raises(ImportModelError, match=r"\(\d of 5 channels differ\)"):
        import_qdq(model)
    imported = import_qdq(model, any_weight_scale=True)
    assert len(imported.notes) == 1
    np.testing.assert_allclose(weights(imported.model)[0], w, atol=float(scale) * 0.51)


def test_q_and_dq_in_inner_graphs_are_refused() -> None:
    inner = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "s"], ["iq"], name="inner"),
            helper.make_node("DequantizeLinear", ["iq", "s"], ["io"], name="outer"),
        ],
        "then",
        [],
        [helper.make_tensor_value_info("io", TensorProto.FLOAT, [4])],
    )
    nodes = [helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner, name="if")]
    constants = {"c": np.array(True), "s": np.float32(1)}
    proto = small(nodes, constants, {"x": [4]}, {"y": [4]})
    with pytest.raises(ImportModelError, match=r"'inner' .* inside another node"):
        import_qdq(ir.from_proto(proto))


def test_the_model_given_is_not_changed(rng: np.random.Generator) -> None:
    w = rng.normal(size=(6, 5)).astype(np.float32)
    model = ir.from_proto(product_model(w, np.abs(w).max(axis=0) / np.float32(127), 1))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    import_qdq(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
