"""What the processes of a pipeline do, by /proc: whether one that is silent works, waits or stands.

Only Linux says so; elsewhere nothing is known, and silence alone decides.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
# Of /proc/PID/stat, counted from the state, which follows the name in brackets.
_STATE, _PARENT, _SESSION, _USER_TICKS, _SYSTEM_TICKS = 0, 1, 3, 11, 12
_MOVED = ("rchar:", "wchar:", "read_bytes:", "write_bytes:")


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process and those that it started have done by now.

    `state`: of its main thread, a letter of /proc/PID/stat. `cpu_ticks`, `io_bytes`: of all of
    them. `waited_ns`: so long its main thread was ready and had no processor.
    """

    state: str
    cpu_ticks: int
    io_bytes: int
    waited_ns: int


@dataclass(frozen=True, slots=True)
class _Row:
    state: str
    parent: int
    session: int
    cpu_ticks: int


def activity_of(leader: int) -> Activity | None:
    """Return what a process, its session and its descendants have done; None: nothing is known."""
    rows = _rows()
    if leader not in rows:
        return None
    members = _members(rows, leader)
    return Activity(
        state=rows[leader].state,
        cpu_ticks=sum(rows[pid].cpu_ticks for pid in members),
        io_bytes=sum(_io_bytes(pid) for pid in members),
        waited_ns=_waited_ns(leader),
    )


def _members(rows: dict[int, _Row], leader: int) -> set[int]:
    members = {pid for pid, row in rows.items() if leader in (pid, row.session)}
    while more := {pid for pid, row in rows.items() if row.parent in members} - members:
        members |= more
    return members


def _rows() -> dict[int, _Row]:
    rows = {}
    with contextlib.suppress(OSError):
        for entry in _PROC.iterdir():
            if entry.name.isdecimal() and (row := _row(entry)) is not None:
                rows[int(entry.name)] = row
    return rows


def _row(entry: Path) -> _Row | None:
    try:
        # A name may hold brackets and blanks: what follows the last one is numbers.
        words = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        ticks = int(words[_USER_TICKS]) + int(words[_SYSTEM_TICKS])
        return _Row(words[_STATE].decode(), int(words[_PARENT]), int(words[_SESSION]), ticks)
    except (OSError, ValueError, IndexError):  # it has ended
        return None


def _io_bytes(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(_MOVED))
    except (OSError, ValueError, IndexError):
        return 0


def _waited_ns(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # a kernel without it
        return 0
