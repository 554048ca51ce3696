"""Rollouts, releases, and the desired document of each device."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device.protocol.documents import ReleaseSpec
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.machine import replay
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.log import EVENT, Note, append, events_of

APPLIED = "applied"


@dataclass(frozen=True, slots=True)
class DesiredRow:
    """The document that a device shall obey, and which rollout made it (with `undo`: going back).

    `document`: the payload of its topic, signed where the fleet signs.
    """

    device: str
    counter: int
    rollout: int
    undo: bool
    sha256: str
    expires_s: float
    document: str


def create_rollout(
    database: Database, spec: v.RolloutSpec, started: v.Started, path: Path, who: str
) -> int:
    """Keep a new rollout with its first event, in a write transaction; return its number."""
    rows = database.rows("SELECT coalesce(max(number), 0) FROM rollouts")
    number = int(rows[0][0]) + 1
    save_release(database, spec.release, path)
    database.run(
        "INSERT INTO rollouts VALUES (?, ?, ?, ?)",
        number, _text(spec), started.at_s, "running",
    )  # fmt: skip
    note_events(database, number, [started], started.at_s, who)
    return number


def note_events(
    database: Database, number: int, events: Iterable[v.Event], at_s: float, who: str
) -> int:
    """Append events of a rollout to the log; return the number of the last row."""
    notes = [Note(who, EVENT, _text(event), number) for event in events]
    return append(database, notes, at_s)


def load_specs(database: Database, after: int = 0) -> dict[int, v.RolloutSpec]:
    """Return the rollouts with a number above one, by their numbers."""
    rows = database.rows(
        "SELECT number, spec FROM rollouts WHERE number > ? ORDER BY number", after
    )
    return {int(number): msgspec.json.decode(spec, type=v.RolloutSpec) for number, spec in rows}


def load_state(database: Database, number: int, spec: v.RolloutSpec) -> v.RolloutState:
    """Return a rollout's state, by replaying its events."""
    return replay(spec, decode_events(events_of(database, number)))


def decode_events(texts: Iterable[str]) -> Iterator[v.Event]:
    """Yield events from their JSON."""
    return (v.EVENTS.decode(text) for text in texts)


def created_s(database: Database) -> dict[int, float]:
    """Return when each rollout was created."""
    rows = database.rows("SELECT number, created_s FROM rollouts")
    return {int(number): float(at_s) for number, at_s in rows}


# -- releases


def save_release(database: Database, release: ReleaseSpec, path: Path) -> None:
    """Keep a release and where its file is."""
    database.run(
        "INSERT INTO releases VALUES (?, ?, ?) ON CONFLICT (sha256) DO UPDATE SET"
        " spec = excluded.spec, path = excluded.path",
        release.blob.sha256, _text(release), str(path),
    )  # fmt: skip


def load_releases(database: Database) -> dict[str, tuple[ReleaseSpec, Path]]:
    """Return all releases by their SHA-256, with their files."""
    rows = database.rows("SELECT sha256, spec, path FROM releases")
    return {
        str(sha256): (msgspec.json.decode(spec, type=ReleaseSpec), Path(path))
        for sha256, spec, path in rows
    }


# -- desired documents


def load_desired(database: Database) -> dict[str, DesiredRow]:
    """Return the desired document of each device that has one."""
    rows = database.rows(
        "SELECT device, counter, rollout, undo, sha256, expires_s, document FROM desired"
    )
    return {
        device: DesiredRow(device, counter, rollout, bool(undo), sha256, expires_s, document)
        for device, counter, rollout, undo, sha256, expires_s, document in rows
    }


def save_desired(database: Database, rows: Iterable[DesiredRow]) -> None:
    """Replace desired documents, in a write transaction."""
    database.run_many(
        "INSERT INTO desired VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (device) DO UPDATE SET"
        " counter = excluded.counter, rollout = excluded.rollout, undo = excluded.undo,"
        " sha256 = excluded.sha256, expires_s = excluded.expires_s, document = excluded.document",
        [
            (r.device, r.counter, r.rollout, int(r.undo), r.sha256, r.expires_s, r.document)
            for r in rows
        ],
    )


# -- how far the server is in the log


def applied(database: Database) -> int:
    """Return the row of the log up to which all has been done."""
    rows = database.rows("SELECT value FROM settings WHERE name = ?", APPLIED)
    return int(rows[0][0]) if rows else 0


def set_applied(database: Database, seq: int) -> None:
    """Note that the log has been done up to a row."""
    database.run(
        "INSERT INTO settings VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value ="
        " excluded.value",
        APPLIED, seq,
    )  # fmt: skip


def set_status(database: Database, number: int, status: v.Status) -> None:
    """Note a rollout's status where lists look for it."""
    database.run("UPDATE rollouts SET status = ? WHERE number = ?", status, number)


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
