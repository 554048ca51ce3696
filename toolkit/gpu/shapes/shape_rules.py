"""Shape inference of operators that compute with sizes: a rule for each.

ONNX's own inference propagates names of dimensions, but does no arithmetic with them. These rules
do, on sizes of `toolkit.gpu.shapes.sizes`. A rule returns the shapes of all results, and raises
Unknown where a size depends on data or on an unknown parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.gpu.shapes.sizes import ceil_div

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]

_MAX_SCALE_DENOMINATOR = 1024  # of the fraction that a float scale of Resize stands for


@dataclass(frozen=True, slots=True)
class Node:
    """An ONNX node with the shapes and the known values of its inputs."""

    kind: str
    attributes: Mapping[str, Any]
    shapes: tuple[Shape | None, ...]
    values: tuple[Array | None, ...]
    results: int
    real: bool  # whether its first input holds real numbers

    def shape(self, at: int) -> Shape:
        """Return the shape of an input. Raises Unknown: it is not known."""
        shape = self.shapes[at] if at < len(self.shapes) else None
        if shape is None:
            raise Unknown
        return shape

    def array(self, at: int) -> Array:
        """Return the values of an input. Raises Unknown: they are not known."""
        values = self.values[at] if at < len(self.values) else None
        if values is None:
            raise Unknown
        return values

    def integers(self, at: int) -> list[Any]:
        """Return the values of an input, flat. Raises Unknown: they are not known."""
        values: list[Any] = self.array(at).reshape(-1).tolist()
        return values

    def value(self, at: int) -> list[Any] | None:
        """Return the values of an input, flat; None where it is absent or unknown."""
        values = self.values[at] if at < len(self.values) else None
        return None if values is None else values.reshape(-1).tolist()

    def parameter(self, at: int, name: str) -> list[Any] | None:
        """Return integers that are an attribute in older versions, and an input in newer ones."""
        attribute = self.attributes.get(name)
        return list(attribute) if attribute is not None else self.value(at)


class Unknown(Exception):  # noqa: N818  (an answer, not an error)
    """A rule needs a shape or a value that is not known."""


def _broadcast(one: Shape, two: Shape) -> Shape:
    """Broadcast shapes as numpy does. Raises Unknown: sizes that may differ."""
    rank = max(len(one), len(two))
    pairs = zip((1,) * (rank - len(one)) + one, (1,) * (rank - len(two)) + two, strict=True)
    shape = []
    for a, b in pairs:
        if a not in (b, 1) and b != 1:
            raise Unknown
        shape.append(b if a == 1 else a)
    return tuple(shape)


def _window(node: Node, rank: int) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Return strides, dilations and padding."""
    strides, dilations = (node.attributes.get(n, [1] * rank) for n in ("strides", "dilations"))
    return strides, dilations, node.attributes.get("pads", [0] * 2 * rank)


