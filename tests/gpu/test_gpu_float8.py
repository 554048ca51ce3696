"""Products of FP8: interpreted on the CPU against arithmetic of ml_dtypes, and compiled."""

import math
from dataclasses import replace
from typing import Any

import gpu_interpreter
import numpy as np
import onnx
import pytest
from float8_graphs import (
    X_SCALE,
    Product,
    convolution,
    convolved,
    float8_weights,
    pair,
    quantized,
    real,
)
from gpu_graphs import Case, ints, node, normal
from ml_dtypes import float8_e4m3fn

from toolkit.gpu.codegen.compile_kernels import compile_kernels
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.launch import TunableOp
from toolkit.gpu.lower import KernelProgram
from toolkit.gpu.target import GpuTarget
from toolkit.graph.dtypes import FLOAT8

pytest.importorskip("triton", reason="Triton is not installed")

THOR = GpuTarget(sm=110, sm_count=20)
EXHAUSTIVE = GpuTarget(sm=90, sm_count=132, exhaustive=True)
# Of the norm. Operands are FP8 in both, results FP16; of few x next to a half between two numbers
# of E4M3 kernels take the other one, as they multiply by 1 / scale.
ERROR = 2e-3


def lower(case: Case, gpu: GpuTarget = THOR) -> KernelProgram:
    return case.lower("fp16", gpu)


def agree(actual: np.ndarray, expected: np.ndarray, what: object = None) -> None:
    difference = np.linalg.norm(actual.astype(np.float64) - expected)
    assert difference < ERROR * np.linalg.norm(expected), what


def operand_types(program: KernelProgram) -> list[str]:
    """The type of the left operand of each matrix product."""
    return [
        dict(launch.spec.signature)["a"].removesuffix(":16")
        for launch in program.launches
        if "a" in dict(launch.spec.signature)
    ]


@pytest.mark.parametrize(
    ("shape", "transposed"),
    [
        ((1, 64), False),
        ((40, 200), False),
        ((2, 17, 96), False),
        ((1, 64), True),
        ((40, 200), True),
    ],
)
def test_products_read_both_operands_as_fp8(
    shape: tuple[int, ...], transposed: bool, rng: np.random.Generator
) -> None:
    product = Product(shape, 40, transposed)
    case, x = product.case(rng), rng.normal(size=shape).astype(np.float32)
    x.reshape(-1)[0] = 100  # beyond 448 scales
    program = lower(case)
    assert operand_types(program) == ["*fp8e4nv"]
    agree(gpu_interpreter.run(program, {"x": x})["y"], product.truth(case, x))


@pytest.mark.parametrize(
    ("rows", "depth", "other"),
    [(1, 512, "split_k_reduce"), (100, 512, "split_k_reduce"), (200, 96, "resident_gemm strided")],
)
def test_every_tactic_gives_the_product(
    rows: int, depth: int, other: str, rng: np.random.Generator
) -> None:
    product = Product((rows, depth), 72)
    case, x = product.case(rng), rng.normal(size=(rows, depth)).astype(np.float32)
    program, expected = lower(case, EXHAUSTIVE), product.truth(case, x)
    (op,) = [op for op in program.ops if "a" in dict(op.tactics[0][0].spec.signature)]
    kernels = {launch.spec.title for tactic in op.tactics for launch in tactic}
    assert kernels == {"gemm strided", other}
    for tactic in op.tactics:
        ops = tuple(TunableOp(w.nodes, (tactic,)) if w is op else w for w in program.ops)
        actual = gpu_interpreter.run(replace(program, ops=ops), {"x": x})["y"]
        agree(actual, expected, tactic[0].spec)


RELU = (node("Add", "c r", "a"), node("Relu", "a", "y"))


@pytest.mark.parametrize(
    ("channels", "taps", "attributes", "after"),
    [
        (32, 1, {}, ()),
        (32, 1, {"strides": [2, 2]}, ()),
        (48, 3, {"pads": [1, 1, 1, 1]}, RELU),
        (16, 3, {"pads": [2, 2, 2, 2], "dilations": [2, 2]}, ()),
        (160, 3, {"pads": [1, 1, 1, 1], "strides": [2, 2]}, ()),
    ],
)
def test_convolutions_read_both_operands_as_fp8(
    channels: int,
    taps: int,
    attributes: dict[str, Any],
    after: tuple[onnx.NodeProto, ...],
    rng: np.random.Generator,
) -> None:
    more = ("r",) if after else ()
    case = convolution(rng, (2, channels, 9, 11), 40, taps, *after, more=more, **attributes)
    feeds, program = case.feeds(rng), lower(case)
    assert operand_types(program) == ["*fp8e4nv"]
    agree(gpu_interpreter.run(program, feeds)["y"], convolved(case, feeds))


