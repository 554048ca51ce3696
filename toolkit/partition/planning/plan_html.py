"""A page about a plan: the graph coloured by processor, frames in flight, and how plans compare."""

from collections.abc import Mapping, Sequence
from html import escape

from device.engine.manifest import NodePlacement
from toolkit.graph.node_view import NodeView
from toolkit.html.charts import Bar, bars
from toolkit.html.graph import LABELS, GraphNode, draw_graph
from toolkit.html.markup import (
    Html,
    Number,
    colour_key,
    heading,
    paragraph,
    preformatted,
    table,
)
from toolkit.html.page import page
from toolkit.partition.planning.advice import Advice
from toolkit.partition.planning.figures import Figures
from toolkit.partition.planning.placement import Candidate
from toolkit.partition.planning.plan import Plan, SharedPlan
from toolkit.partition.planning.plan_text import render_plan
from toolkit.partition.planning.quantities import between, quantity
from toolkit.partition.planning.traffic import frames_at_once
from toolkit.partition.planning.trtexec import trtexec_lines
from toolkit.partition.planning.verdict import verdict
from toolkit.partition.solver.simulate import CROSSING

FRAMES = 3
WIDTH, ROW, LEFT = 860.0, 30.0, 56.0
SHADES = ("s0", "s1", "s2", "s3", "s4", "s5")


def plan_html(
    shared: SharedPlan,
    advice: Mapping[str, Sequence[Advice]],
    notes: Mapping[str, Sequence[str]],
) -> str:
    """Return the page, with advice and notes by model; everything is inside it."""
    names = ", ".join(plan.name for plan in shared.plans)
    first = shared.plans[0]
    lead = (
        f"{first.profile}, {first.arithmetic}, {first.power_mode or 'highest clocks'}. "
        "All times are predicted."
    )
    parts = [heading(_gantt_title(shared)), _gantt(shared)]
    for plan, candidate in zip(shared.plans, shared.candidates, strict=True):
        parts += [
            heading(plan.name),
            paragraph(verdict(plan)),
            *(paragraph(f"Note: {note}") for note in notes[plan.name]),
            plan_graph(plan, candidate),
            heading("Compared"),
            *_compared(plan.figures),
            heading("Segments"),
            _segments(plan),
            heading("Report"),
            preformatted(render_plan(plan, advice.get(plan.name, ()))),
            *_trtexec(plan),
            heading("Nodes"),
            _nodes(plan),
        ]
    return page(f"Plan of {names}", lead, parts)


def plan_graph(plan: Plan, candidate: Candidate) -> Html:
    """Return the graph of a plan, with the reason of each node."""
    rows = {row.node: row for row in plan.placements}
    places = node_places(plan)
    maker = {tensor.name: view.name for view in candidate.views for tensor in view.outputs}
    return draw_graph(
        [
            GraphNode(
                name=view.name,
                op=view.op,
                place=places[view.name],
                after=tuple(maker[name] for name in view.reads if name in maker),
                time=_time(rows[view.name]),
                facts=_facts(view, rows[view.name], plan),
            )
            for view in candidate.views
        ],
        f"Graph of {plan.name}",
    )


def node_places(plan: Plan) -> dict[str, str]:
    """Return the processor of each node, "portable" where a GPU segment has no kernels."""
    return {
        node: "portable"
        if segment.place == "portable" and segment.processor == "gpu"
        else segment.processor
        for segment in plan.segments
        for node in segment.nodes
    }


def _trtexec(plan: Plan) -> list[Html]:
    lines = trtexec_lines(plan)
    return [heading("With trtexec"), preformatted("\n".join(lines))] if lines else []


def _value(row: Figures, value: float, unit: str, field: str) -> str:
    bounds = row.intervals.get(field)
    text = quantity(value, unit)
    return f"{text} ({between(bounds, unit)})" if bounds else text


def _time(row: NodePlacement) -> str:
    return quantity(row.predicted_us, "us") if row.predicted_us else ""


def _facts(view: NodeView, row: NodePlacement, plan: Plan) -> tuple[tuple[str, str], ...]:
    facts = [
        ("runs on", f"{row.processor}, segment {row.segment}"),
        ("why there", f"[{row.rule}] {row.reason}" if row.rule else row.reason),
        ("precision", plan.arithmetic.upper()),
        ("output", "\n".join(tensor.text for tensor in view.outputs)),
        ("predicted time", quantity(row.predicted_us, "us")),
    ]
    if view.macs:
        facts.append(("multiply-accumulates", f"{view.macs / 1e6:.3f} million"))
    return tuple(facts)


