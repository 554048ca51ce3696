"""A matrix product by tiles: a block computes a tile of y, for every loader and on every GPU.

Tiles that share the depth among blocks (split-K) are ranked with the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.epilogue import precision_of
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.emit.split_k import partial_sums, split_k_reduce_launch, split_k_refusal
from toolkit.gpu.ir.gemm import (
    DenseLoader,
    GemmProblem,
    Im2col3dLoader,
    Im2colLoader,
    MatrixStrides,
)
from toolkit.gpu.ir.launch import KernelLaunch, Tactic, TunableOp
from toolkit.gpu.ir.view import View
from toolkit.gpu.ir.windows import window_constants
from toolkit.gpu.schedule.tiles import Tile, gemm_tiles
from toolkit.gpu.shapes.sizes import ceil_div, fixed, power_of_two
from toolkit.gpu.target import GpuTarget
from toolkit.graph.dtypes import FLOAT8
from toolkit.plugins import Constant

# A tile of a power of two columns and a rest, for NCHW results: 128 pixels of FP32 are 512 bytes.
_NCHW_ROWS, _NCHW_WARPS = 128, 4
_MIN_COLUMNS, _MAX_COLUMNS = 16, 64
_CONVERTED_BYTES = 4  # at once, as `toolkit.gpu.kernels.int8` does


def add_gemm(ctx: LoweringContext, nodes: tuple[str, ...], problem: GemmProblem) -> None:
    """Add the matrix product that `nodes` compute, with a tactic for each of the best tiles."""
    ctx.ops.append(TunableOp(nodes, _tactics(ctx, problem)))


def _tactics(ctx: LoweringContext, problem: GemmProblem) -> tuple[Tactic, ...]:
    split_k = split_k_refusal(problem) is None
    dense = split_k and isinstance(problem.left, DenseLoader)
    columns = _vector_columns(problem) if dense else None
    tiles = gemm_tiles(
        problem.shape, ctx.gpu, split_k=split_k, resident=dense, vector_columns=columns
    )
    if problem.layout == "nchw" and ctx.gpu.has_wgmma:
        tiles = (*_two_width_tiles(problem.shape.columns, tiles[0]), *tiles)
    return tuple(_tactic(ctx, problem, tile) for tile in tiles)


def _vector_columns(problem: GemmProblem) -> int | None:
    """Return the fewest columns of a tile of one row; None: there is none of FP8."""
    views = (problem.left.view, problem.y, problem.residual)
    dtypes = {view.dtype for view in views if view is not None}
    if FLOAT8 in dtypes:
        return None
    return _CONVERTED_BYTES if "int8" in dtypes else 1


def _tactic(ctx: LoweringContext, problem: GemmProblem, tile: Tile) -> Tactic:
    if tile.rows == 1:
        return (_vector_launch(problem, tile),)
    if tile.split_k == 1:
        return (tiled_launch(ctx, problem, tile),)
    partial = partial_sums(ctx, problem, tile.split_k)
    return tiled_launch(ctx, partial, tile), split_k_reduce_launch(ctx, problem, partial.y)


def tiled_launch(ctx: LoweringContext, problem: GemmProblem, tile: Tile) -> KernelLaunch:
    """Return the launch of `gemm` with the problem's loader and layout."""
    operands = _operands(problem, tile)
    row_blocks = tile.programs or ceil_div(problem.shape.rows, tile.rows)
    column_blocks = ceil_div(problem.shape.columns, tile.columns + tile.tail_columns)
    y, residual = problem.y_strides, problem.residual_strides
    return make_launch(
        "resident_gemm" if tile.programs else "gemm",
        (row_blocks * column_blocks, *operands.grid),
        {
            "a": problem.left.view,
            "b": problem.right,
            **problem.epilogue_operands(),
            "y": problem.y,
            **operands.parameters,
        },
        {
            **operands.constants,
            "DEPTH": problem.shape.depth,
            "COLUMNS": problem.shape.columns,
            "INNER": problem.inner,
            "Y_STRIDES": (y.outer or operands.group_columns, y.batch, y.row),
            "Y_COLUMN": y.column if problem.layout == "nchw" else None,
            "R_STRIDES": (residual.outer or operands.group_columns, residual.batch, residual.row),
            "EPILOGUE": problem.epilogue.ops,
            "WHOLE_BLOCKS": fixed(problem.shape.depth) and problem.shape.depth % tile.depth == 0,
            "SPLIT_K": tile.split_k,
            "DIAGONAL": operands.diagonal,
            "TAIL_N": tile.tail_columns,
            **tile_constants(problem, tile, ctx.gpu),
        },
        writes=(problem.y,),
        warps=tile.warps,
        stages=tile.stages,
    )


