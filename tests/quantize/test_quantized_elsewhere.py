"""Networks that other tools quantized build with the numbers of onnxruntime, or say what to change.

The files and their maker are in tests/data/quantized_elsewhere; onnxruntime's own are made here.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from ml_dtypes import float8_e4m3fn, float8_e5m2
from model_fixtures import save, small_convnet
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from qdq_fixtures import by_onnxruntime

from device.runtime.exact_products import exact_session
from device.runtime.session import open_session
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import TandemError
from toolkit.graph.widen import widen
from toolkit.quantize.ranges.table_file import read_ranges

FILES = Path(__file__).parents[1] / "data" / "quantized_elsewhere"


@dataclass(frozen=True)
class Case:
    """`precision` asked for; `becomes` that of the engine, with a note; `error` relative.

    `floats`: the nodes that stay in floating point in an INT8 engine, where that is checked. A case
    that is refused has the words of the refusal as `words`, and becomes None.
    """

    model: str
    precision: str | None
    becomes: str | None
    words: str
    error: float = 1e-5
    floats: frozenset[str] | None = None

    def __str__(self) -> str:
        return f"{self.model}-{self.precision}"


HALF = (
    r"activations have a zero point .* steps up to (2\.0\d|1\.\d\d) times as large \(.* dB lost\)"
)
ALONE = "the model quantizes weights alone: they become floating point"
BLOCKS = "weights of 4 bits in blocks: 2, read as they are by FP16 kernels"
ALL_INT8: frozenset[str] = frozenset()
NOT_QUANTIZED = frozenset({"/Add", "/gemm/Gemm"})  # ModelOpt leaves products of single rows alone
FP8 = "Node '/relu1/Relu_output_0_QuantizeLinear' .* rounds an activation to FLOAT8E4M3FN"
WIDE = "floats of 16 bits are read as float32"
CASES = (
    Case("nncf_performance", None, "fp32", r"zero point 0 in UINT8.*tandem build --precision int8"),
    Case("nncf_performance", "int8", "int8", f"2 {HALF}", 0.02),
    Case("nncf_performance@23", "int8", "int8", f"2 {HALF}", 0.02),
    Case("nncf_mixed", "int8", "int8", HALF, 0.02),
    Case("nncf_int8_asym", None, "fp32", ALONE),
    Case("nncf_int4_sym", None, "fp32", BLOCKS),
    Case("brevitas", None, "fp32", "zero point 0 in UINT8"),
    Case("brevitas", "int8", "int8", f"2 {HALF}", 0.02),
    Case("torchao_pt2e", "int8", "int8", f"4 {HALF}", 0.02),
    Case("onnxruntime_static", "int8", "int8", HALF, 0.02),
    Case("onnxruntime_operators", None, "fp32", r"is QLinearConv.*QuantFormat\.QDQ"),
    Case("onnxruntime_operators", "int8", None, r"Node '.*' is QLinearConv.*QuantFormat\.QDQ"),
    Case("onnxruntime_int4", None, "fp32", BLOCKS),
    Case("onnxruntime_uint4", None, "fp32", BLOCKS),
    Case("aimet", None, "fp32", "zero point 111 in UINT8.*tandem build --precision int8"),
    Case("aimet", "int8", "int8", f"8 {HALF}", 0.02, ALL_INT8),
    Case("aimet_int32_bias", "int8", "int8", f"8 {HALF}", 0.02, ALL_INT8),
    Case("aimet_int16", None, "fp32", "'QcQuantizeOp_x_dq' .* stores UINT16"),
    Case(
        "aimet_int16", "int8", None, "'QcQuantizeOp_x_dq' .*UINT16.*AIMET: activation_type='int8'"
    ),
    Case("aimet_int4", None, "fp32", BLOCKS),
    Case("modelopt_int8", None, "int8", WIDE, 0.02, NOT_QUANTIZED),
    Case("modelopt_int8", "int8", "int8", WIDE, 0.02, NOT_QUANTIZED),
    Case("modelopt_int8", "fp16", "fp16", "the Q/DQ of the model stay", 0.01),
    Case("modelopt_int8_fp32", None, "int8", "INT8 with the 5 ranges", 0.02, NOT_QUANTIZED),
    Case("modelopt_int8_dla", None, "int8", WIDE, 0.02, ALL_INT8),
    Case("modelopt_int4_awq_clip", None, "fp32", BLOCKS),
    Case("modelopt_uint4_awq_lite", None, "fp32", BLOCKS),
    *(
        Case("modelopt_fp8_fp32", precision, None, f"{FP8}.*ModelOpt: quantize_mode='int8'")
        for precision in (None, "fp16", "int8")
    ),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all models of CASES."""
    folder, rng = tmp_path_factory.mktemp("quantized"), np.random.default_rng(0)
    for file in FILES.glob("*.onnx"):
        (folder / file.name).write_bytes(file.read_bytes())
    newest = onnx.version_converter.convert_version(onnx.load(FILES / "nncf_performance.onnx"), 23)
    onnx.save(newest, folder / "nncf_performance@23.onnx")
    path = small_convnet(folder / "m.onnx", rng)
    samples = [rng.normal(size=(1, 3, 32, 32)).astype(np.float32) for _ in range(4)]
    by_onnxruntime(path, samples, symmetric=False)
    path.with_suffix(".qdq.onnx").rename(folder / "onnxruntime_static.onnx")
    quantize_static(
        path.with_suffix(".pre.onnx"),
        folder / "onnxruntime_operators.onnx",
        _Samples(samples),
        quant_format=QuantFormat.QOperator,
        weight_type=QuantType.QInt8,
    )
    weights = {f"w{i}": rng.normal(size=(64, 64)).astype(np.float32) / 8 for i in range(2)}
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h"], "first"),
        helper.make_node("MatMul", ["h", "w1"], ["y"], "second"),
    ]
    plain = onnx.load(
        save(folder / "products.onnx", nodes, {"x": [3, 64]}, {"y": [3, 64]}, weights)
    )
    for name, symmetric in (("int4", True), ("uint4", False)):
        quantizer = MatMulNBitsQuantizer(
            plain, block_size=16, is_symmetric=symmetric, quant_format=QuantFormat.QDQ
        )
        quantizer.process()
        quantizer.model.save_model_to_file(str(folder / f"onnxruntime_{name}.onnx"))
    return folder


