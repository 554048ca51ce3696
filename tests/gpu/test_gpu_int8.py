"""Q/DQ graphs as INT8 kernels, interpreted on the CPU on poisoned memory, bit by bit.

The truth is `int8_reference`: the formula of every node in NumPy, without any of the rewriting that
the lowering does. onnxruntime divides by the scale where kernels multiply by its inverse: it may
differ by one step of the grid.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import gpu_interpreter
import int8_reference
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from gpu_graphs import OPSET, ORIN, Case, node
from int8_graphs import SMALL, Graph, inverted_residual, quantized, residual_block, small_detector
from onnx import TensorProto

from device.engine.manifest import DimRange
from device.runtime.exact_products import exact_session
from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.int8_gemm import int8_weights
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.network import IntegerConstant, Network, Operation
from toolkit.gpu.ir.view import View
from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.gpu.shapes.inference import traces_of, with_steps
from toolkit.gpu.target import GpuTarget
from toolkit.graph.extract import extract_segments

pytest.importorskip("triton", reason="Triton is not installed")

XAVIER = GpuTarget(sm=72, sm_count=8)  # where Triton has no products of integers


def program(case: Case, gpu: GpuTarget = ORIN) -> KernelProgram:
    return case.lower("int8", gpu)


def check(case: Case, gpu: GpuTarget = ORIN) -> KernelProgram:
    """All outputs are the reference's, bit by bit."""
    rng = np.random.default_rng(len(case.nodes))
    feeds = {n: rng.normal(size=s).astype(np.float32) for n, s in case.inputs.items()}
    segment = program(case, gpu)
    outputs = gpu_interpreter.run(segment, feeds)
    for name, truth in int8_reference.run(case.model(), feeds).items():
        assert outputs[name].shape == truth.shape
        assert len(np.unique(truth)) > 4
        np.testing.assert_array_equal(outputs[name], truth, strict=True)
    return segment


def stored_types(segment: KernelProgram) -> set[str]:
    """Types of what kernels hand to each other: neither inputs nor outputs nor weights.

    What a single operation touches is scratch memory, such as split-K partial sums.
    """
    borders = {view.base for view in (*segment.inputs.values(), *segment.outputs.values())}
    uses = Counter(base for one in segment.ops for base in one.touched)
    borders |= {base for base, count in uses.items() if count == 1}
    borders |= segment.outputs.keys()  # written channels-last, then as the border wants it
    result = set()
    for call in segment.launches:
        named = zip(call.spec.signature, call.arguments, strict=True)
        result |= {
            kind.removesuffix(":16")
            for (_, kind), argument in named
            if getattr(argument, "base", None) not in (None, *borders)
        }
    return result


