"""An engine whose INT8 ranges were never measured says so wherever it turns up."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from model_fixtures import classification_of_convnet, small_convnet

from calibration.table import CalibrationTable
from device.engine.manifest import UNCALIBRATED
from device.errors import TandemError
from device.update.bundle import extract_bundle
from toolkit.cli.commands.bundle import bundle as bundle_command
from toolkit.cli.commands.deploy import deploy as deploy_command
from toolkit.cli.commands.inspect import inspect as inspect_command
from toolkit.cli.commands.run import run as run_command
from toolkit.cli.main import tandem
from toolkit.engine.build import BuildOptions, build_engine


@pytest.fixture(scope="module", params=[True, False], ids=["dummy", "measured"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose engine has dummy ranges or measured ones, beside its engine and labels."""
    folder = tmp_path_factory.mktemp("bundle")
    model = small_convnet(folder / "m.onnx", np.random.default_rng())
    options = BuildOptions(precision="int8", dummy_ranges=True)
    if not request.param:
        sample = {"x": np.ones((1, 3, 32, 32), np.float32)}
        options = BuildOptions(data=[sample])
    build_engine(model, "laptop", folder / "m.engine", options)
    pipeline = classification_of_convnet(folder)
    args = ("--pipeline", pipeline, "--labels", folder / "labels.txt", "-o", folder / "m.bundle")
    done = invoke(bundle_command, folder / "m.engine", *args)
    assert done.exit_code == 0, done.output
    assert (UNCALIBRATED in done.stderr) == request.param
    return folder / "m.bundle"


def invoke(command: object, *args: object) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args])  # type: ignore[arg-type]


def is_dummy(bundle: Path) -> bool:
    shown = invoke(inspect_command, bundle.with_suffix(".engine"), "--json")
    return bool(json.loads(shown.stdout)["provenance"]["calibration"]["method"] == "dummy")


def test_inspect_says_so(bundle: Path) -> None:
    shown = invoke(inspect_command, bundle.with_suffix(".engine"))
    assert (UNCALIBRATED in shown.stdout) == is_dummy(bundle)


def test_run_says_so_before_the_first_frame(bundle: Path) -> None:
    ran = invoke(run_command, bundle, "--frames", "1", "--json")  # there is no video
    assert ("UNCALIBRATED" in ran.stderr) == is_dummy(bundle)


def test_deploy_says_so_before_anything_is_sent(bundle: Path) -> None:
    nobody = ("--device", "d", "--broker", "127.0.0.1:1", "--timeout", "0.2")
    sent = invoke(deploy_command, bundle, *nobody)
    assert isinstance(sent.exception, TandemError)  # there is no broker
    assert (UNCALIBRATED in sent.stderr) == is_dummy(bundle)


@pytest.mark.parametrize("command", ["bundle", "deploy", "run"])
def test_quiet_commands_warn_in_the_log_alone(bundle: Path, tmp_path: Path, command: str) -> None:
    log, out = tmp_path / "log", ("-o", tmp_path / "m.bundle")
    arguments: dict[str, tuple[object, ...]] = {
        "bundle": (bundle.with_suffix(".engine"), "--pipeline", bundle.parent / "pipeline.toml",
                   "--labels", bundle.parent / "labels.txt", *out),
        "deploy": (bundle, "--device", "d", "--broker", "127.0.0.1:1", "--timeout", "0.2"),
        "run": (bundle, "--frames", "1"),
    }  # fmt: skip
    done = invoke(tandem, command, *arguments[command], "-q", "--log", log)
    assert UNCALIBRATED not in done.output
    assert (UNCALIBRATED in log.read_text()) == is_dummy(bundle)


def test_the_pipeline_on_the_board_logs_it(bundle: Path, tmp_path: Path) -> None:
    extract_bundle(bundle, tmp_path / "slot")
    command = [sys.executable, "-m", "pipelines.__main__", "--bundle", str(tmp_path / "slot")]
    command += ["--profile", "laptop", "--frames", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (UNCALIBRATED in done.stderr) == is_dummy(bundle)


def test_a_dummy_table_is_a_dummy_wherever_it_goes(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    model = small_convnet(tmp_path / "m.onnx", rng)
    names = ("x", "c0", "r0", "n1", "a1", "r1", "g", "f", "y")
    table = CalibrationTable(
        method="minmax",
        samples=0,
        data_sha256="0" * 64,
        model_sha256="0" * 64,
        tensors=dict.fromkeys(names, 4.0),
        dummy=True,
    )
    result = build_engine(model, "laptop", tmp_path / "m.engine", BuildOptions(table=table))
    assert UNCALIBRATED in result.notes
    assert result.manifest.uncalibrated
