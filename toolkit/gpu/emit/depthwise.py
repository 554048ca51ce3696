"""Lower depthwise convolutions to `depthwise_int8`, or to `depthwise` where that does not apply."""

from math import prod

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.conv2d import Conv2d
from toolkit.gpu.emit.depthwise_int8 import depthwise_int8_launches
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.emit.windows import window_constants
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.schedule.tiles import pixel_columns, ranked_rows
from toolkit.gpu.shapes.sizes import ceil_div

_ROWS = (4, 7, 2, 1)  # output rows of a block; of equally good ones the first
_MAX_TACTICS = 2  # of an engine
_MIN_TAPS_FOR_ONE_ROW = 50  # from here on a block has one row


def emit_depthwise(ctx: LoweringContext, nodes: tuple[str, ...], conv: Conv2d) -> None:
    """Add a depthwise convolution."""
    launches = depthwise_int8_launches(ctx, conv) or _launches(ctx, conv)
    ctx.add_op(nodes, *((launch,) for launch in launches))


def _launches(ctx: LoweringContext, conv: Conv2d) -> tuple[KernelLaunch, ...]:
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