@pytest.mark.parametrize(
    ("channels", "filters", "attributes", "kind"),
    [(8, 24, {}, "8 channels"), (32, 32, {"group": 32}, "depthwise"), (64, 32, {"group": 2}, "2")],
)
def test_other_convolutions_read_the_rounded_numbers_in_fp16(
    channels: int,
    filters: int,
    attributes: dict[str, Any],
    kind: str,
    rng: np.random.Generator,
) -> None:
    case = convolution(rng, (1, channels, 7, 7), filters, 3, pads=[1, 1, 1, 1], **attributes)
    feeds, program = case.feeds(rng), lower(case)
    assert "*fp8e4nv" not in operand_types(program), kind
    agree(gpu_interpreter.run(program, feeds)["y"], convolved(case, feeds))


def test_the_kernel_that_computes_a_tensor_rounds_it_to_fp8(rng: np.random.Generator) -> None:
    """Through reshapes, once for all readers with one scale, and for readers in floats."""
    weights = {
        "w0": normal(rng, 64, 64).T,
        **float8_weights(rng, (64, 48), 1),
        **X_SCALE,
        "shape": ints(2, 5, 64),
    }
    nodes = [
        node("MatMul", "x w0", "h"),
        node("Relu", "h", "p"),
        node("Reshape", "p shape", "p3"),
        *pair("p3", "pd"),
        *pair("p3", "pe"),
        node("DequantizeLinear", "q s z", "w", axis=1),
        node("MatMul", "pd w", "m"),
        node("MatMul", "pe w", "n"),
        node("ReduceMean", "pd last", "mean", keepdims=1),
        node("Sub", "n mean", "d"),
        node("Add", "m d", "y"),
    ]
    case = Case(nodes, {"x": (10, 64)}, weights | {"last": ints(2)})
    feeds, program = case.feeds(rng), lower(case)
    assert operand_types(program) == ["*fp16", "*fp8e4nv", "*fp8e4nv"]
    first = program.launches[
        [launch.spec.title for launch in program.launches].index("gemm strided")
    ]
    assert dict(first.spec.signature)["y"].startswith("*fp8e4nv")
    x, w0 = (t.astype(np.float16).astype(np.float32) for t in (feeds["x"], weights["w0"]))
    p = quantized(np.maximum(x @ w0, 0), 0.01)
    p = p.reshape(2, 5, 64).astype(np.float64)
    product = p @ real({name: weights[name] for name in "qsz"}, 1)
    expected = 2 * product - p.mean(2, keepdims=True)
    actual = gpu_interpreter.run(program, feeds)["y"]
    assert np.linalg.norm(actual - expected) < 5e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("factor", [0.002, 1.0, 15000.0])
def test_a_gelu_and_its_rounding_are_one_step(factor: float, rng: np.random.Generator) -> None:
    """With scales that FP16 may multiply by, and with smaller and larger ones."""
    weights = {
        "w0": normal(rng, 64, 64).T * np.float32(max(factor, 1)),
        **float8_weights(rng, (64, 48), 1),
        **X_SCALE,
    }
    weights["xs"] = weights["xs"] * np.float32(factor)
    nodes = [
        node("MatMul", "x w0", "h"),
        node("Gelu", "h", "g"),
        *pair("g", "gd"),
        node("DequantizeLinear", "q s z", "w", axis=1),
        node("MatMul", "gd w", "y"),
    ]
    case = Case(nodes, {"x": (10, 64)}, weights, opset=20)
    feeds, program = case.feeds(rng), lower(case)
    steps = [step[0] for step in dict(program.launches[-2].spec.constants)["EPILOGUE"]]
    joined = ["gelu_to_float8_by"] if factor == 1 else ["gelu_half", "to_float8_by"]
    assert steps == joined
    x, w0 = (t.astype(np.float16).astype(np.float32) for t in (feeds["x"], weights["w0"]))
    h = x @ w0
    g = 0.5 * h * (1 + np.vectorize(math.erf)(h / 2**0.5)).astype(np.float32)
    product = quantized(g, float(weights["xs"])) @ real({n: weights[n] for n in "qsz"}, 1)
    actual = gpu_interpreter.run(program, feeds)["y"]
    assert np.linalg.norm(actual - product) < 5e-3 * np.linalg.norm(product)


def refusal(case: Case) -> str:
    with pytest.raises(NotCoveredError) as caught:
        lower(case)
    return str(caught.value)


