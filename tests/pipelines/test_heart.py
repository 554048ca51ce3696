"""What a pipeline says of its times in its heartbeats: a slow source or loop is no freeze."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import pytest
from msgspec import UNSET
from msgspec.structs import replace
from video_fixtures import LABELS, ColourDetector, colour_pipeline, scene, wait_for, write_video

from device.protocol.messages import ChildMessage, Heartbeat
from pipelines.config import SourceConfig
from pipelines.frame import Stamp
from pipelines.runtime.batch import Model
from pipelines.runtime.heartbeat import ENDING_S, SLACK_S, HeartbeatSender
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.sources.live import BAD_S, FIRST_FRAME_S, LiveSource, RawFrame, Waiting
from pipelines.sources.table import open_source

PATIENCE_S = 60.0


class Given:
    """A source that says these times."""

    def __init__(self, gap_s: float, *, max_hz: float = 0.0, ended: bool = False) -> None:
        self.config = SourceConfig(uri="test://", max_hz=max_hz or UNSET)
        self.gap_s, self.ended, self.away = gap_s, ended, None
        self.dropped: dict[str, int] = {}


def last_beat(*sources: Given, filters: tuple[Given, ...] = ()) -> Heartbeat:
    messages: list[ChildMessage] = []
    heart = HeartbeatSender(messages.append)
    heart.watch(sources, [], filters)  # type: ignore[arg-type]
    beat = messages[-1]
    assert isinstance(beat, Heartbeat)
    return beat


@pytest.mark.parametrize(
    ("sources", "gap_s"),
    [
        ([Given(0.0)], SLACK_S),
        ([Given(5.0)], 5.0 + SLACK_S),
        ([Given(1.0, max_hz=0.01)], 101.0 + SLACK_S),  # a time lapse
        ([Given(9.0), Given(5.0, max_hz=0.5)], 7.0 + SLACK_S),  # one of them gives some
        ([Given(0.1, ended=True), Given(5.0)], 5.0 + SLACK_S),
        ([Given(0.1, ended=True)], SLACK_S),
        ([Given(1e9)], 86400.0),
    ],
)
def test_the_gap_is_that_of_the_quickest_source(sources: list[Given], gap_s: float) -> None:
    assert last_beat(*sources).gap_s == gap_s


def test_frames_that_are_left_out_are_taken_and_those_of_threads_are_not() -> None:
    source, second = Given(0.0), Given(0.0)
    source.dropped = {"busy": 100, "damaged": 10, "stale": 3, "late": 2, "corrupt": 1}
    second.dropped = {"paused": 20, "rate": 30}
    beat = last_beat(source, filters=(second,))
    assert (beat.taken, beat.errors, beat.frames) == (56, 1, 0)


def test_a_loop_with_slow_frames_says_that_it_may_be_silent() -> None:
    messages: list[ChildMessage] = []
    heart = HeartbeatSender(messages.append)
    heart.watch([Given(0.0)], [])  # type: ignore[list-item]
    for wait_s in (0.2, 0.2, 0.0, 0.9, 0.2):
        time.sleep(wait_s)
        heart.frame_done(None)
    heart.end()
    beats = [message for message in messages if isinstance(message, Heartbeat)]
    assert beats[0].quiet_s == 0.0
    assert 0.6 <= beats[-2].quiet_s < 2.7  # three times the usual silence, not the longest
    assert beats[-1].quiet_s == ENDING_S


# A source, the least and the most that its gap may be.
SOURCES: list[tuple[Callable[[Path], SourceConfig], float, float]] = [
    (lambda path: SourceConfig(uri=f"images://{path}?fps=1"), 1.0, 1.0),
    (lambda path: SourceConfig(uri=str(path)), 0.0, 0.0),
    (lambda path: SourceConfig(uri=str(path / "v.avi")), 4.0, 4.0),
    (lambda path: SourceConfig(uri=str(path / "v.avi"), realtime=False), 0.0, 0.0),
    (lambda path: SourceConfig(uri="test://?fps=20", stall_s=12.0), FIRST_FRAME_S, FIRST_FRAME_S),
]


@pytest.mark.parametrize(("config", "least_s", "most_s"), SOURCES)
def test_sources_say_how_far_apart_their_frames_are(
    tmp_path: Path, config: Callable[[Path], SourceConfig], least_s: float, most_s: float
) -> None:
    cv2.imwrite(str(tmp_path / "0.png"), scene(0, 0))
    write_video(tmp_path / "v.avi", [scene(1, 1)] * 2, fps=0.25, fourcc="MJPG")
    waiting = Waiting(threading.Event(), patient=True)
    assert least_s <= open_source(config(tmp_path), waiting).gap_s <= most_s


class Paced:
    """A camera with frames at given intervals, each as old as given when it is read."""

    def __init__(self, interval_s: float, age_s: float = 0.0) -> None:
        self._interval_s, self._age_s = interval_s, age_s

    def read(self) -> RawFrame:
        time.sleep(self._interval_s)
        now = Stamp.now()
        return RawFrame(scene(0, 0), "bgr", 64, 64, now.earlier(int(self._age_s * 1e9)), now)

    def close(self) -> None:
        """Nothing is open."""


def test_a_camera_slower_than_its_limit_is_not_called_away() -> None:
    config = SourceConfig(uri="test://", stall_s=0.2)
    with LiveSource("slow", lambda _: Paced(0.3), config, Waiting(threading.Event())) as source:
        wait_for(lambda: source._seq > 3, PATIENCE_S, "its pace is known")
        assert source.gap_s > 0.5
        away = 0
        for _ in range(30):
            time.sleep(0.02)
            away += source.away is not None
        assert away <= 3  # a machine under load


def test_a_camera_whose_frames_are_all_too_old_is_away_by_name() -> None:
    config = SourceConfig(uri="test://", frames="bounded", max_age_ms=50.0)
    with LiveSource("late", lambda _: Paced(0.02, 0.2), config, Waiting(threading.Event())) as one:
        begin_s = time.monotonic()
        while one.away is None:
            assert one.poll() is None
            assert time.monotonic() - begin_s < PATIENCE_S
            time.sleep(0.01)
        assert time.monotonic() - begin_s > BAD_S
        assert "late gives no frame younger than max_age_ms, 50" in one.away.reason


def test_a_time_lapse_says_so_and_is_taken(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "0.png"), scene(0, 0))
    messages: list[ChildMessage] = []
    stop = threading.Event()
    config = colour_pipeline(tmp_path, loop=True)
    source = SourceConfig(uri=f"images://{tmp_path}?fps=50", loop=True, max_hz=0.001)
    thread = threading.Thread(
        target=run_pipeline,
        args=(
            replace(config, source=source),
            Model(ColourDetector(), LABELS, ""),
            RunOptions(emit=messages.append, stop=stop),
        ),
    )
    thread.start()

    def taken() -> list[int]:
        return [one.taken for one in list(messages) if isinstance(one, Heartbeat)]

    try:
        wait_for(lambda: len(set(taken())) >= 3, PATIENCE_S, "frames are left out")
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    beats = [one for one in messages if isinstance(one, Heartbeat)]
    assert beats[-1].frames <= 2  # the limit lets a first pair pass
    assert beats[-1].gap_s == pytest.approx(1000.02 + SLACK_S)
    assert (beats[-1].quiet_s, beats[-1].state) == (ENDING_S, "running")
