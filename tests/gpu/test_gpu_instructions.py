"""Comparisons take the instructions that a GPU has for them: pairs of halves, NaN that stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

COMPILE = """
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from toolkit.gpu.kernels.expression import evaluate
from toolkit.gpu.kernels.max_pooling import larger
from toolkit.gpu.kernels.primitives import clip, hard_swish, relu

@triton.jit
def kernel(a, b, y, WHAT: tl.constexpr, ELEMENTS: tl.constexpr):
    place = tl.arange(0, ELEMENTS)
    x = tl.load(a + place)
    if WHAT == "larger":
        result = larger(x, tl.load(b + place))
    elif WHAT == "relu":
        result = relu(x)
    elif WHAT == "clip":
        result = clip(x, 0.0, 6.0)
    elif WHAT == "last relu":
        result = evaluate((x,), (("add", 0, 0), ("relu", 1)), None, y.dtype.element_ty)
    elif WHAT == "nothing":
        result = evaluate((x,), (), None, y.dtype.element_ty)
    elif WHAT == "last clip":
        result = evaluate((x,), (("clip", 0, 0.0, 6.0),), None, y.dtype.element_ty)
    else:
        result = hard_swish(x)
    tl.store(y + place, result.to(y.dtype.element_ty))

what, read, stored, sm, elements = sys.argv[1:]
kinds = {"a": "*" + read, "b": "*" + read, "y": "*" + stored}
kinds |= {"WHAT": "constexpr", "ELEMENTS": "constexpr"}
aligned = {(at,): [["tt.divisibility", 16]] for at in range(3)}
source = ASTSource(kernel, kinds, {(3,): what, (4,): int(elements)}, aligned)
print(triton.compile(source, target=GPUTarget("cuda", int(sm), 32)).asm["ptx"])
"""

COMPARED = ("setp", "selp")
ROWS = (
    ("larger", "fp16", "fp16", 87, "max.NaN.f16x2", COMPARED),
    ("larger", "bf16", "bf16", 87, "max.NaN.bf16x2", COMPARED),
    ("larger", "i8", "i8", 87, "max.f16x2", COMPARED),
    ("larger", "fp32", "fp32", 87, "max.NaN.f32", COMPARED),
    ("larger", "fp16", "fp16", 72, "setp.gt.f16x2", ("max.", "cvt.")),
    ("last relu", "fp32", "fp16", 87, "cvt.rn.relu.f16x2.f32", (*COMPARED, "max")),
    ("last relu", "fp32", "fp32", 87, "selp", ("cvt.",)),
    ("last relu", "fp32", "fp16", 62, "selp", ("cvt.rn.relu",)),
    ("last clip", "fp32", "fp16", 87, "min.NaN.f16x2", (*COMPARED, "max", "min.NaN.f32")),
    ("nothing", "fp32", "fp16", 87, "cvt.rn.f16", (*COMPARED, "relu")),
    ("relu", "fp32", "fp16", 62, "selp", ("max.",)),
    ("clip", "fp32", "fp16", 87, "min.NaN.f32", COMPARED),
    ("hard_swish", "fp32", "fp16", 87, "add.rn.sat.f32", (*COMPARED, "max", "min", "fma")),
)


@pytest.mark.parametrize(
    ("what", "read", "stored", "sm", "present", "absent"),
    ROWS,
    ids=[f"{what} {read} {stored} sm_{sm}" for what, read, stored, sm, *_ in ROWS],
)
def test_comparisons_take_the_instructions_of_the_gpu(
    what: str, read: str, stored: str, sm: int, present: str, absent: tuple[str, ...],
    tmp_path: Path,
) -> None:  # fmt: skip
    lines = compiled(tmp_path, what, read, stored, sm, 2048)
    assert any(present in line for line in lines)
    assert not [line for line in lines for name in absent if name in line]


def test_a_block_of_one_number_has_no_pairs(tmp_path: Path) -> None:
    lines = compiled(tmp_path, "last relu", "fp32", "fp16", 87, 1)
    assert any("cvt.rn.f16.f32" in line for line in lines)


def compiled(
    tmp_path: Path, what: str, read: str, stored: str, sm: int, elements: int
) -> list[str]:
    """Return the lines of a kernel's PTX."""
    # In a process of its own: kernels of this one are interpreted.
    file = tmp_path / "compiled.py"
    file.write_text(COMPILE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    compiler_environment = {**environment, "PYTHONPATH": root, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(file), what, read, stored, str(sm), str(elements)]
    done = subprocess.run(
        command, env=compiler_environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    body = done.stdout.partition("\n{")[2].partition(".section")[0]
    return [line for line in body.splitlines() if ".loc" not in line]
