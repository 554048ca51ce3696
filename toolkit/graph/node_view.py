"""A frozen view of one node, fully resolved for rules and costs."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx
import onnx.defs
import onnx_ir as ir

from device.engine.manifest import Dim
from toolkit.graph.block_weights import BlockTensor
from toolkit.graph.window import Attribute, Shape, Window, resolve_window

SMALL_CONSTANT = 4096  # elements: enough for shapes, scales, clip bounds and axes
MAC_FREE = frozenset(
    {"Concat", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose"}
    | {"Unsqueeze", "Shape", "Cast", "Dropout", "Expand", "Gather", "Pad", "DepthToSpace"}
    | {"SpaceToDepth", "Tile", "Constant", "ConstantOfShape", "Resize", "Upsample"}
)


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor: its name, type, shape (None: unknown) and, for small constants, its values.

    `packed_bytes`: of a constant of 4 bits in blocks, as kernels that know them read it.
    """

    name: str
    dtype: str
    shape: Shape | None
    constant: bool = False
    values: tuple[float, ...] | None = None
    packed_bytes: int | None = None

    @property
    def text(self) -> str:
        """Name and shape, such as "x: 1x3x?x?"."""
        if self.shape is None:
            return f"{self.name}: unknown shape"
        sizes = "x".join("?" if dim is None else str(dim) for dim in self.shape) or "1 number"
        return f"{self.name}: {sizes}"

    @property
    def is_float(self) -> bool:
        """Whether a lower precision can stand for this tensor."""
        return self.dtype in ("float32", "float16", "bfloat16", "float64")

    @property
    def elements(self) -> int | None:
        """The number of elements, a dynamic leading dimension counted as 1."""
        return None if self.shape is None else _elements(self.shape)


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as the rules read it; `attributes` are sorted pairs with ONNX defaults filled in.

    `reads` are the tensors that must exist before the node runs, those that its subgraphs capture
    included. `before` and `after` are the operators that make its inputs and use its outputs.
    `macs` is None where the shapes do not tell it; of an `If` they are those of its larger branch,
    of a loop those of one round. `weight_bytes` include the constants of branches and bodies.
    """

    name: str
    op: str
    domain: str
    inputs: tuple[TensorView | None, ...]
    outputs: tuple[TensorView, ...]
    attributes: tuple[tuple[str, Attribute], ...]
    window: Window | None
    reads: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    has_subgraph: bool
    macs: int | None
    weight_bytes: int

    def attribute(self, name: str) -> Attribute | None:
        """Return the attribute `name`, or None where it is neither set nor has a default."""
        return next((value for key, value in self.attributes if key == name), None)

    def integer(self, name: str, default: int) -> int:
        """Return the integer attribute `name`."""
        value = self.attribute(name)
        return value if isinstance(value, int) else default

    def input(self, index: int) -> TensorView | None:
        """Return the input at `index`, None where it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    @property
    def activations(self) -> tuple[TensorView, ...]:
        """The inputs that are computed, not constant."""
        return tuple(tensor for tensor in self.inputs if tensor is not None and not tensor.constant)

    @property
    def constants(self) -> tuple[TensorView, ...]:
        """The inputs that are constant."""
        return tuple(tensor for tensor in self.inputs if tensor is not None and tensor.constant)

    @property
    def flowing(self) -> tuple[TensorView, ...]:
        """The activations and the outputs: every tensor that is not a constant."""
        return self.activations + self.outputs


def view(
    node: ir.Node, opset: int | None = None, shapes: Mapping[str, Shape] | None = None
) -> NodeView:
    """Return the view of `node`; `opset` is the version of its domain (default: the node's own).

    `shapes`: of tensors by name, instead of those that the graph gives them.
    """
    overrides = shapes or {}
    inputs = tuple(None if value is None else _tensor(value, overrides) for value in node.inputs)
    outputs = tuple(_tensor(value, overrides) for value in node.outputs if value.name)
    attributes = _attributes(node, opset if opset is not None else node.version)
    data, weight = _shape(inputs, 0), _shape(inputs, 1)
    window = resolve_window(node.op_type, dict(attributes), data, weight)
    bodies = [_size(graph, opset, overrides) for graph in subgraphs(node)]
    macs = (
        max(macs for macs, _ in bodies)
        if bodies
        else _macs(node.op_type, dict(attributes), window, inputs, outputs)
    )
    return NodeView(
        name=node.name or "",
        op=node.op_type,
        domain=node.domain,
        inputs=inputs,
        outputs=outputs,
        attributes=attributes,
        window=window,
        reads=_reads(node),
        before=_producers(node),
        after=tuple(sorted(user.op_type for value in node.outputs for user in value.consumers())),
        has_subgraph=bool(bodies),
        macs=macs,
        weight_bytes=sum(_constant_bytes(value) for value in node.inputs)
        + sum(weight_bytes for _, weight_bytes in bodies),
    )


