"""What a model asks for is judged before it is made: nodes, bytes beside it, time of folding."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from device.errors import TandemError
from toolkit.cli.actions.infer import infer_file
from toolkit.engine.build import build_engine
from toolkit.engine.options import BuildOptions
from toolkit.errors import ImportModelError, InferError
from toolkit.evaluate.infer.inputs import InputRequest
from toolkit.graph import native, run_limit
from toolkit.graph.cpu_budget import CpuBudget
from toolkit.graph.max_memory import limited_memory
from toolkit.graph.passes import fold
from toolkit.graph.passes.fold import fold_constants
from toolkit.importers import limits
from toolkit.importers.onnx import import_model, read_model_file
from toolkit.importers.refusals import check_tensors
from toolkit.importers.source import model_sha256

node = helper.make_node
OPSETS = [helper.make_opsetid("", 19), helper.make_opsetid("own", 1)]


def model_of(
    nodes: Sequence[onnx.NodeProto],
    constants: dict[str, np.ndarray] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
    sizes: Sequence[int] = (1, 3, 8, 8),
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info("x", 1, sizes)],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=9, functions=functions)


def written(folder: Path, proto: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def calls(name: str, *called: str) -> onnx.FunctionProto:
    """A function that calls others one after the other, or has one node."""
    names = ["a", *(f"t{at}" for at in range(1, len(called))), "b"]
    nodes = [node(one, [names[at]], [names[at + 1]], domain="own") for at, one in enumerate(called)]
    return helper.make_function("own", name, ["a"], ["b"], nodes or [node("Relu", ["a"], ["b"])],
                                OPSETS)  # fmt: skip


def test_functions_that_call_each_other_twice_are_refused_before_they_are_inlined(
    tmp_path: Path,
) -> None:
    functions = [calls(f"F{at}", f"F{at + 1}", f"F{at + 1}") for at in range(23)]
    proto = model_of([node("F0", ["x"], ["y"], domain="own")],
                     functions=[*functions, calls("F23")])  # fmt: skip
    path = written(tmp_path, proto)
    assert path.stat().st_size < 4096
    begin_s = time.process_time()
    for read in (import_model, read_model_file):
        with pytest.raises(ImportModelError, match=r"model\.onnx has 25,165,823 nodes once its 24"):
            read(path)
    assert time.process_time() - begin_s < 5


def test_the_limit_of_nodes_is_at_the_last_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls of a function of two nodes, in a branch, too: 2 x (1 + 2) nodes, and the If."""
    functions = [calls("Two", "One", "One"), calls("One")]
    branch = helper.make_graph(
        [node("Two", ["x"], ["b"], domain="own")], "branch", [],
        [helper.make_tensor_value_info("b", 1, None)],
    )  # fmt: skip
    nodes = [node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)]
    path = written(tmp_path, model_of(nodes, {"c": np.array(True)}, functions))
    proto = onnx.load(path)
    monkeypatch.setattr(limits, "MAX_NODES", 11)  # If, and twice Two, two One and their Relus
    limits.check_node_count(proto, path)
    monkeypatch.setattr(limits, "MAX_NODES", 10)
    with pytest.raises(ImportModelError, match=r"has 11 nodes .* more than 10"):
        limits.check_node_count(proto, path)


MUCH = {
    "operands": node("Max", ["a"] * 10_000, ["b"]),
    "a text": node("Relu", ["a"], ["b"], doc_string="n" * 100_000),
    "integers": node("Relu", ["a"], ["b"], many=[*range(100_000)]),
    "a tensor": node("Relu", ["a"], ["b"], t=numpy_helper.from_array(np.ones(1 << 20))),
}


@pytest.mark.parametrize("kind", MUCH)
def test_functions_that_hold_much_are_refused_before_they_are_copied(
    kind: str, tmp_path: Path
) -> None:
    function = helper.make_function("own", "F", ["a"], ["b"], [MUCH[kind]], OPSETS)
    nodes = [node("F", ["x"], [f"y{at}"], domain="own") for at in range(2000)]
    path = written(tmp_path, model_of(nodes, functions=[function]))
    begin_s = time.process_time()
    with pytest.raises(
        ImportModelError, match=r"model\.onnx: its 1 functions take .* in the places"
    ):
        import_model(path)
    assert time.process_time() - begin_s < 5


