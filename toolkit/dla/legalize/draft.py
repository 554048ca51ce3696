"""New nodes in the making: built beside the graph, put into it on trial, kept or taken out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.shape_inference
import onnx_ir as ir
from numpy.typing import ArrayLike

Attributes = Mapping[str, int | float | str | Sequence[int]]

SMALL = 64  # elements: shapes, axes and scales, which shape inference must read


class Names:
    """The names in use, so that every new one is free and the same each time."""

    def __init__(self, graph: ir.Graph) -> None:
        self._taken = {str(value.name) for value in graph.inputs} | set(graph.initializers)
        for node in graph.all_nodes():
            self._taken.add(node.name or "")
            self._taken |= {str(value.name) for value in node.outputs}

    def free(self, wanted: str) -> str:
        """Return `wanted`, with a number where it is taken, and take it."""
        name, number = wanted, 1
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name

    def release(self, names: Iterable[str]) -> None:
        """Let go of names, so that a draft that is dropped leaves no trace in later ones."""
        self._taken.difference_update(names)


class Draft:
    """Nodes in place of `replaces`, in the order of computing, each beside the node it stems from.

    `borders` are those that may stay off the DLA: views and casts at the edge of a new form.
    `sinks` says that a border existed before and only moves down.
    """

    def __init__(self, graph: ir.Graph, names: Names, origin: ir.Node) -> None:
        self.graph = graph
        self.opset = graph.opset_imports.get("", 1)
        self.nodes: list[ir.Node] = []
        self.borders: set[str] = set()
        self.replaces: list[ir.Node] = []
        self.sinks = False
        self._names = names
        self._anchors: list[ir.Node] = []
        self._constants: list[ir.Value] = []
        self._outputs: list[tuple[ir.Value, ir.Value]] = []
        self._swaps: list[tuple[ir.Value, ir.Value, list[tuple[ir.Node, int]], bool]] = []
        self._origin = origin
        self.at(origin)

    def restart(self) -> None:
        """Forget everything drafted so far."""
        self.back_to((0, 0, 0, False))
        self._outputs.clear()

    def mark(self) -> tuple[int, int, int, bool]:
        """How far the draft is, for `back_to`."""
        return len(self.nodes), len(self.replaces), len(self._constants), self.sinks

    def back_to(self, mark: tuple[int, int, int, bool]) -> None:
        """Forget what was drafted after a mark."""
        nodes, replaces, constants, self.sinks = mark
        self._let_go(self.nodes[nodes:], self._constants[constants:])
        self.borders -= {str(node.name) for node in self.nodes[nodes:]}
        del self.nodes[nodes:], self._anchors[nodes:]
        del self.replaces[replaces:], self._constants[constants:]

    def at(self, origin: ir.Node) -> None:
        """Let the nodes that follow replace `origin` too."""
        self.beside(origin)
        self.replaces.append(origin)

    def beside(self, origin: ir.Node) -> None:
        """Let the nodes that follow stem from `origin`."""
        self._origin = origin

    def add(
        self, op: str, inputs: Sequence[ir.Value | None], attributes: Attributes | None = None
    ) -> ir.Value:
        """Add a node of one output and return that output, with type and shape."""
        name = self._names.free(f"{self._origin.name}_{op}")
        made = ir.Value(name=self._names.free(f"{self._origin.outputs[0].name}_{op}"))
        given = dict(attributes or {})
        self._infer(op, inputs, given, made)
        node = ir.Node(
            "",
            op,
            list(inputs),
            ir.convenience.convert_attributes(given),
            outputs=[made],
            name=name,
        )
        self.nodes.append(node)
        self._anchors.append(self._origin)
        return made

    def border(
        self, op: str, inputs: Sequence[ir.Value | None], attributes: Attributes | None = None
    ) -> ir.Value:
        """Add a node that may stay off the DLA."""
        made = self.add(op, inputs, attributes)
        self.borders.add(str(self.nodes[-1].name))
        return made

    def constant(self, values: ArrayLike, like: ir.Value | None = None) -> ir.Value:
        """Return an initializer; floating point takes the type of `like` (float32)."""
        array = np.asarray(values)
        if like is not None and like.dtype is not None:
            array = np.ascontiguousarray(array, like.dtype.numpy())
        name = self._names.free(f"{self._origin.outputs[0].name}_constant")
        value = ir.Value(
            name=name,
            const_value=ir.tensor(array, name=name),
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        )
        self._constants.append(value)
        return value

    def number(self, value: float, like: ir.Value) -> ir.Value:
        """Return one number as 1x1x1x1, which the DLA takes as a scale or a shift."""
        return self.constant(np.full((1, 1, 1, 1), value), like)

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """Add a Reshape that may stay off the DLA; none where the shape is right already."""
        if value.shape is not None and tuple(value.shape) == tuple(shape):
            return value
        return self.border("Reshape", [value, self.constant(np.array(shape, np.int64))])

    def finish(self, old: ir.Value, new: ir.Value) -> None:
        """Let `new` stand for `old`: it takes its name and its readers."""
        self._outputs.append((old, new))

    def origin_of(self, node: ir.Node) -> ir.Node:
        """The node from which a new node stems."""
        return self._anchors[self.nodes.index(node)]

    @property
    def drops_output(self) -> bool:
        """Whether an output of the graph would lose its node: such a draft cannot be put in."""
        return any(
            old.is_graph_output() and (new.producer() is None or new.is_graph_output())
            for old, new in self._outputs
        )

    def put_in(self) -> None:
        """Put the new nodes into the graph; the replaced ones stay, with nobody reading them."""
        for value in self._constants:
            self.graph.register_initializer(value)
        for anchor, node in zip(self._anchors, self.nodes, strict=True):
            self.graph.insert_before(anchor, node)
        for old, new in self._outputs:
            self._swap(old, new)

    def take_out(self) -> None:
        """Undo `put_in`."""
        self._swap_back()
        self.graph.remove(self.nodes)
        for value in self._constants:
            del self.graph.initializers[str(value.name)]
        self.discard()

    def discard(self) -> None:
        """Let go of the inputs, so that nothing in the graph knows the new nodes, and of names."""
        self._let_go(self.nodes, self._constants)

    def _let_go(self, nodes: Sequence[ir.Node], constants: Sequence[ir.Value]) -> None:
        for node in nodes:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
        made = [value for node in nodes for value in node.outputs]
        self._names.release(str(node.name) for node in nodes)
        self._names.release(str(value.name) for value in (*made, *constants))

    def _swap(self, old: ir.Value, new: ir.Value) -> None:
        """Let `new` have the readers of `old`; a new value, or a new output, its name, too."""
        own = any(new is made for node in self.nodes for made in node.outputs)
        renamed = own or old.is_graph_output()
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
        made: ir.Value,
    ) -> None:
        names = ["" if value is None else str(value.name) for value in inputs]
        proto = onnx.helper.make_node(op, names, [str(made.name)], **attributes)
        types, data = {}, {}
        for value in inputs:
            if value is None:
                continue
            types[str(value.name)] = _type(value)
            constant = value.const_value
            if constant is not None and constant.size <= SMALL:
                data[str(value.name)] = onnx.numpy_helper.from_array(constant.numpy())
        schema = onnx.defs.get_schema(op, self.opset, "")
        found = onnx.shape_inference.infer_node_outputs(
            schema, proto, types, data, opset_imports=[onnx.helper.make_opsetid("", self.opset)]
        )
        kind = found[str(made.name)].tensor_type
        made.type = ir.TensorType(ir.DataType(kind.elem_type))
        made.shape = ir.Shape([d.dim_value for d in kind.shape.dim])


def _type(value: ir.Value) -> onnx.TypeProto:
    dtype = value.dtype or ir.DataType.FLOAT
    shape = (
        None if value.shape is None else [d if isinstance(d, int) else None for d in value.shape]
    )
    return onnx.helper.make_tensor_type_proto(dtype.value, shape)