class _Samples:
    def __init__(self, samples: list[np.ndarray]) -> None:
        self._rest = iter([{"x": sample} for sample in samples])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._rest, None)


def in_onnxruntime(model: bytes) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A sample, and the output of the graph as it stands: INT4 is not fused with other INT8."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = exact_session(model, options)
    (spec,) = session.get_inputs()
    feeds = {spec.name: np.random.default_rng(1).normal(size=spec.shape).astype(np.float32)}
    return feeds, session.run(None, feeds)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_network_quantized_elsewhere_builds_or_says_what_to_change(
    case: Case, models: Path, tmp_path: Path
) -> None:
    path, out = models / f"{case.model}.onnx", tmp_path / "m.engine"
    options = BuildOptions(precision=case.precision)
    if case.becomes is None:
        with pytest.raises(TandemError, match=case.words):
            build_engine(path, "laptop", out, options)
        return
    result = build_engine(path, "laptop", out, options)
    assert result.manifest.provenance.precision == case.becomes
    assert any(re.search(case.words, note) for note in result.notes), result.notes
    assert case.floats is None or set(result.kept) == case.floats
    feeds, expected = in_onnxruntime(path.read_bytes())
    with open_session(out) as session:
        (actual,) = session.infer(feeds).values()
    assert np.linalg.norm(actual - expected) <= case.error * np.linalg.norm(expected)


def test_fp8_builds_where_the_gpu_has_it(tmp_path: Path) -> None:
    path = FILES / "modelopt_fp8_fp32.onnx"
    options = BuildOptions(kernels=False)
    with pytest.raises(TandemError, match="from SM 89 on compute; that of orin-nx-16gb has SM 87"):
        build_engine(path, "orin-nx-16gb", tmp_path / "e", options)
    result = build_engine(path, "agx-thor", tmp_path / "e", options)
    assert result.manifest.provenance.precision == "fp16"
    assert any("1 tensor stays FP8 (E4M3)" in note for note in result.notes)
    feeds, expected = in_onnxruntime(path.read_bytes())
    with open_session(tmp_path / "e") as session:
        (actual,) = session.infer(feeds).values()
    assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)


