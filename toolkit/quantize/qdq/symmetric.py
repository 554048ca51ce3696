"""The Q/DQ nodes that have a plain equivalent: symmetric INT8, and what it makes of constants."""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from toolkit.errors import ImportModelError
from toolkit.quantize.qdq.nodes import Grid, grid_of, has_weight, is_dequantize, quantized_constant
from toolkit.quantize.quantize import QUANTIZED_OPS, weight_axis

# The zero point at which a type holds the symmetric grid.
_SYMMETRIC_ZERO: Mapping[ir.DataType, int] = {ir.DataType.INT8: 0, ir.DataType.UINT8: 128}


def symmetric_grid(node: ir.Node) -> Grid:
    """The grid of a node, checked: constant, symmetric, with usable scales."""
    grid = grid_of(node)
    where = f"Node {node.name!r} ({node.op_type})"
    if grid is None:
        raise ImportModelError(
            f"{where} computes its scale or zero point, which must be constants; fold them first."
        )
    bias = grid.dtype == ir.DataType.INT32 and is_dequantize(node)
    if grid.dtype not in _SYMMETRIC_ZERO and not (bias and quantized_constant(node) is not None):
        raise ImportModelError(
            f"{where} stores {grid.dtype.name}, but only INT8 and UINT8 (and INT32 for biases) are "
            "taken; quantize to INT8."
        )
    wanted = _SYMMETRIC_ZERO.get(grid.dtype, 0)
    wrong = grid.zero != wanted
    if wrong.any():
        raise ImportModelError(
            f"{where} has the zero point {grid.zero.flat[np.argmax(wrong)]} in "
            f"{grid.dtype.name}, but the symmetric one is {wanted}; quantize symmetrically."
        )
    if grid.blocked:
        raise ImportModelError(f"{where} has a scale for each block; quantize per channel.")
    usable = (grid.scale > 0) & np.isfinite(grid.scale)
    if not usable.all():
        raise ImportModelError(
            f"{where} has the scale {grid.scale.flat[np.argmin(usable)]}, but scales are positive "
            "and finite; calibrate the model again."
        )
    return grid


def along(part: np.ndarray, grid: Grid, array: np.ndarray, node: str) -> np.ndarray:
    """A scale or zero point in the shape that goes with an array."""
    if part.ndim == 0:
        return part.astype(np.float64 if array.dtype == np.int32 else np.float32)
    axis = grid.axis % max(array.ndim, 1)
    if part.ndim != 1 or axis >= array.ndim or array.shape[axis] != part.size:
        raise ImportModelError(
            f"Node {node!r} has scales of shape {list(part.shape)} along axis {grid.axis} for a "
            f"constant of shape {list(array.shape)}; they do not fit."
        )
    shaped = part.reshape([-1 if i == axis else 1 for i in range(array.ndim)])
    return shaped.astype(np.float64 if array.dtype == np.int32 else np.float32)


def rounded_by(array: np.ndarray, grid: Grid, node: str) -> np.ndarray:
    """What a Q node makes of a constant."""
    scale, zero = (along(part, grid, array, node) for part in (grid.scale, grid.zero))
    kind = np.iinfo(np.uint8 if grid.dtype == ir.DataType.UINT8 else np.int8)
    rounded: np.ndarray = np.clip(np.rint(array / scale) + zero, kind.min, kind.max)
    return rounded.astype(kind.dtype)


def weight_readers(node: ir.Node, weight: np.ndarray) -> Iterator[tuple[ir.Node, int | None]]:
    """The nodes that multiply with a dequantized weight, and its output-channel axis for each.

    A Transpose between them is looked through.
    """
    for use in node.outputs[0].uses():
        reader, index, shape = use.node, use.idx, weight
        order: tuple[int, ...] = tuple(range(weight.ndim))
        uses = [(reader, index)]
        if reader.op_type == "Transpose":
            default = list(reversed(order))
            order = tuple(reader.attributes.get_ints("perm", default) or default)
            shape = weight.transpose(order)
            uses = [(inner.node, inner.idx) for inner in reader.outputs[0].uses()]
        for product, operand in uses:
            if not has_weight(product) or weight.ndim < 2:
                continue
            row = QUANTIZED_OPS[product.op_type]
            if operand == row.weight:
                axis = weight_axis(product, row, shape)
                yield product, None if axis is None else order[axis]
