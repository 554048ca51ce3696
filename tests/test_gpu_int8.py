"""Q/DQ graphs as INT8 kernels, interpreted on the CPU on poisoned memory, bit by bit.

The truth is `int8_reference`: the formula of every node in NumPy, without any of the rewriting that
the lowering does. onnxruntime divides by the scale where kernels multiply by its inverse: it may
differ by one step of the grid.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import gpu_interpreter
import int8_reference
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from gpu_graphs import OPSET, ORIN, Case, node, normal
from onnx import TensorProto

import configs
from toolkit.gpu.draft import Draft
from toolkit.gpu.gpu import GpuTarget
from toolkit.gpu.integer_products import integer_weights
from toolkit.gpu.lower import DraftedSegment, draft_segment
from toolkit.gpu.network import IntegerConstant, Network, Operation
from toolkit.gpu.view import View
from toolkit.int8.quantize import calibrated_tensors, quantize, with_operands
from toolkit.lower import lower_segments
from toolkit.passes import run_passes

pytest.importorskip("triton", reason="Triton is not installed")

XAVIER = GpuTarget(sm=72, sm_count=8)  # where Triton has no products of integers
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


def drafted(case: Case, gpu: GpuTarget = ORIN) -> DraftedSegment:
    return case.draft("int8", gpu)


def check(case: Case, gpu: GpuTarget = ORIN) -> DraftedSegment:
    """All outputs are the reference's, bit by bit."""
    rng = np.random.default_rng(len(case.nodes))
    feeds = {n: rng.normal(size=s).astype(np.float32) for n, s in case.inputs.items()}
    segment = drafted(case, gpu)
    found = gpu_interpreter.run(segment, feeds)
    for name, truth in int8_reference.run(case.model(), feeds).items():
        assert found[name].shape == truth.shape
        assert len(np.unique(truth)) > 4
        np.testing.assert_array_equal(found[name], truth, strict=True)
    return segment


def stored_types(segment: DraftedSegment) -> set[str]:
    """Types of what kernels hand to each other: neither inputs nor outputs nor weights."""
    borders = {view.base for view in (*segment.inputs.values(), *segment.outputs.values())}
    borders |= segment.outputs.keys()  # written channels-last, then as the border wants it
    found = set()
    for call in segment.calls:
        named = zip(call.spec.signature, call.arguments, strict=True)
        found |= {
            kind.removesuffix(":16")
            for (_, kind), argument in named
            if getattr(argument, "base", None) not in (None, *borders)
        }
    return found


