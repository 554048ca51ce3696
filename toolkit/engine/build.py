"""The build, step by step: model.onnx -> engine file.

 1 import      model file -> graph                   toolkit.importers
 2 passes      fold, fuse, infer shapes              toolkit.graph.passes
 3 rewrite     what keeps nodes off the DLA          toolkit.partition.prepare, toolkit.dla.legalize
 4 calibrate   data -> amax per tensor (INT8)        toolkit.quantize.ranges, calibration
 5 ask         every node: is there a GPU kernel     toolkit.gpu.support, toolkit.engine.support
 6 plan        every node: DLA, GPU or portable      toolkit.partition.planning, costs, solver
 7 quantize    table + plan -> Q/DQ graph (INT8)     toolkit.quantize.scales, quantize
 8 extract     segments -> graphs of their own       toolkit.graph.extract
 9 lower       GPU segments -> kernel programs       toolkit.gpu.lower
10 compile     kernel programs -> cubins             toolkit.gpu.compile
11 assemble    manifest, memory plan, entries        toolkit.engine.assemble
12 write       one file, atomically, once proven     toolkit.engine.write

Steps 7 to 10 are in `toolkit.engine.segments`, which says when they are gone through once more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UnsetType

from device.argument_names import with_arguments
from device.engine.manifest import Manifest
from device.engine.preprocessing import Preprocessing
from device.install_advice import pip_install
from toolkit.dla.legalize.rewrite import Applied
from toolkit.engine.argument_names import BUILD
from toolkit.engine.assemble import FrameCompiler, assemble
from toolkit.engine.batch import bound_notes
from toolkit.engine.calibrate import Calibrated, calibrate
from toolkit.engine.kept_cost import kept_cost_notes
from toolkit.engine.notes import gpu_notes, model_notes
from toolkit.engine.options import BuildJob, BuildOptions
from toolkit.engine.plan_models import PlanMember, PlanRequest, planned_batch
from toolkit.engine.preprocessing import engine_preprocessing
from toolkit.engine.provenance import provenance_of, with_measured
from toolkit.engine.read import read_model
from toolkit.engine.report_text import build_text
from toolkit.engine.segments import BuiltSegments, Quantizer, build_segments
from toolkit.engine.support import ask_gpu
from toolkit.engine.target import Target, choose_target
from toolkit.engine.write import check_destination, write_proven
from toolkit.errors import BuildError, about
from toolkit.gpu.codegen.compile import Progress
from toolkit.gpu.frames import compile_frames
from toolkit.gpu.ports import compile_port
from toolkit.gpu.report import GpuReport, report_segment
from toolkit.gpu.segments import GpuBackend, find_backend
from toolkit.graph.passes import PassReport
from toolkit.importers.onnx import ModelBytes, ModelSource, source_path
from toolkit.importers.source import silent
from toolkit.partition.planning.objectives import goal_named
from toolkit.partition.planning.plan import Model, Plan, SharedPlan, plan_together
from toolkit.partition.planning.portable import KernelSupport
from toolkit.quantize.gpu_operands import operands_on_gpu, tied_on_gpu
from toolkit.quantize.loss.judge import Judgement, check, judge
from toolkit.quantize.loss.parts import split_outputs
from toolkit.quantize.quantize import QuantizedModel, quantize
from toolkit.quantize.ranges.measure import Ranges
from toolkit.quantize.scales.effect import ScaleEffect, scale_effect, scale_notes
from toolkit.quantize.scales.rules import UnifiedRanges, unify_scales

__all__ = ["BuildOptions", "BuildResult", "Progress", "build_engine"]


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The engine that was written, and the report about it.

    `plan`: as its segments were cut in the end. `kept`: the nodes of an INT8 engine that stay in
    floating point, with the reasons. `gpu`: the kernels and the memory of each segment that has
    any. `loss`: what the outputs of the engine lose, None without calibration data.
    """

    path: Path
    target: Target
    manifest: Manifest
    plan: Plan
    passes: tuple[PassReport, ...]
    rewrites: tuple[Applied, ...]
    notes: tuple[str, ...]
    calibration: Ranges | None
    scale_rules: ScaleEffect
    kept: Mapping[str, str] = field(default_factory=dict)
    gpu: tuple[GpuReport, ...] = ()
    loss: Judgement | None = None

    @property
    def report(self) -> str:
        """What runs where and why, calibration, notes and kernels, as text for a script."""
        return with_arguments(build_text(self), BUILD)


