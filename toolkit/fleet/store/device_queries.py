"""Counts and pages of devices by SQL: no more rows are read than are returned.

Whether a device is online, late or silent is judged by the database at the time of the question.
"""

import base64
import binascii
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from device.choices import list_choices
from device.protocol.documents import DeviceFacts
from toolkit.errors import RolloutError
from toolkit.fleet.rollout.liveness import LISTENED, LastHeard, ListeningPeriod
from toolkit.fleet.rollout.targets import FACTS, LABEL, Requirement, Target, broken_by_text
from toolkit.fleet.store.database import Database, Row
from toolkit.fleet.store.derived import PROBLEMS, label_part, parse_labels
from toolkit.fleet.store.devices import COLUMNS, TABLES, DeviceRow, device_row

PAGE = 50
# "late": it is overdue, and not silent yet. The rest is as `DeviceView.state` says.
Presence = Literal["online", "late", "silent", "unknown", "stopped", "lost"]
PRESENCES: tuple[Presence, ...] = ("online", "late", "silent", "unknown", "stopped", "lost")
_BATCH = 500  # rows of a statement
FACT_COLUMNS = ("module", "power_mode", "jetpack", "tensorrt", "dla_cores", "memory_mb")
# Facts that are numbers, and whether 0 says that nothing is known.
_NUMBERS: Mapping[str, bool] = {"dla_cores": False, "memory_mb": True, "free_mb": True}


def presence_sql(ear: ListeningPeriod) -> str:
    """Return the expression of a device's presence: `liveness.judge` in SQL."""
    age = f"abs({ear.until_s!r} - seen_s)"
    listened = f"{ear.until_s - ear.since_s!r} > {LISTENED} * beat_s"
    return (
        "CASE WHEN agent = '' THEN 'unknown' WHEN agent <> 'online' THEN agent"
        f" WHEN beat_s <= 0 OR {age} <= {LISTENED} * beat_s THEN 'online'"
        f" WHEN {age} <= beat_s THEN 'late' WHEN {listened} THEN 'silent' ELSE 'unknown' END"
    )


# Sort -> its expression; {presence} is that of `presence_sql`.
SORTS: Mapping[str, str] = {
    "id": "''",
    "state": "{presence}",
    "heard": "seen_s",
    "profile": "profile",
    "version": "version",
    "rollout": "rollout",
    "temperature": "coalesce(temperature_c, -1000.0)",
    "fps": "coalesce(fps, -1.0)",
    "p95": "coalesce(p95_ms, -1.0)",
    "problems": "problems",
}


@dataclass(frozen=True, slots=True)
class DeviceFilter:
    """Which devices: those that fulfil all of it. Empty or None: any.

    `presence`: "online" also takes the late ones. `problem`: a kind of PROBLEMS, or "any".
    `labels`: KEY -> VALUE. `search`: a part of id, release, version, profile or a label.
    """

    presence: str = ""
    phase: str = ""
    rollout: int | None = None
    release: str = ""
    version: str = ""
    profile: str = ""
    problem: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    search: str = ""
    requires: tuple[Requirement, ...] = ()
    ids: tuple[str, ...] = ()


EVERY = DeviceFilter()


@dataclass(frozen=True, slots=True)
class DevicePage:
    """A page of devices. `after`: the cursor of the next page, empty after the last; it stays right
    while devices come and go, so it may stand in a link."""

    rows: tuple[DeviceRow, ...]
    after: str


class RunningCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many devices run a version on a profile; an empty version: nothing runs there."""

    release: str
    version: str
    profile: str
    devices: int


class FleetCounts(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet in figures. `presence`: devices in each of PRESENCES; `problems`: devices with each
    of PROBLEMS, and with "any"."""

    devices: int
    presence: dict[str, int]
    problems: dict[str, int]
    running: tuple[RunningCount, ...]


def count_devices(database: Database, where: DeviceFilter, ear: ListeningPeriod) -> dict[str, int]:
    """Return how many devices of a filter are in each presence; those of 0 are left out."""
    condition, values = _condition(database, where, ear)
    rows = database.rows(
        f"SELECT {presence_sql(ear)}, count(*) FROM devices WHERE {condition} GROUP BY 1", *values
    )
    return {str(name): int(count) for name, count in rows}


def fleet_counts(database: Database, ear: ListeningPeriod) -> FleetCounts:
    """Return the figures of the whole fleet."""
    rows = database.rows(  # one look at the table for all of them
        f"SELECT {presence_sql(ear)}, problems, reported, release, version, profile, count(*)"
        " FROM devices GROUP BY 1, 2, 3, 4, 5, 6"
    )
    presence: dict[str, int] = dict.fromkeys(PRESENCES, 0)
    problems = dict.fromkeys((*PROBLEMS, "any"), 0)
    running = Counter[tuple[str, str, str]]()
    for state, kinds, reported, release, version, profile, count in rows:
        presence[state] += count
        for kind in (*kinds.strip(",").split(","), "any") if kinds else ():
            problems[kind] = problems.get(kind, 0) + count
        if reported:
            running[release, version, profile] += count
    return FleetCounts(
        devices=sum(presence.values()),
        presence=presence,
        problems=problems,
        running=tuple(
            RunningCount(release=release, version=version, profile=profile, devices=count)
            for (release, version, profile), count in sorted(running.items())
        ),
    )


