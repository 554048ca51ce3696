"""Rollouts, releases, and the desired document of each device."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from device.protocol.documents import ReleaseSpec
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.machine import replay, step
from toolkit.fleet.store.changes import next_changes
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.dialects import json_texts
from toolkit.fleet.store.log import EVENT, Note, append, events_of

APPLIED = "applied"
_BATCH = 500  # rows of a statement


class DesiredRow(msgspec.Struct, frozen=True):
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
        "INSERT INTO rollouts (number, spec, created_s, status) VALUES (?, ?, ?, ?)",
        number, _text(spec), started.at_s, "running",
    )  # fmt: skip
    note_events(database, number, [started], started.at_s, who)
    keep_state(database, number, v.RolloutState(), replay(spec, [started]))
    return number


def note_events(
    database: Database, number: int, events: Iterable[v.Event], at_s: float, who: str
) -> int:
    """Append events of a rollout to the log; return the number of the last row."""
    return append(database, [event_note(event, number, who) for event in events], at_s)[0]


def event_note(event: v.Event, number: int, who: str) -> Note:
    """Return an event of a rollout as a row of the log."""
    return Note(who, EVENT, _text(event), number, devices_of(event))


def devices_of(event: v.Event) -> tuple[str, ...]:
    """Return the devices that an event is about."""
    if isinstance(event, v.Started):
        return tuple(member.device for member in event.members)
    if isinstance(event, v.Silent | v.Superseded | v.Decommissioned):
        return event.devices
    if isinstance(event, v.Begun):
        return tuple(event.previous)
    if isinstance(event, v.Joined | v.Answered | v.Figures):
        return (event.device,)
    return ()


def load_specs(database: Database, after: int = 0) -> dict[int, v.RolloutSpec]:
    """Return the rollouts with a number above one, by their numbers."""
    rows = database.rows(
        "SELECT number, spec FROM rollouts WHERE number > ? ORDER BY number", after
    )
    return {int(number): msgspec.json.decode(spec, type=v.RolloutSpec) for number, spec in rows}


def load_spec(database: Database, number: int) -> v.RolloutSpec | None:
    """Return a rollout, None if there is none with this number."""
    rows = database.rows("SELECT spec FROM rollouts WHERE number = ?", number)
    return msgspec.json.decode(rows[0][0], type=v.RolloutSpec) if rows else None


def newest_number(database: Database) -> int:
    """Return the number of the newest rollout, 0: there is none."""
    return int(database.rows("SELECT coalesce(max(number), 0) FROM rollouts")[0][0])


def count_statuses(database: Database) -> dict[str, int]:
    """Return how many rollouts are in each status; those of 0 are left out."""
    rows = database.rows("SELECT status, count(*) FROM rollouts GROUP BY status")
    return {str(status): int(count) for status, count in rows}


def load_state(
    database: Database, number: int, spec: v.RolloutSpec, until: int | None = None
) -> v.RolloutState:
    """Return a rollout's state: its snapshot, and the events after it replayed, those up to the row
    `until` of the log."""
    rows = database.rows("SELECT seq, state FROM snapshots WHERE rollout = ?", number)
    seq, text = rows[0] if rows else (0, "{}")
    events = decode_events(events_of(database, number, seq, until))
    return step(spec, msgspec.json.decode(text, type=v.RolloutState), events)[0]


def save_snapshot(database: Database, number: int, seq: int, state: v.RolloutState) -> None:
    """Keep a rollout's state after the row `seq` of the log, in a write transaction: what is before
    need not be replayed."""
    database.run(
        "INSERT INTO snapshots VALUES (?, ?, ?) ON CONFLICT (rollout) DO UPDATE SET"
        " seq = excluded.seq, state = excluded.state",
        number, seq, _text(state),
    )  # fmt: skip


def load_summary(database: Database, number: int) -> v.RolloutState:
    """Return a rollout's state without its devices."""
    rows = database.rows("SELECT summary FROM rollouts WHERE number = ?", number)
    return msgspec.json.decode(rows[0][0], type=v.RolloutState)


def keep_state(
    database: Database, number: int, before: v.RolloutState, after: v.RolloutState
) -> None:
    """Keep what lists show of a rollout that has changed, in a write transaction: its status and
    counts, and in the rows of its devices their phases."""
    groups = tuple(replace(group, queue=()) for group in after.groups)
    database.run(
        "UPDATE rollouts SET status = ?, summary = ? WHERE number = ?",
        after.status, _text(replace(after, groups=groups, devices={})), number,
    )  # fmt: skip
    begins = before.waits and not after.waits
    if after.waits or (after.devices is before.devices and not begins):
        return
    changed = [
        (device, row)
        for device, row in after.devices.items()
        if begins or row is not before.devices.get(device)
    ]
    removed = [device for device, row in changed if row.phase in v.GONE]
    rows = [(device, row) for device, row in changed if row.phase not in v.GONE]
    numbers = iter(next_changes(database, len(changed)))
    database.run_many(
        "UPDATE devices SET changed = ?, rollout = 0, grp = 0, phase = '', reason = ''"
        " WHERE id = ? AND rollout = ?",
        [(next(numbers), device, number) for device in removed],
    )
    # A newer rollout keeps what it has taken.
    database.run_many(
        "UPDATE devices SET changed = ?, rollout = ?, grp = ?, phase = ?, reason = ?"
        " WHERE id = ? AND rollout <= ?",
        [
            (next(numbers), number, row.group, row.phase, row.reason, device, number)
            for device, row in rows
        ],
    )


def decode_events(texts: Iterable[str]) -> Iterator[v.Event]:
    """Yield events from their JSON."""
    return (v.EVENTS.decode(text) for text in texts)


def started_by(database: Database, number: int) -> str:
    """Return who began a rollout; empty if a version before this one began it, and that part of the
    log was archived."""
    if by := load_summary(database, number).started_by:
        return by
    rows = database.rows(
        "SELECT who FROM log WHERE rollout = ? AND kind = ? AND body LIKE ? ORDER BY seq LIMIT 1",
        number, EVENT, '{"event":"started"%',
    )  # fmt: skip
    return str(rows[0][0]) if rows else ""


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


def desired_page(database: Database, after: str = "") -> list[DesiredRow]:
    """Return desired documents by the ids of their devices, the next ones after an id."""
    return _desired(database, "device > ? ORDER BY device LIMIT ?", after, _BATCH)


def expiring(database: Database, until_s: float) -> list[DesiredRow]:
    """Return the desired documents that expire first, before a time."""
    return _desired(database, "expires_s < ? ORDER BY expires_s LIMIT ?", until_s, _BATCH)


def find_desired(database: Database, devices: Sequence[str]) -> dict[str, DesiredRow]:
    """Return the desired documents of those of some devices that have one."""
    return {
        row.device: row
        for begin in range(0, len(devices), _BATCH)
        if (part := devices[begin : begin + _BATCH])
        for row in _desired(database, f"device IN ({database.dialect.among})", json_texts(part))
    }


def first_expiry(database: Database) -> float:
    """Return when the first desired document expires."""
    (expires_s,) = database.rows("SELECT min(expires_s) FROM desired")[0]
    return math.inf if expires_s is None else float(expires_s)


def _desired(database: Database, condition: str, *values: object) -> list[DesiredRow]:
    rows = database.rows(
        "SELECT device, counter, rollout, undo, sha256, expires_s, document FROM desired WHERE "
        + condition,
        *values,
    )
    return [
        DesiredRow(device, counter, rollout, bool(undo), sha256, expires_s, document)
        for device, counter, rollout, undo, sha256, expires_s, document in rows
    ]


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


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
