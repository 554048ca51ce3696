"""Zones and lines: what counts, what does not, and when."""

import numpy as np
import pytest

from device.errors import PipelineError
from pipelines.results import NO_TRACK, Detections
from pipelines.stages.zones import ANCHORS, Zones, anchors, inside_polygon
from pipelines.track_config import LineConfig, ZoneConfig

LABELS = ("person", "car")
SQUARE = ((100.0, 100.0), (200.0, 100.0), (200.0, 200.0), (100.0, 200.0))
ROOM = ZoneConfig(name="room", polygon=SQUARE, units="px", inertia_frames=3, loitering_s=1.0)
DOOR = LineConfig(name="door", start=(0, 150), end=(300, 150), units="px", settle_frames=3)


def at(*rows):
    """Detections whose lower middle is at (x, y): (x, y, track) or (x, y, track, class)."""
    place = np.array([row[:2] for row in rows], np.float32).reshape(-1, 2)
    boxes = np.concatenate([place - np.float32([10, 40]), place + np.float32([10, 0])], axis=1)
    return Detections(
        boxes,
        np.ones(len(rows), np.float32),
        np.array([row[3] if len(row) > 3 else 0 for row in rows], np.int64),
        np.array([row[2] for row in rows], np.int64),
    )


def play(zones, frames, fps=10):
    """Give frames to zones; return the events as (frame, kind, track, direction) and the last."""
    events = []
    for i, rows in enumerate(frames):
        frame = zones.update(at(*rows), i / fps, 300, 300)
        events += [(i, one.kind, one.track_id, one.direction) for one in frame.events]
    return events, frame


def one_zone(config=ROOM, forget_s=1.0):
    return Zones([config], [], LABELS, forget_s)


def one_line(config=DOOR):
    return Zones([], [config], LABELS, 1.0)


IN, OUT = (150, 150, 7), (250, 150, 7)


def test_an_object_enters_and_leaves_after_the_frames_of_inertia():
    events, frame = play(one_zone(), [[OUT]] * 2 + [[IN]] * 4 + [[OUT]] * 4)
    assert events == [(4, "enter", 7, ""), (8, "leave", 7, "")]
    assert frame.inside == {"room": {}}


@pytest.mark.parametrize(("inside", "enters"), [(2, False), (3, True)])
def test_inertia_holds_at_its_limit(inside, enters):
    events, _ = play(one_zone(), [[IN]] * inside + [[OUT]])
    assert bool(events) is enters


def test_a_short_absence_is_no_leave():
    events, frame = play(one_zone(), [[IN]] * 3 + [[OUT]] * 2 + [[IN]] * 2)
    assert [kind for _, kind, *_ in events] == ["enter"]
    assert frame.inside == {"room": {"person": 1}}
    assert frame.zones_of == {7: ("room",)}


def test_dwell_is_told_once_with_its_time():
    zones = one_zone()
    frames = [zones.update(at(IN), i / 10, 300, 300) for i in range(20)]
    (dwell,) = [event for frame in frames for event in frame.events if event.kind == "dwell"]
    assert dwell.dwell_s == pytest.approx(1.0)
    assert (dwell.place, dwell.label) == ("room", "person")


def test_a_track_that_is_gone_has_left_with_the_time_it_was_seen():
    zones = one_zone(forget_s=0.5)
    for i in range(10):
        zones.update(at(IN), i / 10, 300, 300)
    assert zones.update(at(), 1.4, 300, 300).events == ()
    (leave,) = zones.update(at(), 1.5, 300, 300).events
    assert (leave.kind, leave.dwell_s) == ("leave", pytest.approx(0.9))


def test_objects_without_a_number_are_ignored():
    events, frame = play(
        Zones([ROOM], [DOOR], LABELS, 1.0),
        [[(150, 140, NO_TRACK), (160, 140, NO_TRACK)], [(150, 160, NO_TRACK)]] * 10,
    )
    assert events == []
    assert frame.crossed == {"door": {"in": 0, "out": 0}}


def test_one_number_in_two_classes_is_two_objects():
    _, frame = play(one_zone(), [[(150, 150, 7, 0), (160, 150, 7, 1)]] * 3)
    assert frame.inside == {"room": {"person": 1, "car": 1}}


def test_only_the_classes_of_a_zone_count():
    zone = ZoneConfig(name="cars", polygon=SQUARE, units="px", classes=("car",))
    _, frame = play(one_zone(zone), [[(150, 150, 7, 0), (160, 150, 8, 1)]] * 3)
    assert frame.inside == {"cars": {"car": 1}}


def test_relative_corners_are_fractions_of_the_frame():
    polygon = tuple((x / 300, y / 300) for x, y in SQUARE)
    _, frame = play(one_zone(ZoneConfig(name="room", polygon=polygon)), [[IN]] * 3)
    assert frame.inside == {"room": {"person": 1}}


