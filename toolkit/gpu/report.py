"""Static report on a segment's kernels and memory; it needs no GPU."""

from collections.abc import Sequence

import msgspec

from toolkit.gpu.compile_segment import GpuSegment
from toolkit.gpu.schedule.occupancy import Limit, occupancy

# Of the networks in docs/performance_slice.md, whose predicted tactics took 1.00 to 1.19 times as
# long as the timed ones.
TIMED_GAIN = "0 to 16 %"


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel: what a block of it takes, and how many warps an SM holds of it.

    `registers` and `spill_bytes` (local memory) are of one thread; they and what follows from them
    are None where Triton came without the tool that reads them. `nodes` are the first that it
    computes. `occupancy` is a share of 1, and `bound_by` what it runs out of.
    """

    function: str
    nodes: tuple[str, ...]
    threads: int
    shared_bytes: int
    registers: int | None
    spill_bytes: int | None
    blocks: int | None
    occupancy: float | None
    bound_by: Limit | None


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """One segment: its kernels, its operations with their tactics, its memory in bytes.

    `largest_live_bytes` is the most that is alive at once: the workspace cannot be smaller.
    """

    segment: str
    sm: int
    operations: int
    tactics: int
    workspace_bytes: int
    largest_live_bytes: int
    weights_bytes: int
    kernels: tuple[KernelReport, ...]


def report_segment(name: str, segment: GpuSegment) -> GpuReport:
    """Report on a compiled segment; raises CompileError for an SM that is not known."""
    cuda = segment.implementation
    nodes: dict[int, tuple[str, ...]] = {}
    for op in cuda.works:
        for tactic in op.tactics:
            for launch in tactic.launches:
                nodes.setdefault(launch.kernel, op.nodes)
    kernels = []
    for at, kernel in enumerate(cuda.kernels):
        threads, registers, shared = kernel.threads, kernel.registers, kernel.shared_bytes
        residency = None
        if registers is not None:
            residency = occupancy(
                cuda.sm, threads=threads, registers=registers, shared_bytes=shared
            )
        kernels.append(
            KernelReport(
                function=kernel.function,
                nodes=nodes.get(at, ()),
                threads=threads,
                shared_bytes=shared,
                registers=registers,
                spill_bytes=kernel.spill_bytes,
                blocks=residency.blocks if residency else None,
                occupancy=residency.share if residency else None,
                bound_by=residency.limit if residency else None,
            )
        )
    return GpuReport(
        segment=name,
        sm=cuda.sm,
        operations=len(cuda.works),
        tactics=sum(len(op.tactics) for op in cuda.works),
        workspace_bytes=segment.workspace_bytes,
        largest_live_bytes=segment.largest_live_bytes,
        weights_bytes=segment.entries[cuda.weights].nbytes,
        kernels=tuple(kernels),
    )


def report_lines(report: GpuReport) -> list[str]:
    """Return a report in lines: memory, the lowest occupancy, and every kernel that spills."""
    kernels = report.kernels
    lines = [
        f"GPU segment {report.segment} (sm_{report.sm}): {report.operations} operations, "
        f"{report.tactics} tactics, {len(kernels)} kernels; weights {_mib(report.weights_bytes)}, "
        f"workspace {_mib(report.workspace_bytes)} (at least {_mib(report.largest_live_bytes)} "
        "alive at once)"
    ]
    if report.tactics > report.operations:
        lines.append(
            "  tactics by estimate: a timing cache of the board gives the fastest, "
            f"which took {TIMED_GAIN} less time on 14 SMs of an H200"
        )
    known = [(k.occupancy, k.function, k) for k in kernels if k.occupancy is not None]
    if not known:
        return [*lines, "  registers and occupancy are not known: Triton came without cuobjdump"]
    share, _, lowest = min(known, key=lambda row: row[:2])
    lines.append(
        f"  lowest occupancy {share:.0%}: {lowest.function}, {lowest.registers} registers, "
        f"{lowest.shared_bytes} bytes of shared memory, {lowest.threads} threads "
        f"(bound by {lowest.bound_by})"
    )
    spilling = sorted((k for k in kernels if k.spill_bytes), key=lambda k: -(k.spill_bytes or 0))
    lines += [
        f"  {kernel.function} spills {kernel.spill_bytes} bytes a thread "
        f"({' '.join(kernel.nodes[:1]) or 'change of layout'})"
        for kernel in spilling
    ]
    return lines if spilling else [*lines, "  no kernel spills registers"]


def memory_line(reports: Sequence[GpuReport], arena_bytes: int) -> str:
    """Return the memory of one session, and what sessions share."""
    workspaces = sum(report.workspace_bytes for report in reports)
    weights = sum(report.weights_bytes for report in reports)
    return (
        f"memory of a session: {_mib(arena_bytes)} arena between segments, {_mib(workspaces)} GPU "
        f"workspace; GPU weights {_mib(weights)}, once for all sessions"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
