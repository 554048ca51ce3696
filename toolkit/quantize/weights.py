"""Quantize weights and biases, given the scale s_x of the activation.

    w_q = clip(round(w / s_w), -127, 127),   s_w = max|w_c| / 127 per output channel c
    b_q = round(b / (s_x s_w)), INT32

If the weights of a channel are so small that its bias would overflow INT32 (batch normalisation
switches channels off that way), s_w is raised to the smallest value that holds the bias.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

INT8_MAX = 127.0
# Largest |quantized bias|; it leaves the INT32 accumulator room for the products.
BIAS_MAX = 2.0**30
# Smaller scales are denormal: runtimes flush them to zero and then divide by them.
MIN_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """`stored` INT8 with `scale` float32 [channels] along `axis`, or [] where `axis` is None.

    `bias` INT32 [channels] with `bias_scale` float32 [channels]; None: the bias is not quantized.
    """

    stored: NDArray[np.int8]
    scale: NDArray[np.float32]
    axis: int | None
    bias: NDArray[np.int32] | None
    bias_scale: NDArray[np.float32] | None

    def restored(self) -> NDArray[np.float32]:
        """The dequantized weight."""
        return dequantized(self.stored, self.scale, self.axis)

    def restored_bias(self) -> NDArray[np.float32] | None:
        """The dequantized bias, [channels]."""
        if self.bias is None or self.bias_scale is None:
            return None
        return self.bias.astype(np.float32) * self.bias_scale


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight as the engine file has it: entry * scales along an axis, or the entry itself."""

    entry: str
    scales: NDArray[np.float32] | None = None
    axis: int | None = None


def dequantized(
    stored: NDArray[np.int8] | NDArray[np.int32], scale: NDArray[np.float32], axis: int | None
) -> NDArray[np.float32]:
    """The numbers that INT8, or INT32 of a bias, stand for; `scale` along `axis`."""
    wide = np.float64 if stored.dtype == np.int32 else np.float32
    restored = stored.astype(wide) * _along(scale, axis, stored.ndim).astype(wide)
    return restored.astype(np.float32)


def quantize_weight(
    weight: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
    axis: int | None,
    activation_scale: float | None,
) -> IntegerWeight:
    """Quantize a weight and its bias.

    `axis`: output-channel axis, None: per tensor. `activation_scale`: s_x; None if the activation
    stays in floating point, and then so does the bias. `bias`: one number per channel, any shape.
    """
    channels = weight.shape[axis] if axis is not None else 1
    flat = np.zeros(channels) if bias is None or activation_scale is None else bias.reshape(-1)
    min_scale = np.maximum(np.abs(flat) / BIAS_MAX, MIN_SCALE) / (activation_scale or 1.0)
    reduced_axes = tuple(i for i in range(weight.ndim) if i != axis)
    max_abs = np.abs(weight).max(axis=reduced_axes).astype(np.float64)
    channel_scale = np.maximum(max_abs / INT8_MAX, np.maximum(min_scale, MIN_SCALE))
    scale = np.asarray(
        channel_scale if axis is not None else channel_scale.reshape(-1)[0], np.float32
    )
    rounded = np.rint(weight / _along(scale, axis, weight.ndim))
    stored = np.clip(rounded, -INT8_MAX, INT8_MAX).astype(np.int8)
    if activation_scale is None or not flat.any():
        return IntegerWeight(stored, scale, axis, None, None)
    stored_bias = np.rint(flat / (scale.astype(np.float64) * activation_scale)).astype(np.int32)
    bias_scale = np.asarray(scale * activation_scale, np.float32)
    return IntegerWeight(stored, scale, axis, stored_bias, bias_scale)


def constant_of(node: ir.Node, index: int | None) -> NDArray[np.float32] | None:
    """The float32 constant that a node has as operand `index`."""
    value = node.inputs[index] if index is not None and index < len(node.inputs) else None
    if value is None or value.const_value is None or value.dtype != ir.DataType.FLOAT:
        return None
    array: NDArray[np.float32] = value.const_value.numpy()
    return array


def bias_per_channel(
    bias: NDArray[np.float32] | None, weight: NDArray[np.float32], axis: int | None
) -> NDArray[np.float32] | None:
    """The bias if it has one number per output channel, else None (it stays in floating point)."""
    channels = weight.shape[axis] if axis is not None else 1
    return bias if bias is not None and bias.shape in {(channels,), (1, channels)} else None


def _along(scale: NDArray[np.float32], axis: int | None, rank: int) -> NDArray[np.float32]:
    other_axes = tuple(i for i in range(rank) if i != axis)
    return scale if axis is None else np.expand_dims(scale, other_axes)
