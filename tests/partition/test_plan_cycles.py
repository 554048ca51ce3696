"""The plan tells the clocks of each DLA layer, worked out by hand for one convolution."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from model_fixtures import save, small_convnet
from onnx import helper

from toolkit.cli.main import tandem
from toolkit.engine.target import choose_target
from toolkit.graph.node_view import views
from toolkit.graph.segment import PlannedSegment
from toolkit.importers.onnx import import_model
from toolkit.partition.costs.constants import load_costs
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.cycles import cycles_of


def plan(*arguments: object) -> str:
    done = CliRunner().invoke(tandem, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_convolution_on_xavier_takes_an_atom_each_clock(tmp_path: Path) -> None:
    """64 channels to 32 at 3x3 fill the 64 x 32 array: a clock for each position and tap."""
    weights = {"w": np.ones((32, 64, 3, 3), np.float32)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "conv", pads=[1] * 4)]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 64, 64, 64]}, {"y": [1, 32, 64, 64]}, weights)
    profile = choose_target("agx-xavier-32gb", None).profile
    seen = views(import_model(path).model.graph)
    costs = CostModel(seen, profile, precision="int8")
    segment = PlannedSegment("dla0.0", "dla0", tuple(view.name for view in seen))
    actual = cycles_of((segment,), seen, costs)
    assert actual is not None
    (layer,) = actual.layers
    efficiency = load_costs().dla.array_efficiency.value
    assert layer.array * efficiency == pytest.approx(64 * 64 * 9, rel=0.02)
    assert layer.macs == 64 * 64 * 9 * 64 * 32
    parts = {"MACs": layer.array, "output stage": layer.output_stage, "memory": layer.memory}
    assert layer.total == max(parts.values())
    assert layer.bound_by == max(parts, key=parts.__getitem__)


def test_no_segment_on_the_dla_has_no_cycles(tmp_path: Path) -> None:
    path = small_convnet(tmp_path / "m.onnx", np.random.default_rng(1))
    actual = json.loads(plan(path, "--profile", "laptop", "--precision", "fp32", "--json"))
    assert actual["plans"][0]["dla_cycles"] is None
    text = plan(path, "--profile", "laptop", "--precision", "fp32", "--cycles")
    assert "no node is on the DLA" in text


def test_orins_cycles_are_shown_as_inferred(tmp_path: Path) -> None:
    path = small_convnet(tmp_path / "m.onnx", np.random.default_rng(1), 256, 64)
    arguments = (path, "--profile", "agx-orin-64gb", "--objective", "gpu-relief")
    actual = json.loads(plan(*arguments, "--json"))["plans"][0]
    cycles = actual["dla_cycles"]
    assert cycles["source"]["certainty"] == "inferred"
    assert cycles["total"] == pytest.approx(sum(one["total"] for one in cycles["layers"]))
    counted = {node for one in cycles["layers"] for node in one["nodes"]}
    placed = {row["node"] for row in actual["nodes"] if row["processor"].startswith("dla")}
    assert counted | set(cycles["uncounted"]) <= placed
    text = plan(*arguments, "--cycles")
    assert "inferred" in text
    assert all(one["nodes"][0] in text for one in cycles["layers"])