CONVOLUTIONS = {
    "pointwise": ((2, 24, 5, 7), (20, 24, 1, 1), {}),
    "3x3": ((1, 5, 9, 8), (18, 5, 3, 3), {"pads": [1, 1, 1, 1]}),
    "whole blocks of channels": ((1, 128, 5, 4), (16, 128, 3, 3), {"pads": [1, 1, 1, 1]}),
    "strided": ((2, 3, 11, 12), (8, 3, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "strided pointwise": ((1, 16, 7, 7), (8, 16, 1, 1), {"strides": [2, 2]}),
    "dilated": ((1, 4, 12, 11), (6, 4, 3, 3), {"dilations": [2, 3]}),
    "grouped": ((2, 12, 6, 5), (18, 4, 3, 3), {"group": 3, "pads": [1, 1, 1, 1]}),
    "narrow groups": ((1, 144, 5, 4), (144, 16, 3, 3), {"group": 9, "pads": [1, 1, 1, 1]}),
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
    assert all(call.spec.exact for call in segment.launches)


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
    assert "gemm strided" in [call.spec.title for call in segment.launches]
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
    kernels = [call.spec.title for call in segment.launches]
    assert kernels.count("gemm im2col") == 1
    assert kernels[kernels.index("gemm im2col") + 1 :] in (["transpose_tiles"], [])  # the border


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
        sum(call.spec.title in ("elementwise", "transpose_tiles") for call in segment.launches) <= 3
    )  # borders


@pytest.mark.parametrize(
    ("sm", "channels", "side"),
    [pytest.param(87, 48, 3, marks=pytest.mark.slow), (87, 128, 6), (90, 48, 3)],
    ids=str,
)
def test_every_tactic_of_a_convolution_has_the_same_bits(
    sm: int, channels: int, side: int, rng: np.random.Generator
) -> None:
    graph = Graph(rng, {"x": (2, channels, side, 4)})
    x = graph.rounded("x")
    c = graph.product("Conv", x, (channels, channels, 3, 3), bias="int32", pads=[1, 1, 1, 1])
    total = graph.rounded(graph.add("Relu", graph.add("Add", graph.rounded(c), x)))
    case = graph.case(graph.product("Conv", total, (40, channels, 1, 1)))
    tactics = check_tactics(case, GpuTarget(sm, sm_count=8, exhaustive=True), rng)
    assert {len(tactic) for tactic in tactics} == {1, 2}  # whole, and in parts


@pytest.mark.parametrize("result", ["int8", "float"])
def test_a_product_of_one_row_needs_no_matrix_units(result: str, rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (1, 72)})
    y = graph.product("Gemm", graph.rounded("x"), (72, 40), axis=1, bias="int32")
    case = graph.case(graph.rounded(y) if result == "int8" else y)
    tactics = check_tactics(case, GpuTarget(87, sm_count=2, exhaustive=True), rng)
    columns = {
        dict(launch.spec.constants)["BLOCK_N"]
        for (launch, *_) in tactics
        if launch.spec.kernel == "matrix_vector"
    }
    assert min(columns) == 4


@pytest.mark.parametrize(("sm_count", "channels"), [(3, 64), (4, 32)])
def test_narrow_groups_are_joined_in_more_blocks_where_sms_would_be_idle(
    sm_count: int, channels: int, rng: np.random.Generator
) -> None:
    graph = Graph(rng, {"x": (1, 192, 4, 4)})
    x = graph.rounded("x")
    y = graph.product("Conv", x, (192, 16, 3, 3), bias="int32", group=12, pads=[1, 1, 1, 1])
    segment = check(graph.case(graph.rounded(y)), GpuTarget(90, sm_count))
    (joined,) = {
        constants["CHANNELS"]
        for call in segment.launches
        if (constants := dict(call.spec.constants)).get("DIAGONAL")
    }
    assert joined == channels


def check_tactics(
    case: Case, gpu: GpuTarget, rng: np.random.Generator
) -> list[tuple[KernelLaunch, ...]]:
    """Each tactic of an operation with several gives the reference's bits; return them."""
    segment = program(case, gpu)
    feeds = {"x": rng.normal(size=case.inputs["x"]).astype(np.float32)}
    ((name, truth),) = int8_reference.run(case.model(), feeds).items()
    tactics = [
        (at, tactic)
        for at, op in enumerate(segment.ops)
        for tactic in op.tactics
        if len(op.tactics) > 1
    ]
    for at, tactic in tactics:
        assert all(call.spec.exact for call in tactic)
        ops = [*segment.ops]
        ops[at] = replace(ops[at], tactics=(tactic,))
        outputs = gpu_interpreter.run(replace(segment, ops=tuple(ops)), feeds)
        np.testing.assert_array_equal(outputs[name], truth, strict=True)
    return [tactic for _, tactic in tactics]


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


def test_concatenations_have_the_scale_of_their_reader(rng: np.random.Generator) -> None:
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
    kernels = [call.spec.title for call in segment.launches]
    assert kernels.count("elementwise") + kernels.count("transpose_tiles") <= 4


def test_moves_carry_int8(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (2, 6, 20)})
    x, operands = graph.rounded("x"), []
    for order in ([0, 2, 1, 3], [0, 2, 3, 1]):
        result = graph.product("MatMul", x, (20, 24), axis=1)
        split = graph.add("Reshape", result, graph.constant(np.array([2, 6, 3, 8])))
        operands.append(graph.rounded(graph.add("Transpose", split, perm=order)))
    segment = check(graph.case(graph.add("MatMul", *operands)))
    assert len(segment.launches) == 4  # the border and three products
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


