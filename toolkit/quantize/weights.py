"""Weights and biases -> integers, for one step s_x of the activation that they meet.

    w_q = clip(round(w / s_w), -127, 127),   s_w = max|w_c| / 127 per output channel c
    b_q = round(b / (s_x s_w)), INT32

Where the weights of a channel are so small that its bias would leave INT32 (batch normalisation
switches channels off that way), s_w is raised to the least that holds the bias.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

INT8_MAX = 127.0
# What a bias may take of the INT32 in which products are summed up.
BIAS_MAX = 2.0**30
# Below it float32 loses digits, and runtimes divide by what they have flushed to zero.
LEAST_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """`stored` INT8 with `scale` float32 [channels] along `axis`, or [] where `axis` is None.

    `bias` INT32 [channels] with `bias_scale` float32 [channels]; None where it stays as it is.
    """

    stored: NDArray[np.int8]
    scale: NDArray[np.float32]
    axis: int | None
    bias: NDArray[np.int32] | None
    bias_scale: NDArray[np.float32] | None

    def restored(self) -> NDArray[np.float32]:
        """What DequantizeLinear makes of the weight."""
        return self.stored.astype(np.float32) * _along(self.scale, self.axis, self.stored.ndim)

    def restored_bias(self) -> NDArray[np.float32] | None:
        """What DequantizeLinear makes of the bias, [channels]."""
        if self.bias is None or self.bias_scale is None:
            return None
        return self.bias.astype(np.float32) * self.bias_scale


def quantize_weight(
    weight: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
    axis: int | None,
    step: float | None,
) -> IntegerWeight:
    """Quantize a weight and its bias.

    `axis` is the output-channel axis; None gives the whole weight one scale. `step` is s_x; None
    for an activation that stays in floating point, whose bias then stays so too. `bias` has one
    number for each channel in any shape.
    """
    channels = weight.shape[axis] if axis is not None else 1
    flat = np.zeros(channels) if bias is None or step is None else bias.reshape(-1)
    least = np.maximum(np.abs(flat) / BIAS_MAX, LEAST_SCALE) / (step or 1.0)
    others = tuple(i for i in range(weight.ndim) if i != axis)
    limit = np.abs(weight).max(axis=others).astype(np.float64)
    raised = np.maximum(limit / INT8_MAX, np.maximum(least, LEAST_SCALE))
    scale = np.asarray(raised if axis is not None else raised.reshape(-1)[0], np.float32)
    steps = np.rint(weight / _along(scale, axis, weight.ndim))
    stored = np.clip(steps, -INT8_MAX, INT8_MAX).astype(np.int8)
    if step is None or not flat.any():
        return IntegerWeight(stored, scale, axis, None, None)
    stored_bias = np.rint(flat / (scale.astype(np.float64) * step)).astype(np.int32)
    bias_scale = np.asarray(scale * step, np.float32)
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
    """The bias if it has one number for each output channel; others stay in floating point."""
    channels = weight.shape[axis] if axis is not None else 1
    return bias if bias is not None and bias.shape in {(channels,), (1, channels)} else None


def _along(scale: NDArray[np.float32], axis: int | None, rank: int) -> NDArray[np.float32]:
    others = tuple(i for i in range(rank) if i != axis)
    return scale if axis is None else np.expand_dims(scale, others)
