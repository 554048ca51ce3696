"""The build, step by step: model.onnx -> engine file.

1 import      ONNX -> graph                         toolkit.importers.onnx
2 passes      fold, fuse, infer shapes              toolkit.graph.passes
3 rewrite     what keeps nodes off the DLA          toolkit.partition.prepare, toolkit.dla.legalize
4 calibrate   data -> amax per tensor (INT8)        toolkit.quantize.ranges, calibration
5 plan        every node: processor and reason      toolkit.partition.planning, costs, solver
6 quantize    table + plan -> Q/DQ graph (INT8)     toolkit.quantize.scales, quantize
7 lower       segments -> implementations           toolkit.graph.extract, toolkit.gpu
8 assemble    manifest, memory plan, entries        toolkit.engine.assemble
9 write       one file, atomically, once proven     toolkit.engine.write
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import onnx_ir as ir

from calibration.table import CalibrationTable, write_table
from device.engine.cuda_manifest import Cuda
from device.engine.manifest import (
    DUMMY,
    UNCALIBRATED,
    CalibrationInfo,
    DimRange,
    Manifest,
    Precision,
    Provenance,
)
from toolkit.dla.legalize.rewrite import Applied
from toolkit.engine.assemble import assemble
from toolkit.engine.target import Target, choose_target
from toolkit.engine.write import check_destination, write_proven
from toolkit.errors import BuildError
from toolkit.gpu.codegen.cuda_source import find_compiler
from toolkit.gpu.report import GpuReport, report_segment
from toolkit.gpu.schedule.tactics import TacticOptions
from toolkit.graph.passes import PassReport, run_passes
from toolkit.importers.onnx import ImportedModel, import_model
from toolkit.partition.best_precision import best_options, idle_nodes, kept_nodes
from toolkit.partition.coverage import cover_segments, coverage_notes, place_in_pieces
from toolkit.partition.planning.plan import Model, Plan, PlanOptions, make_plan
from toolkit.partition.prepare import Prepared, prepare
from toolkit.plugins import Plugin
from toolkit.plugins.functions import give_shapes
from toolkit.quantize.corrections.adjust import adjusted_for, adjusts_only
from toolkit.quantize.corrections.corrections import CORRECTION, EQUALISATION
from toolkit.quantize.gpu_operands import operands_on_gpu, tied_on_gpu
from toolkit.quantize.qdq.importer import PlainModel, import_qdq
from toolkit.quantize.quantize import QUANTIZED_OPS, QuantizedModel, calibrated_tensors, quantize
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.measure import RangeOptions, Ranges, dummy_table, measure_ranges
from toolkit.quantize.ranges.table_file import (
    fit_table,
    foreign_notes,
    has_qdq,
    plain_notes,
    table_of_plain,
)
from toolkit.quantize.scales.effect import ScaleEffect, scale_effect, scale_notes
from toolkit.quantize.scales.rules import UnifiedRanges, unify_scales

Progress = Callable[[str, float], None]
"""Called with the step's name and the share of it that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a build may be asked beside the model and the profile.

    `precision` None: int8 with `data` or `table`, else fp16 (fp32 where there is no GPU). A Q/DQ
    model gives INT8 its ranges, unless there are `data`, `table` or `dummy_ranges`. "best": the
    same, but nodes that INT8 does not serve stay in floating point
    (`toolkit.partition.best_precision`). `data` is what `toolkit.quantize.ranges.data.open_data`
    takes: a folder or file of pictures or arrays, a video, or samples one after the other; `ranges`
    says how their ranges are found. `table` goes before `data`. `save_table`: the file that takes
    the table measured, as soon as it is, so that hours of calibration outlive a failure later.
    `dummy_ranges` stand in for measured
    ones: the engine is good for timing only, and says so. `shapes` and `dims` as in
    `toolkit.importers.onnx.import_model`. `plan`: what the plan aims at; its precision and TensorRT
    are those of the build. `plugins`: operators that the model has beside those of ONNX. `tactics`:
    what GPU kernels to choose among.
    """

    precision: Precision | Literal["best"] | None = None
    jetpack: str | None = None
    data: Source | None = None
    ranges: RangeOptions = field(default_factory=RangeOptions)
    table: CalibrationTable | None = None
    save_table: str | Path | None = None
    dummy_ranges: bool = False
    shapes: Mapping[str, tuple[int, ...]] | None = None
    dims: tuple[DimRange, ...] = ()
    plan: PlanOptions = field(default_factory=PlanOptions)
    plugins: tuple[Plugin, ...] = ()
    tactics: TacticOptions = field(default_factory=TacticOptions)


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The engine that was written, and everything to say about it.

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


def build_engine(
    model: str | Path,
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
    report = on_progress or _silent
    target = choose_target(profile, options.jetpack)
    path = Path(out)
    check_destination(path, Path(model))
    report("import", 0.0)
    imported = import_model(
        model, shapes=options.shapes, dims=options.dims, plugins=options.plugins
    )
    plain = _plain(imported.model, options)
    graph, passes = run_passes(imported.model if plain is None else plain.model)
    give_shapes(graph, options.plugins)
    precision = _precision(options, target, graph, imported.name, plain)
    asked = replace(options.plan, precision=precision, tensorrt=target.tensorrt)
    job = _Job(options, target, imported, asked, report)
    report("rewrite", 0.0)
    calibrated = _calibrated(graph, plain, job)
    report("plan", 0.0)
    plan = _planned(calibrated, job)
    report("lower", 0.0)
    unified = _unify(calibrated, plan)
    compiled = _compile(calibrated, plan, unified.amax, passes, job)
    ranges = calibrated.ranges
    report("write", 0.0)
    sample = ranges.sample if ranges is not None else None
    write_proven(path, compiled.manifest, compiled.entries, model=imported.name, sample=sample)
    report("write", 1.0)
    scale_rules = scale_effect(unified, ranges)
    notes = _notes(imported, compiled.manifest, passes, calibrated.table) + calibrated.notes
    return BuildResult(
        path=path,
        target=target,
        manifest=compiled.manifest,
        plan=plan,
        passes=passes,
        rewrites=calibrated.prepared.applied,
        notes=notes + compiled.notes + scale_notes(scale_rules),
        calibration=ranges,
        scale_rules=scale_rules,
        kept=_kept(calibrated),
        gpu=compiled.gpu,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """What is asked, of which model, for what; `plan` has the precision that was chosen."""

    options: BuildOptions
    target: Target
    imported: ImportedModel
    plan: PlanOptions
    report: Progress


def _planned(calibrated: "_Calibrated", job: _Job) -> Plan:
    """Step 5."""
    table = calibrated.table
    has_scale = (table.tensors if table is not None else {}).__contains__
    keep_float = frozenset(table.keep_float if table is not None else ())
    prepared = calibrated.prepared
    model = Model(
        job.imported.name,
        prepared.model.graph,
        has_scale=has_scale,
        keep_float=keep_float,
        cuts=prepared.cuts,
    )
    return make_plan(model, job.target.profile, job.plan)


def _unify(calibrated: "_Calibrated", plan: Plan) -> UnifiedRanges:
    """The ranges as DLA and GPU want them: equal where one range must serve several tensors."""
    table = calibrated.table
    if table is None:
        return UnifiedRanges({}, (), ())
    kept = frozenset(table.keep_float)
    dla = [n for s in plan.segments if s.processor.startswith("dla") for n in s.nodes]
    graph = calibrated.prepared.model
    tied = tied_on_gpu(graph, _on_gpu(plan), kept)
    return unify_scales(graph, table.tensors, [*(name for name in dla if name not in kept), *tied])


def _on_gpu(plan: Plan) -> frozenset[str]:
    """The nodes that are planned on the GPU."""
    return frozenset(node for s in plan.segments if s.processor == "gpu" for node in s.nodes)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """What is to be written, and what to say of it."""

    manifest: Manifest
    entries: Mapping[str, np.ndarray[Any, Any]]
    notes: tuple[str, ...]
    gpu: tuple[GpuReport, ...]


def _compile(
    calibrated: "_Calibrated",
    plan: Plan,
    amax: Mapping[str, float],
    passes: Sequence[PassReport],
    job: _Job,
) -> _Compiled:
    """Steps 6 to 8."""
    graph, table, imported = calibrated.prepared.model, calibrated.table, job.imported
    covered = cover_segments(
        graph,
        plan,
        job.target.profile,
        _quantizer(graph, plan, table, amax),
        dims=imported.dims,
        plugins=job.options.plugins,
        tactics=job.options.tactics,
        on_progress=job.report,
    )
    has_kernels, has_plugins = bool(covered.gpu.segments), bool(job.options.plugins)
    manifest, entries = assemble(
        covered.quantized.model,
        [piece.segment for piece in covered.pieces],
        covered.lowered,
        cuda=covered.gpu.segments,
        scales=covered.quantized.scales,
        dims=covered.gpu.dims or imported.dims,
        placements=place_in_pieces(plan.placements, covered.pieces),
        profile=job.target.profile.name,
        provenance=Provenance(
            model=imported.name,
            model_sha256=imported.sha256,
            precision=plan.precision,
            passes=(*(step.name for step in passes if step.changes), *_adjusting(table)),
            versions=_versions(job.target, kernels=has_kernels, plugins=has_plugins),
            calibration=None
            if table is None
            else CalibrationInfo(
                method=DUMMY if table.dummy else table.method,
                samples=table.samples,
                data_sha256=table.data_sha256,
            ),
        ),
    )
    return _Compiled(
        manifest,
        entries,
        covered.gpu.notes + coverage_notes(covered.pieces, manifest),
        tuple(report_segment(name, one) for name, one in covered.gpu.segments.items()),
    )


def _quantizer(
    graph: ir.Model, plan: Plan, table: CalibrationTable | None, amax: Mapping[str, float]
) -> Callable[[Mapping[str, str]], QuantizedModel]:
    """Return step 6: the segment of each node -> the graph, with Q/DQ where there are ranges."""
    if table is None:
        return lambda segment_of: QuantizedModel(graph, segment_of, {})
    dla = frozenset(s.name for s in plan.segments if s.processor.startswith("dla"))
    keep = frozenset(table.keep_float)
    operands = operands_on_gpu(graph, _on_gpu(plan), keep, amax)
    return lambda segment_of: quantize(
        graph, amax, segment_of, dla, keep_float=keep, operands=operands
    )


@dataclass(frozen=True, slots=True)
class _Calibrated:
    """The graph that the plan is made of, with its ranges and what to say about them."""

    prepared: Prepared
    table: CalibrationTable | None = None
    ranges: Ranges | None = None
    notes: tuple[str, ...] = ()
    idle: Mapping[str, str] = field(default_factory=dict)


def _kept(calibrated: _Calibrated) -> dict[str, str]:
    if calibrated.table is None:
        return {}
    budget = calibrated.ranges.budget if calibrated.ranges is not None else None
    return kept_nodes(calibrated.table.keep_float, calibrated.idle, budget)


def _calibrated(graph: ir.Model, plain: PlainModel | None, job: _Job) -> _Calibrated:
    """Steps 3 and 4: rewritten for the DLA, then ranges as given, measured, or stand-ins."""
    options, imported, asked = job.options, job.imported, job.plan
    profile = job.target.profile
    if asked.precision != "int8":
        return _Calibrated(prepare(graph, profile, asked))
    notes = plain_notes(plain) if plain is not None else ()
    if options.data is not None:
        prepared = prepare(graph, profile, asked)
        idle = _idle(prepared, job)
        wanted = replace(options.ranges, on_gpu=profile.gpu is not None and profile.dla is None)
        if options.precision == "best":
            wanted = best_options(wanted, prepared.model, idle)
        ranges = measure_ranges(prepared.model, options.data, imported.sha256, wanted, job.report)
        if options.save_table is not None:
            write_table(Path(options.save_table), ranges.table)
        prepared = replace(prepared, model=ranges.model)
        return _Calibrated(prepared, ranges.table, ranges, notes, idle)
    if options.dummy_ranges and options.table is None:
        prepared = prepare(graph, profile, asked)
        return _Calibrated(prepared, dummy_table(prepared.model, imported.sha256), notes=notes)
    table, original = options.table, imported.model
    if plain is not None:
        table, original = table or table_of_plain(plain, imported.sha256), plain.model
    assert table is not None  # _precision lets nothing else through
    # Adjustments measured before the rewrites are made before them, others after.
    early = adjusts_only(graph, table)
    prepared = prepare(
        adjusted_for(graph, table, imported.sha256) if early else graph,
        profile,
        asked,
        table.tensors,
    )
    fitted = fit_table(
        msgspec.structs.replace(table, tensors=dict(prepared.ranges)), original, prepared.model
    )
    if not early:
        adjusted = adjusted_for(prepared.model, table, imported.sha256)
        prepared = replace(prepared, model=adjusted)
    idle = _idle(prepared, job)
    kept = tuple(sorted({*fitted.table.keep_float, *idle}))
    table = msgspec.structs.replace(fitted.table, keep_float=kept)
    return _Calibrated(prepared, table, notes=notes + fitted.notes, idle=idle)


def _idle(prepared: Prepared, job: _Job) -> dict[str, str]:
    """The nodes that INT8 would not make faster, where the best precision is asked for."""
    if job.options.precision != "best":
        return {}
    return idle_nodes(prepared.model, job.target.profile, job.plan.power_mode)


def _plain(model: ir.Model, options: BuildOptions) -> PlainModel | None:
    """A Q/DQ model without its Q/DQ, where INT8 is asked for; None for others."""
    wanted = options.precision in ("int8", "best")
    wanted = wanted or (options.precision is None and _has_ranges(options))
    return import_qdq(model, any_weight_scale=True) if wanted and has_qdq(model) else None


def _has_ranges(options: BuildOptions) -> bool:
    return options.data is not None or options.table is not None or options.dummy_ranges


def _precision(
    options: BuildOptions, target: Target, graph: ir.Model, name: str, plain: PlainModel | None
) -> Precision:
    has_ranges = _has_ranges(options) or (plain is not None and bool(plain.amax))
    default: Precision = "int8" if has_ranges else "fp16" if target.profile.gpu else "fp32"
    asked = options.precision
    precision = default if asked is None or asked == "best" else asked
    if precision != "int8":
        return precision
    if not has_ranges:
        raise BuildError(
            "INT8 needs activation ranges: give calibration data with --data, a table with "
            "--table, build with --precision fp16, or time only with --dummy-ranges."
        )
    _refuse_int8(graph, name)
    return precision


def _refuse_int8(graph: ir.Model, name: str) -> None:
    """Refuse what would be called INT8 and be none."""
    for node in graph.graph:
        data = node.inputs[0] if node.op_type in QUANTIZED_OPS and node.inputs else None
        if data is not None and data.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            raise BuildError(
                f"{name} computes in {data.dtype.name} (node {node.name!r}, {node.op_type}), but "
                "INT8 is made from float32; export it in float32, or build with --precision fp16."
            )
    if not calibrated_tensors(graph):
        raise BuildError(
            f"{name} holds no float32 tensor that INT8 could stand for; "
            "build it with --precision fp32."
        )


def _notes(
    imported: ImportedModel,
    manifest: Manifest,
    passes: Sequence[PassReport],
    table: CalibrationTable | None,
) -> tuple[str, ...]:
    notes = list(imported.notes)
    notes += [f"pass {step.name} left out: {step.failure}" for step in passes if step.failure]
    kernels = [any(isinstance(i, Cuda) for i in s.implementations) for s in manifest.segments]
    if manifest.provenance.precision == "fp16" and not all(kernels):
        notes.append("portable segments compute in FP32; FP16 is for the board")
    if table is not None:
        notes += foreign_notes(table, imported.sha256)
    if table is not None and table.dummy:
        notes.append(UNCALIBRATED)
    return tuple(notes)


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


def _silent(step: str, share: float) -> None:
    """Report to nobody."""