def test_a_real_bias_is_rounded_to_steps_of_the_sums(rng: np.random.Generator) -> None:
    """Which is all that sets such a convolution apart from onnxruntime's."""
    x_scale, w_scale = np.float32(1 / 8), np.float32(1 / 64)  # powers of 2 leave no other rounding
    graph = Graph(rng, {"x": (2, 4, 6, 6)})
    x = graph.rounded("x", x_scale)
    weights = graph.integers(rng.integers(-127, 128, (30, 4, 2, 2)), w_scale)
    bias = graph.constant(rng.normal(size=30).astype(np.float32))
    case = graph.case(graph.rounded(graph.add("Conv", x, weights, bias), np.float32(1 / 32)))
    feeds = case.feeds(rng)
    (actual,) = gpu_interpreter.run(program(case), feeds).values()
    step = x_scale * w_scale
    whole = replace(case, weights={**case.weights, bias: np.rint(case.weights[bias] / step) * step})
    (truth,) = whole.truth(feeds).values()
    np.testing.assert_array_equal(actual, truth)


@pytest.mark.parametrize("beyond", [0.0, 405 / 1024, -3.0])
@pytest.mark.parametrize("rounded", [False, True], ids=["as it is", "rounded"])
def test_the_padding_value_is_a_real_number_and_not_an_integer_of_the_scale(
    beyond: float, rounded: bool, rng: np.random.Generator
) -> None:
    graph = Graph(rng, {"x": (1, 6, 4, 4)})
    roi = graph.constant(np.array([0, 0, -0.4, 0, 1, 1, 1.3, 1], np.float32))
    scales = graph.constant(np.array([1, 1, 2, 2], np.float32))
    x = graph.rounded("x", np.float32(1 / 32))  # a power of 2: onnxruntime gives the same bits
    attributes = {"mode": "nearest", "coordinate_transformation_mode": "tf_crop_and_resize"}
    y = graph.add("Resize", x, roi, scales, extrapolation_value=beyond, **attributes)
    case = graph.case(graph.rounded(y, np.float32(1 / 64)) if rounded else y)
    feeds = case.feeds(rng)
    (truth,) = case.truth(feeds).values()
    (actual,) = gpu_interpreter.run(program(case), feeds).values()
    np.testing.assert_array_equal(actual, truth)


