"""Simulated boards of a farm over a real broker: they die, lie and take their time.

A board answers the command `job` of `toolkit.fleet.farm.run` as an agent does; instead of a kit's
selftest it says the true times of the job's items, with noise and a factor of its own.
"""

import base64
import contextlib
import heapq
import math
import queue
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from device.protocol.documents import (
    Command,
    CommandState,
    DeviceFacts,
    PipelineReport,
    Reported,
    StateDocument,
    Update,
    encode,
)
from device.protocol.mqtt import Link, LinkEvent, LinkSettings, Message, queue_putter
from device.protocol.signed import open_command
from device.protocol.topics import PREFIX, Topics
from device.selftest.job import work_sha256
from toolkit.fleet.brokers.local import free_port
from toolkit.fleet.farm.run import Work
from toolkit.fleet.farm.values import Task, Times
from toolkit.fleet.fleet_folder import Fleet, load_fleet
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.store.devices import DeviceRow, save_devices

PROFILE = "orin-nx-16gb"


@dataclass
class FarmBoard:
    """`dies_at`: the number of its job that it never answers, 0: none; `factor`: of its times;
    `is_told`: the broker says that it is lost; `says`: which work it has done, empty: the one that
    was asked for. `fails`: items whose child crashes; `refuses`: it does no job."""

    dies_at: int = 0
    factor: float = 1.0
    noise: float = 0.02
    took_s: float = 0.01
    is_told: bool = False
    says: str = ""
    fails: tuple[str, ...] = ()
    refuses: bool = False
    taken: int = field(default=0)


@contextmanager
def simulated(
    port: int, boards: Mapping[str, FarmBoard], items: Mapping[str, Times]
) -> Iterator[None]:
    """Have boards answer; `items`: the true times of what each item of a kit times."""
    events: queue.Queue[LinkEvent] = queue.Queue()
    ended = threading.Event()
    topics = ((f"{PREFIX}/+/cmd/job/+", 1),)
    link = Link(LinkSettings("127.0.0.1", port, "boards", topics), queue_putter(events, ended))
    rng = random.Random(1)

    def answer() -> None:
        due: list[tuple[float, str, bytes]] = []
        while not ended.is_set():
            while due and due[0][0] <= time.monotonic():
                _, topic, payload = heapq.heappop(due)
                link.publish(topic, payload, qos=1, retain=True)
            with contextlib.suppress(queue.Empty, ValueError):  # our own answers are no commands
                event = events.get(timeout=0.01)
                if isinstance(event, Message) and event.payload:
                    command, signed = open_command(event.payload)
                    board = boards[command.device]
                    board.taken += 1
                    is_dead = 0 < board.dies_at <= board.taken
                    if is_dead and board.is_told:  # as the broker does, by the agent's will
                        lost = encode(StateDocument(state="lost", session=1))
                        topic = Topics(command.device).state
                        link.publish(topic, lost, qos=1, retain=True)
                    if signed is not None and not is_dead:
                        state = CommandState(status="executing", op="job", id=command.id)
                        link.publish(event.topic, encode(state), qos=1, retain=True)
                        state = _ended(command, board, items, rng)
                        heapq.heappush(
                            due, (time.monotonic() + board.took_s, event.topic, encode(state))
                        )

    thread = threading.Thread(target=answer)
    link.start()
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        link.close()


def _ended(
    command: Command, board: FarmBoard, items: Mapping[str, Times], rng: random.Random
) -> CommandState:
    steps, names = (str(command.arguments[key]).split(",") for key in ("steps", "items"))
    if board.refuses or set(names) & set(board.fails):
        reason = "its pipeline is running" if board.refuses else "it held 9000 MiB"
        return CommandState(
            status="failed", op="job", id=command.id, reason=reason, refused=board.refuses
        )
    times = {
        key: us * board.factor * math.exp(rng.gauss(0.0, board.noise))
        for name in names
        for key, us in items[name].items()
    }
    result = {
        "work": board.says or work_sha256(str(command.arguments["kit"]), steps, names),
        "report": base64.b64encode(msgspec.json.encode(times)).decode(),
    }
    return CommandState(status="successful", op="job", id=command.id, result=result)


def works(items: Mapping[str, Times]) -> list[Work]:
    """Return a job for each item; its report is the times themselves."""

    def read(_board: str, data: bytes) -> Times:
        return msgspec.json.decode(data, type=dict[str, float])

    return [
        Work(Task(name, frozenset(times)), ("tactics",), (name,), read)
        for name, times in items.items()
    ]


def farm_fleet(folder: Path, port: int, boards: Sequence[str]) -> Fleet:
    """Make a fleet with keys whose boards have reported that they are in the farm."""
    make_fleet(folder, name="farm", broker=f"127.0.0.1:{port}")
    settings = folder / "fleet.toml"
    settings.write_text(settings.read_text().replace("tls = true", "tls = false"))
    fleet = load_fleet(folder)
    reported = Reported(
        agent="1", profile=PROFILE, dev=False, warning="", session=1, running=None,
        pipeline=PipelineReport(status="stopped"), update=Update(phase="idle"),
        facts=DeviceFacts(labels={"farm": "yes"}, power_mode="MAXN"),
    )  # fmt: skip
    state = StateDocument(state="online", session=1)
    database = fleet.open_store()
    with contextlib.closing(database), database.write():
        save_devices(database, [DeviceRow(name, 0.0, state, reported, {}) for name in boards])
    return fleet


@contextmanager
def mosquitto(folder: Path) -> Iterator[int]:
    """Yield the port of a broker that lets anybody in."""
    port = free_port()
    config = folder / "mosquitto.conf"
    config.write_text(f"user root\nlistener {port} 127.0.0.1\nallow_anonymous true\n")
    binary = shutil.which("mosquitto") or "/usr/sbin/mosquitto"
    with subprocess.Popen([binary, "-c", str(config)], stderr=subprocess.DEVNULL) as process:
        try:
            yield port
        finally:
            process.kill()
