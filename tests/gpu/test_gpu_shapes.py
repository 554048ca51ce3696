"""Formulas of shapes, against the shapes that onnxruntime makes at sizes never looked at before."""

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from gpu_graphs import Case, ints, node
from onnx import helper

from device.engine.cuda_sizes import evaluate
from device.engine.manifest import DimRange
from toolkit.gpu.shapes import shape_rules
from toolkit.gpu.shapes.inference import Known, Trace, infer_sizes, traces_of, with_steps
from toolkit.gpu.shapes.sizes import Space, amount

Rng = np.random.Generator
DIMS = (
    DimRange(name="n", min=1, opt=2, max=5),
    DimRange(name="h", min=8, opt=12, max=40),
    DimRange(name="w", min=8, opt=10, max=33),
)
FAR = 1 << 40


def case(*nodes: onnx.NodeProto, outputs: Sequence[str] = ("y",), **weights: object) -> Case:
    result = {
        name: np.array(value, np.float32 if isinstance(value, (float, list)) else np.int64)
        if not isinstance(value, np.ndarray)
        else value
        for name, value in weights.items()
    }
    return Case(list(nodes), {"x": ("n", 8, "h", "w")}, result, outputs)


def many(op: str, inputs: list[str], outputs: list[str], **how: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, name=op, **how)


