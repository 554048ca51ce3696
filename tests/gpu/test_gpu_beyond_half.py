"""What FP16 does not hold is stored and multiplied in FP32, so that no engine gives infinities."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import gpu_interpreter
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from gpu_graphs import ORIN, Case, ints, node, normal
from onnx.reference import ReferenceEvaluator

from device.engine.manifest import TensorInfo
from device.engine.tensorrt_manifest import TensorRTGpu
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.engine.tensorrt_gpu import tensorrt_gpu_segment
from toolkit.export.half import to_half
from toolkit.gpu.beyond_half import LARGEST_HALF, beyond_half
from toolkit.gpu.lower import lower_segment
from toolkit.partition.planning.options import PlanOptions
from toolkit.quantize.loss.rounded import HalfModel
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.quantize import calibrated_tensors

pytest.importorskip("triton", reason="Triton is not installed")


def number(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def variance() -> Case:
    """x divided by the root of its mean square, as exporters write RMSNorm."""
    nodes = [
        node("Pow", "x two", "squares"),
        node("ReduceMean", "squares last", "mean"),
        node("Sqrt", "mean", "root"),
        node("Div", "x root", "y"),
    ]
    return Case(nodes, {"x": (2, 5, 32)}, {"two": number(2.0), "last": ints(-1)})


def linear_attention(eps: float = 1e-5) -> Case:
    """The attention of EfficientViT: a column of ones in the values counts the weights."""
    nodes = [
        node("Relu", "q", "queries"),
        node("Relu", "k", "keys"),
        node("Concat", "v ones", "values", axis=2),
        node("Transpose", "keys", "turned", perm=[0, 2, 1]),
        node("MatMul", "turned values", "pairs"),
        node("MatMul", "queries pairs", "sums"),
        node("Slice", "sums zero width columns", "weighted"),
        node("Slice", "sums width end columns", "weights"),
        node("Add", "weights eps", "divisor"),
        node("Div", "weighted divisor", "y"),
    ]
    sizes = {"zero": ints(0), "width": ints(16), "end": ints(17), "columns": ints(2)}
    constants = {**sizes, "eps": number(eps), "ones": np.ones((2, 64, 1), np.float32)}
    return Case(nodes, dict.fromkeys("qkv", (2, 64, 16)), constants)


def softmax_by_hand() -> Case:
    nodes = [
        node("Exp", "x", "powers"),
        node("ReduceSum", "powers last", "sum"),
        node("Div", "powers sum", "y"),
    ]
    return Case(nodes, {"x": (2, 5, 32)}, {"last": ints(-1)})


def magnitudes(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, float]:
    values = ActivationRunner(model, calibrated_tensors(model))(feeds)
    return {name: float(np.abs(array).max()) for name, array in values.items()}


def vision_transformer() -> Case:
    """LayerNormalization as exporters of ViT write it, then GELU with x^3, as tanh has it.

    ViT-B in plain FP16 falls to 19 % top-1, as its Pow overflows (onnxsim/onnxsim#1727).
    """
    nodes = [
        node("ReduceMean", "x last", "mean"),
        node("Sub", "x mean", "centred"),
        node("Pow", "centred two", "squares"),
        node("ReduceMean", "squares last", "variance"),
        node("Add", "variance eps", "kept"),
        node("Sqrt", "kept", "deviation"),
        node("Div", "centred deviation", "normal"),
        node("MatMul", "normal weight", "hidden"),
        node("Pow", "hidden three", "cubes"),
        node("Mul", "cubes small", "scaled"),
        node("Add", "hidden scaled", "inner"),
        node("Mul", "inner root", "angle"),
        node("Tanh", "angle", "curve"),
        node("Add", "curve one", "raised"),
        node("Mul", "hidden raised", "gated"),
        node("Mul", "gated half", "y"),
    ]
    constants = {
        "last": ints(-1), "two": number(2.0), "eps": number(1e-6), "three": number(3.0),
        "small": number(0.044715), "root": number(0.7978846), "one": number(1.0),
        "half": number(0.5),
        "weight": 20.0 * np.eye(32, dtype=np.float32),
    }  # fmt: skip
    return Case(nodes, {"x": (1, 5, 32)}, constants, opset=18)


CASES = {
    "ViT": (vision_transformer(), 400.0, {"squares", "cubes"}),
    "variance": (variance(), 600.0, {"squares"}),
    "linear attention": (linear_attention(), 60.0, {"pairs", "sums", "weighted"}),
    "softmax": (softmax_by_hand(), 8.0, {"powers", "sum"}),  # 5.0: one draw in 70 fits FP16
}


@pytest.mark.parametrize("name", CASES)
def test_values_beyond_fp16_are_right_in_an_fp16_engine(
    name: str, rng: np.random.Generator
) -> None:
    """The same kernels without the rule, and FP16 node by node, lose the result."""
    case, size, named = CASES[name]
    feeds = {key: values * np.float32(size) for key, values in case.feeds(rng).items()}
    truth, model = case.truth(feeds)["y"], case.segment().model
    amax = magnitudes(model, feeds)
    assert max(amax.values()) > LARGEST_HALF
    assert not _near(HalfModel(model)(feeds)["y"], truth)
    observed, by_graph = beyond_half(model, amax), beyond_half(model, None)
    assert named <= observed.keys()
    assert named - {"cubes"} <= by_graph.keys()  # a power that nothing adds up: samples decide
    assert all(observed[tensor].amax == amax[tensor] for tensor in named)
    for wide in (observed, by_graph) if named <= by_graph.keys() else (observed,):
        program = lower_segment(model, gpu=ORIN, precision="fp16", wide=frozenset(wide))
        assert _near(gpu_interpreter.run(program, feeds)["y"], truth)


def _near(actual: np.ndarray, truth: np.ndarray) -> bool:
    with np.errstate(all="ignore"):
        return bool(np.linalg.norm(actual - truth) < 1e-2 * np.linalg.norm(truth))


def test_without_the_rule_the_kernels_overflow(rng: np.random.Generator) -> None:
    case = linear_attention()
    feeds = {key: values * np.float32(60) for key, values in case.feeds(rng).items()}
    with np.errstate(all="ignore"):
        outputs = gpu_interpreter.run(case.lower("fp16"), feeds)
    assert np.isnan(outputs["y"]).any()


PRODUCTS: dict[str, tuple[Sequence[onnx.NodeProto], tuple[int, ...], tuple[int, ...]]] = {
    "Gemm": ([node("Gemm", "s w", "y")], (6, 24), (24, 8)),
    "Conv": ([node("Conv", "s w", "y")], (1, 24, 5, 5), (8, 24, 3, 3)),
    "1x1": ([node("Conv", "s w", "y")], (1, 24, 5, 5), (8, 24, 1, 1)),
    "grouped": ([node("Conv", "s w", "y", group=2)], (1, 24, 5, 5), (8, 12, 3, 3)),
    "depthwise": ([node("Conv", "s w", "y", group=24)], (1, 24, 5, 5), (24, 1, 3, 3)),
    "of three channels": ([node("Conv", "s w", "y")], (1, 3, 9, 9), (8, 3, 3, 3)),
    "1-D": ([node("Conv", "s w", "y")], (1, 24, 9), (8, 24, 3)),
    "transposed": ([node("ConvTranspose", "s w", "y")], (1, 8, 4, 4), (8, 6, 2, 2)),
    "attention": (
        [node("MatMul", "s w", "q"), node("Transpose", "q", "t", perm=[0, 2, 1]),
         node("MatMul", "q t", "scores"), node("Softmax", "scores", "p"),
         node("MatMul", "p s", "y")], (1, 16, 16), (16, 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_read_such_tensors_in_fp32(name: str, rng: np.random.Generator) -> None:
    nodes, shape, weights = PRODUCTS[name]
    case = Case(
        [node("Mul", "x large", "s"), *nodes],
        {"x": shape},
        {"large": number(1e6), "w": (rng.normal(size=weights) * 1e-7).astype(np.float32)},
    )
    feeds = case.feeds(rng)
    model, truth = case.segment().model, case.truth(feeds)["y"]
    wide = frozenset(beyond_half(model, magnitudes(model, feeds)))
    program = lower_segment(model, gpu=ORIN, precision="fp16", wide=wide)
    outputs = gpu_interpreter.run(program, feeds)["y"]
    assert np.linalg.norm(outputs - truth) < 1e-2 * np.linalg.norm(truth)


@pytest.mark.parametrize("name", CASES)
def test_strongly_typed_tensorrt_has_fp32_for_them(name: str, rng: np.random.Generator) -> None:
    """The file that it reads, in ONNX's reference: all in FP16 it loses the result."""
    case, size, _ = CASES[name]
    feeds = {key: values * np.float32(size) for key, values in case.feeds(rng).items()}
    truth, model = case.truth(feeds)["y"], case.segment().model
    wide = beyond_half(model, magnitudes(model, feeds))
    assert _near(_run(to_half(model, half_io=False, wide=wide), feeds), truth)
    assert not _near(_run(to_half(model, half_io=False), feeds), truth)


def _run(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Run a model node by node; onnxruntime would compute FP16 in FP32 on a CPU."""
    with np.errstate(all="ignore"):
        (output,) = ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)
    return np.asarray(output)


def test_a_form_for_tensorrt_is_typed_where_fp16_does_not_hold_a_tensor(
    rng: np.random.Generator,
) -> None:
    """Before TensorRT 10.8 any layer may be FP16."""
    piece = vision_transformer().segment()
    tensors = {n: TensorInfo(name=n, dtype="float32", shape=(1, 5, 32)) for n in "xy"}
    half, single = (
        tensorrt_gpu_segment(piece, tensors, precision, {"squares"})
        for precision in ("fp16", "fp32")
    )
    assert not isinstance(half, str)
    assert not isinstance(single, str)
    assert isinstance(half.implementation, TensorRTGpu)
    assert isinstance(single.implementation, TensorRTGpu)
    assert half.implementation.ranged is None
    assert half.implementation.ranged_problem == "FP16 does not hold tensor 'squares'"
    assert half.implementation.typed is not None
    assert single.implementation.ranged is not None


@pytest.mark.parametrize(("precision", "rule"), [("fp16", "K2"), ("int8", None)])
def test_no_dla_computes_them_in_fp16(
    precision: Literal["fp16", "int8"], rule: str | None, tmp_path: Path, rng: np.random.Generator
) -> None:
    nodes = [
        node("Conv", "x w", "a", pads=[1] * 4),
        node("Mul", "a a", "squares"),
        node("ReduceSum", "squares last", "y", keepdims=1),
    ]
    weights = {"w": normal(rng, 32, 32, 3, 3), "last": ints(1)}
    onnx.save(Case(nodes, {"x": (1, 32, 32, 32)}, weights).model(), tmp_path / "m.onnx")
    options = BuildOptions(
        precision,
        dummy_ranges=precision == "int8",
        kernels=False,
        plan=PlanOptions(min_gain=0.0),
    )
    result = build_engine(tmp_path / "m.onnx", "agx-orin-64gb", tmp_path / "m.engine", options)
    rules = {row.node: row.rule for row in result.plan.placements}
    assert (rules["Mul:squares"] == rule) == (rule is not None)


def test_what_keeps_a_divisor_from_zero_stays_in_fp32() -> None:
    """1e-15 is 0 in FP16: 0 / 0 where no key has a weight."""
    case = linear_attention(eps=1e-15)
    model = case.segment().model
    feeds = {name: np.full((2, 64, 16), -1, np.float32) for name in "qkv"}
    assert not case.truth(feeds)["y"].any()
    assert np.isnan(HalfModel(model)(feeds)["y"]).all()
    amax = magnitudes(model, feeds)
    assert "divisor" in beyond_half(model, amax)
    assert "divisor" not in beyond_half(linear_attention().segment().model, amax)


@pytest.mark.parametrize(("largest", "wide"), [(16000.0, False), (17000.0, True)])
def test_other_inputs_may_be_larger_than_all_samples(largest: float, wide: bool) -> None:
    model = variance().segment().model
    assert ("squares" in beyond_half(model, {"squares": largest})) == wide


def test_a_softmax_that_subtracts_the_largest_stays_in_fp16() -> None:
    nodes = [
        node("ReduceMax", "x last", "largest"),
        node("Sub", "x largest", "low"),
        *softmax_by_hand().nodes,
    ]
    nodes[2] = node("Exp", "low", "powers")
    model = Case(nodes, {"x": (2, 5, 32)}, {"last": ints(-1)}, opset=18).segment().model
    assert not beyond_half(model, None)


def test_a_constant_beyond_fp16_is_packed_in_fp32(rng: np.random.Generator) -> None:
    table = rng.normal(size=(3, 4)).astype(np.float32) * np.float32(1e6)
    case = Case([node("Add", "x table", "a"), node("Relu", "a", "y")], {"x": (3, 4)},
                {"table": table})  # fmt: skip
    model, feeds = case.segment().model, case.feeds(rng)
    wide = frozenset(beyond_half(model, None))
    assert {"table", "a"} <= wide
    program = lower_segment(model, gpu=ORIN, precision="fp16", wide=wide)
    np.testing.assert_allclose(
        gpu_interpreter.run(program, feeds)["y"], case.truth(feeds)["y"], rtol=1e-3
    )


def test_a_build_in_fp16_says_what_stays_in_fp32(tmp_path: Path) -> None:
    model, data = tmp_path / "m.onnx", [{"x": np.full((2, 5, 32), 600, np.float32)}]
    onnx.save(variance().model(), model)
    for samples, reason in ((data, "samples: up to 3.6e+05"), (None, "squares that are added up")):
        options = BuildOptions(precision="fp16", data=samples)
        result = build_engine(model, "orin-nano-8gb", tmp_path / "m.engine", options)
        (note,) = [note for note in result.notes if "65504" in note]
        assert note.startswith("2 results may exceed 65504, the largest of FP16, and stay in FP32")
        assert f"Pow:squares (Pow, {reason})" in note
    fp32 = BuildOptions(precision="fp32")
    result = build_engine(model, "orin-nano-8gb", tmp_path / "m.engine", fp32)
    assert not [note for note in result.notes if "65504" in note]