@pytest.mark.parametrize(("bottom", "units"), [(300, "relative"), (300, "px"), (320, "relative")])
def test_an_object_that_the_border_cuts_off_is_in_a_zone_that_ends_there(bottom, units):
    end = 1.0 if units == "relative" else 299.0  # the last row of pixels
    whole = ((0.0, 0.0), (end, 0.0), (end, end), (0.0, end))
    zone = one_zone(ZoneConfig(name="yard", polygon=whole, units=units, inertia_frames=1))
    _, frame = play(zone, [[(150, bottom, 7), (310, 150, 8)]])
    assert frame.inside == {"yard": {"person": 2}}


def test_a_place_in_pixels_outside_of_the_frames_is_said_once_for_each_size(caplog):
    far = ZoneConfig(name="far", polygon=((300, 0), (400, 0), (400, 9)), units="px")
    zones = Zones([ROOM, far], [DOOR], LABELS, 1.0)
    for size in (300, 300, 299, 299, 301):
        zones.update(at(IN), 0.0, size, size)
    assert [record.args for record in caplog.records] == [("far", 299, 299)]


def walk(*ys):
    return [[(150, y, 7)] for y in ys]


@pytest.mark.parametrize(
    ("ys", "crossings"),
    [
        ((140,) * 3 + (160,) * 3, {"in": 1, "out": 0}),
        ((160,) * 3 + (140,) * 3, {"in": 0, "out": 1}),
        ((140,) * 3 + (160,) * 2, {"in": 0, "out": 0}),  # not settled yet
        ((140,) * 2 + (160,) * 3, {"in": 0, "out": 0}),  # it was never settled before
        ((140,) * 3 + (150,) * 9 + (160,) * 3, {"in": 1, "out": 0}),  # a rest on the line
        ((140,) * 3 + (160, 140) * 9, {"in": 0, "out": 0}),  # flicker
        ((140,) * 3 + (160, 160, 140) * 5 + (160,) * 3, {"in": 1, "out": 0}),
        ((140,) * 3 + (160,) * 3 + (140,) * 3, {"in": 1, "out": 1}),
    ],
)
def test_a_crossing_needs_settled_frames_on_both_sides(ys, crossings):
    _, frame = play(one_line(), walk(*ys))
    assert frame.crossed == {"door": crossings}


def test_a_way_around_the_end_of_a_line_is_no_crossing():
    short = LineConfig(name="door", start=(100, 150), end=(200, 150), units="px")
    beside = [[(250, y, 7)] for y in (140,) * 3 + (160,) * 3]
    assert play(one_line(short), beside)[1].crossed == {"door": {"in": 0, "out": 0}}
    through = [[(190, y, 7)] for y in (140,) * 3 + (160,) * 3]
    assert play(one_line(short), through)[1].crossed == {"door": {"in": 1, "out": 0}}


def test_in_is_from_the_left_of_the_line_to_its_right():
    turned = LineConfig(name="door", start=(300, 150), end=(0, 150), units="px")
    events, _ = play(one_line(turned), walk(*(140,) * 3 + (160,) * 3))
    assert events == [(5, "cross", 7, "out")]


@pytest.mark.parametrize("anchor", ANCHORS)
def test_an_anchor_is_a_point_of_the_box(anchor):
    expected = {
        "bottom": (30, 60),
        "centre": (30, 40),
        "top": (30, 20),
        "left": (10, 40),
        "right": (50, 40),
    }
    assert anchors(np.float32([[10, 20, 50, 60]]), anchor).tolist() == [list(expected[anchor])]


def test_inside_is_what_opencv_says():
    import cv2

    rng = np.random.default_rng()
    polygon = rng.uniform(0, 100, (7, 2))  # it may cut itself: the even-odd rule
    angle = np.arctan2(*(polygon - polygon.mean(axis=0)).T)
    polygon = polygon[np.argsort(angle)]
    points = rng.uniform(0, 100, (400, 2))
    contour = polygon.astype(np.float32)
    expected = [cv2.pointPolygonTest(contour, tuple(point), False) > 0 for point in points.tolist()]
    assert np.mean(inside_polygon(points, polygon) == expected) > 0.99  # rounding on an edge


def test_names_and_classes_are_checked():
    with pytest.raises(PipelineError, match=r"2 .* are called 'room'"):
        Zones([ROOM], [LineConfig(name="room", start=(0, 0), end=(1, 1))], LABELS, 1.0)
    with pytest.raises(PipelineError, match=r"'cat', which is none of the labels \(person, car\)"):
        one_zone(ZoneConfig(name="a", polygon=SQUARE, units="px", classes=("cat",)))
