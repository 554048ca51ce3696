"""The GPU segments of a build -> their `cuda` implementations, or why there are none."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from device.engine.manifest import DimRange, Precision
from device.profile import Profile
from toolkit.gpu.codegen.compile import Progress, has_compiler
from toolkit.gpu.compile import GpuSegment, compile_segment
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.gpu.schedule.tactics import TacticOptions
from toolkit.gpu.shapes.inference import STEPS, Trace, in_steps, traces_of, with_steps
from toolkit.gpu.target import GpuTarget
from toolkit.graph.extract import ExtractedSegment
from toolkit.graph.segment import PlannedSegment
from toolkit.plugins import Plugin


@dataclass(frozen=True, slots=True)
class GpuSegments:
    """Segments with kernels, by name.

    `refused`: nodes that no kernel computes, and why; there are no segments then. `notes` say why
    there are none at all, or what holds for all. `dims`: the dynamic dimensions, with the steps
    that kernels need.
    """

    segments: Mapping[str, GpuSegment] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    dims: tuple[DimRange, ...] = ()


def compile_gpu_segments(
    planned: Sequence[PlannedSegment],
    lowered: Sequence[ExtractedSegment],
    profile: Profile,
    precision: Precision,
    on_progress: Progress | None = None,
    *,
    portable: Collection[str] = (),
    dims: Sequence[DimRange] = (),
    plugins: Sequence[Plugin] = (),
    tactics: TacticOptions | None = None,
) -> GpuSegments:
    """Make kernels for every segment that is planned on the GPU and not among `portable`.

    `dims`: the engine's dynamic dimensions. Raises CompileError: a kernel does not compile, or does
    not fit the GPU of the profile; PluginError: a plugin fails; BuildError: a workspace does not
    keep the limit of `tactics`.
    """
    on_gpu = [
        (segment, piece)
        for segment, piece in zip(planned, lowered, strict=True)
        if segment.processor == "gpu" and segment.name not in portable
    ]
    if profile.gpu is None or not on_gpu:
        return GpuSegments()
    if not has_compiler():
        return GpuSegments(
            notes=(
                "no GPU kernels: Triton is not installed on this host; "
                "pip install 'tandem-edge[gpu-build]'",
            )
        )
    tactics = tactics or TacticOptions()
    gpu = GpuTarget.of(profile.gpu, profile.memory, exhaustive=tactics.exhaustive)
    draft = partial(_lower_all, on_gpu, lowered, gpu=gpu, precision=precision, plugins=plugins)
    pairs = [(piece.onnx, piece.weights) for piece in lowered]
    drafts = _with_fewest_refused(draft, with_steps(pairs, dims, plugins) if dims else ())
    if drafts.refused:
        return GpuSegments(refused=drafts.refused)
    drafted, dims = drafts.drafted, drafts.dims
    refused: dict[str, str] = {}
    found: dict[str, GpuSegment] = {}
    for segment, _ in on_gpu:
        try:
            found[segment.name] = compile_segment(
                segment.name,
                drafted[segment.name],
                gpu=gpu,
                dims=dims,
                tactics=tactics,
                on_progress=on_progress,
            )
        except NotCoveredError as error:
            refused |= _refused(segment, error)
    return GpuSegments(refused=refused) if refused else _found(found, dims)


@dataclass(frozen=True, slots=True)
class _Programs:
    """All segments drafted for dynamic dimensions, and nodes without kernels."""

    dims: tuple[DimRange, ...]
    drafted: Mapping[str, KernelProgram]
    refused: Mapping[str, str]


def _lower_all(
    on_gpu: Sequence[tuple[PlannedSegment, ExtractedSegment]],
    lowered: Sequence[ExtractedSegment],
    dims: tuple[DimRange, ...],
    *,
    gpu: GpuTarget,
    precision: Precision,
    plugins: Sequence[Plugin],
) -> _Programs:
    traces = trace_segments(lowered, dims, plugins)
    drafted: dict[str, KernelProgram] = {}
    refused: dict[str, str] = {}
    for segment, piece in on_gpu:
        try:
            drafted[segment.name] = lower_segment(
                piece.onnx,
                piece.weights,
                gpu=gpu,
                precision=precision,
                plugins=plugins,
                traces=traces[piece.name],
            )
        except NotCoveredError as error:
            refused |= _refused(segment, error)
    return _Programs(dims, drafted, refused)


def _with_fewest_refused(
    draft: Callable[[tuple[DimRange, ...]], _Programs], dims: tuple[DimRange, ...]
) -> _Programs:
    """Draft with the least steps of the dimensions that leave the fewest nodes without kernels.

    In steps, what is a half or a quarter of a size is so exactly, which some kernels need.
    """
    plain = draft(dims)
    finest = in_steps(dims, STEPS[-1])
    if not plain.refused or finest == dims:
        return plain
    best = draft(finest)
    if len(best.refused) >= len(plain.refused):
        return plain
    fewest = len(best.refused)
    for step in STEPS[:-1]:
        found = draft(in_steps(dims, step))
        if len(found.refused) == fewest:
            best = found
            break
    for place, dim in enumerate(dims):
        found = draft((*best.dims[:place], dim, *best.dims[place + 1 :]))
        best = found if len(found.refused) == fewest else best
    return best


def _found(segments: Mapping[str, GpuSegment], dims: Sequence[DimRange]) -> GpuSegments:
    notes = tuple(
        f"dimension {dim.name!r} goes in steps of {dim.step}, at which what the network halves and "
        "doubles fits"
        for dim in dims
        if dim.step > 1
    )
    chosen = tuple(note for segment in segments.values() for note in segment.notes)
    return GpuSegments(segments, notes=notes + chosen, dims=tuple(dims))


def trace_segments(
    lowered: Sequence[ExtractedSegment], dims: Sequence[DimRange], plugins: Sequence[Plugin] = ()
) -> dict[str, tuple[Trace, ...]]:
    """Return what is known before each segment at the points at which it is drafted.

    `lowered` are all segments in running order: sizes of one's inputs are those of another's
    results.
    """
    found: dict[str, tuple[Trace, ...]] = {}
    traces = traces_of(dims, plugins)
    for piece in lowered:
        found[piece.name] = traces
        traces = tuple(trace.after(piece.onnx, piece.weights) for trace in traces)
    return found


def _refused(segment: PlannedSegment, error: NotCoveredError) -> dict[str, str]:
    """Return the nodes of the plan that an error names; all of the segment where it names none."""
    named = {node: error.reasons[node] for node in segment.nodes if node in error.reasons}
    return named or dict.fromkeys(segment.nodes, str(error))
