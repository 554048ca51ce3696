"""Place the tensors that pass between segments into one arena.

A tensor lives from the segment that makes it to the last one that reads it (outputs: to the end).
Tensors are placed one after the other, each at the lowest offset where it meets no tensor that
lives at the same time: largest first, where most is alive first (greedy by size and by breadth, as
in Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020), or by
bytes times lifetime. The order that needs the least is kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from device.engine.manifest import Buffer, MemoryPlan

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
    lives = sorted(lifetimes, key=lambda life: (-life.bytes, life.first, life.tensor))
    alive = _alive_bytes(lives)
    orders = (
        lives,
        sorted(lives, key=lambda life: -alive[life]),
        sorted(lives, key=lambda life: -life.bytes * (life.last - life.first + 1)),
    )
    plans = [_placed(order) for order in orders]
    return min(plans, key=lambda plan: plan.arena_bytes)


def _alive_bytes(lives: Sequence[Lifetime]) -> Mapping[Lifetime, int]:
    """Return the most bytes that are alive at once while each tensor lives."""
    ends = max((life.last for life in lives), default=0) + 1
    alive = [0] * ends
    for life in lives:
        for at in range(life.first, life.last + 1):
            alive[at] += life.bytes
    return {life: max(alive[life.first : life.last + 1]) for life in lives}


def _placed(order: Sequence[Lifetime]) -> MemoryPlan:
    placed: list[tuple[Lifetime, int]] = []
    for life in order:
        placed.append((life, _lowest_offset(life, placed)))
    buffers = sorted(
        (Buffer(tensor=life.tensor, offset=offset, bytes=life.bytes) for life, offset in placed),
        key=lambda buffer: (buffer.offset, buffer.tensor),
    )
    end = max((buffer.offset + buffer.bytes for buffer in buffers), default=0)
    return MemoryPlan(arena_bytes=end, buffers=tuple(buffers))


def _lowest_offset(life: Lifetime, placed: list[tuple[Lifetime, int]]) -> int:
    busy = sorted(
        (offset, offset + neighbour.bytes)
        for neighbour, offset in placed
        if neighbour.first <= life.last and life.first <= neighbour.last
    )
    offset = 0
    for start, end in busy:
        if offset + life.bytes <= start:
            break
        offset = max(offset, _aligned(end))
    return offset


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
