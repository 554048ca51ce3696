"""Rows whose number data decide, padded to their bound.

    y = f(x)   ->   y = f(pad(x))[: rows of x]

f computes each row alone, so the padding changes none of the rows before it. Its rows are copies of
the last row, or of zeros where there is none: ranges that are measured see no other numbers.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from toolkit.gpu.data_dependent_shapes.nodes import NewNodes
from toolkit.gpu.data_dependent_shapes.region import Region
from toolkit.gpu.data_dependent_shapes.symbolic import RowSizes, Source
from toolkit.graph.rewriter import UniqueNames


def bound_rows(graph: ir.Graph, sizes: RowSizes, names: UniqueNames) -> str | None:
    """Pad the rows of the first source that a product of matrices works on, and say so.

    None without any. Those that a kernel pads already are padded for all that works on them.
    """
    for source in sizes.sources:
        if source.bound is None:
            continue
        region = _find_region(graph, sizes, source)
        node = source.value.producer()
        if region is not None and node is not None:
            _Padding(graph, sizes, source, region, NewNodes(graph, names), source.bound).apply()
            return (
                f"padded the rows of {str(node.name)!r} to {source.bound} for {len(region.nodes)} "
                "nodes"
            )
    return None


def _find_region(graph: ir.Graph, sizes: RowSizes, source: Source) -> Region | None:
    region = Region()
    entries = {source.value: None}  # the source, and what is gathered by its indices
    for node in graph:
        if not region.touches(node, entries):
            continue
        by_source = node.op_type == "Gather" and node.inputs[1] in entries
        if by_source and not source.is_padded:
            if sizes.rows(node.outputs[0], source.dim) is not None:
                entries[node.outputs[0]] = None
            continue
        region.add(node, sizes, source.dim, entries)
    leaves = any(value.is_graph_output() or region.readers(value) for value in region.sized)
    pays = region.multiplies or (source.is_padded and region.nodes)
    return region if pays and not leaves else None


@dataclass(frozen=True, slots=True)
class _Padding:
    """A region whose rows are padded to `bound`."""

    graph: ir.Graph
    sizes: RowSizes
    source: Source
    region: Region
    maker: NewNodes
    bound: int

    def apply(self) -> None:
        """Pad what the region reads, and cut what others read of it."""
        node = self.source.value.producer()
        assert node is not None
        if self.source.is_padded:
            rows, _, count = (value for value in node.inputs[:3] if value is not None)
            padded = {self.source.value: rows}
        else:
            count, places = self._count_and_places()
            padded = {value: self._padded(value, places) for value in self.region.read}
        for node in self.region.nodes:
            for at, value in enumerate(node.inputs):
                if value in padded:
                    node.replace_input_with(at, padded[value])
            if node.op_type == "RoiAlign":  # of one image: its number is 0 in every row
                image = self.maker.constant("image", np.zeros(self.bound, np.int64))
                node.replace_input_with(2, image)
        counts = {1: count}
        for value in self.region.rows:
            if value.is_graph_output() or self.region.readers(value):
                self._cut(value, counts)
        for value in (*self.region.rows, *self.region.sized):
            value.shape = None
        self.graph.sort()

    def _count_and_places(self) -> tuple[ir.Value, ir.Value]:
        """Return the number of rows (1), and which row stands in each place (bound)."""
        add, constant = self.maker.add, self.maker.constant
        zero, one = constant("zero", np.array([0])), constant("one", np.array([1]))
        axis = constant("rows_axis", np.array([self.source.axis]))
        count = add("Gather", [add("Shape", [self.source.value]), axis])
        last = add("Max", [add("Sub", [count, one]), zero])
        counting = constant("counting", np.arange(self.bound, dtype=np.int64))
        return count, add("Min", [counting, last])

    def _padded(self, value: ir.Value, places: ir.Value) -> ir.Value:
        rows, shape = self.sizes.rows(value, self.source.dim), self.sizes.shape(value)
        assert rows is not None
        assert shape is not None
        assert value.dtype is not None
        one_row = tuple(1 if at == rows.axis else int(size) for at, size in enumerate(shape))
        zeros = self.maker.constant("no_row", np.zeros(one_row, value.dtype.numpy()))
        joined = self.maker.add("Concat", [value, zeros], {"axis": rows.axis})
        return self.maker.add("Gather", [joined, places], {"axis": rows.axis})

    def _cut(self, value: ir.Value, counts: dict[int, ir.Value]) -> None:
        """Give readers outside of the region the rows without the padding.

        `counts`: the numbers of slices, by how many there are for each row.
        """
        rows, readers = self.sizes.rows(value, self.source.dim), self.region.readers(value)
        assert rows is not None
        if rows.factor not in counts:
            factor = self.maker.constant("factor", np.array([rows.factor]))
            counts[rows.factor] = self.maker.add("Mul", [counts[1], factor])
            counts[rows.factor].type, counts[rows.factor].shape = factor.type, factor.shape
        zero = self.maker.constant("zero", np.array([0]))
        axis = self.maker.constant("axis", np.array([rows.axis]))
        cut = self.maker.add("Slice", [value, zero, counts[rows.factor], axis])
        cut.type, cut.shape = value.type, value.shape
        for node, at in readers:
            node.replace_input_with(at, cut)
        if value.is_graph_output():
            self.maker.take_output(value, cut)
