"""The GPU backend of a build: segments -> kernels -> `cuda` parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from device.engine.manifest import DimRange
from device.install_advice import pip_install
from device.profile import Profile
from toolkit.gpu.codegen.triton_version import check_compiler, has_compiler
from toolkit.gpu.compile_segment import GpuSegment, compile_segment
from toolkit.gpu.coordinates import coordinate_tensors
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.lower import KernelPrecision, KernelProgram, lower_segment
from toolkit.gpu.schedule.tactics import TacticOptions
from toolkit.gpu.shapes.inference import STEPS, Trace, in_steps, traces_of, with_steps
from toolkit.gpu.target import GpuTarget
from toolkit.graph.extract import ExtractedSegment
from toolkit.graph.segment import PlannedSegment
from toolkit.plugins import Plugin
from toolkit.progress import Progress

NO_COMPILER = f"no GPU kernels: Triton is not installed on this host; {pip_install('gpu-build')}"


class SegmentCompiler(Protocol):
    """Compiles the kernels of a segment, as `toolkit.gpu.compile_segment.compile_segment`."""

    def __call__(
        self,
        name: str,
        program: KernelProgram,
        *,
        gpu: GpuTarget,
        dims: Sequence[DimRange] = (),
        tactics: TacticOptions | None = None,
        on_progress: Progress | None = None,
    ) -> GpuSegment:
        """Return the segment's part of the engine."""


