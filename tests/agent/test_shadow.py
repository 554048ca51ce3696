"""Shadow mode on a board: a release sees live frames beside the one that is live, then is tried.

Everything is real: broker, fleet server, agent, pipelines, engines and a video as the camera.
"""

import json
import os
import queue
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import onnx
import pytest
from board_fixtures import command_line, is_keeper, started_by
from click.testing import CliRunner
from fleet_server_fixtures import LONG_S, ServerProcess, wait_until, write_fleet
from mqtt_fixtures import DEVICE, AgentBox, Mosquitto, Watcher
from onnx import numpy_helper
from video_fixtures import COLOUR_TOML, LABELS, colour_model, scene, write_video

from device.agent.pipeline_process import PIPELINE
from device.agent.shadow_process import (
    START_S,
    TAP,
    ShadowEnded,
    ShadowLimits,
    ShadowProcess,
    shadow_refusal,
)
from device.protocol.documents import BlobSpec, Desired, InstallPolicy, ReleaseSpec, Reported
from device.protocol.messages import Shadow
from device.update import slots
from device.update.bundle import write_bundle
from device.update.events import Checked, Do, Moment, Notice, Setup, State
from device.update.machine import step
from device.update.slots import SlotRecord, SlotState
from device.update.update_table import UpdateTable
from toolkit.cli.commands.fleet import fleet as fleet_command
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
    (folder / "p").write_text(
        COLOUR_TOML.format(uri="/nonexistent", source="loop = true", sinks="")
    )
    rows = {"1": ("right", LABELS), "2": ("right", LABELS), "3": ("wrong", LABELS),
            "4": ("right", ("cat", "dog"))}  # fmt: skip
    values = {}
    for version, (engine, labels) in rows.items():
        (folder / "labels.txt").write_text("\n".join(labels) + "\n")
        values[version] = folder / f"{version}.bundle"
        write_bundle(
            values[version], engine=folder / engine, pipeline=folder / "p",
            labels=folder / "labels.txt", name="colours", version=version, profile="laptop",
        )  # fmt: skip
    return values


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
            lambda report: (
                report.update.phase in ("live", "refused", "rolled_back")
                and report.update.request != before
            ),
            known,
        )
        self.request = report.update.request
        return report

    def wait(self, condition: Callable[[Reported], bool], known: int = 0) -> Reported:
        """Return the first report from number `known` on that fulfils a condition."""
        until_s = time.monotonic() + 3 * LONG_S  # an update starts processes in three steps
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
        self.wait_until(lambda: DEVICE in self.fleet_command("devices", "--json"), "a device")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, lambda: f"never: {what}\n{self.box.log()}")

    def wait_status(self, number: int, status: str) -> str:
        """Return what `rollout status` shows once it has this status."""
        words = ("rollout", "status", str(number))
        self.wait_until(
            lambda: json.loads(self.fleet_command(*words, "--json"))["status"] == status, status
        )
        return self.fleet_command(*words)

    def shadow_pids(self) -> list[int]:
        """Processes that run a release of this board in shadow."""
        tap = str(self.box.state_dir / TAP)
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
        lines = {pid: command_line(pid) for pid in pids}
        return [pid for pid, line in lines.items() if "pipelines.shadow" in line and tap in line]

    def pipeline_pids(self) -> list[int]:
        pids = (pid for pid in started_by(self.box) if not is_keeper(pid))
        return [pid for pid in pids if f"\0{PIPELINE.prefix[-1]}\0" in command_line(pid)]


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    new_stand = Stand(tmp_path)
    try:
        new_stand.start_fleet()
        yield new_stand
    finally:
        new_stand.close()


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
    assert third.update.phase == "refused", (third.update, stand.box.log())
    assert re.search(
        r"on \d+ live frames 0\.00% of \d+ results agree with the live release, at least 98\.00%",
        third.update.reason,
    )
    assert third.running is not None
    assert third.running.version == "2"
    assert stand.pipeline_pids() == pids  # the live release never stopped
    shown = stand.fleet_command("device", "show", DEVICE)
    assert re.search(r"live frames +100\.00 % agree on \d+ frames", shown)
    assert "live frames" in stand.wait_status(2, "finished")
    fourth = stand.roll_out(bundles["4"], *gates)
    assert fourth.update.phase == "refused", (fourth.update, stand.box.log())
    assert "same labels.txt" in fourth.update.reason
    assert stand.pipeline_pids() == pids


