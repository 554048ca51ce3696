"""`tandem explore`: what each precision takes and loses, and the command that builds it."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from model_fixtures import save, small_convnet
from onnx import helper, load

from toolkit.cli.main import tandem
from toolkit.engine.explore import FORMS, Point, _notes
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.loss.judge import Judgement
from toolkit.quantize.loss.metrics import SQNR, OutputLoss
from toolkit.quantize.loss.rounded import HalfModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explore")
    rng = np.random.default_rng(0)
    small_convnet(folder / "net.onnx", rng)
    np.save(folder / "x.npy", rng.normal(size=(12, 3, 32, 32)).astype(np.float32))
    return folder


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two products without a bias, one large enough for INT4 weights."""
    folder, rng = tmp_path_factory.mktemp("products"), np.random.default_rng(1)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "large"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "v"], ["y"], "small"),
    ]
    weights = {
        "w": rng.normal(size=(1024, 1024)).astype(np.float32) / 32,
        "v": rng.normal(size=(1024, 24)).astype(np.float32) / 32,
    }
    save(folder / "net.onnx", nodes, {"x": [1, 1024]}, {"y": [1, 24]}, weights)
    np.save(folder / "x.npy", rng.normal(size=(8, 1024)).astype(np.float32))
    return folder


def explore(folder: Path, *words: str) -> str:
    words = ("explore", str(folder / "net.onnx"), "--data", str(folder / "x.npy"), *words)
    done = CliRunner().invoke(tandem, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("profile", ["orin-nx-16gb", "agx-thor"])
def test_every_form_has_its_figures_and_the_command_that_builds_it(
    folder: Path, profile: str
) -> None:
    page = folder / "points.html"
    words = ("--profile", profile, "--samples", "8", "--json", "--html", str(page))
    explored = json.loads(explore(folder, *words))
    points = {row["name"]: row for row in explored["points"]}
    # Its Gemm is small, and of 16 numbers deep.
    missing = {"INT4 weights", "MXFP8 (simulated)"} | ({"FP8"} if profile != "agx-thor" else set())
    assert explored["not_built"].keys() == missing
    forms = [form for form in FORMS if form.name not in missing]
    assert list(points) == [form.name for form in forms]
    bytes_of = [points[name]["weight_bytes"] for name in ("FP32", "FP16", "INT8, min-max")]
    assert bytes_of[0] == 2 * bytes_of[1] > 2 * bytes_of[2]
    losses = [points[name]["spent"] for name in ("FP32", "FP16", "INT8, min-max")]
    assert losses[0] == 0.0 < losses[1] < points["BF16"]["spent"] < losses[2]
    assert points["BF16"]["frame_us"] >= points["FP16"]["frame_us"]
    assert points["BF16"]["weight_bytes"] == bytes_of[1]
    timed = [form for form in forms if form.simulated is None]
    assert all(points[f.name]["frame_us"] > 0 and points[f.name]["energy_mj"] > 0 for f in timed)
    assert any(row["best"] for row in points.values())
    assert page.read_text().count("<circle") == len(timed)
    for form in forms:
        command = shlex.split(points[form.name]["command"])
        assert command[:2] == ["tandem", "build" if form in timed else "calibrate"]
        assert set(form.flags) <= set(command)
        assert ("--samples" in command) == (form.precision in ("int8", "fp8") or form not in timed)


@pytest.mark.parametrize(
    "profile", [pytest.param("orin-nx-16gb", marks=pytest.mark.slow), "agx-thor"]
)
def test_int4_weights_rounding_and_simulated_formats_have_rows(
    products: Path, profile: str, tmp_path: Path
) -> None:
    explored = json.loads(explore(products, "--profile", profile, "--json"))
    points = {row["name"]: row for row in explored["points"]}
    int4, half = points["INT4 weights"], points["FP16"]
    assert int4["energy_mj"] < half["energy_mj"]
    # Half a byte for each number of the large one, a scale and a zero point for each 128, and
    # factors of its channels.
    assert int4["weight_bytes"] == 2**19 + 8 * 2**13 + 2 * 1024 + 2 * 1024 * 24
    assert half["spent"] < int4["spent"] < 1
    assert points["INT8, AdaRound"]["frame_us"] == points["INT8, default"]["frame_us"]
    names = ("MXFP8 (simulated)", "NVFP4 (simulated)")
    for name, bits in zip(names, (8.25, 4.5), strict=True):
        assert points[name]["weight_bytes"] == bits * 1024 * (1024 + 24) / 8
        assert points[name]["frame_us"] is points[name]["energy_mj"] is None
        assert not points[name]["best"]
    losses = [points[name]["sqnr_db"] for name in ("FP16", *names)]
    assert losses == sorted(losses, reverse=True)
    assert any("GPUs from SM 100 on compute it, in TensorRT" in one for one in explored["notes"])
    command = shlex.split(points[names[1]]["command"])
    done = CliRunner().invoke(tandem, [*command[1:], "--out", str(tmp_path / "t.json")])
    assert done.exit_code == 0, done.output
    written = load(products / "net.nvfp4.onnx")
    assert sum(node.op_type == "TRT_FP4DynamicQuantize" for node in written.graph.node) == 2


def test_a_machine_without_a_gpu_has_no_fp16(folder: Path) -> None:
    table = explore(folder, "--profile", "laptop", "--samples", "6")
    assert "FP16" not in table
    assert "INT8, default" in table
    assert re.search(r"BF16 +not built here", table)
    assert "GPUs from SM 80 on compute it" in table


def test_fp16_rounds_every_tensor_and_overflows(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["x", "one"], ["sum"], "add"),
        helper.make_node("Sub", ["sum", "one"], ["y"], "sub"),
        helper.make_node("Mul", ["x", "large"], ["z"], "mul"),
    ]
    weights = {"one": np.float32([2048.0]), "large": np.float32([60000.0])}
    model = save(tmp_path / "m.onnx", nodes, {"x": [4]}, {"y": [4], "z": [4]}, weights)
    run = HalfModel(run_passes(import_model(model).model)[0])
    outputs = run({"x": np.float32([0.5, 1.0, 1.5, 3.0])})
    # FP16 has steps of 2 above 2048, with ties to the even one.
    assert outputs["y"].tolist() == [0.0, 0.0, 2.0, 4.0]
    assert np.isinf(outputs["z"]).tolist() == [False, False, True, True]


def test_a_point_is_best_unless_another_is_as_good_in_all() -> None:
    fast, slow = (Point(FORMS[0], us, 1.0, 10, 0.0, 1.0, None) for us in (1.0, 2.0))
    small = Point(FORMS[0], 2.0, 1.0, 5, 0.0, 1.0, None)
    assert fast.beats(slow)
    assert not fast.beats(fast)
    assert not fast.beats(small)
    assert not small.beats(fast)


def test_a_form_whose_output_is_no_number_is_the_worst() -> None:
    bad, good = (
        Point(FORMS[1], 1.0, 1.0, 10, 0.0, 1.0, Judgement(
            (OutputLoss("y", SQNR, value, 1),), 1, "held out"
        ))
        for value in (float("nan"), 40.0)
    )  # fmt: skip
    assert bad.sqnr_db == -np.inf
    assert good.beats(bad)
    assert not bad.beats(good)
    profile = SimpleNamespace(profile=SimpleNamespace(dla=None))
    front: Any = SimpleNamespace(ranges=SimpleNamespace(remarks=()), graph=None, target=profile)
    assert _notes([bad], {"": front}) == (
        "FP16 fails: a loss is beyond its limit, or an output is not finite",
    )
    assert not _notes([good], {"": front})
