"""A convolution of the DLA, written from its description."""

import itertools

import numpy as np

from device.dla_emulator.arithmetic.convolution import Geometry


def convolved(x: np.ndarray, weight: np.ndarray, shape: Geometry) -> np.ndarray:
    """Sum the products one tap at a time in int64, position by position."""
    batch, channels, height, width = x.shape
    outputs = weight.shape[0]
    rows, columns = shape.positions(height, width)
    result = np.zeros((batch, outputs, rows, columns), np.int64)
    per_group = channels // shape.groups
    for p, q, r, s in itertools.product(
        range(rows), range(columns), range(shape.kernel[0]), range(shape.kernel[1])
    ):
        y = p * shape.strides[0] + r * shape.dilations[0] - shape.pads[0]
        z = q * shape.strides[1] + s * shape.dilations[1] - shape.pads[1]
        if not (0 <= y < height and 0 <= z < width):
            continue
        for k in range(outputs):
            group = k // (outputs // shape.groups)
            part = x[:, group * per_group : (group + 1) * per_group, y, z].astype(np.int64)
            result[:, k, p, q] += part @ weight[k, :, r, s].astype(np.int64)
    return result
