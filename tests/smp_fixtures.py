"""Stock clients of SMP against the board's server: over ptys that are joined, and over UDP."""

import asyncio
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from smpclient import SMPClient
from smpclient.transport import SMPTransport
from smpclient.transport.serial import SMPSerialRawTransport, SMPSerialTransport
from smpclient.transport.udp import SMPUDPTransport

SMPMGR = shutil.which("smpmgr") or str(Path(sys.executable).with_name("smpmgr"))
Change = Callable[[bytes], bytes]


class Cable:
    """Two ptys whose masters are joined: what one end writes the other reads.

    `change` is applied to what goes to the board. A pulled cable loses all.
    """

    def __init__(self) -> None:
        self.change: Change = lambda data: data
        self.pulled = False
        self._masters, slaves = zip(pty.openpty(), pty.openpty(), strict=True)
        for slave in slaves:
            tty.setraw(slave)
        self.board, self.host = (os.ttyname(slave) for slave in slaves)
        self._slaves = slaves  # held open: a pty without a reader would be closed
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        for file in (*self._masters, *self._slaves):
            os.close(file)

    def _run(self) -> None:
        board, host = self._masters
        while not self._ended.is_set():
            for file in select.select([board, host], [], [], 0.1)[0]:
                data = os.read(file, 65536)
                if self.pulled:
                    continue
                target = host if file == board else board
                rest = self.change(data) if target == board else data
                while rest and not self._ended.is_set():
                    if select.select([], [target], [], 0.1)[1]:
                        rest = rest[os.write(target, rest[:2048]) :]


@contextmanager
def cable() -> Iterator[Cable]:
    one = Cable()
    try:
        yield one
    finally:
        one.close()


def transport(kind: str) -> SMPTransport:
    """A stock transport: "console", "raw" or "udp"."""
    if kind == "console":
        return SMPSerialTransport()
    return SMPSerialRawTransport(mtu=65_000) if kind == "raw" else SMPUDPTransport()


async def upload(
    client: SMPClient, data: bytes, image: int = 0, stop_at: int | None = None
) -> list[int]:
    """Upload with the stock client; return the offsets that the board answered."""
    offsets = []
    async for offset in client.upload(data, slot=image):
        offsets.append(offset)
        if stop_at is not None and offset >= stop_at:
            break
    return offsets


def upload_once(
    kind: str, address: str, data: bytes, image: int = 0, stop_at: int | None = None
) -> list[int]:
    """The same, with a client of its own."""

    async def run() -> list[int]:
        async with SMPClient(transport(kind), address, timeout_s=20.0) as client:
            return await upload(client, data, image, stop_at)

    return asyncio.run(run())


def smpmgr(*words: str) -> str:
    """Run the stock command; return what it printed, without line breaks of its table."""
    if not Path(SMPMGR).exists():
        pytest.skip("smpmgr needs Python 3.11")
    done = subprocess.run(
        [SMPMGR, "--timeout", "20", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "1000", "NO_COLOR": "1", "TERM": "dumb"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"\s+", " ", done.stdout)
