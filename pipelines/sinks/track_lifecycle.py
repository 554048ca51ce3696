"""The life of each tracked object: new, update, end, with what was known before and after.

The shape is that of Frigate's events, which home automation and dashboards read.
"""

import time
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from pipelines.results import Attribute, Detections, label_of
from pipelines.stages.zones import ZoneFrame

SCHEMA = 1
BETTER_SCORE = 0.05  # a top score that rose by so much is worth an update
UPDATE_S = 1.0  # at most one update of scores and boxes in this time; zones are told at once

Key = tuple[int, int]  # track, class


class ObjectState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an object. `box`: x1, y1, x2, y2 in pixels; times are seconds since 1970,
    of the capture; `end_time` is there once it has gone; `attributes`: what models on crops say of
    it, by their names."""

    id: str
    camera: str
    track_id: int
    label: str
    score: float
    top_score: float
    box: tuple[float, float, float, float]
    frame_time: float
    start_time: float
    end_time: float | None = None
    current_zones: tuple[str, ...] = ()
    entered_zones: tuple[str, ...] = ()
    attributes: dict[str, Attribute] | UnsetType = UNSET


class ObjectEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A change in the life of an object; `before` is left out of `new`."""

    schema: int = SCHEMA
    type: Literal["new", "update", "end"]
    before: ObjectState | UnsetType = UNSET
    after: ObjectState


class TrackLifecycle:
    """Follows the objects of one camera. Those without a number are not followed."""

    def __init__(self, camera: str, labels: Sequence[str], lost_s: float) -> None:
        """`lost_s`: an object that was not seen for so long has gone."""
        self._camera = camera
        self._labels = labels
        self._lost_s = lost_s
        self._known: dict[Key, ObjectState] = {}
        self._reported: dict[Key, ObjectState] = {}
        self._heard_s = 0.0

    def update(
        self, tracked: Detections, zones: ZoneFrame, wall_ns: int
    ) -> tuple[ObjectEvent, ...]:
        """Return what changed with a frame that was taken at `wall_ns` since 1970."""
        time_s = wall_ns / 1e9
        self._heard_s = time.monotonic()
        events = []
        for key, score, box, attributes in _rows(tracked):
            state = self._seen(key, score, box, zones, time_s)
            if attributes:
                state = msgspec.structs.replace(state, attributes=attributes)
            event = self._change(key, state)
            self._known[key] = state
            if event is not None:
                self._reported[key] = state
                events.append(event)
        expired = [
            key for key, state in self._known.items() if state.frame_time < time_s - self._lost_s
        ]
        return (*events, *map(self._end, expired))

    def expire(self, now_s: float) -> tuple[ObjectEvent, ...]:
        """Return the ends of all objects if no frame came for `lost_s`; `now_s` is
        `time.monotonic()`."""
        return self.close() if self._known and now_s - self._heard_s > self._lost_s else ()

    def close(self) -> tuple[ObjectEvent, ...]:
        """Return the ends of all objects: nobody follows them any more."""
        return tuple(map(self._end, list(self._known)))

    def _seen(
        self, key: Key, score: float, box: list[float], zones: ZoneFrame, time_s: float
    ) -> ObjectState:
        x1, y1, x2, y2 = box
        state = self._known.get(key)
        if state is None:
            state = ObjectState(
                id="-".join(filter(None, (self._camera, f"{time_s:.3f}-{key[0]}-{key[1]}"))),
                camera=self._camera,
                track_id=key[0],
                label=label_of(self._labels, key[1]),
                score=score,
                top_score=score,
                box=(x1, y1, x2, y2),
                frame_time=time_s,
                start_time=time_s,
            )
        inside = zones.zones_of.get(key[0], ())
        fresh = tuple(zone for zone in inside if zone not in state.entered_zones)
        return msgspec.structs.replace(
            state,
            score=score,
            top_score=max(score, state.top_score),
            box=(x1, y1, x2, y2),
            frame_time=time_s,
            current_zones=inside,
            entered_zones=(*state.entered_zones, *fresh),
        )

    def _change(self, key: Key, state: ObjectState) -> ObjectEvent | None:
        published = self._reported.get(key)
        if published is None:
            return ObjectEvent(type="new", after=state)
        better = state.top_score >= published.top_score + BETTER_SCORE
        described = _labels_of(state) != _labels_of(published)
        if state.current_zones != published.current_zones or (
            (better or described) and state.frame_time >= published.frame_time + UPDATE_S
        ):
            return ObjectEvent(type="update", before=published, after=state)
        return None

    def _end(self, key: Key) -> ObjectEvent:
        state = self._known.pop(key)
        published = self._reported.pop(key)
        ended = msgspec.structs.replace(state, end_time=state.frame_time, current_zones=())
        return ObjectEvent(type="end", before=published, after=ended)


def _labels_of(state: ObjectState) -> dict[str, str]:
    attributes = state.attributes or {}
    return {name: attribute.label for name, attribute in attributes.items()}


def _rows(tracked: Detections) -> list[tuple[Key, float, list[float], dict[str, Attribute]]]:
    """Return track and class, score, box and attributes of each object with a number."""
    if tracked.track_ids is None:
        return []
    rows: NDArray[np.int64] = np.flatnonzero(tracked.track_ids >= 0)
    ids, class_ids = tracked.track_ids[rows].tolist(), tracked.class_ids[rows].tolist()
    scores = np.round(tracked.scores[rows].astype(np.float64), 3).tolist()
    boxes = np.round(tracked.boxes[rows].astype(np.float64), 1).tolist()
    attributes: list[dict[str, Attribute]] = [{}] * len(ids)
    if tracked.attributes is not None:
        attributes = [dict(tracked.attributes[row]) for row in rows.tolist()]
    keys = zip(ids, class_ids, strict=True)
    return list(zip(keys, scores, boxes, attributes, strict=True))
