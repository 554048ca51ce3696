"""The `cuda` implementation of a segment in an engine's manifest: cubins, launches, tensors.

A segment has one workspace: every tensor that it reads or writes lies there, at offsets that were
planned on the host. A launch is a kernel, its grid and its arguments in the order that it takes
them. What depends on a dynamic dimension is a formula over them (`device.engine.cuda_sizes`).
"""

from typing import Union

import msgspec
from msgspec import UNSET, UnsetType

from device.engine.cuda_sizes import Amount


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the named parts: frozen, and unknown keys are refused."""


class _Argument(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the arguments: ["weights", 512] in JSON."""


class Workspace(_Argument, frozen=True, array_like=True, tag="workspace"):
    """The address `offset` bytes into the workspace."""

    offset: Amount


class Weights(_Argument, frozen=True, array_like=True, tag="weights"):
    """The address `offset` bytes into the segment's weights."""

    offset: Amount


class Int32(_Argument, frozen=True, array_like=True, tag="int32"):
    """A signed integer of 32 bits."""

    value: Amount


class Null(_Argument, frozen=True, array_like=True, tag="null"):
    """An address that the kernel does not use."""


Argument = Union[Workspace, Weights, Int32, Null]  # noqa: UP007  (msgspec reads it at run time)


class CompiledKernel(_Value, frozen=True, kw_only=True):
    """A function of a cubin (a file entry of uint8), with what one block of it takes.

    `registers` and `spill_bytes` of one thread are for reports; None where the build had no tool
    to read them. `waits`: before it touches memory, each of its blocks waits until the kernels
    before it have ended, so that it can be started early (sm_90 and later).
    """

    cubin: str
    function: str
    threads: int
    shared_bytes: int
    registers: int | None = None
    spill_bytes: int | None = None
    waits: bool = False


class Launch(_Value, frozen=True, kw_only=True):
    """One start of `kernels[kernel]`."""

    kernel: int
    grid: tuple[Amount, Amount, Amount]
    arguments: tuple[Argument, ...]


class Tactic(_Value, frozen=True, kw_only=True):
    """One way to compute an operation: launches, one after the other."""

    launches: tuple[Launch, ...]


class TunableOp(_Value, frozen=True, kw_only=True):
    """An operation with its tactics; it computes the ONNX nodes `nodes` (none: a layout change).

    Without measured times the first tactic runs: the cost model put it there.
    """

    tactics: tuple[Tactic, ...]
    nodes: tuple[str, ...] = ()


class WorkspaceTensor(_Value, frozen=True, kw_only=True):
    """Where an input or output of the segment lies in the workspace: C order, its own dtype.

    `bytes` at the largest sizes. `shape` is there if dynamic dimensions decide it.
    """

    tensor: str
    offset: int
    bytes: int
    shape: tuple[Amount, ...] | None = None


class Cuda(_Value, frozen=True, kw_only=True, tag="cuda", tag_field="kind"):
    """A segment as kernels for one GPU architecture: operations in running order.

    `sm` 87 is compute capability 8.7. `weights` names the entry (uint8) with all constants, packed
    for the kernels. `borders_at`: from here on the workspace holds inputs and outputs alone, which
    may lie anywhere else; UNSET: they share their bytes with other tensors.
    """

    sm: int
    kernels: tuple[CompiledKernel, ...]
    works: tuple[TunableOp, ...]
    weights: str
    workspace_bytes: int
    inputs: tuple[WorkspaceTensor, ...]
    outputs: tuple[WorkspaceTensor, ...]
    borders_at: int | UnsetType = UNSET
