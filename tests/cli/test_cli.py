"""The command line: help with examples, JSON, exit statuses, errors in one sentence."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from model_fixtures import small_convnet
from msgspec import UNSET

from device.engine.file import open_engine
from toolkit.cli import main as cli_main
from toolkit.cli.main import COMMANDS


def tandem(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolkit.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done


def invoke(*arguments: str | Path) -> str:
    """Run a command in this process, which is quicker; return what it prints."""
    done = CliRunner().invoke(cli_main.tandem, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    shown = invoke(name, "--help")
    assert "Example" in shown
    assert f"tandem {name}" in shown


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("build", "Model Precision Calibration Plan Kernels Output Options"),
        ("plan", "Model Calibration Precision Plan Output Options"),
        ("calibrate", "Model Calibration Output Options"),
        *((name, "Model Kernels Output Options") for name in ("run", "record", "replay")),
    ],
)
def test_the_help_shows_options_in_groups(name: str, titles: str) -> None:
    shown = invoke(name, "--help")
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == titles.split()


def test_the_overview_names_every_command() -> None:
    shown = tandem("--help").stdout
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_an_unknown_command_is_a_usage_error() -> None:
    assert tandem("biuld", check=False).returncode == 2


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, folder = np.random.default_rng(), tmp_path_factory.mktemp("engine")
    model = small_convnet(folder / "net.onnx", rng)
    data = folder / "data"
    data.mkdir()
    for index in range(2):
        np.save(data / f"{index}.npy", rng.normal(size=(1, 3, 32, 32)).astype(np.float32))
    tandem("build", model, "--profile", "agx-orin-64gb", "--data", data, "--method", "minmax")
    return model.with_suffix(".engine")


def test_build_prints_a_report_and_writes_beside_the_model(engine: Path) -> None:
    assert engine.exists()


def test_build_json_holds_the_manifest(tmp_path: Path, engine: Path) -> None:
    model = engine.with_suffix(".onnx")
    shown = invoke("build", model, "--profile", "laptop", "-o", tmp_path / "x.engine", "--json")
    result = json.loads(shown)
    assert result["manifest"]["profile"] == "laptop"
    assert Path(result["engine"]).stat().st_size == result["bytes"]


def test_inspect_shows_segments_and_nodes(engine: Path) -> None:
    shown = invoke("inspect", engine, "--nodes")
    assert "engine for agx-orin-64gb, int8, from net.onnx" in shown
    assert "segment " in shown
    assert "conv0" in shown
    manifest = json.loads(invoke("inspect", engine, "--json"))
    assert manifest["inputs"] == ["x"]


def test_a_saved_table_builds_the_same_engine_again(tmp_path: Path, engine: Path) -> None:
    model, data = engine.with_suffix(".onnx"), engine.parent / "data"
    table = tmp_path / "t.json"
    one, two = tmp_path / "1.engine", tmp_path / "2.engine"
    quick = ("--method", "minmax")
    invoke("build", model, "--data", data, *quick, "--save-table", table, "-o", one)
    invoke("build", model, "--table", table, "-o", two)
    with open_engine(one) as measured, open_engine(two) as stated:
        # But for what the build with data has measured: the other one has measured nothing.
        assert measured.manifest.provenance.measured
        plain = msgspec.structs.replace(measured.manifest.provenance, measured=UNSET)
        assert msgspec.structs.replace(measured.manifest, provenance=plain) == stated.manifest
        assert measured.entries == stated.entries
        for name in stated.entries:
            assert measured.entry(name).tobytes() == stated.entry(name).tobytes()


ERRORS = {
    ("build", "none.onnx"): "Cannot read the model none.onnx",
    ("build", "net.onnx", "--profile", "agx-orin-64"): "agx-orin-64gb",
    ("build", "net.onnx", "--data", "empty"): "empty",
    ("build", "net.onnx", "--precision", "int8"): "INT8 needs activation ranges",
    ("inspect", "net.engine"): "net.engine is not an engine",
    ("inspect", "none.onnx"): "there is no file none.onnx",
    ("profiles", "show", "orin-nano"): "orin-nano",
    ("run", "net.engine", "--source", "/dev/null"): "pipeline",
}
# A process for all of them: to start one takes longer than a refusal.
RUN_ALL = """
import contextlib, io, json, sys
from toolkit.cli.main import main

