"""What the importer reads, what it decides by itself, and what it refuses in which words."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from model_fixtures import save, small_convnet
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from device.engine.manifest import DimRange
from toolkit.errors import ImportModelError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.importers.opset import NEWEST_RUN_OPSET
from toolkit.importers.weights import replaced_but_weights, without_weights


def test_reads_a_model_and_names_every_node(tmp_path: Path, rng: np.random.Generator) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    imported = import_model(save(tmp_path / "m.onnx", nodes, {"x": [1, 3]}, {"y": [1, 3]}))
    names = [node.name for node in imported.model.graph]
    assert all(names)
    assert len(set(names)) == len(names)


def test_same_bytes_give_same_hash(tmp_path: Path, rng: np.random.Generator) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    assert import_model(path).sha256 == import_model(path).sha256


@pytest.mark.parametrize("opset", [9, 11, 13, 17, 21, onnx.defs.onnx_opset_version()])
def test_reads_old_and_new_opsets(tmp_path: Path, opset: int) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3]}, {"y": [1, 3]}, opset=opset)
    imported = import_model(path)
    raised = imported.model.graph.opset_imports[""]
    assert raised == min(opset, NEWEST_RUN_OPSET) if opset >= 19 else raised >= 19
    assert bool(imported.notes) == (opset < 19 or opset > NEWEST_RUN_OPSET)


def test_reads_models_of_the_first_ir_versions(tmp_path: Path) -> None:
    nodes = [helper.make_node("Pad", ["x"], ["y"], pads=[0, 1, 0, 2])]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3]}, {"y": [1, 6]}, opset=9)
    old = onnx.load(path)
    old.ir_version = 3  # in which every constant is an input too; raised, pads are a constant
    onnx.save(old, path)
    assert import_model(path).model.graph.opset_imports[""] >= 19


def test_refuses_opsets_that_are_newer_than_onnx(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    opset = onnx.defs.onnx_opset_version() + 1
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3]}, {"y": [1, 3]}, opset=opset)
    with pytest.raises(ImportModelError, match=f"opset {opset}; Tandem reads 1 to"):
        import_model(path)


@pytest.mark.parametrize("opset", [7, 8])
def test_raises_opsets_below_9_to_the_same_numbers(
    tmp_path: Path, opset: int, rng: np.random.Generator
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Clip", ["a"], ["b"], min=-0.5, max=0.5),
        helper.make_node("Upsample", ["b"], ["y"], scales=[1.0, 1.0, 1.5, 2.0], mode="linear"),
    ]
    weights = {"w": rng.normal(size=(4, 3, 3, 3)).astype(np.float32)}
    shapes = {"x": [1, 3, 8, 8]}, {"y": [1, 4, 9, 12]}
    path = save(tmp_path / "m.onnx", nodes, *shapes, weights, opset=opset)
    _same_numbers(path, rng)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("opset", "scale"), [(9, 2.0), (9, 1.5), (10, 3.0), (10, 0.5), (10, 0.7)])
def test_resize_samples_as_it_did_before_opset_11(
    tmp_path: Path, opset: int, scale: float, mode: str, rng: np.random.Generator
) -> None:
    scales = {"s": np.array([1, 1, scale, scale], np.float32)}
    node = helper.make_node("Upsample" if opset == 9 else "Resize", ["x", "s"], ["y"], mode=mode)
    size = int(10 * scale)
    shapes = {"x": [1, 2, 10, 10]}, {"y": [1, 2, size, size]}
    _same_numbers(save(tmp_path / "m.onnx", [node], *shapes, scales, opset=opset), rng)


def test_refuses_an_old_resize_that_shrinks_one_axis_and_stretches_another(tmp_path: Path) -> None:
    scales = {"s": np.array([1, 1, 0.5, 2], np.float32)}
    node = helper.make_node("Resize", ["x", "s"], ["y"])
    shapes = {"x": [1, 2, 10, 10]}, {"y": [1, 2, 5, 20]}
    path = save(tmp_path / "m.onnx", [node], *shapes, scales, opset=10)
    with pytest.raises(ImportModelError, match=r"\[1.0, 1.0, 0.5, 2.0\], both ways"):
        import_model(path)


def _same_numbers(path: Path, rng: np.random.Generator) -> None:
    """The model computes the same before its import (in its own opset) and after."""
    imported = ir.to_proto(run_passes(import_model(path).model)[0]).SerializeToString()
    before, after = (
        onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        for model in (path.read_bytes(), imported)
    )
    feeds = {"x": rng.normal(size=before.get_inputs()[0].shape).astype(np.float32)}
    np.testing.assert_allclose(after.run(None, feeds)[0], before.run(None, feeds)[0], rtol=1e-5)


@pytest.mark.parametrize("size", [(), (3,), (3, 3)])  # as wide as there are channels, too
def test_slopes_of_old_prelus_stay_those_of_channels(
    tmp_path: Path, size: tuple[int, ...], rng: np.random.Generator
) -> None:
    slopes = rng.normal(size=3).astype(np.float32)
    node = helper.make_node("PRelu", ["x", "s"], ["y"])
    shape = [2, 3, *size]
    path = save(tmp_path / "m.onnx", [node], {"x": shape}, {"y": shape}, {"s": slopes}, opset=6)
    imported = ir.to_proto(run_passes(import_model(path).model)[0]).SerializeToString()
    session = onnxruntime.InferenceSession(imported, providers=["CPUExecutionProvider"])
    x = rng.normal(size=shape).astype(np.float32)
    channel_slopes = slopes.reshape(-1, *(1 for _ in size))
    np.testing.assert_allclose(
        session.run(None, {"x": x})[0], np.where(x < 0, x * channel_slopes, x)
    )


def test_refuses_old_slopes_that_another_node_reads(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("PRelu", ["x", "s"], ["a"]),
        helper.make_node("Mul", ["a", "s"], ["y"], broadcast=1),
    ]
    shapes = {"x": [1, 3, 4, 3]}, {"y": [1, 3, 4, 3]}
    slopes = {"s": np.ones(3, np.float32)}
    path = save(tmp_path / "m.onnx", nodes, *shapes, slopes, opset=6)
    with pytest.raises(ImportModelError, match="the slopes of its PRelu"):
        import_model(path)


def test_refuses_an_old_operator_that_has_no_converter_and_says_so(tmp_path: Path) -> None:
    node = helper.make_node("PRelu", ["x", "s"], ["y"])
    inputs, outputs = {"x": [1, 3, 4, 3], "s": [3]}, {"y": [1, 3, 4, 3]}
    path = save(tmp_path / "m.onnx", [node], inputs, outputs, {}, opset=6)
    with pytest.raises(ImportModelError, match=r"opset 6, and the slopes .* opset 13 or newer"):
        import_model(path)


@pytest.mark.parametrize("unnamed", [-1, 0, "?", "None"])
def test_sizes_that_stand_for_unknown_ones_take_any_shape(
    tmp_path: Path, unnamed: int | str
) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    shape = [unnamed, 3, unnamed, unnamed]
    path = save(tmp_path / "m.onnx", nodes, {"x": shape}, {"y": shape})
    with pytest.raises(ImportModelError, match="fix it, such as --shape x=1x3x224x224"):
        import_model(path)
    for sizes in ((1, 3, 224, 224), (2, 3, 48, 192)):
        graph = run_passes(import_model(path, shapes={"x": sizes}).model)[0].graph
        assert graph.outputs[0].shape == sizes


def test_reads_external_data_and_refuses_when_it_is_gone(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    weight = rng.normal(size=(8, 3, 3, 3)).astype(np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"])]
    path = save(tmp_path / "a.onnx", nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 8, 6, 6]}, {"w": weight})
    model = onnx.load(path)
    path = tmp_path / "b.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    imported = import_model(path)
    stored = imported.model.graph.initializers["w"].const_value
    assert stored is not None
    np.testing.assert_array_equal(stored.numpy(), weight)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ImportModelError, match=r"b\.onnx keeps weights in a file beside it"):
        import_model(path)


def test_a_length_of_external_data_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """protobuf gives a string that is no UTF-8 as bytes."""
    weight = np.ones((8, 3, 3, 3), np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"])]
    path = save(tmp_path / "a.onnx", nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 8, 6, 6]}, {"w": weight})
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    data = path.read_bytes()
    assert data.count(b"864") == 1
    path.write_bytes(data.replace(b"864", b"8\xff4"))
    with pytest.raises(ImportModelError, match=r"has 8\\+xff4 bytes in the file beside the model"):
        import_model(path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_refuses_a_truncated_file(tmp_path: Path, rng: np.random.Generator, share: float) -> None:
    data = small_convnet(tmp_path / "m.onnx", rng).read_bytes()
    (tmp_path / "cut.onnx").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ImportModelError, match=r"cut\.onnx"):
        import_model(tmp_path / "cut.onnx")


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ImportModelError, match="No such file or directory; check the path"):
        import_model(tmp_path / "none.onnx")


def test_mutated_files_give_only_our_error(tmp_path: Path, rng: np.random.Generator) -> None:
    data = bytearray(small_convnet(tmp_path / "m.onnx", rng, channels=2).read_bytes())
    for _ in range(1000):
        broken = bytearray(data)
        for position in rng.integers(0, len(broken), int(rng.integers(1, 8))):
            broken[position] = rng.integers(256)
        path = tmp_path / "broken.onnx"
        path.write_bytes(broken)
        try:
            run_passes(import_model(path).model)
        except ImportModelError as err:
            assert len(str(err)) > 20  # noqa: PT017  (either outcome is right)


def test_refuses_a_custom_operator_by_node_and_domain(tmp_path: Path) -> None:
    node = helper.make_node("Magic", ["x"], ["y"], name="spell", domain="acme")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("acme", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), tmp_path / "m.onnx")
    with pytest.raises(ImportModelError, match=r"node 'spell' is acme::Magic"):
        import_model(tmp_path / "m.onnx")


def test_refuses_an_operator_that_onnx_lacks_and_says_what_to_do(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Swirl", ["a"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3]}, {"y": [1, 3]})
    with pytest.raises(ImportModelError, match=r"ONNX has no operator Swirl: .* --plugin"):
        import_model(path)


def test_refuses_string_inputs(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1]}, {"y": [1]}, dtype=int(TensorProto.STRING))
    with pytest.raises(ImportModelError, match="'x' has type STRING"):
        import_model(path)


def test_freezes_a_dynamic_batch_and_says_so(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": ["batch", 3]}, {"y": ["batch", 3]})
    imported = import_model(path)
    assert list(imported.model.graph.inputs[0].shape or ()) == [1, 3]
    assert list(imported.model.graph.outputs[0].shape or ()) == [1, 3]
    assert imported.notes == (
        "input 'x': dynamic first dimension batch frozen to 1; "
        "`tandem build --dim batch=MIN:OPT:MAX` keeps it dynamic",
    )


@pytest.mark.parametrize("whole", ["a", "b"])
def test_a_shape_given_for_one_input_fixes_its_dimensions_in_others(
    whole: str, tmp_path: Path
) -> None:
    joined = helper.make_node("Concat", ["a", "b"], ["y"], axis=2)
    inputs = {"a": ["N", "S", 3], "b": ["N", "S", 5]}
    path = save(tmp_path / "m.onnx", [joined], inputs, {"y": ["N", "S", 8]})
    shape = {"a": (4, 7, 3), "b": (4, 7, 5)}[whole]
    graph = import_model(path, shapes={whole: shape}).model.graph
    results = {value.name: list(value.shape or ()) for value in (*graph.inputs, *graph.outputs)}
    assert results == {"a": [4, 7, 3], "b": [4, 7, 5], "y": [4, 7, 8]}


def test_refuses_shapes_that_disagree_on_a_dimension(tmp_path: Path) -> None:
    joined = helper.make_node("Concat", ["a", "b"], ["y"], axis=1)
    path = save(tmp_path / "m.onnx", [joined], {"a": ["N", 3], "b": ["N", 5]}, {"y": ["N", 8]})
    with pytest.raises(ImportModelError, match=r"'N' is 5 in the shape .* 'b' and 4 elsewhere"):
        import_model(path, shapes={"a": (4, 3), "b": (5, 5)})
    assert import_model(path, shapes={"a": (4, 3), "b": (4, 5)})


@pytest.mark.parametrize(
    ("stated", "example"), [("[320, 480]", "1x3x320x480"), ("[]", "1x3x224x224")]
)
def test_the_shape_to_give_is_the_one_that_the_model_states(
    stated: str, example: str, tmp_path: Path
) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": ["n", 3, "h", "w"]}, {"y": ["n", 3, "h", "w"]})
    model = onnx.load(path)
    model.metadata_props.add(key="imgsz", value=stated)
    onnx.save(model, path)
    with pytest.raises(ImportModelError, match=f"--shape x={example}, or"):
        import_model(path)


def test_refuses_other_dynamic_dimensions_and_says_what_to_give(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, "h", "w"]}, {"y": [1, 3, "h", "w"]})
    with pytest.raises(
        ImportModelError, match=r"--shape x=1x3x224x224, or .* `tandem build --dim h=MIN:OPT:MAX`"
    ):
        import_model(path)
    fixed = import_model(path, shapes={"x": (1, 3, 64, 48)})
    assert list(fixed.model.graph.inputs[0].shape or ()) == [1, 3, 64, 48]


def test_keeps_a_dimension_dynamic_within_a_range(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": ["n", 3]}, {"y": ["n", 3]})
    dim = DimRange(name="n", min=1, opt=2, max=8)
    imported = import_model(path, dims=[dim])
    assert imported.dims == (dim,)
    assert imported.notes == ()
    with pytest.raises(ImportModelError, match=r"no dynamic dimension 'm' \(it has: n\)"):
        import_model(path, dims=[DimRange(name="m", min=1, opt=2, max=8)])
    with pytest.raises(ImportModelError, match="'n' is given a size with --shape and a range"):
        import_model(path, shapes={"x": (4, 3)}, dims=[dim])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": (1, 3)}, "no input 'z' .it has: x."),
        ({"x": (1, 4)}, "which 1x4 does not fit"),
        ({"x": (1, 3, 1)}, "which 1x3x1 does not fit"),
        ({"x": (0, 3)}, "which 0x3 does not fit"),
    ],
)
def test_refuses_shapes_that_do_not_fit(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": ["n", 3]}, {"y": ["n", 3]})
    with pytest.raises(ImportModelError, match=message):
        import_model(path, shapes=shapes)


def test_initializers_listed_as_inputs_are_not_inputs(tmp_path: Path) -> None:
    weight = np.ones((2, 3), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2]),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 3]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "m.onnx")
    assert [v.name for v in import_model(tmp_path / "m.onnx").model.graph.inputs] == ["x"]


def without_shapes(path: Path) -> Path:
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    onnx.save(model, path)
    return path


def test_a_missing_output_shape_is_inferred_and_a_missing_input_shape_asked_for(
    tmp_path: Path,
) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = without_shapes(save(tmp_path / "m.onnx", nodes, {"x": [1, 3]}, {"y": [1, 3]}))
    with pytest.raises(ImportModelError, match="input 'x' has no shape; give one, such as --shape"):
        import_model(path)
    model, _ = run_passes(import_model(path, shapes={"x": (1, 3)}).model)
    assert list(model.graph.outputs[0].shape or ()) == [1, 3]


def test_refuses_a_model_without_inputs(tmp_path: Path) -> None:
    value = numpy_helper.from_array(np.ones(2, np.float32))
    nodes = [helper.make_node("Constant", [], ["y"], value=value)]
    with pytest.raises(ImportModelError, match=r"m\.onnx has no input"):
        import_model(save(tmp_path / "m.onnx", nodes, {}, {"y": [2]}))


def test_nodes_in_any_order_are_sorted(tmp_path: Path, rng: np.random.Generator) -> None:
    """What an If reads from outside counts, too."""
    value = helper.make_tensor_value_info
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(op, ["b", "a"], [name])],
            name,
            [],
            [value(name, TensorProto.FLOAT, None)],
        )
        for name, op in (("then", "Add"), ("else", "Sub"))
    }
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Neg", ["a"], ["b"]),
        helper.make_node("ReduceMin", ["a"], ["least"], keepdims=0),
        helper.make_node("Cast", ["least"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["y"], **branches),
        helper.make_node("Abs", ["y"], ["z"]),
    ]
    x = rng.normal(size=(1, 9)).astype(np.float32)
    results = []
    for order in (range(6), rng.permutation(6)):
        shuffled = [nodes[at] for at in order]
        path = save(tmp_path / "m.onnx", shuffled, {"x": [1, 9]}, {"z": [1, 9]})
        model = ir.to_proto(import_model(path).model)
        onnx.checker.check_model(model)
        results.append(ReferenceEvaluator(model).run(None, {"x": x})[0])
    np.testing.assert_array_equal(*results)


def test_nodes_in_a_ring_are_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 9]}, {"b": [1, 9]})
    with pytest.raises(ImportModelError, match="topologically sorted"):
        import_model(path)


@pytest.mark.parametrize("opset", [13, 19, 27])
def test_functions_of_a_model_are_inlined_at_every_opset(
    tmp_path: Path, rng: np.random.Generator, opset: int
) -> None:
    domain = f'<domain: "my.ops", opset_import: ["" : {opset}, "my.ops" : 1]>'
    times = onnx.parser.parse_function(
        f"{domain} Times <k: float = 2.0> (x) => (y)"
        "{ c = Constant <value_float: float = @k> () y = Mul(x, c) }"
    )
    both = onnx.parser.parse_function(
        f"{domain} Both (x) => (y) {{ a = my.ops.Times(x) y = my.ops.Times <k: float = 3.0> (a) }}"
    )
    weight = rng.normal(size=(64, 80)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"]),
            helper.make_node("Both", ["a"], ["y"], domain="my.ops"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 80])],
        [numpy_helper.from_array(weight, "w")],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("my.ops", 1)]
    model = helper.make_model(graph, functions=[times, both], opset_imports=opsets, ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    imported = import_model(tmp_path / "m.onnx").model
    assert not imported.functions
    x = rng.normal(size=(3, 64)).astype(np.float32)
    (actual,) = ReferenceEvaluator(ir.to_proto(imported)).run(None, {"x": x})
    np.testing.assert_allclose(actual, 6 * (x @ weight), rtol=1e-5, atol=1e-5)


def test_a_function_of_another_opset_than_its_model_is_refused_with_both(tmp_path: Path) -> None:
    function = onnx.parser.parse_function(
        '<domain: "my.ops", opset_import: ["" : 18]> Twice (x) => (y) { y = Add(x, x) }'
    )
    graph = helper.make_graph(
        [helper.make_node("Twice", ["x"], ["y"], domain="my.ops")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
    )
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("my.ops", 1)]
    onnx.save(
        helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=10),
        tmp_path / "m.onnx",
    )
    with pytest.raises(ImportModelError, match=r"version 18 .* version 13"):
        import_model(tmp_path / "m.onnx")


def test_what_the_checker_sees_has_all_but_the_large_weights() -> None:
    weights = {"w": np.ones((64, 64), np.float32), "b": np.ones(4, np.float32)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Identity", ["b"], ["z"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [1, 64]), ("y", [1, 64]), ("z", [4]))
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    proto = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors))
    proto.metadata_props.add(key="author", value="us")
    light = without_weights(proto)
    onnx.checker.check_model(light)
    large, small = light.graph.initializer
    assert (list(large.dims), len(large.raw_data)) == ([0], 0)
    assert small == proto.graph.initializer[1]
    assert len(proto.graph.initializer[0].raw_data) == 64 * 64 * 4
    light.graph.initializer[0].CopyFrom(proto.graph.initializer[0])
    assert light == proto


def test_a_changed_light_copy_is_laid_over_a_model_and_its_weights() -> None:
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 64]) for n in ("x", "y")]
    weights = {name: np.random.default_rng(1).normal(size=(64, 64)) for name in ("v", "w")}
    tensors = [numpy_helper.from_array(w.astype(np.float32), n) for n, w in weights.items()]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    proto = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors))
    light = without_weights(proto, more_than=64, keep_dims=True)
    assert [list(tensor.dims) for tensor in light.graph.initializer] == [[64, 64], [64, 64]]
    light.graph.node[0].name = "product"
    light.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones(2, np.float32), "ones"))
    light.opset_import[0].version = 19
    expected = onnx.ModelProto.FromString(light.SerializeToString())
    expected.graph.initializer[1].CopyFrom(tensors[1])
    assert replaced_but_weights(proto, light, more_than=64) == expected


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"dims": [-64, -32, 1, 1]}, "Negative dimension"),
        ({"data_type": TensorProto.STRING}, "STRING data"),
        ({"float_data": [1.0]}, "one and only one value field"),
    ],
)
def test_faults_of_large_weights_are_refused(
    fault: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """They do not travel to the checker where they are as they should be."""
    weights = numpy_helper.from_array(np.ones((64, 32, 1, 1), np.float32), "w")
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, channels, 4, 4])
        for name, channels in (("x", 32), ("y", 64))
    ]
    for name, value in fault.items():
        if isinstance(value, list):
            getattr(weights, name)[:] = value
        else:
            setattr(weights, name, value)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], "conv")], "g", ends[:1], ends[1:], [weights]
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph).SerializeToString())
    with pytest.raises(ImportModelError, match=message):
        import_model(path)


def test_no_weight_stays_in_protobuf_memory_also_in_branches(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """One that did would keep the bytes of all."""
    shape = [1, 4]
    value = helper.make_tensor_value_info("a", TensorProto.FLOAT, shape)
    weight = numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), "w")
    branch = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["a"])], "then", [], [value], [weight]
    )
    second = helper.make_graph([helper.make_node("Neg", ["x"], ["a"])], "else", [], [value])
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["yes"], to=TensorProto.BOOL),
        helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=second),
    ]
    model = import_model(save(tmp_path / "m.onnx", nodes, {"x": shape}, {"y": shape})).model
    weights = [
        value.const_value for graph in model.graphs() for value in graph.initializers.values()
    ]
    assert weights
    assert not any(isinstance(weight, ir.TensorProtoTensor) for weight in weights)
