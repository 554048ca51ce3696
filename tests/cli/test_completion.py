"""Shell completion: the scripts of `tandem completion`, run by real shells where they are here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import configs
from toolkit.cli.actions.completion import INSTALL, VARIABLE

ROOT = Path(__file__).parents[2]
PROFILES = {path.stem for path in (configs.ROOT / "profiles").glob("*.toml")}


def tandem(*words: str, **environment: str) -> str:
    code = "import sys; sys.argv[0] = 'tandem'; from toolkit.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def completions(*words: str) -> set[str]:
    """What is offered for the last word, by click's protocol of bash."""
    variables = {
        VARIABLE: "bash_complete",
        "COMP_WORDS": " ".join(("tandem", *words)),
        "COMP_CWORD": str(len(words)),
    }
    return {line.partition(",")[2] for line in tandem(**variables).split()}


@pytest.mark.parametrize("command", ["plan", "build", "calibrate", "demo"])
def test_profiles_are_completed(command: str) -> None:
    assert completions(command, "--profile", "orin-n") == {
        name for name in PROFILES if name.startswith("orin-n")
    }


def test_power_modes_are_those_of_the_profile_on_the_line() -> None:
    modes = completions("plan", "m.onnx", "--profile", "agx-orin-64gb", "--power-mode", "3")
    assert modes == {"30W"}
    assert completions("plan", "--profile", "no-such-board", "--power-mode", "3") == set()


def test_calibration_methods_are_completed() -> None:
    assert completions("calibrate", "m.onnx", "--method", "m") == {"minmax", "mse"}


def test_commands_are_completed() -> None:
    assert completions("pl") == {"plan"}


@pytest.mark.parametrize("shell", INSTALL)
def test_the_script_is_one_that_the_shell_takes(shell: str, tmp_path: Path) -> None:
    script = tandem("completion", shell)
    assert script.startswith("# ")
    assert INSTALL[shell][0] in script
    program = shutil.which(shell)
    if program is None:
        assert VARIABLE in script
        return
    file = tmp_path / "script"
    file.write_text(script)
    subprocess.run([program, "-n", str(file)], check=True)


def test_bash_completes_a_profile(tmp_path: Path) -> None:
    (tmp_path / "tandem").write_text(
        f"#!/bin/sh\nexec {sys.executable} -c "
        '\'import sys; sys.argv[0] = "tandem"; from toolkit.cli.main import main; main()\' "$@"\n'
    )
    (tmp_path / "tandem").chmod(0o755)
    (tmp_path / "script").write_text(tandem("completion", "bash"))
    ask = (
        "source script; COMP_WORDS=(tandem plan --profile orin-nx-8); COMP_CWORD=3;"
        "_tandem_completion tandem; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert set(done.stdout.split()) == {n for n in PROFILES if n.startswith("orin-nx-8")}
