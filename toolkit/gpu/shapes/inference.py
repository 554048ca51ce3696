"""Shapes of all tensors of a segment as formulas over the engine's dynamic dimensions.

ONNX's shape inference propagates names of dimensions, node by node; each formula gets a name. The
rows of `toolkit.gpu.shapes.shape_rules` do the arithmetic. Each node is also inferred with the
sizes at one point, and both must agree: that checks the rules.
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

_MAX_SIZE_VALUES = 256  # elements of a tensor that may hold sizes
_INTEGERS = (TensorProto.INT64, TensorProto.INT32)
_REALS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16)
STEPS = (2, 4, 8, 16, 32, 64)  # of dimensions, tried in this order: networks halve sizes
_ONNX_DOMAINS = ("", "ai.onnx")
_MAX_CORNER_DIMS = 3  # dimensions whose ends are tried in all combinations


@dataclass(frozen=True, slots=True)
class Known:
    """Known shapes, ONNX types and values of tensors, by name.

    Values are known of constants and of tensors that hold sizes: arrays of `Size` and int.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    types: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Array] = field(default_factory=dict)

    def constant(self, name: str) -> Array:
        """Return known values in their ONNX type; an object array where a `Size` is among them."""
        values = self.values[name]
        if not _is_fixed(values):
            return values
        return values.astype(helper.tensor_dtype_to_np_dtype(self.types[name]))


@dataclass(frozen=True, slots=True)
class Trace:
    """A point of the dynamic dimensions, and what is known of tensors there."""

    space: Space
    known: Known = field(default_factory=Known)
    plugins: tuple[Plugin, ...] = ()

    def after(self, segment: ir.Model) -> "Trace":
        """Return the trace with all tensors of a segment."""
        return replace(self, known=infer_sizes(segment, self))


