"""Parts of `scripts.bench_transfer`: a broker, a line with delay and rate, a device that fetches.

The device is what the agent runs for a download, in a process of its own: connection, window,
hashes, part file and its syncs, and the comparison of the whole file at the end.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device.protocol.documents import BlobSpec, encode
from device.protocol.mqtt import Link, LinkEvent, LinkSettings, LinkUp, Message, queue_putter
from device.protocol.topics import Topics
from device.update.fetching import Fetching, FetchOptions
from device.update.sources.reader import SourceEnded, SourceEvent, SourcePart
from toolkit.fleet.brokers.local import free_port

HOST = "127.0.0.1"
DEVICE = "bench-1"
READY = "ready"
WAIT_S = 120.0
MAX_READ_BYTES = 1024**2
_PIECE_BYTES = 64 * 1024


@contextmanager
def mosquitto(folder: Path) -> Iterator[int]:
    """A broker with the settings of docs/transfer.md; yields its port."""
    binary = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if binary is None:
        raise SystemExit("mosquitto is missing: apt-get install mosquitto")
    port = free_port()
    config = folder / "mosquitto.conf"
    config.write_text(
        f"listener {port} {HOST}\nallow_anonymous true\nset_tcp_nodelay true\nlog_type error\n"
        "max_queued_messages 4000\nmax_inflight_messages 64\n"
    )
    process = subprocess.Popen((binary, "-c", str(config)))
    try:
        _await_port(port)
        yield port
    finally:
        process.kill()
        process.wait()


def _await_port(port: int) -> None:
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.02)
    raise SystemExit(f"nothing listens on port {port}")


@contextmanager
def chunk_server(folder: Path, port: int, qos: int = 0) -> Iterator[None]:
    """A chunk server in a process of its own."""
    command = (sys.executable, "-m", "toolkit.fleet.server.chunks", "--folder", str(folder))
    process = subprocess.Popen(
        (*command, "--broker", f"{HOST}:{port}", "--qos", str(qos)),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            raise SystemExit("the chunk server did not start")
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# -- a line


@contextmanager
def line(port: int, *, bytes_per_s: float, rtt_s: float) -> Iterator[int]:
    """A proxy to a broker that delays and limits both directions; yields its port."""
    ready: multiprocessing.SimpleQueue[int] = multiprocessing.SimpleQueue()
    process = multiprocessing.Process(
        target=_run_line, args=(port, bytes_per_s, rtt_s, ready), daemon=True
    )
    process.start()
    try:
        yield ready.get()
    finally:
        process.kill()
        process.join()


def _run_line(
    port: int, bytes_per_s: float, rtt_s: float, ready: "multiprocessing.SimpleQueue[int]"
) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(HOST, port)
        for one in (writer, up_writer):
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(
            _carry(reader, up_writer, bytes_per_s, rtt_s / 2),
            _carry(up_reader, writer, bytes_per_s, rtt_s / 2),
        )

    async def run() -> None:
        server = await asyncio.start_server(connect, HOST, 0, limit=_PIECE_BYTES)
        ready.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_s: float, delay_s: float
) -> None:
    """Pass bytes on: each piece leaves when the line is free, and arrives `delay_s` later."""
    loop = asyncio.get_running_loop()
    on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def arrive() -> None:
        while True:
            due_s, piece = await on_the_way.get()
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            writer.write(piece)
            await writer.drain()
            if not piece:
                writer.close()
                return

    arriving = asyncio.create_task(arrive())
    free_s = loop.time()
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(16 * 1024):
            free_s = max(free_s, loop.time()) + len(piece) / bytes_per_s
            on_the_way.put_nowait((free_s + delay_s, piece))
            # What a router holds: the sender notices the rate once this is full.
            if free_s - loop.time() > 0.02:
                await asyncio.sleep(free_s - loop.time() - 0.01)
    on_the_way.put_nowait((loop.time(), b""))
    with contextlib.suppress(ConnectionError):
        await arriving


# -- a device


@dataclass(frozen=True, slots=True)
class Download:
    """What a device measured: seconds from its first request to the compared file, and bytes.

    `sustained`: bytes a second from the first chunk to the last.
    """

    seconds: float
    bytes: int
    received: int
    chunks: int
    cpu_s: float
    sustained: float


@contextmanager
def device(
    spec: BlobSpec,
    folder: Path,
    port: int,
    *,
    qos: int = 0,
    bases: dict[str, Path] | None = None,
    places: tuple[str, ...] = ("mqtt",),
) -> Iterator["subprocess.Popen[str]"]:
    """A device in a process of its own, connected; a line on its standard input lets it begin."""
    folder.mkdir(exist_ok=True)
    task = {
        "spec": msgspec.to_builtins(spec),
        "folder": str(folder),
        "port": port,
        "qos": qos,
        "bases": {sha256: str(path) for sha256, path in (bases or {}).items()},
        "places": places,
    }
    process = subprocess.Popen(
        (sys.executable, "-m", "scripts.transfer_parts", json.dumps(task)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != READY:
            raise SystemExit("the device did not start")
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def begin(process: "subprocess.Popen[str]") -> None:
    """Let a device begin."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def result_of(process: "subprocess.Popen[str]") -> Download:
    """Wait until a device has all of its file."""
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        raise SystemExit("a device failed")
    return Download(**json.loads(text))


