"""Downloads over networks that lose, repeat, reorder and garble, in virtual time."""

import errno
import hashlib
import itertools
import os
import random
import statistics
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device.errors import TransferError
from device.protocol.documents import BlobGet, BlobSpec
from device.update.chunk_table import ChunkTable, decode_index
from device.update.fetching import Fetching, FetchOptions
from device.update.part_file import Fetch, PartFile
from device.update.peers import MAX_CORRUPT_IN_A_ROW
from device.update.transfer import STALL_MAX_S, STALL_S, Download
from device.update.window import WINDOW_MAX, WINDOW_START, RateLimit, Window

CHUNK = 4096


def blob_of(chunks: int, tail: int = 100) -> bytes:
    return random.Random(chunks).randbytes((chunks - 1) * CHUNK + tail)


def index_of(blob: bytes) -> bytes:
    starts = range(0, len(blob), CHUNK)
    return b"".join(hashlib.sha256(blob[s : s + CHUNK]).digest() for s in starts)


def spec_of(blob: bytes) -> BlobSpec:
    return BlobSpec(
        sha256=hashlib.sha256(blob).hexdigest(),
        bytes=len(blob),
        chunk_bytes=CHUNK,
        index_sha256=hashlib.sha256(index_of(blob)).hexdigest(),
    )


def table_of(blob: bytes) -> ChunkTable:
    return decode_index(index_of(blob), spec_of(blob))


@dataclass
class Network:
    """A server behind a bad line, in virtual time: chances are drawn for each part it sends."""

    blob: bytes
    chance: random.Random
    loss: float = 0.0
    repeat: float = 0.0
    garble: float = 0.0
    reorder: float = 0.0
    line: deque[tuple[int | str, bytes]] = field(default_factory=deque)

    def serve(self, request: BlobGet) -> None:
        if request.index:
            self._send("index", index_of(self.blob))
        for number in request.chunks:
            self._send(number, self.blob[number * CHUNK : (number + 1) * CHUNK])

    def _send(self, part: int | str, payload: bytes) -> None:
        draw = self.chance.random
        if draw() < self.loss:
            return
        if draw() < self.garble:
            position = self.chance.randrange(len(payload))
            payload = payload[:position] + bytes([payload[position] ^ 1]) + payload[position + 1 :]
        for _ in range(2 if draw() < self.repeat else 1):
            position = self.chance.randrange(len(self.line) + 1)
            self.line.insert(position if draw() < self.reorder else len(self.line), (part, payload))


@dataclass
class Receiver:
    """Runs a download against a network and keeps the bytes and the requests."""

    download: Download
    network: Network
    now_s: float = 0.0
    chunks: dict[int, bytes] = field(default_factory=dict)
    requested_chunks: list[int] = field(default_factory=list)
    most_in_flight: int = 0

    def run(self, parts: int | None = None) -> None:
        """Until it is complete, or until so many parts have arrived."""
        turns = 0
        while not self.download.complete and (parts is None or turns < parts):
            turns += 1
            assert turns < 200_000, "no end"
            request = self.download.next_request(self.now_s)
            if request is not None:
                self.requested_chunks.extend(request.chunks)
                assert not set(request.chunks) & set(self.chunks)
                self.network.serve(request)
            if self.network.line:
                self.now_s += 0.001
                self._take(*self.network.line.popleft())
            else:
                wake_at_s = self.download.wake_at_s
                assert wake_at_s is not None, "it waits for ever"
                assert wake_at_s - self.now_s <= STALL_MAX_S + 1e-6
                self.now_s = max(self.now_s, wake_at_s)

    def _take(self, part: int | str, payload: bytes) -> None:
        if isinstance(part, str):
            if self.download.on_index(payload):
                self.download.set_index(decode_index(payload, self.download.spec))
        elif self.download.on_chunk(part, payload, self.now_s):
            assert part not in self.chunks
            self.chunks[part] = payload

    @property
    def stored_bytes(self) -> bytes:
        return b"".join(self.chunks[number] for number in sorted(self.chunks))


def test_a_good_line_asks_for_each_chunk_once() -> None:
    blob = blob_of(500)
    receiver = Receiver(Download(spec_of(blob)), Network(blob, random.Random(1)))
    receiver.run()
    assert receiver.stored_bytes == blob
    assert sorted(receiver.requested_chunks) == list(range(500))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    chunks=st.integers(1, 200),
    rates=st.tuples(*[st.floats(0.0, 0.3)] * 4),
    window=st.integers(1, WINDOW_MAX),
)
def test_a_bad_line_still_gives_the_whole_blob(
    seed: int, chunks: int, rates: tuple[float, ...], window: int
) -> None:
    blob = blob_of(chunks)
    loss, repeat, garble, reorder = rates
    network = Network(blob, random.Random(seed), loss, repeat, garble, reorder)
    receiver = Receiver(Download(spec_of(blob), window), network)
    receiver.run()
    assert receiver.stored_bytes == blob


