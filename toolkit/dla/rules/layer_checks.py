"""Facts for the rules of layers without weights: pooling, activation, element-wise, shape, softmax.

Readers return nothing if there is nothing to judge or the value is unknown, as in `general_checks`.
"""

import math

from toolkit.dla.rules.general_checks import Reader, batch_of, text_of
from toolkit.dla.rules.rule import Fact
from toolkit.graph.node_view import NodeView, TensorView
from toolkit.graph.window import Shape


def outputs(view: NodeView) -> tuple[Fact, ...]:
    """The number of outputs of MaxPool; the second one is the indices."""
    text = "indices output" if len(view.outputs) > 1 else "1 output"
    return (Fact(len(view.outputs), text),)


def average_with_padding(view: NodeView) -> tuple[Fact, ...]:
    """True if an average includes its padding, or has none."""
    if view.window is None or view.window.pads is None:
        return ()
    if not any(view.window.pads):
        return (Fact(True, "no padding"),)
    counted = bool(view.integer("count_include_pad", 0))
    return (Fact(counted, f"average {'with' if counted else 'without'} padding"),)


def clip_upper(view: NodeView) -> tuple[Fact, ...]:
    """The upper bound of Clip."""
    return _bound(view, "upper", "max", 2)


def clip_lower(view: NodeView) -> tuple[Fact, ...]:
    """The lower bound of Clip."""
    return _bound(view, "lower", "min", 1)


def _bound(view: NodeView, side: str, name: str, index: int) -> tuple[Fact, ...]:
    tensor, value = view.input(index), view.attribute(name)
    if tensor is not None:
        value = tensor.values[0] if tensor.values else None
    if not isinstance(value, (int, float)):
        return (Fact("none", f"no constant {side} bound"),)
    return (Fact(float(value), f"{side} bound {value:g}"),)


def slope_constant(view: NodeView) -> tuple[Fact, ...]:
    """Whether the slope is constant."""
    slope = view.input(1)
    if slope is None:
        return ()
    kind = "constant" if slope.constant else "computed"
    return (Fact(slope.constant, f"{kind} slope '{slope.name}'"),)


def slope_rank(view: NodeView) -> tuple[Fact, ...]:
    """Whether the slope has the rank of the input."""
    data, slope = view.input(0), view.input(1)
    if data is None or slope is None or data.shape is None or slope.shape is None:
        return ()
    text = f"slope of rank {len(slope.shape)}, input of rank {len(data.shape)}"
    return (Fact(len(data.shape) == len(slope.shape), text),)


