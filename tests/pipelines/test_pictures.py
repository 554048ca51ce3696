"""Pictures are sized from their header before they are decoded; none ends a source."""

import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.errors import SourceError
from pipelines import pictures
from pipelines.config import SourceConfig
from pipelines.pictures import PictureError, PictureSize, decode_picture, picture_size, read_picture
from pipelines.sources.batching import frames_of
from pipelines.sources.files import read_image
from pipelines.sources.http import HttpCapture
from pipelines.sources.live import FrameError, Waiting
from pipelines.sources.table import open_source

SUFFIXES = (".jpg", ".png", ".bmp", ".webp", ".tiff", ".ppm", ".pgm", ".pbm", ".hdr")


def encoded(suffix: str, image: np.ndarray, options: tuple[int, ...] = ()) -> bytes:
    pixels = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY) if suffix in (".pgm", ".pbm") else image
    if suffix == ".hdr":
        pixels = pixels.astype(np.float32) / 255
    ok, data = cv2.imencode(suffix, pixels, options)
    assert ok
    return data.tobytes()


def bomb_jpeg(width: int = 65500, height: int = 65500) -> bytes:
    """A small JPEG whose frame header says another size."""
    data = bytearray(encoded(".jpg", np.zeros((8, 8, 3), np.uint8)))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_header_says_what_opencv_decodes(suffix: str, rng: np.random.Generator) -> None:
    for _ in range(10):
        height, width = rng.integers(1, 80, 2).tolist()
        image = rng.integers(0, 256, (height, width, 3), np.uint8)
        data = encoded(suffix, image)
        size = picture_size(data)
        assert (size.width, size.height) == (width, height)
        decoded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        np.testing.assert_array_equal(decode_picture(data), decoded)


def test_a_progressive_jpeg_says_its_scans(rng: np.random.Generator) -> None:
    image = rng.integers(0, 256, (40, 60, 3), np.uint8)
    data = encoded(".jpg", image, (cv2.IMWRITE_JPEG_PROGRESSIVE, 1))
    assert picture_size(data) == PictureSize(60, 40, 10)


def png_of(width: int, height: int, more: bytes = b"") -> bytes:
    ihdr = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + ihdr + struct.pack(">I", zlib.crc32(ihdr))
    return b"\x89PNG\r\n\x1a\n" + chunk + more + bytes(4) + b"IEND" + bytes(4)


def tiff_of(width: int, height: int, tile: int = 0, order: str = "<") -> bytes:
    tags = [(256, width), (257, height), *([(322, tile), (323, tile)] if tile else [])]
    rows = b"".join(struct.pack(order + "HHII", tag, 4, 1, value) for tag, value in tags)
    magic = b"II*\0" if order == "<" else b"MM\0*"
    return magic + struct.pack(order + "IH", 8, len(tags)) + rows


SIDE = 8192  # squared: the limit


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (bomb_jpeg(), "65500x65500 has more than"),
        (png_of(SIDE, SIDE + 1), "more than"),
        (png_of(2**31 - 1, 2**31 - 1), "more than"),
        (png_of(0, 7), "no pixels"),
        (png_of(257, 1), "one side more than 256 times the other"),
        (b"BM" + bytes(12) + struct.pack("<Iii", 40, SIDE, -SIDE - 1), "more than"),
        (tiff_of(SIDE, SIDE + 1), "more than"),
        (tiff_of(64, 64, tile=65536), "more than"),
        (tiff_of(SIDE, SIDE + 1, order=">"), "more than"),
        (b"P6\n# a comment\n99999 99999\n255\n", "more than"),
        (b"P5 " + b"9" * 5000 + b" 3 255\n", "do not say its size"),
        (b"P5 " + b"9" * 50 + b" 3 255\n", "is no size"),
        (b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 99999 +X 99999\n", "more than"),
        (b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + b"\xff\xff\xff\xff\xff\xff", "more than"),
        (bomb_jpeg(4096, 4096) + b"\xff\xda" * 100, "scans"),
        (b"GIF89a\xff\xff\xff\xff", "no picture of JPEG"),
        (b"", "0 bytes are no picture"),
        (b"\xff\xd8\xff\xe0\xff\xff", "ends within its header"),
        (b"\xff\xd8\xff\xd9\0\2", "no frame header"),
    ],
)
def test_pictures_beyond_a_limit_are_refused_unseen(data: bytes, why: str) -> None:
    with pytest.raises(PictureError, match=why):
        picture_size(data)


