"""The build, step by step: model.onnx -> engine file.

 1 import      model file -> graph                   toolkit.importers
 2 passes      fold, fuse, infer shapes              toolkit.graph.passes
 3 rewrite     what keeps nodes off the DLA          toolkit.partition.prepare, toolkit.dla.legalize
 4 calibrate   data -> amax per tensor (INT8)        toolkit.quantize.ranges, calibration
 5 plan        every node: processor and reason      toolkit.partition.planning, costs, solver
 6 cut         GPU segments at unsupported nodes     toolkit.gpu.support, toolkit.partition.coverage
 7 quantize    table + plan -> Q/DQ graph (INT8)     toolkit.quantize.scales, quantize
 8 extract     pieces -> graphs of their own         toolkit.graph.extract
 9 lower       GPU pieces -> kernel programs         toolkit.gpu.lower
10 compile     kernel programs -> cubins             toolkit.gpu.compile
11 assemble    manifest, memory plan, entries        toolkit.engine.assemble
12 write       one file, atomically, once proven     toolkit.engine.write

Steps 6 to 10 are gone through once more where lowering or compiling refuses nodes
(`toolkit.partition.coverage.cover_plan`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from calibration.table import CalibrationTable
from device.engine.cuda_manifest import Cuda
from device.engine.manifest import (
    DUMMY,
    UNCALIBRATED,
    CalibrationInfo,
    Manifest,
    Provenance,
)
from toolkit.dla.legalize.rewrite import Applied
from toolkit.engine.assemble import assemble
from toolkit.engine.calibrate import Calibrated, calibrate
from toolkit.engine.options import BuildJob, BuildOptions
from toolkit.engine.read import read_model
from toolkit.engine.report_text import build_text
from toolkit.engine.target import Target, choose_target
from toolkit.engine.write import check_destination, write_proven
from toolkit.gpu.codegen.compile import Progress
from toolkit.gpu.codegen.cuda_source import find_compiler
from toolkit.gpu.report import GpuReport, report_segment
from toolkit.gpu.segments import NO_COMPILER, GpuBackend, find_backend
from toolkit.graph.passes import PassReport
from toolkit.importers.onnx import ModelBytes, ModelSource, source_path
from toolkit.importers.source import silent
from toolkit.partition.coverage import (
    Covered,
    PlannedGraph,
    cover_plan,
    coverage_notes,
    place_in_pieces,
)
from toolkit.partition.planning.plan import Model, Plan, make_plan
from toolkit.quantize.corrections.corrections import CORRECTION, EQUALISATION
from toolkit.quantize.gpu_operands import operands_on_gpu, tied_on_gpu
from toolkit.quantize.quantize import QuantizedModel, quantize
from toolkit.quantize.ranges.measure import Ranges
from toolkit.quantize.ranges.table_file import foreign_notes
from toolkit.quantize.scales.effect import ScaleEffect, scale_effect, scale_notes
from toolkit.quantize.scales.rules import UnifiedRanges, unify_scales

__all__ = ["BuildOptions", "BuildResult", "Progress", "build_engine"]


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The engine that was written, and the report about it.

    `kept`: the nodes of an INT8 engine that stay in floating point, with the reasons. `gpu`: the
    kernels and the memory of each segment that has any.
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

    @property
    def report(self) -> str:
        """What runs where and why, calibration, notes and kernels, as text."""
        return build_text(self)


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
    job = read_model(model, target, options, on_progress or silent)
    calibrated = calibrate(job)
    plan = plan_nodes(calibrated, job)
    unified = unified_ranges(calibrated, plan)
    backend = _backend(job)
    covered = cover(calibrated, plan, unified, job, backend)
    manifest, entries = _assemble(calibrated, plan, covered, job)
    _write(path, manifest, entries, calibrated, job)
    scale_rules = scale_effect(unified, calibrated.ranges)
    return BuildResult(
        path=path,
        target=target,
        manifest=manifest,
        plan=plan,
        passes=job.passes,
        rewrites=calibrated.prepared.applied,
        notes=(
            *_notes(manifest, calibrated, job),
            *_gpu_notes(plan, covered, manifest, job, backend),
            *scale_notes(scale_rules),
        ),
        calibration=calibrated.ranges,
        scale_rules=scale_rules,
        kept=calibrated.kept(),
        gpu=tuple(report_segment(name, segment) for name, segment in covered.gpu.segments.items()),
    )


def plan_nodes(calibrated: Calibrated, job: BuildJob) -> Plan:
    """Step 5: give every node a processor."""
    job.report("plan", 0.0)
    table = calibrated.table
    model = Model(
        job.imported.name,
        calibrated.prepared.model.graph,
        has_scale=(table.tensors if table is not None else {}).__contains__,
        keep_float=calibrated.keep_float,
        cuts=calibrated.prepared.cuts,
    )
    return make_plan(model, job.target.profile, job.plan)


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


def cover(
    calibrated: Calibrated,
    plan: Plan,
    ranges: UnifiedRanges,
    job: BuildJob,
    backend: GpuBackend | None,
) -> Covered:
    """Steps 6 to 10: cut, quantize, extract, lower and compile the segments of a plan."""
    job.report("lower", 0.0)
    quantizer = _quantizer(calibrated, plan, ranges.amax)
    graph = calibrated.prepared.model
    return cover_plan(PlannedGraph(graph, plan, job.target.profile, quantizer, backend))


def _backend(job: BuildJob) -> GpuBackend | None:
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


def _quantizer(
    calibrated: Calibrated, plan: Plan, amax: Mapping[str, float]
) -> Callable[[Mapping[str, str]], QuantizedModel]:
    """Return step 7: the segment of each node -> the graph, with Q/DQ where there are ranges."""
    graph, keep = calibrated.prepared.model, calibrated.keep_float
    if calibrated.table is None:
        return lambda segment_of: QuantizedModel(graph, segment_of, {})
    dla = frozenset(s.name for s in plan.segments if s.processor.startswith("dla"))
    operands = operands_on_gpu(graph, _on_gpu(plan), keep, amax)
    return lambda segment_of: quantize(
        graph, amax, segment_of, dla, keep_float=keep, operands=operands
    )


def _assemble(
    calibrated: Calibrated, plan: Plan, covered: Covered, job: BuildJob
) -> tuple[Manifest, dict[str, np.ndarray[Any, Any]]]:
    """Step 11: the manifest and the entries of the file."""
    return assemble(
        covered.quantized.model,
        [piece.segment for piece in covered.pieces],
        covered.extracted,
        cuda=covered.gpu.segments,
        scales=covered.quantized.scales,
        dims=covered.gpu.dims or job.imported.dims,
        placements=place_in_pieces(plan.placements, covered.pieces),
        profile=job.target.profile.name,
        provenance=_provenance(calibrated.table, plan, covered, job),
    )


def _provenance(
    table: CalibrationTable | None, plan: Plan, covered: Covered, job: BuildJob
) -> Provenance:
    info = None
    if table is not None:
        method = DUMMY if table.dummy else table.method
        info = CalibrationInfo(method=method, samples=table.samples, data_sha256=table.data_sha256)
    return Provenance(
        model=job.imported.name,
        model_sha256=job.imported.sha256,
        precision=plan.precision,
        passes=(*(step.name for step in job.passes if step.changes), *_adjusting(table)),
        versions=_versions(
            job.target,
            kernels=bool(covered.gpu.segments),
            plugins=bool(job.options.plugins),
        ),
        calibration=info,
    )


def _write(
    path: Path,
    manifest: Manifest,
    entries: Mapping[str, np.ndarray[Any, Any]],
    calibrated: Calibrated,
    job: BuildJob,
) -> None:
    """Step 12: the file, once a session has run it."""
    job.report("write", 0.0)
    sample = calibrated.ranges.sample if calibrated.ranges is not None else None
    write_proven(path, manifest, entries, model=job.imported.name, sample=sample)
    job.report("write", 1.0)


def _notes(manifest: Manifest, calibrated: Calibrated, job: BuildJob) -> tuple[str, ...]:
    table = calibrated.table
    notes = list(job.imported.notes)
    notes += [f"pass {step.name} left out: {step.failure}" for step in job.passes if step.failure]
    kernels = [any(isinstance(i, Cuda) for i in s.implementations) for s in manifest.segments]
    if manifest.provenance.precision == "fp16" and not all(kernels):
        notes.append("portable segments compute in FP32; FP16 is for the board")
    if table is not None:
        notes += foreign_notes(table, job.imported.sha256)
    if table is not None and table.dummy:
        notes.append(UNCALIBRATED)
    return (*notes, *calibrated.notes)


def _gpu_notes(
    plan: Plan,
    covered: Covered,
    manifest: Manifest,
    job: BuildJob,
    backend: GpuBackend | None,
) -> tuple[str, ...]:
    notes = covered.gpu.notes + coverage_notes(covered.pieces, manifest)
    if job.target.profile.gpu is None or not _on_gpu(plan) or backend is not None:
        return notes
    return (NO_COMPILER, *notes)


def _adjusting(table: CalibrationTable | None) -> tuple[str, ...]:
    """The steps that a table takes beside the passes, in their order."""
    if table is None or not table.adjusted:
        return ()
    rows = ((EQUALISATION, table.adjusted.equalised), (CORRECTION, table.adjusted.biases))
    return tuple(name for name, changed in rows if changed)


def _versions(target: Target, *, kernels: bool, plugins: bool) -> dict[str, str]:
    names = ("onnx", "onnx-ir", "onnxscript", "tandem-edge", *(("triton",) if kernels else ()))
    versions = {name: version(name) for name in names}
    compiler = find_compiler() if kernels and plugins else None
    if compiler is not None:
        versions["cuda"] = compiler.version
    if target.jetpack is not None:
        versions["jetpack"] = target.jetpack.version
        versions["tensorrt"] = target.jetpack.tensorrt
    return dict(sorted(versions.items()))
