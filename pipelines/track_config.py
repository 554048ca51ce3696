"""[tracker], [[zones]], [[lines]] and [roi] of pipeline.toml."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta

from pipelines.value import Fraction, Positive, PositiveFloat, Value

Point = tuple[float, float]
Units = Literal["relative", "px"]
Anchor = Literal["bottom", "centre", "top", "left", "right"]
Seconds = Annotated[float, Meta(ge=0.0)]
FAR = (-1.0, 2.0)  # fractions of the frame beyond these are pixels, or a slip


class TrackerConfig(Value, frozen=True, kw_only=True):
    """How detections of successive frames become tracks (ByteTrack, Zhang et al. 2022).

    Detections from `high_score` on may start a track (from `new_score` on) or extend one; those
    from `low_score` on may only extend one that was seen in the frame before. A track gets its
    number after `confirm_frames` frames in a row and is forgotten `lost_s` after it was last seen.
    `same_class`: a track keeps its class. `every_nth`: the engine runs on every n-th frame; in
    between, the tracks are moved on by their own speed. `model`: of several, the one whose objects
    are followed; empty: the first detector.
    """

    high_score: Fraction = 0.5
    low_score: Fraction = 0.1
    new_score: Fraction = 0.6
    iou: Fraction = 0.1
    confirm_frames: Positive = 2
    lost_s: PositiveFloat = 1.0
    same_class: bool = True
    every_nth: Positive = 1
    model: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for scores that leave no detection between them."""
        if self.low_score > self.high_score:
            raise ValueError(
                f"low_score is {self.low_score:g}, above high_score ({self.high_score:g}): lower it"
            )


class ZoneConfig(Value, frozen=True, kw_only=True):
    """An area of the frame that objects enter, leave and stay in.

    `polygon`: at least three points, as fractions of the frame's sides or in pixels (`units`).
    `anchor`: the point of a box that counts. `classes`: labels; empty means all. An object is in
    or out after `inertia_frames` frames in a row. `loitering_s` > 0: a `dwell` event once an object
    stayed so long.
    """

    name: str
    polygon: Annotated[tuple[Point, ...], Meta(min_length=3)]
    units: Units = "relative"
    anchor: Anchor = "bottom"
    classes: tuple[str, ...] = ()
    inertia_frames: Positive = 3
    loitering_s: Seconds = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError if it is outside of every frame."""
        _check_points(self.polygon, self.units)

    @property
    def points(self) -> tuple[Point, ...]:
        """Its corners."""
        return self.polygon


class LineConfig(Value, frozen=True, kw_only=True):
    """A line that objects cross, from `start` to `end`; `in` is from its left to its right.

    A crossing counts once the object was `settle_frames` frames in a row on either side, so that a
    box that flickers on the line counts never.
    """

    name: str
    start: Point
    end: Point
    units: Units = "relative"
    anchor: Anchor = "bottom"
    classes: tuple[str, ...] = ()
    settle_frames: Positive = 3

    def __post_init__(self) -> None:
        """Raise ValueError if it has no length, or is outside of every frame."""
        if self.start == self.end:
            raise ValueError("start and end are one point, which nothing crosses: move one of them")
        _check_points(self.points, self.units)

    @property
    def points(self) -> tuple[Point, ...]:
        """Its ends."""
        return self.start, self.end


class RoiConfig(Value, frozen=True, kw_only=True):
    """The part of the frame that matters: what has its `anchor` outside of it is left out.

    `crop`: the network sees the rectangle around the polygon alone, so its objects are larger.
    """

    polygon: Annotated[tuple[Point, ...], Meta(min_length=3)]
    units: Units = "relative"
    anchor: Anchor = "centre"
    crop: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError if it is outside of every frame."""
        _check_points(self.polygon, self.units)


def _check_points(points: Sequence[Point], units: Units) -> None:
    if units == "px":
        return  # the size of the frames is not known yet
    for point in points:
        if not all(FAR[0] <= value <= FAR[1] for value in point):
            raise ValueError(
                f"[{point[0]:g}, {point[1]:g}] is far outside of the frame, whose sides are 0 to 1:"
                ' correct it, or write units = "px" if these are pixels'
            )
    for values in zip(*points, strict=True):
        if max(values) < 0.0 or min(values) > 1.0:
            raise ValueError("all of it is outside of the frame, whose sides are 0 to 1: move it")
