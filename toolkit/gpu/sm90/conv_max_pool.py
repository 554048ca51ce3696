"""First convolutions fused with the max pooling after them."""

from math import prod

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.epilogue import (
    constant_weights,
    pixel_pitch,
    precision_of,
    read_epilogue,
    weight_matrix,
)
from toolkit.gpu.emit.int8_gemm import int8_weights
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.view import channels_last
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import ceil_div, opt, power_of_two

_SEGMENT = 7  # pooled pixels of a row that the kernel makes together
_SEGMENTS = 4  # of a block
_FILTERS = 64  # of a block: as many rows as tensor cores of sm_90 take
# Pooled rows that a block goes down: more share more rows of sums, while blocks fill the GPU. The
# first convolution of ResNet-50 in INT8 on 132 SMs: 28 rows 82 us and 14 rows 86 at batch 128; at
# batch 32 28 rows (128 blocks) 27, 14 rows (256) 23, 7 rows 26.
_ROWS = (28, 14, 7, 4, 2, 1)
_LEAST_DEPTH = 32
_WARPS = 4
_STAGES = 3  # input rows that are prefetched
_CARRIED = 2  # numbers of rows that an engine carries


def emit_conv_max_pool(ctx: LoweringContext, group: Group) -> None:
    """Add a ConvMaxPool and what follows it: one call."""
    op = group.root_operation
    weights = constant_weights(ctx, op, 1)
    filters, channels, tap_rows, tap_columns = weights.shape
    int8 = int8_weights(ctx, op, 0, filters, prod(weights.shape[1:]))
    values = int8.values if int8 else weights
    epilogue, _ = read_epilogue(ctx, group, op.input(2), filters, int8)
    x, _ = ctx.read_nhwc(op.inputs[0], keep_int8=int8 is not None)
    # (filter, channel, row, column) -> (filter, row, column, channel)
    packed = values.transpose(0, 2, 3, 1).reshape(filters, -1)
    matrix = weight_matrix(ctx, packed.T, x.dtype)
    y = ctx.output_view(group.result, channels_last(ctx.network.shapes[group.result]))
    batch, _, height, width = y.shape
    segments = batch * ceil_div(width, _SEGMENT)
    before, size = op.integers("before", ()), op.integers("size", ())
    depth = max(_LEAST_DEPTH, power_of_two(tap_columns * channels))

    def call(rows: int) -> KernelLaunch:
        return ctx.make_launch(
            "conv_max_pool",
            (
                ceil_div(segments, _SEGMENTS),
                ceil_div(height, rows),
                ceil_div(filters, _FILTERS),
            ),
            {
                "x": x,
                "weights": matrix,
                "bias": epilogue.bias,
                "scale": epilogue.scale,
                "scalars": epilogue.scalars,
                "y": y,
                "batch": batch,
            },
            {
                "HEIGHT": x.shape[2],
                "WIDTH": x.shape[3],
                "CHANNELS": channels,
                "CONV_HEIGHT": size[0],
                "CONV_WIDTH": size[1],
                "FILTERS": filters,
                "OUT_HEIGHT": height,
                "OUT_WIDTH": width,
                "W_PITCH": matrix.strides[1],
                "Y_PITCH": pixel_pitch(y),
                "TAP_ROWS": tap_rows,
                "TAP_COLUMNS": tap_columns,
                "PAD_TOP": before[0],
                "PAD_LEFT": before[1],
                "EPILOGUE": epilogue.ops,
                "PRECISION": precision_of(ctx.gpu, x.dtype),
                "ROWS": rows,
                "SEGMENTS": _SEGMENTS,
                "BLOCK_F": _FILTERS,
                "BLOCK_K": depth,
                "STAGES": _STAGES,
            },
            writes=(y,),
            warps=_WARPS,
            stages=_STAGES,
        )

    blocks = ceil_div(opt(segments), _SEGMENTS) * ceil_div(filters, _FILTERS)
    enough = 3 * ctx.gpu.sm_count // 2  # an SM holds two
    full = [rows for rows in _ROWS if blocks * ceil_div(height, rows) >= enough]
    carried = (full or [1])[: None if ctx.gpu.exhaustive else _CARRIED]
    ctx.add_op(group.nodes, *((call(rows),) for rows in carried))
