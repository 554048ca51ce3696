"""NonMaxSuppression over a fixed number of boxes, padded to its bound, which a kernel computes.

    i = nonzero(mask)
    n = suppress(x[i], s[i])         ->    n, count = padded(x, where(mask, s, -inf))
    y = x[i][n]                            y = x[n[:count]]

A detector drops small and unlikely boxes before it suppresses others. Here all of them stay where
they are, and those that were dropped have the score -inf: sizes no longer depend on numbers, and
what computes each row alone computes the same of those that count. The operator
`PaddedNonMaxSuppression` is a function of ONNX's own, which runs wherever no kernel does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx_ir.passes import common as ir_passes

from toolkit.gpu.data_dependent_shapes.nodes import NewNodes
from toolkit.gpu.data_dependent_shapes.symbolic import PADDED, PAST_ALL
from toolkit.gpu.ir.elementwise_ops import OPERATORS
from toolkit.gpu.ir.network import ROWS_DOMAIN
from toolkit.graph.rewriter import UniqueNames

_FUNCTION = onnx.parser.parse_function(
    f"""
    <domain: "{ROWS_DOMAIN}", opset_import: ["" : 17]>
    {PADDED} <center_point_box: int = 0>
    (boxes, scores, most, iou, least, counting) => (y, count) {{
        found = NonMaxSuppression <center_point_box: int = @center_point_box>
            (boxes, scores, most, iou, least)
        zero = Constant <value_ints = [0]> ()
        one = Constant <value_ints = [1]> ()
        shape = Shape (found)
        count = Gather <axis = 0> (shape, zero)
        before = Sub (count, one)
        last = Max (before, zero)
        places = Min (counting, last)
        three = Constant <value_ints = [1, 3]> ()
        none = ConstantOfShape <value = int64[1] {{0}}> (three)
        joined = Concat <axis = 0> (found, none)
        y = Gather <axis = 0> (joined, places)
    }}
    """
)
_LOWEST = float(np.finfo(np.float32).min)
_BOX = 2  # the column of its result with the box: [image, class, box]


def pad_suppressions(model: ir.Model, names: UniqueNames) -> int:
    """Pad the results of NonMaxSuppression where all it reads can keep a fixed size; count them."""
    padded = 0
    for node in list(model.graph.all_nodes()):
        if node.op_type == "NonMaxSuppression" and node.domain == "":
            padded += _Suppression(model, node, names).pad()
    if padded:
        function = ir.from_proto(_FUNCTION)
        function.opset_imports[""] = model.graph.opset_imports[""]
        model.functions[function.identifier()] = function
        model.graph.opset_imports[ROWS_DOMAIN] = 1
        ir_passes.RemoveUnusedNodesPass()(model)
        model.graph.sort()
    return padded


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor of a fixed size in the place of one with some of its rows along `axis`.

    `chosen`: which rows those are; both None where it is the tensor itself.
    """

    value: ir.Value
    axis: int | None = None
    chosen: ir.Value | None = None


class _Unfit(Exception):  # noqa: N818  (control flow within this module)
    """A node that cannot be computed for all rows."""


