"""What a build says beside its engine: where kernels are missing, how far ranges can be trusted."""

from collections.abc import Iterable

from device.engine.cuda_manifest import Cuda
from device.engine.manifest import UNCALIBRATED, Manifest, largest_bytes
from device.engine.tensorrt_manifest import TensorRT, TensorRTGpu
from toolkit.engine.frontend_result import Frontend
from toolkit.engine.options import BuildOptions
from toolkit.engine.segments import BuiltSegments
from toolkit.gpu.beyond_half import LARGEST_HALF, BeyondHalf
from toolkit.gpu.segments import NO_COMPILER, GpuBackend
from toolkit.graph.dtypes import FIRST_SM_WITH_BFLOAT16, LARGEST_BFLOAT16
from toolkit.graph.segment import PlannedSegment
from toolkit.partition.costs.measured import measured_in_both
from toolkit.quantize.ranges.table_file import foreign_notes

_MAX_REASONS = 5  # in one note; the manifest lists all nodes


def model_notes(manifest: Manifest, front: Frontend) -> tuple[str, ...]:
    """Return notes on the model, its precision and its ranges."""
    table = front.table
    notes = list(front.imported.notes)
    notes += [f"pass {step.name} left out: {step.failure}" for step in front.passes if step.failure]
    kernels = [any(isinstance(i, Cuda) for i in s.implementations) for s in manifest.segments]
    if manifest.provenance.precision == "fp16" and not all(kernels):
        stored = "BF16" if front.bfloat16 else "FP16"
        notes.append(f"portable segments compute in FP32; {stored} is for the board")
    notes += _refused_forms(manifest)
    if table is not None:
        notes += foreign_notes(table, front.imported.sha256)
    if table is not None and table.dummy:
        notes.append(UNCALIBRATED)
    return (*notes, *_wide_notes(front), *front.notes, *_unread_times(front))


def _unread_times(front: Frontend) -> Iterable[str]:
    """Yield a note on measured times that nothing reads, and on rows of them."""
    precision, measured = front.plan.precision, front.options.node_times
    used = {precision}
    if precision == "int8" and any(times.precision == "int8" for times in measured):
        used.add("fp16")  # it is compared with INT8 where both are measured
    for times, known in zip(measured, front.node_times(), strict=True):
        name = f"the times in {times.precision} on {times.profile} ({times.source})"
        dropped = [row.nodes for row in times.times if row not in known.times]
        if times.precision not in used:
            more = " and no times in int8 are given" if precision == "int8" else ""
            yield f"{name} were not read: the engine is {front.kernel_precision}{more}"
        elif dropped:
            yield (
                f"{len(dropped)} of {len(times.times)} rows of {name} were not read: they name "
                f"nodes that the engine does not have, such as {', '.join(dropped[0])}"
            )
    by_precision = {times.precision: times for times in measured}
    int8, half = by_precision.get("int8"), by_precision.get("fp16")
    if precision == "int8" and int8 and half and not measured_in_both(int8, half):
        counts = [len(times.by_node("gpu")) for times in (int8, half)]
        if any(counts):  # Files of other processors alone are not for that choice.
            yield (
                "measured times did not choose between INT8 and FP16, as no rows on the GPU time "
                f"the same nodes: {int8.source} has {counts[0]} in int8 and {half.source} has "
                f"{counts[1]} in fp16. Both files must name the same nodes"
            )


def _wide_notes(front: Frontend) -> Iterable[str]:
    """Yield a note on the nodes whose results GPU kernels have in FP32."""
    rows = {row.node or name: row for name, row in front.wide.items()}
    if not rows:
        return
    shown = [
        f"{name} ({', '.join(part for part in (row.op, _magnitude(row)) if part)})"
        for name, row in list(rows.items())[:_MAX_REASONS]
    ]
    more = f" and {len(rows) - _MAX_REASONS} more" if len(rows) > _MAX_REASONS else ""
    what, advice = f"may exceed {LARGEST_HALF:g}, the largest of FP16", ""
    sm = front.target.profile.sm or 0
    if front.bfloat16:
        what = f"may not be BF16, whose largest is {LARGEST_BFLOAT16:.4g}"
    elif front.plan.precision == "fp16" and front.float8 is None and sm >= FIRST_SM_WITH_BFLOAT16:
        advice = "; `tandem build --precision bf16` stores all in BF16, of 8 significant bits"
    yield (
        f"{len(rows)} result{'s' if len(rows) > 1 else ''} {what}, "
        f"and stay{'' if len(rows) > 1 else 's'} in FP32 on the GPU: {', '.join(shown)}{more}"
        f"{advice}"
    )


def _magnitude(row: BeyondHalf) -> str:
    return row.reason if row.amax is None else f"{row.reason}: up to {row.amax:.3g}"


