"""A double of the parts of pycuda that examples use, over the driver of tests/cuda_double.py."""

import sys
from types import ModuleType

import numpy as np
import pytest

from device.runtime.cuda.context import Context


class _Memory:
    def __init__(self, context: Context, size: int) -> None:
        self._address = context.allocate(size)

    def __int__(self) -> int:
        return self._address


class _Stream:
    def __init__(self, context: Context) -> None:
        self.stream = context.stream()
        self.handle = self.stream.handle.value
        self.synchronize = self.stream.wait


def install(patch: pytest.MonkeyPatch) -> Context:
    """Let `import pycuda` find the double; close the context at the end."""
    context = Context()
    package, driver = ModuleType("pycuda"), ModuleType("pycuda.driver")
    package.__path__ = []
    driver.Stream = lambda: _Stream(context)
    driver.mem_alloc = lambda size: _Memory(context, size)
    driver.pagelocked_empty = np.empty
    driver.memcpy_htod_async = lambda memory, array, stream: stream.stream.upload(
        int(memory), array.reshape(-1).view(np.uint8)
    )
    driver.memcpy_dtoh_async = lambda array, memory, stream: stream.stream.download(
        array.reshape(-1).view(np.uint8), int(memory)
    )
    package.driver = driver
    patch.setitem(sys.modules, "pycuda", package)
    patch.setitem(sys.modules, "pycuda.driver", driver)
    patch.setitem(sys.modules, "pycuda.autoprimaryctx", ModuleType("pycuda.autoprimaryctx"))
    return context
