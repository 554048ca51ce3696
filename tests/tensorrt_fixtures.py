"""Engines for the DLA, and the double of TensorRT that finishes and runs them."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from model_fixtures import small_convnet

from device.engine.file import open_engine
from device.runtime.tensorrt.board import read_board
from device.runtime.tensorrt.children import Limits
from device.runtime.tensorrt.prepare import Job, Prepared, prepare_engine
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions

HERE = Path(__file__).parent


# The surface of 11.4.0 stands for 11.4.1, the first of its kind with a DLA on Jetson.
VERSIONS = {"8.6.1": "8.6.1", "10.3.0": "10.3.0", "10.7.0": "10.7.0", "11.4.1": "11.4.0.106"}


def build(folder: Path, *, precision: str) -> Path:
    rng = np.random.default_rng(5)
    model = small_convnet(folder / "m.onnx", rng)
    data = [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(4)]
    options = BuildOptions(
        data=data if precision == "int8" else None,
        precision="int8" if precision == "int8" else "fp16",
        kernels=False,
        accept_loss=True,
        plan=PlanOptions(forced=Forced(dla=("all",))),
    )
    build_engine(model, "orin-nx-16gb", folder / f"{precision}.engine", options)
    return folder / f"{precision}.engine"


def install(version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    site = folder / "site"
    site.mkdir()
    (site / "tensorrt").symlink_to(HERE / "tensorrt_double" / "tensorrt")
    info = site / f"tensorrt-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt\nVersion: {version}\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("TENSORRT_DOUBLE_VERSION", version)
    api = HERE / "data" / "tensorrt_api" / f"{VERSIONS[version]}.json"
    monkeypatch.setenv("TENSORRT_DOUBLE_API", str(api))
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    return version


def prepare(
    engine: Path, plans: Path, *, limits: Limits | None = None, again: bool = False
) -> Prepared:
    """Prepare the one DLA segment of an engine."""
    (row,) = prepare_all(engine, plans, limits=limits, again=again)
    return row


def prepare_all(
    engine: Path, plans: Path, *, limits: Limits | None = None, again: bool = False
) -> tuple[Prepared, ...]:
    """Prepare the DLA segments of an engine."""
    with open_engine(engine) as opened:
        job = Job(opened, plans, read_board(), limits or Limits(60), lambda *_: None)
        return prepare_engine(job, again=again)