def _refused_forms(manifest: Manifest) -> Iterable[str]:
    """Yield a note for each segment that no TensorRT of an era takes."""
    for segment in manifest.segments:
        for implementation in segment.implementations:
            if not isinstance(implementation, TensorRT | TensorRTGpu):
                continue
            ranged = implementation.ranged_problem
            if isinstance(implementation, TensorRT):
                how = f"on the DLA on {'any board' if ranged else 'JetPack from 7.2.2 on'}"
            else:
                how = f"through TensorRT {'before 10.8' if ranged else 'from 10.8 on'}"
            if problem := ranged or implementation.typed_problem:
                yield f"segment {segment.name} does not run {how}: {problem}"


def gpu_notes(
    built: BuiltSegments, manifest: Manifest, backend: GpuBackend | None, options: BuildOptions
) -> tuple[str, ...]:
    """Return notes on the kernels, and one for each GPU segment without any."""
    on_gpu = [segment for segment in built.plan.segments if segment.processor == "gpu"]
    no_compiler = (NO_COMPILER,) if on_gpu and backend is None and options.kernels else ()
    portable = (
        _note(segment, manifest, through_tensorrt=segment.name in built.tensorrt)
        for segment in on_gpu
        if segment.place == "portable"
    )
    fallback = _fallback_notes(built) if backend is not None else ()
    return (*no_compiler, *built.gpu.notes, *portable, *fallback, *_tensorrt_notes(built))


def _tensorrt_notes(built: BuiltSegments) -> Iterable[str]:
    """Yield what a board's TensorRT is for, and which GPU segments it cannot have."""
    both = [name for name in built.tensorrt if name in built.gpu.segments]
    if both:
        yield (
            f"{len(both)} GPU segments carry kernels and a form for TensorRT; "
            "`tandem-agent prepare` times both on the board, and the faster runs"
        )
    alone = [name for name in built.tensorrt if name not in built.gpu.segments]
    if alone:
        yield (
            f"{', '.join(alone)}: no kernels, only a form for TensorRT; where the board's TensorRT "
            "refuses it, the CPU runs it. `tandem build --gpu-backend auto` has both"
        )
    for name, reason in built.no_tensorrt.items():
        yield f"segment {name} has no form for TensorRT: {reason}"


def _fallback_notes(built: BuiltSegments) -> Iterable[str]:
    """Yield the bytes that the kernels of DLA segments take, and who has none, and why."""
    parts = [segment.entries for segment in built.fallback.segments.values()]
    sizes = {name: array.nbytes for part in parts for name, array in part.items()}
    if sizes:
        yield (
            f"DLA segments carry GPU kernels, too, {sum(sizes.values()) / 1e6:.2f} MB, for a board "
            "whose TensorRT refuses one; `tandem build --no-fallback` leaves them out"
        )
    for segment in built.plan.segments:
        reasons = [built.fallback.refused[n] for n in segment.nodes if n in built.fallback.refused]
        if reasons:
            yield (
                f"segment {segment.name} has no GPU kernels for a board whose TensorRT refuses it, "
                f"it runs portable there: {'; '.join(dict.fromkeys(reasons))}"
            )


def _note(segment: PlannedSegment, manifest: Manifest, *, through_tensorrt: bool) -> str:
    """Return the refused nodes of a segment without kernels, their reasons and its crossings."""
    reasons = list(dict.fromkeys(segment.no_kernel.values()))
    clauses = reasons[:_MAX_REASONS]
    if len(reasons) > _MAX_REASONS:
        clauses.append(f"and {len(reasons) - _MAX_REASONS} more reasons")
    if segment.unpaid:
        clauses.append(
            f"kernels for {len(segment.unpaid)} more nodes would not save their crossings"
        )
    into_bytes, out_bytes = _crossing_bytes(segment.name, manifest)
    if into_bytes or out_bytes:
        clauses.append(
            f"{into_bytes} bytes cross to the CPU and {out_bytes} back in every inference"
        )
    where = "through TensorRT, or portable" if through_tensorrt else "portable"
    return f"segment {segment.name} has no GPU kernels, it runs {where}: {'; '.join(clauses)}"


def _crossing_bytes(name: str, manifest: Manifest) -> tuple[int, int]:
    """Return the bytes that cross into a segment from, and out to, segments with kernels."""
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    ranges = {dim.name: dim for dim in manifest.dims}
    segment = next(segment for segment in manifest.segments if segment.name == name)
    with_kernels = [
        segment
        for segment in manifest.segments
        if any(isinstance(i, Cuda) for i in segment.implementations)
    ]
    written = {tensor for segment in with_kernels for tensor in segment.outputs}
    read = {tensor for segment in with_kernels for tensor in segment.inputs}

    def total(names: Iterable[str]) -> int:
        return sum(largest_bytes(tensors[tensor], ranges) or 0 for tensor in names)

    return (
        total(tensor for tensor in segment.inputs if tensor in written),
        total(tensor for tensor in segment.outputs if tensor in read),
    )
