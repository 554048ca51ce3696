"""A board with TensorRT takes releases: none while it gives garbage, and the first in its own time.

Agent, broker, pipeline, the building of plans and the check of golden inputs are real and processes
of their own. tests/fixtures/tensorrt_double stands for TensorRT, tests/fixtures/cuda_double for the
driver.
"""

import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from board_fixtures import command_line, is_keeper, started_by
from deploy_fixtures import deploy
from golden_fixtures import ON_DOUBLES, PIPELINE, packed
from mqtt_fixtures import AgentBox, Mosquitto, Watcher
from tensorrt_fixtures import build as build_for_dla
from tensorrt_fixtures import install

from device.agent import pipeline_process
from device.protocol.documents import Reported
from toolkit.fleet.transports.deploy import DeployOptions
from toolkit.fleet.transports.device_deployment import DeployResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 120.0
TRIAL_S = 15.0
# The children that open sessions have the driver's double; the agent itself has none.
LAUNCHER = f"""
import logging, sys
from dataclasses import replace
from pathlib import Path
from device.agent import golden_check
from device.agent.agent import serve
from device.agent.config import load_agent_config
from device.agent.pipeline_process import PIPELINE

doubles = {ON_DOUBLES!r}
golden_check._TASKS = (*doubles, "pipelines.golden")
logging.basicConfig(level=logging.INFO)
own = replace(PIPELINE, prefix=(*doubles, PIPELINE.prefix[-1]))
serve(load_agent_config(Path(sys.argv[1])), own)
"""


class TensorrtBoard:
    """A board with a DLA by the doubles, and a camera of four pictures."""

    def __init__(self, folder: Path, trial_timeout_s: float = PATIENCE_S) -> None:
        self.folder = folder
        pictures = folder / "pictures"
        pictures.mkdir()
        rng = np.random.default_rng(1)
        for number in range(4):
            picture = rng.integers(0, 255, (32, 32, 3), np.uint8)
            cv2.imwrite(str(pictures / f"{number}.png"), picture)
        self.broker = Mosquitto(folder)
        self.box = AgentBox(
            folder,
            self.broker.port,
            profile="orin-nx-16gb",
            source=f"images://{pictures}?fps=10",  # type: ignore[arg-type]
            trial_timeout_s=trial_timeout_s,
        )
        (folder / "launch_agent.py").write_text(LAUNCHER)
        self.box.start()
        self.watcher = Watcher(self.broker.port)

    def deploy(self, bundle: Path) -> DeployResult:
        return deploy(self.broker.port, bundle, DeployOptions(PATIENCE_S))

    def release(self, engine: Path, version: str) -> Path:
        """A release of the engine, with two golden inputs."""
        name = f"{version}.bundle"
        return packed(self.folder, engine, name, "--golden", "2", "--version", version)

    def pipeline_pid(self) -> int:
        pids = [
            pid
            for pid in started_by(self.box)
            if f"\0{pipeline_process.PIPELINE.prefix[-1]}\0" in command_line(pid)
        ]
        (pid,) = (pid for pid in pids if not is_keeper(pid))
        return pid

    def wait_report(self, fits: Callable[[Reported], bool]) -> Reported:
        """Return the last report once it fits."""
        until_s = time.monotonic() + PATIENCE_S
        while not (self.watcher.drain().reports and fits(self.watcher.seen.reports[-1])):
            assert time.monotonic() < until_s, (self.watcher.seen.reports[-1:], self.box.log())
            self.watcher.take(1.0)
        return self.watcher.seen.reports[-1]

    def wait_frames(self) -> None:
        """Wait for figures that the pipeline gives from now on."""
        begin, until_s = len(self.watcher.drain().stats), time.monotonic() + PATIENCE_S
        while len(self.watcher.drain().stats) < begin + 2:
            assert time.monotonic() < until_s, self.box.log()
            self.watcher.take(1.0)

    def close(self) -> None:
        self.watcher.__exit__(None, None, None)
        self.box.close()
        self.broker.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_for_dla(tmp_path_factory.mktemp("engine"), precision="fp16")


@pytest.fixture(autouse=True)
def endless_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases begin the folder of pictures again at its end."""
    text = PIPELINE.replace("v4l2:///dev/video0", "images:///camera")
    text = text.replace("[preprocess]", "loop = true\n[preprocess]")
    monkeypatch.setattr("golden_fixtures.PIPELINE", text)


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (
            "zero",
            "every output of it is the same, whatever its input,",
        ),  # the last node is the GPU's
        ("nan", "its output 'y' is not finite"),
        ("inf", "its output 'y' is not finite"),
    ],
)
def test_a_running_board_that_begins_to_give_garbage_refuses_the_next_release(
    outputs: str, says: str, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    garbage = tmp_path / "garbage"
    monkeypatch.setenv("TENSORRT_DOUBLE_INJECT", f"outputs={outputs}@{garbage}")
    board = TensorrtBoard(tmp_path)
    try:
        result = board.deploy(board.release(engine, "1"))
        assert result.live, (result, board.box.log())
        assert board.wait_report(runs("1")).pipeline.degraded == ()  # it is TensorRT that runs it
        pid = board.pipeline_pid()

        garbage.touch()
        second = board.release(engine, "2")
        result = board.deploy(second)
        assert result.phase == "refused", (result, board.box.log())
        assert says in result.reason
        report = board.wait_report(lambda one: one.update.phase == "refused")
        assert says in report.update.reason
        assert runs("1")(report)
        board.wait_frames()
        assert board.pipeline_pid() == pid

        garbage.unlink()  # it was the outputs alone
        result = board.deploy(second)
        assert result.live, (result, board.box.log())
        board.wait_report(runs("2"))
    finally:
        board.close()


def test_the_first_release_of_a_board_has_its_trial_after_plans_are_built(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans take longer than a trial may wait for a frame, and are none of its time."""
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv("TENSORRT_DOUBLE_TIMES", f"{TRIAL_S} 0 {TRIAL_S}")
    board = TensorrtBoard(tmp_path, TRIAL_S)
    try:
        begun_s = time.monotonic()
        result = board.deploy(board.release(engine, "1"))
        assert result.live, (result, board.box.log())
        assert time.monotonic() - begun_s > 1.5 * TRIAL_S
        assert board.wait_report(runs("1")).pipeline.degraded == ()
        reports = board.watcher.drain().reports
        building = [one.update.phase for one in reports if "TensorRT builds" in one.update.reason]
        assert set(building) == {"staging"}
    finally:
        board.close()


def runs(version: str) -> Callable[[Reported], bool]:
    """Whether a report says that a release gives frames."""

    def fits(report: Reported) -> bool:
        running = report.running is not None and report.running.version == version
        return running and report.pipeline.status == "running"

    return fits
