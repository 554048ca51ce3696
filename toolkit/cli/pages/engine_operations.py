"""What each operation on the GPU takes of an SM, and the least time that the board allows it.

    roofline = max(2 multiply-accumulates / matrix rate, bytes / memory bandwidth)

Bytes are those of weights and of the tensors that enter and leave the operation, each once; INT4
weights count half a byte, without their scales. Rates
are the profile's, at its highest clocks. `tandem bench --profile --json` on a board gives the times
that stand beside them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from device.engine.arithmetic import INT4_KERNELS
from device.engine.cuda_manifest import Cuda, Launch
from device.engine.cuda_sizes import evaluate
from device.engine.file import Engine
from device.engine.manifest import Precision
from device.errors import TandemError
from device.profile import Profile
from toolkit.cli.pages.engine_card import engine_facts
from toolkit.cli.pages.engine_nodes import PRODUCTS, ReadTensors, read_tensors
from toolkit.evaluate.bench.measure import Layer
from toolkit.evaluate.bench.report import BenchResult
from toolkit.gpu.schedule.occupancy import Limit, Occupancy, occupancy
from toolkit.partition.costs.bytes import tensor_bytes

_NARROW_FIRST: tuple[Precision, ...] = ("int8", "fp16", "fp32")
_L2_BYTES = {87: 4 << 20}  # NVIDIA Jetson AGX Orin Series Technical Brief (2022): 4 MB of the GPU


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What the launch with the most blocks takes; `waves`: how often it fills the GPU's SMs.

    Registers and spilled bytes are of a thread; they and what follows from them are None where the
    build had no tool to read them.
    """

    blocks: int
    threads: int
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int
    occupancy: float | None
    bound_by: Limit | None
    waves: float | None


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What the nodes compute and move, and the least time for it in us.

    Nodes that a later operation ends are counted there: one before it arranges operands for it.
    `in_l2`: whether all bytes fit the L2 cache, None: its size is not known. `roofline_us` None:
    the profile is not known here, or no node is counted.
    """

    operations: int
    moved_bytes: int
    in_l2: bool | None
    roofline_us: float | None = None
    roof: str = ""


class OperationRow(msgspec.Struct, frozen=True, kw_only=True):
    """An operation with the tactic that runs: the one measured, else the first.

    `share` is roofline over measured time.
    """

    segment: str
    nodes: tuple[str, ...]
    kernels: tuple[str, ...]
    tactic: int
    tactics: int
    resources: Resources
    work: Work
    measured_us: float | None
    share: float | None


def read_times(path: Path) -> tuple[Layer, ...]:
    """Return the operations that `tandem bench --profile --json` timed. Raises TandemError."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except (OSError, msgspec.DecodeError) as error:
        raise TandemError(
            f"{path} is no output of `tandem bench --profile --json` ({error}); write one on the "
            "board"
        ) from error
    if not result.measured.layers:
        raise TandemError(f"{path} has no times of operations; run `tandem bench --profile --json`")
    return result.measured.layers


def operation_rows(engine: Engine, times: Sequence[Layer] = ()) -> tuple[OperationRow, ...]:
    """Return the operations of all GPU segments in running order.

    `times`: those of a board, of this engine. Raises TandemError: they are of another one.
    """
    facts, tensors = engine_facts(engine), read_tensors(engine)
    precisions = {node.row.node: node.precision for node in facts.nodes}
    point = [dim.opt for dim in engine.manifest.dims]
    rows: list[OperationRow] = []
    for segment in engine.manifest.segments:
        timed = [layer for layer in times if layer.segment == segment.name]
        for cuda in segment.implementations:
            if not isinstance(cuda, Cuda):
                continue
            if times and [op.nodes for op in cuda.works] != [layer.nodes for layer in timed]:
                raise TandemError(
                    f"the times of segment {segment.name} are of {len(timed)} operations, "
                    f"{engine.path} has {len(cuda.works)} others; time this engine"
                )
            for at, op in enumerate(cuda.works):
                tactic = timed[at].tactic if timed else 0
                launches = op.tactics[tactic].launches
                used = {precisions[node] for node in op.nodes if node in precisions}
                narrow: Precision = next((name for name in _NARROW_FIRST if name in used), "fp32")
                later = any(set(op.nodes) <= set(one.nodes) for one in cuda.works[at + 1 :])
                kernels = tuple(cuda.kernels[launch.kernel].function for launch in launches)
                work = _work(
                    () if later else op.nodes,
                    tensors,
                    narrow,
                    cuda.sm,
                    facts.profile,
                    int4=not INT4_KERNELS.isdisjoint(kernels),
                )
                measured_us = timed[at].time_ms * 1e3 if timed else None
                rows.append(
                    OperationRow(
                        segment=segment.name,
                        nodes=op.nodes,
                        kernels=kernels,
                        tactic=tactic,
                        tactics=len(op.tactics),
                        resources=_resources(cuda, launches, point, facts.profile),
                        work=work,
                        measured_us=measured_us,
                        share=work.roofline_us / measured_us
                        if work.roofline_us is not None and measured_us
                        else None,
                    )
                )
    return tuple(rows)


