"""`tandem plan`: what runs where, why, what it takes, and what to change; no board needed."""

import difflib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir

from device.engine.manifest import Precision
from device.files import replacing
from device.profile import Profile
from toolkit.cli.options.calibration import parse_shapes
from toolkit.cli.options.finite import FiniteRange
from toolkit.cli.options.plan import plan_options
from toolkit.cli.options.plugin import plugin_option
from toolkit.dla.legalize.rewrite import Applied
from toolkit.dla.rules.explain import Explanation, explain_node, render_explanation
from toolkit.engine.target import Target, choose_target
from toolkit.errors import PlanError
from toolkit.graph.node_view import views
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.partition.costs.measured import load_measured
from toolkit.partition.planning.advice import Advice, advise
from toolkit.partition.planning.cycles import cycles_of, render_cycles
from toolkit.partition.planning.plan import SECONDS, Model, PlanOptions, SharedPlan, plan_together
from toolkit.partition.planning.plan_html import plan_html
from toolkit.partition.planning.plan_json import shared_builtins
from toolkit.partition.planning.plan_text import render_nodes, render_plan, render_shared
from toolkit.partition.planning.workload import WorkloadModel, load_workload
from toolkit.partition.prepare import Prepared, prepare
from toolkit.plugins import Plugin
from toolkit.plugins.functions import give_shapes
from toolkit.quantize.qdq.importer import import_qdq
from toolkit.quantize.ranges.table_file import has_qdq, read_ranges, table_of_plain


@click.command(
    epilog="Example: tandem plan model.onnx --profile agx-orin-64gb --power-mode 30W "
    "--html plan.html"
)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--profile", required=True, help="See `tandem profiles`.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "int8"]),
    default="int8",
    show_default=True,
)
@plan_options
@click.option("--rate", "rate_hz", type=FiniteRange(min=0, min_open=True),
    help="Frames a second that must be kept up.")  # fmt: skip
@click.option("--workload", type=click.Path(path_type=Path),
    help="Several models on one board, in place of MODEL; see docs/ARCHITECTURE.md.")  # fmt: skip
@click.option("--table", type=click.Path(path_type=Path),
    help="INT8 ranges: what has none stays off the DLA. [default: all have]")  # fmt: skip
@click.option("--measured", type=click.Path(path_type=Path),
    help="Times of nodes from a board; they go before predicted ones.")  # fmt: skip
@click.option("--no-rewrites", is_flag=True, help="Plan the graph without rewriting it.")
@click.option("--seconds", type=FiniteRange(min=0.1), default=SECONDS, show_default=True,
    help="Bound of the search for a proven plan.")  # fmt: skip
@click.option("--explain", "explained", metavar="NODE",
    help="Show every rule for a node, with its value and its limit.")  # fmt: skip
@click.option("--nodes", "with_nodes", is_flag=True, help="List every node with its reason.")
@click.option("--cycles", "with_cycles", is_flag=True,
    help="List the clocks of every DLA layer, and what bounds it.")  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with pictures.")
@click.option("--shape", "shapes", multiple=True, callback=parse_shapes, metavar="NAME=DIMS",
    help="Fix an input's shape.")  # fmt: skip
@plugin_option
@click.option("--jetpack", help="JetPack version on the board. [default: newest with its DLA]")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    model: Path | None,
    profile: str,
    precision: Precision,
    objective: str,
    power_mode: str | None,
    max_crossings: int | None,
    rate_hz: float | None,
    workload: Path | None,
    table: Path | None,
    measured: Path | None,
    no_rewrites: bool,
    seconds: float,
    explained: str | None,
    with_nodes: bool,
    with_cycles: bool,
    html: Path | None,
    shapes: dict[str, tuple[int, ...]],
    plugins: tuple[Plugin, ...],
    jetpack: str | None,
    as_json: bool,
) -> None:
    """Say which nodes of an ONNX MODEL run on the DLA, why the others do not, and what it takes.

    All times and energies are predicted; docs/COSTS.md says how well.
    """
    if (model is None) == (workload is None):
        raise click.UsageError("Give a MODEL or a --workload.")
    if workload is not None and (rate_hz or table or shapes or measured or explained):
        raise click.UsageError(
            "--rate, --table, --shape, --measured and --explain belong to one MODEL; "
            "a workload file holds rate, table and shapes of each."
        )
    target = choose_target(profile, jetpack)
    options = PlanOptions(
        precision=precision,
        tensorrt=target.tensorrt,
        objective=objective,
        power_mode=power_mode,
        max_crossings=max_crossings,
        seconds=seconds,
    )
    if workload is not None:
        members = load_workload(workload).model
    else:
        assert model is not None
        members = (WorkloadModel(path=model, rate_hz=rate_hz, table=table, shapes=shapes),)
    loaded = [
        _load(member, target.profile, options, rewrites=not no_rewrites, plugins=plugins)
        for member in members
    ]
    times = load_measured(measured) if measured else None
    models = tuple(replace(one.model, measured=times) for one in loaded)
    if explained is not None:
        found = _explanation(loaded[0], explained, target, options)
        click.echo(json.dumps(asdict(found)) if as_json else render_explanation(found))
        return
    shared = plan_together(models, target.profile, options)
    advice = {
        plan.name: advise(shared, plan, target.profile, one.prepared.declined)
        for plan, one in zip(shared.plans, loaded, strict=True)
    }
    if html:
        with replacing(html) as file:
            file.write(plan_html(shared, advice).encode())
    if as_json:
        rewrites = {
            plan.name: _builtins(one) for plan, one in zip(shared.plans, loaded, strict=True)
        }
        click.echo(json.dumps({**shared_builtins(shared, advice), "rewrites": rewrites}))
        return
    click.echo(_text(shared, advice, loaded, with_nodes=with_nodes, with_cycles=with_cycles))
    if html:
        click.echo(f"wrote {html}")


