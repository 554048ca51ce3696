"""Products over the last axis, and convolutions with strides that are too long.

x W over the last axis of [N, C, H, K] is a 1x1 convolution once K stands at the channels. A stride
of a b is a stride of b after each block of a x a has become channels, with the weights moved alike.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.dla.legalize.graph_rewriter import Attributes
from toolkit.dla.legalize.rearrange import gather_blocks, space_to_depth_order
from toolkit.dla.legalize.rewrite import Outcome, Site, image
from toolkit.graph.window import Window

MAX_CONV_STRIDE = 8  # longest convolution stride, rule conv.stride


def matmul_last(site: Site) -> Outcome:
    """Write a product of a 4-D tensor and a constant matrix as a convolution between transposes."""
    matrix, shape = site.array(1), image(site.data)
    if matrix is None or matrix.ndim != 2 or shape is None:
        return "it needs a 4-D tensor times a constant matrix"
    rewriter = site.rewriter
    turned = rewriter.add("Transpose", [site.data], {"perm": (0, 3, 1, 2)})
    weights = rewriter.constant(matrix.T[:, :, None, None], site.data)
    product = rewriter.add("Conv", [turned, weights], {"kernel_shape": (1, 1)})
    return site.replaced_by(rewriter.add("Transpose", [product], {"perm": (0, 2, 3, 1)}))


def long_stride(site: Site) -> Outcome:
    """Write a convolution with a long stride as two with shorter ones."""
    weights, window, shape = site.array(1), site.view.window, image(site.data)
    if weights is None or window is None or window.pads is None or shape is None:
        return "it needs constant weights and a map of known size"
    if site.view.integer("group", 1) != 1:
        return "it has groups"
    block = _block(window)
    if isinstance(block, str):
        return block
    kernel = tuple(-(-size // block) for size in window.kernel)
    output_shape = image(site.output) or shape
    for axis in (0, 1):
        length = shape[2 + axis] + window.pads[axis] + window.pads[2 + axis]
        fits = (length // block - kernel[axis]) // (window.strides[0] // block) + 1
        if shape[2 + axis] % block or fits != output_shape[2 + axis]:
            return f"the map is not made of blocks of {block}"
    data = gather_blocks(site.rewriter, site.data, space_to_depth_order(shape[1], block))
    stride = window.strides[0] // block
    attributes: Attributes = {
        "kernel_shape": kernel,
        "strides": (stride, stride),
        "pads": tuple(pad // block for pad in window.pads),
    }
    moved = site.rewriter.constant(_moved(weights, kernel, block), site.data)
    result = site.rewriter.add("Conv", [data, moved, *site.node.inputs[2:]], attributes)
    return site.replaced_by(result)


def _block(window: Window) -> int | str:
    """The smaller factor of a stride, where both are within the limit and padding has it too."""
    stride = window.strides[0]
    if set(window.strides) != {stride} or set(window.dilations) != {1}:
        return "its strides differ, or it is dilated"
    if stride <= MAX_CONV_STRIDE:
        return f"stride {stride} is within {MAX_CONV_STRIDE}"
    for block in range(2, MAX_CONV_STRIDE + 1):
        if stride % block == 0 and stride // block <= MAX_CONV_STRIDE:
            remainders = [pad % block for pad in window.pads or ()]
            return block if not any(remainders) else f"the padding is not made of blocks of {block}"
    return f"stride {stride} is no product of two of at most {MAX_CONV_STRIDE}"


def _moved(weights: NDArray[Any], kernel: tuple[int, ...], block: int) -> NDArray[Any]:
    """The weights for blocks moved to channels: row, column, channel, as space to depth orders."""
    filters, channels, height, width = weights.shape
    wide = np.zeros((filters, channels, kernel[0] * block, kernel[1] * block), weights.dtype)
    wide[:, :, :height, :width] = weights
    parts = wide.reshape(filters, channels, kernel[0], block, kernel[1], block)
    moved: NDArray[Any] = parts.transpose(0, 3, 5, 1, 2, 4).reshape(filters, -1, *kernel)
    return moved
