"""The benchmark on a slice of a GPU: its tables, without a GPU from the files of a run."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from device.engine.file import open_engine
from device.profile import load_profile
from device.runtime.cuda.facts import GpuFacts
from device.runtime.cuda.tactics import choices_of, kernels_of
from device.runtime.timing_cache import add_timings
from scripts import bench_slice
from scripts.gpu_engine import finite_error, operation_floors
from scripts.gpu_table import Ceilings, Cell, Layer, Run
from scripts.older_code import compiling_older, name_gpu
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.gpu.codegen.triton_version import has_compiler

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")

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


@pytest.fixture(scope="module")
def older_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolution for the slice, compiled as for sm_80: one engine, as kernels take seconds."""
    folder = tmp_path_factory.mktemp("older")
    model, engine = folder / "m.onnx", folder / "net-8-fp16.engine"
    weights = onnx.numpy_helper.from_array(np.ones((64, 64, 3, 3), np.float32), "w")
    nodes = [onnx.helper.make_node("Conv", ["x", "w"], ["y"], "conv", pads=[1, 1, 1, 1])]
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, 64, 16, 16))
        for name in ("x", "y")
    )
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], [weights])
    onnx.save(onnx.helper.make_model(graph, ir_version=8), model)
    profile = bench_slice.slice_profile(folder / "slice-gpu.toml", Run(LIMITS, ()), "sm_80")
    with compiling_older(folder, "sm_80", 90):
        build_engine(model, str(profile), engine, BuildOptions(precision="fp16"))
    name_gpu(engine, 90)
    return engine


@needs_compiler
def test_an_engine_for_the_server_has_the_instructions_of_an_older_gpu(older_engine: Path) -> None:
    assert products_in(older_engine) == {"HMMA"}  # for sm_90 they are HGMMA


def products_in(path: Path) -> set[str]:
    """Return the instructions of tensor cores in the kernels of an engine, all for sm_90."""
    from triton import knobs

    with open_engine(path) as engine:
        (gpu,) = kernels_of(engine)
        assert gpu.sm == 90
        instructions = set()
        for kernel in gpu.kernels:
            cubin = path.with_suffix(".cubin")
            cubin.write_bytes(engine.entry(kernel.cubin).tobytes())
            text = subprocess.run(
                [knobs.nvidia.nvdisasm.path, cubin], capture_output=True, text=True, check=True
            ).stdout
            assert re.search("EF_CUDA_SM90|sm_90a", text)
            instructions |= set(re.findall(r"\b(HG?MMA)\.", text))
    return instructions


def test_a_choice_is_good_within_a_twentieth_of_the_fastest_and_counts_only_if_all_are_timed() -> (
    None
):
    times = {"a": 10.4, "b": 10.0, "c": 10.6, "d": 9.0}
    choices = (("a", "b"), ("c", "b"), ("b", "d", "a"), ("d", "missing"))
    assert bench_slice.close_choices(choices, times) == [True, False, False]


@needs_compiler
def test_a_folder_says_how_often_the_host_chose_well(older_engine: Path, tmp_path: Path) -> None:
    engines = tmp_path / "slice12"
    engines.mkdir()
    (engines / older_engine.name).symlink_to(older_engine)
    with open_engine(older_engine) as engine:
        (kernels,) = kernels_of(engine)
        choices = choices_of(engine, kernels)
    assert choices
    gpu = GpuFacts(
        name="H200", sm=90, sm_count=14, sm_mhz=1980, memory_mhz=3201, l2_bytes=60 << 20,
        cuda="13.0", driver="580", power_mode="",
    )  # fmt: skip
    timings = tmp_path / "slice12.timings"
    assert bench_slice.predictions(engines, timings) == []  # nothing is timed yet
    for first_us, share in ((10.4, "100%"), (10.6, "0%")):
        times = {key: 10.0 for keys in choices for key in keys[1:]}
        add_timings(timings, gpu, {**times, **{keys[0]: first_us for keys in choices}})
        assert bench_slice.predictions(engines, timings) == [
            "slice12 fp16: the host's tactic is within 5% of the fastest for "
            f"{share} of {len(choices)} choices"
        ]


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
