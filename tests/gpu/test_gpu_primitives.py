"""The table of primitive operators: what is not in it, and what a change of it compiles again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gpu_interpreter  # noqa: F401  (before kernels are imported)
import pytest

from toolkit.gpu.codegen import compile_kernels as compiler
from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

KERNELS = Path(compiler.__file__).parents[1] / "kernels"
ORIN = GpuTarget(sm=87, sm_count=8)

# Triton keeps the hash of a function; those of all that reach the changed one are made again.
CHANGE_EACH = """
from triton.runtime.jit import JITFunction
from toolkit.gpu.kernels import elementwise, expression, functions, int8, primitives

KERNEL = elementwise.elementwise
CALLERS = (KERNEL, expression.evaluate, expression._apply, primitives.primitive, primitives.table)

def key_after(function, source, *callers):
    function._unsafe_update_src(source)
    for one in (*CALLERS, *callers):
        one.hash = None
    return KERNEL.cache_key

rows = {row[0]: () for row in primitives.table().values() if isinstance(row[0], JITFunction)}
rows[primitives.table] = ()
rows[functions.log1p] = (functions.softplus,)
rows[int8.round_int8] = (primitives.quantize,)
for function, callers in rows.items():
    source, before = function.src, KERNEL.cache_key
    after = key_after(function, source + "    # changed", *callers)
    print(function.__name__, "unchanged" if before == after else "changed")
    assert key_after(function, source, *callers) == before
"""


def test_triton_compiles_kernels_again_when_a_function_of_the_table_changes() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CHANGE_EACH]
    lines = subprocess.run(
        command, env=environment, cwd=KERNELS.parents[2], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(lines) > 50
    assert [line for line in lines if not line.endswith(" changed")] == []


def test_the_cache_forgets_kernels_when_any_of_their_files_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_KERNELS", shutil.copytree(KERNELS, tmp_path / "kernels"))
    keys = [compiler._common_key(ORIN)]
    assert compiler._common_key(ORIN) == keys[0]
    for path in sorted((tmp_path / "kernels").glob("*.py")):
        path.write_text(path.read_text() + "\n")
        keys.append(compiler._common_key(ORIN))
    assert len(set(keys)) == len(keys) > 20


def test_a_step_that_is_no_primitive_is_named() -> None:
    from toolkit.gpu.kernels.primitives import primitive

    with pytest.raises(ValueError, match="'sinus' is not a primitive operator"):
        primitive("sinus")


def test_kernels_are_interpreted_also_where_something_else_imports_triton_first() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    tests = Path(__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join((str(KERNELS.parents[2]), str(tests / "fixtures")))
    code = "import conftest, triton.language as tl, gpu_interpreter; print(type(tl.sum).__name__)"
    command = [sys.executable, "-c", code]
    printed = subprocess.run(
        command, env=environment, cwd=tests, capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    assert printed.strip() == "InterpretedFunction"
