"""Where INT8 meets what ONNX stores: integers with a zero point -> numbers on a grid, and back."""

from dataclasses import replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.view import View, like
from toolkit.gpu.passes.fusion import Group


def emit_to_integers(ctx: LoweringContext, group: Group) -> None:
    """ToIntegers: the same bytes where the zero point is 0, else a copy with it added."""
    op = group.root_operation
    view = ctx.read(op.inputs[0])
    name = op.outputs[0]
    if view.scale != op.number("scale", 1.0):
        raise NotCoveredError(f"tensor {op.inputs[0]!r} does not lie on the grid of {name!r}")
    stored = replace(view, scale=None)
    dtype = ctx.network.dtypes[name]
    ctx.views[name] = stored
    if dtype != "int8":
        ctx.views[name] = _shifted(ctx, group, stored, dtype, op.integer("zero_point", 0))


def emit_from_integers(ctx: LoweringContext, group: Group) -> None:
    """FromIntegers: the same bytes where the zero point is 0, else a copy without it."""
    op = group.root_operation
    view = ctx.read(op.inputs[0])
    if view.dtype != "int8":
        view = _shifted(ctx, group, view, "int8", -op.integer("zero_point", 0))
    ctx.views[op.outputs[0]] = replace(view, scale=op.number("scale", 1.0))


def _shifted(ctx: LoweringContext, group: Group, view: View, dtype: str, amount: int) -> View:
    target = ctx.allocate(
        group.root_operation.outputs[0], dtype, view.shape, like(view.strides, view.shape)
    )
    steps: tuple[ExprOp, ...] = (("real", 0, 1.0), ("constant", float(amount)), ("add", 1, 2))
    ctx.elementwise(target, [view], steps, group.nodes)
    return target
