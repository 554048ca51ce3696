"""1x1 convolutions of an upsampled tensor concatenated with another; neither result is stored."""

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.conv2d import pixel_product, read_filters
from toolkit.gpu.emit.epilogue import pixel_pitch, weight_matrix
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.emit.schedule import Schedule, add_gemm
from toolkit.gpu.emit.tiled_gemm import tile_constants
from toolkit.gpu.ir.gemm import GemmProblem, UpsampleConcatLoader
from toolkit.gpu.ir.launch import KernelLaunch, Tactic
from toolkit.gpu.ir.view import channels_last
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.tiles import Tile, gemm_tiles
from toolkit.gpu.shapes.sizes import ceil_div
from toolkit.gpu.sm90.mma import mma_warps
from toolkit.gpu.sm90.passes.upsample_concat import CHANNELS
from toolkit.gpu.target import GpuTarget


def emit_conv_upsample_concat(ctx: LoweringContext, group: Group) -> None:
    """Add a ConvUpsampleConcat."""
    op = group.root_operation
    filters = read_filters(ctx, group)
    small, large = (ctx.read(op.inputs[at], filters.numbers, "channels last") for at in (0, 3))
    left = UpsampleConcatLoader(small, pixel_pitch(small), large, pixel_pitch(large))
    packed = weight_matrix(ctx, filters.values[:, :, 0, 0].T, left.view.dtype)
    y = ctx.output_view(group.result, channels_last(ctx.network.shapes[group.result]))
    add_gemm(ctx, group.nodes, pixel_product(left, packed, y, filters.epilogue, packed.shape[0]))


def _refusal(problem: GemmProblem, gpu: GpuTarget) -> str | None:
    if not isinstance(problem.left, UpsampleConcatLoader):
        return "nothing is upsampled"
    return None if gpu.has_wgmma else "the kernel is not timed on this GPU"


def upsample_concat_tactics(ctx: LoweringContext, problem: GemmProblem) -> tuple[Tactic, ...]:
    """Return a tactic for each of the best tiles."""
    left = problem.left
    if not isinstance(left, UpsampleConcatLoader):
        return ()
    tiles = gemm_tiles(problem.shape, ctx.gpu)
    return tuple((_launch(ctx, problem, left, tile),) for tile in tiles)


UPSAMPLE_CONCAT = Schedule("upsample and concat", _refusal, upsample_concat_tactics)


def _launch(
    ctx: LoweringContext, problem: GemmProblem, left: UpsampleConcatLoader, tile: Tile
) -> KernelLaunch:
    x, z, shape = left.view, left.large, problem.shape
    height, width = z.shape[2:]
    whole = x.shape[1] % tile.depth == 0 and z.shape[1] % tile.depth == 0
    return make_launch(
        "conv_upsample_concat",
        (ceil_div(shape.rows, tile.rows) * ceil_div(shape.columns, tile.columns), 1, 1),
        {
            "x": x,
            "z": z,
            "weights": problem.right,
            **problem.epilogue.operands(),
            "y": problem.y,
            "batch": z.shape[0],
        },
        {
            "HEIGHT": height,
            "WIDTH": width,
            "ROW_FACTOR": height // x.shape[2],
            "COLUMN_FACTOR": width // x.shape[3],
            "X_CHANNELS": x.shape[1],
            "Z_CHANNELS": z.shape[1],
            "FILTERS": shape.columns,
            "X_PITCH": left.pitch,
            "Z_PITCH": left.large_pitch,
            "W_PITCH": problem.right_strides.column,
            "Y_PITCH": problem.y_strides.row,
            "EPILOGUE": problem.epilogue.ops,
            "MMA_WARPS": mma_warps(problem, tile, ctx.gpu),
            **tile_constants(problem, tile, ctx.gpu),
            "BLOCK_K": tile.depth if whole else min(tile.depth, CHANNELS),
        },
        writes=(problem.y,),
        warps=tile.warps,
        stages=tile.stages,
    )
