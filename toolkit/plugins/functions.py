"""Plugins in a model: ONNX functions beside the graph, and output shapes."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx
import onnx_ir as ir

from toolkit.errors import PluginError, first_line
from toolkit.graph.passes.shapes import infer_shapes
from toolkit.plugins import Attribute, Node, Plugin, Shape, Tensor

IR_VERSION = 8  # the first that knows functions
_DEFAULT_DOMAINS = ("", "ai.onnx")


def add_functions(
    proto: onnx.ModelProto, plugins: Sequence[Plugin], *, reserved: Collection[str] = ()
) -> None:
    """Add the functions of plugins to a model; they replace functions of the same name.

    Raises PluginError: two plugins define one operator, or use a reserved domain; a function is not
    valid ONNX, or is written for another opset than the model's and differs there.
    """
    if not plugins:
        return
    titles = [plugin.title for plugin in plugins]
    for plugin in plugins:
        title, domain = plugin.title, plugin.function.domain
        if titles.count(title) > 1:
            raise PluginError(f"{title} is made by {titles.count(title)} plugins; give one of them")
        if domain in reserved:
            raise PluginError(f"{title}: the domain {domain!r} is taken; choose one of your own")
    proto.ir_version = max(proto.ir_version, IR_VERSION)
    own_functions = [f for f in proto.functions if f"{f.domain}::{f.name}" not in titles]
    del proto.functions[:]
    proto.functions.extend(own_functions)
    proto.functions.extend(_at_opset_of(proto, plugin) for plugin in plugins)
    known = {opset.domain for opset in proto.opset_import}
    for domain in dict.fromkeys(p.function.domain for p in plugins):
        if domain not in known:
            proto.opset_import.append(onnx.helper.make_opsetid(domain, 1))


def unused_plugins(model: ir.Model, plugins: Sequence[Plugin]) -> list[str]:
    """A note for each plugin that no node uses."""
    used = {f"{node.domain}::{node.op_type}" for node in model.graph.all_nodes()}
    titles = [plugin.title for plugin in plugins]
    return [f"the plugin {title} is used by no node" for title in titles if title not in used]


def give_shapes(model: ir.Model, plugins: Sequence[Plugin]) -> None:
    """Set the output shapes of plugin nodes with their shape functions.

    Raises PluginError: a shape function fails, or disagrees with the operator's function in ONNX.
    """
    by_op = {(p.function.domain, p.function.name): p for p in plugins}
    plugin_of = {node: by_op.get((node.domain, node.op_type)) for node in model.graph}
    plugin_nodes = [(node, plugin) for node, plugin in plugin_of.items() if plugin is not None]
    while [node for node, plugin in plugin_nodes if _set_shapes(node, plugin)]:
        infer_shapes(model)  # later shapes may be known now


def shapes_of(
    plugin: Plugin,
    node: str,
    inputs: Sequence[Tensor | None],
    attributes: Iterable[ir.Attr],
    count: int,
) -> tuple[Shape, ...]:
    """Return the shapes of a node's `count` outputs, as the plugin says.

    Raises PluginError: its shape function fails, or gives another number of them.
    """
    values = {attr.name: _value(plugin, node, attr) for attr in attributes}
    query = Node(node, tuple(inputs), (), complete_attributes(plugin, node, values))
    try:
        shapes = tuple(tuple(shape) for shape in plugin.shapes(query))
    except Exception as error:
        raise PluginError(
            f"{plugin.title}: its shape function fails on node {node!r}: {first_line(error)}"
        ) from error
    if len(shapes) != count:
        raise PluginError(
            f"{plugin.title}: its shape function gives {len(shapes)} shapes for node {node!r}, "
            f"which has {count} outputs"
        )
    return shapes


def complete_attributes(
    plugin: Plugin, node: str, attributes: Mapping[str, Attribute]
) -> Mapping[str, Attribute]:
    """Return a node's attributes with defaults.

    Raises PluginError: an attribute is unknown to the function, or is missing.
    """
    function = plugin.function
    defaults = {proto.name: ir.from_proto(proto) for proto in function.attribute_proto}
    known = (*function.attribute, *defaults)
    for name in attributes:
        if name not in known:
            raise PluginError(
                f"node {node!r} has the attribute {name!r}, which {plugin.title} does not know; it "
                f"takes: {', '.join(known) or 'none'}"
            )
    for name in function.attribute:
        if name not in attributes:
            raise PluginError(f"node {node!r} ({plugin.title}) lacks the attribute {name!r}")
    return {**{name: _value(plugin, node, attr) for name, attr in defaults.items()}, **attributes}


def _at_opset_of(proto: onnx.ModelProto, plugin: Plugin) -> onnx.FunctionProto:
    """Return the function at the model's opset; onnxruntime requires them to be equal."""
    model_opset = next(o.version for o in proto.opset_import if o.domain in _DEFAULT_DOMAINS)
    function = onnx.FunctionProto()
    function.CopyFrom(plugin.function)
    opset = next((o for o in function.opset_import if o.domain in _DEFAULT_DOMAINS), None)
    if opset is None:
        raise PluginError(f"{plugin.title}: its function imports no standard ONNX opset; add one")
    for node in function.node:
        if node.domain in _DEFAULT_DOMAINS and _since(node, opset.version) != _since(
            node, model_opset
        ):
            raise PluginError(
                f"{plugin.title}: {node.op_type} of opset {opset.version} is another one in opset "
                f"{model_opset}, that of the model; write the function for opset {model_opset}"
            )
    opset.version = model_opset
    context = onnx.checker.C.CheckerContext()
    context.ir_version = IR_VERSION
    context.opset_imports = {o.domain: o.version for o in function.opset_import}
    try:
        onnx.checker.check_function(function, context)
    except onnx.checker.ValidationError as error:
        raise PluginError(
            f"{plugin.title}: its function is not valid ONNX: {first_line(error)}"
        ) from error
    return function


