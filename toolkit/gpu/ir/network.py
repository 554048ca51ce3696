"""A segment -> the operations that kernels compute, with all shapes and constants known."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.reasons import Reason, reason
from toolkit.gpu.shapes.inference import Known, Trace, infer_sizes
from toolkit.gpu.shapes.sizes import upper_bound
from toolkit.graph.block_weights import BlockTensor

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Attribute = int | float | str | tuple[int, ...] | tuple[float, ...]

# Of one tensor: kernels index with 32 bits, beyond the last element too, as far as a block reaches;
# their blocks have up to 8192 elements.
MAX_ELEMENTS = 2**31 - 2**14


@dataclass(frozen=True, slots=True)
class Operation:
    """One ONNX node; an input or output that is left out is "".

    `others`: names of the ONNX nodes that it computes beside the node `name`.
    """

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]
    others: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all ONNX nodes that it computes."""
        return (*self.others, self.name)

    def integers(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return an attribute that is a row of integers."""
        value = self.attributes.get(name, default)
        assert isinstance(value, tuple)
        return tuple(int(item) for item in value)

    def integer(self, name: str, default: int) -> int:
        """Return an attribute that is an integer."""
        value = self.attributes.get(name, default)
        assert isinstance(value, int)
        return value

    def number(self, name: str, default: float) -> float:
        """Return an attribute that is a number."""
        value = self.attributes.get(name, default)
        assert isinstance(value, (int, float))
        return float(value)

    def text(self, name: str, default: str) -> str:
        """Return an attribute that is a text."""
        value = self.attributes.get(name, default)
        assert isinstance(value, str)
        return value

    def input(self, index: int) -> str:
        """Return the name of an input, "" where it is left out."""
        return self.inputs[index] if index < len(self.inputs) else ""


@dataclass(frozen=True, slots=True)
class IntegerConstant:
    """A constant as `values * scale`: integers, and float32 factors along `axis` (None: one)."""

    values: Array
    scale: Array
    axis: int | None


@dataclass(frozen=True, slots=True)
class Network:
    """A segment: operations in running order, tensors by name.

    `shapes` and `dtypes` hold every tensor that is not constant; `constants` the others, and
    `integers` those of them that were given as integers. `scales`: tensors of real numbers that
    lie on the grid of INT8 with this scale (`toolkit.gpu.passes.quantized`). `blocks`: constants
    that were given as integers of 4 bits in blocks; what a pass computes of them is another one.
    """

    operations: tuple[Operation, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, str]
    constants: Mapping[str, Array]
    integers: Mapping[str, IntegerConstant] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    blocks: Mapping[str, BlockTensor] = field(default_factory=dict)


ROWS_DOMAIN = "tandem.rows"  # of operators that graph passes write (data_dependent_shapes)
RESHAPES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})


def live(network: Network, kinds: Collection[str] | None = None) -> Network:
    """Drop operations whose results nothing reads; `kinds`: only of these operators."""
    names = set(network.outputs)
    operations: list[Operation] = []
    for op in reversed(network.operations):
        if (kinds is None or op.kind in kinds) and names.isdisjoint(op.outputs):
            continue
        names.update(op.inputs)
        operations.append(op)
    return replace(network, operations=tuple(reversed(operations)))


@dataclass(frozen=True, slots=True)
class SegmentTensors:
    """What is known of the tensors of a segment before its operations are read.

    `nodes` become operations: all but constants and what computes with sizes alone. `unknown`:
    tensors that kernels cannot hold, and why. `computed`: tensors that depend on the numbers of the
    inputs, not on constants and sizes alone.
    """

    nodes: tuple[ir.Node, ...]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, str]
    constants: Mapping[str, Array]
    unknown: Mapping[str, str]
    computed: frozenset[str]

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a tensor or a constant, None where it is not known."""
        if name in self.constants:
            return tuple(self.constants[name].shape)
        return self.shapes.get(name)


def read_tensors(segment: ir.Model, trace: Trace | None = None) -> SegmentTensors:
    """Read the tensors of a segment; `trace` as in `read_network`."""
    known = Known() if trace is None else infer_sizes(segment, trace)
    graph = segment.graph
    outputs = [str(value.name) for value in graph.outputs]
    inputs = [str(value.name) for value in graph.inputs]
    constants = {name: _numpy(value.const_value) for name, value in graph.initializers.items()}
    constants |= {name: known.constant(name) for name in inputs if name in known.values}
    nodes: list[ir.Node] = []
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, str] = {}
    unknown: dict[str, str] = {}
    for value in graph.inputs:
        _note(value, known, shapes, dtypes, unknown)
    for node in graph:
        results = [value for value in node.outputs if value.name]
        if node.op_type == "Constant" and "value" in node.attributes:
            tensor = node.attributes["value"].as_tensor()
            constants[str(node.outputs[0].name)] = _numpy(tensor)
        elif _sizes_alone(node, known, outputs):
            constants.update({str(v.name): known.constant(str(v.name)) for v in results})
        else:
            nodes.append(node)
            for value in results:
                _note(value, known, shapes, dtypes, unknown)
    computed = _computed(graph, [name for name in inputs if name not in constants])
    return SegmentTensors(tuple(nodes), shapes, dtypes, constants, unknown, computed)


