"""The node of a DLA rule's case as ONNX, for a board's TensorRT to judge."""

import math

import numpy as np
import onnx
import onnx.checker
import onnx.defs
import onnx.shape_inference
from onnx import ModelProto, TensorProto, helper, numpy_helper

from toolkit.graph.node_view import NodeView, TensorView

# Every parser of TensorRT 8.6 and newer reads them. Others: where the inputs are those of a case.
_OPSET = 17
_OPSETS = {"ReduceMax": 18, "Resize": 18, "Upsample": 9}
_LARGEST = 2**26  # elements of a tensor: what is larger does not fit some boards
_KINDS = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}


def case_model(view: NodeView, *, half: bool) -> ModelProto | None:
    """Return a model of the node alone, with a neighbour where a rule looks at it.

    `half`: its floats are float16. None: it cannot be put to a board; its shapes are not known, it
    is too large, or it is no valid ONNX.
    """
    opset = _OPSETS.get(view.op, _OPSET)
    tensors = [t for t in (*view.inputs, *view.outputs) if t is not None]
    if view.domain or any(not _fits(tensor) for tensor in tensors):
        return None
    inputs = ["" if t is None else t.name for t in view.inputs]
    outputs = [t.name for t in view.outputs]
    known = onnx.defs.get_schema(view.op, opset).attributes if not view.domain else {}
    attributes = {k: value for k, value in view.attributes if value is not None and k in known}
    node = helper.make_node(view.op, inputs, outputs, name="node", **attributes)
    nodes, results = [node], [_info(t, half=half) for t in view.outputs]
    given = [_info(t, half=half) for t in view.activations]
    if view.before:
        before = _before(view, half=half)
        if before is None:
            return None
        nodes.insert(0, before[0])
        given = before[1]
    if view.after:
        after = _after(view, half=half)
        if after is None:
            return None
        nodes.append(after[0])
        results = after[1]
    half_constants = half and view.op not in ("Resize", "Upsample")  # whose scales are float32
    constants = [
        numpy_helper.from_array(_constant(t, half=half_constants), t.name) for t in view.constants
    ]
    graph = helper.make_graph(nodes, "case", given, results, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return _inferred(model)


def _inferred(model: ModelProto) -> ModelProto | None:
    """Return a model with the shapes that ONNX infers, None if it is not valid."""
    for result in model.graph.output:
        result.type.tensor_type.ClearField("shape")
    try:
        model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return None
    return model


def _fits(tensor: TensorView) -> bool:
    if tensor.shape is None or not all(isinstance(dim, int) for dim in tensor.shape):
        return False
    return math.prod(int(dim) for dim in tensor.shape if dim is not None) <= _LARGEST  # type: ignore[arg-type]


def _kind(tensor: TensorView, *, half: bool) -> int:
    return TensorProto.FLOAT16 if half and tensor.is_float else _KINDS[tensor.dtype]


def _info(tensor: TensorView, *, half: bool):  # noqa: ANN202  (onnx has no types)
    return helper.make_tensor_value_info(tensor.name, _kind(tensor, half=half), tensor.shape)


def _constant(tensor: TensorView, *, half: bool) -> np.ndarray:
    shape = tuple(int(dim) for dim in tensor.shape or ())  # type: ignore[arg-type]
    values = np.ones(shape) if tensor.values is None else np.reshape(tensor.values, shape)
    with np.errstate(over="ignore"):  # a constant that no float16 holds is a case of its own
        return values.astype(np.float16 if half and tensor.is_float else tensor.dtype)


def _before(view: NodeView, *, half: bool):  # noqa: ANN202
    """A comparison of two inputs, or an operator of one, that makes the first input."""
    (op,), first = view.before, view.activations[0]
    floats = TensorView("", "float32", first.shape)
    names = ["a", "b"] if op in ("Equal", "Greater", "Less") else ["a"]
    given = [helper.make_tensor_value_info(n, _kind(floats, half=half), first.shape) for n in names]
    return helper.make_node(op, names, [first.name], name="before"), given


def _after(view: NodeView, *, half: bool):  # noqa: ANN202
    """What reads the output: a cast to floats, or an operator of one input."""
    op, out = view.after[0], view.outputs[0]
    floats = TensorView("", "float32", out.shape)
    kind = _kind(floats, half=half)
    if op == "Cast":
        node = helper.make_node(op, [out.name], ["end"], name="after", to=kind)
    elif op == "Concat":
        node = helper.make_node(op, [out.name], ["end"], name="after", axis=1)
    elif op == "Not":
        return helper.make_node(op, [out.name], ["end"], name="after"), [
            helper.make_tensor_value_info("end", TensorProto.BOOL, out.shape)
        ]
    else:
        node = helper.make_node(op, [out.name], ["end"], name="after")
    return node, [helper.make_tensor_value_info("end", kind, out.shape)]
