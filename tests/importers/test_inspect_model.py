"""`tandem inspect model.onnx`: figures against counts made by hand and by numpy."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from model_fixtures import save, small_convnet
from onnx import helper, numpy_helper

from toolkit.cli.main import tandem


def run(*arguments: object) -> Result:
    return CliRunner().invoke(tandem, ["inspect", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_convnet(tmp_path_factory.mktemp("inspect") / "net.onnx", np.random.default_rng())


def test_work_and_weights_are_those_of_the_model(net: Path) -> None:
    document = json.loads(run(net, "--json").stdout)
    operators = {row["op"]: row for row in document["operators"]}
    assert operators["Conv"]["macs"] == 32 * 32 * 16 * (3 * 9 + 16 * 9)
    assert operators["Gemm"]["macs"] == 16 * 10
    assert (operators["Relu"]["nodes"], operators["Relu"]["macs"]) == (2, 2 * 16 * 32 * 32)
    arrays = [numpy_helper.to_array(t) for t in onnx.load(net).graph.initializer]
    total = sum(array.size for array in arrays)
    assert document["parameters"] == total
    assert document["weights"] == {"float32": {"parameters": total, "bytes": 4 * total}}
    assert document["bytes"] == net.stat().st_size
    assert document["opsets"]["ai.onnx"] == 19
    assert document["largest"]["bytes"] == 4 * 16 * 32 * 32


def test_the_text_names_inputs_operators_and_nodes(net: Path) -> None:
    text = run(net, "--nodes").stdout
    assert "input x: float32 1x3x32x32 (12.29 kB)" in text
    assert "output y: float32 1x10 (40 B)" in text
    assert all(node.name in text for node in onnx.load(net).graph.node)


def test_a_profile_says_what_runs_where_and_why(net: Path) -> None:
    actual = json.loads(run(net, "--profile", "agx-orin-64gb", "--json").stdout)["plan"]
    rules = {row["node"]: row["rule"] for row in actual["nodes"]}
    assert rules["pool"] == "op.not-exposed"
    assert sum(segment["nodes"] for segment in actual["segments"]) == len(rules)
    text = run(net, "--profile", "agx-orin-64gb").stdout
    assert "[op.not-exposed] operator GlobalAveragePool" in text


def test_a_dynamic_model_is_shown_as_it_is_or_at_a_shape(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    weights = {"w": np.zeros((8, 5), np.float32)}
    model = save(tmp_path / "m.onnx", nodes, {"x": ["n", "t", 8]}, {"y": None}, weights)
    document = json.loads(run(model, "--json").stdout)
    assert document["inputs"][0]["shape"] == ["n", "t", 8]
    assert document["operators"][0]["unknown"] == 1
    document = json.loads(run(model, "--shape", "x=2x3x8", "--json").stdout)
    assert document["macs"] == 2 * 3 * 8 * 5


def test_arrays_are_listed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"0:x": np.zeros((2, 3)), "1:x": np.zeros((4, 3))})
    assert run(tmp_path / "a.npz").stdout.split() == (
        ["sample", "0", "x:", "float64", "2x3", "sample", "1", "x:", "float64", "4x3"]
    )


def test_options_of_models_are_refused_for_an_engine(tmp_path: Path) -> None:
    (tmp_path / "x.engine").write_bytes(b"")
    done = run(tmp_path / "x.engine", "--profile", "laptop")
    assert done.exit_code == 2
    assert "are for an ONNX model" in done.output
