"""Means, sums and maxima over a map, by windows that the DLA has.

mean(x) = mean of the means of equal blocks; max(x) = max of the maxima of any blocks.
A map that blocks of at most 8 do not divide is padded with zeros, which a sum does not see:
mean(x) = (padded size / size) * mean(padded x).
"""

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from toolkit.dla.legalize.graph_rewriter import GraphRewriter
from toolkit.dla.legalize.rewrite import Outcome, Site, image
from toolkit.dla.legalize.windows import (
    MAX_POOL_WINDOW,
    Step,
    exact_steps,
    inflation,
    padded_steps,
    paired,
)

CHANNEL, ROWS, COLUMNS = 1, 2, 3
MAX_CONV_WINDOW = 32  # longest convolution window, rule conv.kernel

# What a reduction does to each element before it sums, and whether it divides by their number.
SUMS = ("ReduceSum", "ReduceL1", "ReduceSumSquare")


def mean_window(site: Site) -> Outcome:
    """Average in one window."""
    return _spatial(site, lambda shape: _steps(shape, exact_steps, 1))


def mean_cascade(site: Site) -> Outcome:
    """Average in a cascade of windows that divide the map."""
    return _spatial(site, lambda shape: _steps(shape, exact_steps, None))


def mean_padded(site: Site) -> Outcome:
    """Average in a cascade over a map padded with zeros, then scale."""
    return _spatial(site, lambda shape: _steps(shape, padded_steps, None))


def mean_conv(site: Site) -> Outcome:
    """Average by one depthwise convolution whose window is the map."""
    axes = reduced_axes(site)
    shape = image(site.data)
    if shape is None or axes is None or not axes <= {ROWS, COLUMNS}:
        return "it needs a 4-D map of known size, reduced over height or width alone"
    window = _window(shape, axes)
    if max(window) > MAX_CONV_WINDOW:
        return f"window {window[0]}x{window[1]} is larger than {MAX_CONV_WINDOW}x{MAX_CONV_WINDOW}"
    weight = 1.0 if site.node.op_type in SUMS else 1.0 / math.prod(window)
    taps = site.rewriter.constant(np.full((shape[1], 1, *window), weight), site.data)
    data = _prepared(site)
    result = site.rewriter.add(
        "Conv", [data, taps], {"group": shape[1], "kernel_shape": window, "strides": (1, 1)}
    )
    return _finish(site, result)


def over_channels(site: Site) -> Outcome:
    """Sum or average over the channels (and the map) by a convolution of one output channel."""
    axes, shape = reduced_axes(site), image(site.data)
    if shape is None or axes is None or CHANNEL not in axes:
        return "it needs a 4-D map of known size, reduced over the channels"
    steps: tuple[tuple[Step, Step], ...] = ()
    summed = site.node.op_type in SUMS
    if axes & {ROWS, COLUMNS}:
        steps = paired(*(padded_steps(size) for size in _window(shape, axes)))
    factor = math.prod(_window(shape, axes)) if summed else 1.0 / shape[1]
    factor *= _inflation(_window(shape, axes), steps)
    data = average(site.rewriter, _prepared(site), steps)
    weights = site.rewriter.constant(np.full((1, shape[1], 1, 1), factor), site.data)
    return _finish(site, site.rewriter.add("Conv", [data, weights], {"kernel_shape": (1, 1)}))


def global_max(site: Site) -> Outcome:
    """Take the maximum (or -max(-x)) over a map by a cascade of MaxPool."""
    axes, shape = reduced_axes(site), image(site.data)
    if shape is None or axes is None or not axes or not axes <= {ROWS, COLUMNS}:
        return "it needs a 4-D map of known size, reduced over height or width alone"
    least = site.node.op_type == "ReduceMin"
    data = _negated(site.rewriter, site.data) if least else site.data
    data = maximum(site.rewriter, data, paired(*(padded_steps(n) for n in _window(shape, axes))))
    return _finish(site, _negated(site.rewriter, data) if least else data)


def keep_dims(site: Site) -> Outcome:
    """Reduce with the axes kept, and drop them afterwards."""
    axes, shape = reduced_axes(site), image(site.data)
    if shape is None or axes is None or site.view.integer("keepdims", 1):
        return "it needs a 4-D map of known size whose reduced axes are dropped"
    inputs, attributes = [site.data], {"keepdims": 1}
    if site.value(1) is not None:
        result = site.rewriter.add("ReduceMax", [*inputs, site.value(1)], attributes)
    elif site.view.attribute("axes"):  # before opset 18
        result = site.rewriter.add("ReduceMax", inputs, {**attributes, "axes": tuple(sorted(axes))})
    else:  # all axes
        result = site.rewriter.add("ReduceMax", inputs, attributes)
    return _finish(site, result)


