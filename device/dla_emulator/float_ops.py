"""What a DLA segment does to arrays outside the INT8 stages: moving numbers, floating point.

Moves take INT8 and floating point alike and change no number. What has no INT8 arithmetic, or whose
result the engine gives no scale, computes in float32 here and is rounded to FP16, the DLA's other
precision; how the DLA orders those operations is not known.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.dla_emulator.segment_graph import Node

Array = NDArray[Any]
Function = Callable[[Sequence[Array]], Array]


def to_half(x: Array) -> Array:
    """Return numbers as FP16 holds them, in float32."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def move_of(node: Node, parameters: Sequence[Array | None]) -> Function | None:
    """Return what a node does that only moves numbers, None for other nodes.

    `parameters` are its constant inputs (None for the others), in place.
    """
    row = MOVES.get(node.op)
    return None if row is None else row(node, parameters)


def float_of(node: Node) -> Function | None:
    """Return a node's function in float32 (all its inputs given), None for unknown operators."""
    row = FLOATS.get(node.op)
    return None if row is None else row(node)


def nearest_indexes(node: Node, length: int, result: int, scale: float) -> NDArray[np.int64]:
    """Return which input position each output position of a nearest Resize copies (ONNX)."""
    at = _coordinates(node, length, result, scale)
    mode = node.text("nearest_mode", "round_prefer_floor")
    rounded = {
        "floor": np.floor(at),
        "ceil": np.ceil(at),
        "round_prefer_floor": np.ceil(at - 0.5),
        "round_prefer_ceil": np.floor(at + 0.5),
    }[mode]
    return np.clip(rounded, 0, length - 1).astype(np.int64)


def _coordinates(node: Node, length: int, result: int, scale: float) -> NDArray[np.float64]:
    mode = node.text("coordinate_transformation_mode", "half_pixel")
    at = np.arange(result, dtype=np.float64)
    if mode == "asymmetric":
        return at / scale
    if mode == "align_corners":
        return at * (length - 1) / max(result - 1, 1)
    if mode == "pytorch_half_pixel" and result == 1:
        return at * 0
    return (at + 0.5) / scale - 0.5


def _resize_plan(x: Array, parameters: Sequence[Array | None]) -> list[tuple[int, int, float]]:
    """Return (axis, length of the result, scale) for each axis that changes."""
    parts = [p if p is not None and p.size else None for p in parameters[2:4]]
    parts += [None] * (2 - len(parts))
    scales, sizes = parts
    plan = []
    for axis, length in enumerate(x.shape):
        if sizes is not None:
            result, scale = int(sizes[axis]), float(sizes[axis]) / length
        else:
            assert scales is not None
            result, scale = int(length * float(scales[axis])), float(scales[axis])
        if result != length:
            plan.append((axis, result, scale))
    return plan


def _resize(node: Node, parameters: Sequence[Array | None]) -> Function | None:
    if node.text("mode", "nearest") != "nearest":
        return None

    def run(arrays: Sequence[Array]) -> Array:
        x = arrays[0]
        for axis, result, scale in _resize_plan(x, parameters):
            x = np.take(x, nearest_indexes(node, x.shape[axis], result, scale), axis)
        return x

    return run


def resize_linear(node: Node, parameters: Sequence[Array | None]) -> Function:
    """Return the linear Resize of floating-point numbers."""

    def run(arrays: Sequence[Array]) -> Array:
        x = arrays[0]
        for axis, result, scale in _resize_plan(x, parameters):
            length = x.shape[axis]
            at = np.clip(_coordinates(node, length, result, scale), 0, length - 1)
            low = np.floor(at).astype(np.int64)
            shape = [-1 if dim == axis else 1 for dim in range(x.ndim)]
            share = (at - low).astype(np.float32).reshape(shape)
            high = np.take(x, np.minimum(low + 1, length - 1), axis)
            x = np.take(x, low, axis) * (1 - share) + high * share
        return x

    return run


def _integers(parameter: Array | None, default: Sequence[int] = ()) -> tuple[int, ...]:
    return (
        tuple(default)
        if parameter is None
        else tuple(int(value) for value in parameter.reshape(-1))
    )


def _reshape(node: Node, parameters: Sequence[Array | None]) -> Function | None:
    if parameters[1] is None:
        return None
    sizes, keep = _integers(parameters[1]), not node.integer("allowzero", 0)

    def run(arrays: Sequence[Array]) -> Array:
        x = arrays[0]
        shape = [x.shape[i] if size == 0 and keep else size for i, size in enumerate(sizes)]
        return x.reshape(shape)

    return run


def _flatten(node: Node, _: Sequence[Array | None]) -> Function:
    axis = node.integer("axis", 1)
    return lambda arrays: arrays[0].reshape(int(np.prod(arrays[0].shape[:axis])), -1)


def _squeeze(node: Node, parameters: Sequence[Array | None]) -> Function:
    axes = _integers(parameters[1]) if len(parameters) > 1 else node.integers("axes", ())
    return lambda arrays: np.squeeze(arrays[0], axes or None)


def _unsqueeze(node: Node, parameters: Sequence[Array | None]) -> Function:
    axes = _integers(parameters[1]) if len(parameters) > 1 else node.integers("axes", ())
    return lambda arrays: np.expand_dims(arrays[0], axes)


