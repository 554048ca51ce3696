"""What products and convolutions have in common: constant weights, and what follows the sums."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.int8_gemm import Int8Epilogue
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.dtypes import ELEMENT_TYPES
from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.expressions import extract_scalars
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.network import Array, Operation
from toolkit.gpu.ir.view import View
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.tiles import GemmShape, Tile
from toolkit.gpu.shapes.sizes import ceil_div, fixed
from toolkit.plugins import Constant

_PICTURES = (
    "Conv",
    "ConvMaxPool",
    "DirectConv",
    "ConvUpsampleConcat",
    "ConvTranspose",
)  # their columns are channels, the second dimension


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What a kernel does with its sums: bias, factors and residual (or None), and steps.

    Sums of INT8 have `scale`, a factor for each column, a bias in INT32, and `scalars`: what steps
    multiply by on the way between grids.
    """

    bias: View | None
    scale: View | None
    scalars: View | None
    residual: str | None
    steps: tuple[ExprOp, ...]


def constant_weights(ctx: LoweringContext, op: Operation, at: int) -> Array:
    name = op.input(at)
    if name not in ctx.network.constants:
        raise NotCoveredError(
            f"node {op.name!r} ({op.kind}) has weights that are not constant ({name!r})"
        )
    return ctx.network.constants[name]


def epilogue_of(
    ctx: LoweringContext, group: Group, bias: str, integer: Int8Epilogue | None = None
) -> Epilogue:
    """Read what follows the product; a bias has a number for each column.

    A constant one is kept in FP32; one that is made while running is read as it lies.
    """
    op = group.root_operation
    packed, scale = None, None
    if integer is not None:
        scale = ctx.pack_constant(integer.factors, "float32")
        packed = None if integer.bias is None else ctx.pack_constant(integer.bias, "int32")
    elif bias and op.kind == "Conv" and bias not in ctx.network.constants:
        packed = ctx.read_row_major(bias)
    elif bias:
        values = constant_weights(ctx, op, 2)
        columns = ctx.network.shapes[op.outputs[0]][1 if op.kind in _PICTURES else -1]
        if values.size not in (1, columns) or (values.size > 1 and values.shape[-1] != columns):
            raise NotCoveredError(
                f"node {op.name!r} ({op.kind}) adds {list(values.shape)}; kernels take one number "
                f"for each of {columns} columns"
            )
        packed = ctx.pack_constant(np.broadcast_to(values.reshape(-1), (columns,)), "float32")
    expression = ctx.expression(op.outputs[0], group.after)
    residual = expression.operands[1] if len(expression.operands) > 1 else None
    steps, given = expression.ops, None
    if integer is not None:
        steps, scalars = extract_scalars(steps)
        given = ctx.pack_constant(np.array(scalars), "float32") if scalars else None
    return Epilogue(packed, scale, given, residual, steps)


def weight_matrix(ctx: LoweringContext, values: Array, dtype: str) -> View:
    """Pack the right operand of a product, (..., depth, columns), with the depth fastest.

    Tensor cores of sm_90 read INT8 in no other way, and FP16 the fastest. Each column begins at a
    multiple of 16 bytes, so that it can be copied in pieces of that size.
    """
    *batch, depth, columns = values.shape
    pitch = ceil_div(depth * ELEMENT_TYPES[dtype].bytes, 16) * 16 // ELEMENT_TYPES[dtype].bytes
    packed = np.zeros((*batch, columns, pitch), values.dtype)
    packed[..., :depth] = np.moveaxis(values, -1, -2)
    view = ctx.pack_constant(packed, dtype)
    order = (*range(len(batch)), len(batch) + 1, len(batch))
    return replace(view.permuted(order), shape=values.shape)


def gemm_constants(ctx: LoweringContext, tile: Tile, dtype: str) -> dict[str, Constant]:
    precision = "ieee"
    if dtype == "int8":
        precision = "int8" if ctx.gpu.has_matrix_units else "int8 as fp16"
    elif dtype == "float32":
        precision = ctx.gpu.fp32_precision
    return {
        "PRECISION": precision,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
    }


def gemm_launch(
    ctx: LoweringContext,
    product: GemmShape,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
    tile: Tile,
) -> KernelLaunch:
    """Return the call of `matmul` that computes a product, or several, with this tile."""
    left, y = operands["a"], operands["y"]
    assert isinstance(left, View)
    assert isinstance(y, View)
    blocks = ceil_div(product.rows, tile.rows) * ceil_div(product.columns, tile.columns)
    return ctx.make_launch(
        "matmul",
        (blocks, product.products, 1),
        operands,
        {
            **constants,
            "WHOLE_BLOCKS": fixed(product.depth) and product.depth % tile.depth == 0,
            "MMA_WARPS": mma_warps_of(ctx, left, y, tile),
            **gemm_constants(ctx, tile, left.dtype),
        },
        writes=(y,),
        warps=tile.warps,
        stages=tile.stages,
    )


def mma_warps_of(ctx: LoweringContext, left: View, y: View, tile: Tile) -> int:
    """Return the warps of a tile that stores INT8 where sums lie (`kernels.lanes`), or 0."""
    bytes_only = left.item_bytes == 1 and y.item_bytes == 1
    whole = tile.columns in (64, 128) and tile.rows % (16 * tile.warps) == 0
    suits = ctx.gpu.has_wgmma and bytes_only and whole
    return tile.warps if suits else 0


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
