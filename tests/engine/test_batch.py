"""The batch of a plan for throughput, and the engine that is built with it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from calibration.table import write_table
from device.engine.file import open_engine
from device.engine.manifest import DimRange
from toolkit.build import build
from toolkit.cli.main import tandem
from toolkit.engine.batch import BATCHES, bound_notes
from toolkit.engine.options import BuildOptions
from toolkit.errors import BuildError, PlanError
from toolkit.importers import onnx as importer
from toolkit.importers.onnx import import_model
from toolkit.partition.planning.plan import PlanOptions
from toolkit.quantize.ranges.measure import dummy_table


def network(path: Path, batch: int | str, side: int = 32) -> Path:
    """Write six convolutions over a first dimension."""
    rng = np.random.default_rng()
    nodes, weights, data = [], [], "x"
    for index in range(6):
        values = rng.normal(0, 0.05, (64, 3 if index == 0 else 64, 3, 3)).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"w{index}"))
        output = "y" if index == 5 else f"t{index}"
        nodes.append(
            helper.make_node("Conv", [data, f"w{index}"], [output], name=f"n{index}", pads=[1] * 4)
        )
        data = output
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, maps, side, side])]
        for name, maps in (("x", 3), ("y", 64))
    ]
    graph = helper.make_graph(nodes, "g", *ends, weights)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def plan(*arguments: object) -> dict:
    done = CliRunner().invoke(tandem, ["plan", *map(str, arguments), "--json"])
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout)["plans"][0]


def test_throughput_takes_the_fastest_batch_within_the_latency(tmp_path: Path) -> None:
    path = network(tmp_path / "m.onnx", "N")
    here = (path, "--profile", "orin-nx-16gb")
    free = plan(*here, "--max-latency-ms", 1000)["batch"]
    assert [row["batch"] for row in free["tried"]] == list(BATCHES)
    best = max(free["tried"], key=lambda row: row["frames_per_second"])
    assert free["size"] == best["batch"] > 1
    bound_us = free["tried"][2]["latency_us"]
    bound = plan(*here, "--max-latency-ms", bound_us * 1.001 / 1e3)
    within = [row for row in bound["batch"]["tried"] if row["within"]]
    assert all(row["latency_us"] <= bound_us * 1.001 for row in within)
    assert bound["batch"]["size"] == max(within, key=lambda r: r["frames_per_second"])["batch"]
    assert bound["simulated"]["p99_us"] <= bound_us * 1.001
    rate = bound["compared"][0]["frames_per_second"]
    assert rate == pytest.approx(bound["simulated"]["throughput_hz"])
    assert rate == pytest.approx(max(row["frames_per_second"] for row in within))


def test_a_fixed_batch_says_that_it_needs_a_dimension(tmp_path: Path) -> None:
    path = network(tmp_path / "m.onnx", 1)
    arguments = ["plan", str(path), "--profile", "orin-nx-16gb", "--max-latency-ms", "5"]
    done = CliRunner().invoke(tandem, arguments)
    assert "the model has a fixed first dimension" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-latency-ms", 0.001), "a frame takes .* ms at best"),
        (("--max-latency-ms", 5, "--rate", 10), "for the throughput of one model"),
        (("--max-latency-ms", 5, "--objective", "energy"), "for the throughput of one model"),
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused(options, message, tmp_path: Path) -> None:
    path = network(tmp_path / "m.onnx", "N")
    with pytest.raises(PlanError, match=message):
        plan(path, "--profile", "orin-nx-16gb", *options)


def test_the_engine_has_the_batch_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = network(tmp_path / "m.onnx", "N")
    chosen = plan(path, "--profile", "orin-nx-16gb", "--max-latency-ms", 2, "--precision", "fp16")
    options = BuildOptions(precision="fp16", kernels=False, plan=PlanOptions(max_latency_ms=2.0))
    parsed: list[Path] = []

    def parse(data: bytes, path: Path) -> tuple[onnx.ModelProto, tuple[str, ...]]:
        parsed.append(path)
        return original(data, path)

    original = importer._parse
    monkeypatch.setattr(importer, "_parse", parse)
    result = build(path, out=tmp_path / "m.engine", profile="orin-nx-16gb", options=options)
    size = chosen["batch"]["size"]
    assert parsed == [path]
    assert result.plan.batching.size == size > 1
    manifest = open_engine(tmp_path / "m.engine").manifest
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    ends = (*manifest.inputs, *manifest.outputs)
    assert [shapes[name][0] for name in ends] == [size, size]


def test_the_batch_of_an_engine_is_chosen_with_its_table(tmp_path: Path) -> None:
    path = network(tmp_path / "m.onnx", "N", side=128)
    imported = import_model(path)
    whole = dummy_table(imported.model, imported.sha256)
    table = msgspec.structs.replace(whole, dummy=False, samples=1, keep_float=("n2", "n3"))
    write_table(tmp_path / "t.json", table)
    here = (path, "--profile", "orin-nx-16gb", "--max-latency-ms", 1000)
    chosen = plan(*here, "--table", tmp_path / "t.json")
    free = plan(*here)
    assert chosen["batch"]["tried"] != free["batch"]["tried"]
    bound = PlanOptions(max_latency_ms=1000.0)
    options = BuildOptions(table=table, kernels=False, plan=bound)
    result = build(path, out=tmp_path / "m.engine", profile="orin-nx-16gb", options=options)
    tried = [asdict(row) for row in result.plan.batching.tried]
    assert tried == chosen["batch"]["tried"]
    assert bound_notes(result.plan) == ()
    late = replace(result.plan.batching, max_latency_ms=0.99e-3 * result.plan.simulated.p99_us)
    (note,) = bound_notes(replace(result.plan, batching=late))
    assert "more than the bound" in note


def test_a_dimension_that_stays_dynamic_has_no_batch_to_choose(tmp_path: Path) -> None:
    path = network(tmp_path / "m.onnx", "N")
    dims = (DimRange(name="N", min=1, opt=4, max=8),)
    options = BuildOptions(kernels=False, dims=dims, plan=PlanOptions(max_latency_ms=5.0))
    with pytest.raises(BuildError, match=r"leave out one of `BuildOptions\(dims=\.\.\.\)`"):
        build(path, out=tmp_path / "m.engine", profile="orin-nx-16gb", options=options)