def build_engine(
    model: ModelSource,
    profile: str,
    out: str | Path,
    options: BuildOptions | None = None,
    on_progress: Progress | None = None,
) -> BuildResult:
    """Build an engine for a device profile and write it to `out`.

    Raises TandemError: the model, the data or the profile cannot be used; no engine is written
    then.
    """
    options = options or BuildOptions()
    target = choose_target(profile, options.jetpack)
    path = Path(out)
    check_destination(path, None if isinstance(model, ModelBytes) else source_path(model))
    name = source_path(model).name
    with about(name):
        job = _job(model, target, options, on_progress or silent)
        calibrated = calibrate(job)
        preprocessing = engine_preprocessing(calibrated.table, job)
        backend = _backend(job)
        kernels = ask_for_kernels(calibrated, job, backend)
        shared = plan_nodes(calibrated, kernels, job)
        unified = unified_ranges(calibrated, shared.plans[0])
        built = build_planned(calibrated, shared, unified, job, backend)
        manifest, entries = _assemble(calibrated, preprocessing, built, job, backend)
    manifest, loss = _write(path, manifest, entries, calibrated, job)
    scale_rules = scale_effect(unified, calibrated.ranges)
    return BuildResult(
        path=path,
        target=target,
        manifest=manifest,
        plan=built.plan,
        passes=job.passes,
        rewrites=calibrated.prepared.applied,
        notes=(
            *model_notes(manifest, calibrated, job),
            *kept_cost_notes(
                calibrated,
                built.plan,
                target.profile,
                lambda without: plan_nodes(without, kernels, job).plans[0],
            ),
            *bound_notes(built.plan),
            *gpu_notes(built, manifest, backend, job.options),
            *scale_notes(scale_rules),
        ),
        calibration=calibrated.ranges,
        scale_rules=scale_rules,
        kept=calibrated.kept(),
        gpu=tuple(report_segment(name, segment) for name, segment in built.gpu.segments.items()),
        loss=loss,
    )


def _job(model: ModelSource, target: Target, options: BuildOptions, report: Progress) -> BuildJob:
    """Steps 1 and 2; with a bound on latency at the batch that a plan chooses."""
    job = read_model(model, target, options, report)
    if options.plan.max_latency_ms is None:
        return job
    if options.dims:
        raise BuildError(
            f"A bound on latency fixes the batch, but dimension {options.dims[0].name!r} is to "
            "stay dynamic: leave out one of `tandem build --dim` and --max-latency-ms."
        )
    report("plan", 0.0)
    shapes = dict(options.shapes or {})
    request = PlanRequest(
        members=(PlanMember(job.imported.name, model, table=options.table, shapes=shapes),),
        profile=target.profile.name,
        jetpack=options.jetpack,
        options=job.plan,
        plugins=options.plugins,
    )
    batching, plan = planned_batch(request)
    if batching.size > 1:
        job = read_model(model, target, options, report, batch=batching.size)
    return replace(job, plan=plan, batching=batching)


def ask_for_kernels(
    calibrated: Calibrated, job: BuildJob, backend: GpuBackend | None
) -> KernelSupport:
    """Step 5: ask the GPU backend for a kernel of each node; without a backend, ask nothing."""
    if backend is None:
        return KernelSupport()
    return ask_gpu(calibrated.prepared.model, job.imported.dims, job.options.plugins)


def plan_nodes(calibrated: Calibrated, kernels: KernelSupport, job: BuildJob) -> SharedPlan:
    """Step 6: give every node a processor, and cut segments where kernels are missing."""
    job.report("plan", 0.0)
    table = calibrated.table
    model = Model(
        job.imported.name,
        calibrated.prepared.model.graph,
        has_scale=(table.tensors if table is not None else {}).__contains__,
        keep_float=calibrated.keep_float,
        cuts=calibrated.prepared.cuts,
        rewrites=calibrated.prepared.applied,
        kernels=kernels,
        batching=job.batching,
    )
    return plan_together((model,), job.target.profile, job.plan)


def unified_ranges(calibrated: Calibrated, plan: Plan) -> UnifiedRanges:
    """Unify the ranges for DLA and GPU: tensors that must share a range get equal ones."""
    table = calibrated.table
    if table is None:
        return UnifiedRanges({}, (), ())
    keep = calibrated.keep_float
    dla = [n for s in plan.segments if s.processor.startswith("dla") for n in s.nodes]
    graph = calibrated.prepared.model
    tied = tied_on_gpu(graph, _on_gpu(plan), keep)
    return unify_scales(graph, table.tensors, [*(name for name in dla if name not in keep), *tied])


def build_planned(
    calibrated: Calibrated,
    shared: SharedPlan,
    ranges: UnifiedRanges,
    job: BuildJob,
    backend: GpuBackend | None,
) -> BuiltSegments:
    """Steps 7 to 10: quantize, extract, lower and compile the segments of a plan."""
    job.report("lower", 0.0)
    quantizer = _quantizer(calibrated, shared.plans[0], ranges.amax)
    return build_segments(shared, job, quantizer, backend)


