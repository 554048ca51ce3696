"""Regions of shared memory that clients register: of the system, below a prefix, and of GPUs."""

import asyncio
import gc
import os
import stat
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
from msgspec.structs import replace

from device.runtime.cuda.driver import CudaError
from device.runtime.cuda.sharing import ImportedMemory
from pipelines.serving.codec import from_bytes
from pipelines.serving.cuda_memory import CudaRegion, open_cuda_region
from pipelines.serving.mapped_memory import LateMapping
from pipelines.serving.protocol import (
    BYTES,
    DATATYPES,
    Array,
    Parameters,
    Status,
    Tensor,
    check_size,
    refuse,
    whole,
)

ROOT = Path("/dev/shm")  # where shm_open has its objects on Linux
MAX_REGIONS = 1024
MAX_NAME = 1024  # of a region, which answers repeat
CLOSE_S = 10.0  # how long a client waits for requests that use a region which it unregisters
CLOSE_POLL_S = 0.005
COLLECT_S = 2.0

Kind = Literal["system", "cuda"]

_UNREAD: Array = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Region:
    """A registered part of an object; `fd` stays open, so that its name may go. `mapping`: where a
    copy is safe that costs less than the kernel's."""

    name: str
    key: str
    offset: int
    byte_size: int
    fd: int
    mapping: LateMapping

    def as_json(self) -> dict[str, str | int]:
        """Return it as the status has it."""
        return {
            "name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size,
        }  # fmt: skip

    def read(self, offset: int, size: int) -> bytes | memoryview:
        """Return a copy of `size` bytes, less where the object has become smaller."""
        memory = self.mapping.get()
        if memory is not None and size and self.is_whole():
            data: memoryview = np.empty(size, np.uint8).data
            if memory.read(offset, data):
                return data
        return os.pread(self.fd, size, self.offset + offset)

    def write(self, offset: int, data: memoryview) -> int:
        """Write bytes and return how many. Raises OSError."""
        memory = self.mapping.get()
        if memory is not None and data and not data.readonly and memory.write(offset, data):
            return data.nbytes
        return os.pwrite(self.fd, data, self.offset + offset)

    def is_whole(self) -> bool:
        """Whether the object still has all bytes of this part."""
        return self.offset + self.byte_size <= os.fstat(self.fd).st_size

    def close(self) -> None:
        """Close the object."""
        self.mapping.close()
        os.close(self.fd)


AnyRegion = Region | CudaRegion
KINDS: Mapping[Kind, type[AnyRegion]] = {"system": Region, "cuda": CudaRegion}


