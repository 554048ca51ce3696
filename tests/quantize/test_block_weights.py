"""Weights of 4 bits in blocks become constants with the numbers that onnxruntime computes with."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from ml_dtypes import int4, uint4
from onnx import helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from device.runtime.session import open_session
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import ImportModelError
from toolkit.graph.block_weights import BlockTensor
from toolkit.graph.passes import run_passes
from toolkit.quantize.qdq.blocks import import_blocks


def _model(
    nodes: list[onnx.NodeProto], shape: list[int], constants: dict[str, np.ndarray]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _by_onnxruntime(
    rng: np.random.Generator, block: int, *, symmetric: bool, bits: int = 4
) -> onnx.ModelProto:
    """A product of 72 by 40, quantized by onnxruntime's own tool."""
    weights = {"w": rng.normal(size=(72, 40)).astype(np.float32)}
    plain = _model([helper.make_node("MatMul", ["x", "w"], ["y"], "product")], [2, 3, 72], weights)
    quantizer = MatMulNBitsQuantizer(plain, bits=bits, block_size=block, is_symmetric=symmetric)
    quantizer.process()
    model: onnx.ModelProto = quantizer.model.model
    assert [node.op_type for node in model.graph.node] == ["MatMulNBits"]
    return model


def _run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """The output in onnxruntime, as the graph stands: it fuses INT4 with INT8 of its own."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    y: np.ndarray = ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0]
    return y


def _check(model: onnx.ModelProto, rng: np.random.Generator, weights: int = 1) -> ir.Model:
    """Import the blocks of a model; its output is onnxruntime's, before and after the passes."""
    imported = import_blocks(ir.from_proto(model), keep_qdq=False)
    assert (imported.weights, imported.notes) == (weights, ())
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    x = rng.normal(size=shape).astype(np.float32)
    truth = _run(model, x)
    passed, _ = run_passes(imported.model)
    for graph in (imported.model, passed):
        np.testing.assert_allclose(_run(ir.to_proto(graph), x), truth, rtol=1e-5, atol=1e-5)
    return passed


