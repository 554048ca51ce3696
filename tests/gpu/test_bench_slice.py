"""The benchmark on a slice of a GPU: its tables, without a GPU from the files of a run."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from device.profile import load_profile
from scripts import bench_slice
from scripts.gpu_engine import finite_error, operation_floors
from scripts.gpu_table import Ceilings, Cell, Layer, Run

LIMITS = Ceilings(100.0, 200.0, 1.0, 14)


def write(folder: Path, name: str, cells: dict[str, float], layers: tuple[Layer, ...] = ()) -> None:
    rows = tuple(Cell("resnet18", 8, subject, 1e-3, us, 50.0) for subject, us in cells.items())
    (folder / f"{name}.json").write_bytes(msgspec.json.encode(Run(LIMITS, rows, layers)))


def test_the_tables_of_a_folder_have_ratios_of_slice_and_whole_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = (
        Layer("resnet18", 8, "fp16", "gemm", ("a", "b"), 80.0, 60.0),
        Layer("resnet18", 8, "fp16", "pool", ("c",), 40.0, 12.0),
    )
    write(tmp_path, "slice12-limits", {})
    write(tmp_path, "slice12-predicted", {"fp16": 110.0, "int8": 51.0})
    write(tmp_path, "slice12-tuned", {"fp16": 100.0, "int8": 50.0}, layers)
    write(tmp_path, "slice12-peers", {"compiled": 170.0, "eager": 300.0})
    write(tmp_path, "slice25-tuned", {"fp16": 70.0})
    write(tmp_path, "slice25-peers", {"compiled": 140.0, "eager": 210.0})
    write(tmp_path, "whole-tuned", {"fp16": 40.0})
    write(tmp_path, "whole-peers", {"compiled": 50.0})
    monkeypatch.setattr(sys, "argv", ["bench_slice", str(tmp_path), "--networks"])
    bench_slice.main()
    printed = capsys.readouterr().out
    row = "| resnet18 | 8 | 100 | 50 | 170 | 300 | 1.70 | 2.00 | 1.10 | 1.02 | 1.25 |"
    assert row in printed.splitlines()
    assert "slice: 1.70 times torch.compile in FP16, least 1.70, 1 of 1 at 1.5 or more" in printed
    assert "60% of the roofline; 1 of the 2 dearest operations below half of theirs" in printed
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--percent", "25"])
    bench_slice.main()
    printed = capsys.readouterr().out
    assert "| resnet18 | 8 | 70 | | 140 | 210 | 2.00 | | | | 1.25 |" in printed.splitlines()


def test_a_result_that_is_not_finite_has_no_time_and_no_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Cell(
        "efficientvit_b1", 1, "fp16", finite_error(np.full(2, np.nan), np.ones(2)), 9.0, 4.0
    )
    (tmp_path / "slice12-tuned.json").write_bytes(msgspec.json.encode(Run(LIMITS, (broken,))))
    write(tmp_path, "slice12-limits", {})
    write(tmp_path, "slice12-predicted", {})
    (tmp_path / "slice12-peers.json").write_bytes(
        msgspec.json.encode(Run(LIMITS, (Cell("efficientvit_b1", 1, "compiled", 1e-3, 20.0, 4.0),)))
    )
    monkeypatch.setattr(sys, "argv", ["bench_slice", str(tmp_path), "--networks"])
    bench_slice.main()
    printed = capsys.readouterr().out
    assert "| efficientvit_b1 | 1 | | | 20 | | | | | | |" in printed.splitlines()
    assert "times torch.compile" not in printed


def test_engines_of_the_slice_are_built_for_its_processors_and_its_bandwidth(
    tmp_path: Path,
) -> None:
    profile = load_profile(bench_slice.slice_profile(tmp_path / "slice-gpu.toml", Run(LIMITS, ())))
    assert profile.gpu is not None
    assert (profile.gpu.sm, profile.gpu.sm_count.value) == (90, 14)
    assert profile.memory.bandwidth_gbps.value == 1000


def test_an_operation_s_roofline_counts_what_enters_and_leaves_it(tmp_path: Path) -> None:
    weights = onnx.numpy_helper.from_array(np.ones((16, 8, 3, 3), np.float32), "w")
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
        onnx.helper.make_node("Relu", ["c"], ["y"], "relu"),
    ]
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, channels, 32, 32))
        for name, channels in (("x", 8), ("y", 16))
    )
    path = tmp_path / "m.onnx"
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y], [weights])), path)
    floors = operation_floors(path, "fp16", LIMITS)
    # 1 TB/s: the map of 16 channels is written once where both nodes are one operation.
    moved = {"conv": 8 * 1024 + 16 * 1024 + 16 * 72, "relu": 2 * 16 * 1024}
    assert floors(["conv"]) == pytest.approx(moved["conv"] * 2e-6)
    assert floors(["relu"]) == pytest.approx(moved["relu"] * 2e-6)
    assert floors(["conv", "relu"]) == pytest.approx(moved["conv"] * 2e-6)
    # Products bound the convolution where memory is fast.
    fast = operation_floors(path, "fp16", Ceilings(0.001, 0.002, 100.0))
    assert fast(["conv", "relu"]) == pytest.approx(2 * 16 * 1024 * 72 / 0.001 * 1e-6)
