"""All that a process has started, by the parents that the kernel knows, and its end.

A child of another session, with an empty environment, is still a descendant. One whose parent has
ended is given to the next process above that keeps orphans (`device.start.keeper`).
"""

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
# Of /proc/PID/stat, counted from the state, which follows the name in brackets.
_STATE, _PARENT, _USER_TICKS, _SYSTEM_TICKS, _STARTED = 0, 1, 11, 12, 19
_DEAD = "ZX"


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A process: `state` is a letter of /proc/PID/stat; ticks are of the system's clock."""

    pid: int
    state: str
    parent: int
    cpu_ticks: int
    started_ticks: int


def process_rows() -> dict[int, ProcessRow]:
    """Return all processes by id; none where the system is not Linux."""
    rows = {}
    with contextlib.suppress(OSError):
        for entry in _PROC.iterdir():
            if entry.name.isdecimal() and (row := _row(int(entry.name))) is not None:
                rows[row.pid] = row
    return rows


def descendants(pid: int) -> list[ProcessRow]:
    """Return all living processes below one, each after its parent, the oldest child first."""
    children: dict[int, list[ProcessRow]] = {}
    for row in process_rows().values():
        if row.state not in _DEAD:
            children.setdefault(row.parent, []).append(row)
    family: list[ProcessRow] = []
    parents = [pid]
    for parent in parents:
        below = sorted(children.get(parent, ()), key=lambda row: (row.started_ticks, row.pid))
        family += below
        parents += [row.pid for row in below]
    return family


def kill_below(pid: int, wait_s: float) -> int:
    """Kill all that is below a process, for `wait_s` at most, until nothing is; return how many."""
    killed = 0
    until_s = time.monotonic() + wait_s
    while (rows := descendants(pid)) and time.monotonic() < until_s:
        for row in rows:  # they start nothing more
            _send(row, signal.SIGSTOP)
        killed += sum(_send(row, signal.SIGKILL) for row in rows)
        time.sleep(0.01)
    return killed


def _send(row: ProcessRow, number: signal.Signals) -> bool:
    """Send a signal, unless the process has ended and its id is another one's by now."""
    try:
        handle = os.pidfd_open(row.pid)
    except OSError:
        return False
    try:
        now = _row(row.pid)
        if now is None or now.started_ticks != row.started_ticks:
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(handle, number)
        if number == signal.SIGKILL:
            select.select([handle], [], [], 0.2)
        return True
    finally:
        os.close(handle)


def _row(pid: int) -> ProcessRow | None:
    try:
        # A name may hold brackets and blanks: what follows the last one is numbers.
        words = Path(_PROC, str(pid), "stat").read_bytes().rpartition(b")")[2].split()
        ticks = int(words[_USER_TICKS]) + int(words[_SYSTEM_TICKS])
        state, parent = words[_STATE].decode(), int(words[_PARENT])
        return ProcessRow(pid, state, parent, ticks, int(words[_STARTED]))
    except (OSError, ValueError, IndexError):  # it has ended
        return None
