"""The page of `tandem explore`: the points of a model on a board, loss over time."""

import math
from collections.abc import Mapping, Sequence

from toolkit.engine.explore import Explored, Point
from toolkit.html.charts import Spot, scatter
from toolkit.html.markup import Cell, Number, bullets, heading, paragraph, preformatted, table
from toolkit.html.page import page

_HEADS = (
    "form", "us a frame", "mJ a frame", "weights, MiB", "nodes on DLA, %", "work in float, %",
    "SQNR dB", "share of the limit", "",
)  # fmt: skip
MOST_SPENT = 2.0
"""Larger losses lie at the upper edge of the chart."""


def explore_page(explored: Explored, commands: Mapping[str, str]) -> str:
    """Return the page; `commands`: how each point is built, by name."""
    parts = [
        scatter("Loss over time", _spots(explored.points), "us a frame, predicted"),
        paragraph(
            "Up: the share of its limit that the largest loss at the outputs spends; a build "
            "refuses INT8 above 1. The line joins the points that no other beats in all of time, "
            "energy, size and loss.",
            "muted",
        ),
        table("Forms", _HEADS, [_row(row) for row in explored.points]),
        bullets(f"{name}: not built here, {why}" for name, why in explored.not_built.items()),
        bullets(explored.notes),
        heading("How to build each"),
        preformatted("\n".join(commands.values())),
    ]
    return page(
        f"{explored.model} on {explored.profile}", "Times and energies are predicted.", parts
    )


def _spots(rows: Sequence[Point]) -> list[Spot]:
    """Return the points that have a time."""
    spots = []
    for row in rows:
        if row.frame_us is not None:
            text = f"{row.form.name}: {row.frame_us:.0f} us, {row.spent:.3f} of the limit"
            spent = min(row.spent, MOST_SPENT)
            spots.append(Spot(row.form.name, row.frame_us, spent, text, row.best))
    return spots


def _row(row: Point) -> tuple[Cell, ...]:
    sqnr = Number(row.sqnr_db, f"{row.sqnr_db:.1f}" if math.isfinite(row.sqnr_db) else "inf")
    return (
        row.form.name,
        "" if row.frame_us is None else Number(row.frame_us, f"{row.frame_us:.0f}"),
        "" if row.energy_mj is None else Number(row.energy_mj, f"{row.energy_mj:.2f}"),
        Number(row.weight_bytes, f"{row.weight_bytes / 2**20:.2f}"),
        Number(row.on_dla, f"{100 * row.on_dla:.0f}"),
        Number(row.float_share, f"{100 * row.float_share:.1f}"),
        sqnr,
        Number(row.spent, f"{row.spent:.3f}"),
        "best" if row.best else "",
    )
