"""1x1 convolutions whose results lie in strides of their own -> calls of `planes`."""

from dataclasses import replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.epilogue import (
    constant_weights,
    epilogue_of,
    gemm_constants,
    weight_matrix,
)
from toolkit.gpu.emit.int8_gemm import int8_weights
from toolkit.gpu.emit.windows import read_window_2d
from toolkit.gpu.ir.expressions import tensors_read
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.tiles import GemmShape, Tile, gemm_tiles
from toolkit.gpu.shapes.sizes import ceil_div, fixed, power_of_two

# Of a block whose filters are a power of two and a few: 128 pixels are 512 bytes of a plane.
_ROWS, _WARPS = 128, 4
_LEAST_COLUMNS, _MOST_COLUMNS = 16, 64


def supports_conv1x1_nchw(ctx: LoweringContext, group: Group, y: View) -> bool:
    """Whether `planes` can compute a group into `y`: a 1x1 convolution that adds no tensor.

    Where blocks are so few that sums may be made in parts, it had better be another kernel.
    """
    op, network = group.root, ctx.network
    if op is None or op.kind != "Conv" or op.inputs[1] not in network.constants:
        return False
    shape, result = network.shapes[op.inputs[0]], network.shapes[group.result]
    weights = network.constants[op.inputs[1]]
    if len(shape) != 4 or op.integer("group", 1) != 1 or _flat(y) is None:
        return False
    if op.input(2) and op.input(2) not in network.constants:
        return False
    made = {op.outputs[0], *(one.outputs[0] for one in group.after)}
    read = {name for one in group.after for name in tensors_read(one, network.constants)}
    if not read <= made or not read_window_2d(op, weights.shape[2:], shape, result).is_pointwise:
        return False
    item_bytes = ctx.item_bytes if op.inputs[0] not in network.scales else 1
    tiles = gemm_tiles(_product(weights, item_bytes, y), ctx.gpu, split_k=True)
    return all(tile.parts == 1 for tile in tiles)


def emit_conv1x1_nchw(ctx: LoweringContext, group: Group, y: View) -> None:
    """Add a group of which `may_write_planes` holds."""
    op = group.root_operation
    weights = constant_weights(ctx, op, 1)
    filters, depth = weights.shape[:2]
    integer = int8_weights(ctx, op, 0, filters, depth)
    epilogue = epilogue_of(ctx, group, op.input(2), integer)
    x, pitch = ctx.read_nhwc(op.inputs[0], keep_int8=bool(integer))
    values = (integer.values if integer else weights).reshape(filters, depth)
    packed = weight_matrix(ctx, values.T, x.dtype)
    flat = _flat(y)
    assert flat is not None
    images, _, pixels = flat.shape
    product = _product(weights, x.item_bytes, y)

    def call(tile: Tile, rest: int = 0) -> KernelLaunch:
        return ctx.make_launch(
            "conv1x1_nchw",
            (ceil_div(pixels, tile.rows) * ceil_div(filters, tile.columns + rest), images, 1),
            {
                "x": x,
                "weights": packed,
                "bias": epilogue.bias,
                "scale": epilogue.scale,
                "scalars": epilogue.scalars,
                "y": y,
            },
            {
                "DEPTH": depth,
                "FILTERS": filters,
                "PIXELS": pixels,
                "X_IMAGE": pixels * pitch,
                "X_PITCH": pitch,
                "W_PITCH": packed.strides[1],
                "Y_IMAGE": flat.strides[0],
                "Y_FILTER": flat.strides[1],
                "Y_PIXEL": flat.strides[2],
                "EPILOGUE": epilogue.steps,
                "WHOLE_BLOCKS": fixed(depth) and depth % tile.depth == 0,
                "REST": rest,
                **gemm_constants(ctx, tile, x.dtype),
            },
            writes=(y,),
            warps=tile.warps,
            stages=tile.stages,
        )

    tiles = gemm_tiles(product, ctx.gpu)
    parted = _parted(filters, tiles[0]) if ctx.gpu.has_wgmma else None
    first = () if parted is None else (call(*parted),)
    ctx.add_op(group.nodes, *((one,) for one in (*first, *map(call, tiles))))


def _parted(filters: int, tile: Tile) -> tuple[Tile, int] | None:
    """Return a tile of few filters more than a power of two, and how many more; None elsewhere."""
    columns = power_of_two(filters) // 2
    rest = max(_LEAST_COLUMNS, power_of_two(filters - columns))
    if not (_LEAST_COLUMNS < columns <= _MOST_COLUMNS and 2 * rest <= columns):
        return None
    return replace(tile, rows=_ROWS, columns=columns, warps=_WARPS), rest


def _product(weights: Array, item_bytes: int, y: View) -> GemmShape:
    """Return the products of matrices that it is, one for each image: rows are pixels."""
    images, filters, height, width = y.shape
    depth = weights.shape[1]
    return GemmShape(
        rows=height * width,
        columns=filters,
        depth=depth,
        run=depth,
        item_bytes=item_bytes,
        stored_bytes=y.item_bytes,
        products=images,
    )


def _flat(y: View) -> View | None:
    """Return (N, C, H, W) as (N, C, pixels); None where the pixels do not lie in a row."""
    n, c, h, w = y.shape
    return y.reshaped((n, c, h * w))
