"""What is shipped: the wheel, the source archive and the editable install, from a clean copy."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from model_fixtures import small_convnet
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from python_versions import python_of
from shared_folder import shared_folder

import tandem
from device.start.packages import NAMES
from toolkit.build import build_engine
from toolkit.cli.main import COMMANDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGES = ("calibration", "configs", "device", "pipelines", "tandem-stubs", "toolkit")
FOLDERS_OF_THE_SOURCE = ("docs", "examples", "scripts", "tests")
BESIDES = (
    ".dockerignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md",
    "SECURITY.md", "THIRD_PARTY.md",
    "pyproject.toml", "setup.py", "tandem.py",
)  # fmt: skip
CACHES = ("__pycache__", "*.pyc")

# What JetPack ships in a build of its own, or a board has no use for.
NEVER_ON_A_BOARD = (
    "onnx", "onnx-ir", "onnxscript", "onnxruntime", "triton", "torch",
    "opencv-python", "opencv-python-headless", "pycuda", "tensorrt",
)  # fmt: skip


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, with stray caches that must stay behind."""
    return shared_folder(tmp_path_factory, "source", copy_tree)


def copy_tree(copy: Path) -> None:
    for folder in (*PACKAGES, *FOLDERS_OF_THE_SOURCE):
        shutil.copytree(
            ROOT / folder, copy / folder, ignore=shutil.ignore_patterns(*CACHES, "build")
        )
    for name in BESIDES:
        shutil.copy(ROOT / name, copy)
    for folder in ("configs/__pycache__", "configs/profiles/__pycache__", "scripts/__pycache__"):
        (copy / folder).mkdir()
        (copy / folder / "stray.cpython-310.pyc").write_bytes(b"stale")


