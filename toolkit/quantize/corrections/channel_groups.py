"""Find channels that can be rescaled together where values meet: Add, Concat, Split, two readers.

Each channel of a tensor has an unknown factor s > 0, by which it is divided. Operators f with
f(x / s) = f(x) / s hand factors on, channel by channel; Add and the readers of one tensor make
them equal, Concat and Split put them in a row. A convolution ends them: it multiplies the inputs of
its weight by the factors of what it reads, and divides the outputs by new ones. What no rule names
takes its operands as they are, so their factors are 1.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.quantize.corrections.channel_links import (
    commutes,
    find_links,
    flattens,
    unusable,
    unusable_gemm,
)
from toolkit.quantize.weights import constant_of

Ids = NDArray[np.intp]
FIXED = 0
"""The channel whose factor is 1."""


@dataclass(frozen=True, slots=True, eq=False)
class ChannelGroups:
    """`producers`: convolution -> the group of each output channel. `readers`: convolution or Gemm
    -> the group of each input channel. Group 0 (`FIXED`) has the factor 1.

    Both in graph order, without those whose channels are all fixed.
    """

    producers: Mapping[ir.Node, Ids]
    readers: Mapping[ir.Node, Ids]


class _Unions:
    """Disjoint sets of channels; the smallest number of a set stands for it."""

    def __init__(self) -> None:
        self._parents = [FIXED]

    def new(self, count: int) -> Ids:
        first = len(self._parents)
        self._parents.extend(range(first, first + count))
        return np.arange(first, first + count)

    def root(self, number: int) -> int:
        while self._parents[number] != number:
            self._parents[number] = self._parents[self._parents[number]]
            number = self._parents[number]
        return number

    def join(self, first: Ids, second: Ids) -> None:
        for pair in zip(first.tolist(), second.tolist(), strict=True):
            low, high = sorted(map(self.root, pair))
            self._parents[high] = low

    def roots(self, ids: Ids) -> Ids:
        return np.array([self.root(number) for number in ids.tolist()], np.intp)


def find_groups(graph: ir.Graph) -> ChannelGroups:
    """Return the groups of channels, without those of `find_links`."""
    linked = {link.producer for link in find_links(graph)[0]}
    unions, ids_of = _Unions(), dict[ir.Value, Ids]()
    producers, readers = dict[ir.Node, Ids](), dict[ir.Node, Ids]()
    for node in graph:
        ids = [None if value is None else ids_of.get(value) for value in node.inputs]
        results = _results(node, ids, unions)
        if node.op_type in ("Conv", "Gemm") and ids[0] is not None:
            readers[node] = ids[0]
        if node.op_type == "Conv" and results and results[0] is not None:
            producers[node] = results[0]
            _fix(results if node in linked else (), unions)
        for value, row in zip(node.outputs, results, strict=False):
            if row is not None and _escapes(value, row, graph):
                _fix([row], unions)
            elif row is not None:
                ids_of[value] = row
    return ChannelGroups(*(_free(rows, unions) for rows in (producers, readers)))


def _results(node: ir.Node, ids: "Rows", unions: _Unions) -> "Rows":
    """The groups of the results, none where no rule hands factors on; then operands are fixed."""
    rule = _RULES.get(node.op_type) if node.domain == "" else None
    results = None if rule is None else rule(node, ids, unions)
    if results is None:
        _fix(ids, unions)
    return results or []


def _fix(rows: Iterable[Ids | None], unions: _Unions) -> None:
    for row in rows:
        if row is not None:
            unions.join(row, np.full_like(row, FIXED))


def _escapes(value: ir.Value, row: Ids, graph: ir.Graph) -> bool:
    """True if a value is an output, is read in a subgraph, or has other channels than `row`."""
    inside = all(use.node.graph is graph for use in value.uses())
    return value.is_graph_output() or not inside or len(row) != _channels(value)


def _free(rows: Mapping[ir.Node, Ids], unions: _Unions) -> dict[ir.Node, Ids]:
    groups = {node: unions.roots(row) for node, row in rows.items()}
    return {node: row for node, row in groups.items() if (row != FIXED).any()}


def _channels(value: ir.Value | None) -> int | None:
    """The size of axis 1, None if it is not known."""
    if value is None or value.shape is None or len(value.shape) < 2:
        return None
    size = value.shape[1]
    return size if isinstance(size, int) else None


def _rank(value: ir.Value | None) -> int:
    return 0 if value is None or value.shape is None else len(value.shape)


Rows = list[Ids | None]
Rule = Callable[[ir.Node, Rows, _Unions], Rows | None]
"""Node and groups of its operands -> groups of its results; None: its operands are fixed."""


def _convolution(node: ir.Node, ids: Rows, unions: _Unions) -> Rows | None:
    weight = constant_of(node, 1)
    if weight is None or unusable(node):
        return None
    return [unions.new(weight.shape[0])]


def _product(node: ir.Node, ids: Rows, unions: _Unions) -> Rows | None:
    _fix(ids[1:], unions)
    return None if unusable_gemm(node) else [None]


def _alike(node: ir.Node, ids: Rows, unions: _Unions) -> Rows | None:
    _fix(ids[1:], unions)
    return [ids[0]] if commutes(node, 0) else None


def _flattened(node: ir.Node, ids: Rows, unions: _Unions) -> Rows | None:
    return [ids[0]] if flattens(node) else None


def _resized(node: ir.Node, ids: Rows, unions: _Unions) -> Rows | None:
    """Weighted means over space, where nothing outside the operand has a value of its own."""
    mode = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    return None if mode == "tf_crop_and_resize" else [ids[0]]


def _sum(node: ir.Node, ids: Rows, unions: _Unions) -> Rows | None:
    """Factors of all operands are equal; each operand must have every channel."""
    channels, rank = _channels(node.outputs[0]), _rank(node.outputs[0])
    if any(_channels(value) != channels or _rank(value) != rank for value in node.inputs):
        return None
    known = [row for row in ids if row is not None]
    if not known:
        return None
    for row in ids:
        unions.join(known[0], np.full_like(known[0], FIXED) if row is None else row)
    return [known[0]]


def _scaled(node: ir.Node, ids: Rows, unions: _Unions) -> Rows | None:
    """A product is homogeneous in each operand: the largest keeps its factors, others have none."""
    sizes = [_elements(value) for value in node.inputs]
    largest = 0 if node.op_type == "Div" else int(np.argmax(sizes))
    _fix([row for index, row in enumerate(ids) if index != largest], unions)
    result = node.outputs[0]
    whole = _channels(node.inputs[largest]) == _channels(result)
    return [ids[largest]] if whole and _rank(node.inputs[largest]) == _rank(result) else None


def _elements(value: ir.Value | None) -> int:
    dims = () if value is None or value.shape is None else tuple(value.shape)
    return int(np.prod([dim if isinstance(dim, int) else 1 for dim in dims]))


def _joined(node: ir.Node, ids: Rows, unions: _Unions) -> Rows | None:
    if node.attributes.get_int("axis", 0) % max(_rank(node.outputs[0]), 1) != 1:
        return _sum(node, ids, unions)
    rows = []
    for value, row in zip(node.inputs, ids, strict=True):
        count = _channels(value)
        if count is None:
            return None
        rows.append(np.full(count, FIXED) if row is None else row)
    return [np.concatenate(rows)]


def _parted(node: ir.Node, ids: Rows, unions: _Unions) -> Rows | None:
    counts = [_channels(value) for value in node.outputs]
    rank = _rank(node.inputs[0])
    if ids[0] is None or not rank or node.attributes.get_int("axis", 0) % rank != 1:
        return None
    sizes = [count for count in counts if count is not None]
    if len(sizes) < len(counts) or sum(sizes) != len(ids[0]):
        return None
    return list(np.split(ids[0], np.cumsum(sizes)[:-1]))


_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "Conv": _convolution,
        "Gemm": _product,
        "Relu": _alike,
        "LeakyRelu": _alike,
        "PRelu": _alike,
        "MaxPool": _alike,
        "AveragePool": _alike,
        "GlobalAveragePool": _alike,
        "Identity": _alike,
        "Flatten": _flattened,
        "Resize": _resized,
        "Add": _sum,
        "Sub": _sum,
        "Sum": _sum,
        "Mul": _scaled,
        "Div": _scaled,
        "Concat": _joined,
        "Split": _parted,
    }
)