def _size(graph: ir.Graph, opset: int | None, shapes: Mapping[str, Shape]) -> tuple[int, int]:
    """Return the multiply-accumulates of a branch or body, and the bytes of its constants."""
    nodes = [view(node, opset, shapes) for node in graph if node.op_type != "Constant"]
    return sum(node.macs or 0 for node in nodes), sum(node.weight_bytes for node in nodes)


def views(graph: ir.Graph, shapes: Mapping[str, Shape] | None = None) -> tuple[NodeView, ...]:
    """Return the views of the nodes of `graph` in topological order, constants left out.

    `shapes`: of tensors by name, instead of those that the graph gives them.
    """
    versions = graph.opset_imports
    return tuple(
        view(node, versions.get(node.domain), shapes)
        for node in _topological(graph)
        if node.op_type != "Constant"
    )


def _topological(graph: ir.Graph) -> list[ir.Node]:
    nodes = list(graph)
    position = {id(node): index for index, node in enumerate(nodes)}
    producer_of = {value.name: node for node in nodes for value in node.outputs if value.name}
    order: list[ir.Node] = []
    state: dict[int, bool] = {}
    for root in nodes:
        stack = [root]
        while stack:
            node = stack[-1]
            if id(node) not in state:
                state[id(node)] = False
                parents = {
                    id(producer_of[n]): producer_of[n] for n in _reads(node) if n in producer_of
                }
                todo = [p for p in parents.values() if id(p) not in state]
                stack.extend(sorted(todo, key=lambda p: -position[id(p)]))
            else:
                stack.pop()
                if not state[id(node)]:
                    state[id(node)] = True
                    order.append(node)
    return order


def _tensor(value: ir.Value, shapes: Mapping[str, Shape]) -> TensorView:
    shape = None if value.shape is None else tuple(_dim(dim) for dim in value.shape)
    shape = shapes.get(str(value.name), shape)
    constant = _constant(value)
    dtype = "unknown" if value.dtype is None else _DTYPES.get(value.dtype, value.dtype.name.lower())
    values = None
    if constant is not None and constant.size <= SMALL_CONSTANT and _numeric(constant.dtype):
        values = _values(constant)  # type: ignore[arg-type]
    if shape is None and constant is not None:
        shape = tuple(_dim(dim) for dim in constant.shape)
    packed_bytes = constant.packed_bytes if isinstance(constant, BlockTensor) else None
    return TensorView(value.name or "", dtype, shape, constant is not None, values, packed_bytes)


@lru_cache(maxsize=4096)  # copies of a graph share their constants, hashed by identity
def _values(constant: ir.TensorProtocol) -> tuple[float, ...]:
    """Return the values of a small constant."""
    return tuple(constant.numpy().reshape(-1).astype(np.float64).tolist())


_DTYPES = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}


def _shape(tensors: tuple[TensorView | None, ...], index: int) -> Shape | None:
    tensor = tensors[index] if index < len(tensors) else None
    return None if tensor is None else tensor.shape


def _numeric(dtype: ir.DataType) -> bool:
    return dtype != ir.DataType.STRING and dtype.bitwidth >= 8


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    if value.const_value is not None:
        return value.const_value
    producer = value.producer()
    if producer is None or producer.op_type != "Constant" or "value" not in producer.attributes:
        return None
    return producer.attributes["value"].as_tensor()


def _constant_bytes(value: ir.Value | None) -> int:
    constant = None if value is None else _constant(value)
    return 0 if constant is None else constant.nbytes


