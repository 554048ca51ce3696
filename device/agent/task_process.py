"""A child of the agent that does one command, and answers with one JSON object."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from device.start.child_process import ChildExit, ChildLimits, ChildProcess


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
    memory_bytes: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Callable[[], None]:
    """Start a child; return what ends it. Start it from the main thread (`device.start.guard`).

    `put` takes its end, from another thread. `memory_bytes` 0: it may hold anything.
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

    limits = ChildLimits(
        seconds=limit_s, too_long=f"it took longer than {limit_s:g} s", memory_bytes=memory_bytes,
        too_much=lambda used: f"it held {used >> 20} MiB and may hold {memory_bytes >> 20} MiB",
    )  # fmt: skip
    try:
        return ChildProcess(command, on_line, on_exit, limits=limits, environment=environment).end
    except OSError as error:
        put(TaskEnded(command_id, None, str(error.strerror)))
        return lambda: None
