"""Selection by size, interpreted on the CPU, against NumPy's stable order."""

import gpu_interpreter
import numpy as np
import pytest
from gpu_graphs import Case, node
from onnx import helper

from toolkit.gpu.emit.top_k import MAX_RANKED, MAX_SELECTED
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


def kernels(top: Case) -> list[str]:
    return [call.spec.title for call in top.lower("fp32").launches]


def check_selection(top: Case, x: np.ndarray, expected: tuple[np.ndarray, np.ndarray]) -> None:
    actual = gpu_interpreter.run(top.lower("fp16"), {"x": x})
    assert np.array_equal(actual["v"], expected[0])
    assert np.array_equal(actual["i"], expected[1])


def check_truth(top: Case, rng: np.random.Generator) -> None:
    feeds = top.feeds(rng)
    actual = gpu_interpreter.run(top.lower("fp32"), feeds)
    for name, truth in top.truth(feeds).items():
        assert np.array_equal(actual[name], truth)


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
    check_selection(top, x, best(x, count, axis, largest))


@pytest.mark.parametrize(
    ("shape", "count", "titles"),
    [
        ((4, 500), 50, ["top_k"]),
        ((1, 120_000), 600, ["select_top", "select_top", "top_k"]),
    ],
)
def test_onnxruntime_selects_the_same(
    shape: tuple[int, ...], count: int, titles: list[str], rng: np.random.Generator
) -> None:
    top = case(shape, count, axis=1)
    assert kernels(top) == titles
    check_truth(top, rng)


def test_nan_is_the_largest_and_comes_once() -> None:
    x = np.array([[1, np.nan, 3, np.inf, np.nan, -np.inf]], np.float32)
    outputs = gpu_interpreter.run(case((1, 6), 6, axis=1).lower("fp32"), {"x": x})
    assert outputs["i"].tolist() == [[1, 4, 3, 2, 0, 5]]


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
    assert kernels(transposed) == ["top_k"]
    check_truth(transposed, rng)


@pytest.mark.parametrize(
    ("dtype", "shape", "axis", "count", "largest"),
    [
        ("float32", (2, 20_000), 1, 30, 1),
        ("int64", (8_193, 2), 0, 3, 0),  # the last chunk has one column
        ("int32", (2, 9_000), 1, 900, 1),  # and here fewer than are selected
        ("float32", (1, 9_000), 1, 900, 0),
    ],
)
def test_long_rows_are_selected_from_in_chunks(
    dtype: str,
    shape: tuple[int, ...],
    axis: int,
    count: int,
    largest: int,
    rng: np.random.Generator,
) -> None:
    top = case(shape, count, dtype, axis=axis, largest=largest)
    x = rng.integers(-99, 100, shape).astype(dtype)  # many are equal, in all chunks
    assert kernels(top)[-2:] == ["select_top", "top_k"]
    check_selection(top, x, best(x, count, axis, largest))


@pytest.mark.parametrize("largest", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_zeros_are_equal_and_nan_is_the_largest_of_many(largest: int) -> None:
    x = np.tile(np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf], np.float32), 800)[None]
    count = 2000  # through the equal ones of the second kind
    top = case((1, 4800), count, axis=1, largest=largest)
    actual = gpu_interpreter.run(top.lower("fp32"), {"x": x})
    keys = np.where(np.isnan(x), 2, np.sign(x) * np.isinf(x))  # -1, 0, 1, 2
    indices = np.argsort(-keys if largest else keys, kind="stable")[:, :count]
    assert np.array_equal(actual["i"], indices)


def test_rows_up_to_the_limit() -> None:
    case((1, MAX_RANKED), MAX_RANKED, axis=1).lower("fp16")
    case((1, MAX_RANKED + 1), MAX_SELECTED, axis=1).lower("fp16")
    reason = f"selects {MAX_SELECTED + 1} from {MAX_RANKED + 1} elements; kernels take {MAX_RANKED}"
    with pytest.raises(NotCoveredError, match=reason):
        case((1, MAX_RANKED + 1), MAX_SELECTED + 1, axis=1).lower("fp16")
