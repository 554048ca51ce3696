"""The databases that a store may be in, as rows: the SQL is the same but for what is here.

Statements are written with `?` for values; none has a literal `?` or `%`.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import msgspec

from toolkit.errors import RolloutError

BUSY_S = 30.0  # how long a writer waits for another one
ROWS_AT_ONCE = 1000  # of a statement
STATEMENTS = 256  # that are made once; there are few for each table
BYTES_AT_ONCE = 64 * 1024 * 1024  # of JSON in a statement; PostgreSQL takes 256 MB
Rows = Sequence[Sequence[object]]


class Connection(Protocol):
    """A connection as both drivers have it."""

    def execute(self, sql: str, values: Any = ..., /) -> Any:  # noqa: ANN401  (drivers' own types)
        """Run one statement."""

    def cursor(self) -> Any:  # noqa: ANN401
        """Return a cursor, for `executemany`."""

    def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """A database. `now_s`: its clock in seconds since 1970, the same for all its clients; `begin`:
    what begins a write transaction, of which there is one at a time; `begin_read`: what begins one
    that reads all as of one moment; `append_only`: what keeps the log from being changed, but for
    rows that a checkpoint covers, which may be deleted;
    `to_3`: what takes the triggers of older stores away; `position`: the function (text, part) that
    is 0 where the part is not in the text; `among`: what IN takes, of the texts in a JSON
    array; `storable`: makes a statement's values ones that it
    keeps; `run_many`: runs a statement for each row of values;
    `shares`: several servers may work on it."""

    name: str
    connect: Callable[[str], Connection]
    errors: Callable[[], tuple[type[Exception], ...]]
    placeholder: str
    now_s: str
    begin: tuple[str, ...]
    begin_read: tuple[str, ...]
    append_only: tuple[str, ...]
    to_3: tuple[str, ...]
    position: str
    among: str
    storable: Callable[[Sequence[object]], Sequence[object]]
    run_many: Callable[[Connection, str, Rows], None]
    shares: bool


def _connect_sqlite(path: str) -> Connection:
    import sqlite3

    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    # WAL: readers do not wait for the writer. FULL: a commit survives a power cut.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _sqlite_errors() -> tuple[type[Exception], ...]:
    import sqlite3

    return (sqlite3.Error,)


# A server that went away without a word is noticed; what the URL says counts.
_BOUNDS: Mapping[str, int] = {
    "connect_timeout": 10, "tcp_user_timeout": 20_000,  # s, ms
    "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3,
}  # fmt: skip


def _connect_postgresql(url: str) -> Connection:
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict, make_conninfo
    except ImportError as error:
        raise RolloutError(
            "a store in PostgreSQL needs the package psycopg: pip install 'psycopg[binary]'"
        ) from error
    values: dict[str, Any] = {**_BOUNDS, **conninfo_to_dict(url)}
    return psycopg.connect(make_conninfo(**values), autocommit=True)


def _postgresql_errors() -> tuple[type[Exception], ...]:
    import psycopg

    return (psycopg.Error,)


_TYPES: Mapping[type, str] = {int: "bigint", float: "double precision", str: "text"}
_VALUES = re.compile(r"VALUES \(([?, ]+)\)")
_GIVEN = "jsonb_array_elements(%s::jsonb) AS given(row)"


def _without_nul(values: Sequence[object]) -> Sequence[object]:
    """Return values without the NUL that PostgreSQL keeps in no text, and devices may say."""
    return [value.replace("\0", "") if isinstance(value, str) else value for value in values]


def _run_many_postgresql(connection: Connection, sql: str, rows: Rows) -> None:
    """Run an INSERT, UPDATE or DELETE once for all rows, which go as one JSON text. A statement for
    each row costs the driver 20 us, of which a round has ten for a device."""
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        _run_part(connection, sql, rows[begin : begin + ROWS_AT_ONCE])


def _run_part(connection: Connection, sql: str, rows: Rows) -> None:
    values, types = msgspec.json.encode(rows), {tuple(map(type, row)) for row in rows}
    if len(values) > BYTES_AT_ONCE and len(rows) > 1:
        middle = len(rows) // 2
        _run_part(connection, sql, rows[:middle])
        _run_part(connection, sql, rows[middle:])
        return
    if b"\\u0000" in values or (b"null" in values and not _are_finite(rows, types)):
        values = msgspec.json.encode([[_in_json(value) for value in row] for row in rows])
    connection.execute(statement_of_rows(sql, frozenset(types)), (values.decode(),))


def _are_finite(rows: Rows, types: Iterable[Sequence[type]]) -> bool:
    """Whether no row has NaN or infinity, for which JSON says null as for None."""
    floats = {number for row in types for number, kind in enumerate(row) if kind is float}
    return all(
        math.isfinite(value)
        for number in floats
        for row in rows
        if isinstance(value := row[number], float)
    )


def _in_json(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.replace("\0", "") if isinstance(value, str) else value


@lru_cache(STATEMENTS)
def statement_of_rows(sql: str, types: frozenset[tuple[type, ...]]) -> str:
    """Return the statement of PostgreSQL that does for the rows of one JSON array what `sql` does
    for the values of one row. `types`: those of the values of each row. The columns of the rows are
    integers, numbers or texts, or None."""
    joined = {"INSERT": rf"SELECT \1 FROM {_GIVEN}", "UPDATE": "FROM", "DELETE": "USING"}
    word = sql.partition(" ")[0]
    if word == "INSERT":
        sql = _VALUES.sub(joined[word], sql, count=1)
    else:
        sql = sql.replace(" WHERE ", f" {joined[word]} {_GIVEN} WHERE ", 1)
    first, *parts = sql.split("?")
    values = map(_value, range(len(parts)), zip(*types, strict=True))
    return first + "".join(f"{value}{part}" for value, part in zip(values, parts, strict=True))


def _value(number: int, column: Iterable[type]) -> str:
    """Return a value of the row `given` in SQL. A column of whole and other numbers holds both."""
    types = set(column) - {type(None)}
    if not types:
        return "NULL"
    kind = float if types == {int, float} else types.pop()
    return f"(given.row ->> {number})::{_TYPES[kind]}"


def json_texts(texts: Iterable[str]) -> str:
    """Return texts as the value of `Dialect.among`. Many values of one statement cost the driver
    more than the database."""
    return msgspec.json.encode([text.replace("\0", "") for text in texts]).decode()


# The last row of the log that a checkpoint covers.
_COVERED = "coalesce((SELECT value FROM settings WHERE name = 'checkpoint'), 0)"

SQLITE = Dialect(
    name="sqlite",
    connect=_connect_sqlite,
    errors=_sqlite_errors,
    placeholder="?",
    now_s="(julianday('now') - 2440587.5) * 86400.0",
    begin=("BEGIN IMMEDIATE",),
    begin_read=("BEGIN",),
    append_only=(
        "CREATE TRIGGER log_no_update BEFORE UPDATE ON log"
        " BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END",
        f"CREATE TRIGGER log_no_delete BEFORE DELETE ON log WHEN old.seq > {_COVERED}"
        " BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END",
    ),
    to_3=("DROP TRIGGER log_no_update", "DROP TRIGGER log_no_delete"),
    position="instr",
    among="SELECT value FROM json_each(?)",
    storable=lambda values: values,
    run_many=lambda connection, sql, rows: connection.cursor().executemany(sql, rows),
    shares=False,
)
POSTGRESQL = Dialect(
    name="postgresql",
    connect=_connect_postgresql,
    errors=_postgresql_errors,
    placeholder="%s",
    now_s="extract(epoch FROM clock_timestamp())::double precision",
    # Readers may go on, other writers wait; the first one to come finds no table yet.
    begin=("BEGIN", "SELECT pg_advisory_xact_lock(7236837)"),
    begin_read=("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY",),
    append_only=(
        "CREATE FUNCTION log_is_append_only() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'the log is append-only'; END $$",
        "CREATE TRIGGER log_no_change BEFORE UPDATE OR TRUNCATE ON log"
        " EXECUTE FUNCTION log_is_append_only()",
        "CREATE FUNCTION log_keeps_its_rows() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN IF OLD.seq > {_COVERED} THEN"
        " RAISE EXCEPTION 'the log is append-only'; END IF; RETURN OLD; END $$",
        "CREATE TRIGGER log_no_delete BEFORE DELETE ON log FOR EACH ROW"
        " EXECUTE FUNCTION log_keeps_its_rows()",
    ),
    to_3=("DROP TRIGGER log_no_change ON log", "DROP FUNCTION log_is_append_only()"),
    position="strpos",
    among="SELECT jsonb_array_elements_text(?::jsonb)",
    storable=_without_nul,
    run_many=_run_many_postgresql,
    shares=True,
)
# Scheme of the store's URL -> its dialect.
SCHEMES: Mapping[str, Dialect] = {
    "sqlite": SQLITE,
    "postgresql": POSTGRESQL,
    "postgres": POSTGRESQL,
}


def parse_url(url: str, folder: Path) -> tuple[Dialect, str]:
    """Return the dialect of a store's URL, and what it connects to.

    A path in `sqlite:///PATH` is below the fleet's folder, unless it begins with a fourth slash.
    """
    scheme, colon, rest = url.partition("://")
    dialect = SCHEMES.get(scheme)
    if dialect is None or not colon:
        raise RolloutError(
            f"the store {shown(url)!r} is neither sqlite:///fleet.db nor a URL of PostgreSQL "
            "(postgresql://USER@HOST/DATABASE)"
        )
    if dialect is not SQLITE:
        return dialect, url
    if not rest.startswith("/") or len(rest) < 2:
        raise RolloutError(f"the store {url!r} names no file: write sqlite:///fleet.db")
    return dialect, str(folder / rest[1:])


def shown(url: str) -> str:
    """Return a URL without its password."""
    scheme, colon, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    return f"{scheme}{colon}{login.partition(':')[0]}{at}{place}"
