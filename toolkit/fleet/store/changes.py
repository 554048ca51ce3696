"""The numbers of changes: each change of a device's row has one, above all before."""

from collections.abc import Sequence

from toolkit.fleet.store.database import Database

COUNTER = "changed"  # of `settings`


def last_change(database: Database) -> int:
    """Return the number of the last change, 0 before the first."""
    rows = database.rows("SELECT value FROM settings WHERE name = ?", COUNTER)
    return int(rows[0][0]) if rows else 0


def next_changes(database: Database, count: int) -> range:
    """Take numbers for changes, in a write transaction."""
    database.run("UPDATE settings SET value = value + ? WHERE name = ?", count, COUNTER)
    last = last_change(database)
    return range(last - count + 1, last + 1)


def touch(database: Database, devices: Sequence[str]) -> None:
    """Number a change of devices that time alone has changed, in a write transaction."""
    if not devices:
        return
    numbers = next_changes(database, len(devices))
    database.run_many(
        "UPDATE devices SET changed = ? WHERE id = ?", list(zip(numbers, devices, strict=True))
    )
