"""Products of a repeated picture beside another -> calls of `upscaled`."""

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.epilogue import (
    constant_weights,
    epilogue_of,
    gemm_constants,
    mma_warps_of,
    weight_matrix,
)
from toolkit.gpu.emit.int8_gemm import int8_weights
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.view import channels_last
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.passes.upsample_concat import CHANNELS
from toolkit.gpu.schedule.tiles import GemmShape, Tile, gemm_tiles
from toolkit.gpu.shapes.sizes import ceil_div


def emit_conv_upsample_concat(ctx: LoweringContext, group: Group) -> None:
    """Add a ConvUpscaled."""
    op = group.root_operation
    weights = constant_weights(ctx, op, 1)
    filters, depth = weights.shape[:2]
    integer = int8_weights(ctx, op, 0, filters, depth)
    epilogue = epilogue_of(ctx, group, op.input(2), integer)
    (x, x_pitch), (z, z_pitch) = (
        ctx.read_nhwc(op.inputs[at], keep_int8=bool(integer)) for at in (0, 3)
    )
    values = (integer.values if integer else weights).reshape(filters, depth)
    packed = weight_matrix(ctx, values.T, x.dtype)
    result = ctx.network.shapes[group.result]
    y = ctx.output_view(group.result, channels_last(result))
    pixels = result[0] * result[2] * result[3]
    product = GemmShape(
        rows=pixels,
        columns=filters,
        depth=depth,
        run=depth,
        item_bytes=x.item_bytes,
        stored_bytes=y.item_bytes,
    )

    def call(tile: Tile) -> KernelLaunch:
        whole = x.shape[1] % tile.depth == 0 and z.shape[1] % tile.depth == 0
        step = tile.depth if whole else min(tile.depth, CHANNELS)
        return ctx.make_launch(
            "conv_upsample_concat",
            (ceil_div(pixels, tile.rows) * ceil_div(filters, tile.columns), 1, 1),
            {
                "x": x,
                "z": z,
                "weights": packed,
                "bias": epilogue.bias,
                "scale": epilogue.scale,
                "scalars": epilogue.scalars,
                "y": y,
                "batch": result[0],
            },
            {
                "HEIGHT": result[2],
                "WIDTH": result[3],
                "ROW_FACTOR": result[2] // x.shape[2],
                "COLUMN_FACTOR": result[3] // x.shape[3],
                "X_CHANNELS": x.shape[1],
                "Z_CHANNELS": z.shape[1],
                "FILTERS": filters,
                "X_PITCH": x_pitch,
                "Z_PITCH": z_pitch,
                "W_PITCH": packed.strides[1],
                "Y_PITCH": y.pixel_pitch(),
                "EPILOGUE": epilogue.steps,
                "MMA_WARPS": mma_warps_of(ctx, x, y, tile),
                **gemm_constants(ctx, tile, x.dtype),
                "BLOCK_K": step,
            },
            writes=(y,),
            warps=tile.warps,
            stages=tile.stages,
        )

    ctx.add_op(group.nodes, *((call(tile),) for tile in gemm_tiles(product, ctx.gpu)))
