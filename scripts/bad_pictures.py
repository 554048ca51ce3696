"""Feed damaged pictures and hostile HTTP answers to a live board, and see whether it minds.

    python -m scripts.bad_pictures                 every kind; a table
    python -m scripts.bad_pictures --only scans    the kinds with this in their name
    python -m scripts.bad_pictures --json

Broker, agent, pipeline and `tandem deploy` are real; the network camera is a server of this script.
For each kind the camera sends it for some seconds and then good pictures again. No kind may restart
the pipeline, end or roll back the release, or take memory; the report must say that the camera is
away, and why; good frames must come out again. At the end a release on trial meets a camera
that gives damaged pictures: it is postponed, and live once the camera gives good ones. Exit status
1: something did not hold.
"""

import argparse
import contextlib
import json
import os
import socket
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pipelines.vision import cv2
from scripts import chaos_parts as parts
from scripts.chaos import Watcher
from toolkit.fleet.brokers.local import free_port

BAD_S = 2.5
BACK_S = 15.0  # the camera is opened again every 5 s at the longest
LIVE_S = 90.0
GROWTH_BYTES = 300 << 20  # one picture of 64 megapixels, and what it is decoded from
PERIOD_S = 0.05

OK = b"HTTP/1.1 200 OK\r\n"
STREAM = OK + b"Content-Type: multipart/x-mixed-replace; boundary=b\r\n\r\n"
PICTURE = OK + b"Content-Type: image/jpeg\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
PACKED = b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\n"


def part(data: bytes, length: str = "") -> bytes:
    """Return a part of the stream; `length`: what it says instead of its own."""
    head = f"--b\r\nContent-Type: image/jpeg\r\nContent-Length: {length or len(data)}\r\n\r\n"
    return head.encode() + data + b"\r\n"


def encoded(suffix: str, height: int = 64, width: int = 64, *options: int) -> bytes:
    """Return a picture that OpenCV has encoded."""
    pixels = np.full((height, width, 3), 90, np.uint8)
    return bytes(cv2.imencode(suffix, pixels, options)[1].tobytes())


