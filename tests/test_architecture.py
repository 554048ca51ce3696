"""What each entry point loads, and that every shipped TOML file is read strictly."""

import ast
import subprocess
import sys
from collections.abc import Container
from graphlib import TopologicalSorter
from pathlib import Path

import msgspec
import pytest

import configs
from device.agent.config import AgentConfig
from device.profile import JetPackFile, Profile, Source
from pipelines.config import ModelConfig, PipelineConfig
from toolkit.partition.costs.constants import Costs

ROOT = Path(__file__).parents[1]
PACKAGES = ("toolkit", "calibration", "pipelines", "device", "configs")
HEAVY = {"torch", "triton", "onnxruntime", "onnx", "onnx_ir", "cv2", "tensorrt", "pycuda"}


def loaded_by(module: str) -> set[str]:
    """Top-level names in sys.modules of a fresh process that imports only `module`."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_agent_loads_no_arrays_no_cameras_and_no_compiler() -> None:
    loaded = loaded_by("device.agent.agent")
    assert "device" in loaded
    assert loaded & (HEAVY | {"numpy", "toolkit", "calibration", "pipelines"}) == set()


def test_the_command_line_starts_light() -> None:
    loaded = loaded_by("toolkit.cli.main")
    assert "click" in loaded
    assert loaded & (HEAVY | {"numpy"}) == set()


@pytest.mark.parametrize("command", ["profiles", "doctor"])
def test_looking_around_needs_none_of_the_heavy_packages(command: str) -> None:
    assert loaded_by(f"toolkit.cli.commands.{command}") & HEAVY == set()


def test_the_board_never_loads_the_compiler() -> None:
    names = [
        path.relative_to(configs.ROOT.parent).with_suffix("").as_posix().replace("/", ".")
        for package in ("device", "pipelines")
        for path in sorted((configs.ROOT.parent / package).rglob("*.py"))
    ]
    code = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "print(*{name.partition('.')[0] for name in sys.modules})"
    modules = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    compilers = {"toolkit", "calibration", "onnx", "onnx_ir", "onnxscript", "triton", "torch"}
    assert set(done.stdout.split()) & compilers == set()


# Every TOML file below configs, and the type that reads it.
READERS: tuple[tuple[str, object], ...] = (
    ("agent.toml", AgentConfig),
    ("costs.toml", Costs),
    ("jetpack.toml", JetPackFile),
    ("sources.toml", dict[str, Source]),
    ("models/*.toml", ModelConfig),
    ("pipelines/*.toml", PipelineConfig),
    ("profiles/*.toml", Profile),
)
FILES = [
    (path.relative_to(configs.ROOT).as_posix(), path, kind)
    for pattern, kind in READERS
    for path in sorted(configs.ROOT.glob(pattern))
]


def test_modules_do_not_import_each_other_in_a_ring() -> None:
    """A package's own `__init__` counts as a module, also where a sibling is taken from it."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in PACKAGES
        for path in (ROOT / folder).rglob("*.py")
    }
    assert len(files) > 300
    ring = TopologicalSorter({name: imported_by(path, files) for name, path in files.items()})
    ring.prepare()  # raises CycleError, which names the modules


def imported_by(path: Path, known: Container[str]) -> set[str]:
    """The known modules that a file imports when it is loaded."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in known}


def test_every_shipped_toml_has_a_reader() -> None:
    shipped = {path.relative_to(configs.ROOT).as_posix() for path in configs.ROOT.rglob("*.toml")}
    assert shipped == {name for name, _, _ in FILES}


@pytest.mark.parametrize(("path", "kind"), [row[1:] for row in FILES], ids=[f[0] for f in FILES])
def test_a_shipped_toml_is_read_and_a_key_that_is_not_known_is_refused(
    path: Path, kind: type[object]
) -> None:
    msgspec.toml.decode(path.read_bytes(), type=kind)
    with pytest.raises(msgspec.ValidationError):
        msgspec.toml.decode(b"no_such_key = 1\n" + path.read_bytes(), type=kind)
