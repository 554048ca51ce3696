"""Cutting, choosing, padding and adding up by convolutions whose weights are 0 and 1.

A 1x1 convolution with rows of the unit matrix chooses channels; a depthwise convolution whose
window of n - m + 1 has its 1 at place a keeps the m elements from a on of an axis of n.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from toolkit.dla.legalize.graph_rewriter import Attributes, GraphRewriter
from toolkit.dla.legalize.rewrite import Outcome, Site, constant_of, image
from toolkit.graph.node_view import view

MAX_CONV_WINDOW = 32  # longest convolution window, rule conv.kernel
MAX_CONV_STRIDE = 8  # longest convolution stride, rule conv.stride


def slice_conv(site: Site) -> Outcome:
    """Slice channels by a 1x1 convolution, and a map by a depthwise one with the step as stride."""
    ranges, shape = slice_ranges(site.node), image(site.data)
    if isinstance(ranges, str) or shape is None:
        return ranges if isinstance(ranges, str) else "it needs a 4-D map of known size"
    cut = cut_by_conv(site.rewriter, site.data, ranges)
    if isinstance(cut, str):
        return cut
    return site.replaced_by(cut)


def split_conv(site: Site) -> Outcome:
    """Split by one such convolution for each part."""
    shape = image(site.data)
    parts = [image(value) for value in site.node.outputs]
    if shape is None or None in parts:
        return "it needs 4-D tensors of known size"
    axis = site.view.integer("axis", 0) % 4
    start = 0
    for value, part in zip(site.node.outputs, parts, strict=True):
        assert part is not None
        ranges = [range(size) for size in shape]
        ranges[axis] = range(start, start + part[axis])
        start += part[axis]
        cut = cut_by_conv(site.rewriter, site.data, ranges)
        if isinstance(cut, str):
            return cut
        site.rewriter.replace_uses(value, cut)
    return site.rewriter.replacement()


def gather_conv(site: Site) -> Outcome:
    """Gather channels, in any order, by a 1x1 convolution."""
    indices, shape = site.array(1), image(site.data)
    if indices is None or shape is None or site.view.integer("axis", 0) % 4 != 1:
        return "it needs constant indices of the channels of a 4-D tensor"
    if indices.ndim != 1:
        return f"indices of rank {indices.ndim} change the rank"
    return site.replaced_by(choose_channels(site.rewriter, site.data, indices % shape[1]))


def gather_slice(site: Site) -> Outcome:
    """Gather neighbouring rows, columns or channels by a Slice."""
    indices, shape = site.array(1), image(site.data)
    axis = site.view.integer("axis", 0) % 4
    if indices is None or shape is None or indices.ndim != 1 or axis == 0:
        return "it needs a constant list of indices into a 4-D tensor, not of its batch"
    positions = indices % shape[axis]
    if not np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions))):
        return "the indices do not follow each other"
    first = int(positions[0])
    cut = crop(site.rewriter, site.data, {axis: (first, first + len(positions))})
    return site.replaced_by(cut)


def pad_conv(site: Site) -> Outcome:
    """Pad a map with zeros by a depthwise convolution that only moves."""
    pads, shape = _zero_pads(site.node), image(site.data)
    if isinstance(pads, str) or shape is None:
        return pads if isinstance(pads, str) else "it needs a 4-D map of known size"
    (top, bottom), (left, right) = pads
    kernel = (top + bottom + 1, left + right + 1)
    weights = np.zeros((shape[1], 1, *kernel))
    weights[:, :, bottom, right] = 1.0
    around = (top + bottom, left + right)
    padded = site.rewriter.add(
        "Conv",
        [site.data, site.rewriter.constant(weights, site.data)],
        {"group": shape[1], "kernel_shape": kernel, "pads": (*around, *around)},
    )
    return site.replaced_by(padded)


def pad_into_conv(site: Site) -> Outcome:
    """Pad in the convolutions that read the padded map."""
    pads, readers = _zero_pads(site.node), [use.node for use in site.output.uses()]
    windows = [view(node, site.rewriter.opset).window for node in readers]
    if isinstance(pads, str) or site.output.is_graph_output() or not readers:
        return pads if isinstance(pads, str) else "the padded map is an output"
    if any(node.op_type != "Conv" for node in readers):
        return "others than convolutions read the padded map"
    (top, bottom), (left, right) = pads
    for node, window in zip(readers, windows, strict=True):
        if window is None or window.pads is None or len(window.kernel) != 2:
            return f"the window of '{node.name}' is not known"
        whole = tuple(a + b for a, b in zip(window.pads, (top, left, bottom, right), strict=True))
        attributes: Attributes = {
            "kernel_shape": window.kernel,
            "strides": window.strides,
            "dilations": window.dilations,
            "pads": whole,
            "group": node.attributes.get_int("group", 1),
        }
        site.rewriter.replace(node)
        result = site.rewriter.add("Conv", [site.data, *node.inputs[1:]], attributes)
        site.rewriter.replace_uses(node.outputs[0], result)
    return site.rewriter.replacement()


def cumulative_sum(site: Site) -> Outcome:
    """Add up channels by a 1x1 convolution with a triangle of ones."""
    axis, shape = site.array(1), image(site.data)
    if axis is None or shape is None or int(axis.reshape(-1)[0]) % 4 != 1:
        return "it needs a constant axis that is the channels of a 4-D tensor"
    exclusive = site.view.integer("exclusive", 0)
    weights = np.tril(np.ones((shape[1], shape[1])), -1 if exclusive else 0)
    if site.view.integer("reverse", 0):
        weights = weights.T
    return site.replaced_by(_pointwise(site.rewriter, site.data, weights))


def concat_transpose(site: Site) -> Outcome:
    """Concatenate rows or columns as channels, between transposes."""
    axis = site.view.integer("axis", 0) % 4
    if axis not in (2, 3) or any(image(value) is None for value in site.node.inputs):
        return "it needs 4-D tensors of known size, and rows or columns as its axis"
    order = (0, 2, 1, 3) if axis == 2 else (0, 3, 2, 1)
    rewriter = site.rewriter
    turned = [rewriter.add("Transpose", [value], {"perm": order}) for value in site.node.inputs]
    joined = rewriter.add("Concat", turned, {"axis": 1})
    return site.replaced_by(rewriter.add("Transpose", [joined], {"perm": order}))


def slice_ranges(node: ir.Node) -> list[range] | str:
    """What a Slice keeps of every axis of a 4-D map, as a range; or why that is not known."""
    shape = image(node.inputs[0])
    inputs = [*node.inputs, None, None]
    starts, ends, axes, steps = (constant_of(value) for value in inputs[1:5])
    unknown = any(inputs[i] is not None and constant_of(inputs[i]) is None for i in (3, 4))
    if shape is None or starts is None or ends is None or unknown:
        return "it needs a 4-D map of known size and constant starts, ends, axes and steps"
    ranges = [range(size) for size in shape]
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        axis = (int(axes[index]) if axes is not None else index) % 4
        step = int(steps[index]) if steps is not None else 1
        ranges[axis] = range(shape[axis])[slice(start, end, step)]
    return ranges


def cut_by_conv(rewriter: GraphRewriter, data: ir.Value, ranges: Sequence[range]) -> ir.Value | str:
    """Return the part of a 4-D map that `ranges` name, or why no convolution cuts it."""
    shape = image(data)
    assert shape is not None
    if len(ranges[0]) != shape[0] or ranges[0].step != 1:
        return "the batch is cut"
    if any(len(elements) == 0 for elements in ranges):
        return "nothing is kept"
    channels = ranges[1]
    if len(channels) != shape[1] or channels.step != 1:
        data = choose_channels(rewriter, data, np.array(channels))
    windows = [_selecting_window(shape[axis], ranges[axis]) for axis in (2, 3)]
    wrong = next((window for window in windows if isinstance(window, str)), None)
    if wrong is not None:
        return wrong
    if all(window == (1, 0, 1) for window in windows):
        return data
    (height, top, down), (width, left, across) = (w for w in windows if not isinstance(w, str))
    weights = np.zeros((len(channels), 1, height, width))
    weights[:, :, top, left] = 1.0
    attributes: Attributes = {
        "group": len(channels),
        "kernel_shape": (height, width),
        "strides": (down, across),
    }
    return rewriter.add("Conv", [data, rewriter.constant(weights, data)], attributes)


def _selecting_window(size: int, elements: range) -> tuple[int, int, int] | str:
    """Return the window, the index of its 1 and the stride that select `elements` of an axis."""
    if elements.step < 0:
        return f"step {elements.step} turns an axis round"
    step = (
        elements.step if len(elements) > 1 else MAX_CONV_STRIDE
    )  # one element: any stride will do
    # The shortest window whose outputs, one a step, are as many as are kept.
    window = max(elements.start + 1, size - len(elements) * step + 1)
    if elements.start >= window or (size - window) // step + 1 != len(elements):
        return f"elements {elements.start} to {elements[-1]} of {size} cannot be kept by one window"
    if window > MAX_CONV_WINDOW or step > MAX_CONV_STRIDE:
        return f"a window of {window} and a stride of {step} are too long"
    return window, elements.start, step


def choose_channels(rewriter: GraphRewriter, data: ir.Value, indices: np.ndarray) -> ir.Value:
    """Return the channels of `data` that `indices` name, by a 1x1 convolution."""
    shape = image(data)
    assert shape is not None
    weights = np.zeros((len(indices), shape[1]))
    weights[np.arange(len(indices)), indices] = 1.0
    return _pointwise(rewriter, data, weights)


def crop(rewriter: GraphRewriter, data: ir.Value, bounds: dict[int, tuple[int, int]]) -> ir.Value:
    """Return the elements from a to b of some axes, by a Slice."""
    operands = [
        rewriter.constant(np.array(items, np.int64))
        for items in (
            [a for a, _ in bounds.values()],
            [b for _, b in bounds.values()],
            list(bounds),
        )
    ]
    return rewriter.add("Slice", [data, *operands])


def _pointwise(rewriter: GraphRewriter, data: ir.Value, weights: np.ndarray) -> ir.Value:
    taps = rewriter.constant(weights[:, :, None, None], data)
    return rewriter.add("Conv", [data, taps], {"kernel_shape": (1, 1)})


def _zero_pads(pad: ir.Node) -> tuple[tuple[int, int], tuple[int, int]] | str:
    """The padding of height and width of a Pad with zeros; or why it is another."""
    mode = pad.attributes.get_string("mode", "constant")
    amounts = constant_of(pad.inputs[1]) if len(pad.inputs) > 1 else None
    filler = constant_of(pad.inputs[2]) if len(pad.inputs) > 2 else np.zeros(1)
    axes = constant_of(pad.inputs[3]) if len(pad.inputs) > 3 else None
    unknown = len(pad.inputs) > 3 and pad.inputs[3] is not None and axes is None
    if len(pad.inputs) > 2 and pad.inputs[2] is None:
        filler = np.zeros(1)
    if amounts is None or filler is None or unknown:
        return "amounts, value and axes of the padding must be constant"
    if mode != "constant" or filler.reshape(-1)[0] != 0:
        return "the padding is not of zeros"
    count = len(amounts) // 2
    padded_axes = [int(a) % 4 for a in axes] if axes is not None else list(range(count))
    pairs = {p: (int(amounts[i]), int(amounts[i + count])) for i, p in enumerate(padded_axes)}
    outside = [pairs.get(axis, (0, 0)) for axis in (0, 1)]
    if any(map(any, outside)) or any(min(pair) < 0 for pair in pairs.values()):
        return "batch or channels are padded, or something is cut off"
    return pairs.get(2, (0, 0)), pairs.get(3, (0, 0))
