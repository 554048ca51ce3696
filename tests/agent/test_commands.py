"""Commands over MQTT: a real broker, real agents with real pipelines, and what is refused."""

import json
import queue
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import msgspec
import pytest
from board_fixtures import colour_bundle
from click.testing import CliRunner, Result
from deploy_fixtures import deploy
from fleet_server_fixtures import ServerProcess, wait_until, write_fleet
from mqtt_fixtures import DEVICE, WAIT_S, AgentBox, Mosquitto, Watcher, make_bundle
from video_fixtures import scene, write_video

from device.agent.command_journal import JOURNAL, CommandJournal, Taken, boot_id
from device.agent.commands import (
    INTERRUPTED,
    MAX_WAITING,
    REBOOT_S,
    UNSIGNED,
    CommandEvent,
    Commands,
    expired,
)
from device.agent.config import CommandsTable, TrustTable
from device.agent.farm_job import ANOTHER, FarmJob, no_job
from device.agent.operations import Board, Job
from device.agent.task_process import TaskEnded, start_task
from device.agent.verification import Verification
from device.protocol.documents import BlobGet, BlobSpec, Command, CommandState, decode, encode
from device.protocol.mqtt import Link, LinkEvent, LinkSettings, LinkUp, Message, queue_putter
from device.protocol.signed import sign_command
from device.protocol.topics import Topics
from device.update.fetching import Fetching
from toolkit.cli.commands.fleet import fleet as fleet_command
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.server.commands import payload_of
from toolkit.fleet.transports.deploy import DeployOptions
from toolkit.fleet.trust.repository import make_repository

TOPICS = Topics(DEVICE)
MQTT_SINK = '[[sinks]]\nkind = "mqtt"\n'


class Stand:
    """A broker, the folder of a fleet with its server, and one board."""

    def __init__(self, folder: Path, fleet: Path, broker: Mosquitto, box: AgentBox) -> None:
        self.folder, self.fleet, self.broker, self.box = folder, fleet, broker, box
        self.server = ServerProcess(fleet)
        self.server.start()
        self.box.start()
        wait_until(lambda: DEVICE in self.run("devices", "--json").stdout, self.describe)

    def describe(self) -> str:
        return f"{self.server.log()}\n{self.box.log()}"

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(
            fleet_command, words, env={"TANDEM_FLEET": str(self.fleet), "COLUMNS": "160"},
            catch_exceptions=False,
        )  # fmt: skip

    def command(self, *words: str) -> dict[str, Any]:
        """Give a command and return its last state."""
        done = self.run("device", "run", DEVICE, *words, "--json")
        state = json.loads(done.stdout)["state"]
        assert state is not None, self.describe()
        assert (done.exit_code == 0) == (state["status"] == "successful")
        return state

    def deploy(self, bundle: Path) -> None:
        result = deploy(self.broker.port, bundle, DeployOptions(3 * WAIT_S))
        assert result.live, (result, self.box.log())

    def close(self) -> None:
        self.box.close()
        self.server.stop()
        self.broker.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Stand]:
    """A board on a bench with the double of a pipeline, which may be rebooted by `true`."""
    broker = Mosquitto(tmp_path)
    box = AgentBox(tmp_path, broker.port)
    with box.config.open("a") as file:
        file.write(
            '[commands]\nallow = ["restart", "pipeline", "log", "report", "reboot"]\n'
            'reboot_command = ["true"]\n'
        )
    stand = Stand(tmp_path, write_fleet(tmp_path / "fleet", broker.port), broker, box)
    yield stand
    stand.close()


@pytest.fixture
def camera(tmp_path: Path) -> Iterator[Stand]:
    """A board with a real pipeline on a video."""
    video = tmp_path / "squares.mp4"
    write_video(video, [scene(n % 8, 1) for n in range(100)])
    broker = Mosquitto(tmp_path)
    box = AgentBox(tmp_path, broker.port, profile="laptop", source=video)
    stand = Stand(tmp_path, write_fleet(tmp_path / "fleet", broker.port), broker, box)
    yield stand
    stand.close()


