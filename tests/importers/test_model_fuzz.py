"""Damaged models: each is planned or built, or refused in a sentence that names its file.

`scripts/fuzz_models.py` makes them and says how to repeat one.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from device.errors import TandemError
from scripts.fuzz_commands import COMMANDS, CommandLine, run_command
from scripts.fuzz_models import Tally, outcome_of, run
from scripts.mutants.mutant import mutant
from scripts.mutants.whole import whole
from toolkit.build import plan
from toolkit.engine.build import build_engine
from toolkit.engine.options import BuildOptions
from toolkit.errors import ImportModelError
from toolkit.graph import native
from toolkit.graph.max_memory import limited_memory, set_max_memory
from toolkit.graph.memory_limit import check_host_memory
from toolkit.graph.passes.shapes import infer_shapes
from toolkit.importers.onnx import ModelBytes, import_model
from toolkit.quantize.qdq.importer import import_qdq

# Seeds that ended in a traceback or a crash, by what they hit.
FOUND = {
    10: "the version converter without an opset import",
    149: "PRelu slopes of a false rank",
    217: "pads of another number than the kernel",
    232: "PRelu of three inputs",
    357: "groups that do not divide the channels",
    393: "a function that calls itself with fewer inputs",
    420: "a convolution without channels",
    545: "a convolution of rank 1",
    582: "a constant that does not broadcast",
    625: "a definition of fewer inputs",
    667: "a Constant without a value",
    952: "a crash in the version converter",
    20761: "an attribute of a function outside one",
    30795: "no groups",
    2000978: "an axis that is empty",
    2003708: "a Reshape to another number of elements",
    2004193: "operands that a definition does not have",
    2004211: "a Transpose of two of six axes",
    5012681: "an operator whose name has several lines",
    5015687: "a model that the checker cannot parse",
    5019622: "an operator of a domain whose name has several lines",
    5044508: "a constant that is noted as another",
    5058434: "scales of two axes",
    5058832: "a Constant without a value that is named late",
    9005959: "a node before what it reads",
    9037256: "Concats of Concats",
    9055367: "a recurrent layer of an unknown layout",
    9066405: "a function that cannot be written",
    7003474: "a Constant with the value of a function, in none",
    7038103: "a Constant of two values",
}


def no_faults(tally: Tally, count: int) -> None:
    assert not tally.faults, "\n".join(f"{f.seed} {f.where}\n{f.details}" for f in tally.faults)
    assert sum(tally.outcomes.values()) == count
    # The mutants reach every depth: some are built, some refused.
    assert tally.outcomes["done"] > count // 20
    assert tally.outcomes["refused"] > count // 4


def test_damaged_models_are_built_or_refused_by_name() -> None:
    no_faults(run(500_000, 40), 40)


# Seeds of whole files that ended in a traceback, and in what.
FOUND_WHOLE = {
    2: "compare: a file that does not parse",
    13: "infer --all: a tensor that nothing makes",
    34: "inspect: a file that does not parse",
    36: "model guess: a file that does not parse",
    172: "infer: a tensor that nothing makes",
    1313: "infer: a refusal that does not name the file",
    40272: "compare: a branch in a segment that is emulated",
    61280: "export: an input that no segment reads",
    61686: "compare: a false shape that onnxruntime meets in a trial of INT8",
    60280: "inspect: a function that gives what nothing makes",
    31415111: "export: a file of weights whose name is not UTF-8",
    7270527: "inspect: a branch that is one of a function, in none",
    7270766: "model guess: a branch that is one of a function, in none",
}
CRASHES = 62172  # onnxruntime, in calibrate


@pytest.mark.parametrize("seed", FOUND_WHOLE, ids=str)
def test_a_whole_file_that_was_a_fault_is_none(seed: int, tmp_path) -> None:
    assert isinstance(outcome_of(seed, tmp_path, whole=True), str)


def test_a_crash_of_onnxruntime_is_said_with_the_file() -> None:
    tally = run(CRASHES, 1, whole=True)
    assert not tally.faults
    assert sum(tally.outcomes.values()) == 1


def test_damaged_whole_files_end_every_command_in_an_answer_or_a_sentence() -> None:
    no_faults(run(700_000, 10, whole=True), 10)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_thousands_of_damaged_whole_files() -> None:
    no_faults(run(800_000, 3000, jobs=2, whole=True), 3000)


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.words)
def test_commands_take_the_models_that_are_damaged_otherwise(line: CommandLine, tmp_path) -> None:
    """A command that refused its model as it is would say nothing of a damaged one."""
    refuses = {"ranges {model}", "surgeon reduce {model} --check true -o {out}/part.onnx"}
    needs = {"model guess": "detector", "ranges": "quantized"}
    name = needs.get(line.title, "branches")
    data = whole(name)
    if line.words in refuses:
        with pytest.raises(TandemError, match=r"mutant\.onnx"):
            run_command(line, data, data, tmp_path)
        return
    run_command(line, data, data, tmp_path)


def test_no_child_is_started_when_the_time_is_over() -> None:
    assert run(0, 10_000, jobs=2, seconds=0.0) == Tally()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_thousands_of_damaged_models_are_built_or_refused_by_name() -> None:
    no_faults(run(600_000, 4000, jobs=2), 4000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", FOUND, ids=str)
def test_a_mutant_that_was_a_fault_is_none(seed: int) -> None:
    assert not run(seed, 1).faults


def test_a_seed_always_gives_the_same_model() -> None:
    assert mutant(7) == mutant(7)
    assert mutant(7) != mutant(8)


def model_of(
    nodes: Sequence[onnx.NodeProto], opset: int = 19, **constants: np.ndarray
) -> ModelBytes:
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info("x", 1, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return ModelBytes("model.onnx", model.SerializeToString())


def build(model: ModelBytes, tmp_path, profile: str = "laptop") -> None:
    build_engine(model, profile, tmp_path / "m.engine", BuildOptions(kernels=False))


@pytest.mark.parametrize("opset", [11, 13, 17, 18, 19])
def test_a_maximum_over_all_axes_is_planned_and_built(opset: int, tmp_path) -> None:
    model = model_of(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
            helper.make_node("ReduceMax", ["c"], ["y"], name="maximum", keepdims=0),
        ],
        opset,
        w=np.ones((4, 3, 3, 3), np.float32),
    )
    placed = plan(onnx.load_from_string(model.data), profile="agx-orin-64gb")
    assert "conv" in {row.node for row in placed.placements}
    build(model, tmp_path, "agx-orin-64gb")


def test_a_node_that_contradicts_its_operator_is_refused_by_name(tmp_path) -> None:
    convolution = helper.make_node("Conv", ["x", "w"], ["y"], name="stem", group=2)
    with pytest.raises(ImportModelError) as info:
        build(model_of([convolution], w=np.ones((4, 3, 3, 3), np.float32)), tmp_path)
    assert "model.onnx: node 'stem' (Conv) contradicts its operator" in str(info.value)
    assert "2 groups" in str(info.value)


ZERO = np.zeros((), np.int64)
NONE = np.zeros(0, np.int64)
TWO = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("op", "constants", "count"),
    [
        ("CumSum", {"axis": NONE}, 0),
        ("CumSum", {"axis": np.zeros(2, np.int64)}, 2),
        ("Clip", {"low": TWO}, 2),
        ("Pad", {"pads": np.zeros(8, np.int64), "fill": TWO}, 2),
        ("Trilu", {"k": NONE}, 0),
    ],
)
def test_an_input_that_is_not_one_number_is_refused(
    op: str, constants: dict[str, np.ndarray], count: int, tmp_path
) -> None:
    node = helper.make_node(op, ["x", *constants], ["y"], name="one")
    with pytest.raises(ImportModelError, match=rf"node 'one' \({op}\).*has {count} elements"):
        build(model_of([node], **constants), tmp_path)


def test_scales_of_two_axes_are_refused(tmp_path) -> None:
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], name="one")
    model = model_of([node], scales=np.array([[1, 1, 2, 2]], np.float32))
    with pytest.raises(ImportModelError, match=r"node 'one' \(Resize\).* \[1, 4\] instead of one"):
        build(model, tmp_path)


@pytest.mark.parametrize("text", ["scale", "zero"])
def test_text_as_scale_or_zero_point_is_refused_with_node_and_tensor(text: str, tmp_path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="quantize"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], name="restore"),
    ]
    proto = onnx.load_from_string(
        model_of(nodes, scale=np.array(0.5, np.float32), zero=np.array(0, np.int8)).data
    )
    tensor = next(tensor for tensor in proto.graph.initializer if tensor.name == text)
    tensor.CopyFrom(helper.make_tensor(text, onnx.TensorProto.STRING, [], [b"1"]))
    model = ModelBytes("model.onnx", proto.SerializeToString())
    with pytest.raises(TandemError, match=rf"model\.onnx: node 'quantize' .*{text}"):
        build(model, tmp_path)
    with pytest.raises(ImportModelError, match=rf"reads '{text}', which holds text"):
        import_qdq(import_model(model).model)


def test_a_constant_without_a_value_is_refused(tmp_path) -> None:
    nodes = [helper.make_node("Constant", [], ["c"], name="none")]
    nodes.append(helper.make_node("Tile", ["x", "c"], ["y"], name="one"))
    with pytest.raises(ImportModelError, match=r"node 'none' \(Constant\).*it has no value"):
        build(model_of(nodes, opset=9), tmp_path)


def test_a_folded_constant_has_its_own_sizes_whatever_the_model_notes(tmp_path) -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["c", "axes"], ["u"], name="unsqueeze"),
        helper.make_node("Mul", ["x", "u"], ["y"], name="one"),
    ]
    model = model_of(nodes, c=np.ones((3, 2, 2), np.float32), axes=np.array([0, 1]))
    proto = onnx.load_from_string(model.data)
    proto.graph.value_info.append(helper.make_tensor_value_info("u", 1, [3, 1, 1]))
    with pytest.raises(ImportModelError, match=r"node 'one' \(Mul\) contradicts its operator"):
        build(ModelBytes("model.onnx", proto.SerializeToString()), tmp_path, "agx-orin-64gb")


@pytest.mark.parametrize("domain", ["", "own"])
@pytest.mark.parametrize("op", ["Top\n\x04K", "K" * 9000])
def test_a_message_about_an_operator_is_one_short_line(domain: str, op: str) -> None:
    node = helper.make_node(op, ["x"], ["y"], name="one", domain=domain)
    proto = onnx.load_from_string(model_of([node]).data)
    proto.opset_import.append(helper.make_opsetid("own", 1))
    with pytest.raises(ImportModelError) as info:
        import_model(ModelBytes("model.onnx", proto.SerializeToString()))
    message = str(info.value)
    assert message.isprintable()
    assert len(message) < 1000
    assert op[:3] in message


def test_a_model_that_the_checker_cannot_parse_is_refused() -> None:
    with pytest.raises(
        ImportModelError, match=r"model\.onnx is not (valid|a complete) ONNX.*parse"
    ):
        import_model(ModelBytes("model.onnx", mutant(5152917)))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            helper.make_node("Transpose", ["x"], ["y"], name="one", perm=[1, 3]),
            r"its order \[1, 3\] is none of the 4 axes of",
        ),
        (
            helper.make_node("Reshape", ["x", "shape"], ["y"], name="one"),
            r"it makes 35 elements, \[5, 7\], of \d+",
        ),
    ],
)
def test_a_view_of_other_elements_is_refused(node: onnx.NodeProto, message: str, tmp_path) -> None:
    with pytest.raises(ImportModelError, match=message):
        build(model_of([node], shape=np.array([5, 7])), tmp_path)


def test_an_axis_of_rank_0_or_1_is_taken(tmp_path) -> None:
    for axis in (ZERO, np.zeros(1, np.int64)):
        node = helper.make_node("CumSum", ["x", "axis"], ["y"], name="one")
        build(model_of([node], axis=axis), tmp_path)


def doubled(source: str, times: int) -> list[onnx.NodeProto]:
    """Concatenate a tensor with itself again and again: 2^times of it."""
    names = [source, *(f"d{turn}" for turn in range(times))]
    return [
        helper.make_node("Concat", [one, one], [two], name=f"double_{turn}", axis=0)
        for turn, (one, two) in enumerate(itertools.pairwise(names))
    ]


def growing_branch(name: str, size: int) -> onnx.GraphProto:
    """A branch that fills `size` elements and adds them up."""
    nodes = [
        helper.make_node("ConstantOfShape", [f"{name}_size"], [f"{name}_all"], name=f"{name}_grow"),
        helper.make_node("ReduceSum", [f"{name}_all"], [f"{name}_sum"], keepdims=0),
    ]
    result = helper.make_tensor_value_info(f"{name}_sum", onnx.TensorProto.FLOAT, [])
    constant = onnx.numpy_helper.from_array(np.array([size]), f"{name}_size")
    return helper.make_graph(nodes, name, [], [result], [constant])


BOMBS = {
    "a branch of If": (
        [
            helper.make_node("ReduceMax", ["x"], ["m"], name="maximum", keepdims=0),
            helper.make_node("Cast", ["m"], ["c"], name="condition", to=onnx.TensorProto.BOOL),
            helper.make_node(
                "If",
                ["c"],
                ["i"],
                name="choose",
                then_branch=growing_branch("then", 2**40),
                else_branch=growing_branch("else", 2**41),
            ),
            helper.make_node("Add", ["x", "i"], ["y"], name="add"),
        ],
        {},
        "_grow'",
    ),
    "33 doublings of integers": (
        [*doubled("c", 33), helper.make_node("Reshape", ["x", "d32"], ["y"], name="shape")],
        {"c": np.array([1])},
        "node 'double_24'",
    ),
    "33 doublings of an input": (
        [*doubled("x", 33), helper.make_node("Relu", ["d32"], ["y"], name="relu")],
        {},
        "node 'double_",
    ),
    "Expand": (
        [helper.make_node("Expand", ["x", "s"], ["y"], name="grow")],
        {"s": np.array([2**31, 3, 8, 8])},
        "node 'grow'",
    ),
    "ConstantOfShape": (
        [
            helper.make_node("ConstantOfShape", ["s"], ["c"], name="grow"),
            helper.make_node("Add", ["x", "c"], ["y"], name="add"),
        ],
        {"s": np.array([2**26, 3, 8, 8])},
        "node 'grow'",
    ),
    "Resize": (
        [helper.make_node("Resize", ["x", "", "s"], ["y"], name="grow")],
        {"s": np.array([1, 1, 2**14, 2**14], np.float32)},
        "node 'grow'",
    ),
    "Pad": (
        [helper.make_node("Pad", ["x", "s"], ["y"], name="grow")],
        {"s": np.array([0, 0, 0, 0, 2**31, 0, 0, 0])},
        "node 'grow'",
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_model_that_asks_for_terabytes_is_refused_at_its_node(bomb: str, tmp_path) -> None:
    nodes, constants, node = BOMBS[bomb]
    with pytest.raises(TandemError, match=node) as info:
        build(model_of(nodes, **constants), tmp_path)
    assert "model.onnx" in str(info.value)


def test_the_limit_of_memory_is_at_the_last_byte() -> None:
    """A tensor has 768 bytes; x and a live while the first node runs, a and y while the second."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="one"),
        helper.make_node("Sigmoid", ["a"], ["y"], name="two"),
    ]
    imported = import_model(model_of(nodes))
    infer_shapes(imported.model)
    try:
        set_max_memory(2 * 768)
        check_host_memory(imported.model.graph)
        set_max_memory(2 * 768 - 1)
        with pytest.raises(
            ImportModelError, match=r"'one' .* 1536 bytes are in use, above .* 1535"
        ):
            check_host_memory(imported.model.graph)
    finally:
        set_max_memory(None)


