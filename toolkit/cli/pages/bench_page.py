"""The page of a measurement: percentiles, histogram, layer times, and the graph that has them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from device.install_advice import pip_install
from toolkit.evaluate.bench.distribution import Distribution
from toolkit.evaluate.bench.measure import Layer, Measured
from toolkit.evaluate.bench.report import BenchResult, gpu_rows, throughput_text
from toolkit.html.charts import WorkPoint, histogram
from toolkit.html.markup import (
    Cell,
    Html,
    Number,
    bullets,
    facts,
    folded,
    heading,
    markup,
    paragraph,
    table,
)
from toolkit.html.page import page

if TYPE_CHECKING:
    from toolkit.cli.pages.engine_card import EngineFacts

NO_GRAPH = f"Graph and roofline are left out: onnx is not installed ({pip_install('host')})."
FOLDED_NODES = 8  # of a layer; more open on a click
NO_LAYERS = "Layers were not timed; --profile does."


def bench_page(result: BenchResult, engine: "EngineFacts | None") -> str:
    """Return the page; `engine` None: without onnx, its nodes cannot be read."""
    measured = result.measured
    shapes = ", ".join(f"{name} {'x'.join(map(str, s))}" for name, s in measured.shapes.items())
    values = {
        "engine": f"{result.engine}, sha256 {result.sha256[:12]}",
        "profile": f"{result.profile}, {result.precision}",
        "inputs": shapes,
        "throughput": throughput_text(measured),
        **{f"machine: {name}": value for name, value in result.machine.items()},
        "versions": ", ".join(f"{name} {value}" for name, value in result.versions.items()),
    }
    bins = measured.histogram
    parts = [
        facts(values),
        bullets([*measured.segments, *result.notes]),
        heading("Latency"),
        _percentiles(measured),
        histogram("Latency", bins.low_ms, bins.width_ms, bins.counts, "ms"),
        paragraph("Runs by latency in ms; the last bin also holds all above p99.", "muted"),
        heading("Layers"),
        _layers(measured.layers) if measured.layers else paragraph(NO_LAYERS),
    ]
    if engine is None:
        parts.append(paragraph(NO_GRAPH))
    else:
        parts += _graph(measured, engine)
    return page(f"Bench of {result.engine}", "Times were measured on this machine.", parts)


def _percentiles(measured: Measured) -> Html:
    rows: list[tuple[Cell, ...]] = [("latency (infer)", *_cells(measured.latency))]
    for gpu in measured.gpu:
        where = f" {gpu.segment}" if len(measured.gpu) > 1 else ""
        rows += [(f"{title}{where}", *_cells(times)) for title, times in gpu_rows(gpu)]
    heads = ("ms", "min", "mean", "median", "p90", "p95", "p99", "max", "runs")
    return table("Times in ms; pNN is a time that was measured", heads, rows)


def _cells(times: Distribution) -> tuple[Number, ...]:
    values = (
        times.min_ms, times.mean_ms, times.median_ms, times.p90_ms, times.p95_ms, times.p99_ms,
        times.max_ms,
    )  # fmt: skip
    return (*(Number(value, f"{value:.3f}") for value in values), Number(times.count))


def _layers(layers: tuple[Layer, ...]) -> Html:
    rows = [
        (
            Number(index + 1),
            row.segment,
            _nodes(row.nodes),
            " + ".join(row.kernels),
            f"{row.tactic + 1} of {row.tactics}",
            Number(row.time_ms * 1000, f"{row.time_ms * 1000:.1f}"),
            Number(row.share, f"{row.share:.1%}"),
        )
        for index, row in enumerate(layers)
    ]
    heads = ("#", "segment", "nodes", "kernel", "tactic", "us", "share")
    return table(f"{len(rows)} layers in running order, measured", heads, rows)


def _nodes(names: tuple[str, ...]) -> str | Html:
    if len(names) > FOLDED_NODES:
        return folded(f"{len(names)} nodes", markup(", ".join(names)))
    return ", ".join(names) or "change of layout"


def _graph(measured: Measured, engine: "EngineFacts") -> list[Html]:
    from toolkit.cli.pages.engine_card import LayerTime, engine_graph, roofline_parts

    rows = [LayerTime(row.nodes, row.time_ms * 1000) for row in measured.layers]
    times: Mapping[str, LayerTime] = {name: row for row in rows for name in row.nodes}
    nodes = {node.row.node: node for node in engine.nodes}
    work = []
    for row in rows:
        members = [nodes[name] for name in row.nodes if name in nodes]
        if members:
            more = f" and {len(members) - 1} more" if len(members) > 1 else ""
            work.append(
                WorkPoint(
                    f"{members[0].row.node}{more}",
                    members[0].place,
                    float(sum(node.operations or 0 for node in members)),
                    float(sum(node.moved_bytes or 0 for node in members)),
                    row.time_us,
                )
            )
    which = "measured" if rows else "predicted"
    caption = f"Times in the boxes are {which}; a kernel's time is at its first node."
    return [
        heading("Graph"),
        paragraph(caption, "muted"),
        engine_graph(engine.nodes, times),
        *roofline_parts(engine, work, "measured"),
    ]
