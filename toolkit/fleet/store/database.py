"""One connection to a store."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from toolkit.errors import RolloutError
from toolkit.fleet.store.dialects import Connection, Dialect, parse_url, shown
from toolkit.fleet.store.schema import SCHEMA_VERSION, TABLES

Row = tuple[Any, ...]


class Database:
    """A store that is open. Everything that writes does so inside `with database.write():`."""

    def __init__(self, dialect: Dialect, address: str, name: str) -> None:
        self.dialect = dialect
        self._name = name
        self._writing = False
        self._asked_s = 0.0
        with self._explained():
            self._connection: Connection = dialect.connect(address)
        self._make_tables()

    def rows(self, sql: str, *values: object) -> list[Row]:
        """Run a statement and return its rows."""
        with self._explained():
            return list(self._execute(sql, values).fetchall())

    def run(self, sql: str, *values: object) -> int:
        """Run a statement that changes rows; return how many."""
        assert self._writing, "outside of a write transaction"
        with self._explained():
            return int(self._execute(sql, values).rowcount)

    def run_many(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        """Run a statement for each row of values. With ON CONFLICT DO UPDATE no two rows may have
        one key: PostgreSQL refuses them (RolloutError)."""
        assert self._writing, "outside of a write transaction"
        if rows:
            with self._explained():
                self.dialect.run_many(self._connection, sql, rows)

    def now_s(self) -> float:
        """Return the database's clock, which all its clients share."""
        return float(self.rows(f"SELECT {self.dialect.now_s}")[0][0])

    @contextmanager
    def write(self) -> Iterator[None]:
        """One transaction: all of it is kept, or nothing. Writers wait for each other."""
        self._asked_s = time.monotonic()
        with self._transaction(self.dialect.begin):
            self._writing = True
            try:
                yield
            finally:
                self._writing = False

    def writing_s(self) -> float:
        """Return since how many seconds the write transaction waits for the lock or has it."""
        return time.monotonic() - self._asked_s

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read everything as of one moment. No writer waits for it."""
        with self._transaction(self.dialect.begin_read):
            yield

    @contextmanager
    def _transaction(self, begin: Sequence[str]) -> Iterator[None]:
        with self._explained():
            for statement in begin:
                self._connection.execute(statement)
        try:
            yield
            with self._explained():
                self._connection.execute("COMMIT")
        except BaseException:
            # The database may have rolled back itself; what is raised says why.
            with suppress(*self.dialect.errors()):
                self._connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _execute(self, sql: str, values: Sequence[object]) -> Any:  # noqa: ANN401  (driver's type)
        text = sql.replace("?", self.dialect.placeholder)
        return self._connection.execute(text, self.dialect.storable(values))

    def _make_tables(self) -> None:
        if self._version() is None:
            with self.write():
                if self._version() is None:  # nobody was quicker
                    for statement in (*TABLES, *self.dialect.append_only):
                        self.run(statement)
                    self.run("INSERT INTO settings VALUES ('schema', ?)", SCHEMA_VERSION)
        if (self._version() or 0) < SCHEMA_VERSION:
            from toolkit.fleet.store.migrations import migrate

            with self.write():
                migrate(self, self._version() or 0)  # nobody was quicker, or nothing is done
                self.run("UPDATE settings SET value = ? WHERE name = 'schema'", SCHEMA_VERSION)
        if (version := self._version()) != SCHEMA_VERSION:
            raise RolloutError(
                f"{self._name} has the schema {version}, this Tandem reads {SCHEMA_VERSION}: "
                "take the Tandem that wrote it"
            )

    def _version(self) -> int | None:
        catalog = {
            "sqlite": "SELECT name FROM sqlite_master WHERE name = 'settings'",
            "postgresql": "SELECT 1 FROM pg_tables WHERE tablename = 'settings'"
            " AND schemaname = current_schema()",
        }
        if not self.rows(catalog[self.dialect.name]):
            return None
        return int(self.rows("SELECT value FROM settings WHERE name = 'schema'")[0][0])

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise what the database says as one sentence."""
        try:
            yield
        except RolloutError:
            raise
        except Exception as error:
            if not isinstance(error, self.dialect.errors()):
                raise
            text = str(error).strip() or type(error).__name__
            raise RolloutError(f"the fleet's store {self._name}: {text.splitlines()[0]}") from error


def open_database(url: str, folder: Path) -> Database:
    """Open the store of a fleet, and make its tables if it has none."""
    dialect, address = parse_url(url, folder)
    return Database(dialect, address, shown(url))
