"""Select the activations that nodes on the GPU read in INT8.

A reader needs its operand as one of

    INT8     convolution or GEMM with constant weights: tensor cores are fastest in INT8
    either   pooling, Add, per-channel Mul: INT8 and FP16 are equally fast to read
    float    everything else, such as attention: its kernels compute in floating point

A tensor is INT8 if a reader needs INT8, or if all its readers take either. So the residual stream
of a transformer stays in floating point. A convolution and the Add of its residual are one kernel
with no rounding between them: the operand of an Add that is computed last is added in the epilogue.

A Concat does not round. If its output is INT8, its inputs are written with the quantization
parameters of the output. An input that is also read in INT8 elsewhere must share these parameters
(`tied_on_gpu`), or it would be stored twice.
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


# Operators with INT8 GEMM kernels -> supported ranks of the weight.
_PRODUCTS: Mapping[str, frozenset[int]] = {
    "Conv": frozenset({4}),
    "Gemm": frozenset({2}),
    "MatMul": frozenset({2, 3, 4}),
}
_POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool"})
_SUMS = frozenset({"Add", "Sum"})
# The output holds only elements of the first operand and zeros: quantization commutes.
DATA_MOVEMENT = frozenset(
    {"DepthToSpace", "Flatten", "Identity", "Pad", "Reshape", "Resize", "Slice", "SpaceToDepth"}
    | {"Split", "Squeeze", "Transpose", "Unsqueeze"}
)
# Activation functions in the epilogue of an Add.
_ACTIVATIONS = frozenset({"Clip", "HardSwish", "LeakyRelu", "Relu"})


def operands_on_gpu(
    model: ir.Model,
    on_gpu: Collection[str],
    keep_float: frozenset[str] = frozenset(),
    ranges: Collection[str] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return node -> indices of the operands that it reads in INT8; () for none.

    `on_gpu`, `keep_float`: nodes by name; `ranges`: the tensors that have one, None: all.
    """
    types = _OperandTypes(model, on_gpu, keep_float, ranges)
    gpu_nodes = [node for node in model.graph if str(node.name) in types.on_gpu]
    by_node = {str(node.name): types.operands(node) for node in gpu_nodes}
    with_row = {str(node.name) for node in types.rows}
    return {name: operands for name, operands in by_node.items() if operands or name in with_row}


