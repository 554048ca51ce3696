"""Legalising rewrites where it helps and only there, says what it did, and leaves the rest."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from gpu_graphs import ints
from legalize_graphs import (
    ORIN,
    XAVIER,
    Net,
    assert_same,
    feeds_of,
    floats,
    legalized,
    node,
    refused,
    run,
    to_ir,
)
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from planning_graphs import one_node

from device.engine.manifest import Precision
from device.profile import Dla
from toolkit.dla.legalize.legalize import legalize, would_help
from toolkit.dla.legalize.rewrite import Legalized
from toolkit.dla.legalize.rows import REWRITES
from toolkit.dla.rules.ops import STATUS
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model


def bytes_of(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString(deterministic=True)


def classifier(rng: np.random.Generator) -> Net:
    weights = {
        "w": floats(rng, 8, 3, 3, 3),
        "v": floats(rng, 8, 10),
        "bias": floats(rng, 10),
    }
    nodes = [
        node("Conv", "x w", "c", pads=[1] * 4, name="stem"),
        node("HardSwish", "c", "h", name="act"),
        node("GlobalAveragePool", "h", "p", name="pool"),
        node("Flatten", "p", "f", name="flat"),
        node("Gemm", "f v bias", "logits", name="fc"),
    ]
    return Net(nodes, {"x": (1, 3, 14, 14)}, weights)


def test_a_classifier_keeps_only_its_last_view_off_the_dla(rng: np.random.Generator) -> None:
    proto, result = legalized(classifier(rng))
    assert [item.rewrite for item in result.applied] == ["hard-swish", "mean.cascade", "lift"]
    assert [item.node for item in result.applied] == ["act", "pool", "flat"]
    assert [item.verdict.rule for item in result.applied] == ["op.not-exposed"] * 3
    assert result.applied[-1].replaced == ("flat", "fc")
    assert result.applied[-1].nodes == ("fc_Conv", "fc_Reshape")
    assert refused(result.model, ORIN, "10.3.0") == {"fc_Reshape": "shuffle.rank"}
    assert [value.name for value in result.model.graph.outputs] == ["logits"]
    assert_same(proto, result, rng, exact=False)


def test_the_model_given_is_not_changed(rng: np.random.Generator) -> None:
    model = to_ir(classifier(rng).proto())
    before = bytes_of(model)
    assert ORIN is not None
    assert legalize(model, ORIN, None, "int8").applied
    assert bytes_of(model) == before


def test_the_same_model_is_rewritten_in_the_same_way(rng: np.random.Generator) -> None:
    proto = classifier(rng).proto()
    assert ORIN is not None
    first, second = (legalize(to_ir(proto), ORIN, None, "int8") for _ in range(2))
    assert bytes_of(first.model) == bytes_of(second.model)
    assert first.applied == second.applied


def test_what_is_legal_stays_as_it_is(rng: np.random.Generator) -> None:
    _, once = legalized(classifier(rng))
    assert ORIN is not None
    again = legalize(once.model, ORIN, "10.3.0", "int8")
    assert again.applied == ()
    assert bytes_of(again.model) == bytes_of(once.model)


def test_rewrites_can_be_limited_to_some_nodes(rng: np.random.Generator) -> None:
    net = classifier(rng)
    _, whole = legalized(net)
    for item in whole.applied:
        proto, part = legalized(net, only=frozenset({item.node}))
        assert [(a.rewrite, a.node) for a in part.applied] == [(item.rewrite, item.node)]
        assert_same(proto, part, rng, exact=False)
    proto, none = legalized(net, only=frozenset())
    assert none.applied == ()
    assert bytes_of(none.model) == bytes_of(to_ir(proto))


def test_a_name_does_not_depend_on_what_was_tried_in_vain(rng: np.random.Generator) -> None:
    """The ranges of a table are kept by name, whichever rewrites are chosen."""
    net = classifier(rng)
    _, whole = legalized(net)
    _, part = legalized(net, only=frozenset({"pool"}))
    assert part.applied[0].nodes == next(a.nodes for a in whole.applied if a.node == "pool")


def test_new_values_have_shapes_and_types(rng: np.random.Generator) -> None:
    _, result = legalized(classifier(rng))
    for item in result.model.graph:
        for value in item.outputs:
            assert value.dtype == ir.DataType.FLOAT
            assert value.shape is not None
            assert all(isinstance(size, int) for size in value.shape)


def test_constants_that_nothing_reads_are_gone(rng: np.random.Generator) -> None:
    _, result = legalized(classifier(rng))
    values = result.model.graph.initializers.values()
    assert [value.name for value in values if not list(value.uses())] == []


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_nothing_is_rewritten_where_no_new_node_would_run(
    precision: Precision, rng: np.random.Generator
) -> None:
    """FP32 never runs on the DLA, and planning keeps FP16 convolutions off the DLA of Orin."""
    proto, result = legalized(classifier(rng), precision=precision)
    assert "lift" not in {item.rewrite for item in result.applied}
    if precision == "fp32":
        assert bytes_of(result.model) == bytes_of(to_ir(proto))


def test_half_precision_models_keep_their_type(rng: np.random.Generator) -> None:
    net = Net([node("HardSwish", "x", "y")], {"x": (1, 4, 5, 5)}, dtype=TensorProto.FLOAT16)
    proto, result = legalized(net, precision="fp16")
    assert [item.rewrite for item in result.applied] == ["hard-swish"]
    feeds = feeds_of(proto, rng)
    expected = ReferenceEvaluator(proto).run(None, feeds)[0]
    actual = run(ir.to_proto(result.model), feeds)[0]
    assert actual.dtype == np.float16
    np.testing.assert_allclose(actual, expected, atol=2e-2)  # a few roundings of 1e-3, values to 10


def test_an_output_of_the_model_keeps_its_value_and_its_name(rng: np.random.Generator) -> None:
    nodes = [
        node("Relu", "x", "r"),
        node("GlobalAveragePool", "r", "mean"),
        node("Neg", "mean", "y"),
    ]
    net = Net(nodes, {"x": (1, 4, 16, 16)}, outputs=["mean", "y", "r"])
    proto, result = legalized(net)
    assert [value.name for value in result.model.graph.outputs] == ["mean", "y", "r"]
    assert_same(proto, result, rng, exact=False)


def test_a_view_with_other_readers_is_not_paid_for(rng: np.random.Generator) -> None:
    """The Flatten stays for the other reader; a second one would only add to the GPU."""
    nodes = [
        node("Relu", "x", "r"),
        node("Flatten", "r", "f"),
        node("Gemm", "f w", "g", name="fc"),
        node("Erf", "f", "e"),
    ]
    net = Net(nodes, {"x": (1, 4, 1, 1)}, {"w": floats(rng, 4, 3)}, outputs=["g", "e"])
    _, result = legalized(net)
    assert result.applied == ()


def test_a_reshape_beside_a_new_slice_would_be_lost(rng: np.random.Generator) -> None:
    """A Reshape directly at a Slice is refused (rule shuffle.neighbour): no node is won."""
    nodes = [
        node("ConvTranspose", "x w", "d", strides=[2, 2], pads=[1, 1, 1, 1], name="up"),
        node("Reshape", "d shape", "s", name="reshape"),
        node("Relu", "s", "y"),
    ]
    weights = {"w": floats(rng, 2, 2, 4, 4), "shape": ints(1, 2, 4, 16)}
    proto, result = legalized(Net(nodes, {"x": (1, 2, 4, 4)}, weights))
    assert [item.rewrite for item in result.applied] == ["deconv.conv"]
    reasons = {d.rewrite: d.reason for d in result.refused}
    assert reasons == {}  # the node got its rewrite, by another row
    assert refused(result.model, ORIN, "10.3.0") == {}
    assert_same(proto, result, rng, exact=False)


@dataclass(frozen=True)
class Unfit:
    """A node, a rewrite of its operator that does not hold there, and what it says."""

    node: onnx.NodeProto
    rewrite: str
    reason: str
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    shape: tuple[int, ...] = (1, 2, 5, 5)
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dla: Dla | None = ORIN


LINEAR = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
AVERAGE = {"kernel_shape": [9, 9], "pads": [1] * 4}
UNFIT = (
    Unfit(node("ReduceMean", "x a", "y"), "mean.window", "12x4 takes 2 windows",
          {"a": ints(2, 3)}, (1, 2, 12, 4)),
    Unfit(node("ReduceMean", "x a", "y"), "mean.cascade", "221x4 has no factors of at most 8",
          {"a": ints(2, 3)}, (1, 2, 13 * 17, 4)),
    Unfit(node("ReduceMean", "x a", "y"), "mean.conv", "window 33x4 is larger than 32x32",
          {"a": ints(2, 3)}, (1, 2, 33, 4)),
    Unfit(node("ReduceMean", "x a", "y"), "mean.padded", "refused by G4", {"a": ints(2)},
          (1, 2, 8193, 4)),
    Unfit(node("ReduceMean", "x a", "y"), "mean.window", "over height or width alone",
          {"a": ints(0)}),
    Unfit(node("ReduceMean", "x a", "y"), "mean.channels", "refused by G4",
          {"a": ints(1)}, (1, 8193, 2, 2)),
    Unfit(node("MaxPool", "x", "y", kernel_shape=[9, 9], dilations=[2, 2]), "max-pool.cascade",
          "the window is dilated", shape=(1, 2, 30, 30)),
    Unfit(node("MaxPool", "x", "y", kernel_shape=[9, 9], ceil_mode=1), "max-pool.cascade",
          "rounds its size up", shape=(1, 2, 30, 30)),
    Unfit(node("AveragePool", "x", "y", **AVERAGE), "average-pool.conv",
          "padding is left out of the averages", shape=(1, 2, 30, 30)),
    Unfit(node("AveragePool", "x", "y", **AVERAGE), "average-pool.cascade",
          "windows overlap or are padded", shape=(1, 2, 30, 30)),
    Unfit(node("AveragePool", "x", "y", kernel_shape=[33, 1]), "average-pool.conv",
          "window 33x1 is larger than 32x32", shape=(1, 2, 40, 40)),
    Unfit(node("ConvTranspose", "x w", "y", pads=[1] * 4), "deconv.slice",
          "it needs constant weights", others={"w": (2, 2, 3, 3)}),
    Unfit(node("Clip", "x l u", "y"), "clip", "bounds 3 and 2 leave nothing to clip",
          {"l": np.float32(3), "u": np.float32(2)}),
    Unfit(node("Clip", "x", "y"), "clip", "leave nothing to clip"),
    Unfit(node("Resize", "x - s", "y"), "resize.nearest", "scales 1.5 and 1.5",
          {"s": np.array([1, 1, 1.5, 1.5], np.float32)}, (1, 2, 4, 4)),
    Unfit(node("Resize", "x - s", "y"), "resize.nearest", "refused by resize.nearest",
          {"s": np.array([1, 1, 33, 1], np.float32)}),
    Unfit(node("Resize", "x - - s", "y", **LINEAR), "resize.linear",
          "its coordinates are not those of half_pixel", {"s": ints(1, 2, 10, 10)}),
    Unfit(node("Resize", "x - s", "y", mode="nearest", nearest_mode="ceil"), "resize.nearest",
          "no mode that copies the same", {"s": np.array([1, 1, 2, 2], np.float32)}),
    Unfit(node("Pad", "x p", "y", mode="reflect"), "pad.conv", "the padding is not of zeros",
          {"p": ints(0, 0, 1, 1, 0, 0, 1, 1)}),
    Unfit(node("Pad", "x p", "y"), "pad.conv", "batch or channels are padded",
          {"p": ints(0, 1, 1, 1, 0, 0, 1, 1)}),
    Unfit(node("Pad", "x p", "y"), "pad.conv", "refused by conv.kernel",
          {"p": ints(0, 0, 16, 1, 0, 0, 16, 1)}),
    Unfit(node("Concat", "x z", "y", axis=0), "concat.transpose", "rows or columns as its axis",
          others={"z": (1, 2, 5, 5)}),
    Unfit(node("Slice", "x s e a t", "y"), "slice.conv", "a window of 45 and a stride of 2",
          {"s": ints(40), "e": ints(60), "a": ints(2), "t": ints(2)}, (1, 2, 64, 5)),
    Unfit(node("Slice", "x s e a t", "y"), "slice.conv", "step -1 turns an axis round",
          {"s": ints(8), "e": ints(0), "a": ints(2), "t": ints(-1)}, (1, 2, 9, 5)),
    Unfit(node("Gather", "x i", "y", axis=2), "gather.slice", "indices do not follow",
          {"i": ints(2, 1)}),
    Unfit(node("CumSum", "x a", "y"), "cumsum.conv", "axis that is the channels",
          {"a": np.array(2)}),
    Unfit(node("SpaceToDepth", "x", "y", blocksize=9), "space-to-depth.conv",
          "refused by conv.stride", shape=(1, 2, 18, 18)),
    Unfit(node("DepthToSpace", "x", "y", blocksize=23), "depth-to-space.deconv",
          "refused by deconv.square", shape=(1, 529, 1, 1)),
    Unfit(node("Div", "x z", "y"), "div.constant", "the divisor is computed",
          others={"z": (1, 2, 5, 5)}, dla=XAVIER),
    Unfit(node("Pow", "x e", "y"), "pow.mul", "the exponent is not 2, 3 or 4",
          {"e": np.float32(0.5)}, dla=XAVIER),
    Unfit(node("PRelu", "x s", "y"), "prelu.rank", "the slope is not constant",
          others={"s": (2, 1, 1)}),
    Unfit(node("Expand", "x s", "y"), "expand", "a scale of 33 is above 32",
          {"s": ints(1, 2, 33, 5)}, (1, 2, 1, 5)),
    Unfit(node("Tile", "x s", "y"), "expand", "repeats an axis that is longer than 1",
          {"s": ints(1, 2, 1, 1)}),
)  # fmt: skip


@pytest.mark.parametrize("case", UNFIT, ids=lambda case: f"{case.rewrite}: {case.reason}")
def test_a_rewrite_that_does_not_hold_says_why(case: Unfit) -> None:
    """Kept to no node at all, every row of an operator is tried, and each says why not."""
    net = Net([case.node], {"x": case.shape, **case.others}, case.constants)
    tensorrt = "10.3.0" if case.dla is ORIN else "8.5.2"
    _, result = legalized(net, case.dla, tensorrt, only=frozenset())
    reasons = {declined.rewrite: declined.reason for declined in result.refused}
    assert case.reason in reasons[case.rewrite]


def test_a_division_by_zero_stays_a_division() -> None:
    weights = {"c": np.array([[[[1.0]], [[0.0]]]], np.float32)}
    net = Net([node("Div", "x c", "y")], {"x": (1, 2, 5, 5)}, weights)
    _, result = legalized(net, XAVIER, "8.5.2")
    assert result.applied == ()
    assert [d.reason for d in result.refused if d.rewrite == "div.constant"] == [
        "the reciprocal of the divisor is no ordinary number of its type"
    ]


def test_infinities_are_chosen_not_multiplied(rng: np.random.Generator) -> None:
    """0 times infinity is no number, so a mask of -inf keeps its Where."""
    weights = {
        "inf": np.full((1, 1, 1, 1), -np.inf, np.float32),
        "zero": np.zeros((1, 1, 1, 1), np.float32),
        "mask": rng.random((1, 3, 1, 1)) < 0.5,
    }
    nodes = [
        node("Where", "mask x inf", "w"),
        node("Greater", "x zero", "g"),
        node("Not", "g", "n"),
        node("Where", "n w inf", "y"),
    ]
    proto, result = legalized(Net(nodes, {"x": (1, 3, 4, 4)}, weights))
    assert [item.op_type for item in result.model.graph].count("Where") == 2
    assert_same(proto, result, rng, exact=True)


def test_a_bound_that_halves_cannot_hold_stays_off_the_dla() -> None:
    """Its rewrite would need a constant beyond FP16 (rule G17)."""
    weights = {"l": np.float32(-70000), "u": np.float32(5)}
    net = Net([node("Clip", "x l u", "y")], {"x": (1, 1, 2, 2)}, weights)
    _, result = legalized(net)
    assert result.applied == ()
    assert [item.op_type for item in result.model.graph] == ["Clip"]


def test_padding_that_no_reader_can_take_stays(rng: np.random.Generator) -> None:
    """The Conv is refused with the padding of the Pad (rule conv.padding): the attempt ends."""
    nodes = [node("Pad", "x p", "q"), node("Conv", "q w", "y")]
    weights = {"p": ints(0, 0, 40, 0, 0, 0, 40, 0), "w": floats(rng, 2, 2, 3, 3)}
    _, result = legalized(Net(nodes, {"x": (1, 2, 9, 9)}, weights))
    assert result.applied == ()
    assert (
        "refused by conv.padding" in {d.rewrite: d.reason for d in result.refused}["pad.into-conv"]
    )


def test_booleans_and_integers_are_left_alone() -> None:
    nodes = [node("Neg", "x", "y")]
    net = Net(nodes, {"x": (1, 2, 5, 5)}, dtype=TensorProto.INT32)
    assert legalized(net)[1].applied == ()


def test_operands_of_several_ranks_do_no_harm(rng: np.random.Generator) -> None:
    nodes = [
        node("Flatten", "x", "f"),
        node("Add", "f z", "a"),
        node("Gemm", "a w", "g"),
        node("Relu", "g", "y"),
    ]
    weights = {"w": floats(rng, 8, 3)}
    proto, result = legalized(Net(nodes, {"x": (1, 8, 1, 1), "z": (8,)}, weights))
    assert_same(proto, result, rng, exact=False)


def test_a_dynamic_batch_is_left_alone(rng: np.random.Generator) -> None:
    proto = classifier(rng).proto()
    for value in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    assert ORIN is not None
    assert legalize(to_ir(proto), ORIN, None, "int8").applied == ()


def yolo_head(rng: np.random.Generator) -> Net:
    weights = {
        "w": floats(rng, 24, 3, 1, 1),
        "flat": ints(1, 24, 96 * 96),
        "v": floats(rng, 4, 4, 1, 1),
        "back": ints(1, 4, 6, 96 * 96),
    }
    nodes = [
        node("Conv", "x w", "c", name="conv"),
        node("Sigmoid", "c", "s", name="sigmoid"),
        node("Reshape", "s flat", "f", name="flatten"),
        node("Reshape", "f back", "b", name="back"),
        node("Conv", "b v", "d", name="dfl"),
        node("ReduceMax", "d", "y", keepdims=1, name="max"),
    ]
    return Net(nodes, {"x": (1, 3, 96, 96)}, weights)


def test_a_head_is_cut_before_the_tensor_that_is_too_long(rng: np.random.Generator) -> None:
    _, result = legalized(yolo_head(rng))
    (cut,) = result.cuts
    assert cut.node == "flatten"
    assert cut.tensors == ("s",)
    assert cut.below == ("back", "dfl", "max")


def test_a_sigmoid_below_a_long_view_moves_above_it(rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", "x w", "c"),
        node("Reshape", "c flat", "f"),
        node("Transpose", "f", "t", perm=[0, 2, 1]),
        node("Sigmoid", "t", "y"),
    ]
    weights = {"w": floats(rng, 4, 3, 1, 1), "flat": ints(1, 4, 96 * 96)}
    proto, result = legalized(Net(nodes, {"x": (1, 3, 96, 96)}, weights))
    assert [item.rewrite for item in result.applied] == ["view.unary"]
    assert [item.op_type for item in result.model.graph] == [
        "Conv", "Sigmoid", "Reshape", "Transpose",
    ]  # fmt: skip
    assert_same(proto, result, rng, exact=True)


def test_would_help_names_the_rewrites_of_an_operator() -> None:
    pooled = one_node("GlobalAveragePool", [(1, 8, 20, 20)], (1, 8, 1, 1))
    assert would_help(pooled) == ("lift", "mean.window", "mean.cascade", "mean.conv", "mean.padded")
    assert would_help(one_node("NonMaxSuppression", [(1, 4, 4)], (1, 3))) == ()


def test_rows_are_complete_and_name_known_operators() -> None:
    ids = [row.id for row in REWRITES]
    assert len(set(ids)) == len(ids)
    later = {"Gelu", "Swish"}  # newer than the operator matrix
    for row in REWRITES:
        assert row.equation
        assert row.needs
        assert row.source
        assert row.precision
        assert row.ops <= {*STATUS, *later, "Pad", "Upsample"}, row.id


@pytest.mark.parametrize(
    ("op", "opset", "attributes", "rewrite"),
    [
        ("Gelu", 20, {"approximate": "tanh"}, "gelu.tanh"),
        ("Swish", 24, {"alpha": 1.5}, "swish"),
        ("Swish", 24, {}, "swish"),
    ],
)
def test_newer_activations_match_the_onnx_reference(
    op: str, opset: int, attributes: dict[str, object], rewrite: str, rng: np.random.Generator
) -> None:
    for shape in [(1, 2, 3, 4), (2, 5, 7, 1)]:
        net = Net([node(op, "x", "y", **attributes)], {"x": shape}, opset=opset)
        proto, result = legalized(net)
        assert [item.rewrite for item in result.applied] == [rewrite]
        feeds = feeds_of(proto, rng)
        (expected,) = ReferenceEvaluator(proto).run(None, feeds)
        (actual,) = ReferenceEvaluator(ir.to_proto(result.model)).run(None, feeds)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_exact_gelu_is_not_replaced_by_its_approximation() -> None:
    net = Net([node("Gelu", "x", "y")], {"x": (1, 2, 3, 4)}, opset=20)
    _, result = legalized(net)
    assert result.applied == ()
    assert "erf" in next(d.reason for d in result.refused if d.rewrite == "gelu.tanh")


LIGHT = (
    pytest.param("resnet50", ORIN, marks=pytest.mark.slow),
    ("squeezenet", ORIN),
    ("squeezenet", XAVIER),
    ("shufflenet", ORIN),
    pytest.param("shufflenet", XAVIER, marks=pytest.mark.slow),
    ("inception_v1", ORIN),
)


@pytest.mark.parametrize(("name", "dla"), LIGHT)
def test_light_models_gain_nodes_and_keep_their_numbers(
    light_models: Path, name: str, dla: Dla | None
) -> None:
    model, _ = run_passes(import_model(light_models / f"light_{name}.onnx").model)
    assert dla is not None
    result = legalize(model, dla, None, "int8")
    before, after = refused(model, dla, None), refused(result.model, dla, None)
    assert len(after) < len(before)
    assert_all_borders(result, after)
    rng = np.random.default_rng(7)
    proto = ir.to_proto(model)
    feeds = feeds_of(proto, rng)
    expected, actual = run(proto, feeds)[0], run(ir.to_proto(result.model), feeds)[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-6)


def mobile(rng: np.random.Generator) -> Net:
    """Inverted residuals with squeeze-and-excite, in the activations of MobileNetV3."""
    weights = {
        "stem": floats(rng, 16, 3, 3, 3),
        "deep": floats(rng, 16, 1, 3, 3),
        "down": floats(rng, 8, 16, 1, 1),
        "up": floats(rng, 16, 8, 1, 1),
        "last": floats(rng, 32, 16, 1, 1),
        "fc1": floats(rng, 32, 24),
        "fc2": floats(rng, 24, 10),
        "three": np.float32(3),
        "zero": np.float32(0),
        "six": np.float32(6),
    }
    nodes = [
        node("Conv", "x stem", "c", strides=[2, 2], pads=[1] * 4),
        node("HardSwish", "c", "h"),
        node("Conv", "h deep", "d", group=16, pads=[1] * 4),
        node("Relu", "d", "r"),
        node("GlobalAveragePool", "r", "p"),
        node("Conv", "p down", "q"),
        node("Relu", "q", "s"),
        node("Conv", "s up", "t"),
        node("HardSigmoid", "t", "g", alpha=1 / 6),
        node("Mul", "g r", "m"),
        node("Add", "m h", "a"),
        node("Conv", "a last", "l"),
        node("Add", "l three", "l3"),  # HardSwish as older exporters write it
        node("Clip", "l3 zero six", "l6"),
        node("Div", "l6 six", "gate"),
        node("Mul", "l gate", "w"),
        node("ReduceMean", "w", "v", axes=[2, 3], keepdims=0),
        node("Gemm", "v fc1", "f"),
        node("HardSwish", "f", "hf"),
        node("Gemm", "hf fc2", "y"),
    ]
    return Net(nodes, {"x": (1, 3, 52, 52)}, weights, opset=17)


def detector(rng: np.random.Generator) -> Net:
    """Focus, SiLU, pyramid pooling, two scales with Resize by sizes, and a long head."""
    weights = {
        "zero": ints(0), "one": ints(1), "big": ints(2**31), "rows": ints(2), "columns": ints(3),
        "two": ints(2), "stem": floats(rng, 8, 12, 3, 3), "mid": floats(rng, 8, 24, 1, 1),
        "deep": floats(rng, 8, 8, 3, 3), "head": floats(rng, 12, 16, 1, 1),
        "size": ints(1, 8, 64, 64), "split": ints(1, 2, 6, 64 * 64),
        "flat": ints(1, 2 * 64 * 64, 6),
    }  # fmt: skip
    nodes = []
    for i, a in enumerate(("zero", "one")):
        nodes.append(node("Slice", f"x {a} big rows two", f"row{i}"))
        for j, b in enumerate(("zero", "one")):
            nodes.append(node("Slice", f"row{i} {b} big columns two", f"p{i}{j}"))
    nodes += [
        node("Concat", "p00 p10 p01 p11", "f", axis=1),
        node("Conv", "f stem", "c", pads=[1] * 4),
        node("Sigmoid", "c", "s"),
        node("Mul", "c s", "silu"),
        node("Conv", "silu deep", "half", strides=[2, 2], pads=[1] * 4),
        node("MaxPool", "half", "m9", kernel_shape=[9, 9], pads=[4] * 4),
        node("MaxPool", "half", "m13", kernel_shape=[13, 13], pads=[6] * 4),
        node("Concat", "half m9 m13", "spp", axis=1),
        node("Conv", "spp mid", "low"),
        node("Resize", "low - - size", "up", mode="nearest", nearest_mode="floor",
             coordinate_transformation_mode="asymmetric"),
        node("Concat", "up silu", "both", axis=1),
        node("Conv", "both head", "h", name="head"),
        node("Reshape", "h split", "hs", name="split"),
        node("Sigmoid", "hs", "prob"),
        node("Transpose", "prob", "turned", perm=[0, 1, 3, 2], name="turn"),
        node("Reshape", "turned flat", "y", name="join"),
    ]  # fmt: skip
    return Net(nodes, {"x": (1, 3, 128, 128)}, weights)


def test_a_mobile_network_runs_whole_but_for_its_last_view(rng: np.random.Generator) -> None:
    proto, result = legalized(mobile(rng))
    assert len(refused(to_ir(proto), ORIN, "10.3.0")) == 5
    borders = {name for item in result.applied for name in item.borders}
    assert set(refused(result.model, ORIN, "10.3.0")) <= borders
    assert len(borders) <= 2
    assert_close(proto, result, rng)


def test_a_detector_leaves_its_long_head_alone(rng: np.random.Generator) -> None:
    """The head is [1, 2, 6, 4096]; its last view makes 8192 rows, of rank 3."""
    proto, result = legalized(detector(rng))
    reasons_left = refused(result.model, ORIN, "10.3.0")
    assert set(reasons_left) == {"join"}
    done = {item.rewrite for item in result.applied}
    assert done == {"focus.conv", "max-pool.cascade", "resize.nearest"}
    assert_close(proto, result, rng)


def assert_close(proto: onnx.ModelProto, result: Legalized, rng: np.random.Generator) -> None:
    """The numbers agree as float32 carries them through a whole network."""
    feeds = feeds_of(proto, rng)
    expected, actual = run(proto, feeds)[0], run(ir.to_proto(result.model), feeds)[0]
    np.testing.assert_allclose(
        actual, expected, rtol=1e-3, atol=1e-4 * float(np.abs(expected).max())
    )


def assert_all_borders(result: Legalized, reasons_left: dict[str, str]) -> None:
    """What is left off the DLA is a view at an edge, or was refused before and is still there."""
    borders = {name for item in result.applied for name in item.borders}
    replaced = {name for item in result.applied for name in item.nodes}
    assert {name for name in reasons_left if name in replaced} <= borders


def test_the_checker_accepts_what_is_made(rng: np.random.Generator) -> None:
    _, result = legalized(classifier(rng))
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
