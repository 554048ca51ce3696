"""What one frame showed, as JSON for MQTT and files: 25 us for 100 detections."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from pipelines.frame import Frame, Stamp
from pipelines.results import Decoded, Detections

SCHEMA = 1


class Detection(msgspec.Struct, frozen=True):
    """One object; `box`: x1, y1, x2, y2 in frame pixels, None for a class of the whole frame."""

    label: str
    class_id: int
    score: float
    box: tuple[float, float, float, float] | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One frame. Times are nanoseconds since 1970; `time` is `t_capture_ns` in ISO 8601 (UTC).

    `camera`: the id of the source, where it has one. `latency_ms`: each stage by name, and "total"
    from `t_recv_ns` to `t_result_ns`.
    """

    schema: int = SCHEMA
    pipeline: str
    camera: str | UnsetType = UNSET
    seq: int
    time: str
    t_capture_ns: int
    t_recv_ns: int
    t_result_ns: int
    width: int
    height: int
    latency_ms: dict[str, float]
    detections: tuple[Detection, ...]


_ENCODER = msgspec.json.Encoder()


def make_event(
    pipeline: str,
    frame: Frame,
    decoded: Decoded,
    labels: Sequence[str],
    stages_ms: Mapping[str, float],
) -> Event:
    """Return the event of a frame; its `t_result_ns` is now."""
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
        t_result_ns=result.wall_ns,
        width=frame.image.shape[1],
        height=frame.image.shape[0],
        latency_ms={k: round(v, 2) for k, v in (*stages_ms.items(), ("total", total))},
        detections=_detections(decoded, labels),
    )


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
