"""A fleet of one device on this machine: broker, agent process, and an MQTT client."""

import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from device.errors import DeployError
from device.protocol.documents import Reported
from device.protocol.documents import decode as decode_document
from device.protocol.messages import Stats, decode_message
from device.protocol.mqtt import Link, LinkEvent, LinkSettings, Message, queue_putter
from device.protocol.topics import Topics
from device.start.command import module_command
from pipelines.sinks.events import Event
from toolkit.fleet.brokers.address import BrokerAddress
from toolkit.fleet.brokers.local import start_broker

DEVICE = "demo-board"
AGENT_STOP_S = 15.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """One frame's detections as the client received them."""

    event: Event
    received_ns: int  # wall clock

    @property
    def capture_to_client_ms(self) -> float:
        """From the frame's capture to its arrival at the MQTT client."""
        return (self.received_ns - self.event.t_capture_ns) / 1e6


@dataclass
class Listener:
    """What the client has received, in order; written by one thread."""

    topics: Topics
    seen: list[ReceivedFrame] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    reported: list[Reported] = field(default_factory=list)

    def take(self, message: Message) -> None:
        """Store one message; ignore unknown ones."""
        if message.topic == self.topics.detections:
            event = msgspec.json.decode(message.payload, type=Event)
            self.seen.append(ReceivedFrame(event, time.time_ns()))
        elif message.topic == self.topics.stats:
            stats = decode_message(message.payload)
            if isinstance(stats, Stats):
                self.stats.append(stats)
        elif message.topic == self.topics.reported and message.payload:
            self.reported.append(decode_document(message.payload, Reported))

    def of(self, pipeline: str) -> list[ReceivedFrame]:
        """Return the frames that one release's pipeline published."""
        return [item for item in self.seen if item.event.pipeline == pipeline]


@dataclass(frozen=True, slots=True)
class Fleet:
    """A running broker and agent."""

    broker: BrokerAddress
    agent: "subprocess.Popen[bytes]"
    log: Path
    listener: Listener

    def wait_for_frames(
        self, pipeline: str, count: int, timeout_s: float, on_progress: Callable[[float], None]
    ) -> list[ReceivedFrame]:
        """Wait for `count` more frames of a pipeline and return them.

        Raises DeployError: they did not arrive in time, or the agent ended.
        """
        before = len(self.listener.of(pipeline))
        deadline = time.monotonic() + timeout_s
        while True:
            frames = self.listener.of(pipeline)[before:]
            on_progress(min(1.0, len(frames) / count))
            if len(frames) >= count:
                return frames
            if self.agent.poll() is not None:
                raise DeployError(
                    f"the agent ended with status {self.agent.returncode}: {self.log}"
                )
            if time.monotonic() > deadline:
                raise DeployError(
                    f"{len(frames)} of {count} frames of {pipeline} arrived within "
                    f"{timeout_s:g} s; the agent's log is {self.log}"
                )
            time.sleep(POLL_S)


@contextmanager
def start_fleet(folder: Path, profile: str) -> Iterator[Fleet]:
    """Start broker, client and agent for the duration of the `with` block."""
    with ExitStack() as stack:
        broker = stack.enter_context(start_broker())
        listener = stack.enter_context(_listen(broker.host, broker.port))
        log = folder / "agent.log"
        agent = stack.enter_context(_agent(folder, profile, broker.port, log))
        yield Fleet(BrokerAddress(broker.host, broker.port), agent, log, listener)


@contextmanager
def _listen(host: str, port: int) -> Iterator[Listener]:
    listener = Listener(Topics(DEVICE))
    events: queue.Queue[LinkEvent] = queue.Queue(4096)
    stopped = threading.Event()
    settings = LinkSettings(
        host=host,
        port=port,
        client_id="tandem-demo",
        subscriptions=(
            (listener.topics.detections, 0),
            (listener.topics.stats, 0),
            (listener.topics.reported, 1),
        ),
    )
    link = Link(settings, queue_putter(events, stopped))

    def take() -> None:
        while not stopped.is_set():
            try:
                event = events.get(timeout=0.2)
            except queue.Empty:
                continue
            if isinstance(event, Message):
                listener.take(event)

    thread = threading.Thread(target=take, name="demo-client", daemon=True)
    link.start()
    thread.start()
    try:
        yield listener
    finally:
        stopped.set()
        link.close()
        thread.join()


@contextmanager
def _agent(folder: Path, profile: str, port: int, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    settings = folder / "agent.toml"
    settings.write_bytes(
        msgspec.toml.encode(
            {
                "device": DEVICE,
                "profile": profile,
                "state_dir": "agent-state",
                "dev": True,  # the demo's releases are not signed
                "broker": {"host": "127.0.0.1", "port": port},
                "update": {"trial_timeout_s": 30.0, "confirm_after_s": 1.0},
            }
        )
    )
    command = module_command("device.agent", "--config", str(settings))
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, env=os.environ
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(AGENT_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