@pytest.fixture(scope="session")
def archives(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source archive, and the wheel that was built from it."""

    def fill(out: Path) -> None:
        tree = shutil.copytree(source, out / "tree")  # a build writes into its tree
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree))
        shutil.rmtree(tree)

    return shared_folder(tmp_path_factory, "archives", fill)


@pytest.fixture(scope="session")
def wheel(archives: Path) -> Path:
    return next(archives.glob("*.whl"))


@pytest.fixture(scope="session")
def demo_wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def fill(out: Path) -> None:
        for name in ("configs", "scripts/demo_data"):
            shutil.copytree(source / name, out / "tree" / name)
        folder = str(out / "tree/scripts/demo_data")
        run(
            sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), folder
        )

    return next(shared_folder(tmp_path_factory, "demo-wheel", fill).glob("*.whl"))


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        cwd=os.path.abspath(os.sep),
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_of(source: Path, folders: Iterable[str]) -> set[str]:
    """Every file of some folders, caches excepted."""
    return {
        path.relative_to(source).as_posix()
        for folder in folders
        for path in (source / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def of_the_demo(name: str) -> bool:
    return name.startswith("configs/scenes/") or name.endswith(".onnx")


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def requirement_names(lines: Iterable[str]) -> set[str]:
    """Names of what is installed here without any extra."""
    requirements = [Requirement(line) for line in lines]
    return {
        canonicalize_name(requirement.name)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def declared_dependencies() -> list[str]:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return list(declared)


def closure(names: Iterable[str]) -> set[str]:
    """Distributions, and what pip would install for them."""
    todo, seen = set(names), set()
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= requirement_names(metadata.requires(name) or ()) - seen
    return seen


def test_the_wheel_holds_the_code_and_the_small_data(source: Path, wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = {name for name in names if ".dist-info/" in name}
    shipped = files_of(source, set(PACKAGES) - {"tandem-stubs"})
    below = {
        f"tandem/{name}"
        for name in shipped
        if not of_the_demo(name)
        and not name.endswith(".csv")
        and name != "configs/predicted_figures.json"
        and not name.startswith("device/native/")
    }
    stubs = {f"tandem/{name}.pyi" for name in tandem._SUBMODULES}
    assert set(names) - info == {"tandem/__init__.py", "tandem/py.typed", *stubs, *below}
    top_level = next(name for name in info if name.endswith("top_level.txt"))
    assert zipfile.ZipFile(wheel).read(top_level) == b"tandem\n"
    assert {name.rpartition("/")[2] for name in info} >= {
        "LICENSE",
        "THIRD_PARTY.md",
        "entry_points.txt",
    }


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size <= 2_830_000


def test_the_demo_package_holds_what_the_wheel_leaves_to_it(
    source: Path, wheel: Path, demo_wheel: Path
) -> None:
    names = {n for n in zipfile.ZipFile(demo_wheel).namelist() if ".dist-info/" not in n}
    demo = {f"tandem/{name}" for name in files_of(source, PACKAGES) if of_the_demo(name)}
    assert names == demo
    assert names & set(zipfile.ZipFile(wheel).namelist()) == set()


def test_both_packages_the_c_library_and_the_change_log_have_one_version() -> None:
    main, demo = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["version"]
        for folder in ("", "scripts/demo_data")
    )
    assert main == demo
    for recipe in ("Containerfile", "Containerfile.host"):
        assert f'image.version="{main}"' in (ROOT / "configs" / recipe).read_text()
    native = ROOT / "device/native"
    assert f"project(tandem VERSION {main} " in (native / "CMakeLists.txt").read_text()
    header = (native / "include/tandem.h").read_text()
    major, minor = (re.search(rf"VERSION_{part} (\d+)", header) for part in ("MAJOR", "MINOR"))
    assert major is not None
    assert minor is not None
    assert main.startswith(f"{major[1]}.{minor[1]}.")
    sections = re.findall(
        r"^## (\S+)(?: - \d{4}-\d\d-\d\d)?$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert main in sections[:2]  # the newest may be "Unreleased"


def test_the_source_archive_holds_docs_scripts_and_tests_too_and_no_caches(
    source: Path, archives: Path
) -> None:
    with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    everything = files_of(source, (*PACKAGES, *FOLDERS_OF_THE_SOURCE))
    assert (everything | set(BESIDES)) - names == set()
    assert [name for name in names if "__pycache__" in name] == []


def test_both_archives_are_taken_by_a_package_index(archives: Path) -> None:
    """Its page is the README, which it draws itself."""
    paths = sorted(str(path) for path in archives.iterdir())
    report = run(sys.executable, "-m", "twine", "check", "--strict", *paths)
    assert [Path(path).name.rpartition(".")[2] for path in paths] == ["whl", "gz"]
    assert report.count("PASSED") == 2


def test_the_metadata_is_complete(wheel: Path) -> None:
    described = metadata_of(wheel)
    assert described["Author"] == "The Tandem authors"
    assert described["License-Expression"] == "Apache-2.0"
    assert len(described["Keywords"].split(",")) > 5
    classifiers = described.get_all("Classifier") or []
    assert {f"Programming Language :: Python :: 3.{n}" for n in (10, 11, 12, 13)} <= set(
        classifiers
    )
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(classifiers)
    assert [one for one in classifiers if one.startswith("License ::")] == []  # PEP 639


def test_profiles_are_found_from_an_installed_wheel(board: Path) -> None:
    code = (
        "from tandem import configs; import tandem.device.profile as p;"
        "print(configs.__file__, len(p.list_profiles()), len(p.load_jetpacks()),"
        " p.load_profile('orin-nx-16gb').dla_cores)"
    )
    where, profiles, jetpacks, cores = run(str(board / "python"), "-I", "-c", code).split()
    assert Path(where).parent.match("site-packages/tandem/configs")
    assert board.parent in Path(where).parents
    assert int(profiles) == len(list((ROOT / "configs/profiles").glob("*.toml")))
    assert (int(jetpacks) > 20, cores) == (True, "2")


def test_the_installed_command_runs(board: Path) -> None:
    assert "agx-orin-64gb" in run(str(board / "tandem"), "profiles")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_pip_installs_the_wheel_on_each_python(wheel: Path, tmp_path: Path, version: str) -> None:
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    run(python, "-m", "venv", str(tmp_path))
    programs = tmp_path / "bin"
    run(str(programs / "python"), "-m", "pip", "install", "--quiet", str(wheel))
    stated = metadata_of(wheel)["Version"]
    for name in ("tandem", "tandem-agent"):
        assert run(str(programs / name), "--version") == f"{name}, version {stated}\n"
    assert "agx-orin-64gb" in run(str(programs / "tandem"), "profiles")
    assert run(str(programs / "tandem-pipeline"), "--help").startswith("usage: tandem-pipeline")
    run(str(programs / "python"), "-m", "pip", "check")


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
    base = requirement_names(metadata_of(wheel).get_all("Requires-Dist") or [])
    assert "msgspec" in base
    assert base & set(NEVER_ON_A_BOARD) == set()


def test_what_the_base_install_pulls_in_does_not_bring_them_either() -> None:
    """Walk the requirements of the installed packages, as pip would."""
    seen = closure(requirement_names(declared_dependencies()))
    assert "markdown-it-py" in seen  # of rich: the walk does go down
    assert seen & set(NEVER_ON_A_BOARD) == set()


def test_numpy_is_never_forced_to_2() -> None:
    assert [line for line in declared_dependencies() if line.startswith("numpy")] == ["numpy>=1.23"]


@pytest.fixture(scope="session")
def board(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, what it requires and onnxruntime: no onnx, no OpenCV."""
    root = tmp_path_factory.mktemp("board") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(root))
    site = next(root.glob("lib/python3*/site-packages"))
    for name in closure(requirement_names(declared_dependencies()) | {"onnxruntime"}):
        for file in metadata.files(name) or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)
    pip = (sys.executable, "-m", "pip", "--python", str(root / "bin" / "python"))
    run(*pip, "install", "--no-deps", "--no-index", "--no-compile", "--quiet", str(wheel))
    for name in NAMES:  # other people's
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(f"raise SystemExit('{name} of a stranger')")
    return root / "bin"


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    model = small_convnet(folder / "net.onnx", np.random.default_rng(0))
    return build_engine(model, "laptop", folder / "net.engine").path


