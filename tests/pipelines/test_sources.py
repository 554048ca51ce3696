"""Frames from real videos, pictures and a real RTSP server.

V4L2 devices cannot exist where the kernel has no media support, so of them only the addresses, the
commands and the errors are tested.
"""

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import cv2
import numpy as np
import pytest
from msgspec import UNSET
from video_fixtures import (
    PATIENCE_S,
    free_port,
    gray_frame,
    ramp,
    ramp_index,
    require_program,
    rtsp_server,
    scene,
    wait_for,
    write_video,
)

from device.errors import SourceError
from device.start.command import module_command
from pipelines.config import SourceConfig
from pipelines.frame import Stamp
from pipelines.sources import live as live_source
from pipelines.sources.batching import frames_of, read_frames
from pipelines.sources.clock import CaptureClock
from pipelines.sources.cv_capture import open_rtsp_capture
from pipelines.sources.gdp import Nv12Layout, parse_caps, parse_header
from pipelines.sources.gst import GstCapture, camera_pipeline, has_element, rtsp_pipeline
from pipelines.sources.live import LiveSource, RawFrame, Waiting
from pipelines.sources.table import open_source
from pipelines.sources.uri import Camera


@contextmanager
def opened(config, stop=None):
    """Open a source; give it and the iterator over its frames."""
    waiting = Waiting(stop or threading.Event())
    with open_source(config, waiting) as source:
        yield source, frames_of(source, waiting)


def read_all(uri, **options):
    with opened(SourceConfig(uri=str(uri), **options)) as (source, frames):
        return list(frames), source.dropped


# --- video files


def test_every_frame_of_a_video_comes_in_order(tmp_path):
    path = write_video(tmp_path / "ramp.mp4", ramp(12))
    frames, dropped = read_all(path, realtime=False)
    assert [ramp_index(f.image) for f in frames] == list(range(12))
    assert [f.seq for f in frames] == list(range(12))
    assert dropped == {}
    assert frames[0].image.shape == (64, 64, 3)
    assert frames[0].image.dtype == np.uint8


def test_colours_of_a_video_are_bgr(tmp_path):
    path = write_video(tmp_path / "red.mp4", [scene(3, 4)] * 3)
    (frame, *_), _ = read_all(path, realtime=False)
    blue, green, red = frame.image[33:39, 25:31].reshape(-1, 3).mean(axis=0)
    assert red > 150
    assert max(blue, green) < 90


def test_file_uri_is_a_path(tmp_path):
    path = write_video(tmp_path / "a.mp4", ramp(3))
    assert len(read_all(f"file://{path}", realtime=False)[0]) == 3


def test_realtime_keeps_the_pace_of_the_file(tmp_path):
    path = write_video(tmp_path / "ramp.mp4", ramp(11), fps=25.0)
    start = time.monotonic()
    frames, _ = read_all(path, frames="every")
    assert len(frames) == 11
    assert 0.39 < time.monotonic() - start < 1.5
    gaps = np.diff([f.t_recv.mono_ns for f in frames]) / 1e6
    assert 30.0 < np.median(gaps) < 50.0


def test_slow_consumer_of_a_realtime_file_gets_fewer_frames_at_the_same_pace(tmp_path):
    path = write_video(tmp_path / "ramp.mp4", ramp(20), fps=25.0)
    seen = []
    start = time.monotonic()
    with opened(SourceConfig(uri=str(path), frames="latest")) as (source, frames):
        for frame in frames:
            time.sleep(0.1)
            seen.append(frame.seq)
            assert ramp_index(frame.image) == frame.seq
    assert time.monotonic() - start < 1.9  # 0.8 s; 20 frames at the consumer's pace are 2.0 s
    assert len(seen) + source.dropped["late"] == 20
    assert len(seen) <= 12


def test_by_default_every_frame_of_a_realtime_file_reaches_a_slow_consumer(tmp_path):
    path = write_video(tmp_path / "ramp.mp4", ramp(8), fps=100.0)
    with opened(SourceConfig(uri=str(path))) as (_, frames):
        seen = []
        for frame in frames:
            time.sleep(0.02)
            seen.append(frame.seq)
    assert seen == list(range(8))


