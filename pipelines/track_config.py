"""[tracker], [[zones]], [[lines]] and [roi] of pipeline.toml."""

from typing import Annotated, Literal

from msgspec import Meta

from pipelines.value import Fraction, Positive, PositiveFloat, Value

Point = tuple[float, float]
Units = Literal["relative", "px"]
Anchor = Literal["bottom", "centre", "top", "left", "right"]
Seconds = Annotated[float, Meta(ge=0.0)]
FARTHEST = 1.0  # outside of the frame, in its sides: beyond that a fraction is a pixel by mistake


def _check_points(points: tuple[Point, ...], units: Units) -> None:
    """Raise ValueError if points that are said to be fractions of the frame are pixels."""
    for x, y in points:
        if units == "relative" and not all(-FARTHEST <= one <= 1 + FARTHEST for one in (x, y)):
            raise ValueError(
                f"[{x:g}, {y:g}] is no fraction of the frame's width and height: "
                'write units = "px" for pixels'
            )


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
        """Raise ValueError for pixels among fractions."""
        _check_points(self.polygon, self.units)


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
        """Raise ValueError for pixels among fractions, and for a line without a length."""
        _check_points((self.start, self.end), self.units)
        if self.start == self.end:
            raise ValueError("start and end are the same point")


class RoiConfig(Value, frozen=True, kw_only=True):
    """The part of the frame that matters: what has its `anchor` outside of it is left out.

    `crop`: the network sees the rectangle around the polygon alone, so its objects are larger.
    """

    polygon: Annotated[tuple[Point, ...], Meta(min_length=3)]
    units: Units = "relative"
    anchor: Anchor = "centre"
    crop: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError for pixels among fractions."""
        _check_points(self.polygon, self.units)
