"""Operators whose result has sizes that are computed: ONNX's operator -> its formula.

ONNX's own inference passes names of dimensions on, but knows nothing of arithmetic with them. These
rules are that arithmetic, on sizes as `dims.sizes` holds them. A rule returns the shapes of
all results, or None where a size depends on data or on a parameter that is not known.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.gpu.shapes.sizes import ceil_div

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Shapes = tuple[Shape, ...] | None

_FINEST = 1024  # the largest divisor of a Resize factor that is taken for what was meant


@dataclass(frozen=True, slots=True)
class Node:
    """An ONNX node with the shapes and, where they are known, the values of its inputs."""

    kind: str
    attributes: Mapping[str, Any]
    shapes: tuple[Shape | None, ...]
    values: tuple[Array | None, ...]
    results: int
    real: bool  # whether its first input holds real numbers

    def shape(self, at: int) -> Shape:
        """Return the shape of an input. Raises Unknown where it has none."""
        shape = self.shapes[at] if at < len(self.shapes) else None
        if shape is None:
            raise Unknown
        return shape

    def value(self, at: int) -> list[Any] | None:
        """Return the values of an input in order, None where it is left out or not known."""
        values = self.values[at] if at < len(self.values) else None
        return None if values is None else values.reshape(-1).tolist()

    def parameter(self, at: int, name: str) -> list[Any] | None:
        """Return integers that are an attribute in older versions, and an input in newer ones."""
        given = self.attributes.get(name)
        return list(given) if given is not None else self.value(at)


class Unknown(Exception):  # noqa: N818  (it is an answer, not an error)
    """A rule needs a shape that is not known."""


def _broadcast(left: Shape, right: Shape) -> Shape:
    """Join shapes as numpy does; sizes that are not known to be equal must be 1 or are refused."""
    rank = max(len(left), len(right))
    pairs = zip((1,) * (rank - len(left)) + left, (1,) * (rank - len(right)) + right, strict=True)
    found = []
    for a, b in pairs:
        if a not in (b, 1) and b != 1:
            raise Unknown
        found.append(b if a == 1 else a)
    return tuple(found)


def _windows(node: Node, size: Shape, taps: Sequence[int], channels: int) -> Shapes:
    """Sizes of a convolution or pooling: one result for each place of the window."""
    rank = len(taps)
    batch, spatial = size[0], size[2:]
    strides = node.attributes.get("strides", [1] * rank)
    dilations = node.attributes.get("dilations", [1] * rank)
    pads = node.attributes.get("pads", [0] * 2 * rank)
    auto = node.attributes.get("auto_pad", b"NOTSET").decode()
    found = []
    for at in range(rank):
        span = (taps[at] - 1) * dilations[at] + 1
        if auto.startswith("SAME"):
            found.append(ceil_div(spatial[at], strides[at]))
            continue
        before, after = (pads[at], pads[rank + at]) if auto == "NOTSET" else (0, 0)
        if node.attributes.get("ceil_mode", 0):
            # Windows that start on the picture or before it, and reach no further than to a part
            # of the next step: min(ceil((n - span) / stride) + 1, ceil(start / stride)).
            past = min(after - span + strides[at], 0)
            found.append(ceil_div(spatial[at] + before + past, strides[at]))
        else:
            found.append((spatial[at] + before + after - span) // strides[at] + 1)
    return ((batch, channels, *found),) * node.results


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
        return None
    strides = node.attributes.get("strides", [1] * rank)
    dilations = node.attributes.get("dilations", [1] * rank)
    pads = node.attributes.get("pads", [0] * 2 * rank)
    more = node.attributes.get("output_padding", [0] * rank)
    spatial = [
        strides[at] * (size[2 + at] - 1)
        + more[at]
        + (taps[at] - 1) * dilations[at]
        + 1
        - pads[at]
        - pads[rank + at]
        for at in range(rank)
    ]
    return ((size[0], weights[1] * node.attributes.get("group", 1), *spatial),)


def _concat(node: Node) -> Shapes:
    parts = [node.shape(at) for at in range(len(node.shapes))]
    axis = node.attributes["axis"] % len(parts[0])
    others = {(part[:axis], part[axis + 1 :]) for part in parts}
    if len(others) > 1:
        return None  # they may be equal for some sizes, but are not known to be for all
    joined = sum(part[axis] for part in parts)
    return ((*parts[0][:axis], joined, *parts[0][axis + 1 :]),)


def _matmul(node: Node) -> Shapes:
    left, right = node.shape(0), node.shape(1)
    if min(len(left), len(right)) < 2 or left[-1] != right[-2]:
        return None
    return ((*_broadcast(left[:-2], right[:-2]), left[-2], right[-1]),)


def reshape(node: Node) -> Shapes:
    """Return the shape that a Reshape is told; 0 keeps a size, -1 takes what is left."""
    size, wanted = node.shape(0), node.value(1)
    if wanted is None:
        return None
    keeps = not node.attributes.get("allowzero", 0)
    found = [size[at] if keeps and n == 0 else n for at, n in enumerate(wanted)]
    if -1 in found:
        rest = prod(n for n in found if n != -1)
        found[found.index(-1)] = prod(size) // rest
    return (tuple(found),)


def _flatten(node: Node) -> Shapes:
    size = node.shape(0)
    axis = node.attributes.get("axis", 1)
    axis += len(size) if axis < 0 else 0
    return ((prod(size[:axis]), prod(size[axis:])),)


def _expand(node: Node) -> Shapes:
    wanted = node.value(1)
    return None if wanted is None else (_broadcast(node.shape(0), tuple(wanted)),)


def _tile(node: Node) -> Shapes:
    repeats = node.value(1)
    if repeats is None:
        return None
    return (tuple(n * r for n, r in zip(node.shape(0), repeats, strict=True)),)


def _resize(node: Node) -> Shapes:
    size = node.shape(0)
    axes = node.attributes.get("axes", range(len(size)))
    scales = node.value(1 if node.kind == "Upsample" or len(node.shapes) == 2 else 2)
    sizes = node.value(3)
    found = list(size)
    if sizes:
        if node.attributes.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
            return None
        for axis, wanted in zip(axes, sizes, strict=True):
            found[axis] = wanted
        return (tuple(found),)
    if not scales:
        return None
    for axis, scale in zip(axes, scales, strict=True):
        exact = Fraction(scale).limit_denominator(_FINEST)
        if np.float32(exact.numerator / exact.denominator) != np.float32(scale):
            return None
        found[axis] = size[axis] * exact.numerator // exact.denominator
    return (tuple(found),)


def _slice(node: Node) -> Shapes:
    size = list(node.shape(0))
    starts, ends = node.parameter(1, "starts"), node.parameter(2, "ends")
    if starts is None or ends is None:
        return None
    axes = node.parameter(3, "axes") or list(range(len(starts)))
    steps = node.value(4) or [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        size[axis] = _sliced(size[axis], start, end, step)
    return (tuple(size),)


def _sliced(size: int, start: int, end: int, step: int) -> int:
    """How many indices a slice takes; `end` far beyond either side means all."""
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
        if size[axis] % node.results == 0:  # wherever the formula proves it
            part = size[axis] // node.results
        parts = [part] * (node.results - 1) + [size[axis] - part * (node.results - 1)]
    return tuple((*size[:axis], part, *size[axis + 1 :]) for part in parts)


def _pad(node: Node) -> Shapes:
    size, pads = list(node.shape(0)), node.parameter(1, "pads")
    if pads is None:
        return None
    axes = node.value(3) or list(range(len(size)))
    for at, axis in enumerate(axes):
        size[axis] = size[axis] + pads[at] + pads[len(axes) + at]
    return (tuple(size),)


def _depth_to_space(node: Node) -> Shapes:
    n, c, h, w = node.shape(0)
    side = node.attributes["blocksize"]
    return ((n, c // (side * side), h * side, w * side),)


def _space_to_depth(node: Node) -> Shapes:
    n, c, h, w = node.shape(0)
    side = node.attributes["blocksize"]
    return ((n, c * side * side, h // side, w // side),)


def _constant_of_shape(node: Node) -> Shapes:
    wanted = node.value(0)
    return None if wanted is None else (tuple(wanted),)


def _range(node: Node) -> Shapes:
    ends = [node.value(at) for at in range(3)]
    if any(end is None for end in ends):
        return None
    (start,), (limit,), (step,) = (end for end in ends if end is not None)
    return (
        (max(0, ceil_div(limit - start, step) if step > 0 else ceil_div(start - limit, -step)),),
    )


RULES: Mapping[str, Callable[[Node], Shapes]] = {
    "Conv": _convolution,
    "ConvInteger": _convolution,
    "QLinearConv": _convolution,
    "ConvTranspose": _transposed,
    "MaxPool": _pooling,
    "AveragePool": _pooling,
    "LpPool": _pooling,
    "Concat": _concat,
    "MatMul": _matmul,
    "Reshape": reshape,
    "Flatten": _flatten,
    "Expand": _expand,
    "Tile": _tile,
    "Resize": _resize,
    "Upsample": _resize,
    "Slice": _slice,
    "Split": _split,
    "Pad": _pad,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
}
