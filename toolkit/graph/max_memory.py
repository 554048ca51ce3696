"""How much memory this process may take for one model.

The limit belongs to the process, as its address space does: `--max-memory` of the commands sets
it, and what allocates for a model, or starts a child that does, asks for it. It is known without
onnx, for commands that run on boards.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import ImportModelError

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
GIB = 1 << 30
MAX_STATED_BYTES = 1 << 70

_chosen: list[int] = []


def max_memory_bytes() -> int:
    """Return the limit: what was set last, else half of the machine's memory or the cgroup's."""
    return _chosen[-1] if _chosen else machine_bytes() // 2


def set_max_memory(limit_bytes: int | None) -> None:
    """Set the limit of this process; None: the default again."""
    _chosen[:] = [] if limit_bytes is None else [limit_bytes]


@contextmanager
def limited_memory(limit_bytes: int | None) -> Iterator[None]:
    """Hold a limit inside the block; None: the one that holds already.

    Raises ImportModelError: the limit is not above 0.
    """
    if limit_bytes is not None and limit_bytes <= 0:
        raise ImportModelError(f"max_memory_bytes is {limit_bytes}; give a number above 0")
    before = [*_chosen]
    if limit_bytes is not None:
        set_max_memory(limit_bytes)
    try:
        yield
    finally:
        _chosen[:] = before


def machine_bytes() -> int:
    """Return the memory of the machine, or of the cgroup of this process where that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no cgroup, or "max"
        return machine


def address_space_bytes() -> int:
    """Return what RLIMIT_AS counts of this process."""
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()


@contextmanager
def bounded_growth() -> Iterator[None]:
    """Let this process grow by the limit inside the block, and no more: for native code.

    What it asks for beyond that it does not get, which it says; the kernel would end the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = address_space_bytes() + max_memory_bytes()
    unlimited = resource.RLIM_INFINITY
    limits = [size for size in (limit, soft, hard) if size != unlimited]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def size_text(size_bytes: int) -> str:
    """Return a size as people read it: 3.2 GiB."""
    if size_bytes > MAX_STATED_BYTES:  # sizes that a model multiplies; no float holds all of them
        return f"more than {size_text(MAX_STATED_BYTES)}"
    for unit, bytes_per_unit in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", 1 << 20)):
        if size_bytes >= bytes_per_unit:
            return f"{size_bytes / bytes_per_unit:.1f} {unit}"
    return f"{size_bytes} bytes"