def weights(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


CASES: dict[str, Case] = {
    "convolution": case(
        node("Conv", "x k", "y", strides=[2, 3], pads=[1, 0, 2, 1], dilations=[1, 2]),
        k=weights(6, 8, 3, 2),
    ),
    "convolution, same size": case(
        node("Conv", "x k", "y", auto_pad="SAME_LOWER", strides=[3, 2]), k=weights(6, 8, 2, 5)
    ),
    "convolution, no pads": case(
        node("Conv", "x k", "y", auto_pad="VALID", strides=[3, 2]), k=weights(6, 8, 2, 5)
    ),
    "transposed convolution": case(
        node("ConvTranspose", "x k", "y", strides=[2, 3], pads=[1, 0, 0, 1], output_padding=[1, 2]),
        k=weights(8, 3, 3, 4),
    ),
    "pooling": case(node("MaxPool", "x", "y", kernel_shape=[3, 2], strides=[2, 2])),
    "pooling, partial windows": case(
        node("AveragePool", "x", "y", kernel_shape=[3, 2], strides=[2, 2], ceil_mode=1,
             pads=[1, 0, 1, 0])
    ),
    "joined": case(
        node("Shape", "x", "s"),
        node("Expand", "one s", "c"),
        node("Concat", "x x c", "y", axis=-3),
        one=weights(1, 1, 1, 1),
    ),
    "joined rows": case(node("Concat", "x x", "y", axis=2)),
    "halves": case(many("Split", ["x"], ["a", "y"], axis=3, num_outputs=2)),
    "parts": case(many("Split", ["x", "p"], ["a", "y"], axis=1), p=ints(3, 5)),
    "slice": case(
        node("Slice", "x s e a t", "y"), s=ints(1, -3), e=ints(-2, FAR), a=ints(2, 3), t=ints(2, 1)
    ),
    "backwards": case(
        node("Slice", "x s e a t", "y"), s=ints(-1), e=ints(-FAR), a=ints(3), t=ints(-2)
    ),
    "around": case(node("Pad", "x p", "y"), p=ints(0, 1, 2, 3, 0, 0, 4, 0)),
    "flat": case(node("Flatten", "x", "y", axis=-2)),
    "another shape": case(node("Reshape", "x t", "y"), t=ints(0, 2, -1)),
    "a shape that is read": case(
        node("Shape", "x", "s", start=2),
        node("Concat", "a s", "t", axis=0),
        node("Reshape", "x t", "y"),
        a=ints(-1, 2, 4),
    ),
    "half of a size": case(
        node("Shape", "x", "s"),
        node("Gather", "s at", "h"),
        node("Div", "h two", "e"),
        node("Slice", "x zero e two_axis", "y"),
        at=ints(2), two=ints(2), zero=ints(0), two_axis=ints(2),
    ),
    "a size by cases": case(
        node("Shape", "x", "s"),
        node("Equal", "s minus", "q"),
        node("Where", "q minus s", "t"),
        node("Expand", "c t", "y"),
        minus=ints(-1), c=weights(1, 8, 1, 1),
    ),
    "repeated": case(node("Tile", "x r", "y"), r=ints(1, 2, 3, 1)),
    "scaled": case(
        many("Resize", ["x", "", "f"], ["y"], mode="nearest"),
        f=np.array([1, 1, 2, 0.5], np.float32),
    ),
    "scaled by thirds": case(
        many("Resize", ["x", "", "f"], ["y"], mode="linear"),
        f=np.array([1, 1, 4 / 3, 1.25], np.float32),
    ),
    "scaled to a size that is read": case(
        node("Shape", "x", "s"),
        node("Mul", "s f", "t"),
        many("Resize", ["x", "", "", "t"], ["y"], mode="nearest"),
        f=ints(1, 1, 3, 2),
    ),
    "blocks to pixels": case(node("DepthToSpace", "x", "y", blocksize=2)),
    "product": case(
        node("Transpose", "x", "t", perm=[0, 1, 3, 2]), node("MatMul", "x t", "y")
    ),
    "mean": case(node("ReduceMean", "x a", "y", keepdims=0), a=ints(1, 3)),
    "one of them": case(node("Gather", "x i", "y", axis=2), i=np.array(3, np.int64)),
    "best": case(
        many("TopK", ["x", "k"], ["y", "i"], axis=1), k=ints(3)
    ),
    "squeezed": case(
        node("ReduceMax", "x a", "r"), node("Squeeze", "r a", "s"), node("Unsqueeze", "s b", "y"),
        a=ints(1), b=ints(0, 4),
    ),
}  # fmt: skip


def shape_formulas(one: Case) -> tuple[object, ...]:
    trace = traces_of(DIMS)[0]
    known = infer_sizes(ir.from_proto(one.model()), trace)
    return tuple(amount(size) for size in known.shapes["y"])


@pytest.mark.parametrize("name", CASES)
def test_a_shape_is_what_onnxruntime_makes_at_any_sizes(name: str, rng: Rng) -> None:
    formulas = shape_formulas(CASES[name])
    model = CASES[name].model().SerializeToString()
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    for _ in range(6):
        point = [int(rng.integers(dim.min, dim.max + 1)) for dim in DIMS]
        feeds = {"x": np.zeros((point[0], 8, *point[1:]), np.float32)}
        (truth,) = session.run(["y"], feeds)
        assert tuple(evaluate(size, point) for size in formulas) == truth.shape


UNKNOWN = {
    "positions of what is not zero": case(node("NonZero", "x", "y")),
    "a shape that is data": case(
        node("ReduceMax", "x", "m", keepdims=0),
        helper.make_node("Cast", ["m"], ["i"], name="c", to=7),
        node("Unsqueeze", "i a", "t"),
        node("Tile", "v t", "y"),
        a=ints(0),
        v=weights(3),
    ),
    "an operator of others": Case(
        [helper.make_node("Odd", ["x"], ["y"], name="o", domain="others")],
        {"x": ("n", 8, "h", "w")},
        {},
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_formula_gives_is_left_out(name: str) -> None:
    one = UNKNOWN[name]
    graph = helper.make_graph(
        list(one.nodes),
        "g",
        [helper.make_tensor_value_info("x", 1, ["n", 8, "h", "w"])],
        [helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(value, key) for key, value in one.weights.items()],
    )
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid("others", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    assert "y" not in infer_sizes(ir.from_proto(model), traces_of(DIMS)[0]).shapes


def test_a_rule_that_onnx_contradicts_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shape_rules.RULES, "Flatten", lambda _: ((1, 2, 3, 4),))
    assert "y" not in infer_sizes(ir.from_proto(CASES["flat"].model()), traces_of(DIMS)[0]).shapes


def test_sizes_pass_from_one_segment_to_the_next() -> None:
    first = case(node("MaxPool", "x", "y", kernel_shape=[2, 2], strides=[2, 2]))
    trace = traces_of(DIMS)[0].after(ir.from_proto(first.model()))
    graph = helper.make_graph(
        [node("Concat", "y y", "z", axis=3)],
        "g",
        [helper.make_tensor_value_info("y", 1, ["n", 8, "unk__0", "unk__1"])],
        [helper.make_tensor_value_info("z", 1, None)],
    )
    known = infer_sizes(ir.from_proto(helper.make_model(graph)), trace)
    assert [amount(size) for size in known.shapes["z"]] == ["d0", 8, "(d1//2)", "2*(d2//2)"]


def test_segments_are_lowered_at_the_ends_and_between() -> None:
    points = [trace.space.point for trace in traces_of(DIMS)]
    assert points[0] == (2, 12, 10)
    assert {(n, h, w) for n in (1, 5) for h in (8, 40) for w in (8, 33)} < set(points)
    assert len(set(points)) == len(points) > 9
    assert any(h % 2 and 8 < h < 40 for _, h, _ in points)


def test_lowering_points_are_multiples_of_steps() -> None:
    dims = (DimRange(name="h", min=32, opt=96, max=320, step=32),)
    points = [trace.space.point[0] for trace in traces_of(dims)]
    assert len(points) > 3
    assert all(point % 32 == 0 for point in points)


def test_steps_are_the_least_that_make_scales_fit(rng: Rng) -> None:
    one = case(
        node("MaxPool", "x", "a", kernel_shape=[2, 2], strides=[2, 2]),
        node("MaxPool", "a", "b", kernel_shape=[2, 2], strides=[2, 2]),
        many("Resize", ["b", "", "f"], ["u"], mode="nearest"),
        node("Add", "u a", "y"),
        f=np.array([1, 1, 2, 2], np.float32),
    )
    dims = tuple(DimRange(name=name, min=8, opt=16, max=32) for name in ("n", "h", "w"))
    pieces = [ir.from_proto(one.model())]
    assert [dim.step for dim in with_steps(pieces, dims)] == [1, 4, 4]
    odd = (*dims[:2], DimRange(name="w", min=8, opt=16, max=33))
    assert [dim.step for dim in with_steps(pieces, odd)] == [1, 1, 1]


def test_values_of_sizes_are_known_in_the_type_that_onnx_gives_them() -> None:
    nodes = [node("Shape", "x", "s"), node("Gather", "s at", "y")]
    one = Case(nodes, {"x": ("n", 8, "h", "w")}, {"at": ints(1)}, dtypes={"y": "int64"})
    space = Space(DIMS, (2, 12, 10))
    known: Known = infer_sizes(ir.from_proto(one.model()), Trace(space))
    assert known.constant("y").dtype == np.int64
    assert known.constant("y").tolist() == [8]
    assert known.constant("s").dtype == object
