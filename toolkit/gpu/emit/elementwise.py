"""Lower groups of element-wise operations."""

from dataclasses import replace

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.expressions import extract_scalars
from toolkit.gpu.ir.network import RESHAPES
from toolkit.gpu.ir.view import Shape, View, channels_last, like
from toolkit.gpu.passes.fusion import Group

NHWC_KINDS = frozenset({"Conv", "MaxPool", "AveragePool", "GlobalAveragePool"})  # read NHWC


def emit_elementwise(ctx: LoweringContext, group: Group) -> None:
    """Lower an expression; the result has the layout of its first operand of the same shape.

    A tensor that NHWC kernels read is written NHWC, one that only reshapes would copy is written
    row-major.
    """
    shape = ctx.network.shapes[group.result]
    expression = ctx.expression(None, group.after)
    if not expression.operands:
        raise NotCoveredError(f"node {group.nodes[0]!r} reads constants only; fold it")
    operands = [broadcast(ctx.read(name), shape) for name in expression.operands]
    unbroadcast = next((v for v in operands if 0 not in _strides_above_one(v)), None)
    strides = None
    if unbroadcast is not None and group.result not in ctx.network.outputs:
        strides = like(unbroadcast.strides, shape)
        if len(shape) == 4 and _is_read_as_nhwc(ctx, group.result):
            strides = channels_last(shape)
        if _is_reshaped_by_copy(ctx, group.result, strides):
            strides = None
    y = ctx.output_view(group.result, strides)
    ctx.add_elementwise(y, operands, expression.ops, group.nodes)


def epilogue_ops(ctx: LoweringContext, group: Group) -> tuple[tuple[ExprOp, ...], View | None]:
    """Return the epilogue of a root that computes floats, and its run-time scalars.

    The scales are run-time scalars, so that a new calibration compiles nothing.
    """
    expression = ctx.expression(group.root_operation.outputs[0], group.after)
    ops, scalars = extract_scalars(expression.ops)
    return ops, ctx.weights.pack(np.array(scalars), "float32") if scalars else None


def _is_read_as_nhwc(ctx: LoweringContext, name: str) -> bool:
    readers = (op for op in ctx.network.operations if name in op.inputs[:1])
    return any(op.kind in NHWC_KINDS for op in readers)


def _is_reshaped_by_copy(ctx: LoweringContext, name: str, strides: Shape) -> bool:
    """Whether all readers of a tensor are reshapes that would copy it."""
    shapes = ctx.network.shapes
    view = View("", "int8", shapes[name], strides)
    readers = [op for op in ctx.network.operations if name in op.inputs]
    copies = (
        op.kind in RESHAPES and view.reshaped(shapes[op.outputs[0]]) is None for op in readers
    )
    return bool(readers) and all(copies)


def broadcast(view: View, shape: Shape) -> View:
    """Return the view broadcast to a shape, as numpy does."""
    lead = len(shape) - len(view.shape)
    sizes, strides = (1,) * lead + view.shape, (0,) * lead + view.strides
    strides = tuple(
        stride if size == target else 0
        for size, stride, target in zip(sizes, strides, shape, strict=True)
    )
    return replace(view, shape=shape, strides=strides)


def _strides_above_one(view: View) -> tuple[int, ...]:
    """Return the strides of the dimensions of more than one element."""
    return tuple(s for s, n in zip(view.strides, view.shape, strict=True) if n != 1)
