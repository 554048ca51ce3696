"""Which activations the GPU reads in INT8: those that are multiplied, and others where it is free.

A reader of a tensor needs it as

    INT8     a product with constant weights: tensor cores multiply INT8 the fastest
    either   a pooling, a sum, a factor for each channel: it reads one byte as well as two
    float    everything else, attention among it: its kernels compute in floating point

and a tensor is rounded for products, and for other readers of "either" where it is made in INT8
anyway or nobody needs more. So the chain of sums and normalizations that a transformer is built on
stays in floating point, and a convolution's sum with its residual is not rounded in between: the
operand of a sum that is made last is added inside the kernel that makes it.

A concatenation rounds nothing. Where its result is rounded, its parts are written on the grid of
the result; parts that are read in INT8 elsewhere, too, need that grid for it (`tied_nodes`), or
each would be stored twice.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

import onnx_ir as ir

from toolkit.quantize.quantize import QuantizedOp, int8_nodes, is_activation
from toolkit.quantize.weights import constant_of


class Need(Enum):
    """What a reader needs a tensor as."""

    INT8 = "INT8"
    EITHER = "either"
    FLOAT = "float"


# Products whose kernels multiply INT8, with the ranks of weights that they take.
_PRODUCTS: Mapping[str, frozenset[int]] = {
    "Conv": frozenset({4}),
    "Gemm": frozenset({2}),
    "MatMul": frozenset({2, 3, 4}),
}
_POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool"})
_SUMS = frozenset({"Add", "Sum"})
# Their first operand's numbers, zeros, and no others: what rounds the result may round the operand.
_MOVES = frozenset(
    {"DepthToSpace", "Flatten", "Identity", "Pad", "Reshape", "Resize", "Slice", "SpaceToDepth"}
    | {"Split", "Squeeze", "Transpose", "Unsqueeze"}
)
# Between a sum and what reads it; they run inside the kernel of the sum.
_RECTIFIERS = frozenset({"Clip", "HardSwish", "LeakyRelu", "Relu"})


def operands_on_gpu(
    model: ir.Model,
    on_gpu: Collection[str],
    keep_float: frozenset[str] = frozenset(),
    ranges: Collection[str] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return for nodes of the GPU which operands they read in INT8, by index; () is none.

    `on_gpu`, `keep_float`: nodes by name; `ranges`: the tensors that have one, None: all.
    """
    reading = _Reading(model, on_gpu, keep_float, ranges)
    nodes = [node for node in model.graph if str(node.name) in reading.on_gpu]
    found = {str(node.name): reading.operands(node) for node in nodes}
    rows = {str(node.name) for node in reading.rows}
    return {name: operands for name, operands in found.items() if operands or name in rows}


