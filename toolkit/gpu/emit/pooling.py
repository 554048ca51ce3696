"""Lower pooling over one to three dimensions, MaxUnpool and global average pooling."""

from collections.abc import Mapping
from math import prod

from toolkit.gpu.emit import reduction
from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import element_launch, make_launch
from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.gemm import Three
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.network import Operation, Shape
from toolkit.gpu.ir.view import View, channels_last
from toolkit.gpu.ir.windows import read_window, three, window_constants
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.passes.quantized import ROUND
from toolkit.gpu.schedule.tiles import pixel_columns, ranked_rows, row_tile
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt, power_of_two
from toolkit.gpu.target import GpuTarget
from toolkit.plugins import Constant

_MODES = {"MaxPool": "max", "AveragePool": "average", "LpPool": "lp"}
_BLOCK = 1024  # elements of a block of MaxUnpool
_MAX_UNROLLED_TAPS = 49  # of a window; thousands of taps compile for minutes
_ROWS_PER_BLOCK = (4, 2, 1)  # output rows that a block may compute at a time
# The tile of a global average: several loads of 16 bytes for each thread. Wide tiles load whole
# cache lines; narrow ones give more blocks for small batches.
_AVERAGE_CHANNELS = 32
_AVERAGE_BYTES = 64
_WIDE_AVERAGE_BYTES = 128
_AVERAGE_PIXELS = 128
_AVERAGE_BLOCKS_PER_SM = 8
# Of INT8, summed sooner in one launch: 784 in 3.7 us, in two in 5.8 (14 SMs of an H200).
_MAX_PIXELS_IN_ONE_LAUNCH = 784
_MAX_AVERAGE_ELEMENTS = 8192  # of a tile; more spill


def emit_pool(ctx: LoweringContext, group: Group) -> None:
    """Lower MaxPool, AveragePool and LpPool; a MaxPool may return the indices of its maxima."""
    op = group.root_operation
    shape, result = ctx.network.shapes[op.inputs[0]], ctx.network.shapes[op.outputs[0]]
    window = read_window(op, op.integers("kernel_shape", ()), shape, result)
    of_images = len(shape) == 4 and len(op.outputs) == 1 and op.kind != "LpPool"
    x = ctx.read(op.inputs[0], "int8 or float" if of_images else "float", "channels last")
    y = ctx.output_view(group.result, channels_last(result))
    constants: dict[str, Constant] = {
        "CHANNELS": shape[1],
        "X_PITCH": x.pixel_pitch(),
        "Y_PITCH": y.pixel_pitch(),
        "EPILOGUE": ctx.expression(op.outputs[0], group.after, x.scale).ops,
    }
    if of_images and op.kind == "MaxPool" and prod(window.kernel) <= _MAX_UNROLLED_TAPS:
        constants |= {"SIZE": shape[2:], "OUT": result[2:], **window_constants(window)}
        if y.scale == x.scale and all(_rounds_to(x.scale, fused) for fused in group.after):
            constants["EPILOGUE"] = ()  # a maximum of INT8 needs no rounding
        choices = _ROWS_PER_BLOCK if window.dilations[0] == 1 else (1,)
        rows_per_block = ranked_rows(y.shape, choices, ctx.gpu.sm_count)
        ctx.add_op(
            group.nodes, *((_max_pool(ctx, x, y, constants, rows),) for rows in rows_per_block)
        )
        return
    indices = None
    if len(op.outputs) > 1:
        indices = ctx.output_view(op.outputs[1], channels_last(result))
    rows = result[0] * prod(result[2:])
    tile = row_tile(rows, shape[1])
    launch = make_launch(
        "pool",
        (ceil_div(rows, tile.rows), ceil_div(shape[1], tile.columns), 1),
        {"x": x, "y": y, "indices": indices, "batch": shape[0]},
        {
            **constants,
            "SIZE": three(shape[2:], 1),
            "OUT": three(result[2:], 1),
            "INDEX_STRIDES": None if indices is None else _index_strides(op, three(shape[2:], 1)),
            "TAPS": three(window.kernel, 1),
            "STRIDE": three(window.strides, 1),
            "DILATION": three(window.dilations, 1),
            "PAD": three(window.before, 0),
            "PAD_AFTER": three(window.after, 0),
            "MODE": _MODES[op.kind],
            "COUNT_PADDING": bool(op.integer("count_include_pad", 0)),
            "POWER": float(op.integer("p", 2)),
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
        },
        writes=(y,) if indices is None else (y, indices),
    )
    ctx.add_op(group.nodes, (launch,))


def _index_strides(op: Operation, size: Three) -> Three:
    """Return what a step along (depth, row, column) adds to an index of a maximum."""
    if not op.integer("storage_order", 0):
        return size[1] * size[2], size[2], 1
    return 1, size[0], size[0] * size[1]


def _rounds_to(scale: float | None, op: Operation) -> bool:
    return op.kind == ROUND and op.number("scale", 1.0) == scale


