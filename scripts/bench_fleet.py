"""How many devices one broker and one server serve: light devices, real MQTT, a real mosquitto.

    python -m scripts.bench_fleet                all rows, about a minute
    python -m scripts.bench_fleet --scale 0.01   a hundredth of the devices, to see that it works
    python -m scripts.bench_fleet --row rollout --json
    python -m scripts.bench_fleet --row shared --store postgresql://user@host/empty

Each row prints its goal, the anchor and what was measured here. Devices, broker and server share
the machine. Exit status 1: a row missed its goal.
"""

import argparse
import asyncio
import contextlib
import json
import os
import queue
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from device.agent.config import TrustTable
from device.agent.verification import (
    MetadataAsked,
    Verification,
    VerificationEnded,
    VerificationEvent,
)
from device.errors import BrokerError
from device.protocol.device_key import ReportSigner
from device.protocol.documents import (
    CHUNK_BYTES,
    DOCUMENT_FORMAT,
    BlobGet,
    BlobSpec,
    Desired,
    PipelineReport,
    ReleaseSpec,
    Reported,
    Running,
    StateDocument,
    TufGet,
    Update,
    encode,
)
from device.protocol.mqtt import Link, LinkEvent, LinkSettings, LinkUp, Message
from device.protocol.signed import open_desired
from device.protocol.tls import TlsFiles
from device.protocol.topics import PREFIX, Topics
from device.trust.exchange import Trusted
from device.update.bundle import write_bundle
from device.update.chunk_table import ChunkTable
from scripts.light_devices import Birth, Client, connect
from toolkit.fleet.authority import Authority
from toolkit.fleet.brokers.local import free_port
from toolkit.fleet.brokers.mosquitto import BrokerFiles, write_mosquitto
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.release import release_of
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.folder import SETTINGS, make_fleet
from toolkit.fleet.rollout import values as v
from toolkit.fleet.server import operations
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.lease import read_leases
from toolkit.fleet.trust.certificates import init_identity, issue_device
from toolkit.fleet.trust.director import addressed, next_counter, sign_desired
from toolkit.fleet.trust.publish import publish_bundle
from toolkit.fleet.trust.repository import FleetRepository

PROFILE = "bench"
PROBE = "probe"  # asks until the server answers
WAIT_S = 120.0
STALL_S = 5.0  # without a whole file for so long, what is missing is asked for again
MIB = 1024**2
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")  # what processor times are counted in
WINDOW = 8  # chunks that a light device asks for at once
PLAIN = "persistence false\n"
# Retained documents survive a kill: written at each change, or once a second.
EACH_CHANGE = (
    "persistence true\npersistence_location {folder}/\nautosave_interval 1\n"
    "autosave_on_changes true\n"
)
EACH_SECOND = (
    "persistence true\npersistence_location {folder}/\nautosave_interval 1\n"
    "autosave_on_changes false\n"
)
BROKER = (
    "listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n"
    "max_queued_messages 0\nuser root\n"
)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a row gave: seconds, and what else is worth knowing."""

    seconds: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: `goal_s`: the most seconds it may take at full size; None: no goal is set.
    `anchor`: what others, or an earlier measurement, reached."""

    name: str
    what: str
    devices: int
    goal_s: float | None
    anchor: str
    broker: str
    run: Callable[[int, int, Path], Coroutine[None, None, Measured]]


@dataclass(frozen=True, slots=True)
class Result:
    """A row and what was measured."""

    name: str
    what: str
    devices: int
    goal_s: float | None
    anchor: str
    ours_s: float
    per_s: float
    note: str
    passed: bool


# -- parts


@contextlib.contextmanager
def mosquitto(folder: Path, persistence: str) -> Iterator[tuple[int, int]]:
    """Run a mosquitto and yield its port and process id; BrokerError if it does not start."""
    port = free_port()
    config = folder / "mosquitto.conf"
    config.write_text((BROKER + persistence).format(port=port, folder=folder))
    with run_mosquitto(config, port) as pid:
        yield port, pid


