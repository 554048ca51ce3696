"""How many devices were online, late and silent: a row a minute, kept for a while."""

from dataclasses import dataclass

import msgspec

from toolkit.fleet.rollout.liveness import ListeningPeriod
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.device_queries import EVERY, count_devices

EVERY_S = 60
KEPT_S = 8 * 86400


@dataclass(frozen=True, slots=True)
class PresenceSample:
    """How many devices were in each presence (PRESENCES) at a time; none: 0."""

    at_s: int
    counts: dict[str, int]


def save_sample(database: Database, ear: ListeningPeriod) -> None:
    """Keep how the fleet is at the minute of `ear.until_s`, once, in a write transaction."""
    at_s = int(ear.until_s) // EVERY_S * EVERY_S
    if database.rows("SELECT 1 FROM presence WHERE at_s = ?", at_s):
        return
    counts = msgspec.json.encode(count_devices(database, EVERY, ear)).decode()
    database.run("INSERT INTO presence VALUES (?, ?)", at_s, counts)
    database.run("DELETE FROM presence WHERE at_s < ?", at_s - KEPT_S)


def load_samples(database: Database, since_s: float, most: int = 300) -> list[PresenceSample]:
    """Return the samples after a time, thinned evenly to about `most`. Minutes without one: no
    server heard the devices."""
    rows = database.rows(
        "SELECT at_s, counts FROM presence WHERE at_s > ? ORDER BY at_s", int(since_s)
    )
    chosen = rows[:: max(1, len(rows) // most)]
    return [
        PresenceSample(int(at_s), msgspec.json.decode(counts, type=dict[str, int]))
        for at_s, counts in chosen
    ]
