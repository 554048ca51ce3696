"""The interpreter of the tests, against Triton's own: no result and no refusal differs."""

import os
import subprocess
import sys
from pathlib import Path

import gpu_interpreter  # noqa: F401  (it makes the interpreter quick)
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

FIXTURES = Path(__file__).parents[1] / "fixtures"


def printed(how: str) -> str:
    command = [sys.executable, str(FIXTURES / "interpreted_segments.py"), how]
    path = os.pathsep.join((str(FIXTURES), str(FIXTURES.parents[1])))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_segments_compute_the_same_bit_by_bit() -> None:
    lines = printed("quick")
    assert len(lines.splitlines()) == 12
    assert lines == printed("plain")


def test_a_shape_is_judged_also_when_one_like_it_was_made() -> None:
    from triton.language import core

    float32 = core.float32
    assert core.block_type(float32, [16]) == core.block_type(float32, core.tuple([16]))
    with pytest.raises(TypeError, match="must have type"):
        core.block_type(float32, [16.0])
    with pytest.raises(AssertionError):
        core.block_type(float32, (16,))
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            core.block_type(float32, [12])
