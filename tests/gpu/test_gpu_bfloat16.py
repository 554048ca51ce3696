"""Kernels that store BF16: interpreted against operands that ml_dtypes rounds, and compiled."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gpu_interpreter
import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from gpu_dynamic_graphs import attention
from gpu_graphs import Case, convolution, ints, node, normal
from onnx import helper

from toolkit.gpu.beyond_half import beyond_bfloat16
from toolkit.gpu.codegen.compile_kernels import compile_kernels
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.gpu.emit.weights import WeightPacker
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.gpu.target import GpuTarget
from toolkit.graph.dtypes import BFLOAT16

pytest.importorskip("triton", reason="Triton is not installed")

SAME = 1e-5  # of the norm: products of the same numbers, summed in FP32 in another order
ROUNDED = 2.0**-8  # of the norm: results rounded to BF16 a few times, each by 2^-9 at most
LONG_CHAIN = 2.0**-6  # of five steps of an LSTM (to 2^-7 in 25 draws), of squares in two products
Rng = np.random.Generator


def rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    difference = np.linalg.norm(actual.astype(np.float64) - expected)
    return float(difference / np.linalg.norm(expected.astype(np.float64)))


def pointers(program: KernelProgram) -> set[str]:
    """The types of the floats that kernels read and write."""
    signatures = [dict(launch.spec.signature) for launch in program.launches]
    kinds = {kind.removesuffix(":16") for row in signatures for kind in row.values()}
    return kinds & {"*fp16", "*bf16", "*fp32"}


BIASED = (node("Add", "h b", "a"), node("Relu", "a", "y"))
PRODUCTS: dict[str, Callable[[Rng], Case]] = {
    "MatMul of few rows": lambda r: Case(
        [node("MatMul", "x w", "y")], {"x": (1, 200)}, {"w": normal(r, 200, 40)}
    ),
    "MatMul with bias and ReLU": lambda r: Case(
        [node("MatMul", "x w", "h"), *BIASED],
        {"x": (70, 96)},
        {"w": normal(r, 96, 40), "b": normal(r, 40)},
    ),
    "Gemm with transposed weights": lambda r: Case(
        [node("Gemm", "x w b", "y", transB=1, alpha=0.5)],
        {"x": (33, 64)},
        {"w": normal(r, 24, 64), "b": normal(r, 24)},
    ),
    "products of two tensors": lambda _: Case(
        [node("MatMul", "x z", "y")], {"x": (3, 17, 40), "z": (3, 40, 24)}, {}
    ),
    "1x1": lambda r: convolution(r, (2, 24, 9, 11), 40, (1, 1)),
    "3x3, strided, with ReLU": lambda r: convolution(
        r, (2, 24, 9, 11), 40, (3, 3), node("Relu", "c", "y"), pads=[1] * 4, strides=[2, 2]
    ),
    "3x3, few channels": lambda r: convolution(r, (1, 3, 17, 19), 16, (3, 3), strides=[2, 2]),
    "grouped": lambda r: convolution(r, (2, 32, 9, 11), 48, (3, 3), group=4, pads=[1] * 4),
    "transposed": lambda r: Case(
        [node("ConvTranspose", "x w", "y", strides=[2, 2], kernel_shape=[3, 3])],
        {"x": (1, 16, 7, 5)},
        {"w": normal(r, 16, 12, 3, 3)},
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_rounded_operands_are_summed_in_fp32(name: str, rng: Rng) -> None:
    case = PRODUCTS[name](rng)
    feeds, program = case.feeds(rng), case.lower("bf16")
    operands = {key: rounded(v) if key == "w" else v for key, v in case.weights.items()}
    inputs = {key: rounded(value) for key, value in feeds.items()}
    truth = replace(case, weights=operands).truth(inputs)["y"]
    assert pointers(program) >= {"*bf16"}
    assert "*fp16" not in pointers(program)
    assert error(gpu_interpreter.run(program, feeds)["y"], truth) < SAME


def chain(*nodes: object, shape: tuple[int, ...] = (2, 16, 9, 11), **weights: np.ndarray) -> Case:
    return Case(nodes, {"x": shape}, weights)  # type: ignore[arg-type]


OTHERS: dict[str, Callable[[Rng], Case]] = {
    "depthwise": lambda r: convolution(r, (2, 16, 9, 11), 16, (3, 3), group=16, pads=[1] * 4),
    "element-wise": lambda r: chain(
        node("Mul", "x s", "a"), node("Sigmoid", "a", "b"), node("Mul", "a b", "c"),
        node("Tanh", "c", "d"), node("Add", "d x", "y"), s=normal(r, 16, 1, 1),
    ),
    "softmax": lambda _: chain(node("Softmax", "x", "y", axis=-1)),
    "LayerNormalization": lambda r: chain(
        node("LayerNormalization", "x s b", "y", axis=-1), s=normal(r, 11), b=normal(r, 11)
    ),
    "maxima": lambda _: chain(
        node("MaxPool", "x", "m", kernel_shape=[3, 3], pads=[1] * 4),
        node("MaxPool", "m", "y", kernel_shape=[2, 2], strides=[2, 2]),
    ),
    "averages": lambda _: chain(
        node("AveragePool", "x", "m", kernel_shape=[3, 3]), node("GlobalAveragePool", "m", "y")
    ),
    "sums of rows": lambda _: chain(node("ReduceSum", "x a", "y"), a=ints(2, 3)),
    "attention": lambda r: replace(attention(r), inputs={"x": (2, 17, 32)}),
    "concatenation and moves": lambda r: chain(
        node("Conv", "x w", "c"), node("Concat", "c x", "j", axis=1),
        node("Transpose", "j", "t", perm=[0, 2, 3, 1]), node("Slice", "t s e a", "y"),
        w=normal(r, 8, 16, 1, 1), s=ints(1), e=ints(7), a=ints(1),
    ),
    "resized": lambda _: chain(
        node("Relu", "x", "r"),
        helper.make_node("Resize", ["r", "", "f"], ["z"], name="Resize", mode="linear"),
        node("Relu", "z", "y"), f=np.array([1, 1, 2, 2], np.float32),
    ),
    "joined by sums": lambda r: chain(
        node("Relu", "x", "r"), node("ScatterElements", "z i r", "s", reduction="add"),
        node("Relu", "s", "y"), shape=(6, 8), z=np.ones((4, 8), np.float32),
        i=np.asarray(r.integers(0, 4, (6, 8)), np.int64),
    ),
    "recurrence": lambda r: chain(
        helper.make_node("LSTM", ["x", "w", "r"], ["", "h"], name="LSTM", hidden_size=8),
        node("Relu", "h", "y"), shape=(5, 2, 6), w=normal(r, 1, 32, 6), r=normal(r, 1, 32, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels_round_what_they_store(name: str, rng: Rng) -> None:
    case = OTHERS[name](rng)
    feeds, program = case.feeds(rng), case.lower("bf16")
    assert "*fp16" not in pointers(program)
    limit = LONG_CHAIN if name == "recurrence" else ROUNDED
    assert error(gpu_interpreter.run(program, feeds)["y"], case.truth(feeds)["y"]) < limit


def test_values_beyond_fp16_are_multiplied_in_16_bits(rng: Rng) -> None:
    """A residual stream whose squares reach 1e9: FP16 makes infinities of them, BF16 does not."""
    nodes = [
        node("Mul", "x k", "s"),
        node("Mul", "s s", "q"),
        node("MatMul", "q w", "h"),
        node("Relu", "h", "r"),
        node("MatMul", "r v", "y"),
    ]
    weights = {"k": np.float32(1e4), "w": normal(rng, 64, 32), "v": normal(rng, 32, 16)}
    case = Case(nodes, {"x": (20, 64)}, weights)
    feeds, program = case.feeds(rng), case.lower("bf16")
    assert not np.isfinite(gpu_interpreter.run(case.lower("fp16"), feeds)["y"]).all()
    products = [
        dict(one.spec.signature) for one in program.launches if one.spec.title[:4] == "gemm"
    ]
    assert {row[name].removesuffix(":16") for row in products for name in "ab"} == {"*bf16"}
    assert error(gpu_interpreter.run(program, feeds)["y"], case.truth(feeds)["y"]) < LONG_CHAIN


def test_a_mask_of_the_largest_number_stays_finite(rng: Rng) -> None:
    """BF16 rounds the lowest number of FP32 to -inf, and a row of these has no softmax."""
    lowest = np.full((6, 24), np.finfo(np.float32).min)
    lowest[3:, ::2] = 0
    case = Case(
        [node("Relu", "x", "r"), node("Add", "r m", "a"), node("Softmax", "a", "y", axis=-1)],
        {"x": (6, 24)},
        {"m": lowest},
    )
    piece, feeds = case.segment(), case.feeds(rng)
    wide = beyond_bfloat16(piece.model)
    assert set(wide) >= {"m"}
    program = lower_segment(
        piece.model, gpu=GpuTarget(87, 8), precision="bf16", wide=frozenset(wide)
    )
    actual = gpu_interpreter.run(program, feeds)["y"]
    assert error(actual, case.truth(feeds)["y"]) < ROUNDED
    with pytest.raises(NotCoveredError, match=r"3\.4e\+38 does not fit bfloat16"):
        WeightPacker().pack(lowest, BFLOAT16)


def test_what_fp16_does_not_hold_bf16_does() -> None:
    weights = {"k": np.float32(1e5), "e": np.float32(1e-12)}
    nodes = [node("Mul", "x k", "a"), node("Add", "a e", "b"), node("Div", "x b", "y")]
    model = Case(nodes, {"x": (4,)}, weights).model()
    assert beyond_bfloat16(ir.from_proto(model)) == {}


def sass(case: Case, sm: int, path: Path) -> str:
    """The machine instructions of all kernels of a case."""
    from triton import knobs

    gpu = GpuTarget(sm=sm, sm_count=8)
    specs = [launch.spec for launch in case.lower("bf16", gpu).launches]
    texts = []
    for kernel in compile_kernels(specs, gpu):
        path.write_bytes(kernel.cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        texts.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return "\n".join(texts)


def check_halves(text: str) -> None:
    """All instructions on 16 bits are those of BF16; HFMA2 of zeros sets a register."""
    text = re.sub(r"HFMA2[\w.]* R\d+, -RZ, RZ,", "", text)
    halves = set(re.findall(r"\b(?:HG?MMA|H\w+2|F2FP)[\w.]*", text))
    assert halves
    assert all("BF16" in instruction for instruction in halves), halves


@pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")
@pytest.mark.parametrize(
    "sm", [87, *(pytest.param(sm, marks=pytest.mark.slow) for sm in (80, 90, 110))]
)
def test_tensor_cores_multiply_bf16_and_nothing_is_fp16(sm: int, rng: Rng, tmp_path: Path) -> None:
    case = PRODUCTS["MatMul with bias and ReLU"](rng)
    text = sass(replace(case, inputs={"x": (128, 96)}), sm, tmp_path / "k.cubin")
    assert "MMA" in text
    check_halves(text)
    pooled = Case([node("MaxPool", "x", "y", kernel_shape=[3, 3])], {"x": (1, 16, 9, 9)}, {})
    check_halves(sass(pooled, sm, tmp_path / "k.cubin"))


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")
@pytest.mark.parametrize("sm", [80, 87, 90, 110])
@pytest.mark.parametrize("name", ["depthwise", "attention", "LayerNormalization", "recurrence"])
def test_other_kernels_compile_without_fp16(name: str, sm: int, rng: Rng, tmp_path: Path) -> None:
    check_halves(sass(OTHERS[name](rng), sm, tmp_path / "k.cubin"))


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")
@pytest.mark.parametrize("sm", [80, 87, 90, 110])
@pytest.mark.parametrize("name", ["1x1", "3x3, strided, with ReLU", "grouped", "transposed"])
def test_convolutions_compile_without_fp16(name: str, sm: int, rng: Rng, tmp_path: Path) -> None:
    text = sass(PRODUCTS[name](rng), sm, tmp_path / "k.cubin")
    assert "MMA" in text
    check_halves(text)
