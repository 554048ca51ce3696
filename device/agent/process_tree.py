"""Finds all processes that belong to a pipeline, and ends what it left behind.

Every process that the agent starts carries a mark in its environment, and so do those that they
start, in whatever session. The mark names the state folder, which one agent at a time may use: a
marked process that no running pipeline accounts for is a leftover of ours and of nobody else.
"""

import contextlib
import os
import select
import signal
import time
from pathlib import Path

OWNER = "TANDEM_OWNER"
_PROC = Path("/proc")
_KILL_WAIT_S = 5.0
_LOOK_S = 0.05


def mark_of(state_dir: Path) -> str:
    """Return the mark of an agent: its state folder, by path and by device and inode.

    The same path in another container is another folder.
    """
    path = state_dir.resolve()
    try:
        status = path.stat()
    except OSError:
        return str(path)
    return f"{status.st_dev:x}:{status.st_ino:x}:{path}"


def marked(mark: str) -> list[int]:
    """Return the process ids that carry the mark, without this process."""
    if not _PROC.is_dir():  # not Linux
        return []
    ids = (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())
    return [pid for pid in ids if pid != os.getpid() and _carries(pid, mark)]


def end_marked(mark: str, wait_s: float) -> int:
    """Wait `wait_s` for all marked processes to end by themselves, kill the others; return how
    many were killed."""
    until_s = time.monotonic() + wait_s
    while marked(mark):
        if time.monotonic() >= until_s:
            return _kill_marked(mark)
        time.sleep(_LOOK_S)
    return 0


def _kill_marked(mark: str) -> int:
    killed = 0
    until_s = time.monotonic() + _KILL_WAIT_S
    while time.monotonic() < until_s and (pids := marked(mark)):
        killed += sum(_kill(pid, mark) for pid in pids)
    return killed


def _kill(pid: int, mark: str) -> bool:
    """Kill a process, unless its number belongs to another one by now, and wait for its end."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _carries(pid, mark):
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [], 1.0)
        return True
    finally:
        os.close(handle)


def _carries(pid: int, mark: str) -> bool:
    try:
        environment = Path(_PROC, str(pid), "environ").read_bytes()
    except OSError:  # it has ended, or it is another user's
        return False
    return f"{OWNER}={mark}".encode() in environment.split(b"\0")
