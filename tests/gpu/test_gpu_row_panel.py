"""INT8 row-panel products of little depth, interpreted bit by bit, and compiled."""

import gpu_interpreter
import int8_reference
import numpy as np
import pytest
from gpu_row_panel_fixtures import pointwise, tactics_of
from int8_graphs import Graph

from device.engine.manifest import DimRange
from toolkit.gpu.codegen.compile import compile_kernels
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.gpu.lower import lower_segment
from toolkit.gpu.shapes.inference import traces_of, with_steps
from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

HOPPER = GpuTarget(sm=90, sm_count=1)  # so few SMs that there are rows enough for all

BATCH = DimRange(name="batch", min=1, opt=4, max=7)


@pytest.mark.parametrize("kernel", ["row_panel_gemm", "gemm strided"])
@pytest.mark.parametrize(
    ("channels", "filters", "residual"),
    [(64, 256, True), (24, 144, False), (96, 130, True), (256, 192, False)],
)
def test_results_have_the_bits_of_the_formula(
    channels: int, filters: int, residual: bool, kernel: str, rng: np.random.Generator
) -> None:
    case = pointwise(rng, channels, filters, residual, (11, 13))
    feeds = {"x": rng.normal(size=(2, channels, 11, 13)).astype(np.float32)}
    truth = int8_reference.run(case.model(), feeds)
    variants = tactics_of(case.lower("int8", HOPPER), kernel)
    assert variants
    for segment in variants[:2]:
        for name, wanted in truth.items():
            assert len(np.unique(wanted)) > 4
            found = gpu_interpreter.run(segment, feeds)[name]
            np.testing.assert_array_equal(found, wanted, strict=True)


@pytest.mark.parametrize(
    ("channels", "filters", "residual", "rows"),
    [
        (64, 256, True, [128, 64]),
        (64, 256, False, [128]),
        (255, 192, False, [128]),
        (256, 192, False, [64, 128]),
        (257, 192, True, []),  # too deep
        (64, 129, True, [128, 64]),
        (64, 128, True, []),  # two blocks of columns
    ],
)
def test_which_products_use_row_panels(
    channels: int, filters: int, residual: bool, rows: list[int], rng: np.random.Generator
) -> None:
    case = pointwise(rng, channels, filters, residual, (11, 13))
    found = [
        dict(call.spec.constants)["BLOCK_M"]
        for segment in tactics_of(case.lower("int8", HOPPER), "row_panel_gemm")
        for call in segment.launches
        if call.spec.title == "row_panel_gemm"
        and (dict(call.spec.constants).get("residual", "") is not None) == residual
    ]
    assert list(dict.fromkeys(found)) == rows


def test_few_rows_or_other_tensor_cores_use_no_row_panels(rng: np.random.Generator) -> None:
    case = pointwise(rng, 64, 256, True, (11, 13))
    assert tactics_of(case.lower("int8", HOPPER), "row_panel_gemm")
    assert not tactics_of(case.lower("int8", GpuTarget(sm=90, sm_count=132)), "row_panel_gemm")
    assert not tactics_of(case.lower("int8", GpuTarget(sm=87, sm_count=1)), "row_panel_gemm")


def test_row_panels_of_a_dynamic_batch_give_the_same_bits(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": ("batch", 32, 7, 6)})  # type: ignore[dict-item]
    x = graph.rounded("x")
    other = graph.rounded(graph.product("Conv", x, (160, 32, 3, 3), pads=[1] * 4))
    y = graph.add("Add", graph.product("Conv", x, (160, 32, 1, 1), bias="int32"), other)
    y = graph.rounded(graph.add("Relu", y), np.float32(0.03))
    case = graph.case(graph.product("Conv", y, (4, 160, 1, 1)))
    piece = case.segment()
    traces = traces_of(with_steps([piece.model], (BATCH,)))
    segment = lower_segment(piece.model, gpu=HOPPER, precision="fp32", traces=traces)
    (row_panels, *_) = tactics_of(segment, "row_panel_gemm")
    for batch in (BATCH.min, BATCH.max):
        feeds = {"x": rng.normal(size=(batch, 32, 7, 6)).astype(np.float32)}
        found = gpu_interpreter.run(row_panels, feeds, (batch,))
        for name, wanted in int8_reference.run(case.model(), feeds).items():
            np.testing.assert_array_equal(found[name], wanted, strict=True)


@pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")
@pytest.mark.parametrize(
    ("kernel", "residual"),
    [
        *(("row_panel_gemm", True), ("gemm strided", False)),
        pytest.param("row_panel_gemm", False, marks=pytest.mark.slow),
        pytest.param("gemm strided", True, marks=pytest.mark.slow),
    ],
)
def test_results_do_not_go_through_shared_memory(
    kernel: str, residual: bool, rng: np.random.Generator
) -> None:
    """Operands, and of strips what is copied ahead, are all that lies there."""
    segment = pointwise(rng, 64, 256, residual, (11, 13)).lower("int8", HOPPER)
    calls = [call for one in tactics_of(segment, kernel) for call in one.launches]
    spec = next(
        call.spec
        for call in calls
        if call.spec.title == kernel
        and (dict(call.spec.constants).get("residual", "") is not None) == residual
        and dict(call.spec.constants)["COLUMNS"] == 256
    )
    (compiled,) = compile_kernels([spec], HOPPER)
    assert compiled is not None
    block = dict(spec.constants)
    rows, columns, depth = (int(block[f"BLOCK_{name}"]) for name in "MNK")
    stages = spec.stages if kernel == "row_panel_gemm" else 1
    ahead = (rows * residual + 8) * columns * (stages - 1)  # a residual, and 8 bytes a column
    assert compiled.shared_bytes <= (rows + stages * columns) * depth + ahead
    assert not compiled.spill_bytes
