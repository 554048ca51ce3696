"""`-v`, `-q` and `--log`: before and after the command, on standard error and in a file."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from model_fixtures import small_convnet

from toolkit.cli import main as cli_main
from toolkit.cli.main import COMMANDS


def tandem(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolkit.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_convnet(tmp_path_factory.mktemp("log") / "net.onnx", np.random.default_rng())


def test_quiet_prints_the_results_alone(net: Path) -> None:
    done = tandem("build", net, "--profile", "laptop", "-o", net.with_suffix(".e"), "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert "engine: " in done.stdout


def test_verbose_says_each_step_on_standard_error(net: Path) -> None:
    command = ("build", net, "--profile", "laptop", "-o", net.with_suffix(".e"))
    done = tandem("-v", *command)
    assert "INFO tandem: net.onnx: plan\n" in done.stderr
    assert "DEBUG" not in done.stderr
    assert "INFO" not in done.stdout
    done = tandem(*command, "-vv")  # after the command's name, too
    assert "INFO tandem: net.onnx: plan\n" in done.stderr
    assert "DEBUG toolkit.graph.passes: pass fuse-batch-norms: fused 1" in done.stderr


def test_a_log_file_holds_everything_whatever_is_shown(net: Path, tmp_path: Path) -> None:
    log = tmp_path / "t.log"
    done = tandem("build", net, "--profile", "laptop", "-o", tmp_path / "e", "-q", "--log", log)
    assert done.stderr == ""
    text = log.read_text()
    assert f"DEBUG tandem: tandem {version('tandem-edge')}: build " in text
    assert "INFO tandem: net.onnx: plan\n" in text
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", text)
    done = tandem("--log", log, "inspect", tmp_path / "none.onnx")
    assert done.stderr.replace("\n", " ").count("there is no file") == 1
    added = log.read_text().removeprefix(text)
    assert "failed: there is no file" in added
    assert "Traceback" in added


def test_a_log_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    done = tandem("profiles", "--log", tmp_path / "no" / "t.log")
    assert done.returncode == 2
    assert "cannot write" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_them(name: str) -> None:
    words = {"surgeon": ["extract"]}.get(name, [])
    shown = CliRunner().invoke(cli_main.tandem, [name, *words, "--help"]).stdout
    assert all(option in shown for option in ("--verbose", "--quiet", "--log FILE"))
