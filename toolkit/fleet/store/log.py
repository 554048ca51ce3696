"""The log: every event of every rollout, every order and every document sent; append-only.

Each row holds the SHA-256 of the row before and of itself, so a row that was changed, taken out or
put in breaks the chain from there on. That the end was not cut off is shown by a hash noted before.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from toolkit.errors import RolloutError
from toolkit.fleet.store.database import Database

GENESIS = "0" * 64
EVENT = "event"
PAGE = 10_000


@dataclass(frozen=True, slots=True)
class Note:
    """What is appended: who did what, `body` in JSON."""

    who: str
    kind: str
    body: str
    rollout: int = 0


@dataclass(frozen=True, slots=True)
class LogRow:
    """A row of the log."""

    seq: int
    at_s: float
    who: str
    rollout: int
    kind: str
    body: str
    hash: str

    def hash_after(self, before: str) -> str:
        """Return the hash that this row must have after another one."""
        values = (self.seq, self.at_s, self.who, self.rollout, self.kind, self.body)
        return hashlib.sha256(before.encode() + msgspec.json.encode(values)).hexdigest()


@dataclass(frozen=True, slots=True)
class Verified:
    """A chain that holds: its rows, and the hash of the last one."""

    rows: int
    head: str


def append(database: Database, notes: Sequence[Note], at_s: float) -> int:
    """Append rows, in a write transaction; return the number of the last row."""
    seq, before = head(database)
    rows = []
    for note in notes:
        seq += 1
        row = LogRow(seq, at_s, note.who, note.rollout, note.kind, note.body, "")
        before = row.hash_after(before)
        rows.append((seq, at_s, note.who, note.rollout, note.kind, note.body, before))
    database.run_many("INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    return seq


def head(database: Database) -> tuple[int, str]:
    """Return the number and the hash of the last row; 0 and GENESIS before the first."""
    rows = database.rows("SELECT seq, hash FROM log ORDER BY seq DESC LIMIT 1")
    return (int(rows[0][0]), str(rows[0][1])) if rows else (0, GENESIS)


def rows_after(database: Database, seq: int) -> Iterator[LogRow]:
    """Yield the rows after a number, in their order."""
    while True:
        page = database.rows(
            "SELECT seq, at_s, who, rollout, kind, body, hash FROM log WHERE seq > ?"
            " ORDER BY seq LIMIT ?",
            seq, PAGE,
        )  # fmt: skip
        for row in page:
            yield LogRow(*row)
        if len(page) < PAGE:
            return
        seq = page[-1][0]


def events_of(database: Database, rollout: int) -> list[str]:
    """Return the events of a rollout, in their order."""
    rows = database.rows(
        "SELECT body FROM log WHERE rollout = ? AND kind = ? ORDER BY seq", rollout, EVENT
    )
    return [str(row[0]) for row in rows]


def verify(database: Database, known_head: str = "") -> Verified:
    """Check the whole chain; RolloutError names the first row that breaks it.

    `known_head`: a hash noted before, which must still be in the chain.
    """
    count, before, is_known = 0, GENESIS, not known_head
    for row in rows_after(database, 0):
        count += 1
        if row.seq != count:
            raise RolloutError(
                f"the audit log has no row {count}: rows {count} to {row.seq - 1} were taken out"
            )
        if row.hash != row.hash_after(before):
            raise RolloutError(
                f"the audit log was changed at row {row.seq} ({row.kind} by {row.who}): its hash "
                "does not fit the row and the one before"
            )
        before = row.hash
        is_known = is_known or before == known_head
    if not is_known:
        raise RolloutError(
            f"the audit log has {count} rows, none with the hash {known_head}: its end was cut "
            "off, or it is another fleet's"
        )
    return Verified(count, before)