def read_page(
    database: Database, where: DeviceFilter, ear: ListeningPeriod, *, sort: str = "id",
    down: bool = False, after: str = "", limit: int = PAGE,
) -> DevicePage:  # fmt: skip
    """Return a page of the devices of a filter, by a row of SORTS (`down`: the largest first).

    RolloutError: there is no such sort, or `after` is no cursor of it.
    """
    if sort not in SORTS:
        raise RolloutError(f"devices are not sorted by {sort!r}: {list_choices(sort, SORTS)}")
    key = SORTS[sort].format(presence=presence_sql(ear))
    condition, values = _condition(database, where, ear)
    direction, side = ("DESC", "<") if down else ("ASC", ">")
    if after:
        last = _read_cursor(after, sort)
        if sort == "id":
            condition += f" AND devices.id {side} ?"
            values += [last[1]]
        else:
            condition += f" AND ({key} {side} ? OR ({key} = ? AND devices.id {side} ?))"
            values += [last[0], *last]
    order = "devices.id" if sort == "id" else f"{key} {direction}, devices.id"
    # The page is chosen in the narrow table: documents are read of its rows alone.
    chosen = database.rows(
        f"SELECT devices.id, {key} FROM devices WHERE {condition} ORDER BY {order} {direction}"
        " LIMIT ?",
        *values, limit + 1,
    )  # fmt: skip
    page = chosen[:limit]
    by_id = {row.id: row for row in load_rows(database, [str(row[0]) for row in page])}
    return DevicePage(
        rows=tuple(by_id[device] for device, _key in page if device in by_id),
        after=_cursor(sort, page[-1]) if len(chosen) > limit else "",
    )


def load_rows(database: Database, ids: Sequence[str]) -> list[DeviceRow]:
    """Return the devices with some ids, in no order."""
    if not ids:
        return []
    marks = ", ".join("?" * len(ids))
    rows = database.rows(f"SELECT {COLUMNS} FROM {TABLES} WHERE devices.id IN ({marks})", *ids)
    return [device_row(row) for row in rows]


def load_targets(
    database: Database, ear: ListeningPeriod, names: Collection[str] = FACTS, room_mb: int = 0
) -> list[Target]:
    """Return all devices that have reported as a rollout sees them, by their ids. Devices that
    agree in facts, or in labels, share one value of them. Documents are not read: `facts.bundles`
    is empty.

    `names`: the facts that are read, named as in requirements; the others stay empty, but the free
    space where it is below `room_mb`, in MB.
    """
    columns = [name for name in FACT_COLUMNS if name in names]
    free = f"CASE WHEN free_mb < {room_mb:d} THEN free_mb ELSE 0 END"
    rows = database.rows(
        f"SELECT id, profile, all_labels, running, agent = 'online' AND {presence_sql(ear)}"
        f" <> 'silent', dev, {', '.join((*columns, 'free_mb' if 'free_mb' in names else free))}"
        " FROM devices WHERE reported = 1 ORDER BY id"
    )
    parsed: dict[str, Mapping[str, str]] = {}
    shared: dict[Row, DeviceFacts] = {}
    columns.append("free_mb")
    targets = []
    for row in rows:
        device, profile, text, running, online, dev = row[:6]
        fact_values = row[6:]
        if (facts := shared.get(fact_values)) is None:
            facts = shared[fact_values] = DeviceFacts(
                **dict(zip(columns, fact_values, strict=True))
            )
        if (labels := parsed.get(text)) is None:
            labels = parsed[text] = parse_labels(text)
        targets.append(Target(device, profile, facts, labels, running, online == 1, dev == 1))
    return targets


def having_bundle(database: Database, ids: Sequence[str], sha256: str) -> set[str]:
    """Return which of some devices have a bundle in a slot."""
    return {
        row.id
        for begin in range(0, len(ids), _BATCH)
        for row in load_rows(database, ids[begin : begin + _BATCH])
        if row.reported is not None and sha256 in row.reported.facts.bundles
    }


def stream(database: Database, where: DeviceFilter, ear: ListeningPeriod, page: int = 500
           ) -> Iterator[DeviceRow]:  # fmt: skip
    """Yield the devices of a filter by their ids, reading some at a time."""
    after = ""
    while True:
        rows = read_page(database, where, ear, after=after, limit=page)
        yield from rows.rows
        if not (after := rows.after):
            return