@contextlib.contextmanager
def run_mosquitto(config: Path, port: int) -> Iterator[int]:
    """Run a mosquitto with this configuration, yield its process id, and kill it."""
    binary = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if binary is None:
        raise BrokerError("mosquitto is not installed: apt-get install mosquitto")
    with (config.parent / "mosquitto.log").open("ab") as log:
        process = subprocess.Popen([binary, "-c", str(config)], stdout=log, stderr=log)
    try:
        _await_port(port, process)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _await_port(port: int, process: "subprocess.Popen[bytes]") -> None:
    until_s = time.monotonic() + WAIT_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > until_s:
            raise BrokerError("mosquitto did not start: see its log")
        time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class SignedFleet:
    """A fleet of `tandem fleet init`, its broker and server, which run, and one signed release."""

    folder: Path
    port: int
    broker_pid: int
    server_pid: int
    repository: FleetRepository
    bundle: Path
    release: ReleaseSpec
    tls: Path  # key and certificate of each device

    def files(self, name: str) -> TlsFiles:
        """Return what a device connects with."""
        return TlsFiles(*(self.tls / file for file in ("ca.crt", f"{name}.crt", f"{name}.key")))


@contextlib.contextmanager
def signed_fleet(
    folder: Path, devices: Sequence[str], bundle_bytes: int, store: str = ""
) -> Iterator[SignedFleet]:
    """Run broker and server of a new fleet with mutual TLS and a published release. `store`: a URL,
    empty: SQLite."""
    fleet, port = folder / "fleet", free_port()
    make_fleet(fleet, name="bench", broker=f"127.0.0.1:{port}")
    if store:
        settings = (fleet / SETTINGS).read_text()
        (fleet / SETTINGS).write_text(settings.replace("sqlite:///fleet.db", store))
    repository, authority = FleetRepository(fleet), Authority(fleet / "identity")
    bundle, release = make_bundle(folder, bundle_bytes)
    target = publish_bundle(repository, bundle).target
    release = msgspec.structs.replace(release, target=target)
    for name in devices:
        issue_device(authority, name, folder / "tls")
    config = fleet / "broker" / "mosquitto.conf"
    with run_mosquitto(config, port) as broker, serving(fleet, folder) as server:
        yield SignedFleet(fleet, port, broker, server, repository, bundle, release, folder / "tls")


@contextlib.contextmanager
def serving(fleet: Path, folder: Path) -> Iterator[int]:
    """Run `tandem fleet serve` on a fleet, and yield its process id; `folder`: for its log."""
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "toolkit.cli", "fleet", "serve", "--fleet", str(fleet)],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30.0)


def make_bundle(folder: Path, size: int) -> tuple[Path, ReleaseSpec]:
    """Write a bundle of about `size` random bytes, for the profile of the bench."""
    for name, data in (("e", secrets.token_bytes(size)), ("p", b"p"), ("l", b"l\n")):
        (folder / name).write_bytes(data)
    path = folder / "bench.bundle"
    write_bundle(
        path, engine=folder / "e", pipeline=folder / "p", labels=folder / "l", name="bench",
        version="1", profile=PROFILE,
    )  # fmt: skip
    return path, release_of(path)


def reported(counter: int, request: str = "", sha256: str = "") -> bytes:
    """Return what a light device reports: nothing runs, or the release is live."""
    running = Running(slot="a", sha256=sha256, name="bench", version="1") if sha256 else None
    update = Update(phase="live" if sha256 else "idle", sha256=sha256, request=request)
    return encode(
        Reported(
            agent="bench",
            profile=PROFILE,
            dev=False,
            warning="",
            session=1,
            counter=counter,
            running=running,
            pipeline=PipelineReport(status="running"),
            update=update,
        )
    )


def birth_of(device: str) -> Birth:
    """Return the birth and the will of a device."""
    documents = (encode(StateDocument(state=state, session=1)) for state in ("online", "lost"))
    return Birth(Topics(device).state, *documents)


def report_live(client: Client, topic: str, payload: bytes) -> None:
    """Do what an agent does in the end: report that the desired release is live."""
    desired, _ = open_desired(payload)
    document = reported(2, desired.request, desired.release.blob.sha256)
    client.publish(Topics(client.name).reported, document, qos=1, retain=True)


def names(count: int) -> list[str]:
    """Return the ids of light devices."""
    return [f"d{number:05}" for number in range(count)]


