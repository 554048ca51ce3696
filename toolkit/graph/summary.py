"""What a model holds, as its file has it: operators, sizes, multiply-accumulates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from toolkit.graph.node_view import NodeView, TensorView, views
from toolkit.graph.subgraph import with_shapes


@dataclass(frozen=True, slots=True)
class TensorLine:
    """A tensor; a dimension is a number, the name of a dynamic one, or None.

    `bytes` None: not known.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class NodeLine:
    """A node; `macs` None where its shapes are not known. `weight_bytes`: its constants."""

    name: str
    op: str
    outputs: tuple[TensorLine, ...]
    macs: int | None
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class OperatorLine:
    """All nodes of an operator; `unknown` of them have no known MACs."""

    op: str
    nodes: int
    macs: int
    unknown: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model. `weights`: by type, how many numbers and bytes. MACs and sizes count a dynamic
    leading dimension as 1, and leave out what is not known."""

    ir_version: int
    opsets: dict[str, int]
    producer: str
    metadata: dict[str, str]
    inputs: tuple[TensorLine, ...]
    outputs: tuple[TensorLine, ...]
    nodes: tuple[NodeLine, ...]
    operators: tuple[OperatorLine, ...]
    weights: dict[str, tuple[int, int]]
    functions: int
    nested_nodes: int
    largest: TensorLine | None = field(default=None)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all nodes whose shapes are known."""
        return sum(row.macs for row in self.operators)

    @property
    def parameters(self) -> int:
        """The numbers in all initializers."""
        return sum(count for count, _ in self.weights.values())


def summarize(model: ir.Model) -> ModelSummary:
    """Return the summary of a model, with the shapes that ONNX infers."""
    typed = with_shapes(model)
    graph = typed.graph
    nodes = tuple(_node(view) for view in views(graph))
    tensors = [tensor for node in nodes for tensor in node.outputs if tensor.bytes is not None]
    return ModelSummary(
        ir_version=model.ir_version,
        opsets={domain or "ai.onnx": version for domain, version in graph.opset_imports.items()},
        producer=" ".join(filter(None, (model.producer_name, model.producer_version))),
        metadata=dict(model.metadata_props),
        inputs=tuple(_value(v) for v in graph.inputs if not v.is_initializer()),
        outputs=tuple(_value(value) for value in graph.outputs),
        nodes=nodes,
        operators=_operators(nodes),
        weights=_weights(graph),
        functions=len(model.functions),
        nested_nodes=sum(1 for _ in graph.all_nodes()) - len(graph),
        largest=max(tensors, key=lambda tensor: tensor.bytes or 0, default=None),
    )


def _node(view: NodeView) -> NodeLine:
    op = f"{view.domain}::{view.op}" if view.domain else view.op
    outputs = tuple(_tensor(tensor) for tensor in view.outputs)
    return NodeLine(view.name, op, outputs, view.macs, view.weight_bytes)


def _tensor(tensor: TensorView) -> TensorLine:
    bits = _ITEM_BITS.get(tensor.dtype)
    elements = tensor.elements
    total = None if bits is None or elements is None else -(-bits * elements // 8)
    return TensorLine(tensor.name, tensor.dtype, tensor.shape, total)


def _value(value: ir.Value) -> TensorLine:
    dims = None
    if value.shape is not None:
        dims = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
    dtype = "unknown" if value.dtype is None else _NAMES.get(value.dtype, value.dtype.name.lower())
    return _tensor(TensorView(str(value.name), dtype, dims))


_NAMES = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}
_ITEM_BITS = {
    _NAMES.get(dtype, dtype.name.lower()): dtype.bitwidth
    for dtype in ir.DataType
    if dtype not in (ir.DataType.UNDEFINED, ir.DataType.STRING)
}


def _operators(nodes: Sequence[NodeLine]) -> tuple[OperatorLine, ...]:
    """Group nodes by operator, the one with the most work first."""
    groups: dict[str, list[NodeLine]] = {}
    for node in nodes:
        groups.setdefault(node.op, []).append(node)
    rows = [
        OperatorLine(
            op=op,
            nodes=len(members),
            macs=sum(node.macs or 0 for node in members),
            unknown=sum(node.macs is None for node in members),
            weight_bytes=sum(node.weight_bytes for node in members),
        )
        for op, members in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.macs, -row.nodes, row.op)))


def _weights(graph: ir.Graph) -> dict[str, tuple[int, int]]:
    totals: dict[str, tuple[int, int]] = {}
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None:
            name = _NAMES.get(tensor.dtype, tensor.dtype.name.lower())
            count, size = totals.get(name, (0, 0))
            totals[name] = (
                count + math.prod(int(d) for d in tensor.shape.numpy()),
                size + tensor.nbytes,
            )
    return totals
