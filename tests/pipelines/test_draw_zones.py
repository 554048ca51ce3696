"""Zones and lines are drawn where they are, with what they count; windows need a screen."""

import threading
from pathlib import Path

import cv2
import numpy as np
import pytest
from click.testing import CliRunner
from video_fixtures import frame_of, gray_frame

from device.errors import PipelineError
from pipelines.preview import window as window_module
from pipelines.preview.window import Window
from pipelines.results import no_detections
from pipelines.sinks.draw_result import draw_result
from pipelines.sinks.draw_zones import EMPTY, LINE, OCCUPIED, Places
from pipelines.sinks.events import make_event
from pipelines.sinks.labels import write_labels
from pipelines.sinks.result import FrameResult
from pipelines.sinks.video import VideoFileWriter
from pipelines.stages.zones import NO_ZONES, ZoneFrame
from pipelines.track_config import LineConfig, ZoneConfig
from toolkit.cli.main import tandem

ZONE = ZoneConfig(name="dock", polygon=((0.5, 0.5), (0.9, 0.5), (0.9, 0.9), (0.5, 0.9)))
GATE = LineConfig(name="gate", start=(20, 40), end=(120, 40), units="px")
SIZE = (200, 100)  # width, height


def drawn(places: Places, counts: ZoneFrame = NO_ZONES) -> np.ndarray:
    canvas = gray_frame(0, *SIZE)
    write_labels(canvas, places.draw(canvas, counts))
    return canvas


def has_color(image: np.ndarray, color: tuple[int, int, int], near: tuple[int, int]) -> bool:
    x, y = near
    part = image[max(y - 2, 0) : y + 3, max(x - 2, 0) : x + 3].reshape(-1, 3)
    return bool((part == np.array(color)).all(axis=1).any())


def test_a_zone_has_its_outline_in_the_frame_and_another_colour_with_objects_inside() -> None:
    image = drawn(Places(zones=(ZONE,)))
    for corner in ((100, 90), (180, 90), (180, 70)):
        assert has_color(image, EMPTY, corner)
    occupied = drawn(Places(zones=(ZONE,)), ZoneFrame(inside={"dock": {"person": 2}}))
    assert has_color(occupied, OCCUPIED, (180, 90))
    assert not has_color(occupied, EMPTY, (180, 90))
    assert not image[75:85, 120:160].any()  # it is not filled


def test_a_line_has_an_arrow_to_where_in_leads() -> None:
    image = drawn(Places(lines=(GATE,)))
    assert has_color(image, LINE, (25, 40))
    assert has_color(image, LINE, (70, 60))  # right of the way from start to end is below it
    assert not image[70:90, 60:80].any()


def test_what_is_counted_changes_the_picture_and_an_image_without_places_stays() -> None:
    counts = ZoneFrame(crossed={"gate": {"in": 3}})
    assert (drawn(Places(lines=(GATE,)), counts) != drawn(Places(lines=(GATE,)))).any()
    assert not drawn(Places(), counts).any()


def test_a_video_shows_its_zones(tmp_path: Path) -> None:
    writer = VideoFileWriter(tmp_path / "seen.mp4", 10.0)
    for _ in range(3):
        writer.write(gray_frame(0, *SIZE), lambda: draw_result(result()))
    writer.close()
    video = cv2.VideoCapture(str(writer.path))
    frame = video.read()[1]
    video.release()
    assert frame[70:92, 178:184].max() > 100


def result() -> FrameResult:
    frame = frame_of(gray_frame(9, *SIZE))
    event = make_event("test", frame, no_detections(), (), {"total": 1.0})
    return FrameResult(frame, no_detections(), event, places=Places(zones=(ZONE,)))


def test_a_window_without_a_screen_says_what_else_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PipelineError, match="no screen for `tandem run --window`"):
        Window(threading.Event())


@pytest.mark.parametrize("display", [":4711", "127.0.0.1:4711.0"])
def test_a_screen_that_does_not_answer_is_an_error_and_no_crash(
    display: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", display)
    with pytest.raises(PipelineError, match=f"no screen answers at DISPLAY={display}"):
        Window(threading.Event())


def test_a_window_without_opencv_s_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-7")
    monkeypatch.setattr(window_module.cv2, "getBuildInformation", lambda: "  GUI:       NONE\n")
    with pytest.raises(PipelineError, match="`pip install opencv-python` on a desktop"):
        Window(threading.Event())


@pytest.mark.parametrize("how", ["a key", "the window's button"])
def test_a_window_shows_frames_and_ends_the_run(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[np.ndarray] = []
    stop = threading.Event()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-7")
    for name, double in {
        "getBuildInformation": lambda: "  GUI:  GTK3\n",
        "imshow": lambda title, image: shown.append(image),
        "waitKey": lambda ms: ord("q") if how == "a key" and len(shown) == 2 else -1,
        "getWindowProperty": lambda *_: 0.0 if how != "a key" and len(shown) == 2 else 1.0,
        "destroyAllWindows": lambda: None,
    }.items():
        monkeypatch.setattr(window_module.cv2, name, double)
    with Window(stop) as window:
        for _ in range(3):
            if not stop.is_set():
                window.on_result(result())
    assert stop.is_set()
    assert len(shown) == 2
    assert has_color(shown[0], EMPTY, (180, 90))


def test_the_command_names_both_options() -> None:
    text = CliRunner().invoke(tandem, ["run", "--help"]).output
    assert "--save" in text
    assert "--window" in text