@dataclass(frozen=True)
class Typed(Case):
    """A case with inputs of integers."""

    types: str = "int8"

    def model(self) -> onnx.ModelProto:
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(self.types))
        result = onnx.helper.make_graph(
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
        model = onnx.helper.make_model(result, opset_imports=opset, ir_version=9)
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
    outputs = gpu_interpreter.run(program(case), feeds)
    for name, truth in int8_reference.run(case.model(), feeds).items():
        np.testing.assert_array_equal(outputs[name], truth, strict=True)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_halves_are_rounded_to_even_and_the_rest_is_held(
    dtype: str, rng: np.random.Generator
) -> None:
    graph = Graph(rng, {"x": (2, 300)})
    case = graph.case(graph.rounded("x", np.float32(0.125), dtype))
    feeds = {"x": np.float32(0.125) * np.arange(-150, 150, 0.5, np.float32).reshape(2, 300)}
    outputs = gpu_interpreter.run(program(case), feeds)
    for name, truth in case.truth(feeds).items():  # 1 / 0.125 is exact: so is onnxruntime's
        np.testing.assert_array_equal(outputs[name], truth, strict=True)


def lowered(model: ir.Model, precision: str = "int8") -> KernelProgram:
    segment = {str(node.name): "gpu.0" for node in model.graph}
    (piece,) = extract_segments(model, segment, ["gpu.0"])
    return lower_segment(piece.model, gpu=ORIN, precision=precision)


@pytest.mark.parametrize("block", [residual_block, inverted_residual])
def test_whole_networks_are_exact_and_int8_inside(
    block: Callable[[np.random.Generator], Case], rng: np.random.Generator
) -> None:
    case = block(rng)
    feeds = case.feeds(rng)
    model = quantized(ir.from_proto(case.model()), feeds)
    segment = lowered(model)
    assert stored_types(segment) == {"*i8"}
    actual = gpu_interpreter.run(segment, feeds)["y"]
    proto = ir.to_proto(model)
    np.testing.assert_array_equal(actual, int8_reference.run(proto, feeds)["y"], strict=True)
    truth, portable = case.truth(feeds)["y"], ort_run(proto, feeds)["y"]
    noise = np.linalg.norm(truth - portable)
    assert np.linalg.norm(actual - portable) < noise  # differences by chance at halves
    assert np.linalg.norm(actual - truth) < 1.2 * noise


def ort_run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = exact_session(model.SerializeToString(), ort.SessionOptions())
    names = [out.name for out in model.graph.output]
    return dict(zip(names, session.run(None, dict(feeds)), strict=True))


def test_the_shipped_detector_is_exact_and_int8_inside(rng: np.random.Generator) -> None:
    feeds = {"images": rng.random(SMALL, dtype=np.float32)}
    model = quantized(small_detector(), feeds)
    segment = lowered(model)
    assert stored_types(segment) == {"*i8"}
    outputs = gpu_interpreter.run(segment, feeds)
    for name, truth in int8_reference.run(ir.to_proto(model), feeds).items():
        np.testing.assert_array_equal(outputs[name], truth, strict=True)


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
def test_other_sampling_grids_are_read_as_onnx_defines_them(
    name: str, rng: np.random.Generator
) -> None:
    second = OTHERS[name]
    graph = Graph(rng, {"x": (2, 6, 4, 5)})
    scale = graph.constant((2.0 ** rng.integers(-6, -3, second.scale)).astype(np.float32))
    zero = graph.constant(rng.integers(*second.zero, second.scale).astype(second.dtype))
    q = graph.add("QuantizeLinear", "x", scale, zero, axis=second.axis)
    case = graph.case(graph.add("DequantizeLinear", q, scale, zero, axis=second.axis))
    feeds = case.feeds(rng)
    outputs = gpu_interpreter.run(case.lower("fp32"), feeds)
    for output, truth in case.truth(feeds).items():  # powers of two: every step is exact
        np.testing.assert_array_equal(outputs[output], truth, strict=True)


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
    actual = gpu_interpreter.run(lowered(ir.from_proto(model), "fp32"), {"x": x})["y"]
    truth = x @ (weight * scale.repeat(4, 0))
    np.testing.assert_allclose(actual, truth, rtol=1e-4, atol=1e-5)


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
    actual = gpu_interpreter.run(case.lower("fp32"), feeds)["y"]
    steps = np.abs(actual - case.truth(feeds)["y"]) / weights["ys"]
    assert steps.max() <= 1 + 1e-5
    assert (steps > 0.5).mean() < 0.02
    assert len(np.unique(actual)) > 20


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["MatMulInteger", "ConvInteger"])
def test_sums_of_integers_may_leave_what_fp16_holds(
    kind: str, precision: str, rng: np.random.Generator
) -> None:
    """A model with dynamic quantization, as onnxruntime writes it."""
    x, w = ((5, 800), (800, 7)) if kind == "MatMulInteger" else ((1, 90, 5, 4), (7, 90, 3, 3))
    nodes = [
        onnx.helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "ranges"),
        node("Mul", "s ws", "f"),
        node(kind, "q w z", "i"),
        node("Cast", "i", "r", to=TensorProto.FLOAT),
        node("Mul", "r f", "m"),
        node("Relu", "m", "y"),
    ]
    weights = {"w": rng.integers(20, 128, w).astype(np.int8), "ws": np.array(0.05, np.float32)}
    case = Case(nodes, {"x": x}, weights)
    feeds = {"x": rng.uniform(0, 1, x).astype(np.float32)}
    truth = case.truth(feeds)["y"]
    assert (truth / 0.05 * 255 > 65504).all()  # the sums, for a scale of 1/255
    actual = gpu_interpreter.run(case.lower(precision), feeds)["y"]
    np.testing.assert_allclose(actual, truth, rtol=1e-2)


