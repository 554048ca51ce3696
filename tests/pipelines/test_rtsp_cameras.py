"""Streams as network cameras of known makers send them, from a real RTSP server.

Codec, profile, B-frames, rate and key frame interval are those of their settings at delivery; paths
and session descriptions are those that Hikvision, Axis, Reolink and Dahua document.
"""

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from video_fixtures import require_program, rtsp_server

from device.errors import SourceError
from pipelines.config import SourceConfig
from pipelines.frame import Frame
from pipelines.sources import gst
from pipelines.sources.batching import read_frames
from pipelines.sources.cv_capture import open_rtsp_capture

FPS = 15
HIKVISION = "/Streaming/Channels/101"


def slow(*row: object) -> object:
    """A row of a maker whose settings are close to another's."""
    return pytest.param(*row, marks=pytest.mark.slow)


# Path with its query -> width, codec, profile, number of B-frames in a row.
CAMERAS = (
    (HIKVISION, 320, "h264", "High", 2),
    ("/Streaming/Channels/102", 160, "h264", "Constrained Baseline", 0),
    ("/axis-media/media.amp?videocodec=h264&fps=15", 320, "h264", "High", 0),
    slow("/h264Preview_01_main", 320, "h264", "High", 0),
    slow("/h264Preview_01_sub", 160, "h264", "Constrained Baseline", 0),
    slow("/h265Preview_01_main", 320, "hevc", "Main", 0),
    ("/cam/realmonitor?channel=1&subtype=0", 320, "hevc", "Main", 2),
)


def centres(images: list[np.ndarray]) -> np.ndarray:
    """Where the ball of the test picture is: [frames, 2], pixels."""
    return np.array([np.argwhere(image[:, :, 0] > 128).mean(axis=0) for image in images])


def moves_evenly(images: list[np.ndarray]) -> bool:
    """Whether frames come in order: of two that are swapped the ball jumps back, by pixels."""
    steps = np.diff(centres(images), axis=0)
    return bool(np.abs(steps).max() > 0.5 and np.abs(np.diff(steps, axis=0)).max() < 1.0)


def take(uri: str, count: int, **options: float) -> list[Frame]:
    with read_frames(SourceConfig(uri=uri, frames="every", **options)) as frames:  # type: ignore[arg-type]
        return [next(frames) for _ in range(count)]


