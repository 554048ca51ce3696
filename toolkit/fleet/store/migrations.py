"""Bring the tables of an earlier version up to date, in the transaction of its caller."""

import msgspec

from toolkit.fleet.rollout import values as v
from toolkit.fleet.store import log, rollouts
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.devices import device_row, save_devices
from toolkit.fleet.store.schema import SCHEMA_VERSION, TO_2, TO_3, TO_4, TO_5

IS_DEV = '"dev":true'  # in a report; in a text of the device the quotes would be escaped
_OF_2 = "id, seen_s, state, reported, labels, beat, beat_at"


def migrate(database: Database, version: int) -> None:
    """Make the newest version of an older one; nothing is done to the newest."""
    if version == 1:
        for statement in TO_2:
            database.run(statement)
    if version == 3:
        for statement in TO_4:
            database.run(statement)
        contains = database.dialect.position
        database.run(
            "UPDATE devices SET dev = 1 WHERE id IN (SELECT id FROM documents WHERE"
            f" {contains}(reported, ?) > 0)",
            IS_DEV,
        )
    if version in (1, 2):
        for statement in (*TO_3, *database.dialect.to_3, *database.dialect.append_only):
            database.run(statement)
        rows = database.rows(f"SELECT {_OF_2} FROM devices_of_2 ORDER BY id")
        save_devices(database, (device_row(row) for row in rows))
        database.run("DROP TABLE devices_of_2")
        _index_log(database)
        _keep_states(database)
    if version < SCHEMA_VERSION:
        for statement in TO_5:
            database.run(statement)


def _index_log(database: Database) -> None:
    """Note which rows of the log concern which device."""
    for row in log.rows_after(database, 0):
        devices = rollouts.devices_of(v.EVENTS.decode(row.body)) if row.kind == log.EVENT else ()
        if row.kind != log.EVENT:
            body = msgspec.json.decode(row.body)
            name = body.get("device") if isinstance(body, dict) else None
            devices = (name,) if isinstance(name, str) else ()
        log.index_rows(database, [(row.seq, devices)])


def _keep_states(database: Database) -> None:
    """Keep the rollouts' states as lists read them, and snapshots of those that have ended."""
    applied = rollouts.applied(database)
    for number, spec in rollouts.load_specs(database).items():
        state = rollouts.load_state(database, number, spec)
        rollouts.keep_state(database, number, v.RolloutState(), state)
        if state.status in v.ENDED:
            state = rollouts.load_state(database, number, spec, applied)
            rollouts.save_snapshot(database, number, applied, state)
