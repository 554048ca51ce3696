"""The rules of TensorRT for Q/DQ, and its caches, judged by readers that share no code with us."""

import re
import struct
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fixtures import save
from onnx import TensorProto, helper, numpy_helper

import configs
from calibration.trt_cache import decode_cache
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.qdq.export import TARGETS, export_qdq
from toolkit.quantize.quantize import calibrated_tensors

MIN_OPSET = {"tensorrt-gpu": 13, "tensorrt-dla": 19}
PRODUCTS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}


class Reader:
    """A Q/DQ model as the onnx package gives it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        self.makers = {out: node for node in model.graph.node for out in node.output}

    def of(self, op: str) -> list[onnx.NodeProto]:
        return [node for node in self.model.graph.node if node.op_type == op]

    def parameters(self, node: onnx.NodeProto) -> tuple[np.ndarray, np.ndarray]:
        return self.arrays[node.input[1]], self.arrays[node.input[2]]

    def weight(self, product: onnx.NodeProto) -> tuple[onnx.NodeProto, np.ndarray] | None:
        """The Q of a product's constant weight, and that weight."""
        dequantize = self.makers.get(product.input[1])
        if dequantize is None or dequantize.op_type != "DequantizeLinear":
            return None
        quantize = self.makers[dequantize.input[0]]
        array = self.arrays.get(quantize.input[0])
        return None if array is None else (quantize, array)


def attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((a.i for a in node.attribute if a.name == name), default)


def channel_axis(product: onnx.NodeProto, rank: int) -> int | None:
    """Where the output channels of a weight are, by the definition of the operator in ONNX."""
    if product.op_type == "Gemm":
        return 0 if attribute(product, "transB", 0) else 1
    if product.op_type == "MatMul":
        return rank - 1 if rank == 2 else None
    return {"Conv": 0, "ConvTranspose": 1}[product.op_type]


def every_product(path: Path, rng: np.random.Generator) -> Path:
    """x [2, 6, 8, 8] through each operator that has a weight, with biases where they can be."""

    def normal(*shape: int) -> np.ndarray:
        spread = rng.uniform(0.01, 10, size=shape)
        return (rng.normal(size=shape) * spread).astype(np.float32)

    arrays = {
        "wc": normal(4, 3, 3, 3), "bc": normal(4), "wt": normal(4, 5, 2, 2), "bt": normal(5),
        "wg": normal(7, 5), "bg": normal(7), "wh": normal(7, 3), "bh": normal(3),
        "wm": normal(3, 9), "wb": normal(2, 9, 2),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "wc", "bc"], ["c"], "conv", group=2, pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("ConvTranspose", ["r", "wt", "bt"], ["t"], "up", strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["t"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "wg", "bg"], ["g"], "gemm_transposed", transB=1),
        helper.make_node("Gemm", ["g", "wh", "bh"], ["h"], "gemm"),
        helper.make_node("MatMul", ["h", "wm"], ["m"], "matmul"),
        helper.make_node("Add", ["m", "m"], ["a"], "add"),
        helper.make_node("MatMul", ["a", "wb"], ["y"], "matmul_batch"),
    ]
    return save(path, nodes, {"x": [2, 6, 8, 8]}, {"y": [2, 2, 2]}, arrays)


@pytest.fixture(params=["every-product", "detector"])
def model(request: pytest.FixtureRequest, tmp_path: Path, rng: np.random.Generator) -> ir.Model:
    detector = configs.ROOT / "models" / "robot-objects.onnx"
    every = request.param == "every-product"
    path = every_product(tmp_path / "m.onnx", rng) if every else detector
    return run_passes(import_model(path).model)[0]


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_an_export_keeps_the_rules(model: ir.Model, rng: np.random.Generator, target: str) -> None:
    amax = {name: float(rng.uniform(0.1, 20)) for name in calibrated_tensors(model)}
    proto = ir.to_proto(export_qdq(model, amax, target))
    result = Reader(proto)
    (opset,) = (o.version for o in proto.opset_import if o.domain in {"", "ai.onnx"})
    assert opset >= MIN_OPSET[target]
    for node in result.of("QuantizeLinear") + result.of("DequantizeLinear"):
        scale, zero = result.parameters(node)
        assert zero.dtype == np.int8
        assert not zero.any()
        assert scale.dtype == np.float32
        assert scale.shape == zero.shape
        assert ((scale > 0) & np.isfinite(scale)).all()
        activation = node.op_type == "QuantizeLinear" and node.input[0] not in result.arrays
        assert not (activation and scale.ndim)
    for node in result.of("QuantizeLinear"):
        if node.input[0] not in result.arrays:
            (scale,) = result.parameters(node)[0].reshape(1)
            amax_of = amax.get(node.input[0])
            assert amax_of is None or scale == np.float32(amax_of / 127)
    for node in result.of("DequantizeLinear"):  # each follows a Q with the same grid: no INT32
        maker = result.makers[node.input[0]]
        assert maker.op_type == "QuantizeLinear"
        assert list(maker.input[1:]) == list(node.input[1:])
        assert attribute(maker, "axis", 1) == attribute(node, "axis", 1)
    assert not any(t.data_type == TensorProto.INT32 for t in proto.graph.initializer)
    products = [node for node in proto.graph.node if node.op_type in PRODUCTS]
    assert products
    for node in products:
        assert result.makers[node.input[0]].op_type == "DequantizeLinear"
        if len(node.input) > 2:
            assert result.arrays[node.input[2]].dtype == np.float32  # the bias
        quantized = result.weight(node)
        assert quantized is not None
        quantize, weight = quantized
        axis = channel_axis(node, weight.ndim)
        scale = result.parameters(quantize)[0]
        others = tuple(i for i in range(weight.ndim) if i != axis)
        assert scale.shape == (() if axis is None else (weight.shape[axis],))
        assert axis is None or attribute(quantize, "axis", 1) == axis
        np.testing.assert_allclose(scale, np.abs(weight).max(axis=others) / 127, rtol=1e-6)
    onnx.checker.check_model(proto, full_check=True)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {i.name: rng.normal(size=i.shape).astype(np.float32) for i in session.get_inputs()}
    assert all(np.isfinite(array).all() for array in session.run(None, feeds))


NAMES = st.text(st.sampled_from("ab:/ _.()*0"), min_size=1, max_size=9).filter(lambda n: n.strip())
BITS = st.integers(1, 0x7F7FFFFF)  # every positive float32, denormal ones too


@settings(max_examples=200)
@given(
    st.dictionaries(NAMES, BITS, max_size=6),
    st.sampled_from(["%08x", "%x", "%X", "%08X"]),
    st.sampled_from(["\n", "\r\n"]),
)
def test_caches_of_any_writer_are_read(rows: dict[str, int], digits: str, end: str) -> None:
    """Lost leading zeros, capitals, line ends of Windows, colons in names, denormal scales."""
    lines = ["TRT-8502-EntropyCalibration2"]
    lines += [f"{name}: {digits % bits}" for name, bits in rows.items()]
    text = end.join(lines) + end
    result = decode_cache(text, "x").scales
    again = {}
    for line in re.split(r"\r?\n", text)[1:-1]:
        match = re.fullmatch(r"(.*): ([0-9a-fA-F]{1,8})", line, re.DOTALL)
        assert match is not None
        again[match[1]] = struct.unpack("<f", struct.pack("<I", int(match[2], 16)))[0]
    assert dict(result) == again
    assert len(result) == len(rows)