def test_the_board_has_no_onnx(board: Path) -> None:
    code = "import importlib.util as u; print(u.find_spec('onnx'), u.find_spec('cv2'))"
    assert run(str(board / "python"), "-I", "-c", code) == "None None\n"


def test_every_help_works_on_a_board(board: Path) -> None:
    """In one process: a package that is not there is missed whatever was imported before."""
    code = (
        "from tandem.toolkit.cli.main import COMMANDS, tandem\n"
        "for name in COMMANDS: tandem.main([name, '--help'], 'tandem', standalone_mode=False)"
    )
    printed = run(str(board / "python"), "-I", "-c", code)
    assert all(f"Usage: tandem {command} " in printed for command in COMMANDS)


@pytest.mark.parametrize("words", [("inspect",), ("bench", "--iterations", "3")], ids=str)
def test_inspect_and_bench_work_on_a_board(
    board: Path, engine: Path, words: tuple[str, ...]
) -> None:
    assert json.loads(run(str(board / "tandem"), *words, str(engine), "--json"))


def test_the_python_api_works_on_a_board(board: Path, engine: Path) -> None:
    code = (
        "import sys, tandem, numpy; session = tandem.open_session(sys.argv[1]);"
        "feeds = {t.name: numpy.zeros(t.shape, t.dtype) for t in session.inputs};"
        "print(len(session.infer(feeds)), 'tandem.toolkit' in sys.modules, tandem.__version__)"
    )
    printed = run(str(board / "python"), "-I", "-c", code, str(engine)).split()
    assert printed == ["1", "False", metadata_version()]


@pytest.mark.slow
def test_type_checkers_see_the_python_api_of_an_installed_wheel(
    board: Path, tmp_path: Path
) -> None:
    (tmp_path / "user.py").write_text(
        "import tandem\nreveal_type(tandem.open_session('m.engine'))\ntandem.nonsense\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "user.py",
               "--python-executable", str(board / "python")]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    notes = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert 'note: Revealed type is "tandem.device.runtime.session.Session"' in notes, done.stdout
    assert 'error: Module has no attribute "nonsense"  [attr-defined]' in notes
    assert len(notes) == 3  # these, and the count of errors


def test_the_host_part_of_the_python_api_names_what_a_board_lacks(board: Path) -> None:
    command = [board / "python", "-I", "-c", "import tandem; tandem.build"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "No module named 'onnx'" in done.stderr


def metadata_version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


@pytest.mark.parametrize(
    ("words", "packages", "most_modules"),
    [(("plan", "--help"), set(), 60), (("inspect",), {"numpy", "xxhash"}, 90)],
    ids=["plan", "inspect"],
)
def test_quick_commands_load_few_modules(
    board: Path, engine: Path, words: tuple[str, ...], packages: set[str], most_modules: int
) -> None:
    """What a command imports is what its start costs, and unlike time it is the same each run."""
    arguments = list(words) if "--help" in words else [*words, str(engine)]
    code = (
        "import sys; from tandem.toolkit.cli.main import tandem\n"
        f"tandem.main({arguments!r}, 'tandem', standalone_mode=False)\n"
        "print('modules', *sys.modules)"
    )
    loaded = run(str(board / "python"), "-I", "-c", code).splitlines()[-1].split()[1:]
    tandem_modules = [name for name in loaded if name.partition(".")[0] == "tandem"]
    others = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {"__main__"}
    others = {name for name in others if not name.startswith("_")}  # _virtualenv and alike
    assert others - {"tandem", "click", "msgspec", "typing_extensions"} == packages
    assert len(tandem_modules) <= most_modules
