"""Messages between a build and its compiler workers, which are processes of one program."""

import hashlib
import pickle
from dataclasses import dataclass
from typing import IO, TypeVar

import msgspec

from toolkit.gpu.ir.launch import KernelSpec

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class Request:
    """A kernel to compile for an SM."""

    spec: KernelSpec
    sm: int

    @property
    def title(self) -> str:
        """The kernel's name in messages, with its plugin."""
        kernel, source = self.spec.kernel, self.spec.source
        return kernel if source is None else f"{kernel} of {source.title} in {source.file}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The compiled kernel, or the compiler's error."""

    compiled: Compiled | None = None
    problem: str = ""


def write_message(stream: IO[bytes], message: Request | Answer) -> None:
    """Write a message."""
    pickle.dump(message, stream)
    stream.flush()


def read_message(stream: IO[bytes], kind: type[T]) -> T | None:
    """Read a message; None where the stream ends."""
    try:
        message = pickle.load(stream)
    except (EOFError, pickle.UnpicklingError):
        return None
    assert isinstance(message, kind)
    return message
