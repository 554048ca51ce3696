"""`tandem surgeon`: parts compute what the whole does; what is reduced is valid and still fails."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result
from foreign_models import BY_NAME, foreign_model
from model_fixtures import save, small_convnet
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from device.errors import TandemError
from toolkit.cli.main import tandem
from toolkit.evaluate.infer.onnx_runner import OnnxRunner
from toolkit.importers.onnx import read_model_file
from toolkit.surgeon.command import Check
from toolkit.surgeon.write import write_model


def run(*arguments: object) -> Result:
    return CliRunner().invoke(tandem, ["surgeon", *map(str, arguments)], catch_exceptions=False)


def tensors(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, Any]:
    """Every tensor of a model, by the reference evaluator."""
    model = onnx.load(path)
    del model.graph.output[:]
    outputs = [name for node in model.graph.node for name in node.output if name]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in outputs)
    return dict(zip(outputs, ReferenceEvaluator(model).run(None, feeds), strict=True)) | feeds


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_convnet(tmp_path_factory.mktemp("surgeon") / "net.onnx", np.random.default_rng())


@pytest.mark.parametrize(
    ("inputs", "outputs", "nodes"),
    [
        (["r0"], ["a1"], ["conv1", "bn1", "add1"]),
        (["n1", "r0"], ["r1"], ["add1", "relu1"]),
        ([], ["r0"], ["conv0", "relu0"]),
        (["g"], [], ["flatten", "fc"]),
        (["w0", "x"], ["c0"], ["conv0"]),  # cut at a weight, which is fed then
    ],
)
def test_a_part_computes_what_the_whole_computes(
    net: Path, tmp_path: Path, rng: np.random.Generator, inputs: list[str], outputs: list[str],
    nodes: list[str],
) -> None:  # fmt: skip
    options = [word for name in inputs for word in ("--inputs", name)]
    options += [word for name in outputs for word in ("--outputs", name)]
    out = tmp_path / "part.onnx"
    assert run("extract", net, *options, "-o", out).exit_code == 0
    part = onnx.load(out)
    onnx.checker.check_model(part, full_check=True)
    assert [node.name for node in part.graph.node] == nodes
    assert all(v.type.tensor_type.HasField("shape") for v in part.graph.input)
    whole = tensors(net, {"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)})
    whole |= {t.name: numpy_helper.to_array(t) for t in onnx.load(net).graph.initializer}
    feeds = {value.name: whole[value.name] for value in part.graph.input}
    for name, array in OnnxRunner(read_model_file(out).model, "part").run(feeds).items():
        np.testing.assert_allclose(array, whole[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--outputs", "r1x"), "no tensor 'r1x'; the nearest names are 'r1'"),
        (("--inputs", "n1"), "to compute 'y' from 'n1' the model also needs its input 'x'"),
        (("--outputs", "y", "--shape", "z=1"), "has no input 'z'"),
    ],
)
def test_a_part_that_is_none_is_refused(
    net: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(TandemError, match=message):
        run("extract", net, *arguments, "-o", tmp_path / "p.onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_model_itself_is_not_overwritten(net: Path) -> None:
    before = net.read_bytes()
    with pytest.raises(TandemError, match="write the part to another file"):
        run("extract", net, "--outputs", "r0", "-o", net)
    assert net.read_bytes() == before


@pytest.mark.parametrize("out", ["part.onnx", "part.onnx.data"])
def test_the_weights_of_the_model_are_not_overwritten(net: Path, tmp_path: Path, out: str) -> None:
    source, weights = tmp_path / "m.onnx", tmp_path / "part.onnx.data"
    model = onnx.load(net)
    onnx.save(model, source, save_as_external_data=True, size_threshold=256, location=weights.name)
    before = weights.read_bytes()
    with pytest.raises(TandemError, match="holds the weights of"):
        run("extract", source, "--outputs", "r0", "-o", tmp_path / out)
    assert weights.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "part.onnx.data"}


def test_a_part_that_is_not_valid_leaves_what_was_there(net: Path, tmp_path: Path) -> None:
    out, model = tmp_path / "part.onnx", read_model_file(net).model
    write_model(model, out, external=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model.graph.initializers["w0"].const_value = ir.tensor(np.zeros((8, 3, 3, 3), np.float32))
    next(iter(model.graph)).op_type = "NoSuchOperator"
    with pytest.raises(TandemError, match="not a valid model"):
        write_model(model, out, external=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert sorted(before) == ["part.onnx", "part.onnx.data"]


def filled(net: Path, value: float) -> ir.Model:
    """The model with other weights, all `value` in the first convolution."""
    model = read_model_file(net).model
    shape = model.graph.initializers["w0"].shape
    array = np.full(tuple(shape or ()), value, np.float32)
    model.graph.initializers["w0"].const_value = ir.tensor(array, name="w0")
    return model


def weight_of(path: Path) -> float:
    (tensor,) = (t for t in onnx.load(path).graph.initializer if t.name == "w0")
    (value,) = set(numpy_helper.to_array(tensor).ravel().tolist())
    return float(value)


@pytest.mark.parametrize("fatal", [1, 2])  # the rename of the weights, that of the model
def test_an_end_between_two_renames_leaves_model_and_weights_that_fit(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: int
) -> None:
    out, calls = tmp_path / "part.onnx", itertools.count(1)
    write_model(filled(net, 1), out, external=True)
    replace = os.replace

    def dying(source: Path, target: Path) -> None:
        if next(calls) == fatal:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            write_model(filled(net, 2), out, external=True)
    assert weight_of(out) == 1
    for value in (3, 4):
        files = write_model(filled(net, value), out, external=True)
        assert weight_of(out) == value
        assert sorted(tmp_path.iterdir()) == sorted(files)  # no weights of models before


def test_weights_beside_a_model_go_when_it_holds_its_own(net: Path, tmp_path: Path) -> None:
    out = tmp_path / "part.onnx"
    write_model(filled(net, 1), out, external=True)
    (tmp_path / "part.onnx.notes.data").touch()  # of the user
    assert write_model(filled(net, 2), out) == (out,)
    assert weight_of(out) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"part.onnx", "part.onnx.notes.data"}


def test_external_weights_stay_external(net: Path, tmp_path: Path) -> None:
    model = onnx.load(net)
    source = tmp_path / "in" / "m.onnx"
    source.parent.mkdir()
    onnx.save(model, source, save_as_external_data=True, size_threshold=256, location="m.weights")
    out = tmp_path / "part.onnx"
    document = json.loads(run("extract", source, "--outputs", "r0", "-o", out, "--json").stdout)
    assert document["files"] == [str(out), f"{out}.data"]
    plain = onnx.load(out)
    (w0,) = (t for t in plain.graph.initializer if t.name == "w0")
    (expected,) = (t for t in onnx.load(net).graph.initializer if t.name == "w0")
    assert np.array_equal(numpy_helper.to_array(w0), numpy_helper.to_array(expected))
    assert out.stat().st_size < 2000


def test_a_branch_keeps_what_it_captures(tmp_path: Path) -> None:
    """The If reads `a` and the weight `k` only inside its branches."""
    then = helper.make_graph([helper.make_node("Add", ["a", "k"], ["t"])], "then", [],
        [helper.make_tensor_value_info("t", TensorProto.FLOAT, [2])])  # fmt: skip
    second = helper.make_graph([helper.make_node("Neg", ["a"], ["e"])], "else", [],
        [helper.make_tensor_value_info("e", TensorProto.FLOAT, [2])])  # fmt: skip
    nodes = [
        helper.make_node("Abs", ["x"], ["a"], "abs"),
        helper.make_node("ReduceSum", ["x"], ["s"], "sum", keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["c"], "greater"),
        helper.make_node("If", ["c"], ["y"], "if", then_branch=then, else_branch=second),
    ]
    weights = {"k": np.float32([10, 20]), "zero": np.float32(0)}
    model = save(tmp_path / "m.onnx", nodes, {"x": [2]}, {"y": [2]}, weights)
    out = tmp_path / "p.onnx"
    assert run("extract", model, "--inputs", "a", "--inputs", "c", "-o", out).exit_code == 0
    part = OnnxRunner(read_model_file(out).model, "part")
    a = np.float32([1, 2])
    assert part.run({"a": a, "c": np.array(True)})["y"].tolist() == [11, 22]
    assert part.run({"a": a, "c": np.array(False)})["y"].tolist() == [-1, -2]


# Operators stand in an ONNX file as they are written. Fails with 3 if all are there, and with 4 for
# a Relu where that is asked for.
FAILS_IF = """#!/bin/sh
model=$1 ops=$2 relu=$3 missing=
for op in $(echo "$ops" | tr , " "); do grep -q "$op" "$model" || missing=1; done
[ "$missing" ] || { echo "the bug is here"; exit 3; }
[ "$relu" ] && grep -q Relu "$model" && exit 4
exit 0
"""


@pytest.fixture
def fails_if(tmp_path: Path) -> Path:
    script = tmp_path / "fails_if.sh"
    script.write_text(FAILS_IF)
    return script


@pytest.mark.parametrize(
    ("ops", "remaining"),
    [
        ("Gemm", ["fc"]),
        ("Conv,Relu", ["conv0", "relu0"]),
        ("BatchNormalization,GlobalAveragePool", ["bn1", "pool"]),
    ],
)
def test_what_is_left_fails_and_no_node_can_go(
    net: Path, tmp_path: Path, fails_if: Path, ops: str, remaining: list[str]
) -> None:
    out = tmp_path / "small.onnx"
    check = f"sh {fails_if} {{model}} {ops}"
    document = json.loads(run("reduce", net, "--check", check, "-o", out, "--json").stdout)
    assert document["nodes"] == remaining
    assert document["failure"].startswith("exit status 3: the bug is here")
    small = onnx.load(out)
    onnx.checker.check_model(small, full_check=True)
    assert [node.name for node in small.graph.node] == remaining
    assert subprocess.run(["sh", fails_if, out, ops], check=False).returncode == 3
    runner = OnnxRunner(read_model_file(out).model, "small")
    assert len(runner.outputs) == len(small.graph.output)


def test_other_failures_do_not_count_with_a_pattern(
    net: Path, tmp_path: Path, fails_if: Path
) -> None:
    """Without the pattern a Relu alone fails, too, with status 4."""
    check = f"sh {fails_if} {{model}} Gemm --relu"
    for options, remaining in (((), ["relu0"]), (("--fails-with", "the bug"), ["fc"])):
        command = ("reduce", net, "--check", check, "-o", tmp_path / "s.onnx", *options, "--json")
        assert json.loads(run(*command).stdout)["nodes"] == remaining


@pytest.mark.parametrize(
    ("check", "options", "message"),
    [
        ("true", (), r"does not fail on the whole model \(exit status 0\)"),
        ("false", ("--fails-with", "x"), "does not fail with that output"),
        ("sh -c 'sleep 60'", ("--timeout", "0.1"), "it ran out of time"),
        ("no-such-program", (), "cannot run 'no-such-program'"),
        ("sh -c 'exit 1", (), "is no command: No closing quotation"),
        (" ", (), "--check is empty"),
    ],
)
def test_a_command_that_does_not_fail_is_refused(
    net: Path, tmp_path: Path, check: str, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(TandemError, match=message):
        run("reduce", net, "--check", check, "-o", tmp_path / "s.onnx", *options)
    assert not (tmp_path / "s.onnx").exists()


def test_what_a_command_started_ends_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    check = Check(f"sh -c 'sleep 60 & echo $! > {pid}; exit 1' {{model}}")
    assert check.run(tmp_path / "m.onnx").status == 1
    deadline = time.monotonic() + 5
    while _runs(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_an_interrupted_search_leaves_a_valid_model_that_fails(net: Path, tmp_path: Path) -> None:
    """The command fails at once on the first runs, and then hangs until the search is stopped."""
    out, runs = tmp_path / "small.onnx", tmp_path / "runs"
    script = tmp_path / "hangs.sh"
    script.write_text(
        f"echo run >> {runs}\n[ $(grep -c run {runs}) -ge 4 ] && exec sleep 60\nexit 1\n"
    )
    command = [sys.executable, "-m", "toolkit.cli", "surgeon", "reduce", net,
               "--check", f"sh {script}", "-o", out]  # fmt: skip
    # A shell that starts the tests in the background has told them to ignore SIGINT.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (runs.exists() and runs.read_text().count("run") == 4):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)  # by then the search waits for the run that it has started
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert shown.startswith("interrupted: ")
    onnx.checker.check_model(onnx.load(out), full_check=True)
    assert 0 < len(onnx.load(out).graph.node) < len(onnx.load(net).graph.node)
    assert [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_a_part_of_a_model_of_others_is_planned_and_computes_the_same(tmp_path: Path) -> None:
    """As docs/debugging.md walks: up to a tensor, then on its own."""
    model = BY_NAME["mtcnn-onet"]
    source, out = foreign_model(model.name), tmp_path / "part.onnx"
    whole = onnx.load(source)
    middle = next(node for node in whole.graph.node if node.op_type == "MaxPool").output[0]
    assert run("extract", source, "--outputs", middle, "-o", out).exit_code == 0
    assert len(onnx.load(out).graph.node) < len(whole.graph.node)
    feeds = model.feeds(np.random.default_rng(2))
    exact = tensors(source, feeds)[middle]
    np.testing.assert_allclose(tensors(out, feeds)[middle], exact, rtol=1e-5, atol=1e-6)
    words = ["--shape", "input=2x3x48x48", "--profile", "xavier-nx-16gb"]
    planned = CliRunner().invoke(tandem, ["plan", str(out), *words])
    assert planned.exit_code == 0, planned.output
