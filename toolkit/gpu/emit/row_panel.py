"""Products of INT8 with little depth -> calls of `strips` and `kept`, beside `matmul`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.epilogue import gemm_launch
from toolkit.gpu.emit.persistent_gemm import persistent_gemm_launches
from toolkit.gpu.emit.split_k import may_split_k, split_k_gemm
from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.launch import KernelLaunch, Tactic
from toolkit.gpu.ir.network import Network
from toolkit.gpu.ir.view import View
from toolkit.gpu.passes.quantized import ROUND
from toolkit.gpu.schedule.tiles import GemmShape, Tile, gemm_tiles
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt, power_of_two
from toolkit.plugins import Constant

_COLUMNS = 64  # of a block: a lane holds 16 neighbours of them
_LEAST_DEPTH = 32  # one product of the tensor cores
_DEEPEST = 256  # deeper strips leave too little shared memory for what is copied ahead
_DEEP = 256  # from here on rows are long to read: runs are longer, blocks lower
_SHORTEST = 3  # blocks that one program makes at least, or tiles are faster
# Rows and warps, the best first by times on an H200; copies run two blocks ahead.
_SHAPES = ((128, 4), (64, 4))
_STAGES = 3
_PARAMETERS = ("DEPTH", "COLUMNS", "A_ROW", "B_COLUMN", "Y_PITCH", "R_PITCH")
_WORD = 4  # neighbouring results that are made at once
_ROUNDED = ("relu_int8_by", "round_int8_by")  # last steps that make words


@dataclass(frozen=True, slots=True)
class _RowPanel:
    """Blocks of `rows` x 64 results, `run` of them one after the other by one program."""

    rows: int
    warps: int
    run: int


def gemm_tactics(
    ctx: LoweringContext,
    product: GemmShape,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
) -> tuple[Tactic, ...]:
    """Return the ways to compute a product with `matmul`'s operands and constants."""

    def tactic(tile: Tile) -> Tactic:
        if tile.parts > 1:
            return split_k_gemm(ctx, product, operands, constants, tile)
        return (gemm_launch(ctx, product, operands, constants, tile),)

    tiles = gemm_tiles(product, ctx.gpu, split_k=may_split_k(product, constants))
    return (
        *((call,) for call in row_panel_launches(ctx, product, operands, constants)),
        *(tactic(tile) for tile in tiles),
        *((call,) for call in persistent_gemm_tactics(ctx, product, operands, constants)),
    )


def row_panel_launches(
    ctx: LoweringContext,
    product: GemmShape,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
) -> tuple[KernelLaunch, ...]:
    """Return calls that compute a product of `matmul`'s operands and constants in strips.

    There are none where depth or columns do not suit, where there are too few rows for all SMs, or
    where tensor cores leave sums in other places than `kernels.lanes` says.
    """
    y = operands["y"]
    assert isinstance(y, View)
    if not _suits(ctx, product, y, constants):
        return ()
    return tuple(
        _call(ctx, product, operands, constants, _RowPanel(rows, warps, run))
        for rows, warps in _shapes(product, operands["residual"] is not None)
        if (run := _run(ctx, product, rows)) >= _SHORTEST
    )


def persistent_gemm_tactics(
    ctx: LoweringContext,
    product: GemmShape,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
    picture: tuple[int, ...] | None = None,
) -> tuple[KernelLaunch, ...]:
    """Return calls that compute a product as strips do, with weights that stay in shared memory.

    Few columns suit, too. `picture`: how rows lie that are pixels apart (`kernels.lanes`).
    """
    y = operands["y"]
    assert isinstance(y, View)
    if not _suits(ctx, product, y, constants):
        return ()
    strips = _call(ctx, product, operands, constants, _RowPanel(*_SHAPES[0], 1))
    return persistent_gemm_launches(strips, picture, ctx.gpu)


def _call(
    ctx: LoweringContext,
    product: GemmShape,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
    strip: _RowPanel,
) -> KernelLaunch:
    y, numbers, residual = operands["y"], operands["scalars"], operands["residual"]
    assert isinstance(y, View)
    assert not isinstance(residual, int)
    steps = cast("tuple[ExprOp, ...]", constants["EPILOGUE"])
    words = _in_words(product, y, residual, constants, steps)
    runs = ceil_div(product.columns, strip.run * _COLUMNS)
    return ctx.make_launch(
        "row_panel_gemm",
        (ceil_div(product.rows, strip.rows) * runs, 1, 1),
        operands,
        {
            **{name: constants[name] for name in _PARAMETERS},
            "EPILOGUE": _of_rectified(ctx.network, residual, steps) if words else steps,
            "INT8X4": words,
            "SCALARS": numbers.elements if isinstance(numbers, View) else 0,
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


def _in_words(
    product: GemmShape,
    y: View,
    residual: View | None,
    constants: Mapping[str, Constant],
    steps: tuple[ExprOp, ...],
) -> bool:
    """Whether four neighbours of a row are the bytes of a word, of a residual, too."""
    places = [product.columns, y.offset, constants["Y_PITCH"]]
    if residual is not None:
        if residual.scale is None:  # real numbers of two or four bytes
            return False
        places += [residual.offset, constants["R_PITCH"]]
    whole = all(isinstance(n, int) and fixed(n) and n % _WORD == 0 for n in places)
    return whole and steps[-1][0] in _ROUNDED


def _of_rectified(
    network: Network, residual: View | None, steps: tuple[ExprOp, ...]
) -> tuple[ExprOp, ...]:
    """Return the steps, of a residual that is never negative with the shorter way to read it."""
    if residual is None or steps[0][:2] != ("real_by", 1):
        return steps
    makers = {name: op for op in network.operations for name in op.outputs}
    rounded = makers.get(residual.base)
    rectified = makers.get(rounded.inputs[0]) if rounded and rounded.kind == ROUND else None
    if rectified is None or rectified.kind != "Relu":
        return steps
    return (("rectified_by", *steps[0][1:]), *steps[1:])


def _suits(
    ctx: LoweringContext, product: GemmShape, y: View, constants: Mapping[str, Constant]
) -> bool:
    dense = constants["A_COLUMN"] == 1 and constants["B_ROW"] == 1
    short = fixed(product.depth) and product.depth <= _DEEPEST
    single = fixed(product.products) and product.products == 1
    integers = product.item_bytes == 1 and y.item_bytes == 1
    return ctx.gpu.has_wgmma and integers and single and dense and short and fixed(product.columns)


def _shapes(product: GemmShape, residual: bool) -> tuple[tuple[int, int], ...]:
    """Return which blocks are tried: low ones first where rows are long, else for a residual."""
    high, low = _SHAPES
    if product.depth >= _DEEP:
        return (low, high)
    return (high, low) if residual else (high,)


def _run(ctx: LoweringContext, product: GemmShape, rows: int) -> int:
    """Return how many blocks of columns one program takes: fewer where SMs would be idle."""
    run = min(ceil_div(product.columns, _COLUMNS), 8 if product.depth >= _DEEP else 4)
    strips = ceil_div(opt(product.rows), rows)
    while run > 1 and strips * ceil_div(product.columns, run * _COLUMNS) < 2 * ctx.gpu.sm_count:
        run //= 2
    return run
