"""Lower the conversions between INT8 tensors with a scale and ONNX integers with a zero point."""

from dataclasses import replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.view import View, like
from toolkit.gpu.passes.fusion import Group


def emit_to_integers(ctx: LoweringContext, group: Group) -> None:
    """Lower ToIntegers: a view for INT8, else a copy with the zero point added."""
    op = group.root_operation
    view = ctx.read(op.inputs[0])
    name = op.outputs[0]
    if view.scale != op.number("scale", 1.0):
        raise NotCoveredError(f"tensor {op.inputs[0]!r} does not have the scale of {name!r}")
    stored = replace(view, scale=None)
    dtype = ctx.network.dtypes[name]
    ctx.views[name] = stored
    if dtype != "int8":
        ctx.views[name] = _add_zero_point(ctx, group, stored, dtype, op.integer("zero_point", 0))


def emit_from_integers(ctx: LoweringContext, group: Group) -> None:
    """Lower FromIntegers: a view for INT8, else a copy with the zero point subtracted."""
    op = group.root_operation
    view = ctx.read(op.inputs[0])
    if view.dtype != "int8":
        view = _add_zero_point(ctx, group, view, "int8", -op.integer("zero_point", 0))
    ctx.views[op.outputs[0]] = replace(view, scale=op.number("scale", 1.0))


def _add_zero_point(
    ctx: LoweringContext, group: Group, view: View, dtype: str, zero_point: int
) -> View:
    target = ctx.allocate(
        group.root_operation.outputs[0], dtype, view.shape, like(view.strides, view.shape)
    )
    ops: tuple[ExprOp, ...] = (("real", 0, 1.0), ("constant", float(zero_point)), ("add", 1, 2))
    ctx.add_elementwise(target, [view], ops, group.nodes)
    return target
