"""A GPU's context, memory, kernels, streams and graphs, each a small object over the driver.

The primary context is used, which other CUDA libraries of the process share. Every method may be
called from any thread: it makes the context current first. The resources of an object are freed by
`close`, in any order. One object is used by one thread at a time; each session has its own.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref, c_float, c_void_p, pointer
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from device.runtime.cuda.driver import (
    CAPTURE_RELAXED,
    HOST_ALLOC_MAPPED,
    MAX_DYNAMIC_SHARED_BYTES,
    PROGRAMMATIC_STREAM_SERIALIZATION,
    STREAM_NON_BLOCKING,
    CudaError,
    LaunchAttribute,
    LaunchConfig,
    load_driver,
)
from device.runtime.cuda.facts import GpuFacts, read_gpu

Bytes = npt.NDArray[np.uint8]
Parameter = ctypes.c_uint64 | ctypes.c_int32
_DEFAULT_SHARED_BYTES = 48 * 1024  # a block may use so much without an attribute


class Context:
    """The primary context of a GPU, with all that was created in it."""

    def __init__(self, index: int = 0) -> None:
        """Retain the context; raises CudaError without driver or GPU."""
        self._driver = load_driver()
        self._index = index
        handle = c_void_p()
        self._driver.call("cuDevicePrimaryCtxRetain", byref(handle), index)
        self._handle = handle
        self._closers: list[Callable[[], None]] = []

    @property
    def handle(self) -> int:
        """The driver's handle of the context."""
        return self._handle.value or 0

    @property
    def facts(self) -> GpuFacts:
        """The properties of this GPU."""
        return read_gpu(self._index)

    def activate(self) -> None:
        """Make the context current in the calling thread."""
        self._driver.call("cuCtxSetCurrent", self._handle)

    def call(self, name: str, *arguments: object) -> None:
        """Call the driver in this context."""
        self.activate()
        self._driver.call(name, *arguments)

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes on the GPU."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", byref(address), max(size, 1))
        self._closers.append(lambda: self._driver.call("cuMemFree_v2", address))
        return address.value

    def allocate_host(self, size: int, *, mapped: bool = False) -> Bytes:
        """Return `size` bytes of page-locked CPU memory.

        They stay valid as long as an array refers to them, also after `close`. `mapped`: kernels
        may use them, at their `mapped_address`.
        """
        pointer, context = c_void_p(), c_void_p()
        flags = HOST_ALLOC_MAPPED if mapped else 0
        self.call("cuMemHostAlloc", byref(pointer), max(size, 1), flags)
        self._driver.call("cuDevicePrimaryCtxRetain", byref(context), self._index)
        assert pointer.value is not None
        memory = (ctypes.c_ubyte * size).from_address(pointer.value)
        # At the end of the process the system frees all of it.
        weakref.finalize(memory, _free_host, pointer, context, self._index).atexit = False
        return np.ctypeslib.as_array(memory)

    def mapped_address(self, memory: Bytes) -> int:
        """Return the address on the GPU of mapped CPU memory."""
        address = ctypes.c_uint64()
        self.call("cuMemHostGetDevicePointer_v2", byref(address), memory.ctypes.data, 0)
        return address.value

    def upload(self, address: int, data: Bytes) -> None:
        """Copy bytes to the GPU and wait for it."""
        if data.nbytes:
            self.call("cuMemcpyHtoD_v2", address, data.ctypes.data, data.nbytes)

    def fill(self, address: int, value: int, size: int) -> None:
        """Set `size` bytes to one value and wait for it: other streams do not."""
        if size:
            self.call("cuMemsetD8_v2", address, value, size)
            self._driver.call("cuStreamSynchronize", None)

    def load(self, cubin: Bytes) -> c_void_p:
        """Load a cubin; returns its module."""
        module = c_void_p()
        image = np.ascontiguousarray(cubin)
        self.call("cuModuleLoadData", byref(module), image.ctypes.data)
        self._closers.append(lambda: self._driver.call("cuModuleUnload", module))
        return module

    def function(self, module: c_void_p, name: str, shared_bytes: int) -> c_void_p:
        """Return a kernel of a module, allowed to take this much shared memory."""
        function = c_void_p()
        self.call("cuModuleGetFunction", byref(function), module, name.encode())
        if shared_bytes > _DEFAULT_SHARED_BYTES:
            self._driver.call(
                "cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes
            )
        return function

    def stream(self) -> "Stream":
        """Return a new stream."""
        handle = c_void_p()
        self.call("cuStreamCreate", byref(handle), STREAM_NON_BLOCKING)
        self._closers.append(lambda: self._driver.call("cuStreamDestroy_v2", handle))
        return Stream(self, handle)

    def on_close(self, closer: Callable[[], None]) -> None:
        """Call `closer` in `close`, before all that was created earlier is freed."""
        self._closers.append(closer)

    def close_now(self, closer: Callable[[], None]) -> None:
        """Call a closer of `on_close` now instead of in `close`."""
        self._closers.remove(closer)
        self.activate()
        closer()

    def close(self) -> None:
        """Free everything, the newest first; raises the first CudaError after that.

        After a fault on the GPU every call fails; shared values are released all the same.
        """
        if not self._handle:
            return
        closers = [self._release, *self._closers, self.activate]
        self._closers.clear()
        first: CudaError | None = None
        while closers:
            try:
                closers.pop()()
            except CudaError as error:
                first = first or error
        if first is not None:
            raise first

    def _release(self) -> None:
        self._handle = c_void_p()
        self._driver.call("cuDevicePrimaryCtxRelease_v2", self._index)


