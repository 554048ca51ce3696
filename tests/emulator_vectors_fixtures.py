"""Roundings that the DLA's is not."""

import numpy as np


def floor(value: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return np.asarray(value, np.int64) >> np.minimum(shift, 63)


def half_up(value: np.ndarray, shift: np.ndarray) -> np.ndarray:
    below = floor(value, np.maximum(shift, 1) - np.int64(1))
    return np.where(np.asarray(shift) == 0, value, (below + 1) >> 1)


def half_even(value: np.ndarray, shift: np.ndarray) -> np.ndarray:
    up = half_up(value, shift)
    number, places = np.asarray(value, np.int64), np.minimum(shift, 63)
    tie = (places > 0) & (
        number - (floor(number, places) << places) == np.int64(1) << np.maximum(places - 1, 0)
    )
    return np.where(tie & (up % 2 == 1), up - 1, up)


def towards_zero(value: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return np.sign(value) * floor(np.abs(value), shift)


WRONG = (floor, half_up, half_even, towards_zero)
