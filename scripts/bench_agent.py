"""What the agent costs a board: memory, start and idle load, with a signed release installed.

    python -m scripts.bench_agent                 all rows, about a minute
    python -m scripts.bench_agent --idle-s 5      a shorter look at the idle load
    python -m scripts.bench_agent --json

A real mosquitto; the pipeline is a script that says what a pipeline says. Exit status 1: a row
missed its goal.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from device.errors import BrokerError
from device.update.bundle import write_bundle
from toolkit.fleet.brokers.address import BrokerAddress
from toolkit.fleet.brokers.local import free_port
from toolkit.fleet.transports.deploy import DeployOptions, deploy_bundle
from toolkit.fleet.trust.repository import make_repository

DEVICE, PROFILE = "bench-1", "laptop"
ENGINE_BYTES = 4 * 1024**2
WAIT_S = 60.0
STARTS = 5
IMPORT = "import time; t = time.perf_counter(); import device.agent.agent; " \
    "print(time.perf_counter() - t)"  # fmt: skip

# Says what `python -m pipelines` says, twice a second.
PIPELINE = """
import time
begin = time.monotonic()
def say(text):
    print(text, flush=True)
say('{"kind": "ready", "pipeline": "p", "engine_sha256": "0"}')
say('{"kind": "result", "seq": 0, "latency_ms": 5.0}')
frames = 0
while True:
    frames += 15
    say('{"kind": "heartbeat", "frames": %d, "errors": 0, "state": "running"}' % frames)
    time.sleep(0.5)
"""
LAUNCHER = """
import sys
from dataclasses import replace
from pathlib import Path
from device.agent.agent import serve
from device.agent.config import load_agent_config
from device.agent.pipeline_process import PIPELINE
serve(load_agent_config(Path(sys.argv[1])), replace(PIPELINE, prefix=(sys.executable, sys.argv[2])))
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure with its goal, the most that it may be; None: it is told, not judged."""

    name: str
    unit: str
    goal: float | None
    value: float

    @property
    def passed(self) -> bool:
        """Whether the goal is met."""
        return self.goal is None or self.value <= self.goal


@contextmanager
def _broker(folder: Path) -> Iterator[int]:
    """Yield the port of a mosquitto."""
    binary = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if binary is None:
        raise BrokerError("mosquitto is missing: sudo apt-get install mosquitto")
    port = free_port()
    config = folder / "mosquitto.conf"
    config.write_text(f"user root\nlistener {port} 127.0.0.1\nallow_anonymous true\n")
    process = subprocess.Popen([binary, "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(10.0)


class _Agent:
    """An agent process on a board's folder; `online_s`: from its start to its birth message."""

    def __init__(self, folder: Path, port: int) -> None:
        from device.protocol.mqtt import Link, LinkEvent, LinkSettings, LinkUp, Message
        from device.protocol.topics import Topics

        ready, online = threading.Event(), threading.Event()

        def put(event: LinkEvent) -> None:
            if isinstance(event, LinkUp):
                ready.set()
            elif isinstance(event, Message) and b'"online"' in event.payload:
                online.set()

        settings = LinkSettings("127.0.0.1", port, "bench", ((Topics(DEVICE).state, 1),))
        watcher = Link(settings, put)
        watcher.start()
        if not ready.wait(WAIT_S):
            raise BrokerError("the benchmark cannot reach its own broker")
        begin_s = time.monotonic()
        command = [sys.executable, "launcher.py", "agent.toml", "pipeline.py"]
        with (folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, stderr=log, env={**os.environ, "PYTHONPATH": os.getcwd()}
            )
        while not online.wait(0.05) and self.process.poll() is None:
            if time.monotonic() - begin_s > WAIT_S:
                break
        self.online_s = time.monotonic() - begin_s
        watcher.close()
        if not online.is_set():
            self.process.kill()
            self.process.wait(WAIT_S)
            last = (folder / "agent.log").read_text().splitlines()[-1:]
            raise BrokerError(f"the agent was not online within {WAIT_S:g} s: {(*last, '')[0]}")

    def memory_mib(self, key: str) -> float:
        """Return a size of /proc/PID/status, such as VmRSS."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(f"{key}:"))
        return int(line.split()[1]) / 1024

    def cpu_s(self) -> float:
        """Return the time that its threads have had a core."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def load(self, for_s: float) -> float:
        """Return the share of a core, in percent, over a time."""
        before_s, begin_s = self.cpu_s(), time.monotonic()
        time.sleep(for_s)
        return 100.0 * (self.cpu_s() - before_s) / (time.monotonic() - begin_s)

    def stop(self) -> None:
        """End it in good order."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(WAIT_S)


def measure(idle_s: float, tell: Callable[[Row], None]) -> None:
    """Measure all rows and tell each when it is known."""
    texts = [_run_import() for _ in range(STARTS)]
    tell(Row("import", "s", 0.3, statistics.median(texts)))
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with _broker(folder) as port:
            _lay_out(folder, port)
            starts_s = []
            for number in range(STARTS):
                agent = _Agent(folder, port)
                starts_s.append(agent.online_s)
                if number < STARTS - 1:
                    agent.stop()
            try:
                tell(Row("start to online", "s", 1.0, statistics.median(starts_s)))
                time.sleep(min(3.0, idle_s))  # what a start leaves to do
                tell(Row("idle load, no release", "% of a core", 0.05, agent.load(idle_s)))
                broker = BrokerAddress("127.0.0.1", port)
                options = DeployOptions(fleet=folder / "fleet")
                deploy_bundle(_bundle(folder), (DEVICE,), broker, options)
                tell(Row("RSS, signed release live", "MiB", 40.0, agent.memory_mib("VmRSS")))
                tell(Row("highest RSS", "MiB", None, agent.memory_mib("VmHWM")))
                tell(Row("load, pipeline running", "% of a core", None, agent.load(idle_s)))
            finally:
                agent.stop()


def _run_import() -> float:
    ran = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    return float(ran.stdout)


def _lay_out(folder: Path, port: int) -> None:
    """Make a fleet, and the files of one board."""
    make_repository(folder / "fleet")
    shutil.copytree(folder / "fleet" / "trust", folder / "trust")
    (folder / "launcher.py").write_text(LAUNCHER)
    (folder / "pipeline.py").write_text(PIPELINE)
    (folder / "agent.toml").write_text(
        f'device = "{DEVICE}"\nprofile = "{PROFILE}"\nstate_dir = "state"\ndev = true\n'
        f'[broker]\nhost = "127.0.0.1"\nport = {port}\n[update]\nconfirm_after_s = 1.0\n'
    )


def _bundle(folder: Path) -> Path:
    for name, data in (("e", os.urandom(ENGINE_BYTES)), ("p", b"p\n"), ("l", b"l\n")):
        (folder / name).write_bytes(data)
    out = folder / "bench.bundle"
    write_bundle(
        out,
        engine=folder / "e",
        pipeline=folder / "p",
        labels=folder / "l",
        name="bench",
        version="1",
        profile=PROFILE,
    )
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status is 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--idle-s", type=float, default=20.0, help="how long loads are looked at")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each row")
    options = parser.parse_args(arguments)
    rows: list[Row] = []

    def tell(row: Row) -> None:
        rows.append(row)
        if options.json:
            print(json.dumps({**asdict(row), "passed": row.passed}), flush=True)
            return
        goal = "" if row.goal is None else f"goal {row.goal:g}, "
        verdict = "" if row.passed else "  MISSED"
        print(f"{row.name:26} {goal}ours {row.value:.3g} {row.unit}{verdict}", flush=True)

    measure(options.idle_s, tell)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
