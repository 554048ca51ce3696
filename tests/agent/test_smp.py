"""The parsers and the server of SMP, against other people's code and a bad line."""

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import re
import select
import shlex
import socket
import tty
import zlib
from collections.abc import Iterator
from pathlib import Path

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mqtt_fixtures import make_bundle
from smp import packet
from smp.image_management import ImageUploadWriteRequest
from smp.os_management import EchoWriteRequest
from smp_fixtures import Cable, cable, smpmgr, upload_once
from smp_server_fixtures import ServedBoard, serve
from smpclient import SMPClient
from smpclient.exceptions import SMPBadSequence, SMPUploadError
from smpclient.requests.file_management import (
    FileClose,
    FileHashChecksum,
    FileStatus,
    SupportedFileHashChecksumTypes,
)
from smpclient.requests.os_management import (
    DateTimeRead,
    MCUMgrParametersRead,
    OSApplicationInfoRead,
)
from smpclient.transport.serial import SMPSerialTransport

from device.agent.smp_lines import LogTail
from device.errors import ConfigError
from device.protocol.documents import Update
from device.smp.cbor import decode_map, encode
from device.smp.framing import MAX_LINE, ConsoleFraming, RawFraming
from device.smp.inbox import Inbox, Statement
from device.smp.message import ANSWERS, HEADER, MAX_MESSAGE
from device.smp.server import WRITE_S, TtyServer, UdpServer, default_buffer, speed_of
from device.smp.service import BoardState
from device.update.slots import SlotRecord, SlotState

ROOT = Path(__file__).parents[2]
SCALARS = st.integers(-(2**64), 2**64 - 1) | st.booleans() | st.none() | st.text() | st.binary()
KEYS = st.text(max_size=20)
VALUES = st.recursive(SCALARS, lambda item: st.lists(item) | st.dictionaries(KEYS, item))


@pytest.fixture
def board(tmp_path: Path) -> ServedBoard:
    return ServedBoard(tmp_path)


@pytest.fixture
def line(board: ServedBoard) -> Iterator[Cable]:
    """A cable whose other end the board serves in console framing."""
    with cable() as one:
        server = serve(board, one)
        yield one
        server.stop()


# -- CBOR


@given(st.dictionaries(KEYS, SCALARS, max_size=16))
def test_flat_maps_of_another_encoder_are_read(value: dict[str, object]) -> None:
    if all(len(key.encode()) <= 32 for key in value):
        assert decode_map(cbor2.dumps(value)) == value


@given(VALUES)
def test_another_decoder_reads_what_is_written(value: object) -> None:
    assert cbor2.loads(encode(value)) == value


@given(st.binary(max_size=300))
def test_any_bytes_are_a_flat_map_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(decode_map(data), dict)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xa1\x61a" + b"\x81" * 60_000, "nested"),
        (b"\xbb" + b"\xff" * 8, "keys, the limit is 16"),
        (b"\xa1\x61a\x5b" + b"\xff" * 8, "ends too early"),
        (b"\xbf\x61a\x01\xff", "not known at its beginning"),
        (b"\xa1\x61a\xc2\x41\x01", "nested, tagged"),
        (b"\xa1\x61a\xfb" + b"\0" * 8, "nested, tagged or a float"),
        (b"\xa2\x61a\x01\x61a\x02", "there twice"),
        (b"\xa1\x01\x01", "no short text"),
        (b"\xa0\x00", "1 bytes follow"),
        (b"\x80", "no CBOR map"),
    ],
)
def test_bombs_and_what_smp_does_not_need_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_map(data)


# -- framing


@given(st.binary(min_size=8, max_size=3000), st.integers(1, 200), st.integers(8, 300))
def test_console_frames_of_the_stock_encoder_are_read_in_any_pieces(
    message: bytes, size: int, line_length: int
) -> None:
    framing = ConsoleFraming()
    stream = b"login: \r\n" + b"".join(packet.encode(message, line_length)) + b"$ ls\r\n"
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert [one for piece in pieces for one in framing.feed(piece)] == [message]


