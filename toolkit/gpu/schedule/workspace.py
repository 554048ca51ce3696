"""Place the allocations of a segment in one workspace, within a limit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from toolkit.errors import BuildError
from toolkit.gpu.ir.launch import Tactic, TunableOp
from toolkit.memory import ALIGNMENT_BYTES, Lifetime, plan_memory


@dataclass(frozen=True, slots=True)
class WorkspacePlan:
    """Operations and their memory: `offsets` in bytes from the workspace's start, by allocation.

    `largest_live_bytes`: the most that is alive at once, a lower bound of any workspace.
    `borders_at`: where inputs and outputs begin, behind all others; None: they share memory.
    """

    ops: tuple[TunableOp, ...]
    offsets: Mapping[str, int]
    workspace_bytes: int
    largest_live_bytes: int
    borders_at: int | None = None


def fit_workspace(
    ops: Sequence[TunableOp],
    sizes: Mapping[str, int],
    inputs: Sequence[str],
    outputs: Sequence[str],
    limit: int | None = None,
    *,
    apart: bool = False,
) -> WorkspacePlan:
    """Place all allocations that operations touch; `sizes` are in bytes.

    `apart`: inputs and outputs lie behind all others, so that they may be elsewhere: `limit` and
    the bytes that are alive are those of the others then.
    Tactics with scratch memory are dropped, the largest first, until the workspace fits `limit`
    bytes. Raises BuildError: it does not fit without them, either.
    """
    while True:
        lifetimes = _lifetimes(ops, sizes, inputs, outputs)
        borders = dict.fromkeys((*inputs, *outputs)) if apart else {}
        lifetimes = tuple(life for life in lifetimes if life.tensor not in borders)
        memory = plan_memory(lifetimes)
        offsets = {buffer.tensor: buffer.offset for buffer in memory.buffers}
        end = borders_at = _aligned(memory.arena_bytes)
        for name in borders:
            offsets[name], end = end, _aligned(end + sizes[name])
        plan = WorkspacePlan(
            ops=tuple(ops),
            offsets=offsets,
            workspace_bytes=end if apart else memory.arena_bytes,
            largest_live_bytes=_largest_live(lifetimes),
            borders_at=borders_at if apart else None,
        )
        if limit is None or memory.arena_bytes <= limit:
            return plan
        smaller = _without_largest_scratch(ops, sizes)
        if smaller is None:
            raise BuildError(
                f"the GPU workspace takes {_mib(memory.arena_bytes)} MiB, the limit is "
                f"{limit / 2**20:.3f}; {_mib(plan.largest_live_bytes)} MiB are alive at once "
                "whatever is done. Build with a larger --workspace-mib, or for a smaller batch or "
                "image"
            )
        ops = smaller


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _mib(size: int) -> str:
    """Bytes in MiB, rounded up: a limit of that many is enough."""
    return f"{math.ceil(size / 2**20 * 1000) / 1000:.3f}"


def _lifetimes(
    ops: Sequence[TunableOp],
    sizes: Mapping[str, int],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> tuple[Lifetime, ...]:
    """Return the first and last operation that use each allocation."""
    first = dict.fromkeys(inputs, 0)
    last = dict(first)
    for at, op in enumerate(ops):
        for base in op.touched:
            first.setdefault(base, at)
            last[base] = at
    last.update(dict.fromkeys(outputs, len(ops)))
    return tuple(Lifetime(base, sizes[base], first[base], last[base]) for base in first)


def _largest_live(lifetimes: Sequence[Lifetime]) -> int:
    starts = {lifetime.first for lifetime in lifetimes}
    return max(
        (
            sum(lifetime.bytes for lifetime in lifetimes if lifetime.first <= at <= lifetime.last)
            for at in starts
        ),
        default=0,
    )


def _without_largest_scratch(
    ops: Sequence[TunableOp], sizes: Mapping[str, int]
) -> tuple[TunableOp, ...] | None:
    """Drop the tactics that touch the largest scratch; None if there is no scratch."""
    scratch = [(sizes[base], at, base) for at, op in enumerate(ops) for base in _scratch(op)]
    if not scratch:
        return None
    _, at, largest = max(scratch)
    tactics = tuple(tactic for tactic in ops[at].tactics if largest not in _touched(tactic))
    return (*ops[:at], replace(ops[at], tactics=tactics), *ops[at + 1 :])


def _scratch(op: TunableOp) -> set[str]:
    """Return the allocations that some tactics of an operation touch and others do not."""
    touched = [_touched(tactic) for tactic in op.tactics]
    return {base for bases in touched for base in bases if any(base not in b for b in touched)}


def _touched(tactic: Tactic) -> set[str]:
    return {base for call in tactic for base in (*call.reads, *call.writes)}
