"""Products of matrices of every rank, interpreted on the CPU, against onnxruntime."""

from dataclasses import replace

import gpu_interpreter
import numpy as np
import pytest
from gpu_graphs import ORIN, Case, node, normal

from toolkit.gpu.ir.launch import TunableOp
from toolkit.gpu.lower import lower_segment
from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

LIMITS = {"fp32": 1e-5, "fp16": 1e-2}
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "fp16"])


def check(case: Case, precision: str, rng: np.random.Generator, gpu: GpuTarget = ORIN) -> None:
    feeds = case.feeds(rng)
    outputs = gpu_interpreter.run(case.lower(precision, gpu), feeds)
    for name, truth in case.truth(feeds).items():
        assert outputs[name].shape == truth.shape
        difference = np.linalg.norm(outputs[name].astype(np.float64) - truth)
        # A result of one element may cancel to nearly 0: its error is that of its terms.
        assert difference < LIMITS[precision] * max(np.linalg.norm(truth), 1.0), name


SHAPES = [
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((5, 3), (3,)),
    ((3,), (2, 3, 4)),
    ((2, 5, 3), (3,)),
    ((2, 5, 3), (3, 4)),
    ((5, 3), (2, 3, 4)),
    ((2, 5, 3), (2, 3, 4)),
    ((7, 1, 3), (3, 4)),
    ((2, 1, 5, 3), (1, 6, 3, 4)),
    ((2, 1, 3, 5, 3), (4, 1, 3, 4)),
    ((2, 3, 1, 5, 3), (1, 1, 4, 3, 2)),
]


@PRECISIONS
@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_matmul_repeats_as_numpy(
    left: tuple[int, ...], right: tuple[int, ...], precision: str, rng: np.random.Generator
) -> None:
    check(Case([node("MatMul", "a b", "y")], {"a": left, "b": right}, {}), precision, rng)


@pytest.mark.parametrize("constant", [True, False])
def test_a_residual_is_added_to_every_product(constant: bool, rng: np.random.Generator) -> None:
    nodes = [node("MatMul", "a b", "c"), node("Add", "c r", "y")]
    inputs = {"a": (2, 3, 5, 4), "r": (2, 3, 5, 6)}
    weights = {"b": normal(rng, 4, 6)} if constant else {}
    case = Case(nodes, inputs if constant else {**inputs, "b": (2, 3, 4, 6)}, weights)
    assert [call.spec.title for call in case.lower("fp32").launches] == ["gemm strided"]
    check(case, "fp32", rng)


@PRECISIONS
@pytest.mark.parametrize("sm", [72, 87, 90])
@pytest.mark.parametrize("moved", [False, True])
def test_factors_and_a_residual_join_a_transposed_product(
    moved: bool, sm: int, precision: str, rng: np.random.Generator
) -> None:
    """As ConvNeXt scales its branches, before or behind the transposition; beyond FP16, too."""
    weights = {"w": normal(rng, 4, 6), "b": normal(rng, 6), "k": rng.normal(size=6)}
    weights["k"] = weights["k"].reshape((6, 1, 1) if moved else (6,)).astype(np.float32)
    weights["k"].reshape(-1)[0] = 0
    scaled = node("Mul", "t k" if moved else "k c", "d")
    turned = node("Transpose", "c" if moved else "d", "t", perm=[0, 3, 1, 2])
    nodes = [
        node("MatMul", "a w", "m"),
        node("Add", "m b", "c"),
        *((turned, scaled) if moved else (scaled, turned)),
        node("Add", "d r" if moved else "r t", "e"),
        node("GlobalAveragePool", "e", "y"),
    ]
    case = Case(nodes, {"a": (2, 5, 3, 4), "r": (2, 6, 5, 3)}, weights)
    gpu = GpuTarget(sm, 14)
    (joined,) = [op for op in case.lower(precision, gpu).ops if "MatMul:m" in op.nodes]
    assert "Mul:d" in joined.nodes
    assert ("Add:e" in joined.nodes) == gpu.has_matrix_units
    check(case, precision, rng, gpu)
    large = {name: values * np.float32(1e5) for name, values in case.feeds(rng).items()}
    large_truth = case.truth(large)["y"]
    wide = frozenset(["a", "r", "m", "c", "t", "d", "e", "y"])
    program = lower_segment(case.segment().model, gpu=gpu, precision="fp16", wide=wide)
    difference = gpu_interpreter.run(program, large)["y"] - large_truth
    assert np.linalg.norm(difference) < 1e-3 * np.linalg.norm(large_truth)