def probe(uri: str) -> list[str]:
    """What FFmpeg says of the video of a stream: codec, profile, B-frames."""
    entries = "stream=codec_name,profile,has_b_frames"
    done = subprocess.run(
        [require_program("ffprobe"), "-v", "error", "-rtsp_transport", "tcp", "-select_streams",
         "v", "-show_entries", entries, "-of", "csv=p=0", uri],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout.strip().split(",")


@pytest.mark.parametrize(("path", "width", "codec", "profile", "b_frames"), CAMERAS)
def test_a_camera_as_it_is_delivered_gives_frames_in_order_with_its_own_times(
    path: str, width: int, codec: str, profile: str, b_frames: int
) -> None:
    with rtsp_server(path=path) as server:
        frames = take(server.url, 15)
        output = probe(server.url)
    assert output[:2] == [codec, profile]
    assert (int(output[2]) > 0) == (b_frames > 0)
    assert all(frame.image.shape == (width * 9 // 16, width, 3) for frame in frames)
    assert frames[0].fps == FPS
    assert moves_evenly([frame.image for frame in frames])
    gaps_ms = np.diff([frame.t_capture.mono_ns for frame in frames]) / 1e6
    assert (gaps_ms > 0).all()
    assert abs(np.median(gaps_ms) - 1000 / FPS) < 2


@pytest.mark.parametrize("method", ["basic", "digest"])
def test_credentials_with_reserved_characters_are_taken_and_wrong_ones_said(method: str) -> None:
    with rtsp_server(path=HIKVISION, login=("admin", "p@ss:w/1"), method=method) as server:
        right = server.url.replace("://", "://admin:p%40ss%3Aw%2F1@")
        (frame,) = take(right, 1)
        assert frame.source == server.url.replace("://", "://***@")
        with pytest.raises(SourceError, match="refused the credentials") as caught:
            take(right.replace("ss", "sz"), 1)
    assert "w%2F1" not in str(caught.value)


def test_a_substream_is_read_beside_the_main_one() -> None:
    with rtsp_server(path=HIKVISION) as server:
        uris = (server.url, server.url.replace("101", "102"))
        with (
            read_frames(SourceConfig(uri=uris[0])) as main,
            read_frames(SourceConfig(uri=uris[1])) as sub,
        ):
            widths = [next(frames).image.shape[1] for frames in (main, sub, main, sub)]
    assert widths == [320, 160, 320, 160]


def test_a_stream_that_is_joined_between_key_frames_starts_with_the_next_one() -> None:
    """The camera sends key frames each 2.1 s, and none when it is asked: no grey mud before."""
    with (
        rtsp_server(path="/axis-media/media.amp") as server,
        read_frames(SourceConfig(uri=server.url, frames="every")) as first,
    ):
        started = next(first).t_recv.mono_ns
        late = take(server.url, 5)
    waited_s = (late[0].t_recv.mono_ns - started) / 1e9
    assert 1.5 < waited_s < 6.0
    assert moves_evenly([frame.image for frame in late])
    assert late[0].image.min() < 30  # black and white, as a key frame is
    assert late[0].image.max() > 200


def test_key_frames_that_are_too_far_apart_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gst, "FIRST_FRAME_S", 0.8)
    with rtsp_server(path="/h264Preview_01_main") as server:
        says = r"before its next key frame, so set their interval in the camera below 0\.8 s, or"
        with read_frames(SourceConfig(uri=server.url)) as first:
            next(first)
            with pytest.raises(SourceError, match=says):
                take(server.url, 1, stall_s=0.5)


@pytest.mark.parametrize("path", [HIKVISION, "/h264Preview_01_main"])
def test_opencv_waits_for_a_key_frame_longer_than_for_others(path: str) -> None:
    """Where GStreamer is missing; one stream has B-frames, the other a key frame each 4 s."""
    with rtsp_server(path=path) as server:
        capture = open_rtsp_capture("camera", server.url, 1.5)
        try:
            images = [np.asarray(capture.read().pixels) for _ in range(12)]
        finally:
            capture.close()
    assert all(image.max() > 200 for image in images)
    assert moves_evenly(images)


# What a Hikvision camera says of a channel: absolute addresses of its tracks, bandwidths, sizes,
# a private header of its format, and a track of ONVIF's metadata.
SESSION = """v=0
o=- 1109162014219182 1109162014219192 IN IP4 127.0.0.1
s=Media Presentation
e=NONE
b=AS:5100
t=0 0
a=control:{base}/
m=video 0 RTP/AVP 96
c=IN IP4 0.0.0.0
b=AS:5000
a=recvonly
a=x-dimensions:320,180
a=control:{base}/trackID=1
{video}
m=audio 0 RTP/AVP 8
c=IN IP4 0.0.0.0
b=AS:50
a=recvonly
a=control:{base}/trackID=2
a=rtpmap:8 PCMA/8000
m=application 0 RTP/AVP 107
c=IN IP4 0.0.0.0
b=AS:50
a=recvonly
a=control:{base}/trackID=3
a=rtpmap:107 vnd.onvif.metadata/90000
a=fmtp:107 DecoderTag=h3c-v3 RTCP=0
a=Media_header:MEDIAINFO=494D4B48010200000400000111710110401F000000FA0000000000000000000000000000;
a=appversion:1.0
"""
TRACKS = {b"trackID=1": b"stream=0", b"trackID=2": b"stream=1", b"trackID=3": b"stream=2"}


def describe(answer: bytes, port: int) -> bytes:
    """Put the session description of a camera in the place of the server's."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = body.decode().splitlines()
    video = [line for line in lines if line.startswith(("a=rtpmap:96", "a=fmtp:96"))]
    base = f"rtsp://127.0.0.1:{port}{HIKVISION}"
    text = SESSION.format(base=base, video="\n".join(video)).replace("\n", "\r\n").encode()
    lines_left = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    lines_left.append(b"Content-Length: %d" % len(text))
    return b"\r\n".join(lines_left) + b"\r\n\r\n" + text


def forward(client: socket.socket, server: socket.socket, port: int) -> None:
    """Pass on what both send; the description is replaced, and names of tracks."""

    def requests() -> None:
        while data := client.recv(65536):
            for theirs, ours in TRACKS.items():
                data = data.replace(theirs, ours)
            server.sendall(data)

    threading.Thread(target=requests, daemon=True).start()
    described = False
    while data := server.recv(65536):
        if not described and b"application/sdp" in data:
            while b"\r\n\r\n" not in data or not data.partition(b"\r\n\r\n")[2]:
                data += server.recv(65536)
            data, described = describe(data, port), True
        client.sendall(data)


@contextmanager
def hikvision(port: int) -> Iterator[str]:
    """A camera before the RTSP server at `port`: yields the address of its first channel."""
    listener = socket.create_server(("127.0.0.1", 0))
    camera_port = listener.getsockname()[1]

    def serve() -> None:
        try:
            client, _ = listener.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as server:
                forward(client, server, camera_port)
        except OSError:
            return  # the test has ended

    threading.Thread(target=serve, daemon=True).start()
    with listener:
        yield f"rtsp://127.0.0.1:{camera_port}{HIKVISION}"


def test_a_session_description_with_private_attributes_and_metadata_is_read() -> None:
    with rtsp_server(path=HIKVISION) as server, hikvision(server.port) as uri:
        start = time.monotonic()
        frames = take(uri, 15)
        assert time.monotonic() - start < 10.0
    assert moves_evenly([frame.image for frame in frames])
