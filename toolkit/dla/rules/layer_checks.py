"""What the rules of layers without weights read: pooling, activation, element-wise, shape, softmax.

Readers return nothing where there is nothing to judge or the facts are unknown, as in `dla_checks`.
"""

import math

from toolkit.dla.rules.general_checks import Reader, batch_of, text_of
from toolkit.dla.rules.rule import Seen
from toolkit.graph.node_view import NodeView, TensorView
from toolkit.graph.window import Shape


def outputs(view: NodeView) -> tuple[Seen, ...]:
    """The number of outputs of MaxPool, of which the second are indices."""
    text = "indices output" if len(view.outputs) > 1 else "1 output"
    return (Seen(len(view.outputs), text),)


def average_with_padding(view: NodeView) -> tuple[Seen, ...]:
    """Whether an average counts its padding, or has none."""
    if view.window is None or view.window.pads is None:
        return ()
    if not any(view.window.pads):
        return (Seen(True, "no padding"),)
    counted = bool(view.integer("count_include_pad", 0))
    return (Seen(counted, f"average {'with' if counted else 'without'} padding"),)


def clip_upper(view: NodeView) -> tuple[Seen, ...]:
    """The upper bound of Clip."""
    return _bound(view, "upper", "max", 2)


def clip_lower(view: NodeView) -> tuple[Seen, ...]:
    """The lower bound of Clip."""
    return _bound(view, "lower", "min", 1)


def _bound(view: NodeView, side: str, name: str, index: int) -> tuple[Seen, ...]:
    tensor, value = view.input(index), view.attribute(name)
    if tensor is not None:
        value = tensor.values[0] if tensor.values else None
    if not isinstance(value, (int, float)):
        return (Seen("none", f"no constant {side} bound"),)
    return (Seen(float(value), f"{side} bound {value:g}"),)


def slope_constant(view: NodeView) -> tuple[Seen, ...]:
    """Whether the slope is constant."""
    slope = view.input(1)
    if slope is None:
        return ()
    kind = "constant" if slope.constant else "computed"
    return (Seen(slope.constant, f"{kind} slope '{slope.name}'"),)


def slope_rank(view: NodeView) -> tuple[Seen, ...]:
    """Whether the slope has the rank of the input."""
    data, slope = view.input(0), view.input(1)
    if data is None or slope is None or data.shape is None or slope.shape is None:
        return ()
    text = f"slope of rank {len(slope.shape)}, input of rank {len(data.shape)}"
    return (Seen(len(data.shape) == len(slope.shape), text),)


def broadcast(view: NodeView) -> tuple[Seen, ...]:
    """Whether each operand is whole, per channel or one number."""
    result = view.outputs[0].shape if view.outputs else None
    if result is None or len(result) != 4:
        return ()
    return tuple(
        Seen(
            _broadcasts(tensor.shape, result),
            f"'{tensor.name}' of shape {text_of(tensor.shape)} in {text_of(result)}",
        )
        for tensor in view.inputs
        if tensor is not None and tensor.shape is not None
    )


def _broadcasts(shape: Shape, result: Shape) -> bool:
    padded: Shape = (1,) * (4 - len(shape)) + shape
    whole, channel = result[1:], (result[1], 1, 1)
    return padded[0] in (1, result[0]) and padded[1:] in (whole, channel, (1, 1, 1))


def divisor(view: NodeView) -> tuple[Seen, ...]:
    """Whether the divisor is constant."""
    found = view.input(1)
    if found is None:
        return ()
    return (Seen(found.constant, f"{'constant' if found.constant else 'computed'} divisor"),)


def power_side(view: NodeView) -> tuple[Seen, ...]:
    """Whether one side of a power is one repeated constant."""
    single = [t for t in view.constants if t.values is not None and len(set(t.values)) == 1]
    if not single:
        return (Seen(False, "no side of one repeated constant"),)
    return (Seen(True, f"'{single[0].name}' is one repeated constant"),)


