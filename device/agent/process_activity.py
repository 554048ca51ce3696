"""What the processes of a pipeline do, by /proc: whether one that is silent works, waits or stands.

Only Linux says so; elsewhere nothing is known, and silence alone decides.
"""

from dataclasses import dataclass
from pathlib import Path

from device.start.process_tree import descendants

_PROC = Path("/proc")
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


def activity_of(keeper: int) -> Activity | None:
    """Return what all below a keeper have done, the first of them being the pipeline; None: nothing
    is known."""
    rows = descendants(keeper)
    if not rows:
        return None
    return Activity(
        state=rows[0].state,
        cpu_ticks=sum(row.cpu_ticks for row in rows),
        io_bytes=sum(_io_bytes(row.pid) for row in rows),
        waited_ns=_waited_ns(rows[0].pid),
    )


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