async def within(event: asyncio.Event, what: Callable[[], str]) -> None:
    """Wait for an event, BrokerError after WAIT_S."""
    try:
        await asyncio.wait_for(event.wait(), WAIT_S)
    except asyncio.TimeoutError as error:
        raise BrokerError(f"not within {WAIT_S:g} s: {what()}") from error


# -- rows


async def desired_to_reported(count: int, port: int, folder: Path) -> Measured:
    """Publish a desired document to each device, until each one's report has come back."""
    blob = BlobSpec(sha256="0" * 64, bytes=1, chunk_bytes=CHUNK_BYTES, index_sha256="0" * 64)
    release = ReleaseSpec(name="bench", version="1", profile=PROFILE, blob=blob)
    document = encode(Desired(format=DOCUMENT_FORMAT, request="r", release=release))
    heard: set[str] = set()
    done = asyncio.Event()

    def on_report(_client: Client, topic: str, _payload: bytes) -> None:
        heard.add(topic)
        if len(heard) == count:
            done.set()

    devices = [
        Client(name, ((Topics(name).desired, 1),), report_live, birth_of(name))
        for name in names(count)
    ]
    operator = Client("operator", ((f"{PREFIX}/+/reported", 1),), on_report)
    begun_s = time.perf_counter()
    await connect(port, [*devices, operator])
    connected_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    for device in devices:
        operator.publish(Topics(device.name).desired, document, qos=1, retain=True)
    await within(done, lambda: f"{len(heard)} of {count} have reported")
    seconds = time.perf_counter() - begun_s
    for client in (*devices, operator):
        client.close()
    return Measured(seconds, f"connected in {connected_s:.2f} s")


async def rollout(
    count: int, _port: int, folder: Path, store: str = "", servers: int = 1
) -> Measured:
    """Roll a release out with `tandem fleet serve`, from its start to its end in the store: each
    document and each report is signed, each connection has mutual TLS. BrokerError: a device got
    no document, or two."""
    with signed_fleet(folder, names(count), 1000, store) as fleet, contextlib.ExitStack() as stack:
        pids = [fleet.server_pid]
        pids += [stack.enter_context(serving(fleet.folder, folder)) for _ in range(servers - 1)]
        orders: dict[str, set[int]] = {}  # device -> the counters of the documents that it got
        signers = {name: ReportSigner(fleet.tls / f"{name}.key") for name in names(count)}

        def report(client: Client, document: bytes) -> None:
            payload = signers[client.name].sign(document)
            client.publish(Topics(client.name).reported, payload, qos=1, retain=True)

        def on_desired(client: Client, _topic: str, payload: bytes) -> None:
            desired, _ = open_desired(payload)
            counters = orders.setdefault(client.name, set())
            if desired.counter in counters:  # said again, to which an agent says nothing new
                return
            counters.add(desired.counter)
            report(client, reported(2, desired.request, desired.release.blob.sha256))

        devices = [
            Client(
                name, ((Topics(name).desired, 1),), on_desired, birth_of(name),
                fleet.files(name).context(),
            )
            for name in names(count)
        ]  # fmt: skip
        await connect(fleet.port, devices)
        for device in devices:
            report(device, reported(1))
        database = load_fleet(fleet.folder).open_store()
        spec = v.RolloutSpec(key="bench", release=fleet.release, groups=("10%", "rest"))
        until_s = time.monotonic() + WAIT_S
        while len(read_leases(database)) < servers:
            await _pause(until_s, "not all servers have a lease")
        known = "SELECT count(*) FROM devices WHERE reported = 1"
        while database.rows(known)[0][0] < count:
            await _pause(until_s, "not all devices are known to the server")
        plan = operations.make_plan(database, spec)
        run = partial(operations.start_rollout, database, spec, plan, fleet.bundle, "bench")
        seconds, note = await _carry_out(database, run, count, pids)
        database.close()
        for device in devices:
            device.close()
    twice = sum(len(counters) > 1 for counters in orders.values())
    if len(orders) < count or twice:
        raise BrokerError(f"{len(orders)} of {count} devices were ordered, {twice} of them twice")
    return Measured(seconds, f"two groups, each device ordered once; {note}")


