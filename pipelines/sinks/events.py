"""What one frame showed, as JSON for MQTT and files: 25 us for 100 detections."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from pipelines.frame import Frame, Stamp
from pipelines.results import Decoded, Detections
from pipelines.stages.zones import NO_ZONES, ZoneEvent, ZoneFrame

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class FrameFacts:
    """What the run knows of a frame beside its results.

    `infer_ns`: begin and end of the inference on the clock of `time.monotonic()`; `predicted`:
    there was none, the tracker filled the frame in; `processors`: those of the engine's segments;
    `dropped`: frames of this source that were lost so far, by cause.
    """

    infer_ns: tuple[int, int] | None = None
    processors: tuple[str, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    predicted: bool = False
    zones: ZoneFrame = NO_ZONES


class Detection(msgspec.Struct, frozen=True):
    """One object; `box`: x1, y1, x2, y2 in frame pixels, None for a class of the whole frame."""

    label: str
    class_id: int
    score: float
    box: tuple[float, float, float, float] | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One frame. Times are nanoseconds since 1970; `time` is `t_capture_ns` in ISO 8601 (UTC).

    `camera`: the id of the source, where it has one. `latency_ms`: each stage by name, and "total"
    from `t_recv_ns` to `t_result_ns`; `age_ms`: from `t_capture_ns` to it. `predicted`: no engine
    saw the frame, the tracker moved its tracks on. `zones`: objects inside by label; `lines`:
    crossings so far by direction.
    """

    schema: int = SCHEMA
    pipeline: str
    camera: str | UnsetType = UNSET
    seq: int
    time: str
    t_capture_ns: int
    t_recv_ns: int
    t_infer_begin_ns: int | UnsetType = UNSET
    t_infer_end_ns: int | UnsetType = UNSET
    t_result_ns: int
    age_ms: float
    predicted: bool | UnsetType = UNSET
    processors: tuple[str, ...] = ()
    dropped: dict[str, int] = {}
    zones: dict[str, dict[str, int]] | UnsetType = UNSET
    lines: dict[str, dict[str, int]] | UnsetType = UNSET
    zone_events: tuple[ZoneEvent, ...] | UnsetType = UNSET
    width: int
    height: int
    latency_ms: dict[str, float]
    detections: tuple[Detection, ...]


_ENCODER = msgspec.json.Encoder()


def make_event(  # noqa: PLR0917
    pipeline: str,
    frame: Frame,
    decoded: Decoded,
    labels: Sequence[str],
    stages_ms: Mapping[str, float],
    facts: FrameFacts | None = None,
) -> Event:
    """Return the event of a frame; its `t_result_ns` is now."""
    facts = facts or FrameFacts()
    zones = facts.zones
    result = Stamp.now()
    total = (result.mono_ns - frame.t_recv.mono_ns) / 1e6
    taken = datetime.fromtimestamp(frame.t_capture.wall_ns / 1e9, timezone.utc)
    return Event(
        pipeline=pipeline,
        camera=frame.camera or UNSET,
        seq=frame.seq,
        time=taken.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        t_capture_ns=frame.t_capture.wall_ns,
        t_recv_ns=frame.t_recv.wall_ns,
        t_infer_begin_ns=_wall_ns(frame, facts.infer_ns, 0),
        t_infer_end_ns=_wall_ns(frame, facts.infer_ns, 1),
        t_result_ns=result.wall_ns,
        age_ms=round((result.mono_ns - frame.t_capture.mono_ns) / 1e6, 2),
        predicted=facts.predicted or UNSET,
        processors=facts.processors,
        dropped=dict(facts.dropped),
        zones={name: dict(inside) for name, inside in zones.inside.items()} or UNSET,
        lines={name: dict(crossed) for name, crossed in zones.crossed.items()} or UNSET,
        zone_events=zones.events or UNSET,
        width=frame.image.shape[1],
        height=frame.image.shape[0],
        latency_ms={k: round(v, 2) for k, v in (*stages_ms.items(), ("total", total))},
        detections=_detections(decoded, labels),
    )


def _wall_ns(frame: Frame, times_ns: tuple[int, int] | None, which: int) -> int | UnsetType:
    """Return a time of the run on the clock of the frame's own times."""
    if times_ns is None:
        return UNSET
    return frame.t_recv.wall_ns + times_ns[which] - frame.t_recv.mono_ns


def encode_event(event: Event) -> bytes:
    """Return the event as JSON, without a line feed."""
    return _ENCODER.encode(event)


def label_of(labels: Sequence[str], class_id: int) -> str:
    """Return the name of a class, or its number where labels.txt is too short."""
    return labels[class_id] if class_id < len(labels) else str(class_id)


def _detections(decoded: Decoded, labels: Sequence[str]) -> tuple[Detection, ...]:
    # Rounded as float64: a rounded float32 prints as 1234.0999755859375.
    scores = np.round(decoded.scores.astype(np.float64), 3).tolist()
    class_ids = decoded.class_ids.tolist()
    if not isinstance(decoded, Detections):
        return tuple(
            Detection(label_of(labels, c), c, s) for c, s in zip(class_ids, scores, strict=True)
        )
    boxes = np.round(decoded.boxes.astype(np.float64), 1).tolist()
    return tuple(
        Detection(label_of(labels, c), c, s, tuple(b))
        for c, s, b in zip(class_ids, scores, boxes, strict=True)
    )
