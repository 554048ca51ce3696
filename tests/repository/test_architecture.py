"""What each entry point loads, and that every shipped TOML file is read strictly."""

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Container, Iterator
from functools import partial
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import get_args, get_type_hints

import click
import msgspec
import numpy as np
import pytest
from model_fixtures import small_convnet

import configs
from calibration.threshold import METHODS
from device.agent.config import AgentConfig
from device.profile import JetPackFile, Profile, Source
from device.runtime.executors.protocol import ExecutorName
from device.runtime.session import Dla, Scales
from pipelines.config import ModelConfig, PipelineConfig
from toolkit.build import BuildOptions, build_engine
from toolkit.cli.main import COMMANDS, tandem
from toolkit.cli.options import choices
from toolkit.fleet.transports import addresses
from toolkit.partition.costs.constants import Costs, Power
from toolkit.partition.planning.plan import PlanOptions
from toolkit.quantize.corrections.corrections import Switch
from toolkit.quantize.preprocess.presets import PRESETS
from toolkit.quantize.qdq.export import FORMS
from toolkit.quantize.ranges.measure import AUTO, RangeOptions

ROOT = Path(__file__).parents[2]
PACKAGES = ("toolkit", "calibration", "pipelines", "device", "configs")
HEAVY = {
    "torch",
    "tensorflow",
    "keras",
    "triton",
    "onnxruntime",
    "onnx",
    "onnx_ir",
    "cv2",
    "tensorrt",
    "pycuda",
}


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


# What `pip install tandem-edge` leaves out and the host's extra brings, as modules.
HOST_ONLY = {
    "amqtt", "highspy", "onnx", "onnx_ir", "onnxscript", "safetensors", "scipy", "sympy",
    "threadpoolctl", "tomli_w", "torch", "triton",
}  # fmt: skip


def tandem_loads(*arguments: str | Path, block: Collection[str] = ()) -> set[str]:
    """Top-level modules that a process of `tandem` loads; imports of `block` fail."""
    code = """
import sys
for name in sys.argv.pop(1).split():
    sys.modules[name] = None  # its import raises ModuleNotFoundError
from toolkit.cli.main import tandem
tandem(standalone_mode=False)
print(*{name.partition('.')[0] for name, module in sys.modules.items() if module}, file=sys.stderr)
"""
    command = [sys.executable, "-c", code, " ".join(block), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def test_help_loads_no_heavy_package() -> None:
    code = (
        "import sys\n"
        "from toolkit.cli.main import COMMANDS, tandem\n"
        "for name in COMMANDS:\n"
        "    tandem([name, '--help'], standalone_mode=False)\n"
        "    print(name, *{one.partition('.')[0] for one in sys.modules}, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {words[0]: set(words[1:]) for words in map(str.split, done.stderr.splitlines())}
    assert set(loaded) == set(COMMANDS)
    heavy = HEAVY | HOST_ONLY | {"numpy"}
    assert {name: present for name, all_ in loaded.items() if (present := all_ & heavy)} == {}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board")
    model = small_convnet(folder / "net.onnx", np.random.default_rng(0))
    return build_engine(model, "laptop", folder / "net.engine", BuildOptions()).path


def commands_below(command: click.Command) -> Iterator[click.Command]:
    yield command
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        yield from commands_below(below)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_action_takes_the_options_of_its_command(name: str) -> None:
    command = tandem.get_command(click.Context(tandem), name)
    assert command is not None
    for one in commands_below(command):
        if isinstance(one.callback, partial):
            options, action, _ = one.callback.args
            module, _, function = action.partition(":")
            hints = get_type_hints(
                getattr(import_module(f"toolkit.cli.actions.{module}"), function)
            )
            assert hints == {"options": options, "return": hints["return"]}


def test_inspect_loads_numpy_and_nothing_heavier(engine: Path) -> None:
    assert tandem_loads("inspect", engine, "--nodes") & (HEAVY | HOST_ONLY) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", "--help"),
        ("inspect", "--json"),
        ("infer", "--json"),
        ("bench", "--iterations", "2", "--json"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_of_the_board_runs_without_the_packages_of_the_host(
    engine: Path, arguments: tuple[str, ...]
) -> None:
    command, *options = arguments
    tandem_loads(command, engine, *options, block=sorted(HOST_ONLY))


def test_the_choices_of_options_are_those_of_the_tables() -> None:
    assert choices.AUTO == AUTO
    assert RangeOptions().method == choices.AUTO
    assert tuple(METHODS) == choices.CALIBRATION_METHODS
    assert get_args(choices.QdqForm) == FORMS
    assert get_args(choices.Dla) == get_args(Dla)
    assert get_args(choices.Scales) == get_args(Scales)
    assert get_args(choices.Executor) == get_args(ExecutorName)
    assert choices.USB == addresses.USB
    assert tuple(PRESETS) == choices.PREPROCESSINGS
    assert get_args(choices.Switch) == get_args(Switch)
    assert PlanOptions().seconds == choices.PLAN_SECONDS


def test_the_board_never_loads_the_compiler() -> None:
    names = [
        path.relative_to(configs.ROOT.parent).with_suffix("").as_posix().replace("/", ".")
        for package in ("device", "pipelines")
        for path in sorted((configs.ROOT.parent / package).rglob("*.py"))
        if "gstreamer/python" not in path.as_posix()  # of GStreamer's Python
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
    ("power.toml", Power),
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
    result: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            result |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
    return {name for name in result if name in known}


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


def test_no_test_file_imports_another() -> None:
    """What several need is a module of tests/fixtures."""
    statement = re.compile(r"^\s*(?:from|import) +(?:\w+\.)*test_\w+", re.MULTILINE)
    files = (ROOT / "tests").rglob("*.py")
    assert [path.name for path in files if statement.search(path.read_text())] == []
