"""The checks of layers without weights: pooling, activation, element-wise, shape and softmax."""

import math

from toolkit.planning.dla_checks import Check, batch_of
from toolkit.planning.node_view import NodeView, TensorView
from toolkit.planning.windows import Shape


def indices_output(view: NodeView) -> str | None:
    """Refuse MaxPool with indices."""
    return "indices output" if len(view.outputs) > 1 else None


def exclusive_average(view: NodeView) -> str | None:
    """Refuse averages that leave the padding out."""
    padded = view.window is not None and any(view.window.pads or ())
    return (
        "average without padding" if padded and not view.integer("count_include_pad", 0) else None
    )


def clip_upper(view: NodeView) -> str | None:
    """Refuse upper bounds outside [1, 127]."""
    upper = _bound(view, "max", 2)
    if upper is None or not 1 <= upper <= 127:
        return "no constant upper bound" if upper is None else f"upper bound {upper:g}"
    return None


def clip_lower(view: NodeView) -> str | None:
    """Refuse lower bounds other than 0."""
    lower = _bound(view, "min", 1)
    if lower != 0:
        return "no constant lower bound" if lower is None else f"lower bound {lower:g}"
    return None


def _bound(view: NodeView, name: str, index: int) -> float | None:
    tensor = view.input(index)
    if tensor is not None:
        return tensor.values[0] if tensor.values else None
    value = view.attribute(name)
    return float(value) if isinstance(value, (int, float)) else None


def slope_constant(view: NodeView) -> str | None:
    """Refuse computed slopes."""
    slope = view.input(1)
    return f"computed slope '{slope.name}'" if slope is not None and not slope.constant else None


def slope_rank(view: NodeView) -> str | None:
    """Refuse slopes of another rank than the input."""
    data, slope = view.input(0), view.input(1)
    if data is None or slope is None or data.shape is None or slope.shape is None:
        return None
    same = len(data.shape) == len(slope.shape)
    return None if same else f"slope of rank {len(slope.shape)}, input of rank {len(data.shape)}"


def broadcast(view: NodeView) -> str | None:
    """Refuse operands that are neither whole, nor per channel, nor one number."""
    result = view.outputs[0].shape if view.outputs else None
    if result is None or len(result) != 4:
        return None
    for tensor in view.inputs:
        if tensor is None or tensor.shape is None:
            continue
        padded: Shape = (1,) * (4 - len(tensor.shape)) + tensor.shape
        whole, channel = result[1:], (result[1], 1, 1)
        if padded[0] not in (1, result[0]) or padded[1:] not in (whole, channel, (1, 1, 1)):
            return f"'{tensor.name}' of shape {_text(tensor.shape)} in {_text(result)}"
    return None


def divisor_constant(view: NodeView) -> str | None:
    """Refuse computed divisors."""
    divisor = view.input(1)
    return "computed divisor" if divisor is not None and not divisor.constant else None


def power_constant(view: NodeView) -> str | None:
    """Refuse powers without one side that is one repeated constant."""
    for tensor in view.constants:
        if tensor.values is not None and len(set(tensor.values)) == 1:
            return None
    return "no side of one repeated constant"


def lrn_window(view: NodeView) -> str | None:
    """Refuse windows other than 3, 5, 7 and 9."""
    size = view.integer("size", 0)
    return None if size in (3, 5, 7, 9) else f"size {size}"


def channel_axis(view: NodeView) -> str | None:
    """Refuse concatenation along anything but the channels."""
    axis = axis_of(view, view.integer("axis", 0))
    return None if axis is None or axis == 1 else f"axis {axis}"


def two_inputs(view: NodeView) -> str | None:
    """Refuse concatenation of a single tensor."""
    return f"{len(view.inputs)} input" if len(view.inputs) < 2 else None


def slice_static(view: NodeView) -> str | None:
    """Refuse computed starts, ends, axes, steps and split sizes."""
    wrong = (t for t in view.inputs[1:] if t is not None and t.name and t.values is None)
    return next((f"computed '{t.name}'" for t in wrong), None)


def slice_steps(view: NodeView) -> str | None:
    """Refuse steps other than 1."""
    steps = _integers(view.input(4)) if view.op == "Slice" else ()
    return f"steps {_text(steps)}" if any(step != 1 for step in steps) else None


def slice_batch(view: NodeView) -> str | None:
    """Refuse slicing along the batch."""
    if view.op == "Split":
        axis = axis_of(view, view.integer("axis", 0))
        return "split of the batch" if axis == 0 else None
    data = view.input(0)
    if data is None or not data.shape or not view.outputs or not view.outputs[0].shape:
        return None
    came, made = data.shape[0], view.outputs[0].shape[0]
    return None if came == made else f"batch cut from {came} to {made}"


def softmax_axis(view: NodeView) -> str | None:
    """Refuse softmax over the batch."""
    axis = axis_of(view, view.integer("axis", -1))
    return "axis 0" if axis == 0 else None


def softmax_size(view: NodeView) -> str | None:
    """Refuse axes above 1024, or above 8192 where all other dimensions are 1."""
    shape, axis = _sizes(view.input(0)), axis_of(view, view.integer("axis", -1))
    if not shape or not axis:
        return None
    others = math.prod(shape[1:]) // max(1, shape[axis])
    limit = 8192 if others == 1 else 1024
    return f"axis of {shape[axis]} beside {others}" if shape[axis] > limit else None