def average(
    rewriter: GraphRewriter, data: ir.Value, steps: tuple[tuple[Step, Step], ...]
) -> ir.Value:
    """Average blocks step by step; padding counts."""
    for step in steps:
        data = rewriter.add("AveragePool", [data], {**_pool(step), "count_include_pad": 1})
    return data


def maximum(
    rewriter: GraphRewriter, data: ir.Value, steps: tuple[tuple[Step, Step], ...]
) -> ir.Value:
    """Take the maxima of blocks step by step; MaxPool does not see its padding."""
    for step in steps:
        data = rewriter.add("MaxPool", [data], _pool(step))
    return data


def global_average(rewriter: GraphRewriter, data: ir.Value) -> ir.Value:
    """Average a whole map, by whatever steps it takes."""
    shape = image(data)
    assert shape is not None
    steps = paired(padded_steps(shape[2]), padded_steps(shape[3]))
    result = average(rewriter, data, steps)
    factor = _inflation(shape[2:], steps)
    return result if factor == 1.0 else rewriter.add("Mul", [result, rewriter.scalar(factor, data)])


def reduced_axes(site: Site) -> frozenset[int] | None:
    """The axes that a reduction or a global pooling sums over, None where they are not constant."""
    shape = image(site.data)
    if site.node.op_type.startswith("Global"):
        return frozenset({ROWS, COLUMNS})
    axes = site.integers("axes", 1)
    if shape is None or (axes is None and site.value(1) is not None):
        return None
    if not axes:
        whole = not site.view.integer("noop_with_empty_axes", 0)
        return frozenset(range(4)) if whole else None
    return frozenset(axis % 4 for axis in axes)


def _spatial(
    site: Site, steps_of: Callable[[tuple[int, int]], tuple[tuple[Step, Step], ...] | str]
) -> Outcome:
    axes, shape = reduced_axes(site), image(site.data)
    if shape is None or axes is None or not axes or not axes <= {ROWS, COLUMNS}:
        return "it needs a 4-D map of known size, reduced over height or width alone"
    window = _window(shape, axes)
    steps = steps_of(window)
    if isinstance(steps, str):
        return steps
    result = average(site.rewriter, _prepared(site), steps)
    factor = _inflation(window, steps)
    factor *= math.prod(window) if site.node.op_type in SUMS else 1.0
    if factor != 1.0:
        result = site.rewriter.add("Mul", [result, site.rewriter.scalar(factor, site.data)])
    return _finish(site, result)


def _steps(
    window: tuple[int, int],
    plan: Callable[[int], tuple[Step, ...] | None],
    max_steps: int | None,
) -> tuple[tuple[Step, Step], ...] | str:
    rows, columns = plan(window[0]), plan(window[1])
    text = f"{window[0]}x{window[1]}"
    if rows is None or columns is None:
        return f"{text} has no factors of at most {MAX_POOL_WINDOW}"
    steps = paired(rows, columns)
    return f"{text} takes {len(steps)} windows" if max_steps and len(steps) > max_steps else steps


def _window(shape: tuple[int, int, int, int], axes: frozenset[int]) -> tuple[int, int]:
    return shape[2] if ROWS in axes else 1, shape[3] if COLUMNS in axes else 1


def _inflation(window: tuple[int, ...], steps: tuple[tuple[Step, Step], ...]) -> float:
    rows = tuple(step[0] for step in steps)
    columns = tuple(step[1] for step in steps)
    return inflation(window[0], rows) * inflation(window[1], columns)


def _pool(step: tuple[Step, Step]) -> dict[str, tuple[int, ...]]:
    (height, top, bottom), (width, left, right) = step
    window = (height, width)
    return {"kernel_shape": window, "strides": window, "pads": (top, left, bottom, right)}


def _prepared(site: Site) -> ir.Value:
    """What is summed: the elements, their magnitudes or their squares."""
    if site.node.op_type == "ReduceL1":
        return site.rewriter.add("Abs", [site.data])
    if site.node.op_type == "ReduceSumSquare":
        return site.rewriter.add("Mul", [site.data, site.data])
    return site.data


def _negated(rewriter: GraphRewriter, data: ir.Value) -> ir.Value:
    return rewriter.add("Mul", [data, rewriter.scalar(-1.0, data)])


def _finish(site: Site, result: ir.Value) -> Outcome:
    """Replace the site by `result` in the shape of the output: reduced axes may be dropped."""
    shape = site.view.outputs[0].shape
    sizes = [size for size in shape or () if isinstance(size, int)]
    if not site.view.integer("keepdims", 1):
        site.rewriter.sinks = True  # a reduction that drops its axes has always held a view
        result = site.rewriter.reshape(result, sizes)
    return site.replaced_by(result)
