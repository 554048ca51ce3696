"""A double of libcuda whose GPU is this computer's memory and Triton's interpreter.

It stands for the driver where there is none, behind the real `device.runtime.cuda.driver.Driver`:
every call passes through ctypes with the types that Tandem declares. It is stricter than a driver:

    streams   keep what is enqueued until somebody waits: results that are read too early are poison
    memory    is poisoned when it is taken; an address outside of what is taken ends the call
    graphs    record copies, kernels and TensorRT's plans on the GPU; waiting, taking memory or a
              DLA's task while a stream is captured ends the call
    kernels   are those of an engine built with `interpreted_cubins`: a "cubin" is the kernel's
              description, and Triton's interpreter runs it on the same launches

What it cannot show: that a cubin computes what its kernel says, times, and concurrency.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import gpu_interpreter
import numpy as np
import pytest

from device.runtime.cuda import driver as cuda_driver
from toolkit.gpu.codegen.kernel_files import kernel_function
from toolkit.gpu.codegen.messages import Compiled

CUDA_VERSION = 12020
POISON = 0xA5
_ATTRIBUTES = {
    cuda_driver.SM_COUNT: 8,
    cuda_driver.CLOCK_KHZ: 918_000,
    cuda_driver.MEMORY_CLOCK_KHZ: 3_199_000,
    cuda_driver.L2_BYTES: 4 << 20,
    cuda_driver.COMPUTE_MAJOR: 8,
    cuda_driver.COMPUTE_MINOR: 7,
}
Work = Callable[[], None]


class CudaDouble:
    """The library, with what was taken from it. `calls`: names, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.memory: dict[int, np.ndarray] = {}
        self.streams: dict[int, list[Work]] = {0: []}
        self.captures: dict[int, list[Work]] = {}
        self.graphs: dict[int, list[Work]] = {}
        self.invalid: set[int] = set()
        self.kernels: dict[int, dict] = {}
        self.events: dict[int, tuple[int, list[bool]]] = {}
        self.reached_s: dict[int, float] = {}
        self.current = 1
        self.owners: dict[int, int] = {}
        self.problem = b"no error"
        self._handles = iter(range(0x1000, 1 << 40, 8))
        self._functions: dict[str, object] = {}

    def __getattr__(self, name: str) -> object:
        if not name.startswith("cu"):
            raise AttributeError(name)
        if name not in self._functions:
            types = {**cuda_driver._CALLS, **cuda_driver._EARLY_CALLS}.get(name)
            if name == "cuGetErrorString":
                types = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
            assert types is not None, f"{name} is in no table"
            # A callback takes addresses as integers.
            prototype = ctypes.CFUNCTYPE(ctypes.c_int, *types)
            self._functions[name] = prototype(partial(self._call, name))
        return self._functions[name]

    def _call(self, name: str, *arguments: object) -> int:
        if name == "cuGetErrorString":
            arguments[1][0] = self.problem
            return 0
        self.calls.append(name)
        try:
            getattr(self, f"_{name.removesuffix('_v2')}")(*arguments)
        except BaseException as error:  # noqa: BLE001  (a callback cannot raise)
            self.problem = f"{name}: {type(error).__name__}: {error}".encode()
            return 999
        return 0

    # -- device

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDriverGetVersion(self, out: object) -> None:
        out[0] = CUDA_VERSION

    def _cuDeviceGetCount(self, out: object) -> None:
        out[0] = 1

    def _cuDeviceGetName(self, text: object, size: int, index: int) -> None:
        pass  # the buffer holds zeros

    def _cuDeviceGetAttribute(self, out: object, number: int, index: int) -> None:
        out[0] = _ATTRIBUTES[number]

    def _cuDevicePrimaryCtxRetain(self, out: object, index: int) -> None:
        out[0] = 1

    def _cuDevicePrimaryCtxRelease(self, index: int) -> None:
        pass

    def _cuCtxSetCurrent(self, context: int | None) -> None:
        self.current = context or 0

    def _cuCtxGetCurrent(self, out: object) -> None:
        out[0] = self.current

    def _cuStreamGetCtx(self, stream: int, out: object) -> None:
        assert stream in self.streams, "there is no such stream"
        out[0] = self.owners.get(stream, 1)

    # -- memory

    def take(self, size: int) -> int:
        """Take poisoned memory, aligned as cuMemAlloc aligns it (CUDA C++ guide: 256 bytes)."""
        assert not self.captures, "memory is taken while a stream is captured"
        block = np.full(size + 256, POISON, np.uint8)
        address = -(-block.ctypes.data // 256) * 256
        self.memory[address] = block[address - block.ctypes.data :][:size]
        return address

    def check(self, address: int, size: int) -> None:
        """Refuse bytes that are not taken as a whole."""
        for start, block in self.memory.items():
            if start <= address and address + size <= start + len(block):
                return
        raise AssertionError(f"{size} bytes at {address:#x} were not taken")

    def _cuMemAlloc(self, out: object, size: int) -> None:
        out[0] = self.take(size)

    def _cuMemAllocHost(self, out: object, size: int) -> None:
        out[0] = self.take(size)

    def _cuMemFree(self, address: int) -> None:
        self.settle()
        self.memory.pop(address)

    _cuMemFreeHost = _cuMemFree

    def _cuMemsetD8(self, address: int, value: int, size: int) -> None:
        self.check(address, size)
        self.enqueue(0, lambda: ctypes.memset(address, value, size))

    def _cuMemcpyHtoD(self, address: int, source: int, size: int) -> None:
        self.check(address, size)
        self.settle()
        ctypes.memmove(address, source, size)

    def _cuMemcpyHtoDAsync(self, address: int, source: int, size: int, stream: int) -> None:
        self.check(address, size)
        self.enqueue(stream, lambda: ctypes.memmove(address, source, size))

    def _cuMemcpyDtoHAsync(self, target: int, address: int, size: int, stream: int) -> None:
        self.check(address, size)
        self.enqueue(stream, lambda: ctypes.memmove(target, address, size))

    def _cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        self.check(source, size)
        self.check(target, size)
        self.enqueue(stream, lambda: ctypes.memmove(target, source, size))

    def _cuPointerGetAttribute(self, out: int, attribute: int, address: int) -> None:
        start = next(at for at, block in self.memory.items() if at <= address < at + len(block))
        value = {
            cuda_driver.POINTER_CONTEXT: self.owners.get(start, 1),
            cuda_driver.POINTER_MEMORY_TYPE: cuda_driver.MEMORY_DEVICE,
            cuda_driver.POINTER_DEVICE: 0,
            cuda_driver.POINTER_RANGE_START: start,
            cuda_driver.POINTER_RANGE_BYTES: len(self.memory[start]),
        }[attribute]
        ctypes.c_uint64.from_address(out).value = value

    # -- events: a point in a stream, as the number of what was enqueued in it before

    def _cuEventCreate(self, out: object, flags: int) -> None:
        out[0] = next(self._handles)

    def _cuEventDestroy(self, event: int) -> None:
        pass  # streams that wait for it keep it

    def _cuEventRecord(self, event: int, stream: int | None) -> None:
        at = stream or 0
        reached = [False]

        def reach() -> None:
            reached[0] = True
            self.reached_s[event] = time.perf_counter()

        self.enqueue(at, reach)
        self.events[event] = (at, reached)

    def _cuEventElapsedTime(self, out: object, begin: int, end: int) -> None:
        out[0] = (self.reached_s[end] - self.reached_s[begin]) * 1000

    def _cuStreamWaitEvent(self, stream: int | None, event: int, flags: int) -> None:
        if event in self.events:
            self.enqueue(stream, partial(self._reach, *self.events[event]))

    def _cuEventSynchronize(self, event: int) -> None:
        if event in self.events:
            self._reach(*self.events[event])

    def _reach(self, stream: int, reached: list[bool]) -> None:
        """Run another stream up to the event."""
        pending = self.streams.get(stream, [])
        while not reached[0]:
            pending.pop(0)()

    # -- streams and graphs

    def enqueue(self, stream: int | None, work: Work) -> None:
        """Keep work until the stream is waited for, or for the graph that is captured."""
        stream = stream or 0
        assert stream in self.streams, "there is no such stream"
        self.captures.get(stream, self.streams[stream]).append(work)

    def task(self, stream: int, work: Work) -> None:
        """Enqueue a task that no graph can hold."""
        assert stream not in self.captures, "a DLA's task cannot be captured"
        self.calls.append("task")
        self.enqueue(stream, work)

    def plan(self, stream: int, work: Work) -> None:
        """Enqueue a plan of TensorRT on the GPU."""
        self.calls.append("plan")
        self.enqueue(stream, work)

    def is_capturing(self, stream: int) -> bool:
        """Whether what is enqueued in a stream goes into a graph."""
        return stream in self.captures

    def invalidate(self, stream: int) -> None:
        """Let the capture of a stream end in an error, as after a call that no graph can hold."""
        self.invalid.add(stream)

    def settle(self) -> None:
        """Do all that is enqueued anywhere."""
        for stream in list(self.streams):
            self._cuStreamSynchronize(stream)

    def _cuStreamCreate(self, out: object, flags: int) -> None:
        assert flags == cuda_driver.STREAM_NON_BLOCKING
        out[0] = handle = next(self._handles)
        self.streams[handle] = []

    def _cuStreamDestroy(self, stream: int) -> None:
        self._cuStreamSynchronize(stream)
        del self.streams[stream]

    def _cuStreamSynchronize(self, stream: int | None) -> None:
        assert (stream or 0) not in self.captures, "a stream is waited for while it is captured"
        pending = self.streams[stream or 0]
        while pending:
            pending.pop(0)()

    def _cuStreamBeginCapture(self, stream: int, mode: int) -> None:
        assert mode == cuda_driver.CAPTURE_RELAXED
        assert stream not in self.captures
        self.captures[stream] = []

    def _cuStreamEndCapture(self, stream: int, out: object) -> None:
        works = self.captures.pop(stream)
        invalid = stream in self.invalid
        self.invalid.discard(stream)
        assert not invalid, "operation failed due to a previous error during capture"
        out[0] = handle = next(self._handles)
        self.graphs[handle] = works

    def _cuGraphInstantiateWithFlags(self, out: object, graph: int, flags: int) -> None:
        out[0] = handle = next(self._handles)
        self.graphs[handle] = list(self.graphs[graph])

    def _cuGraphDestroy(self, graph: int) -> None:
        del self.graphs[graph]

    _cuGraphExecDestroy = _cuGraphDestroy

    def _cuGraphLaunch(self, graph: int, stream: int) -> None:
        assert stream not in self.captures
        for work in self.graphs[graph]:
            self.enqueue(stream, work)

    # -- kernels

    def _cuModuleLoadData(self, out: object, image: int) -> None:
        out[0] = handle = next(self._handles)
        self.kernels[handle] = _tuples_in(json.loads(ctypes.string_at(image)))

    def _cuModuleGetFunction(self, out: object, module: int, name: bytes) -> None:
        assert self.kernels[module]["kernel"] == name.decode()
        out[0] = module

    def _cuModuleUnload(self, module: int) -> None:
        del self.kernels[module]

    def _cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        assert function in self.kernels

    def _cuLaunchKernel(self, function: int, *rest: object) -> None:
        x, y, z, threads, _, _, _, stream, parameters, _ = rest
        kernel = self.kernels[function]
        assert threads == 32 * kernel["warps"]
        arguments = {}
        for index, (name, kind) in enumerate(kernel["signature"]):
            place = parameters[index]
            if kind.startswith("*"):
                address = ctypes.c_uint64.from_address(place).value
                self.check(address, 1)
                dtype = gpu_interpreter.DTYPES[kind.removesuffix(":16")]
                arguments[name] = gpu_interpreter.Pointer(address, dtype)
            else:
                arguments[name] = ctypes.c_int32.from_address(place).value
        bound = gpu_interpreter._bind(kernel["constants"], arguments)
        program = kernel_function(kernel["kernel"], None)
        self.enqueue(stream, lambda: program[x, y, z](**bound))


def _tuples_in(kernel: dict) -> dict:
    constants = {name: _tuples(value) for name, value in kernel["constants"].items()}
    return {**kernel, "constants": constants}


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@contextmanager
def interpreted_cubins() -> Iterator[None]:
    """Build engines whose cubins are descriptions of kernels, which the double runs."""

    def compile_ops(ops, gpu, on_progress=None):
        specs = {launch.spec for op in ops for tactic in op.tactics for launch in tactic}
        return ops, {spec: _described(spec) for spec in specs}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.gpu.compile.compile_ops", compile_ops)
        yield


def _described(spec) -> Compiled:
    description = {
        "kernel": spec.kernel,
        "signature": spec.signature,
        "constants": dict(spec.constants),
        "warps": spec.warps,
    }
    return Compiled(
        function=spec.kernel,
        cubin=json.dumps(description, sort_keys=True).encode() + b"\0",
        parameters=tuple(name for name, _ in spec.signature),
        threads=32 * spec.warps,
        shared_bytes=0,
        registers=None,
        spill_bytes=None,
    )


CURRENT: CudaDouble | None = None


@contextmanager
def installed() -> Iterator[CudaDouble]:
    """Let this process have the double for a driver; what it took must go back."""
    double = CudaDouble()
    library = ctypes.CDLL
    module = sys.modules[__name__]

    def load(name: str | None, *arguments: object, **options: object) -> object:
        if name == cuda_driver._LIBRARY:
            return double
        return library(name, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver.ctypes, "CDLL", load)
        patch.setattr(module, "CURRENT", double)
        cuda_driver.load_driver.cache_clear()
        try:
            yield double
        finally:
            cuda_driver.load_driver.cache_clear()
