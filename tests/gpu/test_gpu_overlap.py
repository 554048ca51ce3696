"""Loops over products of INT8 wait for the step before; what may not is left as it is."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from int8_graphs import Graph

from toolkit.gpu.codegen.compile import compile_kernels
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.gpu.sm90.overlap import with_overlap
from toolkit.gpu.target import GpuTarget

PRODUCT = "\twgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%r1,%r2}, %rd1, %rd2, %p1, 1, 1;"
FROM_REGISTERS = PRODUCT.replace("%rd1,", "{%r3,%r4,%r5,%r6},")
WAIT = "\twgmma.wait_group.sync.aligned 0;"
COPY = "\t@%p2 cp.async.cg.shared.global [ %r7 + 0 ], [ %rd3 + 0 ], 0x10, %r8;"
BARRIER = "\tbar.sync 0;"
BACK = "\t@%p3 bra \t$L__BB0_1;"
HOPPER = GpuTarget(sm=90, sm_count=132)


def loop(*lines: str, back: str = BACK, label: str = "$L__BB0_1:") -> list[str]:
    return [label + "   // =>This Inner Loop Header: Depth=1", *lines, back]


def ptx(*parts: list[str]) -> str:
    return "\n".join(["\tmov.b32 %r1, %r5;", *(line for part in parts for line in part), "\tret;"])


PLAIN = loop(PRODUCT, "\t// wait for regs: %r1,%r2", WAIT, BARRIER, COPY)
LEFT_ALONE = {
    "sums of FP32": loop(PRODUCT.replace("s32.s8.s8", "f32.f16.f16"), WAIT, BARRIER, COPY),
    "nothing is copied while it multiplies": loop(PRODUCT, WAIT),
    "an operand goes through registers": loop(
        PRODUCT, WAIT, BARRIER, COPY, "\tst.shared.v4.b32 [ %r9 ], {%r3};"
    ),
    "an operand goes through matrices": loop(
        PRODUCT, WAIT, BARRIER, COPY, "\tstmatrix.sync [%r9], {%r3};"
    ),
    "sums are read": loop(PRODUCT, WAIT, BARRIER, COPY, "\tcvt.rn.f32.s32 %f1, %r2;"),
    "sums begin again": loop("\tmov.b32 %r1, 0;", PRODUCT, WAIT, BARRIER, COPY),
    "a second way out": loop(PRODUCT, WAIT, BARRIER, COPY, "\t@%p4 bra $L__BB0_9;"),
    "a loop inside": loop(PRODUCT, WAIT, BARRIER, COPY, "$L__BB0_2:", "\tadd.s32 %r6, %r6, 1;"),
    "one step": [PRODUCT, WAIT, BARRIER, COPY, "\tcvt.rn.f32.s32 %f1, %r2;"],
    "steps that are read": [PRODUCT, WAIT, "\tmov.b32 %r6, %r2;", PRODUCT, WAIT],
    "steps through registers": [PRODUCT, WAIT, "\tst.shared.b32 [ %r9 ], %r3;", PRODUCT, WAIT],
    "a step behind a branch": [PRODUCT, WAIT, "\t@%p4 bra $L__BB0_9;", PRODUCT, WAIT],
    "a wait without a step": [PRODUCT, WAIT, BARRIER, COPY, WAIT],
    "an operand in registers": loop(FROM_REGISTERS, WAIT, BARRIER, COPY),
    "steps of an operand in registers": [FROM_REGISTERS, WAIT, PRODUCT, WAIT],
    "a copy before the wait": loop(PRODUCT, BARRIER, COPY, WAIT),
    "a copy before the product": loop(COPY, PRODUCT, WAIT, BARRIER),
    "a copy without a barrier": loop(PRODUCT, WAIT, COPY),
    "a barrier before the wait": loop(PRODUCT, BARRIER, WAIT, COPY),
    "a barrier of some warps": loop(PRODUCT, WAIT, "\tbar.sync 1, 128;", COPY),
    "a copy for the step after without a barrier": [PRODUCT, WAIT, COPY, PRODUCT, WAIT],
    "products of two types": [
        PRODUCT.replace("s32.s8.s8 {%r1,%r2}", "f32.f16.f16 {%r3,%r4}"),
        *(WAIT, "\tadd.f32 %r6, %r6, %r3;", PRODUCT, WAIT),
    ],
}


def test_a_loop_waits_for_the_step_before_and_behind_it_for_the_last() -> None:
    behind = ["\tcp.async.wait_group 0;"]
    lines = with_overlap(ptx(PLAIN, behind)).split("\n")
    waits = [line for line in lines if "wgmma.wait_group" in line]
    assert [line.split()[-1] for line in waits] == ["1;", "0;"]
    assert lines[lines.index(BACK) + 1 :] == [waits[1], *behind, "\tret;"]
    assert [line for line in lines if line not in waits] == [
        line for line in ptx(PLAIN, behind).split("\n") if line != WAIT
    ]


def test_each_loop_is_looked_at_by_itself() -> None:
    other = loop(PRODUCT, WAIT, back="\t@%p3 bra \t$L__BB0_3;", label="$L__BB0_3:")
    first, second = with_overlap(ptx(PLAIN)), with_overlap(ptx(other, PLAIN))
    assert first.count("aligned 1;") == second.count("aligned 1;") == 1
    assert ptx(other)[:-5] in second


def test_a_step_with_two_products_leaves_one_of_them_open() -> None:
    lines = with_overlap(ptx(loop(PRODUCT, WAIT, PRODUCT, WAIT, BARRIER, COPY))).split("\n")
    assert [line.split()[-1] for line in lines if "wgmma.wait_group" in line] == ["1;", "1;", "0;"]


def test_steps_of_an_unrolled_loop_wait_for_the_one_before() -> None:
    steps = [
        PRODUCT,
        WAIT,
        BARRIER,
        COPY,
        PRODUCT,
        WAIT,
        PRODUCT,
        WAIT,
        "\tcvt.rn.f32.s32 %f1, %r2;",
    ]
    lines = with_overlap(ptx(steps)).split("\n")
    assert [line.split()[-1] for line in lines if "wgmma.wait_group" in line] == ["1;", "1;", "0;"]


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_loop_that_may_not_overlap_is_left_alone(name: str) -> None:
    text = ptx(LEFT_ALONE[name])
    assert with_overlap(text) == text


def disassembled(cubin: bytes, folder: Path) -> str:
    spec = find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip("Triton came without nvdisasm")
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    return subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")
@pytest.mark.parametrize("taps", [1, 3])
def test_products_of_int8_overlap_on_tensor_cores_of_sm_90(
    taps: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    graph = Graph(rng, {"x": (8, 512, 14, 14)})
    x = graph.rounded("x")
    y = graph.product("Conv", x, (64, 512, taps, taps), bias="int32", pads=[taps // 2] * 4)
    program = graph.case(graph.rounded(graph.add("Relu", y))).lower("int8", HOPPER)
    name = "gemm im2col" if taps > 1 else "gemm strided"
    (op,) = [one for one in program.ops if one.tactics[0][0].spec.title == name]
    spec = op.tactics[0][0].spec
    (compiled,) = compile_kernels([spec], HOPPER)
    assert compiled is not None
    sides = dict(spec.constants)
    block = (int(sides["BLOCK_M"]) + int(sides["BLOCK_N"])) * int(sides["BLOCK_K"])  # type: ignore[arg-type]
    assert compiled.shared_bytes >= block * spec.stages  # one place more than copies under way
    found = disassembled(compiled.cubin, tmp_path)
    waits = re.findall(r"IGMMA|WARPGROUP\.DEPBAR\.LE gsb0, 0x\d", found)
    assert "WARPGROUP.DEPBAR.LE gsb0, 0x1" in waits
    assert waits[-1] == "WARPGROUP.DEPBAR.LE gsb0, 0x0"