def on_a_line(
    download: Download, rtt_s: float, bytes_per_s: float, until_s: float = 1e9
) -> tuple[float, list[int]]:
    """Run a download over a line with this delay and rate, in virtual time; return when it ended
    and how many chunks were in flight."""
    payload = b"x" * CHUNK
    now_s = free_s = 0.0
    line: deque[tuple[float, int]] = deque()  # when a chunk arrives, and which
    in_flight = []
    while not download.complete and now_s < until_s:
        request = download.next_request(now_s)
        for number in () if request is None else request.chunks:
            free_s = max(free_s, now_s + rtt_s) + CHUNK / bytes_per_s
            line.append((free_s, number))
        in_flight.append(len(line))
        wake_at_s = download.wake_at_s
        if line and (wake_at_s is None or line[0][0] <= wake_at_s):
            now_s, number = line.popleft()
            download.on_chunk(number, payload, now_s)
        else:
            assert wake_at_s is not None
            now_s = max(now_s, wake_at_s)
    return now_s, in_flight


def equal_chunks(count: int) -> tuple[BlobSpec, ChunkTable]:
    blob = b"x" * (count * CHUNK)
    return spec_of(blob), table_of(blob)


@pytest.mark.parametrize("rtt_s", [0.001, 0.02, 0.2])
@pytest.mark.parametrize("in_the_line", [1, 7, 30])
def test_the_window_grows_until_the_line_is_full(rtt_s: float, in_the_line: int) -> None:
    spec, table = equal_chunks(3000)
    download = Download(spec)
    download.set_index(table)
    bytes_per_s = in_the_line * CHUNK / rtt_s
    duration_s, in_flight = on_a_line(download, rtt_s, bytes_per_s)
    assert in_flight[0] == WINDOW_START
    assert max(in_flight) <= WINDOW_MAX
    assert spec.bytes / bytes_per_s / duration_s > 0.93  # the rest is the start
    assert statistics.median(in_flight[1500:]) <= 4 * in_the_line + 12


def test_a_rate_limit_holds_without_a_chunk_asked_for_twice() -> None:
    spec, table = equal_chunks(200)
    download = Download(spec, limit=RateLimit(CHUNK))  # a chunk a second
    download.set_index(table)
    duration_s, in_flight = on_a_line(download, 0.01, 1e9)
    assert 197.0 < duration_s < 201.0
    assert max(in_flight) == 1


def test_a_new_limit_holds_from_then_on(tmp_path: Path) -> None:
    blob = blob_of(50)
    fetching = Fetching(tmp_path, WINDOW_MAX)
    fetching.begin(spec_of(blob))
    fetching.take(spec_of(blob).sha256, "index", index_of(blob), 0.0)
    first = fetching.next_request(0.0)
    assert first is not None
    assert len(first.chunks) == WINDOW_START
    fetching.begin(spec_of(blob), FetchOptions({}, bytes_per_s=1024))
    second, third = fetching.next_request(1.0), fetching.next_request(1.001)
    assert second is not None
    assert len(second.chunks) == 1
    assert third is None
    fetching.remove()


def test_a_line_slower_than_the_patience_is_not_asked_twice() -> None:
    spec, table = equal_chunks(60)
    download = Download(spec)
    download.set_index(table)
    duration_s, _in_flight = on_a_line(download, 0.1, CHUNK / 2.0)  # two seconds a chunk
    assert duration_s < 60 * 2.0 * 1.25


def test_loss_halves_the_window_and_it_does_not_grow_at_once() -> None:
    window = Window(CHUNK, WINDOW_MAX * CHUNK)
    now_s = 0.0
    for _ in range(3):  # the goodput rises with the window
        window.on_request(now_s)
        now_s += 1.0
        window.on_received(window.bytes, now_s)
    assert window.bytes == 32 * CHUNK
    window.on_loss()
    assert window.bytes == 16 * CHUNK
    now_s += 1.0
    window.on_received(window.bytes, now_s)
    assert window.bytes == 16 * CHUNK
    for _ in range(9):
        window.on_loss()
    assert window.bytes == WINDOW_START * CHUNK


def test_a_lost_chunk_is_asked_for_again_without_waiting_for_silence() -> None:
    blob = blob_of(100)
    download = Download(spec_of(blob))
    download.set_index(table_of(blob))
    line: deque[int] = deque()
    again = []
    for turn in range(400):
        now_s = turn * 0.001  # far less than the time after which silence counts as loss
        request = download.next_request(now_s)
        if request is not None:
            again.extend(n for n in request.chunks if n == 1)
            line.extend(n for n in request.chunks if n != 1 or len(again) > 1)
        if download.complete:
            break
        number = line.popleft()
        download.on_chunk(number, blob[number * CHUNK : (number + 1) * CHUNK], now_s)
    assert download.complete
    assert again == [1, 1]


