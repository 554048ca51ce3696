"""The page of an ONNX model: inputs and outputs, graph, operators, and where nodes would run."""

from collections.abc import Mapping

from device.engine.manifest import NodePlacement
from toolkit.graph.node_view import NodeView, TensorView, views
from toolkit.graph.subgraph import with_shapes
from toolkit.graph.summary import ModelSummary
from toolkit.html.charts import Bar, bars
from toolkit.html.graph import LABELS, GraphNode, draw_graph
from toolkit.html.markup import Html, Number, facts, folded, heading, preformatted, table
from toolkit.html.page import page
from toolkit.importers.onnx import ModelFile
from toolkit.partition.planning.plan import Plan
from toolkit.partition.planning.plan_html import node_places

CHANGED = "the passes fold, fuse or rewrite this node"


def model_page(file: ModelFile, summary: ModelSummary, plan: Plan | None, report: str) -> str:
    """Return the page; with a plan, nodes have the colour of their processor."""
    nodes = views(with_shapes(file.model).graph)
    opsets = ", ".join(f"{domain} {version}" for domain, version in summary.opsets.items())
    values = {
        "file": f"{file.size_bytes / 1e6:.2f} MB, sha256 {file.sha256[:12]}",
        "made by": summary.producer or "not stated",
        "opset": f"{opsets} (IR version {summary.ir_version})",
        "parameters": f"{summary.parameters:,}",
        "multiply-accumulates": f"{summary.macs / 1e6:,.3f} million",
        **summary.metadata,
    }
    parts = [facts(values), heading("Graph"), _graph(nodes, plan), *_tables(summary)]
    parts += [heading("All nodes"), _layers(nodes, plan)]
    parts += [heading("Report"), folded("As printed", preformatted(report))]
    lead = "ONNX model" if plan is None else f"ONNX model, planned for {plan.profile}"
    return page(f"Model {file.path}", lead, parts)


def _graph(nodes: tuple[NodeView, ...], plan: Plan | None) -> Html:
    rows, places = _placements(plan)
    maker = {tensor.name: view.name for view in nodes for tensor in view.outputs}
    return draw_graph(
        [
            GraphNode(
                name=view.name,
                op=view.op,
                place=places.get(view.name, ""),
                after=tuple(maker[name] for name in view.reads if name in maker),
                time=_time(rows.get(view.name)),
                facts=_facts(view, rows.get(view.name), planned=plan is not None),
            )
            for view in nodes
        ],
        "Graph of the model",
    )


def _placements(plan: Plan | None) -> tuple[Mapping[str, NodePlacement], Mapping[str, str]]:
    if plan is None:
        return {}, {}
    return {row.node: row for row in plan.placements}, node_places(plan)


def _time(row: NodePlacement | None) -> str:
    return f"{row.predicted_us:.1f} us" if row is not None and row.predicted_us else ""


def _facts(
    view: NodeView, row: NodePlacement | None, *, planned: bool
) -> tuple[tuple[str, str], ...]:
    facts_of = [("output", "\n".join(map(_shape, view.outputs)))]
    if view.macs:
        facts_of.append(("multiply-accumulates", f"{view.macs / 1e6:.3f} million"))
    if view.weight_bytes:
        facts_of.append(("constants", f"{view.weight_bytes:,} bytes"))
    facts_of += [(name, str(value)) for name, value in view.attributes]
    if row is not None:
        reason = f"[{row.rule}] {row.reason}" if row.rule else row.reason
        facts_of += [
            ("runs on", f"{row.processor}, segment {row.segment}"),
            ("why there", reason),
            ("predicted time", f"{row.predicted_us:.1f} us"),
        ]
    elif planned:
        facts_of.append(("runs on", CHANGED))
    return tuple(facts_of)


def _tables(summary: ModelSummary) -> list[Html]:
    tensors = [
        (kind, tensor.name, tensor.dtype, _sizes(tensor.shape), Number(tensor.bytes))
        for kind, rows in (("input", summary.inputs), ("output", summary.outputs))
        for tensor in rows
    ]
    operators = [
        (
            row.op,
            Number(row.nodes),
            Number(row.macs / 1e6, f"{row.macs / 1e6:.3f}"),
            Number(row.weight_bytes, f"{row.weight_bytes:,}"),
        )
        for row in summary.operators
    ]
    busiest = sorted(summary.operators, key=lambda row: -row.macs)[:10]
    drawn = [Bar(row.op, row.macs, f"{row.macs / 1e6:.3f} MMACs") for row in busiest if row.macs]
    heads = ("operator", "nodes", "MMACs", "constants, bytes")
    return [
        heading("Inputs and outputs"),
        table("Inputs and outputs", ("kind", "name", "type", "shape", "bytes"), tensors),
        heading("Operators"),
        bars("Multiply-accumulates by operator", drawn),
        table("Operators", heads, operators),
    ]


def _layers(nodes: tuple[NodeView, ...], plan: Plan | None) -> Html:
    placements, places = _placements(plan)
    rows = []
    for index, view in enumerate(nodes):
        row = placements.get(view.name)
        rows.append(
            (
                Number(index + 1),
                view.name,
                view.op,
                ", ".join(_sizes(tensor.shape) for tensor in view.outputs),
                Number(None if view.macs is None else view.macs / 1e6, _mmacs(view)),
                LABELS[places[view.name]] if row else "",
                row.reason if row else "",
            )
        )
    heads = ("#", "node", "operator", "output", "MMACs", "processor", "why there")
    return table(f"{len(rows)} nodes", heads, rows)


def _mmacs(view: NodeView) -> str:
    return "" if view.macs is None else f"{view.macs / 1e6:.3f}"


def _shape(tensor: TensorView) -> str:
    return f"{tensor.name}: {tensor.dtype} {_sizes(tensor.shape)}"


def _sizes(shape: tuple[int | str | None, ...] | None) -> str:
    if shape is None:
        return "unknown shape"
    return "x".join("?" if dim is None else str(dim) for dim in shape) or "1 number"
