"""Lower reductions, global pooling, ArgMax and ArgMin."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.strided_rows import plan_strided_rows, tile_rows
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.dtypes import is_float
from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.view import Shape, View
from toolkit.gpu.passes.fusion import Group

_MODES: Mapping[str, str] = {
    "ReduceSum": "sum",
    "ReduceMean": "mean",
    "ReduceMax": "max",
    "ReduceMin": "min",
    "ReduceProd": "prod",
    "ReduceL1": "l1",
    "ReduceL2": "l2",
    "ReduceSumSquare": "sum_square",
    "ReduceLogSum": "log_sum",
    "ReduceLogSumExp": "log_sum_exp",
}
_POOLS: Mapping[str, str] = {
    "GlobalAveragePool": "mean",
    "GlobalMaxPool": "max",
    "GlobalLpPool": "lp",
}
# The identity of a reduction, of floats (True) and of integers; 0 for all other modes.
_LOWEST = {True: float("-inf"), False: -(2**63)}
_HIGHEST = {True: float("inf"), False: 2**63 - 1}
_IDENTITIES: Mapping[str, Mapping[bool, float]] = {
    "max": _LOWEST,
    "min": _HIGHEST,
    "prod": {True: 1.0, False: 1},
}
_ZERO: Mapping[bool, float] = {True: 0.0, False: 0}


def emit_reduce(ctx: LoweringContext, group: Group) -> None:
    """Lower the Reduce operators."""
    op = group.root_operation
    x = _read(ctx, op.inputs[0])
    axes = _axes(ctx, op, len(x.shape))
    if not axes and op.integer("noop_with_empty_axes", 0):
        ctx.views[group.result] = x
        return
    along = axes or tuple(range(len(x.shape)))
    y = _broadcast_result(
        ctx.output_view(group.result), x.shape, along, op.integer("keepdims", 1) == 1
    )
    _reduce(ctx, group, (x, y), along, _MODES[op.kind])


def emit_global_pool(ctx: LoweringContext, group: Group) -> None:
    """Lower GlobalAveragePool, GlobalMaxPool and GlobalLpPool of any rank."""
    op = group.root_operation
    x = ctx.read_float(op.inputs[0])
    along = tuple(range(2, len(x.shape)))
    y = _broadcast_result(ctx.output_view(group.result), x.shape, along, True)
    _reduce(ctx, group, (x, y), along, _POOLS[op.kind], power=float(op.integer("p", 2)))


def emit_arg_reduce(ctx: LoweringContext, group: Group) -> None:
    """Lower ArgMax and ArgMin."""
    op = group.root_operation
    x = _read(ctx, op.inputs[0])
    along = (op.integer("axis", 0) % len(x.shape),)
    y = _broadcast_result(
        ctx.output_view(group.result), x.shape, along, op.integer("keepdims", 1) == 1
    )
    is_max = op.kind == "ArgMax"
    layout = plan_strided_rows([x, y], along)
    tile = tile_rows(layout)
    launch = ctx.make_launch(
        "arg_reduce",
        tile.grid(layout),
        {"x": x, "y": y, "rows": layout.rows},
        {
            **layout.constants("X", "Y"),
            "IS_MAX": is_max,
            "LAST": op.integer("select_last_index", 0) == 1,
            "IDENTITY": (_LOWEST if is_max else _HIGHEST)[is_float(x.dtype)],
            **tile.constants(),
        },
        writes=(y,),
        warps=tile.warps,
    )
    ctx.add_op(group.nodes, (launch,))


def _reduce(
    ctx: LoweringContext,
    group: Group,
    views: tuple[View, View],
    along: Sequence[int],
    mode: str,
    *,
    power: float = 2.0,
) -> None:
    x, y = views
    layout = plan_strided_rows(views, along)
    tile = tile_rows(layout)
    op = group.root_operation
    launch = ctx.make_launch(
        "reduce",
        tile.grid(layout),
        {"x": x, "y": y, "rows": layout.rows},
        {
            **layout.constants("X", "Y"),
            "MODE": mode,
            "IDENTITY": _IDENTITIES.get(mode, _ZERO)[is_float(x.dtype)],
            "POWER": power,
            "EPILOGUE": ctx.expression(op.outputs[0], group.after).ops,
            **tile.constants(),
        },
        writes=(y,),
        warps=tile.warps,
    )
    ctx.add_op(group.nodes, (launch,))


def _read(ctx: LoweringContext, name: str) -> View:
    """Return a tensor as activations if it holds floats, else as it is stored."""
    view = ctx.read(name)
    return ctx.read_float(name) if view.scale is not None or is_float(view.dtype) else view


def _axes(ctx: LoweringContext, op: Operation, rank: int) -> tuple[int, ...]:
    """Read the axes, an attribute or a constant; () where they are absent."""
    axes = op.integers("axes", ())
    if op.input(1):
        if op.input(1) not in ctx.network.constants:
            raise NotCoveredError(
                f"node {op.name!r} ({op.kind}) has axes that are not constant ({op.input(1)!r})"
            )
        axes = tuple(int(axis) for axis in ctx.network.constants[op.input(1)].reshape(-1))
    return tuple(sorted(axis % rank for axis in axes))


def _broadcast_result(view: View, shape: Shape, along: Sequence[int], keepdims: bool) -> View:
    """Return the result broadcast along the reduced dimensions to the operand's shape."""
    reduced = {at for at in range(len(shape)) if at in along}
    remaining = range(len(shape)) if keepdims else sorted(set(range(len(shape))) - reduced)
    by_dim = dict(zip(remaining, view.strides, strict=True))
    strides = tuple(0 if at in reduced else by_dim[at] for at in range(len(shape)))
    return replace(view, shape=shape, strides=strides)
