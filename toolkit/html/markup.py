"""Pieces of a page: every text is escaped here, and nowhere else."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import isnan

TALL_ROWS = 30
LONG_TEXT = 24  # letters; a cell with more of them gets a wider column


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a table: sorted by `value`, shown as `text`; None is shown as a dash."""

    value: float | None
    text: str = ""


Cell = str | Html | Number


def markup(text: str) -> Html:
    """Return text as markup; what is markup already stays as it is."""
    return text if isinstance(text, Html) else Html(escape(text))


def join(parts: Iterable[str]) -> Html:
    """Return all parts after another, texts escaped."""
    return Html("".join(markup(part) for part in parts))


def heading(text: str, level: int = 2) -> Html:
    """Return a heading."""
    return Html(f"<h{level}>{markup(text)}</h{level}>")


def paragraph(text: str, kind: str = "") -> Html:
    """Return a paragraph; `kind`: its CSS class, such as "muted" or "warning"."""
    return Html(f"<p{_classed(kind)}>{markup(text)}</p>")


def preformatted(text: str) -> Html:
    """Return text whose lines are kept; longer ones wrap."""
    return Html(f"<pre>{markup(text)}</pre>")


def bullets(items: Iterable[str]) -> Html:
    """Return a list, or nothing without items."""
    lines = "".join(f"<li>{markup(item)}</li>" for item in items)
    return Html(f"<ul>{lines}</ul>" if lines else "")


def folded(summary: str, content: Html) -> Html:
    """Return content that opens on a click."""
    return Html(f"<details><summary>{markup(summary)}</summary>{content}</details>")


def facts(values: Mapping[str, str]) -> Html:
    """Return names with values."""
    rows = "".join(f"<dt>{markup(k)}</dt><dd>{markup(v)}</dd>" for k, v in values.items())
    return Html(f"<dl>{rows}</dl>")


def table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[Cell]], *, sortable: bool = True
) -> Html:
    """Return a table. `sortable`: a click on a head sorts it by that column, and a long table
    scrolls; a head that is markup already stays as it is."""
    rows = list(rows)
    tall = " tall" if sortable and len(rows) > TALL_ROWS else ""
    button = "<button>{}</button>" if sortable else "{}"
    top = "".join(f"<th scope=col>{button.format(markup(head))}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return Html(
        f'<div class="scroll{tall}" tabindex=0 role=region aria-label="{escape(caption)}"><table>'
        f"<caption>{markup(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def colour_key(entries: Iterable[tuple[str, str]]) -> Html:
    """Return the key of colours: pairs of CSS class and label."""
    items = "".join(
        f"<li><span class='swatch {escape(name)}'></span>{markup(label)}</li>"
        for name, label in entries
    )
    return Html(f"<ul class=key>{items}</ul>")


def _cell(cell: Cell) -> str:
    if isinstance(cell, Number):
        if cell.value is None:
            return '<td class=n data-v="">-</td>'
        text = cell.text or f"{cell.value:g}"
        # As the script reads numbers; NaN, which has no order, is sorted as None is.
        value = "" if isnan(cell.value) else repr(cell.value).replace("inf", "Infinity")
        return f'<td class=n data-v="{value}">{markup(text)}</td>'
    kind = " class=long" if isinstance(cell, Html) or len(cell) > LONG_TEXT else ""
    return f"<td{kind}>{markup(cell)}</td>"


def _classed(kind: str) -> str:
    return f' class="{escape(kind)}"' if kind else ""
