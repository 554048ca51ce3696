"""Segments cut anywhere compute together what the whole model computes."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from model_fixtures import save, small_convnet
from onnx import TensorProto, helper, numpy_helper

from toolkit.errors import BuildError
from toolkit.graph.extract import (
    MIN_ENTRY_BYTES,
    ExtractedSegment,
    extract_segments,
    serialize_segment,
)
from toolkit.graph.passes import PASSES, run_passes
from toolkit.importers.onnx import import_model


def run(
    pieces: tuple[ExtractedSegment, ...], feeds: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    env = dict(feeds)
    for piece in pieces:
        options = ort.SessionOptions()
        if piece.weights:
            options.add_external_initializers(
                list(piece.weights),
                [ort.OrtValue.ortvalue_from_numpy(w) for w in piece.weights.values()],
            )
        session = ort.InferenceSession(
            serialize_segment(piece), options, providers=["CPUExecutionProvider"]
        )
        inputs = {name: env[name] for name in piece.inputs}
        env.update(zip(piece.outputs, session.run(list(piece.outputs), inputs), strict=True))
    return env


def whole(path: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def test_any_cut_in_topological_order_gives_the_same_result(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    model, _ = run_passes(import_model(path).model)
    names = [str(node.name) for node in model.graph]
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    (expected,) = whole(path, {"x": x})
    for cut in range(1, len(names)):
        segment_of = {name: "a" if i < cut else "b" for i, name in enumerate(names)}
        env = run(extract_segments(model, segment_of, ["a", "b"]), {"x": x})
        np.testing.assert_allclose(env["y"], expected, rtol=1e-4, atol=1e-5)


def test_large_weights_leave_the_onnx_bytes(tmp_path: Path, rng: np.random.Generator) -> None:
    model, _ = run_passes(import_model(small_convnet(tmp_path / "m.onnx", rng)).model)
    (piece,) = extract_segments(model, {str(n.name): "a" for n in model.graph}, ["a"])
    assert piece.weights
    assert all(array.nbytes >= MIN_ENTRY_BYTES for array in piece.weights.values())
    inside = onnx.load_model_from_string(serialize_segment(piece)).graph.initializer
    assert all(
        len(tensor.raw_data) < MIN_ENTRY_BYTES
        for tensor in inside
        if tensor.data_location != TensorProto.EXTERNAL
    )


def test_lowering_is_deterministic(tmp_path: Path, rng: np.random.Generator) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    results = []
    for _ in range(2):
        model, _ = run_passes(import_model(path).model)
        (piece,) = extract_segments(model, {str(n.name): "a" for n in model.graph}, ["a"])
        results.append(serialize_segment(piece))
    assert results[0] == results[1]


def test_what_a_subgraph_captures_is_an_input_of_its_segment(tmp_path: Path) -> None:
    def branch(name: str, op: str) -> onnx.GraphProto:
        node = helper.make_node(op, ["captured", "one"], [f"{name}_out"])
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [2])
        return helper.make_graph([node], name, [], [out])

    nodes = [
        helper.make_node("Neg", ["x"], ["captured"], name="neg"),
        helper.make_node("ReduceSum", ["x"], ["sum"], name="sum", keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"], name="greater"),
        helper.make_node(
            "If",
            ["positive"],
            ["y"],
            name="if",
            then_branch=branch("then", "Add"),
            else_branch=branch("else", "Mul"),
        ),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        [
            numpy_helper.from_array(np.array(0.0, np.float32), "zero"),
            numpy_helper.from_array(np.array([1.0, 1.0], np.float32), "one"),
        ],
    )
    path = tmp_path / "if.onnx"
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    model, _ = run_passes(import_model(path).model)
    segment_of = {str(n.name): "b" if n.op_type == "If" else "a" for n in model.graph}
    pieces = extract_segments(model, segment_of, ["a", "b"])
    assert "captured" in pieces[1].inputs
    for x in (np.array([1.0, 2.0], np.float32), np.array([-1.0, -2.0], np.float32)):
        np.testing.assert_array_equal(run(pieces, {"x": x})["y"], whole(path, {"x": x})[0])


def test_a_type_that_cannot_cross_is_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], name="to_fp8", to=int(TensorProto.FLOAT8E5M2)),
        helper.make_node("Cast", ["h"], ["y"], name="back", to=int(TensorProto.FLOAT)),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [2]}, {"y": [2]})
    model, _ = run_passes(import_model(path).model)
    with pytest.raises(BuildError, match="'h' at the border of segment a has FLOAT8E5M2"):
        extract_segments(model, {"to_fp8": "a", "back": "b"}, ["a", "b"])


def test_constant_nodes_go_where_they_are_read_first(tmp_path: Path) -> None:
    value = numpy_helper.from_array(np.array([2.0, 3.0], np.float32))
    nodes = [
        helper.make_node("Constant", [], ["k"], name="k", value=value),
        helper.make_node("Mul", ["x", "k"], ["m"], name="mul"),
        helper.make_node("Add", ["m", "k"], ["y"], name="add"),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [2]}, {"y": [2]})
    # Without the folding passes, which would make an initializer of it.
    model, _ = run_passes(import_model(path).model, [p for p in PASSES if p.name == "infer-shapes"])
    pieces = extract_segments(model, {"mul": "a", "add": "b"}, ["a", "b"])
    assert [piece.inputs for piece in pieces] == [("x",), ("m", "k")]
    x = np.array([1.0, 1.0], np.float32)
    np.testing.assert_array_equal(run(pieces, {"x": x})["y"], [4.0, 6.0])
