"""Releases from a folder and from HTTP(S): the same chunks, checks and resumption as over MQTT."""

import queue
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mqtt_fixtures import WAIT_S, make_bundle

from device.update.fetching import MQTT_SILENT_S, SOURCE_SILENT_S, Fetching, FetchOptions
from device.update.source_choice import AGAIN_S, SourceChoice
from device.update.sources import http
from device.update.sources.folder import FolderSource
from device.update.sources.http import HttpSource
from device.update.sources.reader import MQTT, SourceEnded, SourceEvent, is_source
from device.update.sources.source import SourceReadError, file_names
from toolkit.fleet.bundles.blob import Blob, write_index

TARGET = "robot/1/test-board.bundle"


@dataclass
class Site:
    """What a web server has, and how it misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)  # path and range
    ranges: bool = True
    status: int = 0  # of every answer, if it is not 0
    cut: int = 0  # this many answers break off in the middle
    garble: bool = False
    trickle: bool = False  # a byte now and then
    moved: bool = False  # everything is below /new, by addresses that hold once
    spent: set[str] = field(default_factory=set)
    url: str = ""


def handler_of(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            span = self.headers.get("Range", "")
            site.requests.append((self.path, span))
            if site.moved and not self.path.startswith("/new"):
                signed = f"/new{self.path}?Expires=1&Signature={len(site.requests)}"
                self._answer(302, b"", {"Location": signed})
                return
            path, _, signature = self.path.partition("?")
            is_spent = signature in site.spent
            site.spent |= {signature} - {""}
            body = None if is_spent else site.files.get(path.removeprefix("/new").lstrip("/"))
            if site.status or body is None:
                self._answer(site.status or 404, b"no")
            elif span and site.ranges:
                first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", span).groups())  # type: ignore[union-attr]
                part = body[first : last + 1]
                if site.garble:
                    part = bytes([part[0] ^ 1]) + part[1:]
                self._answer(206, part, cut=site.cut > 0)
                site.cut -= 1
            else:
                self._answer(200, body)

        def _answer(
            self, status: int, body: bytes, more: dict[str, str] | None = None, *, cut: bool = False
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in (more or {}).items():
                self.send_header(name, value)
            self.end_headers()
            for place in range(len(body) if site.trickle else 0):
                self.wfile.write(body[place : place + 1])
                time.sleep(0.05)
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = cut

    return Handler


@contextmanager
def web(site: Site, certificate: Path | None = None) -> Iterator[Site]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(site))
    server.daemon_threads = True
    server.handle_error = lambda *_of: None  # type: ignore[method-assign]  # clients come and go
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    scheme = "http" if certificate is None else "https"
    site.url = f"{scheme}://localhost:{server.server_port}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Device:
    """A download as the agent runs it, without its other parts."""

    def __init__(
        self,
        folder: Path,
        blob: Blob,
        *places: str,
        names: tuple[str, ...] = (),
        ca: Path | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.events: queue.Queue[SourceEvent] = queue.Queue()
        self.fetching = Fetching(folder, 16, self.events.put)
        names = names or file_names(blob.spec.sha256, TARGET)
        self.fetching.begin(blob.spec, FetchOptions({}, places=places, names=names, ca=ca))
        self.asked_over_mqtt = 0

    def run(self, until_bytes: int | None = None) -> str:
        """Until it is complete, has failed, or has so many bytes; return why it failed."""
        until_s = time.monotonic() + WAIT_S
        while not self.fetching.complete:
            assert time.monotonic() < until_s, self.fetching.complaint
            if until_bytes is not None and self.fetching.received_bytes >= until_bytes:
                return ""
            failure = self.fetching.advance(time.monotonic())
            if failure:
                return failure
            request = self.fetching.next_request(time.monotonic())
            self.asked_over_mqtt += request is not None
            try:
                event = self.events.get(timeout=0.02)
            except queue.Empty:
                continue
            self.fetching.on_source(event, time.monotonic())
        self.fetching.finish()
        return ""


@pytest.fixture
def blob(tmp_path: Path) -> Iterator[Blob]:
    blob = Blob(make_bundle(tmp_path / "in", engine_bytes=2_500_000))
    yield blob
    blob.close()


def path_of(blob: Blob) -> str:
    return file_names(blob.spec.sha256, TARGET)[0]


def site_of(blob: Blob, **more: object) -> Site:
    data = blob.file.read(0, blob.spec.bytes)
    path = path_of(blob)
    index = write_index(blob.path).read_bytes()
    return Site({path: data, f"{path}.index": index}, **more)  # type: ignore[arg-type]


def check_whole(device: Device, blob: Blob) -> None:
    assert device.fetching.finish().read_bytes() == blob.file.read(0, blob.spec.bytes)
    device.fetching.remove()


# -- folders


def test_names_are_those_of_a_repository_or_the_hash() -> None:
    assert file_names("ab", "n/1/orin.bundle") == ("n/1/ab.orin.bundle", "ab.bundle")
    assert file_names("ab", "") == ("ab.bundle",)
    assert file_names("ab", "../../etc/x") == ("ab.bundle",)


@pytest.mark.parametrize("name", ["robot/1/{sha}.test-board.bundle", "{sha}.bundle", "any.bundle"])
def test_a_release_comes_from_a_stick(tmp_path: Path, blob: Blob, name: str) -> None:
    stick = tmp_path / "stick"
    path = stick / name.replace("{sha}", blob.spec.sha256)
    path.parent.mkdir(parents=True)
    path.write_bytes(blob.file.read(0, blob.spec.bytes))
    (stick / "other.bundle").write_bytes(bytes(blob.spec.bytes))
    device = Device(tmp_path / "d", blob, stick.as_uri(), MQTT)
    assert device.run() == ""
    assert device.asked_over_mqtt == 0
    check_whole(device, blob)


def test_a_stick_without_the_release_ends_the_download_with_a_sentence(
    tmp_path: Path, blob: Blob
) -> None:
    (tmp_path / "stick").mkdir()
    (tmp_path / "stick" / "false.bundle").write_bytes(bytes(blob.spec.bytes))
    device = Device(tmp_path / "d", blob, str(tmp_path / "stick"))
    assert re.search(r"stick has no bundle .*: copy it there", device.run())
    device.fetching.remove()


def test_a_file_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path, blob: Blob) -> None:
    stick = tmp_path / "stick"
    stick.mkdir()
    (stick / "0.bundle").symlink_to(stick / "gone")
    (stick / f"{blob.spec.sha256}.bundle").write_bytes(blob.file.read(0, blob.spec.bytes))
    source = FolderSource(str(stick), ("1.bundle",))
    assert source.index(blob.spec) == blob.index
    source.close()


# -- HTTP


def test_a_release_comes_over_http_and_goes_on_where_it_was(tmp_path: Path, blob: Blob) -> None:
    with web(site_of(blob)) as site:
        device = Device(tmp_path / "d", blob, site.url)
        device.run(until_bytes=blob.spec.bytes // 2)
        received_bytes = device.fetching.received_bytes
        device.fetching.pause()
    with web(site_of(blob)) as site:
        again = Device(tmp_path / "d", blob, site.url)
        assert again.fetching.received_bytes == received_bytes
        assert again.run() == ""
        spans = [re.findall(r"\d+", span) for _path, span in site.requests if span]
        fetched = sum(int(last) + 1 - int(first) for first, last in spans)
        # Each of two connections looks for the file by its first byte.
        assert blob.spec.bytes - received_bytes <= fetched <= blob.spec.bytes - received_bytes + 2
        assert not any(path.endswith(".index") for path, _span in site.requests)
        check_whole(again, blob)


def test_neighbours_are_asked_for_at_once(tmp_path: Path, blob: Blob) -> None:
    with web(site_of(blob)) as site:
        device = Device(tmp_path / "d", blob, site.url)
        assert device.run() == ""
        assert len(site.requests) <= blob.table.count / 2
        check_whole(device, blob)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ({"status": 404}, "answers 404"),
        ({"status": 403}, "answers 403"),
        ({"ranges": False}, "does not answer requests for ranges"),
        ({"garble": True}, "do not match their hashes"),
    ],
)
def test_a_site_that_cannot_serve_is_left_for_the_next_source(
    tmp_path: Path, blob: Blob, kind: dict[str, object], sentence: str
) -> None:
    with web(site_of(blob, **kind)) as bad, web(site_of(blob)) as good:
        device = Device(tmp_path / "d", blob, bad.url, good.url)
        assert device.run() == ""
        assert sentence in device.fetching.complaint
        check_whole(device, blob)


def test_an_index_that_does_not_fit_is_left_for_the_next_source_at_once(
    tmp_path: Path, blob: Blob
) -> None:
    path = path_of(blob)
    with web(site_of(blob)) as portal, web(site_of(blob)) as good:
        portal.files[f"{path}.index"] = b"<html>Please sign in</html>"
        source = HttpSource(portal.url, (path,))
        with pytest.raises(SourceReadError, match="no index of the bundle"):
            source.index(blob.spec)
        source.close()
        device = Device(tmp_path / "d", blob, portal.url, good.url)
        assert device.run() == ""
        check_whole(device, blob)


def test_a_release_that_is_asked_for_again_is_looked_for_by_its_new_names(
    tmp_path: Path, blob: Blob
) -> None:
    with web(site_of(blob)) as site:
        device = Device(tmp_path / "d", blob, site.url, names=("nothing",))
        options = FetchOptions({}, places=(site.url,), names=(path_of(blob),))
        device.fetching.begin(blob.spec, options)
        assert device.run() == ""
        check_whole(device, blob)


def test_the_only_site_that_answers_404_ends_the_download(tmp_path: Path, blob: Blob) -> None:
    with web(Site()) as site:
        device = Device(tmp_path / "d", blob, site.url)
        assert "answers 404" in device.run()
        assert len(site.requests) <= 2
        device.fetching.remove()


def test_answers_that_break_off_cost_only_time(
    tmp_path: Path, blob: Blob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("device.update.source_choice.AGAIN_S", (0.01,))
    with web(site_of(blob, cut=3)) as site:
        device = Device(tmp_path / "d", blob, site.url)
        assert device.run() == ""
        assert site.cut <= 0
        check_whole(device, blob)


def test_a_site_may_sign_addresses_and_a_url_may_name_the_place_of_the_hash(
    tmp_path: Path, blob: Blob
) -> None:
    name = f"store/{blob.spec.sha256}"
    with web(site_of(blob, moved=True)) as site:
        site.files = {
            name: blob.file.read(0, blob.spec.bytes),
            f"{name}.index": blob.index,
        }
        device = Device(tmp_path / "d", blob, f"{site.url}/store/{{sha256}}")
        assert device.run() == ""
        check_whole(device, blob)


def test_https_checks_the_certificate(
    tmp_path: Path, blob: Blob, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = tmp_path / "c.pem"
    subprocess.run(
        (
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", str(tmp_path / "k")),
            *("-addext", "subjectAltName=DNS:localhost", "-out", str(tmp_path / "crt")),
        ),
        check=True,
        capture_output=True,
    )
    certificate.write_text((tmp_path / "k").read_text() + (tmp_path / "crt").read_text())
    with web(site_of(blob), certificate) as site:
        stranger = Device(tmp_path / "d", blob, site.url, "/nowhere")
        stranger.run(until_bytes=0)
        while not stranger.fetching.complaint:
            stranger.fetching.next_request(time.monotonic())
            stranger.fetching.on_source(stranger.events.get(timeout=WAIT_S), time.monotonic())
        assert "CERTIFICATE_VERIFY_FAILED" in stranger.fetching.complaint
        stranger.fetching.remove()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "crt"))
        device = Device(tmp_path / "e", blob, site.url)
        assert device.run() == ""
        check_whole(device, blob)
        monkeypatch.delenv("SSL_CERT_FILE")
        device = Device(tmp_path / "f", blob, site.url, ca=tmp_path / "crt")
        assert device.run() == ""
        check_whole(device, blob)
        for bad in ("k", "missing"):  # a file without a certificate, and none
            device = Device(tmp_path / f"g-{bad}", blob, site.url, "/nowhere", ca=tmp_path / bad)
            device.run(until_bytes=0)
            while not device.fetching.complaint:
                device.fetching.next_request(time.monotonic())
                device.fetching.on_source(device.events.get(timeout=WAIT_S), time.monotonic())
            assert f"update.ca {tmp_path / bad} is no CA" in device.fetching.complaint
            device.fetching.remove()


def test_a_site_that_trickles_is_left_for_the_next_source(
    tmp_path: Path, blob: Blob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "TRICKLE_S", 0.5)
    folder = tmp_path / "stick" / Path(path_of(blob)).parent
    folder.mkdir(parents=True)
    name = Path(path_of(blob)).name
    shutil.copy(blob.path, folder / name)
    (folder / f"{name}.index").write_bytes(blob.index)
    site = site_of(blob, trickle=True)
    with web(site):
        device = Device(tmp_path / "d", blob, site.url, str(tmp_path / "stick"))
        assert device.run() == ""
        assert site.requests
        assert "bytes a second for" in device.fetching.complaint
        assert "below the 512 that a source must give" in device.fetching.complaint
        check_whole(device, blob)


def test_a_source_that_gives_no_chunk_is_left_for_another(tmp_path: Path, blob: Blob) -> None:
    site = "http://127.0.0.1:9/x"
    for limit, silent_s in ((None, SOURCE_SILENT_S), (64, 4.0 * blob.spec.chunk_bytes / 64)):
        options = FetchOptions({}, places=(site, MQTT), bytes_per_s=limit)
        folder = tmp_path / f"d{limit}"
        folder.mkdir()
        fetching = Fetching(folder, 16)
        fetching.begin(blob.spec, options)
        assert fetching.advance(0.0) == ""
        fetching.advance(silent_s - 0.1)
        assert fetching.complaint == ""
        fetching.advance(silent_s)
        assert f"{site} gave no chunk for {silent_s:.0f} s" in fetching.complaint
        fetching.remove()


# -- which source


def test_the_first_source_that_gives_the_blob_is_used() -> None:
    choice = SourceChoice(("http://a", "mqtt", "/b", "mqtt"))
    assert (choice.place, choice.count) == ("http://a", 3)
    choice.on_ended("a is gone", 0.0, permanent=True)
    assert (choice.place, choice.waits(0.0)) == ("mqtt", False)
    choice.on_ended("silent", 0.0, permanent=False)
    assert (choice.place, choice.waits(0.0)) == ("/b", False)
    choice.on_ended("no stick", 1.0, permanent=False)  # the round begins anew, after a pause
    assert (choice.place, choice.wait_until_s) == ("mqtt", 1.0 + AGAIN_S[0])
    assert choice.waits(1.0)
    assert not choice.waits(1.0 + AGAIN_S[0])
    assert choice.problem == "a is gone; silent; no stick"
    choice.on_good()
    assert choice.problem == "a is gone; no stick"
    choice.on_ended("mqtt is gone", 3.0, permanent=True)
    choice.on_ended("b is gone", 3.0, permanent=True)
    assert (choice.place, choice.current, choice.count) == ("", -1, 0)


def test_pauses_grow_while_no_source_gives_anything() -> None:
    choice = SourceChoice(("http://a",))
    now_s, pauses = 0.0, []
    for _ in range(6):
        choice.on_ended("down", now_s, permanent=False)
        assert choice.wait_until_s is not None
        pauses.append(choice.wait_until_s - now_s)
        now_s = choice.wait_until_s
        assert not choice.waits(now_s)
    assert pauses == [*AGAIN_S, AGAIN_S[-1], AGAIN_S[-1]]


@pytest.mark.parametrize("place", ["ftp://x", "relative/path", "", "mqtts"])
def test_what_is_no_source_is_named(place: str) -> None:
    assert not is_source(place)
    choice = SourceChoice((place,))
    assert choice.current == -1
    assert choice.problem == f"{place!r} is no source that this agent reads"


def test_a_broker_that_is_silent_is_left_for_another_source(tmp_path: Path, blob: Blob) -> None:
    fetching = Fetching(tmp_path / "d", 16)
    (tmp_path / "d").mkdir()
    (tmp_path / "s").mkdir()
    fetching.begin(blob.spec, FetchOptions({}, places=(MQTT, str(tmp_path / "s"))))
    assert fetching.next_request(0.0) is not None
    assert fetching.advance(0.0) == ""
    wake_at_s = fetching.wake_at_s
    assert wake_at_s is not None
    assert wake_at_s <= MQTT_SILENT_S
    assert fetching.advance(MQTT_SILENT_S + 0.1) == ""
    assert "nobody answered over MQTT" in fetching.complaint
    assert fetching.next_request(MQTT_SILENT_S + 0.2) is None  # the folder is asked
    fetching.remove()


def begun(folder: Path, blob: Blob, *places: str) -> Fetching:
    folder.mkdir()
    fetching = Fetching(folder, 16)
    fetching.begin(blob.spec, FetchOptions({}, places=places))
    return fetching


def test_what_is_late_over_mqtt_ends_no_other_source(tmp_path: Path, blob: Blob) -> None:
    (tmp_path / "s").mkdir()
    fetching = begun(tmp_path / "d", blob, MQTT, str(tmp_path / "s"))
    assert fetching.next_request(0.0) is not None
    assert fetching.advance(0.0) == ""
    late_s = MQTT_SILENT_S + 0.1
    assert fetching.advance(late_s) == ""
    fetching.take(blob.spec.sha256, "none/fleet", b"it is not here", late_s + 0.1)
    assert fetching.advance(late_s + 5.0) == ""
    assert "it is not here" not in fetching.complaint
    fetching.remove()


def test_a_pause_between_sources_is_slept_through(tmp_path: Path, blob: Blob) -> None:
    fetching = begun(tmp_path / "d", blob, "http://127.0.0.1:9")
    ended = SourceEnded(blob.spec.sha256, "source-1", "it is down", permanent=False)
    fetching.on_source(ended, 10.0)
    assert fetching.next_request(10.1) is None
    assert fetching.wake_at_s == 10.0 + AGAIN_S[0]
    fetching.remove()


def test_an_agent_without_a_broker_sleeps_until_another_source_is_due(
    tmp_path: Path, blob: Blob
) -> None:
    fetching = begun(tmp_path / "d", blob, MQTT, "http://127.0.0.1:9")
    assert fetching.advance(0.0) == ""
    assert fetching.next_request(0.0, online=False) is None
    assert fetching.wake_offline_at_s == MQTT_SILENT_S
    fetching.remove()


def test_servers_are_asked_over_mqtt_again_however_long_the_other_source_is_down(
    tmp_path: Path, blob: Blob
) -> None:
    fetching = begun(tmp_path / "d", blob, MQTT, "/nowhere")
    asked_s = []
    for now_s in map(float, range(600)):
        assert fetching.advance(now_s) == ""
        if fetching.next_request(now_s) is not None:
            asked_s.append(now_s)
        for number in range(30):  # the one in use is among them
            peer = f"source-{number}"
            fetching.on_source(SourceEnded(blob.spec.sha256, peer, "down", permanent=False), now_s)
    assert asked_s[-1] > 600 - 2 * MQTT_SILENT_S - AGAIN_S[-1]
    fetching.remove()
