"""Holds a pipeline to its memory limit by looking at what its processes have in memory.

A limit of the address space would break CUDA, which reserves far more than it uses. Pages of files
(engines are mapped) are not counted: the kernel takes them back when it needs them. Where systemd
gives the service a limit (`MemoryMax=`), the kernel holds it too, and ends the pipeline before the
agent (`device.start.child`).
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from device.start.process_tree import descendants

LOOK_S = 0.25
SEARCH_EVERY = 4  # looks: all processes of the machine are read to find those below one
DEFAULT_SHARE = 0.75  # of the machine's memory
_CGROUPS = Path("/sys/fs/cgroup")
_COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:")


def default_limit_bytes() -> int:
    """Return the limit of a board that declares none: a share of what the machine, or the control
    group of the agent, has."""
    machine = _kib_of(Path("/proc/meminfo"), ("MemTotal:",)) * 1024
    try:
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        groups = ""
    return int(min((machine, *group_limits(groups, _CGROUPS))) * DEFAULT_SHARE)


def available_bytes() -> int:
    """Return the memory that another process can take now, without others giving theirs back."""
    free = _kib_of(Path("/proc/meminfo"), ("MemAvailable:",)) * 1024
    return min(free, default_limit_bytes()) if free else default_limit_bytes()


def group_limits(groups: str, mount: Path) -> list[int]:
    """Return the memory limits of the control groups in /proc/self/cgroup, and of those above.

    `mount`: where control groups are mounted. Version 2 has one tree, version 1 one for memory.
    """
    limits: list[int] = []
    for line in groups.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            with contextlib.suppress(OSError):
                text = (group / name).read_text().strip()
                limits += [int(text)] if text.isdecimal() else []  # "max": no limit
            if group == root:
                break
    return limits


def used_bytes(pids: list[int]) -> int:
    """Return the memory of processes that only they can give back; ended ones have none."""
    return sum(_kib_of(Path("/proc", str(pid), "status"), _COUNTED) for pid in pids) * 1024


def oom_kills() -> int:
    """Return how many processes the kernel has ended for want of memory since it started."""
    try:
        words = Path("/proc/vmstat").read_text().split()
    except OSError:
        return 0
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def watch_memory(
    pid: int,
    limit_bytes: int,
    ended: threading.Event,
    breach: Callable[[int], None],
) -> None:
    """Call `breach` with the bytes in use of a process and all that it has started when they exceed
    the limit; return then or at `ended`."""
    pids = [pid]
    looks = 0
    while limit_bytes > 0 and not ended.wait(LOOK_S):
        if looks % SEARCH_EVERY == 0:
            pids = [pid, *(row.pid for row in descendants(pid))]
        looks += 1
        used = used_bytes(pids)
        if used > limit_bytes:
            breach(used)
            return


def _kib_of(path: Path, keys: tuple[str, ...]) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(keys))
