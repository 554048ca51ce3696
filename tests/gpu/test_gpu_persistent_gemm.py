"""Persistent INT8 products: bits, conditions, compiled."""

import gpu_interpreter
import int8_reference
import numpy as np
import pytest
from gpu_back_to_back_fixtures import BATCH, Pair, chain_of
from gpu_graphs import Case
from gpu_row_panel_fixtures import pointwise, tactics_of
from int8_graphs import Graph

from toolkit.gpu.codegen.compile import compile_kernels
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.gpu.schedule.occupancy import occupancy
from toolkit.gpu.shapes.inference import traces_of, with_steps
from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

HOPPER = GpuTarget(sm=90, sm_count=1)  # few programs, so that each makes several blocks of rows


def assert_bits(case: Case, feeds: dict[str, np.ndarray], segments: list[KernelProgram]) -> None:
    truth = int8_reference.run(case.model(), feeds)
    assert segments
    for segment in segments:
        found = gpu_interpreter.run(segment, feeds)
        for name, wanted in truth.items():
            assert len(np.unique(wanted)) > 4
            np.testing.assert_array_equal(found[name], wanted, strict=True)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("rectified", [True, False])
@pytest.mark.parametrize(
    ("channels", "filters", "strides"), [(40, 132, (1, 1)), (64, 256, (2, 1)), (130, 196, (2, 3))]
)
def test_results_have_the_bits_of_the_formula(
    channels: int,
    filters: int,
    strides: tuple[int, int],
    rectified: bool,
    residual: bool,
    rng: np.random.Generator,
) -> None:
    size = (11 * strides[0], 14 * strides[1] - 1)
    case = pointwise(rng, channels, filters, residual, size, strides, rectified)
    feeds = {"x": rng.normal(size=(2, channels, *size)).astype(np.float32)}
    assert_bits(case, feeds, tactics_of(case.lower("int8", HOPPER), "persistent_gemm")[-2:])


@pytest.mark.parametrize("quantized", [True, False])
def test_a_float_residual_is_not_read_as_int8x4(quantized: bool, rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (2, 64, 11, 14)})
    x = graph.rounded("x")
    other = graph.product("Conv", x, (128, 64, 1, 1))
    other = graph.rounded(other) if quantized else other
    y = graph.add("Add", graph.product("Conv", x, (128, 64, 1, 1), bias="int32"), other)
    case = graph.case(graph.product("Conv", graph.rounded(y, np.float32(0.03)), (4, 128, 1, 1)))
    program = case.lower("int8", HOPPER)
    op = next(one for one in program.ops if any(name.startswith("Add") for name in one.nodes))
    int8x4_tactics = [t for t in op.tactics if dict(t[0].spec.constants).get("INT8X4")]
    int8x4_tactics += [t for t in op.tactics if t[0].spec.title == "persistent_gemm"]
    assert bool(int8x4_tactics) == quantized


def test_a_dynamic_batch_has_the_same_bits(rng: np.random.Generator) -> None:
    case = chain_of(rng, Pair(channels=16, filters=160, second=16), "batch", (7, 6))
    piece = case.segment()
    traces = traces_of(with_steps([piece.model], (BATCH,)))
    program = lower_segment(piece.model, gpu=HOPPER, precision="fp32", traces=traces)
    segments = tactics_of(program, "persistent_gemm")
    assert segments
    for segment in segments[:2]:
        for batch in (BATCH.min, BATCH.max):
            feeds = {"x": rng.normal(size=(batch, 16, 7, 6)).astype(np.float32)}
            found = gpu_interpreter.run(segment, feeds, (batch,))
            for name, wanted in int8_reference.run(case.model(), feeds).items():
                np.testing.assert_array_equal(found[name], wanted, strict=True)


@pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")
@pytest.mark.parametrize(
    ("pair", "both"),
    [
        pytest.param(Pair(second=64), True, marks=pytest.mark.slow),
        (Pair(second=128), True),
        (Pair(), False),
    ],
)
def test_all_programs_run_at_once(pair: Pair, both: bool, rng: np.random.Generator) -> None:
    program = chain_of(rng, pair).lower("int8", HOPPER)
    calls = [t[0] for op in program.ops for t in op.tactics if t[0].spec.title == "persistent_gemm"]
    found = {c.spec: c.grid[0] for c in calls if (len(c.writes) == 2) == both}
    for compiled, programs in zip(compile_kernels([*found], HOPPER), found.values(), strict=True):
        assert compiled is not None
        assert compiled.spill_bytes == 0
        assert compiled.waits
        registers = compiled.registers or 255  # where no tool says it
        held = occupancy(
            90,
            threads=compiled.threads,
            registers=registers,
            shared_bytes=compiled.shared_bytes,
        )
        assert held.blocks >= programs