def _since(node: onnx.NodeProto, opset: int) -> int | None:
    try:
        return onnx.defs.get_schema(node.op_type, opset).since_version
    except onnx.defs.SchemaError:
        return None


def _set_shapes(node: ir.Node, plugin: Plugin) -> bool:
    """Set unknown output shapes; return True if there were any."""
    inputs = [_tensor(value) for value in node.inputs]
    pairs = zip(inputs, node.inputs, strict=True)
    if any(tensor is None and value is not None for tensor, value in pairs):
        return False  # dynamic, or waiting for others
    attributes = node.attributes.values()
    shapes = shapes_of(plugin, str(node.name), inputs, attributes, len(node.outputs))
    outputs = zip(node.outputs, shapes, strict=True)
    return [value for value, shape in outputs if _set_or_check(plugin, value, shape)] != []


def _set_or_check(plugin: Plugin, value: ir.Value, shape: tuple[int, ...]) -> bool:
    """Set or check a shape; return True if it was unknown."""
    known = value.shape
    if known is not None and all(isinstance(dim, int) for dim in known):
        if tuple(known) != shape:
            raise PluginError(
                f"{plugin.title}: its shape function gives {list(shape)} for {value.name!r}, its "
                f"function in ONNX {list(known)}"
            )
        return False
    value.shape = ir.Shape(shape)
    return True


def _tensor(value: ir.Value | None) -> Tensor | None:
    if value is None or value.shape is None or value.dtype is None or value.shape.is_dynamic():
        return None
    return Tensor(str(value.name), value.dtype.numpy().name, value.shape.numpy())


def _value(plugin: Plugin, node: str, attr: ir.Attr) -> Attribute:
    kinds = ir.AttributeType
    if attr.type in (kinds.INT, kinds.FLOAT, kinds.STRING):
        return attr.value  # type: ignore[no-any-return]
    if attr.type in (kinds.INTS, kinds.FLOATS):
        return tuple(attr.value)
    raise PluginError(
        f"node {node!r} ({plugin.title}) has the attribute {attr.name!r} of type "
        f"{attr.type.name}; plugins take numbers and texts"
    )
