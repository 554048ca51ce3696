"""A test that fails is run once more in CI: with the same numbers, so that a fault fails again."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
MODULE = """
import threading

RUNS = []


def test_fault(rng):
    RUNS.append(rng.integers(2**62))
    print("number", RUNS[-1])
    assert RUNS == []


def test_race(rng, started=threading.Event()):
    assert started.is_set() or started.set()
"""


def test_a_fault_fails_twice_with_one_seed_and_a_race_is_reported(tmp_path: Path) -> None:
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-raR", "--reruns", "1", "-p", "no:cacheprovider",
         f"--rootdir={tmp_path}", str(tmp_path)],
        check=False, cwd=TESTS.parent, capture_output=True, text=True, timeout=280,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")},
    )  # fmt: skip
    assert run.returncode == 1, run.stdout + run.stderr
    numbers = [line for line in run.stdout.splitlines() if line.startswith("number ")]
    assert len(numbers) == 2, run.stdout
    assert len(set(numbers)) == 1
    assert "RERUN test_module.py::test_race" in run.stdout
    assert "1 failed, 1 passed, 2 rerun" in run.stdout
