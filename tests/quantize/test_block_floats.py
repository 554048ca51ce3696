"""MXFP8 and NVFP4: their numbers, the models that TensorRT reads, and weights that are read."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from calibration.table import CalibrationTable, write_table
from device.runtime.session import open_session
from toolkit.cli.main import tandem
from toolkit.engine.build import build_engine
from toolkit.engine.options import BuildOptions
from toolkit.errors import BuildError, ImportModelError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.importers.source import model_sha256
from toolkit.quantize.block_floats.formats import (
    FORMATS,
    MXFP8,
    NVFP4,
    BlockFormat,
    round_weight,
)
from toolkit.quantize.block_floats.graph import exported, simulated
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.qdq.export import BLOCK_FORMS

Array = NDArray[Any]
RANGES = {"x": 700.0, "r": 90.0}
E4M3 = np.arange(0, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(x: Array, values: Array) -> Array:
    """The nearest of sorted values, of two as near the one with an even code; beyond: the last."""
    size = np.abs(x).astype(np.float64)[..., None]
    distance = np.abs(size - values)
    least = distance == distance.min(-1, keepdims=True)
    odd = np.arange(len(values)) % 2
    chosen = np.argmin(np.where(least, odd, 2), -1)
    return np.copysign(values[chosen], x)


def truth(x: Array, form: BlockFormat, amax: float) -> Array:
    """The numbers that stand for x, in blocks along its last axis, by the specifications."""
    cut = x.reshape(-1, form.block).astype(np.float64)
    largest = np.abs(cut).max(1, keepdims=True)
    if form == MXFP8:
        exponents = np.arange(-126, 128)
        fits = largest <= 448.0 * 2.0**exponents
        scales = 2.0 ** exponents[np.argmax(fits, 1)][:, None]
        return (nearest(cut / scales, E4M3) * scales).reshape(x.shape)
    whole = np.float32(amax / (6 * 448))
    blocks = nearest((largest / 6 / whole).astype(np.float32), E4M3)
    scales = (np.maximum(blocks, E4M3[1]) * whole).astype(np.float32)
    return (nearest((cut / scales).astype(np.float32), E2M1) * scales).reshape(x.shape)


def spread(rng: np.random.Generator, *shape: int) -> Array:
    """Numbers of many magnitudes, some beyond any scale's reach, and a row of zeros."""
    x = rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape))
    x[0] = 0.0
    x[1] = 448.0 * 2.0 ** rng.integers(-3, 3)  # the largest that a power of two holds
    x[2] *= 1e-12
    return np.clip(x, -RANGES["x"], RANGES["x"]).astype(np.float32)


