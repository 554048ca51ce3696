"""Products with weights of 4 bits on a GPU: every tactic that an engine carries."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from gpu_graphs import Case, node
from ml_dtypes import uint4

from device.engine.cuda_manifest import Cuda
from device.engine.file import open_engine
from device.runtime.executors import cuda
from device.runtime.session import open_session
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.gpu.codegen.triton_version import has_compiler

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("block", [16, 32, 128, 256])
@pytest.mark.parametrize("rows", [1, 3, 8, 64, 200])
def test_every_tactic_gives_the_product(
    rows: int,
    block: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    if not has_compiler():
        pytest.skip("Triton is not installed")
    blocks = -(-1000 // block)
    weights = {
        "q": rng.integers(0, 16, (1000, 520)).astype(uint4),
        "s": rng.uniform(0.01, 0.05, (blocks, 520)).astype(np.float32),
        "z": rng.integers(0, 16, (blocks, 520)).astype(uint4),
        "b": rng.normal(size=520).astype(np.float32),
    }
    nodes = [
        node("DequantizeLinear", "q s z", "w", axis=0, block_size=block),
        node("MatMul", "x w", "m"),
        node("Add", "m b", "c"),
        node("Relu", "c", "y"),
    ]
    model = Case(nodes, {"x": (rows, 1000)}, weights, opset=21).model()
    onnx.save(model, tmp_path / "m.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    x = rng.normal(size=(rows, 1000)).astype(np.float32)
    (truth,) = ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})
    build_engine(tmp_path / "m.onnx", "h200", tmp_path / "e", BuildOptions(precision="fp16"))
    with open_engine(tmp_path / "e") as engine:
        implementation = engine.manifest.segments[0].implementations[0]
        assert isinstance(implementation, Cuda)
        counts = [len(op.tactics) for op in implementation.works]
    for number in range(max(counts)):
        chosen = tuple(min(number, count - 1) for count in counts)
        monkeypatch.setattr(cuda.CudaExecutor, "_choose", lambda *_, chosen=chosen: chosen)
        with open_session(tmp_path / "e") as session:
            assert [report.implementation for report in session.reports] == ["cuda"]
            y = session.infer({"x": x})["y"]
        assert np.linalg.norm(y - truth) < 2e-3 * np.linalg.norm(truth), number
