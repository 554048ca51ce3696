"""Products of INT8 with little depth -> calls of `strips`, beside those of `matmul`."""

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.gpu.call import Call, Constant, Tactic
from toolkit.gpu.dims.sizes import ceil_div, fixed, opt, power_of_two
from toolkit.gpu.draft import Draft
from toolkit.gpu.emit.endings import product_call
from toolkit.gpu.emit.parts import may_be_in_parts, product_in_parts
from toolkit.gpu.tiles import Product, Tile, product_tiles
from toolkit.gpu.view import View

_COLUMNS = 64  # of a block: a lane holds 16 neighbours of them
_LEAST_DEPTH = 32  # one product of the tensor cores
_DEEPEST = 256  # deeper strips leave too little shared memory for what is copied ahead
_DEEP = 256  # from here on rows are long to read: runs are longer, blocks lower
_SHORTEST = 3  # blocks that one program makes at least, or tiles are faster
# Rows and warps, the best first by times on an H200; copies run two blocks ahead.
_SHAPES = ((128, 4), (64, 4))
_STAGES = 3
_PARAMETERS = ("DEPTH", "COLUMNS", "A_ROW", "B_COLUMN", "Y_PITCH", "R_PITCH", "STEPS")


@dataclass(frozen=True, slots=True)
class _Strip:
    """Blocks of `rows` x 64 results, `run` of them one after the other by one program."""

    rows: int
    warps: int
    run: int


def product_tactics(
    draft: Draft,
    product: Product,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
) -> tuple[Tactic, ...]:
    """Return the ways to compute a product with `matmul`'s operands and constants."""

    def tactic(tile: Tile) -> Tactic:
        if tile.parts > 1:
            return product_in_parts(draft, product, operands, constants, tile)
        return (product_call(draft, product, operands, constants, tile),)

    tiles = product_tiles(product, draft.gpu, in_parts=may_be_in_parts(product, constants))
    return (
        *((call,) for call in strip_calls(draft, product, operands, constants)),
        *(tactic(tile) for tile in tiles),
    )


def strip_calls(
    draft: Draft,
    product: Product,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
) -> tuple[Call, ...]:
    """Return calls that compute a product of `matmul`'s operands and constants in strips.

    There are none where depth or columns do not suit, where there are too few rows for all SMs, or
    where tensor cores leave sums in other places than `kernels.lanes` says.
    """
    y = operands["y"]
    assert isinstance(y, View)
    if not _suits(draft, product, y, constants):
        return ()
    return tuple(
        _call(draft, product, operands, constants, _Strip(rows, warps, run))
        for rows, warps in _shapes(product, operands["residual"] is not None)
        if (run := _run(draft, product, rows)) >= _SHORTEST
    )


def _call(
    draft: Draft,
    product: Product,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
    strip: _Strip,
) -> Call:
    y, numbers = operands["y"], operands["numbers"]
    assert isinstance(y, View)
    runs = ceil_div(product.columns, strip.run * _COLUMNS)
    return draft.make_call(
        "strips",
        (ceil_div(product.rows, strip.rows) * runs, 1, 1),
        operands,
        {
            **{name: constants[name] for name in _PARAMETERS},
            "NUMBERS": numbers.elements if isinstance(numbers, View) else 0,
            "WARPS": strip.warps,
            "RUN": strip.run,
            "STAGES": _STAGES,
            "BLOCK_M": strip.rows,
            "BLOCK_N": _COLUMNS,
            "BLOCK_K": max(_LEAST_DEPTH, power_of_two(product.depth)),
        },
        writes=(y,),
        warps=strip.warps,
        stages=_STAGES,
    )


def _suits(draft: Draft, product: Product, y: View, constants: Mapping[str, Constant]) -> bool:
    dense = constants["A_COLUMN"] == 1 and constants["B_ROW"] == 1
    short = fixed(product.depth) and product.depth <= _DEEPEST
    wide = fixed(product.columns) and product.columns > _COLUMNS
    single = fixed(product.products) and product.products == 1
    integers = product.item_bytes == 1 and y.item_bytes == 1
    return draft.gpu.multiplies_from_shared and integers and single and dense and short and wide


def _shapes(product: Product, residual: bool) -> tuple[tuple[int, int], ...]:
    """Return which blocks are tried: low ones first where rows are long, else for a residual."""
    high, low = _SHAPES
    if product.depth >= _DEEP:
        return (low, high)
    return (high, low) if residual else (high,)


def _run(draft: Draft, product: Product, rows: int) -> int:
    """Return how many blocks of columns one program takes: fewer where SMs would be idle."""
    run = min(ceil_div(product.columns, _COLUMNS), 8 if product.depth >= _DEEP else 4)
    strips = ceil_div(opt(product.rows), rows)
    while run > 1 and strips * ceil_div(product.columns, run * _COLUMNS) < 2 * draft.gpu.sm_count:
        run //= 2
    return run
