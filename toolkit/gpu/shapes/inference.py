"""Shapes of all tensors of a segment as formulas over the engine's dynamic dimensions.

ONNX's shape inference passes names of dimensions from input to output, node by node. Each formula
gets a name for it; what needs arithmetic are the rows of `shape_rules`. The same node
is inferred with the sizes of one point too, and both must agree: that checks the rules.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd, lcm
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from msgspec import structs
from onnx import TensorProto, TypeProto, defs, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from device.engine.manifest import DimRange
from toolkit.gpu.shapes.shape_rules import RULES, Node, Unknown
from toolkit.gpu.shapes.size_values import VALUES
from toolkit.gpu.shapes.sizes import Space
from toolkit.plugins import Plugin, Tensor
from toolkit.plugins.functions import shapes_of

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

_MOST_VALUES = 256  # of a tensor that is taken for sizes
_INTEGERS = (TensorProto.INT64, TensorProto.INT32)
_REALS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16)
STEPS = (2, 4, 8, 16, 32, 64)  # of dimensions, tried in this order: networks halve sizes
_ONNX_DOMAINS = ("", "ai.onnx")
_MOST_CORNERS = 3  # dimensions of which all combinations of ends are tried


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of tensors by name: shapes, ONNX types, and the values of those with sizes.

    Sizes are `sizes.Size` where they depend on a dimension; values are arrays of them.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    types: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Array] = field(default_factory=dict)

    def constant(self, name: str) -> Array:
        """Return known values in their ONNX type; an array of objects where sizes are in it."""
        values = self.values[name]
        if not _is_fixed(values):
            return values
        return values.astype(helper.tensor_dtype_to_np_dtype(self.types[name]))


@dataclass(frozen=True, slots=True)
class Trace:
    """A point of the dynamic dimensions, and what is known there before a segment."""

    space: Space
    known: Known = field(default_factory=Known)
    plugins: tuple[Plugin, ...] = ()

    def after(self, segment: ir.Model) -> "Trace":
        """Return the trace with all tensors of a segment."""
        return replace(self, known=infer_sizes(segment, self))


def traces_of(dims: Sequence[DimRange], plugins: Sequence[Plugin] = ()) -> tuple[Trace, ...]:
    """Return the points at which a segment is drafted, the one that blocks are chosen for first.

    They are the opt, the ends in all combinations (of more than three dimensions: all least and
    all most), and two between, one of them odd if it may: where a decision turns on a size, they
    differ.
    """
    if not dims:
        return ()
    ends = [(dim.min, dim.max) for dim in dims]
    corners = list(product(*ends)) if len(dims) <= _MOST_CORNERS else list(zip(*ends, strict=True))
    between = [tuple(low + (high - low) * share // 7 for low, high in ends) for share in (2, 5)]
    odd = [tuple(min(n | 1, high) for n, (_, high) in zip(between[0], ends, strict=True))]
    found = [tuple(dim.opt for dim in dims), *corners, *odd, *between[1:]]
    points = dict.fromkeys(
        tuple(max(n // dim.step * dim.step, dim.min) for n, dim in zip(point, dims, strict=True))
        for point in found
    )
    return tuple(Trace(Space(tuple(dims), point), plugins=tuple(plugins)) for point in points)


def with_steps(
    segments: Sequence[ir.Model],
    dims: Sequence[DimRange],
    plugins: Sequence[Plugin] = (),
) -> tuple[DimRange, ...]:
    """Return the dimensions with the least steps that make the most shapes known.

    Tensors that are halved and doubled again fit others at some sizes only. `segments`: all of
    them in running order.
    """
    best, fewest = tuple(dims), _unknown(segments, dims, plugins)
    for step in STEPS if fewest else ():
        stepped = in_steps(dims, step)
        count = _unknown(segments, stepped, plugins)
        if count < fewest:
            best, fewest = stepped, count
    for place, dim in enumerate(dims):
        without = (*best[:place], dim, *best[place + 1 :])
        if without != best and _unknown(segments, without, plugins) == fewest:
            best = without
    return best


def in_steps(dims: Sequence[DimRange], step: int) -> tuple[DimRange, ...]:
    """Return dimensions in steps of as much of `step` as their least, best and largest have."""
    return tuple(
        structs.replace(dim, step=lcm(dim.step, gcd(step, dim.min, dim.opt, dim.max)))
        for dim in dims
    )


def _unknown(
    segments: Sequence[ir.Model],
    dims: Sequence[DimRange],
    plugins: Sequence[Plugin],
) -> int:
    """Return how many tensors have no known shape, at the sizes that blocks are chosen for."""
    trace, count = traces_of(dims, plugins)[0], 0
    for segment in segments:
        trace = trace.after(segment)
        results = (value.name for node in segment.graph for value in node.outputs)
        count += sum(name not in trace.known.shapes for name in results if name)
    return count


def infer_sizes(model: ir.Model, trace: Trace) -> Known:
    """Return what is known after a model: of its tensors, and of those before.

    A tensor whose shape is not known, or not the same for ONNX and for the rules, is left out.
    """
    found = _Inference(model.graph, trace)
    for name, constant in model.graph.initializers.items():
        found.add_constant(name, constant.const_value)
    for value in model.graph.inputs:
        found.add_input(value)
    for node in model.graph:
        found.add_node(node)
    return Known(found.shapes, found.types, found.values)


class _Inference:
    """The inference of one graph in the making. ONNX infers a node at a time, from its proto."""

    def __init__(self, graph: ir.Graph, trace: Trace) -> None:
        self._space = trace.space
        self._opsets = [helper.make_opsetid(*item) for item in graph.opset_imports.items()]
        self._places = {dim.name: place for place, dim in enumerate(trace.space.dims)}
        self._plugins = {plugin.title: plugin for plugin in trace.plugins}
        self._names: dict[int, str] = {}  # a formula -> what ONNX's inference calls it
        self._sizes: dict[str, int] = {}
        self.shapes = dict(trace.known.shapes)
        self.types = dict(trace.known.types)
        self.values = dict(trace.known.values)

    def add_constant(self, name: str, tensor: ir.TensorProtocol | None) -> None:
        """Note a constant; small ones may be sizes."""
        assert tensor is not None  # a segment's initializers have values
        self.shapes[name] = tuple(int(size) for size in tensor.shape)  # type: ignore[arg-type]
        self.types[name] = tensor.dtype.value
        if tensor.size <= _MOST_VALUES:
            data = np.asarray(tensor.numpy())
            if data.dtype.kind in "if":
                self.values[name] = data if data.dtype.kind == "f" else data.astype(object)

    def add_input(self, value: ir.Value) -> None:
        """Note an input whose sizes are numbers and names of dimensions."""
        name = str(value.name)
        if name not in self.types:
            self.types[name] = 0 if value.dtype is None else value.dtype.value
        if name in self.shapes or value.shape is None:
            return
        sizes = [
            dim
            if isinstance(dim, int)
            else self._space.dim(self._places[str(dim.value)])
            if str(dim.value) in self._places
            else None
            for dim in value.shape
        ]
        if None not in sizes:
            self.shapes[name] = tuple(size for size in sizes if size is not None)

    def add_node(self, node: ir.Node) -> None:
        """Note the results of a node."""
        if node.op_type == "Constant" and "value" in node.attributes:
            self.add_constant(str(node.outputs[0].name), node.attributes["value"].as_tensor())
            return
        proto = ir.serde.serialize_node(node)
        if proto.domain not in _ONNX_DOMAINS:
            self._add_plugged(node, proto)
            return
        if any(name and name not in self.types for name in proto.input):
            return
        rule_node = self._node(proto)
        inferred = self._inferred(proto, fixed=False) or {}
        ruled = self._ruled(rule_node)
        real = self._inferred(proto, fixed=True)
        for at, name in enumerate(proto.output):
            kind = inferred.get(name)
            if not name or kind is None:
                continue
            self.types[name] = kind.tensor_type.elem_type
            shape = ruled[at] if ruled is not None and at < len(ruled) else self._shape(kind)
            if shape is not None and real is not None and _agree(shape, real.get(name)):
                self.shapes[name] = shape
        self._add_values(proto, rule_node)

    def _add_plugged(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        """Note the results of a plugin's operator, by its shape function; of others nothing."""
        plugin = self._plugins.get(f"{proto.domain}::{proto.op_type}")
        read = [name for name in proto.input if name]
        if plugin is None or any(name not in self.shapes for name in read):
            return
        inputs = [
            Tensor(name, helper.tensor_dtype_to_np_dtype(self.types[name]).name, self.shapes[name])
            if name
            else None
            for name in proto.input
        ]
        attributes = list(node.attributes.values())
        shapes = shapes_of(plugin, proto.name, inputs, attributes, len(proto.output))
        for value, shape in zip(node.outputs, shapes, strict=True):
            if value.name and value.dtype is not None:
                self.types[value.name] = value.dtype.value
                self.shapes[value.name] = shape

    def _add_values(self, proto: onnx.NodeProto, node: Node) -> None:
        """Note the values of a result, if it is computed from sizes and constants alone."""
        reads = proto.op_type in ("Shape", "Size")
        if len(proto.output) != 1 or not (reads or _all_known(proto, node)):
            return
        name = proto.output[0]
        if self.types.get(name) in _REALS and all(v is None or _is_fixed(v) for v in node.values):
            values = _computed(proto, node.values, self.types)
        else:
            values = _sizes(node)
        if values is not None and values.size <= _MOST_VALUES:
            self.values[name] = values
            self.shapes[name] = values.shape

    def _node(self, proto: onnx.NodeProto) -> Node:
        attributes = {one.name: _attribute(one) for one in proto.attribute}
        return Node(
            proto.op_type,
            attributes,
            tuple(self.shapes.get(name) if name else None for name in proto.input),
            tuple(self.values.get(name) if name else None for name in proto.input),
            len(proto.output),
            bool(proto.input) and self.types.get(proto.input[0]) in _REALS,
        )

    def _ruled(self, node: Node) -> tuple[Shape | None, ...] | None:
        """Return shapes by the operator's rule, None for those unknown or without a rule."""
        rule = RULES.get(node.kind)
        if rule is None:
            return None
        try:
            return rule(node) or (None,) * node.results
        except Unknown:
            return (None,) * node.results

    def _inferred(self, proto: onnx.NodeProto, *, fixed: bool) -> Mapping[str, TypeProto] | None:
        """Return what ONNX's inference says, with sizes as names, or as numbers at the point.

        None where the node's tensors do not fit each other.
        """
        opset = next((one.version for one in self._opsets if one.domain == proto.domain), 0)
        types = {name: self._type(name, fixed) for name in proto.input if name in self.types}
        data = {
            name: numpy_helper.from_array(values.astype(np.int64), name)
            for name in proto.input
            if (values := self.values.get(name)) is not None
            and self.types.get(name) in _INTEGERS
            and (fixed or _is_fixed(values))
        }
        try:
            schema = defs.get_schema(proto.op_type, opset, proto.domain)
            return onnx.shape_inference.infer_node_outputs(
                schema, proto, types, data, opset_imports=self._opsets
            )
        except onnx.shape_inference.InferenceError:
            return None
        except (defs.SchemaError, RuntimeError):
            return {}  # an operator of others: so nothing is known

    def _type(self, name: str, fixed: bool) -> TypeProto:
        shape = self.shapes.get(name)
        if shape is None:
            return helper.make_tensor_type_proto(self.types[name], None)
        sizes = [int(n) if fixed or type(n) is int else self._name(n) for n in shape]
        return helper.make_tensor_type_proto(self.types[name], sizes)

    def _name(self, size: int) -> str:
        name = self._names.setdefault(size, f"s{len(self._names)}")
        self._sizes[name] = size
        return name

    def _shape(self, kind: TypeProto) -> Shape | None:
        """Return a shape that ONNX inferred, its names as the sizes that they stand for."""
        tensor = kind.tensor_type
        if not tensor.HasField("shape"):
            return None
        found = []
        for dim in tensor.shape.dim:
            if dim.HasField("dim_value"):
                found.append(dim.dim_value)
            elif dim.dim_param in self._sizes:
                found.append(self._sizes[dim.dim_param])
            else:
                return None
        return tuple(found)