@dataclass
class _Suppression:
    model: ir.Model
    node: ir.Node
    names: UniqueNames
    maker: NewNodes = field(init=False)
    known: dict[ir.Value, _Rows] = field(default_factory=dict)
    masks: dict[object, ir.Value] = field(default_factory=dict)
    branches: list[ir.Graph] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.maker = NewNodes(self.model.graph, self.names)

    def pad(self) -> bool:
        """Pad the node's result; False where something is not as it must be for that."""
        try:
            self._pad()
        except _Unfit:
            self.maker.take_back()
            return False
        return True

    def _pad(self) -> None:
        boxes, scores = (self._rows(_value(self.node, at)) for at in (0, 1))
        most, iou, least = (_numbers(self.node, at) for at in (2, 3, 4))
        fits = _are_fixed(self.node.inputs[2:]) and boxes.chosen is scores.chosen
        if not fits or most is None or int(most[0]) < 1:
            raise _Unfit
        shape = _shape(scores.value)
        values = scores.value
        if scores.chosen is not None:
            if (boxes.axis, scores.axis) != (1, 2):
                raise _Unfit
            nothing = self.maker.constant("no_score", np.array(-np.inf, np.float32))
            values = self.maker.add("Where", [scores.chosen, values, nothing])
            _describe(values, ir.DataType.FLOAT, shape)
            least = np.array([_LOWEST], np.float32) if least is None else least
        bound = shape[0] * shape[1] * min(int(most[0]), shape[2])
        operands: dict[str, npt.NDArray[Any] | None] = {
            "most": np.array([most[0]], np.int64),
            "iou": np.array([0.0 if iou is None else iou[0]], np.float32),
            "least": None if least is None else np.array([least[0]], np.float32),
            "counting": np.arange(bound, dtype=np.int64),
        }
        node = ir.node(
            PADDED,
            [
                *(boxes.value, values),
                *(None if v is None else self.maker.constant(n, v) for n, v in operands.items()),
            ],
            attributes={"center_point_box": self.node.attributes.get_int("center_point_box", 0)},
            domain=ROWS_DOMAIN,
            num_outputs=2,
        )
        self.maker.put(node, str(self.node.name))
        rows, count = node.outputs
        _describe(rows, ir.DataType.INT64, (bound, 3))
        _describe(count, ir.DataType.INT64, (1,))
        zero = self.maker.constant("zero", np.array([0]))
        selected = self.maker.add("Slice", [rows, zero, count, zero])
        old = self.node.outputs[0]
        _describe(selected, ir.DataType.INT64, tuple(old.shape or (None, 3)))
        changes: list[tuple[ir.Value, ir.Value]] = []
        if scores.chosen is None and self.node.graph is self.model.graph:
            changes.append((old, selected))
        else:
            self._follow(old, selected, bound, scores.chosen, changes)
        for value, new in changes:
            if value.is_graph_output():
                self.maker.take_output(value, new)
            ir.convenience.replace_all_uses_with(value, new)
        for branch in self.branches:  # of an If that nothing reads now; its operands are others'
            branch.outputs.clear()
            branch.remove(list(branch), safe=True)

    def _follow(
        self,
        old: ir.Value,
        new: ir.Value,
        bound: int,
        chosen: ir.Value | None,
        changes: list[tuple[ir.Value, ir.Value]],
    ) -> None:
        """Compute what reads a result again, up to the rows that are taken by it."""
        outer = self._result_of_branch(old, chosen)
        if outer is not None:
            self._follow(outer, new, bound, chosen, changes)
        elif old.is_graph_output():
            raise _Unfit
        for node, at in [(use.node, use.idx) for use in old.uses()]:
            if node.op_type == "Gather" and at == 1:
                rows = self._rows(_value(node, 0))
                if rows.chosen is not chosen or rows.axis not in (None, _axis(node)):
                    raise _Unfit
                taken = self.maker.copy(node, [rows.value, new])
                changes.append((node.outputs[0], taken))
                continue
            if at != 0 or not _arranges(node, bound):
                raise _Unfit
            result = new
            if node.op_type != "Slice":
                constants = [self._rows(_value(node, i)).value for i in range(1, len(node.inputs))]
                result = self.maker.copy(node, [new, *constants])
            self._follow(node.outputs[0], result, bound, chosen, changes)

    def _result_of_branch(self, value: ir.Value, chosen: ir.Value | None) -> ir.Value | None:
        """Return what an If gives for a branch's output, where that is nothing without rows."""
        for node in self.model.graph:
            branches = [a.as_graph() for a in node.attributes.values() if _is_graph(a)]
            for branch in branches if node.op_type == "If" else ():
                if value not in branch.outputs:
                    continue
                at = list(branch.outputs).index(value)
                (empty,) = (one.outputs[at].const_value for one in branches if one is not branch)
                if empty is None or empty.size or len(node.outputs) != 1:
                    raise _Unfit
                counted = self._rows(_counted(_value(node, 0)))
                is_then = branch is node.attributes["then_branch"].as_graph()
                if is_then or counted.chosen is not chosen:
                    raise _Unfit
                self.branches += branches
                return node.outputs[at]
        return None

    def _rows(self, value: ir.Value) -> _Rows:
        """Return a tensor with all rows, computed by nodes that are added; raises _Unfit."""
        if value not in self.known:
            self.known[value] = self._all_rows(value)
        return self.known[value]

    def _all_rows(self, value: ir.Value) -> _Rows:
        if value.const_value is not None:
            if value.is_initializer() and value.graph is self.model.graph:
                return _Rows(value)
            return _Rows(self.maker.constant(str(value.name), value.const_value.numpy()))
        node = value.producer()
        in_graph = node is None or node.graph is self.model.graph
        if in_graph and value.shape is not None and all(isinstance(n, int) for n in value.shape):
            return _Rows(value)
        if node is None or node.domain:
            raise _Unfit
        if node.op_type == "Gather" and _fixed(_value(node, 1)) is None:
            return self._gathered(node)
        if node.op_type == "Slice" and _numbers(node, 2) is None:
            return self._cut(node)
        return self._computed(node)

    def _gathered(self, node: ir.Node) -> _Rows:
        """Rows whose places a NonZero gives: all, of which the mask chooses."""
        source = self._rows(_value(node, 0))
        mask = self._rows(_mask(_value(node, 1)))
        sizes, rank = _shape(mask.value), len(_shape(source.value))
        axis = _axis(node) % rank
        aligned = source.axis in (None, axis) and source.chosen is mask.chosen
        if len(node.outputs[0].shape or ()) != rank:  # places are not in a row
            raise _Unfit
        if len(sizes) != 1 or not aligned or _shape(source.value)[axis] != sizes[0]:
            raise _Unfit
        key = (mask.value, mask.chosen)
        if mask.chosen is None:
            self.masks[key] = mask.value
        elif key not in self.masks:
            self.masks[key] = self.maker.add("And", [mask.chosen, mask.value])
            _describe(self.masks[key], ir.DataType.BOOL, sizes)
        return _Rows(source.value, axis, self.masks[key])

    def _cut(self, node: ir.Node) -> _Rows:
        """The first rows, as many as a number says: all, of which the first are chosen."""
        source, ends = self._rows(_value(node, 0)), self._rows(_value(node, 2)).value
        starts, axes, steps = (_numbers(node, at) for at in (1, 3, 4))
        fits = _are_fixed((*node.inputs[1:2], *node.inputs[3:])) and source.chosen is None
        fits = fits and ends.dtype == ir.DataType.INT64
        if not fits or starts is None or axes is None or len(axes) > 1 or starts[0] != 0:
            raise _Unfit
        if steps is not None and steps[0] != 1:
            raise _Unfit
        shape = _shape(source.value)
        axis = int(axes[0]) % len(shape)
        key = (ends, shape[axis])
        if key not in self.masks:
            counting = np.arange(shape[axis], dtype=np.int64)
            from_start = self.maker.constant("from_start", counting)
            from_end = self.maker.constant("from_end", counting - shape[axis])
            counts_back = self.maker.add("Less", [ends, self.maker.constant("zero", np.array([0]))])
            _describe(counts_back, ir.DataType.BOOL, (1,))
            places = self.maker.add("Where", [counts_back, from_end, from_start])
            _describe(places, ir.DataType.INT64, (shape[axis],))
            self.masks[key] = self.maker.add("Less", [places, ends])
            _describe(self.masks[key], ir.DataType.BOOL, (shape[axis],))
        return _Rows(source.value, axis, self.masks[key])

    def _computed(self, node: ir.Node) -> _Rows:
        """A node that computes each row alone, or the largest of all rows."""
        operands = [None if v is None else self._rows(v) for v in node.inputs]
        chosen = {o.chosen for o in operands if o is not None and o.chosen is not None}
        if len(chosen) > 1:
            raise _Unfit
        values = [None if o is None else o.value for o in operands]
        if len(node.outputs) != 1:
            raise _Unfit
        mask, first, axis = chosen.pop() if chosen else None, operands[0], None
        if mask is not None and node.op_type == "ReduceMax" and first is not None:
            values[0] = self._least(first)  # and of fixed size: other axes alone stay unknown
        elif mask is not None:
            axis = _row_axis(node, operands)
        old = node.outputs[0]
        if old.shape is None or old.dtype is None:
            raise _Unfit
        rows = None if mask is None else mask.shape[0]  # type: ignore[index]
        result = self.maker.copy(node, values)
        _describe(result, old.dtype, [rows if at == axis else n for at, n in enumerate(old.shape)])
        _shape(result)
        return _Rows(result, axis, None if axis is None else mask)

    def _least(self, rows: _Rows) -> ir.Value:
        """Return rows that are the largest of none where they are not chosen."""
        if rows.chosen is None or rows.axis is None or rows.value.dtype != ir.DataType.FLOAT:
            raise _Unfit
        shape = _shape(rows.value)
        sizes = [n if at == rows.axis else 1 for at, n in enumerate(shape)]
        to = self.maker.constant("mask_shape", np.array(sizes))
        aligned = self.maker.add("Reshape", [rows.chosen, to])
        _describe(aligned, ir.DataType.BOOL, tuple(sizes))
        lowest = self.maker.constant("lowest", np.array(_LOWEST, np.float32))
        values = self.maker.add("Where", [aligned, rows.value, lowest])
        _describe(values, ir.DataType.FLOAT, shape)
        return values


