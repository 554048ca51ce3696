"""What one frame showed, as JSON for MQTT and files: 25 us for 100 detections."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import starmap
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from pipelines.frame import Frame, Stamp
from pipelines.results import (
    NO_TRACK,
    Attribute,
    ClassScores,
    Decoded,
    DepthMap,
    Detections,
    ModelResult,
    SegmentationMap,
    Texts,
    label_of,
    text_of,
)
from pipelines.stages.zones import NO_ZONES, ZoneEvent, ZoneFrame

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class FrameFacts:
    """What the run knows of a frame beside its results.

    `infer_ns`: begin and end of the inference on the clock of `time.monotonic()`; `predicted`: the
    model that is followed did not see it, the tracker filled the frame in; `processors`: where its
    inferences ran; `dropped`: frames of this source that were lost so far, by cause; `models`: what
    those beside the first say, by name.
    """

    infer_ns: tuple[int, int] | None = None
    processors: tuple[str, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    predicted: bool = False
    zones: ZoneFrame = NO_ZONES
    models: Mapping[str, ModelResult] = field(default_factory=dict)


class Detection(msgspec.Struct, frozen=True):
    """One object; `box`: x1, y1, x2, y2 in frame pixels, None for a class of the whole frame.

    What the model or pipeline does not give is left out. `keypoints`: x, y, score of each;
    `rotated`: centre x, centre y, width, height, angle in degrees; `mask`: outlines, each x, y, x,
    y and so on; `attributes`: what models on crops say of it, by their names.
    """

    label: str
    class_id: int
    score: float
    box: tuple[float, float, float, float] | None = None
    track_id: int | UnsetType = UNSET
    keypoints: tuple[tuple[float, float, float], ...] | UnsetType = UNSET
    rotated: tuple[float, float, float, float, float] | UnsetType = UNSET
    mask: tuple[tuple[int, ...], ...] | UnsetType = UNSET
    attributes: dict[str, Attribute] | UnsetType = UNSET


class ClassShare(msgspec.Struct, frozen=True):
    """A class of a segmentation, and the part of the frame that it has, 0 to 1."""

    label: str
    class_id: int
    share: float


class DepthRange(msgspec.Struct, frozen=True):
    """The depth of a frame: in metres if `metric`, else relative, larger is nearer."""

    nearest: float
    median: float
    farthest: float
    metric: bool


class TextLine(msgspec.Struct, frozen=True):
    """A line that was read."""

    text: str
    score: float


class ModelRows(msgspec.Struct, frozen=True, kw_only=True):
    """What one of several models says of a frame, as the same keys of `Event` do."""

    detections: tuple[Detection, ...] = ()
    classes: tuple[ClassShare, ...] | UnsetType = UNSET
    depth: DepthRange | UnsetType = UNSET
    texts: tuple[TextLine, ...] | UnsetType = UNSET


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One frame. Times are nanoseconds since 1970; `time` is `t_capture_ns` in ISO 8601 (UTC).

    `camera`: the id of the source, where it has one. `latency_ms`: each stage by name, and "total"
    from `t_recv_ns` to `t_result_ns`; `age_ms`: from `t_capture_ns` to it. `predicted`: the model
    that is followed did not see the frame, the tracker moved its tracks on. `zones`: objects inside
    by label; `lines`: crossings so far by direction. `classes`, `depth` and `texts` are there if
    the model gives a map or reads. `models`: what those beside the first say, by name.
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
    classes: tuple[ClassShare, ...] | UnsetType = UNSET
    depth: DepthRange | UnsetType = UNSET
    texts: tuple[TextLine, ...] | UnsetType = UNSET
    models: dict[str, ModelRows] | UnsetType = UNSET


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
    rows = model_rows(decoded, labels)
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
        width=frame.size[1],
        height=frame.size[0],
        latency_ms={k: round(v, 2) for k, v in (*stages_ms.items(), ("total", total))},
        detections=rows.detections,
        classes=rows.classes,
        depth=rows.depth,
        texts=rows.texts,
        models={name: model_rows(one.decoded, one.labels) for name, one in facts.models.items()}
        or UNSET,
    )


def _wall_ns(frame: Frame, times_ns: tuple[int, int] | None, which: int) -> int | UnsetType:
    """Return a time of the run on the clock of the frame's own times."""
    if times_ns is None:
        return UNSET
    return frame.t_recv.wall_ns + times_ns[which] - frame.t_recv.mono_ns


