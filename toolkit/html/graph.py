"""A graph as SVG: boxes with operator, name and time, coloured by place, and the facts of each.

The script of the page adds zoom, search and the panel; without it the boxes' titles still tell.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from toolkit.html.layout import Layout, lay_out
from toolkit.html.markup import Html, colour_key

BOX, SIDE, PAD = 172.0, 6.0, 8.0
LINE, LETTERS, LINES = 12.0, 25, 3  # of a name inside a box
HEAD = 18.0
OP_LETTERS = 16
LABELS = {"cpu": "CPU", "gpu": "GPU", "dla0": "DLA 0", "dla1": "DLA 1", "portable": "portable"}


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node: `place` is its colour (a key of LABELS, "" where none is known).

    `after`: names of the nodes whose results it reads. `time`: short text in the box. `facts`: what
    the panel shows, beside name and operator.
    """

    name: str
    op: str
    place: str
    after: tuple[str, ...] = ()
    time: str = ""
    facts: tuple[tuple[str, str], ...] = field(default=())


def draw_graph(nodes: Sequence[GraphNode], title: str) -> Html:
    """Return the graph with its tools, key and panel; `nodes` in running order."""
    number = {node.name: index for index, node in enumerate(nodes)}
    edges = [
        (number[name], index)
        for index, node in enumerate(nodes)
        for name in dict.fromkeys(node.after)
        if number.get(name, index) < index
    ]
    texts = [_wrapped(node.name) for node in nodes]
    layout = lay_out([(BOX, HEAD + PAD + LINE * len(lines)) for lines in texts], edges)
    drawn = [
        _edge(layout, at, edge, crosses=nodes[edge[0]].place != nodes[edge[1]].place)
        for at, edge in enumerate(edges)
    ]
    drawn += [
        _box(node, lines, *centre)
        for node, lines, centre in zip(nodes, texts, layout.centres, strict=True)
    ]
    places = [place for place in LABELS if any(node.place == place for node in nodes)]
    key = [(place, LABELS[place]) for place in places]
    if len(places) > 1:
        key.append(("crossing", "crossing"))
    label = escape(title)
    return Html(
        f"{colour_key(key)}<div class=graph><div class=tools><label>Search "
        '<input type=search placeholder="node or operator"></label>'
        "<button data-do=next>Next</button><span role=status></span>"
        '<button data-do=in aria-label="Zoom in">+</button>'
        '<button data-do=out aria-label="Zoom out">&minus;</button>'
        "<button data-do=fit>Whole graph</button><button data-do=begin>Start</button></div>"
        f'<div class=field><svg tabindex=0 role=group aria-label="{label}: arrow keys go from node '
        f'to node, + and - zoom, 0 shows all" data-width={layout.width:.0f} '
        f"data-height={layout.height:.0f} viewBox='0 0 {layout.width:.0f} {layout.height:.0f}'>"
        f"{''.join(drawn)}</svg><div class=about aria-live=polite tabindex=0>Point at a node, or "
        "click it to keep it here. Drag to move, turn the wheel to zoom.</div></div></div>"
    )


def _wrapped(name: str) -> list[str]:
    """Return the lines of a name in its box; the panel has what does not fit."""
    lines = [name[at : at + LETTERS] for at in range(0, len(name), LETTERS)] or [""]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"{lines[LINES - 1][:-1]}\u2026"]
    return lines


def _short(op: str) -> str:
    return op if len(op) <= OP_LETTERS else f"{op[: OP_LETTERS - 1]}\u2026"


def _edge(layout: Layout, at: int, edge: tuple[int, int], *, crosses: bool) -> str:
    points = layout.routes[at]
    steps = [f"M{points[0][0]:.0f} {points[0][1]:.0f}"]
    for index, (x, y) in enumerate(points[1:], 1):
        before_x, before_y = points[index - 1]
        if index % 2 == 0:  # along a lane
            steps.append(f"V{y:.0f}")
            continue
        middle = (before_y + y) / 2
        steps.append(f"C{before_x:.0f} {middle:.0f} {x:.0f} {middle:.0f} {x:.0f} {y:.0f}")
    kind = "edge crossing" if crosses else "edge"
    return f'<path class="{kind}" data-from={edge[0]} data-to={edge[1]} d="{"".join(steps)}"/>'


def _box(node: GraphNode, lines: Sequence[str], x: float, y: float) -> str:
    height = HEAD + PAD + LINE * len(lines)
    left, top = x - BOX / 2, y - height / 2
    values = (("node", node.name), ("operator", node.op), *node.facts)
    title = "\n".join(f"{name}: {value}" for name, value in values)
    names = "".join(
        f'<text class=name x="{left + SIDE + PAD:.0f}" '
        f'y="{top + HEAD + LINE * (index + 0.8):.0f}">{escape(line)}</text>'
        for index, line in enumerate(lines)
    )
    at, box = f'x="{left:.0f}" y="{top:.0f}"', f'height="{height:.0f}"'
    text_x = f'x="{left + SIDE + PAD:.0f}"'
    return (
        f'<g class="node {escape(node.place)}" data-x={x:.0f} data-y={y:.0f} '
        f'data-search="{escape(f"{node.name} {node.op} {node.place}".lower())}" '
        f'data-facts="{escape(json.dumps(values))}"><title>{escape(title)}</title>'
        f"<rect class=box {at} width={BOX:.0f} {box} rx=4 />"
        f"<rect class=side {at} width={SIDE:.0f} {box} />"
        f'<text class=op {text_x} y="{top + 14:.0f}">{escape(_short(node.op))}</text>'
        f'<text class=time x="{left + BOX - 6:.0f}" y="{top + 13:.0f}">{escape(node.time)}</text>'
        f"{names}</g>"
    )
