"""The log: every event of every rollout, every order and every document sent; append-only.

Each row holds the SHA-256 of the row before and of itself, so a row that was changed, taken out or
put in breaks the chain from there on. That the end was not cut off is shown by a hash noted before.
The first rows may be archived: a later row, the checkpoint, then says which and their last hash.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from toolkit.errors import RolloutError
from toolkit.fleet.store.database import Database

GENESIS = "0" * 64
EVENT = "event"
CHECKPOINT = "checkpoint"  # kind of a row, and the setting that says up to where rows are archived
PAGE = 10_000
_HEAD = 400  # characters of a long body


@dataclass(frozen=True, slots=True)
class Note:
    """What is appended: who did what to which devices, `body` in JSON."""

    who: str
    kind: str
    body: str
    rollout: int = 0
    devices: tuple[str, ...] = ()


def _hash(before: str, *values: float | str) -> str:
    return hashlib.sha256(before.encode() + msgspec.json.encode(values)).hexdigest()


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
        return _hash(before, self.seq, self.at_s, self.who, self.rollout, self.kind, self.body)


@dataclass(frozen=True, slots=True)
class Verified:
    """A chain that holds: the number of its last row, and that row's hash. `checkpoint`: the rows
    up to this number are in an archive, 0: all rows are here."""

    rows: int
    head: str
    checkpoint: int = 0


class Checkpoint(msgspec.Struct, frozen=True):
    """The body of a row that says that the rows up to `seq`, whose hash is given, were archived."""

    seq: int
    hash: str


def append(
    database: Database, notes: Sequence[Note], at_s: float, after: tuple[int, str] | None = None
) -> tuple[int, str]:
    """Append rows, in a write transaction; return number and hash of the last row. `after`: those
    of the last row now, if they are known."""
    seq, before = after or head(database)
    rows = []
    for note in notes:
        seq += 1
        values = (seq, at_s, note.who, note.rollout, note.kind, note.body)
        before = _hash(before, *values)
        rows.append((*values, before))
    database.run_many("INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    index_rows(database, [(row[0], note.devices) for row, note in zip(rows, notes, strict=True)])
    return seq, before


def index_rows(database: Database, rows: Iterable[tuple[int, Sequence[str]]]) -> None:
    """Note which devices rows concern, by their numbers, in a write transaction."""
    database.run_many(
        "INSERT INTO log_devices VALUES (?, ?) ON CONFLICT DO NOTHING",
        [(device, seq) for seq, devices in rows for device in devices],
    )


def head(database: Database) -> tuple[int, str]:
    """Return the number and the hash of the last row; 0 and GENESIS before the first."""
    rows = database.rows("SELECT seq, hash FROM log ORDER BY seq DESC LIMIT 1")
    return (int(rows[0][0]), str(rows[0][1])) if rows else (0, GENESIS)


def rows_after(database: Database, seq: int, last: int = 2**62) -> Iterator[LogRow]:
    """Yield the rows after a number, up to the last one, in their order."""
    while True:
        page = database.rows(
            "SELECT seq, at_s, who, rollout, kind, body, hash FROM log WHERE seq > ?"
            " AND seq <= ? ORDER BY seq LIMIT ?",
            seq, last, PAGE,
        )  # fmt: skip
        for row in page:
            yield LogRow(*row)
        if len(page) < PAGE:
            return
        seq = page[-1][0]


def rows_of(database: Database, device: str) -> Iterator[LogRow]:
    """Yield the rows that concern a device, in their order; of the event that begins a rollout,
    which names all its devices, the beginning of the body."""
    rows = database.rows(
        "SELECT log.seq, at_s, who, rollout, kind,"
        f" CASE WHEN body LIKE ? THEN substr(body, 1, {_HEAD}) ELSE body END, hash"
        " FROM log JOIN log_devices ON log_devices.seq = log.seq WHERE device = ?"
        " ORDER BY log.seq",
        '{"event":"started"%', device,
    )  # fmt: skip
    return (LogRow(*row) for row in rows)


def page_before(database: Database, seq: int | None, limit: int) -> list[LogRow]:
    """Return the newest rows before a number (None: of all), the newest first."""
    rows = database.rows(
        f"SELECT seq, at_s, who, rollout, kind, substr(body, 1, {_HEAD}), hash FROM log"
        " WHERE seq < ? ORDER BY seq DESC LIMIT ?",
        2**62 if seq is None else seq, limit,
    )  # fmt: skip
    return [LogRow(*row) for row in rows]


def events_of(
    database: Database, rollout: int, after: int = 0, until: int | None = None
) -> list[str]:
    """Return the events of a rollout in the rows from `after` (without it) to `until`."""
    rows = database.rows(
        "SELECT body FROM log WHERE rollout = ? AND kind = ? AND seq > ? AND seq <= ? ORDER BY seq",
        rollout, EVENT, after, 2**62 if until is None else until,
    )  # fmt: skip
    return [str(row[0]) for row in rows]


def archive_until(database: Database, seq: int, who: str, at_s: float) -> Iterator[LogRow]:
    """Yield the rows up to a number, then delete them and append the checkpoint that carries their
    last hash; in a write transaction. Who takes them has kept them when asking for the next."""
    last = None
    for row in rows_after(database, 0):
        if row.seq > seq:
            break
        last = row
        yield row
    if last is None:
        return
    body = msgspec.json.encode(Checkpoint(last.seq, last.hash)).decode()
    append(database, [Note(who, CHECKPOINT, body)], at_s)
    database.run(
        "INSERT INTO settings VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET"
        " value = excluded.value",
        CHECKPOINT, last.seq,
    )  # fmt: skip
    for table in ("log", "log_devices"):
        database.run(f"DELETE FROM {table} WHERE seq <= ?", last.seq)


def read_checkpoint(database: Database) -> Checkpoint:
    """Return the newest checkpoint; row 0 and GENESIS where nothing was archived. RolloutError: the
    log has lost the row that tells it."""
    rows = database.rows("SELECT value FROM settings WHERE name = ?", CHECKPOINT)
    if not rows:
        return Checkpoint(0, GENESIS)
    bodies = database.rows("SELECT body FROM log WHERE kind = ? ORDER BY seq DESC", CHECKPOINT)
    for (body,) in bodies:
        checkpoint = msgspec.json.decode(body, type=Checkpoint)
        if checkpoint.seq == int(rows[0][0]):
            return checkpoint
    raise RolloutError(
        f"the audit log has no checkpoint for the rows 1 to {rows[0][0]}: rows were taken out"
    )


def verify(database: Database, known_head: str = "") -> Verified:
    """Check the whole chain; RolloutError names the first row that breaks it.

    `known_head`: a hash noted before, which must still be in the chain.
    """
    checkpoint = read_checkpoint(database)
    count, before = checkpoint.seq, checkpoint.hash
    is_known = not known_head or before == known_head
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
            + (f", or it is of the archived rows 1 to {checkpoint.seq}" if checkpoint.seq else "")
        )
    return Verified(count, before, checkpoint.seq)
