"""Charts as SVG or bars. Sizes are units of a chart that scales, and scrolls where it is small."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from toolkit.html.markup import Html, colour_key, markup

WIDTH, HEIGHT = 860.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 74.0, 30.0, 12.0, 44.0
Label = Callable[[float], str]
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: its label, its value, the value in words, and its CSS class."""

    label: str
    value: float
    text: str
    kind: str = "accent"


@dataclass(frozen=True, slots=True)
class Steps:
    """A series with a value for each step; None: not known. A filled one lies on those before."""

    name: str
    values: tuple[float | None, ...]
    kind: str
    filled: bool = True


@dataclass(frozen=True, slots=True)
class WorkPoint:
    """Work in a roofline: operations, bytes moved and the time that it takes, in microseconds."""

    name: str
    place: str
    operations: float
    moved_bytes: float
    time_us: float


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most operations a second of a processor."""

    label: str
    place: str
    operations_per_s: float


@dataclass(frozen=True, slots=True)
class Spot:
    """A point of a scatter chart; its text is its title. Those on the line are joined by it."""

    label: str
    x: float
    y: float
    text: str
    on_line: bool


def bars(title: str, rows: Sequence[Bar]) -> Html:
    """Return horizontal bars, the longest for the largest value."""
    largest = max((row.value for row in rows), default=0.0) or 1.0
    items = "".join(
        f"<span>{markup(row.label)}</span><span class=track>"
        f'<span class="bar {escape(row.kind)}" style="width:{65 * row.value / largest:.1f}%">'
        f"</span><span>{markup(row.text)}</span></span>"
        for row in rows
    )
    return Html(f'<div class=bars role=group aria-label="{escape(title)}">{items}</div>')


def strip(title: str, parts: Sequence[Bar]) -> Html:
    """Return parts of a whole in one bar, with their key."""
    total = sum(part.value for part in parts) or 1.0
    spans = "".join(
        f'<span class="{escape(part.kind)}" style="width:{100 * part.value / total:.2f}%" '
        f'title="{escape(f"{part.label}: {part.text}")}"></span>'
        for part in parts
    )
    key = colour_key((part.kind, f"{part.label}: {part.text}") for part in parts)
    return Html(f'<div class=strip role=img aria-label="{escape(title)}">{spans}</div>{key}')


def histogram(title: str, low: float, width: float, counts: Sequence[int], unit: str) -> Html:
    """Return counts of equal bins that begin at `low`."""
    largest = max([*counts, 1])
    plot = _Plot((low, low + width * len(counts)), (0.0, float(largest)))
    drawn = [plot.grid_y(_ticks(0.0, float(largest)), lambda value: f"{value:g}")]
    for index, count in enumerate(counts):
        x, end = plot.x(low + index * width), plot.x(low + (index + 1) * width)
        y = plot.y(float(count))
        label = f"{low + index * width:.4g} to {low + (index + 1) * width:.4g} {unit}: {count}"
        drawn.append(
            f"<rect class='fill accent' x={x:.1f} y={y:.1f} width={max(end - x - 1, 0.5):.1f} "
            f"height={plot.bottom - y:.1f}><title>{escape(label)}</title></rect>"
        )
    drawn.append(plot.grid_x(_ticks(low, low + width * len(counts)), lambda v: f"{v:.4g}"))
    return _chart(title, drawn, unit)


def step_chart(title: str, names: Sequence[str], series: Sequence[Steps], unit: str) -> Html:
    """Return the series over steps; `names`: of the steps, for the titles."""
    count = len(names)
    stacked = [0.0] * count
    tops = []
    for row in series:
        values = [value or 0.0 for value in row.values]
        if row.filled:
            stacked = [base + value for base, value in zip(stacked, values, strict=True)]
            values = list(stacked)
        tops.append(values)
    largest = max((value for values in tops for value in values), default=0.0) or 1.0
    plot = _Plot((0.0, float(max(count, 1))), (0.0, largest))
    drawn = [plot.grid_y(_ticks(0.0, largest), lambda value: f"{_short(value)}{unit}")]
    filled = [(row, values) for row, values in zip(series, tops, strict=True) if row.filled]
    lines = [(row, values) for row, values in zip(series, tops, strict=True) if not row.filled]
    for row, values in reversed(filled):
        path = _staircase(plot, values) + f"V{plot.bottom:.1f}H{plot.x(0.0):.1f}Z"
        drawn.append(f"<path class='fill {row.kind}' d='{path}'/>")
    drawn += [f"<path class='stroke {row.kind}' d='{_staircase(plot, v)}'/>" for row, v in lines]
    for index, name in enumerate(names):
        x = plot.x(float(index))
        label = ", ".join(
            f"{row.name} " + ("unknown" if row.values[index] is None
                              else f"{_short(row.values[index] or 0.0)}{unit}")
            for row in series
        )  # fmt: skip
        drawn.append(
            f"<rect fill=transparent x={x:.1f} y={TOP:.0f} "
            f"width={plot.x(index + 1.0) - x:.2f} height={plot.bottom - TOP:.0f}>"
            f"<title>{escape(f'{name}: {label}')}</title></rect>"
        )
    key = colour_key((row.kind, row.name) for row in series)
    return Html(key + _chart(title, drawn, f"node in running order, 1 to {count}"))


def scatter(title: str, spots: Sequence[Spot], below: str) -> Html:
    """Return points with labels, and a staircase through those on the line: less is better."""
    across = max((row.x for row in spots), default=0.0) or 1.0
    up = max((row.y for row in spots), default=0.0) or 1.0
    plot = _Plot((0.0, across * 1.2), (0.0, up * 1.1))
    drawn = [
        plot.grid_y(_ticks(0.0, up * 1.1), lambda value: f"{value:g}"),
        plot.grid_x(_ticks(0.0, across * 1.2), lambda value: f"{_short(value)}"),
    ]
    line = sorted((row for row in spots if row.on_line), key=lambda row: (row.x, row.y))
    if line:
        steps = [f"M{plot.x(line[0].x):.1f} {plot.y(line[0].y):.1f}"]
        steps += [f"H{plot.x(row.x):.1f}V{plot.y(row.y):.1f}" for row in line[1:]]
        drawn.append(f"<path class='stroke accent' d='{''.join(steps)}'/>")
    for row in spots:
        x, y, kind = plot.x(row.x), plot.y(row.y), "accent" if row.on_line else "soft"
        drawn.append(
            f"<circle class='fill {kind}' r=5 cx={x:.1f} cy={y:.1f}>"
            f"<title>{escape(row.text)}</title></circle>"
            f"<text x={x + 8:.1f} y={y - 6:.1f}>{escape(row.label)}</text>"
        )
    return _chart(title, drawn, below)


def roofline(
    title: str, points: Sequence[WorkPoint], ceilings: Sequence[Ceiling], bytes_per_s: float
) -> Html:
    """Return operations a second over operations a byte, on logarithmic axes.

    The roof is min(ceiling, intensity * bytes_per_s) (Williams, Waterman and Patterson, 2009).
    """
    spots = [
        (point, point.operations / point.moved_bytes, point.operations / point.time_us * 1e6)
        for point in points
        if point.operations > 0 and point.moved_bytes > 0 and point.time_us > 0
    ]
    ridges = [ceiling.operations_per_s / bytes_per_s for ceiling in ceilings]
    xs = [intensity for _, intensity, _ in spots] + ridges or [1.0]
    low, high = 10 ** math.floor(math.log10(min(xs) / 2)), 10 ** math.ceil(math.log10(max(xs) * 2))
    ys = [rate for _, _, rate in spots] + [c.operations_per_s for c in ceilings] or [bytes_per_s]
    bottom, top = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))
    plot = _Plot((math.log10(low), math.log10(high)), (math.log10(bottom), math.log10(top)))
    drawn = [
        plot.grid_y(_decades(bottom, top), lambda value: f"{_short(10**value)}op/s"),
        plot.grid_x(_decades(low, high), lambda value: f"{10**value:g}"),
    ]
    for ceiling in ceilings:
        drawn.append(_roof(plot, ceiling, bytes_per_s, (low, high), bottom))
    if not ceilings:
        unlimited = Ceiling("memory", "soft", top)
        drawn.append(_roof(plot, unlimited, bytes_per_s, (low, high), bottom))
    for point, intensity, rate in spots:
        text = (
            f"{point.name}: {_short(rate)}op/s at {intensity:.3g} operations a byte, "
            f"{point.time_us:.1f} us"
        )
        drawn.append(
            f"<circle class='fill {escape(point.place)}' fill-opacity=.7 r=5 "
            f"cx={plot.x(math.log10(intensity)):.1f} cy={plot.y(math.log10(rate)):.1f}>"
            f"<title>{escape(text)}</title></circle>"
        )
    return _chart(title, drawn, "operations a byte")


def _roof(
    plot: "_Plot", ceiling: Ceiling, bytes_per_s: float, span: tuple[float, float], bottom: float
) -> str:
    low, high = span
    start = max(low, bottom / bytes_per_s)
    ridge = min(high, max(start, ceiling.operations_per_s / bytes_per_s))

    def spot(intensity: float) -> str:
        rate = max(bottom, min(ceiling.operations_per_s, intensity * bytes_per_s))
        return f"{plot.x(math.log10(intensity)):.1f} {plot.y(math.log10(rate)):.1f}"

    y = plot.y(math.log10(ceiling.operations_per_s))
    return (
        f"<path class='stroke {escape(ceiling.place)}' d='M{spot(start)}L{spot(ridge)}"
        f"L{spot(high)}'/><text x={plot.right - 4:.0f} y={y - 5:.0f} text-anchor=end>"
        f"{escape(ceiling.label)}</text>"
    )


class _Plot:
    """Axes: maps values to the units of the chart."""

    right = WIDTH - RIGHT
    bottom = HEIGHT - BOTTOM

    def __init__(self, across: tuple[float, float], up: tuple[float, float]) -> None:
        self._across, self._up = across, up

    def x(self, value: float) -> float:
        low, high = self._across
        return LEFT + (value - low) / ((high - low) or 1.0) * (self.right - LEFT)

    def y(self, value: float) -> float:
        low, high = self._up
        return self.bottom - (value - low) / ((high - low) or 1.0) * (self.bottom - TOP - 12)

    def grid_x(self, ticks: Sequence[float], text: Label) -> str:
        return "".join(
            f"<text class=dim-text x={self.x(tick):.1f} y={self.bottom + 16:.0f} "
            f"text-anchor=middle>{escape(text(tick))}</text>"
            for tick in ticks
        )

    def grid_y(self, ticks: Sequence[float], text: Label) -> str:
        return "".join(
            f"<path class=grid d='M{LEFT:.0f} {self.y(tick):.1f}H{self.right:.0f}'/>"
            f"<text class=dim-text x={LEFT - 6:.0f} y={self.y(tick) + 4:.1f} text-anchor=end>"
            f"{escape(text(tick))}</text>"
            for tick in ticks
        )


def _chart(title: str, drawn: Sequence[str], below: str) -> Html:
    return Html(
        f'<div class=scroll tabindex=0 role=region aria-label="{escape(title)}">'
        f'<svg class=chart role=img aria-label="{escape(title)}" '
        f"viewBox='0 0 {WIDTH:.0f} {HEIGHT:.0f}'>{''.join(drawn)}"
        f"<text class=dim-text x={(LEFT + WIDTH) / 2:.0f} y={HEIGHT - 6:.0f} text-anchor=middle>"
        f"{escape(below)}</text></svg></div>"
    )


def _staircase(plot: _Plot, values: Sequence[float]) -> str:
    steps = [f"M{plot.x(0.0):.1f} {plot.y(values[0] if values else 0.0):.1f}"]
    for index, value in enumerate(values):
        steps.append(f"V{plot.y(value):.1f}H{plot.x(index + 1.0):.1f}")
    return "".join(steps)


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round values between both."""
    span = (high - low) or 1.0
    unit = 10 ** math.floor(math.log10(span / 5))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= 6)
    first = math.ceil(low / step)
    return [step * index for index in range(first, math.floor(high / step) + 1)]


def _decades(low: float, high: float) -> list[float]:
    return [float(d) for d in range(round(math.log10(low)), round(math.log10(high)) + 1)]


def _short(value: float) -> str:
    """Return a number with a prefix: 12.5 k."""
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "
