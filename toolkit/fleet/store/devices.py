"""The devices of a fleet: their last documents, and the labels that the operator gave them; when
each was last heard, and since when the server hears."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from device.protocol.documents import Reported, StateDocument, decode
from toolkit.fleet.rollout.liveness import ListeningPeriod, Liveness, judge, place_of
from toolkit.fleet.rollout.targets import Target
from toolkit.fleet.store.changes import next_changes
from toolkit.fleet.store.database import Database, Row
from toolkit.fleet.store.derived import derive, labels_text
from toolkit.fleet.store.dialects import json_texts
from toolkit.fleet.store.schema import DERIVED

DEAF_S = 10.0  # what a server that hears has written is younger
COLUMNS = "devices.id, seen_s, state, documents.reported, labels, beat, beat_at"
TABLES = "devices JOIN documents ON documents.id = devices.id"
_DERIVED = tuple(name for name, _kind in DERIVED)
_BATCH = 500  # rows of a statement


class DeviceRow(msgspec.Struct, frozen=True, gc=False):
    """A device: when it was last heard on the server's clock (0: never), its state and report
    (None: none yet), the labels; the counter of its last beat, and what its clock said then.

    Heard is what came live and was signed where the device has a key; nothing retained is.
    """

    id: str
    heard_s: float
    state: StateDocument | None
    reported: Reported | None
    labels: Mapping[str, str]
    beat: int = 0
    beat_at: str = ""

    @property
    def beat_s(self) -> float:
        """The device says something at least so often; 0: nothing is known."""
        return 0.0 if self.reported is None else self.reported.beat_s

    def liveness(self, ear: ListeningPeriod) -> Liveness:
        """Return whether it is alive."""
        return judge(self.heard_s, self.beat_s, ear)

    def is_online(self, ear: ListeningPeriod) -> bool:
        """Whether its agent is connected, as far as it may be believed."""
        says_so = self.state is not None and self.state.state == "online"
        return says_so and self.liveness(ear) != "silent"

    @property
    def all_labels(self) -> Mapping[str, str]:
        """The device's own labels, and above them the operator's."""
        reported_labels = {} if self.reported is None else self.reported.facts.labels
        return {**reported_labels, **self.labels}

    def target(self, ear: ListeningPeriod) -> Target | None:
        """Return the device as a rollout sees it, None before its first report."""
        reported = self.reported
        if reported is None:
            return None
        return Target(
            device=self.id,
            profile=reported.profile,
            facts=reported.facts,
            labels=self.all_labels,
            running="" if reported.running is None else reported.running.sha256,
            online=self.is_online(ear),
            dev=reported.dev,
            agent=None if reported.versions is None else reported.versions.running,
        )


def save_devices(database: Database, rows: Iterable[DeviceRow]) -> None:
    """Keep the documents of devices, in a write transaction; the labels of one that is known
    stay."""
    every = list(rows)
    for begin in range(0, len(every), _BATCH):
        _save_batch(database, every[begin : begin + _BATCH])


def _save_batch(database: Database, rows: Sequence[DeviceRow]) -> None:
    stored_labels = {
        str(device): msgspec.json.decode(text, type=dict[str, str])
        for device, text in database.rows(
            f"SELECT id, labels FROM devices WHERE id IN ({database.dialect.among})",
            json_texts(row.id for row in rows),
        )
    }
    values = []
    for number, heard in zip(next_changes(database, len(rows)), rows, strict=True):
        labels = stored_labels.get(heard.id, heard.labels)
        row = heard if labels == heard.labels else replace(heard, labels=labels)
        derived = derive(row.state, row.reported, row.all_labels)
        values.append((row.id, row.heard_s, _text(row.labels), row.beat, row.beat_at, number,
            *derived.values()))  # fmt: skip
    names = ("seen_s", "beat", "beat_at", "changed", *_DERIVED)
    database.run_many(
        f"INSERT INTO devices (id, seen_s, labels, beat, beat_at, changed, {', '.join(_DERIVED)})"
        f" VALUES (?, ?, ?, ?, ?, ?{', ?' * len(_DERIVED)}) ON CONFLICT (id) DO UPDATE SET "
        + ", ".join(f"{name} = excluded.{name}" for name in names),
        values,
    )
    database.run_many(
        "INSERT INTO documents VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
        " state = excluded.state, reported = excluded.reported",
        [(row.id, _text(row.state), _text(row.reported)) for row in rows],
    )


def save_beats(database: Database, rows: Iterable[DeviceRow]) -> None:
    """Keep when devices were last heard, in a write transaction; their documents stay."""
    database.run_many(
        "UPDATE devices SET seen_s = ?, beat = ?, beat_at = ? WHERE id = ?",
        [(row.heard_s, row.beat, row.beat_at, row.id) for row in rows],
    )


def save_ear(database: Database, ear: ListeningPeriod) -> None:
    """Keep since when and until when the server hears, in a write transaction."""
    for name, moment_s in (("ear_since_ms", ear.since_s), ("ear_until_ms", ear.until_s)):
        database.run(
            "INSERT INTO settings VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET"
            " value = excluded.value",
            name, int(moment_s * 1000),
        )  # fmt: skip


def load_ear(database: Database) -> ListeningPeriod:
    """Return since when and until when the server hears. One that does not hear at present, or no
    server, hears nothing."""
    rows = database.rows("SELECT name, value FROM settings WHERE name LIKE ?", "ear_%")
    values = {str(name): float(value) / 1000.0 for name, value in rows}
    now_s, until_s = time.time(), values.get("ear_until_ms", 0.0)
    if abs(now_s - until_s) > DEAF_S:
        return ListeningPeriod(now_s, now_s)
    return ListeningPeriod(values.get("ear_since_ms", until_s), until_s)


def is_heard(database: Database) -> bool:
    """Whether a server hears the devices at present."""
    ear = load_ear(database)
    return ear.since_s < ear.until_s


def load_device(database: Database, device: str) -> DeviceRow | None:
    """Return a device, None if it is not known."""
    return next(iter(load_devices(database, (device,))), None)


def load_devices(database: Database, devices: Sequence[str]) -> list[DeviceRow]:
    """Return those of some devices that are known."""
    return [
        device_row(row)
        for begin in range(0, len(devices), _BATCH)
        if (part := devices[begin : begin + _BATCH])
        for row in database.rows(
            f"SELECT {COLUMNS} FROM {TABLES} WHERE devices.id IN ({database.dialect.among})",
            json_texts(part),
        )
    ]


def set_labels(database: Database, device: str, labels: Mapping[str, str]) -> None:
    """Replace the operator's labels of a device, in a write transaction."""
    row = load_device(database, device)
    if row is None:
        return
    both = replace(row, labels=labels).all_labels
    database.run(
        "UPDATE devices SET labels = ?, all_labels = ?, place = ?, changed = ? WHERE id = ?",
        _text(labels), labels_text(both), place_of(both), next_changes(database, 1)[0], device,
    )  # fmt: skip