def _attribute(one: onnx.AttributeProto) -> object:
    value = helper.get_attribute_value(one)
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def _is_fixed(values: Array) -> bool:
    """Whether no value depends on a dimension."""
    return values.dtype != object or all(type(one) is int for one in values.reshape(-1))


def _all_known(proto: onnx.NodeProto, node: Node) -> bool:
    given = zip(proto.input, node.values, strict=True)
    return bool(proto.input) and all(values is not None for name, values in given if name)


def _sizes(node: Node) -> Array | None:
    """Return the sizes that a node computes, by its rule; None without one."""
    rule = VALUES.get(node.kind)
    if rule is None:
        return None
    try:
        made = rule(node)
    except Unknown:
        return None
    if made is None:
        return None
    values = np.asarray(made, object)
    return values if all(isinstance(one, int) for one in values.reshape(-1)) else None


def _computed(
    proto: onnx.NodeProto, values: Sequence[Array | None], types: Mapping[str, int]
) -> Array | None:
    """Return the real numbers that a node of constants computes, by ONNX's reference."""
    feeds = {
        name: array.astype(helper.tensor_dtype_to_np_dtype(types[name]))
        for name, array in zip(proto.input, values, strict=True)
        if array is not None
    }
    try:
        (made,) = ReferenceEvaluator(proto).run(None, feeds)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None  # no such operator there: then it is left to the kernels
    return np.asarray(made)


def _agree(shape: Sequence[int], kind: TypeProto | None) -> bool:
    """Whether the sizes at the point are those that ONNX infers there, where it does."""
    if kind is None or not kind.tensor_type.HasField("shape"):
        return True
    dims: Iterable[Any] = kind.tensor_type.shape.dim
    pairs = list(zip(shape, dims, strict=False))
    known = [(int(n), dim.dim_value) for n, dim in pairs if dim.HasField("dim_value")]
    return len(pairs) == len(shape) and all(a == b for a, b in known)
