"""The benchmark of INT4 weights: its networks, engines and table, without a GPU."""

import sys
from pathlib import Path

import cuda_double
import msgspec
import numpy as np
import onnxruntime as ort
import pytest

from device.runtime.session import open_session
from scripts import bench_int4
from scripts.bench_int4 import Measured, Network, Row
from toolkit.engine.build import BuildOptions, build_engine

pytest.importorskip("triton", reason="Triton is not installed")

NETWORK = Network(size=256, layers=2, batches=(3,))


def test_both_networks_compute_the_same(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 256)).astype(np.float32)
    outputs = []
    for subject in bench_int4.SUBJECTS:
        path = tmp_path / f"{subject}.onnx"
        bench_int4.make_model(path, NETWORK, subject, 3)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        outputs += ort.InferenceSession(path, options).run(None, {"x0": x})
    truth = x @ bench_int4.layer_weights(0, 256) @ bench_int4.layer_weights(1, 256)
    for output in outputs:
        assert bench_int4.error_of(output, truth) < 1e-5
    assert 0.3 < truth.std() < 3


def test_engines_travel_compressed(tmp_path: Path, rng: np.random.Generator) -> None:
    note = bench_int4.build(tmp_path, NETWORK, "slice", "int4", 3)
    assert note.startswith("slice-int4-3.engine: weights of 4 bits in blocks: 2, ")
    bench_int4.unpack(tmp_path / "slice-int4-3.engine.xz", tmp_path / "e")
    x = rng.normal(size=(3, 256)).astype(np.float32)
    truth = x @ bench_int4.layer_weights(0, 256) @ bench_int4.layer_weights(1, 256)
    with open_session(tmp_path / "e") as session:
        assert bench_int4.error_of(session.infer({"x0": x})["x2"], truth) < 1e-2


@pytest.mark.slow
def test_an_engine_is_timed_with_its_fastest_tactics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(bench_int4, "WARM_UP", 1)
    monkeypatch.setattr(bench_int4, "RUNS", 2)
    x = rng.normal(size=(1, 128)).astype(np.float32)
    truth = x @ bench_int4.layer_weights(0, 128)
    bench_int4.make_model(tmp_path / "m.onnx", Network(128, 1, (1,)), "int4", 1)
    options = BuildOptions(precision="fp16")
    with cuda_double.interpreted_cubins():
        build_engine(tmp_path / "m.onnx", "orin-nano-8gb", tmp_path / "int4.engine", options)
    with cuda_double.installed():
        error, network_us, product_us, kernels = bench_int4.time_engine(
            tmp_path / "int4.engine", x, truth, tmp_path / "timings.json"
        )
    assert error < 1e-2
    assert 0 < product_us < network_us
    assert kernels
    assert all("int4" in kernel or "split_k" in kernel for kernel in kernels)


def test_the_table_has_the_ratios_of_each_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (
        Row("int4", 1, 1e-3, 10.0, 3.0, ("int4_gemm (64, 1, 1)",)),
        Row("fp16", 1, 1e-3, 24.0, 7.5),
        Row("torch", 1, 1e-3, 27.0),
    )
    data = msgspec.json.encode(Measured("a GPU", 14, rows))
    (tmp_path / "slice.json").write_bytes(data)
    monkeypatch.setattr(sys, "argv", ["bench_int4", "table", str(tmp_path)])
    bench_int4.main()
    row = "| slice, 14 SMs | 1 | 10.0 | 24.0 | 27.0 | 2.40 | 2.70 | 2.50 |"
    assert row in capsys.readouterr().out.splitlines()
