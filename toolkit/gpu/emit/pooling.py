"""Pooling -> calls."""

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.gpu.emit import reduction
from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.pooling3d import emit_pool3d
from toolkit.gpu.emit.windows import read_window_2d, window_constants
from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.view import View, channels_last
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.passes.quantized import ROUND
from toolkit.gpu.schedule.tiles import Tile, row_tile
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt, power_of_two
from toolkit.gpu.target import GpuTarget
from toolkit.plugins import Constant

_MOST_TAPS = 49  # of a window that is unrolled; thousands compile for minutes
_HEIGHTS = (4, 2, 1)  # rows that a block makes at a time
_PACKED_MAXIMA = 90  # the first SM with maxima of two numbers of 16 bits (PTX ISA, max)
# What a global average reads at a time: several loads of 16 bytes for each thread. Wide blocks read
# whole lines of memory; narrow ones are more, for small batches.
_AVERAGE_CHANNELS = 32
_AVERAGE_BYTES = 64
_WIDE_AVERAGE_BYTES = 128
_AVERAGE_PIXELS = 128
_AVERAGE_BLOCKS = 8  # of an SM
_AVERAGE_NUMBERS = 8192  # more of them leave a thread no registers


def emit_pool(ctx: LoweringContext, group: Group) -> None:
    """Add a MaxPool or AveragePool."""
    op = group.root_operation
    if len(op.outputs) > 1 or len(ctx.network.shapes[op.inputs[0]]) != 4:
        emit_pool3d(ctx, group)
        return
    shape, result = ctx.network.shapes[op.inputs[0]], ctx.network.shapes[group.result]
    window = read_window_2d(op, op.integers("kernel_shape", ()), shape, result)
    x, x_pitch = ctx.stored_pixels(op.inputs[0])
    y = ctx.make(group.result, channels_last(result))
    constants: dict[str, Constant] = {
        "HEIGHT": shape[2],
        "WIDTH": shape[3],
        "CHANNELS": shape[1],
        "X_PITCH": x_pitch,
        "OUT_HEIGHT": result[2],
        "OUT_WIDTH": result[3],
        "Y_PITCH": y.pixel_pitch(),
        **window_constants(window),
        "EPILOGUE": ctx.expression(op.outputs[0], group.after, x.scale).steps,
    }
    if op.kind == "MaxPool" and window.kernel[0] * window.kernel[1] <= _MOST_TAPS:
        if y.scale == x.scale and all(_rounds_to(x.scale, one) for one in group.after):
            constants["EPILOGUE"] = ()  # what lies on the grid is rounded
        heights = _heights(ctx, y) if window.dilations[0] == 1 else (1,)
        calls = (_max_pool(ctx, x, y, constants, rows) for rows in heights)
        ctx.add(group.nodes, *((call,) for call in calls))
        return
    pixels = result[0] * result[2] * result[3]
    tile = row_tile(pixels, shape[1])
    call = ctx.make_launch(
        "pool",
        (ceil_div(pixels, tile.rows), ceil_div(shape[1], tile.columns), 1),
        {"x": x, "y": y, "batch": shape[0]},
        {
            **constants,
            "PAD_BOTTOM": window.after[0],
            "PAD_RIGHT": window.after[1],
            "MODE": "max" if op.kind == "MaxPool" else "average",
            "COUNT_PADS": bool(op.integer("count_include_pad", 0)),
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
        },
        writes=(y,),
    )
    ctx.add(group.nodes, (call,))


def _rounds_to(scale: float | None, op: Operation) -> bool:
    return op.kind == ROUND and op.number("scale", 1.0) == scale


def _heights(ctx: LoweringContext, y: View) -> tuple[int, ...]:
    """Return how many rows a block makes at a time, the best by estimate first.

    More rows read less, while there are blocks enough for the GPU and no row of a block is empty.
    """

    def order(rows: int) -> tuple[bool, int, int]:
        tile, strips = _strips(y, rows)
        blocks = ceil_div(opt(strips), tile.rows) * ceil_div(y.shape[1], tile.columns)
        return blocks < ctx.gpu.sm_count, -opt(y.shape[2]) % rows, -rows

    return tuple(sorted(_HEIGHTS, key=order))


def _strips(y: View, rows: int) -> tuple[Tile, int]:
    """Return the tile of strips of `rows` pixels above each other, and how many there are."""
    batch, channels, height, width = y.shape
    strips = batch * ceil_div(height, rows) * width
    return row_tile(strips, channels), strips


