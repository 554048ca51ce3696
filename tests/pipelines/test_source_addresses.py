"""Sources beside files, USB cameras and RTSP: HTTP, test pictures, CSI, GStreamer, image folders.

A CSI camera needs a Jetson: its address, the pipeline's words and its errors are tested.
"""

import base64
import hashlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cv2
import numpy as np
import pytest
from mqtt_fixtures import free_port
from video_fixtures import (
    ramp,
    ramp_index,
    require_program,
    scene,
    write_video,
)

from device.errors import SourceError
from pipelines.config import SourceConfig
from pipelines.frame import Frame
from pipelines.sources.batching import frames_of, read_frames
from pipelines.sources.gst import csi_pipeline, own_pipeline
from pipelines.sources.live import Waiting
from pipelines.sources.pattern import draw_pattern
from pipelines.sources.table import open_source
from pipelines.sources.uri import parse_csi, parse_images, parse_test

LOGIN = "admin:s3/cr@t"


def jpeg(index: int) -> bytes:
    """The picture with that number of `ramp`."""
    ok, data = cv2.imencode(".jpg", ramp(index + 1)[index], [cv2.IMWRITE_JPEG_QUALITY, 95])
    assert ok
    return data.tobytes()


class Camera(BaseHTTPRequestHandler):
    """A network camera: a path for each way to send pictures."""

    def do_GET(self) -> None:
        ways: dict[str, Callable[[], None]] = {
            "/stream": lambda: self.stream(with_length=True),
            "/no-length": lambda: self.stream(with_length=False),
            "/freezes": lambda: self.stream(with_length=True, pause_s=30.0),
            "/picture": lambda: self.send("image/jpeg", jpeg(5)),
            "/broken": lambda: self.send("image/jpeg", b"no picture"),
            "/page": lambda: self.send("text/html", b"<html></html>"),
            "/huge": lambda: self.send(
                "multipart/x-mixed-replace; boundary=b",
                b"--b\r\nContent-Length: 99999999999\r\n\r\n",
            ),
            "/unknown-status": lambda: self.send_error(520, "odd"),  # not in http.HTTPStatus
            "/basic": self.basic,
            "/digest": self.digest,
        }
        if self.path not in ways:
            self.send_error(404)
            return
        ways[self.path]()

    def send(self, kind: str, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(data)

    def stream(self, *, with_length: bool, pause_s: float = 0.0) -> None:
        self.send("multipart/x-mixed-replace; boundary=--next", b"")
        try:
            for index in range(8):
                data = jpeg(index)
                head = f"Content-Length: {len(data)}\r\n" if with_length else ""
                part = f"--next\r\nContent-Type: image/jpeg\r\n{head}\r\n".encode() + data + b"\r\n"
                self.wfile.write(part)
                time.sleep(0.02)
                if index == 2 and pause_s:
                    self.server.stopped.wait(pause_s)  # type: ignore[attr-defined]
            self.wfile.write(b"--next--\r\n")
        except OSError:
            return  # the client has gone

    def basic(self) -> None:
        right = "Basic " + base64.b64encode(LOGIN.encode()).decode()
        if self.headers.get("Authorization") == right:
            self.stream(with_length=True)
        else:
            self.refuse('Basic realm="camera"')

    def digest(self) -> None:
        given = self.headers.get("Authorization", "")
        fields = dict(
            part.split("=", 1) for part in given.removeprefix("Digest ").split(", ") if part
        )
        user, password = LOGIN.split(":", 1)
        first = hashlib.md5(f"{user}:camera:{password}".encode()).hexdigest()
        second = hashlib.md5(b"GET:/digest").hexdigest()
        right = hashlib.md5(f"{first}:once:{second}".encode()).hexdigest()
        if fields.get("response", "").strip('"') == right:
            self.stream(with_length=True)
        else:
            self.refuse('Digest realm="camera", nonce="once"')

    def refuse(self, how: str) -> None:
        self.send_response(401)
        self.send_header("WWW-Authenticate", how)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing."""


class CameraServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Camera)
        self.stopped = threading.Event()


@pytest.fixture(scope="module")
def camera() -> Iterator[str]:
    """The address of a camera over HTTP."""
    with CameraServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.stopped.set()
        server.shutdown()
        thread.join()


def first(count: int, uri: str, **options: object) -> list[Frame]:
    with read_frames(SourceConfig(uri=uri, **options)) as frames:  # type: ignore[arg-type]
        return [frame for frame, _ in zip(frames, range(count), strict=False)]


@pytest.mark.parametrize("path", ["/stream", "/no-length"])
def test_pictures_of_an_mjpeg_stream_come_in_order(camera: str, path: str) -> None:
    frames = first(5, camera + path, frames="every")
    assert [ramp_index(frame.image) for frame in frames] == [0, 1, 2, 3, 4]
    assert [frame.seq for frame in frames] == [0, 1, 2, 3, 4]


def test_a_stream_that_ends_is_opened_again(camera: str) -> None:
    frames = first(10, camera + "/stream", frames="every")
    assert [ramp_index(frame.image) for frame in frames] == [*range(8), 0, 1]


def test_a_camera_of_single_pictures_is_asked_again_and_again(camera: str) -> None:
    frames = first(3, camera + "/picture", frames="every")
    assert [ramp_index(frame.image) for frame in frames] == [5, 5, 5]
    gap_s = (frames[2].t_recv.mono_ns - frames[0].t_recv.mono_ns) / 2e9
    assert gap_s > 0.15


@pytest.mark.parametrize("path", ["/basic", "/digest"])
def test_a_camera_asks_for_a_login_and_gets_it(camera: str, path: str) -> None:
    address = camera.replace("://", "://admin:s3%2Fcr%40t@") + path
    (frame, *_) = first(2, address)
    assert "s3" not in frame.source


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/basic", "refused the credentials: check the user and password"),
        ("/nothing", "has no such stream: check the path"),
        ("/unknown-status", "answers 520 odd"),
        ("/page", "sends 'text/html', neither MJPEG"),
        ("/broken", "30 damaged frames in a row, the last: 10 bytes are no picture of"),
        ("/huge", "announces a picture of 99999999999 bytes"),
    ],
)
def test_what_is_wrong_with_a_camera_is_one_sentence(camera: str, path: str, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        first(1, camera.replace("://", "://admin:wrong@") + path)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("http://127.0.0.1:1/x", "does not answer: check host and port"),
        ("http://no-such-host.invalid/x", "has a host that is not known"),
        ("http://", "names no host"),
        ("http://host:port/x", "is no address"),
    ],
)
def test_an_address_that_cannot_answer_is_one_sentence(uri: str, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        first(1, uri)


def test_a_frozen_camera_is_opened_again_after_the_stall_time(camera: str) -> None:
    frames = first(5, camera + "/freezes", frames="every", stall_s=0.5)
    assert [ramp_index(frame.image) for frame in frames] == [0, 1, 2, 0, 1]


def test_a_stream_of_ffmpeg_is_read() -> None:
    port = free_port()
    graph = "testsrc2=size=160x90:rate=20"
    words = [require_program("ffmpeg"), "-v", "error", "-re", "-f", "lavfi", "-i", graph]
    words += ["-c:v", "mjpeg", "-f", "mpjpeg", "-listen", "1"]
    words += ["-content_type", "multipart/x-mixed-replace;boundary=ffmpeg"]
    words += [f"http://127.0.0.1:{port}/"]
    with subprocess.Popen(words) as server:
        try:
            deadline_s = time.monotonic() + 30.0
            while True:
                try:
                    frames = first(5, f"http://127.0.0.1:{port}/", frames="every")
                    break
                except SourceError:  # it does not listen yet
                    assert time.monotonic() < deadline_s
                    time.sleep(0.1)
        finally:
            server.kill()
    assert frames[0].image.shape == (90, 160, 3)
    assert [frame.seq for frame in frames] == [0, 1, 2, 3, 4]


def test_a_video_at_an_address_is_read_to_its_end(tmp_path: Path) -> None:
    write_video(tmp_path / "ramp.mp4", ramp(6))
    with _served(tmp_path) as address:
        frames = first(99, f"{address}/ramp.mp4", realtime=False)
    assert [ramp_index(frame.image) for frame in frames] == list(range(6))


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    class Files(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = (folder / self.path.lstrip("/")).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


# --- test pictures


def test_test_pictures_keep_their_rate_and_differ() -> None:
    frames = first(21, "test://?width=160&height=120&fps=50", frames="every")
    assert frames[0].image.shape == (120, 160, 3)
    span_s = (frames[20].t_recv.mono_ns - frames[0].t_recv.mono_ns) / 1e9
    assert span_s > 0.2
    assert not np.array_equal(frames[0].image, frames[1].image)


def test_the_ball_of_a_test_picture_is_back_after_its_period() -> None:
    black = np.zeros((120, 160, 3), np.uint8)
    start, half, back = (draw_pattern(black, n)[:100] for n in (0, 45, 90))
    assert start.any()
    assert not np.array_equal(start, half)
    np.testing.assert_array_equal(start, back)


# --- addresses


def test_a_csi_camera_is_read_through_the_boards_image_processor() -> None:
    words = " ".join(csi_pipeline(parse_csi("csi://1?width=1920&height=1080&fps=60&flip=2")))
    assert words.startswith(
        "nvarguscamerasrc sensor-id=1 ! video/x-raw(memory:NVMM),format=NV12,width=1920,"
        "height=1080,framerate=60/1 ! nvvidconv flip-method=2 ! video/x-raw,format=NV12 ! gdppay"
    )
    with pytest.raises(SourceError, match=r"csi://0 needs GStreamer's nvarguscamerasrc"):
        first(1, "csi://0")


@pytest.mark.parametrize(
    ("parse", "uri", "says"),
    [
        (parse_csi, "csi://front", "names no sensor: write csi://0"),
        (parse_csi, "csi://0?flip=8", "use one of 0, 1, 2"),
        (parse_csi, "csi://0?size=4", "unknown option 'size'"),
        (parse_csi, "csi://0?fps=0", "from 1 to 16384"),
        (parse_test, "test://ball", "names 'ball'"),
        (parse_test, "test://?width=16385", "from 1 to 16384"),
        (parse_images, "images://x?fps=-1", "from 1 to 16384"),
    ],
)
def test_a_wrong_address_says_what_to_write(
    parse: Callable[[str], object], uri: str, says: str
) -> None:
    with pytest.raises(SourceError, match=says):
        parse(uri)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("", "address is empty"),
        ("rtsp://", "names no host: write rtsp://10.0.0.7/stream"),
        ("rtsp://u:s3cret@/x", r"//\*\*\*@/x' names no host"),
        ("rtsp://[::1/x", "is no address"),
        ("https:///x", "names no host"),
    ],
)
def test_an_address_that_cannot_be_right_is_refused_without_a_camera(uri: str, says: str) -> None:
    patient = Waiting(threading.Event(), patient=True)
    with pytest.raises(SourceError, match=says):
        open_source(SourceConfig(uri=uri), patient)


def test_a_pipeline_of_ones_own_is_a_source() -> None:
    uri = "gst://videotestsrc is-live=true pattern=blue ! video/x-raw,width=64,height=48"
    frames = first(3, uri, frames="every")
    assert frames[0].image.shape == (48, 64, 3)
    blue, green, red = frames[0].image.reshape(-1, 3).mean(axis=0)
    assert blue > 200
    assert max(green, red) < 30


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("gst://", "names no element"),
        ('gst://filesrc location="a', "close its quotes"),
    ],
)
def test_a_pipeline_that_cannot_be_read_is_refused(uri: str, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        own_pipeline(uri)


def test_images_come_at_the_rate_that_the_address_says(tmp_path: Path) -> None:
    for number in range(4):
        cv2.imwrite(str(tmp_path / f"{number}.png"), scene(number, 0))
    frames = first(9, f"images://{tmp_path}?fps=20")
    assert len(frames) == 4
    span_s = (frames[3].t_recv.mono_ns - frames[0].t_recv.mono_ns) / 1e9
    assert span_s >= 0.149


# --- bounded age


def test_bounded_frames_come_in_order_and_none_is_older_than_its_limit() -> None:
    config = SourceConfig(uri="test://?fps=100", frames="bounded", max_age_ms=150.0)
    waiting = Waiting(threading.Event())
    ages_ms, numbers = [], []
    with open_source(config, waiting) as source:
        for frame, _ in zip(frames_of(source, waiting), range(12), strict=False):
            ages_ms.append((time.monotonic_ns() - frame.t_capture.mono_ns) / 1e6)
            numbers.append(frame.seq)
            time.sleep(0.05)  # five frame periods
        dropped = dict(source.dropped)
    assert numbers == sorted(numbers)
    assert np.median(ages_ms) < 200.0  # the limit, and a busy machine
    assert dropped.get("stale", 0) + dropped.get("busy", 0) >= 20