def retained(port: int, *topics: str) -> dict[str, bytes]:
    """What the broker retains below these topics."""
    events: queue.Queue[LinkEvent] = queue.Queue()
    ended = threading.Event()
    mark = f"test/mark/{time.monotonic_ns()}"
    settings = LinkSettings("127.0.0.1", port, f"look-{time.monotonic_ns()}",
        tuple((topic, 1) for topic in (*topics, mark)))  # fmt: skip
    link = Link(settings, queue_putter(events, ended))
    link.start()
    seen: dict[str, bytes] = {}
    try:
        while not isinstance(events.get(timeout=WAIT_S), LinkUp):
            pass
        while mark not in seen:
            link.publish(mark, b"x", qos=1)
            try:
                event = events.get(timeout=1.0)
            except queue.Empty:
                continue
            if isinstance(event, Message):
                seen[event.topic] = event.payload
        del seen[mark]
    finally:
        ended.set()
        link.close()
    return {topic: payload for topic, payload in seen.items() if payload}


def publish(port: int, topic: str, payload: bytes) -> None:
    """Publish retained, as anybody who reaches the broker may."""
    events: queue.Queue[LinkEvent] = queue.Queue()
    ended = threading.Event()
    link = Link(LinkSettings("127.0.0.1", port, f"pub-{time.monotonic_ns()}"),
        queue_putter(events, ended))  # fmt: skip
    link.start()
    assert isinstance(events.get(timeout=WAIT_S), LinkUp)
    assert link.publish(topic, payload, qos=1, retain=True, wait_s=WAIT_S)
    ended.set()
    link.close()


def state_at(port: int, topic: str) -> CommandState | None:
    """What a device has made of a command, None: nothing yet."""
    payload = retained(port, topic).get(topic)
    if payload is None:
        return None
    try:
        return decode(payload, CommandState)
    except ValueError:
        return None


def test_operations_are_done_once_answered_in_place_and_cleared(bench: Stand) -> None:
    denied = bench.command("restart")
    assert (denied["status"], denied["reason"]) == ("failed", "there is no release to run")
    bench.deploy(make_bundle(bench.folder / "in"))
    assert len(bench.box.runs()) == 1
    assert bench.command("restart")["status"] == "successful"
    wait_until(lambda: len(bench.box.runs()) == 2, bench.describe)
    with Watcher(bench.broker.port) as watcher:
        assert bench.command("pipeline", "state=stopped")["status"] == "successful"
        while not any(
            report.pipeline.reason == "it was stopped by a command"
            for report in watcher.seen.reports
        ):
            assert watcher.take(WAIT_S), bench.describe()
    assert bench.command("pipeline", "state=running")["status"] == "successful"
    wait_until(lambda: len(bench.box.runs()) == 3, bench.describe)
    wrong = bench.command("pipeline", "state=upside-down")
    assert "Invalid enum value 'upside-down'" in wrong["reason"]
    assert "has no operation 'dance'" in bench.command("dance")["reason"]
    assert "the operation 'snapshot' is not allowed" in bench.command("snapshot")["reason"]
    lines = bench.command("log", "lines=3", "source=agent")["result"]["lines"]
    assert len(lines) == 3
    assert "the command log" in lines[-1]["text"]
    report = bench.command("report")["result"]
    assert report["reported"]["running"]["name"] == "good"
    assert report["machine"]["python"]
    # A capability for each operation that is allowed, and no command is left behind.
    retained_rows = retained(bench.broker.port, TOPICS.capability("+"), TOPICS.commands)
    allowed = ("restart", "pipeline", "log", "report", "reboot")
    assert retained_rows == {TOPICS.capability(op): b"{}" for op in allowed}
    shown = bench.run("logs", DEVICE).stdout
    assert re.search(r"gave the command pipeline \([0-9a-f]{8}\)", shown)
    verified = bench.run("audit", "verify")
    assert verified.exit_code == 0


def test_a_real_pipeline_gives_pictures_and_lines(camera: Stand) -> None:
    camera.deploy(colour_bundle(camera.folder / "release", source="loop = true", sinks=MQTT_SINK))
    picture = camera.folder / "picture.jpg"
    words = ("device", "run", DEVICE, "snapshot", "width=32", "-o", str(picture))
    done = camera.run(*words)
    assert done.exit_code == 0, (done.output, camera.describe())
    image = cv2.imread(str(picture))
    assert image.shape == (32, 32, 3)
    red = image[:, :, 2].astype(int) - image[:, :, 1]
    assert red.max() > 60  # the square
    missing = camera.command("snapshot", "camera=rear")
    assert "has no camera 'rear'" in missing["reason"]
    # Nothing is published before somebody asks for it.
    follower = subprocess.Popen(
        [sys.executable, "-m", "toolkit.cli", "fleet", "logs", DEVICE, "-f", "--fleet",
         str(camera.fleet)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert follower.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(follower.stdout.readline, "")))
    reader.start()
    try:
        wait_until(lambda: any("reported" in line for line in lines), lambda: lines)
        assert camera.command("restart")["status"] == "successful"
        assert not any("log/" in line for line in lines)
        assert camera.command("logs", "seconds=60")["status"] == "successful"
        assert camera.command("restart")["status"] == "successful"
        wait_until(
            lambda: (
                any("log/pipeline" in line and "mqtt sink connected" in line for line in lines)
                and any("log/agent" in line and "the command restart" in line for line in lines)
            ),
            lambda: (lines, camera.describe()),
        )
    finally:
        follower.terminate()
        follower.wait()
        reader.join()


