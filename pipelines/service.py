"""A release of kind "service", as the agent runs it: a program of its payload, which knows nothing
of Tandem, held to its limits and asked for its health.

Each health check that succeeds counts as a frame. While the program loads, the service is starting;
a program that ends, that fails its checks or that holds too much memory ends the process with the
reason, and the agent starts it again. What the program has started and left behind is ended by the
agent's keeper (`device.start.keeper`).
"""

import http.client
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import UNSET

from device.errors import PipelineError
from device.files import sha256_of
from device.protocol.messages import ChildMessage, Heartbeat, Ready, Result
from device.start.child import guarded
from device.start.memory_watch import watch_memory
from device.start.process_tree import kill_below
from device.update.bundle import INFO, PIPELINE
from device.update.members import PAYLOAD
from pipelines.config import PipelineConfig
from pipelines.runtime.heartbeat import HEARTBEAT_S, SLACK_S
from pipelines.service_config import ServiceConfig

END_S = 10.0  # a program has so long to end, then it is killed; an agent may be less patient
ENDING_S = 3.0 * END_S  # it may say nothing for so long while the program ends
LOADING_CHECK_S = 0.5  # between checks before the first success, at most
OWN_VARIABLES = "TANDEM_"  # of our process, such as the login of the broker: not the program's


def run_service(
    config: PipelineConfig,
    folder: Path,
    emit: Callable[[ChildMessage], None],
    stop: threading.Event,
) -> None:
    """Run the program of an unpacked bundle until `stop` is set.

    Raises PipelineError: it cannot be started, has ended, fails its health checks, or holds more
    memory than it may.
    """
    service = config.service
    assert service is not UNSET
    payload = folder / PAYLOAD
    _check_port(service, config.name)
    described = folder / INFO
    identity = sha256_of(described if described.exists() else folder / PIPELINE)
    with _program(service, payload, config.name) as process, _checks(service, payload) as checks:
        began_s = time.monotonic()
        excess_bytes = _hold_memory(service, process)
        ready = False
        while not stop.is_set():
            _beat(checks, emit)
            if checks.passed and not ready:
                took_s = time.monotonic() - began_s
                emit(Ready(pipeline=config.name, engine_sha256=identity))
                emit(Result(seq=0, latency_ms=took_s * 1e3))
                ready = True
            fault = _fault(service, process, checks, excess_bytes, time.monotonic() - began_s)
            if fault is not None:
                # Silence while the program ends is no stall.
                emit(checks.heartbeat(quiet_s=ENDING_S))
                raise PipelineError(f"service {config.name!r} {fault}")
            stop.wait(HEARTBEAT_S / 2)
        emit(checks.heartbeat(quiet_s=ENDING_S))


def _fault(
    service: ServiceConfig,
    process: "subprocess.Popen[bytes]",
    checks: "_Checks",
    excess_bytes: list[int],
    age_s: float,
) -> str | None:
    """Return why a service cannot go on, None if it can."""
    if excess_bytes:
        return (
            f"held {excess_bytes[0] >> 20} MiB of memory and may hold {service.memory_mb} MiB"
            " (memory_mb in [service]): it was ended"
        )
    status = process.poll()
    if status is not None:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{how}, its program {service.command[0]!r} has to go on; its output says why"
    if not checks.passed and age_s > service.start_s:
        return (
            f"was not healthy within {service.start_s:g} s (start_s in [service]):"
            f" {checks.problem or 'no check has ended'}"
        )
    if checks.passed and checks.failed_in_a_row >= service.failures:
        return (
            f"failed {checks.failed_in_a_row} health checks in a row (failures in [service]):"
            f" {checks.problem}"
        )
    return None


