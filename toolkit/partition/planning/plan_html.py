"""A page about a plan: the graph coloured by processor, frames in flight, and how plans compare."""

from collections.abc import Mapping, Sequence
from html import escape

from device.engine.manifest import Processor
from toolkit.partition.planning.advice import Advice
from toolkit.partition.planning.figures import Figures
from toolkit.partition.planning.graph_drawing import draw_graph
from toolkit.partition.planning.plan import Plan, SharedPlan
from toolkit.partition.planning.plan_text import render_plan
from toolkit.partition.planning.traffic import frames_at_once
from toolkit.partition.planning.verdict import verdict
from toolkit.partition.solver.simulate import CROSSING

FRAMES = 3
WIDTH, ROW = 960.0, 30.0
COLOURS: Mapping[Processor, str] = {
    "gpu": "#76b900",
    "dla0": "#5b8def",
    "dla1": "#9a6fe0",
    "cpu": "#8a8f98",
}
SHADES = ("#1f6f8b", "#d1495b", "#edae49", "#5f4b8b", "#00798c", "#66a182")
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;
color:#1d2127;background:#fff}
h1{font-size:1.6rem;margin-bottom:0}h2{font-size:1.15rem;margin-top:2rem}
pre{background:#f5f6f8;padding:1rem;overflow-x:auto;font-size:12px;white-space:pre-wrap}
table{border-collapse:collapse;font-size:12px}td,th{padding:.15rem .6rem .15rem 0;text-align:left;
vertical-align:top}td.n{text-align:right}
.graph{overflow-x:auto;border:1px solid #e4e7eb;border-radius:4px}svg text{font-size:11px}
.muted{color:#667}.key span{padding:0 .5rem;margin-right:.5rem;color:#fff;border-radius:3px}
"""


def plan_html(shared: SharedPlan, advice: Mapping[str, Sequence[Advice]]) -> str:
    """Return the page; everything is inside it."""
    names = ", ".join(plan.name for plan in shared.plans)
    first = shared.plans[0]
    used = {s.processor for plan in shared.plans for s in plan.segments}
    key = "".join(
        f"<span style='background:{c}'>{p}</span>" for p, c in COLOURS.items() if p in used
    )
    key += "<span style='background:#c62828'>crossing</span>"
    parts = [
        f"<h1>Plan of {escape(names)}</h1>",
        f"<p class=muted>{escape(first.profile)}, {first.precision}, "
        f"{escape(first.power_mode or 'highest clocks')}. All times are predicted.</p>",
        f"<h2>{_gantt_title(shared)}</h2>",
        _gantt(shared),
    ]
    for plan, candidate in zip(shared.plans, shared.candidates, strict=True):
        parts += [
            f"<h2>{escape(plan.name)}</h2><p>{escape(verdict(plan))}</p>",
            f"<p class=key>{key}</p><div class=graph>",
            draw_graph(plan, candidate.views, COLOURS),
            "</div><h2>Compared</h2>",
            _compared(plan.figures),
            f"<pre>{escape(render_plan(plan, advice.get(plan.name, ())))}</pre>",
            _nodes(plan),
        ]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Plan of {escape(names)}</title>"
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _nodes(plan: Plan) -> str:
    """Return a collapsed table of every node with its processor and reason."""
    rows = "".join(
        f"<tr><td>{escape(row.node)}<td>{escape(row.op)}<td>{row.segment}"
        f"<td class=n>{row.predicted_us:.1f}<td>{escape(row.rule)}<td>{escape(row.reason)}"
        for row in plan.placements
    )
    head = "<tr><th>node<th>operator<th>segment<th>us<th>rule<th>reason"
    return (
        f"<details><summary>All {len(plan.placements)} nodes</summary>"
        f"<table>{head}{rows}</table></details>"
    )


def _gantt_title(shared: SharedPlan) -> str:
    if len(shared.plans) == 1:
        return f"{FRAMES} frames in flight"
    return "A frame of every model at once"


def _gantt(shared: SharedPlan) -> str:
    """Draw when each segment of the first frames runs: a row a processor, a colour a frame."""
    intervals = frames_at_once(shared.placed, FRAMES if len(shared.plans) == 1 else 1)
    end = max((interval.end_us for interval in intervals), default=0.0) or 1.0
    rows = sorted({interval.processor for interval in intervals}, key=list(COLOURS).index)
    names = [plan.name for plan in shared.plans]
    left, scale = 50.0, (WIDTH - 50.0) / end
    drawn = [
        f"<text x=0 y={ROW * index + 20:.0f}>{processor}</text>"
        for index, processor in enumerate(rows)
    ]
    for interval in intervals:
        shade = interval.frame if len(names) == 1 else names.index(interval.network)
        colour = "#c3c8d0" if interval.segment == CROSSING else SHADES[shade % len(SHADES)]
        label = "crossing" if interval.segment == CROSSING else f"segment {interval.segment}"
        title = (
            f"{interval.network} frame {interval.frame + 1}, {label}: "
            f"{interval.start_us:.0f} to {interval.end_us:.0f} us"
        )
        x, width = left + interval.start_us * scale, (interval.end_us - interval.start_us) * scale
        y = ROW * rows.index(interval.processor) + 4
        drawn.append(
            f"<rect x={x:.2f} y={y:.0f} width={max(width, 0.5):.2f} height={ROW - 8:.0f} "
            f"fill='{colour}'><title>{escape(title)}</title></rect>"
        )
    height = ROW * len(rows) + 18
    drawn.append(f"<text x={left} y={height - 4:.0f}>0</text>")
    drawn.append(f"<text x={WIDTH} y={height - 4:.0f} text-anchor=end>{end:.0f} us</text>")
    svg = f"<svg viewBox='0 0 {WIDTH:.0f} {height:.0f}' width='100%'>{''.join(drawn)}</svg>"
    titles = [f"frame {number + 1}" for number in range(FRAMES)] if len(names) == 1 else names
    key = "".join(
        f"<span style='background:{SHADES[index % len(SHADES)]}'>{escape(name)}</span>"
        for index, name in enumerate(titles)
    )
    return f"{svg}<p class=key>{key}<span style='background:#c3c8d0'>crossing</span></p>"


def _compared(rows: Sequence[Figures]) -> str:
    """Draw latency, time between frames and energy of each plan as bars."""
    measures = (
        ("latency, us", [row.latency_us for row in rows]),
        ("time between frames, us", [row.busiest_us for row in rows]),
        ("GPU time a frame, us", [row.gpu_us for row in rows]),
        ("energy a frame, mJ", [row.energy_mj for row in rows]),
    )
    drawn, y = [], 0.0
    for title, values in measures:
        drawn.append(f"<text x=0 y={y + 14:.0f} font-weight=bold>{title}</text>")
        y += 18
        largest = max(*values, 1e-9)
        for index, (row, value) in enumerate(zip(rows, values, strict=True)):
            width = 600 * value / largest
            colour = "#1f6f8b" if index == 0 else "#c3c8d0"
            drawn.append(
                f"<text x=0 y={y + 12:.0f}>{escape(row.name)}</text>"
                f"<rect x=140 y={y:.0f} width={width:.1f} height=14 fill='{colour}' />"
                f"<text x={146 + width:.1f} y={y + 12:.0f}>{value:.4g}</text>"
            )
            y += 18
        y += 8
    return f"<svg viewBox='0 0 {WIDTH:.0f} {y:.0f}' width='100%'>{''.join(drawn)}</svg>"