def _segments(plan: Plan) -> Html:
    """Return a table of the segments with the 80 % intervals of time and energy."""
    rows: list[tuple[str | Number, ...]] = []
    for segment, cost in zip(plan.segments, plan.costs, strict=True):
        cells: list[str | Number] = []
        for field, value, unit in (
            ("predicted_us", cost.predicted_us, "us"),
            ("energy_mj", cost.energy_mj, "mJ"),
        ):
            bounds = cost.intervals.get(field)
            cells += [Number(value, quantity(value, unit)), between(bounds, unit) if bounds else ""]
        rows.append((segment.name, LABELS[segment.processor], Number(cost.nodes), *cells))
    heads = ("segment", "processor", "nodes", "time", "80 % of cases", "energy", "80 % of cases")
    return table(f"All {len(rows)} segments in running order", heads, rows)


def _nodes(plan: Plan) -> Html:
    """Return a table of every node with its processor and reason."""
    places = node_places(plan)
    rows = [
        (
            Number(index + 1),
            row.node,
            row.op,
            LABELS[places[row.node]],
            row.segment,
            Number(row.predicted_us, quantity(row.predicted_us, "us")),
            row.rule,
            row.reason,
        )
        for index, row in enumerate(plan.placements)
    ]
    heads = ("#", "node", "operator", "processor", "segment", "time", "rule", "reason")
    return table(f"All {len(rows)} nodes in running order", heads, rows)


def _gantt_title(shared: SharedPlan) -> str:
    if len(shared.plans) == 1:
        return f"{FRAMES} frames in flight"
    return "A frame of every model at once"


def _gantt(shared: SharedPlan) -> Html:
    """Draw when each segment of the first frames runs: a row a processor, a colour a frame."""
    intervals = frames_at_once(shared.placed, FRAMES if len(shared.plans) == 1 else 1)
    end = max((interval.end_us for interval in intervals), default=0.0) or 1.0
    rows = sorted({interval.processor for interval in intervals}, key=list(LABELS).index)
    names = [plan.name for plan in shared.plans]
    scale = (WIDTH - LEFT) / end
    drawn = [
        f"<text x=0 y={ROW * index + 20:.0f}>{LABELS[processor]}</text>"
        for index, processor in enumerate(rows)
    ]
    for interval in intervals:
        shade = interval.frame if len(names) == 1 else names.index(interval.network)
        kind = "soft" if interval.segment == CROSSING else SHADES[shade % len(SHADES)]
        label = "crossing" if interval.segment == CROSSING else f"segment {interval.segment}"
        title = (
            f"{interval.network} frame {interval.frame + 1}, {label}: "
            f"{quantity(interval.start_us, 'us')} to {quantity(interval.end_us, 'us')}"
        )
        x, width = LEFT + interval.start_us * scale, (interval.end_us - interval.start_us) * scale
        y = ROW * rows.index(interval.processor) + 4
        drawn.append(
            f"<rect class='fill {kind}' x={x:.2f} y={y:.0f} width={max(width, 0.5):.2f} "
            f"height={ROW - 8:.0f}><title>{escape(title)}</title></rect>"
        )
    height = ROW * len(rows) + 20
    drawn.append(f"<text x={LEFT} y={height - 4:.0f}>0</text>")
    drawn.append(f"<text x={WIDTH} y={height - 4:.0f} text-anchor=end>{quantity(end, 'us')}</text>")
    svg = (
        "<div class=scroll tabindex=0 role=region aria-label='When segments run'><svg class=chart "
        f"role=img aria-label='When segments run' viewBox='0 0 {WIDTH:.0f} {height:.0f}'>"
        f"{''.join(drawn)}</svg></div>"
    )
    titles = [f"frame {number + 1}" for number in range(FRAMES)] if len(names) == 1 else names
    key = [(SHADES[index % len(SHADES)], name) for index, name in enumerate(titles)]
    return Html(svg + colour_key([*key, ("soft", "crossing")]))


def _compared(rows: Sequence[Figures]) -> list[Html]:
    """Draw latency, time between frames and energy of each plan as bars, with 80 % intervals."""
    measures = (
        ("latency", "us", "latency_us", [row.latency_us for row in rows]),
        ("time between frames", "us", "", [row.busiest_us for row in rows]),
        ("GPU time a frame", "us", "gpu_us", [row.gpu_us for row in rows]),
        ("energy a frame", "mJ", "energy_mj", [row.energy_mj for row in rows]),
    )
    parts = [paragraph("In brackets: where 80 % of boards and models like these are.")]
    for title, unit, field, values in measures:
        parts += [
            heading(title, 3),
            bars(
                title,
                [
                    Bar(row.name, value, _value(row, value, unit, field), "soft" if index else "s0")
                    for index, (row, value) in enumerate(zip(rows, values, strict=True))
                ],
            ),
        ]
    return parts
