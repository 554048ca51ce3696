"""Arrays to and from the DLA's memory formats.

    chw16, chw32   [N, ceil(C / v), H, W, v], v = 32 bytes / element: 16 float16 or 32 int8

Channels beyond C are zero. Source: NVIDIA TensorRT Developer Guide, "I/O Formats".
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from device.engine.tensorrt_check import VECTOR_BYTES
from device.engine.tensorrt_manifest import Port

Array = npt.NDArray[Any]


def packed_shape(port: Port, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a port's memory for a tensor of `shape`, [N, C, H, W]."""
    n, c, h, w = four(shape)
    vector = VECTOR_BYTES // np.dtype(port.dtype).itemsize
    return n, -(-c // vector), h, w, vector


def pack(port: Port, array: Array, memory: Array) -> None:
    """Write a tensor into a port's memory: quantized by its scale, unless it is int8 already.

    Halves round away from zero, as the DLA rounds.
    """
    n, c, h, w = four(array.shape)
    values = _stored(port, array).reshape(n, c, h, w)
    vector = memory.shape[-1]
    whole = c // vector
    memory[:, :whole] = (
        values[:, : whole * vector].reshape(n, whole, vector, h, w).transpose(0, 1, 3, 4, 2)
    )
    if c % vector:
        memory[:, whole] = 0
        memory[:, whole, :, :, : c % vector] = values[:, whole * vector :].transpose(0, 2, 3, 1)


def unpack(port: Port, memory: Array, target: Array) -> None:
    """Write a port's memory into a tensor, as reals unless the tensor is int8."""
    n, c, h, w = four(target.shape)
    values = memory.transpose(0, 1, 4, 2, 3).reshape(n, -1, h, w)[:, :c].reshape(target.shape)
    if port.scale is not None and target.dtype != np.int8:
        np.multiply(values, np.float32(port.scale), out=target, casting="unsafe")
    else:
        np.copyto(target, values, casting="unsafe")


def four(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return a shape with four dimensions, as the DLA has it: 1 for those that are missing."""
    n, c, h, w = (*shape, 1, 1, 1, 1)[:4]
    return n, c, h, w


def _stored(port: Port, array: Array) -> Array:
    if port.scale is None:
        return array.astype(np.float16)
    if array.dtype == np.int8:
        return array
    scaled = array / np.float32(port.scale)
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    stored: Array = np.clip(rounded, -128, 127).astype(np.int8)
    return stored