def _computed(graph: ir.Graph, inputs: Collection[str]) -> frozenset[str]:
    computed = set(inputs)
    for node in graph:
        read = (value.name for value in node.inputs if value is not None)
        if node.op_type not in ("Shape", "Size") and any(name in computed for name in read):
            computed.update(value.name for value in node.outputs if value.name)
    return frozenset(computed)


def read_network(
    segment: ir.Model,
    plugged: Collection[str] = (),
    trace: Trace | None = None,
) -> Network:
    """Read the operations, shapes and constants of a segment.

    `plugged`: operators of other domains that plugins compute, such as "my.domain::Op". `trace`:
    the point of dynamic dimensions at which shapes are read, as sizes with their formulas; what
    computes with sizes is left out then.
    Every node has a kernel (`toolkit.gpu.support`).
    """
    tensors = read_tensors(segment, trace)
    return Network(
        tuple(read_operation(node, plugged) for node in tensors.nodes),
        tuple(str(value.name) for value in segment.graph.inputs),
        tuple(str(value.name) for value in segment.graph.outputs),
        tensors.shapes,
        tensors.dtypes,
        tensors.constants,
        blocks={
            name: value.const_value
            for name, value in segment.graph.initializers.items()
            if isinstance(value.const_value, BlockTensor)
        },
    )


def _numpy(tensor: ir.TensorProtocol | None) -> Array:
    assert tensor is not None  # a segment's initializers have values
    return np.asarray(tensor.numpy())


# Operators that make as many elements as the numbers they read ask for.
_SIZED_BY_NUMBERS = frozenset({"NonMaxSuppression", "NonZero", "StringSplit", "Unique"})


# Operators that rewrites decompose into others; only the outputs that are read are computed.
_DECOMPOSED = frozenset({"GRU", "LSTM", "RNN"})


def read_operation(node: ir.Node, plugged: Collection[str]) -> Operation:
    """Read one node.

    Raises NotCoveredError: an operator of another domain, results whose size depends on numbers,
    outputs that are left out, and attributes that are neither numbers nor texts.
    """
    kind = node.op_type
    if node.op_type in _SIZED_BY_NUMBERS:
        raise _refused(node, reason("gpu.sized-by-numbers"))
    if node.domain not in ("", "ai.onnx", ROWS_DOMAIN):
        kind = f"{node.domain}::{node.op_type}"
    if kind != node.op_type and kind not in plugged:
        raise _refused(node, reason("gpu.domain", node.domain))
    return Operation(
        kind=kind,
        name=str(node.name),
        inputs=tuple("" if value is None else str(value.name) for value in node.inputs),
        outputs=_outputs(node),
        attributes={name: _attribute(node, attr) for name, attr in node.attributes.items()},
    )


def _outputs(node: ir.Node) -> tuple[str, ...]:
    """Return the names of the outputs up to the last that has one; "" for those left out."""
    names = [str(value.name or "") for value in node.outputs]
    while names and not names[-1]:
        names.pop()
    if "" in names and node.op_type not in _DECOMPOSED:
        raise _refused(node, reason("gpu.left-out-output", names.index("")))
    return tuple(names)


def _attribute(node: ir.Node, attr: ir.Attr) -> Attribute:
    kinds = ir.AttributeType
    if attr.type == kinds.FLOAT:
        return float(np.float32(attr.value))  # as ONNX stores it
    if attr.type in (kinds.INT, kinds.STRING):
        return attr.value  # type: ignore[no-any-return]
    if attr.type == kinds.FLOATS:
        return tuple(float(np.float32(number)) for number in attr.value)
    if attr.type == kinds.INTS:
        return tuple(attr.value)
    if attr.type == kinds.STRINGS:
        return ",".join(attr.value)
    raise _refused(node, reason("gpu.attribute", attr.name, attr.type.name))


def _refused(node: ir.Node, sentence: Reason) -> NotCoveredError:
    return NotCoveredError(f"node {node.name!r} ({node.op_type}) {sentence}")


def _note(
    value: ir.Value,
    known: Known,
    shapes: dict[str, Shape],
    dtypes: dict[str, str],
    unknown: dict[str, str],
) -> None:
    """Keep the shape and the type of a tensor, or why kernels cannot hold it."""
    name = str(value.name)
    shape = known.shapes.get(name) or _fixed_shape(value)
    if shape is None:
        shape_text = "unknown" if value.shape is None else str(value.shape)
        unknown[name] = f"tensor {name!r} {reason('gpu.unknown-shape', shape_text)}"
        return
    elements = math.prod(shape)
    if not elements >= 1 or upper_bound(elements) > MAX_ELEMENTS:
        refusal = reason("gpu.elements", upper_bound(elements), MAX_ELEMENTS)
        unknown[name] = f"tensor {name!r} {refusal}"
    elif value.dtype is None:
        unknown[name] = f"tensor {name!r} {reason('gpu.unknown-type')}"
    else:
        shapes[name] = shape
        dtypes[name] = value.dtype.numpy().name


def _fixed_shape(value: ir.Value) -> Shape | None:
    return None if value.shape is None or value.shape.is_dynamic() else value.shape.numpy()


def _sizes_alone(node: ir.Node, known: Known, outputs: Collection[str]) -> bool:
    """Whether a node computes with sizes, whose results are known and stay in the segment.

    The integers of a DequantizeLinear are needed, not only its result.
    """
    if node.op_type == "DequantizeLinear":
        return False
    results = [str(value.name) for value in node.outputs]
    return all(name in known.values and name not in outputs for name in results)
