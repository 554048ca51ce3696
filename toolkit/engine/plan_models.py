"""Plan one model or several on one board, without building: import, rewrite, place, advise."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from calibration.table import CalibrationTable
from toolkit.dla.rules.explain import Explanation, explain_node, render_explanation
from toolkit.engine.batch import choose_batch, chooses_batch
from toolkit.engine.frontend import run_frontend
from toolkit.engine.frontend_result import Frontend
from toolkit.engine.options import BuildOptions
from toolkit.engine.support import ask_gpu
from toolkit.engine.target import choose_target
from toolkit.errors import PlanError, about
from toolkit.graph.node_view import views
from toolkit.graph.passes import SIZELESS_PASSES, run_passes
from toolkit.importers.onnx import ModelSource, OpenModel, open_model, sized, source_path
from toolkit.importers.source import ModelPath
from toolkit.partition.costs.measured import Measured, load_measured
from toolkit.partition.planning.advice import Advice, advise
from toolkit.partition.planning.batch import Batching
from toolkit.partition.planning.plan import Plan, PlanOptions, SharedPlan, plan_together
from toolkit.partition.planning.portable import KernelSupport
from toolkit.partition.planning.services import Service
from toolkit.partition.planning.super_clocks import super_notes
from toolkit.partition.planning.workload import WorkloadModel
from toolkit.plugins import Plugin
from toolkit.progress import Progress, silent
from toolkit.quantize.loss.parts import output_parts
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.table_file import read_ranges
from toolkit.quantize.trials.keep import MOST_FLOAT

SCORE_KINDS = ("scores", "detections")
"""Kinds of outputs that INT8 costs their target in most trained models."""


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
    """Models that share one board, with `services` beside them, and how to plan them.

    `options.tensorrt` is filled in from the profile and `jetpack`. `measured`: node times,
    or a file of them.
    """

    members: tuple[PlanMember, ...]
    profile: str
    jetpack: str | None = None
    options: PlanOptions = field(default_factory=PlanOptions)
    measured: Measured | Path | None = None
    plugins: tuple[Plugin, ...] = ()
    services: tuple[Service, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The plans of all models, in their order, with advice and notes by model name.

    `notes`: where a build may end elsewhere than the plan, and what Super clocks change.
    """

    shared: SharedPlan
    advice: Mapping[str, tuple[Advice, ...]]
    fronts: tuple[Frontend, ...]
    notes: Mapping[str, tuple[str, ...]]


def member_of(row: WorkloadModel) -> PlanMember:
    """Return the model of a workload file."""
    source = ModelPath(row.path, row.inputs_as_nchw)
    return PlanMember(row.title, source, row.rate_hz, row.table, row.shapes)


def make_plan(request: PlanRequest, report: Progress = silent) -> PlanResult:
    """Plan all models of the request together; `report` hears of exports and calibrations."""
    fronts, shared, _ = _planned(request, report)
    profile = fronts[0].target.profile
    with about(_names(request)):
        advice = {
            plan.name: advise(shared, plan, profile, front.prepared.declined)
            for plan, front in zip(shared.plans, fronts, strict=True)
        }
    notes = {
        plan.name: (
            *float_notes(plan, front),
            *super_notes(plan, views(front.prepared.model.graph), request.jetpack),
        )
        for plan, front in zip(shared.plans, fronts, strict=True)
    }
    return PlanResult(shared, advice, fronts, notes)


def float_notes(plan: Plan, front: Frontend) -> tuple[str, ...]:
    """Say that a build with data will keep nodes in floating point, which a plan cannot know.

    It does where INT8 costs scores their target: of detectors and masks in most cases. Nothing is
    said of a plan without the DLA, which loses the most by it.
    """
    on_dla = any(segment.processor.startswith("dla") for segment in plan.segments)
    scores = [p.name for p in output_parts(front.prepared.model) if p.kind in SCORE_KINDS]
    if front.table is not None or plan.precision != "int8" or not on_dla or not scores:
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


def planned_batch(request: PlanRequest, model: OpenModel) -> tuple[Batching, PlanOptions]:
    """Return the batch of one model that the request's plan has, and the options that led there.

    `model`: that of the request, which stays as it is.
    """
    _, shared, options = _planned(request, silent, (model,))
    return shared.plans[0].batching, options


