"""Events that wait for the broker, on the disk: nothing final is lost, old telemetry goes first.

SQLite with full syncs: an event that was added survives a power cut. A disk that takes nothing
costs that alone; the events are then kept in memory.
"""

import contextlib
import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device.files import UnfitFileError, open_regular
from device.protocol.cloud_events import CloudEvent
from device.update.state_folder import set_aside

LOG = logging.getLogger("tandem.agent")
MAX_BYTES = 4 * 1024**2
MAX_FILE_BYTES = 16 * MAX_BYTES  # of a database, with its free pages, and of its journal
MAX_FINAL = 1000  # each is the end of an update: years of them
MAX_TOLD = 256  # ids of finals that were sent, which are not sent again
# The module decodes SQLite's messages, which quote a damaged file, as UTF-8.
_FAILED = (sqlite3.Error, UnicodeDecodeError)
SCHEMA = """
CREATE TABLE IF NOT EXISTS waiting (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE, topic TEXT NOT NULL, final INTEGER NOT NULL, event BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS told (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE);
"""


@dataclass(frozen=True, slots=True)
class Waiting:
    """An event that was not acknowledged; `topic` is below the device's."""

    id: str
    topic: str
    event: CloudEvent


class Outbox:
    """The events of one agent, oldest first."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._database = self._open()

    def add(self, topic: str, event: CloudEvent, *, final: bool) -> None:
        """Keep an event until `sent`; one of a known id is dropped."""
        blob = msgspec.json.encode(event)

        def insert(database: sqlite3.Connection) -> None:
            known = "SELECT 1 FROM told WHERE id = ?"
            if final and database.execute(known, (event.id,)).fetchone():
                return
            database.execute(
                "INSERT OR IGNORE INTO waiting (id, topic, final, event) VALUES (?, ?, ?, ?)",
                (event.id, topic, final, blob),
            )
            self._drop_oldest(database)

        self._write(insert)

    def waiting(self, count: int) -> tuple[Waiting, ...]:
        """Return the oldest events, `count` if there are more; damaged ones are dropped."""
        query = "SELECT number, id, topic, event FROM waiting ORDER BY number LIMIT ?"
        try:
            rows = self._database.execute(query, (count,)).fetchall()
        except _FAILED:
            return ()
        waiting, damaged = [], []
        for number, *row in rows:
            try:
                name, topic, blob = msgspec.convert(row, tuple[str, str, bytes])
                waiting.append(Waiting(name, topic, msgspec.json.decode(blob, type=CloudEvent)))
            except (ValueError, RecursionError) as error:
                LOG.error("an event of the outbox %s is damaged (%s)", self._path, error)
                damaged.append((number,))
        if damaged:
            delete = "DELETE FROM waiting WHERE number = ?"
            self._write(lambda database: database.executemany(delete, damaged))
            return self.waiting(count)
        return tuple(waiting)

    def sent(self, ids: Iterable[str]) -> None:
        """Forget events that the broker has acknowledged."""
        names = tuple(ids)

        def forget(database: sqlite3.Connection) -> None:
            for name in names:
                query = "DELETE FROM waiting WHERE id = ? RETURNING final"
                row = database.execute(query, (name,)).fetchone()
                if row and row[0]:
                    database.execute("INSERT OR IGNORE INTO told (id) VALUES (?)", (name,))
            database.execute(
                "DELETE FROM told WHERE number <= (SELECT max(number) FROM told) - ?", (MAX_TOLD,)
            )

        self._write(forget)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def _drop_oldest(self, database: sqlite3.Connection) -> None:
        """Make room: telemetry first; of finals only the oldest of far too many."""
        totals = "SELECT coalesce(sum(length(event)), 0), coalesce(sum(final), 0) FROM waiting"
        for final in (0, 1):
            while True:
                size, finals = database.execute(totals).fetchone()
                too_much = size > self._max_bytes if not final else finals > MAX_FINAL
                oldest = "SELECT min(number) FROM waiting WHERE final = ?"
                (number,) = database.execute(oldest, (final,)).fetchone()
                if not too_much or number is None:
                    break
                database.execute("DELETE FROM waiting WHERE number = ?", (number,))

    def _write(self, action: Callable[[sqlite3.Connection], object]) -> None:
        """Do it in a transaction; if the disk fails, in memory, with what can still be read."""
        try:
            with self._database:
                action(self._database)
        except _FAILED as error:
            LOG.error("the outbox %s takes nothing (%s): events are in memory", self._path, error)
            memory = _prepared(_connect(":memory:"))
            with contextlib.suppress(*_FAILED), memory:
                rows = self._database.execute("SELECT * FROM waiting").fetchall()
                memory.executemany("INSERT INTO waiting VALUES (?, ?, ?, ?, ?)", rows)
            self._database.close()
            self._database = memory
            with memory:
                action(memory)

    def _open(self) -> sqlite3.Connection:
        """Open the file; a damaged one is kept aside."""
        for _ in range(2):
            try:
                _check_files(self._path)
                return _prepared(_connect(self._path))
            except (*_FAILED, OSError) as error:
                LOG.error("the outbox %s cannot be read (%s) and begins anew", self._path, error)
                for path in _files(self._path):
                    if os.path.lexists(path):
                        set_aside(path)
        return _prepared(_connect(":memory:"))


def _files(path: Path) -> tuple[Path, ...]:
    """Return the files that SQLite opens for a database."""
    return tuple(path.with_name(path.name + end) for end in ("", "-journal", "-wal", "-shm"))


def _check_files(path: Path) -> None:
    """Raise OSError for a file that SQLite must not open: it waits for a named pipe for ever.

    The database is made here, for its user alone; SQLite gives its other files the same rights.
    """
    os.close(open_regular(path, os.O_RDWR | os.O_CREAT))
    for file in _files(path):
        with contextlib.suppress(FileNotFoundError):
            descriptor = open_regular(file, os.O_RDONLY)
            size = os.fstat(descriptor).st_size
            os.close(descriptor)
            if size > MAX_FILE_BYTES:
                raise UnfitFileError(errno.EFBIG, f"{file.name} has {size} bytes")


def _connect(path: Path | str) -> sqlite3.Connection:
    # One thread at a time uses it, not always the one that made it.
    return sqlite3.connect(path, isolation_level="IMMEDIATE", check_same_thread=False)


def _prepared(database: sqlite3.Connection) -> sqlite3.Connection:
    """Set full syncs and make the tables."""
    try:
        database.execute("PRAGMA journal_mode = TRUNCATE")
        database.execute("PRAGMA synchronous = FULL")
        database.executescript(SCHEMA)
    except _FAILED:
        database.close()
        raise
    return database