def traces_of(dims: Sequence[DimRange], plugins: Sequence[Plugin] = ()) -> tuple[Trace, ...]:
    """Return the points at which a segment is lowered, first the opt point.

    The others are the ends in all combinations (of more than three dimensions: all minima and all
    maxima), and two between, one of them odd where possible. Lowerings that depend on a size differ
    between them.
    """
    if not dims:
        return ()
    ends = [(dim.min, dim.max) for dim in dims]
    corners = list(product(*ends) if len(dims) <= _MAX_CORNER_DIMS else zip(*ends, strict=True))
    between = [tuple(low + (high - low) * share // 7 for low, high in ends) for share in (2, 5)]
    odd = [tuple(min(n | 1, high) for n, (_, high) in zip(between[0], ends, strict=True))]
    candidates = [tuple(dim.opt for dim in dims), *corners, *odd, *between[1:]]
    points = dict.fromkeys(
        tuple(max(n // dim.step * dim.step, dim.min) for n, dim in zip(point, dims, strict=True))
        for point in candidates
    )
    return tuple(Trace(Space(tuple(dims), point), plugins=tuple(plugins)) for point in points)


def with_steps(
    segments: Sequence[ir.Model],
    dims: Sequence[DimRange],
    plugins: Sequence[Plugin] = (),
) -> tuple[DimRange, ...]:
    """Return the dimensions with the smallest steps with which most shapes are known.

    Tensors that are halved and doubled again fit others at some sizes only. `segments`: all of
    them in running order.
    """
    best, fewest = tuple(dims), _unknown(segments, dims, plugins)
    for step in STEPS if fewest else ():
        stepped = in_steps(dims, step)
        count = _unknown(segments, stepped, plugins)
        if count < fewest:
            best, fewest = stepped, count
    for at, dim in enumerate(dims):
        without = (*best[:at], dim, *best[at + 1 :])
        if without != best and _unknown(segments, without, plugins) == fewest:
            best = without
    return best


def in_steps(dims: Sequence[DimRange], step: int) -> tuple[DimRange, ...]:
    """Return dimensions with steps of `step`, or its divisor that min, opt and max allow."""
    return tuple(
        structs.replace(dim, step=lcm(dim.step, gcd(step, dim.min, dim.opt, dim.max)))
        for dim in dims
    )


def _unknown(
    segments: Sequence[ir.Model],
    dims: Sequence[DimRange],
    plugins: Sequence[Plugin],
) -> int:
    """Return the number of tensors whose shape is unknown at the opt point."""
    trace, count = traces_of(dims, plugins)[0], 0
    for segment in segments:
        trace = trace.after(segment)
        results = (value.name for node in segment.graph for value in node.outputs)
        count += sum(name not in trace.known.shapes for name in results if name)
    return count


def infer_sizes(model: ir.Model, trace: Trace) -> Known:
    """Return what is known after a model: of its tensors, and of those before.

    A tensor whose shape is not known, or not the same for ONNX and for the rules, is left out. A
    result of the model whose shape is known before keeps it.
    """
    inference = _Inference(model.graph, trace)
    for name, constant in model.graph.initializers.items():
        inference.add_constant(name, constant.const_value)
    for value in model.graph.inputs:
        inference.add_input(value)
    for node in model.graph:
        inference.add_node(node)
    return Known(inference.shapes, inference.types, inference.values)


class _Inference:
    """The inference of one graph in the making. ONNX infers a node at a time, from its proto."""

    def __init__(self, graph: ir.Graph, trace: Trace) -> None:
        self._space = trace.space
        self._opsets = [helper.make_opsetid(*item) for item in graph.opset_imports.items()]
        self._dim_index = {dim.name: index for index, dim in enumerate(trace.space.dims)}
        self._plugins = {plugin.title: plugin for plugin in trace.plugins}
        self._names: dict[int, str] = {}  # a size -> its name in ONNX's inference
        self._sizes: dict[str, int] = {}
        self._given = frozenset(trace.known.shapes)  # not inferred again
        self.shapes = dict(trace.known.shapes)
        self.types = dict(trace.known.types)
        self.values = dict(trace.known.values)

    def add_constant(self, name: str, tensor: ir.TensorProtocol | None) -> None:
        """Note a constant; small ones may be sizes."""
        assert tensor is not None  # a segment's initializers have values
        self.shapes[name] = tuple(tensor.shape.numpy())
        self.types[name] = tensor.dtype.value
        if tensor.size <= _MAX_SIZE_VALUES:
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
            else self._space.dim(self._dim_index[str(dim.value)])
            if str(dim.value) in self._dim_index
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
            self._add_plugin_node(node, proto)
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
            if name in self._given:
                continue
            shape = ruled[at] if ruled is not None and at < len(ruled) else self._shape(kind)
            if shape is not None and real is not None and _agree(shape, real.get(name)):
                self.shapes[name] = shape
        self._add_values(proto, rule_node)

    def _add_plugin_node(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        """Note the results of a plugin's operator, by its shape function; of others fixed ones."""
        plugin = self._plugins.get(f"{proto.domain}::{proto.op_type}")
        if plugin is None:
            for value in node.outputs:
                sizes = [size for size in value.shape or () if isinstance(size, int)]
                if value.shape is not None and value.dtype and len(sizes) == len(value.shape):
                    self.types[str(value.name)] = value.dtype.value
                    self.shapes[str(value.name)] = tuple(sizes)
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
        """Add the values of a result that is computed from sizes and constants alone."""
        reads = proto.op_type in ("Shape", "Size")
        if len(proto.output) != 1 or not (reads or _all_known(proto, node)):
            return
        name = proto.output[0]
        if self.types.get(name) in _REALS and all(v is None or _is_fixed(v) for v in node.values):
            values = _computed(proto, node.values, self.types)
        else:
            values = _sizes(node)
        if values is not None and values.size <= _MAX_SIZE_VALUES:
            self.values[name] = values
            self.shapes[name] = values.shape

    def _node(self, proto: onnx.NodeProto) -> Node:
        attributes = {a.name: _attribute_value(a) for a in proto.attribute}
        return Node(
            proto.op_type,
            attributes,
            tuple(self.shapes.get(name) if name else None for name in proto.input),
            tuple(self.values.get(name) if name else None for name in proto.input),
            len(proto.output),
            bool(proto.input) and self.types.get(proto.input[0]) in _REALS,
        )

    def _ruled(self, node: Node) -> tuple[Shape | None, ...] | None:
        """Return shapes by the operator's rule, with None for unknown ones; None without a rule."""
        rule = RULES.get(node.kind)
        if rule is None:
            return None
        try:
            return rule(node)
        except Unknown:
            return (None,) * node.results

    def _inferred(self, proto: onnx.NodeProto, *, fixed: bool) -> Mapping[str, TypeProto] | None:
        """Return the types that ONNX infers, with sizes as names, or with `fixed` as numbers.

        None where the node's inputs are inconsistent.
        """
        opset = next((o.version for o in self._opsets if o.domain == proto.domain), 0)
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
            return {}  # an unknown operator

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
        """Return an inferred shape names replaced by sizes; None where one is unknown."""
        tensor = kind.tensor_type
        if not tensor.HasField("shape"):
            return None
        shape = []
        for dim in tensor.shape.dim:
            if dim.HasField("dim_value"):
                shape.append(dim.dim_value)
            elif dim.dim_param in self._sizes:
                shape.append(self._sizes[dim.dim_param])
            else:
                return None
        return tuple(shape)


def _attribute_value(attribute: onnx.AttributeProto) -> object:
    value = helper.get_attribute_value(attribute)
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def _is_fixed(values: Array) -> bool:
    """Whether no value is a dynamic size."""
    return values.dtype != object or all(type(value) is int for value in values.reshape(-1))


def _all_known(proto: onnx.NodeProto, node: Node) -> bool:
    pairs = zip(proto.input, node.values, strict=True)
    return bool(proto.input) and all(values is not None for name, values in pairs if name)


def _sizes(node: Node) -> Array | None:
    """Return the sizes that a node computes, by its rule; None without one."""
    rule = VALUES.get(node.kind)
    if rule is None:
        return None
    try:
        values = np.asarray(rule(node), object)
    except Unknown:
        return None
    return values if all(isinstance(value, int) for value in values.reshape(-1)) else None


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
        (result,) = ReferenceEvaluator(proto).run(None, feeds)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None  # not in ONNX's reference: the kernels compute it
    return np.asarray(result)


def _agree(shape: Sequence[int], kind: TypeProto | None) -> bool:
    """Whether the sizes at the point are those that ONNX infers, as far as it does."""
    if kind is None or not kind.tensor_type.HasField("shape"):
        return True
    dims: Iterable[Any] = kind.tensor_type.shape.dim
    pairs = list(zip(shape, dims, strict=False))
    known = [(int(n), dim.dim_value) for n, dim in pairs if dim.HasField("dim_value")]
    return len(pairs) == len(shape) and all(a == b for a, b in known)
