"""Products of a repeated picture beside another -> calls of `upscaled`."""

from toolkit.gpu.emit.context import Draft
from toolkit.gpu.emit.epilogue import (
    constant_weights,
    ending_of,
    lanes_of,
    product_constants,
    weight_matrix,
)
from toolkit.gpu.emit.int8_gemm import integer_weights
from toolkit.gpu.ir.launch import Call
from toolkit.gpu.ir.view import channels_last
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.passes.upsample_concat import CHANNELS
from toolkit.gpu.schedule.tiles import Product, Tile, product_tiles
from toolkit.gpu.shapes.sizes import ceil_div


def emit_convolution_of_upscaled(draft: Draft, group: Group) -> None:
    """Add a ConvUpscaled."""
    op = group.root_operation
    weights = constant_weights(draft, op, 1)
    filters, depth = weights.shape[:2]
    integer = integer_weights(draft, op, 0, filters, depth)
    ending = ending_of(draft, group, op.input(2), integer)
    read = draft.stored_pixels if integer else draft.pixels
    (x, x_pitch), (z, z_pitch) = read(op.inputs[0]), read(op.inputs[3])
    values = (integer.values if integer else weights).reshape(filters, depth)
    packed = weight_matrix(draft, values.T, x.dtype)
    result = draft.network.shapes[group.result]
    y = draft.make(group.result, channels_last(result))
    pixels = result[0] * result[2] * result[3]
    product = Product(
        rows=pixels,
        columns=filters,
        depth=depth,
        run=depth,
        item_bytes=x.item_bytes,
        stored_bytes=y.item_bytes,
    )

    def call(tile: Tile) -> Call:
        whole = x.shape[1] % tile.depth == 0 and z.shape[1] % tile.depth == 0
        step = tile.depth if whole else min(tile.depth, CHANNELS)
        return draft.make_call(
            "upscaled",
            (ceil_div(pixels, tile.rows) * ceil_div(filters, tile.columns), 1, 1),
            {
                "x": x,
                "z": z,
                "weights": packed,
                "bias": ending.bias,
                "scale": ending.scale,
                "numbers": ending.numbers,
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
                "STEPS": ending.steps,
                "LANES": lanes_of(draft, x, y, tile),
                **product_constants(draft, tile, x.dtype),
                "BLOCK_K": step,
            },
            writes=(y,),
            warps=tile.warps,
            stages=tile.stages,
        )

    draft.add(group.nodes, *((call(tile),) for tile in product_tiles(product, draft.gpu)))
