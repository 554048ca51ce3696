"""MXFP8 and NVFP4: numbers that share a scale in blocks along the depth k of a product.

    MXFP8   x' = s e4m3(x / s),     s = 2^ceil(log2(max|x| / 448)),    blocks of 32
    NVFP4   x' = t b e2m1(x / (t b)),   b = e4m3(max|x| / (6 t)),   t = amax / (6 448), blocks of 16

The formats are those of the OCP Microscaling specification 1.0 and of TensorRT's DynamicQuantize.
The power of two is rounded up, as in cuDNN and TensorRT Model Optimizer, so that nothing saturates;
the specification leaves that open. t is that of a tensor. All else is rounded to nearest, ties to
even.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.graph.block_weights import BlockTensor
from toolkit.graph.dtypes import LARGEST_FLOAT8
from toolkit.quantize.quantize import is_activation
from toolkit.quantize.weights import constant_of

LARGEST_FLOAT4 = 6.0
SMALLEST_BLOCK_SCALE = 2.0**-9  # of E4M3
LOWEST_EXPONENT = -126  # a smaller scale is no normal float32
EXPONENT_BIAS = 127  # of E8M0
FIRST_SM = 100  # whose tensor cores multiply them (TensorRT, "Working with Quantized Types")
_RANKS = (2, 3)  # of an activation that TensorRT's DynamicQuantize reads


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A format; `bits` of a number with its share of a scale; `ranged`: t needs a range."""

    name: str
    block: int
    bits: float
    ranged: bool


MXFP8 = BlockFormat("MXFP8", 32, 8 + 8 / 32, ranged=False)
NVFP4 = BlockFormat("NVFP4", 16, 4 + 8 / 16, ranged=True)
FORMATS = (MXFP8, NVFP4)


@dataclass(frozen=True, slots=True)
class BlockFloats:
    """A weight: `stored` [as the weight]; `scales` [one for each block along `axis`].

    Scales are the exponents of E8M0 as UINT8, or E4M3 with the float32 `tensor_scale`.
    """

    stored: NDArray[Any]
    scales: NDArray[Any]
    axis: int
    block: int
    tensor_scale: NDArray[np.float32] | None

    def restored(self) -> NDArray[np.float32]:
        """Return the numbers that are stood for, float32."""
        if self.tensor_scale is None:
            steps = np.exp2(self.scales.astype(np.float32) - EXPONENT_BIAS)
        else:
            steps = self.scales.astype(np.float32) * self.tensor_scale
        restored: NDArray[np.float32] = self.stored.astype(np.float32) * self._repeated(steps)
        return restored

    def _repeated(self, steps: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.repeat(steps, self.block, self.axis)


def block_products(model: ir.Model) -> list[ir.Node]:
    """Return the MatMul and Gemm nodes with a constant finite float32 matrix, in graph order."""
    return [node for node in model.graph if _multiplies(node)]


def _multiplies(node: ir.Node) -> bool:
    if node.domain != "" or node.op_type not in ("Gemm", "MatMul") or len(node.inputs) < 2:
        return False
    x, value, weight = node.inputs[0], node.inputs[1], constant_of(node, 1)
    if x is None or value is None or weight is None or not is_activation(x):
        return False
    plain = not isinstance(value.const_value, BlockTensor) and not node.attributes.get_int(
        "transA", 0
    )
    return plain and weight.ndim == 2 and weight.size > 0 and bool(np.isfinite(weight).all())


def why_float(node: ir.Node, form: BlockFormat, amax: Mapping[str, float]) -> str:
    """Return why a product cannot have operands of a format, "": it can."""
    x, weight = node.inputs[0], constant_of(node, 1)
    assert x is not None
    assert weight is not None
    depth = weight.shape[depth_axis(node)]
    rank = None if x.shape is None else len(x.shape)
    if depth % form.block:
        return f"its depth {depth} is no multiple of {form.block}"
    if rank not in _RANKS:
        return f"{x.name!r} has {rank} axes, and TensorRT takes {_RANKS[0]} or {_RANKS[1]}"
    if form.ranged and not 0 < amax.get(str(x.name), 0.0) < np.inf:
        return f"{x.name!r} has no range"
    return ""


def depth_axis(node: ir.Node) -> int:
    """Return the axis of a product's weight that it sums over."""
    transposed: int = node.attributes.get_int("transB", 0)
    return transposed


def tensor_scale(amax: float) -> NDArray[np.float32]:
    """Return t, [], of a tensor whose largest magnitude is `amax`."""
    smallest = float(np.finfo(np.float32).tiny)
    return np.array(max(amax / (LARGEST_FLOAT4 * LARGEST_FLOAT8), smallest), np.float32)


def round_weight(weight: NDArray[np.float32], axis: int, form: BlockFormat) -> BlockFloats:
    """Round a matrix in blocks along an axis, whose size is a multiple of the block."""
    shape = list(weight.shape)
    shape[axis : axis + 1] = [shape[axis] // form.block, form.block]
    cut = weight.reshape(shape)
    largest = np.abs(cut).max(axis + 1, keepdims=True)
    if form == MXFP8:
        # amax = m 2^e with m in [0.5, 1), and 448 = 0.875 2^9
        mantissas, exponents = np.frexp(largest)
        rounded = np.maximum(exponents - 9 + (mantissas > 0.875), LOWEST_EXPONENT)
        stored = _cast(np.ldexp(cut, -rounded), LARGEST_FLOAT8, ml_dtypes.float8_e4m3fn)
        scales = (rounded + EXPONENT_BIAS).astype(np.uint8)
        return BlockFloats(stored.reshape(weight.shape), scales.squeeze(axis + 1), axis, 32, None)
    whole = tensor_scale(float(largest.max()))
    blocks = np.clip(largest / np.float32(LARGEST_FLOAT4) / whole, SMALLEST_BLOCK_SCALE, 448.0)
    scales = blocks.astype(ml_dtypes.float8_e4m3fn)
    steps = scales.astype(np.float32) * whole
    stored = _cast(cut / steps, LARGEST_FLOAT4, ml_dtypes.float4_e2m1fn)
    return BlockFloats(stored.reshape(weight.shape), scales.squeeze(axis + 1), axis, 16, whole)


def _cast(numbers: NDArray[np.float32], limit: float, dtype: type[np.generic]) -> NDArray[Any]:
    return np.clip(numbers, -limit, limit).astype(dtype)