def _transpose(node: Node, _: Sequence[Array | None]) -> Function:
    order = node.integers("perm", ())
    return lambda arrays: np.transpose(arrays[0], order or None)


def _slice(_: Node, parameters: Sequence[Array | None]) -> Function | None:
    if any(parameter is None for parameter in parameters[1:3]):
        return None
    starts, ends = _integers(parameters[1]), _integers(parameters[2])
    axes = _integers(parameters[3] if len(parameters) > 3 else None, range(len(starts)))
    steps = _integers(parameters[4] if len(parameters) > 4 else None, [1] * len(starts))

    def run(arrays: Sequence[Array]) -> Array:
        x = arrays[0]
        cut = [slice(None)] * x.ndim
        for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
            open_end = step < 0 and end < -x.shape[axis]
            cut[axis] = slice(start, None if open_end else end, step)
        return x[tuple(cut)]

    return run


def _concat(node: Node, _: Sequence[Array | None]) -> Function:
    axis = node.integer("axis", 0)
    return lambda arrays: np.concatenate(list(arrays), axis)


def _pad(node: Node, parameters: Sequence[Array | None]) -> Function | None:
    value = parameters[2] if len(parameters) > 2 else None
    if node.text("mode", "constant") != "constant" or parameters[1] is None or np.any(value):
        return None
    amounts = _integers(parameters[1])
    axes = _integers(parameters[3] if len(parameters) > 3 else None, range(len(amounts) // 2))

    def run(arrays: Sequence[Array]) -> Array:
        widths = [(0, 0)] * arrays[0].ndim
        for i, axis in enumerate(axes):
            widths[axis] = (amounts[i], amounts[i + len(axes)])
        return np.pad(arrays[0], widths)

    return run


def _depth_to_space(node: Node, _: Sequence[Array | None]) -> Function:
    block, rows_first = node.integer("blocksize", 1), node.text("mode", "DCR") == "CRD"

    def run(arrays: Sequence[Array]) -> Array:
        n, c, h, w = arrays[0].shape
        if rows_first:
            parts = arrays[0].reshape(n, c // block**2, block, block, h, w)
            spread = parts.transpose(0, 1, 4, 2, 5, 3)
        else:
            parts = arrays[0].reshape(n, block, block, c // block**2, h, w)
            spread = parts.transpose(0, 3, 4, 1, 5, 2)
        return np.asarray(spread.reshape(n, c // block**2, h * block, w * block))

    return run


def _identity(_: Node, __: Sequence[Array | None]) -> Function:
    return lambda arrays: arrays[0]


MOVES: Mapping[str, Callable[[Node, Sequence[Array | None]], Function | None]] = {
    "Concat": _concat,
    "DepthToSpace": _depth_to_space,
    "Flatten": _flatten,
    "Identity": _identity,
    "Pad": _pad,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}


def _softmax(node: Node) -> Function:
    axis = node.integer("axis", -1)

    def run(arrays: Sequence[Array]) -> Array:
        power = np.exp(arrays[0] - arrays[0].max(axis, keepdims=True))
        return np.asarray(power / power.sum(axis, keepdims=True))

    return run


def _lrn(node: Node) -> Function:
    size, bias = node.integer("size", 1), node.number("bias", 1.0)
    alpha, beta = node.number("alpha", 1e-4), node.number("beta", 0.75)

    def run(arrays: Sequence[Array]) -> Array:
        x = arrays[0]
        squares = np.pad(x * x, ((0, 0), ((size - 1) // 2, size // 2), (0, 0), (0, 0)))
        total = sum(squares[:, i : i + x.shape[1]] for i in range(size))
        return np.asarray(x / (bias + alpha / size * total) ** beta)

    return run


def _leaky(node: Node) -> Function:
    slope = node.number("alpha", 0.01)
    return lambda arrays: np.where(arrays[0] < 0, slope * arrays[0], arrays[0])


def _plain(function: Callable[..., Any]) -> Callable[[Node], Function]:
    return lambda _: lambda arrays: np.asarray(function(*arrays))


def _folded(function: Callable[[Array, Array], Array]) -> Callable[[Node], Function]:
    def run(arrays: Sequence[Array]) -> Array:
        total = arrays[0]
        for operand in arrays[1:]:
            total = function(total, operand)
        return total

    return lambda _: run


FLOATS: Mapping[str, Callable[[Node], Function]] = {
    "Abs": _plain(np.abs),
    "Add": _plain(np.add),
    "Cos": _plain(np.cos),
    "Div": _plain(np.divide),
    "LRN": _lrn,
    "LeakyRelu": _leaky,
    "Max": _folded(np.maximum),
    "Min": _folded(np.minimum),
    "Mul": _plain(np.multiply),
    "PRelu": _plain(lambda x, slope: np.where(x < 0, x * slope, x)),
    "Pow": _plain(np.power),
    "Sigmoid": _plain(lambda x: 0.5 * (1 + np.tanh(0.5 * x))),
    "Sin": _plain(np.sin),
    "Softmax": _softmax,
    "Sub": _plain(np.subtract),
    "Sum": _folded(np.add),
    "Tanh": _plain(np.tanh),
}
