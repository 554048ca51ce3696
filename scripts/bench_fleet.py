"""How many devices one broker and one server serve: light devices, real MQTT, a real mosquitto.

    python -m scripts.bench_fleet                all rows, about a minute
    python -m scripts.bench_fleet --scale 0.01   a hundredth of the devices, to see that it works
    python -m scripts.bench_fleet --row rollout --json

Each row prints its goal, the anchor and what was measured here. Devices, broker and server share
the machine. Exit status 1: a row missed its goal.
"""

import argparse
import asyncio
import contextlib
import json
import os
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
from pathlib import Path

from device.errors import BrokerError
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
    Update,
    decode,
    encode,
)
from device.protocol.tls import TlsFiles
from device.protocol.topics import PREFIX, Topics
from device.update.bundle import write_bundle
from device.update.chunk_table import ChunkTable
from scripts.light_devices import Birth, Client, connect
from toolkit.fleet import operations, views
from toolkit.fleet.admission import admit, release_of
from toolkit.fleet.blob import Blob
from toolkit.fleet.broker import free_port
from toolkit.fleet.broker_files import BrokerFiles, write_mosquitto
from toolkit.fleet.certificates import init_identity
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.rollout import values as v

PROFILE = "bench"
WAIT_S = 120.0
STALL_S = 5.0  # without a whole file for so long, what is missing is asked for again
MIB = 1024**2
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


@contextlib.contextmanager
def server(folder: Path, port: int) -> Iterator[Path]:
    """Run `tandem fleet serve` on a new fleet, and yield its folder."""
    fleet = folder / "fleet"
    fleet.mkdir()
    (fleet / "fleet.toml").write_text(
        f'name = "bench"\n[broker]\nhost = "127.0.0.1"\nport = {port}\ntls = false\n'
    )
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "toolkit.cli", "fleet", "serve", "--fleet", str(fleet)],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield fleet
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


