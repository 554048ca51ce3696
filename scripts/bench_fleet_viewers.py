"""What viewers of a fleet's page cost: `tandem fleet web` as a process over a filled store.

    python -m scripts.bench_fleet_viewers                     10 000 devices, 50 viewers
    python -m scripts.bench_fleet_viewers --devices 200 --viewers 3     to see that it works

The first page of a viewer (time, bytes), how soon a change of a device is on the list, and what the
viewers take of a core and of memory while one device a second changes.
"""

import argparse
import asyncio
import gzip
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from scripts.bench_fleet_web import device_of, fill
from toolkit.fleet.rollout.liveness import ListeningPeriod
from toolkit.fleet.store.accounts import add_account
from toolkit.fleet.store.database import Database, open_database
from toolkit.fleet.store.devices import save_devices, save_ear

PASSWORD = "password of a bench"
RUNS = 9
CHANGES = 30
START_S = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; the goals stand in `GOALS`."""

    devices: int
    viewers: int
    first_page_ms: float
    first_page_cpu_ms: float
    page_kb: float
    change_p95_ms: float
    viewers_core_percent: float
    viewers_mb: float


# Figure -> its goal, at 10 000 devices and 50 viewers.
GOALS = {
    "first_page_ms": 300.0,
    "page_kb": 100.0,
    "change_p95_ms": 1000.0,
    "viewers_core_percent": 10.0,
    "viewers_mb": 50.0,
}


@contextmanager
def site(folder: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run the page of a fleet; yield its port and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = ("-m", "toolkit.cli", "fleet", "web", "--fleet", str(folder))
    process = subprocess.Popen([sys.executable, *words, "--listen", f"127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        until_s = time.monotonic() + START_S
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit("tandem fleet web did not start")
            time.sleep(0.1)
        yield port, process
    finally:
        process.terminate()
        process.wait()


def sign_in(port: int) -> str:
    """Return the cookie of a viewer."""
    body = f"name=viewer&password={PASSWORD.replace(' ', '+')}"
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"content-type": "application/x-www-form-urlencoded"}
    connection.request("POST", "/sign-in", body, headers)
    return connection.getresponse().headers["set-cookie"].partition(";")[0]


def read_page(port: int, cookie: str, path: str) -> tuple[float, int, str]:
    """Return the seconds that a page takes, its compressed bytes and its text."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    begun_s = time.perf_counter()
    connection.request("GET", path, headers={"cookie": cookie, "accept-encoding": "gzip"})
    data = connection.getresponse().read()
    return time.perf_counter() - begun_s, len(data), gzip.decompress(data).decode()


def cpu_s(process: "subprocess.Popen[bytes]") -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_mb(process: "subprocess.Popen[bytes]") -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class Changes:
    """Changes the first device of the list, one version after the other."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._row = device_of(0, random.Random(1), time.time())
        self._number = 0

    def make(self) -> str:
        """Change the device; return what a page shows of it then."""
        self._number += 1
        version = f"9.{self._number}"
        reported = self._row.reported
        assert reported is not None
        assert reported.running is not None
        running = type(reported.running)(slot="a", sha256=reported.running.sha256,
            name="person", version=version)  # fmt: skip
        fields = {name: getattr(reported, name) for name in reported.__struct_fields__}
        changed = type(reported)(**{**fields, "running": running})
        now_s = time.time()
        with self._database.write():
            save_devices(self._database, [replace(self._row, reported=changed, heard_s=now_s)])
            save_ear(self._database, ListeningPeriod(now_s - 10_000.0, now_s))
        return f"person {version}"


async def watch(port: int, cookie: str, seen: dict[str, float], stopped: asyncio.Event) -> None:
    """Follow the list of devices as a browser does; note when each version is first seen."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    request = f"GET /live?page=/devices HTTP/1.1\r\nhost: 127.0.0.1\r\ncookie: {cookie}\r\n\r\n"
    writer.write(request.encode())
    while not stopped.is_set():
        line = await reader.readline()
        if not line:
            return
        at = line.find(b"person 9.")
        if at >= 0:
            version = line[at : at + 16].split(b"<")[0].decode()
            seen.setdefault(version, time.perf_counter())
    writer.close()


async def follow(
    process: "subprocess.Popen[bytes]", port: int, cookies: list[str], changes: Changes,
    seconds: float,
) -> tuple[list[float], float, float]:  # fmt: skip
    """Return the delays of changes in s, what the viewers take of a core, and memory in MB."""
    seen: dict[str, float] = {}
    stopped = asyncio.Event()
    quiet_mb = memory_mb(process)
    viewers = [asyncio.create_task(watch(port, cookie, seen, stopped)) for cookie in cookies]
    await asyncio.sleep(1.0)
    begun_s, cpu_before_s = time.perf_counter(), cpu_s(process)
    made_at: dict[str, float] = {}
    while time.perf_counter() - begun_s < seconds:
        made_at[changes.make()] = time.perf_counter()
        await asyncio.sleep(1.0 + random.uniform(-0.2, 0.2))
    await asyncio.sleep(1.5)
    share = (cpu_s(process) - cpu_before_s) / (time.perf_counter() - begun_s)
    more_mb = memory_mb(process) - quiet_mb
    stopped.set()
    for viewer in viewers:
        viewer.cancel()
    await asyncio.gather(*viewers, return_exceptions=True)
    missed = set(made_at) - set(seen)
    if missed:
        raise SystemExit(f"{len(missed)} of {len(made_at)} changes were not seen")
    return [seen[version] - at for version, at in made_at.items()], share, more_mb


def measure(folder: Path, devices: int, viewers: int, seconds: float) -> Figures:
    """Fill a store, run the page over it, and return the figures."""
    (folder / "fleet.toml").write_text('name = "bench"\n[broker]\nport = 1\ntls = false\n')
    database = open_database("sqlite:///fleet.db", folder)
    fill(database, devices)
    add_account(database, "viewer", "viewer", PASSWORD)
    with site(folder) as (port, process):
        cookie = sign_in(port)
        read_page(port, cookie, "/")  # templates and imports
        before_s = cpu_s(process)
        changes = Changes(database)
        pages = []
        for _ in range(RUNS):
            changes.make()  # nothing that was drawn before is taken
            pages.append(read_page(port, cookie, "/"))
        cpu_ms = 1000.0 * (cpu_s(process) - before_s) / RUNS
        delays, share, more_mb = asyncio.run(
            follow(process, port, [cookie] * viewers, changes, seconds)
        )
    database.close()
    delays.sort()
    return Figures(
        devices=devices,
        viewers=viewers,
        first_page_ms=1000.0 * statistics.median(page[0] for page in pages),
        first_page_cpu_ms=cpu_ms,
        page_kb=max(page[1] for page in pages) / 1e3,
        change_p95_ms=1000.0 * delays[min(len(delays) - 1, int(0.95 * len(delays)))],
        viewers_core_percent=100.0 * share,
        viewers_mb=more_mb,
    )


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-viewers-") as folder:
        figures = measure(Path(folder), options.devices, options.viewers, options.seconds)
    if options.json:
        print(json.dumps(asdict(figures)))
        return
    table = Table("figure", "measured", "goal")
    for name, value in asdict(figures).items():
        goal = GOALS.get(name)
        table.add_row(name, f"{value:g}", "" if goal is None else f"{goal:g}")
    Console().print(table)


if __name__ == "__main__":
    main()