class Regions:
    """The regions of both kinds by name. `prefix`: how keys of the system must begin; None: no
    region is registered."""

    def __init__(self, prefix: str | None) -> None:
        self._prefix = prefix
        self._regions: dict[str, AnyRegion] = {}
        self._closing: dict[str, weakref.ref[ImportedMemory]] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open an object of the system. Raises Refusal."""
        where = self._check_new(name)
        assert self._prefix is not None
        path = key.removeprefix("/")
        if not path.startswith(self._prefix) or "/" in path or path in {"", ".", ".."}:
            refuse(
                f"{where} has the key {key!r}: it must be one name"
                + (f" that begins with {self._prefix!r}" if self._prefix else "")
            )
        try:
            fd = os.open(ROOT / path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            refuse(f"{where}: unable to open the shared memory {key!r} ({reason})")
        region = Region(name, key, offset, byte_size, fd, LateMapping(fd, offset, byte_size))
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                refuse(f"{where}: {key!r} is no shared memory")
            _check_size(region)
        except BaseException:
            os.close(fd)
            raise
        self._regions[name] = region

    async def register_cuda(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        """Open memory of a client on the GPU. Raises Refusal."""
        self._check_new(name)
        # The first opens the driver, which takes long.
        region = await asyncio.to_thread(open_cuda_region, name, handle, device_id, byte_size)
        self._check_new(name)
        self._regions[name] = region

    def _check_new(self, name: str) -> str:
        """Return what a region is called. Raises Refusal: it cannot be registered."""
        if self._prefix is None:
            refuse("shared memory is off: this server answers other machines", Status.UNIMPLEMENTED)
        where = f"shared memory region {name[:MAX_NAME]!r}"
        if len(name) > MAX_NAME:
            refuse(f"{where} has a name of {len(name)} characters; at most {MAX_NAME} are taken")
        if name in self._regions:
            refuse(f"{where} is registered already: unregister it first", Status.EXISTS)
        if name in self._closing:
            refuse(f"{where} is being closed: wait until it is unregistered", Status.EXISTS)
        if len(self._regions) >= MAX_REGIONS:
            refuse(f"{where}: {MAX_REGIONS} regions are registered, the most", Status.BUSY)
        return where

    def unregister(self, name: str, kind: Kind = "system") -> None:
        """Close a region, or all of a kind with an empty name; an unknown one is no fault. Memory
        on the GPU is closed with the last request that uses it."""
        for one in [name] if name else list(self._regions):
            region = self._regions.get(one)
            if not isinstance(region, KINDS[kind]):
                continue
            del self._regions[one]
            if isinstance(region, CudaRegion):
                self._closing[one] = weakref.ref(region.memory, partial(self._on_closed, one))
            else:
                region.close()

    async def unregister_cuda(self, name: str) -> None:
        """Unregister a region of the GPU, or all with an empty name, and wait until no request uses
        it: then its client may free the memory. Raises Refusal: one still does."""
        self.unregister(name, "cuda")
        begin_s = collected_s = time.monotonic()
        for one in [name] if name else list(self._closing):
            while one in self._closing:
                now_s = time.monotonic()
                if now_s >= begin_s + CLOSE_S:
                    refuse(
                        f"CUDA shared memory region {one!r} is still used by a request after"
                        f" {CLOSE_S:g} s: keep its memory, and unregister it again",
                        Status.UNAVAILABLE,
                    )
                await asyncio.sleep(CLOSE_POLL_S)
                # A request that was refused may wait for the collector: tracebacks make cycles. It
                # holds up all threads, so it does not run at every look.
                if collected_s == begin_s or now_s >= collected_s + COLLECT_S:
                    gc.collect()
                    collected_s = time.monotonic()

    def _on_closed(self, name: str, memory: weakref.ref[ImportedMemory]) -> None:
        if self._closing.get(name) is memory:
            del self._closing[name]

    def status(self, name: str, kind: Kind = "system") -> Mapping[str, AnyRegion]:
        """Return the regions of a kind, or the one of a name. Raises Refusal: it is not
        registered."""
        rows = {key: one for key, one in self._regions.items() if isinstance(one, KINDS[kind])}
        if name and name not in rows:
            _refuse_unknown(name, f"{kind} ")
        return {name: rows[name]} if name else rows

    def find(self, name: str) -> AnyRegion:
        """Return a region. Raises Refusal."""
        if name not in self._regions:
            _refuse_unknown(name)
        return self._regions[name]

    def input(
        self, name: str, datatype: str, shape: tuple[int, ...], parameters: Parameters
    ) -> Tensor:
        """Return an input that is to be read. Raises Refusal."""
        region, offset, size = self.place(f"input {name!r}", parameters)
        if datatype != BYTES:
            check_size(name, datatype, shape, size)
        return Tensor(name, datatype, shape, _UNREAD, (region.name, offset, size))

    async def read(self, tensor: Tensor) -> Tensor:
        """Return an input with its data. Those of the system are copied: the client may shrink the
        object, and a read of what has gone, but by libtandem's copy, would end this process.
        Numbers on the GPU stay there. Raises Refusal."""
        if tensor.place is None:
            return tensor
        name, offset, size = tensor.place
        region = self.find(name)
        if offset + size > region.byte_size:  # it is another one since the request came
            refuse(
                f"input {tensor.name!r}: shared memory region {name!r} was registered anew, with"
                f" {region.byte_size} bytes: {offset + size} are needed"
            )
        if isinstance(region, CudaRegion):
            if tensor.datatype != BYTES and size:
                dtype = DATATYPES[tensor.datatype].numpy
                return replace(tensor, device=region.array(offset, tensor.shape, dtype))
            try:
                data = await asyncio.to_thread(region.read, offset, size) if size else b""
            except CudaError as error:
                refuse(f"input {tensor.name!r} cannot be read: {error}", Status.INTERNAL)
            return from_bytes(tensor.name, tensor.datatype, tensor.shape, data)
        copy = region.read(offset, size)
        if len(copy) != size:
            refuse(
                f"input {tensor.name!r}: shared memory region {name!r} has {len(copy)} bytes from"
                f" offset {offset}; {size} were asked for"
            )
        if tensor.datatype == BYTES:
            return from_bytes(tensor.name, BYTES, tensor.shape, copy)
        array = np.frombuffer(copy, DATATYPES[tensor.datatype].numpy)  # of the size, says `input`
        return Tensor(tensor.name, tensor.datatype, tensor.shape, array.reshape(tensor.shape))

    def place(self, where: str, parameters: Parameters) -> tuple[AnyRegion, int, int]:
        """Return the region, offset and size that parameters name. Raises Refusal."""
        region = self.find(str(parameters["shared_memory_region"]))
        size = whole(parameters, "shared_memory_byte_size", where)
        offset = whole(parameters, "shared_memory_offset", where)
        if offset + size > region.byte_size:
            refuse(
                f"{where}: offset {offset} and {size} bytes end at {offset + size}; shared memory"
                f" region {region.name!r} has {region.byte_size} bytes"
            )
        return region, offset, size

    async def write(self, tensor: str, place: tuple[AnyRegion, int, int], data: memoryview) -> None:
        """Write an output. Raises Refusal: it does not fit, or the region has gone."""
        region, offset, size = place
        if self._regions.get(region.name) is not region:
            refuse(
                f"output {tensor!r}: shared memory region {region.name!r} was unregistered since"
                " the request came",
                Status.NOT_FOUND,
            )
        if data.nbytes > size:
            refuse(
                f"output {tensor!r} has {data.nbytes} bytes; {size} were given in shared memory"
                f" region {region.name!r}"
            )
        if isinstance(region, CudaRegion):
            try:
                await asyncio.to_thread(region.write, offset, data)
            except CudaError as error:
                refuse(f"output {tensor!r} cannot be written: {error}", Status.INTERNAL)
            return
        _check_size(region)
        try:
            written = region.write(offset, data)
        except OSError as error:
            written, reason = 0, error.strerror
        else:
            reason = "no space is left"
        if written != data.nbytes:
            refuse(
                f"output {tensor!r}: {written} of {data.nbytes} bytes were written to shared memory"
                f" region {region.name!r} ({reason}): free shared memory of the machine",
                Status.BUSY,
            )

    def close(self) -> None:
        """Close all regions."""
        for kind in KINDS:
            self.unregister("", kind)


def _refuse_unknown(name: str, kind: str = "") -> NoReturn:
    refuse(
        f"Unable to find {kind}shared memory region: {name!r} is not registered", Status.NOT_FOUND
    )


def _check_size(region: Region) -> None:
    if not region.is_whole():
        size = os.fstat(region.fd).st_size
        refuse(
            f"shared memory region {region.name!r}: offset {region.offset} and"
            f" {region.byte_size} bytes end at {region.offset + region.byte_size}; the object"
            f" {region.key!r} has {size} bytes"
        )
