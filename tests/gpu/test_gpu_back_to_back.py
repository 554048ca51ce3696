"""Back-to-back products: a residual product and the product of its result, bits and conditions."""

from dataclasses import replace
from itertools import pairwise

import gpu_interpreter
import int8_reference
import numpy as np
import pytest
from gpu_back_to_back_fixtures import BATCH, Pair, chain_of
from int8_graphs import Graph

from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.gpu.shapes.inference import traces_of, with_steps
from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

HOPPER = GpuTarget(sm=90, sm_count=1)  # so few SMs that there are rows enough for all


def makes_both(call: KernelLaunch) -> bool:
    return call.spec.title == "persistent_gemm" and len(call.writes) == 2


def tactic_variants(segment: KernelProgram) -> list[KernelProgram]:
    """The segment once for each tactic of the operations that one kernel can compute."""
    found = []
    for at, op in enumerate(segment.ops):
        if any(makes_both(tactic[0]) for tactic in op.tactics):
            for tactic in op.tactics:
                chosen = list(segment.ops)
                chosen[at] = replace(op, tactics=(tactic,))
                found.append(replace(segment, ops=tuple(chosen)))
    return found


def fused_variants(segment: KernelProgram) -> list[KernelProgram]:
    return [one for one in tactic_variants(segment) if any(map(makes_both, one.launches))]


@pytest.mark.parametrize(
    "pair",
    [
        Pair(),
        Pair(channels=96, filters=256, second=128),
        Pair(channels=24, filters=144, second=24),
        Pair(channels=40, filters=180, second=65),
        Pair(channels=64, filters=132, second=1, residual=False),
    ],
)
def test_both_results_have_the_bits_of_the_formula(pair: Pair, rng: np.random.Generator) -> None:
    case = chain_of(rng, pair)
    feeds = {"x": rng.normal(size=(2, pair.channels, 11, 10)).astype(np.float32)}
    truth = int8_reference.run(case.model(), feeds)
    variants = fused_variants(case.lower("int8", HOPPER))
    assert variants
    for segment in variants:
        found = gpu_interpreter.run(segment, feeds)
        for name, wanted in truth.items():
            assert len(np.unique(wanted)) > 4
            np.testing.assert_array_equal(found[name], wanted, strict=True)


def test_every_tactic_gives_the_same_bits(rng: np.random.Generator) -> None:
    case = chain_of(rng, Pair(channels=16, filters=136, second=5), 1, (12, 11))
    feeds = {"x": rng.normal(size=(1, 16, 12, 11)).astype(np.float32)}
    truth = int8_reference.run(case.model(), feeds)
    segments = tactic_variants(case.lower("int8", HOPPER))
    assert len(segments) > 2
    seen: set[KernelLaunch] = set()
    for segment in segments:
        if not seen.issuperset(segment.launches):  # each call once
            seen |= set(segment.launches)
            found = gpu_interpreter.run(segment, feeds)
            for name, wanted in truth.items():
                np.testing.assert_array_equal(found[name], wanted, strict=True)
    assert {"persistent_gemm", "row_panel_gemm", "gemm strided"} <= {
        call.spec.title for call in seen
    }


def test_matrix_products_fuse_back_to_back(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (260, 48)})
    x = graph.rounded("x")
    y = graph.add("Relu", graph.product("MatMul", x, (48, 192), axis=1))
    y = graph.rounded(y, np.float32(0.03))
    z = graph.rounded(graph.product("MatMul", y, (192, 40), axis=1), np.float32(0.02))
    case = graph.case(graph.product("MatMul", z, (40, 8), axis=1), y)
    feeds = {"x": rng.normal(size=(260, 48)).astype(np.float32)}
    truth = int8_reference.run(case.model(), feeds)
    variants = fused_variants(case.lower("int8", HOPPER))
    assert variants
    for segment in variants:
        found = gpu_interpreter.run(segment, feeds)
        for name, wanted in truth.items():
            np.testing.assert_array_equal(found[name], wanted, strict=True)


def test_a_dynamic_batch_has_the_same_bits(rng: np.random.Generator) -> None:
    case = chain_of(rng, Pair(channels=32, filters=160, second=32), "batch", (7, 6))
    piece = case.segment()
    traces = traces_of(with_steps([piece.model], (BATCH,)))
    program = lower_segment(piece.model, gpu=HOPPER, precision="fp32", traces=traces)
    for segment in fused_variants(program):
        for batch in (BATCH.min, BATCH.max):
            feeds = {"x": rng.normal(size=(batch, 32, 7, 6)).astype(np.float32)}
            found = gpu_interpreter.run(segment, feeds, (batch,))
            for name, wanted in int8_reference.run(case.model(), feeds).items():
                np.testing.assert_array_equal(found[name], wanted, strict=True)
    assert len(fused_variants(program)) >= 2


@pytest.mark.parametrize(
    ("pair", "sm", "sm_count", "joined"),
    [
        (Pair(second=128), 90, 1, True),
        (Pair(second=129), 90, 1, False),
        (Pair(filters=512), 90, 1, True),  # 512 columns of 64 and 64: 64 KB
        (Pair(filters=516), 90, 1, False),
        (Pair(channels=128, filters=256, second=128), 90, 1, True),
        (Pair(channels=128, filters=260, second=128), 90, 1, False),
        (Pair(filters=129), 90, 1, False),  # int8x4 packs four columns
        (Pair(), 90, 1, True),  # 220 rows: four blocks of 64 for three programs
        (Pair(), 90, 3, False),
        (Pair(), 87, 1, False),
        (Pair(stride=2), 90, 1, False),
        (Pair(taps=3), 90, 1, False),
        (Pair(added=True), 90, 1, False),
    ],
)
def test_which_products_fuse_back_to_back(
    pair: Pair, sm: int, sm_count: int, joined: bool, rng: np.random.Generator
) -> None:
    program = chain_of(rng, pair).lower("int8", GpuTarget(sm=sm, sm_count=sm_count))
    assert any(makes_both(t[0]) for op in program.ops for t in op.tactics) == joined


def test_what_one_kernel_reads_and_writes_lies_apart(rng: np.random.Generator) -> None:
    program = chain_of(rng, Pair()).lower("int8", HOPPER)
    ops = [w for w in program.ops if any(makes_both(t[0]) for t in w.tactics)]
    assert ops
    for op in ops:
        call = next(t[0] for t in op.tactics if makes_both(t[0]))
        touched = (*call.reads, *call.writes)
        assert len(call.writes) == 2
        extents = sorted((program.offsets[b], program.sizes[b]) for b in touched)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(extents))


def test_tactics_of_the_two_come_first(rng: np.random.Generator) -> None:
    """Without times the choice of each by itself stays what it was."""
    ops = chain_of(rng, Pair()).lower("int8", HOPPER).ops
    op = next(w for w in ops if any(makes_both(t[0]) for t in w.tactics))
    assert len(op.tactics[0]) == 2
    assert op.tactics[0][0].writes != op.tactics[0][1].writes
    assert len(set(op.tactics)) == len(op.tactics)
