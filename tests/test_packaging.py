"""What is shipped: the wheel, the source archive and the editable install, from a clean copy."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGES = ("calibration", "configs", "device", "pipelines", "toolkit")
BESIDES = ("pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY.md")
CACHES = ("__pycache__", "*.pyc")

# What JetPack ships in a build of its own, or a board has no use for.
NEVER_ON_A_BOARD = (
    "onnx", "onnx-ir", "onnxscript", "onnxruntime", "triton", "torch",
    "opencv-python", "opencv-python-headless", "pycuda", "tensorrt",
)  # fmt: skip


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the shipped part of the tree, with a stray cache that must stay behind."""
    copy = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns(*CACHES))
    for name in BESIDES:
        shutil.copy(ROOT / name, copy)
    for folder in ("configs/__pycache__", "configs/profiles/__pycache__"):
        (copy / folder).mkdir()
        (copy / folder / "stray.cpython-310.pyc").write_bytes(b"stale")
    (copy / "tests").mkdir()
    (copy / "tests" / "test_nothing.py").write_text("")
    (copy / "scripts").mkdir()
    (copy / "scripts" / "helper.py").write_text("")
    return copy


@pytest.fixture(scope="session")
def archives(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source archive, and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source))
    return out


@pytest.fixture(scope="session")
def wheel(archives: Path) -> Path:
    return next(archives.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed; nothing of the checkout is on its path."""
    target = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet",
        "--disable-pip-version-check", "--target", str(target), str(wheel))  # fmt: skip
    return target


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=os.path.abspath(os.sep),
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shipped_files(source: Path) -> set[str]:
    """Every file of the five packages, caches excepted."""
    return {
        path.relative_to(source).as_posix()
        for package in PACKAGES
        for path in (source / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def requirement_names(lines: Iterable[str]) -> set[str]:
    """Names of what is installed here without any extra."""
    requirements = [Requirement(line) for line in lines]
    return {
        canonicalize_name(requirement.name)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def test_the_wheel_holds_exactly_the_five_packages(source: Path, wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = {name for name in names if ".dist-info/" in name}
    assert set(names) - info == shipped_files(source)
    assert {name.rpartition("/")[2] for name in info} >= {
        "LICENSE",
        "THIRD_PARTY.md",
        "entry_points.txt",
    }


def test_the_source_archive_holds_them_too_and_no_caches(source: Path, archives: Path) -> None:
    with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped_files(source) | set(BESIDES) <= names
    assert [name for name in names if "__pycache__" in name or name.startswith("scripts")] == []


def test_profiles_are_found_from_an_installed_wheel(installed: Path) -> None:
    code = (
        "import configs, device.profile as p;"
        "print(configs.__file__, len(p.list_profiles()), len(p.load_jetpacks()),"
        " p.load_profile('orin-nx-16gb').dla_cores)"
    )
    printed = run(sys.executable, "-c", code, PYTHONPATH=str(installed))
    where, profiles, jetpacks, cores = printed.split()
    assert Path(where).parent == installed / "configs"
    assert int(profiles) == len(list((ROOT / "configs/profiles").glob("*.toml")))
    assert (int(jetpacks) > 20, cores) == (True, "2")


def test_the_installed_command_runs(installed: Path) -> None:
    shown = run(str(installed / "bin" / "tandem"), "profiles", PYTHONPATH=str(installed))
    assert "agx-orin-64gb" in shown


def test_an_editable_install_is_a_path_that_type_checkers_see(source: Path, tmp_path: Path) -> None:
    # Built beside the others, in a copy: it writes build files into its tree.
    copy = shutil.copytree(source, tmp_path / "tree")
    code = (
        "from setuptools.build_meta import build_editable as b; import sys; print(b(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=copy, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    editable = zipfile.ZipFile(tmp_path / done.stdout.split()[-1])
    links = [name for name in editable.namelist() if name.endswith(".pth")]
    assert [editable.read(name).decode().strip() for name in links] == [str(copy)]
    assert [name for name in editable.namelist() if name.endswith(".py")] == []


def test_the_base_install_brings_nothing_that_replaces_jetpacks_own(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        described = Parser().parsestr(archive.read(name).decode())
    base = requirement_names(described.get_all("Requires-Dist") or [])
    assert "msgspec" in base
    assert base & set(NEVER_ON_A_BOARD) == set()


def test_what_the_base_install_pulls_in_does_not_bring_them_either() -> None:
    """Walk the requirements of the installed packages, as pip would."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    todo, seen = requirement_names(declared), set()
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= requirement_names(metadata.requires(name) or ()) - seen
    assert "markdown-it-py" in seen  # of rich: the walk does go down
    assert seen & set(NEVER_ON_A_BOARD) == set()


def test_numpy_is_never_forced_to_2() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [line for line in declared if line.startswith("numpy")] == ["numpy>=1.23"]
