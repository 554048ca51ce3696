"""The HTML report of a demo: build, run and checks."""

import base64
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from device.files import replacing
from pipelines.vision import cv2
from toolkit.demo.steps import DemoResult, Deployment
from toolkit.partition.planning.plan import Plan
from toolkit.partition.planning.plan_text import render_plan

PICTURES = 3
COLOURS = {"gpu": "#76b900", "dla0": "#5b8def", "dla1": "#9a6fe0", "cpu": "#8a8f98"}
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#1d2127;background:#fff}
h1{font-size:1.6rem;margin-bottom:0}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse}td,th{padding:.25rem .9rem .25rem 0;text-align:left;
border-bottom:1px solid #e4e7eb}td.n{text-align:right;font-variant-numeric:tabular-nums}
pre{background:#f5f6f8;padding:1rem;overflow-x:auto;font-size:12px}
.ok{color:#1a7f37}.no{color:#c62828}.pictures img{width:32%;border-radius:4px}
.bar{font-size:12px}.muted{color:#667}
"""


def write_report(result: DemoResult) -> None:
    """Write the page to `result.report`."""
    with replacing(result.report) as file:
        file.write(report_html(result).encode())


def report_html(result: DemoResult) -> str:
    """Return the page with embedded images."""
    verdict = "worked" if result.passed else "failed"
    parts = (
        f"<h1>Tandem demo: {verdict}</h1>",
        f"<p class=muted>profile {escape(result.options.profile)}, "
        f"{result.duration_s:.0f} s on this machine</p>",
        _checks(result),
        "<h2>What it saw</h2>",
        _pictures(result),
        "<h2>Where the network runs</h2>",
        plan_bars(result.build.plan),
        "<p class=muted>Predicted from published figures of other networks; no board was involved. "
        "On this machine:</p><ul>",
        *(f"<li>{escape(line)}</li>" for line in result.segments),
        f"</ul><pre>{escape(render_plan(result.build.plan))}</pre>",
        "<h2>Accuracy</h2>",
        _accuracy(result),
        "<h2>Latency on this machine</h2>",
        _latency(result),
        "<h2>Releases</h2>",
        _releases(result.deployments),
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Tandem demo</title>"
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def plan_bars(plan: Plan) -> str:
    """Draw the predicted time of each segment, in running order, as bars (SVG)."""
    times = {cost.segment: cost.predicted_us for cost in plan.costs}
    total = max(sum(times.values()) + plan.crossings_us, 1e-9)
    width, x, bars = 940.0, 0.0, []
    for segment in plan.segments:
        size = width * times[segment.name] / total
        colour = COLOURS[segment.processor]
        title = f"{segment.name}: {len(segment.nodes)} nodes, {times[segment.name]:.0f} us"
        bars.append(
            f"<rect x={x:.1f} y=0 width={max(size, 1):.1f} height=34 fill='{colour}'>"
            f"<title>{escape(title)}</title></rect>"
        )
        if size > 90:
            bars.append(f"<text x={x + 6:.1f} y=22 fill=white>{escape(title)}</text>")
        x += size
    rest = width - x
    if rest > 1:
        title = f"crossings: {plan.crossings_us:.0f} us"
        bars.append(
            f"<rect x={x:.1f} y=0 width={rest:.1f} height=34 fill='#d9dde3'>"
            f"<title>{title}</title></rect>"
            + (f"<text x={x + 6:.1f} y=22>{title}</text>" if rest > 90 else "")
        )
    return f"<svg class=bar viewBox='0 0 {width:.0f} 34' width='100%'>{''.join(bars)}</svg>"


def _checks(result: DemoResult) -> str:
    rows = (
        (
            f"<span class={'ok' if check.passed else 'no'}>{'ok' if check.passed else 'failed'}"
            "</span>",
            escape(check.name),
            escape(check.found),
        )
        for check in result.checks
    )
    return _table(("", "check", "found"), rows)


def _accuracy(result: DemoResult) -> str:
    scores = result.scores
    rows = [
        (
            escape(scores.labels[class_id]),
            _number(scores.fp32.by_class[class_id], 3),
            _number(scores.int8.by_class[class_id], 3),
        )
        for class_id in sorted(scores.fp32.by_class)
    ]
    rows.append(("<b>all</b>", _number(scores.fp32.map50, 3), _number(scores.int8.map50, 3)))
    return _table(("class", "FP32 AP50", "INT8 AP50"), rows) + (
        f"<p class=muted>{scores.pictures} held-out scenes.</p>"
    )


def _latency(result: DemoResult) -> str:
    stats = result.stats
    if stats is None:
        return "<p>No figures arrived.</p>"
    rows = [
        (escape(stage), _number(p50, 2), _number(stats.stage_p99_ms[stage], 2))
        for stage, p50 in stats.stage_p50_ms.items()
    ]
    rows.append(
        ("frame to result", _number(stats.latency_p50_ms, 2), _number(stats.latency_p99_ms, 2))
    )
    ages = [seen.capture_to_client_ms for item in result.deployments for seen in item.frames]
    p50, p99 = np.percentile(ages, [50, 99]) if ages else (0.0, 0.0)
    rows.append(("capture to MQTT client", _number(p50, 2), _number(p99, 2)))
    dropped = ", ".join(f"{n} {escape(cause)}" for cause, n in stats.dropped.items()) or "none"
    return _table(("stage", "p50 ms", "p99 ms"), rows) + (
        f"<p class=muted>{stats.fps:.1f} frames/s; dropped: {dropped}.</p>"
    )


def _releases(deployments: Sequence[Deployment]) -> str:
    rows = (
        (
            escape(f"{item.result.name} {item.result.version}"),
            escape(item.result.phase),
            _number(item.result.duration_s, 1),
            _number(item.result.sent_bytes / 1e6, 2),
            escape(item.result.reason),
        )
        for item in deployments
    )
    return _table(("release", "became", "seconds", "MB sent", "reason"), rows)


def _pictures(result: DemoResult) -> str:
    capture = cv2.VideoCapture(str(result.video))
    count = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    images = []
    for number in np.linspace(0, max(count - 1, 0), PICTURES, dtype=int):
        capture.set(cv2.CAP_PROP_POS_FRAMES, int(number))
        read, picture = capture.read()
        if read:
            encoded = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 85])[1]
            text = base64.b64encode(encoded.tobytes()).decode()
            images.append(f"<img alt='frame {number}' src='data:image/jpeg;base64,{text}'>")
    capture.release()
    return f"<div class=pictures>{' '.join(images)}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        "<tr>"
        + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _number(value: float, digits: int) -> str:
    return f"<td class=n>{value:.{digits}f}</td>"
