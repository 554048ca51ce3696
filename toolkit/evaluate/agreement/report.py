"""A comparison as text and as JSON values."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.evaluate.agreement.bisect import Culprit
from toolkit.evaluate.agreement.compare import Compared, Row
from toolkit.evaluate.agreement.figures import DECADES, Figures, finite_json

BAR = 40  # characters
SHOWN = 10  # tensors of --layers without --nodes
_HEAD = (
    f"{'max abs':>10} {'max rel':>10} {'mean abs':>10} {'SQNR dB':>8} {'cosine':>10} {'arg-max':>8}"
)


def compared_text(compared: Compared, *, every: bool) -> str:
    """Return the report; `every`: all tensors of `layers`, not the first and the worst alone."""
    precision_a, precision_b = compared.precisions
    lines = [
        f"A: {compared.a} ({precision_a})",
        f"B: {compared.b} ({precision_b}), the reference",
        f"on {compared.inputs}",
        *(f"note: {note}" for note in compared.notes),
        "",
        *_table("output", compared.outputs),
    ]
    for row in compared.outputs:
        lines += _details(row)
    if compared.layers is not None:
        lines += ["", *_layers(compared.layers, every=every)]
    return "\n".join([*lines, "", _verdict(compared)])


def compared_builtins(compared: Compared, culprit: dict[str, Any] | None) -> dict[str, Any]:
    """Return what `--json` prints; what is not finite is None."""
    values: dict[str, Any] = finite_json(
        {
            "a": compared.a,
            "b": compared.b,
            "precisions": compared.precisions,
            "inputs": compared.inputs,
            "notes": compared.notes,
            "agrees": compared.agrees,
            "judged": compared.judged,
            "decades": DECADES,
            "outputs": [asdict(row) for row in compared.outputs],
            "layers": None if compared.layers is None else [asdict(r) for r in compared.layers],
            "bisect": culprit,
        }
    )
    return values


def culprit_text(culprit: Culprit, files: Sequence[Path], commands: Sequence[str]) -> str:
    """Return what the bisection found, and how to run it again."""
    what = ", ".join(f"{n} ({op})" for n, op in zip(culprit.nodes, culprit.ops, strict=True))
    several = "one of these nodes (B does not show what is between them)"
    lines = [
        f"first difference after {culprit.runs} runs: "
        f"{what if len(culprit.nodes) == 1 else several}",
        *([f"  {what}"] if len(culprit.nodes) != 1 else []),
        f"  tensor {culprit.tensor}: {_short(culprit.figures)}; all before it agrees",
    ]
    if culprit.alone is not None:
        lines.append(f"  alone on the same inputs: {_short(culprit.alone)}: {_alone(culprit)}")
    lines += [f"  wrote {path}" for path in files]
    return "\n".join([*lines, "run it again with", *(f"  {line}" for line in commands)])


def culprit_builtins(
    culprit: Culprit, files: Sequence[Path], commands: Sequence[str]
) -> dict[str, Any]:
    """Return what `--json` prints of a bisection."""
    return {
        "tensor": culprit.tensor,
        "nodes": culprit.nodes,
        "ops": culprit.ops,
        "runs": culprit.runs,
        "figures": asdict(culprit.figures),
        "alone": None if culprit.alone is None else asdict(culprit.alone),
        "alone_agrees": culprit.alone_agrees,
        "files": [str(path) for path in files],
        "commands": list(commands),
    }


def _alone(culprit: Culprit) -> str:
    if culprit.alone_agrees:
        return "it agrees there, so that small errors of its inputs add up"
    return "it differs by itself"


def _table(title: str, rows: Sequence[Row]) -> list[str]:
    width = max([len(title), *(len(row.tensor) for row in rows)])
    lines = [f"{title:{width}} {_HEAD}"]
    for row in rows:
        cells = row.problem if row.figures is None else _cells(row.figures)
        lines.append(f"{row.tensor:{width}} {cells}  {_word(row)}")
    return lines


def _word(row: Row) -> str:
    return {True: "agrees", False: "DIFFERS", None: ""}[row.agrees]


def _cells(figures: Figures) -> str:
    argmax = "-" if figures.argmax is None else f"{figures.argmax:.2%}"
    return (
        f"{figures.max_abs:10.3g} {figures.max_rel:10.3g} {figures.mean_abs:10.3g} "
        f"{_db(figures.sqnr_db):>8} {figures.cosine:10.7f} {argmax:>8}"
    )


def _db(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.2f}"


def _short(figures: Figures) -> str:
    return (
        f"{figures.beyond} of {figures.elements} elements beyond the tolerance, max abs "
        f"{figures.max_abs:.3g}, SQNR {_db(figures.sqnr_db)} dB"
    )


def _details(row: Row) -> list[str]:
    """Return the worst element and the histogram of an output that is not exact."""
    figures = row.figures
    if figures is None or figures.equal == figures.elements:
        return []
    lines = ["", f"{row.tensor}: tolerance {row.tolerance.text}"]
    if figures.beyond:
        lines.append(f"  {figures.beyond} of {figures.elements} elements are beyond it")
    if figures.not_finite:
        lines.append(f"  {figures.not_finite} elements are NaN or infinite on one side")
    if figures.worst is not None:
        worst = figures.worst
        lines.append(
            f"  worst: sample {worst.sample}, {list(worst.index)}: A {worst.a:.6g}, B {worst.b:.6g}"
        )
    return lines + _histogram(figures)


def _histogram(figures: Figures) -> list[str]:
    """Return the distribution of errors, a line for each decade that has some."""
    labels = ["0", *(f"to 1e{power}" for power in DECADES), f"above 1e{DECADES[-1]}"]
    counts = (figures.equal, *figures.histogram)
    most = max(counts)
    return [
        f"  |error| {label:10} {'#' * math.ceil(BAR * count / most):{BAR}} {count}"
        for label, count in zip(labels, counts, strict=True)
        if count
    ]


def _layers(rows: Sequence[Row], *, every: bool) -> list[str]:
    if not rows:
        return ["no tensor between inputs and outputs is shown by both sides"]
    lines = [f"tensors that both sides show: {len(rows)}, in running order"]
    first = next((row for row in rows if row.agrees is False), None)
    if first is not None:
        lines.append(f"first beyond its tolerance: {first.tensor}, of {first.node} ({first.op})")
    shown = rows if every else _worst(rows)
    if len(shown) < len(rows):
        lines.append(f"the {len(shown)} of the lowest SQNR (--nodes lists all):")
    return [*lines, *_table("tensor", shown)]


def _worst(rows: Sequence[Row]) -> list[Row]:
    ranked = sorted(rows, key=lambda row: row.figures.sqnr_db if row.figures else -math.inf)
    chosen = {row.tensor for row in ranked[:SHOWN]}
    return [row for row in rows if row.tensor in chosen]


def _verdict(compared: Compared) -> str:
    if not compared.agrees:
        names = [row.tensor for row in compared.outputs if row.agrees is False]
        return f"A and B DIFFER: {', '.join(names)}"
    if not compared.judged:
        return "not judged: INT8 has no usual tolerance; give --atol, --rtol or --min-sqnr"
    unjudged = [row.tensor for row in compared.outputs if row.agrees is None]
    return f"A and B agree; not judged: {', '.join(unjudged)}" if unjudged else "A and B agree"
