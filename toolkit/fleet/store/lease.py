"""The leases: which servers share a fleet. One that is gone loses its lease, and the others take
its devices over.

In PostgreSQL any number of servers have one each; in SQLite one server has the only one, and others
stand by. A holder's name says where its process is. One on the same machine that is gone need not
be waited for.
"""

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from toolkit.errors import RolloutError
from toolkit.fleet.store.database import Database

LEASE_S = 5.0
ALONE = "server"  # name of the lease of a server of before leases were shared
LOST = "another server has taken over this fleet: this one stops"


class LeaseLostError(RolloutError):
    """A server has no lease: others have ended it, or have the only one."""


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """Who holds a lease, and for how much longer in seconds (0 or less: it has run out)."""

    name: str
    holder: str
    remaining_s: float


def holder_name() -> str:
    """Return a new name for this process: its machine and process namespace, its id, and chance."""
    return f"{_place()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


@cache
def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def is_gone(holder: str) -> bool:
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


def read_leases(database: Database) -> list[LeaseRow]:
    """Return all leases by their holders; those that have run out, too."""
    return [
        LeaseRow(str(name), str(holder), float(remaining_s))
        for name, holder, remaining_s in database.rows(
            f"SELECT name, holder, until_s - {database.dialect.now_s} FROM lease ORDER BY holder"
        )
    ]


def lease_end(database: Database, holder: str) -> float | None:
    """Return until when, on the store's clock, a server has a lease, or had one that nobody has
    ended; None: it has none."""
    rows = database.rows("SELECT until_s FROM lease WHERE holder = ?", holder)
    return float(rows[0][0]) if rows else None


def is_served(database: Database) -> bool:
    """Whether a server works."""
    return any(row.remaining_s > 0.0 for row in read_leases(database))


def acquire(database: Database, holder: str) -> bool:
    """Take or renew a lease; False if another server has the only one."""
    with database.write():
        if _excludes(database, [row for row in _living(database) if row.holder != holder]):
            return False
        database.run(
            "INSERT INTO lease VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET"
            " until_s = excluded.until_s",
            holder, holder, database.now_s() + LEASE_S,
        )  # fmt: skip
        return True


def is_free(database: Database) -> bool:
    """Whether a server that has no lease may have one."""
    rows = read_leases(database)
    living = [row for row in rows if row.remaining_s > 0.0 and not is_gone(row.holder)]
    return not _excludes(database, living)


def _excludes(database: Database, others: Sequence[LeaseRow]) -> bool:
    """Whether other servers that live leave no room for one more."""
    alone = not database.dialect.shares or any(row.name == ALONE for row in others)
    return bool(others) and alone


def check(database: Database, holder: str) -> tuple[str, ...]:
    """End the leases that have run out, but for the holder's own, in a write transaction that ends
    with its renewal; return who has one. LeaseLostError: the other servers have ended this one's.

    So nothing is kept by a server that was thought dead, and all agree on who lives.
    """
    holders = tuple(row.holder for row in _living(database, holder))
    if holder not in holders:
        raise LeaseLostError(LOST)
    return holders


def renew(database: Database, holder: str) -> None:
    """Let a lease last for LEASE_S from now on, in a write transaction. LeaseLostError: it was
    ended."""
    changed = database.run(
        f"UPDATE lease SET until_s = {database.dialect.now_s} + ? WHERE name = ? AND holder = ?",
        LEASE_S, holder, holder,
    )  # fmt: skip
    if changed != 1:
        raise LeaseLostError(LOST)


def _living(database: Database, me: str = "") -> list[LeaseRow]:
    """Return the leases of servers that live, and delete the others, in a write transaction.

    What ran out while this server waited for the lock, or had it, could not be renewed.
    """
    rows, excused_s = read_leases(database), database.writing_s()
    dead = [
        row
        for row in rows
        if row.holder != me and (row.remaining_s + excused_s <= 0.0 or is_gone(row.holder))
    ]
    database.run_many("DELETE FROM lease WHERE name = ?", [(row.name,) for row in dead])
    return [row for row in rows if row not in dead]


def release(database: Database, holder: str) -> None:
    """Give a lease back, so that nobody need wait."""
    with database.write():
        database.run("DELETE FROM lease WHERE name = ? AND holder = ?", holder, holder)


def lease_board(database: Database, board: str, holder: str, for_s: float) -> bool:
    """Take or renew the lease of a board for so many seconds; False if another run has it."""
    with database.write():
        changed = database.run(
            "INSERT INTO board_leases VALUES (?, ?, ?) ON CONFLICT (board) DO UPDATE SET"
            " holder = excluded.holder, until_s = excluded.until_s"
            " WHERE board_leases.holder = excluded.holder OR board_leases.until_s < ?",
            board, holder, database.now_s() + for_s, database.now_s(),
        )  # fmt: skip
        return changed == 1


def release_board(database: Database, board: str, holder: str) -> None:
    """Give the lease of a board back."""
    with database.write():
        database.run("DELETE FROM board_leases WHERE board = ? AND holder = ?", board, holder)
