"""Figures of errors, at their edges and against NumPy on random tensors."""

import math

import numpy as np
import pytest

from device.error_figures import cosine, sqnr_db


@pytest.mark.parametrize(
    ("signal", "noise", "expected"),
    [
        (0.0, 0.0, math.inf),
        (1.0, 0.0, math.inf),
        (0.0, 1.0, -math.inf),
        (1.0, math.inf, -math.inf),
        (math.inf, math.inf, -math.inf),
        (1.0, 1.0, 0.0),
        (1e-300, 1e300, -6000.0),  # the quotient is no float64
        (1e300, 1e-300, 6000.0),
    ],
)
def test_a_ratio_at_its_edges(signal: float, noise: float, expected: float) -> None:
    assert sqnr_db(signal, noise) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("signal", "power", "product", "expected"),
    [(0.0, 0.0, 0.0, 1.0), (0.0, 2.0, 0.0, 0.0), (2.0, 0.0, 0.0, 0.0), (0.1, 0.1, 0.1, 1.0),
     (0.1, 0.1, -0.1, -1.0), (1.0, 4.0, 1.0, 0.5)],
)  # fmt: skip
def test_a_cosine_at_its_edges(
    signal: float, power: float, product: float, expected: float
) -> None:
    assert cosine(signal, power, product) == expected


def test_figures_are_those_of_numpy(rng: np.random.Generator) -> None:
    r = rng.normal(size=1000)
    t = r + rng.normal(size=1000, scale=0.1)
    sums = float(r @ r), float(t @ t), float(r @ t)
    noise = float(np.linalg.norm(r - t) ** 2)
    assert sqnr_db(sums[0], noise) == pytest.approx(10 * np.log10(np.var(r) / np.var(r - t)), 1e-2)
    assert cosine(*sums) == pytest.approx(float(r @ t / np.linalg.norm(r) / np.linalg.norm(t)))