def _backend(job: BuildJob) -> GpuBackend | None:
    if not job.options.kernels:
        return None
    return find_backend(
        job.target.profile,
        job.plan.precision,
        dims=job.imported.dims,
        plugins=job.options.plugins,
        tactics=job.options.tactics,
        on_progress=job.report,
    )


def _on_gpu(plan: Plan) -> frozenset[str]:
    """Return the nodes planned on the GPU."""
    return frozenset(node for s in plan.segments if s.processor == "gpu" for node in s.nodes)


def _quantizer(calibrated: Calibrated, plan: Plan, amax: Mapping[str, float]) -> Quantizer:
    """Return step 7. It depends on the processor of each node, and on no cut between kernels."""
    graph, keep = calibrated.prepared.model, calibrated.keep_float
    if calibrated.table is None:
        return lambda segment_of: QuantizedModel(graph, segment_of, {})
    dla = frozenset(s.name for s in plan.segments if s.processor.startswith("dla"))
    operands = operands_on_gpu(graph, _on_gpu(plan), keep, amax)
    return lambda segment_of: quantize(
        graph, amax, segment_of, dla, keep_float=keep, operands=operands
    )


def _assemble(
    calibrated: Calibrated,
    preprocessing: Preprocessing | UnsetType,
    built: BuiltSegments,
    job: BuildJob,
    backend: GpuBackend | None,
) -> tuple[Manifest, dict[str, np.ndarray[Any, Any]]]:
    """Step 11: the manifest and the entries of the file."""
    return assemble(
        built.quantized.model,
        built.plan.segments,
        built.extracted,
        cuda={**built.gpu.segments, **built.fallback.segments},
        tensorrt=built.tensorrt,
        take_turns=job.target.profile.dla_cores > 1
        and goal_named(job.plan.objective).frames_in_flight,
        compile_port=None if backend is None else partial(compile_port, backend),
        scales=built.quantized.scales,
        dims=built.gpu.dims or job.imported.dims,
        placements=built.plan.placements,
        profile=job.target.profile.name,
        provenance=provenance_of(calibrated, built, job),
        preprocessing=preprocessing,
        compile_frames=_frame_compiler(preprocessing, job, backend),
    )


def _frame_compiler(
    preprocessing: Preprocessing | UnsetType, job: BuildJob, backend: GpuBackend | None
) -> FrameCompiler | None:
    """Return what compiles the kernels for frames, None where they are not asked for.

    Raises BuildError: no kernels can be made, or nothing says what they compute.
    """
    if job.options.preprocess_on == "cpu":
        return None
    if backend is None:
        raise BuildError(
            "`tandem build --preprocess-on gpu` makes kernels, and profile"
            f" {job.target.profile.name} has no GPU or this host no Triton: take another profile,"
            f" or {pip_install('gpu-build')}."
        )
    if not preprocessing:
        raise BuildError(
            "`tandem build --preprocess-on gpu` compiles the preprocessing in, and nothing says"
            " what it is: calibrate with images (--data), or state it, such as --preprocess yolo."
        )
    return partial(compile_frames, backend, preprocessing)


def _write(
    path: Path,
    manifest: Manifest,
    entries: Mapping[str, np.ndarray[Any, Any]],
    calibrated: Calibrated,
    job: BuildJob,
) -> tuple[Manifest, Judgement | None]:
    """Step 12: the file, once a session has run it and its loss is within the limits.

    The engine has the ranges of all samples, and rounds what the calibration only predicts: scales
    that the DLA shares, and tensors between segments. So it is judged again, as it is, and the
    manifest says what was measured. Returns that manifest, and the judgement.
    """
    job.report("write", 0.0)
    ranges, name = calibrated.ranges, job.imported.name
    judgement: Judgement | None = None

    def accept(outputs: Sequence[Mapping[str, np.ndarray[Any, Any]]]) -> Manifest:
        nonlocal judgement
        if ranges is None:
            return manifest
        parts = ranges.fit.trial.parts
        actual = [split_outputs(parts, arrays) for arrays in outputs]
        judgement = judge(parts, [exact for _, exact in ranges.judges], actual, basis="engine")
        if not job.options.accept_loss:
            check(judgement, f"the engine of {name}")
        return with_measured(manifest, judgement, ranges, job)

    samples = [sample for sample, _ in ranges.judges] if ranges is not None else []
    accepted = write_proven(path, manifest, entries, model=name, samples=samples, accept=accept)
    job.report("write", 1.0)
    return accepted, judgement