def _row_axis(node: ir.Node, operands: Sequence[_Rows | None]) -> int:
    """Return where a result has its rows; raises _Unfit where rows are not computed alone."""
    first = operands[0]
    if node.op_type in OPERATORS or node.op_type == "Cast":
        rank = max(len(_shape(o.value)) for o in operands if o is not None)
        backs = {len(_shape(o.value)) - o.axis for o in operands if o and o.axis is not None}
        back = backs.pop()
        single = all(
            o is None or o.axis is not None or _shape(o.value)[-back:][:1] == (1,) or
            len(_shape(o.value)) < back
            for o in operands
        )  # fmt: skip
        if backs or not single:
            raise _Unfit
        return rank - back
    if first is None or first.axis is None or any(o and o.axis is not None for o in operands[1:]):
        raise _Unfit
    axis, rank = first.axis, len(_shape(first.value))
    if node.op_type == "Transpose":
        order = node.attributes.get_ints("perm") or tuple(reversed(range(rank)))
        return tuple(order).index(axis)
    if node.op_type == "Gather" and _axis(node) % rank != axis:
        indices = _fixed(_value(node, 1))
        assert indices is not None
        return axis if _axis(node) % rank > axis else axis + indices.ndim - 1
    if node.op_type == "Slice":
        return _sliced_axis(node, axis, rank)
    axes = _numbers(node, 1)
    if node.op_type == "Unsqueeze" and axes is not None:
        added = {int(a) % (rank + len(axes)) for a in axes}
        return [a for a in range(rank + len(axes)) if a not in added][axis]
    if node.op_type == "Squeeze" and axes is not None and axis not in {int(a) % rank for a in axes}:
        return axis - sum(int(a) % rank < axis for a in axes)
    raise _Unfit


