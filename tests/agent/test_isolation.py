"""Children import nothing from their working directory, whatever PYTHONPATH says, also on 3.10."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from device.start.command import module_command

ROOT = Path(__file__).parents[2]
# Modules that children import and that are not Tandem's, the interpreter's own start among them.
HOSTILE = ("sitecustomize", "usercustomize", "msgspec", "numpy", "cv2", "paho", "json", "runpy")
PATHS = [
    pytest.param(f"{ROOT}{os.pathsep}", id="trailing separator"),  # the usual slip
    pytest.param(str(ROOT), id="absolute", marks=pytest.mark.slow),
    pytest.param(f".{os.pathsep}{ROOT}", id="dot", marks=pytest.mark.slow),
    pytest.param(f"{os.pathsep}{ROOT}", id="leading separator", marks=pytest.mark.slow),
]
CHILDREN = {
    "device.start.child": ("0", "true"),  # process 0 is not its parent: it ends with 1
    "pipelines.sources.gst_process": ("0",),
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with files that take the place of packages, if they are imported."""
    folder = tmp_path_factory.mktemp("hostile")
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"import os\nos.write(2, b'{name} of the user')\n")
    return folder


def python_310() -> str:
    """Return a Python 3.10, the oldest that Tandem runs on."""
    candidates = [*Path.home().glob(".pyenv/versions/3.10.*/bin/python3.10")]
    path = shutil.which("python3.10") if not candidates else str(candidates[-1])
    if path is None:
        pytest.skip("there is no Python 3.10 here")
    return path


def run(
    command: tuple[str, ...], folder: Path, **environment: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("module", ["pipelines.__main__", "device.agent"])
def test_children_import_nothing_from_the_working_directory(
    hostile: Path, module: str, path: str
) -> None:
    done = run(module_command(module, "--help"), hostile, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("module", CHILDREN)
def test_neither_do_they_on_python_310(hostile: Path, module: str, path: str) -> None:
    interpreter = python_310()
    command = (interpreter, *module_command(module, *CHILDREN[module])[1:])
    done = run(command, hostile, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("module", ["pipelines.__main__", "device.agent"])
def test_an_agent_or_a_pipeline_that_a_user_starts_does_not_either(
    hostile: Path, module: str
) -> None:
    names = ("msgspec", "numpy", "cv2", "paho")  # the others are Python's before our first line
    done = run((sys.executable, "-m", module, "--help"), hostile, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert [name for name in names if name in done.stderr] == []


def test_packages_of_an_absolute_python_path_are_there(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('chosen on purpose')")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = run(module_command("pipelines.__main__", "--help"), ROOT, PYTHONPATH=path)
    assert "chosen on purpose" in done.stderr


def test_packages_of_the_user_are_there_before_those_of_the_system(tmp_path: Path) -> None:
    """As after `pip install --user` with the system's Python, which knows a user site."""
    base = Path(sys.base_prefix, "bin", "python3")
    site = subprocess.run(
        (base, "-c", "import site; print(site.getusersitepackages())"),
        env={**os.environ, "PYTHONUSERBASE": str(tmp_path)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    folder = Path(site.stdout.strip())
    folder.mkdir(parents=True)
    (folder / "msgspec.py").write_text("raise SystemExit('installed by the user')")
    command = (str(base), *module_command("pipelines.__main__", "--help")[1:])
    done = run(command, tmp_path, PYTHONUSERBASE=str(tmp_path))
    assert "installed by the user" in done.stderr
    done = run(command, tmp_path, PYTHONUSERBASE=str(tmp_path), PYTHONNOUSERSITE="1")
    assert "installed by the user" not in done.stderr
