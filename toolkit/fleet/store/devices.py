"""The devices of a fleet: their last documents, and the labels that the operator gave them; when
each was last heard, and since when the server hears."""

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from device.protocol.documents import Reported, StateDocument, decode
from toolkit.fleet.rollout.liveness import Ear, Liveness, judge
from toolkit.fleet.rollout.targets import Target
from toolkit.fleet.store.database import Database, Row

DEAF_S = 10.0  # what a server that hears has written is younger
_COLUMNS = "id, seen_s, state, reported, labels, beat, beat_at"


@dataclass(frozen=True, slots=True)
class DeviceRow:
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

    def liveness(self, ear: Ear) -> Liveness:
        """Return whether it is alive."""
        return judge(self.heard_s, self.beat_s, ear)

    def is_online(self, ear: Ear) -> bool:
        """Whether its agent is connected, as far as it may be believed."""
        says_so = self.state is not None and self.state.state == "online"
        return says_so and self.liveness(ear) != "silent"

    @property
    def all_labels(self) -> Mapping[str, str]:
        """The device's own labels, and above them the operator's."""
        own = {} if self.reported is None else self.reported.facts.labels
        return {**own, **self.labels}

    def target(self, ear: Ear) -> Target | None:
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
        )


def save_devices(database: Database, rows: Iterable[DeviceRow]) -> None:
    """Keep the documents of devices; the labels of one that is known stay."""
    values = [
        (row.id, row.heard_s, _text(row.state), _text(row.reported), _text(row.labels),
            row.beat, row.beat_at)
        for row in rows
    ]  # fmt: skip
    database.run_many(
        f"INSERT INTO devices ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id)"
        " DO UPDATE SET seen_s = excluded.seen_s, state = excluded.state,"
        " reported = excluded.reported, beat = excluded.beat, beat_at = excluded.beat_at",
        values,
    )


def save_beats(database: Database, rows: Iterable[DeviceRow]) -> None:
    """Keep when devices were last heard, in a write transaction; their documents stay."""
    database.run_many(
        "UPDATE devices SET seen_s = ?, beat = ?, beat_at = ? WHERE id = ?",
        [(row.heard_s, row.beat, row.beat_at, row.id) for row in rows],
    )


def save_ear(database: Database, ear: Ear) -> None:
    """Keep since when and until when the server hears, in a write transaction."""
    for name, moment_s in (("ear_since_ms", ear.since_s), ("ear_until_ms", ear.until_s)):
        database.run(
            "INSERT INTO settings VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET"
            " value = excluded.value",
            name, int(moment_s * 1000),
        )  # fmt: skip


def load_ear(database: Database) -> Ear:
    """Return since when and until when the server hears. One that does not hear at present, or no
    server, hears nothing."""
    rows = database.rows("SELECT name, value FROM settings WHERE name LIKE ?", "ear_%")
    values = {str(name): float(value) / 1000.0 for name, value in rows}
    now_s, until_s = time.time(), values.get("ear_until_ms", 0.0)
    if abs(now_s - until_s) > DEAF_S:
        return Ear(now_s, now_s)
    return Ear(values.get("ear_since_ms", until_s), until_s)


def load_devices(database: Database) -> list[DeviceRow]:
    """Return all devices, by their ids."""
    rows = database.rows(f"SELECT {_COLUMNS} FROM devices ORDER BY id")
    return [_row(row) for row in rows]


def load_device(database: Database, device: str) -> DeviceRow | None:
    """Return a device, None if it is not known."""
    rows = database.rows(f"SELECT {_COLUMNS} FROM devices WHERE id = ?", device)
    return _row(rows[0]) if rows else None


def set_labels(database: Database, device: str, labels: Mapping[str, str]) -> None:
    """Replace the operator's labels of a device, in a write transaction."""
    database.run("UPDATE devices SET labels = ? WHERE id = ?", _text(labels), device)


def load_labels(database: Database) -> dict[str, dict[str, str]]:
    """Return the operator's labels by device."""
    rows = database.rows("SELECT id, labels FROM devices WHERE labels <> ?", "{}")
    return {str(device): msgspec.json.decode(text, type=dict[str, str]) for device, text in rows}


def _text(value: object) -> str:
    return "" if value is None else msgspec.json.encode(value).decode()


def _row(row: Row) -> DeviceRow:
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