def softmax_alone(view: NodeView) -> str | None:
    """Refuse batches and other dimensions above 1, as TensorRT 8.4 and older do."""
    shape, axis = _sizes(view.input(0)), axis_of(view, view.integer("axis", -1))
    if not shape or not axis:
        return None
    others = math.prod(shape) // max(1, shape[axis])
    return f"{others} rows" if others > 1 else None


def batch_kept(view: NodeView) -> str | None:
    """Refuse transposes and reshapes that move or resize the batch."""
    order = view.attribute("perm")
    if isinstance(order, tuple) and order and order[0] != 0:
        return f"permutation {_text(tuple(int(item) for item in order))}"
    data = view.input(0)
    came = None if data is None else batch_of(data)
    made = batch_of(view.outputs[0]) if view.outputs else None
    return None if None in (came, made) or came == made else f"batch {came} to {made}"


def beside_slice(view: NodeView) -> str | None:
    """Refuse reshapes directly connected to Slice, Split or Concat."""
    neighbours = {*view.before, *view.after} & {"Slice", "Split", "Concat"}
    return f"Reshape beside {', '.join(sorted(neighbours))}" if neighbours else None


def reduced_axes(view: NodeView) -> str | None:
    """Refuse reductions over the batch, or over axes that are not constant."""
    if view.op == "GlobalMaxPool":
        return None
    given = view.attribute("axes")
    axes = tuple(int(a) for a in given) if isinstance(given, tuple) else _integers(view.input(1))
    if view.input(1) is not None and not axes:
        return "computed axes"
    places = [axis_of(view, axis) for axis in axes]
    return "reduction over the batch" if not axes or 0 in places else None


def scales_constant(view: NodeView) -> str | None:
    """Refuse output sizes and computed scales."""
    if view.op == "Resize" and view.input(3) is not None:
        return "output sizes instead of scales"
    return "computed scales" if scales_of(view) is None else None


def scales_spatial(view: NodeView) -> str | None:
    """Refuse scales of the batch or of the channels, or of another rank."""
    scales = scales_of(view)
    if scales is None or (len(scales) == 4 and scales[:2] == (1.0, 1.0)):
        return None
    return f"scales {_text(scales)}"


def scales_integer(view: NodeView) -> str | None:
    """Refuse scales that are not whole numbers."""
    scales = scales_of(view) or ()
    return f"scales {_text(scales)}" if any(s != int(s) or s < 1 for s in scales[2:]) else None


def scales_within(mode: str, most: int) -> Check:
    """Refuse scales above `most` in the interpolation `mode`."""

    def check(view: NodeView) -> str | None:
        scales = scales_of(view) or ()
        wrong = view.attribute("mode") == mode and any(scale > most for scale in scales[2:])
        return f"scales {_text(scales)}" if wrong else None

    return check


def linear_mode(view: NodeView) -> str | None:
    """Refuse bilinear interpolation."""
    mode = view.attribute("mode")
    return f"mode {mode}" if mode == "linear" else None


RESIZE_MODES = frozenset(
    {
        "nearest asymmetric floor",
        "nearest half_pixel round_prefer_floor",
        "nearest half_pixel round_prefer_ceil",
        "linear half_pixel",
        "linear pytorch_half_pixel",
    }
)


def resize_mode(view: NodeView) -> str | None:
    """Refuse combinations of interpolation, coordinates and rounding that the DLA lacks."""
    mode = view.attribute("mode")
    if view.op == "Upsample":
        return None if mode == "nearest" else f"mode {mode}"  # asymmetric, rounded down
    parts = [mode, view.attribute("coordinate_transformation_mode")]
    parts += [view.attribute("nearest_mode")] if mode == "nearest" else []
    text = " ".join(str(part) for part in parts)
    return None if text in RESIZE_MODES else f"mode {text}"


def scales_of(view: NodeView) -> tuple[float, ...] | None:
    """Return the scales of Resize or Upsample for all axes, None where they are not constant."""
    tensor = view.input(1 if view.op == "Upsample" else 2)
    values = None if tensor is None else tensor.values
    axes, data = view.attribute("axes"), view.input(0)
    if not values or not isinstance(axes, tuple) or data is None or data.shape is None:
        return values or None
    scales = [1.0] * len(data.shape)
    for axis, value in zip(axes, values, strict=True):
        scales[axis if isinstance(axis, int) else 0] = value
    return tuple(scales)


def axis_of(view: NodeView, axis: int) -> int | None:
    """Return `axis` counted from the front, None where the rank is unknown."""
    data = view.input(0)
    if axis >= 0 or data is None or data.shape is None:
        return axis if axis >= 0 else None
    return axis + len(data.shape)


def _sizes(tensor: TensorView | None) -> tuple[int, ...]:
    shape = (tensor.shape if tensor is not None else None) or ()
    sizes = tuple(size for size in shape if isinstance(size, int))
    return sizes if len(sizes) == len(shape) else ()


def _integers(tensor: TensorView | None) -> tuple[int, ...]:
    return () if tensor is None else tuple(int(value) for value in tensor.values or ())


def _text(values: tuple[object, ...]) -> str:
    return "x".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
