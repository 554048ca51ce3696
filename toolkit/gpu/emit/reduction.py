"""Lower reductions, global pooling, ArgMax and ArgMin."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.strided_rows import add_row_kernel, plan_strided_rows
from toolkit.gpu.ir.dtypes import is_float
from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.view import Shape, View
from toolkit.gpu.passes.fusion import Group
from toolkit.plugins import Constant

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
    x = ctx.read(op.inputs[0], "float or integer")
    axes = _axes(ctx, op, len(x.shape))
    if not axes and op.integer("noop_with_empty_axes", 0):
        ctx.views[group.result] = x
        return
    along = axes or tuple(range(len(x.shape)))
    y = _result(ctx, group, x.shape, along)
    _reduce(ctx, group, (x, y), along, _MODES[op.kind])


def emit_global_pool(ctx: LoweringContext, group: Group) -> None:
    """Lower GlobalAveragePool, GlobalMaxPool and GlobalLpPool of any rank."""
    op = group.root_operation
    x = ctx.read(op.inputs[0], "float")
    along = tuple(range(2, len(x.shape)))
    y = _result(ctx, group, x.shape, along)
    _reduce(ctx, group, (x, y), along, _POOLS[op.kind], power=float(op.integer("p", 2)))


def emit_arg_reduce(ctx: LoweringContext, group: Group) -> None:
    """Lower ArgMax and ArgMin."""
    op = group.root_operation
    x = ctx.read(op.inputs[0], "float or integer")
    along = (op.integer("axis", 0) % len(x.shape),)
    y = _result(ctx, group, x.shape, along)
    is_max = op.kind == "ArgMax"
    constants: dict[str, Constant] = {
        "IS_MAX": is_max,
        "LAST": op.integer("select_last_index", 0) == 1,
        "IDENTITY": (_LOWEST if is_max else _HIGHEST)[is_float(x.dtype)],
    }
    layout = plan_strided_rows([x, y], along)
    add_row_kernel(ctx, group.nodes, "arg_reduce", {"x": x}, constants, y=y, layout=layout)


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
    constants: dict[str, Constant] = {
        "MODE": mode,
        "IDENTITY": _IDENTITIES.get(mode, _ZERO)[is_float(x.dtype)],
        "POWER": power,
        "EPILOGUE": ctx.expression(group.root_operation.outputs[0], group.after).ops,
    }
    layout = plan_strided_rows(views, along)
    add_row_kernel(ctx, group.nodes, "reduce", {"x": x}, constants, y=y, layout=layout)


def _axes(ctx: LoweringContext, op: Operation, rank: int) -> tuple[int, ...]:
    """Read the axes, an attribute or a constant; () where they are absent."""
    axes = op.integers("axes", ())
    if op.input(1):
        axes = tuple(int(axis) for axis in ctx.network.constants[op.input(1)].reshape(-1))
    return tuple(sorted(axis % rank for axis in axes))


def _result(ctx: LoweringContext, group: Group, shape: Shape, along: Sequence[int]) -> View:
    """Return the result broadcast along the reduced dimensions to the operand's shape."""
    view = ctx.output_view(group.result)
    keepdims = group.root_operation.integer("keepdims", 1) == 1  # global pooling has no flag
    reduced = {at for at in range(len(shape)) if at in along}
    remaining = range(len(shape)) if keepdims else sorted(set(range(len(shape))) - reduced)
    by_dim = dict(zip(remaining, view.strides, strict=True))
    strides = tuple(0 if at in reduced else by_dim[at] for at in range(len(shape)))
    return replace(view, shape=shape, strides=strides)
