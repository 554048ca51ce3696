"""Plan one model or several on one board, without building: import, rewrite, place, advise."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from calibration.table import CalibrationTable
from device.profile import Profile
from toolkit.dla.rules.explain import Explanation, explain_node, render_explanation
from toolkit.engine.batch import choose_batch, chooses_batch
from toolkit.engine.calibrate import bounded_rows, calibrate, clipped_layers, foreign_for_dla
from toolkit.engine.options import BuildOptions
from toolkit.engine.read import read_model, without_qdq
from toolkit.engine.support import ask_gpu
from toolkit.engine.target import Target, choose_target
from toolkit.errors import PlanError, about
from toolkit.graph.check import check_nodes
from toolkit.graph.memory_limit import check_device_memory
from toolkit.graph.node_view import views
from toolkit.graph.passes import SIZELESS_PASSES, run_passes
from toolkit.importers.onnx import (
    ImportedModel,
    ModelSource,
    OpenModel,
    open_model,
    sized,
    source_path,
)
from toolkit.importers.source import ModelPath, Report, silent
from toolkit.partition.costs.measured import Measured, load_measured
from toolkit.partition.planning.advice import Advice, advise
from toolkit.partition.planning.batch import Batching
from toolkit.partition.planning.plan import Model, Plan, PlanOptions, SharedPlan, plan_together
from toolkit.partition.planning.portable import KernelSupport
from toolkit.partition.planning.super_clocks import super_notes
from toolkit.partition.planning.workload import WorkloadModel
from toolkit.partition.prepare import Prepared, prepare
from toolkit.plugins import Plugin
from toolkit.plugins.functions import give_shapes
from toolkit.quantize.loss.parts import mixing_concats, output_parts
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.table_file import has_qdq, read_ranges, table_of_plain
from toolkit.quantize.trials.keep import MOST_FLOAT

SCORE_KINDS = ("scores", "detections")
"""Kinds of outputs that INT8 costs their target in most trained models."""
TENSORRT_PLUGIN = (
    "a plugin of TensorRT, which TensorRT runs on the GPU; for an engine of Tandem take it out of "
    "the model, or give its function with `tandem build --plugin`"
)


@dataclass(frozen=True, slots=True)
class PlanMember:
    """A model to plan. `table`: INT8 ranges, None: every tensor has one.

    `data`: samples that ranges are measured over as a build does it, in the place of a table.
    """

    title: str
    source: ModelSource
    rate_hz: float | None = None
    table: Path | CalibrationTable | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    data: Source | None = None


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Models that share one board, and how to plan them.

    `options.tensorrt` is filled in from the profile and `jetpack`. `measured`: node times,
    or a file of them.
    """

    members: tuple[PlanMember, ...]
    profile: str
    jetpack: str | None = None
    options: PlanOptions = field(default_factory=PlanOptions)
    measured: Measured | Path | None = None
    rewrites: bool = True
    plugins: tuple[Plugin, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model after passes and rewrites; `original` is the one before the rewrites.

    `ranges_known`: they are given or measured, and with them the nodes that stay in floating point.
    """

    model: Model
    prepared: Prepared
    original: ir.Model
    ranges_known: bool = False


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The plans of all models, in their order, with advice and notes by model name.

    `notes`: where a build may end elsewhere than the plan, and what Super clocks change.
    """

    shared: SharedPlan
    advice: Mapping[str, tuple[Advice, ...]]
    loaded: tuple[LoadedModel, ...]
    notes: Mapping[str, tuple[str, ...]]


def member_of(row: WorkloadModel) -> PlanMember:
    """Return the model of a workload file."""
    source = ModelPath(row.path, row.inputs_as_nchw)
    return PlanMember(row.title, source, row.rate_hz, row.table, row.shapes)


def make_plan(request: PlanRequest, report: Report = silent) -> PlanResult:
    """Plan all models of the request together; `report` hears of the exports of models."""
    target, options = _target(request)
    loaded, shared, _ = _planned(request, target.profile, options, report)
    with about(_names(request)):
        advice = {
            plan.name: advise(shared, plan, target.profile, model.prepared.declined)
            for plan, model in zip(shared.plans, loaded, strict=True)
        }
    notes = {
        plan.name: (
            *float_notes(plan, model),
            *super_notes(plan, views(model.prepared.model.graph), request.jetpack),
        )
        for plan, model in zip(shared.plans, loaded, strict=True)
    }
    return PlanResult(shared, advice, loaded, notes)


def float_notes(plan: Plan, loaded: LoadedModel) -> tuple[str, ...]:
    """Say that a build with data will keep nodes in floating point, which a plan cannot know.

    It does where INT8 costs scores their target: of detectors and masks in most cases. Nothing is
    said of a plan without the DLA, which loses the most by it.
    """
    on_dla = any(segment.processor.startswith("dla") for segment in plan.segments)
    scores = [p.name for p in output_parts(loaded.prepared.model) if p.kind in SCORE_KINDS]
    if loaded.ranges_known or plan.precision != "int8" or not on_dla or not scores:
        return ()
    this, gpu_only = plan.figures[0], plan.figures[1]
    return (
        f"all nodes are taken to be in INT8, but '{scores[0]}' holds scores: a build with --data "
        "will probably keep nodes in floating point for them, with up to "
        f"{100 * MOST_FLOAT:.0f} % of the multiplications. Such nodes break the DLA's segments: "
        f"expect less of the DLA, down to none ({gpu_only.frames_per_second:.0f} instead of "
        f"{this.frames_per_second:.0f} frames/s). `tandem plan --data`, or --table of a "
        "calibration, knows which.",
    )


def planned_batch(request: PlanRequest, report: Report = silent) -> tuple[Batching, PlanOptions]:
    """Return the batch of one model that the request's plan has, and the options that led there."""
    target, options = _target(request)
    _, shared, options = _planned(request, target.profile, options, report)
    return shared.plans[0].batching, options


def _planned(
    request: PlanRequest, profile: Profile, options: PlanOptions, report: Report
) -> tuple[tuple[LoadedModel, ...], SharedPlan, PlanOptions]:
    times = request.measured
    if isinstance(times, Path):
        times = load_measured(times)

    def plan_all(
        imports: Sequence[ImportedModel], options: PlanOptions, batching: Batching
    ) -> tuple[tuple[LoadedModel, ...], SharedPlan]:
        loaded = tuple(
            _load(member, imported, request, profile, options, report=report)
            for member, imported in zip(request.members, imports, strict=True)
        )
        models = (replace(member.model, measured=times, batching=batching) for member in loaded)
        start = {member.model.name: member.prepared.placement for member in loaded}
        with about(_names(request)):
            return loaded, plan_together(tuple(models), profile, options, (start,))

    rated = any(member.rate_hz is not None for member in request.members)
    if not chooses_batch(options, rated=rated, models=len(request.members)):
        imports = [_import(member, request, report=report) for member in request.members]
        return *plan_all(imports, options, Batching()), options

    (member,) = request.members
    opened = _open(member, request, report)
    opened = replace(opened, model=run_passes(opened.model, SIZELESS_PASSES)[0])

    def sized_copy(batch: int) -> ImportedModel:
        """Return the model at a batch; all share the weights."""
        return _sized(member, replace(opened, model=opened.model.clone()), batch)

    single = sized_copy(1)

    def plan_at(
        batch: int, options: PlanOptions
    ) -> tuple[tuple[tuple[LoadedModel, ...], SharedPlan], Plan]:
        imported = single if batch == 1 else sized_copy(batch)
        loaded, shared = plan_all((imported,), options, Batching(batch))
        return (loaded, shared), shared.plans[0]

    choice = choose_batch(plan_at, options, dynamic=single.batched)
    loaded, shared = choice.planned
    plan = replace(shared.plans[0], batching=choice.batching)
    return loaded, replace(shared, plans=(plan,)), choice.options


def _names(request: PlanRequest) -> str:
    return ", ".join(source_path(member.source).name for member in request.members)


@dataclass(frozen=True, slots=True)
class ExplainedNode:
    """The rules of the DLA on a node, and why the GPU has no kernel for it; "": it has one."""

    dla: Explanation
    no_kernel: str

    def as_text(self) -> str:
        """Return the report for people."""
        gpu = self.no_kernel or "kernels compute it"
        return f"{render_explanation(self.dla)}\nGPU: {gpu}"

    def as_builtins(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {**asdict(self.dla), "no_kernel": self.no_kernel}


def explain(request: PlanRequest, node: str) -> ExplainedNode:
    """Check every DLA rule on a node of the first model, rewritten or as it was; ask the GPU too.

    Raises PlanError: the profile has no DLA, or the model no such node.
    """
    target, options = _target(request)
    member = request.members[0]
    loaded = _load(member, _import(member, request), request, target.profile, options)
    dla = target.profile.dla
    if dla is None:
        raise PlanError(f"{target.profile.name} has no DLA, so that no rule keeps nodes off it")
    originals = {view.name: view for view in views(loaded.original.graph)}
    planned = {view.name: view for view in views(loaded.model.graph)}
    nodes = {**originals, **planned}
    if node not in nodes:
        similar = difflib.get_close_matches(node, nodes, n=3, cutoff=0.5)
        what = "the nearest names are" if similar else "its nodes begin with"
        names = ", ".join(similar or list(nodes)[:3])
        raise PlanError(f"{loaded.model.name} has no node {node!r}; {what} {names}")
    kernels = loaded.model.kernels
    if node not in planned:
        kernels = _kernels(loaded.original, request, target.profile)
    explanation = explain_node(nodes[node], dla, target.tensorrt, options.precision)
    return ExplainedNode(explanation, kernels.no_kernel.get(node, ""))


def _target(request: PlanRequest) -> tuple[Target, PlanOptions]:
    target = choose_target(request.profile, request.jetpack)
    return target, replace(request.options, tensorrt=target.tensorrt)


def _import(member: PlanMember, request: PlanRequest, report: Report = silent) -> ImportedModel:
    return _sized(member, _open(member, request, report))


def _open(member: PlanMember, request: PlanRequest, report: Report) -> OpenModel:
    with about(source_path(member.source).name):
        return open_model(member.source, plugins=request.plugins, keep_tensorrt=True, report=report)


def _sized(member: PlanMember, opened: OpenModel, batch: int = 1) -> ImportedModel:
    with about(source_path(member.source).name):
        return sized(opened, shapes=member.shapes, batch=batch)


def _load(
    member: PlanMember,
    imported: ImportedModel,
    request: PlanRequest,
    profile: Profile,
    options: PlanOptions,
    *,
    report: Report = silent,
) -> LoadedModel:
    with about(source_path(member.source).name):
        if member.data is not None and options.precision == "int8":
            return _calibrated(member, request, options, report)
        return _load_member(member, imported, request, profile, options)


def _calibrated(
    member: PlanMember, request: PlanRequest, options: PlanOptions, report: Report
) -> LoadedModel:
    """The model as a build has it after its calibration: ranges, corrections and kept nodes."""
    build_options = BuildOptions(
        precision="int8",
        jetpack=request.jetpack,
        data=member.data,
        shapes=member.shapes,
        plan=options,
        plugins=request.plugins,
    )
    target = choose_target(request.profile, request.jetpack)
    job = read_model(member.source, target, build_options, report)
    calibrated = calibrate(job)
    table = calibrated.table
    assert table is not None  # of INT8
    prepared = calibrated.prepared
    model = Model(
        member.title,
        prepared.model.graph,
        has_scale=table.tensors.__contains__,
        keep_float=calibrated.keep_float,
        rate_hz=member.rate_hz,
        cuts=prepared.cuts,
        rewrites=prepared.applied,
        kernels=_kernels(prepared.model, request, target.profile),
    )
    return LoadedModel(model, prepared, job.graph, ranges_known=True)


def _load_member(
    member: PlanMember,
    imported: ImportedModel,
    request: PlanRequest,
    profile: Profile,
    options: PlanOptions,
) -> LoadedModel:
    graph, table = imported.model, None
    if options.precision == "int8" and has_qdq(graph):
        plain = without_qdq(imported)
        graph, table = plain.model, table_of_plain(plain, imported.sha256)
    if member.table is not None and options.precision == "int8":
        table = _table(member.table, member.shapes)
    graph, _ = run_passes(graph)
    give_shapes(graph, request.plugins)
    check_nodes(graph)
    check_device_memory(graph.graph, profile)
    ranges, keep = None, frozenset[str]()
    if table is not None:
        ranges, keep = table.tensors, frozenset(table.keep_float)
    if request.rewrites:
        prepared = prepare(graph, profile, options, ranges, keep)
    else:
        prepared = Prepared(graph, dict(ranges or {}))
    prepared, _ = bounded_rows(prepared, profile)
    if options.precision == "int8" and profile.dla is not None:  # as a build keeps them
        keep |= frozenset(mixing_concats(prepared.model))
        if member.table is not None and table is not None and foreign_for_dla(table, profile):
            keep |= clipped_layers(table, prepared.model)
    model = Model(
        member.title,
        prepared.model.graph,
        has_scale=prepared.ranges.__contains__ if ranges is not None else _always,
        keep_float=keep,
        rate_hz=member.rate_hz,
        cuts=prepared.cuts,
        rewrites=prepared.applied,
        kernels=_kernels(prepared.model, request, profile),
    )
    return LoadedModel(model, prepared, graph, ranges_known=table is not None)


def _kernels(graph: ir.Model, request: PlanRequest, profile: Profile) -> KernelSupport:
    """Ask for GPU kernels, whether or not this host could compile them."""
    if profile.gpu is None:
        return KernelSupport()
    support = ask_gpu(graph, (), request.plugins)
    ops = {str(node.name): node.op_type for node in graph.graph}
    reasons = {
        name: TENSORRT_PLUGIN if ops[name].endswith("_TRT") else why
        for name, why in support.no_kernel.items()
    }
    return replace(support, no_kernel=reasons)


def _table(
    table: Path | CalibrationTable, shapes: Mapping[str, tuple[int, ...]]
) -> CalibrationTable:
    return table if isinstance(table, CalibrationTable) else read_ranges(table, shapes=shapes).table


def _always(name: str) -> bool:
    return True
