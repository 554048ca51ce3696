"""How fast SMP clients, stock ones and our own, upload to the board's server, over a pty and UDP
on this machine.

    python -m scripts.bench_serial               all rows, a few seconds
    python -m scripts.bench_serial --mb 1 --json out.json

Each row prints its goal, the anchor (the same stock client against a server of 60 lines that keeps
nothing, measured elsewhere) and what was measured here: the best of `--runs`. Ours writes the file,
syncs it and compares its SHA-256. Exit status 1: an upload did not arrive whole.
"""

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import pty
import secrets
import sys
import tempfile
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from smpclient import SMPClient
from smpclient.transport import SMPTransport
from smpclient.transport.serial import SMPSerialRawTransport, SMPSerialTransport
from smpclient.transport.udp import SMPUDPTransport

from device.protocol.documents import Update
from device.smp.framing import FRAMINGS
from device.smp.inbox import Inbox
from device.smp.message import MAX_MESSAGE
from device.smp.server import UdpServer, serve_file
from device.smp.service import BoardState, SmpService
from device.update.slots import SlotState
from toolkit.fleet.transports.smp_client import SmpClient as OwnClient
from toolkit.fleet.transports.smp_links import Line, SerialLine, UdpLine

UDP_PORT = 1337  # the only one that the stock client asks


def _stock(transport: Callable[[], SMPTransport]) -> Callable[[str, bytes], float]:
    """Return what uploads with the stock client and returns the seconds of it."""

    async def upload(address: str, data: bytes) -> float:
        async with SMPClient(transport(), address, timeout_s=30.0) as client:
            begun_s = time.monotonic()
            async for _offset in client.upload(data):
                pass
            return time.monotonic() - begun_s

    return lambda address, data: asyncio.run(upload(address, data))


def _own(line: Callable[[str], Line]) -> Callable[[str, bytes], float]:
    """The same with the client of `tandem flash`."""

    def upload(address: str, data: bytes) -> float:
        client = OwnClient(line(address))
        client.connect()
        try:
            begun_s = time.monotonic()
            client.upload(0, data, hashlib.sha256(data).digest())
            return time.monotonic() - begun_s
        finally:
            client.close()

    return upload


@dataclass(frozen=True, slots=True)
class Row:
    """A way to upload. `goal_mb_s` and `anchor_mb_s`: 10^6 bytes a second; None: there is none.

    `upload`: takes an address and the data, returns seconds.
    """

    name: str
    line: Literal["console", "raw", "udp"]
    goal_mb_s: float | None
    anchor_mb_s: float | None
    upload: Callable[[str, bytes], float]


BAUD = 115200  # a pty has no rate
ROWS = (
    Row("console", "console", 3.8, 3.8, _stock(SMPSerialTransport)),
    Row("raw", "raw", 11.7, 11.7, _stock(lambda: SMPSerialRawTransport(mtu=MAX_MESSAGE))),
    Row("udp", "udp", None, None, _stock(SMPUDPTransport)),
    Row("own console", "console", 3.8, 3.8, _own(lambda at: SerialLine(at, BAUD, "console"))),
    Row("own raw", "raw", 11.7, 11.7, _own(lambda at: SerialLine(at, BAUD, "raw"))),
    Row("own udp", "udp", None, None, _own(lambda at: UdpLine(at, UDP_PORT))),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a row gave, 10^6 bytes a second."""

    name: str
    goal_mb_s: float | None
    anchor_mb_s: float | None
    ours_mb_s: float


def measure(row: Row, data: bytes, runs: int) -> Measured:
    """Upload `runs` times; return the best rate. Raises RuntimeError: it did not arrive whole."""
    rates = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            with _served(row.line, Path(folder)) as address:
                seconds = row.upload(address, data)
            bundle = Inbox(Path(folder)).bundle
            if bundle is None or bundle.read_bytes() != data:
                raise RuntimeError(f"{row.name}: the upload did not arrive whole")
        rates.append(len(data) / 1e6 / seconds)
    return Measured(row.name, row.goal_mb_s, row.anchor_mb_s, round(max(rates), 2))


@contextmanager
def _served(name: str, folder: Path) -> Iterator[str]:
    """Serve a line in a process of its own; yield the address that a client opens."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    service = _service(folder)
    # Bound before the client asks; its thread is started in the child.
    udp = UdpServer("127.0.0.1", UDP_PORT, service.handle) if name == "udp" else None
    server = multiprocessing.get_context("fork").Process(
        target=_serve, args=(name, service, udp, master)
    )
    server.start()
    try:
        yield "127.0.0.1" if name == "udp" else os.ttyname(slave)
    finally:
        server.terminate()
        server.join()
        if udp is not None:
            udp.stop()
        os.close(master)
        os.close(slave)


def _service(folder: Path) -> SmpService:
    state = BoardState(SlotState(), Update(phase="idle"))
    return SmpService(
        Inbox(folder),
        device="bench",
        profile="bench",
        dev=True,
        state=lambda: state,
        install=lambda _handed_in: None,
        restart=lambda: None,
    )


def _serve(name: str, service: SmpService, udp: UdpServer | None, file: int) -> None:
    """Serve until the process is ended."""
    ended = threading.Event()
    if udp is not None:
        udp.start()
        ended.wait()
    framing = FRAMINGS["raw" if name == "raw" else "console"]()
    serve_file(file, framing, service.handle, ended)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=float, default=16.0, help="size of the file (default: 16)")
    parser.add_argument("--runs", type=int, default=3, help="the best of so many (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    arguments = parser.parse_args(argv)
    data, rows = secrets.token_bytes(int(arguments.mb * 1e6)), []
    print(f"{'row':<12} {'goal MB/s':>10} {'anchor MB/s':>12} {'ours MB/s':>10}")
    for row in ROWS:
        try:
            measured = measure(row, data, arguments.runs)
        except RuntimeError as error:
            print(f"bench_serial: {error}", file=sys.stderr)
            return 1
        rows.append(measured)
        goal, anchor = ("-" if one is None else one for one in (row.goal_mb_s, row.anchor_mb_s))
        print(f"{row.name:<12} {goal!s:>10} {anchor!s:>12} {measured.ours_mb_s:>10}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