@pytest.mark.parametrize(
    "limit_bytes", [1_000, pytest.param(64 << 20, marks=pytest.mark.slow), 128 << 20]
)
def test_a_limit_without_room_for_onnx_is_said_before_any_call(limit_bytes: int) -> None:
    """A child under such a limit could end in the middle of a call, as if the model did it."""
    good = onnx.load_from_string(model_of([helper.make_node("Relu", ["x"], ["y"])]).data)
    with limited_memory(limit_bytes):
        for _ in range(3):
            with pytest.raises(ImportModelError, match=r"does not start within .*--max-memory"):
                native.infer_shapes(good, strict=True, data_prop=True)
    assert native.infer_shapes(good, strict=True, data_prop=True).graph.node


def test_a_crash_of_onnx_is_an_error_and_the_next_model_is_served() -> None:
    good = onnx.load_from_string(model_of([helper.make_node("Relu", ["x"], ["y"])]).data)
    native.infer_shapes(good, strict=True, data_prop=True)
    (child,) = native._children
    child.process.kill()
    child.process.wait()
    inferred = native.infer_shapes(good, strict=True, data_prop=True)
    assert [dim.dim_value for dim in inferred.graph.output[0].type.tensor_type.shape.dim] == [
        *(1, 3, 8, 8)
    ]