def test_a_bias_of_another_scale_is_rounded_to_that_of_the_sums(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (1, 6, 5, 5)})
    y = graph.product("Conv", graph.rounded("x"), (7, 6, 3, 3))
    bias = rng.normal(size=7).astype(np.float32)
    graph.nodes[-1].input.append(graph.constant(bias))
    case = graph.case(y)
    feeds = case.feeds(rng)
    segment = program(case)
    assert stored_types(segment) == {"*i8"}
    actual = gpu_interpreter.run(segment, feeds)[y]
    truth = int8_reference.run(case.model(), feeds)[y]
    np.testing.assert_array_equal(actual, truth, strict=True)
    np.testing.assert_allclose(actual, case.truth(feeds)[y], atol=1e-4)


@pytest.mark.parametrize(("depth", "integers"), [(131071, True), (131072, False)])
def test_sums_that_could_leave_int32_are_made_of_floats(depth: int, integers: bool) -> None:
    operation = Operation("Gemm", "g", ("x", "w"), ("y",), {})
    given = IntegerConstant(np.ones((depth, 1), np.int8), np.ones(1, np.float32), None)
    network = Network((), ("x",), ("y",), {}, {}, {}, {"w": given}, {"x": 1.0})
    program = LoweringContext(network, ORIN, "float16")
    program.views["x"] = View("x", "int8", (1, depth), (depth, 1), scale=1.0)
    assert (int8_weights(program, operation, 1, 1, depth) is not None) == integers


@pytest.mark.parametrize("channels", [True, False])
def test_weights_that_a_model_quantizes_itself_are_int8(
    channels: bool, rng: np.random.Generator
) -> None:
    """Exporters leave Q and DQ behind a weight in float32; the build makes the integers."""
    weight = rng.normal(size=(7, 40, 3, 3)).astype(np.float32)
    scale = rng.uniform(0.01, 0.02, 7 if channels else ()).astype(np.float32)  # clips some
    steps = weight / scale.reshape((-1, 1, 1, 1) if channels else ())
    stored = np.clip(np.rint(steps), -128, 127).astype(np.int8)
    seed = int(rng.integers(2**31))

    def graph_of(integers: bool) -> Case:
        graph = Graph(np.random.default_rng(seed), {"x": (1, 40, 6, 5)})
        x = graph.rounded("x")
        if integers:
            w = graph.integers(stored, scale)
        else:
            grid = graph.constant(scale), graph.constant(np.zeros(scale.shape, np.int8))
            q = graph.add("QuantizeLinear", graph.constant(weight), *grid, axis=0)
            w = graph.add("DequantizeLinear", q, *grid, axis=0)
        return graph.case(graph.rounded(graph.add("Conv", x, w)))

    segment = program(graph_of(integers=False), ORIN)
    feeds = {"x": rng.normal(size=(1, 40, 6, 5)).astype(np.float32)}
    (truth,) = int8_reference.run(graph_of(integers=True).model(), feeds).values()
    (actual,) = gpu_interpreter.run(segment, feeds).values()
    np.testing.assert_array_equal(actual, truth, strict=True)
    assert stored_types(segment) == {"*i8"}


