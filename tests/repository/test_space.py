"""The space that the tests take: what scripts/test.sh asks for first, and what it leaves behind."""

import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = f"set -euo pipefail; source {ROOT}/scripts/venv.sh; source {ROOT}/scripts/test_parts.sh; "


def bash(
    script: str, cwd: Path, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-c", PARTS + script], cwd=cwd, env={**os.environ, **(env or {})},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def needed_mb(cwd: Path) -> int:
    first = bash("check_space", cwd, disk(cwd, 50_000)).stdout.split()
    return int(first[first.index("MB") - 1])


def disk(folder: Path, free_mb: int) -> dict[str, str]:
    """An environment with a double of `df`, by which so much is free."""
    double = folder / "bin/df"
    double.parent.mkdir(exist_ok=True)
    kib = -(-free_mb * 1_000_000 // 1024)
    double.write_text(f"#!/bin/sh\necho header\necho disk 9 9 {kib} 9% /\n")
    double.chmod(0o755)
    return {"PATH": f"{double.parent}:{os.environ['PATH']}", "TMPDIR": str(folder)}


def test_too_little_space_is_said_in_one_sentence_before_anything_is_made(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts/test.sh", "--version"], env={**os.environ, **disk(tmp_path, 17)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.startswith("The tests need ")
    assert len(done.stdout.splitlines()) == len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: the tests need ")
    assert f" MB in {ROOT} and 17 MB are free there: make space, or set TMPDIR" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize(("more", "status"), [(0, 0), (-1, 1)])
def test_the_space_is_that_of_what_is_not_there_and_of_temporary_files(
    tmp_path: Path, more: int, status: int
) -> None:
    assert needed_mb(tmp_path) > 6000
    (tmp_path / ".venv").mkdir()
    needed = needed_mb(tmp_path)
    assert 3000 < needed < 4000
    done = bash("check_space", tmp_path, disk(tmp_path, needed + 3000 + more))
    assert done.returncode == status, done.stderr


@pytest.mark.parametrize("end", ["true", "kill -KILL $$"])
def test_temporary_files_go_when_the_run_ends_and_those_of_killed_ones_before(
    tmp_path: Path, end: str
) -> None:
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    runs = tmp_path / f"pytest-of-{user}"
    ended = subprocess.Popen(["true"])
    ended.wait(60)
    for name, pid in (("killed", ended.pid), ("running", os.getpid())):
        (runs / f"pytest-{name}").mkdir(parents=True)
        (runs / f"pytest-{name}/.lock").write_text(str(pid))
    (runs / "pytest-ended").mkdir()  # a test failed there
    done = bash(
        f'make_scratch; mktemp; touch "$TMPDIR/more"; echo "$PYTEST_DEBUG_TEMPROOT"; {end}',
        tmp_path, {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    file, root = done.stdout.split()
    scratch = Path(file).parent
    assert scratch.parent == tmp_path == Path(root)
    end_s = time.monotonic() + 60
    while scratch.exists():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    assert sorted(path.name for path in runs.iterdir()) == ["pytest-ended", "pytest-running"]