def tied_on_gpu(
    model: ir.Model, on_gpu: Collection[str], keep_float: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Return the GPU nodes whose operands and results must share one range to avoid copies.

    They are INT8 concatenations, and data movement between INT8 tensors.
    """
    types = _OperandTypes(model, on_gpu, keep_float, None)
    return tuple(str(node.name) for node in model.graph if types.tied(node))


@dataclass(frozen=True, slots=True)
class _ReaderNeeds:
    """What the readers of a tensor need, and whether it is rounded for them."""

    needs: frozenset[Need]

    @property
    def rounded(self) -> bool:
        """True if the tensor is written in INT8."""
        return Need.INT8 in self.needs or self.needs == {Need.EITHER}


class _OperandTypes:
    """The type in which each tensor is read, derived from the last node to the first."""

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
        self._position = {node: position for position, node in enumerate(model.graph)}
        self._needs_of: dict[ir.Value, _ReaderNeeds] = {}
        for node in reversed(list(model.graph)):  # readers first: short chains of calls
            for value in node.outputs:
                self._needs_at(value)
        for value in model.graph.inputs:
            self._needs_at(value)

    def _needs_at(self, value: ir.Value) -> _ReaderNeeds:
        """Return what the readers of a value need; nodes may stand before what they read."""
        needs = self._needs_of.get(value)
        if needs is None:
            needs = self._needs_of[value] = self._readers_need(value)
        return needs

    def operands(self, node: ir.Node) -> tuple[int, ...]:
        """Indices of the operands that a GPU node reads in INT8."""
        if node.op_type in DATA_MOVEMENT | {"Concat"}:
            return ()
        return tuple(
            index
            for index, value in enumerate(node.inputs)
            if value is not None and is_activation(value) and self._reads_int8(node, index, value)
        )

    def tied(self, node: ir.Node) -> bool:
        """True if a node's operands and results must share one range."""
        if str(node.name) not in self.on_gpu or node.domain != "":
            return False
        if node.op_type == "Concat":
            return node in self.rows and self._needs_at(node.outputs[0]).rounded
        source = node.inputs[0] if node.inputs else None
        if source is None or not is_activation(source):
            return False
        if node.op_type == "MaxPool":
            return self._needs_at(source).rounded and self._needs_at(node.outputs[0]).rounded
        shared = len(node.outputs) > 1 or len(source.uses()) > 1 or _beside_concat(node)
        return node.op_type in DATA_MOVEMENT and shared and self._needs_at(source).rounded

    def _reads_int8(self, node: ir.Node, index: int, value: ir.Value) -> bool:
        needs = self._needs(node, index)
        if Need.INT8 in needs:
            return True
        free = needs == {Need.EITHER} and self._needs_at(value).rounded
        return free and (self._ranges is None or str(value.name) in self._ranges)

    def _readers_need(self, value: ir.Value) -> _ReaderNeeds:
        needs: set[Need] = {Need.FLOAT} if value.is_graph_output() else set()
        for use in value.uses():
            needs |= self._needs(use.node, use.idx)
        return _ReaderNeeds(frozenset(needs))

    def _needs(self, node: ir.Node, index: int) -> frozenset[Need]:
        """What a node needs an operand as; data movement needs what its readers need."""
        if str(node.name) not in self.on_gpu:
            return _EITHER  # the crossing decides its type
        if (
            node.domain == ""
            and node.op_type in DATA_MOVEMENT
            and index == 0
            and _preserves_values(node)
        ):
            reader_needs = (self._needs_at(value).needs for value in node.outputs)
            return frozenset[Need]().union(*reader_needs) or _FLOAT
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
            return self._needs_at(result).rounded
        # MaxPool keeps quantized values exact; in a floating-point Concat it would be copied.
        if node.op_type == "MaxPool" and any(use.node.op_type == "Concat" for use in result.uses()):
            return self._needs_at(result).rounded
        return node.op_type in _POOLS or (node.op_type in _SUMS and self._is_summand(node, index))

    def _is_summand(self, node: ir.Node, index: int) -> bool:
        """True if an Add may read an operand in INT8: its output is INT8, no operand is constant.

        The operand computed last stays in floating point: its kernel adds the others.
        """
        operands = [value for value in node.inputs if value is not None and is_activation(value)]
        if len(operands) < 2 or not self._rounded_after(node.outputs[0]):
            return False
        value = node.inputs[index]
        assert value is not None
        latest = max(operands, key=self._position_of_producer)
        producer = latest.producer()
        fused = producer is not None and producer.op_type not in DATA_MOVEMENT | _POOLS | {"Concat"}
        return not fused or value is not latest or len(value.uses()) > 1

    def _position_of_producer(self, value: ir.Value) -> int:
        producer = value.producer()
        return -1 if producer is None else self._position[producer]

    def _rounded_after(self, value: ir.Value) -> bool:
        uses = tuple(value.uses())
        if len(uses) == 1 and uses[0].node.op_type in _ACTIVATIONS and uses[0].idx == 0:
            return self._rounded_after(uses[0].node.outputs[0])
        return self._needs_at(value).rounded

    def _is_scaled(self, node: ir.Node, index: int) -> bool:
        """True if the node scales an operand per channel and its output is INT8."""
        shapes = [None if value is None else value.shape for value in node.inputs]
        if any(shape is None or len(shape) != 4 for shape in shapes):
            return False
        value, factor = shapes[index], shapes[1 - index]
        assert value is not None
        assert factor is not None
        per_channel = [factor[2], factor[3]] == [1, 1] and value[1] == factor[1]
        spatial = any(size != 1 for size in (value[2], value[3]))
        return per_channel and spatial and self._needs_at(node.outputs[0]).rounded


_INT8, _EITHER, _FLOAT = (frozenset({need}) for need in (Need.INT8, Need.EITHER, Need.FLOAT))


def _beside_concat(node: ir.Node) -> bool:
    """True if a data movement node comes after or before a Concat, through other such nodes."""
    source = node.inputs[0]
    producer = None if source is None else source.producer()
    while (
        producer is not None
        and producer.op_type in DATA_MOVEMENT
        and producer.inputs[0] is not None
    ):
        producer = producer.inputs[0].producer()
    return _leads_to_concat(node) or (producer is not None and producer.op_type == "Concat")


def _leads_to_concat(node: ir.Node) -> bool:
    readers = [use.node for value in node.outputs for use in value.uses()]
    return any(
        reader.op_type == "Concat" or (reader.op_type in DATA_MOVEMENT and _leads_to_concat(reader))
        for reader in readers
    )


def _preserves_values(node: ir.Node) -> bool:
    """True if a data movement node adds no values except zeros."""
    if node.op_type == "Pad":
        value = node.inputs[2] if len(node.inputs) > 2 else None
        return value is None or (
            value.const_value is not None and not value.const_value.numpy().any()
        )
    return node.op_type != "Resize" or node.attributes.get_string("mode", "nearest") == "nearest"


def _multiplies(node: ir.Node, row: QuantizedOp) -> bool:
    """True if a kernel multiplies the constant weight of this node in INT8."""
    weight = constant_of(node, row.weight)
    return weight is not None and weight.ndim in _PRODUCTS[node.op_type] and prod(weight.shape) > 0
