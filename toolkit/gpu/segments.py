"""The GPU segments of a build -> their `cuda` implementations, or why there are none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from device.manifest import Precision
from device.profile import Profile
from toolkit.gpu.compile import Progress, has_compiler
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.gpu import GpuTarget
from toolkit.gpu.lower import GpuSegment, lower_gpu
from toolkit.lower import LoweredSegment
from toolkit.planning.segments import PlannedSegment


@dataclass(frozen=True, slots=True)
class GpuSegments:
    """Segments with kernels, by name, and a note for each GPU segment without."""

    segments: Mapping[str, GpuSegment] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def lower_gpu_segments(
    planned: Sequence[PlannedSegment],
    lowered: Sequence[LoweredSegment],
    profile: Profile,
    precision: Precision,
    on_progress: Progress | None = None,
) -> GpuSegments:
    """Make kernels for every segment that is planned on the GPU.

    Raises CompileError: a kernel does not compile, or does not fit the GPU of the profile.
    """
    on_gpu = [
        piece for segment, piece in zip(planned, lowered, strict=True) if segment.processor == "gpu"
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
    gpu = GpuTarget(profile.gpu.sm, profile.gpu.sm_count.value)
    found: dict[str, GpuSegment] = {}
    notes: list[str] = []
    for piece in on_gpu:
        try:
            found[piece.name] = lower_gpu(
                piece.name,
                piece.onnx,
                piece.weights,
                gpu=gpu,
                precision=precision,
                on_progress=on_progress,
            )
        except NotCoveredError as error:
            notes.append(f"segment {piece.name} has no GPU kernels, it runs portable: {error}")
    return GpuSegments(found, tuple(notes))
