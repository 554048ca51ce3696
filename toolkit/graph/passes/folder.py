"""The folder of onnxscript, which learns sizes on its way through the graph.

A size makes a Shape fold, whose constant makes the size of a Reshape known, which makes the next
Shape fold: a Swin transformer has 36 such steps in a row. With one inference of the whole graph for
each, the time would grow with the square of the depth. So a node that reads what has become known
on the way is inferred alone, before it is folded.
"""

from collections.abc import Callable

import onnx
import onnx_ir as ir
from onnxscript.optimizer._constant_folding import FoldConstantsPass

from toolkit.errors import ImportModelError
from toolkit.graph import native
from toolkit.graph.passes.shapes import INFERENCE_ERRORS, agree

MAX_READ_BYTES = 1000  # of a constant that inference reads; as when it reads the whole graph
ONNX_DOMAINS = ("", "ai.onnx")


class Folder(FoldConstantsPass):
    """Folds each node once, in running order, with the sizes that folding others made known.

    `before`: what checks each node before its result is made. Raises what that raises, and
    ImportModelError: a node crashes ONNX.
    """

    def __init__(
        self,
        model: ir.Model,
        *,
        max_elements: int,
        should_fold: Callable[[ir.Node], bool],
        before: Callable[[ir.Node], None],
    ) -> None:
        super().__init__(
            shape_inference=True,
            input_size_limit=max_elements,
            output_size_limit=max_elements,
            should_fold=should_fold,
        )
        self._before = before
        self._opsets = [onnx.helper.make_opsetid(*row) for row in model.opset_imports.items()]
        self._ir_version = model.ir_version
        # What the inference of the whole graph has seen, and what has become known since.
        self._old = {v for graph in model.graphs() for v in graph.initializers.values()}
        self._new: set[ir.Value] = set()

    def _do_inference(self, node: ir.Node) -> None:
        """Infer a node that reads something new; the folder calls this before it folds the node."""
        self._before(node)
        if node.domain not in ONNX_DOMAINS or all(_is_known(value) for value in node.outputs):
            return
        read = [value for value in node.inputs if value is not None]
        if not any(self._is_new(value) for value in read):
            return
        if any(value.dtype is None or value.shape is None for value in read):
            return
        try:
            inferred = native.infer_shapes(self._alone(node), strict=False, data_prop=True)
        except ImportModelError:
            raise
        except INFERENCE_ERRORS:
            return  # it stays unknown, and is judged where it runs
        for value, known in zip(node.outputs, inferred.graph.output, strict=True):
            self._take(value, known.type)

    def _is_new(self, value: ir.Value) -> bool:
        return value in self._new or (value.is_initializer() and value not in self._old)

    def _alone(self, node: ir.Node) -> onnx.ModelProto:
        """Return a model of one node, with the small constants that it reads."""
        graph = onnx.GraphProto(name="node", node=[ir.to_proto(node)])
        for value in dict.fromkeys(value for value in node.inputs if value is not None):
            graph.input.append(ir.serde.serialize_value(value))
            constant = value.const_value
            if constant is not None and constant.nbytes <= MAX_READ_BYTES:
                tensor = ir.serde.serialize_tensor(constant)
                tensor.name = str(value.name)
                graph.initializer.append(tensor)
        graph.output.extend(onnx.ValueInfoProto(name=str(value.name)) for value in node.outputs)
        return onnx.ModelProto(graph=graph, opset_import=self._opsets, ir_version=self._ir_version)

    def _take(self, value: ir.Value, kind: onnx.TypeProto) -> None:
        """Give a value a size that is known now, unless it stands against what was noted."""
        shape = ir.serde.deserialize_type_proto_for_shape(kind)
        if shape is None or not all(isinstance(size, int) for size in shape):
            return
        if value.shape is not None and not agree(value.shape, shape):
            return
        value.shape = shape
        if value.type is None:
            value.type = ir.serde.deserialize_type_proto_for_type(kind)
        self._new.add(value)


def _is_known(value: ir.Value) -> bool:
    return value.shape is not None and all(isinstance(size, int) for size in value.shape)
