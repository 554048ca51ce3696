"""Shared memory of a client, mapped into this process, where libtandem (docs/cpp.md) can copy it.

A client may shrink its object at any moment: whoever reads or writes a page that has gone is ended
by SIGBUS. The library's copy is not.
"""

import ctypes
import logging
import mmap
from ctypes import c_char, c_size_t, c_void_p
from functools import lru_cache
from typing import Any

from device.closing import Closing
from pipelines.stages.native import LIBRARY

MAPPED_AFTER = 16  # uses: to touch new pages costs what a dozen later copies save

_log = logging.getLogger(__name__)


class MappedMemory(Closing):
    """`size` bytes of the object `fd` from `offset` on."""

    def __init__(self, copy: Any, fd: int, offset: int, size: int) -> None:  # noqa: ANN401
        """Raises OSError, ValueError or OverflowError: it cannot be mapped."""
        before = offset % mmap.ALLOCATIONGRANULARITY
        self._copy = copy
        self._mapping = mmap.mmap(fd, before + size, offset=offset - before)
        self._address = address_of(memoryview(self._mapping)) + before

    def read(self, offset: int, data: memoryview) -> bool:
        """Fill memory from `offset` on; False if a page of that has gone."""
        return not self._copy(address_of(data), self._address + offset, data.nbytes)

    def write(self, offset: int, data: memoryview) -> bool:
        """Write what is no constant from `offset` on; False if a page of that cannot be had."""
        return not self._copy(self._address + offset, address_of(data), data.nbytes)

    def close(self) -> None:
        """Take the mapping away."""
        self._mapping.close()


class LateMapping(Closing):
    """Maps `size` bytes of the object `fd` from `offset` on, once they are used often.

    For one thread: it is not closed while a copy runs.
    """

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self._place = fd, offset, size
        self._uses = 0
        self._memory: MappedMemory | None = None

    def get(self) -> MappedMemory | None:
        """Count a use. Return the memory; None: it is not mapped, or cannot be."""
        if self._uses <= MAPPED_AFTER:
            self._uses += 1
            if self._uses > MAPPED_AFTER:
                self._memory = _map_memory(*self._place)
        return self._memory

    def close(self) -> None:
        """Take the mapping away; there will be no other."""
        memory, self._memory, self._uses = self._memory, None, MAPPED_AFTER + 1
        if memory is not None:
            memory.close()


def _map_memory(fd: int, offset: int, size: int) -> MappedMemory | None:
    copy = _native_copy()
    if copy is None or size == 0:
        return None
    try:
        return MappedMemory(copy, fd, offset, size)
    except (OSError, ValueError, OverflowError) as error:
        _log.info("shared memory is not mapped: %s", error)
        return None


@lru_cache(maxsize=1)
def _native_copy() -> Any:  # noqa: ANN401
    """Return `tandem_memory_copy`; None where the library is not installed, or too old."""
    try:
        copy = ctypes.CDLL(LIBRARY).tandem_memory_copy
    except (OSError, AttributeError) as error:
        _log.info("shared memory is copied by the kernel: %s", error)
        return None
    copy.argtypes = (c_void_p, c_void_p, c_size_t)
    return copy


def address_of(data: memoryview) -> int:
    """Return where memory is that may be written; numpy takes eight times as long to tell."""
    return ctypes.addressof(c_char.from_buffer(data))