def reported(request: str = "", sha256: str = "") -> bytes:
    """Return what a light device reports: nothing runs, or the release is live."""
    running = Running(slot="a", sha256=sha256, name="bench", version="1") if sha256 else None
    update = Update(phase="live" if sha256 else "idle", sha256=sha256, request=request)
    return encode(
        Reported(
            agent="bench",
            profile=PROFILE,
            dev=True,
            warning="",
            session=1,
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
    desired = decode(payload, Desired)
    document = reported(desired.request, desired.release.blob.sha256)
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


async def rollout(count: int, port: int, folder: Path) -> Measured:
    """Roll a release out with `tandem fleet serve`, from its start to its end in the store."""
    bundle, release = make_bundle(folder, 1000)
    devices = [
        Client(name, ((Topics(name).desired, 1),), report_live, birth_of(name))
        for name in names(count)
    ]
    with server(folder, port) as fleet:
        await connect(port, devices)
        for device in devices:
            device.publish(Topics(device.name).reported, reported(), qos=1, retain=True)
        database = load_fleet(fleet).open_store()
        spec = v.RolloutSpec(key="bench", release=release, groups=("10%", "rest"))
        until_s = time.monotonic() + WAIT_S
        known = "SELECT count(*) FROM devices WHERE reported <> ''"
        while database.rows(known)[0][0] < count:
            await _pause(until_s, "not all devices are known to the server")
        begun_s = time.perf_counter()
        plan = operations.make_plan(database, spec)
        number = operations.start_rollout(database, spec, plan, bundle, "bench")
        while database.rows("SELECT status FROM rollouts")[0][0] != "finished":
            await _pause(until_s, f"{views.rollout_views(database, [number])}")
        seconds = time.perf_counter() - begun_s
        database.close()
    for device in devices:
        device.close()
    return Measured(seconds, "two groups; each event and document in the store")


async def _pause(until_s: float, what: str) -> None:
    if time.monotonic() > until_s:
        raise BrokerError(f"not within {WAIT_S:g} s: {what}")
    await asyncio.sleep(0.05)


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
        parts = topic.split("/")
        if len(parts) < 6:
            return  # its own request: the subscription takes that in
        number = int(parts[5])
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


async def download(count: int, port: int, folder: Path) -> Measured:
    """Let each device fetch 1 MiB in chunks from the server."""
    bundle, release = make_bundle(folder, MIB - 20480)
    content, remaining, done = bundle.read_bytes(), count, asyncio.Event()

    def one_done() -> None:
        nonlocal remaining
        remaining -= 1
        if not remaining:
            done.set()

    blob = Blob(bundle)
    rows = [_Download(release.blob, blob.table, content, one_done) for _ in range(count)]
    blob.close()
    devices = [
        Client(name, ((f"{Topics(name).root}/blob/+/#", 0),), row.on_message)
        for name, row in zip(names(count), rows, strict=True)
    ]
    with server(folder, port) as fleet:
        admit(fleet, bundle)
        await connect(port, devices)
        await _await_chunks(port, release.blob)
        begun_s = time.perf_counter()
        for device, row in zip(devices, rows, strict=True):
            row.begin(device)
        until_s = time.monotonic() + WAIT_S
        while not await _is_set(done, STALL_S):
            if time.monotonic() > until_s:
                raise BrokerError(
                    f"not within {WAIT_S:g} s: {remaining} of {count} have no whole file"
                )
            for device, row in zip(devices, rows, strict=True):
                row.ask_again(device)
        seconds = time.perf_counter() - begun_s
    for device in devices:
        device.close()
    return Measured(seconds, f"{count * len(content) / seconds / 1e6:.0f} MB/s")


async def _is_set(event: asyncio.Event, for_s: float) -> bool:
    """Wait for an event, at most so long."""
    try:
        await asyncio.wait_for(event.wait(), for_s)
    except asyncio.TimeoutError:
        return False
    return True


async def _await_chunks(port: int, blob: BlobSpec) -> None:
    """Wait until the server answers: it may just be starting."""
    answered = asyncio.Event()
    probe = Client("probe", ((f"{Topics('probe').root}/blob/+/#", 0),),
        lambda _client, _topic, _payload: answered.set())  # fmt: skip
    await connect(port, [probe])
    until_s = time.monotonic() + WAIT_S
    while not answered.is_set():
        request = encode(BlobGet(sha256=blob.sha256, chunks=(0,)))
        probe.publish(Topics("probe").blob_get, request, qos=1)
        await _pause(until_s, "the server serves no chunk")
    await asyncio.sleep(0.5)  # the answers to the other requests
    probe.close()


async def broadcast(count: int, port: int, folder: Path) -> Measured:
    """Publish 1 MiB once, to all devices."""
    content = secrets.token_bytes(MIB)
    chunks = [content[at : at + CHUNK_BYTES] for at in range(0, MIB, CHUNK_BYTES)]
    missing, done = count * len(chunks), asyncio.Event()

    def on_chunk(_client: Client, topic: str, payload: bytes) -> None:
        nonlocal missing
        assert payload == chunks[int(topic.rpartition("/")[2])]
        missing -= 1
        if not missing:
            done.set()

    devices = [Client(name, ((f"{PREFIX}/cast/+/+", 0),), on_chunk) for name in names(count)]
    caster = Client("caster", ((f"{PREFIX}/caster", 0),), on_chunk)
    await connect(port, [*devices, caster])
    begun_s = time.perf_counter()
    for number, chunk in enumerate(chunks):
        caster.publish(f"{PREFIX}/cast/{'0' * 64}/{number}", chunk)
        # Two under way: a broker drops what it cannot keep for a slow device.
        while missing > count * (len(chunks) - number + 1):
            await asyncio.sleep(0.005)
            if time.perf_counter() - begun_s > WAIT_S:
                raise BrokerError(f"{missing} chunks did not come within {WAIT_S:g} s")
    await within(done, lambda: f"{missing} chunks did not come")
    seconds = time.perf_counter() - begun_s
    for client in (*devices, caster):
        client.close()
    return Measured(seconds, f"{count * MIB / seconds / 1e6:.0f} MB/s")


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
    Row("rollout", "a rollout of `tandem fleet serve`", 9000, None, "AWS Jobs: 1000 a minute",
        PLAIN, rollout),
    Row("download", "1 MiB each from the server", 1000, 5.0, "4.9 s", PLAIN, download),
    Row("reconnect", "all connect again at once, mutual TLS", 2000, 2.5, "-", PLAIN, reconnect),
    Row("broadcast", "1 MiB to all at once", 2000, 6.5, "6.3 s", PLAIN, broadcast),
)  # fmt: skip


def measure(row: Row, scale: float) -> Result:
    """Run one row on a broker of its own."""
    count = max(2, round(row.devices * scale))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        persistence = row.broker.format(folder=folder)
        with mosquitto(folder, persistence) as (port, pid):
            measured = asyncio.run(row.run(count, port, folder))
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
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each row")
    options = parser.parse_args(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    passed = True
    for row in ROWS:
        if options.row is None or row.name in options.row:
            result = measure(row, options.scale)
            passed &= result.passed
            print(json.dumps(asdict(result)) if options.json else text(result), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
