"""Shadow mode on a board: a release sees live frames beside the one that is live, then is tried.

Everything is real: broker, fleet server, agent, pipelines, engines and a video as the camera.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from board_fixtures import command_line
from click.testing import CliRunner
from fleet_server_fixtures import LONG_S, ServerProcess, write_fleet
from mqtt_fixtures import DEVICE, AgentBox, Mosquitto, Watcher
from onnx import numpy_helper
from video_fixtures import COLOUR_TOML, LABELS, colour_model, scene, write_video

from device.agent.process_tree import mark_of, marked
from device.agent.shadow import shadow_refusal
from device.agent.shadow_process import ShadowEnded
from device.protocol.documents import InstallPolicy, Reported
from device.protocol.messages import Shadow
from device.update import slots
from device.update.bundle import write_bundle
from device.update.slots import SlotRecord, SlotState
from toolkit.cli.commands.fleet.group import fleet as fleet_command
from toolkit.engine.build import BuildOptions, build_engine

SHADOW_S = "2"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Releases: two that agree, one that takes red for green, one with other labels."""
    folder = tmp_path_factory.mktemp("releases")
    right = colour_model(folder / "right.onnx")
    model = onnx.load(right)
    for tensor in model.graph.initializer:
        if tensor.name == "look":
            swapped = numpy_helper.to_array(tensor)[::-1].copy()
            tensor.CopyFrom(numpy_helper.from_array(swapped, "look"))
    onnx.save(model, folder / "wrong.onnx")
    for name in ("right", "wrong"):
        build_engine(
            folder / f"{name}.onnx", "laptop", folder / name, BuildOptions(precision="fp32")
        )
    (folder / "p").write_text(COLOUR_TOML.format(uri="/nonexistent", source="loop = true", sinks=""))
    rows = {"1": ("right", LABELS), "2": ("right", LABELS), "3": ("wrong", LABELS),
            "4": ("right", ("cat", "dog"))}  # fmt: skip
    made = {}
    for version, (engine, labels) in rows.items():
        (folder / "labels.txt").write_text("\n".join(labels) + "\n")
        made[version] = folder / f"{version}.bundle"
        write_bundle(
            made[version], engine=folder / engine, pipeline=folder / "p",
            labels=folder / "labels.txt", name="colours", version=version, profile="laptop",
        )  # fmt: skip
    return made


class Stand:
    """A broker, a fleet server and one board whose camera is a video of coloured squares."""

    def __init__(self, folder: Path) -> None:
        video = folder / "squares.mp4"
        frames = [scene(n % 8, n // 8 % 8, "red" if n % 2 else "green") for n in range(100)]
        write_video(video, [np.asarray(frame) for frame in frames])
        self.broker = Mosquitto(folder)
        self.fleet = write_fleet(folder / "fleet", self.broker.port)
        self.server = ServerProcess(self.fleet)
        self.box = AgentBox(folder, self.broker.port, profile="laptop", source=video)
        text = self.box.config.read_text()
        self.box.config.write_text(text.replace("[update]\n", "[update]\nshadow_frames = 8\n"))
        self.watcher = Watcher(self.broker.port)
        self.request = ""  # of the last update that has ended
        self.server.start()
        self.box.start()

    def close(self) -> None:
        self.watcher.__exit__(None, None, None)
        self.box.close()
        self.server.stop()
        self.broker.close()

    def fleet_command(self, *words: str) -> str:
        done = CliRunner().invoke(
            fleet_command, words, env={"TANDEM_FLEET": str(self.fleet), "COLUMNS": "160"},
            catch_exceptions=False,
        )  # fmt: skip
        assert done.exit_code == 0, (done.output, self.server.log())
        return done.stdout

    def begin(self, bundle: Path, *options: str) -> int:
        words = ("rollout", "start", "--bundle", str(bundle), "--groups", "rest", *options)
        return int(json.loads(self.fleet_command(*words, "--json"))["rollout"])

    def roll_out(self, bundle: Path, *options: str) -> Reported:
        """Roll a bundle out; return the report once its update has ended."""
        known, before = len(self.watcher.drain().reports), self.request
        self.begin(bundle, *options)
        report = self.wait(
            lambda report: report.update.phase in ("live", "refused", "rolled_back")
            and report.update.request != before,
            known,
        )
        self.request = report.update.request
        return report

    def wait(self, condition: Callable[[Reported], bool], known: int = 0) -> Reported:
        """Return the first report from number `known` on that fulfils a condition."""
        until_s = time.monotonic() + LONG_S
        while True:
            for report in self.watcher.drain().reports[known:]:
                if condition(report):
                    return report
            known = len(self.watcher.seen.reports)
            assert time.monotonic() < until_s, (self.watcher.seen.reports[-1:], self.box.log())
            self.watcher.take(0.5)

    def start_fleet(self) -> None:
        """Wait until the device is known."""
        self.wait(lambda report: True)
        until_s = time.monotonic() + LONG_S
        while DEVICE not in self.fleet_command("devices", "--json"):
            assert time.monotonic() < until_s, self.server.log()
            time.sleep(0.2)

    def pipeline_pids(self) -> list[int]:
        pids = marked(mark_of(self.box.state_dir))
        return [pid for pid in pids if "\0pipelines\0" in command_line(pid)]


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    made = Stand(tmp_path)
    try:
        made.start_fleet()
        yield made
    finally:
        made.close()


def test_a_release_that_agrees_is_tried_and_one_that_does_not_is_refused_with_numbers(
    stand: Stand, bundles: dict[str, Path]
) -> None:
    gates = ("--gate", "shadow_agreement>0.98", "--shadow", SHADOW_S)
    first = stand.roll_out(bundles["1"])
    assert first.update.phase == "live", stand.box.log()
    second = stand.roll_out(bundles["2"], *gates)
    assert second.update.phase == "live", (second.update, stand.box.log())
    measured = second.measured
    assert measured is not None
    assert measured.shadow_agreement == pytest.approx(1.0)
    assert measured.shadow_frames >= 8
    assert any(b'"shadow"' in message for message in stand.watcher.seen.stats)
    pids = stand.pipeline_pids()
    third = stand.roll_out(bundles["3"], *gates)
    print(third, second)