@dataclass(frozen=True, slots=True)
class GpuBackend:
    """The target GPU of a build and the options of its kernels.

    `dims`: the engine's dynamic dimensions; `wide`: tensors that stay FP32; `compiler`: compiles
    the kernels of one segment.
    """

    gpu: GpuTarget
    precision: KernelPrecision
    dims: tuple[DimRange, ...] = ()
    plugins: tuple[Plugin, ...] = ()
    wide: frozenset[str] = frozenset()
    tactics: TacticOptions = field(default_factory=TacticOptions)
    compiler: SegmentCompiler = compile_segment
    on_progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class GpuPrograms:
    """Segments before compiling, by name.

    `refused`: nodes of other segments that no kernel computes, and why. `dims`: the dynamic
    dimensions, with the steps that kernels need.
    """

    programs: Mapping[str, KernelProgram] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    dims: tuple[DimRange, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuSegments:
    """Segments with kernels, by name.

    `refused`: nodes of other segments that no kernel computes, and why. `notes` say what holds for
    all. `dims`: the dynamic dimensions, with the steps that kernels need.
    """

    segments: Mapping[str, GpuSegment] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    dims: tuple[DimRange, ...] = ()


def find_backend(
    profile: Profile,
    precision: KernelPrecision,
    *,
    dims: Sequence[DimRange] = (),
    plugins: Sequence[Plugin] = (),
    wide: frozenset[str] = frozenset(),
    tactics: TacticOptions | None = None,
    on_progress: Progress | None = None,
) -> GpuBackend | None:
    """Return the backend of a profile, None where it has no GPU or this host no compiler.

    Raises CompileError: the compiler is too old.
    """
    if profile.gpu is None or not has_compiler():
        return None
    check_compiler()
    tactics = tactics or TacticOptions()
    return GpuBackend(
        gpu_target(profile, tactics),
        precision,
        tuple(dims),
        tuple(plugins),
        wide,
        tactics,
        on_progress=on_progress,
    )


def gpu_target(profile: Profile, tactics: TacticOptions) -> GpuTarget:
    """Return the GPU of a profile that has one."""
    assert profile.gpu is not None
    return GpuTarget.of(profile.gpu, profile.memory, exhaustive=tactics.exhaustive)


def lower_gpu_segments(
    backend: GpuBackend,
    planned: Sequence[PlannedSegment],
    extracted: Sequence[ExtractedSegment],
) -> GpuPrograms:
    """Lower the segments `planned`; `extracted`: all segments of the model, in running order.

    Dynamic dimensions get the smallest steps that leave the fewest nodes without a kernel.
    Raises PluginError: a plugin fails.
    """
    if not planned:
        return GpuPrograms()
    dims = backend.dims
    if dims:
        dims = with_steps([piece.model for piece in extracted], dims, backend.plugins)
    models = {piece.name: piece.model for piece in extracted}
    exact = coordinate_tensors(list(models.values()))

    def lower(dims: tuple[DimRange, ...]) -> GpuPrograms:
        traces = trace_segments(extracted, dims, backend.plugins)
        programs: dict[str, KernelProgram] = {}
        refused: dict[str, str] = {}
        for segment in planned:
            try:
                programs[segment.name] = lower_segment(
                    models[segment.name],
                    gpu=backend.gpu,
                    precision=backend.precision,
                    plugins=backend.plugins,
                    traces=traces[segment.name],
                    exact=exact,
                    wide=backend.wide,
                )
            except NotCoveredError as error:
                refused |= _refused(segment, error)
        return GpuPrograms(programs, refused, dims)

    return _with_fewest_refused(lower, dims)


def compile_gpu_segments(
    backend: GpuBackend, planned: Sequence[PlannedSegment], programs: GpuPrograms
) -> GpuSegments:
    """Compile those of the segments `planned` that were lowered.

    Raises CompileError: a kernel does not compile, or does not fit the GPU; BuildError: a workspace
    does not keep the limit of the tactics.
    """
    compiled: dict[str, GpuSegment] = {}
    refused: dict[str, str] = {}
    for segment in planned:
        if segment.name not in programs.programs:
            continue
        try:
            compiled[segment.name] = backend.compiler(
                segment.name,
                programs.programs[segment.name],
                gpu=backend.gpu,
                dims=programs.dims,
                tactics=backend.tactics,
                on_progress=backend.on_progress,
            )
        except NotCoveredError as error:
            refused |= _refused(segment, error)
    return GpuSegments(compiled, refused, _notes(compiled, programs.dims), programs.dims)


def _with_fewest_refused(
    lower: Callable[[tuple[DimRange, ...]], GpuPrograms], dims: tuple[DimRange, ...]
) -> GpuPrograms:
    """Lower with the smallest steps of the dimensions that leave the fewest nodes without a kernel.

    Steps make halves and quarters of a size exact, which some kernels need.
    """
    unstepped = lower(dims)
    finest = in_steps(dims, STEPS[-1])
    if not unstepped.refused or finest == dims:
        return unstepped
    best = lower(finest)
    if len(best.refused) >= len(unstepped.refused):
        return unstepped
    fewest = len(best.refused)
    for step in STEPS[:-1]:
        candidate = lower(in_steps(dims, step))
        if len(candidate.refused) == fewest:
            best = candidate
            break
    for index, dim in enumerate(dims):
        candidate = lower((*best.dims[:index], dim, *best.dims[index + 1 :]))
        best = candidate if len(candidate.refused) == fewest else best
    return best


def _notes(segments: Mapping[str, GpuSegment], dims: Sequence[DimRange]) -> tuple[str, ...]:
    steps = tuple(
        f"dimension {dim.name!r} goes in steps of {dim.step}, at which what the network halves and "
        "doubles fits"
        for dim in dims
        if dim.step > 1
    )
    return steps + tuple(note for segment in segments.values() for note in segment.notes)


def trace_segments(
    extracted: Sequence[ExtractedSegment], dims: Sequence[DimRange], plugins: Sequence[Plugin] = ()
) -> dict[str, tuple[Trace, ...]]:
    """Return what is known before each segment at every point of the dynamic dimensions.

    `extracted`: all segments in running order; the input sizes of a segment are result sizes of
    earlier ones.
    """
    by_segment: dict[str, tuple[Trace, ...]] = {}
    traces = traces_of(dims, plugins)
    for piece in extracted:
        by_segment[piece.name] = traces
        traces = tuple(trace.after(piece.model) for trace in traces)
    return by_segment


def _refused(segment: PlannedSegment, error: NotCoveredError) -> dict[str, str]:
    """Return the nodes of the plan that an error names; all of the segment where it names none."""
    named = {node: error.reasons[node] for node in segment.nodes if node in error.reasons}
    return named or dict.fromkeys(segment.nodes, str(error))