def _run_device(task: dict[str, object]) -> None:
    spec = msgspec.convert(task["spec"], BlobSpec)
    bases = {sha256: Path(path) for sha256, path in msgspec.convert(task["bases"], dict).items()}
    topics = Topics(DEVICE)
    events: queue.Queue[LinkEvent | SourceEvent] = queue.Queue(128)
    ended = threading.Event()
    qos = msgspec.convert(task["qos"], int)
    subscriptions = [(topics.chunks, qos)]
    settings = LinkSettings(
        HOST, msgspec.convert(task["port"], int), f"bench-{time.time_ns()}", tuple(subscriptions)
    )
    link = Link(settings, queue_putter(events, ended))
    link.start()
    while not isinstance(events.get(), LinkUp):
        pass
    print(READY, flush=True)
    sys.stdin.readline()
    fetching = Fetching(Path(str(task["folder"])), 64, queue_putter(events, ended))
    places = tuple(msgspec.convert(task["places"], list[str]))
    begun_s, cpu_s = time.monotonic(), time.process_time()
    names = (f"{spec.sha256}.bundle",)
    options = FetchOptions(bases, places=places, names=names)
    fetching.begin(spec, options)
    received = chunks = first_bytes = 0
    first_s = begun_s
    while not fetching.complete:
        request = fetching.next_request(time.monotonic())
        if request is not None:
            link.publish(topics.blob_get, encode(request), qos=0)
        failure = fetching.advance(time.monotonic())
        if failure:
            raise SystemExit(failure)
        wake_s = fetching.wake_at_s
        timeout_s = None if wake_s is None else max(0.0, wake_s - time.monotonic())
        with contextlib.suppress(queue.Empty):
            event = events.get(timeout=timeout_s)
            if isinstance(event, Message):
                received, chunks = received + len(event.payload), chunks + 1
            _take(fetching, topics, event)
            if not first_bytes and fetching.received_bytes:
                first_bytes, first_s = fetching.received_bytes, time.monotonic()
    sustained = (spec.bytes - first_bytes) / max(time.monotonic() - first_s, 1e-6)
    fetching.finish()
    seconds = time.monotonic() - begun_s
    cpu_s = time.process_time() - cpu_s
    result = {"seconds": seconds, "bytes": spec.bytes, "received": received, "chunks": chunks}
    print(json.dumps({**result, "cpu_s": cpu_s, "sustained": sustained}), flush=True)
    ended.set()
    link.close()


def _take(fetching: Fetching, topics: Topics, event: LinkEvent | SourceEvent) -> None:
    now_s = time.monotonic()
    if not isinstance(event, Message):
        if isinstance(event, SourcePart | SourceEnded):
            fetching.on_source(event, now_s)
        return
    sha256, _, part = event.topic.removeprefix(f"{topics.root}/blob/").partition("/")
    fetching.take(sha256, part, event.payload, now_s)


def main() -> None:
    """Run a device; `scripts.bench_transfer` starts it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("task")
    _run_device(json.loads(parser.parse_args().task))


if __name__ == "__main__":
    main()