def readers(view: NodeView) -> tuple[Seen, ...]:
    """The operators that read the result."""
    names = sorted(set(view.after))
    text = f"read by {', '.join(view.after)}" if names else "read by no node"
    return (Seen(" ".join(view.after), text),)


def lrn_window(view: NodeView) -> tuple[Seen, ...]:
    """The channels that a local response normalisation spans."""
    size = view.integer("size", 0)
    return (Seen(size, f"size {size}"),)


def data_axis(default: int) -> Reader:
    """Return the reader of the axis, counted from the front; `default` where it is not set."""

    def read(view: NodeView) -> tuple[Seen, ...]:
        axis = axis_of(view, view.integer("axis", default))
        return () if axis is None else (Seen(axis, f"axis {axis}"),)

    return read


def input_count(view: NodeView) -> tuple[Seen, ...]:
    """The number of inputs."""
    count = len(view.inputs)
    return (Seen(count, f"{count} input{'' if count == 1 else 's'}"),)


def slice_operands(view: NodeView) -> tuple[Seen, ...]:
    """Whether starts, ends, axes, steps and split sizes are constant."""
    return tuple(
        Seen(t.values is not None, f"{'computed' if t.values is None else 'constant'} '{t.name}'")
        for t in view.inputs[1:]
        if t is not None and t.name
    )


def slice_steps(view: NodeView) -> tuple[Seen, ...]:
    """The steps of Slice."""
    steps = _integers(view.input(4)) if view.op == "Slice" else ()
    return (Seen(steps, f"steps {text_of(steps)}"),) if steps else ()


def slice_batch(view: NodeView) -> tuple[Seen, ...]:
    """Whether the batch stays whole."""
    if view.op == "Split":
        axis = axis_of(view, view.integer("axis", 0))
        text = "split of the batch" if axis == 0 else f"split along axis {axis}"
        return (Seen(axis != 0, text),)
    data = view.input(0)
    if data is None or not data.shape or not view.outputs or not view.outputs[0].shape:
        return ()
    came, made = data.shape[0], view.outputs[0].shape[0]
    return (
        Seen(came == made, f"batch {'kept' if came == made else f'cut from {came} to {made}'}"),
    )


def softmax_size(view: NodeView) -> tuple[Seen, ...]:
    """Whether the axis is within 1024, or within 8192 where all other dimensions are 1."""
    shape, axis = _sizes(view.input(0)), axis_of(view, view.integer("axis", -1))
    if not axis or not 0 < axis < len(shape):
        return ()
    others = math.prod(shape[1:]) // max(1, shape[axis])
    fits = shape[axis] <= (8192 if others == 1 else 1024)
    return (Seen(fits, f"axis of {shape[axis]} beside {others}"),)


def softmax_rows(view: NodeView) -> tuple[Seen, ...]:
    """The number of softmaxes in one, the batch included."""
    shape, axis = _sizes(view.input(0)), axis_of(view, view.integer("axis", -1))
    if not axis or not 0 < axis < len(shape):
        return ()
    others = math.prod(shape) // max(1, shape[axis])
    return (Seen(others, f"{others} row{'' if others == 1 else 's'}"),)


def batch_kept(view: NodeView) -> tuple[Seen, ...]:
    """Whether a transpose or reshape leaves the batch where and as large as it is."""
    found = []
    order = view.attribute("perm")
    if isinstance(order, tuple) and order:
        found.append(Seen(order[0] == 0, f"permutation {text_of(order)}"))
    data = view.input(0)
    came = None if data is None else batch_of(data)
    made = batch_of(view.outputs[0]) if view.outputs else None
    if came is not None and made is not None:
        found.append(Seen(came == made, f"batch {came} to {made}"))
    return tuple(found)