def _max_pool(
    ctx: LoweringContext, x: View, y: View, constants: Mapping[str, Constant], rows: int
) -> KernelLaunch:
    """Return the call that makes `rows` rows at a time."""
    tile, strips = _strips(y, rows)
    return ctx.make_launch(
        "max_pool",
        (ceil_div(strips, tile.rows), ceil_div(y.shape[1], tile.columns), 1),
        {"x": x, "y": y, "batch": y.shape[0]},
        {
            **constants,
            "ROWS": rows,
            "PACKED": ctx.gpu.sm >= _PACKED_MAXIMA,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
        },
        writes=(y,),
    )


def emit_global_average(ctx: LoweringContext, group: Group) -> None:
    """Add a GlobalAveragePool."""
    op = group.root_operation
    if len(ctx.network.shapes[op.inputs[0]]) != 4:
        reduction.emit_global_pool(ctx, group)
        return
    x, x_pitch = ctx.stored_pixels(op.inputs[0])
    batch, channels, height, width = x.shape
    y = ctx.make(group.result, channels_last(ctx.network.shapes[group.result]))
    steps = ctx.expression(op.outputs[0], group.after, x.scale).steps
    pixels = height * width
    block = _average_channels(x, ctx.gpu)
    parts = _parts(opt(batch), channels, block, opt(pixels), ctx.gpu)
    at_once = (_average(ctx, _Average(x, x_pitch, y, pixels, 1, pixels, steps)),)
    if parts == 1 or not fixed(pixels):
        ctx.add(group.nodes, at_once)
        return
    # Few images do not fill the GPU: parts of their pixels are summed first.
    sums = ctx.allocate(
        f"{y.base} (sums)",
        "float32",
        (batch, channels, parts, 1),
        (channels * parts, 1, channels, 1),
    )
    first = _average(ctx, _Average(x, x_pitch, sums, pixels, parts, 1, ()))
    second = _average(ctx, _Average(sums, channels, y, parts, 1, pixels, steps))
    ctx.add(group.nodes, (first, second), at_once)


@dataclass(frozen=True, slots=True)
class _Average:
    """A call: sums over `parts` of `pixels` of x, divided, to y; y has a row for each part."""

    x: View
    x_pitch: int
    y: View
    pixels: int
    parts: int
    divisor: int
    steps: tuple[ExprOp, ...]


def _average_channels(x: View, gpu: GpuTarget) -> int:
    """Return the channels of a block: the wide ones where their blocks fill the GPU eight times."""
    batch, channels = opt(x.shape[0]), x.shape[1]
    wide = _WIDE_AVERAGE_BYTES // x.item_bytes
    fills = batch * ceil_div(channels, wide) >= _AVERAGE_BLOCKS * gpu.sm_count
    narrow = max(_AVERAGE_CHANNELS, _AVERAGE_BYTES // x.item_bytes)
    return wide if fills else min(narrow, max(power_of_two(channels), 16))


def _parts(batch: int, channels: int, block: int, pixels: int, gpu: GpuTarget) -> int:
    """Return into how many parts the pixels are split, so that blocks fill the GPU."""
    blocks = batch * ceil_div(channels, block)
    return max(1, min(_AVERAGE_BLOCKS * gpu.sm_count // blocks, pixels // _AVERAGE_PIXELS))


def _average(ctx: LoweringContext, one: _Average) -> KernelLaunch:
    batch, channels = one.x.shape[:2]
    block = _average_channels(one.x, ctx.gpu)
    most = _AVERAGE_NUMBERS // block
    if one.x.item_bytes > 1:
        most = min(most, _AVERAGE_PIXELS)
    pixels = min(power_of_two(ceil_div(one.pixels, one.parts)), most)
    return ctx.make_launch(
        "global_average",
        (batch, ceil_div(channels, block), one.parts),
        {"x": one.x, "y": one.y, "batch": batch},
        {
            "PIXELS": one.pixels,
            "CHANNELS": channels,
            "X_PITCH": one.x_pitch,
            "Y_PITCH": channels if one.parts > 1 else one.y.pixel_pitch(),
            "SPLIT_K": one.parts,
            "DIVISOR": one.divisor,
            "EPILOGUE": one.steps,
            "BLOCK_M": pixels,
            "BLOCK_N": block,
        },
        writes=(one.y,),
    )
