"""Transposed convolutions without padding, groups and dilation.

deconv with padding p = deconv without padding, cut from p on. Groups are blocks on the diagonal of
one dense kernel, and a dilated kernel is a longer one with zeros between its taps; rows of zeros
at its end make room for an output padding.
"""

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.dla.legalize.rewrite import Outcome, Site, image, sizes
from toolkit.dla.legalize.selection import crop, cut_by_conv
from toolkit.graph.window import Window


def dense(site: Site) -> Outcome:
    """Write groups and dilation into the kernel."""
    window = _window(site)
    if isinstance(window, str):
        return window
    if any(window.pads or ()) or _extra(site) != (0, 0):
        return "it is padded"
    if site.view.integer("group", 1) == 1 and set(window.dilations) == {1}:
        return "it has one group and no dilation"
    return site.replaced_by(_unpadded(site, window, (0, 0)))


def cropped_by_slice(site: Site) -> Outcome:
    """Leave the padding out and cut the result by Slice."""
    return _cropped(site, by_slice=True)


def cropped_by_conv(site: Site) -> Outcome:
    """Leave the padding out and cut the result by a depthwise convolution."""
    return _cropped(site, by_slice=False)


def _cropped(site: Site, *, by_slice: bool) -> Outcome:
    window, shape = _window(site), image(site.output)
    if isinstance(window, str) or shape is None:
        return window if isinstance(window, str) else "it needs a result of known size"
    pads, extra = window.pads or (), _extra(site)
    if not any(pads) and extra == (0, 0):
        return "it is not padded"
    beyond = [max(0, extra[axis] - pads[2 + axis]) for axis in range(2)]
    whole = _unpadded(site, window, (beyond[0], beyond[1]))
    bounds = {2 + axis: (pads[axis], pads[axis] + shape[2 + axis]) for axis in range(2)}
    shape_before = image(whole)
    assert shape_before is not None
    cropped = {axis: pair for axis, pair in bounds.items() if pair != (0, shape_before[axis])}
    result: ir.Value | str = whole
    if cropped and by_slice:
        result = crop(site.rewriter, whole, cropped)
    elif cropped:
        ranges = [range(*bounds.get(axis, (0, shape_before[axis]))) for axis in range(4)]
        result = cut_by_conv(site.rewriter, whole, ranges)
    if isinstance(result, str):
        return result
    return site.replaced_by(result)


def _window(site: Site) -> Window | str:
    """The window of a 2-D transposed convolution with constant weights."""
    window = site.view.window
    if window is None or window.pads is None or len(window.kernel) != 2:
        return "it needs a 2-D window of known padding"
    if site.array(1) is None or image(site.data) is None:
        return "it needs constant weights and a map of known size"
    if site.view.attribute("output_shape"):
        return "its padding is made for an output_shape; write it as pads"
    if site.view.attribute("auto_pad") in ("SAME_UPPER", "SAME_LOWER") and _extra(site) != (0, 0):
        return "automatic padding beside an output padding is ambiguous"
    return window


def _extra(site: Site) -> tuple[int, int]:
    padding = site.view.attribute("output_padding")
    if not isinstance(padding, tuple) or len(padding) != 2:
        return 0, 0
    return int(padding[0]), int(padding[1])


def _unpadded(site: Site, window: Window, beyond: tuple[int, int]) -> ir.Value:
    """Add the transposed convolution with one dense kernel and no padding."""
    weights = site.array(1)
    assert weights is not None
    kernel = _spread(_ungrouped(weights, site.view.integer("group", 1)), window.dilations, beyond)
    operands = [site.data, site.rewriter.constant(kernel, site.data)]
    bias = site.value(2)
    if bias is not None:
        operands.append(bias)
    attributes = {"kernel_shape": kernel.shape[2:], "strides": window.strides}
    return site.rewriter.add("ConvTranspose", operands, attributes)


def _ungrouped(weights: NDArray[Any], groups: int) -> NDArray[Any]:
    """Write [I, O / g, h, w] as [I, O, h, w] with zeros between the groups."""
    inputs, outputs, *kernel = weights.shape
    if groups == 1:
        return weights
    whole = np.zeros((inputs, outputs * groups, *kernel), weights.dtype)
    share = inputs // groups
    for group in range(groups):
        rows, columns = slice(group * share, (group + 1) * share), slice(group * outputs, None)
        whole[rows, columns][:, :outputs] = weights[rows]
    return whole


def _spread(
    weights: NDArray[Any], dilations: tuple[int, ...], beyond: tuple[int, int]
) -> NDArray[Any]:
    """Put zeros between the taps of a dilated kernel, and rows of zeros behind them."""
    spans = [
        (size - 1) * dilation + 1
        for size, dilation in zip(weights.shape[2:], dilations, strict=True)
    ]
    shape = (*weights.shape[:2], spans[0] + beyond[0], spans[1] + beyond[1])
    whole = np.zeros(shape, weights.dtype)
    whole[:, :, : spans[0] : dilations[0], : spans[1] : dilations[1]] = weights
    return whole


def conv_dense(site: Site) -> Outcome:
    """Write the groups of a convolution into one dense kernel."""
    weights, groups, shape = site.array(1), site.view.integer("group", 1), sizes(site.data)
    window = site.view.window
    if weights is None or shape is None or window is None or window.pads is None or groups == 1:
        return "it needs groups, constant weights and a map of known size"
    if groups < 1 or len(weights) % groups:
        return f"its {len(weights)} output channels are no multiple of {groups} groups"
    # [O, I / g, h, w]: the blocks lie the other way round than those of a transposed convolution.
    parts = np.split(weights, groups)
    turned = np.concatenate([part.swapaxes(0, 1) for part in parts])
    kernel = _ungrouped(turned, groups).swapaxes(0, 1)
    attributes = {
        "kernel_shape": window.kernel,
        "strides": window.strides,
        "dilations": window.dilations,
        "pads": window.pads,
    }
    operands = [site.data, site.rewriter.constant(kernel, site.data), *site.node.inputs[2:]]
    return site.replaced_by(site.rewriter.add("Conv", operands, attributes))
