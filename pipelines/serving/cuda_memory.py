"""Regions of CUDA shared memory: memory of clients on GPU 0, opened by its IPC handle."""

from dataclasses import dataclass

import numpy as np

from device.runtime.cuda.context import Context
from device.runtime.cuda.device_array import DeviceArray
from device.runtime.cuda.driver import CudaError, load_driver
from device.runtime.cuda.sharing import CallersContext, ImportedMemory
from pipelines.serving.protocol import Status, refuse

HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class CudaRegion:
    """A registered region; its memory is closed when no request uses it any more."""

    name: str
    device_id: int
    byte_size: int
    memory: ImportedMemory

    def as_json(self) -> dict[str, str | int]:
        """Return it as the status has it."""
        return {"name": self.name, "device_id": self.device_id, "byte_size": self.byte_size}

    def array(
        self, offset: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]
    ) -> DeviceArray:
        """Return an array at an offset; it ends inside the region, which the caller checked."""
        return DeviceArray.within(self.memory, self.memory.address + offset, shape, dtype)

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of bytes. Raises CudaError."""
        return self.array(offset, (size,), np.dtype(np.uint8)).numpy().tobytes()

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes into it and wait for it. Raises CudaError."""
        with CallersContext():
            context = Context()
            try:
                context.upload(self.memory.address + offset, np.frombuffer(data, np.uint8))
            finally:
                context.close()


def open_cuda_region(name: str, handle: bytes, device_id: int, byte_size: int) -> CudaRegion:
    """Open the memory of a client. Raises Refusal."""
    where = f"CUDA shared memory region {name!r}"
    if device_id != 0:
        refuse(f"{where} is on GPU {device_id}; this server uses GPU 0 alone")
    if len(handle) != HANDLE_BYTES:
        refuse(
            f"{where} has a raw_handle of {len(handle)} bytes; those of CUDA have {HANDLE_BYTES}"
        )
    try:
        load_driver()
    except CudaError as error:
        refuse(f"{where} cannot be opened: {error}", Status.UNIMPLEMENTED)
    try:
        memory = ImportedMemory(handle)
    except CudaError as error:
        refuse(
            f"{where} cannot be opened: {error}; the raw_handle must be of memory that another"
            " process of this machine holds"
        )
    if byte_size > memory.bytes:
        size = memory.bytes
        del memory  # closed now: the traceback lives on for a while
        refuse(f"{where} has a byte_size of {byte_size}; the memory has {size} bytes")
    return CudaRegion(name, device_id, byte_size, memory)