def _sliced_axis(node: ir.Node, axis: int, rank: int) -> int:
    """Return the axis of the rows of a Slice that takes all of them."""
    parameters = [_numbers(node, at) for at in (1, 2, 3)]
    if not _are_fixed(node.inputs[1:]) or any(numbers is None for numbers in parameters):
        raise _Unfit
    steps = _numbers(node, 4)
    for at, (start, end, along) in enumerate(zip(*parameters, strict=True)):
        whole = start == 0 and end >= PAST_ALL and (steps is None or steps[at] == 1)
        if int(along) % rank == axis and not whole:
            raise _Unfit
    return axis


def _mask(places: ir.Value) -> ir.Value:
    """Return the mask whose elements that are not 0 have these places; raises _Unfit."""
    node = places.producer()
    while node is not None and node.op_type in ("Transpose", "Split", "Squeeze", "Identity"):
        places = _value(node, 0)
        node = places.producer()
    if node is None or node.op_type != "NonZero":
        raise _Unfit
    mask = _value(node, 0)
    if mask.dtype != ir.DataType.BOOL or mask.shape is None or len(mask.shape) != 1:
        raise _Unfit
    return mask


def _counted(condition: ir.Value) -> ir.Value:
    """Return the tensor of which a condition says that it has no element; raises _Unfit."""
    equal = condition.producer()
    zero = None if equal is None or equal.op_type != "Equal" else _numbers(equal, 1)
    if equal is None or zero is None or zero.tolist() != [0]:
        raise _Unfit
    count = _value(equal, 0).producer()
    if count is not None and count.op_type == "ReduceProd" and len(count.inputs) == 1:
        count = _value(count, 0).producer()
        if count is not None and count.op_type == "Shape" and not count.attributes:
            return _value(count, 0)
    if count is None or count.op_type != "Size":
        raise _Unfit
    return _value(count, 0)


