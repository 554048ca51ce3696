"""Sums in parts: where blocks are few, several share a depth, and a second call adds their sums."""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.gpu.emit.context import Draft
from toolkit.gpu.emit.epilogue import product_constants
from toolkit.gpu.ir.launch import Call, Tactic
from toolkit.gpu.ir.view import Shape, View, row_major
from toolkit.gpu.schedule.tiles import Product, Tile, row_tile
from toolkit.gpu.shapes.sizes import ceil_div, fixed
from toolkit.plugins import Constant

PLAIN = {"bias": None, "scale": None, "numbers": None, "residual": None}
PLAIN_STEPS = (("same", 0),)
# Of a picture of one pixel.
_ONES = (
    *("HEIGHT", "WIDTH", "OUT_HEIGHT", "OUT_WIDTH", "TAP_ROWS", "TAP_COLUMNS"),
    *("STRIDE_H", "STRIDE_W", "DILATION_H", "DILATION_W"),
)
_LEAST_ROWS = 8  # of a block that adds: 4 numbers of a row for each thread
_ENDING = ("bias", "scale", "numbers", "residual", "y")


def may_be_in_parts(product: Product, constants: Mapping[str, Constant]) -> bool:
    """Whether a product of `matmul` is one that a convolution of one pixel an image computes."""
    dense = constants["A_COLUMN"] == 1 and constants["B_ROW"] == 1
    single = fixed(product.products) and product.products == 1
    return dense and single and fixed(product.depth) and fixed(product.columns)


def product_in_parts(
    draft: Draft,
    product: Product,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
    tile: Tile,
) -> Tactic:
    """Return the calls that compute a product of `matmul`'s operands in `tile.parts`."""
    left, y = operands["a"], operands["y"]
    assert isinstance(left, View)
    assert isinstance(y, View)
    rows, columns = product.rows, product.columns
    sums = sums_in_parts(draft, y, left, (tile.parts, rows, columns))
    first = draft.make_call(
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
            "STEPS": PLAIN_STEPS,
            "PARTS": tile.parts,
            "LANES": 0,
            **product_constants(draft, tile, left.dtype),
        },
        writes=(sums,),
        warps=tile.warps,
        stages=tile.stages,
    )
    return first, adding_call(draft, sums, product, operands, constants)


def sums_in_parts(draft: Draft, y: View, left: View, shape: Shape) -> View:
    """Take memory for the sums of all parts, (parts, rows, columns) in FP32 or INT32."""
    dtype = "int32" if left.dtype == "int8" else "float32"
    sums = draft.allocate(f"{y.base} (parts)", dtype, shape, row_major(shape))
    return replace(sums, scale=left.scale)  # of INT8: what reads them rounds as such kernels do


def adding_call(
    draft: Draft,
    sums: View,
    product: Product,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
) -> Call:
    """Return the call that adds the sums of parts and ends the product as its one call would.

    `operands`: bias, scale, numbers, residual and y; `constants`: Y_PITCH, R_PITCH and STEPS.
    """
    rows, columns = product.rows, product.columns * product.products
    block, y = row_tile(rows, columns), operands["y"]
    assert isinstance(y, View)
    blocks = ceil_div(columns, block.columns)
    height = block.rows
    while height > _LEAST_ROWS and ceil_div(rows, height) * blocks < draft.gpu.sm_count:
        height //= 2
    return draft.make_call(
        "add_parts",
        (ceil_div(rows, height) * blocks, 1, 1),
        {"x": sums, **{name: operands[name] for name in _ENDING}, "pixels": rows},
        {
            "FILTERS": columns,
            **{name: constants[name] for name in ("Y_PITCH", "R_PITCH", "STEPS")},
            "PARTS": sums.shape[0],
            "BLOCK_M": height,
            "BLOCK_N": block.columns,
        },
        writes=(y,),
        warps=block.warps,
    )
