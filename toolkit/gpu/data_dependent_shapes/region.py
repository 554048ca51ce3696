"""The part of a graph that works on rows of one source, each row alone."""

from collections.abc import Collection
from dataclasses import dataclass, field

import onnx_ir as ir

from toolkit.gpu.data_dependent_shapes.row_wise import MULTIPLYING, RowNode, computes_rows_alone
from toolkit.gpu.data_dependent_shapes.symbolic import Rows, RowSizes

# Operators that compute sizes of sizes; their results are right for any number of rows.
_SIZE_OPS = frozenset(
    {"Add", "Cast", "Concat", "ConstantOfShape", "Equal", "Gather", "Identity", "Mul", "ReduceProd"}
    | {"Reshape", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where"}
)

# The operands that are sizes, by operator.
_SIZES = {"ConstantOfShape": (0,), "Expand": (1,), "Reshape": (1,), "Slice": (1, 2)}


@dataclass
class Region:
    """Nodes that compute each row alone, and what they compute.

    `rows`: results with rows; `sized`: results that hold sizes; `nodes`: those of both, in running
    order; `read`: tensors with rows that they read and do not compute.
    """

    rows: dict[ir.Value, None] = field(default_factory=dict)
    sized: dict[ir.Value, None] = field(default_factory=dict)
    nodes: dict[ir.Node, None] = field(default_factory=dict)
    read: dict[ir.Value, None] = field(default_factory=dict)

    @property
    def multiplies(self) -> bool:
        """Whether a node of the region multiplies matrices or samples images."""
        return any(node.op_type in MULTIPLYING for node in self.nodes)

    def readers(self, value: ir.Value) -> list[tuple[ir.Node, int]]:
        """Return the nodes outside of the region, those of branches, too, and the inputs there."""
        return [(use.node, use.idx) for use in value.uses() if use.node not in self.nodes]

    def touches(self, node: ir.Node, others: Collection[ir.Value]) -> bool:
        """Whether a node reads what the region computes, or one of `others`."""
        return any(
            v in self.rows or v in self.sized or v in others for v in node.inputs if v is not None
        )

    def add(self, node: ir.Node, sizes: RowSizes, dim: int, entries: Collection[ir.Value]) -> bool:
        """Add a node where it belongs to the region; `entries`: tensors with rows before it."""
        if self._computes_sizes(node, sizes, entries):
            if sizes.holds(node.outputs[0], dim):
                self.sized[node.outputs[0]] = None
        elif self._computes_rows(node, sizes, dim, entries):
            self.rows.update(dict.fromkeys(node.outputs))
        else:
            return False
        self.nodes[node] = None
        self.read.update({v: None for v in node.inputs if v is not None and v in entries})
        return True

    def _computes_sizes(
        self, node: ir.Node, sizes: RowSizes, entries: Collection[ir.Value]
    ) -> bool:
        if node.op_type not in _SIZE_OPS or node.domain != "" or len(node.outputs) != 1:
            return False
        if str(node.outputs[0].name) not in sizes.known.values:
            return False
        reads = [value for value in node.inputs if value is not None]
        if node.op_type == "Shape":
            return all(value in self.rows or value in entries for value in reads)
        if node.op_type == "Equal" and not any(_is_negative(value, sizes) for value in reads):
            return False  # a number of rows is equal to it or not
        return all(value in self.sized or sizes.is_static(value) for value in reads)

    def _computes_rows(
        self, node: ir.Node, sizes: RowSizes, dim: int, entries: Collection[ir.Value]
    ) -> bool:
        operands: list[Rows | None] = []
        for at, value in enumerate(node.inputs):
            rows = None
            if value in self.sized and at not in _SIZES.get(node.op_type, ()):
                return False  # a number of rows as a number to compute with
            if value is not None and (value in self.rows or value in entries):
                rows = sizes.rows(value, dim)
                if rows is None:
                    return False
            elif value is not None and value not in self.sized and not sizes.is_static(value):
                return False
            operands.append(rows)
        results = {sizes.rows(value, dim) for value in node.outputs}
        result = results.pop()
        if results or result is None:
            return False
        return computes_rows_alone(RowNode(node, tuple(operands), result, sizes))


def _is_negative(value: ir.Value, sizes: RowSizes) -> bool:
    values = sizes.values(value)
    return values is not None and sizes.is_static(value) and bool((values < 0).all())
