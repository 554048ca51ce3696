"""The scripts of examples/, each run as its docstring says, on small data."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_lines import next_line
from video_fixtures import mosquitto

import configs
from device.update.bundle import ENGINE, LABELS, PIPELINE

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODELS = configs.ROOT / "models"
COVERED = {
    "build_and_infer.py",
    "calibrate.py",
    "dla_arithmetic.py",
    "fine_tune.py",
    "mnist.py",
    "read_events.py",
    "stereo/run.py",
}
# plugin.py and its kernels: tests/graph/test_plugins.py
# tests/runtime/test_on_device.py; on a GPU tests/gpu/test_gpu_on_device.py
WITH_PYCUDA = {f"pycuda/{name}.py" for name in ("tandem_script", "tensorrt_script", "try_kernel")}
PARTS_OF_STEREO = {"stereo/make_model.py", "stereo/plugin.py", "stereo/cost_volume.py"}
WAIT_S = 60
BUILD_S = 240  # of an example that builds; half a minute alone


def start(folder: Path, *arguments: str | Path) -> "subprocess.Popen[str]":
    command = [sys.executable, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def run(folder: Path, example: str, *arguments: str | Path) -> str:
    """Run it in this process, which has imported what it needs; return what it prints."""
    script, out = str(EXAMPLES / example), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(script, run_name="__main__")
    return out.getvalue()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The engine of the first example, and what it printed."""
    folder = tmp_path_factory.mktemp("built")
    options = ("--profile", "laptop", "--samples", "8", "--method", "minmax")
    out = run(folder, "build_and_infer.py", *options)
    return folder / "robot.engine", out


def test_every_example_is_run() -> None:
    scripts = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert scripts == COVERED | PARTS_OF_STEREO | WITH_PYCUDA


def test_build_and_infer_finds_objects_in_an_image(built: tuple[Path, str]) -> None:
    engine, out = built
    assert engine.stat().st_size > 1e6
    assert re.search(r"^(cone|ball|box|wheel|marker) 0\.\d\d at \d+ \d+ \d+ \d+$", out, re.M)


def test_dla_arithmetic_says_what_integers_cost(tmp_path: Path) -> None:
    out = run(tmp_path, "dla_arithmetic.py", "--channels", "8", "--seed", "3")
    share = re.search(r"convolution: (\d+\.\d)% of the numbers differ", out)
    assert share is not None
    assert 0 < float(share[1]) < 90
    assert "keeps 2 of 15 bits" in out
    assert "the scale of a converter holds 40000" in out


def test_calibrate_writes_a_table_and_compares_int8_with_fp32(tmp_path: Path) -> None:
    out = run(tmp_path, "calibrate.py", "--count", "8", "--method", "minmax", "--profile", "laptop")
    assert "ranges from 8 samples" in out
    names = {"fp32.engine", "int8.engine", "laptop.engine", "robot.calib.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    sqnr_db = [float(value) for value in re.findall(r"SQNR (-?[\d.]+) dB", out)]
    assert len(sqnr_db) == 8
    assert min(sqnr_db) > 8


def test_read_events_prints_what_a_pipeline_publishes(
    tmp_path: Path, built: tuple[Path, str]
) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / ENGINE).symlink_to(built[0])
    (bundle / LABELS).symlink_to(MODELS / "robot-objects.labels.txt")
    (bundle / PIPELINE).symlink_to(configs.ROOT / "pipelines" / "robot-objects.toml")
    source = tmp_path / "images"
    source.mkdir()
    (source / "scene.jpg").symlink_to(configs.ROOT / "scenes" / "heldout" / "000.jpg")
    with mosquitto(tmp_path) as (port, _):
        reader = start(
            tmp_path, EXAMPLES / "read_events.py", "--broker", f"127.0.0.1:{port}", "--count", "1"
        )
        assert next_line(reader) == "listening on fleet/v1/demo-board/detections\n"
        end_s = time.monotonic() + BUILD_S
        while reader.poll() is None:  # a message before the subscription is not kept
            assert time.monotonic() < end_s, "no message has arrived"
            pipeline = start(
                tmp_path, "-m", "pipelines", "--bundle", bundle, "--profile", "laptop",
                "--mqtt-host", "127.0.0.1", "--mqtt-port", str(port),
                "--topic-prefix", "fleet/v1/demo-board", "--source", source,
            )  # fmt: skip
            _, err = pipeline.communicate(timeout=WAIT_S)
            assert pipeline.returncode == 0, err
        out, err = reader.communicate(timeout=WAIT_S)
    assert reader.returncode == 0, err
    assert re.match(r"frame \d+, [\d.]+ ms: .*(cone|ball|box|wheel|marker) 0\.\d\d", out)


def test_the_stereo_plugin_measures_the_shift_of_a_texture(tmp_path: Path) -> None:
    process = start(tmp_path, EXAMPLES / "stereo/run.py")  # it imports files of its folder
    out, err = process.communicate(timeout=BUILD_S)
    assert process.returncode == 0, err
    assert re.search(r"shifted by 9 pixels, median disparity 9\.0\d$", out.strip())


def test_mnist_recognizes_digits_that_it_has_not_seen(tmp_path: Path) -> None:
    out = run(tmp_path, "mnist.py")
    assert "scores: float32 (50, 10)" in out
    (share,) = re.findall(r"recognized ([\d.]+)% of 500 digits", out)
    assert float(share) > 93


@pytest.mark.usefixtures("quick_torch_export")
def test_fine_tuning_wins_back_what_int8_costs(tmp_path: Path) -> None:
    out = run(tmp_path, "fine_tune.py", "--profile", "laptop", "--steps", "12")
    exact, before, after = (float(loss) for loss in re.findall(r"loss ([\d.]+)", out))
    assert exact < after < before
    shares = [float(share) for share in re.findall(r"([\d.]+)% right", out)]
    assert shares[2] > shares[1]
    equal = re.search(r"scores of the training for (\d+) of 200 images", out)
    assert equal is not None
    assert int(equal[1]) > 150
