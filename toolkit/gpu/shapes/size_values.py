"""Operators that compute with sizes while a network runs: their values as formulas.

Exporters write Shape, Gather, Mul, Concat and the like between a tensor and the Reshape that it
goes through. The build computes them on sizes, so they leave the network.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.gpu.shapes.shape_rules import Node, Unknown, reshape

Array = npt.NDArray[Any]


def _each(rule: Callable[[Any, Any], Any]) -> Callable[[Node], Array | None]:
    """A rule for each pair of numbers, repeated as numpy repeats."""

    def apply(node: Node) -> Array | None:
        left, right = node.values[:2]
        assert left is not None
        assert right is not None
        return np.frompyfunc(rule, 2, 1)(left, right)  # type: ignore[no-any-return]

    return apply


def _same(node: Node) -> Array | None:
    return node.values[0]


def _shape_value(node: Node) -> Array | None:
    size = node.shape(0)
    return np.array(
        size[slice(node.attributes.get("start", 0), node.attributes.get("end"))], object
    )


def _size_value(node: Node) -> Array | None:
    return np.array(prod(node.shape(0)), object)


def _gather_value(node: Node) -> Array | None:
    values, places = node.values
    assert values is not None
    assert places is not None
    return np.take(values, places.astype(np.int64), axis=node.attributes.get("axis", 0))


def _concat_value(node: Node) -> Array | None:
    parts = [part for part in node.values if part is not None]
    return np.concatenate(parts, axis=node.attributes["axis"])


def _slice_value(node: Node) -> Array | None:
    values = node.values[0]
    starts, ends = node.parameter(1, "starts"), node.parameter(2, "ends")
    if values is None or starts is None or ends is None:
        return None
    axes = node.parameter(3, "axes") or range(len(starts))
    steps = node.value(4) or [1] * len(starts)
    chosen = [slice(None)] * values.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        # Far before the first index means all of it, when going backwards.
        chosen[axis] = slice(start, None if step < 0 and end < -values.shape[axis] else end, step)
    return values[tuple(chosen)]


def _transposed_value(node: Node) -> Array | None:
    values = node.values[0]
    return None if values is None else values.transpose(node.attributes.get("perm"))


def _reshape_value(node: Node) -> Array | None:
    found = reshape(node)
    values = node.values[0]
    return None if found is None or values is None else values.reshape(found[0])


def _unsqueeze_value(node: Node) -> Array | None:
    axes = node.parameter(1, "axes")
    values = node.values[0]
    return None if axes is None or values is None else np.expand_dims(values, tuple(axes))


def _squeeze_value(node: Node) -> Array | None:
    axes = node.parameter(1, "axes")
    values = node.values[0]
    return None if values is None else np.squeeze(values, tuple(axes) if axes else None)


def _filled_value(node: Node) -> Array | None:
    wanted = node.value(0)
    filling = node.attributes.get("value")
    if wanted is None or filling is None or not all(type(size) is int for size in wanted):
        return None
    return np.full(wanted, filling.reshape(-1)[0], object)


def _where_value(node: Node) -> Array | None:
    chosen, yes, no = node.values
    assert chosen is not None
    return np.frompyfunc(lambda c, a, b: a if c else b, 3, 1)(chosen, yes, no)  # type: ignore[no-any-return]


def _product_value(node: Node) -> Array | None:
    values = node.value(0)
    return None if values is None else np.array([prod(values)], object)


def _divide_value(node: Node) -> Array | None:
    """Quotients of sizes: none is below 0, so rounding to 0 is rounding down; real ones are whole.

    Raises Unknown: a negative number, or a quotient of real numbers that need not be whole.
    """

    def divide(left: int, right: int) -> int:
        if left < 0 or right < 1 or (node.real and left % right != 0):
            raise Unknown
        return left // right

    return _each(divide)(node)


# What computes with sizes: values of the inputs -> values of the first result.
VALUES: Mapping[str, Callable[[Node], Array | None]] = {
    "Shape": _shape_value,
    "Size": _size_value,
    "Identity": _same,
    "Cast": _same,
    "Floor": _same,
    "Ceil": _same,
    "Gather": _gather_value,
    "Concat": _concat_value,
    "Slice": _slice_value,
    "Reshape": _reshape_value,
    "Transpose": _transposed_value,
    "Unsqueeze": _unsqueeze_value,
    "Squeeze": _squeeze_value,
    "ConstantOfShape": _filled_value,
    "Where": _where_value,
    "ReduceProd": _product_value,
    "Add": _each(lambda a, b: a + b),
    "Sub": _each(lambda a, b: a - b),
    "Mul": _each(lambda a, b: a * b),
    "Div": _divide_value,
    "Mod": _each(lambda a, b: a % b),
    "Max": _each(max),
    "Min": _each(min),
    "Equal": _each(lambda a, b: a == b),
}