def test_the_limit_of_copies_is_at_the_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = [calls("Two", "One", "One"), calls("One")]
    proto = model_of([node("Two", ["x"], ["y"], domain="own")], functions=functions)
    path = written(tmp_path, proto)
    bodies = {function.name: function.node for function in functions}
    one, two = (
        sum(each.ByteSize() + 2 * limits.OPERAND_BYTES for each in bodies[name])
        for name in ("One", "Two")
    )
    monkeypatch.setattr(limits, "MAX_COPIED_BYTES", two + 2 * one)
    limits.check_node_count(proto, path)
    monkeypatch.setattr(limits, "MAX_COPIED_BYTES", two + 2 * one - 1)
    with pytest.raises(ImportModelError, match="its 2 functions take"):
        limits.check_node_count(proto, path)


def test_functions_that_call_themselves_are_refused_by_name(tmp_path: Path) -> None:
    functions = [calls("One", "Two"), calls("Two", "One")]
    proto = model_of([node("One", ["x"], ["y"], domain="own")], functions=functions)
    with pytest.raises(ImportModelError, match=r"model\.onnx: its functions call themselves.*own"):
        import_model(written(tmp_path, proto))


@pytest.mark.parametrize("depth", [1200, 16_000])
def test_counts_of_any_length_are_said_in_one_short_sentence(depth: int, tmp_path: Path) -> None:
    """2^16000 has more digits than Python writes, and no float holds it."""
    functions = [calls(f"F{at}", f"F{at + 1}", f"F{at + 1}") for at in range(depth - 1)]
    proto = model_of([node("F0", ["x"], ["y"], domain="own")],
                     functions=[*functions, calls(f"F{depth - 1}")])  # fmt: skip
    with pytest.raises(ImportModelError, match=r"000 or more nodes once its") as caught:
        limits.check_node_count(proto, tmp_path / "model.onnx")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("where", ["in", "beside", "input", "noted"])
@pytest.mark.parametrize(
    ("dims", "message"),
    [([1] * 5000, "has 5000 axes"), ([1 << 62] * 3000, "has 3000 axes"),
     ([0, 1 << 62], "which no array can have"), ([1 << 62, 1 << 62], "which no array can have")],
)  # fmt: skip
def test_sizes_that_no_array_can_have_are_refused(
    where: str, dims: list[int], message: str, tmp_path: Path
) -> None:
    path = external(tmp_path, None, 12, dims)
    if where == "in":
        proto = onnx.load(path, load_external_data=False)
        (tensor,) = proto.graph.initializer
        del tensor.external_data[:]
        tensor.data_location = onnx.TensorProto.DEFAULT
        tensor.raw_data = bytes(0 if 0 in dims else 4)
        path.write_bytes(proto.SerializeToString())
    elif where != "beside":
        proto = model_of([node("Relu", ["x"], ["m"]), node("Relu", ["m"], ["y"])], sizes=dims)
        if where == "noted":
            proto.graph.value_info.append(proto.graph.input[0])
            proto.graph.value_info[0].name = "m"
            proto.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", 1, [1, 3]))
        path = written(tmp_path, proto)
    for read in (import_model, read_model_file):
        with pytest.raises(ImportModelError, match=message) as caught:
            read(path)
        assert len(str(caught.value)) < 300


def test_nodes_of_one_name_get_names_of_their_own_in_no_time(tmp_path: Path) -> None:
    """It had taken the square of their number: minutes for the most that a model may have."""
    nodes = [node("Relu", ["x"], ["y" if at == 0 else f"r{at}"], name="a") for at in range(8000)]
    nodes[1].name = "a_2"
    path = written(tmp_path, model_of(nodes, sizes=(1, 3)))
    begin_s = time.process_time()
    names = [one.name for one in read_model_file(path).model.graph]
    assert names[:4] == ["a", "a_2", "a_1", "a_3"]
    assert len(set(names)) == 8000
    assert time.process_time() - begin_s < 5


@pytest.mark.parametrize("dims", [(3,), (1 << 30,), (2, 24, 1013305, 172571, 62)])
def test_a_constant_without_its_elements_is_refused_before_they_are_made(
    dims: Sequence[int], tmp_path: Path
) -> None:
    proto = model_of([node("Add", ["x", "w"], ["y"])], sizes=(1, 3))
    proto.graph.initializer.add(name="w", data_type=1, dims=dims)
    with pytest.raises(ImportModelError, match="'w' has not as many elements"):
        import_model(written(tmp_path, proto))


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [(TensorProto.FLOAT, 7), (TensorProto.FLOAT16, 7), (TensorProto.INT4, 4),
     (TensorProto.UINT2, 2), (TensorProto.COMPLEX64, 14)],
)  # fmt: skip
def test_elements_in_a_field_of_their_type_are_counted(dtype: int, numbers: int) -> None:
    field = (
        "int32_data"
        if dtype in (TensorProto.FLOAT16, TensorProto.INT4, TensorProto.UINT2)
        else "float_data"
    )
    proto = model_of([node("Add", ["x", "w"], ["y"])])
    tensor = proto.graph.initializer.add(name="w", data_type=dtype, dims=[7])
    getattr(tensor, field).extend([1] * numbers)
    check_tensors(proto, Path("model.onnx"))
    del getattr(tensor, field)[1:]
    with pytest.raises(ImportModelError, match="'w' has not as many elements"):
        check_tensors(proto, Path("model.onnx"))


