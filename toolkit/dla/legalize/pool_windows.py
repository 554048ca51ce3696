"""Pooling windows that are too long, or that leave padding out, in windows that the DLA takes.

max over k = max over k1 of max over k2, stride 1 first, with k - 1 = (k1 - 1) + (k2 - 1);
padding splits in the same way, for a maximum does not see it.
"""

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from toolkit.dla.legalize.graph_rewriter import Attributes
from toolkit.dla.legalize.pooling import MAX_CONV_WINDOW, average
from toolkit.dla.legalize.rewrite import Outcome, Site, image, sizes
from toolkit.dla.legalize.windows import MAX_POOL_WINDOW, exact_steps, paired
from toolkit.graph.window import Window


def max_cascade(site: Site) -> Outcome:
    """Split a MaxPool into MaxPools of stride 1 and a last one with the stride."""
    window = _plain(site)
    if isinstance(window, str):
        return window
    if max(window.kernel) <= MAX_POOL_WINDOW:
        return f"windows are within {MAX_POOL_WINDOW}x{MAX_POOL_WINDOW} already"
    pads = window.pads or ()
    count = max(-(-(size - 1) // (MAX_POOL_WINDOW - 1)) for size in window.kernel)
    rows, columns = (
        _split(size, before, after, count)
        for size, before, after in zip(window.kernel, pads[:2], pads[2:], strict=True)
    )
    data = site.data
    for index, (row, column) in enumerate(zip(rows, columns, strict=True)):
        last = index == count - 1
        attributes: Attributes = {
            "kernel_shape": (row[0], column[0]),
            "strides": window.strides if last else (1, 1),
            "pads": (row[1], column[1], row[2], column[2]),
        }
        data = site.rewriter.add("MaxPool", [data], attributes)
    return site.replaced_by(data)


def average_cascade(site: Site) -> Outcome:
    """Split an AveragePool of blocks side by side into a cascade."""
    window = _plain(site)
    if isinstance(window, str):
        return window
    steps = [exact_steps(size) for size in window.kernel]
    if window.strides != window.kernel or any(window.pads or ()):
        return "windows overlap or are padded"
    if steps[0] is None or steps[1] is None:
        return f"window {_text(window.kernel)} has no factors of at most {MAX_POOL_WINDOW}"
    return site.replaced_by(average(site.rewriter, site.data, paired(steps[0], steps[1])))


def average_conv(site: Site) -> Outcome:
    """Average by a depthwise convolution of equal weights."""
    window, shape = _plain(site), image(site.data)
    if isinstance(window, str) or shape is None:
        return window if isinstance(window, str) else "it needs a 4-D map of known size"
    pads = window.pads or ()
    if any(pads) and not site.view.integer("count_include_pad", 0):
        return "padding is left out of the averages"
    if max(window.kernel) > MAX_CONV_WINDOW:
        return f"window {_text(window.kernel)} is larger than {MAX_CONV_WINDOW}x{MAX_CONV_WINDOW}"
    return site.replaced_by(_equal_weights(site, window, shape[1]))


def average_inclusive(site: Site) -> Outcome:
    """Count the padding, then scale each output by its window's size over the elements in it."""
    return _inclusive(site, by_convolution=False)


def average_inclusive_conv(site: Site) -> Outcome:
    """Sum by a depthwise convolution of equal weights, then scale as `average_inclusive`."""
    return _inclusive(site, by_convolution=True)


def _equal_weights(site: Site, window: Window, channels: int) -> ir.Value:
    weights = np.full((channels, 1, *window.kernel), 1.0 / math.prod(window.kernel))
    attributes: Attributes = {
        "group": channels,
        "kernel_shape": window.kernel,
        "strides": window.strides,
        "pads": window.pads or (),
    }
    taps = site.rewriter.constant(weights, site.data)
    return site.rewriter.add("Conv", [site.data, taps], attributes)


def _inclusive(site: Site, *, by_convolution: bool) -> Outcome:
    window, input_shape, output_shape = _plain(site), image(site.data), image(site.output)
    if isinstance(window, str) or input_shape is None or output_shape is None:
        return window if isinstance(window, str) else "it needs a 4-D map of known size"
    pads = window.pads or ()
    if not any(pads) or site.view.integer("count_include_pad", 0):
        return "padding counts already"
    if by_convolution and max(window.kernel) > MAX_CONV_WINDOW:
        return f"window {_text(window.kernel)} is larger than {MAX_CONV_WINDOW}x{MAX_CONV_WINDOW}"
    counts = [
        _elements_in_windows(
            input_shape[2 + axis], output_shape[2 + axis], window, pads[axis], axis
        )
        for axis in range(2)
    ]
    scale = math.prod(window.kernel) / np.outer(counts[0], counts[1])
    whole = np.broadcast_to(scale, (1, *output_shape[1:]))
    if by_convolution:
        mean = _equal_weights(site, window, input_shape[1])
    else:
        attributes: Attributes = {
            "kernel_shape": window.kernel,
            "strides": window.strides,
            "pads": pads,
            "count_include_pad": 1,
        }
        mean = site.rewriter.add("AveragePool", [site.data], attributes)
    scaled = site.rewriter.add("Mul", [mean, site.rewriter.constant(whole, site.data)])
    return site.replaced_by(scaled)


def _elements_in_windows(size: int, count: int, window: Window, pad: int, axis: int) -> list[int]:
    """Return how many elements each window along an axis covers, padding excluded."""
    starts = [index * window.strides[axis] - pad for index in range(count)]
    return [min(size, s + window.kernel[axis]) - max(0, s) for s in starts]


def _split(size: int, before: int, after: int, count: int) -> list[tuple[int, int, int]]:
    """Split a window and its padding into `count` windows of at most 8."""
    steps = []
    for remaining in range(count, 0, -1):
        part = -(-(size - 1) // remaining)
        pads = min(before, part), min(after, part)
        steps.append((part + 1, *pads))
        size, before, after = size - part, before - pads[0], after - pads[1]
    return steps


def _plain(site: Site) -> Window | str:
    """The window of a 2-D pooling without dilation, rounding up or indices."""
    window = site.view.window
    if window is None or window.pads is None or len(window.kernel) != 2 or not sizes(site.data):
        return "it needs a 2-D window and a map of known size"
    if set(window.dilations) != {1}:
        return "the window is dilated"
    if site.view.integer("ceil_mode", 0) or len(site.view.outputs) > 1:
        return "it rounds its size up or returns indices"
    return window


def _text(values: Sequence[int]) -> str:
    return "x".join(map(str, values))