def test_a_video_at_an_address_that_gives_none_is_no_damaged_file():
    uri = f"http://u:s3cret@127.0.0.1:{free_port()}/seen.mp4"
    with pytest.raises(SourceError, match=r"//\*\*\*@127.* gives no video: check the address"):
        open_source(SourceConfig(uri=uri), Waiting(threading.Event()))


def test_loop_starts_again_and_goes_on_counting(tmp_path):
    path = write_video(tmp_path / "ramp.mp4", ramp(3))
    stop = threading.Event()
    config = SourceConfig(uri=str(path), loop=True, realtime=False)
    seen = []
    with opened(config, stop) as (_, frames):
        for frame in frames:
            seen.append((frame.seq, ramp_index(frame.image)))
            if len(seen) == 7:
                stop.set()
    assert seen == [(i, i % 3) for i in range(7)]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(SourceError, match=re.escape(f"no such file or folder: {tmp_path}/no.mp4")):
        read_all(f"{tmp_path}/no.mp4")


def test_file_that_is_no_video_is_named(tmp_path):
    path = tmp_path / "notes.mp4"
    path.write_text("not a video")
    with pytest.raises(SourceError, match=r"notes\.mp4 is not a video"):
        read_all(path)


@pytest.mark.parametrize("loop", [False, True])
def test_video_without_a_frame_says_so(tmp_path, loop):
    path = tmp_path / "cut.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 25.0, (64, 64))
    writer.write(gray_frame(1))
    writer.release()
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"movi") + 4])  # the headers, and no frame after them
    with pytest.raises(SourceError, match="holds no frame"):
        read_all(path, realtime=False, loop=loop)


def test_video_made_by_ffmpeg_is_read(tmp_path):
    path = tmp_path / "h264.mkv"
    graph = "testsrc2=size=160x90:rate=10:duration=1"
    ffmpeg = [require_program("ffmpeg"), "-v", "error", "-f", "lavfi", "-i", graph]
    subprocess.run([*ffmpeg, "-c:v", "libx264", str(path)], check=True)
    frames, _ = read_all(path, realtime=False)
    assert len(frames) == 10
    assert frames[0].image.shape == (90, 160, 3)


# --- pictures