def new_command(op: str = "log", **changes: object) -> Command:
    """A command as an operator gives it now."""
    counter = time.time_ns() // 10**6
    command = Command(
        op=op, id=f"t{counter}", device=DEVICE, counter=counter, expires="2999-01-01T00:00:00Z"
    )
    return msgspec.structs.replace(command, **changes)


def ended(stand: Stand, command: Command, payload: bytes) -> CommandState:
    """Publish a command; return how it ended."""
    topic = TOPICS.command(command.op, command.id)
    publish(stand.broker.port, topic, payload)

    def is_over() -> bool:
        state = state_at(stand.broker.port, topic)
        return state is not None and state.status in ("successful", "failed")

    wait_until(is_over, stand.describe)
    state = state_at(stand.broker.port, topic)
    assert state is not None
    publish(stand.broker.port, topic, b"")
    return state


def test_a_board_that_takes_signed_commands_refuses_all_others(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path)
    folder = tmp_path / "fleet"
    make_fleet(folder, name="robots", broker=f"127.0.0.1:{broker.port}")
    settings = folder / "fleet.toml"  # this broker has another CA
    settings.write_text(settings.read_text().replace("tls = true", "tls = false"))
    shutil.copytree(folder / "trust", tmp_path / "trust")
    box = AgentBox(tmp_path, broker.tls_port, dev=False, ca=broker.ca)
    stand = Stand(tmp_path, folder, broker, box)
    stranger = make_repository(tmp_path / "stranger").director_signer()
    fleet = load_fleet(folder)
    try:
        assert stand.command("log", "lines=1")["status"] == "successful"
        command = new_command()
        payload = payload_of(fleet, command)
        assert ended(stand, command, payload).status == "successful"
        stand.box.kill()  # what it has executed it knows after any end
        stand.box.start()
        assert ended(stand, command, payload).reason == INTERRUPTED
        older = new_command(counter=command.counter - 1)
        assert "it is an old one" in ended(stand, older, payload_of(fleet, older)).reason
        unsigned = new_command()
        assert ended(stand, unsigned, encode(unsigned)).reason == UNSIGNED
        foreign = new_command()
        refused = ended(stand, foreign, sign_command(foreign, [stranger]))
        assert "the command is signed by 0 of the director's keys" in refused.reason
        changed = new_command()
        signed = msgspec.json.decode(payload_of(fleet, changed))
        signed["payload"] = signed["payload"].replace("{}", "{ }")
        refused = ended(stand, changed, msgspec.json.encode(signed))
        assert "the command is signed by 0 of the director's keys" in refused.reason
        second = new_command(device="board-2")
        refused = ended(stand, second, payload_of(fleet, second))
        assert "the command is for the device board-2" in refused.reason
        late = new_command(expires="2020-01-01T00:00:00Z")
        assert "has expired at 2020-01-01" in ended(stand, late, payload_of(fleet, late)).reason
    finally:
        stand.close()


def test_commands_that_ended_unwatched_are_shown_and_cleared(bench: Stand) -> None:
    given = bench.run("device", "run", DEVICE, "log", "--wait", "0")
    assert given.exit_code == 0
    assert re.match(r"the command [0-9a-f]{8} was given\n", given.stdout)
    cleared: list[dict[str, Any]] = []

    def is_cleared() -> bool:
        cleared.extend(json.loads(bench.run("device", "clear", DEVICE, "--json").stdout))
        return bool(cleared)

    wait_until(is_cleared, bench.describe)
    assert [row["status"] for row in cleared] == ["successful"]
    assert not retained(bench.broker.port, TOPICS.commands)