def _free_host(pointer: c_void_p, context: c_void_p, index: int) -> None:
    driver, callers = load_driver(), c_void_p()
    driver.call("cuCtxGetCurrent", byref(callers))  # garbage collection runs in any thread
    driver.call("cuCtxSetCurrent", context)
    driver.call("cuMemFreeHost", pointer)
    driver.call("cuDevicePrimaryCtxRelease_v2", index)
    driver.call("cuCtxSetCurrent", callers)


class Stream:
    """A stream of a GPU: what is enqueued runs in order."""

    def __init__(self, context: Context, handle: c_void_p) -> None:
        """Take a stream of the driver; use `Context.stream`."""
        self._context = context
        driver = load_driver()
        self._call = driver.call
        self._starts_early = driver.starts_early
        self.handle = handle

    def launch(
        self,
        function: c_void_p,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        parameters: Sequence[Parameter],
        *,
        early: bool = False,
    ) -> None:
        """Enqueue a kernel; the driver copies the parameters before this returns.

        `early`: its blocks may start before the preceding kernel in the stream has ended, because
        they wait for it themselves (programmatic dependent launch). Ignored by older drivers.
        """
        addresses = (c_void_p * len(parameters))(
            *(ctypes.addressof(parameter) for parameter in parameters)
        )
        if early and self._starts_early:
            allowed = LaunchAttribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
            config = LaunchConfig(
                grid, (threads, 1, 1), shared_bytes, self.handle, pointer(allowed), 1
            )
            self._call("cuLaunchKernelEx", byref(config), function, addresses, None)
            return
        self._call(
            "cuLaunchKernel", function, *grid, threads, 1, 1, shared_bytes, self.handle, addresses,
            None,
        )  # fmt: skip

    def upload(self, address: int, data: Bytes) -> None:
        """Enqueue a copy to the GPU; `data` must not change until `wait`."""
        self._call("cuMemcpyHtoDAsync_v2", address, data.ctypes.data, data.nbytes, self.handle)

    def download(self, data: Bytes, address: int) -> None:
        """Enqueue a copy from the GPU."""
        self._call("cuMemcpyDtoHAsync_v2", data.ctypes.data, address, data.nbytes, self.handle)

    def copy(self, target: int, source: int, size: int) -> None:
        """Enqueue a copy of `size` bytes on the GPU."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, size, self.handle)

    def borrowed(self, handle: int) -> "Stream":
        """Return a stream of the same context that somebody else created and destroys."""
        return Stream(self._context, c_void_p(handle))

    def wait(self) -> None:
        """Wait until everything in the stream is done."""
        self._call("cuStreamSynchronize", self.handle)

    def capture(self, work: Callable[[], None]) -> "CudaGraph":
        """Capture what `work` enqueues into one graph, without running it.

        What `work` raises passes through, and the stream stays usable. The capture is relaxed
        because garbage collection may free any object meanwhile, also in this thread. No other
        stream waits for this one, so that a relaxed capture is safe.
        """
        self._context.call("cuStreamBeginCapture_v2", self.handle, CAPTURE_RELAXED)
        graph, runnable = c_void_p(), c_void_p()
        try:
            try:
                work()
            except BaseException:
                # The failure may have ended the capture: the first error counts.
                with suppress(CudaError):
                    self._call("cuStreamEndCapture", self.handle, byref(graph))
                raise
            self._call("cuStreamEndCapture", self.handle, byref(graph))
            self._call("cuGraphInstantiateWithFlags", byref(runnable), graph, 0)
        finally:
            if graph:
                self._call("cuGraphDestroy", graph)
        return CudaGraph(self._context, self, runnable)

    def time_us(self, work: Callable[[], None]) -> float:
        """Return the GPU's time for what `work` enqueues, in microseconds."""
        return self.laps_us((work,))[0]

    def laps_us(self, parts: Sequence[Callable[[], None]]) -> list[float]:
        """Return the GPU's time for what each part enqueues, in microseconds."""
        marks = [c_void_p() for _ in range(len(parts) + 1)]
        try:
            for mark in marks:
                self._context.call("cuEventCreate", byref(mark), 0)
            self._call("cuEventRecord", marks[0], self.handle)
            for part, mark in zip(parts, marks[1:], strict=True):
                part()
                self._call("cuEventRecord", mark, self.handle)
            self._call("cuEventSynchronize", marks[-1])
            return [self._between_us(*pair) for pair in pairwise(marks)]
        finally:
            for mark in filter(None, marks):  # those that were created
                self._call("cuEventDestroy_v2", mark)

    def _between_us(self, begin: c_void_p, end: c_void_p) -> float:
        elapsed_ms = c_float()
        self._call("cuEventElapsedTime", byref(elapsed_ms), begin, end)
        return elapsed_ms.value * 1000


class CudaGraph:
    """Launches and copies, captured once and launched as one."""

    def __init__(self, context: Context, stream: Stream, handle: c_void_p) -> None:
        """Take a graph of the driver; use `Stream.capture`."""
        self._context = context
        self._launch = load_driver().functions["cuGraphLaunch"]
        self._handle, self._stream = handle, stream.handle

        def destroy() -> None:
            load_driver().call("cuGraphExecDestroy", handle)

        self._destroy = destroy
        context.on_close(destroy)

    def launch(self, stream: Stream | None = None) -> None:
        """Enqueue the graph, on the stream of its capture unless there is another.

        The context is current already.
        """
        status = self._launch(self._handle, self._stream if stream is None else stream.handle)
        if status != 0:
            raise load_driver().error("cuGraphLaunch", status)

    def close(self) -> None:
        """Free the graph before the context does; its last launch is done."""
        self._context.close_now(self._destroy)
