"""Real parts for the fleet tests: mosquitto, agent processes, and one double, the pipeline.

The pipeline is a double because a real one needs a model and a camera; it says the same JSON lines,
is started, killed and restarted by the same code, and behaves as its bundle's pipeline.toml says.
"""

import os
import queue
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from device.profile import PROFILES
from device.protocol.documents import BlobGet, Reported, decode
from device.protocol.mqtt import Link, LinkEvent, LinkSettings, LinkUp, Message, queue_putter
from device.protocol.topics import Topics
from device.update.bundle import write_bundle
from toolkit.fleet.authority import Authority
from toolkit.fleet.brokers.local import free_port

PROFILE = "test-board"
DEVICE = "board-1"
WAIT_S = 20.0

PIPELINE_DOUBLE = '''
"""Double of the pipeline: says what a pipeline says, as pipeline.toml of its bundle tells."""
import json, os, resource, signal, sys, time
from pathlib import Path

resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))  # AgentBox.fill_disk is for the agent alone

bundle = Path(sys.argv[sys.argv.index("--bundle") + 1])
behaviour = (bundle / "pipeline.toml").read_text().split()
runs = Path(os.environ["TEST_RUNS"])
with runs.open("a") as file:
    file.write(f"{behaviour[0]} {os.getpid()}\\n")
count = len(runs.read_text().splitlines())

def say(kind, **fields):
    print(json.dumps({"kind": kind, **fields}), flush=True)

print("a stray line that is not JSON", flush=True)
say("ready", pipeline=behaviour[0], engine_sha256="0" * 64)
if behaviour[0] == "fails":
    say("failure", message="camera /dev/video9 does not exist: name one that does")
    sys.exit(1)
if behaviour[0] == "exits":
    print("Traceback (most recent call last):", file=sys.stderr)
    print("ValueError: scores [1,80] has no labels", file=sys.stderr)
    sys.exit(3)
def beat(state, frames=0, errors=0, reason=""):
    say("heartbeat", frames=frames, errors=errors, state=state, reason=reason)
word, _, times = behaviour[0].partition("-")  # hangs-2: the first two times
if word == "hangs" and count <= int(times or 1000):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        beat("loading")
        time.sleep(0.1)
if word == "loads":  # loads-5: five seconds, without a word
    until_s = time.monotonic() + float(times)
    while time.monotonic() < until_s:
        sum(range(100_000))
        time.sleep(0.2)
if behaviour[0] == "empty":  # its loop turns and gives no frame
    while True:
        beat("starting")
        time.sleep(0.1)
if behaviour[0] == "silent":  # it says nothing and does nothing
    signal.pause()
def run_on(frames=1, errors=0, for_s=1e9):
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        beat("running", frames, errors)
        frames += 1
        time.sleep(0.1)
    return frames

camera = runs.parent / "camera"
if behaviour[0] == "waits":  # for its camera: a file that is there or not
    while not camera.exists():
        beat("degraded", reason="the camera is away")
        time.sleep(0.05)
say("result", seq=0, latency_ms=1.0)
if behaviour[0] == "dies":
    sys.exit(4)
if behaviour[0] == "crashes":  # once it is live
    run_on(for_s=1.0)
    sys.exit(4)
if behaviour[0] == "errs":
    run_on(10, 3)
if word in ("freezes", "mute", "floods"):  # freezes-2: after two seconds
    frames = run_on(for_s=float(times))
    if word == "freezes":
        os.kill(os.getpid(), signal.SIGSTOP)
    while word == "floods":
        say("reload")
    while True:
        beat("running", frames)
        time.sleep(0.1)
if behaviour[0] == "waits":
    frames = 1
    while True:
        there = camera.exists()
        frames += there
        beat("running" if there else "degraded", frames, reason="" if there else "it is away")
        time.sleep(0.05)
say("stats", frames=1, fps=30.0, latency_p50_ms=1.0, latency_p99_ms=2.0,
    stage_p50_ms={}, stage_p99_ms={}, dropped={})
run_on()
'''

AGENT_LAUNCHER = """
import logging, sys
from pathlib import Path
from dataclasses import replace
from device.agent.agent import serve
from device.agent.config import load_agent_config
from device.errors import TandemError
from device.agent.pipeline_process import PIPELINE

logging.basicConfig(level=logging.INFO)
row = PIPELINE if sys.argv[2] == "real" else replace(PIPELINE, prefix=(sys.executable, sys.argv[2]))
try:
    serve(load_agent_config(Path(sys.argv[1])), row)
except TandemError as error:
    sys.exit(f"tandem-agent: {error}")
"""

