"""Lower 2-D convolutions: a depthwise kernel, or the matrix product that they are."""

from dataclasses import replace

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.conv1x1_nchw import emit_conv1x1_nchw
from toolkit.gpu.emit.convolution_nd import emit_convolution_nd
from toolkit.gpu.emit.convolution_operands import Conv2d, read_filters
from toolkit.gpu.emit.depthwise import emit_depthwise
from toolkit.gpu.emit.epilogue import pixel_pitch, weight_matrix
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
from toolkit.gpu.ir.view import channels_last
from toolkit.gpu.ir.windows import read_window
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import ceil_div, opt
from toolkit.gpu.target import GpuTarget
from toolkit.graph.dtypes import FLOAT8
from toolkit.graph.window import Window

_JOINED_BYTES = 64  # of the channels of a block of narrow groups
_WGMMA_ROWS = 64
_MAX_ROW_CHANNELS = 64  # of pixels whose rows of taps are one tap


def emit_convolution(ctx: LoweringContext, group: Group) -> None:
    """Add a Conv with bias, residual and activation."""
    op = group.root_operation
    dynamic_weights = op.inputs[1] not in ctx.network.constants
    if dynamic_weights or len(ctx.network.shapes[group.result]) != 4:
        emit_convolution_nd(ctx, group)
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
        emit_depthwise(ctx, group.nodes, conv)
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
        floats = ctx.float_type(*op.inputs[:2])
        x = ctx.read(op.inputs[0], filters.numbers, "channels last", floats)
        pitch = pixel_pitch(x)
        if not depthwise and groups == 1 and _row_is_one_tap(window, pitch, values.shape[1]):
            rows = window.kernel[0]
            values = values.transpose(0, 3, 1, 2).reshape(len(values), -1, rows, 1)
            window = replace(window, kernel=(rows, 1))
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


def _row_is_one_tap(window: Window, pitch: int, channels: int) -> bool:
    """Whether the pixels under a row of taps lie side by side: channels of one tap, few else."""
    bare = not any((*window.before, *window.after)) and window.dilations[1] == 1
    return bare and window.kernel[1] > 1 and pitch == channels < _MAX_ROW_CHANNELS


def _joined_groups(conv: Conv2d, gpu: GpuTarget) -> Conv2d:
    """Return a convolution of narrow groups with as many of them in a block as fill a tile.

    The zeros cost products of tensor cores, which wait for operands otherwise: 64 bytes are read
    at once where a group alone has 8 to 32. INT8 reads 32 where SMs would be idle.
    """
    filters, channels = conv.weights.shape[:2]
    width = _JOINED_BYTES // conv.left.view.item_bytes
    batch, _, height, columns = conv.y.shape
    blocks = ceil_div(opt(batch) * opt(height) * opt(columns), _WGMMA_ROWS)
    blocks *= ceil_div(filters, width)
    if conv.left.view.item_bytes == 1 and blocks < gpu.sm_count:
        width //= 2
    square = filters == conv.left.groups * channels and width % channels == 0
    if not (gpu.has_matrix_units and square and channels < width < 2 * filters):
        return conv
    first_channel = np.arange(filters) % width // channels * channels
    joined = np.zeros((filters, width, *conv.weights.shape[2:]), conv.weights.dtype)
    for channel in range(channels):
        joined[np.arange(filters), first_channel + channel] = conv.weights[:, channel]
    left = replace(conv.left, channels=width, groups=1, diagonal=True)
    return replace(conv, left=left, weights=joined)


def _problem(ctx: LoweringContext, conv: Conv2d) -> GemmProblem:
    """Return a convolution as a matrix product: rows are pixels, columns are filters."""
    conv = _joined_groups(conv, ctx.gpu)
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
        block_columns=channels if conv.left.diagonal else None,
        float8=conv.left.view.dtype == FLOAT8,
        holds_registers=residual_bytes > conv.left.view.item_bytes,
    )
    left: Loader = conv.left
    # The bordered input of a first convolution with one row of taps has more pixels than y.
    same_size = conv.left.size == conv.left.output_size
    if (
        conv.left.window.is_pointwise
        and not (conv.left.diagonal or conv.left.groups > 1)
        and same_size
    ):
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
