"""Passes change the graph, never what it computes, and never the model that they are given."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from model_fixtures import save, small_convnet
from onnx import helper
from onnx.reference import ReferenceEvaluator

from toolkit.graph import native
from toolkit.graph.native import infer_shapes
from toolkit.graph.passes import PASSES, Pass, PassReport, run_passes
from toolkit.importers.onnx import import_model


def ops(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def test_batch_norm_disappears_into_the_convolution(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    model, reports = run_passes(import_model(path).model)
    assert ops(model)["BatchNormalization"] == 0
    assert {r.name: r.changes for r in reports}["fuse-batch-norms"] == (
        "fused 1 batch normalisations"
    )
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    expected = ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})[0]
    actual = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_the_given_model_is_not_changed(tmp_path: Path, rng: np.random.Generator) -> None:
    imported = import_model(small_convnet(tmp_path / "m.onnx", rng))
    before = ir.to_proto(imported.model).SerializeToString(deterministic=True)
    run_passes(imported.model)
    assert ir.to_proto(imported.model).SerializeToString(deterministic=True) == before


def test_identity_and_dropout_disappear(tmp_path: Path, rng: np.random.Generator) -> None:
    nodes = [
        helper.make_node("Identity", ["x"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Dropout", ["b"], ["c"]),
        helper.make_node("Neg", ["c"], ["y"]),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [2, 3]}, {"y": [2, 3]})
    model, _ = run_passes(import_model(path).model)
    assert ops(model) == Counter({"Relu": 1, "Neg": 1})


def test_constant_weights_are_folded_into_initializers(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["w"]),
        helper.make_node("Add", ["w", "one"], ["w1"]),
        helper.make_node("MatMul", ["x", "w1"], ["y"]),
    ]
    weights = {"shape": np.array([3, 4]), "one": np.array(1.0, np.float32)}
    path = save(tmp_path / "m.onnx", nodes, {"x": [2, 3]}, {"y": [2, 4]}, weights)
    model, _ = run_passes(import_model(path).model)
    assert ops(model) == Counter({"MatMul": 1})
    (weight,) = model.graph.initializers.values()
    assert weight.const_value is not None
    np.testing.assert_array_equal(weight.const_value.numpy(), np.ones((3, 4), np.float32))


@pytest.mark.parametrize(
    ("op", "operands"),
    [
        ("ConstantOfShape", [np.array([1 << 20, 1 << 20])]),
        ("Expand", [np.ones((1, 1), np.float32), np.array([1 << 20, 1 << 20])]),
        ("Tile", [np.ones((1, 1), np.float32), np.array([1 << 20, 1 << 20])]),
        ("Range", [np.array(v, np.float32) for v in (0, 1e12, 1)]),
    ],
)
def test_a_gigantic_constant_is_not_folded(
    tmp_path: Path, op: str, operands: list[np.ndarray]
) -> None:
    weights = {f"c{index}": array for index, array in enumerate(operands)}
    nodes = [
        helper.make_node(op, list(weights), ["w"]),
        helper.make_node("ReduceMax", ["w"], ["m"], keepdims=0),
        helper.make_node("Add", ["x", "m"], ["y"]),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [2]}, {"y": [2]}, weights)
    model, _ = run_passes(import_model(path).model)
    assert ops(model)[op] == 1


def test_many_constants_share_one_budget(tmp_path: Path) -> None:
    nodes = [helper.make_node("ConstantOfShape", ["shape"], [f"w{i}"]) for i in range(3)]
    nodes += [
        helper.make_node("ReduceMax", [f"w{i}"], [f"m{i}"], keepdims=0, name=f"max{i}")
        for i in range(3)
    ]
    nodes.append(helper.make_node("Sum", ["x", "m0", "m1", "m2"], ["y"]))
    weights = {"shape": np.array([1 << 27])}
    path = save(tmp_path / "m.onnx", nodes, {"x": [2]}, {"y": [2]}, weights)
    model, _ = run_passes(import_model(path).model)
    assert 1 <= ops(model)["ConstantOfShape"] <= 2


def test_a_constant_output_keeps_its_name(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("Neg", ["c"], ["z"]),
    ]
    weights = {"c": np.array([1.0, 2.0], np.float32)}
    path = save(tmp_path / "m.onnx", nodes, {"x": [2]}, {"y": [2], "z": [2]}, weights)
    model, _ = run_passes(import_model(path).model)
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    assert ops(model)["Identity"] == 1
    _, z = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": np.zeros(2, np.float32)})
    np.testing.assert_array_equal(z, [-1.0, -2.0])


def test_an_input_that_is_an_output_gets_a_node(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": [2]}, {"y": [2]})
    model, _ = run_passes(import_model(path).model)
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert ops(model)["Identity"] == 1


def test_an_output_of_a_branch_stays_a_value_of_the_branch(tmp_path: Path) -> None:
    """An Identity in a branch does something: a branch cannot return a value from outside it."""

    def branch(name: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}_out", onnx.TensorProto.FLOAT, [2])
        node = helper.make_node("Identity", [name], [f"{name}_out"])
        return helper.make_graph([node], name, [], [out])

    nodes = [
        helper.make_node("Neg", ["x"], ["negative"]),
        helper.make_node("Abs", ["x"], ["absolute"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node(
            "If",
            ["positive"],
            ["y"],
            then_branch=branch("negative"),
            else_branch=branch("absolute"),
        ),
    ]
    weights = {"zero": np.array(0.0, np.float32)}
    path = save(tmp_path / "m.onnx", nodes, {"x": [2]}, {"y": [2]}, weights)
    model, _ = run_passes(import_model(path).model)
    data = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    for x, y in (([1.0, 2.0], [-1.0, -2.0]), ([-1.0, -2.0], [1.0, 2.0])):
        (actual,) = session.run(None, {"x": np.array(x, np.float32)})
        np.testing.assert_array_equal(actual, np.array(y, np.float32))


def test_sequences_keep_their_type(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x"], ["s"]),
        helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [2]}, {"y": [4]})
    model, _ = run_passes(import_model(path).model)
    data = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    (actual,) = session.run(None, {"x": np.array([1.0, 2.0], np.float32)})
    np.testing.assert_array_equal(actual, np.array([1.0, 2.0, 1.0, 2.0], np.float32))


@pytest.mark.parametrize("name", ["light_resnet50", "light_squeezenet", "light_inception_v2"])
def test_passes_are_done_after_one_run(light_models: Path, name: str) -> None:
    once, _ = run_passes(import_model(light_models / f"{name}.onnx").model)
    _, again = run_passes(once)
    assert {report.name: report.changes for report in again} == {p.name: "" for p in PASSES}


def test_every_value_of_a_light_model_has_a_shape(light_models: Path) -> None:
    model, _ = run_passes(import_model(light_models / "light_densenet121.onnx").model)
    assert all(value.shape is not None for node in model.graph for value in node.outputs)


@pytest.mark.parametrize("place", [0, 4, len(PASSES)])
def test_a_pass_that_fails_is_left_out_and_named(
    place: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    def fail(model: ir.Model) -> str:
        model.graph.remove(list(model.graph), safe=False)
        raise ValueError("no luck")

    imported = import_model(small_convnet(tmp_path / "m.onnx", rng))
    steps = [*PASSES[:place], Pass("broken", fail), *PASSES[place:]]
    model, reports = run_passes(imported.model, steps)
    assert reports[place] == PassReport("broken", "", "ValueError: no luck")
    assert ops(model) == ops(run_passes(imported.model)[0])


def test_the_model_is_copied_once(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = import_model(small_convnet(tmp_path / "m.onnx", rng))
    copied, clone = [], ir.Model.clone
    monkeypatch.setattr(ir.Model, "clone", lambda self: copied.append(self) or clone(self))
    run_passes(imported.model)
    assert copied == [imported.model]


def with_constant_if(path: Path, rng: np.random.Generator) -> Path:
    """A Conv, and an If whose constant condition takes a BatchNorm of it. The other branch reads a
    Sigmoid, a constant and the Conv."""

    def value(name: str, shape: list[int]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)

    shape = [1, 4, 8, 8]
    norm = helper.make_node("BatchNormalization", ["c", "one", "zero", "zero", "one"], ["t"])
    then = helper.make_graph([norm], "then", [], [value("t", shape)])
    add = helper.make_node("Add", ["s", "W"], ["a"])
    both = helper.make_node("Add", ["a", "c"], ["e"])
    second = helper.make_graph([add, both], "other", [], [value("e", shape)])
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Sigmoid", ["x"], ["s"]),
        helper.make_node("If", ["yes"], ["i"], then_branch=then, else_branch=second),
        helper.make_node("Neg", ["i"], ["y"]),
    ]
    weights = {
        "k": rng.normal(size=(4, 4, 3, 3)).astype(np.float32), "W": np.ones(shape, np.float32),
        "one": np.ones(4, np.float32), "zero": np.zeros(4, np.float32), "yes": np.array(True),
    }  # fmt: skip
    return save(path, nodes, {"x": shape}, {"y": shape}, weights)


def test_what_a_branch_read_that_is_gone_is_gone_and_holds_up_no_fusion(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    graph, _ = run_passes(import_model(with_constant_if(tmp_path / "m.onnx", rng)).model)
    assert [node.op_type for node in graph.graph] == ["Conv", "Neg"]
    assert "W" not in graph.graph.initializers


def test_factors_of_a_gemm_move_into_its_constants(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    weights = {
        "w": rng.normal(size=(4, 5)).astype(np.float32),
        "b": rng.normal(size=5).astype(np.float32),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["y"], alpha=0.5, beta=3.0),
        helper.make_node("Gemm", ["x", "w", "b"], ["z"]),  # shares the constants
    ]
    outputs = {"y": [2, 5], "z": [2, 5]}
    path = save(tmp_path / "m.onnx", nodes, {"x": [2, 4]}, outputs, weights)
    model, _ = run_passes(import_model(path).model)
    assert not any(set(node.attributes) & {"alpha", "beta"} for node in model.graph)
    x = rng.normal(size=(2, 4)).astype(np.float32)
    expected = ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})
    for actual, requested in zip(
        ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x}), expected, strict=True
    ):
        np.testing.assert_allclose(actual, requested, rtol=1e-5, atol=1e-6)


def test_folds_a_split_of_a_constant(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = {"c": rng.normal(size=(4, 6)).astype(np.float32), "n": np.array([2, 4])}
    nodes = [
        helper.make_node("Split", ["c", "n"], ["l", "r"], axis=1),
        helper.make_node("MatMul", ["x", "l"], ["a"]),
        helper.make_node("MatMul", ["x", "r"], ["b"]),
        helper.make_node("Concat", ["b", "a"], ["y"], axis=1),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [3, 4]}, {"y": [3, 6]}, weights)
    model, _ = run_passes(import_model(path).model)
    assert ops(model)["Split"] == 0
    x = rng.normal(size=(3, 4)).astype(np.float32)
    expected = np.roll(x @ weights["c"], 4, axis=1)
    actual = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_an_output_that_is_an_identity_of_another_keeps_both_names(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Identity", ["a"], ["b"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": [2]}, {"a": [2], "b": [2]})
    model, reports = run_passes(import_model(path).model)
    assert [value.name for value in model.graph.outputs] == ["a", "b"]
    assert not any(report.failure for report in reports)


def squeezing_branches(path: Path, size: int) -> Path:
    """If(flag): squeeze axis 1 of x [2, size], valid for size 1 only; else its mean there."""
    value = helper.make_tensor_value_info("t", 1, None)
    squeeze = helper.make_node("Squeeze", ["x", "one"], ["t"])
    squeezed = helper.make_graph([squeeze], "then", [], [value])
    value = helper.make_tensor_value_info("e", 1, None)
    mean = helper.make_node("ReduceMean", ["x", "one"], ["e"], keepdims=0)
    second = helper.make_graph([mean], "else", [], [value])
    nodes = [
        helper.make_node("Cast", ["flag"], ["c"], to=9),
        helper.make_node(
            "If", ["c"], ["a"], name="choice", then_branch=squeezed, else_branch=second
        ),
        helper.make_node("Neg", ["a"], ["y"]),
    ]
    inputs = {"x": [2, size], "flag": [1]}
    return save(path, nodes, inputs, {"y": [2]}, {"one": np.array([1])}, opset=18)


def test_a_branch_that_the_shapes_rule_out_is_never_taken(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model, reports = run_passes(import_model(squeezing_branches(tmp_path / "m.onnx", 3)).model)
    changes = {report.name: report.changes for report in reports}["fold-constants"]
    assert "choice takes its else_branch whatever its condition is" in changes
    assert "its then_branch is not valid for these sizes (Dimension of input 1 must be 1" in changes
    assert ops(model)["If"] == 0
    x = rng.normal(size=(2, 3)).astype(np.float32)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    feeds = {"x": x, "flag": np.zeros(1, np.float32)}
    np.testing.assert_allclose(session.run(None, feeds)[0], -x.mean(axis=1), rtol=1e-5, atol=1e-6)


def test_branches_that_both_hold_stay(tmp_path: Path) -> None:
    model, reports = run_passes(import_model(squeezing_branches(tmp_path / "m.onnx", 1)).model)
    assert ops(model)["If"] == 1
    assert not any("whatever its condition" in report.changes for report in reports)


def test_shapes_that_the_nodes_contradict_are_dropped(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["x", "z"], ["a"]),
        helper.make_node("Neg", ["a"], ["y"]),
    ]
    weights = {"z": np.array([0])}
    path = save(tmp_path / "m.onnx", nodes, {"x": [2, 3]}, {"y": [2, "n"]}, weights)
    model, _ = run_passes(import_model(path).model)
    assert model.graph.outputs[0].shape == (1, 2, 3)


def _inferred_nodes(path: Path, depth: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many nodes inference goes over, of a chain of sizes that folding makes known."""
    nodes = []
    for i in range(depth):  # inference alone does not see through Mod
        nodes += [
            helper.make_node("Shape", [f"x{i}"], [f"s{i}"]),
            helper.make_node("Mod", [f"s{i}", "one"], [f"m{i}"]),
            helper.make_node("Concat", [f"m{i}", f"m{i}"], [f"p{i}"], axis=0),
            helper.make_node("Pad", [f"x{i}", f"p{i}"], [f"x{i + 1}"]),
        ]
    weights = {"one": np.array([1])}
    last = f"x{depth}"
    model = import_model(save(path, nodes, {"x0": [2, 3]}, {last: [None, None]}, weights)).model
    counts = []

    def count(proto: onnx.ModelProto, *, strict: bool, data_prop: bool) -> onnx.ModelProto:
        counts.append(len(proto.graph.node))
        return infer_shapes(proto, strict=strict, data_prop=data_prop)

    with monkeypatch.context() as patch:
        patch.setattr(native, "infer_shapes", count)
        folded, _ = run_passes(model)
    assert ops(folded) == Counter({"Pad": depth})
    assert folded.graph.outputs[0].shape == (2, 3)
    return sum(counts)


def test_sizes_that_depend_on_each_other_take_twice_the_inference_when_they_double(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = (_inferred_nodes(tmp_path / "m.onnx", n, monkeypatch) for n in (20, 40))
    assert long <= 2.3 * short
