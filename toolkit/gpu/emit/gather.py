"""Gather and Scatter, and their kind -> calls."""

from dataclasses import dataclass, replace

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.elementwise import broadcast
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.view import Shape, View, row_major
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.loop_order import order_of
from toolkit.gpu.shapes.sizes import ceil_div

_BLOCK = 512  # elements of one block
_MOST_INDICES = 4  # that the kernels read for an element
# ONNX's `reduction` -> how the kernel joins an update with what lies there, and in which types: of
# the atomic operations of PTX (atom.add, atom.max, atom.min) those that Triton gives a name.
_JOINS: dict[str, tuple[str, frozenset[str]]] = {
    "add": ("add", frozenset({"float32", "float16", "int32", "int64"})),
    "max": ("max", frozenset({"float32", "int32", "int64"})),
    "min": ("min", frozenset({"float32", "int32", "int64"})),
}


@dataclass(frozen=True, slots=True)
class _Index:
    """Indices of one dimension, for each element; `size` and `stride` of that dimension."""

    view: View
    size: int
    stride: int


def emit_gather(ctx: LoweringContext, group: Group) -> None:
    """Gather: a slice where the indices are constant and evenly spaced, else a kernel."""
    op = group.root_operation
    x = _source(ctx, op)
    axis = op.integer("axis", 0) % len(x.shape)
    if _gather_evenly(ctx, op, x, axis):
        return
    indices = ctx.read(op.inputs[1])
    rank = len(indices.shape)
    outer, inner = x.shape[:axis], x.shape[axis + 1 :]
    shape = (*outer, *indices.shape, *inner)
    source = replace(
        x, shape=shape, strides=(*x.strides[:axis], *(0,) * rank, *x.strides[axis + 1 :])
    )
    index = replace(
        indices, shape=shape, strides=(*(0,) * axis, *indices.strides, *(0,) * len(inner))
    )
    _gather(ctx, group, source, [_Index(index, x.shape[axis], x.strides[axis])])


def emit_gather_elements(ctx: LoweringContext, group: Group) -> None:
    """GatherElements: one index for each element of the result; also one for several of them."""
    op = group.root_operation
    x = _source(ctx, op)
    axis = op.integer("axis", 0) % len(x.shape)
    shape = ctx.network.shapes[op.outputs[0]]
    indices = broadcast(ctx.read(op.inputs[1]), shape)
    source = replace(x, shape=shape, strides=_without(x.strides, axis))
    _gather(ctx, group, source, [_Index(indices, x.shape[axis], x.strides[axis])])


def emit_gather_nd(ctx: LoweringContext, group: Group) -> None:
    """GatherND: the last dimension of the indices holds one for each of some dimensions."""
    op = group.root_operation
    x, indices = _source(ctx, op), ctx.read(op.inputs[1])
    batch = op.integer("batch_dims", 0)
    count = indices.shape[-1]
    rest = indices.shape[:-1]  # batch dimensions first, as in x
    shape = (*rest, *x.shape[batch + count :])
    source = replace(
        x,
        shape=shape,
        strides=(
            *x.strides[:batch],
            *(0,) * (len(rest) - batch),
            *x.strides[batch + count :],
        ),
    )
    _gather(ctx, group, source, _parts(indices, shape, x, batch))


def emit_scatter_elements(ctx: LoweringContext, group: Group) -> None:
    """ScatterElements: a copy, and each update at its index."""
    op = group.root_operation
    y = _copied(ctx, op)
    axis = op.integer("axis", 0) % len(y.shape)
    indices, updates = ctx.read(op.inputs[1]), ctx.read(op.inputs[2])
    target = replace(y, shape=indices.shape, strides=_without(y.strides, axis))
    _scatter(
        ctx, group, updates, target, [_Index(indices, y.shape[axis], y.strides[axis])], whole=y
    )


def emit_scatter_nd(ctx: LoweringContext, group: Group) -> None:
    """ScatterND: a copy, and slices of updates at their indices."""
    op = group.root_operation
    y = _copied(ctx, op)
    indices, updates = ctx.read(op.inputs[1]), ctx.read(op.inputs[2])
    count = indices.shape[-1]
    rest = (0,) * (len(indices.shape) - 1)
    target = replace(y, shape=updates.shape, strides=(*rest, *y.strides[count:]))
    _scatter(ctx, group, updates, target, _parts(indices, updates.shape, y, 0), whole=y)


