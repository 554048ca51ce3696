"""`tandem flash --to serial://`: our own client of SMP, over ptys that are joined, and over UDP."""

import contextlib
import json
import os
import random
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from control_fixtures import client_of
from flash_fixtures import MEGABYTE, bundle_of, flash, run
from mqtt_fixtures import AgentBox, free_port, make_bundle
from serial_board_fixtures import roles, wait_for
from smp_fixtures import Cable, cable
from smp_server_fixtures import ServedBoard, serve

from device.protocol.control import AskProgress, Rollback
from device.smp.intake import RECORD, ChunkList
from device.smp.message import HEADER, SmpError
from device.smp.server import UdpServer
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.transports import smp as smp_board
from toolkit.fleet.transports.addresses import open_board, parse_address
from toolkit.fleet.transports.console import ConsoleBoard
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.flash_board import deliver
from toolkit.fleet.transports.smp import SmpBoard, difference_encoder
from toolkit.fleet.transports.smp_client import TRIES, SmpClient
from toolkit.fleet.transports.smp_links import SerialLine, UdpLine
from toolkit.fleet.transports.smp_records import Records, numbers_of
from toolkit.fleet.transports.ssh import ControlBoard
from toolkit.fleet.transports.transport import Progress, RefusedError, TransportError

Told = Callable[[Progress], None]


@pytest.fixture
def wire() -> Iterator[Cable]:
    with cable() as one:
        yield one


@pytest.fixture
def board(tmp_path: Path) -> ServedBoard:
    return ServedBoard(tmp_path)


def send(line: SerialLine | UdpLine, bundle: Path, on_progress: Told | None = None) -> int:
    """Send a bundle as `tandem flash` does; return the bytes that were sent for it."""
    delivery, client = Delivery(bundle, None), SmpClient(line)
    sender = smp_board.Sender(client, delivery, b"{}", on_progress or (lambda _progress: None))
    try:
        client.connect()
        sender.run()
        return sender.sent_bytes
    finally:
        client.close()
        delivery.close()


@pytest.mark.parametrize("framing", ["console", "raw"])
def test_a_bundle_arrives_and_is_not_sent_again(
    tmp_path: Path, wire: Cable, board: ServedBoard, rng: np.random.Generator, framing: str
) -> None:
    bundle = bundle_of(tmp_path / "in", rng.bytes(3 * MEGABYTE), "1")
    server = serve(board, wire, framing)
    line = SerialLine(wire.host, 115200, "raw" if framing == "raw" else "console")
    try:
        sent_bytes = send(line, bundle)
        assert board.inbox.bundle is not None
        assert board.inbox.bundle.read_bytes() == bundle.read_bytes()
        assert bundle.stat().st_size <= sent_bytes < bundle.stat().st_size * 1.01
        assert send(line, bundle) == 0
    finally:
        server.stop()


def damaged(kind: str, seed: int) -> Callable[[bytes], bytes]:
    """What a bad line does to about every fortieth piece of what goes to the board."""
    chance = random.Random(seed)

    def change(data: bytes) -> bytes:
        if chance.random() > 0.025 or not data:
            return data
        at = chance.randrange(len(data))
        if kind == "noise":
            return data[:at] + bytes((data[at] ^ 0x55,)) + data[at + 1 :]
        return (
            data[:at] + data[at + 1 :]
            if kind == "dropped"
            else data[:at] + data[at : at + 1] + data[at:]
        )

    return change


