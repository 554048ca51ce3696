"""Lower CumSum and CumProd."""

from math import prod

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.loop_order import order_of
from toolkit.gpu.shapes.sizes import ceil_div, power_of_two

_BLOCK = 1024  # elements of a block


def emit_scan(ctx: LoweringContext, group: Group) -> None:
    """Lower CumSum and CumProd."""
    op = group.root_operation
    x = ctx.read(op.inputs[0], "real")
    y = ctx.output_view(op.outputs[0])
    axis = int(ctx.network.constants[op.inputs[1]].reshape(())) % len(x.shape)
    outer = [at for at in range(len(x.shape)) if at != axis]
    shape = tuple(x.shape[at] for at in outer)
    order = order_of(shape, [tuple(v.strides[at] for at in outer) for v in (y, x)])
    columns, rows = x.shape[axis], prod(shape)
    block = min(power_of_two(columns), _BLOCK)
    block_rows = min(power_of_two(rows), max(1, _BLOCK // block))
    launch = make_launch(
        "scan",
        (ceil_div(rows, block_rows), 1, 1),
        {"x": x, "y": y, "rows": rows},
        {
            "COLUMNS": columns,
            **order.constants("Y_STRIDES", "X_STRIDES"),
            "X_STRIDE": x.strides[axis],
            "Y_STRIDE": y.strides[axis],
            "PRODUCT": op.kind == "CumProd",
            "EXCLUSIVE": bool(op.integer("exclusive", 0)),
            "REVERSE": bool(op.integer("reverse", 0)),
            "ROWS": block_rows,
            "BLOCK": block,
        },
        writes=(y,),
    )
    ctx.add_op(group.nodes, (launch,))
