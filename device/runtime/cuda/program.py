"""A segment's weights and kernels on the GPU, shared by all sessions of a process."""

import hashlib
import threading
from collections.abc import Callable, Hashable
from ctypes import c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from device.engine.cuda_manifest import CompiledKernel, Cuda
from device.engine.file import Engine
from device.runtime.cuda.context import Context

ProgramKey = tuple[tuple[int, ...], str, tuple[CompiledKernel, ...]]
"""The identity of the engine file, the entry of the segment's weights, and its kernels."""


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    users: int


class Shared(Generic[K, V]):
    """Values by key with the number of their users; any thread may acquire and release."""

    def __init__(self, destroy: Callable[[V], None]) -> None:
        """Use `destroy` on a value that has no users left."""
        self._destroy = destroy
        self._entries: dict[K, _Entry[V]] = {}
        self._lock = threading.RLock()  # garbage collection may release inside an acquire

    def acquire(self, key: K, create: Callable[[], V]) -> V:
        """Return the value of a key, created for its first user; `release` it once.

        What `create` raises passes through, and nothing is acquired then.
        """
        with self._lock:
            if key not in self._entries:
                self._entries[key] = _Entry(create(), 0)
            entry = self._entries[key]
            entry.users += 1
            return entry.value

    def release(self, key: K) -> None:
        """Remove one user of the value."""
        with self._lock:
            entry = self._entries[key]
            entry.users -= 1
            if entry.users == 0:
                del self._entries[key]
                self._destroy(entry.value)

    def __len__(self) -> int:
        """Return the number of values with users."""
        with self._lock:
            return len(self._entries)


class Program:
    """Weights and kernels of one segment; no session changes them."""

    def __init__(self, engine: Engine, implementation: Cuda) -> None:
        """Upload the weights; kernels are loaded at their first use.

        Raises CudaError if the driver refuses.
        """
        self._kernels = implementation.kernels
        self._cubins = {
            kernel.cubin: engine.entry(kernel.cubin) for kernel in implementation.kernels
        }
        self._modules: dict[str, c_void_p] = {}
        self._functions: dict[int, c_void_p] = {}
        self._lock = threading.Lock()
        self._context = Context()
        try:
            weights = engine.entry(implementation.weights)
            self.weights_bytes = weights.nbytes
            self.weights = self._context.allocate(weights.nbytes)
            self._context.upload(self.weights, weights)
        except BaseException:
            self._context.close()
            raise

    def function(self, kernel: int) -> c_void_p:
        """Return a kernel, loaded at its first use; raises CudaError."""
        with self._lock:
            if kernel not in self._functions:
                compiled = self._kernels[kernel]
                if compiled.cubin not in self._modules:
                    self._modules[compiled.cubin] = self._context.load(self._cubins[compiled.cubin])
                self._functions[kernel] = self._context.function(
                    self._modules[compiled.cubin], compiled.function, compiled.shared_bytes
                )
            return self._functions[kernel]

    def cubin_sha256(self, kernel: int) -> str:
        """Return the SHA-256 of a kernel's cubin, in hex."""
        return hashlib.sha256(self._cubins[self._kernels[kernel].cubin].tobytes()).hexdigest()

    def close(self) -> None:
        """Free weights and kernels; no session may run them afterwards."""
        self._context.close()


_PROGRAMS: Shared[ProgramKey, Program] = Shared(Program.close)


def acquire_program(engine: Engine, implementation: Cuda) -> tuple[ProgramKey, Program]:
    """Return the program of a segment and the key to release it; raises CudaError."""
    key = (engine.identity, implementation.weights, implementation.kernels)
    return key, _PROGRAMS.acquire(key, partial(Program, engine, implementation))


def release_program(key: ProgramKey) -> None:
    """Remove one session from the users of a program."""
    _PROGRAMS.release(key)