@given(st.binary(min_size=8, max_size=3000))
def test_the_stock_decoder_reads_console_frames(message: bytes) -> None:
    lines = ConsoleFraming().encode(message).splitlines(keepends=True)
    assert max(map(len, lines)) <= 127
    decoder = packet.decode()
    next(decoder)
    for one in lines[:-1]:
        decoder.send(one)
    with pytest.raises(StopIteration) as ended:
        decoder.send(lines[-1])
    assert ended.value.value == message


@given(st.lists(st.binary(max_size=400) | st.sampled_from([b"\x06\x09", b"\x04\x14", b"\n"])))
@settings(max_examples=200)
def test_noise_is_no_message_and_a_message_after_it_is_read(noise: list[bytes]) -> None:
    message = bytes(EchoWriteRequest(d="x").BYTES)
    framing = ConsoleFraming()
    for piece in noise:
        framing.feed(piece)
    framing.reset()
    assert framing.feed(b"\n" + framing.encode(message)) == [message]
    raw = RawFraming()
    for piece in noise:
        raw.feed(piece)
    raw.reset()
    assert raw.feed(message) == [message]


def test_a_damaged_frame_is_dropped_and_frames_without_an_end_take_no_memory() -> None:
    message = bytes(ImageUploadWriteRequest(off=0, data=bytes(500), len=500).BYTES)
    framing = ConsoleFraming()
    frame = framing.encode(message)
    for at in range(0, len(frame), 37):
        wrong = b"A" if frame[at : at + 1] != b"A" else b"B"
        assert framing.feed(frame[:at] + wrong + frame[at + 1 :]) in ([], [message])
        assert framing.feed(b"\n" + frame) == [message]  # the CRC is last: this is whole
    for _ in range(100):
        assert framing.feed(b"\x06\x09" + b"A" * MAX_LINE) == []
    assert framing.feed(b"\n" + frame) == [message]


def test_zeros_within_an_upload_that_lost_a_byte_are_no_requests() -> None:
    zeros = bytes(ImageUploadWriteRequest(off=0, data=bytes(4000), len=4000).BYTES)
    assert len(RawFraming().feed(zeros[1:] + zeros)) < 10


# -- uploads


def test_an_upload_goes_on_at_the_exact_byte_after_a_restart_of_the_board(tmp_path: Path) -> None:
    data = random.Random(3).randbytes(60_000)
    head = {"off": 0, "len": len(data), "sha": hashlib.sha256(data).digest()}
    board = ServedBoard(tmp_path)
    assert board.ask(2, 1, 1, {**head, "data": data[:30_001]}) == {"off": 30_001}
    assert board.ask(2, 1, 1, {"off": 30_001, "data": data[30_001:30_008]}) == {"off": 30_008}
    again = ServedBoard(tmp_path)
    assert again.ask(2, 1, 1, {**head, "data": data[:10]}) == {"off": 30_008}
    for off in (30_007, 30_009, 0x7FFF_FFFF):  # doubled and lost requests
        assert again.ask(2, 1, 1, {"off": off, "data": b"zz"}) == {"off": 30_008}
    done = again.ask(2, 1, 1, {"off": 30_008, "data": data[30_008:]})
    assert done == {"off": 60_000, "match": True}
    assert again.inbox.bundle is not None
    assert again.inbox.bundle.read_bytes() == data
    assert again.send(data) == {"off": 60_000, "match": True}  # it is there


def test_an_upload_that_was_spoiled_on_the_disk_begins_anew(tmp_path: Path) -> None:
    data = random.Random(4).randbytes(5000)
    head = {"off": 0, "len": len(data), "sha": hashlib.sha256(data).digest()}
    ServedBoard(tmp_path).ask(2, 1, 1, {**head, "data": data[:2000]})
    (tmp_path / "smp" / "bundle.part").write_bytes(bytes(2000))
    again = ServedBoard(tmp_path)
    assert again.ask(2, 1, 1, {**head, "data": b""}) == {"off": 2000}
    done = again.ask(2, 1, 1, {"off": 2000, "data": data[2000:]})
    assert done == {"off": 5000, "match": False}
    assert again.inbox.bundle is None
    assert again.send(data) == {"off": 5000, "match": True}


