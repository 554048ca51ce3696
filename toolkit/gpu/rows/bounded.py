"""Rows whose number data decide, padded to their bound.

    y = f(x)   ->   y = f(pad(x))[: rows of x]

f computes each row alone, so the padding changes none of the rows before it. Its rows are copies of
the last row, or of zeros where there is none: ranges that are measured see no other numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from toolkit.gpu.rows.region import Region
from toolkit.gpu.rows.symbolic import RowSizes, Source
from toolkit.graph.rewriter import UniqueNames


@dataclass(frozen=True, slots=True)
class Bounded:
    """Rows that were padded: what makes them, how many at most, and the nodes that work on them."""

    source: str
    bound: int
    nodes: int


def bound_rows(graph: ir.Graph, sizes: RowSizes, names: UniqueNames) -> Bounded | None:
    """Pad the rows of the first source that a product of matrices works on; None without any."""
    for source in sizes.sources:
        region = _find_region(graph, sizes, source) if source.bound is not None else None
        if region is not None:
            _pad(graph, sizes, source, region, names)
            node = source.value.producer()
            assert node is not None
            assert source.bound is not None
            return Bounded(str(node.name), source.bound, len(region.nodes))
    return None


def _find_region(graph: ir.Graph, sizes: RowSizes, source: Source) -> Region | None:
    region = Region()
    entries = {source.value: None}  # the source, and what is gathered by its indices
    for node in graph:
        if not region.touches(node, entries):
            continue
        if node.op_type == "Gather" and node.inputs[1] in entries:
            if sizes.rows(node.outputs[0], source.dim) is not None:
                entries[node.outputs[0]] = None
            continue
        region.add(node, sizes, source.dim, entries)
    leaves = any(
        value.is_graph_output() or any(use.node not in region.nodes for use in value.uses())
        for value in region.sized
    )
    return region if region.multiplies and not leaves else None


def _pad(
    graph: ir.Graph, sizes: RowSizes, source: Source, region: Region, names: UniqueNames
) -> None:
    maker = _Nodes(graph, names)
    count, places = _count_and_places(maker, source)
    padded = {value: _padded(maker, sizes, source, value, places) for value in region.read}
    for node in region.nodes:
        for at, value in enumerate(node.inputs):
            if value in padded:
                node.replace_input_with(at, padded[value])
        if node.op_type == "RoiAlign":  # of one image: its number is 0 in every row
            node.replace_input_with(2, maker.constant("image", np.zeros(source.bound, np.int64)))
    for value in region.rows:
        if value.is_graph_output() or any(use.node not in region.nodes for use in value.uses()):
            _cut(maker, sizes, source, region, value, count)
    for value in (*region.rows, *region.sized):
        value.shape = None
    graph.sort()


def _count_and_places(maker: "_Nodes", source: Source) -> tuple[ir.Value, ir.Value]:
    """Return the number of rows (1), and which row stands in each place (bound)."""
    axis = maker.constant("rows_axis", np.array([source.axis]))
    zero, one = maker.constant("zero", np.array([0])), maker.constant("one", np.array([1]))
    counting = np.arange(source.bound, dtype=np.int64)
    shape = maker.add("Shape", [source.value])
    count = maker.add("Gather", [shape, axis])
    last = maker.add("Max", [maker.add("Sub", [count, one]), zero])
    return count, maker.add("Min", [maker.constant("counting", counting), last])


def _padded(
    maker: "_Nodes", sizes: RowSizes, source: Source, value: ir.Value, places: ir.Value
) -> ir.Value:
    rows, shape = sizes.rows(value, source.dim), sizes.shape(value)
    assert rows is not None
    assert shape is not None
    assert value.dtype is not None
    one_row = tuple(1 if at == rows.axis else int(size) for at, size in enumerate(shape))
    zeros = maker.constant("no_row", np.zeros(one_row, value.dtype.numpy()))
    joined = maker.add("Concat", [value, zeros], {"axis": rows.axis})
    return maker.add("Gather", [joined, places], {"axis": rows.axis})


def _cut(
    maker: "_Nodes",
    sizes: RowSizes,
    source: Source,
    region: Region,
    value: ir.Value,
    count: ir.Value,
) -> None:
    """Give readers outside of the region the rows without the padding."""
    rows = sizes.rows(value, source.dim)
    assert rows is not None
    if rows.factor > 1:
        factor = maker.constant("factor", np.array([rows.factor]))
        count = maker.add("Mul", [count, factor])
    zero, axis = maker.constant("zero", np.array([0])), maker.constant("axis", np.array([rows.axis]))
    cut = maker.add("Slice", [value, zero, count, axis])
    cut.type, cut.shape = value.type, value.shape
    for use in tuple(value.uses()):
        if use.node not in region.nodes and use.node is not cut.producer():
            use.node.replace_input_with(use.idx, cut)
    if value.is_graph_output():
        outputs = value.producer().graph.outputs  # type: ignore[union-attr]
        outputs[outputs.index(value)] = cut
        name, value.name = value.name, cut.name
        cut.name = name


class _Nodes:
    """Adds nodes and constants with new names to a graph."""

    def __init__(self, graph: ir.Graph, names: UniqueNames) -> None:
        self._graph = graph
        self._names = names
        self._constants: dict[tuple[str, bytes], ir.Value] = {}

    def constant(self, name: str, values: np.ndarray) -> ir.Value:
        """Return a constant; equal ones of a name once."""
        key = (name, values.tobytes())
        if key not in self._constants:
            value = ir.Value(name=self._names.take(f"padding/{name}"), const_value=ir.tensor(values))
            value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(values.shape)
            self._graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def add(
        self, op: str, inputs: list[ir.Value], attributes: Mapping[str, int] | None = None
    ) -> ir.Value:
        """Add a node; the graph is to be sorted."""
        name = self._names.take(f"padding/{op}")
        node = ir.node(op, inputs, attributes=dict(attributes or {}), name=name)
        node.outputs[0].name = self._names.take(f"{name}_output")
        self._graph.append(node)
        return node.outputs[0]
