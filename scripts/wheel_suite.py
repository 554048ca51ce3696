"""Run tests against the installed wheel, beside another distribution with packages of our names.

    python -m scripts.wheel_suite                      # all but READS_THE_CHECKOUT
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
# What reads the checkout, and can't run without it: folders, files, tests.
READS_THE_CHECKOUT = {
    "tests/repository": "the repository itself",
    "tests/agent/test_service.py::"
    "test_an_image_is_made_of_what_the_wheel_is_made_of_and_no_environment": "what a build takes",
    "tests/boards/test_flash_messages.py": "texts in the sources, by their folders",
    "tests/boards/test_provision.py::test_a_wheel_is_built_beside_an_old_setuptools": "a build",
    "tests/boards/test_provision.py::test_a_wheel_is_built_with_what_pyproject_asks_for": "a build",
    "tests/cli/test_install_advice.py::test_a_checkout_names_itself": "where it lies",
    "tests/fleet/test_asyncapi.py::test_the_description_is_up_to_date": "names of modules",
    "tests/partition/test_advice.py": "the imports of all sources",
    "tests/partition/test_cost_errors.py": "published figures, which no wheel has",
    "tests/partition/test_costs.py::"
    "test_a_fit_of_all_dla_rows_reaches_its_goal_and_gives_the_shipped_constants": (
        "published figures"
    ),
    "tests/partition/test_fit_costs.py": "published figures",
    "tests/runtime/test_board_report.py::test_a_report_becomes_a_change_that_git_applies": (
        "sources that a change is made for"
    ),
}
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


def demo_wheel(folder: Path) -> Path:
    """Build the wheel of the demo's model and pictures, which tests read, in `folder`."""
    tree = folder / "demo"  # a copy: a build writes into its tree
    for name in ("configs", "scripts/demo_data"):
        shutil.copytree(ROOT / name, tree / name, ignore=_CODE)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run((*pip, "-w", str(folder), str(tree / "scripts/demo_data")), check=True)
    return next(folder.glob("tandem_edge_demo-*.whl"))


def make_environment(folder: Path, wheels: Sequence[Path], names: Sequence[str]) -> Path:
    """Make an environment of wheels; return its Python. A stranger has packages of `names`."""
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
    subprocess.run((*pip, "--no-deps", "--no-index", *map(str, wheels)), check=True)
    for name in names:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(f"raise SystemExit('{name} of a stranger')\n")
    return python


def copy_suite(folder: Path, one_name: ModuleType) -> None:
    """Copy the tests, what they start and what they read, without the packages."""
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=_CODE)
    # Sources of libtandem, which no wheel has, and tests compile.
    shutil.copytree(ROOT / "device/native", folder / "device/native", ignore=_CODE)
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
        wheels = (own_wheel(folder), demo_wheel(folder))
        python = make_environment(folder / "env", wheels, one_name.PACKAGES)
        copy_suite(suite, one_name)
        selection = words or ["-m", "not slow and not gpu and not jetson"]
        # A file that is left out is not imported either, as it may read the checkout then.
        left_out = [
            f"--{'deselect' if '::' in name else 'ignore'}={name}" for name in READS_THE_CHECKOUT
        ]
        command = [str(python), "-m", "pytest", "-q", *selection, *left_out]
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
        return subprocess.run(command, cwd=suite, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