def test_a_refusal_names_the_node_the_limit_and_the_value(rng: np.random.Generator) -> None:
    case = Product((4, 64), 32).case(rng)
    scales = {
        **case.weights,
        "xs": np.full(64, 0.01, np.float32),
        "xz": np.zeros(64, float8_e4m3fn),
    }
    assert f"(QuantizeLinear) has 64 scales of {FLOAT8}; kernels take 1" in refusal(
        replace(case, weights=scales)
    )
    wrong = {**case.weights, "xs": np.float32(0).reshape(())}
    assert "has the scale 0.0; kernels take positive ones with a finite reciprocal" in refusal(
        replace(case, weights=wrong)
    )
    shifted = {**case.weights, "xz": np.ones((), float8_e4m3fn)}
    assert f"has a zero point of {FLOAT8}, 'xz'; kernels take 0" in refusal(
        replace(case, weights=shifted)
    )
    wraps = node("QuantizeLinear", "x xs xz", "xd_(FP8)", saturate=0)
    assert "has saturate=0" in refusal(replace(case, nodes=[wraps, *case.nodes[1:]]))
    computed = [node("Abs", "t", "xs"), *case.nodes]
    weights = {name: value for name, value in case.weights.items() if name != "xs"}
    inputs = {**case.inputs, "t": ()}
    assert "that is computed, 'xs'" in refusal(Case(computed, inputs, weights))


ROUNDED = [
    node("DequantizeLinear", "wq t z", "w", axis=1),
    node("MatMul", "x w", "y"),
]


def rounded_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights `v` of FP16, scales `s` that they are rounded by, `t` that they are read by."""
    return {
        "v": (rng.normal(size=(16, 64)) * 30).astype(np.float16),
        "s": rng.uniform(0.1, 1, 64).astype(np.float16),
        "t": np.ones(64, np.float16),
        "z": np.zeros(64, float8_e4m3fn),
    }


def test_constants_of_fp16_are_rounded_to_fp8_once(rng: np.random.Generator) -> None:
    weights = rounded_weights(rng)
    nodes = [node("QuantizeLinear", "v s z", "wq", axis=1), *ROUNDED]
    dtypes = {"x": "float16", "y": "float16"}
    program = Case(nodes, {"x": (16, 16)}, weights, dtypes=dtypes).lower("fp16", THOR)
    actual = gpu_interpreter.run(program, {"x": np.eye(16, dtype=np.float16)})["y"]
    steps = weights["v"].astype(np.float32) / weights["s"].astype(np.float32)
    twice = (weights["v"] / weights["s"]).clip(-448, 448).astype(float8_e4m3fn)
    once = steps.clip(-448, 448).astype(float8_e4m3fn)
    assert (once != twice).any()
    assert np.array_equal(actual, once.astype(np.float16))


@pytest.mark.parametrize(
    ("attributes", "zero", "words"),
    [({"saturate": 0}, 0, "has saturate=0"), ({}, 1, "has a zero point of")],
)
def test_constants_are_asked_for_saturation_and_zero_points(
    attributes: dict[str, Any], zero: float, words: str, rng: np.random.Generator
) -> None:
    weights = {
        name: value.astype(np.float32) if name in "vst" else value
        for name, value in rounded_weights(rng).items()
    }
    weights["u"] = np.full(64, zero, float8_e4m3fn)
    quantize = node("QuantizeLinear", "v s u", "wq", axis=1, **attributes)
    assert words in refusal(Case([quantize, *ROUNDED], {"x": (16, 16)}, weights))


def test_a_gpu_without_fp8_is_named(rng: np.random.Generator) -> None:
    with pytest.raises(NotCoveredError, match="from SM 89 on compute; this one has SM 87"):
        lower(Product((4, 64), 32).case(rng), GpuTarget(87, 16))
    weights = float8_weights(rng, (64, 32), 1)
    nodes = [node("DequantizeLinear", "q s z", "w", axis=1), node("MatMul", "x w", "y")]
    program = lower(Case(nodes, {"x": (4, 64)}, weights), GpuTarget(87, 16))
    assert operand_types(program) == ["*fp16"]  # weights alone become FP16


@pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")
@pytest.mark.parametrize(
    "sm", [*(pytest.param(sm, marks=pytest.mark.slow) for sm in (89, 90)), 110]
)
def test_no_kernel_spills_registers(sm: int, rng: np.random.Generator) -> None:
    gpu = GpuTarget(sm, 20)
    program = lower(Product((1024, 1024), 1024).case(rng), gpu)
    specs = {launch.spec for op in program.ops for t in op.tactics for launch in t}
    kernels = compile_kernels(sorted(specs, key=str), gpu)
    assert [one.spill_bytes for one in kernels if one is not None and one.spill_bytes] == []
