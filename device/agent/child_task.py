"""A child that prints one JSON object: its end arrives as an event."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from device.agent.child_process import ChildExit, ChildLimits, ChildProcess


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
    output = bytearray()

    def on_line(line: bytes) -> None:
        if len(output) <= max_bytes:
            output.extend(line)

    def on_exit(exit_: ChildExit) -> None:
        if exit_.cause:
            put(TaskEnded(command_id, None, exit_.cause))
            return
        if len(output) > max_bytes:
            put(TaskEnded(command_id, None, f"its result has more than {max_bytes} bytes"))
            return
        try:
            result = msgspec.json.decode(output, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            put(TaskEnded(command_id, None, exit_.reason))
        else:
            put(TaskEnded(command_id, result))

    limits = ChildLimits(seconds=limit_s, too_long=f"it took longer than {limit_s:g} s")
    try:
        return ChildProcess(command, on_line, on_exit, limits=limits).end
    except OSError as error:
        put(TaskEnded(command_id, None, str(error.strerror)))
        return lambda: None
