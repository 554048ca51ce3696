"""Annotated videos play in a real browser, by every encoder that is said to be for browsers."""

import logging
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import pytest
from browser_fixtures import Browser, open_browser

from pipelines.sinks import encoders, video
from pipelines.sinks.encoders import ENCODERS, Encoder, VideoFormat, choose_encoder
from pipelines.sinks.video import VideoFileWriter

FRAMES, FPS, WIDTH, HEIGHT = 12, 12.0, 160, 120
# Plays the video to its end; returns its size, its duration and where it stopped, or its error.
PLAY = """new Promise(done => {
    const video = document.createElement("video");
    video.muted = true;
    const frames = () => video.getVideoPlaybackQuality().totalVideoFrames;
    video.onended = () => done([video.videoWidth, video.videoHeight, video.duration,
                                video.currentTime, frames()]);
    video.onerror = () => done(video.error.message);
    video.src = %r;
    document.body.append(video);
    video.play().catch(error => done(String(error)));
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("browser")
    page = folder / "page.html"
    page.write_text("<!doctype html><body></body>")
    with open_browser(folder) as opened:
        opened.open(page)
        yield opened


def frame(number: int) -> np.ndarray:
    image = np.full((HEIGHT, WIDTH, 3), 40, np.uint8)
    cv2.circle(image, (10 + 12 * number, 60), 8, (0, 200, 250), -1)
    return image


def write(path: Path) -> Path:
    writer = VideoFileWriter(path, FPS)
    for number in range(FRAMES):
        writer.write(frame(number))
    writer.close()
    assert writer.failed == 0
    return writer.path


def play(browser: Browser, path: Path) -> list[float] | str:
    result: list[float] | str = browser.evaluate(PLAY % path.as_uri())
    return result


def plays(browser: Browser, path: Path) -> None:
    result = play(browser, path)
    assert isinstance(result, list), result
    width, height, duration_s, stopped_s, frames = result
    assert (width, height) == (WIDTH, HEIGHT)
    assert duration_s == pytest.approx(FRAMES / FPS, abs=0.1)
    assert stopped_s == pytest.approx(duration_s, abs=0.1)
    assert frames >= FRAMES // 2  # a busy machine may drop some


def test_an_encoder_closes_what_it_opened(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        write(tmp_path / "annotated.mp4")
    assert [str(one.message) for one in warned if one.category is ResourceWarning] == []


def test_an_annotated_video_plays(
    tmp_path: Path, browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        plays(browser, write(tmp_path / "annotated.mp4"))
    assert "H.264 (ffmpeg libx264)" in caplog.text


ROWS = [(row, suffix) for row in ENCODERS if row.in_browsers for suffix in row.suffixes]


@pytest.mark.parametrize(
    ("encoder", "suffix"), ROWS, ids=[f"{row.name} {suffix}" for row, suffix in ROWS]
)
def test_every_encoder_for_browsers_plays(
    tmp_path: Path,
    browser: Browser,
    monkeypatch: pytest.MonkeyPatch,
    encoder: Encoder,
    suffix: str,
) -> None:
    monkeypatch.setattr(encoders, "ENCODERS", (encoder,))
    chosen, refused = choose_encoder(suffix, VideoFormat(WIDTH, HEIGHT, FPS))
    if chosen is None:  # pip's OpenCV has no H.264; all else is installed with the tests
        assert encoder.name == "H.264 (OpenCV avc1)", refused
        return
    plays(browser, write(tmp_path / f'a "b\\ c{suffix}'))


def test_what_browsers_do_not_play_is_said(
    tmp_path: Path,
    browser: Browser,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = tuple(row for row in ENCODERS if not row.in_browsers)
    monkeypatch.setattr(encoders, "ENCODERS", rows)
    path = write(tmp_path / "out.mp4")
    assert "is MPEG-4 part 2 (OpenCV mp4v), and browsers do not play it" in caplog.text
    assert "install ffmpeg" in caplog.text
    assert isinstance(play(browser, path), str)  # it is true


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from pipelines.sinks.video import VideoFileWriter
writer = VideoFileWriter(Path(sys.argv[1]), 12.0)
for number in range(12):
    writer.write(np.full((120, 160, 3), 10 * number, np.uint8))
os.kill(os.getpid(), signal.SIGKILL)
"""


def encodes(path: Path) -> bool:
    """Whether a process runs that was told this path."""
    for commandline in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if bytes(path) in commandline.read_bytes():
                return True
    return False


def test_a_killed_pipeline_leaves_a_video_that_plays(tmp_path: Path, browser: Browser) -> None:
    path = tmp_path / "out.mp4"
    done = subprocess.run([sys.executable, "-c", KILLED, path], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    deadline_s = time.monotonic() + 30.0
    while encodes(path):  # the encoder finishes by itself
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    plays(browser, path)


def test_an_encoder_that_ends_costs_frames_and_no_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = ENCODERS[0]

    def open_broken(path: Path, fmt: VideoFormat) -> encoders.FrameWriter:
        return good.open(tmp_path / "no such folder" / "out.mp4", fmt)

    broken = Encoder("broken", (".mp4",), True, open_broken, good.why_not)
    monkeypatch.setattr(video, "choose_encoder", lambda suffix, fmt: (broken, ()))
    writer = VideoFileWriter(tmp_path / "out.mp4", FPS)
    for number in range(200):
        writer.write(frame(number % 12))
    writer.close()
    assert writer.failed > 0
    assert caplog.text.count("frames are dropped") == 1
    assert "No such file" in caplog.text


def test_the_first_encoder_that_works_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fmt = VideoFormat(WIDTH, HEIGHT, FPS)
    assert choose_encoder(".mp4", fmt)[0] is ENCODERS[0]
    assert choose_encoder(".webm", fmt)[0] is next(r for r in ENCODERS if ".webm" in r.suffixes)
    monkeypatch.setenv("PATH", str(tmp_path))  # neither ffmpeg nor GStreamer
    encoders._trial.cache_clear()
    chosen, refused = choose_encoder(".mp4", fmt)
    encoders._trial.cache_clear()
    assert chosen is not None
    assert chosen.name == "VP9 (OpenCV vp09)"
    assert refused[0] == "H.264 (ffmpeg libx264): ffmpeg is not installed"
