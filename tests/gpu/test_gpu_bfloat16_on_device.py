"""BF16 on a GPU: every tactic of products, and whole networks against every tensor rounded."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from gpu_graphs import Case, convolution, node, normal

from device.engine.arithmetic import arithmetic_of
from device.engine.cuda_manifest import Cuda
from device.engine.file import open_engine
from device.runtime.executors import cuda
from device.runtime.session import open_session
from scripts.gpu_engine import relative_error
from scripts.networks import NETWORKS
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.loss.rounded import HalfModel
from toolkit.quantize.observe import ActivationRunner

pytestmark = pytest.mark.gpu
SAME = 1e-4  # of the norm: products of the same numbers; rounding them to BF16 makes 2e-3
Rng = np.random.Generator


@pytest.fixture(autouse=True)
def needs_gpu() -> None:
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    if not has_compiler():
        pytest.skip("Triton is not installed")


def rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def tactic_counts(engine_file: Path) -> list[int]:
    with open_engine(engine_file) as engine:
        implementation = engine.manifest.segments[0].implementations[0]
        assert isinstance(implementation, Cuda)
        return [len(op.tactics) for op in implementation.works]


def cases(rng: Rng) -> dict[str, Case]:
    relu = node("Relu", "c", "y")
    product = [node("MatMul", "x w", "h"), node("Add", "h b", "a"), node("Relu", "a", "y")]
    return {
        "one row": Case([product[0], *product[1:]], {"x": (1, 1000)},
                        {"w": normal(rng, 1000, 520), "b": normal(rng, 520)}),
        "rows": Case(product, {"x": (200, 4096)},
                     {"w": normal(rng, 4096, 768), "b": normal(rng, 768)}),
        "1x1": convolution(rng, (2, 32, 19, 21), 72, (1, 1), relu),
        "3x3": convolution(rng, (2, 48, 19, 21), 72, (3, 3), relu, pads=[1] * 4),
        "grouped": convolution(rng, (2, 64, 19, 21), 64, (3, 3), relu, group=4, strides=[2, 2]),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["one row", "rows", "1x1", "3x3", "grouped"])
def test_every_tactic_gives_products_of_rounded_operands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: Rng
) -> None:
    case = cases(rng)[name]
    feeds = case.feeds(rng)
    feeds["x"] *= 1e4  # squares and sums are beyond FP16
    weights = {key: rounded(v) if key == "w" else v for key, v in case.weights.items()}
    truth = Case(case.nodes, case.inputs, weights).truth({"x": rounded(feeds["x"])})["y"]
    onnx.save(case.model(), tmp_path / "m.onnx")
    build_engine(tmp_path / "m.onnx", "h200", tmp_path / "e", BuildOptions(precision="bf16"))
    counts = tactic_counts(tmp_path / "e")
    for number in range(max(counts)):
        chosen = tuple(min(number, count - 1) for count in counts)
        monkeypatch.setattr(cuda.CudaExecutor, "_choose", lambda *_, chosen=chosen: chosen)
        with open_session(tmp_path / "e") as session:
            assert [report.implementation for report in session.reports] == ["cuda"]
            (y,) = session.infer(feeds).values()
        assert relative_error(y, truth) < SAME, number


@pytest.mark.parametrize(
    "name", ["resnet50", "mobilenet_v2", "efficientnet_b0", "vit_small", "encoder"]
)
def test_networks_lose_no_more_than_by_rounding_every_tensor(
    name: str, tmp_path: Path, rng: Rng
) -> None:
    ir.save(NETWORKS[name].model(), tmp_path / "m.onnx")
    result = build_engine(
        tmp_path / "m.onnx", "h200", tmp_path / "e", BuildOptions(precision="bf16")
    )
    assert arithmetic_of(result.manifest) == "bf16"
    graph = run_passes(import_model(tmp_path / "m.onnx").model)[0]
    feeds = {
        str(value.name): rng.normal(size=value.shape.numpy()).astype(np.float32)  # type: ignore[union-attr]
        for value in graph.graph.inputs
    }
    outputs = [str(value.name) for value in graph.graph.outputs]
    truth = ActivationRunner(graph, outputs)(feeds)[outputs[0]]
    limit = relative_error(HalfModel(graph, half=ir.DataType.BFLOAT16)(feeds)[outputs[0]], truth)
    with open_session(tmp_path / "e") as session:
        assert [report.implementation for report in session.reports] == ["cuda"]
        y = session.infer(feeds)[outputs[0]]
    error = relative_error(y, truth)
    print(f"{name}: {error:.1e}, with every tensor rounded {limit:.1e}")
    assert 0.0 < error < 1.5 * limit
