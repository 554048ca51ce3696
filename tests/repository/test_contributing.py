"""The recipes of CONTRIBUTING.md, applied to a copy of the repository as they are written."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = {
    title: body
    for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    if title != "Set up"
}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COPIED = (
    "toolkit",
    "calibration",
    "device",
    "pipelines",
    "configs",
    "scripts",
    "tests",
    "pyproject.toml",
)
CACHES = shutil.ignore_patterns("__pycache__", "*.pyc")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=CACHES)
        else:
            shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def apply(block: str, folder: Path) -> Path:
    """Apply a diff without line numbers, whose old lines are in the file once; return the file."""
    header, _, hunk = block.partition("\n")
    path = folder / header.removeprefix("--- ")
    lines = hunk.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} does not hold exactly once:\n{old}"
    path.write_text(text.replace(old, new))
    return path


def lint(path: Path, folder: Path) -> None:
    """Check the form of a changed file; what it imports may come in the next block."""
    for command in (("check", "--ignore", "F821"), ("format", "--check")):
        arguments = [sys.executable, "-m", "ruff", *command, str(path)]
        result = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def run(line: str, folder: Path) -> None:
    """Run a command of a recipe in the copy."""
    program, *arguments = shlex.split(line)
    module = {"pytest": "pytest", "tandem": "toolkit.cli"}[program]
    command = [sys.executable, "-m", module, *arguments]
    path = os.pathsep.join([str(folder), str(folder / "tests" / "fixtures")])
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout


def test_there_is_a_recipe_for_each_kind_of_row() -> None:
    assert list(RECIPES) == [
        "An operator on the GPU",
        "A DLA rule",
        "A decoder",
        "A board",
        "An option of a command",
    ]


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_works_as_it_is_written(title: str, copy: Path) -> None:
    if title == "An operator on the GPU":
        pytest.importorskip("triton", reason="Triton is not installed")
    for language, block in BLOCK.findall(RECIPES[title]):
        if language == "diff":
            lint(apply(block, copy), copy)
        elif language == "bash":
            for line in block.splitlines():
                run(line, copy)
        else:
            header, _, content = block.partition("\n")
            (copy / header.removeprefix("# file: ")).write_text(content)