def broadcast(view: NodeView) -> tuple[Fact, ...]:
    """True for each operand that is full-size, per channel or a scalar."""
    result = view.outputs[0].shape if view.outputs else None
    if result is None or len(result) != 4:
        return ()
    return tuple(
        Fact(
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


def divisor(view: NodeView) -> tuple[Fact, ...]:
    """Whether the divisor is constant."""
    operand = view.input(1)
    if operand is None:
        return ()
    return (Fact(operand.constant, f"{'constant' if operand.constant else 'computed'} divisor"),)


def power_side(view: NodeView) -> tuple[Fact, ...]:
    """True if one side of a power is a uniform constant."""
    single = [t for t in view.constants if t.values is not None and len(set(t.values)) == 1]
    if not single:
        return (Fact(False, "no side of one repeated constant"),)
    return (Fact(True, f"'{single[0].name}' is one repeated constant"),)


def readers(view: NodeView) -> tuple[Fact, ...]:
    """The operators that read the result."""
    names = sorted(set(view.after))
    text = f"read by {', '.join(view.after)}" if names else "read by no node"
    return (Fact(" ".join(view.after), text),)


def producers(view: NodeView) -> tuple[Fact, ...]:
    """The operators that make the inputs."""
    text = f"it reads what {', '.join(view.before)} makes" if view.before else "it reads an input"
    return (Fact(" ".join(view.before), text),)


def lrn_window(view: NodeView) -> tuple[Fact, ...]:
    """The channel window of a local response normalisation."""
    size = view.integer("size", 0)
    return (Fact(size, f"size {size}"),)


def data_axis(default: int) -> Reader:
    """Return the reader of the non-negative axis; `default` if it is not set."""

    def read(view: NodeView) -> tuple[Fact, ...]:
        axis = axis_of(view, view.integer("axis", default))
        return () if axis is None else (Fact(axis, f"axis {axis}"),)

    return read


def input_count(view: NodeView) -> tuple[Fact, ...]:
    """The number of inputs."""
    count = len(view.inputs)
    return (Fact(count, f"{count} input{'' if count == 1 else 's'}"),)


def slice_operands(view: NodeView) -> tuple[Fact, ...]:
    """Whether starts, ends, axes, steps and split sizes are constant."""
    return tuple(
        Fact(t.values is not None, f"{'computed' if t.values is None else 'constant'} '{t.name}'")
        for t in view.inputs[1:]
        if t is not None and t.name
    )


def slice_steps(view: NodeView) -> tuple[Fact, ...]:
    """The steps of Slice."""
    steps = _integers(view.input(4)) if view.op == "Slice" else ()
    return (Fact(steps, f"steps {text_of(steps)}"),) if steps else ()


def slice_batch(view: NodeView) -> tuple[Fact, ...]:
    """True if the batch is not sliced."""
    if view.op == "Split":
        axis = axis_of(view, view.integer("axis", 0))
        text = "split of the batch" if axis == 0 else f"split along axis {axis}"
        return (Fact(axis != 0, text),)
    data = view.input(0)
    if data is None or not data.shape or not view.outputs or not view.outputs[0].shape:
        return ()
    batch_in, batch_out = data.shape[0], view.outputs[0].shape[0]
    return (
        Fact(
            batch_in == batch_out,
            f"batch {'kept' if batch_in == batch_out else f'cut from {batch_in} to {batch_out}'}",
        ),
    )


def softmax_size(view: NodeView) -> tuple[Fact, ...]:
    """True if the axis is at most 1024, or at most 8192 with all other dimensions 1."""
    shape, axis = _sizes(view.input(0)), axis_of(view, view.integer("axis", -1))
    if not axis or not 0 < axis < len(shape):
        return ()
    rest = math.prod(shape[1:]) // max(1, shape[axis])
    fits = shape[axis] <= (8192 if rest == 1 else 1024)
    return (Fact(fits, f"axis of {shape[axis]} beside {rest}"),)


def softmax_rows(view: NodeView) -> tuple[Fact, ...]:
    """The number of softmax rows, with the batch."""
    shape, axis = _sizes(view.input(0)), axis_of(view, view.integer("axis", -1))
    if not axis or not 0 < axis < len(shape):
        return ()
    rows = math.prod(shape) // max(1, shape[axis])
    return (Fact(rows, f"{rows} row{'' if rows == 1 else 's'}"),)


def batch_kept(view: NodeView) -> tuple[Fact, ...]:
    """True if a transpose or reshape keeps the position and size of the batch."""
    facts = []
    order = view.attribute("perm")
    if isinstance(order, tuple) and order:
        facts.append(Fact(order[0] == 0, f"permutation {text_of(order)}"))
    data = view.input(0)
    batch_in = None if data is None else batch_of(data)
    batch_out = batch_of(view.outputs[0]) if view.outputs else None
    if batch_in is not None and batch_out is not None:
        facts.append(Fact(batch_in == batch_out, f"batch {batch_in} to {batch_out}"))
    return tuple(facts)


def beside_slice(view: NodeView) -> tuple[Fact, ...]:
    """True if a reshape is not adjacent to Slice, Split or Concat."""
    neighbours = sorted({*view.before, *view.after})
    refused = [op for op in neighbours if op in ("Slice", "Split", "Concat")]
    text = f"Reshape beside {', '.join(refused or neighbours) or 'no node'}"
    return (Fact(not refused, text),)


def reduced_axes(view: NodeView) -> tuple[Fact, ...]:
    """True if the axes of a reduction are constant and exclude the batch."""
    if view.op == "GlobalMaxPool":
        return (Fact(True, "axes 2, 3"),)
    attribute = view.attribute("axes")
    axes = (
        tuple(int(a) for a in attribute)
        if isinstance(attribute, tuple)
        else _integers(view.input(1))
    )
    if view.input(1) is not None and not axes:
        return (Fact(False, "computed axes"),)
    positions = [axis_of(view, axis) for axis in axes]
    if not axes or 0 in positions:
        return (Fact(False, "reduction over the batch"),)
    return (Fact(True, f"axes {', '.join(map(str, positions))}"),)


def scales_constant(view: NodeView) -> tuple[Fact, ...]:
    """True if there are constant scales."""
    if view.op == "Resize" and view.input(3) is not None:
        return (Fact(False, "output sizes instead of scales"),)
    scales = scales_of(view)
    if scales is None:
        return (Fact(False, "no constant scales"),)
    return (Fact(True, f"scales {text_of(scales)}"),)


def scales_spatial(view: NodeView) -> tuple[Fact, ...]:
    """True for four scales, of which the first two are 1."""
    scales = scales_of(view)
    if scales is None:
        return ()
    fits = len(scales) == 4 and scales[:2] == (1.0, 1.0)
    return (Fact(fits, f"scales {text_of(scales)}"),)


def scales_whole(view: NodeView) -> tuple[Fact, ...]:
    """True if the spatial scales are integers of at least 1."""
    scales = scales_of(view)
    if scales is None:
        return ()
    whole = all(scale.is_integer() and scale >= 1 for scale in scales[2:])
    return (Fact(whole, f"scales {text_of(scales)}"),)


def largest_scale(mode: str) -> Reader:
    """Return the reader of the largest spatial scale for the interpolation `mode`."""

    def read(view: NodeView) -> tuple[Fact, ...]:
        scales = scales_of(view) or ()
        if view.attribute("mode") != mode or not scales[2:]:
            return ()
        return (Fact(max(scales[2:]), f"scales {text_of(scales)}"),)

    return read


def resize_kind(view: NodeView) -> tuple[Fact, ...]:
    """The interpolation mode."""
    mode = str(view.attribute("mode"))
    return (Fact(mode, f"mode {mode}"),)


def resize_mode(view: NodeView) -> tuple[Fact, ...]:
    """Interpolation, coordinate transformation and rounding, by their ONNX names."""
    mode = view.attribute("mode")
    if view.op == "Upsample":
        rest = " asymmetric floor" if mode == "nearest" else ""
        return (Fact(f"{mode}{rest}", f"mode {mode}"),)
    parts = [mode, view.attribute("coordinate_transformation_mode")]
    parts += [view.attribute("nearest_mode")] if mode == "nearest" else []
    text = " ".join(str(part) for part in parts)
    return (Fact(text, f"mode {text}"),)


def scales_of(view: NodeView) -> tuple[float, ...] | None:
    """Return the scales of Resize or Upsample for all axes.

    None if they are not constant, or do not match their axes (an invalid model).
    """
    tensor = view.input(1 if view.op == "Upsample" else 2)
    values = None if tensor is None else tensor.values
    axes, data = view.attribute("axes"), view.input(0)
    if not values or not isinstance(axes, tuple) or data is None or data.shape is None:
        return values or None
    rank = len(data.shape)
    positions = [axis for axis in axes if isinstance(axis, int) and -rank <= axis < rank]
    if len(positions) != len(values):
        return None
    scales = [1.0] * rank
    for position, value in zip(positions, values, strict=True):
        scales[position] = value
    return tuple(scales)


def axis_of(view: NodeView, axis: int) -> int | None:
    """Return the non-negative axis, None if the rank is unknown."""
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
