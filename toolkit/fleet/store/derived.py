"""What lists filter, count and sort devices by, derived from their documents. Pure functions."""

from collections.abc import Callable, Mapping

import msgspec

from device.protocol.documents import Reported, StateDocument
from toolkit.fleet.rollout.liveness import place_of
from toolkit.fleet.store.schema import DERIVED

HOT_C = 85.0  # Jetson modules slow down from 85 to 105 C on
BAD_PIPELINE = frozenset({"degraded", "stalled", "restarting", "failed"})

# Kind of a problem -> whether a report tells it.
PROBLEMS: Mapping[str, Callable[[Reported], bool]] = {
    "pipeline": lambda report: report.pipeline.status in BAD_PIPELINE,
    "fallback": lambda report: bool(report.pipeline.degraded),  # a segment left its processor
    "throttled": lambda report: bool(report.pipeline.load),
    "hot": lambda report: _temperature(report) >= HOT_C,
    "update": lambda report: report.update.phase in ("refused", "rolled_back"),
    "device": lambda report: bool(report.problems or report.warning),
}


def derive(
    state: StateDocument | None, reported: Reported | None, labels: Mapping[str, str]
) -> dict[str, object]:
    """Return the derived columns of a device with all its labels."""
    columns: dict[str, object] = {
        "agent": "" if state is None else state.state,
        "all_labels": labels_text(labels),
        "place": place_of(labels),
    }
    if reported is not None:
        columns |= _of_report(reported)
    return {**_DEFAULTS, **columns}


def _of_report(report: Reported) -> dict[str, object]:
    facts, running, measured = report.facts, report.running, report.measured
    kinds = [kind for kind, tells in PROBLEMS.items() if tells(report)]
    columns: dict[str, object] = {
        "reported": 1,
        "dev": int(report.dev),
        "beat_s": report.beat_s,
        "profile": report.profile,
        "module": facts.module,
        "power_mode": facts.power_mode,
        "jetpack": facts.jetpack,
        "tensorrt": facts.tensorrt,
        "dla_cores": facts.dla_cores,
        "memory_mb": facts.memory_mb,
        "free_mb": facts.free_mb,
        "problems": f",{','.join(kinds)}," if kinds else "",
        "request": report.update.request,
        "received_bytes": report.update.received_bytes,
    }
    if running is not None:
        columns |= {
            "release": running.name, "version": running.version, "running": running.sha256,
        }  # fmt: skip
    if measured is not None:
        columns |= {
            "temperature_c": measured.temperature_c,
            "fps": measured.fps if measured.frames else None,
            "p95_ms": measured.latency_p95_ms if measured.frames else None,
            "measured": measured.sha256,
            "shadow_agreement": measured.shadow_agreement,
            "shadow_frames": measured.shadow_frames,
        }
    return columns


def _temperature(report: Reported) -> float:
    degrees = None if report.measured is None else report.measured.temperature_c
    return 0.0 if degrees is None else degrees


def labels_text(labels: Mapping[str, str]) -> str:
    """Return labels as they are searched for: `,"KEY":"VALUE",`."""
    pairs = "".join(f"{label_part(key, value)[1:]}" for key, value in sorted(labels.items()))
    return f",{pairs}"


def parse_labels(text: str) -> dict[str, str]:
    """Return the labels in such a text."""
    return msgspec.json.decode(f"{{{text[1:-1]}}}", type=dict[str, str])


def label_part(key: str, value: str) -> str:
    """Return what the text of all labels contains where it has a label. Quotes in keys and values
    are escaped, so nothing else contains it."""
    return f",{_json(key)}:{_json(value)},"


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()


_DEFAULTS: Mapping[str, object] = {
    name: None if "NOT NULL" not in kind else "" if kind.startswith("TEXT") else 0
    for name, kind in DERIVED
}
