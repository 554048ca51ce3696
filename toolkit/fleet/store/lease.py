"""The lease: of several servers on one store one sends, and another takes over when it is gone.

A holder's name says where its process is. One on the same machine that is gone need not be waited
for: a server that was killed and started again goes on at once.
"""

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import RolloutError
from toolkit.fleet.store.database import Database

LEASE_S = 5.0
NAME = "server"


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """Who holds the lease, and for how much longer in seconds (0 or less: it has run out)."""

    holder: str
    remaining_s: float


def holder_name() -> str:
    """Return a new name for this process: its machine and process namespace, its id, and chance."""
    return f"{_place()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _is_gone(holder: str) -> bool:
    """Whether the process of a holder was here and is here no more."""
    place, _, rest = holder.rpartition(":")[0].rpartition(":")
    if place != _place() or not rest.isdigit():
        return False
    try:
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def read_lease(database: Database) -> LeaseRow | None:
    """Return the lease, None if nobody ever held it."""
    rows = database.rows(
        f"SELECT holder, until_s - {database.dialect.now_s} FROM lease WHERE name = ?", NAME
    )
    return LeaseRow(str(rows[0][0]), float(rows[0][1])) if rows else None


def acquire(database: Database, holder: str) -> bool:
    """Take or renew the lease; False if another server has it."""
    with database.write():
        row = read_lease(database)
        is_held = row is not None and row.holder != holder and row.remaining_s > 0.0
        if row is not None and is_held and not _is_gone(row.holder):
            return False
        now_s = database.now_s()
        database.run(
            "INSERT INTO lease VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET"
            " holder = excluded.holder, until_s = excluded.until_s",
            NAME, holder, now_s + LEASE_S,
        )  # fmt: skip
        return True


def check(database: Database, holder: str) -> None:
    """Renew the lease inside a write transaction; RolloutError if another server has it.

    So nothing is kept, and nothing is sent, by a server that was thought dead.
    """
    changed = database.run(
        f"UPDATE lease SET until_s = {database.dialect.now_s} + ? WHERE name = ? AND holder = ?",
        LEASE_S, NAME, holder,
    )  # fmt: skip
    if changed != 1:
        raise RolloutError("another server has taken over this fleet: this one stops")


def release(database: Database, holder: str) -> None:
    """Give the lease back, so that another server need not wait."""
    with database.write():
        database.run("DELETE FROM lease WHERE name = ? AND holder = ?", NAME, holder)