def test_a_reboot_is_told_by_the_agent_after_it(bench: Stand) -> None:
    """`true` reboots nothing: the next agent finds the boot unchanged, or another one."""
    for other_boot, status in ((False, "failed"), (True, "successful")):
        command = new_command("reboot")
        topic = TOPICS.command("reboot", command.id)
        publish(bench.broker.port, topic, encode(command))
        wait_until(
            lambda topic=topic: (state := state_at(bench.broker.port, topic)) is not None
            and state.status == "executing", bench.describe,
        )  # fmt: skip
        bench.box.kill()
        journal = bench.box.state_dir / JOURNAL
        taken = msgspec.json.decode(journal.read_bytes(), type=Taken)
        assert (taken.op, taken.id, taken.boot) == ("reboot", command.id, boot_id())
        if other_boot:
            journal.write_bytes(encode(msgspec.structs.replace(taken, boot="another")))
        bench.box.start()
        wait_until(
            lambda topic=topic, status=status: (
                (state := state_at(bench.broker.port, topic)) is not None and state.status == status
            ), bench.describe,
        )  # fmt: skip


# -- what decides


class Told:
    """Commands without a broker: what they publish, and an operation that counts."""

    def __init__(self, folder: Path, *, allow: tuple[str, ...] = ("restart",)) -> None:
        self.sent: list[CommandState] = []
        self.capabilities: dict[str, bytes] = {}
        self.online = True
        self.restarts = 0
        self.no_job = ""
        self.requests: list[BlobGet] = []
        events: list[CommandEvent] = []
        self.commands = Commands(
            CommandsTable(allow=allow, reboot_command=("true",)),
            TOPICS,
            Board(
                restart=self._restart, set_pipeline=lambda _: "", log=lambda *_: [],
                follow=lambda _: None, report=dict, no_job=lambda: self.no_job, tap="",
                state_dir="",
            ),
            dev=True,
            journal=CommandJournal(folder),
            verification=Verification(
                lambda _: None, lambda _: None, device=DEVICE, trust=TrustTable(), state_dir=folder
            ),
            put=events.append,
            send=self._send,
            job=FarmJob(
                folder, 4, ask=self.requests.append, put=events.append, refusal=lambda: self.no_job
            ),
        )  # fmt: skip

    def _restart(self) -> str:
        self.restarts += 1
        return ""

    def _send(self, topic: str, payload: bytes) -> bool:
        if self.online and topic.count("/") == TOPICS.capability("x").count("/"):
            self.capabilities[topic] = payload
        elif self.online:
            self.sent.append(decode(payload, CommandState))
        return self.online

    def take(self, *commands: Command, now_s: float = 0.0) -> list[str]:
        """Take commands and do what is due; return what was published."""
        for command in commands:
            topic = TOPICS.command(command.op, command.id)
            self.commands.on_message(topic, encode(command), now_s)
        del self.sent[:]
        for _ in range(len(commands) + 1):
            self.commands.advance(now_s + 1.0)
        return [f"{state.id} {state.status}" for state in self.sent]


def test_commands_run_in_the_order_in_which_they_were_given(tmp_path: Path) -> None:
    harness = Told(tmp_path)
    second, first = (new_command("restart", counter=n, id=f"c{n}") for n in (2, 1))
    assert harness.take(second, first) == [
        "c1 executing", "c1 successful", "c2 executing", "c2 successful",
    ]  # fmt: skip
    assert harness.restarts == 2
    third = new_command("restart", counter=2, id="c3")
    assert harness.take(third) == ["c3 failed"]
    assert harness.restarts == 2


def test_an_operation_that_is_not_allowed_any_more_is_not_offered(tmp_path: Path) -> None:
    harness = Told(tmp_path)
    harness.commands.on_link_up()
    assert harness.capabilities.pop(TOPICS.capability("restart")) == b"{}"
    assert TOPICS.capability("reboot") in harness.capabilities
    assert set(harness.capabilities.values()) == {b""}


def test_the_time_for_a_reboot_begins_with_it(tmp_path: Path) -> None:
    """A command may have waited long, for others or for signed metadata."""
    harness = Told(tmp_path, allow=("reboot",))
    command = new_command("reboot", counter=1, id="c1")
    harness.commands.on_message(TOPICS.command("reboot", "c1"), encode(command), 0.0)
    begun_s = 2 * REBOOT_S
    harness.commands.advance(begun_s)
    harness.commands.advance(begun_s + REBOOT_S - 1.0)
    assert [state.status for state in harness.sent] == ["executing"]
    harness.commands.advance(begun_s + REBOOT_S)
    assert [state.status for state in harness.sent] == ["executing", "failed"]


