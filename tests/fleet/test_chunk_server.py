"""Chunk servers: several at once, floods, and bundles that are not there; real broker,
real servers and real agents."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from bundle_models import detector, write_model_bundle
from mqtt_fixtures import (
    DEVICE,
    PROFILE,
    WAIT_S,
    AgentBox,
    Mosquitto,
    Watcher,
    make_bundle,
)
from process_lines import next_line

from device.errors import BrokerError
from device.protocol.documents import (
    DOCUMENT_FORMAT,
    BlobGet,
    Desired,
    InstallPolicy,
    ReleaseSpec,
    Update,
    encode,
)
from device.protocol.mqtt import LinkEvent, LinkUp, Message
from device.protocol.tls import TlsFiles
from device.protocol.topics import Topics
from toolkit.fleet.authority import Authority
from toolkit.fleet.brokers.address import BrokerAddress
from toolkit.fleet.brokers.local import start_broker
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.library import Library
from toolkit.fleet.server.chunks import MAX_PENDING, READY, ChunkServer, reach, serve
from toolkit.fleet.server.request_gate import RequestGate, gated


@contextmanager
def chunk_server(folder: Path, port: int, *more: str) -> Iterator["subprocess.Popen[str]"]:
    """A chunk server in a process of its own, once it serves."""
    command = (sys.executable, "-m", "toolkit.fleet.server.chunks", "--folder", str(folder))
    process = subprocess.Popen(
        (*command, "--broker", f"127.0.0.1:{port}", *more), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert next_line(process).strip() == READY
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)
        process.stdout.close()


def release_of(bundle: Path, **more: object) -> ReleaseSpec:
    blob = Blob(bundle)
    blob.close()
    return ReleaseSpec(name="n", version="1", profile=PROFILE, blob=blob.spec, **more)  # type: ignore[arg-type]


def ask_for(watcher: Watcher, release: ReleaseSpec, request: str, **more: object) -> None:
    desired = Desired(format=DOCUMENT_FORMAT, request=request, release=release, **more)  # type: ignore[arg-type]
    topic = Topics(DEVICE).desired
    watcher.link.publish(topic, encode(desired), qos=1, retain=True, wait_s=WAIT_S)


def result(watcher: Watcher, request: str) -> Update:
    """Wait until the device is done with a request."""
    for _ in range(2000):
        watcher.drain()
        for report in watcher.seen.reports:
            ended = report.update.phase in ("live", "refused", "rolled_back")
            if report.update.request == request and ended:
                return report.update
        watcher.take(WAIT_S)
    raise AssertionError("no result")


@pytest.fixture
def board(board: AgentBox) -> AgentBox:
    board.start()
    return board


def model_bundle(path: Path, seed: int, moved: float = 0.0, version: str = "1") -> Path:
    """A model in FP16, its weights moved by a share of their deviation."""
    tensors = detector(np.random.default_rng(seed), blocks=6)
    noise = np.random.default_rng(seed + 1)
    weights = {
        name: (value + noise.normal(0.0, moved * value.std(), value.shape)).astype(np.float16)
        for name, value in tensors.items()
    }
    return write_model_bundle(path, weights, version=version, profile=PROFILE)


def test_servers_come_and_go_and_an_update_comes_as_differences(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    targets = tmp_path / "targets"
    first = model_bundle(targets / "1.bundle", 1)
    second = model_bundle(targets / "2.bundle", 1, moved=0.01, version="2")
    with Watcher(broker.port) as watcher:
        with chunk_server(targets, broker.port) as one:
            ask_for(watcher, release_of(first), "first")
            assert result(watcher, "first").phase == "live"
            with chunk_server(targets, broker.port):
                one.send_signal(signal.SIGKILL)
                one.wait(WAIT_S)
                before = len(watcher.seen.requests)
                ask_for(watcher, release_of(second), "second")
                assert result(watcher, "second").phase == "live"
        requests = watcher.drain().requests
    # Each download asks all, then one server by its name; the first one's was killed.
    assert len({request.peer for request in requests} - {""}) == 2
    assert any(request.bases for request in requests[before:])
    assert "a difference" not in board.log()


def test_a_bundle_that_nobody_has_ends_the_download_with_a_sentence(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    (tmp_path / "targets").mkdir()
    bundle = make_bundle(tmp_path / "in")
    with Watcher(broker.port) as watcher, chunk_server(tmp_path / "targets", broker.port):
        ask_for(watcher, release_of(bundle), "lost")
        update = result(watcher, "lost")
        count = len(watcher.drain().requests)
    assert update.phase == "refused"
    assert "does not have the bundle" in update.reason
    assert "publish it again" in update.reason
    assert count < 10


def test_a_broker_of_mqtt_3_has_several_servers_too(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "targets", engine_bytes=2 * 1024**2)
    targets = tmp_path / "targets"
    with start_broker() as embedded:
        box = AgentBox(tmp_path, embedded.port)
        box.start()
        try:
            with (
                Watcher(embedded.port) as watcher,
                chunk_server(targets, embedded.port),
                chunk_server(targets, embedded.port),
            ):
                ask_for(watcher, release_of(bundle), "one")
                assert result(watcher, "one").phase == "live"
                requests = watcher.drain().requests
        finally:
            box.close()
    peers = {request.peer for request in requests if request.chunks}
    assert len(peers - {""}) == 1


def test_the_limit_of_the_desired_document_holds(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    bundle = make_bundle(tmp_path / "targets", engine_bytes=200_000)
    with Watcher(broker.port) as watcher, chunk_server(tmp_path / "targets", broker.port):
        policy = InstallPolicy(max_bytes_per_s=200_000)
        ask_for(watcher, release_of(bundle), "slow", policy=policy)
        steps = []
        while not any(report.update.phase == "live" for report in watcher.seen.reports):
            assert watcher.take(WAIT_S)
            steps = [report.update.received_bytes for report in watcher.seen.reports]
    assert len(set(steps)) >= 3  # it came in steps


def test_a_release_comes_from_a_stick_that_the_desired_document_names(
    tmp_path: Path, broker: Mosquitto, board: AgentBox
) -> None:
    bundle = make_bundle(tmp_path / "stick")
    with Watcher(broker.port) as watcher:
        places = (str(tmp_path / "nothing"), bundle.parent.as_uri())
        ask_for(watcher, release_of(bundle, sources=places), "stick")
        assert result(watcher, "stick").phase == "live"
        assert watcher.drain().requests == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--fleet", "nowhere"), "nowhere/repository/targets is no folder: publish a bundle"),
        (("--folder", "."), "cannot reach the broker at 127.0.0.1:9"),
    ],
)
def test_a_server_that_cannot_serve_says_why(words: tuple[str, str], message: str) -> None:
    command = (sys.executable, "-m", "toolkit.fleet.server.chunks", "--broker", "127.0.0.1:9")
    ended = subprocess.run((*command, *words), capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("chunks: ")
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_address_with_tls_is_never_spoken_to_in_plain(tmp_path: Path, broker: Mosquitto) -> None:
    Authority.create(tmp_path / "id", "test")
    files = TlsFiles(tmp_path / "id" / "ca.crt")
    plain = BrokerAddress("127.0.0.1", broker.port, "me", "secret", files)
    blob, library = Blob(make_bundle(tmp_path / "targets")), Library(tmp_path / "targets")
    ended = threading.Event()
    with pytest.raises(BrokerError, match="cannot reach the broker"):
        serve(reach(plain), library, ended, on_up=ended.set)
    blob.close()
    library.close()


# -- without a network


class Sent:
    def __init__(self) -> None:
        self.rows: list[tuple[str, bytes]] = []

    def __call__(self, topic: str, payload: bytes) -> bool:
        self.rows.append((topic, payload))
        return True


def request_of(device: str, request: BlobGet) -> Message:
    return Message(Topics(device).blob_get, encode(request))


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    make_bundle(tmp_path / "targets", engine_bytes=1_000_000)
    library = Library(tmp_path / "targets")
    yield library
    library.close()


def sha256_of(library: Library, folder: Path) -> str:
    blob = Blob(sorted(folder.rglob("*.bundle"))[-1])
    blob.close()
    return blob.spec.sha256


def test_a_bundle_that_was_taken_away_costs_that_bundle_alone(
    tmp_path: Path, library: Library
) -> None:
    sha256 = sha256_of(library, tmp_path)
    (tmp_path / "targets" / "gone.bundle").symlink_to(tmp_path / "nothing")
    assert library.blob("0" * 64) is None
    assert library.blob(sha256) is not None


def test_devices_are_answered_in_turn(tmp_path: Path, library: Library) -> None:
    sha256, sent = sha256_of(library, tmp_path), Sent()
    server = ChunkServer(library, sent, "fleet")
    for device in ("a", "b"):
        server.on_message(request_of(device, BlobGet(sha256=sha256, chunks=(0, 1, 2, 0))))
    while server.pending:
        server.send_next()
    assert [topic.split("/")[2] for topic, _ in sent.rows] == ["a", "b"] * 3
    assert {topic.split("/")[-1] for topic, _ in sent.rows} == {"fleet"}


@pytest.mark.parametrize(
    "message",
    [
        Message("fleet/v1/a/blob/get", b"{"),
        Message("fleet/v1/a/blob/get", b""),
        Message("fleet/v1/a/desired", b"{}"),
        Message("other", b"{}"),
    ],
)
def test_what_is_no_request_is_dropped(library: Library, message: Message) -> None:
    sent = Sent()
    server = ChunkServer(library, sent)
    server.on_message(message)
    assert not server.pending
    assert sent.rows == []


def test_requests_for_others_and_for_chunks_that_do_not_exist_are_dropped(
    tmp_path: Path, library: Library
) -> None:
    sha256, sent = sha256_of(library, tmp_path), Sent()
    server = ChunkServer(library, sent)
    server.on_message(request_of("a", BlobGet(sha256=sha256, chunks=(1,), peer="another")))
    server.on_message(request_of("a", BlobGet(sha256=sha256, chunks=(30_000,))))
    assert not server.pending


def test_the_queue_of_a_server_is_bounded(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_PENDING < 10**6
    monkeypatch.setattr("toolkit.fleet.server.chunks.MAX_PENDING", 20)
    sha256, sent = sha256_of(library, tmp_path), Sent()
    server = ChunkServer(library, sent)
    for number in range(9):
        server.on_message(request_of(f"d{number}", BlobGet(sha256=sha256, chunks=(0, 1, 2, 3))))
    while server.pending:
        server.send_next()
    assert len(sent.rows) == 20


def test_who_floods_has_the_rate_of_one_device_and_no_more() -> None:
    gate = RequestGate(per_s=10.0, burst=20.0)
    assert [gate.admits("thief", 0.0) for _ in range(21)] == [True] * 20 + [False]
    assert gate.admits("board", 0.0)  # another one has its own
    assert [gate.admits("thief", 0.1) for _ in range(2)] == [True, False]
    assert sum(gate.admits("thief", 100.0) for _ in range(50)) == 20


def test_a_flood_is_dropped_before_it_is_queued_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken: list[LinkEvent] = []
    put = gated(taken.append, RequestGate(per_s=0.001, burst=5.0))
    for _ in range(1000):
        put(Message("fleet/v1/thief/blob/get", b"{}"))
    put(Message("fleet/v1/board/blob/get", b"{}"))
    put(LinkUp(1, "5"))
    assert len(taken) == 7
    assert [record.message for record in caplog.records] == [
        "thief sends more than 0.001 requests a second, which are dropped: if it does not end, "
        "shut it out with `tandem fleet identity revoke thief`"
    ]


def test_one_device_fills_neither_the_queue_nor_the_disk_s_time(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.fleet.server.chunks.MAX_PENDING_EACH", 3)
    looked: list[str] = []
    find = library._find
    monkeypatch.setattr(library, "_find", lambda sha256: looked.append(sha256) or find(sha256))
    sha256, sent = sha256_of(library, tmp_path), Sent()
    server = ChunkServer(library, sent)
    for number in range(200):  # bundles that nobody has: each one is looked for on the disk
        server.on_message(request_of("thief", BlobGet(sha256=f"{number:064x}", chunks=(0,))))
    assert len(looked) == len(sent.rows) < 20
    server.on_message(request_of("board", BlobGet(sha256=sha256, chunks=(0, 1, 2, 3, 4))))
    for base in range(200, 300):
        request = BlobGet(sha256=sha256, chunks=(0, 1, 2, 3, 4), bases=(f"{base:064x}",))
        server.on_message(request_of("thief", request))
    assert len(looked) < 25
    sent.rows.clear()
    while server.pending:
        server.send_next()
    assert [topic.split("/")[2] for topic, _ in sent.rows] == ["board", "thief"] * 3


def test_a_library_opens_a_bundle_by_name_or_by_hash(tmp_path: Path) -> None:
    named = make_bundle(tmp_path / "in", version="2")
    sha256 = sha256_of(Library(tmp_path), tmp_path / "in")
    folder = tmp_path / "targets" / "n" / "2"
    folder.mkdir(parents=True)
    named.rename(folder / f"{sha256}.orin.bundle")
    library = Library(tmp_path / "targets")
    blob = library.blob(sha256)
    assert blob is not None
    assert blob.spec.sha256 == sha256
    assert library.blob("0" * 64) is None
    late = make_bundle(tmp_path / "targets", version="3")
    by_hash = library.blob(sha256_of(library, late.parent))
    assert by_hash is not None
    assert by_hash.spec.bytes == late.stat().st_size
    library.close()


def test_a_file_with_a_false_name_is_not_served(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "targets")
    bundle.rename(bundle.with_name(f"{'1' * 64}.x.bundle"))
    library = Library(tmp_path / "targets")
    assert library.blob("1" * 64) is None
    library.close()
