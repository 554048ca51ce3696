"""For every rule of the DLA a node at its limit and one a step beyond it."""

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper

from device.engine.manifest import Precision
from device.profile import Dla, load_profile
from scripts.one_node import constant, numbers, one_node
from toolkit.graph.node_view import NodeView, views

V1 = load_profile("agx-xavier-32gb").dla
V2 = load_profile("agx-orin-64gb").dla


@dataclass(frozen=True)
class Case:
    """A rule, a node that it lets pass and one that it refuses, and where it applies.

    `beside`: the other rules that refuse the node that passes, however it is made.
    """

    rule: str
    passes: NodeView
    fails: NodeView
    dla: Dla | None = V2
    precision: Precision = "int8"
    tensorrt: str | None = None
    passes_on: tuple[Dla | None, Precision, str | None] | None = None
    beside: frozenset[str] = frozenset()


def relu(*shape: int | str | None, **options: object) -> NodeView:
    return one_node("Relu", [shape], shape, **options)


def conv(
    came: tuple[int, ...] = (1, 32, 64, 64),
    maps: int = 32,
    kernel: tuple[int, ...] = (3, 3),
    group: int = 1,
    **attributes: object,
) -> NodeView:
    weights = constant(maps, came[1] // group, *kernel)
    out_shape = (came[0], maps, *came[2:])
    return one_node("Conv", [came, weights], out_shape, group=group, **attributes)


def deconv(kernel: tuple[int, int] = (2, 2), group: int = 1, **attributes: object) -> NodeView:
    weights = constant(8, 8 // group, *kernel)
    operands = [(1, 8, 16, 16), weights]
    return one_node("ConvTranspose", operands, (1, 8, 32, 32), group=group, **attributes)


def pool(op: str = "MaxPool", **attributes: object) -> NodeView:
    options = {"kernel_shape": [2, 2], **attributes}
    return one_node(op, [(1, 8, 16, 16)], (1, 8, 16, 16), **options)


def gemm(k: int = 64, n: int = 10, **attributes: object) -> NodeView:
    return one_node("Gemm", [(1, k), constant(k, n)], (1, n), **attributes)


def clip(low: float | None, high: float | None) -> NodeView:
    bounds = ["" if v is None else np.array(v, np.float32) for v in (low, high)]
    return one_node("Clip", [(1, 8, 4, 4), *bounds], (1, 8, 4, 4))


def binary(op: str, *operands: object, after: str = "", **options: object) -> NodeView:
    return one_node(op, operands, (2, 8, 4, 4), after=after, **options)


def multiplied(factor: float) -> NodeView:
    return binary("Mul", WHOLE, constant(1, 8, 1, 1, value=factor))


def concat(axis: int = 1, count: int = 2) -> NodeView:
    return one_node("Concat", [(1, 8, 4, 4)] * count, (1, 16, 4, 4), axis=axis)


WHOLE = (2, 8, 4, 4)
BATCH = numbers(0)


def cut(
    starts: object = BATCH, steps: object = "", came: tuple[int, ...] = (2, 8, 4, 4)
) -> NodeView:
    operands = [came, starts, numbers(4), numbers(1), steps]
    return one_node("Slice", operands, (came[0], 4, *came[2:]))


def resize(scales: object = None, sizes: object = "", **attributes: object) -> NodeView:
    if scales is None:
        scales = numbers(1, 1, 2, 2, dtype=np.float32)
    options = {
        "mode": "nearest",
        "nearest_mode": "floor",
        "coordinate_transformation_mode": "asymmetric",
        **attributes,
    }
    return one_node("Resize", [(1, 8, 4, 4), "", scales, sizes], (1, 8, 8, 8), **options)


def upsample(scales: object) -> NodeView:
    return one_node("Upsample", [(1, 8, 4, 4), scales], (1, 8, 8, 8), mode="nearest", opset=9)


def scaled(*scales: float, **attributes: object) -> NodeView:
    return resize(numbers(*scales, dtype=np.float32), **attributes)


LINEAR = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}


def softmax(*shape: int, axis: int = 1) -> NodeView:
    return one_node("Softmax", [shape], shape, axis=axis)


def reshape(came: tuple[int, ...], out_shape: tuple[int, ...], **options: str) -> NodeView:
    return one_node("Reshape", [came, numbers(*out_shape)], out_shape, **options)


def transpose(*order: int) -> NodeView:
    shape = (2, 8, 4, 4)
    return one_node("Transpose", [shape], [shape[axis] for axis in order], perm=order)


def reduce_max(*axes: int, out_shape: tuple[int, ...] = (2, 8, 1, 1)) -> NodeView:
    return one_node("ReduceMax", [WHOLE, numbers(*axes)], out_shape)


def compare(op: str = "Equal", after: str = "Cast") -> NodeView:
    return binary(op, WHOLE, WHOLE, after=after, out_dtype=TensorProto.BOOL)


def cast(before: str) -> NodeView:
    """A Cast to floats of what `before` makes."""
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, WHOLE)
    nodes = [
        helper.make_node(before, ["a"] if before == "Relu" else ["a", "b"], ["m"]),
        helper.make_node("Cast", ["m"], ["y"], "node", to=TensorProto.FLOAT),
    ]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, WHOLE) for n in "ab"]
    kind = TensorProto.FLOAT if before == "Relu" else TensorProto.BOOL
    between = helper.make_tensor_value_info("m", kind, WHOLE)
    graph = helper.make_graph(nodes, "g", inputs, [output], value_info=[between])
    return views(ir.from_proto(helper.make_model(graph)).graph)[-1]