def _windows(node: Node, size: Shape, taps: Sequence[int], channels: int) -> Shapes:
    """Return the shape of a convolution or pooling: one element for each window."""
    rank = len(taps)
    batch, spatial = size[0], size[2:]
    strides, dilations, pads = _window(node, rank)
    auto = node.attributes.get("auto_pad", b"NOTSET").decode()
    result = []
    for at in range(rank):
        span = (taps[at] - 1) * dilations[at] + 1
        if auto.startswith("SAME"):
            result.append(ceil_div(spatial[at], strides[at]))
            continue
        before, after = (pads[at], pads[rank + at]) if auto == "NOTSET" else (0, 0)
        if node.attributes.get("ceil_mode", 0):
            # Windows that start in the image or the padding before it, the last one at most
            # partial: min(ceil((n - span) / stride) + 1, ceil(start / stride)).
            past = min(after - span + strides[at], 0)
            result.append(ceil_div(spatial[at] + before + past, strides[at]))
        else:
            result.append((spatial[at] + before + after - span) // strides[at] + 1)
    return ((batch, channels, *result),) * node.results


def _convolution(node: Node) -> Shapes:
    weights = node.shape(3 if node.kind == "QLinearConv" else 1)
    return _windows(node, node.shape(0), weights[2:], weights[0])


def _pooling(node: Node) -> Shapes:
    size = node.shape(0)
    return _windows(node, size, node.attributes["kernel_shape"], size[1])


def _transposed(node: Node) -> Shapes:
    size, weights = node.shape(0), node.shape(1)
    taps = weights[2:]
    rank = len(taps)
    if "output_shape" in node.attributes or "auto_pad" in node.attributes:
        raise Unknown
    strides, dilations, pads = _window(node, rank)
    output_padding = node.attributes.get("output_padding", [0] * rank)
    spans = [(tap - 1) * dilation + 1 for tap, dilation in zip(taps, dilations, strict=True)]
    spatial = [
        strides[at] * (size[2 + at] - 1)
        + (output_padding[at] + spans[at] - pads[at] - pads[rank + at])
        for at in range(rank)
    ]
    return ((size[0], weights[1] * node.attributes.get("group", 1), *spatial),)


def _concat(node: Node) -> Shapes:
    parts = [node.shape(at) for at in range(len(node.shapes))]
    axis = node.attributes["axis"] % len(parts[0])
    other_dims = {(part[:axis], part[axis + 1 :]) for part in parts}
    if len(other_dims) > 1:
        raise Unknown  # equal at some sizes at most
    total = sum(part[axis] for part in parts)
    return ((*parts[0][:axis], total, *parts[0][axis + 1 :]),)


def _matmul(node: Node) -> Shapes:
    left, right = node.shape(0), node.shape(1)
    if min(len(left), len(right)) < 2 or left[-1] != right[-2]:
        raise Unknown
    return ((*_broadcast(left[:-2], right[:-2]), left[-2], right[-1]),)


def reshape(node: Node) -> Shapes:
    """Return the shape of a Reshape: 0 copies a size, -1 is the remaining size."""
    size, target = node.shape(0), node.integers(1)
    zero_copies = not node.attributes.get("allowzero", 0)
    shape = [size[at] if zero_copies and n == 0 else n for at, n in enumerate(target)]
    if -1 in shape:
        shape[shape.index(-1)] = prod(size) // prod(n for n in shape if n != -1)
    return (tuple(shape),)


def _flatten(node: Node) -> Shapes:
    size = node.shape(0)
    axis = node.attributes.get("axis", 1)
    axis += len(size) if axis < 0 else 0
    return ((prod(size[:axis]), prod(size[axis:])),)


def _resize(node: Node) -> Shapes:
    size = node.shape(0)
    axes = node.attributes.get("axes", range(len(size)))
    scales = node.value(1 if node.kind == "Upsample" or len(node.shapes) == 2 else 2)
    sizes = node.value(3)
    result = list(size)
    if sizes:
        if node.attributes.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
            raise Unknown
        for axis, target in zip(axes, sizes, strict=True):
            result[axis] = target
        return (tuple(result),)
    if not scales:
        raise Unknown
    for axis, scale in zip(axes, scales, strict=True):
        exact = Fraction(scale).limit_denominator(_MAX_SCALE_DENOMINATOR)
        if np.float32(exact.numerator / exact.denominator) != np.float32(scale):
            raise Unknown
        result[axis] = size[axis] * exact.numerator // exact.denominator
    return (tuple(result),)


def _slice(node: Node) -> Shapes:
    size = list(node.shape(0))
    starts, ends = node.parameter(1, "starts"), node.parameter(2, "ends")
    if starts is None or ends is None:
        raise Unknown
    axes = node.parameter(3, "axes") or list(range(len(starts)))
    steps = node.value(4) or [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        size[axis] = _sliced(size[axis], start, end, step)
    return (tuple(size),)


def _sliced(size: int, start: int, end: int, step: int) -> int:
    """Return the number of indices of a slice; `end` may be far outside."""
    first = start + size if start < 0 else start
    last = end + size if end < 0 else end
    if step > 0:
        first, last = min(max(first, 0), size), min(max(last, 0), size)
        return max(0, ceil_div(last - first, step))
    first, last = min(max(first, 0), size - 1), min(max(last, -1), size - 1)
    return max(0, ceil_div(first - last, -step))


def _split(node: Node) -> Shapes:
    size = node.shape(0)
    axis = node.attributes.get("axis", 0) % len(size)
    parts = node.parameter(1, "split")
    if parts is None:
        part = ceil_div(size[axis], node.results)
        if size[axis] % node.results == 0:  # where the formula proves it
            part = size[axis] // node.results
        parts = [part] * (node.results - 1) + [size[axis] - part * (node.results - 1)]
    return tuple((*size[:axis], part, *size[axis + 1 :]) for part in parts)


def _pad(node: Node) -> Shapes:
    size, pads = list(node.shape(0)), node.parameter(1, "pads")
    if pads is None:
        raise Unknown
    axes = node.value(3) or list(range(len(size)))
    for at, axis in enumerate(axes):
        size[axis] = size[axis] + pads[at] + pads[len(axes) + at]
    return (tuple(size),)


def _between_depth_and_space(node: Node) -> Shapes:
    n, c, h, w = node.shape(0)
    side = node.attributes["blocksize"]
    if node.kind == "SpaceToDepth":
        return ((n, c * side * side, h // side, w // side),)
    return ((n, c // (side * side), h * side, w * side),)


def _range(node: Node) -> Shapes:
    (start,), (limit,), (step,) = (node.integers(at) for at in range(3))
    length = ceil_div(limit - start, step) if step > 0 else ceil_div(start - limit, -step)
    return ((max(0, length),),)


RULES: Mapping[str, Callable[[Node], Shapes]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "QLinearConv"), _convolution),
    "ConvTranspose": _transposed,
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pooling),
    "Concat": _concat,
    "MatMul": _matmul,
    "Reshape": reshape,
    "Flatten": _flatten,
    "Expand": lambda node: (_broadcast(node.shape(0), tuple(node.integers(1))),),
    "Tile": lambda node: (tuple(map(mul, node.shape(0), node.integers(1))),),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    "Slice": _slice,
    "Split": _split,
    "Pad": _pad,
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _between_depth_and_space),
    "ConstantOfShape": lambda node: (tuple(node.integers(0)),),
    "Range": _range,
}