def test_a_child_that_has_ended_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another process's by then."""
    events: queue.Queue[TaskEnded] = queue.Queue()
    command = (sys.executable, "-c", "print('{}')")
    end = start_task("c1", command, events.put, limit_s=WAIT_S, max_bytes=100)
    assert events.get(timeout=WAIT_S) == TaskEnded("c1", {})
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr("os.killpg", lambda *row: killed.append(row))
    end()
    assert killed == []


def test_states_wait_for_the_connection(tmp_path: Path) -> None:
    harness = Told(tmp_path)
    harness.online = False
    assert harness.take(new_command("restart", counter=1, id="c1")) == []
    harness.online = True
    harness.commands.advance(2.0)
    assert [state.status for state in harness.sent] == ["successful"]  # the newest of its topic


def test_a_command_that_is_cleared_before_it_begins_is_not_executed(tmp_path: Path) -> None:
    harness = Told(tmp_path)
    command = new_command("restart", id="c1")
    topic = TOPICS.command("restart", "c1")
    harness.commands.on_message(topic, encode(command), 0.0)
    harness.commands.on_message(topic, b"", 0.0)
    assert harness.take() == []
    assert harness.restarts == 0


def test_too_many_commands_at_once_are_refused(tmp_path: Path) -> None:
    harness = Told(tmp_path)
    for number in range(MAX_WAITING):
        command = new_command("restart", counter=number + 1, id=f"c{number}")
        harness.commands.on_message(TOPICS.command("restart", command.id), encode(command), 0.0)
    late = new_command("restart", counter=99, id="late")
    harness.commands.on_message(TOPICS.command("restart", "late"), encode(late), 0.0)
    assert [(one.id, one.status) for one in harness.sent] == [("late", "failed")]
    assert "16 commands wait already" in harness.sent[0].reason


def test_a_disk_that_takes_nothing_executes_nothing(tmp_path: Path) -> None:
    harness = Told(tmp_path)
    shutil.rmtree(tmp_path)
    assert harness.take(new_command("restart", id="c1")) == ["c1 failed"]
    assert "no command is executed before the disk has recorded it" in harness.sent[0].reason
    assert harness.restarts == 0


def test_what_is_no_command_does_nothing(tmp_path: Path) -> None:
    harness = Told(tmp_path)
    topic = TOPICS.command("restart", "c1")
    good = encode(new_command("restart", id="c1"))
    rng = random.Random(7)
    for _ in range(3000):
        garbled = bytearray(good)
        for _ in range(rng.randrange(1, 5)):
            garbled[rng.randrange(len(garbled))] = rng.randrange(256)
        harness.commands.on_message(topic, bytes(garbled), 0.0)
        harness.commands.on_message(topic, b"", 0.0)  # those that are still commands
    moved = encode(new_command("restart", id="c2"))
    harness.commands.on_message(topic, moved, 0.0)  # published at another's place
    assert harness.take() == []
    assert harness.restarts == 0


@pytest.mark.parametrize(
    ("expires", "words"),
    [
        ("2999-01-01T00:00:00Z", ""),
        ("2020-01-01T00:00:00Z", "has expired"),
        ("2999-01-01T00:00:00", "has expired"),  # of no zone
        ("tomorrow", "which is no time"),
    ],
)
def test_a_command_has_a_time(expires: str, words: str) -> None:
    reason = expired(new_command(expires=expires))
    assert (words in reason) if words else not reason


# -- jobs of a farm

KIT = {
    "kit": "ab" * 32, "bytes": 1000, "chunk_bytes": 65536, "index": "cd" * 32, "chunk_format": 2,
    "steps": "tactics", "items": "m.0,m.1", "minutes": 1,
}  # fmt: skip


def give_job(harness: Told, command_id: str, **changes: object) -> list[str]:
    """Give a job with changed arguments; return what was published of it."""
    counter = harness.commands._journal.taken.counter + 1
    arguments = {key: str(value) for key, value in {**KIT, **changes}.items()}
    return harness.take(new_command("job", id=command_id, counter=counter, arguments=arguments))