@pytest.mark.slow
def test_an_agent_that_is_killed_in_mid_shadow_compares_again_and_gives_up_after_two(
    stand: Stand, bundles: dict[str, Path]
) -> None:
    assert stand.roll_out(bundles["1"]).update.phase == "live", stand.box.log()
    stand.begin(bundles["2"], "--shadow", "600")
    for _ in range(slots.MAX_ATTEMPTS):
        known = len(stand.watcher.drain().reports)
        report = stand.wait(lambda report: "frames compared" in report.update.reason, known)
        assert report.update.phase == "staging"
        (shadow,) = stand.shadow_pids()
        stand.box.kill()
        stand.wait_until(lambda pid=shadow: not command_line(pid), "the shadow ends with its agent")
        stand.box.start()
    report = stand.wait(lambda report: report.update.phase == "refused")
    assert "the agent died in 2 of 2 attempts to run this release beside the live" in (
        report.update.reason
    )
    assert report.running is not None
    assert report.running.version == "1"
    assert not stand.shadow_pids()


@pytest.mark.slow
def test_a_shadow_that_dies_or_a_stop_of_the_agent_costs_the_live_release_nothing(
    stand: Stand, bundles: dict[str, Path]
) -> None:
    assert stand.roll_out(bundles["1"]).update.phase == "live", stand.box.log()
    stand.begin(bundles["2"], "--shadow", "600")
    for _ in range(slots.MAX_ATTEMPTS + 1):  # orderly stops do not count
        known = len(stand.watcher.drain().reports)
        stand.wait(lambda report: "frames compared" in report.update.reason, known)
        assert stand.box.terminate() == 0
        stand.box.start()
    known = len(stand.watcher.drain().reports)
    stand.wait(lambda report: "frames compared" in report.update.reason, known)
    pids = stand.pipeline_pids()
    (shadow,) = stand.shadow_pids()
    os.kill(shadow, signal.SIGKILL)
    report = stand.wait(lambda report: report.update.phase == "refused")
    assert "it cannot run beside the live release: it ended with status -9" in report.update.reason
    assert stand.pipeline_pids() == pids


# -- the decision


POLICY = InstallPolicy(shadow_s=60.0, min_shadow_agreement=0.98)


@pytest.mark.parametrize(
    ("frames", "agreement", "reason"),
    [
        (30, 0.98, None),
        (30, 0.9799, "on 30 live frames 97.99% of 90 results agree"),
        (29, 1.0, "29 live frames were compared with the live release in 60 s (shadow_s)"),
        (0, 1.0, "at least 30 must be (shadow_frames)"),
    ],
)
def test_a_release_is_judged_at_the_limits(
    frames: int, agreement: float, reason: str | None
) -> None:
    result = Shadow(frames=frames, agreement=agreement, counted=3 * frames, done=True)
    refusal = shadow_refusal(ShadowEnded(1, result), POLICY, 30)
    assert refusal is None if reason is None else reason in str(refusal)


def test_frames_in_which_nobody_sees_anything_prove_nothing() -> None:
    empty = ShadowEnded(1, Shadow(frames=60, agreement=1.0, counted=0, done=True))
    assert "neither release saw anything" in str(shadow_refusal(empty, POLICY, 30))
    assert shadow_refusal(empty, InstallPolicy(shadow_s=1.0), 30) is None
    one_object = ShadowEnded(1, Shadow(frames=60, agreement=1.0, counted=1, done=True))
    assert shadow_refusal(one_object, POLICY, 30) is None


def test_without_a_limit_the_agreement_is_only_measured() -> None:
    result = Shadow(frames=30, agreement=0.0, counted=30, done=True)
    assert shadow_refusal(ShadowEnded(1, result), InstallPolicy(shadow_s=1.0), 30) is None
    ended = ShadowEnded(1, None, "it held 900 MiB of memory")
    assert "it held 900 MiB" in str(shadow_refusal(ended, POLICY, 30))


