"""Reductions and the places of extremes, interpreted on the CPU, against onnx's reference."""

from collections.abc import Mapping

import gpu_interpreter
import numpy as np
import pytest
from gpu_graphs import Case, node
from onnx.reference import ReferenceEvaluator

pytest.importorskip("triton", reason="Triton is not installed")

LIMITS = {"fp32": 1e-4, "fp16": 1e-2}
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "fp16"])


def check(case: Case, precision: str, feeds: Mapping[str, np.ndarray], exact: bool = False) -> None:
    actual = gpu_interpreter.run(case.lower(precision), feeds)["y"]
    (truth,) = ReferenceEvaluator(case.model()).run(None, dict(feeds))
    truth = np.asarray(truth).astype(case.dtypes.get("y", "float32"))
    assert actual.shape == truth.shape
    assert actual.dtype == truth.dtype
    if exact:
        assert np.array_equal(actual, truth)
    else:
        assert np.linalg.norm(actual - truth) < LIMITS[precision] * np.linalg.norm(truth)


SUMS = ["ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare"]
OTHERS = ["ReduceMax", "ReduceMin", "ReduceLogSumExp", "ReduceLogSum", "ReduceProd"]
AXES = [[-1], [0], [1], [0, 2], [1, 2], [2, 3], [0, 1, 2, 3], None]


@PRECISIONS
@pytest.mark.parametrize("op", [*SUMS, *OTHERS])
@pytest.mark.parametrize("axes", AXES)
def test_reductions(
    op: str, axes: list[int] | None, precision: str, rng: np.random.Generator
) -> None:
    weights = {} if axes is None else {"axes": np.array(axes, np.int64)}
    keep = int(rng.integers(2))
    nodes = [node(op, "x" if axes is None else "x axes", "y", keepdims=keep)]
    feeds = {"x": rng.uniform(0.5, 1.2, (2, 3, 4, 5)).astype(np.float32)}
    check(Case(nodes, {"x": (2, 3, 4, 5)}, weights), precision, feeds)


@pytest.mark.parametrize("shape", [(3, 40000), (40000, 3), (70, 3, 70)])
@pytest.mark.parametrize("op", ["ReduceMean", "ReduceMax", "ReduceLogSumExp"])
def test_long_rows(op: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    axes = [at for at, size in enumerate(shape) if size > 3]
    case = Case([node(op, "x axes", "y")], {"x": shape}, {"axes": np.array(axes, np.int64)})
    check(case, "fp32", case.feeds(rng))


def test_no_axes_may_mean_no_reduction(rng: np.random.Generator) -> None:
    nodes = [node("ReduceSum", "x axes", "y", noop_with_empty_axes=1)]
    case = Case(nodes, {"x": (2, 3)}, {"axes": np.zeros(0, np.int64)})
    check(case, "fp32", case.feeds(rng), exact=True)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_extremes_that_come_several_times(
    op: str, last: int, axis: int, rng: np.random.Generator
) -> None:
    shape = (4, 30, 9)
    keep = int(rng.integers(2))
    nodes = [node(op, "x", "y", axis=axis, keepdims=keep, select_last_index=last)]
    feeds = {"x": rng.integers(0, 4, shape).astype(np.float32)}
    check(Case(nodes, {"x": shape}, {}, dtypes={"y": "int64"}), "fp16", feeds, exact=True)


@pytest.mark.parametrize("last", [0, 1])
def test_extremes_of_long_rows(last: int, rng: np.random.Generator) -> None:
    nodes = [node("ArgMax", "x", "y", axis=1, select_last_index=last)]
    feeds = {"x": rng.integers(0, 2000, (2, 20000)).astype(np.float32)}
    check(Case(nodes, {"x": (2, 20000)}, {}, dtypes={"y": "int64"}), "fp32", feeds, exact=True)


INTEGERS = ["ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceSumSquare"]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("op", INTEGERS)
def test_integers_are_exact(op: str, dtype: str, rng: np.random.Generator) -> None:
    nodes = [node(op, "x axes", "y", keepdims=0)]
    case = Case(
        nodes,
        {"x": (3, 5, 4)},
        {"axes": np.array([0, 2], np.int64)},
        dtypes={"x": dtype, "y": dtype},
    )
    feeds = {"x": rng.integers(-5, 6, (3, 5, 4)).astype(dtype)}
    check(case, "fp16", feeds, exact=True)


@PRECISIONS
@pytest.mark.parametrize("shape", [(2, 3, 7, 5), (2, 3, 40), (2, 3, 4, 5, 6)])
@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
def test_global_pools(
    op: str, shape: tuple[int, ...], precision: str, rng: np.random.Generator
) -> None:
    case = Case([node(op, "x", "y")], {"x": shape}, {})
    feeds = case.feeds(rng)
    actual = gpu_interpreter.run(case.lower(precision), feeds)["y"]
    truth = case.truth(feeds)["y"]
    assert actual.shape == truth.shape
    assert np.linalg.norm(actual - truth) < LIMITS[precision] * np.linalg.norm(truth)