@PRECISIONS
@pytest.mark.parametrize("second", ["itself", "convolution", "input"])
def test_a_sum_stays_outside_a_transposed_product_where_another_kernel_takes_it(
    second: str, precision: str, rng: np.random.Generator
) -> None:
    weights = {"w": normal(rng, 4, 6), "v": normal(rng, 6, 3, 1, 1)}
    operand = {"itself": "t", "convolution": "v0", "input": "r"}[second]
    pool = second == "itself"
    nodes = [
        node("MatMul", "a w", "m"),
        node("Transpose", "m", "t", perm=[0, 3, 1, 2]),
        *([node("Conv", "p v", "v0")] if second == "convolution" else []),
        node("Add", f"t {operand}", "e"),
        node("GlobalAveragePool" if pool else "Relu", "e", "y"),
    ]
    extra = {"itself": {}, "convolution": {"p": (2, 3, 5, 3)}, "input": {"r": (2, 6, 5, 3)}}
    case = Case(nodes, {"a": (2, 5, 3, 4), **extra[second]}, weights)
    gpu = GpuTarget(90, 14)
    (product,) = [op for op in case.lower(precision, gpu).ops if "MatMul:m" in op.nodes]
    assert "Add:e" not in product.nodes
    check(case, precision, rng, gpu)


@PRECISIONS
@pytest.mark.parametrize("shape", [(5, 264), (2, 3, 264)])
def test_a_deep_product_of_few_rows_is_the_same_in_parts(
    shape: tuple[int, ...], precision: str, rng: np.random.Generator
) -> None:
    nodes = [node("MatMul", "a w", "m"), node("Add", "m b", "s"), node("Add", "s r", "y")]
    weights = {"w": normal(rng, 264, 24), "b": normal(rng, 24)}
    case = Case(nodes, {"a": shape, "r": (*shape[:-1], 24)}, weights)
    program = case.lower(precision, GpuTarget(sm=90, sm_count=8, exhaustive=True))
    (op,) = [one for one in program.ops if len(one.tactics) > 1]
    split_k = [tactic for tactic in op.tactics if len(tactic) == 2]
    assert split_k
    feeds = case.feeds(rng)
    truth = case.truth(feeds)["y"]
    for tactic in split_k:
        assert [call.spec.title for call in tactic] == ["gemm strided", "split_k_reduce"]
        chosen = tuple(TunableOp(w.nodes, (tactic,)) if w is op else w for w in program.ops)
        actual = gpu_interpreter.run(replace(program, ops=chosen), feeds)["y"]
        difference = np.linalg.norm(actual.astype(np.float64) - truth)
        assert difference < LIMITS[precision] * np.linalg.norm(truth)


@PRECISIONS
@pytest.mark.parametrize("order", [[0, 2, 1, 3], [2, 0, 1, 3], [1, 0, 3, 2]])
def test_products_read_transposed_operands_in_place(
    order: list[int], precision: str, rng: np.random.Generator
) -> None:
    shape = (2, 5, 3, 4)
    moved = tuple(shape[at] for at in order)
    nodes = [node("Transpose", "a", "t", perm=order), node("MatMul", "t b", "y")]
    case = Case(nodes, {"a": shape, "b": (*moved[:2], moved[3], 6)}, {})
    assert [call.spec.title for call in case.lower("fp32").launches] == ["gemm strided"]
    check(case, precision, rng)


@pytest.mark.parametrize("biased", [True, False])
def test_constant_weights_are_packed_once(biased: bool, rng: np.random.Generator) -> None:
    weights = {"w": normal(rng, 64, 48), "b": normal(rng, 48)}
    nodes = [node("MatMul", "x w", "p" if biased else "y")]
    nodes += [node("Add", "p b", "y")] if biased else []
    program = Case(nodes, {"x": (4, 64)}, weights).lower("fp16")
    bias_bytes = 512  # with what aligns it
    assert 64 * 48 * 2 <= len(program.weights) <= 64 * 48 * 2 + biased * bias_bytes


def test_an_int8_matrix_by_an_int8_vector(rng: np.random.Generator) -> None:
    nodes = []
    for name in ("x", "v"):
        nodes.append(node("QuantizeLinear", f"{name} scale zero", f"{name}i"))
        nodes.append(node("DequantizeLinear", f"{name}i scale zero", f"{name}r"))
    nodes.append(node("MatMul", "xr vr", "y"))
    weights = {"scale": np.float32(1 / 16), "zero": np.int8(0)}
    case = Case(nodes, {"x": (2, 3, 40), "v": (40,)}, weights)
    feeds = case.feeds(rng)
    x, v = (np.clip(np.rint(feeds[name] * 16), -128, 127) / 16 for name in ("x", "v"))
    np.testing.assert_array_equal(gpu_interpreter.run(case.lower("fp32"), feeds)["y"], x @ v)
