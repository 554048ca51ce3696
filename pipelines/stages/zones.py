"""Objects in zones and across lines: what tracks did, as events and counts.

Objects are told apart by track and class; those without a number are ignored, as many of them share
one. Nothing is said of an object before it was on one side for some frames in a row: a box that
flickers on a border neither enters nor crosses.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from device.errors import PipelineError
from pipelines.results import Detections, label_of
from pipelines.track_config import Anchor, LineConfig, Point, Units, ZoneConfig

_log = logging.getLogger(__name__)

EDGE = 1e-3  # of a pixel: what is on the right or lower edge of a polygon is outside

Key = tuple[int, int]  # track, class
EventKind = Literal["enter", "leave", "dwell", "cross"]
Counts = Mapping[str, Mapping[str, int]]

# Of a box: the share of its width and height from its upper left corner.
ANCHORS: Mapping[Anchor, tuple[float, float]] = {
    "bottom": (0.5, 1.0),
    "centre": (0.5, 0.5),
    "top": (0.5, 0.0),
    "left": (0.0, 0.5),
    "right": (1.0, 0.5),
}


class ZoneEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one object did. `place`: the zone or line; `direction`: of a crossing, "in" or "out";
    `dwell_s`: of `dwell` and `leave`, how long it was inside so far."""

    kind: EventKind
    place: str
    track_id: int
    label: str
    direction: str = ""
    dwell_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ZoneFrame:
    """Zones and lines after a frame.

    `inside`: objects in each zone by label; `crossed`: crossings of each line since the start by
    "in" or "out"; `zones_of`: the zones of each track; `events`: what happened in this frame.
    """

    inside: Counts = field(default_factory=dict)
    crossed: Counts = field(default_factory=dict)
    zones_of: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    events: tuple[ZoneEvent, ...] = ()


NO_ZONES = ZoneFrame()


@dataclass(slots=True)
class _Stay:
    """An object and a zone: settled inside or not, and for how many frames it seems otherwise."""

    inside: bool = False
    doubts: int = 0
    since_s: float = 0.0
    first_s: float = 0.0
    dwelt: bool = False
    seen_s: float = 0.0


@dataclass(slots=True)
class _Side:
    """An object and a line: the side where it settled (0: none yet), and where it seems to be."""

    stable_side: int = 0
    last: Point = (0.0, 0.0)  # on the settled side
    side: int = 0
    frames: int = 0
    crosses: bool = False
    seen_s: float = 0.0


class Zones:
    """Follows tracks through zones and across lines; one for each source."""

    def __init__(
        self,
        zones: Sequence[ZoneConfig],
        lines: Sequence[LineConfig],
        labels: Sequence[str],
        forget_s: float,
    ) -> None:
        """`forget_s`: an object that was not seen for so long has left. Raises PipelineError: two
        places have one name, or a class is none of the labels."""
        check_places(zones, lines, labels)
        self._labels = labels
        self._forget_s = forget_s
        self._zones = [_Zone(config, labels) for config in zones]
        self._lines = [_Line(config, labels) for config in lines]
        self._size = (0, 0)  # of the frame for which places outside were last looked for

    def change(self, zones: Sequence[ZoneConfig], lines: Sequence[LineConfig]) -> None:
        """Go on with these; one that is as before keeps its objects and counts. Raises as the
        constructor does."""
        check_places(zones, lines, self._labels)
        known_zones = {zone.config: zone for zone in self._zones}
        known_lines = {line.config: line for line in self._lines}
        self._zones = [known_zones.get(one) or _Zone(one, self._labels) for one in zones]
        self._lines = [known_lines.get(one) or _Line(one, self._labels) for one in lines]
        self._size = (0, 0)

    def update(self, tracked: Detections, time_s: float, width: int, height: int) -> ZoneFrame:
        """Return what happened in a frame of that size, taken at `time_s`."""
        if self._size != (width, height):
            self._size = (width, height)
            self._warn_of_outside()
        events: list[ZoneEvent] = []
        known = np.zeros(len(tracked), bool)
        if tracked.track_ids is not None:
            known = tracked.track_ids >= 0
        objects = tracked if known.all() else tracked[known]
        ids = [] if objects.track_ids is None else objects.track_ids.tolist()
        keys: list[Key] = list(zip(ids, objects.class_ids.tolist(), strict=True))
        places: tuple[_Zone | _Line, ...] = (*self._zones, *self._lines)
        for place in places:
            points = anchors_within(objects.boxes, place.config.anchor, width, height)
            scale = (width, height) if place.config.units == "relative" else (1.0, 1.0)
            place.update(keys, points, scale, time_s, events)
            place.forget(time_s - self._forget_s, events)
        zones_of: dict[int, tuple[str, ...]] = {}
        for zone in self._zones:
            for (track_id, _), stay in zone.stays.items():
                if stay.inside:
                    zones_of[track_id] = (*zones_of.get(track_id, ()), zone.config.name)
        return ZoneFrame(
            inside={zone.config.name: zone.count() for zone in self._zones},
            crossed={line.config.name: dict(line.crossed) for line in self._lines},
            zones_of=zones_of,
            events=tuple(events),
        )

    def _warn_of_outside(self) -> None:
        """Say which places in pixels nothing in the frame can reach."""
        width, height = self._size
        places: tuple[_Zone | _Line, ...] = (*self._zones, *self._lines)
        for place in places:
            corners = polygon_px(place.config.points, place.config.units, width, height)
            if (corners.max(axis=0) < 0.0).any() or (corners.min(axis=0) > self._size).any():
                _log.warning(
                    "%r is outside of frames of %d x %d pixels, and counts nothing: correct it, or"
                    ' write units = "relative" for fractions of the frame',
                    place.config.name,
                    width,
                    height,
                )


