"""Pooling over one to three dimensions, with powers or indices, and back."""

from math import prod

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.conv3d import (
    channels_last_3d,
    channels_last_strides_3d,
    check_spatial_rank,
    pitch_3d,
)
from toolkit.gpu.emit.windows import WindowNd, three
from toolkit.gpu.errors import NotCoveredError
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
    window = WindowNd.read(op, op.integers("kernel_shape", ()))
    before, after = window.pads_of_convolution(shape[2:], result[2:])
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
            "TAPS": three(window.taps, 1),
            "STRIDE": three(window.strides, 1),
            "DILATION": three(window.dilations, 1),
            "PAD": three(before, 0),
            "PAD_AFTER": three(after, 0),
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


def emit_unpool(ctx: LoweringContext, group: Group) -> None:
    """Lower MaxUnpool: fill with 0, then scatter."""
    op = group.root_operation
    shape, result = ctx.network.shapes[op.inputs[0]], ctx.network.shapes[group.result]
    window = WindowNd.read(op, op.integers("kernel_shape", ()))
    pads = window.pads or (0,) * 2 * len(window.taps)
    for at, (n, stride, tap) in enumerate(
        zip(shape[2:], window.strides, window.taps, strict=True), start=2
    ):
        whole = (n - 1) * stride + tap - pads[at - 2] - pads[at - 2 + len(window.taps)]
        if whole != result[at]:
            raise NotCoveredError(
                f"node {op.name!r} (MaxUnpool) writes {result[at]} along dimension {at} by indices "
                f"in {whole}; kernels take equal sizes"
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