def test_two_clients_do_not_mix_their_uploads(board: ServedBoard) -> None:
    mine, theirs = random.Random(5).randbytes(400), random.Random(6).randbytes(400)
    heads = [
        {"off": 0, "len": 400, "sha": hashlib.sha256(data).digest(), "data": data[:100]}
        for data in (mine, theirs)
    ]
    assert board.ask(2, 1, 1, heads[0], "a") == {"off": 100}
    refused = board.ask(2, 1, 1, heads[1], "b")
    assert (refused["rc"], str(refused["rsn"])[:39]) == (
        10,
        "another client uploads a bundle: wait u",
    )
    assert board.ask(2, 1, 1, {"off": 100, "data": theirs[100:]}, "b")["rc"] == 10
    assert board.ask(2, 1, 1, heads[0], "b") == {"off": 100}  # the same file: continued
    assert "has continued" in str(board.ask(2, 1, 1, {"off": 100, "data": mine[100:]}, "a")["rsn"])
    done = board.ask(2, 1, 1, {"off": 100, "data": mine[100:]}, "b")
    assert done == {"off": 400, "match": True}


REFUSALS = (
    ((2, 1, 1, {"off": 0, "len": 0, "data": b""}), 3, "the bundle is empty"),
    ((2, 1, 1, {"off": 0, "len": 2**31 + 1, "data": b""}), 3, "the limit is 2147483648"),
    ((2, 1, 1, {"off": 0, "len": 9, "image": 1, "data": bytes(10)}), 3, "beyond the end"),
    ((2, 1, 1, {"off": 0, "len": 9 * 2**20, "image": 1, "data": b""}), 3, "the limit is 8388608"),
    ((2, 1, 1, {"off": 0, "len": 9, "image": 3, "data": b""}), 3, "there is no image 3"),
    ((2, 1, 1, {"off": 0, "len": 9, "sha": b"xx", "data": b""}), 3, "no SHA-256 of 32 bytes"),
    ((2, 1, 1, {"off": 0, "len": 9, "data": "text"}), 3, "data is no byte string"),
    ((2, 1, 1, {"off": -1, "data": b""}), 3, "off is no number from 0 on"),
    ((2, 1, 1, {"off": 5, "data": b""}), 6, "begin at the offset 0"),
    ((2, 1, 1, {"off": 0, "len": 9, "upgrade": True, "data": b""}), 8, "does not order versions"),
    ((2, 1, 0, {"hash": bytes(32)}), 5, "was uploaded"),
    ((2, 1, 0, {"confirm": True}), 6, "no release runs"),
    ((2, 1, 0, {"confirm": 7}), 3, "neither true nor false"),
    ((2, 1, 5, {"slot": 0}), 11, "slot 0 is not erased"),
    ((2, 0, 0, {"d": 5}), 3, "d is no text"),
    ((0, 9, 0, {}), 8, "no command 0 of group 9"),
    ((0, 1, 0, [1]), 3, "no CBOR map"),
    ((0, 65, 1, {}), 6, "no transfer has begun"),
    ((2, 65, 2, {"off": 0, "data": b"x"}), 6, "no transfer has begun"),
    ((2, 65, 2, {"off": 0}), 3, "data is no byte string"),
    ((2, 65, 4, {}), 6, "nothing that came over this line"),
    ((0, 8, 0, {"off": 0, "name": "/etc/passwd"}), 5, "there is no file '/etc/passwd'"),
    ((0, 8, 0, {"off": 10**6, "name": "/agent.log"}), 3, "has 0 bytes, not 1000000"),
    ((0, 8, 2, {"name": "/agent.log", "type": "md5"}), 8, "there is no checksum 'md5'"),
    ((0, 0, 7, {"format": "x"}), 3, "format takes letters of"),
)


@pytest.mark.parametrize(("request_", "code", "reason"), REFUSALS)
def test_refusals_have_a_code_and_a_sentence(
    board: ServedBoard, request_: tuple[int, int, int, object], code: int, reason: str
) -> None:
    refused = board.ask(*request_)
    assert refused["rc"] == code
    assert reason in str(refused["rsn"])


def record(version: str) -> SlotRecord:
    sha256 = hashlib.sha256(version.encode()).hexdigest()
    return SlotRecord(
        sha256=sha256, bytes=1, name="person", version=version, request="r", good=True
    )