def encode_event(event: Event) -> bytes:
    """Return the event as JSON, without a line feed."""
    return _ENCODER.encode(event)


def model_rows(decoded: Decoded, labels: Sequence[str]) -> ModelRows:
    """Return what a model says of a frame."""
    return ModelRows(
        detections=detection_rows(decoded, labels),
        classes=_class_shares(decoded, labels) if isinstance(decoded, SegmentationMap) else UNSET,
        depth=_depth_range(decoded) if isinstance(decoded, DepthMap) else UNSET,
        texts=_text_lines(decoded, labels) if isinstance(decoded, Texts) else UNSET,
    )


def detection_rows(decoded: Decoded, labels: Sequence[str]) -> tuple[Detection, ...]:
    """Return the objects, or the classes of the whole frame."""
    if isinstance(decoded, ClassScores):
        shares = zip(decoded.class_ids.tolist(), _rounded(decoded.scores, 3), strict=True)
        return tuple(Detection(label_of(labels, c), c, s) for c, s in shares)
    if not isinstance(decoded, Detections):
        return ()
    class_ids, scores = decoded.class_ids.tolist(), _rounded(decoded.scores, 3)
    names = [label_of(labels, number) for number in class_ids]
    boxes = map(tuple, _rounded(decoded.boxes, 1))
    rows = zip(names, class_ids, scores, boxes, *_extras(decoded), strict=True)
    return tuple(starmap(Detection, rows))


def _extras(detections: Detections) -> list[list[Any]]:
    """Return the columns of `Detection` from `track_id` to the last that there is: track,
    keypoints, rotated box, mask and attributes of each detection, UNSET for what is not."""
    columns: list[list[Any] | None] = [None] * 5
    if detections.track_ids is not None:
        ids = detections.track_ids.tolist()
        columns[0] = [UNSET if track == NO_TRACK else track for track in ids]
    if detections.keypoints is not None:
        points = detections.keypoints.astype(np.float64)
        points[..., :2], points[..., 2] = points[..., :2].round(1), points[..., 2].round(3)
        columns[1] = [tuple(map(tuple, person)) for person in points.tolist()]
    if detections.rotated is not None:
        values = detections.rotated.astype(np.float64)
        values[:, 4] = np.degrees(values[:, 4])
        columns[2] = list(map(tuple, values.round(1).tolist()))
    if detections.masks is not None:
        from pipelines.stages.mask_pixels import mask_polygons

        columns[3] = [
            tuple(tuple(outline.reshape(-1).tolist()) for outline in mask_polygons(detections, row))
            for row in range(len(detections))
        ]
    if detections.attributes is not None:
        columns[4] = [dict(attribute) or UNSET for attribute in detections.attributes]
    while columns and columns[-1] is None:
        columns.pop()
    return [[UNSET] * len(detections) if column is None else column for column in columns]


def _class_shares(segmentation: SegmentationMap, labels: Sequence[str]) -> tuple[ClassShare, ...]:
    """Return the classes of a map, largest first; those below 0.1 % are left out."""
    numbers, counts = np.unique(segmentation.class_ids, return_counts=True)
    shares = counts / segmentation.class_ids.size
    order = np.argsort(-shares, kind="stable")
    order = order[shares[order] >= 0.001]
    return tuple(
        ClassShare(label_of(labels, number), number, round(share, 3))
        for number, share in zip(numbers[order].tolist(), shares[order].tolist(), strict=True)
    )


def _depth_range(depth_map: DepthMap) -> DepthRange:
    low, median, high = np.percentile(depth_map.depth.astype(np.float64), [2, 50, 98]).tolist()
    nearest, farthest = (low, high) if depth_map.metric else (high, low)
    nearest, median, farthest = (float(f"{v:.4g}") for v in (nearest, median, farthest))
    return DepthRange(nearest, median, farthest, depth_map.metric)


def _text_lines(texts: Texts, labels: Sequence[str]) -> tuple[TextLine, ...]:
    rows = zip(texts.lines, _rounded(texts.scores, 3), strict=True)
    return tuple(TextLine(text_of(line, labels), score) for line, score in rows)


def _rounded(values: NDArray[Any], digits: int) -> Any:  # noqa: ANN401  (nested lists of floats)
    # Rounded as float64: a rounded float32 prints as 1234.0999755859375.
    return np.round(values.astype(np.float64), digits).tolist()