@dataclass(frozen=True, slots=True)
class _Loaded:
    model: Model
    prepared: Prepared
    original: ir.Graph


def _load(
    member: WorkloadModel,
    profile: Profile,
    options: PlanOptions,
    *,
    rewrites: bool,
    plugins: tuple[Plugin, ...],
) -> _Loaded:
    imported = import_model(member.path, shapes=member.shapes, plugins=plugins)
    graph, table = imported.model, None
    if options.precision == "int8" and has_qdq(graph):
        plain = import_qdq(graph, any_weight_scale=True)
        graph, table = plain.model, table_of_plain(plain, imported.sha256)
    if member.table is not None and options.precision == "int8":
        table = read_ranges(member.table, shapes=member.shapes).table
    graph, _ = run_passes(graph)
    give_shapes(graph, plugins)
    ranges, keep = None, frozenset[str]()
    if table is not None:
        ranges, keep = table.tensors, frozenset(table.keep_float)
    prepared = prepare(graph, profile, options, ranges) if rewrites else _plain(graph, ranges)
    model = Model(
        member.title,
        prepared.model.graph,
        has_scale=prepared.ranges.__contains__ if ranges is not None else _always,
        keep_float=keep,
        rate_hz=member.rate_hz,
        cuts=prepared.cuts,
    )
    return _Loaded(model, prepared, graph.graph)


def _plain(graph: ir.Model, ranges: dict[str, float] | None) -> Prepared:
    return Prepared(graph, dict(ranges or {}))


def _always(name: str) -> bool:
    return True


def _explanation(one: _Loaded, node: str, target: Target, options: PlanOptions) -> Explanation:
    """Explain a node of the rewritten graph, or of the model as it was."""
    dla = target.profile.dla
    if dla is None:
        raise PlanError(f"{target.profile.name} has no DLA, so that no rule keeps nodes off it")
    nodes = {view.name: view for view in (*views(one.original), *views(one.model.graph))}
    if node not in nodes:
        near = difflib.get_close_matches(node, nodes, n=3, cutoff=0.5) or list(nodes)[:3]
        what = "the nearest names are" if near != list(nodes)[:3] else "its nodes begin with"
        raise PlanError(f"{one.model.name} has no node {node!r}; {what} {', '.join(near)}")
    return explain_node(nodes[node], dla, target.tensorrt, options.precision)


def _text(
    shared: SharedPlan,
    advice: dict[str, tuple[Advice, ...]],
    loaded: list[_Loaded],
    *,
    with_nodes: bool,
    with_cycles: bool,
) -> str:
    parts = [render_shared(shared)] if len(shared.plans) > 1 else []
    rows = zip(shared.plans, loaded, shared.candidates, strict=True)
    for plan, one, candidate in rows:
        title = f"== {plan.name}\n" if len(shared.plans) > 1 else ""
        parts.append(title + render_plan(plan, advice[plan.name]) + _rewrites(one))
        if with_nodes:
            parts.append(render_nodes(plan))
        if with_cycles:
            found = cycles_of(plan.segments, candidate.views, candidate.costs)
            parts.append(render_cycles(found))
    return "\n\n".join(parts)


def _builtins(one: _Loaded) -> dict[str, Any]:
    prepared = one.prepared
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


def _rewrites(one: _Loaded) -> str:
    prepared = one.prepared
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
