"""Selection by size, interpreted on the CPU, against NumPy's stable order."""

import gpu_interpreter
import numpy as np
import pytest
from gpu_graphs import Case, node
from onnx import helper

from toolkit.gpu.emit.top_k import MAX_COLUMNS
from toolkit.gpu.errors import NotCoveredError

pytest.importorskip("triton", reason="Triton is not installed")


def case(shape: tuple[int, ...], count: int, dtype: str = "float32", **attributes: int) -> Case:
    top = helper.make_node("TopK", ["x", "k"], ["v", "i"], name="top", **attributes)
    dtypes = {"x": dtype, "v": dtype, "i": "int64"}
    return Case([top], {"x": shape}, {"k": np.array([count], np.int64)}, ("v", "i"), dtypes)


def best(x: np.ndarray, count: int, axis: int, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `count` in order; equal ones by their places."""
    keys = -x if largest else x
    indices = np.take(np.argsort(keys, axis=axis, kind="stable"), np.arange(count), axis)
    return np.take_along_axis(x, indices, axis), indices


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize(
    ("shape", "axis", "count"),
    [
        *(((3, 40), 1, 5), ((3, 40), 0, 3), ((2, 7, 9), 1, 7), ((5,), 0, 1)),
        pytest.param((2, 1000), -1, 300, marks=pytest.mark.slow),
        ((2, 300), -1, 90),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "int64", "int32"])
def test_the_first_by_size(
    dtype: str,
    shape: tuple[int, ...],
    axis: int,
    count: int,
    largest: int,
    rng: np.random.Generator,
) -> None:
    top = case(shape, count, dtype, axis=axis, largest=largest)
    x = rng.integers(-9, 10, shape).astype(dtype)  # many are equal
    if dtype == "int64":
        x += 2**40
    found = gpu_interpreter.run(top.lower("fp16"), {"x": x})
    values, indices = best(x, count, axis, largest)
    assert np.array_equal(found["v"], values)
    assert np.array_equal(found["i"], indices)


def test_onnxruntime_selects_the_same(rng: np.random.Generator) -> None:
    top = case((4, 500), 50, axis=1)
    feeds = top.feeds(rng)
    found = gpu_interpreter.run(top.lower("fp32"), feeds)
    for name, truth in top.truth(feeds).items():
        assert np.array_equal(found[name], truth)


def test_nan_is_the_largest_and_comes_once() -> None:
    x = np.array([[1, np.nan, 3, np.inf, np.nan, -np.inf]], np.float32)
    found = gpu_interpreter.run(case((1, 6), 6, axis=1).lower("fp32"), {"x": x})
    assert found["i"].tolist() == [[1, 4, 3, 2, 0, 5]]


def test_a_transposed_tensor_is_read_in_place(rng: np.random.Generator) -> None:
    top = helper.make_node("TopK", ["t", "k"], ["v", "i"], name="top", axis=1)
    nodes = [node("Transpose", "x", "t", perm=[0, 2, 1]), top]
    transposed = Case(
        nodes,
        {"x": (2, 30, 5)},
        {"k": np.array([2], np.int64)},
        ("v", "i"),
        {"i": "int64"},
    )
    assert [call.spec.title for call in transposed.lower("fp32").launches] == ["top_k"]
    feeds = transposed.feeds(rng)
    found = gpu_interpreter.run(transposed.lower("fp32"), feeds)
    for name, truth in transposed.truth(feeds).items():
        assert np.array_equal(found[name], truth)


def test_rows_up_to_the_limit() -> None:
    case((1, MAX_COLUMNS), 1, axis=1).lower("fp16")
    with pytest.raises(
        NotCoveredError, match=f"{MAX_COLUMNS + 1} elements; kernels take {MAX_COLUMNS}"
    ):
        case((1, MAX_COLUMNS + 1), 1, axis=1).lower("fp16")
