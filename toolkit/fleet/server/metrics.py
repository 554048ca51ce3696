"""The figures of a fleet's server, for Prometheus (`tandem fleet serve --metrics 127.0.0.1:9464`)
and OpenTelemetry.

Each reading asks the store on a connection of its own. No label is unbounded: what devices and
operators name freely has a limit of series, and what is above it is added up as "other".
"""

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version

from pipelines.metrics import Family, Figures, Histogram, MetricsServer, Rows, render
from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.rollout import values as v
from toolkit.fleet.server.views import RolloutView, open_rollouts
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.device_queries import FleetCounts, fleet_counts
from toolkit.fleet.store.devices import load_ear
from toolkit.fleet.store.rollouts import count_statuses

LOG = logging.getLogger("tandem.fleet")
HOST = "127.0.0.1"
MAX_SERIES = 200  # of one family
OTHER = "other"
BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
# Kinds of what a server takes: messages by topic, and those that it cannot read.
EVENTS = ("state", "reported", "beat", "unreadable")
_ADDRESS = re.compile(r"(?:(?P<host>[^:\[\]\s]+|\[[0-9A-Fa-f:.]+\]):)?(?P<port>\d{1,5})\Z")


def parse_listen(text: str) -> tuple[str, int]:
    """Return the address in [HOST:]PORT, by default of this machine alone; RolloutError: none."""
    match = _ADDRESS.match(text)
    if match is None or int(match["port"]) > 65535:
        raise RolloutError(f"{text!r} is no address to listen on: write PORT or HOST:PORT")
    return (match["host"] or HOST).strip("[]"), int(match["port"])


class Meters:
    """What a server counts and times. Its thread adds, any thread reads."""

    def __init__(self) -> None:
        self.delay = Histogram(
            "fleet_event_delay_seconds",
            "From taking an event until it is stored and what it asks for is sent.", BOUNDS_S,
        )  # fmt: skip
        self.store = Histogram("fleet_store_seconds", "A round on the store.", BOUNDS_S)
        self.holds_lease = False
        self._lock = threading.Lock()
        self._events: Counter[str] = Counter()

    def count(self, kind: str) -> None:
        """Count an event, one of EVENTS."""
        with self._lock:
            self._events[kind] += 1

    def events(self) -> Mapping[str, int]:
        """Return how many events were counted, by kind."""
        with self._lock:
            return {kind: self._events[kind] for kind in EVENTS}


class ServerFigures:
    """Reads the figures of a server and its fleet, on standby, too."""

    def __init__(self, fleet: Fleet, meters: Meters) -> None:
        self._fleet = fleet
        self._meters = meters
        self._reading = threading.Lock()

    def read(self) -> Figures:
        """Return all figures; without a store those of this process alone."""
        families = own_families(self._meters)
        with self._reading:  # however many ask, the store has one question at a time
            try:
                database = self._fleet.open_store()
                try:
                    families += store_families(database)
                finally:
                    database.close()
            except RolloutError as error:
                LOG.warning("%s", error)
        return Figures(families, (self._meters.delay, self._meters.store))


class MetricsListener(MetricsServer):
    """Answers GET /metrics while a server runs."""

    def __init__(self, read: Callable[[], Figures], address: tuple[str, int]) -> None:
        """Listen; RolloutError: not possible there."""
        try:
            super().__init__(address, lambda: render(read()))
        except OSError as error:
            host, port = address
            raise RolloutError(
                f"cannot listen for metrics on {host}:{port} ({error.strerror}): give another "
                "address to --metrics"
            ) from error

    def start(self) -> None:
        """Begin to answer."""
        LOG.info("metrics at http://%s:%d/metrics", self.server_address[0], self.port)
        super().start()


def build_family() -> Family:
    """Return the figure that every process of a fleet has."""
    return ("build_info", "gauge", "The version.", [({"version": version("tandem-edge")}, 1)])


def own_families(meters: Meters) -> list[Family]:
    """Return the figures of a server's process."""
    events: Rows = [({"kind": kind}, count) for kind, count in meters.events().items()]
    lease: Rows = [({}, int(meters.holds_lease))]
    return [
        build_family(),
        ("fleet_lease_holder", "gauge", "1: this server sends, 0: it is on standby.", lease),
        ("fleet_events_total", "counter", "Messages of devices that were taken.", events),
    ]


def store_families(database: Database) -> list[Family]:
    """Return the figures of the fleet."""
    counts = fleet_counts(database, load_ear(database))
    by_state: Rows = [({"state": state}, count) for state, count in counts.presence.items()]
    problems: Rows = [
        ({"kind": kind}, count) for kind, count in counts.problems.items() if kind != "any"
    ]
    statuses = count_statuses(database)
    rollouts: Rows = [({"status": one}, statuses.get(one, 0)) for one in v.STATUSES]
    return [
        ("fleet_devices", "gauge", "Devices by state.", by_state),
        ("fleet_problems", "gauge", "Devices with a problem, by kind.", problems),
        ("fleet_running_devices", "gauge", "Devices by what they run.", _running(counts)),
        ("fleet_rollouts", "gauge", "Rollouts by status.", rollouts),
        (
            "fleet_rollout_devices", "gauge", "Devices of each open rollout by group and phase.",
            _of_rollouts(open_rollouts(database)),
        ),
    ]  # fmt: skip


def _running(counts: FleetCounts) -> Rows:
    rows = [
        ({"release": one.release, "version": one.version, "profile": one.profile}, one.devices)
        for one in counts.running
    ]
    return _bounded(rows, {"release": OTHER, "version": OTHER, "profile": OTHER})


def _of_rollouts(views: Iterable[RolloutView]) -> Rows:
    rows = [
        ({"rollout": str(view.number), "group": group.name, "phase": phase}, count)
        for view in views
        for group in view.groups
        for phase, count in group.phases.items()
    ]
    return _bounded(rows, {"rollout": OTHER, "group": OTHER, "phase": OTHER})


def _bounded(rows: list[tuple[dict[str, str], int]], others: dict[str, str]) -> Rows:
    """Return the largest rows, and the sum of the others as one."""
    ordered = sorted(rows, key=lambda row: (-row[1], tuple(row[0].values())))
    largest, rest = ordered[:MAX_SERIES], ordered[MAX_SERIES:]
    return [*largest, *([(others, sum(count for _, count in rest))] if rest else [])]