rows = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["tandem", *words]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main()
        except SystemExit as end:
            rows.append((end.code, errors.getvalue()))
print(json.dumps(rows))
"""


INTERRUPTED = """
import sys
from toolkit.cli import main as command_line

def imports(standalone_mode):
    raise ImportError("initialization failed") from KeyboardInterrupt()

command_line.tandem = imports
sys.argv = ["tandem", "profiles"]
command_line.main()
"""


def test_ctrl_c_while_a_module_in_c_starts_is_no_error_of_the_import() -> None:
    """Python makes an ImportError of a KeyboardInterrupt in the start of a module in C."""
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (1, "Aborted!\n")


def test_errors_are_one_sentence_and_status_one(tmp_path: Path, rng: np.random.Generator) -> None:
    small_convnet(tmp_path / "net.onnx", rng)
    (tmp_path / "empty").mkdir()
    (tmp_path / "net.engine").write_bytes(b"not an engine")
    command = [sys.executable, "-c", RUN_ALL, json.dumps([*ERRORS])]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    for (words, message), (status, errors) in zip(ERRORS.items(), rows, strict=True):
        assert status == (2 if words[0] == "run" else 1), words  # run lacks its argument
        assert message in errors.replace("\n", " "), words
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "net.engine", "net.onnx"]


@pytest.mark.parametrize(
    "option",
    [
        ("--shape", "x=1xa"),
        ("--shape", "1x3"),
        ("--dim", "n=4:2:8"),
        ("--dim", "n=1:2"),
        ("--samples", "3"),
        ("--save-table", "t.json"),
        ("--data", "d", "--table", "t.json"),
        ("--data", "d", "--precision", "fp16"),
    ],
)
def test_malformed_and_useless_options_are_usage_errors(
    tmp_path: Path, rng: np.random.Generator, option: tuple[str, ...]
) -> None:
    model = small_convnet(tmp_path / "net.onnx", rng)
    done = CliRunner().invoke(cli_main.tandem, ["build", str(model), *option])
    assert done.exit_code == 2, done.output
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


def options_of(command: click.Command) -> set[str]:
    below = command.commands.values() if isinstance(command, click.Group) else ()
    command_options = {option for parameter in command.params for option in parameter.opts}
    return command_options.union(*(options_of(one) for one in below))


@pytest.mark.parametrize(
    ("program", "module"), [("tandem", "toolkit.cli"), ("tandem-agent", "device.agent")]
)
def test_programs_say_their_name_and_version(program: str, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{program}, version {version('tandem-edge')}\n"


# Options of other programs, and of processes that Tandem starts.
FOREIGN = {
    "--abi", "--accept", "--add", "--again", "--binary", "--calib", "--clear", "--config", "--dest",
    "--disable-pip-version-check", "--dump-resource-usage", "--exists", "--find-links",
    "--folder", "--force-reinstall", "--format", "--help", "--home-dir", "--id",
    "--implementation", "--no-build-isolation", "--no-cache-dir", "--no-deps", "--no-index",
    "--no-pager", "--no-same-owner", "--now", "--only-binary", "--onnx", "--opset",
    "--platform", "--port", "--python-version", "--qos", "--query-gpu", "--request",
    "--root-user-action", "--saved-model", "--shell", "--system",
    "--system-site-packages", "--tag", "--tflite", "--unrestrict", "--until-stdin-closes",
    "--user-group",
    "--version", "--without-pip", "--write",
}  # fmt: skip


def test_options_that_messages_name_are_those_of_a_command() -> None:
    root = click.Context(cli_main.tandem)
    commands = [cli_main.tandem.get_command(root, name) for name in COMMANDS]
    known = set().union(*(options_of(command) for command in commands if command))
    folder = Path(cli_main.__file__).parents[1]
    named: dict[str, Path] = {}
    for path in folder.rglob("*.py"):
        text = path.read_text()
        if "--" not in text:  # most files: to parse them all takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                matches = re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w-])", node.value)
                named |= dict.fromkeys(matches, path)
    assert len(named) > 50
    assert {option: path for option, path in named.items() if option not in known | FOREIGN} == {}