def _max_pool(
    ctx: LoweringContext, x: View, y: View, constants: Mapping[str, Constant], rows: int
) -> KernelLaunch:
    """Launch max pooling with `rows` output rows per block."""
    tile, columns = pixel_columns(y.shape, rows)
    return make_launch(
        "max_pool",
        (ceil_div(columns, tile.rows), ceil_div(y.shape[1], tile.columns), 1),
        {"x": x, "y": y, "batch": y.shape[0]},
        {
            **constants,
            "ROWS": rows,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
        },
        writes=(y,),
    )


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
    x, indices = (ctx.read(name, "float or integer", "row-major") for name in op.inputs[:2])
    y = ctx.output_view(group.result)
    fill = element_launch("fill", y, {}, {}, block=_BLOCK)
    operands: dict[str, View | int | None] = {"x": x, "indices": indices, "size": y.elements}
    unpool = element_launch("unpool", y, operands, {}, block=_BLOCK, over=x)
    ctx.add_op(group.nodes, (fill, unpool))


def emit_global_average(ctx: LoweringContext, group: Group) -> None:
    """Lower GlobalAveragePool, in two launches where one takes longer: it does not fill the GPU."""
    op = group.root_operation
    if len(ctx.network.shapes[op.inputs[0]]) != 4:
        reduction.emit_global_pool(ctx, group)
        return
    x = ctx.read(op.inputs[0], "int8 or float", "channels last")
    batch, channels, height, width = x.shape
    y = ctx.output_view(group.result, channels_last(ctx.network.shapes[group.result]))
    epilogue = ctx.expression(op.outputs[0], group.after, x.scale).ops
    pixels = height * width
    block = _average_channels(x, ctx.gpu)
    split_k = _average_split_k(opt(batch), channels, block, opt(pixels), ctx.gpu)
    one_launch = (_average(ctx, x, y, pixels=pixels, divisor=pixels, epilogue=epilogue),)
    if split_k == 1 or not fixed(pixels):
        ctx.add_op(group.nodes, one_launch)
        return
    sums = ctx.allocate(
        f"{y.base} (sums)",
        "float32",
        (batch, channels, split_k, 1),
        (channels * split_k, 1, channels, 1),
    )
    first = _average(ctx, x, sums, pixels=pixels, split_k=split_k)
    second = _average(ctx, sums, y, pixels=split_k, divisor=pixels, epilogue=epilogue)
    tactics = (first, second), one_launch
    short = x.item_bytes == 1 and pixels <= _MAX_PIXELS_IN_ONE_LAUNCH
    ctx.add_op(group.nodes, *(reversed(tactics) if short else tactics))


def _average_channels(x: View, gpu: GpuTarget) -> int:
    """Return the channels of a tile: wide ones where their blocks fill the GPU eight times."""
    batch, channels = opt(x.shape[0]), x.shape[1]
    wide = _WIDE_AVERAGE_BYTES // x.item_bytes
    fills = batch * ceil_div(channels, wide) >= _AVERAGE_BLOCKS_PER_SM * gpu.sm_count
    narrow = max(_AVERAGE_CHANNELS, _AVERAGE_BYTES // x.item_bytes)
    return wide if fills else min(narrow, max(power_of_two(channels), 16))


def _average_split_k(batch: int, channels: int, block: int, pixels: int, gpu: GpuTarget) -> int:
    """Return the split of the pixels with which blocks fill the GPU."""
    blocks = batch * ceil_div(channels, block)
    return max(1, min(_AVERAGE_BLOCKS_PER_SM * gpu.sm_count // blocks, pixels // _AVERAGE_PIXELS))


def _average(
    ctx: LoweringContext,
    x: View,
    y: View,
    *,
    pixels: int,
    split_k: int = 1,
    divisor: int = 1,
    epilogue: tuple[ExprOp, ...] = (),
) -> KernelLaunch:
    """Launch sums / divisor of each image: x (pixels, channels) -> y (split_k, channels)."""
    batch, channels = x.shape[:2]
    block = _average_channels(x, ctx.gpu)
    max_pixels = _MAX_AVERAGE_ELEMENTS // block
    if x.item_bytes > 1:
        max_pixels = min(max_pixels, _AVERAGE_PIXELS)
    return make_launch(
        "global_average_pool",
        (batch, ceil_div(channels, block), split_k),
        {"x": x, "y": y, "batch": batch},
        {
            "PIXELS": pixels,
            "CHANNELS": channels,
            "X_PITCH": x.pixel_pitch(),
            "Y_PITCH": channels if split_k > 1 else y.pixel_pitch(),
            "SPLIT_K": split_k,
            "DIVISOR": divisor,
            "EPILOGUE": epilogue,
            "BLOCK_M": min(power_of_two(ceil_div(pixels, split_k)), max_pixels),
            "BLOCK_N": block,
        },
        writes=(y,),
    )
