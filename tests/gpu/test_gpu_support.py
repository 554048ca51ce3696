"""What the GPU backend says of nodes before anything is cut or lowered."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from gpu_graphs import Case, node, normal
from onnx import helper

from toolkit.gpu.emit.top_k import MAX_RANKED, MAX_SELECTED
from toolkit.gpu.ir.elementwise_ops import OPERATORS
from toolkit.gpu.operations import MAX_INDICES, MAX_STEPS, OPERATIONS
from toolkit.gpu.support import ask_support

Rng = np.random.Generator


def refusals(case: Case, result: tuple[int, ...] | None = None, **how: object) -> dict[str, str]:
    """Ask for a case; `result`: the shape of "y", where inference does not find it."""
    model = ir.from_proto(case.model())
    if result is not None:
        model.graph.outputs[0].shape = ir.Shape(result)
    return dict(ask_support(model, **how).refused)


REGIONS = {"x": (1, 2, 6, 6), "r": (3, 4), "b": (3,)}
OF_IMAGES = {"b": "int64"}


def roi_align(**how: object) -> onnx.NodeProto:
    """Regions that are averaged over one bin, unless `how` says otherwise."""
    return node("RoiAlign", "x r b", "y", coordinate_transformation_mode="half_pixel", **how)


HEADS = {"q": (1, 4, 8, 256), "k": (1, 4, 8, 256), "v": (1, 4, 8, 256)}
REFUSED = {
    "an operator without kernel": (
        Case([node("Det", "x", "y")], {"x": (2, 3, 3)}, {}),
        "'Det:y' (Det) has no kernel yet",
    ),
    "results whose size depends on numbers": (
        Case([node("NonZero", "x", "y")], {"x": (2, 3)}, {}, dtypes={"y": "int64"}),
        "depends on the numbers",
    ),
    "tensors of unknown shape": (
        Case([node("Relu", "x", "y")], {"x": ("rows", 3)}, {}),
        "'x' has the shape [rows,3], which no formula gives",
    ),
    "four spatial dimensions": (
        Case(
            [node("Conv", "x w", "y")],
            {"x": (1, 2, 3, 3, 3, 3)},
            {"w": np.ones((2, 2, 1, 1, 1, 1), np.float32)},
        ),
        "has 4 spatial dimensions; kernels take 1 to 3",
    ),
    "more indices than kernels read": (
        Case(
            [node("GatherND", "x i", "y")],
            {"x": (2,) * (MAX_INDICES + 1)},
            {"i": np.zeros((3, MAX_INDICES + 1), np.int64)},
        ),
        f"takes {MAX_INDICES + 1} indices for an element",
    ),
    "cubic samples of volumes": (
        Case(
            [node("GridSample", "x g", "y", mode="bicubic")],
            {"x": (1, 2, 3, 3, 3), "g": (1, 2, 2, 2, 3)},
            {},
            opset=19,
        ),
        "samples 3 dimensions (cubic)",
    ),
    "the largest samples of regions": (
        Case([roi_align(mode="max", sampling_ratio=2)], REGIONS, {}, dtypes=OF_IMAGES),
        "takes the largest sample of a bin",
    ),
    "regions with samples by their size": (
        Case([roi_align()], REGIONS, {}, dtypes=OF_IMAGES),
        "has as many samples as a region is large",
    ),
    "regions without a word on corners": (
        Case([node("RoiAlign", "x r b", "y", sampling_ratio=2)], REGIONS, {}, dtypes=OF_IMAGES),
        "leaves coordinate_transformation_mode to its opset",
    ),
    "computed weights of a transposed convolution": (
        Case([node("ConvTranspose", "x w", "y")], {"x": (1, 2, 3, 3), "w": (2, 2, 1, 1)}, {}),
        "has weights that are not constant ('w')",
    ),
    "a diagonal of an Einsum": (
        Case([node("Einsum", "x", "y", equation="...ii ->...i")], {"x": (3, 5, 5)}, {}),
        "has the equation '...ii ->...i' of 1 tensors",
    ),
    "sizes of an Einsum that differ": (
        Case([node("Einsum", "x w", "y", equation="ab,bc->ac")], {"x": (2, 3), "w": (4, 5)}, {}),
        "has sizes 3 and 4 of b",
    ),
    "a part of a Split that has no name": (
        Case(
            [helper.make_node("Split", ["x"], ["y", ""], name="s", num_outputs=2)],
            {"x": (4,)},
            {},
            opset=18,
        ),
        "has a result without a name",
    ),
    "texts": (
        Case(
            [node("Equal", "x w", "y")],
            {"x": (2,), "w": (2,)},
            {},
            dtypes={"x": "object", "w": "object", "y": "bool"},
            opset=19,
        ),
        "reads 'x' of type",
    ),
    "products of scattered numbers": (
        Case(
            [node("ScatterND", "x i u", "y", reduction="mul")],
            {"x": (4,), "u": (2,)},
            {"i": np.array([[1], [3]])},
            opset=18,
        ),
        "joins by 'mul'; kernels join by add, max, min",
    ),
    "more columns than are ranked": (
        Case(
            [helper.make_node("TopK", ["x", "k"], ["y", "i"], name="t")],
            {"x": (1, MAX_RANKED + 1)},
            {"k": np.array([MAX_SELECTED + 1])},
        ),
        f"selects {MAX_SELECTED + 1} from {MAX_RANKED + 1} elements; kernels take {MAX_RANKED}",
    ),
    "dropout in training": (
        Case(
            [node("Dropout", "x r t", "y")],
            {"x": (2, 3)},
            {"r": np.array(0.5, np.float32), "t": np.array(True)},
        ),
        "is in training mode",
    ),
    "scales of blocks that are computed": (
        Case(
            [node("QuantizeLinear", "x s", "y", axis=1, block_size=2)],
            {"x": (2, 4), "s": (2, 2)},
            {},
            dtypes={"y": "uint8"},
            opset=21,
        ),
        "has blocks with scales of their own, 's', that are not constant",
    ),
    "a border of a computed number": (
        Case(
            [node("ReduceMax", "x", "m", keepdims=0), node("Pad", "x p m", "y")],
            {"x": (2, 3)},
            {"p": np.array([0, 1, 0, 1])},
        ),
        "'Pad:y' (Pad) reads 'm', which is computed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_node_alone_tells_is_refused(name: str) -> None:
    case, text = REFUSED[name]
    (reason,) = refusals(case).values()
    assert text in reason


def test_an_operator_that_others_define_is_asked_as_those() -> None:
    """Heads that are deeper than a block of attention, by MatMul and Softmax."""
    case = Case([node("Attention", "q k v", "y")], HEADS, {}, opset=23)
    supported = ask_support(ir.from_proto(case.model()))
    assert not supported.refused
    kinds = {one.op_type for one in supported.model.graph}
    assert {"MatMul", "Softmax"} <= kinds
    assert "Attention" not in kinds


def test_a_definition_that_has_no_kernels_leaves_the_reason_of_the_operator() -> None:
    case = Case([node("Bernoulli", "x", "y")], {"x": (2, 3)}, {})
    supported = ask_support(ir.from_proto(case.model()))
    assert supported.refused == {"Bernoulli:y": "node 'Bernoulli:y' (Bernoulli) has no kernel yet"}
    assert "(RandomUniformLike) has no kernel" in supported.last["Bernoulli:y"]


def test_open_sizes_are_left_to_lowering() -> None:
    """Shapes are formulas there, and what computes with sizes needs no kernel."""
    nodes = [
        node("Shape", "x", "s"),
        node("Det", "x", "d"),
        node("Relu", "x", "y"),
    ]
    case = Case(nodes, {"x": ("rows", 3, 3)}, {}, ("s", "d", "y"), {"s": "int64"})
    assert set(refusals(case, dynamic=True)) == {"Det:d"}


def test_operators_without_lowering_are_of_onnx_and_others_are_not_elementwise() -> None:
    lowered = {kind for kind, row in OPERATIONS.items() if row.lower is not None}
    assert not lowered & OPERATORS.keys()
    assert all(onnx.defs.has(kind) for kind in OPERATIONS.keys() - lowered)
    assert all(row.lower for row in OPERATIONS.values() if row.epilogue is not None)


def test_scales_of_a_resize_are_refused_where_they_are_computed() -> None:
    scales = helper.make_node("Resize", ["x", "", "s"], ["y"], name="r")
    computed = Case([scales], {"x": (1, 1, 2, 2), "s": (4,)}, {})
    assert "reads 's', which is computed" in refusals(computed, (1, 1, 4, 4))["r"]
    constant = Case([scales], {"x": (1, 1, 2, 2)}, {"s": np.array([1, 1, 2, 2], np.float32)})
    assert not refusals(constant)
    model = ir.from_proto(constant.model())
    (resize,) = model.graph
    resize.attributes["coordinate_transformation_mode"] = ir.AttrString(
        "coordinate_transformation_mode", "odd"
    )
    assert "'r' (Resize) has the unknown mode 'odd'" in ask_support(model).refused["r"]
    resize.attributes["axes"] = ir.AttrInt64s("axes", [3])
    assert "has no scale for every dimension" in ask_support(model).refused["r"]
    resize.replace_input_with(2, None)
    assert "has neither scales nor sizes" in ask_support(model).refused["r"]


@pytest.mark.parametrize(("mode", "side"), [("nearest", 5), ("linear", 4)])
def test_computed_sizes_are_taken_where_shapes_tell_them(mode: str, side: int) -> None:
    """Pixels that repeat whole times, and broadcasts, need no sizes."""

    def refused(x: int, result: int, mode: str) -> dict[str, str]:
        sizes = helper.make_node("Resize", ["x", "", "", "s"], ["y"], name="r", mode=mode)
        case = Case([sizes], {"x": (1, 1, x, x), "s": (4,)}, {}, dtypes={"s": "int64"})
        return refusals(case, (1, 1, result, result))

    assert "reads 's', which is computed" in refused(2, side, mode)["r"]
    assert not refused(2, 4, "nearest")
    assert not refused(1, side, mode)


def test_results_are_unpooled_to_the_size_of_their_indices() -> None:
    unpool = node("MaxUnpool", "x i s", "y", kernel_shape=[2, 2], strides=[2, 2])
    indices = np.zeros((1, 1, 2, 2), np.int64)

    def refused(side: int) -> dict[str, str]:
        weights = {"i": indices, "s": np.array([1, 1, side, side])}
        return refusals(Case([unpool], {"x": (1, 1, 2, 2)}, weights), (1, 1, side, side))

    assert not refused(4)
    (reason,) = refused(5).values()
    assert "writes [1, 1, 5, 5] by indices in [1, 1, 4, 4]" in reason


def test_as_many_columns_as_are_ranked_are_taken() -> None:
    top_k = helper.make_node("TopK", ["x", "k"], ["y", "i"], name="t")
    assert not refusals(Case([top_k], {"x": (1, MAX_RANKED)}, {"k": np.array([MAX_RANKED])}))
    assert not refusals(Case([top_k], {"x": (1, MAX_RANKED + 1)}, {"k": np.array([MAX_SELECTED])}))


def test_more_steps_than_a_recurrence_takes_are_refused(rng: Rng) -> None:
    weights = {"w": normal(rng, 1, 12, 4), "r": normal(rng, 1, 12, 3)}
    lstm = helper.make_node("LSTM", ["x", "w", "r"], ["y"], name="l", hidden_size=3)
    assert not refusals(Case([lstm], {"x": (MAX_STEPS, 1, 4)}, weights))
    assert refusals(Case([lstm], {"x": (MAX_STEPS + 1, 1, 4)}, weights)) == {
        "l": f"node 'l' (LSTM) has {MAX_STEPS + 1} steps; kernels take {MAX_STEPS}"
    }


def test_weights_that_a_recurrence_computes_are_refused(rng: Rng) -> None:
    weights = {"b": normal(rng, 1, 24), "r": normal(rng, 1, 12, 3)}
    nodes = [
        node("Relu", "v", "w"),
        helper.make_node("LSTM", ["x", "w", "r", "b"], ["y"], name="l", hidden_size=3),
    ]
    case = Case(nodes, {"x": (2, 1, 4), "v": (1, 12, 4)}, weights)
    assert refusals(case) == {"l": "node 'l' (LSTM) has weights that are not constant"}


def test_weights_that_a_model_dequantizes_are_constant() -> None:
    weights = {
        "q": np.ones((2, 2, 1, 1), np.int8),
        "s": np.array(0.5, np.float32),
    }
    nodes = [node("DequantizeLinear", "q s", "w"), node("ConvTranspose", "x w", "y")]
    assert not refusals(Case(nodes, {"x": (1, 2, 3, 3)}, weights))


def test_weights_that_nodes_make_of_constants_are_not() -> None:
    nodes = [node("Neg", "v", "w"), node("ConvTranspose", "x w", "y")]
    weights = {"v": np.ones((2, 2, 1, 1), np.float32)}
    reasons = refusals(Case(nodes, {"x": (1, 2, 3, 3)}, weights))
    assert "has weights that are not constant ('w')" in reasons["ConvTranspose:y"]
