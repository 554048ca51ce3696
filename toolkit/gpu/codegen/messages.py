"""Messages between a build and its compiler workers."""

import hashlib
from typing import IO, TypeVar

import msgspec

from toolkit.gpu.ir.launch import KernelSource

T = TypeVar("T")
_LENGTH_BYTES = 4


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel compiled for one SM.

    `parameters`: names of the run-time parameters in the cubin's order, as in
    `toolkit.gpu.ir.launch.KernelSpec`. `registers` and `spill_bytes` are per thread, None where
    Triton came without the tool that reads them. `waits`: its blocks wait for previous kernels
    (`toolkit.gpu.codegen.early_start`).
    """

    function: str
    cubin: bytes
    parameters: tuple[str, ...]
    threads: int
    shared_bytes: int
    registers: int | None
    spill_bytes: int | None
    waits: bool = False

    @property
    def sha256(self) -> str:
        """The SHA-256 of the cubin in hex."""
        return hashlib.sha256(self.cubin).hexdigest()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel to compile; see `toolkit.gpu.ir.launch.KernelSpec`."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: dict[str, object]
    warps: int
    stages: int
    exact: bool
    sm: int
    source: KernelSource | None = None

    @property
    def title(self) -> str:
        """The kernel's name in messages, with its plugin."""
        if self.source is None:
            return self.kernel
        return f"{self.kernel} of {self.source.title} in {self.source.file}"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The compiled kernel, or the compiler's error."""

    compiled: Compiled | None = None
    problem: str = ""


def write_message(stream: IO[bytes], message: Request | Answer) -> None:
    """Write a message, preceded by its length."""
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    stream.flush()


def read_message(stream: IO[bytes], kind: type[T]) -> T | None:
    """Read a message; None where the stream ends."""
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    return msgspec.msgpack.decode(stream.read(int.from_bytes(head, "little")), type=kind)
