"""Sums in parts: where blocks are few, several share a depth, and a second call adds their sums."""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.epilogue import gemm_constants
from toolkit.gpu.ir.launch import KernelLaunch, Tactic
from toolkit.gpu.ir.view import Shape, View, row_major
from toolkit.gpu.schedule.tiles import GemmShape, Tile, row_tile
from toolkit.gpu.shapes.sizes import ceil_div, fixed
from toolkit.plugins import Constant

PLAIN = {"bias": None, "scale": None, "scalars": None, "residual": None}
IDENTITY_EPILOGUE = (("same", 0),)
# Of a picture of one pixel.
_ONES = (
    *("HEIGHT", "WIDTH", "OUT_HEIGHT", "OUT_WIDTH", "TAP_ROWS", "TAP_COLUMNS"),
    *("STRIDE_H", "STRIDE_W", "DILATION_H", "DILATION_W"),
)
_LEAST_ROWS = 8  # of a block that adds: 4 numbers of a row for each thread
_ENDING = ("bias", "scale", "scalars", "residual", "y")


def may_split_k(product: GemmShape, constants: Mapping[str, Constant]) -> bool:
    """Whether a product of `matmul` is one that a convolution of one pixel an image computes."""
    dense = constants["A_COLUMN"] == 1 and constants["B_ROW"] == 1
    single = fixed(product.products) and product.products == 1
    return dense and single and fixed(product.depth) and fixed(product.columns)


def split_k_gemm(
    ctx: LoweringContext,
    product: GemmShape,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
    tile: Tile,
) -> Tactic:
    """Return the calls that compute a product of `matmul`'s operands in `tile.parts`."""
    left, y = operands["a"], operands["y"]
    assert isinstance(left, View)
    assert isinstance(y, View)
    rows, columns = product.rows, product.columns
    sums = split_k_partials(ctx, y, left, (tile.parts, rows, columns))
    first = ctx.make_launch(
        "convolution",
        (ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns), 1, tile.parts),
        {"x": left, "weights": operands["b"], **PLAIN, "y": sums, "batch": rows},
        {
            **dict.fromkeys(_ONES, 1),
            "PAD_TOP": 0,
            "PAD_LEFT": 0,
            "CHANNELS": product.depth,
            "X_PITCH": constants["A_ROW"],
            "FILTERS": columns,
            "W_PITCH": constants["B_COLUMN"],
            "Y_PITCH": columns,
            "R_PITCH": 0,
            "EPILOGUE": IDENTITY_EPILOGUE,
            "SPLIT_K": tile.parts,
            "MMA_WARPS": 0,
            **gemm_constants(ctx, tile, left.dtype),
        },
        writes=(sums,),
        warps=tile.warps,
        stages=tile.stages,
    )
    return first, split_k_reduce_launch(ctx, sums, product, operands, constants)


def split_k_partials(ctx: LoweringContext, y: View, left: View, shape: Shape) -> View:
    """Take memory for the sums of all parts, (parts, rows, columns) in FP32 or INT32."""
    dtype = "int32" if left.dtype == "int8" else "float32"
    sums = ctx.allocate(f"{y.base} (parts)", dtype, shape, row_major(shape))
    return replace(sums, scale=left.scale)  # of INT8: what reads them rounds as such kernels do


def split_k_reduce_launch(
    ctx: LoweringContext,
    sums: View,
    product: GemmShape,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
) -> KernelLaunch:
    """Return the call that adds the sums of parts and ends the product as its one call would.

    `operands`: bias, scale, numbers, residual and y; `constants`: Y_PITCH, R_PITCH and STEPS.
    """
    rows, columns = product.rows, product.columns * product.products
    block, y = row_tile(rows, columns), operands["y"]
    assert isinstance(y, View)
    blocks = ceil_div(columns, block.columns)
    height = block.rows
    while height > _LEAST_ROWS and ceil_div(rows, height) * blocks < ctx.gpu.sm_count:
        height //= 2
    return ctx.make_launch(
        "split_k_reduce",
        (ceil_div(rows, height) * blocks, 1, 1),
        {"x": sums, **{name: operands[name] for name in _ENDING}, "pixels": rows},
        {
            "FILTERS": columns,
            **{name: constants[name] for name in ("Y_PITCH", "R_PITCH", "EPILOGUE")},
            "SPLIT_K": sums.shape[0],
            "BLOCK_M": height,
            "BLOCK_N": block.columns,
        },
        writes=(y,),
        warps=block.warps,
    )