def _blocks(model: ir.Model) -> list[BlockTensor]:
    constants = (value.const_value for value in model.graph.initializers.values())
    return [tensor for tensor in constants if isinstance(tensor, BlockTensor)]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_a_matmul_n_bits_computes_as_in_onnxruntime(
    block: int, symmetric: bool, rng: np.random.Generator
) -> None:
    (tensor,) = _blocks(_check(_by_onnxruntime(rng, block, symmetric=symmetric), rng))
    assert (tensor.weight.block, tensor.weight.integers.shape) == (block, (72, 40))
    assert tensor.weight.scales.shape == (-(-72 // block), 40)


def test_a_bias_and_the_name_of_an_output_stay(rng: np.random.Generator) -> None:
    model = _by_onnxruntime(rng, 32, symmetric=False)
    model.graph.node[0].input.extend(["", "bias"])
    bias = rng.normal(size=40).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(bias, "bias"))
    passed = _check(model, rng)
    assert [node.op_type for node in passed.graph] == ["MatMul", "Add"]
    assert [value.name for value in passed.graph.outputs] == ["y"]


@pytest.mark.parametrize("dtype", [int4, uint4])
@pytest.mark.parametrize("form", ["MatMul", "Gemm", "Transpose"])
def test_blocks_of_a_dequantize_linear_compute_as_in_onnxruntime(
    form: str, dtype: type[np.generic], rng: np.random.Generator
) -> None:
    stored = {"MatMul": (96, 24)}.get(form, (24, 96))
    axis = stored.index(96)
    blocks = tuple(3 if size == 96 else size for size in stored)
    first = -8 if dtype is int4 else 0
    constants = {
        "q": rng.integers(first, first + 16, stored).astype(dtype),
        "s": rng.uniform(0.1, 1, blocks).astype(np.float32),
        "z": rng.integers(first, first + 16, blocks).astype(dtype),
    }
    dequantize = helper.make_node(
        "DequantizeLinear", ["q", "s", "z"], ["w"], "dequantize", axis=axis, block_size=32
    )
    products = {
        "MatMul": [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        "Gemm": [helper.make_node("Gemm", ["x", "w"], ["y"], "product", transB=1)],
        "Transpose": [
            helper.make_node("Transpose", ["w"], ["t"], "turn", perm=[1, 0]),
            helper.make_node("MatMul", ["x", "t"], ["y"], "product"),
        ],
    }
    passed = _check(_model([dequantize, *products[form]], [5, 96], constants), rng)
    (tensor,) = _blocks(passed)
    assert tensor.transposed == (form == "Gemm")
    assert [node.op_type for node in passed.graph] == ["Gemm" if form == "Gemm" else "MatMul"]


@pytest.mark.parametrize(("perm", "count"), [([0, 1], 0), ([1, 0], 1), (None, 1)], ids=str)
def test_a_transpose_turns_a_square_weight_only_where_it_exchanges_the_axes(
    perm: list[int] | None, count: int, rng: np.random.Generator
) -> None:
    constants = {
        "q": rng.integers(-8, 8, (64, 64)).astype(int4),
        "s": rng.uniform(0.1, 1, (64, 2)).astype(np.float32),
    }
    nodes = [
        helper.make_node(
            "DequantizeLinear", ["q", "s"], ["w"], "dequantize", axis=1, block_size=32
        ),
        helper.make_node("Transpose", ["w"], ["t"], "turn", perm=perm),
        helper.make_node("MatMul", ["x", "t"], ["y"], "product"),
    ]
    _check(_model(nodes, [5, 64], constants), rng, count)


@pytest.mark.parametrize("scale", [np.float16, np.float32])
def test_a_weight_has_the_type_that_its_dequantize_linear_states(
    scale: type[np.generic], rng: np.random.Generator
) -> None:
    stated = onnx.TensorProto.FLOAT if scale is np.float16 else onnx.TensorProto.FLOAT16
    constants = {
        "q": rng.integers(-8, 8, (64, 8)).astype(int4),
        "s": rng.uniform(0.1, 1, (2, 8)).astype(scale),
    }
    nodes = [
        helper.make_node(
            "DequantizeLinear", ["q", "s"], ["w"], axis=0, block_size=32, output_dtype=stated
        ),
        helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
    ]
    model = ir.from_proto(_model(nodes, [4, 64], constants))
    (tensor,) = _blocks(import_blocks(model, keep_qdq=False).model)
    assert tensor.dtype == ir.DataType(stated)
    truth = constants["q"].astype(np.float32) * np.repeat(constants["s"].astype(np.float32), 32, 0)
    np.testing.assert_allclose(tensor.numpy(), truth, 1e-3)


def test_a_pass_that_changes_the_numbers_leaves_a_plain_constant(rng: np.random.Generator) -> None:
    constants = {
        "q": rng.integers(-8, 8, (64, 8)).astype(int4),
        "s": rng.uniform(0.1, 1, (2, 8)).astype(np.float32),
    }
    nodes = [
        helper.make_node(
            "DequantizeLinear", ["q", "s"], ["w"], "dequantize", axis=0, block_size=32
        ),
        helper.make_node("Gemm", ["x", "w"], ["y"], "product", alpha=0.5),
    ]
    assert _blocks(_check(_model(nodes, [4, 64], constants), rng)) == []


def test_another_form_stays_and_is_named(rng: np.random.Generator) -> None:
    model = ir.from_proto(_by_onnxruntime(rng, 32, symmetric=True, bits=8))
    imported = import_blocks(model, keep_qdq=False)
    assert imported.weights == 0
    (note,) = imported.notes
    assert "(MatMulNBits) has weights of 8 bits, not of 4" in note
    assert [node.op_type for node in imported.model.graph] == ["MatMulNBits"]


def test_weights_packed_for_a_kernel_are_refused(rng: np.random.Generator) -> None:
    model = _by_onnxruntime(rng, 32, symmetric=True)
    model.graph.node[0].attribute.append(helper.make_attribute("weight_prepacked", 2))
    words = r"Node 'product_Q4' \(MatMulNBits\) has weight_prepacked=2"
    with pytest.raises(ImportModelError, match=words):
        import_blocks(ir.from_proto(model), keep_qdq=False)


def test_operands_that_do_not_fit_are_refused(rng: np.random.Generator) -> None:
    model = _by_onnxruntime(rng, 32, symmetric=True)
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "K":
            attribute.i = 200
    words = r"Node 'product_Q4' \(MatMulNBits\) has weights of 1920 elements.*take 4480"
    with pytest.raises(ImportModelError, match=words):
        import_blocks(ir.from_proto(model), keep_qdq=False)


def test_a_build_takes_the_weights_and_says_so(tmp_path: Path, rng: np.random.Generator) -> None:
    model = _by_onnxruntime(rng, 32, symmetric=False)
    onnx.save(model, tmp_path / "m.onnx")
    result = build_engine(tmp_path / "m.onnx", "laptop", tmp_path / "e", BuildOptions())
    assert any(note.startswith("weights of 4 bits in blocks: 1, ") for note in result.notes)
    x = rng.normal(size=(2, 3, 72)).astype(np.float32)
    with open_session(tmp_path / "e") as session:
        np.testing.assert_allclose(session.infer({"x": x})["y"], _run(model, x), 1e-5, 1e-5)
