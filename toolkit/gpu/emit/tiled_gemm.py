"""The generic schedule: a block computes a tile of y, for every loader and on every GPU.

Tiles that share the depth among blocks (split-K) are ranked with the others.
"""

from dataclasses import replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.epilogue import precision_of
from toolkit.gpu.emit.schedule import Schedule
from toolkit.gpu.emit.split_k import partial_sums, split_k_reduce_launch, split_k_refusal
from toolkit.gpu.emit.windows import window_constants
from toolkit.gpu.ir.gemm import (
    DenseLoader,
    GemmProblem,
    Im2col3dLoader,
    Im2colLoader,
    MatrixStrides,
)
from toolkit.gpu.ir.launch import KernelLaunch, Tactic
from toolkit.gpu.schedule.tiles import Tile, gemm_tiles
from toolkit.gpu.shapes.sizes import ceil_div, fixed, power_of_two
from toolkit.gpu.target import GpuTarget
from toolkit.plugins import Constant

# A tile of a power of two columns and a rest, for NCHW results: 128 pixels of FP32 are 512 bytes.
_NCHW_ROWS, _NCHW_WARPS = 128, 4
_MIN_COLUMNS, _MAX_COLUMNS = 16, 64


def _refusal(problem: GemmProblem, _: GpuTarget) -> str | None:
    if isinstance(problem.left, (DenseLoader, Im2colLoader, Im2col3dLoader)):
        return None
    return f"{type(problem.left).__name__} has a kernel of its own"


def tiled_tactics(ctx: LoweringContext, problem: GemmProblem) -> tuple[Tactic, ...]:
    """Return a tactic for each of the best tiles."""
    split_k = split_k_refusal(problem) is None
    tiles = gemm_tiles(problem.shape, ctx.gpu, split_k=split_k)
    if problem.layout == "nchw" and ctx.gpu.has_wgmma:
        tiles = (*_two_width_tiles(problem.shape.columns, tiles[0]), *tiles)
    return tuple(_tactic(ctx, problem, tile) for tile in tiles)


TILED = Schedule("tiled", _refusal, tiled_tactics)


def _tactic(ctx: LoweringContext, problem: GemmProblem, tile: Tile) -> Tactic:
    if tile.split_k == 1:
        return (tiled_launch(ctx, problem, tile),)
    partial = partial_sums(ctx, problem, tile.split_k)
    return tiled_launch(ctx, partial, tile), split_k_reduce_launch(ctx, problem, partial.y)


def tiled_launch(ctx: LoweringContext, problem: GemmProblem, tile: Tile) -> KernelLaunch:
    """Return the launch of the kernel that has the problem's loader and layout."""
    left = problem.left
    if isinstance(left, DenseLoader):
        if problem.layout == "nchw":
            return _nchw_launch(ctx, problem, left, tile)
        return _dense_launch(ctx, problem, left, tile)
    if isinstance(left, Im2colLoader):
        return _im2col_launch(ctx, problem, left, tile)
    if isinstance(left, Im2col3dLoader):
        return _im2col_3d_launch(ctx, problem, left, tile)
    raise NotImplementedError(f"the tiled schedule has no kernel for {type(left).__name__}")


def tile_constants(problem: GemmProblem, tile: Tile, gpu: GpuTarget) -> dict[str, Constant]:
    """Return precision and tile as constants of a kernel."""
    return {
        "PRECISION": precision_of(gpu, problem.right.dtype),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
    }


def _blocks(problem: GemmProblem, tile: Tile) -> int:
    shape = problem.shape
    return ceil_div(shape.rows, tile.rows) * ceil_div(shape.columns, tile.columns + tile.rest)


def _whole_blocks(problem: GemmProblem, tile: Tile) -> bool:
    """Whether BLOCK_K divides the depth, so that no k is masked."""
    return fixed(problem.shape.depth) and problem.shape.depth % tile.depth == 0


def _dense_launch(
    ctx: LoweringContext, problem: GemmProblem, left: DenseLoader, tile: Tile
) -> KernelLaunch:
    shape = problem.shape
    return ctx.make_launch(
        "matmul",
        (_blocks(problem, tile), shape.batch, 1),
        {
            "a": left.view,
            "b": problem.right,
            **problem.epilogue_operands(),
            "y": problem.y,
            "rows": shape.rows,
        },
        {
            "DEPTH": shape.depth,
            "COLUMNS": shape.columns,
            "INNER": problem.inner,
            **_operand_strides("A", left.strides),
            **_operand_strides("B", problem.right_strides),
            **_result_strides("Y", problem.y_strides),
            **_result_strides("R", problem.residual_strides),
            "EPILOGUE": problem.epilogue.ops,
            "WHOLE_BLOCKS": _whole_blocks(problem, tile),
            "MMA_WARPS": ctx.mma_warps(problem, tile, ctx.gpu),
            **tile_constants(problem, tile, ctx.gpu),
        },
        writes=(problem.y,),
        warps=tile.warps,
        stages=tile.stages,
    )


