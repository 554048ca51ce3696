"""What a session shares with other CUDA code of the process: memory, streams and contexts.

Memory here outlives the session that took it. No function leaves another context current in the
calling thread than the one that it found.
"""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from ctypes import byref, c_void_p

from device.runtime.cuda.context import Context, Stream
from device.runtime.cuda.driver import (
    EVENT_DISABLE_TIMING,
    IPC_LAZY_PEER_ACCESS,
    POINTER_RANGE_BYTES,
    POINTER_RANGE_START,
    CudaError,
    IpcMemoryHandle,
    load_driver,
)


class CallersContext(AbstractContextManager[None]):
    """`with CallersContext():` gives the thread the context back that was current before."""

    __slots__ = ("_current",)

    def __enter__(self) -> None:
        """Remember the current context; raises CudaError."""
        self._current = current_context()

    def __exit__(self, *_: object) -> None:
        """Make it current again."""
        load_driver().call("cuCtxSetCurrent", c_void_p(self._current))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Give the thread its context back where there is a driver; without, there is none."""
    try:
        callers = CallersContext()
        callers.__enter__()
    except CudaError:
        yield
        return
    try:
        yield
    finally:
        callers.__exit__()


def current_context() -> int:
    """Return the context that is current in this thread, 0 for none; raises CudaError."""
    handle = c_void_p()
    load_driver().call("cuCtxGetCurrent", byref(handle))
    return handle.value or 0


class DeviceMemory:
    """Bytes on GPU 0, freed with the last reference: then the GPU has done all work on them."""

    __slots__ = ("__weakref__", "address", "bytes")

    def __init__(self, size: int) -> None:
        """Take `size` bytes; raises CudaError."""
        driver, address, context = load_driver(), ctypes.c_uint64(), c_void_p()
        with CallersContext():
            driver.call("cuDevicePrimaryCtxRetain", byref(context), 0)
            driver.call("cuCtxSetCurrent", context)
            driver.call("cuMemAlloc_v2", byref(address), max(size, 1))
        self.address = address.value
        self.bytes = size
        # At the end of the process the driver frees all of it.
        weakref.finalize(self, _release, "cuMemFree_v2", address, context).atexit = False


def _release(call: str, address: ctypes.c_uint64, context: c_void_p) -> None:
    driver = load_driver()
    # After a fault on the GPU every call fails; that error was raised when it was seen.
    with suppress(CudaError), CallersContext():
        driver.call("cuCtxSetCurrent", context)
        driver.call(call, address)
        driver.call("cuDevicePrimaryCtxRelease_v2", 0)


class ImportedMemory:
    """Memory on GPU 0 of another process, closed with the last reference: then the GPU has done all
    work on it."""

    __slots__ = ("__weakref__", "address", "bytes")

    def __init__(self, handle: bytes) -> None:
        """Open a handle of cuIpcGetMemHandle, which has 64 bytes; raises CudaError."""
        driver, address, context = load_driver(), ctypes.c_uint64(), c_void_p()
        with CallersContext():
            driver.call("cuDevicePrimaryCtxRetain", byref(context), 0)
            driver.call("cuCtxSetCurrent", context)
            try:
                driver.call(
                    "cuIpcOpenMemHandle_v2", byref(address),
                    IpcMemoryHandle.from_buffer_copy(handle), IPC_LAZY_PEER_ACCESS,
                )  # fmt: skip
            except CudaError:
                driver.call("cuDevicePrimaryCtxRelease_v2", 0)
                raise
            weakref.finalize(self, _release, "cuIpcCloseMemHandle", address, context).atexit = False
            start, size = ctypes.c_uint64(), ctypes.c_uint64()
            for value, attribute in ((start, POINTER_RANGE_START), (size, POINTER_RANGE_BYTES)):
                driver.call("cuPointerGetAttribute", ctypes.addressof(value), attribute, address)
        self.address = address.value
        self.bytes = start.value + size.value - address.value


class Event:
    """A point in a stream, freed by the context."""

    def __init__(self, context: Context) -> None:
        """Create an event; raises CudaError."""
        self._handle = c_void_p()
        context.call("cuEventCreate", byref(self._handle), EVENT_DISABLE_TIMING)
        context.on_close(lambda: load_driver().call("cuEventDestroy_v2", self._handle))

    def record(self, stream: Stream) -> None:
        """Move the event to the end of what is in the stream now."""
        load_driver().call("cuEventRecord", self._handle, stream.handle)

    def precede(self, stream: Stream) -> None:
        """What is enqueued in `stream` from now on runs after the event; the CPU does not wait."""
        load_driver().call("cuStreamWaitEvent", stream.handle, self._handle, 0)

    def wait(self) -> None:
        """Wait on the CPU until the GPU has reached the event."""
        load_driver().call("cuEventSynchronize", self._handle)


LEGACY, PER_THREAD = 1, 2
"""The handles of CUDA's two default streams; 0 is the first of them, too."""


def follow(first: int, then: int) -> None:
    """What is enqueued in `then` from now on runs after what is in `first`; the CPU does not wait.

    Both are handles of the driver. Raises CudaError.
    """
    if (first or LEGACY) == (then or LEGACY):
        return
    with CallersContext():
        context = Context()
        try:
            context.activate()
            event = Event(context)
            event.record(Stream(context, c_void_p(first)))
            event.precede(Stream(context, c_void_p(then)))
        finally:
            context.close()  # the driver keeps the event until both streams are past it