def _vector_launch(problem: GemmProblem, tile: Tile) -> KernelLaunch:
    """Return the launch of `matrix_vector`."""
    return make_launch(
        "matrix_vector",
        (ceil_div(problem.shape.columns, tile.columns), 1, 1),
        {
            "a": problem.left.view,
            "b": problem.right,
            **problem.epilogue_operands(),
            "y": problem.y,
        },
        {
            "DEPTH": problem.shape.depth,
            "COLUMNS": problem.shape.columns,
            "B_PITCH": problem.right_strides.column,
            "EPILOGUE": problem.epilogue.ops,
            "BLOCK_N": tile.columns,
            "BLOCK_K": tile.depth,
        },
        writes=(problem.y,),
        warps=tile.warps,
    )


def tile_constants(problem: GemmProblem, tile: Tile, gpu: GpuTarget) -> dict[str, Constant]:
    """Return precision and tile as constants of a kernel."""
    return {
        "PRECISION": precision_of(gpu, problem.right.dtype),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
    }


@dataclass(frozen=True, slots=True)
class _Operands:
    """What the loader decides of a launch.

    `grid`: its second and third size. `group_columns`: elements of y from group to group.
    `diagonal`: all input channels where blocks of filters read channels of their own.
    """

    grid: tuple[int, int]
    parameters: Mapping[str, View | int]
    constants: Mapping[str, Constant]
    group_columns: int = 0
    diagonal: int | None = None


_NO_WINDOW: Mapping[str, Constant] = dict.fromkeys(
    ("SIZE", "OUT", "CHANNELS", "TAPS", "STRIDE", "DILATION", "PAD")
)


def _operands(problem: GemmProblem, tile: Tile) -> _Operands:
    left = problem.left
    if isinstance(left, DenseLoader):
        return _strided(problem, left, tile)
    if isinstance(left, Im2colLoader):
        return _im2col(problem, left, tile)
    if isinstance(left, Im2col3dLoader):
        return _im2col_3d(problem, left)
    raise TypeError(f"the tiled schedule has no loader for {type(left).__name__}")


def _strided(problem: GemmProblem, left: DenseLoader, tile: Tile) -> _Operands:
    constants = {
        "LOADER": "strided",
        "batch": None,
        **_NO_WINDOW,
        "A_STRIDES": _all_strides(left.strides),
        "B_STRIDES": _all_strides(problem.right_strides),
    }
    rows: dict[str, int] = {"rows": problem.shape.rows}
    grid = (problem.shape.batch, tile.split_k)
    if problem.layout == "nchw":  # stores of neighbouring rows need the constant
        return _Operands(grid, {}, {**constants, **rows})
    return _Operands(grid, rows, constants)


def _im2col(problem: GemmProblem, left: Im2colLoader, tile: Tile) -> _Operands:
    return _Operands(
        (left.groups, tile.split_k),
        {"batch": left.batch},
        {
            "LOADER": "im2col",
            "rows": None,
            "SIZE": left.size,
            "OUT": left.output_size,
            "CHANNELS": left.channels,
            **window_constants(left.window),
            "A_STRIDES": (left.pitch,),
            "B_STRIDES": _all_strides(problem.right_strides),
        },
        problem.shape.columns,
        problem.shape.columns if left.diagonal else None,
    )


def _im2col_3d(problem: GemmProblem, left: Im2col3dLoader) -> _Operands:
    return _Operands(
        (left.groups, left.phases),
        {"batch": left.view.shape[0]},
        {
            "LOADER": "transposed" if left.transposed else "im2col_3d",
            "rows": None,
            "SIZE": left.size,
            "OUT": left.output_size,
            "CHANNELS": left.channels,
            "TAPS": left.taps,
            "STRIDE": left.step,
            "DILATION": left.dilations,
            "PAD": left.pads,
            "A_STRIDES": left.strides,
            "B_STRIDES": _all_strides(problem.right_strides),
        },
        problem.shape.columns,
    )


def _all_strides(strides: MatrixStrides) -> tuple[int, int, int, int]:
    return strides.outer, strides.batch, strides.row, strides.column


def _two_width_tiles(columns: int, tile: Tile) -> tuple[Tile, ...]:
    """Return a tile for a few columns more than a power of two; none for other numbers."""
    main = power_of_two(columns) // 2
    tail = max(_MIN_COLUMNS, power_of_two(columns - main))
    if not (_MIN_COLUMNS < main <= _MAX_COLUMNS and 2 * tail <= main):
        return ()
    return (replace(tile, rows=_NCHW_ROWS, columns=main, tail_columns=tail, warps=_NCHW_WARPS),)
