"""The HTML report of a calibration: every histogram with the threshold of each method."""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from calibration.observer import Histogram
from toolkit.quantize.ranges.measure import Ranges
from toolkit.quantize.ranges.report_text import ranges_text

WIDTH, HEIGHT, BARS = 420, 90, 140
COLOURS = {"minmax": "#8a8f98", "entropy": "#c62828", "percentile": "#e69500", "mse": "#5b8def"}
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;
color:#1d2127;background:#fff}
h1{font-size:1.5rem}pre{background:#f5f6f8;padding:1rem;overflow-x:auto;font-size:12px}
.grid{display:grid;grid-template-columns:1fr 1fr;gap:1rem}
figure{margin:0;border:1px solid #e4e7eb;border-radius:4px;padding:.5rem}
figcaption{font-size:12px;overflow-wrap:anywhere}svg{display:block}.muted{color:#667}
"""


def ranges_html(ranges: Ranges, title: str) -> str:
    """Return the page; tensors with the most clipping come first."""
    names = sorted(
        ranges.histograms,
        key=lambda name: ranges.table.tensors[name] / max(ranges.histograms[name].amax, 1e-30),
    )
    figures = "".join(_figure(ranges, name) for name in names)
    legend = " ".join(
        f"<span style='color:{colour}'>| {name}</span>" for name, colour in COLOURS.items()
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>Calibration of {escape(title)}</title><style>{STYLE}</style>"
        f"<h1>Calibration of {escape(title)}</h1><pre>{escape(ranges_text(ranges))}</pre>"
        "<p class=muted>Histograms of |x|, counts on a logarithmic scale; a tall line is the range "
        f"taken, short ones what methods propose: {legend}. What lies right of the line is clipped."
        f"</p><div class=grid>{figures}</div></html>\n"
    )


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
        f"<rect x={i * step:.1f} y={HEIGHT - h:.1f} width={step:.1f} height={h:.1f} fill=#c9d6ee />"
        for i, h in enumerate(bars)
        if h > 0
    )
    lines = "".join(
        _line(WIDTH * value / end, HEIGHT * 0.45, COLOURS.get(name.partition(":")[0], "#333"), name)
        for name, value in proposed.items()
    )
    taken = _line(WIDTH * amax / end, 0.0, "#1d2127", "taken")
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


def _line(x: float, top: float, colour: str, title: str) -> str:
    return (
        f"<line x1={x:.1f} x2={x:.1f} y1={top:.1f} y2={HEIGHT} stroke='{colour}' "
        f"stroke-width=2><title>{escape(title)}</title></line>"
    )