@pytest.fixture
def case(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Two products, one of a transposed weight."""
    weights = {"w": spread(rng, 64, 32) / 64, "v": spread(rng, 24, 32)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "MatMul:h"),
        helper.make_node("Relu", ["h"], ["r"], "Relu:r"),
        helper.make_node("Gemm", ["r", "v"], ["y"], "Gemm:y", transB=1),
    ]
    return saved(tmp_path / "m.onnx", nodes, weights, {"x": (6, 64)}, {"y": (6, 24)}, 19)


def saved(
    path: Path,
    nodes: list[onnx.NodeProto],
    weights: dict[str, Array],
    inputs: dict[str, tuple[int, ...]],
    outputs: dict[str, tuple[int, ...]],
    opset: int,
    *domains: str,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        *(
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in values.items()]
            for values in (inputs, outputs)
        ),
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(one, 1) for one in domains)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10 + opset // 23), path)
    return path


def graph_of(path: Path) -> ir.Model:
    return run_passes(import_model(path).model)[0]


def evaluated(path: Path, x: Array, form: BlockFormat) -> Array:
    """The output with both operands of products in a format, in NumPy."""
    weights = {one.name: numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}
    w, v = weights["w"].T, weights["v"]
    w, v = (truth(one, form, float(np.abs(one).max())) for one in (w, v))
    hidden = np.maximum(truth(x, form, RANGES["x"]) @ w.T, 0)
    return truth(hidden.astype(np.float32), form, RANGES["r"]) @ v.T


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("axis", [0, 1])
def test_weights_are_rounded_as_the_formats_say(
    form: BlockFormat, axis: int, rng: np.random.Generator
) -> None:
    weight = spread(rng, 64, 64)
    rows = weight if axis else np.ascontiguousarray(weight.T)
    expected = truth(rows, form, float(np.abs(weight).max()))
    rounded = round_weight(weight, axis, form)
    restored = rounded.restored() if axis else rounded.restored().T
    np.testing.assert_allclose(restored, expected, rtol=1e-6, atol=0)
    assert rounded.stored.dtype == (
        ml_dtypes.float8_e4m3fn if form == MXFP8 else ml_dtypes.float4_e2m1fn
    )
    assert rounded.scales.shape[axis] == 64 // form.block


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_simulation_and_the_model_for_tensorrt_compute_the_numbers_of_the_format(
    case: Path, form: BlockFormat, rng: np.random.Generator
) -> None:
    x = spread(rng, 6, 64)
    expected = evaluated(case, x, form)
    model = simulated(graph_of(case), form, RANGES)
    assert model.products == ("MatMul:h", "Gemm:y")
    assert model.weight_bytes == round((64 * 32 + 24 * 32) * form.bits / 8)
    run = ActivationRunner(model.model, ["y", "x_rounded"])({"x": x})
    np.testing.assert_allclose(run["x_rounded"], truth(x, form, RANGES["x"]), rtol=1e-6, atol=0)
    limit = 1e-5 * float(np.abs(expected).max())
    np.testing.assert_allclose(run["y"], expected, rtol=0, atol=limit)
    proto = ir.to_proto(exported(graph_of(case), form, RANGES))
    onnx.checker.check_model(proto, full_check=True)
    (y,) = ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_allclose(y, expected, rtol=0, atol=limit)


def test_the_model_for_tensorrt_has_its_operators_and_types(case: Path) -> None:
    protos = {f: ir.to_proto(exported(graph_of(case), f, RANGES)) for f in FORMATS}
    names = {f: [f"{n.domain}:{n.op_type}" for n in p.graph.node] for f, p in protos.items()}
    assert names[MXFP8].count("trt:TRT_MXFP8DynamicQuantize") == 2
    assert names[MXFP8].count("trt:TRT_MXFP8DequantizeLinear") == 4
    assert names[NVFP4].count("trt:TRT_FP4DynamicQuantize") == 2
    assert names[NVFP4].count(":DequantizeLinear") == 8  # of scales, and of numbers
    types = {f: {one.data_type for one in p.graph.initializer} for f, p in protos.items()}
    assert {TensorProto.FLOAT8E4M3FN, TensorProto.UINT8} <= types[MXFP8]
    assert {TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN} <= types[NVFP4]
    quantize = next(n for n in protos[NVFP4].graph.node if n.op_type == "TRT_FP4DynamicQuantize")
    attributes = {one.name: one.i for one in quantize.attribute}
    assert attributes == {"axis": -1, "block_size": 16, "scale_type": TensorProto.FLOAT8E4M3FN}
    assert all(one.opset_import[0].version == 23 for one in protos.values())


def test_products_that_do_not_fit_stay_in_floating_point(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "MatMul:h"),
        helper.make_node("MatMul", ["h", "v"], ["r"], "MatMul:r"),
        helper.make_node("MatMul", ["z", "w"], ["y"], "MatMul:y"),
    ]
    weights = {"w": spread(rng, 32, 40), "v": spread(rng, 40, 8)}
    shapes: dict[str, tuple[int, ...]] = {"x": (2, 32), "z": (1, 2, 2, 32)}
    path = tmp_path / "m.onnx"
    model = graph_of(saved(path, nodes, weights, shapes, {"r": (2, 8), "y": (1, 2, 2, 40)}, 20))
    assert simulated(model, MXFP8, {}).floats == {
        "MatMul:r": "its depth 40 is no multiple of 32",
        "MatMul:y": "'z' has 4 axes, and TensorRT takes 2 or 3",
    }
    with pytest.raises(BuildError, match=r"NVFP4 needs .* MatMul:h: 'x' has no range"):
        simulated(model, NVFP4, {})
    partly_float = exported(model, MXFP8, {}, ["MatMul:y"])
    assert sum(node.op_type == "TRT_MXFP8DynamicQuantize" for node in partly_float.graph) == 1
    with pytest.raises(BuildError, match="the model has none"):
        exported(model, MXFP8, {}, ["MatMul:h"])


def test_the_commands_write_them_and_the_build_refuses_what_only_tensorrt_computes(
    case: Path, tmp_path: Path
) -> None:
    table = CalibrationTable(
        method="minmax", samples=1, data_sha256="0" * 64, model_sha256=model_sha256(case),
        tensors={**RANGES, "h": 90.0, "y": 9.0},
    )  # fmt: skip
    write_table(tmp_path / "t.json", table)
    for form, block_format in BLOCK_FORMS.items():
        words = ("ranges", str(tmp_path / "t.json"), "--model", str(case), "--qdq-for", form)
        written = tmp_path / f"{form}.onnx"
        done = CliRunner().invoke(tandem, [*words, "--qdq", str(written), "--json"])
        assert json.loads(done.stdout)["wrote"] == [str(written)]
        onnx.checker.check_model(onnx.load(written))
        refusal = rf"rounds an activation to {block_format.name}, for which there are no kernels"
        with pytest.raises(ImportModelError, match=refusal):
            build_engine(written, "laptop", tmp_path / "e", BuildOptions())


def narrow_model(path: Path, kind: str, rng: np.random.Generator) -> tuple[Path, Array]:
    """A product with a weight in a format alone, and the weight in floating point."""
    form = MXFP8 if kind == "MXFP8" else NVFP4
    rounded = round_weight(spread(rng, 64, 48), 0, form)
    blocks = {"axis": 0, "block_size": form.block}
    weights: dict[str, Array] = {"q": rounded.stored}
    nodes = []
    if kind == "MXFP8":
        weights["s"] = rounded.scales.view(ml_dtypes.float8_e8m0fnu)
        blocks["output_dtype"] = TensorProto.FLOAT
    elif kind == "NVFP4":
        assert rounded.tensor_scale is not None
        weights |= {"b": rounded.scales, "t": rounded.tensor_scale}
        nodes.append(helper.make_node("DequantizeLinear", ["b", "t"], ["s"], "scales"))
    else:
        weights["s"] = rounded.scales.astype(np.float32) * rounded.tensor_scale
    restored = rounded.restored()
    if kind == "FP4 with half scales":
        weights["s"] = weights["s"].astype(np.float16)
        spread_scales = np.repeat(weights["s"], form.block, 0)
        restored = (rounded.stored.astype(np.float32) * spread_scales).astype(np.float16)
        nodes.append(helper.make_node("DequantizeLinear", ["q", "s"], ["h"], "weight", **blocks))
        nodes.append(helper.make_node("Cast", ["h"], ["w"], "floats", to=TensorProto.FLOAT))
    else:
        absent = [""] if kind == "an absent zero point" else []
        operands = ["q", "s", *absent]
        nodes.append(helper.make_node("DequantizeLinear", operands, ["w"], "weight", **blocks))
    nodes.append(helper.make_node("MatMul", ["x", "w"], ["y"], "MatMul:y"))
    opset = 24 if kind == "MXFP8" else 23
    saved(path, nodes, weights, {"x": (2, 64)}, {"y": (2, 48)}, opset)
    return path, restored.astype(np.float32)


@pytest.mark.parametrize(
    "kind",
    [
        "NVFP4",
        "FP4 with float scales",
        "FP4 with half scales",
        "an absent zero point",
        "MXFP8",
    ],
)
def test_weights_alone_in_these_formats_become_floating_point(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path, weight = narrow_model(tmp_path / "m.onnx", kind, rng)
    x = rng.normal(size=(2, 64)).astype(np.float32)
    result = build_engine(path, "laptop", tmp_path / "e", BuildOptions(precision="fp32"))
    assert any("NVFP4 or MXFP8: 1, which become floating point" in n for n in result.notes)
    with open_session(tmp_path / "e") as session:
        y = session.infer({"x": x})["y"]
    np.testing.assert_allclose(y, x @ weight, rtol=1e-4, atol=1e-4)


def test_scales_that_do_not_fit_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    path, _ = narrow_model(tmp_path / "m.onnx", "FP4 with float scales", rng)
    proto = onnx.load(path)
    scales = next(one for one in proto.graph.initializer if one.name == "s")
    scales.CopyFrom(numpy_helper.from_array(np.ones((4, 47), np.float32), "s"))
    onnx.save(proto, path)
    with pytest.raises((ImportModelError, BuildError), match=r"weight.*scales that do not fit"):
        build_engine(path, "laptop", tmp_path / "e", BuildOptions())


def test_scales_of_a_single_number_are_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], "weight"),
        helper.make_node("Mul", ["x", "w"], ["y"], "Mul:y"),
    ]
    weights = {"q": np.array(1, ml_dtypes.float4_e2m1fn), "s": np.ones(2, np.float32)}
    saved(tmp_path / "m.onnx", nodes, weights, {"x": (2, 64)}, {"y": (2, 64)}, 23)
    with pytest.raises((ImportModelError, BuildError), match=r"weight.*scales that do not fit"):
        build_engine(tmp_path / "m.onnx", "laptop", tmp_path / "e", BuildOptions())


def test_an_activation_in_fp4_is_refused_by_name(tmp_path: Path, rng: np.random.Generator) -> None:
    nodes = [
        helper.make_node(
            "QuantizeLinear", ["x", "s"], ["q"], "rounds", axis=1, block_size=16,
            output_dtype=TensorProto.FLOAT4E2M1,
        ),
        helper.make_node("DequantizeLinear", ["q", "s"], ["r"], "back", axis=1, block_size=16),
        helper.make_node("MatMul", ["r", "w"], ["y"], "MatMul:y"),
    ]  # fmt: skip
    weights = {"s": np.ones((2, 4), np.float32), "w": spread(rng, 64, 8)}
    saved(tmp_path / "m.onnx", nodes, weights, {"x": (2, 64)}, {"y": (2, 8)}, 23)
    with pytest.raises(ImportModelError, match=r"'rounds'.*FLOAT4E2M1, for which there are no k"):
        build_engine(tmp_path / "m.onnx", "laptop", tmp_path / "e", BuildOptions())
