"""Products and convolutions of FP8 on a GPU: every tactic that an engine carries."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from float8_graphs import Product, convolution, convolved, quantized
from gpu_graphs import Case, node, normal

from calibration.table import CalibrationTable
from device.engine.cuda_manifest import Cuda
from device.engine.file import open_engine
from device.runtime.executors import cuda
from device.runtime.session import open_session
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.graph.dtypes import FIRST_SM_WITH_FLOAT8

pytestmark = pytest.mark.gpu
ERROR = 2e-3  # of the norm: as interpreted


def check_every_tactic(
    case: Case, feeds: dict[str, np.ndarray], truth: np.ndarray, folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    if not has_compiler():
        pytest.skip("Triton is not installed")
    onnx.save(case.model(), folder / "m.onnx")
    build_engine(folder / "m.onnx", "h200", folder / "e", BuildOptions(precision="fp16"))
    with open_engine(folder / "e") as engine:
        implementation = engine.manifest.segments[0].implementations[0]
        assert isinstance(implementation, Cuda)
        counts = [len(op.tactics) for op in implementation.works]
    assert implementation.sm >= FIRST_SM_WITH_FLOAT8
    for number in range(max(counts)):
        chosen = tuple(min(number, count - 1) for count in counts)
        monkeypatch.setattr(cuda.CudaExecutor, "_choose", lambda *_, chosen=chosen: chosen)
        with open_session(folder / "e") as session:
            assert [report.implementation for report in session.reports] == ["cuda"]
            (y,) = session.infer(feeds).values()
        assert np.linalg.norm(y - truth) < ERROR * np.linalg.norm(truth), number


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 1000, 520), (37, 200, 40), (200, 4096, 768)]
)
def test_every_tactic_gives_the_product(
    rows: int,
    depth: int,
    columns: int,
    transposed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    product = Product((rows, depth), columns, transposed)
    case, x = product.case(rng), rng.normal(size=(rows, depth)).astype(np.float32)
    x[0, :2] = 100, -100  # beyond 448 scales
    check_every_tactic(case, {"x": x}, product.truth(case, x), tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("channels", "taps", "attributes"),
    [
        (32, 1, {}),
        (48, 3, {"pads": [1, 1, 1, 1]}),
        (160, 3, {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    ],
)
def test_every_tactic_gives_the_convolution(
    channels: int,
    taps: int,
    attributes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    after = node("Relu", "c", "y")
    case = convolution(rng, (2, channels, 19, 21), 72, taps, after, **attributes)
    feeds = case.feeds(rng)
    check_every_tactic(case, feeds, convolved(case, feeds), tmp_path, monkeypatch)


def test_products_of_a_table_run_in_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """`--precision fp8` of a plain model: every operand rounded as ml_dtypes does."""
    if cuda.why_not() is not None or not has_compiler():
        pytest.skip("no GPU, or no Triton")
    monkeypatch.setattr("toolkit.engine.frontend.no_gain_of_float8", lambda *_: {})
    weights = {"w": normal(rng, 96, 64), "v": normal(rng, 40, 96)}
    nodes = [node("Gemm", "x w", "h", transB=1), node("Relu", "h", "r")]
    case = Case([*nodes, node("Gemm", "r v", "y", transB=1)], {"x": (33, 64)}, weights)
    onnx.save(case.model(), tmp_path / "m.onnx")
    x = case.feeds(rng)["x"]
    w, v = (real_rows(weights[name]) for name in "wv")
    h = quantized(x, np.abs(x).max() / 448) @ w.T
    ranges = {"x": x, "h": h, "r": np.maximum(h, 0), "y": np.maximum(h, 0) @ v.T}
    amax = {name: float(np.abs(array).max()) for name, array in ranges.items()}
    sha256 = "0" * 64
    table = CalibrationTable(
        method="minmax", samples=1, data_sha256=sha256, model_sha256=sha256, tensors=amax
    )
    options = BuildOptions(precision="fp8", table=table)
    result = build_engine(tmp_path / "m.onnx", "h200", tmp_path / "e", options)
    assert any("2 of 2 products" in note for note in result.notes)
    with open_session(tmp_path / "e") as session:
        assert [report.implementation for report in session.reports] == ["cuda"]
        (y,) = session.infer({"x": x}).values()
    expected = quantized(ranges["r"], amax["r"] / 448) @ v.T
    assert np.linalg.norm(y - expected) < 5e-3 * np.linalg.norm(expected)


def real_rows(weight: np.ndarray) -> np.ndarray:
    """A weight as FP8 has it, with a scale for each row."""
    return np.stack([quantized(row, np.abs(row).max() / 448) for row in weight])
