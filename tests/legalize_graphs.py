"""Networks for the tests of legalising, and the run that compares them before and after."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from device.engine.manifest import Precision
from device.profile import Dla, load_profile
from toolkit.dla.legalize.legalize import legalize
from toolkit.dla.legalize.rewrite import Legalized
from toolkit.dla.rules.verdicts import judge
from toolkit.graph.node_view import view
from toolkit.graph.passes.shapes import infer_shapes

ORIN, XAVIER = load_profile("agx-orin-64gb").dla, load_profile("agx-xavier-32gb").dla
assert ORIN is not None
assert XAVIER is not None


@dataclass(frozen=True)
class Net:
    """A network to be: nodes, input shapes and weights; `outputs` default to the last one."""

    nodes: Sequence[onnx.NodeProto]
    inputs: dict[str, Sequence[int]]
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    opset: int = 19
    dtype: int = TensorProto.FLOAT

    def proto(self) -> onnx.ModelProto:
        """Return the checked model; nodes get the names n0, n1 and so on."""
        for index, node in enumerate(self.nodes):
            node.name = node.name or f"n{index}"
        outputs = list(self.outputs) or [self.nodes[-1].output[0]]
        graph = helper.make_graph(
            list(self.nodes),
            "net",
            [helper.make_tensor_value_info(n, self.dtype, s) for n, s in self.inputs.items()],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            [numpy_helper.from_array(a, n) for n, a in self.weights.items()],
        )
        opset = helper.make_opsetid("", self.opset)
        proto = helper.make_model(graph, opset_imports=[opset], ir_version=10)
        return onnx.shape_inference.infer_shapes(proto, data_prop=True)


def node(op: str, inputs: str, outputs: str, **attributes: object) -> onnx.NodeProto:
    """Return a node; names are separated by blanks, and "-" is an input left out."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(op, names, outputs.split(), **attributes)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers in float32."""
    return rng.normal(size=shape).astype(np.float32)


def to_ir(proto: onnx.ModelProto) -> ir.Model:
    """The model as the passes leave it: shapes inferred."""
    model = ir.from_proto(proto)
    infer_shapes(model)
    return model


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a model in onnxruntime as it is written: no optimisation of its own."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds))


def feeds_of(proto: onnx.ModelProto, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random inputs with values on both sides of every usual bound."""
    found = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        found[value.name] = (3 * rng.normal(size=shape)).astype(dtype)
    return found


def refused(
    model: ir.Model, dla: Dla, tensorrt: str | None, precision: Precision = "int8"
) -> dict[str, str]:
    """The nodes that the DLA refuses, each with the first rule that says so."""
    opset = model.graph.opset_imports[""]
    found = {}
    for item in model.graph:
        verdicts = judge(view(item, opset), dla, tensorrt, precision)
        if verdicts:
            found[str(item.name)] = verdicts[0].rule
    return found


def legalized(
    net: Net,
    dla: Dla | None = ORIN,
    tensorrt: str | None = "10.3.0",
    precision: Precision = "int8",
    only: frozenset[str] | None = None,
) -> tuple[onnx.ModelProto, Legalized]:
    """Return the model of a network and what legalising makes of it."""
    assert dla is not None
    proto = net.proto()
    return proto, legalize(to_ir(proto), dla, tensorrt, precision, only)


def assert_same(
    proto: onnx.ModelProto, result: Legalized, rng: np.random.Generator, *, exact: bool
) -> None:
    """Both models give the same numbers: all bits, or to within float rounding.

    The rewrites add in another order or multiply by a rounded reciprocal: some 1e2 operations of
    relative error 6e-8 each, of numbers as large as the largest input or result.
    """
    feeds = feeds_of(proto, rng)
    changed = ir.to_proto(result.model)
    onnx.checker.check_model(changed, full_check=True)
    for wanted, found in zip(run(proto, feeds), run(changed, feeds), strict=True):
        assert found.shape == wanted.shape
        if exact:
            np.testing.assert_array_equal(found, wanted)
        else:
            step = float(np.finfo(wanted.dtype).eps)
            numbers = [wanted, *feeds.values()]
            largest = max(float(np.max(np.abs(array), initial=0.0)) for array in numbers)
            np.testing.assert_allclose(found, wanted, rtol=200 * step, atol=100 * step * largest)