def _dim(dim: int | ir.SymbolicDimProtocol) -> Dim:
    return dim if isinstance(dim, int) else dim.value


@lru_cache(maxsize=4096)  # a plan asks for the same few shapes tens of thousands of times
def _elements(shape: Shape) -> int | None:
    sizes = [1 if i == 0 and not isinstance(d, int) else d for i, d in enumerate(shape)]
    return math.prod(d for d in sizes if isinstance(d, int)) if _all_int(sizes) else None


def _all_int(dims: Iterable[Dim]) -> bool:
    return all(isinstance(dim, int) for dim in dims)


def _attributes(node: ir.Node, opset: int | None) -> tuple[tuple[str, Attribute], ...]:
    attributes = dict(_defaults(node.op_type, node.domain, opset))
    for name, attr in node.attributes.items():
        if attr.type in _PLAIN:
            value = attr.value
            attributes[name] = tuple(value) if isinstance(value, (list, tuple)) else value
    return tuple(sorted(attributes.items()))


_PLAIN = frozenset(
    {ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING}
    | {ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS}
)


@lru_cache(maxsize=1024)
def _defaults(op: str, domain: str, opset: int | None) -> Mapping[str, Attribute]:
    try:
        newest = onnx.defs.onnx_opset_version()
        schema = onnx.defs.get_schema(op, opset or newest, domain)
    except onnx.defs.SchemaError:  # an operator of another domain has no defaults to fill in
        return {}
    defaults: dict[str, Attribute] = {}
    for name, attribute in schema.attributes.items():
        if attribute.default_value.name:
            value = onnx.helper.get_attribute_value(attribute.default_value)
            defaults[name] = value.decode() if isinstance(value, bytes) else value
    return defaults


def _macs(
    op: str,
    attributes: dict[str, Attribute],
    window: Window | None,
    inputs: tuple[TensorView | None, ...],
    outputs: tuple[TensorView, ...],
) -> int | None:
    """Count multiply-accumulates; an operator without a formula counts one per output element."""
    if op in MAC_FREE:
        return 0
    output_elements = outputs[0].elements if outputs else None
    data = inputs[0] if inputs else None
    weight = inputs[1] if len(inputs) > 1 else None
    if op in ("Conv", "ConvTranspose"):
        # A convolution works for each output, a transposed one for each input element.
        moved = output_elements if op == "Conv" else (data.elements if data is not None else None)
        taps = _known_product(weight.shape[1:]) if weight and weight.shape is not None else None
        return None if moved is None or taps is None else moved * taps
    if op in ("Gemm", "MatMul") and data is not None and data.shape:
        across = attributes.get("transA", 0) == 1
        inner = data.shape[0 if across else -1]
        return (
            output_elements * inner
            if output_elements is not None and isinstance(inner, int)
            else None
        )
    if window is not None:
        return None if output_elements is None else output_elements * math.prod(window.kernel)
    if op.startswith(("Global", "Reduce")) or op == "Softmax":
        return data.elements if data is not None else None
    return output_elements


def _known_product(dims: Shape) -> int | None:
    return math.prod(d for d in dims if isinstance(d, int)) if _all_int(dims) else None


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the graphs in a node's attributes."""
    for attr in node.attributes.values():
        if attr.type == ir.AttributeType.GRAPH:
            yield attr.as_graph()
        elif attr.type == ir.AttributeType.GRAPHS:
            yield from attr.as_graphs()


def _reads(node: ir.Node) -> tuple[str, ...]:
    names = [v.name for v in node.inputs if v is not None and v.name and _constant(v) is None]
    for graph in subgraphs(node):
        inner = {value.name for value in graph.inputs} | set(graph.initializers)
        inner |= {value.name for child in graph for value in child.outputs}
        outer = [name for child in graph for name in _reads(child)]
        names += [n for n in outer + [v.name or "" for v in graph.outputs] if n not in inner]
    return tuple(dict.fromkeys(names))


def _producers(node: ir.Node) -> tuple[str, ...]:
    makers = (v.producer() for v in node.inputs if v is not None and _constant(v) is None)
    return tuple(maker.op_type for maker in makers if maker is not None)
