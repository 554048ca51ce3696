"""Drawn frames: labels are inside and not over each other; golden pictures hold the rest."""

import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from drawn_frames import CROWD, FRAMES, GOLDEN, PLACES, golden_size, plain, result, sheet
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sinks.draw_result import draw_result
from pipelines.sinks.draw_zones import LINE
from pipelines.sinks.labels import Label, place_labels, scale_of, write_labels

LATENCY_CORNER = (4, 4, 4, 4)


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_is_drawn_as_its_golden_picture(name):
    """With a tolerance for JPEG and other versions of OpenCV, whose letters differ."""
    drawn = golden_size(draw_result(FRAMES[name]()))
    golden = cv2.imread(str(GOLDEN / f"{name}.jpg"))
    assert golden.shape == drawn.shape
    size = (drawn.shape[1] // 4, drawn.shape[0] // 4)
    small = [
        cv2.resize(image, size, interpolation=cv2.INTER_AREA).astype(float)
        for image in (golden, drawn)
    ]
    difference = np.abs(small[0] - small[1]).max(axis=2)
    assert difference.mean() < 8
    assert (difference > 60).mean() < 0.01


def test_the_golden_pictures_see_a_label_that_moves():
    drawn = golden_size(draw_result(FRAMES["bright"]()))
    write_labels(drawn, [Label("dock: 2 and more", (200, 200, 300, 300), (60, 60, 235))])
    golden = cv2.imread(str(GOLDEN / "bright.jpg"))
    size = (drawn.shape[1] // 4, drawn.shape[0] // 4)
    small = [
        cv2.resize(image, size, interpolation=cv2.INTER_AREA).astype(float)
        for image in (golden, drawn)
    ]
    assert (np.abs(small[0] - small[1]).max(axis=2) > 60).mean() > 0.01


def test_labels_of_a_crowd_lie_beside_each_other():
    labels = [Label("12.3 ms", LATENCY_CORNER, (0, 0, 0), fixed=True)]
    labels += [Label("dock: 2", (0, 0, 240, 192), (60, 60, 235))]
    labels += [Label("person #1 0.93", tuple(map(int, row[:4])), (9, 9, 9)) for row in CROWD]
    places = place_labels(labels, [(90, 12)] * len(labels), (480, 320), 3)
    assert places[0] == (4, 4, 100, 22)
    for at, place in enumerate(places):
        assert 0 <= place[0] < place[2] <= 480
        assert 0 <= place[1] < place[3] <= 320
        assert not any(overlap(place, second) for second in places[:at])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.integers(-50, 700)] * 4), max_size=40))
def test_every_label_is_inside_the_frame(corners):
    labels = [
        Label("x", (min(a, c), min(b, d), max(a, c), max(b, d)), (0, 0, 0))
        for a, b, c, d in corners
    ]
    places = place_labels(labels, [(60, 10)] * len(labels), (320, 240), 3)
    for x1, y1, x2, y2 in places:
        assert (x2 - x1, y2 - y1) == (66, 16)
        assert 0 <= x1 < x2 <= 320
        assert 0 <= y1 < y2 <= 240


def test_the_time_stays_readable_under_zones_and_boxes():
    """The corner of the frame is the same with and without what lies below it."""
    empty = draw_result(result(plain((90, 90, 90)), no_objects()))
    full = draw_result(FRAMES["dark"]())
    alike = draw_result(result(plain((15, 15, 15)), no_objects()))
    assert (full[5:20, 5:50] == alike[5:20, 5:50]).all()
    assert (empty[5:20, 5:50] == alike[5:20, 5:50]).all()


def no_objects():
    return FRAMES["small"]().decoded[np.zeros(2, bool)]


def test_lines_lie_below_labels_and_are_seen_on_their_own_colour():
    labels = PLACES.draw(plain(LINE), FRAMES["dark"]().zones)
    assert [label.text for label in labels][2] == "gate: 3 in, 1 out"
    drawn = draw_result(FRAMES["yellow"]())
    column = drawn[:, 250].astype(int).sum(axis=1)
    assert column.min() < sum(LINE) / 2  # the dark edge of the gate on its own yellow


@pytest.mark.parametrize(("color", "ink"), [((60, 220, 230), 0), ((60, 60, 235), 255)])
def test_the_ink_is_dark_on_bright_colours_and_bright_on_dark_ones(color, ink):
    canvas = plain((128, 128, 128))
    write_labels(canvas, [Label("HHHHHHHH", LATENCY_CORNER, color, fixed=True)])
    assert (canvas == ink).all(axis=2).sum() > 30
    assert not (canvas == 255 - ink).all(axis=2).any()


def test_texts_of_large_frames_are_larger():
    assert scale_of(plain((0, 0, 0))) == 1.0
    assert scale_of(plain((0, 0, 0), 1920, 1080)) == 2.0
    huge = np.broadcast_to(np.zeros(3, np.uint8), (8640, 15360, 3))  # its 400 MB are not needed
    assert scale_of(huge) == 4.0


def test_the_sheet_shows_all(tmp_path):
    assert sheet().shape[1] == 2 * 660
    script = Path(__file__).parents[1] / "fixtures" / "drawn_frames.py"
    command = [sys.executable, str(script), "--sheet", str(tmp_path / "s.png")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    assert (tmp_path / "s.png").stat().st_size > 10_000
