"""Lower GridSample."""

from dataclasses import replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import element_launch
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.loop_order import order_of

_BLOCK = 256  # elements of a block
MODES = {"bilinear": "linear", "bicubic": "cubic"}  # the names before opset 20


def emit_grid_sample(ctx: LoweringContext, group: Group) -> None:
    """Lower GridSample of images (4 dimensions) or volumes (5)."""
    op = group.root_operation
    x, grid = ctx.read(op.inputs[0], "float"), ctx.read(op.inputs[1])
    dims = len(x.shape) - 2
    mode = op.text("mode", "linear")
    y = ctx.output_view(op.outputs[0])
    source = replace(x, shape=y.shape, strides=(*x.strides[:2], *(0,) * dims))
    points = replace(grid, shape=y.shape, strides=(grid.strides[0], 0, *grid.strides[1:-1]))
    order = order_of(y.shape, [y.strides, source.strides, points.strides])
    constants = {
        **order.constants("Y_STRIDES", "X_STRIDES", "POINT_STRIDES"),
        "SIZES": x.shape[2:],
        "SPATIAL_STRIDES": x.strides[2:],
        "COORDINATE_STRIDE": grid.strides[-1],
        "MODE": MODES.get(mode, mode),
        "PADDING": op.text("padding_mode", "zeros"),
        "ALIGN": bool(op.integer("align_corners", 0)),
    }
    launch = element_launch("grid_sample", y, {"x": x, "points": grid}, constants, block=_BLOCK)
    ctx.add_op(group.nodes, (launch,))
