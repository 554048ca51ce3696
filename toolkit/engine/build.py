"""The build, step by step: model.onnx -> engine file.

 1 import      model file -> graph                   toolkit.importers
 2 passes      fold, fuse, infer shapes              toolkit.graph.passes
 3 rewrite     what keeps nodes off the DLA          toolkit.partition.prepare_graph, dla.legalize
 4 calibrate   data -> amax per tensor (INT8)        toolkit.quantize.ranges, calibration
 5 ask         every node: is there a GPU kernel     toolkit.gpu.support, toolkit.engine.support
 6 plan        every node: DLA, GPU or portable      toolkit.partition.planning, costs, solver
 7 quantize    table + plan -> Q/DQ graph (INT8)     toolkit.quantize.scales, quantize
 8 extract     segments -> graphs of their own       toolkit.graph.extract
 9 lower       GPU segments -> kernel programs       toolkit.gpu.lower
10 compile     kernel programs -> cubins             toolkit.gpu.compile_segment
11 assemble    manifest, memory plan, entries        toolkit.engine.assemble
12 write       one file, atomically, once proven     toolkit.engine.write

Steps 1 to 4 are in `toolkit.engine.frontend`, for plans and calibrations, too. Steps 7 to 10 are in
`toolkit.engine.segments`, which says when they are gone through once more.
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
from toolkit.engine.frontend import run_frontend
from toolkit.engine.frontend_result import Frontend
from toolkit.engine.int8_ranges import note_gain
from toolkit.engine.notes import gpu_notes, model_notes
from toolkit.engine.options import BuildOptions
from toolkit.engine.plan_models import PlanMember, PlanRequest, planned_batch
from toolkit.engine.precision_gain import LayerGain, gain_notes, kept_cost_notes, layer_gains
from toolkit.engine.preprocessing import engine_preprocessing
from toolkit.engine.provenance import provenance_of, with_measured
from toolkit.engine.read import read_model
from toolkit.engine.report_text import build_text
from toolkit.engine.segments import BuiltSegments, Quantizer, build_segments
from toolkit.engine.support import ask_gpu
from toolkit.engine.target import Target, choose_target
from toolkit.engine.write import check_destination, write_proven
from toolkit.errors import BuildError, about
from toolkit.gpu.frames import compile_frames
from toolkit.gpu.ports import compile_port
from toolkit.gpu.report import GpuReport, report_segment
from toolkit.gpu.segments import GpuBackend, find_backend
from toolkit.graph.passes import PassReport
from toolkit.importers.onnx import ModelBytes, ModelSource, OpenModel, open_model, source_path
from toolkit.importers.source import check_not_model
from toolkit.partition.best_precision import GpuNodes
from toolkit.partition.planning.batch import Batching
from toolkit.partition.planning.objectives import goal_named
from toolkit.partition.planning.plan import Plan, SharedPlan, plan_together
from toolkit.partition.planning.portable import KernelSupport
from toolkit.progress import Progress, silent
from toolkit.quantize.gpu_operands import operands_on_gpu, tied_on_gpu
from toolkit.quantize.loss.judge import Judgement, check, judge
from toolkit.quantize.loss.parts import split_outputs
from toolkit.quantize.quantize import QuantizedModel, quantize
from toolkit.quantize.ranges.measure import Ranges
from toolkit.quantize.ranges.table_file import refuse_lossy
from toolkit.quantize.scales.effect import ScaleEffect, scale_effect, scale_notes
from toolkit.quantize.scales.rules import UnifiedRanges, unify_scales

__all__ = ["BuildOptions", "BuildResult", "build_engine"]


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The engine that was written, and the report about it.

    `plan`: as its segments were cut in the end. `kept`: the nodes of an INT8 engine that stay in
    floating point, with the reasons. `gpu`: the kernels and the memory of each segment that has
    any. `loss`: what the outputs of the engine lose, None without calibration data. `gains`: what
    INT8 gains and loses at each node.
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
    gains: tuple[LayerGain, ...] = ()

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
    file = None if isinstance(model, ModelBytes) else source_path(model)
    check_destination(path, file)
    if options.save_table is not None:
        check_not_model(Path(options.save_table), file)
    name = source_path(model).name
    with about(name):
        planned = plan_engine(model, target, options, on_progress or silent)
        front, kernels, unified = planned.front, planned.kernels, planned.ranges
        preprocessing, backend = engine_preprocessing(front), planned.backend
        built = build_planned(front, planned.shared, unified, backend)
        manifest, entries = _assemble(front, preprocessing, built, backend)
        # An error in what is said later than this would leave an engine.
        cost_notes = kept_cost_notes(
            front, built.plan, lambda without: plan_nodes(without, kernels).plans[0]
        )
        gains = layer_gains(front, built.plan)
    manifest, loss = _write(path, manifest, entries, front)
    scale_rules = scale_effect(unified, front.ranges)
    return BuildResult(
        path=path,
        target=target,
        manifest=manifest,
        plan=built.plan,
        passes=front.passes,
        rewrites=front.prepared.applied,
        notes=(
            *options.notes,
            *model_notes(manifest, front),
            *cost_notes,
            *gain_notes(front),
            *bound_notes(built.plan),
            *gpu_notes(built, manifest, backend, options),
            *scale_notes(scale_rules),
        ),
        calibration=front.ranges,
        scale_rules=scale_rules,
        kept=front.float_reasons(),
        gpu=tuple(report_segment(name, segment) for name, segment in built.gpu.segments.items()),
        loss=loss,
        gains=gains,
    )


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """A build before its segments are made: steps 1 to 6, and the ranges that step 7 takes."""

    front: Frontend
    backend: GpuBackend | None
    kernels: KernelSupport
    shared: SharedPlan
    ranges: UnifiedRanges

    def quantizer(self) -> Quantizer:
        """Return step 7, which reads the weights of the graph each time that it is called."""
        return _quantizer(self.front, self.shared.plans[0], self.ranges.amax)


def plan_engine(
    model: ModelSource, target: Target, options: BuildOptions, report: Progress
) -> PlannedEngine:
    """Go through steps 1 to 6. Raises as `build_engine`."""
    front = _frontend(model, target, options, report)
    backend = _backend(front)
    kernels = ask_for_kernels(front, backend)
    shared = plan_nodes(front, kernels)
    front = _note_gain(front, shared.plans[0])
    return PlannedEngine(front, backend, kernels, shared, unified_ranges(front, shared.plans[0]))


def _frontend(
    source: ModelSource, target: Target, options: BuildOptions, report: Progress
) -> Frontend:
    """Steps 1 to 4; with a bound on latency at the batch that a plan chooses."""
    batching = Batching()
    model: ModelSource | OpenModel = source
    if options.plan.max_latency_ms is not None:
        if options.dims:
            raise BuildError(
                f"A bound on latency fixes the batch, but dimension {options.dims[0].name!r} is to "
                "stay dynamic: leave out one of `tandem build --dim` and --max-latency-ms."
            )
        report("import", 0.0)
        model = open_model(source, plugins=options.plugins, report=report)
        single = read_model(model.copy(), target, options, report)
        report("plan", 0.0)
        shapes = dict(options.shapes or {})
        request = PlanRequest(
            members=(PlanMember(single.imported.name, source, table=options.table, shapes=shapes),),
            profile=target.profile.name,
            jetpack=options.jetpack,
            options=single.plan,
            plugins=options.plugins,
        )
        batching, plan = planned_batch(request, model)
        options = replace(options, plan=plan)
    front = run_frontend(model, target, options, report, batch=batching.size)
    if front.table is not None and not options.accept_loss:
        refuse_lossy(front.table, front.imported.name)
    return replace(front, batching=batching)


def ask_for_kernels(front: Frontend, backend: GpuBackend | None) -> KernelSupport:
    """Step 5: ask the GPU backend for a kernel of each node; without a backend, ask nothing."""
    if backend is None:
        return KernelSupport()
    return ask_gpu(front.prepared.model, front.imported.dims, front.options.plugins)


def plan_nodes(front: Frontend, kernels: KernelSupport) -> SharedPlan:
    """Step 6: give every node a processor, and cut segments where kernels are missing."""
    front.report("plan", 0.0)
    trials = {front.imported.name: front.prepared.trial}
    return plan_together((front.to_plan(kernels),), front.target.profile, front.plan, trials)


def _note_gain(front: Frontend, plan: Plan) -> Frontend:
    """Beside a DLA the plan says which nodes run on the GPU, where INT8 is to save time."""
    if front.table is None or front.target.profile.dla is None:
        return front
    return note_gain(front, GpuNodes(_on_gpu(plan), front.keep_float, front.table.tensors))


def unified_ranges(front: Frontend, plan: Plan) -> UnifiedRanges:
    """Unify the ranges for DLA and GPU: tensors that must share a range get equal ones."""
    table = front.table
    if table is None:
        return UnifiedRanges({}, (), ())
    keep = front.keep_float
    dla = [n for s in plan.segments if s.processor.startswith("dla") for n in s.nodes]
    graph = front.prepared.model
    tied = tied_on_gpu(graph, _on_gpu(plan), keep)
    return unify_scales(graph, table.tensors, [*(name for name in dla if name not in keep), *tied])


def build_planned(
    front: Frontend, shared: SharedPlan, ranges: UnifiedRanges, backend: GpuBackend | None
) -> BuiltSegments:
    """Steps 7 to 10: quantize, extract, lower and compile the segments of a plan."""
    front.report("lower", 0.0)
    quantizer = _quantizer(front, shared.plans[0], ranges.amax)
    return build_segments(shared, front, quantizer, backend)


def _backend(front: Frontend) -> GpuBackend | None:
    if not front.options.kernels:
        return None
    return find_backend(
        front.target.profile,
        front.kernel_precision,
        dims=front.imported.dims,
        plugins=front.options.plugins,
        wide=frozenset(front.wide),
        tactics=front.options.tactics,
        on_progress=front.report,
    )


def _on_gpu(plan: Plan) -> frozenset[str]:
    """Return the nodes planned on the GPU."""
    return frozenset(node for s in plan.segments if s.processor == "gpu" for node in s.nodes)


def _quantizer(front: Frontend, plan: Plan, amax: Mapping[str, float]) -> Quantizer:
    """Return step 7. It depends on the processor of each node, and on no cut between kernels."""
    graph, keep = front.prepared.model, front.keep_float
    if front.table is None:
        return lambda segment_of, _: QuantizedModel(graph, segment_of, {})
    dla = frozenset(s.name for s in plan.segments if s.processor.startswith("dla"))
    operands = operands_on_gpu(graph, _on_gpu(plan), keep, amax)
    return lambda segment_of, writer: quantize(
        graph, amax, segment_of, dla, keep_float=keep, operands=operands, writer=writer
    )


def _assemble(
    front: Frontend,
    preprocessing: Preprocessing | UnsetType,
    built: BuiltSegments,
    backend: GpuBackend | None,
) -> tuple[Manifest, dict[str, np.ndarray[Any, Any]]]:
    """Step 11: the manifest and the entries of the file."""
    return assemble(
        built.quantized.model,
        built.plan.segments,
        built.extracted,
        cuda={**built.gpu.segments, **built.fallback.segments},
        tensorrt=built.tensorrt,
        take_turns=front.target.profile.dla_cores > 1
        and goal_named(front.plan.objective).frames_in_flight,
        compile_port=None if backend is None else partial(compile_port, backend),
        scales=built.quantized.scales,
        dims=built.gpu.dims or front.imported.dims,
        placements=built.plan.placements,
        profile=front.target.profile.name,
        provenance=provenance_of(front, built),
        preprocessing=preprocessing,
        compile_frames=_frame_compiler(preprocessing, front, backend),
    )


def _frame_compiler(
    preprocessing: Preprocessing | UnsetType, front: Frontend, backend: GpuBackend | None
) -> FrameCompiler | None:
    """Return what compiles the kernels for frames, None where they are not asked for.

    Raises BuildError: no kernels can be made, or nothing says what they compute.
    """
    if front.options.preprocess_on == "cpu":
        return None
    if backend is None:
        raise BuildError(
            "`tandem build --preprocess-on gpu` makes kernels, and profile"
            f" {front.target.profile.name} has no GPU or this host no Triton: take another profile,"
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
    front: Frontend,
) -> tuple[Manifest, Judgement | None]:
    """Step 12: the file, once a session has run it and its loss is within the limits.

    The engine has the ranges of all samples, and rounds what the calibration only predicts: scales
    that the DLA shares, and tensors between segments. So it is judged again, as it is, and the
    manifest says what was measured. Returns that manifest, and the judgement.
    """
    front.report("write", 0.0)
    ranges, name = front.ranges, front.imported.name
    judgement: Judgement | None = None

    def accept(outputs: Sequence[Mapping[str, np.ndarray[Any, Any]]]) -> Manifest:
        nonlocal judgement
        if ranges is None:
            return manifest
        parts = ranges.fit.trial.parts
        actual = [split_outputs(parts, arrays) for arrays in outputs]
        judgement = judge(parts, [exact for _, exact in ranges.judges], actual, basis="engine")
        if not front.options.accept_loss:
            check(judgement, f"the engine of {name}")
        return with_measured(manifest, judgement, front)

    samples = [sample for sample, _ in ranges.judges] if ranges is not None else []
    accepted = write_proven(path, manifest, entries, model=name, samples=samples, accept=accept)
    front.report("write", 1.0)
    return accepted, judgement