@dataclass
class _Checks:
    """Health checks in a thread of their own: one that hangs holds no heartbeat up."""

    service: ServiceConfig
    payload: Path
    passed: int = 0
    failed: int = 0  # since the first success
    failed_in_a_row: int = 0
    problem: str = ""
    due_s: float = 0.0  # of the next heartbeat
    since_s: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Check until the end."""
        while not self.ended.is_set():
            problem = problem_of(self.service, self.payload)
            if problem is None:
                self.failed_in_a_row = 0
                self.passed += 1
            else:
                self.problem = problem
                self.failed_in_a_row += 1
                self.failed += self.passed > 0
            interval_s = self.service.interval_s
            self.ended.wait(interval_s if self.passed else min(interval_s, LOADING_CHECK_S))

    def heartbeat(self, quiet_s: float = 0.0) -> Heartbeat:
        """Return what is known by now."""
        service = self.service
        gap_s = service.interval_s + service.timeout_s if self.passed else service.start_s
        return Heartbeat(
            frames=self.passed, errors=self.failed, since_s=self.since_s, quiet_s=quiet_s,
            state="running" if self.passed else "starting", gap_s=gap_s + SLACK_S,
        )  # fmt: skip


def _beat(checks: _Checks, emit: Callable[[ChildMessage], None]) -> None:
    now_s = time.monotonic()
    if now_s >= checks.due_s:
        checks.due_s = now_s + HEARTBEAT_S
        emit(checks.heartbeat())


@contextmanager
def _checks(service: ServiceConfig, payload: Path) -> Iterator[_Checks]:
    checks = _Checks(service, payload)
    threading.Thread(target=checks.run, name="health", daemon=True).start()
    try:
        yield checks
    finally:
        checks.ended.set()


def problem_of(service: ServiceConfig, payload: Path) -> str | None:
    """Ask a service for its health; return what is wrong, None if nothing."""
    if service.health_url:
        return _problem_at(service.health_url, service.timeout_s)
    command = _command(service.health_command, payload)
    try:
        process = subprocess.Popen(
            command, cwd=payload, env=_environment(service), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        status = process.wait(service.timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it waits for; it is not reaped yet
        process.wait()
        return f"{service.health_command[0]!r} took longer than {service.timeout_s:g} s (timeout_s)"
    except OSError as error:
        return f"{service.health_command[0]!r} cannot be started: {error.strerror}"
    return None if status == 0 else f"{service.health_command[0]!r} ended with status {status}"


def _problem_at(url: str, timeout_s: float) -> str | None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port, timeout=timeout_s
    )  # no proxy: it is this machine
    try:
        connection.request("GET", f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"{url} gives no answer ({error or type(error).__name__})"
    finally:
        connection.close()
    return None if status == http.HTTPStatus.OK else f"{url} answers {status}"


def _check_port(service: ServiceConfig, name: str) -> None:
    """Raise PipelineError if another process answers at the service's port: its health would be
    taken for that of the service."""
    if not service.health_url:
        return
    parts = urlsplit(service.health_url)
    place = parts.hostname, parts.port or 0  # a checked URL has a port
    with suppress(OSError), socket.create_connection(place, 1.0):
        raise PipelineError(
            f"service {name!r} cannot be started: another process listens on port {parts.port}"
            " (health_url in [service]): end that, or choose another port"
        )


@contextmanager
def _program(
    service: ServiceConfig, payload: Path, name: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the program; at the end ask it to end, then kill it with what it has started."""
    command = _command(service.command, payload)
    if not os.access(command[0], os.X_OK):
        raise PipelineError(
            f"service {name!r} cannot be started: {service.command[0]!r} is no program of"
            f" {'this board' if service.command[0].startswith('/') else 'the payload'}"
        )
    with _cores(service):
        process = subprocess.Popen(
            guarded(command), cwd=payload, env=_environment(service), stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            kill_below(process.pid, END_S)
            process.kill()
            process.wait()


def _command(words: tuple[str, ...], payload: Path) -> tuple[str, ...]:
    """Return a command line whose program is named from the root."""
    return (str(payload / words[0]), *words[1:])


def _environment(service: ServiceConfig) -> dict[str, str]:
    ours = {k: value for k, value in os.environ.items() if not k.startswith(OWN_VARIABLES)}
    return {**ours, **service.env}


@contextmanager
def _cores(service: ServiceConfig) -> Iterator[None]:
    """Let this thread, and what it starts meanwhile, run on the last cores only: the first ones
    take most interrupts."""
    if service.cpus is UNSET:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[-service.cpus :])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _hold_memory(service: ServiceConfig, process: "subprocess.Popen[bytes]") -> list[int]:
    """Watch the memory of the program and what it has started; the bytes that were too many are
    put into the list."""
    excess_bytes: list[int] = []
    if service.memory_mb is not UNSET:
        limits = (process.pid, service.memory_mb * 2**20, threading.Event(), excess_bytes.append)
        threading.Thread(target=watch_memory, args=limits, name="memory", daemon=True).start()
    return excess_bytes