def test_silence_is_asked_into_ever_more_rarely() -> None:
    blob = blob_of(10)
    download = Download(spec_of(blob))
    download.set_index(table_of(blob))
    now_s, times = 0.0, []
    while len(times) < 9:
        if download.next_request(now_s) is not None:
            times.append(now_s)
        wake_at_s = download.wake_at_s
        assert wake_at_s is not None
        now_s = wake_at_s
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_server_that_announces_the_blob_again_is_asked_at_once(tmp_path: Path) -> None:
    blob = blob_of(40)
    fetching = Fetching(tmp_path, WINDOW_MAX)
    fetching.begin(spec_of(blob))
    now_s = 0.0
    fetching.next_request(now_s)
    for _ in range(6):  # it is away: the pauses double
        assert fetching.wake_at_s is not None
        now_s = fetching.wake_at_s
        assert fetching.next_request(now_s) is not None
    assert fetching.wake_at_s is not None
    assert fetching.wake_at_s - now_s == STALL_MAX_S
    fetching.begin(spec_of(blob))
    assert fetching.next_request(now_s + 0.5) is not None
    assert fetching.wake_at_s == now_s + 0.5 + STALL_S
    fetching.remove()


def test_a_server_with_another_file_costs_no_release() -> None:
    """It is asked as rarely as into silence, until it sends what fits."""
    blob = blob_of(200)
    download = Download(spec_of(blob))
    download.set_index(table_of(blob))
    network = Network(blob, random.Random(1), garble=1.0)
    now_s, requests = 0.0, 0
    while now_s < 600.0:
        request = download.next_request(now_s)
        if request is not None:
            requests += len(request.chunks)
            network.serve(request)
        while network.line:
            number, payload = network.line.popleft()
            assert isinstance(number, int)
            assert not download.on_chunk(number, payload, now_s)
        now_s = now_s + 0.001 if request else max(now_s + 0.001, download.wake_at_s or 0.0)
    assert MAX_CORRUPT_IN_A_ROW <= requests < MAX_CORRUPT_IN_A_ROW + 600.0 / STALL_MAX_S * 4 + 32
    assert download.complaint.startswith("a server sent ")
    assert "it holds another file" in download.complaint
    network.garble = 0.0
    receiver = Receiver(download, network)
    receiver.now_s = now_s
    receiver.run()
    assert receiver.stored_bytes == blob
    assert download.complaint == ""


def answer(blob: bytes, number: int) -> bytes:
    return blob[number * CHUNK : (number + 1) * CHUNK]


def test_bad_chunks_cost_the_window_of_their_peer_alone() -> None:
    blob = blob_of(2000)
    download = Download(spec_of(blob))
    download.set_index(table_of(blob))
    requests: dict[str, int] = {}
    for turn in range(20_000):
        now_s = turn * 0.001
        request = download.next_request(now_s)
        if request is not None:
            requests[request.peer] = requests.get(request.peer, 0) + len(request.chunks)
            for number in request.chunks:
                # Both answer what anyone may; the bad one is the first.
                if request.peer in ("", "bad"):
                    assert not download.on_chunk(number, b"x" * CHUNK, now_s, "bad")
                if request.peer in ("", "good"):
                    download.on_chunk(number, answer(blob, number), now_s, "good")
        if download.complete:
            break
    assert download.complete
    assert requests.get("bad", 0) == 0
    assert requests["good"] > 1900


def test_a_peer_that_turns_bad_is_left_for_another() -> None:
    blob = blob_of(1000)
    download = Download(spec_of(blob))
    download.set_index(table_of(blob))
    answered = 0
    for turn in range(20_000):
        now_s = turn * 0.001
        request = download.next_request(now_s)
        for number in () if request is None else request.chunks:
            assert request is not None
            answered += 1
            good = answer(blob, number)
            if request.peer in ("", "one"):
                download.on_chunk(number, good if answered < 300 else b"x", now_s, "one")
            if request.peer in ("", "two"):
                download.on_chunk(number, good, now_s, "two")
        if download.complete:
            break
    assert download.complete
    assert "the server one sent" in download.complaint
    assert "two" not in download.complaint


