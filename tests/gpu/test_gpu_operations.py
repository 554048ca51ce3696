"""`tandem inspect --kernels`: what operations take of an SM, and their least time."""

import json
from pathlib import Path

import cuda_double
import msgspec
import numpy as np
import onnx
import pytest
from cli_fixtures import output_of
from click.testing import CliRunner
from gpu_graphs import Case, node, normal
from ml_dtypes import uint4

from device.engine.cuda_manifest import Cuda
from device.engine.file import open_engine
from toolkit.cli.main import tandem
from toolkit.cli.pages.engine_operations import OperationRow, operation_rows, operations_text
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import TandemError
from toolkit.evaluate.bench.measure import Layer
from toolkit.gpu.schedule.occupancy import occupancy

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two convolutions, 16 -> 32 -> 8 channels of 32x32, in FP16 for an Orin."""
    folder = tmp_path_factory.mktemp("operations")
    rng = np.random.default_rng(0)
    case = Case(
        [
            node("Conv", "x w", "a", pads=[1, 1, 1, 1]),
            node("Relu", "a", "r"),
            node("Conv", "r v", "y"),
        ],
        {"x": (1, 16, 32, 32)},
        {"w": normal(rng, 32, 16, 3, 3), "v": normal(rng, 8, 32, 1, 1)},
    )
    onnx.save(case.model(), folder / "m.onnx")
    with cuda_double.interpreted_cubins():
        options = BuildOptions(precision="fp16")
        build_engine(folder / "m.onnx", "orin-nano-8gb", folder / "m.engine", options)
    return folder / "m.engine"


def rows_of(engine: Path, times: list[Layer] | None = None) -> tuple[OperationRow, ...]:
    with open_engine(engine) as opened:
        return operation_rows(opened, times or [])


def times_of(rows: tuple[OperationRow, ...]) -> list[Layer]:
    return [
        Layer(segment=row.segment, nodes=row.nodes, kernels=row.kernels, tactic=row.tactics - 1,
              tactics=row.tactics, time_ms=0.02, share=0.5)
        for row in rows
    ]  # fmt: skip


def test_int4_weights_count_half_a_byte(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = {
        "q": rng.integers(0, 16, (128, 96)).astype(uint4),
        "s": rng.uniform(0.1, 1, (4, 96)).astype(np.float32),
    }
    nodes = [
        node("DequantizeLinear", "q s", "w", axis=0, block_size=32),
        node("MatMul", "x w", "y"),
    ]
    onnx.save(Case(nodes, {"x": (1, 128)}, weights, opset=21).model(), tmp_path / "m.onnx")
    with cuda_double.interpreted_cubins():
        options = BuildOptions(precision="fp16")
        build_engine(tmp_path / "m.onnx", "orin-nano-8gb", tmp_path / "e", options)
    (row,) = [row for row in rows_of(tmp_path / "e") if row.work.operations]
    assert row.kernels == ("int4_gemm",)
    assert row.work.moved_bytes == 128 * 96 // 2 + 2 * (128 + 96)
    text = output_of("inspect", str(tmp_path / "e"))
    assert text.startswith("engine for orin-nano-8gb, fp16 with INT4 weights, ")


def test_work_is_that_of_the_fused_nodes(engine: Path) -> None:
    rows = [row for row in rows_of(engine) if row.work.operations]
    first, second = rows
    pixels = 32 * 32
    assert first.nodes == ("Conv:a", "Relu:r")
    assert first.work.operations == 2 * pixels * 32 * 16 * 9
    # What is between convolution and activation is in no memory.
    assert first.work.moved_bytes == 2 * (16 * pixels + 32 * 16 * 9 + 32 * pixels)
    assert second.work.operations == 2 * pixels * 8 * 32
    assert second.work.moved_bytes == 2 * (32 * pixels + 8 * 32 + 8 * pixels)


def test_the_roofline_is_the_profiles(engine: Path) -> None:
    first, second = (row.work for row in rows_of(engine) if row.work.operations)
    assert first.roof == second.roof == "memory"
    assert first.roofline_us == pytest.approx(first.moved_bytes / 68e3)  # 68 GB/s
    assert first.operations / 10.2e6 < first.roofline_us  # 10.2 TFLOP/s
    assert first.in_l2


def test_resources_are_those_of_the_kernel(engine: Path) -> None:
    with open_engine(engine) as opened:
        (cuda,) = (
            item
            for segment in opened.manifest.segments
            for item in segment.implementations
            if isinstance(item, Cuda)
        )
        kernels = tuple(
            msgspec.structs.replace(kernel, registers=200, threads=128, spill_bytes=8)
            for kernel in cuda.kernels
        )
        segments = tuple(
            msgspec.structs.replace(
                segment, implementations=(msgspec.structs.replace(cuda, kernels=kernels),
                                          *segment.implementations[1:])
            )
            for segment in opened.manifest.segments
        )  # fmt: skip
        opened.manifest = msgspec.structs.replace(opened.manifest, segments=segments)
        rows = operation_rows(opened)
    for row in rows:
        takes = row.resources
        held = occupancy(87, threads=128, registers=200, shared_bytes=takes.shared_bytes)
        assert (takes.registers, takes.spill_bytes, takes.threads) == (200, 8, 128)
        assert takes.occupancy == held.share
        assert takes.waves == takes.blocks / (8 * held.blocks)
    assert "17%" in operations_text(rows)  # two blocks of four warps, of 48


def test_times_of_a_board_stand_beside_the_roofline(engine: Path) -> None:
    before = rows_of(engine)
    for row, old in zip(rows_of(engine, times_of(before)), before, strict=True):
        assert row.measured_us == pytest.approx(20)
        assert row.tactic == row.tactics - 1  # the one that was measured
        if old.work.roofline_us is not None:
            assert row.share == pytest.approx(old.work.roofline_us / 20)


def test_times_of_another_engine_are_refused(engine: Path) -> None:
    with pytest.raises(TandemError, match=r"the times of segment gpu\.0 are of 1 operations"):
        rows_of(engine, times_of(rows_of(engine))[:1])


def test_the_command_prints_a_table_or_json(engine: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(tandem, ["inspect", str(engine), "--kernels"])
    assert "roofline us" in shown.output
    assert "us by roofline" in shown.output
    as_json = runner.invoke(tandem, ["inspect", str(engine), "--kernels", "--json"])
    assert json.loads(as_json.output)["operations"][0]["segment"] == "gpu.0"
    (tmp_path / "t.json").write_text("{}")
    wrong = runner.invoke(
        tandem, ["inspect", str(engine), "--kernels", "--times", str(tmp_path / "t.json")]
    )
    assert "is no output of `tandem bench --profile --json`" in str(wrong.exception)
    alone = runner.invoke(tandem, ["inspect", str(engine), "--times", str(tmp_path / "t.json")])
    assert "--times is shown beside --kernels" in alone.output