def test_slot_0_is_what_runs_and_nobody_else_ends_a_trial(board: ServedBoard) -> None:
    old, new = record("1"), record("2")
    idle = Update(phase="idle")
    board.state = BoardState(SlotState(active="b", b=old), idle)
    (row,) = board.ask(0, 1, 0, {})["images"]
    assert (row["slot"], row["version"], row["active"], row["confirmed"]) == (
        0,
        "person 1",
        True,
        True,
    )
    assert board.ask(2, 1, 0, {"confirm": True})["images"] == [row]
    on_trial = SlotState(active="b", b=old, trial="a", a=new)
    board.state = BoardState(on_trial, Update(phase="trial", sha256=new.sha256))
    first, second = board.ask(0, 1, 0, {})["images"]
    assert (first["version"], first["active"], first["confirmed"]) == ("person 2", True, False)
    assert (second["version"], second["active"], second["confirmed"]) == ("person 1", False, True)
    for request in ({"confirm": True}, {"hash": bytes.fromhex(new.sha256), "confirm": True}):
        refused = board.ask(2, 1, 0, request)
        assert (refused["rc"], "on trial" in str(refused["rsn"])) == (10, True)


def test_an_unsigned_bundle_is_for_a_bench_and_one_of_another_board_for_none(
    tmp_path: Path,
) -> None:
    bench, field = ServedBoard(tmp_path / "a"), ServedBoard(tmp_path / "b", dev=False)
    data = make_bundle(tmp_path / "in", engine_bytes=3000).read_bytes()
    ask = {"hash": hashlib.sha256(data).digest()}
    for board in (bench, field):
        board.send(data)
    assert "images" in bench.ask(2, 1, 0, ask)
    (handed_in,) = bench.installs
    assert handed_in == bench.inbox.handed_in()
    refused = field.ask(2, 1, 0, ask)
    assert (refused["rc"], field.installs) == (11, [])
    assert "takes only signed ones" in str(refused["rsn"])
    second = make_bundle(
        tmp_path / "in", profile="orin-nx", version="2", engine_bytes=3000
    ).read_bytes()
    bench.send(second)
    refused = bench.ask(2, 1, 0, {"hash": hashlib.sha256(second).digest()})
    assert "the bundle is built for orin-nx, this device is" in str(refused["rsn"])
    bench.send(b"no bundle")
    refused = bench.ask(2, 1, 0, {"hash": hashlib.sha256(b"no bundle").digest()})
    assert (refused["rc"], len(bench.installs)) == (9, 1)
    field.send(b'{"desired": "{}", "files": {}}', image=1)
    assert field.ask(2, 1, 0, ask)["rc"] == 9
    assert bench.ask(2, 1, 5, {}) == {}
    assert (bench.inbox.bundle, bench.inbox.handed_in()) == (None, None)


@given(st.binary(max_size=200), st.integers(0, 3), st.integers(0, 70), st.integers(0, 8))
@settings(max_examples=300)
def test_any_request_is_answered_or_ignored(
    tmp_path_factory: pytest.TempPathFactory, body: bytes, operation: int, group: int, command: int
) -> None:
    board = ServedBoard(tmp_path_factory.getbasetemp() / "fuzz")
    message = HEADER.pack(operation, 0, len(body), group, 0, command) + body
    reply = board.service.handle(message, "host")
    assert reply is None or len(reply) <= 1472
    assert board.service.handle(body, "host") is None or len(body) >= HEADER.size


# -- lines


@pytest.mark.parametrize("kind", ["console", "raw", "udp"])
def test_a_killed_stock_client_is_followed_by_one_that_goes_on(
    board: ServedBoard, kind: str
) -> None:
    data = random.Random(kind).randbytes(600_000)
    if kind == "udp":
        one = UdpServer("127.0.0.1", 1337, board.service.handle)
        one.start()
        try:
            before = upload_once(kind, "127.0.0.1", data, stop_at=200_000)
            after = upload_once(kind, "127.0.0.1", data)
        finally:
            one.stop()
    else:
        with cable() as wire:
            server = serve(board, wire, kind)
            before = upload_once(kind, wire.host, data, stop_at=200_000)
            after = upload_once(kind, wire.host, data)
            server.stop()
    assert (after[0], after[-1]) == (before[-1], len(data))
    assert board.inbox.bundle is not None
    assert board.inbox.bundle.read_bytes() == data


