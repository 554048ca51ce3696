"""Engines whose GPU segments TensorRT finishes."""

from dataclasses import replace
from pathlib import Path

import cuda_double
import numpy as np
from model_fixtures import small_convnet

from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.engine.options import GpuBackendName
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions

X = (1, 3, 32, 32)


def build(
    folder: Path, precision: str, backend: GpuBackendName, *, dla: bool = False, **options: object
) -> BuildResult:
    rng = np.random.default_rng(5)
    model = small_convnet(folder / "m.onnx", rng)
    data = [{"x": rng.normal(size=X).astype(np.float32)} for _ in range(4)]
    build_options = BuildOptions(
        data=data if precision == "int8" else None,
        precision=precision,  # type: ignore[arg-type]
        accept_loss=True,
        gpu_backend=backend,
        plan=PlanOptions(forced=Forced(dla=("all",) if dla else ())),
    )
    path = folder / f"{precision}-{backend}-{dla}.engine"
    with cuda_double.interpreted_cubins():
        return build_engine(model, "orin-nx-16gb", path, replace(build_options, **options))  # type: ignore[arg-type]
