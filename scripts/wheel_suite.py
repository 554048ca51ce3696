"""Run tests against the installed wheel, beside another distribution with packages of our names.

    python -m scripts.wheel_suite                      # all but those of the repository
    python -m scripts.wheel_suite tests/agent -n 2     # arguments of pytest

The wheel is built, and installed into an environment of its own, which sees the packages of this
one but not the checkout. The tests are copied, with the imports that setup.py gives the wheel.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from toolkit.fleet.boards.wheels import own_wheel

ROOT = Path(__file__).parents[1]
NOT_OF_A_WHEEL = "tests/repository"  # tests of the checkout
_COPIED = ("docs", "examples", "scripts", "tests")
_FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "pyproject.toml")
_CODE = shutil.ignore_patterns("__pycache__", "*.py[co]", "build", "*.egg-info")


def transformation() -> ModuleType:
    """Load setup.py."""
    spec = spec_from_file_location("one_name", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_environment(folder: Path, wheel: Path, names: Sequence[str]) -> Path:
    """Make an environment with the wheel; return its Python. A stranger has packages of `names`."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python3*/site-packages"))
    # As an entry of a .pth file a folder is searched, but its own .pth files are not read.
    (site / "tools.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for program in Path(sys.executable).parent.iterdir():
        if not (python.parent / program.name).exists():
            (python.parent / program.name).symlink_to(program)
    for name in ("tandem", "tandem-agent", "tandem-pipeline"):
        (python.parent / name).unlink(missing_ok=True)
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet")
    subprocess.run((*pip, "--no-deps", "--no-index", str(wheel)), check=True)
    for name in names:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(f"raise SystemExit('{name} of a stranger')\n")
    return python


def copy_suite(folder: Path, one_name: ModuleType) -> None:
    """Copy the tests, what they start and what they read, without the packages."""
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=_CODE)
    shutil.copytree(ROOT / "configs", folder / "configs", ignore=shutil.ignore_patterns("*.py*"))
    for name in _FILES:
        shutil.copy(ROOT / name, folder)
    for name in (".models", ".venv", ".venv-tensorflow"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    modules = one_name.modules_of(ROOT / name for name in one_name.PACKAGES)
    for name in _COPIED:
        one_name.rewrite(sorted((folder / name).rglob("*.py")), modules)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests; return pytest's exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    one_name = transformation()
    with tempfile.TemporaryDirectory(prefix="tandem-wheel-") as scratch:
        folder = Path(scratch)
        suite = folder / "suite"
        suite.mkdir()
        python = make_environment(folder / "env", own_wheel(folder), one_name.PACKAGES)
        copy_suite(suite, one_name)
        selection = words or ["-m", "not slow and not gpu and not jetson"]
        command = [str(python), "-m", "pytest", "-q", *selection, f"--ignore={NOT_OF_A_WHEEL}"]
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
        return subprocess.run(command, cwd=suite, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