def tied_on_gpu(
    model: ir.Model, on_gpu: Collection[str], keep_float: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Return the nodes of the GPU whose operands and results need one range, to need no copies.

    They are concatenations in INT8, and what only moves or picks numbers of tensors in INT8.
    """
    reading = _Reading(model, on_gpu, keep_float, None)
    return tuple(str(node.name) for node in model.graph if reading.tied(node))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the readers of a tensor need, and whether it is rounded then."""

    needs: frozenset[Need]

    @property
    def rounded(self) -> bool:
        """Whether it is made in INT8 for those that read it so."""
        return Need.INT8 in self.needs or self.needs == {Need.EITHER}


class _Reading:
    """What is read as what, found from the last nodes to the first."""

    def __init__(
        self,
        model: ir.Model,
        on_gpu: Collection[str],
        keep_float: frozenset[str],
        ranges: Collection[str] | None,
    ) -> None:
        self.rows = dict(int8_nodes(model, keep_float))
        self.on_gpu = frozenset(on_gpu)
        self._ranges = ranges
        self._at = {node: at for at, node in enumerate(model.graph)}
        self._wanted: dict[ir.Value, _Wanted] = {}
        for node in reversed(list(model.graph)):
            for value in node.outputs:
                self._wanted[value] = self._want(value)
        for value in model.graph.inputs:
            self._wanted[value] = self._want(value)

    def operands(self, node: ir.Node) -> tuple[int, ...]:
        """The operands that a node of the GPU reads in INT8, by index."""
        if node.op_type in _MOVES | {"Concat"}:
            return ()
        return tuple(
            index
            for index, value in enumerate(node.inputs)
            if value is not None and is_activation(value) and self._reads_int8(node, index, value)
        )

    def tied(self, node: ir.Node) -> bool:
        """Whether one range must serve a node's operands and results."""
        if str(node.name) not in self.on_gpu or node.domain != "":
            return False
        if node.op_type == "Concat":
            return node in self.rows and self._wanted[node.outputs[0]].rounded
        source = node.inputs[0] if node.inputs else None
        if source is None or not is_activation(source):
            return False
        if node.op_type == "MaxPool":
            return self._wanted[source].rounded and self._wanted[node.outputs[0]].rounded
        shared = len(node.outputs) > 1 or len(source.uses()) > 1 or _beside_concat(node)
        return node.op_type in _MOVES and shared and self._wanted[source].rounded

    def _reads_int8(self, node: ir.Node, index: int, value: ir.Value) -> bool:
        needs = self._needs(node, index)
        if Need.INT8 in needs:
            return True
        free = needs == {Need.EITHER} and self._wanted[value].rounded
        return free and (self._ranges is None or str(value.name) in self._ranges)

    def _want(self, value: ir.Value) -> _Wanted:
        needs: set[Need] = {Need.FLOAT} if value.is_graph_output() else set()
        for use in value.uses():
            needs |= self._needs(use.node, use.idx)
        return _Wanted(frozenset(needs))

    def _needs(self, node: ir.Node, index: int) -> frozenset[Need]:
        """What a node needs its operand as; a move, what the readers of its results do."""
        if str(node.name) not in self.on_gpu:
            return _EITHER  # it crosses in the type that the border asks for
        if node.domain == "" and node.op_type in _MOVES and index == 0 and _keeps_numbers(node):
            wanted = (self._wanted[value].needs for value in node.outputs)
            return frozenset[Need]().union(*wanted) or _FLOAT
        row = self.rows.get(node)
        if row is not None and node.op_type in _PRODUCTS:
            return _INT8 if index == 0 and _multiplies(node, row) else _FLOAT
        return _EITHER if self._takes_either(node, index) else _FLOAT

    def _takes_either(self, node: ir.Node, index: int) -> bool:
        if node.op_type == "Mul" and node.domain == "":
            return self._is_scaled(node, index)
        if node not in self.rows:
            return False
        result = node.outputs[0]
        if node.op_type == "Concat":
            return self._wanted[result].rounded
        # A maximum of numbers on a grid lies on it: joined with floats, it would be copied.
        if node.op_type == "MaxPool" and any(use.node.op_type == "Concat" for use in result.uses()):
            return self._wanted[result].rounded
        return node.op_type in _POOLS or (node.op_type in _SUMS and self._is_summand(node, index))

    def _is_summand(self, node: ir.Node, index: int) -> bool:
        """Whether a sum may read an operand in INT8: it is rounded itself, and adds no constant.

        What is made last is added inside the kernel that makes it.
        """
        operands = [value for value in node.inputs if value is not None and is_activation(value)]
        if len(operands) < 2 or not self._rounded_after(node.outputs[0]):
            return False
        value = node.inputs[index]
        assert value is not None
        last = max(operands, key=self._made_at)
        maker = last.producer()
        joins = maker is not None and maker.op_type not in _MOVES | _POOLS | {"Concat"}
        return not joins or value is not last or len(value.uses()) > 1

    def _made_at(self, value: ir.Value) -> int:
        maker = value.producer()
        return -1 if maker is None else self._at[maker]

    def _rounded_after(self, value: ir.Value) -> bool:
        uses = tuple(value.uses())
        if len(uses) == 1 and uses[0].node.op_type in _RECTIFIERS and uses[0].idx == 0:
            return self._rounded_after(uses[0].node.outputs[0])
        return self._wanted[value].rounded

    def _is_scaled(self, node: ir.Node, index: int) -> bool:
        """Whether an operand is multiplied by a factor for each channel, and the result rounded."""
        shapes = [None if value is None else value.shape for value in node.inputs]
        if any(shape is None or len(shape) != 4 for shape in shapes):
            return False
        value, factor = shapes[index], shapes[1 - index]
        assert value is not None
        assert factor is not None
        single = [factor[2], factor[3]] == [1, 1] and value[1] == factor[1]
        wide = any(size != 1 for size in (value[2], value[3]))
        return single and wide and self._wanted[node.outputs[0]].rounded


_INT8, _EITHER, _FLOAT = (frozenset({need}) for need in (Need.INT8, Need.EITHER, Need.FLOAT))


def _beside_concat(node: ir.Node) -> bool:
    """Whether a move follows a concatenation, or a concatenation the move; through other moves."""
    source = node.inputs[0]
    maker = None if source is None else source.producer()
    while maker is not None and maker.op_type in _MOVES and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    return _leads_to_concat(node) or (maker is not None and maker.op_type == "Concat")


def _leads_to_concat(node: ir.Node) -> bool:
    readers = [use.node for value in node.outputs for use in value.uses()]
    return any(
        one.op_type == "Concat" or (one.op_type in _MOVES and _leads_to_concat(one))
        for one in readers
    )


def _keeps_numbers(node: ir.Node) -> bool:
    """Whether a move makes no numbers of its own but zeros."""
    if node.op_type == "Pad":
        value = node.inputs[2] if len(node.inputs) > 2 else None
        return value is None or (
            value.const_value is not None and not value.const_value.numpy().any()
        )
    return node.op_type != "Resize" or node.attributes.get_string("mode", "nearest") == "nearest"


def _multiplies(node: ir.Node, row: QuantizedOp) -> bool:
    """Whether kernels multiply the constant weights of a product in INT8."""
    weight = constant_of(node, row.weight)
    return weight is not None and weight.ndim in _PRODUCTS[node.op_type] and prod(weight.shape) > 0
