"""Lower 1x1 convolutions with an NCHW output: one matrix product for each image."""

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.convolution_operands import read_filters
from toolkit.gpu.emit.epilogue import pixel_pitch, weight_matrix
from toolkit.gpu.emit.tiled_gemm import add_gemm
from toolkit.gpu.ir.expressions import tensors_read
from toolkit.gpu.ir.gemm import DenseLoader, GemmProblem, GemmShape, MatrixStrides
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View
from toolkit.gpu.ir.windows import read_window
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.tiles import gemm_tiles
from toolkit.graph.dtypes import FLOAT8


def supports_conv1x1_nchw(ctx: LoweringContext, group: Group, y: View) -> bool:
    """Whether a group is a 1x1 convolution without residual, so that it can write NCHW `y`.

    Where blocks are so few that split-K may be faster, another kernel and a copy are better.
    """
    op, network = group.root, ctx.network
    if op is None or op.kind != "Conv" or op.inputs[1] not in network.constants:
        return False
    shape, result = network.shapes[op.inputs[0]], network.shapes[group.result]
    weights = network.constants[op.inputs[1]]
    if len(shape) != 4 or op.integer("group", 1) != 1 or _merged_pixels(y) is None:
        return False
    if op.input(2) and op.input(2) not in network.constants:
        return False
    inside = {op.outputs[0], *(later.outputs[0] for later in group.after)}
    read = {name for later in group.after for name in tensors_read(later, network.constants)}
    if not read <= inside or not read_window(op, weights.shape[2:], shape, result).is_pointwise:
        return False
    float8 = network.dtypes[op.inputs[0]] == FLOAT8
    item_bytes = 1 if float8 or op.inputs[0] in network.scales else ctx.item_bytes
    tiles = gemm_tiles(_shape(weights, item_bytes, y, float8=float8), ctx.gpu, split_k=True)
    return all(tile.split_k == 1 for tile in tiles)


def emit_conv1x1_nchw(ctx: LoweringContext, group: Group, y: View) -> None:
    """Add a group that `supports_conv1x1_nchw`."""
    op = group.root_operation
    filters = read_filters(ctx, group)
    weights = filters.values
    floats = ctx.float_type(*op.inputs[:2])
    x = ctx.read(op.inputs[0], filters.numbers, "channels last", floats)
    packed = weight_matrix(ctx, weights[:, :, 0, 0].T, x.dtype)
    planes = _merged_pixels(y)
    assert planes is not None
    shape = _shape(weights, x.item_bytes, y, float8=x.dtype == FLOAT8)
    pitch = pixel_pitch(x)
    problem = GemmProblem(
        shape=shape,
        left=DenseLoader(x, MatrixStrides(pitch, outer=shape.rows * pitch)),
        right=packed,
        right_strides=MatrixStrides(*packed.strides),
        y=y,
        y_strides=MatrixStrides(planes.strides[2], planes.strides[1], outer=planes.strides[0]),
        epilogue=filters.epilogue,
        layout="nchw",
    )
    add_gemm(ctx, group.nodes, problem)


def _shape(weights: Array, item_bytes: int, y: View, *, float8: bool) -> GemmShape:
    images, filters, height, width = y.shape
    depth = weights.shape[1]
    return GemmShape(
        rows=height * width,
        columns=filters,
        depth=depth,
        unshared_depth=depth,
        item_bytes=item_bytes,
        stored_bytes=y.item_bytes,
        batch=images,
        float8=float8,
    )


def _merged_pixels(y: View) -> View | None:
    """Return (N, C, H, W) as (N, C, pixels); None where H and W cannot be merged."""
    n, c, h, w = y.shape
    return y.reshaped((n, c, h * w))