def _resources(
    cuda: Cuda, launches: Sequence[Launch], point: Sequence[int], profile: Profile | None
) -> Resources:
    """Return what the launch with the most blocks takes."""

    def blocks_of(launch: Launch) -> int:
        x, y, z = (evaluate(side, point) for side in launch.grid)
        return x * y * z

    largest = max(launches, key=blocks_of)
    kernel, blocks = cuda.kernels[largest.kernel], blocks_of(largest)
    residency: Occupancy | None = None
    if kernel.registers is not None:
        residency = occupancy(
            cuda.sm,
            threads=kernel.threads,
            registers=kernel.registers,
            shared_bytes=kernel.shared_bytes,
        )
    sms = None if profile is None or profile.gpu is None else profile.gpu.sm_count.value
    return Resources(
        blocks=blocks,
        threads=kernel.threads,
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
        shared_bytes=kernel.shared_bytes,
        occupancy=None if residency is None else residency.share,
        bound_by=None if residency is None else residency.limit,
        waves=blocks / (residency.blocks * sms) if residency and residency.blocks and sms else None,
    )


def _work(
    nodes: Sequence[str],
    tensors: ReadTensors,
    precision: Precision,
    sm: int,
    profile: Profile | None,
    *,
    int4: bool = False,
) -> Work:
    """Return the operations and bytes of a group of nodes, and the time that they need at least."""
    group = [tensors.views[name] for name in nodes if name in tensors.views]
    computed = {tensor.name for view in group for tensor in view.outputs}
    moved: dict[str, int] = {}
    for view in group:
        for tensor in view.inputs:
            source = "" if tensor is None else tensors.source(tensor.name)
            if tensor is not None and source not in computed:
                halves = int4 and view.op in PRODUCTS and tensor is view.inputs[1]
                size = (tensor.elements or 0) // 2 if halves else tensor_bytes(tensor, precision)
                moved[source] = size or 0
        for tensor in view.outputs:
            if tensors.readers.get(tensor.name, {""}) - set(nodes):
                moved[tensor.name] = tensor_bytes(tensor, precision) or 0
    macs = sum(view.macs or 0 for view in group if view.op in PRODUCTS)
    total = sum(moved.values())
    l2_bytes = _L2_BYTES.get(sm)
    in_l2 = None if l2_bytes is None else total <= l2_bytes
    if profile is None or profile.gpu is None or not group:
        return Work(operations=2 * macs, moved_bytes=total, in_l2=in_l2)
    gpu = profile.gpu
    rates = {"fp32": gpu.fp32_tflops, "fp16": gpu.fp16_tflops, "int8": gpu.int8_tops}
    rate = (rates[precision] or gpu.fp32_tflops).value * 1e6  # in a microsecond
    compute, memory = 2 * macs / rate, total / (profile.memory.bandwidth_gbps.value * 1e3)
    return Work(
        operations=2 * macs,
        moved_bytes=total,
        in_l2=in_l2,
        roofline_us=max(compute, memory),
        roof="arithmetic" if compute > memory else "memory",
    )


def operations_text(rows: Sequence[OperationRow]) -> str:
    """Return the rows as a table, the sum of the rooflines below."""
    heads = (
        "segment", "kernel", "blocks", "threads", "regs", "shared B", "occupancy", "bound by",
        "waves", "Mop", "KiB", "roofline us", "roof", "measured us", "share", "nodes",
    )  # fmt: skip
    lines = [heads, *(_cells(row) for row in rows)]
    shown = [at for at in range(len(heads)) if any(line[at] for line in lines[1:])]
    widths = {at: max(len(line[at]) for line in lines) for at in shown}
    texts = [
        "  ".join(
            line[at].ljust(widths[at]) if heads[at] in _LEFT else line[at].rjust(widths[at])
            for at in shown
        ).rstrip()
        for line in lines
    ]
    roofs = [us for row in rows if (us := row.work.roofline_us) is not None]
    times = [row.measured_us for row in rows if row.measured_us is not None]
    texts.append(f"{len(rows)} operations, {sum(roofs):.1f} us by roofline")
    if times:
        texts[-1] += f", {sum(times):.1f} us measured: {sum(roofs) / sum(times):.0%}"
    return "\n".join(texts)


_LEFT = frozenset({"segment", "kernel", "bound by", "roof", "nodes"})


def _cells(row: OperationRow) -> tuple[str, ...]:
    def text(value: float | None, form: str = "d") -> str:
        return "" if value is None else format(value, form)

    more = f" and {len(row.nodes) - 1} more" if len(row.nodes) > 1 else ""
    takes, work = row.resources, row.work
    return (
        row.segment,
        " + ".join(row.kernels),
        str(takes.blocks),
        str(takes.threads),
        text(takes.registers),
        str(takes.shared_bytes),
        text(takes.occupancy, ".0%"),
        takes.bound_by or "",
        text(takes.waves, ".1f"),
        f"{work.operations / 1e6:.1f}",
        f"{work.moved_bytes / 1024:.0f}",
        text(work.roofline_us, ".2f"),
        f"{work.roof}{' (fits L2)' if work.in_l2 and work.roof == 'memory' else ''}"
        if work.roof
        else "",
        text(row.measured_us, ".1f"),
        text(row.share, ".0%"),
        f"{row.nodes[0]}{more}" if row.nodes else "change of layout",
    )


def json_rows(rows: Sequence[OperationRow]) -> list[Mapping[str, object]]:
    """Return the rows as JSON values."""
    builtins: list[Mapping[str, object]] = msgspec.to_builtins(list(rows))
    return builtins
