"""What a rewrite rule adds to an ONNX graph: staged on trial, then committed or rolled back."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.shape_inference
import onnx_ir as ir
from numpy.typing import ArrayLike

from toolkit.graph.rewriter import Replacement, UniqueNames

Attributes = Mapping[str, int | float | str | Sequence[int]]

MAX_INFERENCE_ELEMENTS = 64  # of constants that shape inference reads: shapes, axes, scales


class GraphRewriter:
    """What one rule adds to the graph: new nodes beside those that they replace.

    `staged` in the graph they can be judged; `commit` removes what they supersede, and `roll_back`
    leaves no trace. `borders` are nodes that may stay off the DLA: views and casts at the edge of a
    new form. `sinks` says that a border existed before and only moves down.
    """

    def __init__(self, graph: ir.Graph, names: UniqueNames, origin: ir.Node) -> None:
        self.graph = graph
        self.opset = graph.opset_imports.get("", 1)
        self.nodes: list[ir.Node] = []
        self.borders: set[str] = set()
        self.replaced: list[ir.Node] = []
        self.sinks = False
        self._names = names
        self._start = names.mark()
        self._origins: list[ir.Node] = []
        self._constants: list[ir.Value] = []
        self._outputs: list[tuple[ir.Value, ir.Value]] = []
        self._swaps: list[tuple[ir.Value, ir.Value, list[tuple[ir.Node, int]], bool]] = []
        self._staged = False
        self._origin = origin
        self.replace(origin)

    def restart(self) -> None:
        """Drop everything added so far."""
        self.back_to((0, 0, 0, False, self._start))
        self._outputs.clear()

    def mark(self) -> tuple[int, int, int, bool, int]:
        """Return the current state, for `back_to`."""
        counts = len(self.nodes), len(self.replaced), len(self._constants)
        return *counts, self.sinks, self._names.mark()

    def back_to(self, mark: tuple[int, int, int, bool, int]) -> None:
        """Drop what was added after a mark."""
        nodes, replaced, constants, self.sinks, names = mark
        self._detach(self.nodes[nodes:])
        self._names.roll_back(names)
        self.borders -= {str(node.name) for node in self.nodes[nodes:]}
        del self.nodes[nodes:], self._origins[nodes:]
        del self.replaced[replaced:], self._constants[constants:]

    def replace(self, node: ir.Node) -> None:
        """Let the nodes that follow replace `node` too, with it as their origin."""
        self.set_origin(node)
        self.replaced.append(node)

    def set_origin(self, node: ir.Node) -> None:
        """Make `node` the origin of the nodes that follow: named after it, inserted before it."""
        self._origin = node

    def add(
        self, op: str, inputs: Sequence[ir.Value | None], attributes: Attributes | None = None
    ) -> ir.Value:
        """Add a node of one output and return that output, with type and shape."""
        name = self._names.take(f"{self._origin.name}_{op}")
        output = ir.Value(name=self._names.take(f"{self._origin.outputs[0].name}_{op}"))
        attributes = dict(attributes or {})
        self._infer(op, inputs, attributes, output)
        node = ir.Node(
            "",
            op,
            list(inputs),
            ir.convenience.convert_attributes(attributes),
            outputs=[output],
            name=name,
        )
        self.nodes.append(node)
        self._origins.append(self._origin)
        return output

    def add_border(
        self, op: str, inputs: Sequence[ir.Value | None], attributes: Attributes | None = None
    ) -> ir.Value:
        """Add a node that may stay off the DLA."""
        output = self.add(op, inputs, attributes)
        self.borders.add(str(self.nodes[-1].name))
        return output

    def constant(self, values: ArrayLike, like: ir.Value | None = None) -> ir.Value:
        """Return an initializer; floating point takes the type of `like` (float32)."""
        array = np.asarray(values)
        if like is not None and like.dtype is not None:
            array = array.astype(
                like.dtype.numpy(), copy=False
            )  # a view of large weights stays one
        name = self._names.take(f"{self._origin.outputs[0].name}_constant")
        value = ir.Value(
            name=name,
            const_value=ir.tensor(array, name=name),
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        )
        self._constants.append(value)
        return value

    def scalar(self, value: float, like: ir.Value) -> ir.Value:
        """Return a constant of shape 1x1x1x1, which the DLA takes as a scale or a shift."""
        return self.constant(np.full((1, 1, 1, 1), value), like)

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """Add a Reshape that may stay off the DLA; none where the shape is right already."""
        if value.shape is not None and tuple(value.shape) == tuple(shape):
            return value
        return self.add_border("Reshape", [value, self.constant(np.array(shape, np.int64))])

    def replace_uses(self, old: ir.Value, new: ir.Value) -> None:
        """Let `new` stand for `old`: it takes its name and its readers."""
        self._outputs.append((old, new))

    def replacement(self) -> Replacement[ir.Node]:
        """Return what was added as a value."""
        return Replacement(tuple(self.replaced), tuple(self.nodes))

    def origin_of(self, node: ir.Node) -> ir.Node:
        """Return the origin of a new node."""
        return self._origins[self.nodes.index(node)]

    @property
    def drops_output(self) -> bool:
        """True if an output of the graph would lose its node, which no graph may."""
        return any(
            old.is_graph_output() and (new.producer() is None or new.is_graph_output())
            for old, new in self._outputs
        )

    def around_outputs(self) -> Iterator[ir.Node]:
        """Yield the nodes that make or read what stands for a replaced output."""
        for _, new in self._outputs:
            yield from producers([use.node for use in new.uses()])
            yield from (use.node for use in new.uses())

    def stage(self) -> None:
        """Put the new nodes into the graph; the replaced ones stay, and nothing reads them."""
        self._staged = True
        for value in self._constants:
            self.graph.register_initializer(value)
        for origin, node in zip(self._origins, self.nodes, strict=True):
            self.graph.insert_before(origin, node)
        for old, new in self._outputs:
            self._swap(old, new)

    def superseded(self) -> list[ir.Node]:
        """Return the replaced nodes, and those above whose results nothing else reads."""
        dead, superseded = set(self.replaced), list(self.replaced)
        open_nodes = list(self.replaced)
        while open_nodes:
            for producer in producers([open_nodes.pop()]):
                if producer not in dead and _is_unread(producer, dead):
                    dead.add(producer)
                    superseded.append(producer)
                    open_nodes.append(producer)
        return superseded

    def commit(self) -> None:
        """Remove what the staged nodes supersede, and the constants that only those read."""
        superseded = self.superseded()
        values = [value for node in superseded for value in node.inputs if value is not None]
        self.graph.remove(superseded, safe=True)
        for value in values:
            unused = not list(value.uses()) and not value.is_graph_output()
            if value.is_initializer() and unused:
                self.graph.initializers.pop(str(value.name), None)

    def roll_back(self) -> None:
        """Undo `stage`, detach the new nodes from the graph, and give their names back."""
        if self._staged:
            self._swap_back()
            self.graph.remove(self.nodes)
            for value in self._constants:
                del self.graph.initializers[str(value.name)]
        self._detach(self.nodes)
        self._names.roll_back(self._start)

    def _detach(self, nodes: Sequence[ir.Node]) -> None:
        for node in nodes:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)

    def _swap(self, old: ir.Value, new: ir.Value) -> None:
        """Let `new` have the readers of `old`; a new value, or a new output, its name, too."""
        is_new = any(new is output for node in self.nodes for output in node.outputs)
        renamed = is_new or old.is_graph_output()
        self._swaps.append((old, new, [(use.node, use.idx) for use in old.uses()], renamed))
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        if renamed:
            old.name, new.name = new.name, old.name

    def _swap_back(self) -> None:
        for old, new, readers, renamed in reversed(self._swaps):
            for node, index in readers:
                node.replace_input_with(index, old)
            for index, value in enumerate(self.graph.outputs):
                if value is new and renamed:
                    self.graph.outputs[index] = old
            if renamed:
                old.name, new.name = new.name, old.name

    def _infer(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        output: ir.Value,
    ) -> None:
        names = ["" if value is None else str(value.name) for value in inputs]
        proto = onnx.helper.make_node(op, names, [str(output.name)], **attributes)
        types, data = {}, {}
        for value in inputs:
            if value is None:
                continue
            types[str(value.name)] = _type(value)
            constant = value.const_value
            if constant is not None and constant.size <= MAX_INFERENCE_ELEMENTS:
                data[str(value.name)] = onnx.numpy_helper.from_array(constant.numpy())
        schema = onnx.defs.get_schema(op, self.opset, "")
        inferred = onnx.shape_inference.infer_node_outputs(
            schema, proto, types, data, opset_imports=[onnx.helper.make_opsetid("", self.opset)]
        )
        kind = inferred[str(output.name)].tensor_type
        output.type = ir.TensorType(ir.DataType(kind.elem_type))
        output.shape = ir.Shape([d.dim_value for d in kind.shape.dim])


def producers(nodes: Sequence[ir.Node]) -> Iterator[ir.Node]:
    """Yield the nodes that compute what `nodes` read, constants excluded."""
    for node in nodes:
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer.op_type != "Constant":
                yield producer


def _is_unread(node: ir.Node, dead: set[ir.Node]) -> bool:
    return all(
        not value.is_graph_output() and all(use.node in dead for use in value.uses())
        for value in node.outputs
    )


def _type(value: ir.Value) -> onnx.TypeProto:
    dtype = value.dtype or ir.DataType.FLOAT
    shape = (
        None if value.shape is None else [d if isinstance(d, int) else None for d in value.shape]
    )
    return onnx.helper.make_tensor_type_proto(dtype.value, shape)
