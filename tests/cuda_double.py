"""A double of `device.runtime.cuda.context.Context` whose memory is the CPU's.

It stands for the driver where there is none: addresses are real, copies are memmove, and a stream
does at once what is enqueued.
"""

import ctypes
from collections.abc import Callable

import numpy as np


class HostStream:
    handle = ctypes.c_void_p(0)

    def upload(self, address: int, data: np.ndarray) -> None:
        assert data.flags.c_contiguous
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def download(self, data: np.ndarray, address: int) -> None:
        assert data.flags.c_contiguous
        ctypes.memmove(data.ctypes.data, address, data.nbytes)

    def wait(self) -> None:
        pass


class HostContext:
    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._closers: list[Callable[[], None]] = []

    def activate(self) -> None:
        pass

    def stream(self) -> HostStream:
        return HostStream()

    def allocate(self, size: int) -> int:
        self._blocks.append(np.full(size, 0xA5, np.uint8))
        return int(self._blocks[-1].ctypes.data)

    def allocate_host(self, size: int) -> np.ndarray:
        return np.full(size, 0x5A, np.uint8)

    def close(self) -> None:
        self._blocks.clear()