def test_a_release_that_became_live_meanwhile_is_not_compared_and_nothing_is_tried() -> None:
    """The live release crashes in a loop: the board goes back to the one that is in shadow."""
    staged_ = staged()
    assert staged_.b is not None
    state = msgspec.structs.replace(staged_, b=msgspec.structs.replace(staged_.b, good=True))
    blob = BlobSpec(sha256="b" * 64, bytes=1, chunk_bytes=4096, index_sha256="c" * 64)
    release = ReleaseSpec(name="app", version="b", profile="p", blob=blob)
    desired = Desired(format=2, request="r1", release=release, policy=POLICY)
    running = State(
        slots=slots.begin_shadow(state, "r1"), stage="shadow", desired=desired, shadow="r1"
    )
    setup = Setup("p", UpdateTable())
    back, effects = step(setup, running, Notice("fall_back", "it crashed"), Moment())
    assert back.slots.active == "b"
    assert Do("stop_shadow") in effects
    for state_ in (back, replace(back, shadow="r1")):
        after, effects = step(setup, state_, Checked("shadow", None, agreement=1.0), Moment())
        assert effects == ()
        assert after.slots == back.slots


def started(command: tuple[str, ...], folder: Path, put: Callable[[object], None]) -> ShadowProcess:
    process = ShadowProcess(put, folder, "laptop", command=command)
    process.start(folder, ShadowLimits(1.0, 1, 1.0, 1.0))
    return process


def test_what_could_not_be_started_does_not_end_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: queue.Queue[object] = queue.Queue()
    with monkeypatch.context() as patched:
        patched.setattr("subprocess.Popen", mock.Mock(side_effect=OSError(11, "try again")))
        process = started((sys.executable, "-c", "import time; time.sleep(600)"), tmp_path,
            events.put)  # fmt: skip
    process.start(tmp_path, ShadowLimits(600.0, 1, 1.0, 1.0))
    stale = events.get(timeout=LONG_S)
    assert isinstance(stale, ShadowEnded)
    assert not process.ended(stale.run)
    assert process.running
    process.stop()


def test_a_shadow_that_has_ended_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another process's by then."""
    events: queue.Queue[object] = queue.Queue()
    process = started((sys.executable, "-c", ""), tmp_path, events.put)
    assert isinstance(events.get(timeout=LONG_S), ShadowEnded)
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr("os.killpg", lambda *row: killed.append(row))
    process.stop()
    assert killed == []


def test_a_shadow_that_keeps_its_limits_is_not_ended_early() -> None:
    """It waits for the first frame as long as it looks from then on (`compare_live`)."""
    assert ShadowLimits(600.0, 30, 30.0, 10.0).longest_s >= START_S + 2 * (600.0 + 30.0)


# -- what the disk keeps


def staged() -> SlotState:
    rows = [
        SlotRecord(sha256=letter * 64, bytes=1, name="app", version=letter, request=f"r-{letter}")
        for letter in "ab"
    ]
    return SlotState(active="a", a=rows[0], b=rows[1])


def test_attempts_count_for_one_request_and_a_result_lasts_into_the_trial() -> None:
    state = slots.begin_shadow(slots.begin_shadow(staged(), "r1"), "r1")
    assert state.b is not None
    assert state.b.shadow_attempts == 2
    assert slots.suspend_shadow(state).b.shadow_attempts == 1  # type: ignore[union-attr]
    second = slots.begin_shadow(state, "r2").b
    assert second is not None
    assert (second.shadow_request, second.shadow_attempts) == ("r2", 1)
    ended = slots.end_shadow(state, 0.99, 40)
    trial = slots.begin_trial(ended, "r1").b
    assert trial is not None
    assert (trial.shadow_agreement, trial.shadow_frames) == (0.99, 40)
    newer = slots.begin_trial(ended, "r2").b  # was not compared for this request
    assert newer is not None
    assert newer.shadow_agreement is None
    with pytest.raises(ValueError, match="a slot is on trial"):
        slots.begin_shadow(slots.begin_trial(ended, "r1"), "r3")