def _rounded(path: Path, reader: str, dtype: type) -> Path:
    """A product of what a Reshape and DequantizeLinear, or a Cast, read from a QuantizeLinear."""
    weights = {
        "s": np.float32(0.01),
        "z": np.zeros((), dtype),
        "rows": np.array([8, 8]),
        "w": np.ones((8, 4), np.float32),
    }
    read = {
        "Reshape": [
            helper.make_node("Reshape", ["q", "rows"], ["r"], "reshape"),
            helper.make_node("DequantizeLinear", ["r", "s", "z"], ["d"], "dequantize"),
        ],
        "Cast": [helper.make_node("Cast", ["q"], ["d"], "cast", to=onnx.TensorProto.FLOAT)],
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "quantize"),
        *read[reader],
        helper.make_node("MatMul", ["d", "w"], ["y"], "product"),
    ]
    return save(path, nodes, {"x": [8, 8]}, {"y": [8, 4]}, weights)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_fp8_behind_a_reshape_is_refused_where_the_gpu_has_none(
    precision: str, tmp_path: Path
) -> None:
    path = _rounded(tmp_path / "m.onnx", "Reshape", float8_e4m3fn)
    words = {"fp16": "that of agx-orin-64gb has SM 87", "int8": "of which no INT8 is made"}
    with pytest.raises(TandemError, match=f"'quantize' .* FLOAT8E4M3FN, .*{words[precision]}"):
        build_engine(path, "agx-orin-64gb", tmp_path / "e", BuildOptions(precision=precision))


@pytest.mark.parametrize("dtype", [float8_e4m3fn, float8_e5m2])
def test_fp8_that_a_cast_reads_runs_portable(dtype: type, tmp_path: Path) -> None:
    path = _rounded(tmp_path / "m.onnx", "Cast", dtype)
    options = BuildOptions(precision="fp16")
    result = build_engine(path, "agx-orin-64gb", tmp_path / "e", options)
    assert not any("FP8 (E4M3)" in note for note in result.notes)
    feeds, expected = in_onnxruntime(path.read_bytes())
    with open_session(tmp_path / "e") as session:
        (actual,) = session.infer(feeds).values()
    assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)
    with pytest.raises(TandemError, match=r"'quantize' .* to node 'cast' \(Cast\)"):
        build_engine(path, "agx-orin-64gb", tmp_path / "e", BuildOptions(precision="int8"))


def _few_bits(proto: onnx.ModelProto) -> None:
    """Brevitas writes fewer bits as a Clip of integers."""
    quantize = next(node for node in proto.graph.node if node.op_type == "QuantizeLinear")
    stored = quantize.output[0]
    for name, bound in (("low", -8), ("high", 7)):
        proto.graph.initializer.append(numpy_helper.from_array(np.int8(bound), name))
    for node in proto.graph.node:
        node.input[:] = ["cut" if name == stored else name for name in node.input]
    index = list(proto.graph.node).index(quantize) + 1
    clip = helper.make_node("Clip", [stored, "low", "high"], ["cut"], "four_bits")
    proto.graph.node.insert(index, clip)


def test_activations_of_fewer_bits_are_refused_with_the_tools_option(tmp_path: Path) -> None:
    proto = onnx.load(FILES / "brevitas.onnx")
    _few_bits(proto)
    onnx.save(proto, tmp_path / "m.onnx")
    words = r"'four_bits' clips .* of an activation to \[-8, 7\].*Brevitas: bit_width=8"
    with pytest.raises(TandemError, match=words):
        build_engine(tmp_path / "m.onnx", "laptop", tmp_path / "e", BuildOptions(precision="int8"))


def test_floats_of_16_bits_inside_become_float32_and_those_of_the_interface_stay() -> None:
    half = onnx.load(FILES / "modelopt_int8.onnx")
    proto = onnx.shape_inference.infer_shapes(half)
    wide = ir.from_proto(proto)
    assert widen(wide, ir.DataType.FLOAT16)
    types = {value.dtype for node in wide.graph for value in (*node.inputs, *node.outputs) if value}
    assert not types & {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    assert "Cast" not in {node.op_type for node in wide.graph}
    feeds, expected = in_onnxruntime(half.SerializeToString())
    (actual,) = exact_session(ir.to_proto(wide).SerializeToString(), ort.SessionOptions()).run(
        None, feeds
    )
    assert np.linalg.norm(actual - expected) <= 0.02 * np.linalg.norm(expected)
    narrow = ir.from_proto(proto)
    narrow.graph.inputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
    assert not widen(narrow, ir.DataType.FLOAT16)


def test_encodings_of_aimet_are_refused_with_its_call_for_a_model() -> None:
    with pytest.raises(TandemError, match=r"aimet\.encodings: .* build .* sim\.to_onnx_qdq\(\)"):
        read_ranges(FILES / "aimet.encodings")