@pytest.mark.slow  # test_smp_install.py has the stock client, too
def test_the_commands_of_the_page_run_with_the_stock_client(
    tmp_path: Path, board: ServedBoard, line: Cable
) -> None:
    board.state = BoardState(SlotState(active="a", a=record("1")), Update(phase="live"))
    bundle = make_bundle(tmp_path / "in", engine_bytes=3000)
    statement = tmp_path / "board-1.statement"
    statement.write_text("{}")
    places = {"robot.bundle": str(bundle), statement.name: str(statement)}
    sha256 = hashlib.sha256(bundle.read_bytes()).hexdigest()
    page = (ROOT / "docs" / "flash_serial.md").read_text()
    page = page.replace("$(sha256sum robot.bundle | cut -c1-64)", sha256)
    lines = re.findall(r"^\$ smpmgr --port /dev/ttyACM0 (.*)$", page, re.MULTILINE)
    assert len(lines) == 6
    places["report.json"] = str(tmp_path / "report.json")
    for words in map(shlex.split, lines):
        printed = smpmgr("--port", line.host, *(places.get(word, word) for word in words))
        assert "rsn" not in printed
        if "state-read" in words:
            assert "version='person 1'" in printed
            assert sha256.upper() in printed
    assert len(board.installs) == 1
    assert board.inbox.holds(1, hashlib.sha256(b"{}").hexdigest(), 2)
    assert "slot 0 is not erased" in smpmgr("--port", line.host, "image", "erase", "0")
    assert "r='hello'" in smpmgr("--port", line.host, "os", "echo", "hello")
    assert board.ask(2, 0, 5, {}) == {}
    assert board.restarts == 1


def test_stock_requests_of_the_os_and_file_groups_are_answered(board: ServedBoard) -> None:
    log = b"".join(b"line %d\n" % number for number in range(20_000))
    board.service._files._files["/agent.log"] = lambda: log  # type: ignore[index]

    async def ask(address: str) -> list[object]:
        async with SMPClient(SMPSerialTransport(), address, timeout_s=20.0) as client:
            assert await client.download_file("/agent.log") == log
            return [await client.request(request) for request in requests]

    requests = (
        OSApplicationInfoRead(format="a"),
        DateTimeRead(),
        FileStatus(name="/agent.log"),
        FileHashChecksum(name="/agent.log"),
        FileHashChecksum(name="/agent.log", type="crc32"),
        SupportedFileHashChecksumTypes(),
        FileClose(),
    )
    with cable() as one:
        server = serve(board, one)
        try:
            info, date, status, sha256, crc32, kinds, _closed = asyncio.run(ask(one.host))
        finally:
            server.stop()
    assert os.uname().release in info.output
    assert re.match(r"20\d\d-\d\d-\d\dT", date.datetime)
    assert status.len == len(log)
    assert sha256.output == hashlib.sha256(log).digest()
    assert crc32.output == zlib.crc32(log)
    assert set(kinds.types) == {"sha256", "crc32"}


def test_a_bad_line_costs_time_and_never_the_upload(board: ServedBoard, line: Cable) -> None:
    noise = random.Random(8)
    data = noise.randbytes(150_000)

    def spoil(piece: bytes) -> bytes:
        at, kind = noise.randrange(len(piece)), noise.randrange(12)
        if kind == 0:
            return piece[:at] + piece[at + 1 :]
        if kind == 1:
            return piece[:at] + piece[at : at + 1] * 2 + piece[at + 1 :]
        if kind == 2:
            return piece[:at] + noise.randbytes(5) + piece[at:]
        return piece

    async def insist() -> int:
        attempts = 0
        while True:
            attempts += 1
            try:
                transport = SMPSerialTransport()
                async with SMPClient(transport, line.host, timeout_s=0.5) as client:
                    steps = client.upload(data, first_timeout_s=0.5)
                    offsets = [offset async for offset in steps]
                    if offsets[-1] == len(data):
                        return attempts
            except (TimeoutError, SMPUploadError, SMPBadSequence):  # or an answer came too late
                line.change = spoil if attempts < 4 else (lambda piece: piece)

    line.change = spoil
    assert asyncio.run(insist()) > 1
    assert board.inbox.bundle is not None
    assert board.inbox.bundle.read_bytes() == data