def tiff_rows(*rows: tuple[int, int, int], far: int = 0) -> bytes:
    """A TIFF with these tags (tag, type, value); `far`: 8 bytes at offset 300."""
    directory = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in rows)
    head = b"II*\0" + struct.pack("<IH", 8, len(rows)) + directory
    return head.ljust(300, b"\0") + struct.pack("<Q", far)


def animated_webp() -> bytes:
    return b"RIFF\0\0\0\0WEBPVP8X" + struct.pack("<II", 10, 2) + b"\x3f\0\0\x3f\0\0"


def animated_png() -> bytes:
    return png_of(64, 64, struct.pack(">I", 8) + b"acTL" + struct.pack(">III", 2, 0, 0))


HDR = b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param(b"P6 #\r12000 12000 255\n#\n64 64 255\n", "more than", id="comment to CR"),
        pytest.param(b"P6 64#144000000\n64 255\n", "do not say", id="comment within a word"),
        pytest.param(b"P6\n#".ljust(4080) + b"\n12000 1200012000 255\n", "not say", id="cut"),
        pytest.param(b"P6 " + b" " * 5000 + b"9 9 255\n", "not say", id="white space"),
        pytest.param(
            HDR + b"x" * 127 + b"\n-Y 12000 +X 12000\n\n-Y 64 +X 64\n", "a line of", id="long line"
        ),
        pytest.param(
            HDR + (b"#" * 63 + b"\n") * 1022 + b"#" * 75 + b"\n\n-Y 12000 +X 120000\n",
            "does not end",
            id="a size at 64 KiB",
        ),
        pytest.param(HDR + b"\n-Y 4096 +X 4097\n", "more than 16777216", id="float pixels"),
        pytest.param(
            tiff_rows((256, 4, 12000), (256, 4, 64), (257, 4, 12000), (257, 4, 64)),
            "two tags 256",
            id="a tag twice",
        ),
        pytest.param(
            tiff_rows((256, 4, 12000), (257, 16, 300), far=12000), "type of its tag", id="far tag"
        ),
        pytest.param(animated_webp(), "animated", id="animated WebP"),
        pytest.param(animated_png(), "animated", id="animated PNG"),
        pytest.param(
            png_of(9, 9, (bytes(4) + b"teSt" + bytes(4)) * 100_000), "chunks", id="chunks"
        ),
        pytest.param(png_of(9, 9, b"\xff\xff\xff\xffIDAT" + bytes(600)), "not whole", id="4 GiB"),
        pytest.param(png_of(9, 9)[:-12] + b"\xff\xff\xff\xffIEND", "not whole", id="a 4 GiB end"),
        pytest.param(png_of(9, 9)[:-12], "not whole", id="no end"),
    ],
)
def test_a_header_that_decoders_read_otherwise_is_refused(data: bytes, why: str) -> None:
    """Each of them had passed as a small picture, or cost four times the memory of its pixels."""
    with pytest.raises(PictureError, match=why):
        picture_size(data)


