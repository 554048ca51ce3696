"""GPU and DLA segments on one stream: what is copied, converted and captured, and what comes out.

tests/cuda_double.py stands for the driver, tests/tensorrt_double for TensorRT.
"""

from collections.abc import Iterator
from pathlib import Path

import cuda_double
import numpy as np
import pytest
from model_fixtures import small_convnet
from test_tensorrt import install, prepare_all

from device.runtime.session import open_session
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions


@pytest.fixture
def gpu() -> Iterator[cuda_double.CudaDouble]:
    with cuda_double.installed() as double:
        yield double


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network in INT8, and in FP16: with two DLA segments between three of kernels."""
    folder, rng = tmp_path_factory.mktemp("engines"), np.random.default_rng(5)
    model = small_convnet(folder / "m.onnx", rng)
    data = [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(4)]
    with cuda_double.interpreted_cubins():
        for precision in ("int8", "fp16"):
            options = BuildOptions(
                data=data if precision == "int8" else None,
                precision=precision,
                accept_loss=True,
                plan=PlanOptions(forced=Forced(dla=("all",))),
            )
            build_engine(model, "orin-nx-16gb", folder / f"{precision}.engine", options)
    return folder


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_a_line_computes_what_its_segments_do_one_by_one(
    precision: str, engines: Path, gpu: cuda_double.CudaDouble, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator,
) -> None:  # fmt: skip
    install("10.3.0", tmp_path, monkeypatch)
    engine = engines / f"{precision}.engine"
    rows = prepare_all(engine, tmp_path / "plans")
    assert [row.problem for row in rows] == [None] * len(rows)
    feeds = {"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)}
    with open_session(engine, plans=tmp_path / "plans") as session:
        kinds = {report.processor: report.implementation for report in session.reports}
        assert kinds == {"dla0": "tensorrt", "gpu": "cuda"}
        gpu.calls.clear()
        inputs, outputs = session.arrays()
        inputs["x"][:] = feeds["x"]
        actual = session.infer(inputs, outputs)["y"]
        calls = [call for call in gpu.calls if call in ("task", "cuGraphLaunch")]
        waits = gpu.calls.count("cuStreamSynchronize")
        assert actual is outputs["y"]
        assert np.array_equal(session.infer(feeds)["y"], actual)
        copies = [call for call in gpu.calls if "Memcpy" in call]
    # Graphs end at each task of the DLA, and the host waits once.
    assert calls == {
        "int8": ["cuGraphLaunch", "task", "cuGraphLaunch"],
        "fp16": ["cuGraphLaunch", "task"] * 2 + ["cuGraphLaunch"],
    }[precision]  # fmt: skip
    assert waits == 1
    # Copies are recorded into graphs once: that of the input, and that of the output.
    assert copies == ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"]
    with open_session(engine, plans=tmp_path / "none") as session:
        assert {report.implementation for report in session.reports} == {"cuda"}
        on_gpu = session.infer(feeds)["y"]
    # The double computes between the ports in floating point: a step or two of INT8 apart.
    share = 0.06 if precision == "int8" else 0.01
    assert np.abs(actual - on_gpu).max() < share * np.abs(on_gpu).max()
