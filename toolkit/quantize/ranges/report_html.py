"""The HTML report of a calibration: every histogram with the threshold of each method."""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from calibration.observer import Histogram
from toolkit.html.markup import Html, colour_key, preformatted
from toolkit.html.page import page
from toolkit.quantize.ranges.measure import Ranges
from toolkit.quantize.ranges.report_text import ranges_text

WIDTH, HEIGHT, BARS = 420, 90, 140
KINDS = {"minmax": "soft", "entropy": "s1", "percentile": "s2", "mse": "s0"}


def ranges_html(ranges: Ranges, title: str) -> str:
    """Return the page; tensors with the most clipping come first."""
    names = sorted(
        ranges.histograms,
        key=lambda name: ranges.table.tensors[name] / max(ranges.histograms[name].amax, 1e-30),
    )
    figures = "".join(_figure(ranges, name) for name in names)
    lead = (
        "Histograms of |x|, counts on a logarithmic scale; a tall line is the range taken, short "
        "ones what methods propose. What lies right of the line is clipped."
    )
    parts = (
        preformatted(ranges_text(ranges)),
        colour_key((kind, name) for name, kind in KINDS.items()),
        Html(f"<div class=figures>{figures}</div>"),
    )
    return page(f"Calibration of {title}", lead, parts)


def _figure(ranges: Ranges, name: str) -> str:
    histogram = ranges.histograms[name]
    amax = ranges.table.tensors[name]
    proposed = {
        candidate_method: candidate[name]
        for candidate_method, candidate in ranges.candidates.items()
        if name in candidate
    }
    method = ranges.table.methods.get(name, ranges.table.method)
    dead = ranges.dead_channels.get(name)
    note = f", {dead.dead} of {dead.channels} channels always zero" if dead else ""
    return (
        f"<figure>{_svg(histogram, amax, proposed)}<figcaption><b>{escape(name)}</b><br>"
        f"range {amax:.4g} by {escape(method)}, largest seen {histogram.amax:.4g}{note}"
        "</figcaption></figure>"
    )


def _svg(histogram: Histogram, amax: float, proposed: Mapping[str, float]) -> str:
    end = max(histogram.amax, amax, *proposed.values())
    bars = _bars(histogram, end)
    step = WIDTH / BARS
    drawn = "".join(
        f"<rect class='fill soft' x={i * step:.1f} y={HEIGHT - h:.1f} width={step:.1f} "
        f"height={h:.1f} />"
        for i, h in enumerate(bars)
        if h > 0
    )
    lines = "".join(
        _line(WIDTH * value / end, HEIGHT * 0.45, KINDS.get(name.partition(":")[0], "accent"), name)
        for name, value in proposed.items()
    )
    taken = _line(WIDTH * amax / end, 0.0, "crossing", "taken")
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='100%'>{drawn}{lines}{taken}</svg>"


def _bars(histogram: Histogram, end: float) -> Sequence[float]:
    """Heights of BARS equal bins over [0, end], logarithmic."""
    counts, width = histogram.counts, histogram.width
    middles = (np.arange(counts.size) + 0.5) * width
    index = np.minimum((middles / end * BARS).astype(int), BARS - 1)
    sums = np.bincount(index, weights=counts, minlength=BARS)
    heights = np.log1p(sums)
    result: list[float] = (heights / max(heights.max(), 1e-9) * (HEIGHT - 4)).tolist()
    return result


def _line(x: float, top: float, kind: str, title: str) -> str:
    return (
        f"<line class='stroke {kind}' x1={x:.1f} x2={x:.1f} y1={top:.1f} y2={HEIGHT}>"
        f"<title>{escape(title)}</title></line>"
    )