def beside_slice(view: NodeView) -> tuple[Seen, ...]:
    """Whether a reshape keeps apart from Slice, Split and Concat."""
    near = sorted({*view.before, *view.after})
    wrong = [op for op in near if op in ("Slice", "Split", "Concat")]
    text = f"Reshape beside {', '.join(wrong or near) or 'no node'}"
    return (Seen(not wrong, text),)


def reduced_axes(view: NodeView) -> tuple[Seen, ...]:
    """Whether the axes of a reduction are constant and leave the batch out."""
    if view.op == "GlobalMaxPool":
        return (Seen(True, "axes 2, 3"),)
    given = view.attribute("axes")
    axes = tuple(int(a) for a in given) if isinstance(given, tuple) else _integers(view.input(1))
    if view.input(1) is not None and not axes:
        return (Seen(False, "computed axes"),)
    places = [axis_of(view, axis) for axis in axes]
    if not axes or 0 in places:
        return (Seen(False, "reduction over the batch"),)
    return (Seen(True, f"axes {', '.join(map(str, places))}"),)


def scales_constant(view: NodeView) -> tuple[Seen, ...]:
    """Whether scales are given, and as constants."""
    if view.op == "Resize" and view.input(3) is not None:
        return (Seen(False, "output sizes instead of scales"),)
    scales = scales_of(view)
    if scales is None:
        return (Seen(False, "no constant scales"),)
    return (Seen(True, f"scales {text_of(scales)}"),)


def scales_spatial(view: NodeView) -> tuple[Seen, ...]:
    """Whether there are four scales, of which the first two are 1."""
    scales = scales_of(view)
    if scales is None:
        return ()
    fits = len(scales) == 4 and scales[:2] == (1.0, 1.0)
    return (Seen(fits, f"scales {text_of(scales)}"),)


def scales_whole(view: NodeView) -> tuple[Seen, ...]:
    """Whether the scales of the map are whole numbers from 1 on."""
    scales = scales_of(view)
    if scales is None:
        return ()
    whole = all(scale.is_integer() and scale >= 1 for scale in scales[2:])
    return (Seen(whole, f"scales {text_of(scales)}"),)


def largest_scale(mode: str) -> Reader:
    """Return the reader of the largest scale of the map in the interpolation `mode`."""

    def read(view: NodeView) -> tuple[Seen, ...]:
        scales = scales_of(view) or ()
        if view.attribute("mode") != mode or not scales[2:]:
            return ()
        return (Seen(max(scales[2:]), f"scales {text_of(scales)}"),)

    return read


def resize_kind(view: NodeView) -> tuple[Seen, ...]:
    """The interpolation alone."""
    mode = str(view.attribute("mode"))
    return (Seen(mode, f"mode {mode}"),)


def resize_mode(view: NodeView) -> tuple[Seen, ...]:
    """Interpolation, coordinates and rounding in one, by their names in ONNX."""
    mode = view.attribute("mode")
    if view.op == "Upsample":
        rest = " asymmetric floor" if mode == "nearest" else ""
        return (Seen(f"{mode}{rest}", f"mode {mode}"),)
    parts = [mode, view.attribute("coordinate_transformation_mode")]
    parts += [view.attribute("nearest_mode")] if mode == "nearest" else []
    text = " ".join(str(part) for part in parts)
    return (Seen(text, f"mode {text}"),)


def scales_of(view: NodeView) -> tuple[float, ...] | None:
    """Return the scales of Resize or Upsample for all axes, None where they are not constant.

    None too where they do not fit their axes, which no valid model has.
    """
    tensor = view.input(1 if view.op == "Upsample" else 2)
    values = None if tensor is None else tensor.values
    axes, data = view.attribute("axes"), view.input(0)
    if not values or not isinstance(axes, tuple) or data is None or data.shape is None:
        return values or None
    rank = len(data.shape)
    places = [axis for axis in axes if isinstance(axis, int) and -rank <= axis < rank]
    if len(places) != len(values):
        return None
    scales = [1.0] * rank
    for place, value in zip(places, values, strict=True):
        scales[place] = value
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