class _Zone:
    """One zone with the objects that were near it."""

    def __init__(self, config: ZoneConfig, labels: Sequence[str]) -> None:
        self.config = config
        self.stays: dict[Key, _Stay] = {}
        self._labels = labels
        self._classes = _class_ids(config.classes, labels)

    def update(
        self,
        keys: Sequence[Key],
        points: NDArray[np.float64],
        scale: tuple[float, float],
        time_s: float,
        events: list[ZoneEvent],
    ) -> None:
        inside = inside_polygon(points, np.asarray(self.config.polygon) * scale).tolist()
        for key, now_inside in zip(keys, inside, strict=True):
            if self._classes and key[1] not in self._classes:
                continue
            stay = self.stays.get(key)
            if stay is None:
                if not now_inside:
                    continue
                stay = self.stays[key] = _Stay()
            self._settle(key, stay, now_inside, time_s, events)

    def _settle(
        self, key: Key, stay: _Stay, inside: bool, time_s: float, events: list[ZoneEvent]
    ) -> None:
        stay.seen_s = time_s
        if inside == stay.inside:
            stay.doubts = 0
        else:
            if not stay.doubts:
                stay.first_s = time_s
            stay.doubts += 1
        if stay.doubts >= self.config.inertia_frames:
            stay.inside, stay.doubts = inside, 0
            if inside:
                stay.since_s, stay.dwelt = stay.first_s, False
                events.append(self._event("enter", key))
            else:
                events.append(self._event("leave", key, stay.first_s - stay.since_s))
        loitering_s = self.config.loitering_s
        stayed_s = time_s - stay.since_s
        if stay.inside and not stay.dwelt and 0.0 < loitering_s <= stayed_s:
            stay.dwelt = True
            events.append(self._event("dwell", key, stayed_s))

    def forget(self, before_s: float, events: list[ZoneEvent]) -> None:
        """Let go of objects that were last seen before a time; those inside leave."""
        for key in [key for key, stay in self.stays.items() if stay.seen_s < before_s]:
            stay = self.stays.pop(key)
            if stay.inside:
                events.append(self._event("leave", key, stay.seen_s - stay.since_s))

    def count(self) -> dict[str, int]:
        """Return how many objects are inside, by label."""
        inside = (class_id for (_, class_id), stay in self.stays.items() if stay.inside)
        return dict(Counter(label_of(self._labels, class_id) for class_id in inside))

    def _event(self, kind: EventKind, key: Key, dwell_s: float | None = None) -> ZoneEvent:
        event = ZoneEvent(kind, self.config.name, key[0], label_of(self._labels, key[1]))
        return event if dwell_s is None else replace(event, dwell_s=round(dwell_s, 3))


