"""Q/DQ graphs for the tests of INT8 kernels: small ones in the making, and networks in INT8."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from gpu_graphs import Case, node, normal
from onnx import TensorProto

import configs
from toolkit.graph.passes import run_passes
from toolkit.quantize.gpu_operands import operands_on_gpu, tied_on_gpu
from toolkit.quantize.quantize import calibrated_tensors, quantize, with_operands
from toolkit.quantize.scales.rules import unify_scales

SMALL = (1, 3, 64, 96)  # pictures that the interpreter takes seconds for
ZERO = {"int8": np.int8(0), "uint8": np.uint8(128)}


@dataclass
class Graph:
    """A Q/DQ graph in the making: each method adds nodes and returns the name of their result."""

    rng: np.random.Generator
    inputs: dict[str, tuple[int, ...]]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    count: int = 0

    def name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def add(self, op: str, *inputs: str, **attributes: object) -> str:
        made = self.name()
        self.nodes.append(node(op, " ".join(inputs), made, **attributes))
        return made

    def constant(self, values: np.ndarray) -> str:
        made = self.name()
        self.weights[made] = np.asarray(values)
        return made

    def scale(self) -> np.float32:
        return np.float32(2 ** self.rng.uniform(-6, -4))

    def rounded(self, x: str, scale: np.float32 | None = None, dtype: str = "uint8") -> str:
        """Q and DQ."""
        parameters = self.parameters(scale, dtype)
        stored = self.add("QuantizeLinear", x, *parameters)
        return self.add("DequantizeLinear", stored, *parameters)

    def parameters(self, scale: np.float32 | None, dtype: str) -> tuple[str, str]:
        return self.constant(scale or self.scale()), self.constant(ZERO[dtype])

    def integers(
        self, values: np.ndarray, scale: np.ndarray, axis: int = 0, dtype: type = np.int8
    ) -> str:
        zero = self.constant(np.zeros(scale.shape, dtype))
        stored = self.constant(values.astype(dtype))
        parameters = (self.constant(scale.astype(np.float32)), zero)
        return self.add("DequantizeLinear", stored, *parameters, axis=axis)

    def product(
        self,
        op: str,
        x: str,
        shape: tuple[int, ...],
        *,
        axis: int = 0,
        channels: bool = True,
        bias: str = "",
        **attributes: object,
    ) -> str:
        """A Conv, Gemm or MatMul of a tensor on a grid with INT8 weights of one scale a channel."""
        step = next(self.weights[n.input[1]] for n in self.nodes if n.output and n.output[0] == x)
        scale = np.float32(2 ** self.rng.uniform(-9, -8, shape[axis] if channels else ()))
        values = self.rng.integers(-127, 128, shape)
        operands = [x, self.integers(values, scale, axis)]
        if bias:
            factors = np.broadcast_to(step * scale, (shape[axis],)).astype(np.float32)
            steps = self.rng.integers(-5000, 5000, shape[axis])
            operands.append(
                self.integers(steps, factors, 0, np.int32)
                if bias == "int32"
                else self.constant((steps * factors).astype(np.float32))
            )
        return self.add(op, *operands, **attributes)

    def case(self, *outputs: str) -> Case:
        return Case(self.nodes, self.inputs, self.weights, outputs)


def quantized(
    model: ir.Model, feeds: Mapping[str, np.ndarray], *, on_gpu: bool = False
) -> ir.Model:
    """The model in INT8, with the ranges that its tensors have on `feeds`.

    `on_gpu`: as the builds round for a GPU; else every operand of a row is rounded.
    """
    graph, _ = run_passes(model)
    wanted = calibrated_tensors(graph)
    proto = ir.to_proto(graph)
    known = {one.name for one in (*proto.graph.input, *proto.graph.output)}
    proto.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        for name in wanted
        if name not in known
    )
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [out.name for out in session.get_outputs()]
    found = dict(zip(names, session.run(None, dict(feeds)), strict=True))
    found |= feeds
    amax = {name: max(1e-6, float(np.abs(found[name]).max())) for name in wanted}
    segment = {str(node.name): "gpu.0" for node in graph.graph}
    ranges: Mapping[str, float] = with_operands(graph, amax)
    if not on_gpu:
        return quantize(graph, ranges, segment, frozenset()).model
    ranges = unify_scales(graph, ranges, tied_on_gpu(graph, segment)).amax
    operands = operands_on_gpu(graph, segment)
    return quantize(graph, ranges, segment, frozenset(), operands=operands).model


def residual_block(rng: np.random.Generator) -> Case:
    """Two blocks of a ResNet, the first with a strided shortcut, and a classifier."""
    weights: dict[str, np.ndarray] = {}
    nodes: list[onnx.NodeProto] = []

    def conv(x: str, y: str, filters: int, channels: int, taps: int, stride: int = 1) -> None:
        weights[f"w{y}"] = normal(rng, filters, channels, taps, taps)
        weights[f"b{y}"] = rng.normal(size=filters).astype(np.float32)
        attributes = {"pads": [taps // 2] * 4, "strides": [stride, stride]}
        nodes.append(node("Conv", f"{x} w{y} b{y}", y, **attributes))

    conv("x", "c0", 8, 3, 3)
    nodes.append(node("Relu", "c0", "r0"))
    nodes.append(node("MaxPool", "r0", "p0", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4))
    conv("p0", "c1", 12, 8, 3, 2)
    nodes.append(node("Relu", "c1", "r1"))
    conv("r1", "c2", 12, 12, 3)
    conv("p0", "c3", 12, 8, 1, 2)
    nodes += [node("Add", "c2 c3", "a1"), node("Relu", "a1", "r2")]
    conv("r2", "c4", 12, 12, 3)
    nodes.append(node("Relu", "c4", "r4"))
    conv("r4", "c5", 12, 12, 1)
    nodes += [node("Add", "c5 r2", "a2"), node("Relu", "a2", "r5")]
    weights["g"], weights["h"] = normal(rng, 12, 10), rng.normal(size=10).astype(np.float32)
    nodes += [
        node("GlobalAveragePool", "r5", "p"),
        node("Flatten", "p", "f", axis=1),
        node("Gemm", "f g h", "y"),
    ]
    return Case(nodes, {"x": (2, 3, 20, 18)}, weights)


def inverted_residual(rng: np.random.Generator) -> Case:
    """A block of MobileNetV2: wide, depthwise, narrow, and the sum."""
    weights = {
        "wa": normal(rng, 24, 6, 1, 1),
        "wb": normal(rng, 24, 1, 3, 3),
        "wc": normal(rng, 6, 24, 1, 1),
        "wd": normal(rng, 9, 6, 1, 1),
        "zero": np.array(0, np.float32),
        "six": np.array(6, np.float32),
    }
    for name, filters in (("ba", 24), ("bb", 24), ("bc", 6), ("bd", 9)):
        weights[name] = rng.normal(size=filters).astype(np.float32)
    nodes = [
        node("Conv", "x wa ba", "a"),
        node("Clip", "a zero six", "ra"),
        node("Conv", "ra wb bb", "b", group=24, pads=[1, 1, 1, 1]),
        node("Clip", "b zero six", "rb"),
        node("Conv", "rb wc bc", "c"),
        node("Add", "c x", "s"),
        node("Conv", "s wd bd", "y"),
    ]
    return Case(nodes, {"x": (1, 6, 9, 8)}, weights)


def small_detector() -> ir.Model:
    """The shipped detector on pictures of SMALL."""
    proto = onnx.load(configs.ROOT / "models" / "robot-objects.onnx")
    for dim, size in zip(proto.graph.input[0].type.tensor_type.shape.dim, SMALL, strict=True):
        dim.dim_value = size
    del proto.graph.value_info[:]
    for constant in (n for n in proto.graph.node if n.op_type == "Constant"):
        values = onnx.numpy_helper.to_array(constant.attribute[0].t)
        if values.dtype == np.int64:  # the pixels of a head: as many as there are
            sizes = np.array([1, values[1], -1])
            constant.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(sizes))
    for out in proto.graph.output:
        out.type.tensor_type.ClearField("shape")
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))