def _planned(
    request: PlanRequest, report: Progress, opened: Sequence[OpenModel] = ()
) -> tuple[tuple[Frontend, ...], SharedPlan, PlanOptions]:
    """`opened`: the models of the request, which are read where there are none."""
    times = request.measured
    if isinstance(times, Path):
        times = load_measured(times)

    def plan_all(
        models: Sequence[OpenModel], options: PlanOptions, batch: int = 1
    ) -> tuple[tuple[Frontend, ...], SharedPlan]:
        members = request.members
        fronts = tuple(
            _frontend(member, model, request, options, report, batch=batch)
            for member, model in zip(members, models, strict=True)
        )
        rows = tuple(
            replace(
                front.to_plan(_kernels(front, front.prepared.model)),
                name=member.title,
                rate_hz=member.rate_hz,
                measured=times,
                batching=Batching(batch),
            )
            for member, front in zip(members, fronts, strict=True)
        )
        trials = {row.name: front.prepared.trial for row, front in zip(rows, fronts, strict=True)}
        with about(_names(request)):
            return fronts, plan_together(
                rows, fronts[0].target.profile, fronts[0].plan, trials, request.services
            )

    options = request.options
    opened = opened or [_open(member, request, report) for member in request.members]
    rated = any(member.rate_hz is not None for member in request.members)
    if not chooses_batch(options, rated=rated, models=len(request.members)):
        return *plan_all(opened, options), options

    (member,), (model,) = request.members, opened
    model = replace(model, model=run_passes(model.model, SIZELESS_PASSES)[0])

    def plan_at(
        batch: int, options: PlanOptions
    ) -> tuple[tuple[tuple[Frontend, ...], SharedPlan], Plan]:
        fronts, shared = plan_all((model.copy(),), options, batch)
        return (fronts, shared), shared.plans[0]

    with about(model.path.name):
        dynamic = sized(model.copy(), shapes=member.shapes).batched
    choice = choose_batch(plan_at, options, dynamic=dynamic)
    fronts, shared = choice.planned
    plan = replace(shared.plans[0], batching=choice.batching)
    return fronts, replace(shared, plans=(plan,)), choice.options


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
    member = request.members[0]
    front = _frontend(member, _open(member, request, silent), request, request.options)
    profile = front.target.profile
    dla = profile.dla
    if request.options.bfloat16:
        raise PlanError("BF16 runs nothing on the DLA: explain nodes of a plan in FP16 or INT8")
    if dla is None:
        raise PlanError(f"{profile.name} has no DLA, so that no rule keeps nodes off it")
    originals = {view.name: view for view in views(front.graph.graph)}
    planned = {view.name: view for view in views(front.prepared.model.graph)}
    nodes = {**originals, **planned}
    if node not in nodes:
        similar = difflib.get_close_matches(node, nodes, n=3, cutoff=0.5)
        what = "the nearest names are" if similar else "its nodes begin with"
        names = ", ".join(similar or list(nodes)[:3])
        raise PlanError(f"{member.title} has no node {node!r}; {what} {names}")
    kernels = _kernels(front, front.prepared.model if node in planned else front.graph)
    explanation = explain_node(nodes[node], dla, front.plan.tensorrt, front.plan.precision)
    return ExplainedNode(explanation, kernels.no_kernel.get(node, ""))


def _open(member: PlanMember, request: PlanRequest, report: Progress) -> OpenModel:
    with about(source_path(member.source).name):
        return open_model(member.source, plugins=request.plugins, keep_tensorrt=True, report=report)


def _frontend(
    member: PlanMember,
    model: OpenModel,
    request: PlanRequest,
    options: PlanOptions,
    report: Progress = silent,
    *,
    batch: int = 1,
) -> Frontend:
    """Return the model as a build has it before its plan."""
    target = choose_target(request.profile, request.jetpack)
    precision = "bf16" if options.bfloat16 else options.precision
    int8, table = precision == "int8", member.table
    with about(model.path.name):
        if isinstance(table, Path) and int8:
            table = read_ranges(table, shapes=member.shapes, any_weight_scale=True).table
        build_options = BuildOptions(
            precision=precision,
            jetpack=request.jetpack,
            data=member.data if int8 else None,
            table=table if isinstance(table, CalibrationTable) and int8 else None,
            shapes=member.shapes,
            plan=options,
            plugins=request.plugins,
        )
        return run_frontend(model, target, build_options, report, batch=batch, assume_ranges=True)


def _kernels(front: Frontend, graph: ir.Model) -> KernelSupport:
    """Ask for GPU kernels, whether or not this host could compile them."""
    if front.target.profile.gpu is None:
        return KernelSupport()
    return ask_gpu(graph, (), front.options.plugins)
