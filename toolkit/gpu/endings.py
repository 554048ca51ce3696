"""What products and convolutions have in common: constant weights, and what follows the sums."""

from dataclasses import dataclass

import numpy as np

from toolkit.gpu.call import Constant
from toolkit.gpu.draft import Draft
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.expressions import Step
from toolkit.gpu.fusion import Group
from toolkit.gpu.integer_products import IntegerEnding
from toolkit.gpu.network import Array, Operation
from toolkit.gpu.tiles import Tile
from toolkit.gpu.view import View


@dataclass(frozen=True, slots=True)
class Ending:
    """What a kernel does with its sums: bias, factors and residual (or None), and steps.

    Sums of INT8 have `scale`, a factor for each column, and a bias in INT32.
    """

    bias: View | None
    scale: View | None
    residual: str | None
    steps: tuple[Step, ...]


def constant_weights(draft: Draft, op: Operation, at: int) -> Array:
    name = op.input(at)
    if name not in draft.network.constants:
        raise NotCoveredError(
            f"node {op.name!r} ({op.kind}) has weights that are not constant ({name!r})"
        )
    return draft.network.constants[name]


def ending_of(
    draft: Draft, group: Group, bias: str, integer: IntegerEnding | None = None
) -> Ending:
    """Read what follows the product; a bias is constant and has a number for each column."""
    op = group.root_operation
    packed, scale = None, None
    if integer is not None:
        scale = draft.constant(integer.factors, "float32")
        packed = None if integer.bias is None else draft.constant(integer.bias, "int32")
    elif bias:
        values = constant_weights(draft, op, 2)
        columns = draft.network.shapes[op.outputs[0]][1 if op.kind == "Conv" else -1]
        if values.size not in (1, columns) or (values.size > 1 and values.shape[-1] != columns):
            raise NotCoveredError(
                f"node {op.name!r} ({op.kind}) adds {list(values.shape)}; kernels take one number "
                f"for each of {columns} columns"
            )
        packed = draft.constant(np.broadcast_to(values.reshape(-1), (columns,)), "float32")
    expression = draft.expression(op.outputs[0], group.after)
    residual = expression.operands[1] if len(expression.operands) > 1 else None
    return Ending(packed, scale, residual, expression.steps)


def weight_matrix(draft: Draft, values: Array, dtype: str) -> View:
    """Pack the right operand of a product, (..., depth, columns).

    Integers lie with the depth fastest: tensor cores of sm_90 read them in no other way.
    """
    if dtype != "int8":
        return draft.constant(values, dtype)
    order = (*range(values.ndim - 2), values.ndim - 1, values.ndim - 2)
    return draft.constant(values.transpose(order), dtype).permuted(order)


def product_constants(draft: Draft, tile: Tile, dtype: str) -> dict[str, Constant]:
    precision = "ieee"
    if dtype == "int8":
        precision = "int8" if draft.gpu.has_matrix_units else "int8 as fp16"
    elif dtype == "float32":
        precision = draft.gpu.fp32_precision
    return {
        "PRECISION": precision,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
    }


def operand_strides(
    operand: str, row: int, column: int, batch: int = 0, outer: int = 0
) -> dict[str, Constant]:
    return {
        f"{operand}_OUTER": outer,
        f"{operand}_BATCH": batch,
        f"{operand}_ROW": row,
        f"{operand}_COLUMN": column,
    }


def result_strides(operand: str, row: int, batch: int = 0, outer: int = 0) -> dict[str, Constant]:
    return {f"{operand}_OUTER": outer, f"{operand}_BATCH": batch, f"{operand}_PITCH": row}
