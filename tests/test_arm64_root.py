"""`scripts/test_arm64.sh` removes what it has made itself, and nothing else."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_a_folder_of_somebody_else_is_never_removed(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the script wants root")
    programs, home = tmp_path / "bin", tmp_path / "home"
    programs.mkdir()
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    doubles = {"uname": "echo aarch64", "debootstrap": "exit 7", "qemu-aarch64-static": "exit 7"}
    for name, line in doubles.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)

    def run(root: Path) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", str(ROOT / "scripts/test_arm64.sh")],
            env={"PATH": f"{programs}:{os.environ['PATH']}", "TANDEM_ARM64_ROOT": str(root)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    done = run(home)
    assert (done.returncode, "is not a root of this script" in done.stderr) == (1, True), done
    assert (home / "thesis.tex").exists()
    # One that it has begun is made anew: debootstrap is asked both times.
    begun = tmp_path / "arm64"
    assert [run(begun).returncode, run(begun).returncode] == [7, 7]