@pytest.mark.parametrize("framing", ["console", "raw"])
@pytest.mark.parametrize("kind", ["noise", "dropped", "doubled"])
def test_a_bad_line_costs_time_and_nothing_else(
    tmp_path: Path,
    wire: Cable,
    board: ServedBoard,
    rng: np.random.Generator,
    kind: str,
    framing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolkit.fleet.transports.smp_client.ANSWER_S", 0.8)
    monkeypatch.setattr("toolkit.fleet.transports.smp_client.TRIES", 40)
    bundle = bundle_of(tmp_path / "in", rng.bytes(MEGABYTE), "1")
    server = serve(board, wire, framing, buffer_bytes=8192)
    wire.change = damaged(kind, 7)
    line = SerialLine(wire.host, 3_000_000, "raw" if framing == "raw" else "console")
    try:
        sent_bytes = send(line, bundle)
    finally:
        server.stop()
    assert sent_bytes > bundle.stat().st_size
    assert board.inbox.bundle is not None
    assert board.inbox.bundle.read_bytes() == bundle.read_bytes()


def test_no_stream_of_records_breaks_the_board(tmp_path: Path, rng: np.random.Generator) -> None:
    blob = Blob(bundle_of(tmp_path / "in", rng.bytes(150_000), "1"))
    chance = random.Random(11)
    board = ServedBoard(tmp_path)
    chunks = tmp_path / "list"
    chunks.write_bytes(msgspec.json.encode(ChunkList(blob=blob.spec, index=blob.index)))
    board.inbox.intake.take_list(chunks, "")
    plan, offset = board.inbox.intake.plan("host"), 0
    stream = Records(blob, numbers_of(plan.missing), 0, 0)
    whole = stream.read(0, 10**7)
    for _ in range(2000):
        data = whole[offset : offset + chance.randrange(1, 40_000)]
        if chance.random() < 0.15:
            data = chance.randbytes(chance.randrange(0, 40)) + data[chance.randrange(0, 40) :]
        taken = board.inbox.intake.take("host", offset + chance.choice((0, 0, 0, -1, 5)), data)
        offset = taken.offset
        if taken.match is not None:
            break
    assert board.inbox.bundle is not None
    assert board.inbox.bundle.read_bytes() == (tmp_path / "in" / "1.bundle").read_bytes()
    blob.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"index": b""}, "not that of its bundle"),
        ({"index": bytes(36)}, "not that of its bundle"),
        (None, "is not understood"),
    ],
)
def test_a_list_that_is_none_is_refused(
    tmp_path: Path, board: ServedBoard, changes: dict[str, bytes] | None, reason: str
) -> None:
    blob = Blob(make_bundle(tmp_path / "in"))
    chunks = msgspec.structs.replace(ChunkList(blob=blob.spec, index=blob.index), **changes or {})
    blob.close()
    path = tmp_path / "list"
    path.write_bytes(b"[]" if changes is None else msgspec.json.encode(chunks))
    board.inbox.intake.take_list(path, "")
    with pytest.raises(SmpError, match=reason):
        board.inbox.intake.plan("host")


class StopError(Exception):
    """Ends a transfer in a test."""


def stop_at(limit_bytes: int) -> Told:
    def on_progress(progress: Progress) -> None:
        if progress.received_bytes > limit_bytes:
            raise StopError

    return on_progress


def test_a_client_that_was_killed_goes_on_at_the_exact_offset(
    tmp_path: Path, wire: Cable, board: ServedBoard, rng: np.random.Generator
) -> None:
    bundle = bundle_of(tmp_path / "in", rng.bytes(3 * MEGABYTE), "1")
    server = serve(board, wire)
    try:
        with pytest.raises(StopError):
            send(SerialLine(wire.host, 115200, "console"), bundle, stop_at(MEGABYTE))
        until_s = time.monotonic() + 30.0
        offset = -1
        while offset != (now := board.inbox.intake.plan("looks").offset):  # what was on its way
            offset = now
            assert time.monotonic() < until_s
            time.sleep(0.3)
        rest_bytes = send(SerialLine(wire.host, 115200, "console"), bundle)
    finally:
        server.stop()
    blob = Blob(bundle)
    blob.close()
    assert rest_bytes == blob.spec.bytes + RECORD.size * blob.table.count - offset
    assert board.inbox.bundle is not None
    assert board.inbox.bundle.read_bytes() == bundle.read_bytes()