def phases_of(database: Database, ids: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Return the rollout (0: none) of some devices and their phase in it."""
    if not ids:
        return {}
    marks = ", ".join("?" * len(ids))
    rows = database.rows(f"SELECT id, rollout, phase FROM devices WHERE id IN ({marks})", *ids)
    return {str(device): (int(number), str(phase)) for device, number, phase in rows}


@dataclass(frozen=True, slots=True)
class Changes:
    """Devices that have changed, in the order of their changes. `number`: the last one's number.
    `missed`: more have changed than are named."""

    number: int
    devices: tuple[str, ...]
    missed: bool


def changes_since(database: Database, number: int, limit: int = 1000) -> Changes:
    """Return the devices that have changed since a number (`last_change`), each once."""
    rows = database.rows(
        "SELECT changed, id FROM devices WHERE changed > ? ORDER BY changed LIMIT ?",
        number, limit + 1,
    )  # fmt: skip
    page = rows[:limit]
    return Changes(
        number=int(page[-1][0]) if page else number,
        devices=tuple(str(device) for _number, device in page),
        missed=len(rows) > limit,
    )


def load_voices(database: Database) -> list[LastHeard]:
    """Return when each device was last heard."""
    return [
        LastHeard(*row) for row in database.rows("SELECT id, seen_s, beat_s, place FROM devices")
    ]


def silent_voices(
    database: Database, ear: ListeningPeriod
) -> tuple[list[LastHeard], dict[str, int]]:
    """Return the silent devices, and how many devices their places have."""
    rows = database.rows(
        f"SELECT id, seen_s, beat_s, place FROM devices WHERE {presence_sql(ear)} = 'silent'"
    )
    sizes = database.rows("SELECT place, count(*) FROM devices GROUP BY place") if rows else []
    return [LastHeard(*row) for row in rows], {str(place): int(count) for place, count in sizes}


def _condition(
    database: Database, where: DeviceFilter, ear: ListeningPeriod
) -> tuple[str, list[object]]:
    """Return the condition of a filter and its values."""
    contains = database.dialect.position
    kinds = () if where.problem in ("", "any") else (f",{where.problem},",)
    texts = ("devices.id", "release", "version", "profile", "all_labels")
    matches = " OR ".join(f"{contains}(lower({text}), ?) > 0" for text in texts)
    # Condition and its values, and whether the filter asks for it.
    rows: list[tuple[str, Sequence[object], bool]] = [
        ("phase = ?", (where.phase,), bool(where.phase)),
        ("release = ?", (where.release,), bool(where.release)),
        ("version = ?", (where.version,), bool(where.version)),
        ("profile = ?", (where.profile,), bool(where.profile)),
        ("rollout = ?", (where.rollout,), where.rollout is not None),
        (f"{presence_sql(ear)} IN ('online', 'late')", (), where.presence == "online"),
        (f"{presence_sql(ear)} = ?", (where.presence,), where.presence not in ("", "online")),
        ("problems <> ''", (), where.problem == "any"),
        (f"{contains}(problems, ?) > 0", kinds, bool(kinds)),
        (f"devices.id IN ({', '.join('?' * len(where.ids))})", where.ids, bool(where.ids)),
        (f"({matches})", (where.search.lower(),) * len(texts), bool(where.search)),
        ("reported = 1", (), bool(where.requires)),
        *(
            (f"{contains}(all_labels, ?) > 0", (label_part(*label),), True)
            for label in where.labels
        ),
        *((*_requirement(database, row), True) for row in where.requires),
    ]
    parts = [(condition, values) for condition, values, is_asked in rows if is_asked]
    sql = " AND ".join(condition for condition, _values in parts) or "1 = 1"
    return sql, [value for _condition, values in parts for value in values]


def _requirement(database: Database, row: Requirement) -> tuple[str, tuple[object, ...]]:
    """Return the condition of a requirement: `targets.fulfils` in SQL."""
    if row.name.startswith(LABEL):
        part = label_part(row.name.removeprefix(LABEL), row.value)
        compare = ">" if row.compare == "=" else "="
        return f"{database.dialect.position}(all_labels, ?) {compare} 0", (part,)
    if row.name in _NUMBERS:
        known = f"{row.name} > 0 AND " if _NUMBERS[row.name] else ""
        compare = "<>" if row.compare == "!=" else row.compare
        return f"{known}{row.name} {compare} ?", (float(row.value),)
    # Versions are compared as targets compare them, once for each that there is.
    texts = [str(text) for (text,) in database.rows(f"SELECT DISTINCT {row.name} FROM devices")]
    fitting = [text for text in texts if broken_by_text(row, text) is None]
    if not fitting:
        return "1 = 0", ()
    return f"{row.name} IN ({', '.join('?' * len(fitting))})", tuple(fitting)


def _cursor(sort: str, row: Row) -> str:
    device, key = row
    text = msgspec.json.encode([sort, key, device])
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def _read_cursor(text: str, sort: str) -> tuple[object, str]:
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        kind, key, device = msgspec.json.decode(data, type=tuple[str, str | float, str])
    except (ValueError, binascii.Error) as error:
        raise RolloutError(f"{text!r} is no place in a list of devices") from error
    if kind != sort or isinstance(key, str) != (sort in _TEXTS):
        raise RolloutError(f"{text!r} is a place in a list by {kind}, not by {sort}")
    return key, device


_TEXTS = frozenset({"id", "state", "profile", "version", "problems"})
