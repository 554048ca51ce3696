"""`--precision best`: which nodes stay in floating point, and what is said of each."""

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from model_fixtures import save, small_convnet
from onnx import helper

from calibration.budget import parse_budget
from device.profile import load_profile
from toolkit.cli.commands.build import build
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.partition.best_precision import idle_nodes
from toolkit.quantize.ranges.measure import RangeOptions

pytestmark = pytest.mark.usefixtures("without_kernels")


def graph_of(path: Path) -> ir.Model:
    graph, _ = run_passes(import_model(path).model)
    return graph


def chain(tmp_path: Path, rng: np.random.Generator, channels: int, size: int, group: int) -> Path:
    """Two convolutions 3x3, the second in groups."""
    shape = (channels, channels // group, 3, 3)
    weights = {
        "v": rng.normal(size=(channels, channels, 3, 3)).astype(np.float32),
        "w": rng.normal(size=shape).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], name="first", pads=[1] * 4),
        helper.make_node("Conv", ["a", "w"], ["y"], name="second", pads=[1] * 4, group=group),
    ]
    sizes = [1, channels, size, size]
    return save(tmp_path / "m.onnx", nodes, {"x": sizes}, {"y": sizes}, weights)


def test_nodes_bound_by_their_launch_gain_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    idle = idle_nodes(graph_of(small_convnet(tmp_path / "m.onnx", rng)), load_profile("h200"), None)
    assert {"conv0", "pool", "fc"} <= idle.keys()
    assert "conv1" not in idle  # it and the sum read one tensor: both in INT8, or it is made twice
    assert all("INT8 saves nothing" in why for why in idle.values())


def test_products_that_keep_the_gpu_busy_are_int8(tmp_path: Path, rng: np.random.Generator) -> None:
    graph = graph_of(chain(tmp_path, rng, 256, 56, group=1))
    assert idle_nodes(graph, load_profile("orin-nano-8gb"), None) == {}


@pytest.mark.parametrize("profile", ["agx-orin-64gb", "laptop"])
def test_with_a_dla_or_without_a_gpu_all_stay_int8(
    profile: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    graph = graph_of(small_convnet(tmp_path / "m.onnx", rng))
    assert idle_nodes(graph, load_profile(profile), None) == {}


def best(tmp_path: Path, rng: np.random.Generator, profile: str, budget: str | None) -> BuildResult:
    model = small_convnet(tmp_path / "m.onnx", rng)
    data = [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(8)]
    ranges = RangeOptions("minmax", budget=parse_budget(budget) if budget else None)
    options = BuildOptions("best", data=data, ranges=ranges)
    return build_engine(model, profile, tmp_path / "m.engine", options)


def test_the_noise_stays_within_a_hundredth_of_the_signal(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    result = best(tmp_path, rng, "h200", None)
    assert result.manifest.provenance.precision == "int8"
    assert result.calibration is not None
    assert min(result.calibration.sqnr_db.values()) >= 20
    assert tuple(result.kept) == result.calibration.table.keep_float
    assert "INT8 saves nothing" in result.kept["conv0"]


def test_a_budget_names_the_nodes_that_it_cost(tmp_path: Path, rng: np.random.Generator) -> None:
    plain = best(tmp_path, rng, "agx-orin-64gb", "sqnr:0")
    assert plain.kept == {}
    assert plain.calibration is not None
    expected = min(plain.calibration.sqnr_db.values()) + 10
    result = best(tmp_path, rng, "agx-orin-64gb", f"sqnr:{expected}")
    assert result.kept
    assert all(
        why.startswith("the budget: INT8 of it alone costs ") for why in result.kept.values()
    )


@pytest.mark.parametrize(("profile", "precision"), [("orin-nano-8gb", "fp16"), ("laptop", "fp32")])
def test_without_ranges_it_is_floating_point(
    profile: str, precision: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    result = build_engine(model, profile, tmp_path / "m.engine", BuildOptions("best"))
    assert result.manifest.provenance.precision == precision
    assert result.kept == {}


def test_a_table_without_samples_keeps_the_idle_nodes_too(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    measured = best(tmp_path, rng, "agx-orin-64gb", "sqnr:0").calibration
    assert measured is not None
    options = BuildOptions("best", table=measured.table)
    result = build_engine(tmp_path / "m.onnx", "h200", tmp_path / "m.engine", options)
    assert "INT8 saves nothing" in result.kept["conv0"]
    assert "conv1" not in result.kept


def test_the_command_says_why(tmp_path: Path, rng: np.random.Generator) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    for at in range(4):
        np.save(tmp_path / f"{at}.npy", rng.normal(size=(1, 3, 32, 32)).astype(np.float32))
    arguments = [str(model), "--profile", "h200", "--precision", "best", "--data", str(tmp_path)]
    text = CliRunner().invoke(build, arguments, catch_exceptions=False).output
    assert "conv0 stays in floating point: INT8 saves nothing: " in text
    result = CliRunner().invoke(build, [*arguments, "--json"], catch_exceptions=False)
    assert "INT8 saves nothing" in json.loads(result.stdout)["keep_float"]["conv0"]