def test_opencv_itself_refuses_more_pixels() -> None:
    """What stands behind a header that is misread; in a process that begins with it."""
    program = f"""
import numpy as np
from pipelines.vision import cv2
try:
    cv2.imdecode(np.frombuffer(b"P6 {SIDE} {SIDE + 1} 255\\n", np.uint8), cv2.IMREAD_COLOR)
except cv2.error as error:
    print(error.err)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "CV_IO_MAX_IMAGE_PIXELS" in done.stdout, done.stderr


@pytest.mark.parametrize("data", [png_of(SIDE, SIDE), png_of(256, 1), tiff_of(SIDE, SIDE)])
def test_pictures_at_a_limit_are_taken(data: bytes) -> None:
    assert picture_size(data).scans == 1


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_pictures_are_pictures_or_refused(data: st.DataObject) -> None:
    suffix = data.draw(st.sampled_from(SUFFIXES))
    intact = encoded(suffix, np.arange(20 * 24 * 3, dtype=np.uint8).reshape(20, 24, 3))
    damaged = bytearray(intact[: data.draw(st.integers(0, len(intact)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, min(64, len(damaged) - 1)))] = data.draw(
                st.integers(0, 255)
            )
    try:
        size = picture_size(bytes(damaged))
    except PictureError:
        return
    assert 0 < size.width * size.height <= pictures.MAX_PIXELS


def test_files_that_are_no_pictures_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bomb.jpg").write_bytes(bomb_jpeg())
    assert read_image(tmp_path / "bomb.jpg") is None
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(pictures.MAX_FILE_BYTES + 1)
    with pytest.raises(PictureError, match="more than a picture may have"):
        read_picture(tmp_path / "sparse.png")
    with pytest.raises(PictureError, match="no file"):
        read_picture(tmp_path)


GOOD = encoded(".jpg", np.full((48, 64, 3), 90, np.uint8))
OK = b"HTTP/1.1 200 OK\r\n"
STREAM = OK + b"Content-Type: multipart/x-mixed-replace; boundary=b\r\n\r\n"


def part(data: bytes, length: str | None = None) -> bytes:
    message = f"Content-Length: {length or len(data)}\r\n\r\n".encode()
    return b"--b\r\nContent-Type: image/jpeg\r\n" + message + data + b"\r\n"


@contextmanager
def camera(*answers: tuple[bytes, float]) -> Iterator[str]:
    """A server that sends to every client pieces of bytes, each after so many seconds, and the last
    piece again and again."""
    stop = threading.Event()

    def serve(client: socket.socket) -> None:
        with client:
            try:
                client.recv(4096)
                for data, pause_s in answers:
                    stop.wait(pause_s)
                    client.sendall(data)
                while not stop.wait(answers[-1][1]):
                    client.sendall(answers[-1][0])
            except OSError:
                return

    def accept() -> None:
        while not stop.is_set():
            try:
                client, _ = server.accept()
            except TimeoutError:
                continue
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        thread = threading.Thread(target=accept)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/stream"
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([(STREAM, 0), (part(GOOD, "9" * 5000), 0.1)], id="length of 5,000 digits"),
        pytest.param([(STREAM, 0), (b"x", 0.05)], id="a dripping header of a part"),
        pytest.param([(STREAM, 0), (b"X: y\r\n", 0.01)], id="an endless header of a part"),
        pytest.param(
            [(STREAM + b"--b\r\nContent-Length: 90000\r\n\r\n", 0), (b"x", 0.05)],
            id="a dripping part",
        ),
        pytest.param(
            [(OK + b"Content-Type: image/jpeg\r\nContent-Length: 90000\r\n\r\n", 0), (b"x", 0.05)],
            id="a dripping picture",
        ),
        pytest.param(
            [
                (
                    OK + b"Content-Type: image/jpeg\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
                    0,
                ),
                (b"x", 0.05),
            ],
            id="a chunk of no size",
        ),
    ],
)
def test_no_answer_of_a_camera_holds_its_reader(answers: list[tuple[bytes, float]]) -> None:
    """A read ends at the deadline, however the bytes come."""
    with camera(*answers) as uri:
        capture = HttpCapture(uri, 0.5, lambda: False)
        begin_s = time.monotonic()
        with pytest.raises(SourceError) as raised:
            capture.read()
        assert not isinstance(raised.value, FrameError)
        assert time.monotonic() - begin_s < 5.0
        capture.close()


@pytest.mark.parametrize(
    ("answer", "pause_s"),
    [(b"HTTP/1.1 100 Continue\r\n\r\n", 0.005), (b"H", 0.05), (OK, 0.02)],
    ids=["endless 100 Continue", "a dripping status", "endless lines"],
)
def test_no_answer_of_a_camera_holds_its_opening(
    answer: bytes, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.sources.http.OPEN_S", 0.5)
    with camera((answer, pause_s)) as uri:
        begin_s = time.monotonic()
        with pytest.raises(SourceError):
            HttpCapture(uri, 0.5, lambda: False)
        assert time.monotonic() - begin_s < 5.0


REDIRECT = b"HTTP/1.1 302 Go\r\nLocation: "


@pytest.mark.parametrize(
    ("hello", "piece", "why"),
    [
        (OK + b"Content-Type: image/jpeg\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
         bytes(1 << 16), "piece of -1 bytes"),
        (REDIRECT + b"ftp://127.0.0.1:1/x\r\n\r\n", b"", "redirects to ftp"),
        (REDIRECT + b"http://127.0.0.1:1/x\r\n\r\n", bytes(1 << 16), "does not answer"),
        (b"HTTP/1.1 401 No\r\nWWW-Authenticate: Digest realm=\r\n\r\n", b"", "gives no pictures"),
    ],
    ids=["a chunk of -1 bytes", "a redirect to FTP", "an endless redirect", "an empty challenge"],
)  # fmt: skip
def test_no_answer_of_a_camera_is_read_without_a_limit(
    hello: bytes, piece: bytes, why: str
) -> None:
    """The whole deadline is not waited for: what would take memory so long is not read."""
    with camera((hello, 0), (piece, 0.001)) as uri:
        begin_s = time.monotonic()
        with pytest.raises(SourceError, match=why):
            HttpCapture(uri.replace("//", "//user:word@"), 6.0, lambda: False).read()
        assert time.monotonic() - begin_s < 5.0


@pytest.mark.parametrize(
    "answer",
    [b"\0\xff\x1b[31m\r\n\r\n", b"HTTP/1.1 500 " + b"n\x1bo " * 9000 + b"\r\n\r\n",
     REDIRECT + b"/stream\r\n\r\n", OK.replace(b"200", b"2\x85\x80") + b"\r\n"],
    ids=["no status", "a reason of pages", "redirects in a circle", "a status of marks"],
)  # fmt: skip
def test_what_a_camera_says_is_part_of_one_line(answer: bytes) -> None:
    """It goes to logs, reports and tables."""
    with camera((answer, 0)) as uri, pytest.raises(SourceError) as raised:
        HttpCapture(uri, 0.5, lambda: False)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500


def test_a_damaged_picture_costs_that_frame_alone() -> None:
    bad = [part(bomb_jpeg()), part(b"no picture"), part(GOOD[: len(GOOD) // 2])]
    stream = b"".join([part(GOOD), *bad])
    with camera((STREAM, 0), (stream, 0.02)) as uri:
        waiting = Waiting(threading.Event())
        with open_source(SourceConfig(uri=uri, frames="every"), waiting) as source:
            frames = frames_of(source, waiting)
            for _ in range(5):
                assert next(frames).image.shape == (48, 64, 3)
            assert source.dropped["damaged"] >= 8
            assert source.reopened == 0
            assert source.away is None


def test_a_camera_that_gives_damaged_pictures_alone_is_away_with_the_reason() -> None:
    with camera((STREAM, 0), (part(bomb_jpeg()), 0.02)) as uri:
        stop = threading.Event()
        waiting = Waiting(stop, patient=True)
        with open_source(SourceConfig(uri=uri), waiting) as source:
            deadline_s = time.monotonic() + 20.0
            while source.away is None and time.monotonic() < deadline_s:
                time.sleep(0.02)
            away = source.away
            assert away is not None
            assert "65500x65500" in away.reason
            assert "127.0.0.1" in away.reason
            assert source.poll() is None  # and no error
            stop.set()
