"""Lower pooling over one to three dimensions, LpPool and MaxUnpool."""

from math import prod

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.conv3d import (
    channels_last_3d,
    channels_last_strides_3d,
    check_spatial_rank,
    pitch_3d,
)
from toolkit.gpu.emit.windows import read_window, three
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.network import Operation, Shape
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.tiles import row_tile
from toolkit.gpu.shapes.sizes import ceil_div

_MODES = {"MaxPool": "max", "AveragePool": "average", "LpPool": "lp"}
_BLOCK = 1024  # elements of a block


def emit_pool3d(ctx: LoweringContext, group: Group) -> None:
    """Lower MaxPool, AveragePool and LpPool; a MaxPool may return the indices of its maxima."""
    op = group.root_operation
    shape, result = ctx.network.shapes[op.inputs[0]], ctx.network.shapes[op.outputs[0]]
    check_spatial_rank(op, shape)
    window = read_window(op, op.integers("kernel_shape", ()), shape, result)
    x = channels_last_3d(ctx, op.inputs[0])
    y = ctx.output_view(group.result, channels_last_strides_3d(result))
    indices = None
    if len(op.outputs) > 1:
        indices = ctx.output_view(op.outputs[1], channels_last_strides_3d(result))
    size, out = three(shape[2:], 1), three(result[2:], 1)
    index_strides = (size[1] * size[2], size[2], 1)
    if op.integer("storage_order", 0):
        index_strides = (1, size[0], size[0] * size[1]) if len(shape) == 5 else (0, 1, size[1])
    rows = result[0] * prod(out)
    tile = row_tile(rows, shape[1])
    launch = ctx.make_launch(
        "pool3d",
        (ceil_div(rows, tile.rows), ceil_div(shape[1], tile.columns), 1),
        {"x": x, "y": y, "indices": indices, "batch": shape[0]},
        {
            "SIZE": size,
            "OUT": out,
            "CHANNELS": shape[1],
            "X_STRIDES": (x.strides[0], *three(x.strides[2:], 0)),
            "INDEX_STRIDES": index_strides,
            "Y_PITCH": pitch_3d(y),
            "TAPS": three(window.kernel, 1),
            "STRIDE": three(window.strides, 1),
            "DILATION": three(window.dilations, 1),
            "PAD": three(window.before, 0),
            "PAD_AFTER": three(window.after, 0),
            "MODE": _MODES[op.kind],
            "COUNT_PADDING": bool(op.integer("count_include_pad", 0)),
            "POWER": float(op.integer("p", 2)),
            "EPILOGUE": ctx.expression(op.outputs[0], group.after).ops,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
        },
        writes=(y,) if indices is None else (y, indices),
    )
    ctx.add_op(group.nodes, (launch,))


def unpooled_shape(op: Operation, shape: Shape, result: Shape) -> Shape:
    """Return the shape that the indices of a MaxUnpool count in; `result`: of its output."""
    window = read_window(op, op.integers("kernel_shape", ()), shape, result)
    sizes = zip(shape[2:], window.strides, window.kernel, window.before, window.after, strict=True)
    return (
        *shape[:2],
        *((n - 1) * stride + tap - before - after for n, stride, tap, before, after in sizes),
    )


def emit_unpool(ctx: LoweringContext, group: Group) -> None:
    """Lower MaxUnpool: fill with 0, then scatter."""
    op = group.root_operation
    shape, result = ctx.network.shapes[op.inputs[0]], ctx.network.shapes[group.result]
    if unpooled_shape(op, shape, result) != result:
        raise NotCoveredError(
            f"node {op.name!r} (MaxUnpool) writes {list(result)} by indices in "
            f"{list(unpooled_shape(op, shape, result))}; kernels take equal sizes"
        )
    x, indices = ctx.read_row_major(op.inputs[0]), ctx.read_row_major(op.inputs[1])
    y = ctx.output_view(group.result)
    fill = ctx.make_launch(
        "fill",
        (ceil_div(y.elements, _BLOCK), 1, 1),
        {"y": y, "elements": y.elements},
        {"BLOCK": _BLOCK},
        writes=(y,),
    )
    unpool = ctx.make_launch(
        "unpool",
        (ceil_div(x.elements, _BLOCK), 1, 1),
        {"x": x, "indices": indices, "y": y, "elements": x.elements, "size": y.elements},
        {"BLOCK": _BLOCK},
        writes=(y,),
    )
    ctx.add_op(group.nodes, (fill, unpool))
