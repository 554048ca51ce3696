"""Parts of the fleet tests: a folder, the real server as a process, light devices' reports."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from device.protocol.documents import (
    BlobSpec,
    DeviceFacts,
    Measured,
    Phase,
    PipelineReport,
    ReleaseSpec,
    Reported,
    Running,
    StateDocument,
    Update,
)
from toolkit.fleet.store.devices import DeviceRow

LONG_S = 60.0
PROFILE = "test-board"


def release(letter: str, profile: str = PROFILE) -> ReleaseSpec:
    """A release whose hash is a letter."""
    blob = BlobSpec(sha256=letter * 64, bytes=100, chunk_bytes=65536, index_sha256="0" * 64)
    return ReleaseSpec(name=f"app-{letter}", version="1", profile=profile, blob=blob)


def report(
    running: str = "",
    phase: Phase = "idle",
    request: str = "",
    *,
    measured: Measured | None = None,
    facts: DeviceFacts | None = None,
    reason: str = "",
    profile: str = PROFILE,
    beat_s: float = 0.0,
    counter: int = 0,
) -> Reported:
    """What a device reports that runs the release of a letter."""
    return Reported(
        agent="1", profile=profile, dev=True, warning="", session=1,
        running=Running(slot="a", sha256=running * 64, name=f"app-{running}", version="1")
        if running
        else None,
        pipeline=PipelineReport(status="running"),
        update=Update(phase=phase, request=request, reason=reason),
        facts=facts or DeviceFacts(), measured=measured, beat_s=beat_s, counter=counter,
    )  # fmt: skip


def device_row(device: str, reported: Reported | None = None) -> DeviceRow:
    """A device as the server keeps it."""
    state = StateDocument(state="online", session=1)
    return DeviceRow(device, 0.0, state, reported or report(), {})


def write_fleet(folder: Path, port: int, store: str = "sqlite:///fleet.db") -> Path:
    """Write fleet.toml and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fleet.toml").write_text(
        f'name = "test"\nstore = "{store}"\n[broker]\nhost = "127.0.0.1"\nport = {port}\n'
        "tls = false\n"
    )
    return folder


class ServerProcess:
    """`tandem fleet serve` as a process that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_file = folder / "server.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self.process is None
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "toolkit.cli", "-v", "fleet", "serve", "--fleet",
                 str(self.folder)],
                stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        status = self.process.wait(LONG_S)
        self.process = None
        return status

    def log(self) -> str:
        return self.log_file.read_text()


def wait_until(
    condition: Callable[[], bool], what: Callable[[], object], for_s: float = LONG_S
) -> None:
    """Wait for a condition; `what` says what was seen instead."""
    until_s = time.monotonic() + for_s
    while not condition():
        assert time.monotonic() < until_s, what()
        time.sleep(0.05)
