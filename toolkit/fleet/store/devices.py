"""The devices of a fleet: their last documents, and the labels that the operator gave them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from device.protocol.documents import Reported, StateDocument, decode
from toolkit.fleet.rollout.targets import Target
from toolkit.fleet.store.database import Database


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A device: when it was last heard, its state and report (None: none yet), the labels."""

    id: str
    seen_s: float
    state: StateDocument | None
    reported: Reported | None
    labels: Mapping[str, str]

    @property
    def online(self) -> bool:
        """Whether its agent is connected."""
        return self.state is not None and self.state.state == "online"

    @property
    def all_labels(self) -> Mapping[str, str]:
        """The device's own labels, and above them the operator's."""
        own = {} if self.reported is None else self.reported.facts.labels
        return {**own, **self.labels}

    def target(self) -> Target | None:
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
            online=self.online,
            dev=reported.dev,
        )


def save_devices(database: Database, rows: Iterable[DeviceRow]) -> None:
    """Keep the documents of devices; the labels of one that is known stay."""
    values = [
        (row.id, row.seen_s, _text(row.state), _text(row.reported), _text(row.labels))
        for row in rows
    ]
    database.run_many(
        "INSERT INTO devices VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
        " seen_s = excluded.seen_s, state = excluded.state, reported = excluded.reported",
        values,
    )


def load_devices(database: Database) -> list[DeviceRow]:
    """Return all devices, by their ids."""
    rows = database.rows("SELECT id, seen_s, state, reported, labels FROM devices ORDER BY id")
    return [_row(*row) for row in rows]


def load_device(database: Database, device: str) -> DeviceRow | None:
    """Return a device, None if it is not known."""
    rows = database.rows(
        "SELECT id, seen_s, state, reported, labels FROM devices WHERE id = ?", device
    )
    return _row(*rows[0]) if rows else None


def set_labels(database: Database, device: str, labels: Mapping[str, str]) -> None:
    """Replace the operator's labels of a device, in a write transaction."""
    database.run("UPDATE devices SET labels = ? WHERE id = ?", _text(labels), device)


def load_labels(database: Database) -> dict[str, dict[str, str]]:
    """Return the operator's labels by device."""
    rows = database.rows("SELECT id, labels FROM devices WHERE labels <> ?", "{}")
    return {str(device): msgspec.json.decode(text, type=dict[str, str]) for device, text in rows}


def _text(value: object) -> str:
    return "" if value is None else msgspec.json.encode(value).decode()


def _row(device: str, seen_s: float, state: str, reported: str, labels: str) -> DeviceRow:
    return DeviceRow(
        id=device,
        seen_s=seen_s,
        state=decode(state.encode(), StateDocument) if state else None,
        reported=decode(reported.encode(), Reported) if reported else None,
        labels=msgspec.json.decode(labels, type=dict[str, str]),
    )
