"""A child that prints one JSON object: its end arrives as an event."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from device.start.child import guarded


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """The child of a command has ended. `result` None: without one, `problem` says how."""

    id: str
    result: dict[str, Any] | None
    problem: str = ""


def start_task(
    command_id: str,
    command: tuple[str, ...],
    put: Callable[[TaskEnded], None],
    *,
    limit_s: float,
    max_bytes: int,
) -> Callable[[], None]:
    """Start a child; return what ends it. Start it from the main thread (`device.start.guard`).

    `put` takes its end, from another thread.
    """
    try:
        child = subprocess.Popen(
            guarded(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        put(TaskEnded(command_id, None, f"no process can be started: {error.strerror}"))
        return lambda: None

    def end() -> None:
        if child.returncode is not None:
            return  # its number may be another process's by now
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(child.pid, signal.SIGKILL)

    def wait() -> None:
        try:
            stdout, stderr = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            end()
            child.wait()
            put(TaskEnded(command_id, None, f"it took longer than {limit_s:g} s"))
            return
        put(_ended(command_id, stdout, stderr, child.returncode, max_bytes))

    try:
        threading.Thread(target=wait, daemon=True).start()
    except RuntimeError as error:  # the limit of tasks is reached: nobody would see it end
        end()
        put(TaskEnded(command_id, None, f"no thread can be started: {error}"))
    return end


def _ended(command_id: str, stdout: bytes, stderr: bytes, status: int, most: int) -> TaskEnded:
    if len(stdout) > most:
        problem = f"its result has {len(stdout)} bytes, {most} are the most"
        return TaskEnded(command_id, None, problem)
    try:
        return TaskEnded(command_id, msgspec.json.decode(stdout, type=dict[str, Any]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        last = stderr.decode(errors="replace").strip().splitlines()[-1:]
        return TaskEnded(command_id, None, (*last, f"exit status {status}")[0])
