"""The graph as a picture: a box a node, coloured by processor, from left to right as data flows."""

from collections.abc import Mapping, Sequence
from html import escape

from device.manifest import Processor
from toolkit.node_view import NodeView
from toolkit.planning.plan import Plan

BOX, GAP_X, GAP_Y = 12.0, 8.0, 8.0


def draw_graph(plan: Plan, views: Sequence[NodeView], colours: Mapping[Processor, str]) -> str:
    """Return the picture as SVG; a box tells its node, operator, processor and reason on hover."""
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
                lines.append(
                    f"<line x1={from_x + BOX:.0f} y1={from_y + BOX / 2:.0f} x2={x:.0f} "
                    f"y2={y + BOX / 2:.0f} stroke='{colour}' stroke-width={width} />"
                )
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


def _spots(views: Sequence[NodeView]) -> dict[str, tuple[float, float]]:
    """Place each node at its depth (its longest path from an input), below those before it."""
    depth: dict[str, int] = {}  # by tensor
    taken: dict[int, int] = {}
    spots = {}
    for view in views:
        column = max((depth[name] for name in view.reads if name in depth), default=0)
        row = taken.get(column, 0)
        taken[column] = row + 1
        depth |= {tensor.name: column + 1 for tensor in view.outputs}
        spots[view.name] = (GAP_X + column * (BOX + GAP_X), GAP_Y + row * (BOX + GAP_Y))
    return spots
