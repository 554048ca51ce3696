"""Lower Pad."""

from collections.abc import Mapping

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import element_launch
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.parameters import constant_of, integers_of
from toolkit.gpu.ir.view import View
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.loop_order import order_of

_BLOCK = 1024  # elements of a block


def emit_pad(ctx: LoweringContext, group: Group) -> None:
    """Lower Pad; negative widths crop."""
    op = group.root_operation
    value = _fill_value(ctx, op)
    x = _operand(ctx, op, value)
    before = _before(ctx, op, len(x.shape))
    y = ctx.output_like(op.outputs[0], x)
    padded = {at: n for at, n in enumerate(before) if n != 0 or y.shape[at] != x.shape[at]}
    mode = op.text("mode", "constant")
    ctx.add_op(group.nodes, (padded_copy(x, y, padded, mode=mode, value=value),))


def padded_copy(
    x: View,
    y: View,
    before: Mapping[int, int],
    *,
    mode: str = "constant",
    value: float = 0,
) -> KernelLaunch:
    """Return the launch that copies x with padding, `before` it in each padded dimension."""
    inner = tuple(0 if at in before else stride for at, stride in enumerate(x.strides))
    order = order_of(y.shape, [y.strides, inner], separate=before)
    constants = {
        **order.constants("Y_STRIDES", "X_STRIDES"),
        "DIMS": tuple(order.positions[at] for at in before),
        "BEFORE": tuple(before.values()),
        "SIZES": tuple(x.shape[at] for at in before),
        "BORDER_STRIDES": tuple(x.strides[at] for at in before),
        "MODE": mode,
        "VALUE": value,
    }
    return element_launch("pad", y, {"x": x}, constants, block=_BLOCK)


def _operand(ctx: LoweringContext, op: Operation, value: float) -> View:
    """Return the operand; dequantized where the result does not have its scale."""
    if ctx.network.scales.get(op.outputs[0]) is not None and value != 0:
        raise NotCoveredError(f"node {op.name!r} (Pad) pads INT8 with {value}; kernels pad with 0")
    return ctx.read_for(op.inputs[0], op.outputs[0])


def _fill_value(ctx: LoweringContext, op: Operation) -> float | int:
    if "value" in op.attributes:
        return op.number("value", 0.0)
    values = constant_of(ctx.network, op, 2)
    number: float | int | bool = 0 if values is None else values.reshape(()).item()
    return int(number) if isinstance(number, bool) else number


def _before(ctx: LoweringContext, op: Operation, rank: int) -> tuple[int, ...]:
    """Return the padding before each dimension."""
    pads = integers_of(ctx.network, op, 1, "pads") or ()
    axes = integers_of(ctx.network, op, 3, "axes") or tuple(range(rank))
    before = [0] * rank
    for axis, width in zip(axes, pads, strict=False):
        before[axis] = width
    return tuple(before)
