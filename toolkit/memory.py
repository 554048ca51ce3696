"""Place the tensors that pass between segments into one arena.

A tensor lives from the segment that makes it to the last one that reads it (outputs: to the end).
Tensors are placed largest first at the lowest offset where they meet no tensor that lives at the
same time (greedy by size, as in Pisarchyk and Lee, "Efficient Memory Management for Deep Neural
Net Inference", 2020).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from device.manifest import Buffer, MemoryPlan

ALIGNMENT_BYTES = 256  # of every buffer: what GPUs want, and more than any CPU vector


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A tensor of `bytes` that lives from segment index `first` to `last`, both included."""

    tensor: str
    bytes: int
    first: int
    last: int


def plan_memory(lifetimes: Iterable[Lifetime]) -> MemoryPlan:
    """Return offsets such that no two tensors that live at the same time share a byte."""
    placed: list[tuple[Lifetime, int]] = []
    for life in sorted(lifetimes, key=lambda item: (-item.bytes, item.first, item.tensor)):
        placed.append((life, _lowest_offset(life, placed)))
    buffers = sorted(
        (Buffer(tensor=life.tensor, offset=offset, bytes=life.bytes) for life, offset in placed),
        key=lambda buffer: (buffer.offset, buffer.tensor),
    )
    end = max((buffer.offset + buffer.bytes for buffer in buffers), default=0)
    return MemoryPlan(arena_bytes=end, buffers=tuple(buffers))


def _lowest_offset(life: Lifetime, placed: list[tuple[Lifetime, int]]) -> int:
    busy = sorted(
        (offset, offset + other.bytes)
        for other, offset in placed
        if other.first <= life.last and life.first <= other.last
    )
    offset = 0
    for start, end in busy:
        if offset + life.bytes <= start:
            break
        offset = max(offset, _aligned(end))
    return offset


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