class _Line:
    """One line with the sides of the objects, and its crossings."""

    def __init__(self, config: LineConfig, labels: Sequence[str]) -> None:
        self.config = config
        self.crossed: Counter[str] = Counter({"in": 0, "out": 0})
        self._sides: dict[Key, _Side] = {}
        self._labels = labels
        self._classes = _class_ids(config.classes, labels)

    def update(
        self,
        keys: Sequence[Key],
        points: NDArray[np.float64],
        scale: tuple[float, float],
        time_s: float,
        events: list[ZoneEvent],
    ) -> None:
        start, end = (np.asarray(point) * scale for point in (self.config.start, self.config.end))
        sides = np.sign(_turn(start, end, points)).astype(np.int64).tolist()
        line = (tuple(start.tolist()), tuple(end.tolist()))
        for key, point, side in zip(keys, map(tuple, points.tolist()), sides, strict=True):
            if self._classes and key[1] not in self._classes:
                continue
            state = self._sides.setdefault(key, _Side())
            state.seen_s = time_s
            # On the line itself nothing changes.
            direction = self._settle(state, point, side, line) if side else ""
            if direction:
                self.crossed[direction] += 1
                label = label_of(self._labels, key[1])
                events.append(ZoneEvent("cross", self.config.name, key[0], label, direction))

    def _settle(self, state: _Side, point: Point, side: int, line: tuple[Point, Point]) -> str:
        """Return the direction of the crossing that a point of an object completes, or ""."""
        if side != state.side:
            state.side, state.frames = side, 0
            state.crosses = side == -state.stable_side and _segments_cross(state.last, point, *line)
        state.frames += 1
        direction = ""
        if side != state.stable_side and state.frames >= self.config.settle_frames:
            state.stable_side = side
            if state.crosses:
                direction = "in" if side > 0 else "out"
        if side == state.stable_side:
            state.last = point
        return direction

    def forget(self, before_s: float, events: list[ZoneEvent]) -> None:
        """Let go of objects that were last seen before a time."""
        for key in [key for key, state in self._sides.items() if state.seen_s < before_s]:
            del self._sides[key]


def anchors(boxes: NDArray[np.float32], anchor: Anchor) -> NDArray[np.float64]:
    """Return the point of each box [N, 4] that counts, float64 [N, 2]."""
    corners = boxes.astype(np.float64)
    return corners[:, :2] + (corners[:, 2:] - corners[:, :2]) * ANCHORS[anchor]


def anchors_within(
    boxes: NDArray[np.float32], anchor: Anchor, width: int, height: int
) -> NDArray[np.float64]:
    """Return `anchors`, moved to the last pixels of the frame: an object that the border cuts off
    is inside a polygon that ends there."""
    last = np.array([width, height]) - (1.0 + EDGE)
    return np.clip(anchors(boxes, anchor), 0.0, np.maximum(last, 0.0))


def inside_polygon(points: NDArray[np.float64], polygon: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which points [N, 2] are inside a polygon [K, 2], by the even-odd rule."""
    x, y = points[:, 0, None], points[:, 1, None]
    x1, y1 = polygon.T
    x2, y2 = np.roll(polygon, -1, axis=0).T
    spans = (y1 > y) != (y2 > y)
    rise = np.where(y2 == y1, 1.0, y2 - y1)  # a level edge spans nothing
    left_of = x < (x2 - x1) * (y - y1) / rise + x1
    return np.asarray(np.count_nonzero(spans & left_of, axis=1) % 2 == 1)


def polygon_px(
    polygon: Sequence[Point], units: Units, width: int, height: int
) -> NDArray[np.float64]:
    """Return a polygon in pixels of a frame."""
    corners = np.asarray(polygon, np.float64)
    return corners * (width, height) if units == "relative" else corners


def _turn(
    start: NDArray[np.float64], end: NDArray[np.float64], points: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return above 0 for points on the right of a line as seen from its start (y points down)."""
    (dx, dy), offset = end - start, points - start
    return np.asarray(dx * offset[:, 1] - dy * offset[:, 0])


def _segments_cross(a: Point, b: Point, start: Point, end: Point) -> bool:
    """Return whether the way from a to b, on two sides of a line, passes between its ends."""
    way = np.array([a, b])
    ends = np.array([start, end])
    first, second = _turn(way[0], way[1], ends)
    return bool(first * second <= 0.0)


def _class_ids(classes: Sequence[str], labels: Sequence[str]) -> frozenset[int]:
    return frozenset(i for i, label in enumerate(labels) if label in classes)


def check_places(
    zones: Sequence[ZoneConfig], lines: Sequence[LineConfig], labels: Sequence[str]
) -> None:
    """Raise PipelineError unless every place has a name of its own and counts known classes."""
    places: tuple[ZoneConfig | LineConfig, ...] = (*zones, *lines)
    names = Counter(place.name for place in places)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise PipelineError(
            f"{names[twice[0]]} [[zones]] and [[lines]] are called {twice[0]!r}: give each its own"
            " name."
        )
    for place in places:
        unknown = [name for name in place.classes if name not in labels]
        if unknown:
            raise PipelineError(
                f"{place.name!r} counts the class {unknown[0]!r}, which is none of the labels"
                f" ({', '.join(labels)}): correct `classes` in pipeline.toml."
            )