async def _carry_out(
    database: Database, start: Callable[[], int], count: int, pids: Sequence[int]
) -> tuple[float, str]:
    """Start a rollout and wait for its end; return the seconds, and what it took. The first of
    several servers is killed (-9) when a quarter of the devices is live."""
    before = [cpu_s(pid) for pid in pids]
    begun_s = time.perf_counter()
    number = start()
    until_s = time.monotonic() + WAIT_S

    async def until(sql: str, reached: Callable[[Any], bool]) -> float:
        while not reached(database.rows(sql)[0][0]):
            await _pause(until_s, f"rollout {number}: {sql}", 0.01)
        return time.perf_counter() - begun_s

    live = "SELECT count(*) FROM devices WHERE phase = 'live'"
    used_s, note = 0.0, ""
    if len(pids) > 1:
        killed_s = await until(live, lambda devices: devices >= count / 4)
        used_s = sum(cpu_s(pid) - known_s for pid, known_s in zip(pids, before, strict=True))
        first, pids, killed = int(database.rows(live)[0][0]), pids[1:], pids[0]
        before = [cpu_s(pid) for pid in pids]
        os.kill(killed, signal.SIGKILL)
        os.waitpid(killed, 0)
        taken_s = await until("SELECT count(*) FROM lease", lambda leases: leases == len(pids))
        rest = count - int(database.rows(live)[0][0])
        note = (
            f"until the kill {first / killed_s:.0f} a second, "
            f"{first / max(used_s, TICK_S):.0f} of one core; "
            f"its lease taken after {taken_s - killed_s:.2f} s; "
        )
    seconds = await until("SELECT status FROM rollouts", lambda status: status == "finished")
    rest_s = sum(cpu_s(pid) - known_s for pid, known_s in zip(pids, before, strict=True))
    if note:
        note += (
            f"then {rest / (seconds - taken_s):.0f} a second, "
            f"{(count - first) / max(rest_s, TICK_S):.0f} of one core; "
        )
    used_s = max(used_s + rest_s, TICK_S)
    return seconds, (
        f"{note}for each {used_s / count * 1000.0:.2f} ms of a core in all servers, "
        f"{count / used_s:.0f} a second of one core"
    )


async def shared(count: int, port: int, folder: Path, store: str) -> Measured:
    """The same by two servers on a store in PostgreSQL, of which one is killed."""
    return await rollout(count, port, folder, store, 2)


async def _pause(until_s: float, what: str, pause_s: float = 0.05) -> None:
    if time.monotonic() > until_s:
        raise BrokerError(f"not within {WAIT_S:g} s: {what}")
    await asyncio.sleep(pause_s)


