"""Lower Gather, Scatter and their variants."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.elementwise import broadcast
from toolkit.gpu.emit.launches import element_launch
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.view import Shape, View, row_major
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.loop_order import order_of
from toolkit.graph.dtypes import BFLOAT16
from toolkit.plugins import Constant

_BLOCK = 512  # elements of a block
_INDICES = ("j0", "j1", "j2", "j3")  # parameters of the kernels for indices of an element
# ONNX's `reduction` -> the types with such an atomic operation in PTX (atom.add, atom.max,
# atom.min) that Triton offers.
ATOMIC_TYPES: dict[str, tuple[str, ...]] = {
    "add": ("float16", "float32", "int32", "int64"),
    "max": ("float32", "int32", "int64"),
    "min": ("float32", "int32", "int64"),
}


@dataclass(frozen=True, slots=True)
class _Index:
    """The indices of one dimension of `size` and `stride`, broadcast to all elements."""

    view: View
    size: int
    stride: int


def emit_gather(ctx: LoweringContext, group: Group) -> None:
    """Lower Gather: a view where the indices are constant and evenly spaced, else a kernel."""
    op = group.root_operation
    x = ctx.read_for(op.inputs[0], op.outputs[0])
    axis = op.integer("axis", 0) % len(x.shape)
    if _gather_as_view(ctx, op, x, axis):
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
    """Lower GatherElements: one index for each element; the indices may be broadcast."""
    op = group.root_operation
    x = ctx.read_for(op.inputs[0], op.outputs[0])
    axis = op.integer("axis", 0) % len(x.shape)
    shape = ctx.network.shapes[op.outputs[0]]
    indices = broadcast(ctx.read(op.inputs[1]), shape)
    source = replace(x, shape=shape, strides=_without_axis(x.strides, axis))
    _gather(ctx, group, source, [_Index(indices, x.shape[axis], x.strides[axis])])


def emit_gather_nd(ctx: LoweringContext, group: Group) -> None:
    """Lower GatherND: the last dimension of the indices holds one per indexed dimension."""
    op = group.root_operation
    x, indices = ctx.read_for(op.inputs[0], op.outputs[0]), ctx.read(op.inputs[1])
    batch = op.integer("batch_dims", 0)
    count = indices.shape[-1]
    outer = indices.shape[:-1]  # batch dimensions first, as in x
    shape = (*outer, *x.shape[batch + count :])
    source = replace(
        x,
        shape=shape,
        strides=(
            *x.strides[:batch],
            *(0,) * (len(outer) - batch),
            *x.strides[batch + count :],
        ),
    )
    _gather(ctx, group, source, _index_columns(indices, shape, x, batch))


def emit_scatter_elements(ctx: LoweringContext, group: Group) -> None:
    """Lower ScatterElements: a copy, then each update to its index."""
    op = group.root_operation
    y = _copy_data(ctx, op)
    axis = op.integer("axis", 0) % len(y.shape)
    indices, updates = ctx.read(op.inputs[1]), ctx.read(op.inputs[2])
    target = replace(y, shape=indices.shape, strides=_without_axis(y.strides, axis))
    _scatter(
        ctx, group, updates, target, [_Index(indices, y.shape[axis], y.strides[axis])], whole=y
    )


def emit_scatter_nd(ctx: LoweringContext, group: Group) -> None:
    """Lower ScatterND: a copy, then slices of updates to their indices."""
    op = group.root_operation
    y = _copy_data(ctx, op)
    indices, updates = ctx.read(op.inputs[1]), ctx.read(op.inputs[2])
    count = indices.shape[-1]
    outer = (0,) * (len(indices.shape) - 1)
    target = replace(y, shape=updates.shape, strides=(*outer, *y.strides[count:]))
    _scatter(ctx, group, updates, target, _index_columns(indices, updates.shape, y, 0), whole=y)


def _gather_as_view(ctx: LoweringContext, op: Operation, x: View, axis: int) -> bool:
    """Gather constant, evenly spaced indices as a view; False where they are not."""
    values = ctx.network.constants.get(op.inputs[1])
    if values is None or values.ndim > 1:
        return False
    indices = [int(at) % x.shape[axis] for at in values.reshape(-1)]
    steps = set(np.diff(indices).tolist()) or {1}
    if len(steps) > 1:
        return False
    stride = x.strides[axis]
    row: Shape = (len(indices),) if values.ndim else ()
    ctx.views[op.outputs[0]] = replace(
        x,
        shape=(*x.shape[:axis], *row, *x.shape[axis + 1 :]),
        strides=(*x.strides[:axis], *(stride * steps.pop() for _ in row), *x.strides[axis + 1 :]),
        offset=x.offset + indices[0] * stride,
    )
    return True


def _copy_data(ctx: LoweringContext, op: Operation) -> View:
    """Return the output of a scatter, with a copy of its first operand.

    It is FP32 beside a tensor of BF16, which no atomic operation joins before sm_90.
    """
    name = op.outputs[0]
    y = ctx.output_view(name)
    if y.dtype == BFLOAT16 and op.text("reduction", "none") != "none":
        y = ctx.allocate(f"{name} (sums)", "float32", y.shape)
    ctx.add_elementwise(y, [ctx.read(op.inputs[0])], (), (op.name,))
    return y


def _index_columns(indices: View, shape: Shape, x: View, first: int) -> list[_Index]:
    """Return the columns of the indices, each broadcast over the slices that it selects."""
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


def _without_axis(strides: Shape, axis: int) -> Shape:
    return (*strides[:axis], 0, *strides[axis + 1 :])


def _gather(ctx: LoweringContext, group: Group, x: View, indices: list[_Index]) -> None:
    name = group.root_operation.outputs[0]
    y = ctx.output_view(name)
    views = [y, x, *(index.view for index in indices)]
    order = order_of(ctx.network.shapes[name], [view.strides for view in views])
    constants = _constants(order.shape, order.strides, indices)
    tensors = {"x": x, **_index_operands(indices)}
    ctx.add_op(group.nodes, (element_launch("gather", y, tensors, constants, block=_BLOCK),))


def _scatter(
    ctx: LoweringContext,
    group: Group,
    updates: View,
    target: View,
    indices: list[_Index],
    *,
    whole: View,
) -> None:
    """Add a scatter of floats into `whole`; `target` views it with stride 0 where it is indexed."""
    op = group.root_operation
    reduction = _reduction(op, whole)
    if whole.scale is not None or updates.scale is not None:
        raise NotCoveredError(f"node {op.name!r} ({op.kind}) works on INT8; kernels take numbers")
    # In the order of the updates: the target's strides may all be 0.
    views = [target, updates, *(index.view for index in indices)]
    strides = [row_major(updates.shape), *(view.strides for view in views)]
    order = order_of(updates.shape, strides)
    constants = _constants(order.shape, order.strides[1:], indices) | {"REDUCTION": reduction}
    tensors = {"x": updates, **_index_operands(indices)}
    launch = element_launch("scatter", whole, tensors, constants, block=_BLOCK, over=updates)
    ctx.add_op(group.nodes, (launch,))
    result = ctx.views[op.outputs[0]]
    if result != whole:
        ctx.add_elementwise(result, [whole], (), group.nodes)


def _index_operands(indices: Sequence[_Index]) -> dict[str, View | None]:
    views = dict(zip(_INDICES, (index.view for index in indices), strict=False))
    return {name: views.get(name) for name in _INDICES}


def _constants(
    shape: Shape, strides: Sequence[Shape], indices: Sequence[_Index]
) -> dict[str, Constant]:
    """Return the constants of an order of elements; `strides`: of y, x and the indices."""
    return {
        "SHAPE": (0, *shape[1:]),
        "Y_STRIDES": strides[0],
        "X_STRIDES": strides[1],
        "J_STRIDES": tuple(strides[2:]),
        "SIZES": tuple(index.size for index in indices),
        "INDEXED_STRIDES": tuple(index.stride for index in indices),
    }


def _reduction(op: Operation, y: View) -> str:
    reduction = op.text("reduction", "none")
    if reduction == "none":
        return "none"
    types = ATOMIC_TYPES.get(reduction, ())
    if y.dtype not in types:
        raise NotCoveredError(
            f"node {op.name!r} ({op.kind}) joins {y.dtype} by {reduction!r}; GPUs do that at once "
            f"for {', '.join(types) or 'no type'}"
        )
    return reduction
