"""Small graphs for the GPU tests: ONNX nodes in, a segment and onnxruntime's answer out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import helper, numpy_helper

from device.runtime.exact_products import exact_session
from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.gpu.target import GpuTarget
from toolkit.graph.extract import ExtractedSegment, extract_segments
from toolkit.graph.passes import run_passes

ORIN = GpuTarget(sm=87, sm_count=8)
OPSET = 19


@dataclass(frozen=True)
class Case:
    """A graph with its weights and the shapes of its inputs; the last node's outputs leave it.

    `dtypes`: of inputs and outputs that are not float32.
    """

    nodes: Sequence[onnx.NodeProto]
    inputs: Mapping[str, tuple[int, ...]]
    weights: Mapping[str, np.ndarray]
    outputs: Sequence[str] = ("y",)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    opset: int = OPSET

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            list(self.nodes),
            "case",
            [helper.make_tensor_value_info(n, self._type(n), s) for n, s in self.inputs.items()],
            [helper.make_tensor_value_info(n, self._type(n), None) for n in self.outputs],
            [numpy_helper.from_array(value, name) for name, value in self.weights.items()],
        )
        opset = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=9)
        return onnx.shape_inference.infer_shapes(model, strict_mode=True)

    def _type(self, name: str) -> int:
        return helper.np_dtype_to_tensor_dtype(np.dtype(self.dtypes.get(name, "float32")))

    def segment(self) -> ExtractedSegment:
        model, _ = run_passes(ir.from_proto(self.model()))
        names = {str(node.name): "gpu0" for node in model.graph}
        (piece,) = extract_segments(model, names, ["gpu0"])
        return piece

    def lower(self, precision: str = "fp32", gpu: GpuTarget = ORIN) -> KernelProgram:
        piece = self.segment()
        return lower_segment(piece.model, gpu=gpu, precision=precision)

    def feeds(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {n: rng.normal(size=s).astype(np.float32) for n, s in self.inputs.items()}

    def truth(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        session = exact_session(self.model().SerializeToString(), ort.SessionOptions())
        return dict(zip(self.outputs, session.run(list(self.outputs), dict(feeds)), strict=True))


def node(op: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    names = inputs.split()
    return helper.make_node(op, names, [output], name=f"{op}:{output}", **attributes)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Weights that keep the size of what they multiply."""
    depth = max(1, int(np.prod(shape[1:])))
    return (rng.normal(size=shape) / np.sqrt(depth)).astype(np.float32)


def convolution(
    rng: np.random.Generator,
    shape: tuple[int, int, int, int],
    filters: int,
    taps: tuple[int, int],
    *after: onnx.NodeProto,
    group: int = 1,
    **attributes: object,
) -> Case:
    """A convolution with bias from x to y, or to c where nodes come after it."""
    weights = {
        "w": normal(rng, filters, shape[1] // group, *taps),
        "b": rng.normal(size=filters).astype(np.float32),
    }
    last = "c" if after else "y"
    conv = node("Conv", "x w b", last, group=group, **attributes)
    return Case([conv, *after], {"x": shape}, weights)