class _Download:
    """A light device that fetches a blob with a window, and compares each chunk."""

    def __init__(
        self, spec: BlobSpec, table: ChunkTable, content: bytes, done: Callable[[], None]
    ) -> None:
        self._spec = spec
        self._table = table
        self._content = content
        self._done = done
        self._next = 0
        self._missing = set(range(table.count))

    def begin(self, client: Client) -> None:
        self._ask(client, min(WINDOW, self._table.count))

    def on_message(self, client: Client, topic: str, payload: bytes) -> None:
        if not _is_chunk(topic):
            return
        number = int(topic.split("/")[5])
        begin = self._table.starts[number]
        assert payload == self._content[begin : begin + self._table.size(number)]
        if number not in self._missing:
            return  # it was asked for twice
        self._missing.remove(number)
        if not self._missing:
            self._done()
        elif self._next < self._table.count and len(self._missing) % (WINDOW // 2) == 0:
            self._ask(client, min(WINDOW // 2, self._table.count - self._next))

    def ask_again(self, client: Client) -> None:
        """Ask for what was asked for and did not come, as a device does that hears nothing."""
        lost = tuple(number for number in sorted(self._missing) if number < self._next)
        if lost:
            request = encode(BlobGet(sha256=self._spec.sha256, chunks=lost))
            client.publish(Topics(client.name).blob_get, request, qos=1)

    def _ask(self, client: Client, count: int) -> None:
        chunks = tuple(range(self._next, self._next + count))
        self._next += count
        request = encode(BlobGet(sha256=self._spec.sha256, chunks=chunks))
        client.publish(Topics(client.name).blob_get, request, qos=1)


async def download(count: int, _port: int, folder: Path) -> Measured:
    """Let each device fetch 1 MiB in chunks from the server, with mutual TLS."""
    remaining, done = count, asyncio.Event()

    def one_done() -> None:
        nonlocal remaining
        remaining -= 1
        if not remaining:
            done.set()

    with signed_fleet(folder, (*names(count), PROBE), MIB - 20480) as fleet:
        content, blob = fleet.bundle.read_bytes(), Blob(fleet.bundle)
        downloads = [
            _Download(fleet.release.blob, blob.table, content, one_done) for _ in range(count)
        ]
        blob.close()
        devices = [
            Client(name, ((_chunks_of(name), 0),), row.on_message, tls=fleet.files(name).context())
            for name, row in zip(names(count), downloads, strict=True)
        ]
        await connect(fleet.port, devices)
        await _await_chunks(fleet)
        pids = (fleet.broker_pid, fleet.server_pid)
        begun_s, before = time.perf_counter(), [cpu_s(pid) for pid in pids]
        for device, row in zip(devices, downloads, strict=True):
            row.begin(device)
        until_s = time.monotonic() + WAIT_S
        while not await _is_set(done, STALL_S):
            if time.monotonic() > until_s:
                raise BrokerError(
                    f"not within {WAIT_S:g} s: {remaining} of {count} have no whole file"
                )
            for device, row in zip(devices, downloads, strict=True):
                row.ask_again(device)
        seconds = time.perf_counter() - begun_s
        broker_ms, server_ms = (
            (cpu_s(pid) - used_s) / count * 1000.0 for pid, used_s in zip(pids, before, strict=True)
        )
        for device in devices:
            device.close()
    return Measured(
        seconds,
        f"{count * len(content) / seconds / 1e6:.0f} MB/s; for each {broker_ms:.2f} ms of a core "
        f"in the broker and {server_ms:.2f} ms in the server",
    )


def _chunks_of(name: str) -> str:
    return f"{Topics(name).root}/blob/+/#"


def _is_chunk(topic: str) -> bool:
    """Whether it is no request of the client itself: its subscription takes those in."""
    return len(topic.split("/")) >= 6


async def _is_set(event: asyncio.Event, for_s: float) -> bool:
    """Wait for an event, at most so long."""
    try:
        await asyncio.wait_for(event.wait(), for_s)
    except asyncio.TimeoutError:
        return False
    return True


async def _await_chunks(fleet: SignedFleet) -> None:
    """Wait until the server answers: it may just be starting."""
    answered = asyncio.Event()

    def on_message(_client: Client, topic: str, _payload: bytes) -> None:
        if _is_chunk(topic):
            answered.set()

    tls = fleet.files(PROBE).context()
    probe = Client(PROBE, ((_chunks_of(PROBE), 0),), on_message, tls=tls)
    await connect(fleet.port, [probe])
    until_s = time.monotonic() + WAIT_S
    while not answered.is_set():
        request = encode(BlobGet(sha256=fleet.release.blob.sha256, chunks=(0,)))
        probe.publish(Topics(PROBE).blob_get, request, qos=1)
        await _pause(until_s, "the server serves no chunk")
    await asyncio.sleep(0.5)  # the answers to the other requests
    probe.close()


async def reconnect(count: int, _port: int, folder: Path) -> Measured:
    """Let all devices connect again, at once, after their broker was killed: mutual TLS with a full
    handshake each, the configuration of `tandem fleet init`, no pause between them."""
    authority = init_identity(folder / "identity", fleet="bench", hosts=("127.0.0.1",))
    contexts = {}
    for name in names(count):
        key, issued = authority.issue(name)
        certificate, key_file = folder / f"{name}.crt", folder / f"{name}.key"
        certificate.write_bytes(issued.pem)
        key_file.write_bytes(key)
        contexts[name] = TlsFiles(authority.folder / "ca.crt", certificate, key_file).context()
    files = BrokerFiles(folder / "broker", authority.folder, free_port())
    write_mosquitto(files)
    config = files.folder / "mosquitto.conf"
    seconds = []
    for _storm in ("first", "again"):
        devices = [
            Client(name, ((Topics(name).desired, 1),), report_live, birth_of(name), contexts[name])
            for name in names(count)
        ]
        with run_mosquitto(config, files.port) as pid:
            begun_s, own_s = time.perf_counter(), time.process_time()
            await connect(files.port, devices)
            seconds.append(time.perf_counter() - begun_s)
            own_ms = (time.process_time() - own_s) / count * 1000.0
            broker_ms = cpu_s(pid) / count * 1000.0
        for device in devices:
            device.close()
    first_s, again_s = seconds
    return Measured(
        again_s,
        f"first {count / first_s:.0f} a second; for each {broker_ms:.2f} ms of a core in the "
        f"broker and {own_ms:.2f} ms in the devices",
    )


class _Events(queue.Queue["tuple[_Board, LinkEvent | VerificationEvent]"]):
    """Events of all boards, each with its board."""


class _Board:
    """What of an agent checks a signed release: its connection, and its process for the check."""

    def __init__(self, name: str, fleet: SignedFleet, events: "_Events") -> None:
        topics = Topics(name)
        settings = LinkSettings(
            "127.0.0.1", fleet.port, name, ((topics.tuf_replies, 0),), tls=fleet.files(name)
        )
        self.name, self.is_up, self.is_trusted = name, False, False
        self._tuf_get = topics.tuf_get
        self._link = Link(settings, lambda event: events.put((self, event)))
        self._check = Verification(
            lambda event: events.put((self, event)),
            self.ask,
            device=name,
            trust=TrustTable(dir=str(fleet.folder / "trust")),
            state_dir=fleet.folder.parent / name,
        )
        self._link.start()

    def ask(self, get: TufGet) -> None:
        """Ask the server for a file."""
        self._link.publish(self._tuf_get, encode(get), qos=0)

    def begin(self, document: bytes) -> None:
        """Begin to check a desired document."""
        self._check.take(document, time.monotonic())

    def advance(self) -> None:
        """Start the check if it is due."""
        self._check.advance(time.monotonic())

    def take(self, event: LinkEvent | VerificationEvent) -> None:
        """Take an event of the connection or of the check."""
        if isinstance(event, LinkUp):
            self.is_up = True
        elif isinstance(event, Message):
            request, number = event.topic.split("/")[-2:]
            self._check.on_reply(request, number, event.payload)
        elif isinstance(event, MetadataAsked | VerificationEnded):
            verdict = self._check.on_event(event, time.monotonic())
            self.is_trusted |= isinstance(verdict, Trusted)

    def close(self) -> None:
        """End both."""
        self._check.stop()
        self._link.close()


async def signed(count: int, _port: int, folder: Path) -> Measured:
    """Let all boards check a signed release at once, with the processes that agents have for it and
    mutual TLS, from a fleet of `tandem fleet init`."""
    events = _Events()
    with signed_fleet(folder, names(count), 1000) as fleet, contextlib.ExitStack() as stack:
        desired = Desired(format=DOCUMENT_FORMAT, request="r", release=fleet.release)
        boards = [
            stack.enter_context(contextlib.closing(_Board(name, fleet, events)))
            for name in names(count)
        ]
        _take_until(lambda: all(board.is_up for board in boards), boards, events)
        _await_metadata(boards, events)
        for board in boards:
            document = addressed(desired, board.name, next_counter())
            board.begin(sign_desired(document, fleet.repository.director_signer()))
        begun_s, pids = time.perf_counter(), (fleet.broker_pid, fleet.server_pid)
        before = [cpu_s(pid) for pid in pids]
        board_s = _children_s()
        _take_until(lambda: all(board.is_trusted for board in boards), boards, events)
        seconds = time.perf_counter() - begun_s
        board_ms = (_children_s() - board_s) / count * 1000.0
        broker_ms, server_ms = (
            (cpu_s(pid) - used_s) / count * 1000.0 for pid, used_s in zip(pids, before, strict=True)
        )
    return Measured(
        seconds,
        f"for each {board_ms:.0f} ms of a core on the board, {server_ms:.1f} ms in the server and "
        f"{broker_ms:.1f} ms in the broker",
    )


def _take_until(done: Callable[[], bool], boards: Sequence[_Board], events: "_Events") -> None:
    until_s = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > until_s:
            waiting = sum(not board.is_trusted for board in boards)
            raise BrokerError(f"not within {WAIT_S:g} s: {waiting} boards have not checked it")
        with contextlib.suppress(queue.Empty):
            board, event = events.get(timeout=0.05)
            board.take(event)
        for board in boards:
            board.advance()


def _await_metadata(boards: Sequence[_Board], events: "_Events") -> None:
    """Wait until the server answers: it may just be starting."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        boards[0].ask(TufGet(id="f0", path="metadata/1.root.json"))
        with contextlib.suppress(queue.Empty):
            if isinstance(events.get(timeout=0.5)[1], Message):
                return
    raise BrokerError(f"the server serves no metadata within {WAIT_S:g} s")


def _children_s() -> float:
    """Return how long the children of this process that have ended were on a core, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_s(pid: int) -> float:
    """Return how long a process has been on a core, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


ROWS: tuple[Row, ...] = (
    Row("reported", "desired -> reported", 9000, 2.0, "1.1 s; hawkBit polls every 300 s", PLAIN,
        desired_to_reported),
    Row("each-second", "the same, written to disk each second", 9000, None, "-", EACH_SECOND,
        desired_to_reported),
    Row("each-change", "the same, written to disk at each change", 900, None, "-", EACH_CHANGE,
        desired_to_reported),
    Row("rollout", "a rollout of `tandem fleet serve`, signed, mutual TLS", 2000, None,
        "AWS Jobs: 1000 a minute", PLAIN, rollout),
    Row("shared", "the same, two servers, one is killed; --store", 2000, None, "-", PLAIN, shared),
    Row("download", "1 MiB each from the server, mutual TLS", 1000, 5.0, "2.3 s without TLS",
        PLAIN, download),
    Row("reconnect", "all connect again at once, mutual TLS", 2000, 2.5, "-", PLAIN, reconnect),
    Row("signed", "all check a signed release at once, mutual TLS", 60, None, "-", PLAIN, signed),
)  # fmt: skip


def measure(row: Row, scale: float, store: str = "") -> Result:
    """Run one row on a broker of its own; `store`: an empty one in PostgreSQL, for `shared`."""
    run = partial(shared, store=store) if row.run is shared else row.run
    count = max(2, round(row.devices * scale))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        persistence = row.broker.format(folder=folder)
        with mosquitto(folder, persistence) as (port, pid):
            measured = asyncio.run(run(count, port, folder))
            broker_mb = _peak_mb(pid)
    passed = row.goal_s is None or measured.seconds <= row.goal_s
    return Result(
        row.name, row.what, count, row.goal_s, row.anchor, round(measured.seconds, 6),
        round(count / measured.seconds, 1), f"{measured.note}; broker {broker_mb:.0f} MB", passed,
    )  # fmt: skip


def _peak_mb(pid: int) -> float:
    """Return the most memory that a process has held, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1000.0
    return 0.0


def text(result: Result) -> str:
    """Return a result as one line."""
    goal = "no goal" if result.goal_s is None else f"goal {result.goal_s:g} s"
    return (
        f"{result.devices:6} devices  {result.what:45} {goal:12} anchor: {result.anchor:35} "
        f"ours: {result.ours_s:.2f} s, {result.per_s:.0f} a second; {result.note}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="times the devices of each row")
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS])
    parser.add_argument("--store", default="", help="URL of an empty PostgreSQL, for --row shared")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each row")
    options = parser.parse_args(arguments)
    if "shared" in (options.row or ()) and not options.store.startswith("postgresql://"):
        parser.error(
            "--row shared has two servers on one store, which only PostgreSQL lets them share, and "
            f"--store is {options.store or 'not given'}: make an empty database, and give its URL "
            "as --store postgresql://user@host/empty"
        )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    passed = True
    for row in ROWS:
        is_asked = (
            row.name in options.row if options.row else row.run is not shared or options.store
        )
        if is_asked:
            result = measure(row, options.scale, options.store)
            passed &= result.passed
            print(json.dumps(asdict(result)) if options.json else text(result), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