T = TypeVar("T")


def wait_for_port(port: int, process: "subprocess.Popen[bytes]", for_s: float = WAIT_S) -> None:
    """Return when a server accepts connections; connecting is the event that is awaited."""
    until = time.monotonic() + for_s
    while True:
        assert process.poll() is None, f"the broker ended with status {process.returncode}"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < until, f"nothing listens on port {port}"
        threading.Event().wait(0.02)


def _password_file(folder: Path, login: tuple[str, str]) -> str:
    path = folder / "passwords"
    command = ("mosquitto_passwd", "-b", "-c", str(path), *login)
    subprocess.run(command, check=True, capture_output=True)
    return f"password_file {path}\n"


def _server_certificate(folder: Path) -> str:
    """Make a CA and the broker's certificate; return the lines of the configuration."""
    authority = Authority.create(folder / "tls", "tests")
    key, server = authority.issue_server(("127.0.0.1",))
    (folder / "tls" / "server.key").write_bytes(key)
    (folder / "tls" / "server.crt").write_bytes(server.pem)
    return f"certfile {folder}/tls/server.crt\nkeyfile {folder}/tls/server.key\n"


class Mosquitto:
    """The real broker on a free port, without persistence: a kill loses all that it held.

    `tls_port` is for agents that take no plain connection; `ca` vouches for it.
    """

    def __init__(self, folder: Path, login: tuple[str, str] | None = None) -> None:
        binary = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
        assert binary, "mosquitto is missing: apt-get install mosquitto"
        self.port, self.tls_port = free_port(), free_port()
        self.ca = folder / "tls" / "ca.crt"
        config = folder / "mosquitto.conf"
        config.write_text(
            # Started by root it would become another user, who cannot look into this folder.
            f"user root\nlistener {self.port} 127.0.0.1\nset_tcp_nodelay true\n"
            + ("allow_anonymous true\n" if login is None else _password_file(folder, login))
            + (f"listener {self.tls_port} 127.0.0.1\n" + _server_certificate(folder))
        )
        self._command = [binary, "-c", str(config)]
        self._log = (folder / "mosquitto.log").open("ab")
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        wait_for_port(self.port, self._process)

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP freezes it: connections stay open and nothing is answered."""
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._log.close()


def write_profile(folder: Path) -> Path:
    """Write the profile of a board that is not shipped, as a user would, and return its path."""
    shipped = (PROFILES / "laptop.toml").read_text()
    path = folder / f"{PROFILE}.toml"
    path.write_text(shipped.replace('name = "laptop"', f'name = "{PROFILE}"', 1))
    return path


class AgentBox:
    """A board: its folder, its agent.toml and the agent process that can be killed and started."""

    def __init__(
        self,
        folder: Path,
        port: int,
        *,
        dev: bool = True,
        trial_timeout_s: float = 15.0,
        confirm_after_s: float = 0.3,
        max_crashes: int = 1000,
        device: str = DEVICE,
        profile: str = PROFILE,
        source: Path | None = None,
        login: tuple[str, str] | None = None,
        ca: Path | None = None,
    ) -> None:
        """With a `source` the real pipeline runs, on it; without one the double.

        `ca`: the port is one for TLS.
        """
        self.device = device
        self.state_dir = folder / "state"
        self.runs_file = folder / "runs.txt"
        self.log_file = folder / "agent.log"
        self.config = folder / "agent.toml"
        self._launcher = folder / "launch_agent.py"
        double = folder / "pipeline_double.py"
        self._pipeline = "real" if source is not None else str(double)
        self._launcher.write_text(AGENT_LAUNCHER)
        double.write_text(PIPELINE_DOUBLE)
        board = profile if profile != PROFILE else write_profile(folder).name
        self.config.write_text(
            f'device = "{device}"\nprofile = "{board}"\nstate_dir = "state"\n'
            f"dev = {str(dev).lower()}\n"
            f'[broker]\nhost = "127.0.0.1"\nport = {port}\n'
            + ("" if login is None else f'username = "{login[0]}"\npassword = "{login[1]}"\n')
            + ("" if ca is None else f'tls = {{ca = "{ca}"}}\n')
            + f"[update]\ntrial_timeout_s = {trial_timeout_s}\nstop_grace_s = 0.3\n"
            + f"confirm_after_s = {confirm_after_s}\nmax_crashes = {max_crashes}\n"
            + ("" if source is None else f'[source]\nuri = "{source}"\n')
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self.process is None
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, self._launcher, self.config, self._pipeline],
                stdout=log,
                stderr=log,
                env={**os.environ, "TEST_RUNS": str(self.runs_file)},
            )

    def fill_disk(self, *, full: bool = True) -> None:
        """From now on no file takes a byte of the agent, its log included."""
        assert self.process is not None
        limit = 0 if full else resource.RLIM_INFINITY
        limits = (limit, resource.RLIM_INFINITY)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, limits)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(WAIT_S)
        self.process = None

    def terminate(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(WAIT_S)
        self.process = None
        return status

    def runs(self) -> list[tuple[str, int]]:
        """(behaviour, pid) of every start of the pipeline double."""
        if not self.runs_file.exists():
            return []
        lines = [line.split() for line in self.runs_file.read_text().splitlines()]
        return [(name, int(pid)) for name, pid in lines]

    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def close(self) -> None:
        if self.process is not None:
            self.terminate()


@dataclass
class Seen:
    """What a watcher saw, in order."""

    reports: list[Reported]
    requests: list[BlobGet]
    states: list[bytes]
    stats: list[bytes]


class Watcher:
    """A client that looks at a device from outside; it sends nothing."""

    def __init__(self, port: int, device: str = DEVICE) -> None:
        topics = Topics(device)
        self._topics = topics
        self._events: queue.Queue[LinkEvent] = queue.Queue()
        self._ended = threading.Event()
        wanted = (topics.reported, topics.blob_get, topics.state, topics.stats)
        settings = LinkSettings("127.0.0.1", port, "watcher", tuple((topic, 1) for topic in wanted))
        self.seen = Seen([], [], [], [])
        self.link = Link(settings, queue_putter(self._events, self._ended))
        self.link.start()
        while not isinstance(self._events.get(timeout=WAIT_S), LinkUp):
            pass

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self.link.close()

    def take(self, timeout_s: float) -> bool:
        """Take one event, False if none comes."""
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if isinstance(event, Message) and event.payload:
            if event.topic == self._topics.reported:
                self.seen.reports.append(decode(event.payload, Reported))
            elif event.topic == self._topics.blob_get:
                self.seen.requests.append(decode(event.payload, BlobGet))
            elif event.topic == self._topics.stats:
                self.seen.stats.append(event.payload)
            else:
                self.seen.states.append(event.payload)
        return True

    def drain(self) -> Seen:
        """All that has arrived by now."""
        while self.take(0.0):
            pass
        return self.seen

    def wait_report(self, phase: str, **fields: object) -> Reported:
        """Return the newest report once its update has this phase (and these fields)."""
        until = time.monotonic() + WAIT_S
        while True:
            newest = self.seen.reports[-1] if self.seen.reports else None
            if (
                newest is not None
                and newest.update.phase == phase
                and all(getattr(newest, name) == value for name, value in fields.items())
            ):
                return newest
            left_s = until - time.monotonic()
            assert left_s > 0.0, f"no report {phase} {fields}, the last: {newest}"
            self.take(left_s)

    def wait_problems(self) -> tuple[str, ...]:
        """Return the problems of the first report that has some."""
        until = time.monotonic() + WAIT_S
        while not (self.seen.reports and self.seen.reports[-1].problems):
            left_s = until - time.monotonic()
            assert left_s > 0.0, f"no problems in {self.seen.reports}"
            self.take(left_s)
        return self.seen.reports[-1].problems

    def wait_state(self, state: str) -> None:
        until = time.monotonic() + WAIT_S
        while not (self.seen.states and f'"{state}"'.encode() in self.seen.states[-1]):
            left_s = until - time.monotonic()
            assert left_s > 0.0, f"never {state}, seen: {self.seen.states}"
            self.take(left_s)


def make_bundle(
    folder: Path,
    behaviour: str = "good",
    *,
    engine_bytes: int = 300_000,
    profile: str = PROFILE,
    version: str = "1",
) -> Path:
    """Write a bundle whose pipeline double behaves as told; `version` changes its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    engine, pipeline, labels = folder / "e", folder / "p", folder / "l"
    block = f"{behaviour} {version}\n".encode()
    # Every chunk differs, so that one in the wrong place is found.
    rows = [b"%010d" % n + block for n in range(-(-engine_bytes // (10 + len(block))))]
    engine.write_bytes(b"".join(rows)[:engine_bytes])
    pipeline.write_text(behaviour)
    labels.write_text("person\n")
    out = folder / f"{behaviour}-{version}.bundle"
    write_bundle(
        out,
        engine=engine,
        pipeline=pipeline,
        labels=labels,
        name=behaviour,
        version=version,
        profile=profile,
    )
    return out
