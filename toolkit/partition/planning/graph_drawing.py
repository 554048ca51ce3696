"""Draws the graph: one box per node, coloured by processor, data flow from left to right.

A long graph goes on in the next line, as text does.
"""

from collections.abc import Mapping, Sequence
from html import escape

from device.engine.manifest import Processor
from toolkit.graph.node_view import NodeView
from toolkit.partition.planning.plan import Plan

BOX, GAP_X, GAP_Y = 12.0, 8.0, 8.0
COLUMNS = 47  # in a line; fills the page
Spot = tuple[float, float]


def draw_graph(plan: Plan, views: Sequence[NodeView], colours: Mapping[Processor, str]) -> str:
    """Return the SVG; hovering over a box shows its node, operator, processor and reason."""
    rows = {row.node: row for row in plan.placements}
    spots = _spots(views)
    maker = {tensor.name: view.name for view in views for tensor in view.outputs}
    lines, boxes = [], []
    for view in views:
        x, y = spots[view.name]
        row = rows[view.name]
        for name in view.reads:
            if name in maker:
                from_x, from_y = spots[maker[name]]
                crosses = rows[maker[name]].processor != row.processor
                colour, width = ("#c62828", 1.5) if crosses else ("#c3c8d0", 0.8)
                lines += _arcs((from_x, from_y), (x, y), f"stroke='{colour}' stroke-width={width}")
        rule = f" [{row.rule}]" if row.rule else ""
        title = (
            f"{view.name} ({view.op}) on {row.processor}, {row.predicted_us:.1f} us"
            f"{rule}: {row.reason}"
        )
        boxes.append(
            f"<rect x={x:.0f} y={y:.0f} width={BOX:.0f} height={BOX:.0f} rx=2 "
            f"fill='{colours[row.processor]}'><title>{escape(title)}</title></rect>"
        )
    width = max(x for x, _ in spots.values()) + BOX + GAP_X
    height = max(y for _, y in spots.values()) + BOX + GAP_Y
    return (
        f"<svg width={width:.0f} height={height:.0f} viewBox='0 0 {width:.0f} {height:.0f}'>"
        f"{''.join(lines)}{''.join(boxes)}</svg>"
    )


def _arcs(source: Spot, target: Spot, style: str) -> list[str]:
    """Draw from box to box; to another line, only the ends of the arc."""
    start, end = (source[0] + BOX, source[1] + BOX / 2), (target[0], target[1] + BOX / 2)
    if target[0] > source[0]:
        return [_line(start, end, style)]
    out, into = (start[0] + GAP_X * 0.7, start[1]), (end[0] - GAP_X * 0.7, end[1])
    return [_line(start, out, style), _line(into, end, style)]


def _line(start: Spot, end: Spot, style: str) -> str:
    return f"<line x1={start[0]:.1f} y1={start[1]:.1f} x2={end[0]:.1f} y2={end[1]:.1f} {style} />"


def _spots(views: Sequence[NodeView]) -> dict[str, Spot]:
    """Place each node at its depth (its longest path from an input), below those before it."""
    depth: dict[str, int] = {}  # by tensor
    taken: dict[int, int] = {}
    cells = {}
    for view in views:
        column = max((depth[name] for name in view.reads if name in depth), default=0)
        row = taken.get(column, 0)
        taken[column] = row + 1
        depth |= {tensor.name: column + 1 for tensor in view.outputs}
        cells[view.name] = (column, row)
    tops = [GAP_Y]  # of each line of columns
    for first in range(0, max(taken, default=0) + 1, COLUMNS):
        rows = max(taken.get(column, 0) for column in range(first, first + COLUMNS))
        tops.append(tops[-1] + rows * (BOX + GAP_Y) + GAP_Y)
    return {
        name: (
            GAP_X + column % COLUMNS * (BOX + GAP_X),
            tops[column // COLUMNS] + row * (BOX + GAP_Y),
        )
        for name, (column, row) in cells.items()
    }