def _arranges(node: ir.Node, bound: int) -> bool:
    """Whether a node keeps each result, its box among them, in its row."""
    if node.op_type == "Gather":
        column = _numbers(node, 1)
        return _axis(node) == 1 and column is not None and column.tolist() == [_BOX]
    if node.op_type == "Slice":
        starts, ends, axes, steps = (_numbers(node, at) for at in (1, 2, 3, 4))
        return (
            starts is not None and ends is not None and starts.tolist() == [0]
            and len(ends) == 1 and ends[0] >= bound and (axes is None or axes.tolist() == [0])
            and (steps is None or steps.tolist() == [1])
        )  # fmt: skip
    return node.op_type in ("Squeeze", "Cast", "Identity") and _are_fixed(node.inputs[1:])


def _are_fixed(values: Iterable[ir.Value | None]) -> bool:
    return all(value is None or value.const_value is not None for value in values)


def _is_graph(attribute: ir.Attr) -> bool:
    return attribute.type == ir.AttributeType.GRAPH


def _value(node: ir.Node, at: int) -> ir.Value:
    value = node.inputs[at] if at < len(node.inputs) else None
    if value is None:
        raise _Unfit
    return value


def _shape(value: ir.Value) -> tuple[int, ...]:
    sizes = [size for size in value.shape or () if isinstance(size, int)]
    if value.shape is None or len(sizes) != len(value.shape):
        raise _Unfit
    return tuple(sizes)


def _fixed(value: ir.Value) -> npt.NDArray[Any] | None:
    return None if value.const_value is None else np.asarray(value.const_value.numpy())


def _numbers(node: ir.Node, at: int) -> npt.NDArray[Any] | None:
    """Return the numbers of a constant operand, flat; None where it is computed or left out."""
    value = node.inputs[at] if at < len(node.inputs) else None
    numbers = None if value is None else _fixed(value)
    return None if numbers is None else numbers.reshape(-1)


def _axis(node: ir.Node) -> int:
    return node.attributes.get_int("axis", 0) or 0


def _describe(value: ir.Value, dtype: ir.DataType, shape: Sequence[object]) -> None:
    value.dtype, value.shape = dtype, ir.Shape(shape)  # type: ignore[arg-type]
