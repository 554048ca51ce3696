"""Lower depthwise convolutions to `depthwise_int8`, or to `depthwise` where that does not apply."""

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.conv2d import Conv2d
from toolkit.gpu.emit.depthwise_int8 import depthwise_int8_launches
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.emit.windows import window_constants
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.schedule.tiles import row_tile
from toolkit.gpu.shapes.sizes import ceil_div, opt
from toolkit.gpu.target import GpuTarget

_ROWS = (4, 7, 2, 1)  # output rows of a block; of equally good ones the first
_MIN_TAPS_FOR_ONE_ROW = 50  # from here on a block has one row


def emit_depthwise(ctx: LoweringContext, nodes: tuple[str, ...], conv: Conv2d) -> None:
    """Add a depthwise convolution."""
    launches = depthwise_int8_launches(ctx, conv) or _launches(ctx, conv)
    ctx.add_op(nodes, *((launch,) for launch in launches))


def _launches(ctx: LoweringContext, conv: Conv2d) -> tuple[KernelLaunch, ...]:
    channels = conv.weights.shape[0]
    weights = ctx.weights.pack(conv.weights[:, 0].transpose(1, 2, 0), conv.left.view.dtype)

    def launch(rows: int) -> KernelLaunch:
        pixel_columns = _pixel_columns(conv, rows)
        tile = row_tile(pixel_columns, channels)
        return make_launch(
            "depthwise",
            (ceil_div(pixel_columns, tile.rows), ceil_div(channels, tile.columns), 1),
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

    return tuple(launch(rows) for rows in _rows_of_block(conv, ctx.gpu))


def _pixel_columns(conv: Conv2d, rows: int) -> int:
    """Return the number of columns of `rows` vertically adjacent output pixels."""
    return conv.y.shape[0] * ceil_div(conv.y.shape[2], rows) * conv.y.shape[3]


def _rows_of_block(conv: Conv2d, gpu: GpuTarget) -> tuple[int, ...]:
    """Return the output rows per block to try, the best by estimate first.

    More rows load fewer inputs, as long as there are blocks for all SMs and no row is masked.
    """
    taps = conv.left.window.kernel
    if taps[0] * taps[1] >= _MIN_TAPS_FOR_ONE_ROW:
        return (1,)
    channels, height = conv.weights.shape[0], opt(conv.y.shape[2])

    def order(rows: int) -> tuple[bool, int, int]:
        pixel_columns = opt(_pixel_columns(conv, rows))
        tile = row_tile(pixel_columns, channels)
        blocks = ceil_div(pixel_columns, tile.rows) * ceil_div(channels, tile.columns)
        return blocks < gpu.sm_count, -height % rows, _ROWS.index(rows)

    return tuple(sorted(_ROWS, key=order)[: len(_ROWS) if gpu.exhaustive else 2])