def remove_device(database: Database, device: str) -> None:
    """Take a device out of the fleet, in a write transaction. What the broker has retained of it
    does not bring it back."""
    for table, column in (("devices", "id"), ("documents", "id"), ("desired", "device")):
        database.run(f"DELETE FROM {table} WHERE {column} = ?", device)
    database.run("INSERT INTO decommissioned VALUES (?) ON CONFLICT DO NOTHING", device)


def readmit(database: Database, devices: Iterable[str]) -> None:
    """Note that devices are in the fleet again, in a write transaction."""
    database.run_many(
        "DELETE FROM decommissioned WHERE device = ?", [(device,) for device in devices]
    )


def load_decommissioned(database: Database) -> set[str]:
    """Return the devices that left the fleet and were not heard since."""
    return {str(row[0]) for row in database.rows("SELECT device FROM decommissioned")}


def load_labels(database: Database) -> dict[str, dict[str, str]]:
    """Return the operator's labels by device."""
    rows = database.rows("SELECT id, labels FROM devices WHERE labels <> ?", "{}")
    return {str(device): msgspec.json.decode(text, type=dict[str, str]) for device, text in rows}


def _text(value: object) -> str:
    return "" if value is None else msgspec.json.encode(value).decode()


def device_row(row: Row) -> DeviceRow:
    """Return the device in a row of COLUMNS."""
    device, heard_s, state, reported, labels, beat, beat_at = row
    report = None
    with suppress(ValueError):  # one without limits, of before there were any: the next one comes
        report = decode(reported.encode(), Reported) if reported else None
    return DeviceRow(
        id=device,
        heard_s=heard_s,
        state=decode(state.encode(), StateDocument) if state else None,
        reported=report,
        labels=msgspec.json.decode(labels, type=dict[str, str]),
        beat=beat,
        beat_at=beat_at,
    )