def jpeg_of(width: int, height: int) -> bytes:
    """Return a small JPEG whose header says this size."""
    data = bytearray(encoded(".jpg"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def png_of(width: int, height: int) -> bytes:
    """Return the header of a PNG."""
    ihdr = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n\0\0\0\r" + ihdr + struct.pack(">I", zlib.crc32(ihdr))


GOOD = encoded(".jpg")


@dataclass(frozen=True, slots=True)
class Kind:
    """What the camera does: an answer's beginning, then a piece every `period_s`.

    `good`: the pictures are ones that a pipeline takes. `closes`: the connection after the piece.
    """

    name: str
    piece: bytes
    hello: bytes = STREAM
    good: bool = False
    closes: bool = False
    period_s: float = PERIOD_S


def _picture(name: str, data: bytes) -> Kind:
    return Kind(name, part(data))


def _answer(name: str, hello: bytes, piece: bytes = b"", period_s: float = PERIOD_S) -> Kind:
    return Kind(name, piece, hello, closes=not piece, period_s=period_s)


KINDS = (
    _picture("JPEG that says 65500x65500", jpeg_of(65500, 65500)),
    _picture("JPEG that says 0x64", jpeg_of(64, 0)),
    _picture("JPEG that says 64x65000", jpeg_of(64, 65000)),
    _picture("JPEG cut in half", GOOD[: len(GOOD) // 2]),
    _picture("JPEG of 3 bytes", GOOD[:3]),
    _picture("JPEG without a frame", b"\xff\xd8\xff\xd9\0\0"),
    _picture("JPEG of markers without end", b"\xff\xd8" + b"\xff" * 100_000),
    _picture("JPEG of 5,000 scans", jpeg_of(4096, 4096) + b"\xff\xda" * 5000),
    _picture("JPEG with noise for data", GOOD[:-200] + os.urandom(180) + b"\xff\xd9"),
    _picture("PNG that says 2147483647 squared", png_of(2**31 - 1, 2**31 - 1)),
    _picture("PNG without data", png_of(64, 64)),
    _picture("PNG with a chunk of 4 GiB", png_of(64, 64) + b"\xff\xff\xff\xffIDAT" + bytes(600)),
    _picture("PNG with a wrong checksum", encoded(".png")[:-8] + bytes(8)),
    _picture("BMP of 900 megapixels", b"BM" + bytes(12) + struct.pack("<Iii", 40, 30000, -30000)),
    _picture("WebP that says 16777216 squared", b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + b"\xff" * 6),
    _picture("WebP cut in half", encoded(".webp")[:40]),
    _picture(
        "TIFF with a tile of 65536",
        b"II*\0"
        + struct.pack("<IH", 8, 4)
        + b"".join(
            struct.pack("<HHII", *row)
            for row in ((256, 4, 1, 64), (257, 4, 1, 64), (322, 4, 1, 65536), (323, 4, 1, 65536))
        ),
    ),
    _picture("PPM that says 99999 squared", b"P6 99999 99999 255\n"),
    _picture("PGM with 5,000 digits", b"P5 " + b"9" * 5000 + b" 5 255\n"),
    _picture("HDR that says 99999 squared", b"#?RADIANCE\n\n-Y 99999 +X 99999\n"),
    _picture("GIF", b"GIF89a\xff\xff\xff\xff\0\0\0;"),
    _picture("JPEG 2000", b"\xff\x4f\xff\x51" + bytes(60)),
    _picture("OpenEXR", b"\x76\x2f\x31\x01" + bytes(60)),
    _picture("1 x 300 pixels", encoded(".png", 1, 300)),
    _picture("text", b"<html>busy</html>"),
    _picture("nothing", b""),
    _picture("noise", os.urandom(5000)),
    _picture("40 MB of zeros", bytes(40_000_000)),
    Kind("another size every time", part(encoded(".jpg", 480, 640)) + part(GOOD), good=True),
    Kind("grey, 16 bits, alpha", part(encoded(".png", 1, 1)) + part(GOOD), good=True),
    Kind("a good one among damaged ones", part(jpeg_of(65500, 65500)) * 5 + part(GOOD), good=True),
    Kind("length of 5,000 digits", part(GOOD, "9" * 5000)),
    Kind("length of 9 GB", part(GOOD, "9000000000")),
    Kind("length that is negative", part(GOOD, "-5").replace(b"\xff\xd9", b"")),
    Kind("length that is too short", part(GOOD, "40")),
    Kind("a header without end", b"X-Y: z\r\n", period_s=0.001),
    Kind("a header that drips", b"x", period_s=0.3),
    Kind("a picture that drips", b"x", STREAM + part(b"", "90000"), period_s=0.3),
    Kind("a boundary that never comes", GOOD, STREAM.replace(b"=b", b"=c"), period_s=0.01),
    _answer("100 Continue for ever", CONTINUE, CONTINUE, 0.001),
    _answer("a status that drips", b"H", b"T", 0.3),
    _answer("no status", b"\0\xff\0\xff\r\n\r\n"),
    _answer("500", b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"),
    _answer("401 of an unknown kind", b"HTTP/1.1 401 No\r\nWWW-Authenticate: Odd\r\n\r\n"),
    _answer("redirects in a circle", b"HTTP/1.1 302 Go\r\nLocation: /stream\r\n\r\n"),
    _answer("a redirect to a file", b"HTTP/1.1 302 Go\r\nLocation: file:///etc/passwd\r\n\r\n"),
    _answer("text instead of a stream", OK + b"Content-Type: text/html\r\n\r\n<html>"),
    _answer("chunks of no size", PICTURE + CHUNKED + b"zz\r\n"),
    _answer("chunks of 16 EiB", PICTURE + CHUNKED + b"ffffffffffffffff\r\n", b"x"),
    _answer("a picture that is packed", PICTURE + PACKED + b"\x1f\x8b\x08"),
    _answer("headers of 90 KB", OK + b"X: " + b"y" * 90_000 + b"\r\n\r\n"),
    _answer("10,000 headers", OK + b"X: y\r\n" * 10_000 + b"\r\n"),
    _answer("nothing at all", b""),
)  # fmt: skip
NORMAL = Kind("good pictures", part(GOOD), good=True)
TRIAL = KINDS[0]
DECIDED = ("trial", "postponed", "rolled_back", "refused")  # before: live, of the first release


class Camera:
    """A network camera that does what `kind` says, to every client."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(0.1)
        self._ended = threading.Event()
        self.kind = NORMAL
        self.met: set[str] = set()  # kinds that a client was given a piece of
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    @property
    def uri(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._server.getsockname()[1]}/stream"

    def close(self) -> None:
        """Switch it off."""
        self._ended.set()
        self._thread.join()
        self._server.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(5.0)
            client.recv(4096)
            kind = self.kind
            client.sendall(kind.hello)
            if kind.closes:
                self.met.add(kind.name)
            while not self._ended.is_set() and not kind.closes:
                if self.kind.hello != kind.hello:
                    return  # the next connection meets the new kind
                kind = self.kind
                client.sendall(kind.piece)
                self.met.add(kind.name)
                self._ended.wait(kind.period_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one kind did: `problems` is empty if the board did not mind."""

    kind: str
    answer: str
    back_s: float
    growth_mb: float
    problems: tuple[str, ...]


class Board:
    """A live agent with its broker, a release, and a camera."""

    def __init__(self, folder: Path) -> None:
        self.camera = Camera()
        self._folder = folder
        self._mark = f"bad-pictures-{os.getpid()}"
        self._bundles = parts.make_releases(folder)
        self._port = free_port()
        self._broker = parts.broker_part(folder, self._port, self._mark)
        self._agent = parts.agent_part(folder, self._port, self.camera.uri, self._mark)

    def __enter__(self) -> "Board":
        """Start all, and bring the first release up."""
        self._broker.start()
        _wait(lambda: parts.listens(self._port), parts.START_S, "the broker listens")
        self._watcher = Watcher(self._port)
        self._agent.start()
        self._deploy("one")
        _wait(lambda: self._runs("one"), LIVE_S, "the first release runs")
        return self

    def __exit__(self, *error: object) -> None:
        """End all."""
        self._watcher.close()
        self._agent.end()
        self._broker.end()
        self.camera.close()

    def meet(self, kind: Kind) -> Outcome:
        """Let the camera do what a kind says for a time, then give good pictures again."""
        before = self._pipeline()
        problems: list[str] = []
        self.camera.kind = kind
        reason_told, most_bytes = "", before.resident_bytes
        _wait(lambda: kind.name in self.camera.met, BACK_S, f"the pipeline meets {kind.name}")
        end_s = time.monotonic() + BAD_S
        while time.monotonic() < end_s:
            time.sleep(0.05)
            status, reason = self._status()
            reason_told = reason if status == "degraded" else ""
            with contextlib.suppress(LookupError):
                most_bytes = max(most_bytes, self._pipeline().resident_bytes)
        if bool(reason_told) == kind.good:
            problems.append(f"the report said {self._status()} of it")
        self.camera.kind = NORMAL
        begin_s = time.monotonic()
        while self._status()[0] != "running" and time.monotonic() - begin_s < BACK_S:
            time.sleep(0.05)
        back_s = time.monotonic() - begin_s
        if self._status()[0] != "running":
            problems.append(f"after {BACK_S:g} s of good pictures it was {self._status()}")
        problems += self._changes(before, most_bytes)
        growth_mb = (most_bytes - before.resident_bytes) / 2**20
        return Outcome(
            kind.name, reason_told, round(back_s, 2), round(growth_mb, 1), tuple(problems)
        )

    def trial(self) -> Outcome:
        """Deploy a release while the camera gives damaged pictures alone."""
        self.camera.kind = TRIAL
        _wait(lambda: self._status()[0] == "degraded", BACK_S, "the camera is away")
        self._deploy("two")
        with contextlib.suppress(TimeoutError):  # the phase says it then
            _wait(lambda: self._phase() in DECIDED, LIVE_S, "the release is on trial")
        time.sleep(BAD_S)
        reason_told = self._status()[1]
        problems = [] if self._phase() in ("trial", "postponed") else [f"it is {self._phase()}"]
        self.camera.kind = NORMAL
        begin_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            _wait(lambda: self._runs("two"), LIVE_S, "the release is live")
        if not self._runs("two"):
            problems.append("it is not live after good pictures")
        back_s = round(time.monotonic() - begin_s, 2)
        return Outcome(f"on trial: {TRIAL.name}", reason_told, back_s, 0.0, tuple(problems))

    def _changes(self, before: parts.Process, most_bytes: int) -> Iterator[str]:
        try:
            now = self._pipeline()
        except LookupError:
            yield "no pipeline runs"
            return
        if now.pid != before.pid:
            yield "the pipeline was started again"
        if now.release != "one":
            yield f"it runs release {now.release}"
        if most_bytes - before.resident_bytes > GROWTH_BYTES:
            yield f"the pipeline grew by {(most_bytes - before.resident_bytes) >> 20} MiB"

    def _deploy(self, name: str) -> None:
        parts.deployer_part(self._folder, self._bundles[name], self._port, self._mark).start()

    def _pipeline(self) -> parts.Process:
        rows = [row for row in parts.processes(self._mark).values() if row.is_pipeline]
        if not rows:
            raise LookupError("no pipeline runs")
        return rows[0]

    def _status(self) -> tuple[str, str]:
        self._watcher.look()
        report = self._watcher.report
        return ("", "") if report is None else (report.pipeline.status, report.pipeline.reason)

    def _phase(self) -> str:
        self._watcher.look()
        report = self._watcher.report
        return "" if report is None else report.update.phase

    def _runs(self, name: str) -> bool:
        status = self._status()
        report = self._watcher.report
        running = None if report is None else report.running
        return running is not None and running.name == name and status[0] == "running"


def _wait(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{seconds:g} s were not enough until {what}")
        time.sleep(0.05)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kinds; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="kinds with this text in their name")
    parser.add_argument("--no-trial", action="store_true", help="leave the release on trial out")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if chosen.only in kind.name]
    with tempfile.TemporaryDirectory() as folder, Board(Path(folder)) as board:
        outcomes = [board.meet(kind) for kind in kinds]
        if not chosen.no_trial:
            outcomes.append(board.trial())
    failed = [outcome for outcome in outcomes if outcome.problems]
    if chosen.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    else:
        for one in outcomes:
            print(f"{one.kind:35} {one.back_s:6.2f} s {one.growth_mb:6.1f} MB  {one.answer[:90]}")
            for problem in one.problems:
                print(f"    {problem}")
        print(f"{len(outcomes)} kinds, {len(failed)} that the board minded")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
