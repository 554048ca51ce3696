"""Element-wise work -> calls."""

from dataclasses import replace

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.expressions import with_numbers
from toolkit.gpu.ir.view import Shape, View, channels_last, like
from toolkit.gpu.passes.fusion import Group

# Operators whose kernels read (N, C, H, W) channels-last, as `Draft.pixels` gives it.
_RESHAPES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
PICTURE_KINDS = frozenset({"Conv", "MaxPool", "AveragePool", "GlobalAveragePool"})


def emit_elementwise(ctx: LoweringContext, group: Group) -> None:
    """Add an expression; the result lies as its first operand of the same shape does.

    A picture that kernels for pictures read is written channels-last at once, and what would be
    copied to join dimensions that lie apart in the order of the indices.
    """
    shape = ctx.network.shapes[group.result]
    expression = ctx.expression(None, group.after)
    if not expression.operands:
        raise NotCoveredError(f"node {group.nodes[0]!r} reads constants only; fold it")
    operands = [broadcast(ctx.read(name), shape) for name in expression.operands]
    whole = next((v for v in operands if 0 not in _wide(v)), None)
    strides = None
    if whole is not None and group.result not in ctx.network.outputs:
        strides = like(whole.strides, shape)
        if len(shape) == 4 and _read_as_pixels(ctx, group.result):
            strides = channels_last(shape)
        if _is_joined(ctx, group.result, strides):
            strides = None
    y = ctx.make(group.result, strides)
    ctx.elementwise(y, operands, expression.steps, group.nodes)


def steps_after(ctx: LoweringContext, group: Group) -> tuple[tuple[ExprOp, ...], View | None]:
    """Return the steps after a root that makes floats, and the scales that they multiply by.

    Kernels are given the scales, so that a new calibration compiles nothing.
    """
    expression = ctx.expression(group.root_operation.outputs[0], group.after)
    steps, numbers = with_numbers(expression.steps)
    return steps, ctx.constant(np.array(numbers), "float32") if numbers else None


def _read_as_pixels(ctx: LoweringContext, name: str) -> bool:
    readers = (op for op in ctx.network.operations if name in op.inputs[:1])
    return any(op.kind in PICTURE_KINDS for op in readers)


def _is_joined(ctx: LoweringContext, name: str, strides: Shape) -> bool:
    """Whether all that reads a tensor would copy it to take another shape."""
    shapes = ctx.network.shapes
    view = View("", "int8", shapes[name], strides)
    readers = [op for op in ctx.network.operations if name in op.inputs]
    joins = (
        op.kind in _RESHAPES and view.reshaped(shapes[op.outputs[0]]) is None for op in readers
    )
    return bool(readers) and all(joins)


def broadcast(view: View, shape: Shape) -> View:
    """Return the view repeated to a shape, as numpy broadcasts."""
    lead = len(shape) - len(view.shape)
    sizes, strides = (1,) * lead + view.shape, (0,) * lead + view.strides
    strides = tuple(
        stride if size == wanted else 0
        for size, stride, wanted in zip(sizes, strides, shape, strict=True)
    )
    return replace(view, shape=shape, strides=strides)


def _wide(view: View) -> tuple[int, ...]:
    """Strides of the dimensions that are no single ones."""
    return tuple(s for s, n in zip(view.strides, view.shape, strict=True) if n != 1)
