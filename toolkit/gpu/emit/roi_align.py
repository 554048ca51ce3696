"""Lower RoiAlign."""

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.elementwise import broadcast
from toolkit.gpu.emit.launches import element_launch
from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.view import View, channels_last
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.loop_order import order_of
from toolkit.gpu.shapes.sizes import opt

_BLOCK = 256  # elements of a block
# From so many channels on, neighbours in a block are channels: they read neighbours in memory.
_MIN_CHANNELS = 16
_STRIDED = ("Y", "X", "ROI", "BATCH", "ROW", "COLUMN", "CHOSEN", "REST")


def emit_roi_align(ctx: LoweringContext, group: Group) -> None:
    """Lower RoiAlign that averages a fixed number of samples in each bin.

    With a fourth and fifth operand only chosen regions are sampled; the fifth is what others get.
    """
    op = group.root_operation
    shape = ctx.network.shapes[op.outputs[0]]
    by_channel = opt(shape[1]) >= _MIN_CHANNELS
    x = ctx.read(op.inputs[0], "float", "channels last" if by_channel else "any")
    rois, batches = ctx.read(op.inputs[1], "real"), ctx.read(op.inputs[2])
    is_output = op.outputs[0] in ctx.network.outputs
    strides = channels_last(shape) if by_channel and not is_output else None
    y = ctx.output_view(op.outputs[0], strides)
    chosen = broadcast(ctx.read(op.inputs[3]), shape) if op.input(3) else None
    rest = _rest(ctx, op)
    shifted = op.text("coordinate_transformation_mode", "") == "half_pixel"
    order = order_of(
        y.shape,
        [
            y.strides,
            (0, x.strides[1], 0, 0),
            (rois.strides[0], 0, 0, 0),
            (batches.strides[0], 0, 0, 0),
            (0, 0, 1, 0),
            (0, 0, 0, 1),
            (0, 0, 0, 0) if chosen is None else chosen.strides,
            (0, 0, 0, 0) if not isinstance(rest, View) else rest.strides,
        ],
    )
    tensors = {
        "x": x,
        "rois": rois,
        "batches": batches,
        "chosen": chosen,
        "rest": rest if isinstance(rest, View) else None,
    }
    constants = {
        **order.constants(*(f"{name}_STRIDES" for name in _STRIDED)),
        "COORDINATE_STRIDE": rois.strides[1],
        "IMAGES": x.shape[0],
        "IMAGE_STRIDE": x.strides[0],
        "SIZES": x.shape[2:],
        "SPATIAL_STRIDES": x.strides[2:],
        "BINS": y.shape[2:],
        "SCALE": op.number("spatial_scale", 1.0),
        "OFFSET": 0.5 if shifted else 0.0,
        "LEAST": None if shifted else 1.0,
        "SAMPLES": op.integer("sampling_ratio", 0),
        "REST": rest if isinstance(rest, float) else 0.0,
    }
    ctx.add_op(group.nodes, (element_launch("roi_align", y, tensors, constants, block=_BLOCK),))


def _rest(ctx: LoweringContext, op: Operation) -> View | float | None:
    """Return what regions get that are not chosen: a tensor, a number, or None without choice."""
    name = op.input(4)
    if not name:
        return None
    values = ctx.network.constants.get(name)
    if values is not None and values.size == 1:
        return float(values.reshape(()))
    return broadcast(ctx.read(name, "real"), ctx.network.shapes[op.outputs[0]])