def test_a_board_serves_a_tty_that_vanishes_and_comes_back(
    tmp_path: Path, board: ServedBoard
) -> None:
    data, link = random.Random(9).randbytes(300_000), tmp_path / "ttyGS0"
    with cable() as first:
        link.symlink_to(first.board)
        server = TtyServer(
            str(link),
            board.service.handle,
            framing="console",
            baud=115200,
            buffer_bytes=MAX_MESSAGE,
        )
        server.start()
        before = upload_once("console", first.host, data, stop_at=100_000)
        link.unlink()
    with cable() as second:
        link.symlink_to(second.board)
        after = upload_once("console", second.host, data)
        server.stop()
    assert (after[0], after[-1]) == (before[-1], len(data))


def test_a_board_reads_on_while_its_answers_are_not_read(board: ServedBoard) -> None:
    request = bytes(EchoWriteRequest(d="x" * 2000).BYTES)
    master, slave = os.openpty()
    tty.setraw(slave)
    server = TtyServer(
        os.ttyname(slave),
        board.service.handle,
        framing="raw",
        baud=115200,
        buffer_bytes=MAX_MESSAGE,
    )
    server.start()
    os.set_blocking(master, False)
    rest = memoryview(request * 1000)
    try:
        while rest:
            assert select.select([], [master], [], WRITE_S - 1)[1], f"{len(rest)} bytes are left"
            rest = rest[os.write(master, rest) :]
        answers = RawFraming(ANSWERS)
        assert answers.feed(os.read(master, 65536)), "those that it kept come"
    finally:
        os.set_blocking(master, True)
        os.close(slave)
        os.close(master)
        server.stop()


def test_a_stock_client_over_udp_beside_noise(board: ServedBoard) -> None:
    server = UdpServer("127.0.0.1", 0, board.service.handle)
    server.start()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(20.0)
            for size in (0, 1, 8, 60_000):
                client.sendto(random.Random(size).randbytes(size), ("127.0.0.1", server.port))
            request = bytes(MCUMgrParametersRead().BYTES)
            client.sendto(request, ("127.0.0.1", server.port))
            reply = client.recv(2000)
        assert cbor2.loads(reply[HEADER.size :]) == {"buf_size": 1472, "buf_count": 32}
    finally:
        server.stop()
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:9 cannot be used"):
        UdpServer("192.0.2.1", 9, board.service.handle)


@pytest.mark.parametrize(
    ("device", "baud", "buffer_bytes"),
    [
        ("/dev/ttyGS0", 115200, MAX_MESSAGE),
        ("/dev/ttyTHS1", 115200, 5760),
        ("/dev/ttyTHS1", 3_000_000, MAX_MESSAGE),
        ("/dev/ttyS0", 1200, 512),
    ],
)
def test_a_request_takes_half_a_second_of_a_uart(device: str, baud: int, buffer_bytes: int) -> None:
    assert default_buffer(device, baud) == buffer_bytes


def test_a_rate_that_no_tty_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="baud = 115201 is no rate"):
        speed_of(115201)


def test_signed_metadata_is_on_the_disk_before_its_document_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, synced = Inbox(tmp_path / "smp"), set[str]()
    sync = os.fsync

    def noted(handle: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    names = ("metadata/1.root.json", "targets/d.director.json")
    inbox._unpack(Statement(desired="", files=dict.fromkeys(names, "{}")))
    for name in names:
        path = inbox.repository / name
        assert path.read_text() == "{}"
        assert {str(path), str(path.parent), str(inbox.repository)} <= synced


def test_the_log_that_a_client_downloads_has_no_secrets() -> None:
    tail = LogTail((None, "hunter2"))
    text = "login hunter2 at mqtt://me:pw@host failed, token=abc"
    tail.emit(logging.LogRecord("tandem.agent", logging.WARNING, "", 0, text, None, None))
    output = tail.read().decode()
    assert "at mqtt://***@host failed" in output
    assert not any(secret in output for secret in ("hunter2", "pw", "abc"))
