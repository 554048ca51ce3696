"""The launch of an element-wise expression on views: over all elements, or by transposing tiles."""

from collections.abc import Sequence
from math import prod

from toolkit.gpu.emit.launches import element_launch, make_launch
from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.expressions import requantize_ops
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.view import View
from toolkit.gpu.schedule.loop_order import order_of, tiles_of
from toolkit.gpu.shapes.sizes import ceil_div, opt, power_of_two
from toolkit.plugins import Constant

_MIN_BLOCK = 1024  # elements of a block of an element-wise kernel
# Bytes of a block that only copies, and of one that computes: 1024 take a quarter longer.
_COPY_BLOCK_BYTES = 8192
_COMPUTE_BLOCK_BYTES = 2048
_MIN_BLOCKS_PER_SM = 4
_TILE_ELEMENTS = 2048  # of a transposing tile
_MAX_TILE_COLUMNS = 64
_OPERANDS = ("x0", "x1", "x2", "x3")  # parameters of the kernels


def elementwise_launch(
    y: View, operands: Sequence[View], ops: Sequence[ExprOp], sm_count: int
) -> KernelLaunch:
    """Return the launch that writes `ops` of the operands, which have the shape of y.

    `ops` work on stored values; without any the first operand is copied and requantized.
    """
    ops = tuple(ops) or requantize_ops(operands[0].scale, y.scale)
    order = order_of(y.shape, [v.strides for v in (y, *operands)])
    tiles = tiles_of(order)
    present = dict(zip(_OPERANDS, operands, strict=False))
    tensors = {name: present.get(name) for name in _OPERANDS}
    if tiles is None:
        block = _block(y, _COMPUTE_BLOCK_BYTES if ops else _COPY_BLOCK_BYTES, sm_count)
        constants: dict[str, Constant] = {
            "SHAPE": (0, *order.shape[1:]),
            "STRIDES": order.strides[1:],
            "Y_STRIDES": order.strides[0],
            "EXPRESSION": ops,
        }
        return element_launch("elementwise", y, tensors, constants, block=block)
    rows, columns = power_of_two(tiles.rows), power_of_two(tiles.columns)
    block_m = min(rows, _TILE_ELEMENTS // min(columns, _MAX_TILE_COLUMNS))
    block_n = min(columns, _TILE_ELEMENTS // block_m)
    tiles_per_matrix = ceil_div(tiles.rows, block_m) * ceil_div(tiles.columns, block_n)
    return make_launch(
        "transpose_tiles",
        (prod(tiles.shape) * tiles_per_matrix, 1, 1),
        {**tensors, "y": y},
        {
            "ROWS": tiles.rows,
            "COLUMNS": tiles.columns,
            "SHAPE": (0, *tiles.shape[1:]),
            "STRIDES": tiles.strides,
            "ROW_STRIDES": tiles.row_strides,
            "COLUMN_STRIDES": tiles.column_strides,
            "EXPRESSION": ops,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
        },
        writes=(y,),
    )


def _block(y: View, max_bytes: int, sm_count: int) -> int:
    """Return the elements of a block: fewer where SMs would be idle."""
    block, min_blocks = max_bytes // y.item_bytes, _MIN_BLOCKS_PER_SM * sm_count
    while block > _MIN_BLOCK and opt(y.elements) < min_blocks * block:
        block //= 2
    return max(block, _MIN_BLOCK)
