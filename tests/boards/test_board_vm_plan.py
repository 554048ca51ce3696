"""What `scripts/test_board_vm.sh` would build and boot, without root and without qemu."""

import subprocess
from pathlib import Path

import pytest

from scripts.board_vm import (
    SUITES,
    arguments_of,
    customise,
    needed_programs,
    parse,
    preferences,
)

ROOT = Path(__file__).parents[2]


def test_the_default_is_a_debian_of_arm64() -> None:
    plan, rest = parse(["-k", "power"])
    assert (plan.suite, plan.arch, plan.accel, rest) == (
        "bookworm",
        "arm64",
        "tcg",
        ["-k", "power"],
    )
    assert "linux-image-arm64" in plan.packages
    assert plan.place.parent == Path.home() / ".cache/tandem/board-vm"


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("arch", ["arm64", "amd64"])
def test_a_plan_is_what_its_options_say(suite: str, arch: str, tmp_path: Path) -> None:
    words = ["--suite", suite, "--arch", arch, "--folder", str(tmp_path)]
    plan, _ = parse(words)
    assert parse(arguments_of(plan)) == (plan, [])
    assert f"linux-image-{arch}" in plan.packages
    row, root = SUITES[suite], str(tmp_path / "root")
    command = plan.bootstrap(tmp_path / "root", tmp_path, "mirror:/a")
    second = (f"deb mirror:/a {row.systemd_release} main",) if row.systemd_release else ()
    assert command[command.index(root) - 1 :] == (row.release, root, "mirror:/a", *second)
    assert f"--architectures={arch}" in command
    boot = plan.boot(tmp_path / "d", 2222, tmp_path / "q", tmp_path / "c")
    assert boot[0] == {"arm64": "qemu-system-aarch64", "amd64": "qemu-system-x86_64"}[arch]
    assert f"file={tmp_path / 'd'},format=qcow2" in " ".join(boot)
    assert "hostfwd=tcp:127.0.0.1:2222-:22" in " ".join(boot)


def test_systemd_alone_comes_from_another_release() -> None:
    text = preferences(SUITES["bookworm-systemd247"])
    assert text.split("\n\n") == [
        "Package: src:systemd\nPin: release n=bullseye\nPin-Priority: 990",
        "Package: *\nPin: release n=bookworm\nPin-Priority: 900\n",
    ]
    assert preferences(SUITES["trixie"]) == ""


def test_the_suites_lie_around_the_systemd_of_each_jetpack() -> None:
    versions = {suite.systemd for suite in SUITES.values()}
    for jetpack in (249, 255):
        assert min(versions) < jetpack < max(versions)
        assert jetpack not in versions


def test_other_packages_are_another_image() -> None:
    places = {parse(["--suite", suite])[0].place for suite in SUITES}
    places |= {parse(["--arch", "amd64"])[0].place}
    assert len(places) == len(SUITES) + 1


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert needed_programs(parse([])[0])[-1] == "qemu-system-aarch64"


def test_the_scripts_pass_shellcheck(tmp_path: Path) -> None:
    inside = tmp_path / "customise.sh"
    inside.write_text(f"#!/bin/sh\n{customise('KEY')}")
    script = ROOT / "scripts/test_board_vm.sh"
    subprocess.run(["shellcheck", str(script), str(inside)], check=True)
    done = subprocess.run([str(script), "--help"], capture_output=True, text=True, check=True)
    assert all(option in done.stdout for option in ("--suite", "--arch", "--accel"))
