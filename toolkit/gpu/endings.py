"""What products and convolutions have in common: constant weights, and what follows the sums."""

from dataclasses import dataclass

import numpy as np

from toolkit.gpu.call import Constant
from toolkit.gpu.draft import Draft
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.expressions import Step, expression_of
from toolkit.gpu.fusion import Group
from toolkit.gpu.network import Array, Operation
from toolkit.gpu.tiles import Tile
from toolkit.gpu.view import View


@dataclass(frozen=True, slots=True)
class Ending:
    """What a kernel does with its sums: bias and residual (or None), and steps."""

    bias: View | None
    residual: str | None
    steps: tuple[Step, ...]


def constant_weights(draft: Draft, op: Operation, at: int) -> Array:
    name = op.input(at)
    if name not in draft.network.constants:
        raise NotCoveredError(
            f"node {op.name!r} ({op.kind}) has weights that are not constant ({name!r})"
        )
    return draft.network.constants[name]


def ending_of(draft: Draft, group: Group, bias: str) -> Ending:
    """Read what follows the product; a bias is constant and has a number for each column."""
    op = group.root_operation
    packed = None
    if bias:
        values = constant_weights(draft, op, 2)
        columns = draft.network.shapes[op.outputs[0]][1 if op.kind == "Conv" else -1]
        if values.size not in (1, columns) or (values.size > 1 and values.shape[-1] != columns):
            raise NotCoveredError(
                f"node {op.name!r} ({op.kind}) adds {list(values.shape)}; kernels take one number "
                f"for each of {columns} columns"
            )
        packed = draft.constant(np.broadcast_to(values.reshape(-1), (columns,)), "float32")
    expression = expression_of(op.outputs[0], group.after, draft.network.constants)
    residual = expression.operands[1] if len(expression.operands) > 1 else None
    return Ending(packed, residual, expression.steps)


def product_constants(draft: Draft, tile: Tile) -> dict[str, Constant]:
    half = draft.dtype == "float16"
    return {
        "PRECISION": "ieee" if half else draft.gpu.fp32_precision,
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
