"""Lower 2-D convolutions: a depthwise kernel, or the matrix product that they are."""

from math import prod

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.conv1x1_nchw import emit_conv1x1_nchw
from toolkit.gpu.emit.conv2d import Conv2d, read_filters
from toolkit.gpu.emit.conv3d import emit_conv3d
from toolkit.gpu.emit.depthwise_int8 import depthwise_int8_launches
from toolkit.gpu.emit.epilogue import pixel_pitch, weight_matrix
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.emit.space_to_depth import CHANNELS as STEM_CHANNELS
from toolkit.gpu.emit.space_to_depth import is_stem, make_stem
from toolkit.gpu.emit.tiled_gemm import add_gemm
from toolkit.gpu.ir.gemm import (
    DenseLoader,
    GemmProblem,
    GemmShape,
    Im2colLoader,
    Loader,
    MatrixStrides,
)
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.view import channels_last
from toolkit.gpu.ir.windows import read_window, window_constants
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.tiles import pixel_columns, ranked_rows
from toolkit.gpu.shapes.sizes import ceil_div

_ROWS = (4, 7, 2, 1)  # output rows of a block; of equally good ones the first
_MAX_TACTICS = 2  # of an engine
_MIN_TAPS_FOR_ONE_ROW = 50  # from here on a block has one row


def _emit_depthwise(ctx: LoweringContext, nodes: tuple[str, ...], conv: Conv2d) -> None:
    """Add a depthwise convolution."""
    launches = depthwise_int8_launches(ctx, conv) or _depthwise_launches(ctx, conv)
    ctx.add_op(nodes, *((launch,) for launch in launches))


def _depthwise_launches(ctx: LoweringContext, conv: Conv2d) -> tuple[KernelLaunch, ...]:
    channels = conv.weights.shape[0]
    weights = ctx.weights.pack(conv.weights[:, 0].transpose(1, 2, 0), conv.left.view.dtype)

    def launch(rows: int) -> KernelLaunch:
        tile, columns = pixel_columns(conv.y.shape, rows)
        return make_launch(
            "depthwise",
            (ceil_div(columns, tile.rows), ceil_div(channels, tile.columns), 1),
            {**conv.operands(), "weights": weights},
            {
                **conv.constants(),
                **window_constants(conv.left.window),
                "ROWS": rows,
                "BLOCK_M": tile.rows,
                "BLOCK_N": tile.columns,
            },
            writes=(conv.y,),
            warps=tile.warps,
            stages=tile.stages,
        )

    many = prod(conv.left.window.kernel) >= _MIN_TAPS_FOR_ONE_ROW
    best = ranked_rows(conv.y.shape, (1,) if many else _ROWS, ctx.gpu.sm_count)
    return tuple(launch(rows) for rows in best[: None if ctx.gpu.exhaustive else _MAX_TACTICS])


def emit_convolution(ctx: LoweringContext, group: Group) -> None:
    """Add a Conv with bias, residual and activation."""
    op = group.root_operation
    dynamic_weights = op.inputs[1] not in ctx.network.constants
    if dynamic_weights or len(ctx.network.shapes[group.result]) != 4:
        emit_conv3d(ctx, group)
        return
    concat_slice = ctx.concat_slices.get(group.result)
    if concat_slice is not None and concat_slice.pixel_pitch() is None:
        emit_conv1x1_nchw(ctx, group, ctx.output_view(group.result))
        return
    shape = ctx.network.shapes[op.inputs[0]]
    filters, channels = ctx.network.constants[op.inputs[1]].shape[:2]
    depthwise = channels == 1 and op.integer("group", 1) == filters == shape[1]
    conv = _read(ctx, group, depthwise)
    if depthwise:
        _emit_depthwise(ctx, group.nodes, conv)
    else:
        add_gemm(ctx, group.nodes, _problem(ctx, conv))


def _read(ctx: LoweringContext, group: Group, depthwise: bool) -> Conv2d:
    """Return the convolution with its tensors channels-last."""
    op = group.root_operation
    filters, groups = read_filters(ctx, group), op.integer("group", 1)
    values = filters.values
    shape, result = ctx.network.shapes[op.inputs[0]], ctx.network.shapes[group.result]
    window = read_window(op, values.shape[2:], shape, result)
    as_stored = filters.is_int8 or ctx.read(op.inputs[0]).scale is None
    if as_stored and not depthwise and is_stem(values, groups, window, shape):
        stem = make_stem(ctx, op.inputs[0], values, window, result)
        values, window, x, pitch = stem.weights, stem.window, stem.x, STEM_CHANNELS
    else:
        x = ctx.read(op.inputs[0], filters.numbers, "channels last")
        pitch = pixel_pitch(x)
    residual, r_pitch = None, 0
    if filters.residual is not None:
        residual = ctx.read(filters.residual, "int8 or float", "channels last")
        r_pitch = pixel_pitch(residual)
    y = ctx.output_view(group.result, channels_last(result))
    loader = Im2colLoader(
        view=x,
        pitch=pitch,
        batch=x.shape[0],
        size=(x.shape[2], x.shape[3]),
        output_size=(y.shape[2], y.shape[3]),
        window=window,
        channels=values.shape[1],
        groups=groups,
    )
    return Conv2d(loader, values, y, pixel_pitch(y), residual, r_pitch, filters.epilogue)


def _problem(ctx: LoweringContext, conv: Conv2d) -> GemmProblem:
    """Return a convolution as a matrix product: rows are pixels, columns are filters."""
    filters, channels = conv.weights.shape[:2]
    # (filter, channel, row, column) -> (filter, row, column, channel)
    packed = conv.weights.transpose(0, 2, 3, 1).reshape(filters, -1)
    weights = weight_matrix(ctx, packed.T, conv.left.view.dtype)
    residual_bytes = 0 if conv.residual is None else conv.residual.item_bytes
    shape = GemmShape(
        rows=conv.y.shape[0] * conv.y.shape[2] * conv.y.shape[3],
        columns=filters // conv.left.groups,
        depth=packed.shape[1],
        unshared_depth=channels,
        item_bytes=conv.left.view.item_bytes,
        stored_bytes=conv.y.item_bytes + residual_bytes,
        batch=conv.left.groups,
    )
    left: Loader = conv.left
    # The bordered input of a first convolution with one row of taps has more pixels than y.
    same_size = conv.left.size == conv.left.output_size
    if conv.left.window.is_pointwise and conv.left.groups == 1 and same_size:
        left = DenseLoader(conv.left.view, MatrixStrides(conv.left.pitch))
    return GemmProblem(
        shape=shape,
        left=left,
        right=weights,
        right_strides=MatrixStrides(*weights.strides),
        y=conv.y,
        y_strides=MatrixStrides(conv.y_pitch),
        epilogue=conv.epilogue,
        residual=conv.residual,
        residual_strides=MatrixStrides(conv.r_pitch),
    )
