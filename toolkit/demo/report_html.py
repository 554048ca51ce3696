"""The HTML report of a demo: build, run and checks."""

import base64
from collections.abc import Sequence

import numpy as np

from device.engine.arithmetic import arithmetic_of
from pipelines.vision import cv2
from toolkit.demo.steps import DemoResult, Deployment
from toolkit.html.charts import Bar, strip
from toolkit.html.markup import Html, Number, bullets, heading, paragraph, preformatted, table
from toolkit.html.page import page, write_page
from toolkit.partition.planning.plan import Plan
from toolkit.partition.planning.plan_text import render_plan

PICTURES = 3


def write_report(result: DemoResult) -> None:
    """Write the page to `result.report`."""
    write_page(result.report, report_html(result))


def report_html(result: DemoResult) -> str:
    """Return the page with embedded images."""
    verdict = "worked" if result.passed else "failed"
    parts = (
        _checks(result),
        heading("What it saw"),
        _pictures(result),
        heading("Where the network runs"),
        plan_strip(result.build.plan),
        paragraph(
            "Predicted from published figures of other networks; no board was involved. "
            "On this machine:",
            "muted",
        ),
        bullets(result.segments),
        preformatted(
            render_plan(result.build.plan, arithmetic=arithmetic_of(result.build.manifest))
        ),
        heading("Accuracy"),
        _accuracy(result),
        heading("Latency on this machine"),
        _latency(result),
        heading("Releases"),
        _releases(result.deployments),
    )
    lead = f"profile {result.options.profile}, {result.duration_s:.0f} s on this machine"
    return page(f"Tandem demo: {verdict}", lead, parts)


def plan_strip(plan: Plan) -> Html:
    """Draw the predicted time of each segment, in running order."""
    times = {cost.segment: cost.predicted_us for cost in plan.costs}
    parts = [
        Bar(
            f"{segment.name}, {len(segment.nodes)} nodes",
            times[segment.name],
            f"{times[segment.name]:.0f} us",
            segment.processor,
        )
        for segment in plan.segments
    ]
    crossings = Bar("crossings", plan.crossings_us, f"{plan.crossings_us:.0f} us", "soft")
    return strip("Predicted time of each segment", [*parts, crossings])


def _checks(result: DemoResult) -> Html:
    rows = (
        ("ok" if check.passed else Html("<b class=bad>failed</b>"), check.name, check.finding)
        for check in result.checks
    )
    return table("Checks", ("result", "check", "found"), rows)


def _accuracy(result: DemoResult) -> Html:
    scores = result.scores
    rows = [
        (
            scores.labels[class_id],
            _number(scores.fp32.by_class[class_id], 3),
            _number(scores.int8.by_class[class_id], 3),
        )
        for class_id in sorted(scores.fp32.by_class)
    ]
    rows.append(("all", _number(scores.fp32.map50, 3), _number(scores.int8.map50, 3)))
    caption = f"AP50 on {scores.pictures} held-out scenes"
    return table(caption, ("class", "FP32 AP50", "INT8 AP50"), rows)


def _latency(result: DemoResult) -> Html:
    stats = result.stats
    if stats is None:
        return paragraph("No figures arrived.")
    rows = [
        (stage, _number(p50, 2), _number(stats.stage_p99_ms[stage], 2))
        for stage, p50 in stats.stage_p50_ms.items()
    ]
    rows.append(
        ("frame to result", _number(stats.latency_p50_ms, 2), _number(stats.latency_p99_ms, 2))
    )
    ages = [seen.capture_to_client_ms for item in result.deployments for seen in item.frames]
    p50, p99 = np.percentile(ages, [50, 99]) if ages else (0.0, 0.0)
    rows.append(("capture to MQTT client", _number(p50, 2), _number(p99, 2)))
    dropped = ", ".join(f"{n} {cause}" for cause, n in stats.dropped.items()) or "none"
    caption = f"{stats.fps:.1f} frames/s; dropped: {dropped}"
    return table(caption, ("stage", "p50 ms", "p99 ms"), rows)


def _releases(deployments: Sequence[Deployment]) -> Html:
    rows = (
        (
            f"{item.result.name} {item.result.version}",
            item.result.phase,
            _number(item.result.duration_s, 1),
            _number(item.result.sent_bytes / 1e6, 2),
            item.result.reason,
        )
        for item in deployments
    )
    return table("Releases", ("release", "became", "seconds", "MB sent", "reason"), rows)


def _pictures(result: DemoResult) -> Html:
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
    return Html(f"<div class=pictures>{' '.join(images)}</div>")


def _number(value: float, digits: int) -> Number:
    return Number(value, f"{value:.{digits}f}")