def test_a_name_of_pages_is_refused_in_a_line(tmp_path: Path) -> None:
    proto = model_of([node("Relu", ["x"], ["y"], name="n" * limits.MAX_NAME)])
    read_model_file(written(tmp_path, proto))
    for field, value in (("name", "n" * (limits.MAX_NAME + 1)), ("op_type", "R" * 100_000)):
        setattr(proto.graph.node[0], field, value)
        path = written(tmp_path, proto)
        with pytest.raises(ImportModelError, match="characters, more than 4096") as caught:
            read_model_file(path)
        assert len(str(caught.value)) < 300


def build(model: Path, folder: Path) -> None:
    build_engine(model, "laptop", folder / "model.engine", BuildOptions())


def test_sizes_that_inference_multiplies_are_refused_at_their_node(tmp_path: Path) -> None:
    """32 sizes of 2^62: no float holds their product."""
    nodes = [node("Expand", ["x", "s"], ["large"], name="grow"),
             node("ReduceMax", ["large"], ["y"], name="most", keepdims=0)]  # fmt: skip
    proto = model_of(nodes, {"s": np.full(32, 1 << 62)}, sizes=(1,))
    path = written(tmp_path, proto)
    for run in (lambda: infer_file(path, InputRequest()), lambda: build(path, tmp_path)):
        with pytest.raises(TandemError, match=r"model\.onnx: node 'grow' \(Expand\) makes"):
            run()


def test_a_file_beside_the_model_whose_name_is_too_long_is_refused(tmp_path: Path) -> None:
    path = external(tmp_path, None, 12)
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = "w" * 5000
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ImportModelError, match=r"model\.onnx keeps weights in a file beside it"):
        import_model(path)


def external(folder: Path, length: str | None, file_bytes: int, dims: Sequence[int] = (3,)) -> Path:
    proto = model_of([node("Add", ["x", "w"], ["y"])], sizes=(1, 3))
    tensor = proto.graph.initializer.add(name="w", data_type=1, dims=dims, data_location=1)
    tensor.external_data.add(key="location", value="w.bin")
    if length is not None:
        tensor.external_data.add(key="length", value=length)
    with (folder / "w.bin").open("wb") as file:
        file.write(np.ones(3, np.float32).tobytes())
        file.truncate(file_bytes)
    return written(folder, proto)


def test_of_a_large_file_beside_the_model_only_the_tensor_is_read(tmp_path: Path) -> None:
    """The file has holes for 9 GiB; what is read of it are 12 bytes."""
    path = external(tmp_path, None, 9 << 30)
    with limited_memory(1 << 30):
        (weights,) = import_model(path).model.graph.initializers.values()
    assert weights.const_value is not None
    assert weights.const_value.numpy().tolist() == [1, 1, 1]


@pytest.mark.parametrize("length", [str(9 << 30), "13", "-1", "many"])
def test_a_length_that_is_not_the_tensor_s_is_refused(length: str, tmp_path: Path) -> None:
    with pytest.raises(ImportModelError, match=r"model\.onnx: the constant 'w'.* take 12;"):
        import_model(external(tmp_path, length, 9 << 30))


def test_weights_beside_the_model_are_refused_above_the_limit_of_memory(tmp_path: Path) -> None:
    path = external(tmp_path, None, 2 << 30, dims=(1 << 28,))
    with (
        limited_memory(1 << 29),
        pytest.raises(ImportModelError, match=r"1\.0 GiB of weights or more.* limit of 512\.0 MiB"),
    ):
        import_model(path)


def test_weights_beside_the_model_count_twice_while_they_are_read(tmp_path: Path) -> None:
    proto = onnx.load(external(tmp_path, None, 12), load_external_data=False)
    with limited_memory(24):
        limits.check_external_sizes(proto.graph.initializer, tmp_path / "model.onnx")
    with limited_memory(23), pytest.raises(ImportModelError, match="takes 24 bytes, above"):
        limits.check_external_sizes(proto.graph.initializer, tmp_path / "model.onnx")