def _operand_strides(operand: str, strides: MatrixStrides) -> dict[str, Constant]:
    return {
        f"{operand}_OUTER": strides.outer,
        f"{operand}_BATCH": strides.batch,
        f"{operand}_ROW": strides.row,
        f"{operand}_COLUMN": strides.column,
    }


def _result_strides(operand: str, strides: MatrixStrides) -> dict[str, Constant]:
    return {
        f"{operand}_OUTER": strides.outer,
        f"{operand}_BATCH": strides.batch,
        f"{operand}_PITCH": strides.row,
    }


def _im2col_launch(
    ctx: LoweringContext, problem: GemmProblem, left: Im2colLoader, tile: Tile
) -> KernelLaunch:
    return ctx.make_launch(
        "convolution",
        (_blocks(problem, tile), left.groups, tile.split_k),
        {
            "x": left.view,
            "weights": problem.right,
            **problem.epilogue_operands(),
            "y": problem.y,
            "batch": left.batch,
        },
        {
            **left.size_constants(),
            **window_constants(left.window),
            "CHANNELS": left.channels,
            "FILTERS": problem.shape.columns,
            "W_PITCH": problem.right_strides.column,
            "Y_PITCH": problem.y_strides.row,
            "R_PITCH": problem.residual_strides.row,
            "EPILOGUE": problem.epilogue.ops,
            "SPLIT_K": tile.split_k,
            "MMA_WARPS": ctx.mma_warps(problem, tile, ctx.gpu),
            **tile_constants(problem, tile, ctx.gpu),
        },
        writes=(problem.y,),
        warps=tile.warps,
        stages=tile.stages,
    )


def _im2col_3d_launch(
    ctx: LoweringContext, problem: GemmProblem, left: Im2col3dLoader, tile: Tile
) -> KernelLaunch:
    return ctx.make_launch(
        "conv3d",
        (_blocks(problem, tile), left.groups, left.phases),
        {
            "x": left.view,
            "weights": problem.right,
            "bias": problem.epilogue.bias,
            "residual": problem.residual,
            "y": problem.y,
            "batch": left.view.shape[0],
        },
        {
            "SIZE": left.size,
            "OUT": left.output_size,
            "CHANNELS": left.channels,
            "FILTERS": problem.shape.columns,
            "X_STRIDES": left.strides,
            "W_PHASE": problem.right_strides.outer,
            "W_GROUP": problem.right_strides.batch,
            "W_PITCH": problem.right_strides.column,
            "Y_PITCH": problem.y_strides.row,
            "R_PITCH": problem.residual_strides.row,
            "TAPS": left.taps,
            "STRIDE": left.step,
            "DILATION": left.dilations,
            "PAD": left.pads,
            "TRANSPOSED": left.transposed,
            "EPILOGUE": problem.epilogue.ops,
            **tile_constants(problem, tile, ctx.gpu),
        },
        writes=(problem.y,),
        warps=tile.warps,
        stages=tile.stages,
    )


def _nchw_launch(
    ctx: LoweringContext, problem: GemmProblem, left: DenseLoader, tile: Tile
) -> KernelLaunch:
    shape = problem.shape
    return ctx.make_launch(
        "conv1x1_nchw",
        (_blocks(problem, tile), shape.batch, 1),
        {
            "x": left.view,
            "weights": problem.right,
            "bias": problem.epilogue.bias,
            "scale": problem.epilogue.scale,
            "scalars": problem.epilogue.scalars,
            "y": problem.y,
        },
        {
            "DEPTH": shape.depth,
            "FILTERS": shape.columns,
            "PIXELS": shape.rows,
            "X_IMAGE": left.strides.batch,
            "X_PITCH": left.strides.row,
            "W_PITCH": problem.right_strides.column,
            "Y_IMAGE": problem.y_strides.batch,
            "Y_FILTER": problem.y_strides.column,
            "Y_PIXEL": problem.y_strides.row,
            "EPILOGUE": problem.epilogue.ops,
            "WHOLE_BLOCKS": _whole_blocks(problem, tile),
            "REST": tile.rest,
            **tile_constants(problem, tile, ctx.gpu),
        },
        writes=(problem.y,),
        warps=tile.warps,
        stages=tile.stages,
    )


def _two_width_tiles(columns: int, tile: Tile) -> tuple[Tile, ...]:
    """Return a tile for a few columns more than a power of two; none for other numbers."""
    whole = power_of_two(columns) // 2
    rest = max(_MIN_COLUMNS, power_of_two(columns - whole))
    if not (_MIN_COLUMNS < whole <= _MAX_COLUMNS and 2 * rest <= whole):
        return ()
    return (replace(tile, rows=_NCHW_ROWS, columns=whole, rest=rest, warps=_NCHW_WARPS),)
