"""Tandem beside files of the user's that have the names of its packages."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from model_fixtures import small_convnet

import tandem
from device.agent.pipeline_process import PIPELINE
from device.start.child import guarded
from device.start.command import module_command
from device.start.packages import NAMES

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = {"tandem": "command", "tandem-agent": "agent", "tandem-pipeline": "pipeline"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory where every name of Tandem is a file that cannot be imported."""
    folder = tmp_path_factory.mktemp("work")
    for name in (*NAMES, "tandem"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} of the user')")
    small_convnet(folder / "net.onnx", np.random.default_rng(0))
    return folder


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The entry points, as pip writes them."""
    folder = tmp_path_factory.mktemp("bin")
    for name, function in ENTRY_POINTS.items():
        text = f"import sys\nfrom tandem import {function}\nsys.exit({function}())\n"
        (folder / name).write_text(text)
    return folder


def run(
    folder: Path, *command: str | Path, **environment: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(word) for word in command], cwd=folder, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ("tandem", "--help"),
        ("tandem", "plan", "net.onnx", "--profile", "orin-nx-16gb"),
        ("tandem", "build", "net.onnx", "-o", "net.engine"),
        ("tandem", "bench", "net.engine", "--iterations", "2"),  # of the build before
        ("tandem", "profiles"),
        ("tandem-agent", "--help"),
        ("tandem-pipeline", "--help"),
    ],
    ids=" ".join,
)
def test_entry_points_do_not_import_files_of_the_working_directory(
    folder: Path, scripts: Path, words: tuple[str, ...]
) -> None:
    script, *arguments = words
    done = run(folder, sys.executable, scripts / script, *arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", [str(ROOT), f".{os.pathsep}{ROOT}"], ids=["plain", "with ."])
@pytest.mark.parametrize(
    "command",
    [
        (*PIPELINE.prefix, "--help"),
        module_command("device.agent", "--help"),
        module_command("toolkit.fleet.brokers.local", "--help"),
        module_command("toolkit.machine", "cuda_device"),
    ],
    ids=lambda command: command[3],
)
def test_child_processes_do_not_import_them_either(
    folder: Path, command: tuple[str, ...], path: str
) -> None:
    done = run(folder, *command, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr


def test_the_guard_of_a_pipeline_does_not_import_them_either(folder: Path) -> None:
    started = guarded(PIPELINE.prefix)
    done = run(folder, *started[:4], "0", "true")  # process 0 is not its parent: it ends
    assert (done.returncode, done.stderr) == (1, "")


def test_a_worker_that_compiles_kernels_does_not_import_them_either(folder: Path) -> None:
    pytest.importorskip("triton")
    done = run(folder, *module_command("toolkit.gpu.codegen.worker"))
    assert done.returncode == 0, done.stderr


def test_a_child_needs_no_python_path(folder: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        module_command("device.agent", "--help"), cwd=folder, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_script_may_have_a_file_of_such_a_name_beside_it(tmp_path: Path) -> None:
    (tmp_path / "device.py").write_text("raise SystemExit('imported')")
    (tmp_path / "configs").mkdir()  # a folder without __init__.py hides nothing
    (tmp_path / "script.py").write_text("import tandem\nprint(tandem.open_session.__module__)\n")
    done = run(tmp_path, sys.executable, "script.py")
    assert done.stdout == "device.runtime.session\n", done.stderr
    assert f"script.py:2: UserWarning: {tmp_path}/device.py cannot be imported" in done.stderr
    assert done.stderr.count("Warning") == 1


def test_a_file_that_was_imported_before_is_named(tmp_path: Path) -> None:
    (tmp_path / "device.py").write_text("")
    (tmp_path / "script.py").write_text("import device, tandem\ntandem.open_session\n")
    done = run(tmp_path, sys.executable, "script.py")
    assert done.returncode == 1
    assert f"ImportError: {tmp_path}/device.py was imported as 'device'" in done.stderr
    assert "rename device.py" in done.stderr.lower()


def test_import_tandem_alone_loads_none_of_its_packages() -> None:
    code = f"import sys, tandem; print(sorted(set(sys.modules) & set({NAMES!r})))"
    assert run(ROOT, sys.executable, "-c", code).stdout == "[]\n"


def test_every_name_of_the_api_is_there_and_has_a_docstring() -> None:
    assert set(tandem.__all__) == {*tandem._MODULES, *tandem._SUBMODULES, "__version__"}
    assert list(tandem.__all__) == sorted(tandem.__all__)
    stubs = (ROOT / "tandem-stubs/__init__.pyi").read_text()
    rows = re.findall(r"^from ([\w.]+) import (\w+) as \2$", stubs, re.M)
    assert {name: module for module, name in rows} == {
        **tandem._MODULES, **dict.fromkeys(tandem._SUBMODULES, "."),
    }  # fmt: skip
    undocumented = [name for name in tandem._MODULES if not getattr(tandem, name).__doc__]
    assert undocumented == []
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        tandem.nonsense  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "import tandem; print(tandem.fleet.Client)",
        "from tandem.fleet import Client; print(Client)",
        "import tandem.fleet as fleet; print(fleet.Client)",
    ],
)
def test_the_client_of_a_fleet_is_there_without_the_compiler(tmp_path: Path, code: str) -> None:
    program = f"{code}; import sys; assert not {{'onnx', 'numpy'}} & set(sys.modules)"
    done = run(tmp_path, sys.executable, "-c", program)
    assert done.stdout == "<class 'toolkit.fleet.client.Client'>\n", done.stderr


@pytest.mark.parametrize("name", tandem._SUBMODULES)
def test_a_module_of_the_api_has_the_names_of_its_origin_and_no_others(name: str) -> None:
    module, origin = getattr(tandem, name), import_module(tandem._SUBMODULES[name])
    assert [getattr(module, one) for one in origin.__all__] == [
        getattr(origin, one) for one in origin.__all__
    ]
    stub = (ROOT / f"tandem-stubs/{name}.pyi").read_text()
    assert stub == f"from {tandem._SUBMODULES[name]} import *\n"
    with pytest.raises(AttributeError, match=rf"'tandem\.{name}' has no attribute 'nonsense'"):
        module.nonsense  # noqa: B018
