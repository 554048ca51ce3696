"""GPTQ against its formula from the paper, and against rounding to nearest."""

import numpy as np
import pytest

from toolkit.quantize.int4.rounding import (
    DAMPING,
    MAX_DEPTH,
    feedback_factor,
    round_to_nearest,
    round_with_feedback,
)


def _operands(rng: np.random.Generator, rows: int, depth: int) -> np.ndarray:
    """Rows whose channels go together, as activations do."""
    directions = rng.normal(size=(depth // 4, depth))
    mixed = rng.normal(size=(rows, depth // 4)) @ directions
    return np.asarray(mixed + 0.3 * rng.normal(size=(rows, depth)), np.float32)


def _reference(weight: np.ndarray, x: np.ndarray, block: int) -> np.ndarray:
    """Optimal brain quantization, a row of the depth after the other (Frantar, 2022, eq. 2 and 3).

    The inverse Hessian is that of the rows that are left, and every column is its own problem.
    """
    depth, columns = weight.shape
    hessian = x.astype(np.float64).T @ x.astype(np.float64)
    hessian += DAMPING * np.trace(hessian) / depth * np.eye(depth)
    rest, restored = weight.astype(np.float64), np.empty(weight.shape)
    for k in range(depth):
        if k % block == 0:
            low = np.minimum(rest[k : k + block].min(0), 0)
            high = np.maximum(rest[k : k + block].max(0), 0)
            scale = np.float32((np.float32(high) - np.float32(low)) / 15)
            zero = np.rint(-np.float32(low) / scale)
        inverse = np.linalg.inv(hessian[k:, k:])
        for n in range(columns):
            integer = min(max(np.rint(rest[k, n] / scale[n]) + zero[n], 0), 15)
            restored[k, n] = (integer - zero[n]) * scale[n]
            change = (rest[k, n] - restored[k, n]) / inverse[0, 0]
            rest[k:, n] -= change * inverse[:, 0]
    return restored


@pytest.mark.parametrize(("depth", "block"), [(64, 16), (72, 32), (24, 128)])
def test_it_is_what_the_paper_computes(depth: int, block: int, rng: np.random.Generator) -> None:
    weight = rng.normal(size=(depth, 12)).astype(np.float32)
    x = _operands(rng, 96, depth)
    upper = feedback_factor(x)
    assert upper is not None
    rounded = round_with_feedback(weight, upper, block)
    assert rounded.integers.max() <= 15
    expected = _reference(weight, x, block)
    # A number between two integers may go either way by rounding errors of float64.
    np.testing.assert_allclose(rounded.restored(), expected, rtol=1e-5, atol=1e-5)


def test_the_factor_of_a_deep_operand_is_that_of_the_inverse_hessian(
    rng: np.random.Generator,
) -> None:
    """A triangular matrix of this depth is inverted in parts of other sizes."""
    depth = 1030
    x = _operands(rng, 1500, depth)
    upper = feedback_factor(x)
    assert upper is not None
    np.testing.assert_array_equal(upper, np.triu(upper))
    hessian = x.T.astype(np.float64) @ x
    hessian += DAMPING * np.trace(hessian) / depth * np.eye(depth)
    np.testing.assert_allclose(upper.T @ upper @ hessian, np.eye(depth), atol=1e-9)


@pytest.mark.parametrize("columns", [40, 1100])
def test_its_error_is_below_that_of_rounding_to_nearest(
    columns: int, rng: np.random.Generator
) -> None:
    """Columns beyond a strip are rounded like the first."""
    depth = 128
    weight = rng.normal(size=(depth, columns)).astype(np.float32)
    x = _operands(rng, 512, depth)
    upper = feedback_factor(x)
    assert upper is not None
    feedback, nearest = (
        np.square(x @ (one.restored() - weight)).sum(0)
        for one in (round_with_feedback(weight, upper, 32), round_to_nearest(weight, 32))
    )
    assert feedback.sum() < 0.6 * nearest.sum()
    assert np.mean(feedback < nearest) > 0.95


def test_operands_that_say_nothing_have_no_factor() -> None:
    x = np.zeros((4, 16), np.float32)
    assert feedback_factor(x) is None
    x[0, 0] = np.inf
    assert feedback_factor(x) is None
    assert feedback_factor(np.ones((1, MAX_DEPTH + 1), np.float32)) is None


def test_a_channel_that_is_always_zero_is_rounded_to_nearest(rng: np.random.Generator) -> None:
    x, weight = _operands(rng, 64, 32), rng.normal(size=(32, 8)).astype(np.float32)
    x[:, 5] = 0
    upper = feedback_factor(x)
    assert upper is not None
    rounded = round_with_feedback(weight, upper, 32)
    half = np.repeat(rounded.scales, 32, 0)[5] / 2
    assert (np.abs(rounded.restored()[5] - weight[5]) <= half * 1.001).all()
