"""Steps 7 to 10 of the build: the segments of a plan -> graphs of their own, and kernels.

The plan has cut its segments where a node alone tells that it has no kernel. Lowering and compiling
may refuse more, for what `toolkit.gpu.support` names: the graph with its Q/DQ, the cut, open sizes
and the tactics decide it. Then the plan is cut once more, at all nodes refused so far, and steps 7
to 10 are gone through again. A segment that is refused then runs portable as a whole.

Segments on a DLA get kernels, too, of the same graph with the same scales: for boards on which
TensorRT refuses them. Where they cannot have any, the plan stays as it is.

With another GPU backend than "cuda", GPU segments get forms for TensorRT, too: also those without a
kernel, which TensorRT may run. All forms for TensorRT are made of the graph in floating point, with
its quantization as metadata (`toolkit.quantize.qdq.writer.FloatWriter`), cut alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from device.engine.manifest import DimRange
from toolkit.engine.assemble import border_tensors
from toolkit.engine.frontend_result import Frontend
from toolkit.engine.tensorrt import TensorRTSegment
from toolkit.engine.tensorrt_gpu import tensorrt_gpu_segment
from toolkit.gpu.lower import KernelProgram
from toolkit.gpu.segments import (
    GpuBackend,
    GpuSegments,
    compile_gpu_segments,
    lower_gpu_segments,
)
from toolkit.graph.extract import ExtractedSegment, extract_segments
from toolkit.partition.planning.plan import Plan, SharedPlan, cut_again, run_portable
from toolkit.quantize.qdq.writer import FloatWriter, QdqWriter
from toolkit.quantize.quantize import QuantizedModel

Quantizer = Callable[[Mapping[str, str], type[QdqWriter]], QuantizedModel]
"""Step 7: the segment of each node -> the graph, with Q/DQ where there are ranges."""


@dataclass(frozen=True, slots=True)
class BuiltSegments:
    """The plan as it was cut in the end, its segments extracted, and the kernels by segment.

    `fallback`: the kernels of segments on a DLA. `tensorrt`: the forms of GPU segments;
    `no_tensorrt`: why others of them have none.
    """

    plan: Plan
    quantized: QuantizedModel
    extracted: tuple[ExtractedSegment, ...]
    gpu: GpuSegments = field(default_factory=GpuSegments)
    fallback: GpuSegments = field(default_factory=GpuSegments)
    tensorrt: Mapping[str, TensorRTSegment] = field(default_factory=dict)
    no_tensorrt: Mapping[str, str] = field(default_factory=dict)


def build_segments(
    shared: SharedPlan, front: Frontend, quantizer: Quantizer, backend: GpuBackend | None
) -> BuiltSegments:
    """Quantize, extract, lower and compile the segments of a plan.

    `backend` None: no kernels are made.
    Raises as `toolkit.gpu.segments.lower_gpu_segments` and `compile_gpu_segments`.
    """
    (plan,) = shared.plans
    built = _build(plan, quantizer, backend, front)
    if built.gpu.refused:
        plan = cut_again(shared, front.target.profile, front.plan, built.gpu.refused).plans[0]
        built = _build(plan, quantizer, backend, front, again=True)
    built = replace(built, plan=run_portable(built.plan, built.gpu.refused))
    if backend is None or not front.options.fallback:
        return built
    return replace(built, fallback=_fallback(built, backend))


def _fallback(built: BuiltSegments, backend: GpuBackend) -> GpuSegments:
    """Return the kernels of the segments on a DLA, at the dynamic dimensions of the others.

    Without measured times each operation has one tactic, the cost model's choice: to compile the
    others takes most of the time of a build, for what seldom runs.
    """
    on_dla = [s for s in built.plan.segments if s.processor.startswith("dla")]
    backend = replace(backend, dims=built.gpu.dims or backend.dims)
    programs = lower_gpu_segments(backend, on_dla, built.extracted)
    if backend.tactics.timings is None:
        chosen = {name: _first_tactics(program) for name, program in programs.programs.items()}
        programs = replace(programs, programs=chosen)
    compiled = compile_gpu_segments(backend, on_dla, programs)
    return replace(compiled, refused={**programs.refused, **compiled.refused})


def _first_tactics(program: KernelProgram) -> KernelProgram:
    ops = tuple(replace(op, tactics=op.tactics[:1]) for op in program.ops)
    return replace(program, ops=ops)


def _build(
    plan: Plan,
    quantizer: Quantizer,
    backend: GpuBackend | None,
    front: Frontend,
    *,
    again: bool = False,
) -> BuiltSegments:
    """Go through steps 7 to 10. `again`: what is still refused stops nothing."""
    quantized, extracted = extract_quantized(plan, quantizer, QdqWriter)
    places = {segment.place for segment in plan.segments}
    if front.table is not None and ("dla" in places or front.options.gpu_backend != "cuda"):
        _, floating = extract_quantized(plan, quantizer, FloatWriter)
        pairs = zip(extracted, floating, strict=True)
        extracted = tuple(
            replace(piece, floating=float_piece.model) for piece, float_piece in pairs
        )
    built = BuiltSegments(plan, quantized, extracted)
    if backend is None:
        return _with_tensorrt(built, front, front.imported.dims)
    on_gpu = [segment for segment in plan.segments if segment.place == "gpu"]
    programs = lower_gpu_segments(backend, on_gpu, extracted)
    if programs.refused and not again:
        return replace(built, gpu=GpuSegments(refused=programs.refused))
    built = _with_tensorrt(built, front, programs.dims or front.imported.dims)
    if front.options.gpu_backend == "tensorrt":
        on_gpu = [segment for segment in on_gpu if segment.name not in built.tensorrt]
    gpu = compile_gpu_segments(backend, on_gpu, programs)
    return replace(built, gpu=replace(gpu, refused={**programs.refused, **gpu.refused}))


def extract_quantized(
    plan: Plan, quantizer: Quantizer, writer: type[QdqWriter]
) -> tuple[QuantizedModel, tuple[ExtractedSegment, ...]]:
    """Steps 7 and 8: quantize a plan's graph, and cut it along the segments."""
    quantized = quantizer({node: s.name for s in plan.segments for node in s.nodes}, writer)
    names = [segment.name for segment in plan.segments]
    return quantized, extract_segments(quantized.model, quantized.segment_of, names)


def _with_tensorrt(
    built: BuiltSegments, front: Frontend, dims: Sequence[DimRange]
) -> BuiltSegments:
    """Give GPU segments their forms for TensorRT, if that is asked for."""
    if front.options.gpu_backend == "cuda":
        return built
    quantized, names = built.quantized, {dim.name for dim in dims}
    tensors = border_tensors(quantized.model, built.extracted, quantized.scales, names)
    forms: dict[str, TensorRTSegment] = {}
    reasons: dict[str, str] = {}
    for segment, piece in zip(built.plan.segments, built.extracted, strict=True):
        if segment.processor != "gpu":
            continue
        form = tensorrt_gpu_segment(piece, tensors, built.plan.precision, front.wide)
        if isinstance(form, str):
            reasons[segment.name] = form
        else:
            forms[segment.name] = form
    return replace(built, tensorrt=forms, no_tensorrt=reasons)