@pytest.mark.parametrize(
    ("labels", "phase", "pipeline", "reason"),
    [
        ({"farm": "yes"}, "idle", "stopped", ""),
        ({"farm": "yes"}, "live", "failed", ""),
        ({}, "idle", "stopped", "is in no farm"),
        ({"farm": "no"}, "idle", "stopped", "is in no farm"),
        ({"farm": "yes"}, "trial", "running", "a release is being installed"),
        ({"farm": "yes"}, "downloading", "stopped", "a release is being installed"),
        ({"farm": "yes"}, "live", "running", "its pipeline is running"),
        ({"farm": "yes"}, "live", "starting", "its pipeline is running"),
    ],
)
def test_a_board_does_jobs_for_a_farm_it_is_in_while_it_does_nothing_else(
    labels: dict[str, str], phase: Any, pipeline: Any, reason: str
) -> None:
    text = no_job(labels, phase, pipeline)
    assert reason in text
    assert bool(text) == bool(reason)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("kit", "../../etc/passwd"), ("bytes", 10**12), ("items", "m.0;rm"), ("steps", "-x y"),
        ("minutes", 1e9), ("minutes", "nan"), ("items", "a" * 5000),
    ],
)  # fmt: skip
def test_a_job_beyond_its_limits_is_refused(tmp_path: Path, argument: str, value: object) -> None:
    harness = Told(tmp_path, allow=("job",))
    assert give_job(harness, "c1", **{argument: value}) == ["c1 executing", "c1 failed"]
    assert "the arguments of job are not understood" in harness.sent[-1].reason
    assert not harness.sent[-1].refused  # no other board would take it
    assert not harness.requests


def test_a_job_fetches_its_kit_and_gives_way_to_all_else(tmp_path: Path) -> None:
    harness = Told(tmp_path, allow=("job", "restart"))
    assert give_job(harness, "c1") == ["c1 executing"]
    assert [(get.sha256, get.index) for get in harness.requests] == [(KIT["kit"], True)]
    # Another command need not wait for it.
    counter = harness.commands._journal.taken.counter + 1
    published = harness.take(new_command("restart", id="c2", counter=counter))
    assert published == ["c1 failed", "c2 executing", "c2 successful"]
    assert (harness.sent[0].reason, harness.sent[0].refused) == (ANOTHER, True)
    # Nor a pipeline that begins, or a release.
    assert give_job(harness, "c3") == ["c3 executing"]
    harness.no_job = "its pipeline is running"
    assert harness.take() == ["c3 failed"]
    assert give_job(harness, "c4") == ["c4 executing", "c4 failed"]
    harness.no_job = ""
    # Who gave it takes it back by clearing its topic; nobody waits for an answer.
    assert give_job(harness, "c5") == ["c5 executing"]
    harness.commands.on_message(TOPICS.command("job", "c5"), b"", 2.0)
    assert not harness.commands.job.running
    assert harness.take() == []
    assert not list((tmp_path / "farm").iterdir())
    # A job whose child ends without a result has failed: another board need not do better.
    assert give_job(harness, "c6") == ["c6 executing"]
    harness.commands.on_event(TaskEnded("c6", None, "it held 9000 MiB"), 3.0)
    assert (harness.sent[-1].reason, harness.sent[-1].refused) == ("it held 9000 MiB", False)


def test_nothing_is_left_on_the_disk_of_a_job_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: queue.Queue[TaskEnded] = queue.Queue()
    requests: list[BlobGet] = []
    job = FarmJob(tmp_path, 4, ask=requests.append, put=events.put, refusal=lambda: "")
    leftover = tmp_path / "farm-work" / "earlier" / "kit"  # the agent was killed with its child
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"kit")
    program = (
        "import signal, sys, tempfile; from pathlib import Path\n"
        "Path(tempfile.mkdtemp(), 'engine').write_bytes(b'x')\n"
        f"Path({str(tmp_path / 'ready')!r}).touch(); signal.pause()"
    )
    spec = BlobSpec(sha256="ab" * 32, bytes=1000, chunk_bytes=65536, index_sha256="cd" * 32)
    job.begin("c1", Job(spec, (sys.executable, "-c", program), WAIT_S))
    assert not leftover.exists()
    monkeypatch.setattr(Fetching, "complete", True)
    monkeypatch.setattr(Fetching, "finish", lambda _: tmp_path / "kit")
    assert job.advance(1.0, waited_for=False) == ""
    wait_until((tmp_path / "ready").exists, lambda: list(events.queue))
    assert list((tmp_path / "farm-work").rglob("engine"))
    job.stop()
    assert events.get(timeout=WAIT_S).id == "c1"
    assert not list((tmp_path / "farm-work").iterdir())
