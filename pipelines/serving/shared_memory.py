"""Regions of shared memory that clients register: of the system, below a prefix."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipelines.serving.codec import from_bytes
from pipelines.serving.protocol import (
    BYTES,
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
NO_CUDA = "CUDA shared memory is not served: use system shared memory, or send the bytes"

_UNREAD: Array = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Region:
    """A registered part of an object; `fd` stays open, so that its name may go."""

    name: str
    key: str
    offset: int
    byte_size: int
    fd: int

    def as_json(self) -> dict[str, str | int]:
        """Return it as the status has it."""
        return {
            "name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size,
        }  # fmt: skip


class SystemRegions:
    """The regions by name. `prefix`: how keys must begin; None: no region is registered."""

    def __init__(self, prefix: str | None) -> None:
        self._prefix = prefix
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open an object. Raises Refusal."""
        if self._prefix is None:
            refuse("shared memory is off: this server answers other machines", Status.UNIMPLEMENTED)
        where = f"shared memory region {name!r}"
        if name in self._regions:
            refuse(f"{where} is registered already: unregister it first", Status.EXISTS)
        if len(self._regions) >= MAX_REGIONS:
            refuse(f"{where}: {MAX_REGIONS} regions are registered, the most", Status.BUSY)
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
        region = Region(name, key, offset, byte_size, fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                refuse(f"{where}: {key!r} is no shared memory")
            _check_size(region)
        except BaseException:
            os.close(fd)
            raise
        self._regions[name] = region

    def unregister(self, name: str) -> None:
        """Close a region, or all with an empty name; an unknown one is no fault."""
        for one in [name] if name else list(self._regions):
            region = self._regions.pop(one, None)
            if region is not None:
                os.close(region.fd)

    def status(self, name: str) -> Mapping[str, Region]:
        """Return the regions, or the one of a name. Raises Refusal: it is not registered."""
        if not name:
            return self._regions
        return {name: self.find(name)}

    def find(self, name: str) -> Region:
        """Return a region. Raises Refusal."""
        if name not in self._regions:
            refuse(
                f"Unable to find system shared memory region: {name!r} is not registered",
                Status.NOT_FOUND,
            )
        return self._regions[name]

    def input(
        self, name: str, datatype: str, shape: tuple[int, ...], parameters: Parameters
    ) -> Tensor:
        """Return an input that is to be read. Raises Refusal."""
        region, offset, size = self.place(f"input {name!r}", parameters)
        if datatype != BYTES:
            check_size(name, datatype, shape, size)
        return Tensor(name, datatype, shape, _UNREAD, (region.name, offset, size))

    def read(self, tensor: Tensor) -> Tensor:
        """Return an input with its data. They are copied: the client may shrink the object, and a
        mapping of what has gone would end this process. Raises Refusal."""
        if tensor.place is None:
            return tensor
        name, offset, size = tensor.place
        region = self.find(name)
        data = os.pread(region.fd, size, region.offset + offset)
        if len(data) != size:
            refuse(
                f"input {tensor.name!r}: shared memory region {name!r} has {len(data)} bytes from"
                f" offset {offset}; {size} were asked for"
            )
        return from_bytes(tensor.name, tensor.datatype, tensor.shape, data)

    def place(self, where: str, parameters: Parameters) -> tuple[Region, int, int]:
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

    def write(self, tensor: str, place: tuple[Region, int, int], data: memoryview) -> None:
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
        _check_size(region)
        try:
            written = os.pwrite(region.fd, data, region.offset + offset)
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
        self.unregister("")


def _check_size(region: Region) -> None:
    size = os.fstat(region.fd).st_size
    if region.offset + region.byte_size > size:
        refuse(
            f"shared memory region {region.name!r}: offset {region.offset} and"
            f" {region.byte_size} bytes end at {region.offset + region.byte_size}; the object"
            f" {region.key!r} has {size} bytes"
        )
