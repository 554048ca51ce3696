"""Reductions, pooling over whole pictures, and the places of extremes -> calls."""

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
# Less and more than every number, and where all other joins start.
_LEAST = {True: float("-inf"), False: -(2**63)}
_MOST = {True: float("inf"), False: 2**63 - 1}


def emit_reduce(ctx: LoweringContext, group: Group) -> None:
    """Add one of the Reduce operators."""
    op = group.root_operation
    x = _read(ctx, op.inputs[0])
    axes = _axes(ctx, op, len(x.shape))
    if not axes and op.integer("noop_with_empty_axes", 0):
        ctx.views[group.result] = x
        return
    along = axes or tuple(range(len(x.shape)))
    y = _kept(ctx.make(group.result), x.shape, along, op.integer("keepdims", 1) == 1)
    _reduce(ctx, group, (x, y), along, _MODES[op.kind])


def emit_global_pool(ctx: LoweringContext, group: Group) -> None:
    """Add a GlobalAveragePool, GlobalMaxPool or GlobalLpPool of any rank."""
    op = group.root_operation
    x = ctx.read_float(op.inputs[0])
    along = tuple(range(2, len(x.shape)))
    y = _kept(ctx.make(group.result), x.shape, along, True)
    _reduce(ctx, group, (x, y), along, _POOLS[op.kind], power=float(op.integer("p", 2)))


def emit_find_extreme(ctx: LoweringContext, group: Group) -> None:
    """Add an ArgMax or ArgMin."""
    op = group.root_operation
    x = _read(ctx, op.inputs[0])
    along = (op.integer("axis", 0) % len(x.shape),)
    y = _kept(ctx.make(group.result), x.shape, along, op.integer("keepdims", 1) == 1)
    greatest = op.kind == "ArgMax"
    walk = plan_strided_rows([x, y], along)
    tile = tile_rows(walk)
    call = ctx.make_launch(
        "find_extreme",
        tile.grid(walk),
        {"x": x, "y": y, "rows": walk.rows},
        {
            **walk.constants("X", "Y"),
            "GREATEST": greatest,
            "LAST": op.integer("select_last_index", 0) == 1,
            "START": (_LEAST if greatest else _MOST)[is_float(x.dtype)],
            **tile.constants(),
        },
        writes=(y,),
        warps=tile.warps,
    )
    ctx.add(group.nodes, (call,))


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
    walk = plan_strided_rows(views, along)
    tile = tile_rows(walk)
    op = group.root_operation
    starts = {"max": _LEAST, "min": _MOST, "prod": {True: 1.0, False: 1}}
    call = ctx.make_launch(
        "reduce",
        tile.grid(walk),
        {"x": x, "y": y, "rows": walk.rows},
        {
            **walk.constants("X", "Y"),
            "MODE": mode,
            "START": starts.get(mode, {True: 0.0, False: 0})[is_float(x.dtype)],
            "POWER": power,
            "EPILOGUE": ctx.expression(op.outputs[0], group.after).steps,
            **tile.constants(),
        },
        writes=(y,),
        warps=tile.warps,
    )
    ctx.add(group.nodes, (call,))


def _read(ctx: LoweringContext, name: str) -> View:
    """Return a tensor in the type that its elements are reduced in."""
    view = ctx.read(name)
    return ctx.read_float(name) if view.scale is not None or is_float(view.dtype) else view


def _axes(ctx: LoweringContext, op: Operation, rank: int) -> tuple[int, ...]:
    """Read the axes, an attribute or a constant; () where there are none."""
    axes = op.integers("axes", ())
    if op.input(1):
        if op.input(1) not in ctx.network.constants:
            raise NotCoveredError(
                f"node {op.name!r} ({op.kind}) has axes that are not constant ({op.input(1)!r})"
            )
        axes = tuple(int(axis) for axis in ctx.network.constants[op.input(1)].reshape(-1))
    return tuple(sorted(axis % rank for axis in axes))


def _kept(view: View, shape: Shape, along: Sequence[int], kept: bool) -> View:
    """Return the result repeated along what is reduced, so that it has the operand's shape."""
    steps = iter(view.strides)
    strides = []
    for at in range(len(shape)):
        if at in along:
            strides.append(0)
            if kept:
                next(steps)
        else:
            strides.append(next(steps))
    return replace(view, shape=shape, strides=tuple(strides))