def test_images_come_in_the_order_of_their_names(tmp_path):
    for name, column in (("b.png", 2), ("a.jpg", 1), ("c.bmp", 3)):
        cv2.imwrite(str(tmp_path / name), scene(column, 0))
    (tmp_path / "labels.txt").write_text("not a picture")
    frames, dropped = read_all(tmp_path)
    assert [os.path.basename(f.source) for f in frames] == ["a.jpg", "b.png", "c.bmp"]
    assert [int(f.image[4, :, 2].argmax()) // 8 for f in frames] == [1, 2, 3]
    assert dropped == {}


def test_one_image_is_a_source(tmp_path):
    cv2.imwrite(str(tmp_path / "one.png"), scene(1, 1))
    frames, _ = read_all(tmp_path / "one.png")
    np.testing.assert_array_equal(frames[0].image, scene(1, 1))


def test_corrupt_image_is_named_counted_and_skipped(tmp_path, caplog):
    cv2.imwrite(str(tmp_path / "a.png"), scene(1, 0))
    (tmp_path / "b.jpg").write_bytes(b"\xff\xd8\xff\xe0 not really")
    cv2.imwrite(str(tmp_path / "c.png"), scene(2, 0))
    with caplog.at_level(logging.WARNING):
        frames, dropped = read_all(tmp_path)
    assert [f.seq for f in frames] == [0, 2]
    assert dropped == {"corrupt": 1}
    assert "b.jpg is not an image that can be read" in caplog.text


def test_folder_of_corrupt_images_is_an_error(tmp_path):
    for name in ("a.jpg", "b.png"):
        (tmp_path / name).write_bytes(b"broken")
    with pytest.raises(SourceError, match="none of the 2 images"):
        read_all(tmp_path, loop=True)


def test_folder_without_images_is_an_error(tmp_path):
    with pytest.raises(SourceError, match="holds no images"):
        read_all(tmp_path)


# --- cameras that are not there


def test_camera_that_is_not_there_is_named():
    with pytest.raises(SourceError, match=r"camera /dev/video77 is not there \(cameras found: "):
        read_all("v4l2:///dev/video77")


def test_unknown_scheme_lists_the_known_ones():
    with pytest.raises(SourceError, match=r"unknown scheme 'httpx'.* http://, https://"):
        read_all("httpx://u:p@cam/x")


def test_camera_pipeline_asks_for_the_wanted_format():
    text = " ".join(camera_pipeline(Camera("/dev/video0", 1280, 720, 30)))
    assert 'device="/dev/video0"' in text
    assert "! video/x-raw,width=1280,height=720,framerate=30/1 ! videoconvert !" in text
    text = " ".join(camera_pipeline(Camera("/dev/video0", format="mjpg")))
    assert "! image/jpeg ! jpegdec ! videoconvert !" in text


def test_address_cannot_add_elements_to_the_command():
    command = rtsp_pipeline('rtsp://h/a" ! filesink location="/tmp/x', {"H264": "avdec_h264"})
    assert 'location="rtsp://h/a\\" ! filesink location=\\"/tmp/x"' in command


def test_board_decoder_is_followed_by_the_board_converter():
    text = " ".join(rtsp_pipeline("rtsp://h/a", {"H265": "nvv4l2decoder"}))
    assert "! nvv4l2decoder ! nvvidconv ! video/x-raw,format=NV12 !" in text


def test_camera_pipeline_is_what_gstreamer_understands():
    """Only the device is missing: the chain is parsed and linked, then the device is not found."""
    for camera in (Camera("/dev/video77", 64, 48, 10), Camera("/dev/video77", format="mjpg")):
        command = module_command("pipelines.sources.gst_process", str(os.getpid()))
        words = json.dumps(camera_pipeline(camera))
        result = subprocess.run(
            command, input=words, capture_output=True, text=True, check=False, timeout=60
        )
        assert result.returncode == 1
        assert "Cannot identify device '/dev/video77'" in result.stderr


# --- the GStreamer protocol


def test_padded_rows_of_nv12_are_counted():
    assert Nv12Layout(322, 181).size == 324 * 182 * 3 // 2
    assert Nv12Layout(640, 360).size == 640 * 360 * 3 // 2


@pytest.mark.parametrize(
    "payload",
    [b"", b"video/x-raw, width=(int)4", b"video/x-raw, width=(int)99999, height=(int)4, "],
)
def test_damaged_caps_are_refused(payload):
    with pytest.raises(SourceError, match="not NV12"):
        parse_caps(payload + b"format=(string)NV12")


@pytest.mark.parametrize(("rate", "fps"), [("30000/1001", 30000 / 1001), ("0/1", None)])
def test_caps_say_the_rate_if_the_camera_knows_it(rate, fps):
    caps = f"video/x-raw, width=(int)64, height=(int)48, framerate=(fraction){rate}"
    assert parse_caps(caps.encode() + b", format=(string)NV12") == Nv12Layout(64, 48, fps)


def test_a_file_says_its_rate(tmp_path):
    path = write_video(tmp_path / "ramp.mp4", ramp(3), fps=12.0)
    assert {frame.fps for frame in read_all(path, realtime=False)[0]} == {12.0}


def test_text_on_the_pipe_is_refused():
    with pytest.raises(SourceError, match="not a frame"):
        parse_header(b"Setting pipeline to PLAYING ...".ljust(62))


def test_capture_clock_removes_the_jitter_of_arrivals():
    rng = np.random.default_rng(3)
    clock = CaptureClock()
    period, base, delay = 33_000_000, 5_000_000_000, 2_000_000
    errors = []
    for i in range(300):
        true = base + i * period
        arrival = true + delay + int(rng.exponential(5e6))
        stamp = clock.stamp(i * period, Stamp(arrival, arrival + 10**18))
        assert stamp.wall_ns - stamp.mono_ns == 10**18
        errors.append(abs(stamp.mono_ns - true - delay))
    assert max(errors[50:]) < 1_000_000
    assert clock.stamp(None, Stamp(7, 8)) == Stamp(7, 8)


# --- RTSP, with a real server


def live(server, **options):
    return opened(SourceConfig(uri=server.url, **options))


def test_rtsp_frames_arrive_with_increasing_times():
    with rtsp_server() as server, live(server) as (_, stream):
        frames = [frame for frame, _ in zip(stream, range(20), strict=False)]
    assert frames[0].image.shape == (180, 320, 3)
    captured = [f.t_capture.mono_ns for f in frames]
    assert captured == sorted(captured)
    assert all(f.t_capture.mono_ns <= f.t_recv.mono_ns for f in frames)
    assert max(f.image.max() for f in frames) > 200  # the white ball of the test picture
    assert min(f.image.min() for f in frames) < 30


def test_rtsp_size_with_padded_rows_is_not_sheared():
    with rtsp_server(322, 180) as server, live(server) as (_, frames):
        image = next(frames).image
    assert image.shape == (180, 322, 3)
    bright = np.argwhere(image[:, :, 0] > 128)
    spread = bright.max(axis=0) - bright.min(axis=0)
    assert abs(int(spread[0]) - int(spread[1])) <= 4  # a ball is as wide as it is high


def test_slow_consumer_of_a_stream_sees_young_frames_and_a_count():
    ages = []
    with rtsp_server() as server, live(server) as (source, frames):
        for _, frame in zip(range(24), frames, strict=False):
            time.sleep(0.1)  # three frame periods
            ages.append((time.monotonic_ns() - frame.t_recv.mono_ns) / 1e6 - 100)
        dropped = source.dropped["busy"]
    assert dropped > 24
    assert np.median(ages[12:]) < 200  # the period of 33 ms and a busy machine; a backlog: 1000


def test_killed_camera_comes_back():
    with rtsp_server() as server, live(server) as (source, frames):
        for _ in range(5):
            last = next(frames)
        server.kill()
        time.sleep(0.6)
        server.start()
        back = time.monotonic()
        while (frame := next(frames)).t_recv.mono_ns < back * 1e9:
            last = frame
        took = time.monotonic() - back
        assert frame.seq > last.seq
        assert source.reopened == 1
    assert took < 10.0


def test_frozen_camera_is_detected_after_the_stall_time(caplog):
    with rtsp_server() as server, live(server, stall_s=1.0) as (_, frames):
        for _ in range(5):
            next(frames)
        with caplog.at_level(logging.WARNING):
            server.freeze()
            frozen = time.monotonic()
            wait_for(
                lambda: "gave no frame for 1.0 s" in caplog.text,
                PATIENCE_S,
                "the stall is reported",
            )
            took = time.monotonic() - frozen
        server.thaw()
        thawed = time.monotonic_ns()
        while next(frames).t_recv.mono_ns < thawed:
            pass
        back = (time.monotonic_ns() - thawed) / 1e9
    assert 0.8 < took < 3.0
    assert back < 10.0


def test_stop_ends_the_wait_for_a_camera_that_is_away():
    stop = threading.Event()
    with rtsp_server() as server:
        config = SourceConfig(uri=server.url, stall_s=0.5)
        with opened(config, stop) as (_, frames):
            next(frames)
            server.kill()
            threading.Timer(0.5, stop.set).start()
            start = time.monotonic()
            assert len(list(frames)) < 60
            assert time.monotonic() - start < 5.0


class FastCamera:
    """Gives frames faster than anybody takes them, until a read fails as told."""

    def __init__(self, fault=None, good=0):
        self.closed = 0
        self._fault, self._good = fault, good

    def read(self):
        self._good -= 1
        if self._good < 0 and self._fault is not None:
            raise self._fault
        time.sleep(0.002)
        now = Stamp.now()
        return RawFrame(gray_frame(1), "bgr", 64, 64, now, now)

    def close(self):
        self.closed += 1


def source_of(camera, policy="latest", stop=None):
    config = SourceConfig(uri="v4l2:///dev/video0", frames=policy)
    return LiveSource("camera", lambda _: camera, config, Waiting(stop or threading.Event()))


@pytest.mark.parametrize("policy", ["latest", "every", UNSET])
def test_stop_ends_a_stream_whose_consumer_is_too_slow(policy):
    stop = threading.Event()
    with source_of(FastCamera(), policy, stop) as source:
        frames = frames_of(source, Waiting(stop))
        next(frames)
        wait_for(lambda: source.dropped.get("busy", 0) > 0, PATIENCE_S, "the slot is full")
        stop.set()
        assert next(frames, None) is None


class OneFrame(FastCamera):
    """Gives one frame, and no other one until `over` is set."""

    def __init__(self):
        super().__init__()
        self.over = threading.Event()
        self.gave = False

    def read(self):
        if self.gave:
            assert self.over.wait(PATIENCE_S)
        self.gave = True
        return super().read()


def test_a_frame_wakes_all_that_wait_for_something():
    """A source that reads a file ahead waits there for room, and the loop for frames."""
    camera, waiting = OneFrame(), Waiting(threading.Event())
    waits, woken = threading.Semaphore(0), []

    def wait():
        with waiting.arrived:
            waits.release()
            woken.append(waiting.arrived.wait(PATIENCE_S))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert waits.acquire(timeout=PATIENCE_S)
    config = SourceConfig(uri="v4l2:///dev/video0")
    with LiveSource("camera", lambda _: camera, config, waiting):
        for thread in threads:
            thread.join()
        camera.over.set()
    assert woken == [True, True]


@pytest.mark.parametrize("fault", [SourceError("lost"), ValueError("a fault of our own")])
def test_camera_without_a_first_frame_is_let_go(fault):
    camera = FastCamera(fault)
    with pytest.raises(type(fault)), source_of(camera):
        pass
    assert camera.closed == 1


def test_a_reader_that_met_what_nobody_expected_opens_the_camera_again():
    camera = FastCamera(ValueError("a fault of our own"), good=3)
    with source_of(camera) as source:
        wait_for(lambda: camera.closed > 1, PATIENCE_S, "the camera was opened again")
        away = source.away
        assert away is not None
        assert "ValueError: a fault of our own" in away.reason


def test_stop_ends_the_wait_for_the_first_frame():
    stop = threading.Event()

    def open_silent(ended):
        return GstCapture("camera", ["appsrc", "!", "fdsink"], 30.0, ended)

    threading.Timer(0.1, stop.set).start()
    start = time.monotonic()
    waiting = Waiting(stop)
    with LiveSource("camera", open_silent, SourceConfig(uri="gst://"), waiting) as source:
        assert list(frames_of(source, waiting)) == []
    assert time.monotonic() - start < 10.0  # it would be 30 s


def test_camera_that_never_gave_a_frame_is_away_however_patient_its_limit_is(monkeypatch):
    monkeypatch.setattr(live_source, "FIRST_FRAME_S", 0.2)
    stop = threading.Event()

    def open_silent(ended):
        return GstCapture("camera", ["appsrc", "!", "fdsink"], 60.0, ended)

    waiting = Waiting(stop, patient=True)
    config = SourceConfig(uri="gst://", stall_s=60.0)
    with LiveSource("camera", open_silent, config, waiting) as source:
        until_s = time.monotonic() + 20.0
        while (away := source.away) is None and time.monotonic() < until_s:
            time.sleep(0.05)
        stop.set()
    assert away is not None
    assert away.reason == "camera has given no frame for 0.2 s"


def test_gstreamer_that_cannot_be_started_is_one_sentence(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(SourceError, match=r"camera: the GStreamer process cannot be started \(No"):
        GstCapture("camera", ["fakesrc", "!", "fakesink"], 1.0, lambda: False)


def test_element_that_is_missing_is_one_sentence():
    capture = GstCapture("camera", ["no-such-element", "!", "fakesink"], 1.0, lambda: False)
    with pytest.raises(SourceError, match="camera: a GStreamer plugin is missing"):
        capture.read()
    capture.close()


def test_closing_a_stream_leaves_no_process_behind():
    with rtsp_server() as server:
        with live(server) as (_, frames):
            next(frames)
            assert gst_children()
        wait_for(lambda: not gst_children(), PATIENCE_S, "the GStreamer process ends")


def gst_children():
    out = subprocess.run(
        ["ps", "-ww", "-o", "stat,args", "--ppid", str(os.getpid())],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = out.stdout.splitlines()
    return [line for line in lines if "gst_process" in line and not line.startswith("Z")]


def test_refused_connection_says_so_without_the_credentials():
    with rtsp_server() as server:
        pass
    url = server.url.replace("://", "://admin:s3cret@")
    with (
        pytest.raises(SourceError, match="nothing answers there") as caught,
        read_frames(SourceConfig(uri=url)),
    ):
        pass
    assert "s3cret" not in str(caught.value)
    assert f"rtsp://***@127.0.0.1:{server.port}/cam" in str(caught.value)


def test_h265_stream_is_read():
    with rtsp_server(path="/h265") as server, live(server) as (_, frames):
        assert next(frames).image.shape == (180, 320, 3)


def test_sound_beside_the_image_does_not_disturb():
    with rtsp_server(path="/sound") as server, live(server) as (source, stream):
        frames = [frame for frame, _ in zip(stream, range(10), strict=False)]
    assert frames[-1].seq == 9 + source.dropped.get("busy", 0)


def test_stream_without_an_image_says_so():
    with (
        rtsp_server(path="/only-sound") as server,
        pytest.raises(SourceError, match=r"carries no H\.264 or H\.265 video"),
        live(server),
    ):
        pass


def test_wrong_password_says_so_without_it():
    with rtsp_server(login=("admin", "s3cret")) as server:
        right = server.url.replace("://", "://admin:s3cret@")
        with read_frames(SourceConfig(uri=right)) as frames:
            assert next(frames).source == server.url.replace("://", "://***@")
        with (
            pytest.raises(SourceError, match="refused the credentials") as caught,
            read_frames(SourceConfig(uri=right.replace("s3cret", "s3crat"))),
        ):
            pass
    assert "s3crat" not in str(caught.value)


def test_wrong_path_of_a_stream_says_so():
    with (
        rtsp_server() as server,
        pytest.raises(SourceError, match="no such stream: check the path"),
        read_frames(SourceConfig(uri=server.url + "2")),
    ):
        pass


def test_every_policy_keeps_frames_in_order_up_to_its_bound():
    with rtsp_server() as server, live(server, frames="every") as (source, frames):
        first = next(frames)
        time.sleep(0.5)
        rest = [next(frames).seq for _ in range(8)]
        assert rest == list(range(first.seq + 1, first.seq + 9))
        assert source.dropped == {}


def test_opencv_reads_a_stream_where_gstreamer_is_missing():
    with rtsp_server() as server:
        waiting = Waiting(threading.Event())
        source = LiveSource(
            server.url,
            lambda _: open_rtsp_capture(server.url, server.url, 1.0),
            SourceConfig(uri=server.url),
            waiting,
        )
        with source:
            frames = [f for f, _ in zip(frames_of(source, waiting), range(5), strict=False)]
    assert frames[-1].image.shape == (180, 320, 3)
    assert [f.seq for f in frames] == sorted(f.seq for f in frames)
    assert "OPENCV_FFMPEG_CAPTURE_OPTIONS" not in os.environ  # they would spoil video files


def test_opencv_names_a_stream_that_it_cannot_open():
    with rtsp_server() as server:
        pass
    with pytest.raises(SourceError, match="cannot be opened: check address"):
        open_rtsp_capture("the camera", server.url, 1.0)


def test_gstreamer_is_found_only_where_its_tools_are():
    assert has_element("rtspsrc")
    assert not has_element("no-such-element")
    code = "from pipelines.sources.gst import has_element; raise SystemExit(has_element('rtspsrc'))"
    env = {**os.environ, "PATH": "/nonexistent"}
    result = subprocess.run([sys.executable, "-c", code], env=env, check=False)
    assert result.returncode == 0