CONVOLUTIONS = {
    "pointwise": ((2, 24, 5, 7), (20, 24, 1, 1), {}),
    "3x3": ((1, 5, 9, 8), (18, 5, 3, 3), {"pads": [1, 1, 1, 1]}),
    "whole blocks of channels": ((1, 128, 5, 4), (16, 128, 3, 3), {"pads": [1, 1, 1, 1]}),
    "strided": ((2, 3, 11, 12), (8, 3, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "strided pointwise": ((1, 16, 7, 7), (8, 16, 1, 1), {"strides": [2, 2]}),
    "dilated": ((1, 4, 12, 11), (6, 4, 3, 3), {"dilations": [2, 3]}),
    "grouped": ((2, 12, 6, 5), (18, 4, 3, 3), {"group": 3, "pads": [1, 1, 1, 1]}),
    "depthwise": ((2, 20, 7, 6), (20, 1, 3, 3), {"group": 20, "pads": [1, 1, 1, 1]}),
    "depthwise strided": ((1, 9, 8, 8), (9, 1, 5, 5), {"group": 9, "strides": [2, 2]}),
}


@pytest.mark.parametrize("gpu", [ORIN, XAVIER], ids=["sm_87", "sm_72"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_exact(name: str, gpu: GpuTarget, rng: np.random.Generator) -> None:
    shape, weights, attributes = CONVOLUTIONS[name]
    graph = Graph(rng, {"x": shape})
    bias = str(rng.choice(["", "int32", "float32"]))
    channels, dtype = bool(rng.integers(2)), str(rng.choice(["int8", "uint8"]))
    x = graph.rounded("x", dtype=dtype)
    y = graph.product("Conv", x, weights, bias=bias, channels=channels, **attributes)
    segment = check(graph.case(graph.rounded(graph.add("Relu", y), dtype=dtype)), gpu)
    assert stored_types(segment) == {"*i8"}
    assert all(call.spec.exact for call in segment.calls)


PRODUCTS: dict[str, Callable[[Graph], str]] = {
    "gemm": lambda g: g.product("Gemm", g.rounded("x"), (40, 17), axis=1, bias="int32"),
    "gemm of turned weights": lambda g: g.product(
        "Gemm", g.rounded("x"), (17, 40), axis=0, bias="int32", transB=1
    ),
    "matmul": lambda g: g.product("MatMul", g.rounded("x"), (40, 9), axis=1),
    "matmul of one scale": lambda g: g.product("MatMul", g.rounded("x"), (40, 9), channels=False),
    "of two tensors": lambda g: g.add(
        "MatMul", g.rounded("x"), g.rounded(g.add("Transpose", "x", perm=[1, 0]))
    ),
}


@pytest.mark.parametrize("gpu", [ORIN, XAVIER], ids=["sm_87", "sm_72"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_exact(name: str, gpu: GpuTarget, rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (12, 40)})
    segment = check(graph.case(PRODUCTS[name](graph)), gpu)
    assert "matmul" in [call.spec.kernel for call in segment.calls]
    assert stored_types(segment) == {"*i8"}


def test_products_of_batches_are_exact(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"q": (2, 3, 5, 40), "k": (2, 3, 40, 7)})
    case = graph.case(graph.add("MatMul", graph.rounded("q"), graph.rounded("k")))
    assert stored_types(check(case)) == {"*i8"}


ENDINGS: dict[str, Callable[[Graph, str], str]] = {
    "relu": lambda g, c: g.add("Relu", c),
    "clip": lambda g, c: g.add("Clip", c, g.constant(np.float32(0)), g.constant(np.float32(0.9))),
    "rounded twice on one grid": lambda g, c: g.rounded(
        g.add("Relu", g.rounded(c, np.float32(0.03))), np.float32(0.03)
    ),
    "rounded twice on two grids": lambda g, c: g.rounded(g.add("Relu", g.rounded(c))),
    "a product of itself": lambda g, c: g.add("Mul", g.rounded(c), g.rounded(c)),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_what_follows_a_convolution_is_part_of_it(name: str, rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (1, 6, 5, 5)})
    sums = graph.product("Conv", graph.rounded("x"), (10, 6, 3, 3), bias="int32")
    segment = check(graph.case(graph.rounded(ENDINGS[name](graph, sums))))
    kernels = [call.spec.kernel for call in segment.calls]
    assert kernels.count("convolution") == 1
    assert kernels[kernels.index("convolution") + 1 :] in (["transposing"], [])  # the border


@pytest.mark.parametrize("kind", ["pointwise", "3x3", "depthwise"])
def test_a_residual_is_read_in_int8(kind: str, rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (2, 8, 5, 6)})
    x = graph.rounded("x")
    taps = 1 if kind == "pointwise" else 3
    group = 8 if kind == "depthwise" else 1
    attributes = {"group": group, "pads": [taps // 2] * 4}
    r = graph.rounded(graph.product("Conv", x, (8, 8, 1, 1), bias="int32"))
    c = graph.product("Conv", r, (8, 8 // group, taps, taps), bias="int32", **attributes)
    total = graph.rounded(graph.add("Add", graph.rounded(c), r), np.float32(0.03))
    y = graph.rounded(graph.add("Relu", total), np.float32(0.03))
    case = graph.case(graph.product("Conv", y, (4, 8, 1, 1)))
    segment = check(case)
    assert stored_types(segment) == {"*i8"}
    assert (
        sum(call.spec.kernel in ("elementwise", "transposing") for call in segment.calls) <= 3
    )  # borders


POOLS = {
    "max": ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "average": ("AveragePool", {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1]}),
    "whole picture": ("GlobalAveragePool", {}),
}


@pytest.mark.parametrize("name", POOLS)
def test_poolings_read_and_write_int8(name: str, rng: np.random.Generator) -> None:
    kind, attributes = POOLS[name]
    graph = Graph(rng, {"x": (2, 11, 7, 8)})
    pooled = graph.add(kind, graph.rounded("x", np.float32(0.02)), **attributes)
    y = graph.rounded(pooled, np.float32(0.011))
    segment = check(graph.case(graph.product("Conv", y, (5, 11, 1, 1))))
    assert stored_types(segment) == {"*i8"}


def test_concatenations_lie_on_the_grid_of_their_reader(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (1, 6, 5, 5)})
    x = graph.rounded("x")
    parts = [
        graph.rounded(graph.add("Relu", graph.product("Conv", x, (filters, 6, 1, 1))))
        for filters in (7, 9)
    ]
    joined = graph.rounded(graph.add("Concat", *parts, x, axis=1))
    segment = check(graph.case(graph.product("Conv", joined, (4, 22, 3, 3), bias="int32")))
    assert stored_types(segment) == {"*i8"}
    # Both parts are written in place; what is left is the border, and x on the new grid.
    kernels = [call.spec.kernel for call in segment.calls]
    assert kernels.count("elementwise") + kernels.count("transposing") <= 4


def test_moves_carry_int8(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (2, 6, 20)})
    x, operands = graph.rounded("x"), []
    for order in ([0, 2, 1, 3], [0, 2, 3, 1]):
        made = graph.product("MatMul", x, (20, 24), axis=1)
        split = graph.add("Reshape", made, graph.constant(np.array([2, 6, 3, 8])))
        operands.append(graph.rounded(graph.add("Transpose", split, perm=order)))
    segment = check(graph.case(graph.add("MatMul", *operands)))
    assert len(segment.calls) == 4  # the border and three products
    assert stored_types(segment) == {"*i8"}


def test_upscaling_stays_int8(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (1, 6, 4, 4)})
    x = graph.rounded(graph.product("Conv", graph.rounded("x"), (8, 6, 1, 1)))
    scales = graph.constant(np.array([1, 1, 2, 2], np.float32))
    graph.nodes.append(
        onnx.helper.make_node(
            "Resize",
            [x, "", scales],
            ["up"],
            name="up",
            mode="nearest",
            nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        )
    )
    y = graph.rounded("up", np.float32(0.02))
    segment = check(graph.case(graph.product("Conv", y, (3, 8, 3, 3))))
    assert stored_types(segment) == {"*i8"}


@dataclass(frozen=True)
class Typed(Case):
    """A case with inputs of integers."""

    types: str = "int8"

    def model(self) -> onnx.ModelProto:
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(self.types))
        made = onnx.helper.make_graph(
            list(self.nodes),
            "case",
            [onnx.helper.make_tensor_value_info(n, kind, s) for n, s in self.inputs.items()],
            [
                onnx.helper.make_tensor_value_info(self.outputs[0], kind, None),
                onnx.helper.make_tensor_value_info(self.outputs[1], TensorProto.FLOAT, None),
            ],
            [onnx.numpy_helper.from_array(value, name) for name, value in self.weights.items()],
        )
        opset = [onnx.helper.make_opsetid("", OPSET)]
        model = onnx.helper.make_model(made, opset_imports=opset, ir_version=9)
        return onnx.shape_inference.infer_shapes(model, strict_mode=True)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_integers_cross_the_borders_of_a_segment(dtype: str, rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (1, 6, 5, 5)})
    x = graph.add("DequantizeLinear", "x", *graph.parameters(None, dtype))
    y = graph.add("Relu", graph.product("Conv", x, (7, 6, 3, 3), bias="int32"))
    out = graph.add("QuantizeLinear", y, *graph.parameters(np.float32(0.04), dtype))
    back = graph.add("DequantizeLinear", out, graph.nodes[-1].input[1], graph.nodes[-1].input[2])
    case = Typed(graph.nodes, graph.inputs, graph.weights, (out, back), types=dtype)
    feeds = {
        "x": rng.integers(*((-128, 128) if dtype == "int8" else (0, 256)), (1, 6, 5, 5), dtype)
    }
    found = gpu_interpreter.run(drafted(case), feeds)
    for name, truth in int8_reference.run(case.model(), feeds).items():
        np.testing.assert_array_equal(found[name], truth, strict=True)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_halves_are_rounded_to_even_and_the_rest_is_held(
    dtype: str, rng: np.random.Generator
) -> None:
    graph = Graph(rng, {"x": (2, 300)})
    case = graph.case(graph.rounded("x", np.float32(0.125), dtype))
    feeds = {"x": np.float32(0.125) * np.arange(-150, 150, 0.5, np.float32).reshape(2, 300)}
    found = gpu_interpreter.run(drafted(case), feeds)
    for name, truth in case.truth(feeds).items():  # 1 / 0.125 is exact: so is onnxruntime's
        np.testing.assert_array_equal(found[name], truth, strict=True)


def quantized(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> ir.Model:
    """The model in INT8, with the ranges that its tensors have on `feeds`."""
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
    return quantize(graph, with_operands(graph, amax), segment, frozenset()).model


def lowered(model: ir.Model, precision: str = "int8") -> DraftedSegment:
    segment = {str(node.name): "gpu.0" for node in model.graph}
    (piece,) = lower_segments(model, segment, ["gpu.0"])
    return draft_segment(piece.onnx, piece.weights, gpu=ORIN, precision=precision)


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


@pytest.mark.parametrize("block", [residual_block, inverted_residual])
def test_whole_networks_are_exact_and_int8_inside(
    block: Callable[[np.random.Generator], Case], rng: np.random.Generator
) -> None:
    case = block(rng)
    feeds = case.feeds(rng)
    model = quantized(ir.from_proto(case.model()), feeds)
    segment = lowered(model)
    assert stored_types(segment) == {"*i8"}
    found = gpu_interpreter.run(segment, feeds)["y"]
    proto = ir.to_proto(model)
    np.testing.assert_array_equal(found, int8_reference.run(proto, feeds)["y"], strict=True)
    truth, portable = case.truth(feeds)["y"], ort_run(proto, feeds)["y"]
    noise = np.linalg.norm(truth - portable)
    assert np.linalg.norm(found - portable) < noise  # differences by chance at halves
    assert np.linalg.norm(found - truth) < 1.2 * noise


def ort_run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [out.name for out in model.graph.output]
    return dict(zip(names, session.run(None, dict(feeds)), strict=True))


def test_the_shipped_detector_is_exact_and_int8_inside(rng: np.random.Generator) -> None:
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
    feeds = {"images": rng.random(SMALL, dtype=np.float32)}
    model = quantized(ir.from_proto(onnx.shape_inference.infer_shapes(proto)), feeds)
    segment = lowered(model)
    assert stored_types(segment) == {"*i8"}
    found = gpu_interpreter.run(segment, feeds)
    for name, truth in int8_reference.run(ir.to_proto(model), feeds).items():
        np.testing.assert_array_equal(found[name], truth, strict=True)


@dataclass(frozen=True)
class Other:
    """A grid that is not symmetric, or not one for a whole tensor of (2, 6, 4, 5)."""

    scale: tuple[int, ...]
    zero: tuple[int, int]
    dtype: str
    axis: int = 1


OTHERS = {
    "asymmetric": Other((), (3, 200), "uint8"),
    "int8 not around 0": Other((), (-90, 90), "int8"),
    "a channel each": Other((6,), (0, 1), "int8"),
    "asymmetric, a channel each": Other((6,), (0, 256), "uint8"),
    "along the last": Other((5,), (-9, 9), "int8", axis=-1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_grids_are_read_as_onnx_defines_them(name: str, rng: np.random.Generator) -> None:
    other = OTHERS[name]
    graph = Graph(rng, {"x": (2, 6, 4, 5)})
    scale = graph.constant((2.0 ** rng.integers(-6, -3, other.scale)).astype(np.float32))
    zero = graph.constant(rng.integers(*other.zero, other.scale).astype(other.dtype))
    q = graph.add("QuantizeLinear", "x", scale, zero, axis=other.axis)
    case = graph.case(graph.add("DequantizeLinear", q, scale, zero, axis=other.axis))
    feeds = case.feeds(rng)
    found = gpu_interpreter.run(case.draft("fp32"), feeds)
    for output, truth in case.truth(feeds).items():  # powers of two: every step is exact
        np.testing.assert_array_equal(found[output], truth, strict=True)


def test_weights_of_blocks_are_dequantized(rng: np.random.Generator) -> None:
    weight = rng.integers(-127, 128, (8, 6)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, (2, 6)).astype(np.float32)
    weights = {"w": weight, "s": scale, "z": np.zeros((2, 6), np.int8)}
    nodes = [
        onnx.helper.make_node(
            "DequantizeLinear", ["w", "s", "z"], ["d"], "dequantize", axis=0, block_size=4
        ),
        node("MatMul", "x d", "y"),
    ]
    inputs = [onnx.helper.make_tensor_value_info("x", TensorProto.FLOAT, (3, 8))]
    outputs = [onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, (3, 6))]
    constants = [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = onnx.helper.make_graph(nodes, "blocks", inputs, outputs, constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    model = onnx.shape_inference.infer_shapes(model)
    x = rng.normal(size=(3, 8)).astype(np.float32)
    found = gpu_interpreter.run(lowered(ir.from_proto(model), "fp32"), {"x": x})["y"]
    truth = x @ (weight * scale.repeat(4, 0))
    np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-5)


def test_operators_on_integers_are_what_defines_them(rng: np.random.Generator) -> None:
    weights = {
        "xs": np.float32(0.02),
        "xz": np.uint8(120),
        "w": rng.integers(0, 256, (7, 6, 3, 3)).astype(np.uint8),
        "ws": np.float32(0.01),
        "wz": np.uint8(130),
        "ys": np.float32(0.25),
        "yz": np.uint8(100),
        "b": rng.integers(-3000, 3000, 7).astype(np.int32),
    }
    names = ["xs", "xz", "w", "ws", "wz", "ys", "yz", "b"]
    nodes = [
        node("QuantizeLinear", "x xs xz", "q"),
        node("QLinearConv", f"q {' '.join(names)}", "c", pads=[1, 1, 1, 1]),
        node("DequantizeLinear", "c ys yz", "y"),
    ]
    case = Case(nodes, {"x": (1, 6, 5, 5)}, {n: np.asarray(v) for n, v in weights.items()})
    feeds = case.feeds(rng)
    found = gpu_interpreter.run(case.draft("fp32"), feeds)["y"]
    steps = np.abs(found - case.truth(feeds)["y"]) / weights["ys"]
    assert steps.max() <= 1 + 1e-5
    assert (steps > 0.5).mean() < 0.02
    assert len(np.unique(found)) > 20


def test_a_bias_of_another_scale_is_rounded_to_that_of_the_sums(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (1, 6, 5, 5)})
    y = graph.product("Conv", graph.rounded("x"), (7, 6, 3, 3))
    bias = rng.normal(size=7).astype(np.float32)
    graph.nodes[-1].input.append(graph.constant(bias))
    case = graph.case(y)
    feeds = case.feeds(rng)
    segment = drafted(case)
    assert stored_types(segment) == {"*i8"}
    found = gpu_interpreter.run(segment, feeds)[y]
    truth = int8_reference.run(case.model(), feeds)[y]
    np.testing.assert_array_equal(found, truth, strict=True)
    np.testing.assert_allclose(found, case.truth(feeds)[y], atol=1e-4)


@pytest.mark.parametrize(("depth", "integers"), [(131071, True), (131072, False)])
def test_sums_that_could_leave_int32_are_made_of_floats(depth: int, integers: bool) -> None:
    operation = Operation("Gemm", "g", ("x", "w"), ("y",), {})
    given = IntegerConstant(np.ones((depth, 1), np.int8), np.ones(1, np.float32), None)
    network = Network((), ("x",), ("y",), {}, {}, {}, {"w": given}, {"x": 1.0})
    draft = Draft(network, ORIN, "float16")
    draft.views["x"] = View("x", "int8", (1, depth), (depth, 1), scale=1.0)
    assert (integer_weights(draft, operation, 1, 1, depth) is not None) == integers


def test_weights_in_int8_behind_an_activation_in_float_are_floats(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (1, 6, 5, 5)})
    w = graph.integers(rng.integers(-127, 128, (7, 6, 3, 3)), rng.uniform(0.001, 0.002, 7))
    case = graph.case(graph.add("Conv", "x", w))
    feeds = case.feeds(rng)
    found = gpu_interpreter.run(case.draft("fp32"), feeds)
    for name, truth in case.truth(feeds).items():
        np.testing.assert_allclose(found[name], truth, rtol=1e-4, atol=1e-4)
