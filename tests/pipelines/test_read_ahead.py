"""A video over HTTP is read beside the loop: it may stall without stopping anything."""

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from video_fixtures import PATIENCE_S, ramp, ramp_index, wait_for, write_video

from device.errors import SourceError
from pipelines.config import SourceConfig
from pipelines.sources.batching import read_frames
from pipelines.sources.live import Waiting
from pipelines.sources.read_ahead import ReadAhead
from pipelines.sources.table import open_source


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, threading.Event]]:
    """Serve a video of 12 frames; while the event is clear, nothing more is sent."""
    data = write_video(tmp_path / "ramp.mp4", ramp(12)).read_bytes()
    goes_on = threading.Event()
    goes_on.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/ramp.mp4" else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.path == "/ramp.mp4":
                goes_on.wait(PATIENCE_S)
                self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}", goes_on
    goes_on.set()
    httpd.shutdown()
    httpd.server_close()


def test_frames_of_a_video_over_http_come_in_order_to_its_end(
    server: tuple[str, threading.Event],
) -> None:
    config = SourceConfig(uri=f"{server[0]}/ramp.mp4", realtime=False)
    with read_frames(config) as frames:
        assert [ramp_index(frame.image) for frame in frames] == list(range(12))


def test_an_address_without_a_video_fails_at_once(server: tuple[str, threading.Event]) -> None:
    config = SourceConfig(uri=f"{server[0]}/none.mp4")
    with pytest.raises(SourceError), read_frames(config) as frames:
        next(frames)


class Stalling:
    """A file whose third frame takes as long as a test wants."""

    name, dropped, ended, due_s = "http://camera/v.mp4", {}, False, 0.0

    def __init__(self, go: threading.Event) -> None:
        self.go = go
        self.count = 0

    def poll(self) -> object:
        self.count += 1
        if self.count == 3:
            self.go.wait(PATIENCE_S)
        if self.count == 5:
            raise SourceError("the connection broke off")
        return object()

    def __enter__(self) -> "Stalling":
        return self

    def __exit__(self, *_: object) -> None:
        self.count = -1


def test_a_stall_holds_nothing_up_and_is_called_away() -> None:
    go, waiting = threading.Event(), Waiting(threading.Event())
    file = Stalling(go)
    source = ReadAhead(file, SourceConfig(uri=file.name, stall_s=0.05, frames="every"), waiting)
    with source:
        wait_for(lambda: file.count == 3, PATIENCE_S, "the file stalls")
        assert [source.poll() is not None for _ in range(3)] == [True, True, False]
        wait_for(lambda: source.away is not None, PATIENCE_S, "the source is away")
        begin_s = time.monotonic()
        assert source.poll() is None
        assert time.monotonic() - begin_s < 5.0
        go.set()
        wait_for(lambda: source.due_s < 0, PATIENCE_S, "it goes on")
        assert source.away is None
        assert source.poll() is not None
        with pytest.raises(SourceError, match="broke off"):
            wait_for(lambda: source.poll() and False, PATIENCE_S, "it fails")
    assert file.count == -1


def test_a_fault_of_the_reader_ends_the_run_and_is_no_silence() -> None:
    file = Stalling(threading.Event())
    file.poll = lambda: 1 // 0  # type: ignore[method-assign]
    source = ReadAhead(file, SourceConfig(uri=file.name), Waiting(threading.Event()))
    with source, pytest.raises(ZeroDivisionError):
        wait_for(lambda: source.poll() and False, PATIENCE_S, "it fails")


def test_it_reads_no_further_ahead_than_its_bound() -> None:
    file = Stalling(threading.Event())
    file.count = 10  # it neither stalls nor fails
    config = SourceConfig(uri=file.name, frames="every")
    source = ReadAhead(file, config, Waiting(threading.Event()))
    with source:
        wait_for(lambda: file.count >= 14, PATIENCE_S, "it reads ahead")
        time.sleep(0.2)
        assert file.count <= 16


def test_only_videos_over_a_network_have_a_thread(
    server: tuple[str, threading.Event], tmp_path: Path
) -> None:
    waiting = Waiting(threading.Event())
    remote = SourceConfig(uri=f"{server[0]}/ramp.mp4")
    assert isinstance(open_source(remote, waiting), ReadAhead)
    local = SourceConfig(uri=str(tmp_path / "ramp.mp4"))
    assert not isinstance(open_source(local, waiting), ReadAhead)
