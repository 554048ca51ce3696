"""`scripts/test_arm64.sh` removes what it made itself, and asks apt for its mirror."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_folder_of_somebody_else_is_never_removed(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the script wants root")
    programs, home = tmp_path / "bin", tmp_path / "home"
    programs.mkdir()
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    doubles = {"uname": "echo aarch64", "debootstrap": "exit 7", "qemu-aarch64-static": "exit 7"}
    doubles["apt-get"] = "echo mirror:/"
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


def mirror(tmp_path: Path, apt: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "apt-get").write_text(f"#!/bin/sh\n{apt}\n")
    (programs / "apt-get").chmod(0o755)
    return subprocess.run(
        ["bash", str(ROOT / "scripts/apt_mirror.sh"), "bookworm"],
        env={"PATH": f"{programs}:{os.environ['PATH']}", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


APT = """case "$*" in *"Release: bookworm Component: main") echo one:/a; echo two:/b ;; esac"""


def test_the_mirror_is_the_one_of_this_machines_apt(tmp_path: Path) -> None:
    assert mirror(tmp_path, APT).stdout == "one:/a\n"


def test_a_mirror_of_another_release_of_debian_has_this_one_too(tmp_path: Path) -> None:
    apt = """case "$*" in *"Label: Debian Component: main") echo one:/a ;; esac"""
    assert mirror(tmp_path, apt).stdout == "one:/a\n"


def test_a_mirror_can_be_named(tmp_path: Path) -> None:
    assert mirror(tmp_path, "exit 9", TANDEM_MIRROR="three:/c").stdout == "three:/c\n"


def test_a_machine_without_a_mirror_of_that_release_is_told(tmp_path: Path) -> None:
    done = mirror(tmp_path, "true")
    assert done.returncode == 1
    assert "name one in TANDEM_MIRROR" in done.stderr


def test_the_repository_names_no_package_mirror() -> None:
    hosts = r"(deb|archive|ports|security|snapshot)\.(debian|ubuntu)\.|(pypi|pythonhosted)\.org|"
    hosts += r"download\.pytorch\.org|registry\.npmjs|https?://mirror"
    done = subprocess.run(
        ("git", "grep", "-nIE", hosts, "--", ".", ":!tests/boards/test_arm64_root.py"),
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 128:
        pytest.skip("this is no checkout")
    assert done.stdout == ""
