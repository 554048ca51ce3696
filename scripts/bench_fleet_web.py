"""How long pages and lists of a large fleet take: a store that is filled here, and each question,
pages and API through the site, from the request to the compressed answer.

    python -m scripts.bench_fleet_web                      100 000 devices, about two minutes
    python -m scripts.bench_fleet_web --devices 500        to see that it works
    python -m scripts.bench_fleet_web --store postgresql://user@host/empty

Each row is the median of some runs in CPU seconds, of this process and of a PostgreSQL on this
machine, and in wall time. Exit status 1: a row is above its goal.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import resource
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from starlette.types import Message

from device.protocol.documents import (
    BlobSpec,
    DeviceFacts,
    Measured,
    PipelineReport,
    ReleaseSpec,
    Reported,
    Running,
    StateDocument,
    Update,
)
from toolkit.cli.actions.fleet.tables import devices_table, rollouts_table
from toolkit.cli.actions.fleet.views import json_array
from toolkit.fleet.fleet_folder import Fleet, load_fleet
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.liveness import ListeningPeriod
from toolkit.fleet.rollout.targets import parse_requirements
from toolkit.fleet.server.history import history_of
from toolkit.fleet.server.operations import make_plan, order
from toolkit.fleet.server.views import (
    device_page,
    device_views,
    read_outages,
    rollout_views,
)
from toolkit.fleet.store import rollouts
from toolkit.fleet.store.accounts import add_account, add_token, open_session
from toolkit.fleet.store.database import Database, open_database
from toolkit.fleet.store.device_queries import DeviceFilter, changes_since
from toolkit.fleet.store.devices import DeviceRow, save_devices, save_ear, set_labels
from toolkit.fleet.web.access import COOKIE
from toolkit.fleet.web.app import Site, SiteSettings

DEVICES = 100_000
GOAL_MS = 300.0
PLAN = "command: rollout start --dry-run"  # sees every device, and says why it does not fit
PLAN_GOAL_MS = 1000.0
RUNS = 5
BEAT_S = 300.0
PROFILES = ("orin-nx-16gb", "agx-orin-64gb", "orin-nano-8gb")
BATCH = 2000


def release_of(version: int) -> ReleaseSpec:
    """Return the release with a number."""
    blob = BlobSpec(
        sha256=f"{version:064x}", bytes=10_000_000, chunk_bytes=65536, index_sha256="0" * 64
    )
    return ReleaseSpec(name="person", version=f"1.{version}", profile=PROFILES[0], blob=blob)


def device_of(number: int, chance: random.Random, now_s: float) -> DeviceRow:
    """Return a device as a fleet has them: most are online, some silent, some with a problem."""
    release = release_of(chance.choice((1, 1, 2, 2, 2, 3)))
    sha256, fps = release.blob.sha256, chance.uniform(20.0, 31.0)
    reported = Reported(
        agent="1.0", profile=chance.choice(PROFILES), dev=False, warning="", session=1,
        running=Running(slot="a", sha256=sha256, name=release.name, version=release.version),
        pipeline=PipelineReport(
            status=chance.choices(("running", "stalled"), (98, 2))[0],
            degraded=chance.choices(((), ("segment 2 runs on the GPU",)), (99, 1))[0],
        ),
        update=Update(phase="live", sha256=sha256, request="bench-1"),
        facts=DeviceFacts(
            module="p3767", jetpack=chance.choice(("5.1.2", "6.0", "6.1")), tensorrt="10.3.0",
            dla_cores=chance.choice((1, 2)), memory_mb=16000, free_mb=chance.randrange(1, 60_000),
            power_mode="25W", labels={"site": f"site-{number % 97}"}, bundles=(sha256,),
        ),
        measured=Measured(
            sha256=sha256, frames=10_000, fps=fps, latency_p50_ms=900.0 / fps,
            latency_p95_ms=1000.0 / fps, temperature_c=chance.uniform(45.0, 88.0),
        ),
        counter=number + 1, beat_s=BEAT_S,
    )  # fmt: skip
    age_s = chance.choices((100.0, 280.0, 5000.0), (95, 4, 1))[0]
    return DeviceRow(
        f"board-{number:06}", now_s - age_s, StateDocument(state="online", session=1), reported, {}
    )


def fill(database: Database, count: int) -> None:
    """Fill a store: devices, and three rollouts over all of them, of which the last one goes on."""
    chance, now_s = random.Random(1), time.time()
    for begin in range(0, count, BATCH):
        rows = [device_of(n, chance, now_s) for n in range(begin, min(count, begin + BATCH))]
        with database.write():
            save_devices(database, rows)
    with database.write():
        save_ear(database, ListeningPeriod(now_s - 10_000.0, now_s))
        set_labels(database, "board-000007", {"group": "canary"})
    names = [f"board-{number:06}" for number in range(count)]
    members = tuple(v.Member(device=name, group=0, previous="1" * 64) for name in names)
    for version in (1, 2, 3):
        spec = v.RolloutSpec(key="bench", release=release_of(version), groups=("rest",))
        started, tick = v.Started(at_s=now_s, members=members), v.Tick(at_s=now_s)
        answers: list[v.Event] = [
            v.Answered(at_s=now_s, device=name, live=n % 100 != 1, reason="no room")
            for n, name in enumerate(names if version < 3 else names[: count // 2])
        ]
        with database.write():
            number = rollouts.create_rollout(database, spec, started, Path("/none"), "bench")
            applied = rollouts.note_events(
                database, number, [tick, *answers, tick], now_s, "server"
            )
            rollouts.set_applied(database, applied)
            state = rollouts.load_state(database, number, spec)
            rollouts.keep_state(database, number, v.RolloutState(), state)
            if state.status in v.ENDED:
                rollouts.save_snapshot(database, number, applied, state)


def drawn(what: object) -> int:
    """Return how many characters a terminal gets."""
    console = Console(file=io.StringIO(), width=160)
    console.print(what)
    return len(console.file.getvalue()) if isinstance(console.file, io.StringIO) else 0


def first_part(database: Database) -> int:
    """Return the characters of the first device of the list in JSON, which is streamed."""
    return len(next(json_array(device_views(database))))


def pause(database: Database) -> None:
    """Give two orders to the rollout that goes on."""
    order(database, 3, "pause", "bench")
    order(database, 3, "resume", "bench")


class Visitor:
    """Somebody who has signed in at the site, and a program."""

    def __init__(self, fleet: Fleet, database: Database) -> None:
        add_account(database, "bench", "approver", secrets.token_hex(8))
        token = add_token(database, "bench", "viewer", lifetime_s=86400.0)
        self._headers = [
            (b"accept-encoding", b"gzip"),
            (b"cookie", f"{COOKIE}={open_session(database, 'bench')}".encode()),
            (b"authorization", f"Bearer {token}".encode()),
        ]
        self._site = Site(fleet, SiteSettings()).application()
        self._loop = asyncio.new_event_loop()

    def get(self, address: str) -> int:
        """Return the bytes of an answer."""
        path, _, query = address.partition("?")
        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
            "root_path": "", "scheme": "http", "query_string": query.encode(),
            "headers": self._headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        self._loop.run_until_complete(self._site(scope, receive, send))
        if sent[0]["status"] != 200:
            raise SystemExit(f"{address} answers {sent[0]['status']}")
        return sum(len(message.get("body", b"")) for message in sent[1:])

    def close(self) -> None:
        """End the loop."""
        self._loop.close()


def addresses(database: Database, count: int) -> dict[str, str]:
    """Return the pages and the operations of the API, by name."""
    middle = f"board-{count // 2:06}"
    last = device_page(database, sort="heard", limit=50).after
    return {
        "page: overview": "/",
        "page: first devices": "/devices",
        "page: by temperature": "/devices?sort=temperature&down=yes",
        "page: by heard, the next": f"/devices?sort=heard&after={last}",
        "page: a label": "/devices?label=site%3Dsite-5",
        "page: a search": "/devices?q=site-96",
        "page: late ones": "/devices?state=late",
        "page: silent ones": "/devices?state=silent",
        "page: with a problem": "/devices?problem=any",
        "page: labels of many, planned": "/bulk/labels?label=site%3Dsite-5&labels=a%3Db",
        "page: one device": f"/devices/{middle}",
        "page: it leaves, planned": f"/devices/{middle}/decommission",
        "page: rollouts": "/rollouts",
        "page: one rollout": "/rollouts/3",
        "page: new rollout": "/rollouts/new",
        "page: audit log": "/audit",
        "API: fleet": "/api/v1/fleet",
        "API: 1000 devices": "/api/v1/devices?limit=1000",
        "API: history of a device": f"/api/v1/devices/{middle}/history",
        "API: rollouts": "/api/v1/rollouts",
        "API: 1000 rows of the log": "/api/v1/audit?limit=1000",
    }


def questions(database: Database, visitor: Visitor, count: int) -> dict[str, Callable[[], object]]:
    """Return what pages and commands ask, by name."""
    middle = f"board-{count // 2:06}"
    number = changes_since(database, 0, limit=1).number + max(0, count - 100)
    where = {
        "a requirement": DeviceFilter(requires=parse_requirements("jetpack>=6.1,dla_cores>=2")),
        "what no device has": DeviceFilter(requires=parse_requirements("label.site=nowhere")),
    }
    pages: dict[str, Callable[[], object]] = {
        name: lambda address=address: visitor.get(address)  # type: ignore[misc]
        for name, address in addresses(database, count).items()
    }
    filtered: dict[str, Callable[[], object]] = {
        f"command: devices --where {name}": lambda chosen=chosen: device_page(database, chosen)  # type: ignore[misc]
        for name, chosen in where.items()
    }
    return {
        **pages,
        "live: changes": lambda: changes_since(database, number),
        "command: devices": lambda: drawn(
            devices_table(device_page(database, limit=100).devices, {"online": count})
        ),
        **filtered,
        "command: devices --json, begins": lambda: first_part(database),
        "command: logs": lambda: list(history_of(database, middle)),
        "command: rollout status": lambda: drawn(rollouts_table(rollout_views(database))),
        "command: rollout status 3": lambda: rollout_views(database, [3]),
        "command: status": lambda: read_outages(database),
        PLAN: lambda: make_plan(
            database, v.RolloutSpec(key="plan", release=release_of(9), groups=("5%", "rest"))
        ),
        "command: rollout pause, resume": lambda: pause(database),
    }


@dataclass(frozen=True, slots=True)
class Row:
    """A question: its CPU and wall time in ms, medians."""

    question: str
    cpu_ms: float
    wall_ms: float
    goal_ms: float = GOAL_MS

    @property
    def reached(self) -> bool:
        """Whether the goal is kept; other processes share the machine, so CPU time counts."""
        return self.cpu_ms <= self.goal_ms


def cpu_clock(database: Database) -> Callable[[], float]:
    """Return what tells the CPU seconds of this process, and of a PostgreSQL that works for it."""
    if database.dialect.name != "postgresql":
        return time.process_time
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")

    def read() -> float:
        pids = database.rows("SELECT pid FROM pg_stat_activity WHERE usename = current_user")
        texts = [Path(f"/proc/{pid}/stat").read_text() for (pid,) in pids]
        fields = [text.rpartition(")")[2].split() for text in texts]  # from its state on
        return time.process_time() + tick_s * sum(int(row[11]) + int(row[12]) for row in fields)

    return read


def measure(question: str, ask: Callable[[], object], runs: int, clock: Callable[[], float]) -> Row:
    """Ask some times."""
    ask()  # each thread of a site has connected
    cpu, wall = [], []
    for _ in range(runs):
        begun_cpu_s, begun_s = clock(), time.perf_counter()
        ask()
        cpu.append(clock() - begun_cpu_s)
        wall.append(time.perf_counter() - begun_s)
    goal_ms = PLAN_GOAL_MS if question == PLAN else GOAL_MS
    return Row(question, 1e3 * statistics.median(cpu), 1e3 * statistics.median(wall), goal_ms)


def bench(url: str, count: int, runs: int) -> list[Row]:
    """Fill a store and ask all questions."""
    os.environ["PGOPTIONS"] = "-c max_parallel_workers_per_gather=0"  # one process a connection
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(open_database(url, Path(folder))) as database,
    ):
        fill(database, count)
        text = f'name = "bench"\nstore = "{url}"\n[broker]\nport = 1\ntls = false\n'
        Path(folder, "fleet.toml").write_text(text)
        with contextlib.closing(Visitor(load_fleet(Path(folder)), database)) as visitor:
            clock = cpu_clock(database)
            requests = questions(database, visitor, count)
            return [measure(name, ask, runs, clock) for name, ask in requests.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=DEVICES)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--store", default="sqlite:///fleet.db", help="the URL of an empty store")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    rows = bench(arguments.store, arguments.devices, arguments.runs)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if arguments.json:
        print(json.dumps([asdict(row) | {"reached": row.reached} for row in rows]))
    else:
        print(f"{arguments.devices} devices, at most {GOAL_MS:g} ms each (CPU ms, wall ms):")
        for row in rows:
            mark = "" if row.reached else "  MISSED"
            print(f"  {row.question:34} {row.cpu_ms:8.1f} {row.wall_ms:8.1f}{mark}")
        print(f"memory with filling: {peak_mb:.0f} MB")
    return 0 if all(row.reached for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
