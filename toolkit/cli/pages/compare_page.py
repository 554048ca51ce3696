"""The pages of `tandem compare`: two files, and what the INT8 of one engine loses."""

import math
from collections.abc import Sequence

from toolkit.cli.pages.engine_card import EngineFacts, engine_graph
from toolkit.cli.pages.two_engines import two_engines
from toolkit.evaluate.agreement.compare import Compared, Row
from toolkit.evaluate.agreement.figures import DECADES, Figures
from toolkit.evaluate.compare.compare import Comparison, TensorRow
from toolkit.evaluate.compare.report import why
from toolkit.evaluate.error_tally import Error
from toolkit.html.charts import Bar, bars
from toolkit.html.markup import (
    Html,
    Number,
    bullets,
    facts,
    folded,
    heading,
    paragraph,
    preformatted,
    table,
)
from toolkit.html.page import page

_HEADS = (
    "tensor", "node", "operator", "shape", "max abs", "max rel", "mean abs", "SQNR dB", "cosine",
    "verdict",
)  # fmt: skip


def agreement_page(
    compared: Compared, engines: tuple[EngineFacts | None, EngineFacts | None], text: str
) -> str:
    """Return the page of two files; `engines`: those sides that are engines; `text`: the report."""
    a, b = engines
    values = {
        "A": f"{compared.a} ({compared.precisions[0]})",
        "B, the reference": f"{compared.b} ({compared.precisions[1]})",
        "compared on": compared.inputs,
    }
    parts = [_verdict(compared), facts(values), bullets(compared.notes)]
    parts += [heading("Outputs"), _rows("Outputs of A against B", compared.outputs)]
    for row in compared.outputs:
        parts += _errors(row)
    if compared.layers is not None:
        parts += [heading("Tensors between"), _rows("In running order", compared.layers)]
    if a is not None and b is not None:
        parts += two_engines(a, b)
    else:
        for title, engine in (("A", a), ("B", b)):
            if engine is not None:
                parts += [heading(f"Graph of {title}"), engine_graph(engine.nodes)]
    parts += [heading("Report"), folded("As printed", preformatted(text))]
    return page(f"{compared.a} and {compared.b}", "Two files side by side.", parts)


def losses_page(comparison: Comparison, text: str) -> str:
    """Return the page on the INT8 of one engine; `text`: the printed report."""
    values = {
        "engine": comparison.engine,
        "model": comparison.model,
        "samples": str(comparison.samples),
        "the engine's graph": comparison.graph,
    }
    order = ", the most costly on the DLA first" if comparison.dla_segments else ""
    parts = [
        facts(values),
        bullets(comparison.notes),
        heading("Outputs"),
        _losses("Outputs against FP32", comparison.outputs),
        heading("Nodes"),
        _losses(f"{len(comparison.nodes)} tensors{order}", comparison.by_cost),
        heading("Report"),
        preformatted(text),
    ]
    return page(f"What INT8 loses in {comparison.engine}", "SQNR and cosine against FP32.", parts)


def _verdict(compared: Compared) -> Html:
    if not compared.judged:
        return paragraph("No output has a tolerance, so that none is judged.")
    if compared.agrees:
        return paragraph("A and B agree.", "good")
    return paragraph("A and B differ beyond the tolerance.", "warning")


def _rows(caption: str, rows: Sequence[Row]) -> Html:
    return table(caption, _HEADS, [_row(row) for row in rows])


def _row(row: Row) -> tuple[str | Number, ...]:
    verdict = {True: "agrees", False: "differs", None: "not judged"}[row.agrees]
    shape = "x".join(map(str, row.shape)) or "1 number"
    head = (row.tensor, row.node, row.op, shape)
    if row.figures is None:
        return (*head, *(Number(None) for _ in range(5)), f"{verdict}: {row.problem}")
    figures = row.figures
    return (
        *head,
        _figure(figures.max_abs),
        _figure(figures.max_rel),
        _figure(figures.mean_abs),
        _db(figures.sqnr_db),
        Number(figures.cosine, f"{figures.cosine:.7f}"),
        verdict,
    )


def _errors(row: Row) -> list[Html]:
    """Return the distribution of an output's errors, unless it is exact."""
    figures = row.figures
    if figures is None or figures.equal == figures.elements:
        return []
    title = f"Errors of {row.tensor}, tolerance {row.tolerance.text}"
    return [heading(title, 3), bars(title, _decades(figures))]


def _decades(figures: Figures) -> list[Bar]:
    labels = ["no error", *(f"up to 1e{power}" for power in DECADES), f"above 1e{DECADES[-1]}"]
    counts = (figures.equal, *figures.histogram)
    return [
        Bar(label, float(count), f"{count} elements")
        for label, count in zip(labels, counts, strict=True)
        if count
    ]


def _losses(caption: str, rows: Sequence[TensorRow]) -> Html:
    lines = [
        (
            row.tensor,
            row.node,
            row.op,
            row.segment,
            _error(row.gpu),
            _error(row.dla),
            Number(None if row.own is None else row.own.cost_db),
            "; ".join(why(row.own)) if row.own is not None else "",
        )
        for row in rows
    ]
    heads = (
        "tensor", "node", "operator", "segment", "SQNR dB, INT8", "SQNR dB, DLA arithmetic",
        "own cost dB", "why",
    )  # fmt: skip
    return table(caption, heads, lines)


def _error(error: Error | None) -> Number:
    return Number(None) if error is None else _db(error.sqnr_db)


def _figure(value: float) -> Number:
    return Number(value, f"{value:.3g}")


def _db(value: float) -> Number:
    return Number(1e9, "exact") if value == math.inf else Number(value, f"{value:.2f}")