def test_a_computed_scale_of_a_constant_is_refused_by_node(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (1, 6), "s": ()})
    weight = graph.constant(rng.normal(size=(1, 6)).astype(np.float32))
    q = graph.add("QuantizeLinear", weight, "s", graph.constant(np.int8(0)))
    case = graph.case(graph.add("Add", "x", graph.add("DequantizeLinear", q, "s")))
    with pytest.raises(NotCoveredError, match=r"reads a constant, but its scale .* is none"):
        case.lower("fp32")


def test_weights_in_int8_behind_an_activation_in_float_are_floats(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (1, 6, 5, 5)})
    w = graph.integers(rng.integers(-127, 128, (7, 6, 3, 3)), rng.uniform(0.001, 0.002, 7))
    case = graph.case(graph.add("Conv", "x", w))
    feeds = case.feeds(rng)
    outputs = gpu_interpreter.run(case.lower("fp32"), feeds)
    for name, truth in case.truth(feeds).items():
        np.testing.assert_allclose(outputs[name], truth, rtol=1e-4, atol=1e-4)


BATCH = DimRange(name="batch", min=1, opt=2, max=4)
HEIGHT = DimRange(name="height", min=5, opt=8, max=13)
TOKENS = DimRange(name="tokens", min=1, opt=9, max=20)


def check_everywhere(case: Case, dims: tuple[DimRange, ...], rng: np.random.Generator) -> None:
    """One program gives the reference's bits at the least, the largest and other sizes."""
    piece = case.segment()
    stepped = with_steps([piece.model], dims)
    segment = lower_segment(piece.model, gpu=ORIN, precision="fp32", traces=traces_of(stepped))
    between = tuple(int(rng.integers(dim.min, dim.max + 1)) for dim in dims)
    for point in (tuple(d.min for d in dims), tuple(d.max for d in dims), between):
        sizes = {dim.name: size for dim, size in zip(dims, point, strict=True)}
        feeds = {
            name: rng.normal(size=[sizes.get(dim, dim) for dim in shape]).astype(np.float32)
            for name, shape in case.inputs.items()
        }
        outputs = gpu_interpreter.run(segment, feeds, point)
        for name, truth in int8_reference.run(case.model(), feeds).items():
            np.testing.assert_array_equal(outputs[name], truth, strict=True)


def test_images_of_dynamic_sizes_are_exact(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": ("batch", 8, "height", 7)})
    x = graph.rounded("x")
    r = graph.rounded(graph.product("Conv", x, (8, 8, 3, 3), bias="int32", pads=[1] * 4))
    c = graph.rounded(graph.product("Conv", r, (8, 8, 1, 1)))
    total = graph.rounded(graph.add("Relu", graph.add("Add", c, r)))
    mean = graph.rounded(graph.add("GlobalAveragePool", total))
    case = graph.case(graph.product("Conv", mean, (4, 8, 1, 1)))
    check_everywhere(case, (BATCH, HEIGHT), rng)


@pytest.mark.parametrize(("side", "launches"), [(28, [1, 2]), (32, [2, 1])])
def test_a_mean_of_few_bytes_is_made_at_once(
    side: int, launches: list[int], rng: np.random.Generator
) -> None:
    graph = Graph(rng, {"x": (2, 40, side, side)})
    case = graph.case(graph.rounded(graph.add("GlobalAveragePool", graph.rounded("x"))))
    ops = case.lower("int8").ops
    (op,) = [one for one in ops if one.tactics[0][0].spec.kernel == "global_average_pool"]
    assert [len(tactic) for tactic in op.tactics] == launches


def test_products_of_dynamic_sizes_are_right(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": ("batch", "tokens", 32)})
    x = graph.rounded("x")
    result = graph.rounded(graph.product("MatMul", x, (32, 24), axis=1), np.float32(0.03125))
    turned = graph.add("Transpose", result, perm=[0, 2, 1])
    graph.add("MatMul", result, graph.rounded(turned, np.float32(0.03125)))
    check_everywhere(graph.case(graph.nodes[-1].output[0]), (BATCH, TOKENS), rng)