def test_what_is_no_onnx_file_by_its_size_or_kind_is_not_read(tmp_path: Path) -> None:
    large, pipe = tmp_path / "large.onnx", tmp_path / "pipe.onnx"
    with large.open("wb") as file:
        file.truncate(9 << 30)
    os.mkfifo(pipe)
    with pytest.raises(ImportModelError, match=r"large\.onnx has 9\.0 GiB"):
        read_model_file(large)
    for read in (read_model_file, model_sha256):
        with pytest.raises(ImportModelError, match=r"pipe\.onnx: it is no file"):
            read(pipe)


def growing(op: str, inputs: Sequence[str], **attributes: object) -> list[onnx.NodeProto]:
    return [
        node(op, inputs, ["c"], name="costly", **attributes),
        node("Add", ["x", "c"], ["y"], name="add"),
    ]


SLOW = growing("Einsum", ["v"] * 6, equation="ab,bc,cd,da,ac,bd->")
WIDE = np.ones((1000, 1000), np.float32)


def test_a_node_that_takes_too_long_to_fold_stays_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1000^4 products in NumPy: half an hour."""
    monkeypatch.setattr(fold, "MAX_CHILD_SECONDS", 0.5)
    model = import_model(written(tmp_path, model_of(SLOW, {"v": WIDE}))).model
    begin_s = time.monotonic()
    fold_constants(model)
    assert time.monotonic() - begin_s < 60
    assert [one.name for one in model.graph] == ["costly", "add"]


@pytest.mark.parametrize(
    ("nodes", "constants", "expected"),
    [
        (
            growing("MatMul", ["a", "b"]),
            {"a": np.full((2, 3), 2.0, np.float32), "b": np.ones((3, 8), np.float32)},
            np.full((2, 8), 6.0),
        ),
        (
            growing("Resize", ["a", "", "s"], mode="nearest"),
            {"a": np.ones((1, 1, 4, 4), np.float32), "s": np.array([1, 1, 2, 2], np.float32)},
            np.ones((1, 1, 8, 8)),
        ),
    ],
)
def test_other_operators_are_folded_in_the_child(
    nodes: list[onnx.NodeProto],
    constants: dict[str, np.ndarray],
    expected: np.ndarray,
    tmp_path: Path,
) -> None:
    model = import_model(written(tmp_path, model_of(nodes, constants))).model
    fold_constants(model)
    (add,) = model.graph
    assert add.inputs[1] is not None
    assert add.inputs[1].const_value is not None
    np.testing.assert_array_equal(add.inputs[1].const_value.numpy(), expected)


def test_text_is_never_folded(tmp_path: Path) -> None:
    """40 doublings of a letter would be a terabyte in one element."""
    names = ["s", *(f"s{turn}" for turn in range(40))]
    nodes = [node("StringConcat", [names[at]] * 2, [names[at + 1]], name=f"double_{at}")
             for at in range(40)]  # fmt: skip
    nodes += [node("Equal", ["s39", "s39"], ["e"]), node("Cast", ["e"], ["f"], to=1)]
    proto = model_of([*nodes, node("Add", ["x", "f"], ["y"])], {"s": np.array(["a"], object)})
    proto.opset_import[0].version = 20
    model = import_model(written(tmp_path, proto)).model
    fold_constants(model)
    assert sum(one.op_type == "StringConcat" for one in model.graph) == 40


def test_a_sequence_of_millions_of_parts_is_refused_at_its_node(tmp_path: Path) -> None:
    nodes = [
        node("ConstantOfShape", ["n"], ["c"]),
        node("SplitToSequence", ["c", "k"], ["s"], name="split", axis=0),
        node("SequenceAt", ["s", "z"], ["e"]),
        node("Add", ["x", "e"], ["y"]),
    ]
    constants = {"n": np.array([1 << 26]), "k": np.array(1), "z": np.array(0)}
    model = import_model(written(tmp_path, model_of(nodes, constants))).model
    with pytest.raises(ImportModelError, match=r"node 'split' \(SplitToSequence\) makes 67108864"):
        fold_constants(model)


def test_a_step_ends_when_its_seconds_are_over() -> None:
    budget = CpuBudget("folding", 0.05)
    budget.check()
    until_s = time.process_time() + 0.06
    while time.process_time() < until_s:
        pass
    with pytest.raises(ImportModelError, match=r"folding takes longer than 0 s of processor time"):
        budget.check()


def test_the_child_ends_a_step_after_its_seconds_and_serves_the_next() -> None:
    graph = helper.make_graph(
        [SLOW[0]], "g", [], [helper.make_tensor_value_info("c", 1, [])],
        [numpy_helper.from_array(WIDE, "v")],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=OPSETS[:1], ir_version=9)
    with pytest.raises(native.TooSlowError, match="evaluator took longer than 1 s"):
        native.evaluate(proto, cpu_seconds=1, max_bytes=100)
    proto.graph.node[0].CopyFrom(node("ReduceSum", ["v"], ["c"], keepdims=0))
    results = native.evaluate(proto, cpu_seconds=1, max_bytes=100)
    assert numpy_helper.to_array(results["c"]) == 1e6


def test_inputs_of_64_gib_are_refused_before_they_are_made(tmp_path: Path) -> None:
    proto = model_of([node("Relu", ["x"], ["y"])], sizes=(64, 1024, 1024, 256))
    with pytest.raises(InferError, match=r"64\.0 GiB each, of which 'x' .* --max-memory"):
        infer_file(written(tmp_path, proto), InputRequest())


def test_tensors_that_do_not_fit_are_refused_before_the_model_runs(tmp_path: Path) -> None:
    nodes = [node("Expand", ["x", "s"], ["y"], name="grow")]
    path = written(tmp_path, model_of(nodes, {"s": np.array([2**30, 3, 8, 8])}))
    with pytest.raises(TandemError, match=r"model\.onnx: node 'grow' \(Expand\) makes"):
        infer_file(path, InputRequest())


def test_memory_that_only_the_run_asks_for_is_bounded(tmp_path: Path) -> None:
    """The size is computed of the input, so that nothing says it before."""
    nodes = [
        node("ReduceMax", ["x"], ["m"], keepdims=0),
        node("Mul", ["m", "zero"], ["none"]),
        node("Add", ["none", "large"], ["f"]),
        node("Cast", ["f"], ["i"], to=TensorProto.INT64),
        node("Unsqueeze", ["i", "axes"], ["s"]),
        node("ConstantOfShape", ["s"], ["c"]),
        node("ReduceSum", ["c"], ["r"], keepdims=0),
        node("Add", ["x", "r"], ["y"]),
    ]
    constants = {
        "zero": np.array(0, np.float32),
        "large": np.array(2**30, np.float32),
        "axes": np.array([0]),
    }
    path = written(tmp_path, model_of(nodes, constants))
    with limited_memory(1 << 30), pytest.raises(InferError, match=r"cannot run .*model\.onnx"):
        infer_file(path, InputRequest())


def test_a_loop_without_an_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("Add", ["state", "one"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("at", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", 1, None),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", 1, None),
        ],
    )
    nodes = [node("Loop", ["turns", "", "one"], ["l"], body=body), node("Add", ["x", "l"], ["y"])]
    constants = {"turns": np.array(2**62), "one": np.array(1, np.float32)}
    monkeypatch.setattr(run_limit, "MAX_RUN_SECONDS", 0.5)
    with pytest.raises(InferError, match=r"model\.onnx: onnxruntime has not ended the model"):
        infer_file(written(tmp_path, model_of(nodes, constants)), InputRequest())


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    data = model_of([node("Relu", ["x"], ["y"], name="abcdefgh")]).SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(data.replace(b"abcdefgh", b"abcd\xff\xfegh"))
    for read in (import_model, read_model_file):
        with pytest.raises(ImportModelError, match=r"model\.onnx.*(UTF-8|do not parse)"):
            read(path)


def test_a_tensor_that_nothing_makes_is_refused_by_every_reader(tmp_path: Path) -> None:
    path = written(tmp_path, model_of([node("Add", ["x", "nowhere"], ["y"])]))
    for read in (import_model, read_model_file):
        with pytest.raises(ImportModelError, match=r"model\.onnx is not valid ONNX: .*nowhere"):
            read(path)


def test_operators_that_onnx_does_not_have_can_be_inspected(tmp_path: Path) -> None:
    path = written(tmp_path, model_of([node("EfficientNMS_TRT", ["x"], ["y"], name="nms")]))
    assert [one.op_type for one in read_model_file(path).model.graph] == ["EfficientNMS_TRT"]
    assert isinstance(read_model_file(path).model, ir.Model)
    with pytest.raises(ImportModelError, match="ONNX has no operator EfficientNMS_TRT"):
        import_model(path)