def test_what_nobody_asked_for_costs_nothing() -> None:
    """A stranger's chunks for what another was asked for."""
    blob = blob_of(300)
    download = Download(spec_of(blob))
    download.set_index(table_of(blob))
    first = download.next_request(0.0)
    assert first is not None
    for number in first.chunks:
        download.on_chunk(number, answer(blob, number), 0.0, "good")
    request = download.next_request(0.0)
    assert request is not None
    assert request.peer == "good"
    for _ in range(MAX_CORRUPT_IN_A_ROW):
        for stranger in ("", "stranger", *map(str, range(50))):
            assert not download.on_chunk(request.chunks[0], b"x", 0.0, stranger)
    assert download.next_request(0.0) is None  # nothing is asked for again
    for number in request.chunks:
        assert download.on_chunk(number, answer(blob, number), 0.0, "good")
    more = download.next_request(0.0)
    assert more is not None
    assert more.peer == "good"
    assert len(more.chunks) > len(request.chunks)


@pytest.mark.parametrize("number", [-1, 3, 2**40])
def test_chunks_that_do_not_exist_are_dropped(number: int) -> None:
    blob = blob_of(3)
    download = Download(spec_of(blob))
    download.set_index(table_of(blob))
    assert not download.on_chunk(number, b"x", 0.0)
    assert not download.on_chunk(0, blob[: CHUNK - 1], 0.0)


# -- the disk


def test_a_restart_finds_its_chunks_by_hashing(tmp_path: Path) -> None:
    blob = blob_of(20)
    spec, index = spec_of(blob), index_of(blob)
    fetch = Fetch(tmp_path, spec, WINDOW_MAX)
    fetch.on_part("index", index, 0.0)
    for number in (0, 3, 19):
        fetch.on_part(str(number), blob[number * CHUNK : (number + 1) * CHUNK], 0.0)
    fetch.file.close()
    # One chunk is torn by a power cut after it was taken.
    with (tmp_path / f"{spec.sha256}.part").open("r+b") as part:
        part.seek(3 * CHUNK + 17)
        part.write(b"\0" * 100)
    again = Fetch(tmp_path, spec, WINDOW_MAX)
    assert again.download.has_index
    assert again.download.received_bytes == CHUNK + 100
    request = again.download.next_request(0.0)
    assert request is not None
    assert request.chunks == (1, 2, 3, 4)
    again.file.close()


def test_a_chunk_that_the_disk_does_not_give_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = blob_of(20)
    fetch = Fetch(tmp_path, spec_of(blob), WINDOW_MAX)
    fetch.on_part("index", index_of(blob), 0.0)
    for number in range(20):
        fetch.on_part(str(number), blob[number * CHUNK : (number + 1) * CHUNK], 0.0)
    fetch.file.close()
    read = os.pread

    def bad_sector(file: int, size: int, offset: int) -> bytes:
        if offset == 7 * CHUNK:
            raise OSError(errno.EIO, "Input/output error")
        return read(file, size, offset)

    monkeypatch.setattr(os, "pread", bad_sector)
    again = Fetch(tmp_path, spec_of(blob), WINDOW_MAX)
    assert again.download.missing == (7,)
    again.file.close()


def test_a_whole_file_is_compared_with_its_hash(tmp_path: Path) -> None:
    blob = blob_of(5)
    file = PartFile(tmp_path, spec_of(blob))
    for number in range(5):
        file.write(number * CHUNK, blob[number * CHUNK : (number + 1) * CHUNK])
    file.finish()
    file.write(0, b"other")
    with pytest.raises(TransferError, match="announced was"):
        file.finish()
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_new_blob_removes_what_is_left_of_others(tmp_path: Path) -> None:
    for chunks in (5, 6):
        PartFile(tmp_path, spec_of(blob_of(chunks))).close()
    assert [p.name for p in tmp_path.iterdir()] == [f"{spec_of(blob_of(6)).sha256}.part"]


def test_a_full_disk_is_noticed_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A double of the disk's answer: a really full one would need a file system of its own.
    disk = SimpleNamespace(f_bavail=5000, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _path: disk)
    with pytest.raises(TransferError, match=r"needs 23 MiB .* 19 MiB are free: make room"):
        PartFile(tmp_path, spec_of(blob_of(2000)))
    PartFile(tmp_path, spec_of(blob_of(900))).close()  # only its own bytes count here


@pytest.mark.parametrize(
    "part",
    [
        "",
        "-1",
        "d",
        "d-1",
        "dd0",
        "dindex",
        "1x",
        "²",
        "9" * 30,
        "index/",
        "1/",
        "0/a/b",
        "0/+",
        f"0/{'x' * 33}",
    ],
)
def test_topics_that_name_no_part_are_ignored(tmp_path: Path, part: str) -> None:
    blob = blob_of(3)
    fetch = Fetch(tmp_path, spec_of(blob), WINDOW_MAX)
    fetch.on_part("index", index_of(blob), 0.0)
    fetch.on_part(part, blob[:CHUNK], 0.0)
    assert fetch.download.received_bytes == 0
    fetch.file.close()
