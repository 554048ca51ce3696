"""A board as in the field: broker, agent process, real pipeline, real engine, RTSP camera."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from mqtt_fixtures import DEVICE, WAIT_S, AgentBox, Mosquitto, Watcher
from video_fixtures import COLOUR_TOML, LABELS, colour_model

from device.protocol.documents import Reported
from device.start import keeper
from device.update.bundle import write_bundle
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.fleet.brokers.address import BrokerAddress
from toolkit.fleet.transports.deploy import deploy_bundle
from toolkit.fleet.transports.deployment import DeployResult

PATIENCE_S = 60.0


def colour_bundle(folder: Path, *, sinks: str = "", source: str = "", version: str = "1") -> Path:
    """Write a release of the detector of coloured squares, with a real engine."""
    folder.mkdir(parents=True, exist_ok=True)
    engine = folder / "model.engine"
    if not engine.exists():
        model = colour_model(folder / "colours.onnx")
        build_engine(model, "laptop", engine, BuildOptions(precision="fp32"))
    (folder / "labels.txt").write_text("\n".join(LABELS) + "\n")
    text = COLOUR_TOML.format(uri="/nonexistent", source=source, sinks=sinks)
    (folder / "pipeline.toml").write_text(text)
    bundle = folder / f"colours-{version}.bundle"
    write_bundle(
        bundle,
        engine=engine,
        pipeline=folder / "pipeline.toml",
        labels=folder / "labels.txt",
        name="colours",
        version=version,
        profile="laptop",
    )
    return bundle


class Board:
    """The agent of a board with one camera. `limits` is the table [pipeline] of agent.toml."""

    def __init__(self, folder: Path, source: str, limits: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.broker = Mosquitto(folder)
        self.box = AgentBox(
            folder, self.broker.port, profile="laptop", source=source, trial_timeout_s=WAIT_S
        )
        text = self.box.config.read_text()
        self.box.config.write_text(f"{text}[pipeline]\n{limits}\n")
        self.box.start()
        self.watcher = Watcher(self.broker.port)

    def close(self) -> None:
        self.watcher.__exit__(None, None, None)
        self.box.close()
        self.broker.close()

    def deploy(self, bundle: Path) -> DeployResult:
        address = BrokerAddress("127.0.0.1", self.broker.port)
        return deploy_bundle(bundle, DEVICE, address, timeout_s=PATIENCE_S)

    def processes(self, word: str = "") -> list[int]:
        """Processes of the pipeline with a word on their command line, wherever they are by now."""
        return [pid for pid in started_by(self.box) if word in command_line(pid)]

    def pipeline_pid(self) -> int:
        """The process of the pipeline itself."""
        (pid,) = (pid for pid in self.processes("\0pipelines\0") if not is_keeper(pid))
        return pid

    def wait_status(self, status: str) -> Reported:
        """Return the first report from now on whose pipeline has this status."""
        seen = len(self.watcher.drain().reports)
        if seen and self.watcher.seen.reports[-1].pipeline.status == status:
            return self.watcher.seen.reports[-1]
        while True:
            assert self.watcher.take(PATIENCE_S), (status, self.watcher.seen.reports[-1:])
            for report in self.watcher.seen.reports[seen:]:
                if report.pipeline.status == status:
                    return report


def command_line(pid: int) -> str:
    """The words of a process, each ended by a zero; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def stop_process(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def is_keeper(pid: int) -> bool:
    return f"\0{keeper.MODULE}\0" in command_line(pid)


def started_by(box: AgentBox) -> list[int]:
    """What an agent has started, by its environment, which these tests' pipelines keep."""
    mark = f"TEST_RUNS={box.runs_file}".encode()
    agent = None if box.process is None else box.process.pid
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return [pid for pid in pids if pid != agent]


def start_kept(mark: str, code: str = "") -> "subprocess.Popen[bytes]":
    """Start a keeper as an agent with that mark would, with Python code that it runs."""
    code = f"import time; print(flush=True); {code or 'time.sleep(600)'}"
    process = subprocess.Popen(
        keeper.kept((sys.executable, "-c", code), mark), start_new_session=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    return process
