"""Operators that compute each row alone: a row of the result reads the same row of each operand.

A rule gets a node of which some operands have rows, the others none, and whose result has rows. It
says whether more or fewer rows after the last leave those before as they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from toolkit.gpu.data_dependent_shapes.symbolic import PAST_ALL, Rows, RowSizes
from toolkit.gpu.ir.elementwise_ops import OPERATORS

MULTIPLYING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "RoiAlign"})
"""Operators for which rows are padded: on a CPU they take longer than all others."""


@dataclass(frozen=True, slots=True)
class RowNode:
    """A node with the rows of its operands (None: it has none, or is left out) and its result."""

    node: ir.Node
    operands: tuple[Rows | None, ...]
    result: Rows
    sizes: RowSizes

    def rank(self, at: int) -> int:
        """Return the rank of an operand."""
        value = self.node.inputs[at]
        assert value is not None
        return len(self.sizes.shape(value) or ())

    @property
    def axis(self) -> int:
        """The axis of the rows of the first operand, -1 where it has none."""
        return self.operands[0].axis if self.operands[0] is not None else -1


Rule = Callable[[RowNode], bool]


def computes_rows_alone(row_node: RowNode) -> bool:
    """Whether each row of the result depends on the same row of the operands alone."""
    rule = RULES.get(row_node.node.op_type)
    return row_node.node.domain == "" and rule is not None and rule(row_node)


def _aligned(it: RowNode) -> bool:
    """Element-wise: all rows at the same place, counted from the last dimension."""
    shape = it.sizes.shape(it.node.outputs[0])
    back = len(shape or ()) - it.result.axis
    return all(
        rows is None or (it.rank(at) - rows.axis, rows.factor) == (back, it.result.factor)
        for at, rows in enumerate(it.operands)
    )


def _along_another_axis(it: RowNode) -> bool:
    """The node works along the attribute `axis`, and all operands have rows, or the first alone."""
    axis = it.node.attributes.get_int("axis", _DEFAULT_AXES.get(it.node.op_type, -1))
    return it.axis >= 0 and axis is not None and axis % it.rank(0) != it.axis


def _normalizes_after(it: RowNode) -> bool:
    """The node works along `axis` and, in some opsets, all dimensions after it."""
    axis = it.node.attributes.get_int("axis", -1)
    return it.axis >= 0 and axis is not None and it.axis < axis % it.rank(0)


def _joins(it: RowNode) -> bool:
    return all(rows == it.result for rows in it.operands) and _along_another_axis(it)


def _gathers(it: RowNode) -> bool:
    """Elements within each row, by indices without rows; or what the index in each row says."""
    axis = it.node.attributes.get_int("axis", 0)
    assert axis is not None
    if it.operands[0] is None:
        return it.operands[1] is not None
    return it.axis >= 0 and it.operands[1] is None and axis % it.rank(0) != it.axis


def _slices(it: RowNode) -> bool:
    """Within each row; of the rows, all."""
    parameters = [it.sizes.values(value) for value in it.node.inputs[1:]]
    if it.axis < 0 or len(parameters) < 3 or any(p is None for p in parameters):
        return False
    starts, ends, axes, *steps = (p.reshape(-1).tolist() for p in parameters if p is not None)
    size = (it.sizes.shape(it.node.inputs[0]) or ())[it.axis]  # type: ignore[arg-type]
    for at, axis in enumerate(axes):
        if axis % it.rank(0) != it.axis:
            continue
        step = steps[0][at] if steps else 1
        if starts[at] != 0 or step != 1 or not (ends[at] == size or ends[at] >= PAST_ALL):
            return False
    return True


def _leads(it: RowNode) -> bool:
    """Row-major: the rows are the outermost dimension, before and after."""
    rows, value = it.operands[0], it.node.inputs[0]
    if rows is None or value is None:
        return False
    before = (it.sizes.shape(value) or ())[: rows.axis]
    after = (it.sizes.shape(it.node.outputs[0]) or ())[: it.result.axis]
    return all(size == 1 for size in (*before, *after))


def _first_operand_alone(it: RowNode) -> bool:
    return it.axis >= 0 and all(rows is None for rows in it.operands[1:])


def _batch(it: RowNode) -> bool:
    return it.axis == 0 and _first_operand_alone(it)


def _gemm(it: RowNode) -> bool:
    """A row of A, times B without rows; C has none or one for each row of A."""
    transposed = it.node.attributes.get_int("transA", 0) == 1
    if it.axis != 0 or it.operands[1] is not None or transposed:
        return False
    c = it.operands[2] if len(it.operands) > 2 else None
    rank = len(it.sizes.shape(it.node.outputs[0]) or ())
    return c is None or (c == it.result and it.rank(2) == rank)


def _matmul(it: RowNode) -> bool:
    return it.axis >= 0 and it.axis != it.rank(0) - 1 and it.operands[1] is None


def _reduces(it: RowNode) -> bool:
    axes = it.node.attributes.get_ints("axes")
    if axes is None and len(it.node.inputs) > 1:
        values = it.sizes.values(it.node.inputs[1])
        axes = None if values is None else tuple(int(axis) for axis in values.reshape(-1))
    return it.axis >= 0 and bool(axes) and all(a % it.rank(0) != it.axis for a in axes or ())


def _regions(it: RowNode) -> bool:
    """RoiAlign from one image: the numbers of images, which must be 0, may be so in all rows."""
    image = it.sizes.shape(it.node.inputs[0]) if it.node.inputs[0] is not None else None
    single = image is not None and image[0] == 1
    return single and it.operands[0] is None and it.operands[1] == Rows(0, 1)


def _filled(it: RowNode) -> bool:
    """Equal elements, or operands that are repeated in all rows."""
    return it.operands[0] is None or _aligned(it)


_DEFAULT_AXES: Mapping[str, int] = {"Split": 0, "ArgMax": 0, "ArgMin": 0}
_REDUCTIONS = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"),
    *("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
)
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(OPERATORS, _aligned),
    **dict.fromkeys(_REDUCTIONS, _reduces),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "LayerNormalization"), _normalizes_after),
    **dict.fromkeys(("Split", "TopK", "ArgMax", "ArgMin"), _along_another_axis),
    **dict.fromkeys(("Reshape", "Flatten"), _leads),
    **dict.fromkeys(("Identity", "Squeeze", "Transpose", "Unsqueeze"), lambda _: True),
    **dict.fromkeys(("Conv", "ConvTranspose", "MaxPool", "AveragePool"), _batch),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "BatchNormalization"), _batch),
    **dict.fromkeys(("ConstantOfShape", "Expand"), _filled),
    "Concat": _joins,
    "Gather": _gathers,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "RoiAlign": _regions,
    "Slice": _slices,
}
