"""Plan one model or several on one board: import, rewrite, place, report."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from device.profile import Profile
from toolkit.dla.legalize.rewrite import Applied
from toolkit.dla.rules.explain import Explanation, explain_node, render_explanation
from toolkit.engine.support import ask_gpu
from toolkit.engine.target import Target, choose_target
from toolkit.errors import PlanError
from toolkit.graph.node_view import views
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.partition.costs.measured import load_measured
from toolkit.partition.planning.advice import Advice, advise
from toolkit.partition.planning.cycles import cycles_of, render_cycles
from toolkit.partition.planning.plan import Model, PlanOptions, SharedPlan, plan_together
from toolkit.partition.planning.plan_html import plan_html
from toolkit.partition.planning.plan_json import shared_builtins
from toolkit.partition.planning.plan_text import render_nodes, render_plan, render_shared
from toolkit.partition.planning.portable import KernelSupport
from toolkit.partition.planning.workload import WorkloadModel
from toolkit.partition.prepare import Prepared, prepare
from toolkit.plugins import Plugin
from toolkit.plugins.functions import give_shapes
from toolkit.quantize.qdq.importer import import_qdq
from toolkit.quantize.ranges.table_file import has_qdq, read_ranges, table_of_plain

__all__ = [
    "PlanOptions",
    "PlanRequest",
    "PlanResult",
    "as_builtins",
    "as_text",
    "explain",
    "make_plan",
    "plan_html",
]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The command line of `tandem plan`.

    `options.tensorrt` is filled in from the profile and `jetpack`. `measured`: file of node times.
    """

    members: tuple[WorkloadModel, ...]
    profile: str
    jetpack: str | None
    options: PlanOptions
    measured: Path | None
    rewrites: bool
    plugins: tuple[Plugin, ...]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model after passes and rewrites; `original` is the one before the rewrites."""

    model: Model
    prepared: Prepared
    original: ir.Model


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The plans of all models, in their order, with advice by model name."""

    shared: SharedPlan
    advice: Mapping[str, tuple[Advice, ...]]
    loaded: tuple[LoadedModel, ...]


def make_plan(request: PlanRequest) -> PlanResult:
    """Plan all models of the request together."""
    target, options = _target(request)
    loaded = tuple(_load(member, request, target.profile, options) for member in request.members)
    times = load_measured(request.measured) if request.measured else None
    models = tuple(replace(one.model, measured=times) for one in loaded)
    shared = plan_together(models, target.profile, options)
    advice = {
        plan.name: advise(shared, plan, target.profile, one.prepared.declined)
        for plan, one in zip(shared.plans, loaded, strict=True)
    }
    return PlanResult(shared, advice, loaded)


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
    loaded = _load(request.members[0], request, target.profile, options)
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


def as_text(result: PlanResult, *, with_nodes: bool, with_cycles: bool) -> str:
    """Return the report for people."""
    shared = result.shared
    several = len(shared.plans) > 1
    parts = [render_shared(shared)] if several else []
    rows = zip(shared.plans, result.loaded, shared.candidates, strict=True)
    for plan, one, candidate in rows:
        title = f"== {plan.name}\n" if several else ""
        advice = result.advice[plan.name]
        parts.append(title + render_plan(plan, advice) + _rewrites_text(one.prepared))
        if with_nodes:
            parts.append(render_nodes(plan))
        if with_cycles:
            cycles = cycles_of(plan.segments, candidate.views, candidate.costs)
            parts.append(render_cycles(cycles))
    return "\n\n".join(parts)


def as_builtins(result: PlanResult) -> dict[str, Any]:
    """Return what `--json` prints."""
    rewrites = {
        plan.name: _rewrites_builtins(one.prepared)
        for plan, one in zip(result.shared.plans, result.loaded, strict=True)
    }
    return {**shared_builtins(result.shared, result.advice), "rewrites": rewrites}


def _target(request: PlanRequest) -> tuple[Target, PlanOptions]:
    target = choose_target(request.profile, request.jetpack)
    return target, replace(request.options, tensorrt=target.tensorrt)


def _load(
    member: WorkloadModel, request: PlanRequest, profile: Profile, options: PlanOptions
) -> LoadedModel:
    imported = import_model(member.path, shapes=member.shapes, plugins=request.plugins)
    graph, table = imported.model, None
    if options.precision == "int8" and has_qdq(graph):
        plain = import_qdq(graph, any_weight_scale=True)
        graph, table = plain.model, table_of_plain(plain, imported.sha256)
    if member.table is not None and options.precision == "int8":
        table = read_ranges(member.table, shapes=member.shapes).table
    graph, _ = run_passes(graph)
    give_shapes(graph, request.plugins)
    ranges, keep = None, frozenset[str]()
    if table is not None:
        ranges, keep = table.tensors, frozenset(table.keep_float)
    if request.rewrites:
        prepared = prepare(graph, profile, options, ranges)
    else:
        prepared = Prepared(graph, dict(ranges or {}))
    model = Model(
        member.title,
        prepared.model.graph,
        has_scale=prepared.ranges.__contains__ if ranges is not None else _always,
        keep_float=keep,
        rate_hz=member.rate_hz,
        cuts=prepared.cuts,
        kernels=_kernels(prepared.model, request, profile),
    )
    return LoadedModel(model, prepared, graph)


def _kernels(graph: ir.Model, request: PlanRequest, profile: Profile) -> KernelSupport:
    """Ask for GPU kernels, whether or not this host could compile them."""
    return KernelSupport() if profile.gpu is None else ask_gpu(graph, (), request.plugins)


def _always(name: str) -> bool:
    return True


def _rewrites_builtins(prepared: Prepared) -> dict[str, Any]:
    return {
        "gain": prepared.gain,
        "applied": [_rewrite(row) for row in prepared.applied],
        "unused": [_rewrite(row) for row in prepared.unused],
        "declined": [
            {"rewrite": row.rewrite, "node": row.node, "reason": row.reason}
            for row in prepared.declined
        ],
    }


def _rewrite(row: Applied) -> dict[str, Any]:
    return {
        "rewrite": row.rewrite,
        "node": row.node,
        "rule": row.verdict.rule,
        "replaced": list(row.replaced),
        "nodes": list(row.nodes),
    }


def _rewrites_text(prepared: Prepared) -> str:
    lines = [
        f"rewritten {row.rewrite}: {row.node} ({row.verdict.rule}: {row.verdict.actual})"
        for row in prepared.applied
    ]
    if prepared.gain is not None:
        lines.append(
            f"predicted gain of what was rewritten: {prepared.gain:.1%} by the objective, alone"
        )
    lines += [f"possible, but no gain: {row.rewrite} of {row.node}" for row in prepared.unused]
    return "".join(f"\n{line}" for line in lines)