def _gather_evenly(ctx: LoweringContext, op: Operation, x: View, axis: int) -> bool:
    """Make a slice of constant indices that are evenly spaced; False where they are not."""
    values = ctx.network.constants.get(op.inputs[1])
    if values is None or values.ndim > 1:
        return False
    places = [int(at) % x.shape[axis] for at in values.reshape(-1)]
    steps = set(np.diff(places).tolist()) or {1}
    if len(steps) > 1:
        return False
    stride = x.strides[axis]
    row: Shape = (len(places),) if values.ndim else ()
    made = replace(
        x,
        shape=(*x.shape[:axis], *row, *x.shape[axis + 1 :]),
        strides=(*x.strides[:axis], *(stride * steps.pop() for _ in row), *x.strides[axis + 1 :]),
        offset=x.offset + places[0] * stride,
    )
    ctx.views[op.outputs[0]] = made
    return True


def _source(ctx: LoweringContext, op: Operation) -> View:
    """Return what is gathered; from another INT8 grid than the result's as real numbers."""
    view = ctx.read(op.inputs[0])
    same = view.scale == ctx.network.scales.get(op.outputs[0])
    return view if same else ctx.read_float(op.inputs[0])


def _copied(ctx: LoweringContext, op: Operation) -> View:
    """Return the result of a scatter, holding its first operand."""
    name = op.outputs[0]
    y = ctx.make(name)
    ctx.elementwise(y, [ctx.read(op.inputs[0])], (), (op.name,))
    return y


def _parts(indices: View, shape: Shape, x: View, first: int) -> list[_Index]:
    """Return the columns of indices, each repeated over the slices of a result or an update."""
    tail = (0,) * (len(shape) - len(indices.shape) + 1)
    column = replace(indices, shape=shape, strides=(*indices.strides[:-1], *tail))
    return [
        _Index(
            replace(column, offset=indices.offset + at * indices.strides[-1]),
            x.shape[first + at],
            x.strides[first + at],
        )
        for at in range(indices.shape[-1])
    ]


def _without(strides: Shape, axis: int) -> Shape:
    return (*strides[:axis], 0, *strides[axis + 1 :])


def _gather(ctx: LoweringContext, group: Group, x: View, indices: list[_Index]) -> None:
    name = group.root_operation.outputs[0]
    shape = ctx.network.shapes[name]
    y = ctx.make(name)
    views = [y, x, *(index.view for index in indices)]
    way = order_of(shape, [v.strides for v in views])
    call = ctx.make_launch(
        "gather",
        (ceil_div(y.elements, _BLOCK), 1, 1),
        {"x": x, **_named(indices), "y": y, "elements": y.elements},
        {
            "SHAPE": (0, *way.shape[1:]),
            "Y_STRIDES": way.strides[0],
            "X_STRIDES": way.strides[1],
            "J_STRIDES": way.strides[2:],
            "SIZES": tuple(index.size for index in indices),
            "EPILOGUE": tuple(index.stride for index in indices),
            "BLOCK": _BLOCK,
        },
        writes=(y,),
    )
    ctx.add(group.nodes, (call,))


def _scatter(
    ctx: LoweringContext,
    group: Group,
    updates: View,
    target: View,
    indices: list[_Index],
    *,
    whole: View,
) -> None:
    """Add a scatter of updates of real numbers into `target`, the places of `whole` without those
    of the indices.
    """
    op = group.root_operation
    join = _join(op, whole)
    if whole.scale is not None or updates.scale is not None:
        raise NotCoveredError(f"node {op.name!r} ({op.kind}) works on INT8; kernels take numbers")
    # In the order of the updates: the target's strides may all be 0.
    order = row_major(updates.shape)
    views = [target, updates, *(index.view for index in indices)]
    way = order_of(updates.shape, [order, *(v.strides for v in views)])
    call = ctx.make_launch(
        "scatter",
        (ceil_div(updates.elements, _BLOCK), 1, 1),
        {"x": updates, **_named(indices), "y": whole, "elements": updates.elements},
        {
            "SHAPE": (0, *way.shape[1:]),
            "Y_STRIDES": way.strides[1],
            "X_STRIDES": way.strides[2],
            "J_STRIDES": way.strides[3:],
            "SIZES": tuple(index.size for index in indices),
            "EPILOGUE": tuple(index.stride for index in indices),
            "JOIN": join,
            "BLOCK": _BLOCK,
        },
        writes=(whole,),
    )
    ctx.add(group.nodes, (call,))


def _join(op: Operation, y: View) -> str:
    reduction = op.text("reduction", "none")
    if reduction == "none":
        return "none"
    join, types = _JOINS.get(reduction, ("", frozenset[str]()))
    if y.dtype not in types:
        raise NotCoveredError(
            f"node {op.name!r} ({op.kind}) joins {y.dtype} by {reduction!r}; GPUs do that at once "
            f"for {', '.join(sorted(types)) or 'no type'}"
        )
    return join


def _named(indices: list[_Index]) -> dict[str, View | None]:
    views = [index.view for index in indices]
    return dict(zip(("j0", "j1", "j2", "j3"), [*views, *[None] * _MOST_INDICES], strict=False))