def test_a_cable_that_is_pulled_and_plugged_again_loses_nothing(
    tmp_path: Path,
    wire: Cable,
    board: ServedBoard,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolkit.fleet.transports.smp_client.ANSWER_S", 0.5)
    bundle = bundle_of(tmp_path / "in", rng.bytes(3 * MEGABYTE), "1")
    server = serve(board, wire)
    pulled = threading.Event()

    def on_progress(progress: Progress) -> None:
        if progress.received_bytes > MEGABYTE and not pulled.is_set():
            wire.pulled = True
            pulled.set()
            threading.Timer(1.5, lambda: setattr(wire, "pulled", False)).start()

    try:
        send(SerialLine(wire.host, 115200, "console"), bundle, on_progress)
    finally:
        server.stop()
    assert pulled.is_set()
    assert board.inbox.bundle is not None
    assert board.inbox.bundle.read_bytes() == bundle.read_bytes()


def test_a_second_client_is_told_to_wait_and_a_port_belongs_to_one_program(
    tmp_path: Path, wire: Cable, board: ServedBoard, rng: np.random.Generator
) -> None:
    bundle = bundle_of(tmp_path / "in", rng.bytes(MEGABYTE), "1")
    second = bundle_of(tmp_path / "other", rng.bytes(MEGABYTE), "2")
    server = serve(board, wire)
    udp = UdpServer("127.0.0.1", 0, board.service.handle)
    udp.start()
    refused: list[str] = []

    def on_progress(progress: Progress) -> None:
        if refused or progress.phase != "sending":
            return
        for line, kind in (
            (UdpLine("127.0.0.1", udp.port), RefusedError),
            (SerialLine(wire.host, 115200, "console"), TransportError),
        ):
            with pytest.raises(kind) as error:
                send(line, second)
            refused.append(str(error.value))

    try:
        send(SerialLine(wire.host, 115200, "console"), bundle, on_progress)
    finally:
        server.stop()
        udp.stop()
    assert "another client sends a bundle" in refused[0]
    assert f"{wire.host} is in use" in refused[1]
    assert board.inbox.bundle is not None
    assert board.inbox.bundle.read_bytes() == bundle.read_bytes()


class BadNetwork:
    """Passes datagrams on, loses some, doubles some and swaps some."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.settimeout(0.1)
        self.port = int(self._socket.getsockname()[1])
        self._board = "127.0.0.1", port
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        chance, client, held = random.Random(3), None, []
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                data, sender = self._socket.recvfrom(65535)
                target = client if sender == self._board else self._board
                client = client if sender == self._board else sender
                lot = chance.random()
                if target is None or lot < 0.01:
                    continue
                if lot < 0.02:
                    held.append((data, target))
                    continue
                for _ in range(2 if lot < 0.03 else 1):
                    self._socket.sendto(data, target)
                while held:
                    self._socket.sendto(*held.pop())


def test_datagrams_that_are_lost_doubled_and_swapped_are_sent_again(
    tmp_path: Path, board: ServedBoard, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.fleet.transports.smp_client.ANSWER_S", 0.3)
    monkeypatch.setattr("toolkit.fleet.transports.smp_client.TRIES", 60)
    bundle = bundle_of(tmp_path / "in", rng.bytes(MEGABYTE), "1")
    udp = UdpServer("127.0.0.1", 0, board.service.handle)
    udp.start()
    network = BadNetwork(udp.port)
    try:
        send(UdpLine("127.0.0.1", network.port), bundle)
    finally:
        network.close()
        udp.stop()
    assert board.inbox.bundle is not None
    assert board.inbox.bundle.read_bytes() == bundle.read_bytes()


class ServiceLine:
    """A line without a cable: what `answer` returns for a message has come at once."""

    name = "line"
    bytes_per_s: float | None = None

    def __init__(self, answer: Callable[[bytes], bytes | None]) -> None:
        self._answer = answer
        self._answers: list[bytes] = []

    def open(self) -> None:
        self._answers.clear()

    def write(self, message: bytes) -> None:
        answer = self._answer(message)
        if answer is not None:
            self._answers.append(answer)

    def read(self, timeout_s: float) -> list[bytes]:
        if not self._answers:
            time.sleep(min(timeout_s, 0.01))
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Nothing is held."""


def flash_service(answer: Callable[[bytes], bytes | None], bundle: Path) -> None:
    """Send a bundle as `tandem flash` does, to what answers each message."""
    delivery, flasher = Delivery(bundle, None), SmpBoard(ServiceLine(answer))
    try:
        flasher._client.connect()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(smp_board, "_statement", lambda *_: b"{}")  # one message
            flasher.send(delivery, lambda _progress: None)
    finally:
        delivery.close()


def test_the_last_answers_that_are_lost_cost_time_and_nothing_else(
    tmp_path: Path, board: ServedBoard, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.fleet.transports.smp_client.ANSWER_S", 0.2)
    bundle = bundle_of(tmp_path / "in", rng.bytes(MEGABYTE), "1")
    ends = 0

    def answer(message: bytes) -> bytes | None:
        nonlocal ends
        reply = board.service.handle(message, "host", 512)
        assert reply is not None
        ends += b"ematch" in reply  # the key of the answer to the last bytes of an upload
        return None if b"ematch" in reply and ends % 2 else reply

    flash_service(answer, bundle)
    assert ends == 6
    assert board.inbox.bundle is not None
    assert board.inbox.bundle.read_bytes() == bundle.read_bytes()


def test_an_agent_that_is_started_again_gets_the_rest(
    tmp_path: Path, board: ServedBoard, rng: np.random.Generator
) -> None:
    bundle = bundle_of(tmp_path / "in", rng.bytes(MEGABYTE), "1")
    boards, count = [board], 0

    def answer(message: bytes) -> bytes | None:
        nonlocal count
        count += 1
        if count == 1500:
            boards.append(ServedBoard(tmp_path))  # of the same folder
        return boards[-1].service.handle(message, "host", 512)

    flash_service(answer, bundle)
    assert len(boards) == 2
    assert boards[-1].inbox.bundle is not None
    assert boards[-1].inbox.bundle.read_bytes() == bundle.read_bytes()


def test_a_line_that_is_gone_before_the_first_chunk_is_waited_for(
    tmp_path: Path, board: ServedBoard, rng: np.random.Generator
) -> None:
    bundle = bundle_of(tmp_path / "in", rng.bytes(100_000), "1")
    count = 0

    def answer(message: bytes) -> bytes | None:
        nonlocal count
        count += 1
        if count == 2:  # after the parameters
            raise TransportError("line was unplugged")
        return board.service.handle(message, "host", 512)

    flash_service(answer, bundle)
    assert board.inbox.bundle is not None


def test_ctrl_c_before_the_board_installs_is_no_refusal(tmp_path: Path, board: ServedBoard) -> None:
    asked_to_install = False

    def answer(message: bytes) -> bytes | None:
        nonlocal asked_to_install
        _, _, _, group, _, command = HEADER.unpack_from(message)
        if (group, command) == (65, smp_board.INSTALL):
            asked_to_install = True
            raise KeyboardInterrupt
        return board.service.handle(message, "host")

    delivery = Delivery(make_bundle(tmp_path / "in"), None)
    flasher = SmpBoard(ServiceLine(answer))
    flasher._client.connect()
    with pytest.raises(KeyboardInterrupt):
        deliver(flasher, delivery, lambda _progress: None)
    delivery.close()
    assert asked_to_install


def test_a_file_beside_the_bundle_that_cannot_be_read_is_no_base(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "in")
    (tmp_path / "in" / "a.bundle").symlink_to("/proc/self/mem")  # its first bytes are an error
    blob = Blob(bundle)
    assert difference_encoder(blob, ["00" * 32], None) is None
    blob.close()


# -- a real agent


@pytest.fixture
def bench(tmp_path: Path, wire: Cable) -> Iterator[AgentBox]:
    """A board on a bench, without a broker, at the end of a cable."""
    with started(tmp_path, wire, confirm_after_s=0.3) as box:
        yield box


@contextlib.contextmanager
def started(folder: Path, wire: Cable, confirm_after_s: float) -> Iterator[AgentBox]:
    box = AgentBox(folder, free_port(), confirm_after_s=confirm_after_s)
    with box.config.open("a") as file:
        file.write(f'[smp]\ndevice = "{wire.board}"\nframing = "raw"\n')
    box.start()
    try:
        client_of(box).close()
        yield box
    finally:
        box.close()


def test_a_release_goes_live_by_cable_and_the_next_one_comes_as_a_difference(
    tmp_path: Path, wire: Cable, bench: AgentBox, rng: np.random.Generator
) -> None:
    address, weights = (
        f"serial://{wire.host}?framing=raw",
        rng.normal(size=200_000).astype(np.float32),
    )
    first = bundle_of(tmp_path / "in", engine_of(weights), "1")
    result = flash(address, first)
    assert (result.phase, result.device) == ("live", bench.device), bench.log()
    assert result.measured is not None
    assert result.measured.first_latency_ms > 0.0
    assert flash(address, first).phase == "same"
    tuned = weights + rng.normal(scale=1e-6, size=weights.size).astype(np.float32)
    second = bundle_of(tmp_path / "in", engine_of(tuned), "2")  # its base lies beside it
    result = flash(address, second)
    assert result.phase == "live"
    assert result.sent_bytes < 0.7 * result.total_bytes
    assert client_of(bench).ask(AskProgress()).slots[1].version == "2"


def engine_of(weights: np.ndarray) -> bytes:
    """A safetensors file with one tensor, as an engine has them."""
    header = {"w": {"dtype": "F32", "shape": [weights.size], "data_offsets": [0, weights.nbytes]}}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + weights.tobytes()


def test_a_slot_is_chosen_and_a_release_waits_for_its_commit(
    tmp_path: Path, wire: Cable, bench: AgentBox
) -> None:
    to = ("--to", f"serial://{wire.host}?framing=raw")
    first, second = (make_bundle(tmp_path / "in", version=version) for version in "12")
    done = run(str(first), *to, "--slot", "b", "--json")
    assert (done.exit_code, "first release goes into slot a" in done.stdout) == (3, True)
    assert run(str(first), *to, "--slot", "a").exit_code == 0
    done = run(str(second), *to, "--slot", "a", "--json")
    assert (done.exit_code, "slot a runs and is never overwritten" in done.stdout) == (3, True)
    done = run("--commit", *to, "--json")
    assert (done.exit_code, "waits for a commit" in done.stdout) == (3, True)
    done = run(str(second), *to, "--slot", "b", "--no-commit", "--erase-cache")
    assert (done.exit_code, "runs on trial on" in done.stdout) == (0, True), done.output
    assert "first detections after 1.0 ms" in done.stdout
    assert roles(bench) == {"1": "active", "2": "trial"}
    done = run("--commit", *to)
    assert (done.exit_code, "keeps the release on trial" in done.stdout) == (0, True), done.output
    wait_for(lambda: roles(bench) == {"1": "idle", "2": "active"}, bench)
    third = make_bundle(tmp_path / "in", version="3")
    assert run(str(third), *to, "--no-commit").exit_code == 0
    bench.kill()
    bench.start()
    client_of(bench).close()
    assert roles(bench) == {"2": "active", "3": "idle"}
    reported = client_of(bench).ask(AskProgress()).reported
    assert reported is not None
    assert "was not committed before the agent was started again" in reported.update.reason


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many more answers to what installs or commits are lost; none at first."""
    remaining, read = [0], SerialLine.read

    def lossy(self: SerialLine, timeout_s: float) -> list[bytes]:
        lines = []
        for message in read(self, timeout_s):
            _, _, _, group, _, command = HEADER.unpack_from(message)
            if (group, command) == (65, smp_board.INSTALL) and remaining[0]:
                remaining[0] -= 1
            else:
                lines.append(message)
        return lines

    monkeypatch.setattr(SerialLine, "read", lossy)
    monkeypatch.setattr("toolkit.fleet.transports.smp_client.ANSWER_S", 0.4)
    yield remaining
    assert remaining[0] == 0, "so many were not sent"


@pytest.mark.parametrize("count", [1, TRIES])
def test_a_board_that_installs_though_its_answer_is_lost_is_followed(
    tmp_path: Path, wire: Cable, losing: list[int], count: int
) -> None:
    bundle, losing[0] = make_bundle(tmp_path / "in"), count
    with started(tmp_path, wire, confirm_after_s=4.0) as box:  # it is asked again in the trial
        done = run(str(bundle), "--to", f"serial://{wire.host}?framing=raw")
        assert (done.exit_code, "is live on" in done.stdout) == (0, True), done.output
        assert roles(box) == {"1": "active"}


@pytest.mark.parametrize(
    ("count", "full"),
    [
        (1, False),
        (TRIES, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(TRIES, False, marks=pytest.mark.slow),
    ],
)
def test_a_board_that_commits_though_its_answer_is_lost_is_believed(
    tmp_path: Path, wire: Cable, bench: AgentBox, losing: list[int], full: bool, count: int
) -> None:
    to = ("--to", f"serial://{wire.host}?framing=raw")
    done = run(str(make_bundle(tmp_path / "in")), *to, "--no-commit")
    assert done.exit_code == 0, done.output
    losing[0] = count
    bench.fill_disk(full=full)  # which holds the commit up, so that the next one finds a trial
    done = run("--commit", *to)
    assert (done.exit_code, "keeps the release on trial" in done.stdout) == (0, True), done.output
    bench.fill_disk(full=False)
    wait_for(lambda: roles(bench) == {"1": "active"}, bench)


def test_a_commit_that_does_not_arrive_is_said(
    tmp_path: Path, wire: Cable, bench: AgentBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = ("--to", f"serial://{wire.host}?framing=raw")
    first, second = (make_bundle(tmp_path / "in", version=version) for version in "12")
    assert run(str(first), *to).exit_code == 0
    assert run(str(second), *to, "--no-commit").exit_code == 0
    monkeypatch.setattr("toolkit.fleet.transports.smp_client.ANSWER_S", 0.2)
    monkeypatch.setattr(smp_board, "COMMIT_S", 0.2)
    act: list[Callable[[], object]] = []
    write = SerialLine.write

    def lossy(self: SerialLine, message: bytes) -> None:
        _, _, _, group, _, command = HEADER.unpack_from(message)
        if (group, command) != (65, smp_board.INSTALL):
            write(self, message)
        elif act:
            act.pop()()

    monkeypatch.setattr(SerialLine, "write", lossy)
    done = run("--commit", *to, "--json")
    assert (done.exit_code, "does not answer any more" in done.stdout) == (1, True), done.output
    assert roles(bench) == {"1": "active", "2": "trial"}
    with contextlib.closing(client_of(bench)) as client:
        act.append(lambda: client.ask(Rollback()))
        done = run("--commit", *to, "--json")
    assert (done.exit_code, "did not keep the release on trial" in done.stdout) == (4, True)
    assert roles(bench) == {"1": "active", "2": "idle"}


class PeakBytes:
    """The most that files below a folder take on the disk; a file with two names counts once."""

    def __init__(self, folder: Path) -> None:
        self.most = 0
        self._folder = folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.most

    def _run(self) -> None:
        while not self._ended.wait(0.002):
            blocks: dict[int, int] = {}
            for folder, _, names in os.walk(self._folder):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        status = os.stat(os.path.join(folder, name))
                        blocks[status.st_ino] = status.st_blocks * 512
            self.most = max(self.most, sum(blocks.values()))


@pytest.mark.slow
@pytest.mark.parametrize("address", ["serial", "ssh"])
def test_a_bundle_takes_at_most_twice_its_size_while_it_is_installed(
    tmp_path: Path, wire: Cable, bench: AgentBox, rng: np.random.Generator, address: str
) -> None:
    agent = (sys.executable, "-m", "device.agent", "control", "--config", str(bench.config))
    first, second = (
        bundle_of(tmp_path / "in", rng.bytes(size * MEGABYTE), str(size)) for size in (1, 12)
    )
    for bundle in (first, second):
        board: SmpBoard | ControlBoard = SmpBoard(SerialLine(wire.host, 115200, "raw"))
        if address == "ssh":
            board = ControlBoard(("sh", "-c"), parse_address("ssh://b"), agent)
        peak = PeakBytes(bench.state_dir)
        delivery = Delivery(bundle, None)
        try:
            board.facts()
            deliver(board, delivery, lambda _progress: None)
        finally:
            delivery.close()
            board.close()
            most_bytes = peak.close()
    assert 1.9 * 12 * MEGABYTE < most_bytes < (2 * 12 + 3 * 1 + 2) * MEGABYTE


def test_ctrl_c_in_a_trial_leaves_the_old_release(
    tmp_path: Path, wire: Cable, bench: AgentBox
) -> None:
    address = f"serial://{wire.host}?framing=raw"
    assert flash(address, make_bundle(tmp_path / "in", version="1")).phase == "live"
    slow = make_bundle(tmp_path / "in", "hangs", version="2")

    def stop(progress: Progress) -> None:
        if progress.phase == "trial":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flash(address, slow, stop)
    wait_for(lambda: roles(bench) == {"1": "active", "2": "idle"}, bench)


def test_the_commands_of_the_page_run(tmp_path: Path, wire: Cable) -> None:
    udp_port = free_port()
    box = AgentBox(tmp_path, free_port())
    with box.config.open("a") as file:
        file.write(f'[smp]\ndevice = "{wire.board}"\nudp = "127.0.0.1:{udp_port}"\n')
    box.start()
    page = (Path(__file__).parents[2] / "docs/flash_cable.md").read_text()
    lines = re.findall(r"^\$ tandem (flash .*)$", page, re.MULTILINE)
    assert len(lines) == 5
    stands_for = {
        "serial:///dev/ttyACM0": f"serial://{wire.host}",
        "smp+udp://192.168.55.1": f"smp+udp://127.0.0.1:{udp_port}",
    }
    try:
        client_of(box).close()
        for number, line in enumerate(lines):
            words = [stands_for.get(word, word) for word in shlex.split(line)]
            if "console=" in line:  # tests/boards/test_flash_console.py does this
                assert isinstance(open_board(parse_address(words[-1])), ConsoleBoard)
                continue
            bundle = make_bundle(tmp_path / "in", version=str(number))
            words = [str(bundle) if word == "robot.bundle" else word for word in words[1:]]
            done = run(*words)
            assert done.exit_code == 0, done.output + box.log()
    finally:
        box.close()
