"""Values of operators that compute sizes at run time, as formulas.

Exporters write Shape, Gather, Mul, Concat and the like before a Reshape. The build computes them on
sizes, so they leave the network.
"""

import operator
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.gpu.shapes.shape_rules import Node, Unknown, reshape

Array = npt.NDArray[Any]


def _elementwise(rule: Callable[[Any, Any], Any]) -> Callable[[Node], Array]:
    """Apply a rule to each pair of numbers, broadcast as numpy does."""
    function = np.frompyfunc(rule, 2, 1)
    return lambda node: function(node.array(0), node.array(1))


def _shape_value(node: Node) -> Array:
    size = slice(node.attributes.get("start", 0), node.attributes.get("end"))
    return np.array(node.shape(0)[size], object)


def _gather_value(node: Node) -> Array:
    indices = node.array(1).astype(np.int64)
    return np.take(node.array(0), indices, axis=node.attributes.get("axis", 0))


def _concat_value(node: Node) -> Array:
    parts = [part for part in node.values if part is not None]
    return np.concatenate(parts, axis=node.attributes["axis"])


def _slice_value(node: Node) -> Array:
    values = node.array(0)
    starts, ends = node.parameter(1, "starts"), node.parameter(2, "ends")
    if starts is None or ends is None:
        raise Unknown
    axes = node.parameter(3, "axes") or range(len(starts))
    steps = node.value(4) or [1] * len(starts)
    slices = [slice(None)] * values.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        # A negative step with an end far before the first index takes all of it.
        slices[axis] = slice(start, None if step < 0 and end < -values.shape[axis] else end, step)
    return values[tuple(slices)]


def _unsqueeze_value(node: Node) -> Array:
    axes = node.parameter(1, "axes")
    if axes is None:
        raise Unknown
    return np.expand_dims(node.array(0), tuple(axes))


def _squeeze_value(node: Node) -> Array:
    axes = node.parameter(1, "axes")
    return np.squeeze(node.array(0), tuple(axes) if axes else None)


def _filled_value(node: Node) -> Array:
    shape, fill = node.integers(0), node.attributes.get("value")
    if fill is None or not all(type(size) is int for size in shape):
        raise Unknown
    return np.full(shape, fill.reshape(-1)[0], object)


def _where_value(node: Node) -> Array:
    select = np.frompyfunc(lambda c, a, b: a if c else b, 3, 1)
    return select(*(node.array(at) for at in range(3)))  # type: ignore[no-any-return]


def _divide_value(node: Node) -> Array:
    """Divide sizes; they are not negative, so rounding toward 0 is rounding down.

    Raises Unknown: a negative number, or real numbers whose quotient may not be an integer.
    """

    def divide(dividend: int, divisor: int) -> int:
        if dividend < 0 or divisor < 1 or (node.real and dividend % divisor != 0):
            raise Unknown
        return dividend // divisor

    return _elementwise(divide)(node)


# Operator -> rule: values of the inputs -> values of the first result.
VALUES: Mapping[str, Callable[[Node], Array]] = {
    "Shape": _shape_value,
    "Size": lambda node: np.array(prod(node.shape(0)), object),
    **dict.fromkeys(("Identity", "Cast", "Floor", "Ceil"), lambda node: node.array(0)),
    "Gather": _gather_value,
    "Concat": _concat_value,
    "Slice": _slice_value,
    "Reshape": lambda node: node.array(0).reshape(*reshape(node)),
    "Transpose": lambda node: node.array(0).transpose(node.attributes.get("perm")),
    "Unsqueeze": _unsqueeze_value,
    "Squeeze": _squeeze_value,
    "ConstantOfShape": _filled_value,
    "Where": _where_value,
    "ReduceProd": lambda node: np.array([prod(node.integers(0))], object),
    "Add": _elementwise(operator.add),
    "Sub": _elementwise(operator.sub),
    "Mul": _elementwise(operator.mul),
    "Div": _divide_value,
    "Mod": _elementwise(operator.mod),
    "Max": _elementwise(max),
    "Min": _elementwise(min),
    "Equal": _elementwise(operator.eq),
}
