"""The benchmark on a slice of a GPU: its tables, without a GPU from the files of a run."""

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from device.engine.cuda_manifest import Cuda
from device.engine.file import open_engine
from device.profile import load_profile
from scripts import bench_slice
from scripts.gpu_engine import finite_error, operation_floors
from scripts.gpu_table import Ceilings, Cell, Layer, Run
from scripts.older_code import compiling_older, name_gpu
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.gpu.codegen.triton_version import has_compiler

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


def test_kernels_compiled_as_for_an_older_gpu_stand_beside_the_same_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "slice12-tuned", {"fp16": 100.0})
    write(tmp_path, "slice12-peers", {"compiled": 170.0, "eager": 300.0})
    write(tmp_path, "slice12_sm_80-predicted", {"fp16": 165.0})
    write(tmp_path, "slice12_sm_80-tuned", {"fp16": 150.0})
    command = ["bench_slice", str(tmp_path), "--networks", "--code", "sm_80"]
    monkeypatch.setattr(sys, "argv", command)
    bench_slice.main()
    row = "| resnet18 | 8 | 150 | | 170 | 300 | 1.13 | | 1.10 | | |"
    assert row in capsys.readouterr().out.splitlines()


@pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")
def test_an_engine_for_the_server_has_the_instructions_of_an_older_gpu(tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    weights = onnx.numpy_helper.from_array(np.ones((64, 64, 3, 3), np.float32), "w")
    nodes = [onnx.helper.make_node("Conv", ["x", "w"], ["y"], "conv", pads=[1, 1, 1, 1])]
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, 64, 16, 16))
        for name in ("x", "y")
    )
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], [weights])
    onnx.save(onnx.helper.make_model(graph, ir_version=8), model)
    instructions = {}
    for code in (None, "sm_80"):
        profile = tmp_path / f"{code}-gpu.toml"
        bench_slice.slice_profile(profile, Run(LIMITS, ()), code)
        with ExitStack() as stack:
            if code is not None:
                stack.enter_context(compiling_older(tmp_path, code, 90))
            engine = tmp_path / f"{code}.engine"
            build_engine(model, str(profile), engine, BuildOptions(precision="fp16"))
        name_gpu(engine, 90)
        instructions[code] = products_in(engine)
    assert "HGMMA" in instructions[None]
    assert instructions["sm_80"] == {"HMMA"}


def products_in(path: Path) -> set[str]:
    """Return the instructions of tensor cores in the kernels of an engine, all for sm_90."""
    from triton import knobs

    with open_engine(path) as engine:
        (gpu,) = (
            one
            for segment in engine.manifest.segments
            for one in segment.implementations
            if isinstance(one, Cuda)
        )
        assert gpu.sm == 90
        found = set()
        for kernel in gpu.kernels:
            cubin = path.with_suffix(".cubin")
            cubin.write_bytes(engine.entry(kernel.cubin).tobytes())
            text = subprocess.run(
                [knobs.nvidia.nvdisasm.path, cubin], capture_output=True, text=True, check=True
            ).stdout
            assert re.search("EF_CUDA_SM90|sm_90a", text)
            found |= set(re.findall(r"\b(HG?MMA)\.", text))
    return found


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
