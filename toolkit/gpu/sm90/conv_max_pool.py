"""First convolutions fused with the max pooling after them."""

from dataclasses import dataclass

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.conv2d import read_filters
from toolkit.gpu.emit.epilogue import pixel_pitch, precision_of, weight_matrix
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.ir.gemm import Epilogue
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.view import View, channels_last
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import ceil_div, opt, power_of_two
from toolkit.gpu.target import GpuTarget

_SEGMENT = 7  # adjacent pooled pixels of a row
_SEGMENTS = 4  # of a block
_FILTERS = 64  # of a block: the rows of a wgmma instruction
# Pooled rows per block: more reuse more accumulator rows, as long as the blocks fill the GPU. The
# first convolution of ResNet-50 in INT8 on 132 SMs: 28 rows 82 us and 14 rows 86 at batch 128; at
# batch 32 28 rows (128 blocks) 27, 14 rows (256) 23, 7 rows 26.
_ROWS = (28, 14, 7, 4, 2, 1)
_MIN_DEPTH = 32
_WARPS = 4
_STAGES = 3  # input rows that are prefetched
_MAX_TACTICS = 2  # of an engine


@dataclass(frozen=True, slots=True)
class _ConvMaxPool:
    """A convolution of `taps` to `size` (rows, columns), pooled to y (N, C, H, W), channels-last.

    `pads_before`: of the pooling, above and to the left.
    """

    x: View
    weights: View
    y: View
    taps: tuple[int, int]
    size: tuple[int, ...]
    pads_before: tuple[int, ...]
    epilogue: Epilogue


def emit_conv_max_pool(ctx: LoweringContext, group: Group) -> None:
    """Add a ConvMaxPool with its epilogue."""
    op = group.root_operation
    filters = read_filters(ctx, group)
    weights = filters.values
    x = ctx.read(op.inputs[0], filters.numbers, "channels last")
    # (filter, channel, row, column) -> (filter, row, column, channel)
    values = weights.transpose(0, 2, 3, 1).reshape(len(weights), -1)
    packed = weight_matrix(ctx, values.T, x.dtype)
    conv = _ConvMaxPool(
        x=x,
        weights=packed,
        y=ctx.output_view(group.result, channels_last(ctx.network.shapes[group.result])),
        taps=(weights.shape[2], weights.shape[3]),
        size=op.integers("size", ()),
        pads_before=op.integers("before", ()),
        epilogue=filters.epilogue,
    )
    ctx.add_op(group.nodes, *((_launch(ctx, conv, rows),) for rows in _rows(conv, ctx.gpu)))


def _rows(conv: _ConvMaxPool, gpu: GpuTarget) -> list[int]:
    """Return the numbers of pooled rows to try: the largest with blocks for all SMs."""
    _, filters, height, _ = conv.y.shape
    blocks = ceil_div(opt(_segments(conv)), _SEGMENTS) * ceil_div(filters, _FILTERS)
    enough = 3 * gpu.sm_count // 2  # an SM holds two
    full = [rows for rows in _ROWS if blocks * ceil_div(height, rows) >= enough]
    return (full or [1])[: None if gpu.exhaustive else _MAX_TACTICS]


def _segments(conv: _ConvMaxPool) -> int:
    """Return the number of segments in a pooled row of all images."""
    return conv.y.shape[0] * ceil_div(conv.y.shape[3], _SEGMENT)


def _launch(ctx: LoweringContext, conv: _ConvMaxPool, rows: int) -> KernelLaunch:
    batch, filters, height, width = conv.y.shape
    channels = conv.x.shape[1]
    return make_launch(
        "conv_max_pool",
        (
            ceil_div(_segments(conv), _SEGMENTS),
            ceil_div(height, rows),
            ceil_div(filters, _FILTERS),
        ),
        {
            "x": conv.x,
            "weights": conv.weights,
            **conv.epilogue.operands(),
            "y": conv.y,
            "batch": batch,
        },
        {
            "HEIGHT": conv.x.shape[2],
            "WIDTH": conv.x.shape[3],
            "CHANNELS": channels,
            "CONV_HEIGHT": conv.size[0],
            "CONV_WIDTH": conv.size[1],
            "FILTERS": filters,
            "OUT_HEIGHT": height,
            "OUT_WIDTH": width,
            "W_PITCH": conv.weights.strides[1],
            "Y_PITCH": pixel_pitch(conv.y),
            "TAP_ROWS": conv.taps[0],
            "TAP_COLUMNS": conv.taps[1],
            "PAD_TOP": conv.pads_before[0],
            "PAD_LEFT": conv.pads_before[1],
            "EPILOGUE": conv.epilogue.ops,
            "PRECISION": precision_of(ctx.gpu, conv.x.dtype),
            "ROWS": rows,
            "SEGMENTS": _SEGMENTS,
            "BLOCK_F": _FILTERS,
            "BLOCK_K": max(_MIN_DEPTH, power_of_two(conv.taps[1] * channels)),
            "STAGES": _STAGES,
        },
        writes=(conv.y,),
        warps=_WARPS,
        stages=_STAGES,
    )
