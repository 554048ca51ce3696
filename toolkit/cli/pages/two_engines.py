"""Two engines side by side: what they are, segments, nodes placed otherwise, kernels, graphs."""

from collections.abc import Callable, Sequence

from toolkit.cli.pages.engine_card import (
    EngineFacts,
    engine_graph,
    kernel_text,
    mib,
    precision_text,
    segment_times,
    segments,
    workspaces,
)
from toolkit.cli.pages.engine_nodes import EngineNode
from toolkit.html.charts import Bar, bars
from toolkit.html.graph import LABELS
from toolkit.html.markup import Html, Number, heading, paragraph, table

Show = Callable[[EngineFacts], str]


def two_engines(a: EngineFacts, b: EngineFacts) -> list[Html]:
    """Return the parts of the page that lay engine B beside engine A."""
    return [
        heading("Engines"),
        _summary(a, b),
        bars("Sizes and predicted times", _bars(a, b)),
        heading("Nodes placed or computed otherwise"),
        *_moved(a, b),
        heading("Kernels"),
        _kernels(a, b),
        heading("Segments of A"),
        *segments(a),
        heading("Segments of B"),
        *segments(b),
        heading("Graph of A"),
        engine_graph(a.nodes),
        heading("Graph of B"),
        engine_graph(b.nodes),
    ]


def _summary(a: EngineFacts, b: EngineFacts) -> Html:
    rows = []
    for name, show in _FACTS:
        in_a, in_b = show(a), show(b)
        rows.append((name, in_a, in_b, "same" if in_a == in_b else "differs"))
    return table("What the engines are", ("what", "A", "B", "compared"), rows)


def _bars(a: EngineFacts, b: EngineFacts) -> list[Bar]:
    rows = []
    largest = max(_total_us(a), _total_us(b)) or 1.0
    size = max(a.size_bytes, b.size_bytes)
    for title, engine, kind in (("A", a, "s0"), ("B", b, "s2")):
        us = _total_us(engine)
        rows.append(Bar(f"{title}: predicted time", us / largest, f"{us:.1f} us", kind))
    for title, engine, kind in (("A", a, "s0"), ("B", b, "s2")):
        text = f"{engine.size_bytes / 1e6:.2f} MB"
        rows.append(Bar(f"{title}: file", engine.size_bytes / size, text, kind))
    return rows


def _moved(a: EngineFacts, b: EngineFacts) -> list[Html]:
    ours = {node.row.node: node for node in a.nodes}
    theirs = {node.row.node: node for node in b.nodes}
    rows = [
        (
            name,
            node.row.op,
            _where(node),
            _where(theirs[name]),
            Number(node.row.predicted_us, f"{node.row.predicted_us:.1f}"),
            Number(theirs[name].row.predicted_us, f"{theirs[name].row.predicted_us:.1f}"),
            node.row.reason,
            theirs[name].row.reason,
        )
        for name, node in ours.items()
        if name in theirs and _where(node) != _where(theirs[name])
    ]
    heads = ("node", "operator", "A", "B", "A us", "B us", "why in A", "why in B")
    count = sum(name in theirs for name in ours)
    title = f"{len(rows)} of {count} nodes that both have"
    parts = [table(title, heads, rows) if rows else paragraph(f"{title}: all are alike.")]
    for name, nodes, other_nodes in (("A", ours, theirs), ("B", theirs, ours)):
        alone = [node for key, node in nodes.items() if key not in other_nodes]
        if alone:
            lines = [(node.row.node, node.row.op, _where(node), node.row.reason) for node in alone]
            head = ("node", "operator", "runs on", "why there")
            parts.append(table(f"{len(lines)} nodes in {name} alone", head, lines))
    return parts


def _kernels(a: EngineFacts, b: EngineFacts) -> Html:
    theirs = {node.row.node: kernel_text(node) for node in b.nodes}
    rows = [
        (node.row.node, node.row.op, kernel_text(node), theirs[node.row.node])
        for node in a.nodes
        if node.row.node in theirs and kernel_text(node) != theirs[node.row.node]
    ]
    if not rows:
        return paragraph("Nodes that both have run the same kernels.")
    return table(f"{len(rows)} nodes in other kernels", ("node", "operator", "A", "B"), rows)


def _where(node: EngineNode) -> str:
    return f"{LABELS[node.place]} {node.computes}"


def _total_us(engine: EngineFacts) -> float:
    return sum(segment_times(engine.manifest).values())


def _ranges(engine: EngineFacts) -> str:
    info = engine.manifest.provenance.calibration
    return "none" if info is None else f"{info.method}, {info.samples} samples"


def _versions(engine: EngineFacts) -> Sequence[tuple[str, str]]:
    return tuple(engine.manifest.provenance.versions.items())


# What the first table shows of each engine.
_FACTS: tuple[tuple[str, Show], ...] = (
    ("model", lambda e: e.manifest.provenance.model),
    ("model sha256", lambda e: e.manifest.provenance.model_sha256[:12]),
    ("profile", lambda e: e.manifest.profile),
    ("precision", lambda e: precision_text(e.nodes, e.manifest)),
    ("INT8 ranges", _ranges),
    ("file", lambda e: f"{e.size_bytes / 1e6:.2f} MB"),
    ("segments", lambda e: ", ".join(f"{s.name} ({len(s.nodes)})" for s in e.manifest.segments)),
    ("crossings", lambda e: str(len(e.manifest.crossings))),
    ("arena", lambda e: mib(e.manifest.memory.arena_bytes)),
    ("GPU workspace", lambda e: mib(sum(workspaces(e.manifest).values()))),
    ("predicted time of all nodes", lambda e: f"{_total_us(e):.1f} us"),
    ("passes", lambda e: ", ".join(e.manifest.provenance.passes) or "none"),
    ("made with", lambda e: ", ".join(f"{k} {v}" for k, v in _versions(e))),
)