def absolute() -> NodeView:
    return one_node("Abs", [WHOLE], WHOLE)


def lrn(size: int) -> NodeView:
    return one_node("LRN", [WHOLE], WHOLE, size=size)


def norm(*parameters: object) -> NodeView:
    return one_node("BatchNormalization", [WHOLE, *parameters], WHOLE)


C8 = constant(8)
TALL = (1, 1, 8192, 8192)

CASES = (
    Case("G1", conv(), conv(), precision="fp32", passes_on=(V2, "int8", None)),
    Case("G11", conv(), conv(), tensorrt="10.8", passes_on=(V2, "int8", "10.7")),
    Case("G11", conv(), conv(), tensorrt="11.4.0", passes_on=(V2, "int8", "11.4.1")),
    Case("version.v1", conv(), conv(), V1, tensorrt="8.6", passes_on=(V1, "int8", "8.5.2.2")),
    Case("version.v2", conv(), conv(), tensorrt="8.3.9", passes_on=(V2, "int8", "8.4")),
    Case("G13", relu(*WHOLE), relu(*WHOLE, domain="com.example")),
    Case("op.rewrite", relu(*WHOLE), one_node("Neg", [WHOLE], WHOLE)),
    Case("op.folded", relu(*WHOLE), one_node("Shape", [WHOLE], (4,), out_dtype=TensorProto.INT64)),
    Case("op.not-exposed", relu(*WHOLE), one_node("GlobalAveragePool", [WHOLE], (2, 8, 1, 1))),
    Case("op.unsupported", relu(*WHOLE), one_node("TopK", [WHOLE, numbers(2)], WHOLE, WHOLE)),
    Case(
        "op.version",
        reduce_max(2, 3),
        reduce_max(2, 3),
        tensorrt="8.6.11",
        passes_on=(V2, "int8", "8.6.12"),
    ),
    Case(
        "softmax.v1", softmax(1, 10, 1, 1), softmax(1, 10, 1, 1), V1, passes_on=(V2, "int8", None)
    ),
    Case(
        "sub.version",
        binary("Sub", WHOLE, WHOLE),
        binary("Sub", WHOLE, WHOLE),
        V1,
        tensorrt="8.0.1",
        passes_on=(V1, "int8", "8.2.1"),
    ),
    Case("slice.v1", cut(), cut(), V1, passes_on=(V2, "int8", None)),
    Case("unary.v1", absolute(), absolute(), V1, passes_on=(V2, "int8", None)),
    Case(
        "shuffle.v1", transpose(0, 1, 3, 2), transpose(0, 1, 3, 2), V1, passes_on=(V2, "int8", None)
    ),
    Case(
        "shuffle.version",
        transpose(0, 1, 3, 2),
        transpose(0, 1, 3, 2),
        tensorrt="8.4.1",
        passes_on=(V2, "int8", "8.5"),
    ),
    Case(
        "reduce.v1",
        reduce_max(2, 3),
        reduce_max(2, 3),
        V1,
        passes_on=(V2, "int8", "10.3"),
    ),
    Case("min.conflict", binary("Max", WHOLE, WHOLE), binary("Min", WHOLE, WHOLE)),
    Case("unary.kind", absolute(), one_node("Sin", [WHOLE], WHOLE)),
    Case("G5", relu(1, 8, 4, 4), relu("N", 8, 4, 4)),
    Case("G1.type", relu(*WHOLE), relu(*WHOLE, dtype=TensorProto.INT32)),
    Case("G2", relu(4096, 8, 4, 4), relu(4097, 8, 4, 4)),
    Case("G2.v1", relu(32, 8, 4, 4), relu(33, 8, 4, 4), V1),
    Case("G4", relu(1, 8192, 1, 1), relu(1, 8193, 1, 1)),
    Case("G10", relu(31, *TALL[1:]), relu(32, *TALL[1:])),
    Case("G16", gemm(), one_node("Gemm", [(1, 64), (64, 10)], (1, 10))),
    Case("G16", norm(C8, C8, C8, C8), norm(C8, (8,), C8, C8)),
    Case("G17", multiplied(65504.0), multiplied(65536.0)),
    Case("conv.rank", conv(), one_node("Conv", [(1, 8, 64), constant(8, 8, 3)], (1, 8, 64))),
    Case("product.form", gemm(), gemm(transA=1)),
    Case(
        "product.form",
        one_node("MatMul", [(1, 64), constant(64, 10)], (1, 10)),
        one_node("MatMul", [(1, 7, 64), constant(64, 10)], (1, 7, 10)),
    ),
    Case("conv.kernel", conv((1, 4, 64, 64), 4, (32, 1)), conv((1, 4, 64, 64), 4, (33, 1))),
    Case(
        "conv.padding",
        conv((1, 4, 64, 64), 4, (32, 1), pads=[31, 0, 31, 0]),
        conv((1, 4, 64, 64), 4, (33, 1), pads=[32, 0, 32, 0]),
    ),
    Case("conv.padding-kernel", conv(pads=[2, 2, 2, 2]), conv(pads=[2, 2, 3, 2])),
    Case("conv.stride", conv(strides=[8, 8]), conv(strides=[8, 9])),
    Case(
        "conv.dilation",
        conv((1, 4, 64, 64), 4, (2, 2), dilations=[32, 32]),
        conv((1, 4, 64, 64), 4, (2, 2), dilations=[32, 33]),
    ),
    Case("conv.channels", conv((1, 8192, 1, 1), 8, (1, 1)), conv((1, 8193, 1, 1), 8, (1, 1))),
    Case("conv.maps", conv((1, 8, 1, 1), 8192, (1, 1)), conv((1, 8, 1, 1), 8193, (1, 1))),
    Case(
        "conv.groups",
        conv((1, 8192, 1, 1), 8192, (1, 1), group=8192),
        conv((1, 8193, 1, 1), 8193, (1, 1), group=8193),
    ),
    Case(
        "conv.group-int8",
        conv((1, 8, 8, 8), 8, group=2),
        conv((1, 12, 8, 8), 12, group=2),
    ),
    Case("conv.group-int8", conv((1, 6, 8, 8), 6, group=6), conv((1, 6, 8, 8), 12, group=6)),
    # A 1x1 kernel takes 1 bank; the slice 124 * 123 / 4 = 3813 entries, 15 banks of 256 (124: 16).
    Case("conv.cbuf-int8", conv((1, 3968, 4, 123), 8, (1, 1)), conv((1, 3968, 4, 124), 8, (1, 1))),
    # 8192 channels of 4x1 fill one bank of weights to the last byte; 4 lines of 15 take 15 banks.
    Case("conv.cbuf-int8", conv((1, 8192, 8, 15), 8, (4, 1)), conv((1, 8192, 8, 16), 8, (4, 1))),
    Case(
        "conv.cbuf-fp16",
        conv((1, 2048, 4, 120), 8, (1, 1)),
        conv((1, 2048, 4, 124), 8, (1, 1)),
        V1,
        "fp16",
    ),
    Case("deconv.kernel", deconv((1, 64)), deconv((1, 65))),
    Case("deconv.kernel", deconv((32, 31)), deconv((33, 31))),
    Case("deconv.stride", deconv(strides=[1, 128]), deconv(strides=[2, 128])),
    Case("deconv.padding", deconv(), deconv(pads=[0, 0, 0, 1])),
    Case("deconv.padding", deconv(), deconv(output_padding=[1, 0])),
    Case("deconv.padding", deconv(), deconv(output_shape=[31, 31])),
    Case("deconv.groups", deconv(), deconv(group=2)),
    Case("deconv.dilation", deconv(), deconv(dilations=[1, 2])),
    Case("deconv.square", deconv((22, 22)), deconv((23, 23))),
    Case("deconv.kernel", deconv((1, 96)), deconv((1, 97))),
    Case("deconv.kernel", deconv((128, 1)), deconv((95, 1))),
    Case("deconv.square", deconv((32, 31)), deconv((32, 32))),
    Case("deconv.square", deconv(strides=[22, 22]), deconv(strides=[23, 23])),
    Case(
        "pool.rank",
        pool(),
        one_node("MaxPool", [(1, 8, 16)], (1, 8, 8), kernel_shape=[2], strides=[2]),
    ),
    Case("pool.window", pool(kernel_shape=[8, 8]), pool(kernel_shape=[8, 9])),
    Case(
        "pool.padding",
        pool(kernel_shape=[8, 8], pads=[7, 7, 7, 7]),
        pool(kernel_shape=[8, 8], pads=[7, 7, 8, 7]),
    ),
    Case("pool.stride", pool(strides=[16, 16]), pool(strides=[16, 17])),
    Case("pool.dilation", pool(), pool(dilations=[1, 2])),
    Case(
        "pool.indices",
        pool(),
        one_node("MaxPool", [(1, 8, 4, 4)], (1, 8, 3, 3), (1, 8, 3, 3), kernel_shape=[2, 2]),
    ),
    Case(
        "pool.inclusive",
        pool("AveragePool", pads=[1, 1, 1, 1], count_include_pad=1),
        pool("AveragePool", pads=[1, 1, 1, 1]),
        V1,
    ),
    Case(
        "window.unknown",
        pool(auto_pad="SAME_UPPER"),
        one_node("MaxPool", [None], (1, 8, 4, 4), kernel_shape=[2, 2], auto_pad="SAME_UPPER"),
    ),
    Case("activation.rank", relu(1, 10, 1, 1), relu(1, 10)),
    Case("clip.upper", clip(0, 127), clip(0, 127.5)),
    Case("clip.upper", clip(0, 1), clip(0, 0.5)),
    Case("clip.upper", clip(0, 6), clip(0, None)),
    Case("clip.lower", clip(0, 6), clip(-1, 6)),
    Case(
        "prelu.slope",
        one_node("PRelu", [WHOLE, constant(1, 8, 1, 1)], WHOLE),
        one_node("PRelu", [WHOLE, (1, 8, 1, 1)], WHOLE),
    ),
    Case(
        "prelu.rank",
        one_node("PRelu", [WHOLE, constant(1, 8, 1, 1)], WHOLE),
        one_node("PRelu", [WHOLE, constant(8, 1, 1)], WHOLE),
    ),
    Case(
        "eltwise.broadcast",
        binary("Add", WHOLE, constant(8, 1, 1)),
        binary("Add", WHOLE, constant(4, 4)),
    ),
    Case(
        "eltwise.broadcast", binary("Mul", WHOLE, (2, 8, 1, 1)), binary("Mul", WHOLE, (2, 1, 4, 4))
    ),
    Case(
        "div.divisor",
        binary("Div", WHOLE, constant(1)),
        binary("Div", WHOLE, WHOLE),
        precision="fp16",
    ),
    Case("pow.constant", binary("Pow", WHOLE, constant(8, 1, 1)), binary("Pow", WHOLE, WHOLE)),
    Case(
        "pow.precision",
        binary("Pow", WHOLE, constant(1)),
        binary("Pow", WHOLE, constant(1)),
        precision="fp16",
        passes_on=(V2, "int8", None),
    ),
    Case(
        "compare.precision",
        compare(),
        compare(),
        precision="fp16",
        passes_on=(V2, "int8", None),
    ),
    Case("compare.reader", compare(), compare(after="Not")),
    Case("compare.v1", binary("Max", WHOLE, WHOLE), compare(), dla=V1),
    Case("cast.compare", cast("Greater"), cast("Relu")),
    Case("lrn.window", lrn(9), lrn(11)),
    Case("lrn.window", lrn(3), lrn(4)),
    Case("concat.axis", concat(1), concat(2)),
    Case("concat.axis", concat(-3), concat(-1)),
    Case("concat.inputs", concat(count=2), concat(count=1)),
    Case("slice.rank", cut(), cut(came=(2, 8, 4))),
    Case("slice.static", cut(), cut(starts=(1,))),
    Case("slice.steps", cut(steps=numbers(1)), cut(steps=numbers(2))),
    Case(
        "slice.batch",
        cut(),
        one_node("Slice", [WHOLE, numbers(0), numbers(1), numbers(0)], (1, 8, 4, 4)),
    ),
    Case(
        "slice.batch",
        one_node("Split", [WHOLE, numbers(4, 4)], (2, 4, 4, 4), (2, 4, 4, 4), axis=1),
        one_node("Split", [WHOLE, numbers(1, 1)], (1, 8, 4, 4), (1, 8, 4, 4), axis=0),
    ),
    Case("slice.int8", cut(), cut(), tensorrt="8.5.2", passes_on=(V2, "int8", "8.6")),
    Case("resize.scales", resize(), resize("", numbers(1, 8, 8, 8))),
    Case("resize.scales", resize(), resize((4,))),
    Case("resize.scales", upsample(numbers(1, 1, 2, 2, dtype=np.float32)), upsample((4,))),
    Case("resize.axes", scaled(1, 1, 2, 2), scaled(1, 2, 2, 2)),
    Case("resize.axes", scaled(2, 2, axes=[2, 3]), scaled(1, 2, 2)),
    Case("resize.integer", scaled(1, 1, 2, 3), scaled(1, 1, 2, 2.5)),
    Case("resize.integer", scaled(1, 1, 1, 1), scaled(1, 1, 2, np.inf)),
    Case("conv.groups", conv(), replace(conv(), attributes=(("group", 0),))),
    Case("resize.nearest", scaled(1, 1, 32, 32), scaled(1, 1, 32, 33)),
    Case("resize.linear", scaled(1, 1, 4, 4, **LINEAR), scaled(1, 1, 4, 5, **LINEAR)),
    Case("resize.mode", resize(), resize(nearest_mode="ceil")),
    Case(
        "resize.mode",
        scaled(1, 1, 2, 2, **LINEAR),
        scaled(1, 1, 2, 2, **(LINEAR | {"coordinate_transformation_mode": "align_corners"})),
    ),
    Case(
        "resize.linear-version",
        scaled(1, 1, 2, 2, **LINEAR),
        scaled(1, 1, 2, 2, **LINEAR),
        tensorrt="8.2.1",
        passes_on=(V2, "int8", "8.4"),
    ),
    Case("softmax.axis", softmax(2, 10, 1, 1), softmax(2, 10, 1, 1, axis=0)),
    Case("softmax.size", softmax(1, 1024, 2, 2), softmax(1, 1025, 2, 2)),
    Case("softmax.size", softmax(1, 8192, 1, 1), softmax(1, 8192, 2, 1)),
    Case("softmax.rows", softmax(1, 10, 1, 1), softmax(2, 10, 1, 1), tensorrt="8.4"),
    Case(
        "softmax.rows",
        softmax(2, 10, 1, 1),
        softmax(2, 10, 1, 1),
        tensorrt="8.4",
        passes_on=(V2, "int8", "8.5"),
    ),
    Case("shuffle.rank", reshape(WHOLE, (2, 4, 8, 4)), reshape(WHOLE, (2, 128))),
    Case("shuffle.batch", transpose(0, 2, 1, 3), transpose(1, 0, 2, 3)),
    Case("shuffle.batch", reshape(WHOLE, (2, 4, 8, 4)), reshape(WHOLE, (1, 16, 4, 4))),
    Case(
        "shuffle.neighbour",
        reshape(WHOLE, (2, 4, 8, 4), after="Relu"),
        reshape(WHOLE, (2, 4, 8, 4), after="Concat"),
    ),
    Case("reduce.rank", reduce_max(2, 3), reduce_max(2, 3, out_shape=(2, 8))),
    Case(
        "reduce.axes",
        reduce_max(1, 2, 3, out_shape=(2, 1, 1, 1)),
        reduce_max(0, out_shape=(1, 8, 4, 4)),
    ),
    Case("layer.rank", concat(), one_node("Concat", [(1, 8, 4), (1, 8, 4)], (1, 16, 4), axis=1)),
    Case("P1", conv(), conv(), precision="fp16", passes_on=(V2, "int8", None)),
    Case("P1", conv(), conv(), precision="fp16", passes_on=(V1, "fp16", None)),
)
