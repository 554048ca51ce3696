"""The tables of a store. Documents are JSON in TEXT; times are seconds since 1970."""

from collections.abc import Mapping

SCHEMA_VERSION = 2

TABLES = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
    # One row for each server's right to send; there is one, named "server".
    "CREATE TABLE lease (name TEXT PRIMARY KEY, holder TEXT NOT NULL,"
    " until_s DOUBLE PRECISION NOT NULL)",
    # `hash`: SHA-256 of the hash before and this row. `rollout`: 0 for what concerns none.
    "CREATE TABLE log (seq BIGINT PRIMARY KEY, at_s DOUBLE PRECISION NOT NULL, who TEXT NOT NULL,"
    " rollout BIGINT NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL, hash TEXT NOT NULL)",
    "CREATE INDEX log_of_rollout ON log (rollout, seq)",
    # `seen_s`: when it was last heard, 0: never. `reported` and `state`: its last documents, empty
    # before the first. `beat`: the counter of its last beat, `beat_at`: its clock then.
    "CREATE TABLE devices (id TEXT PRIMARY KEY, seen_s DOUBLE PRECISION NOT NULL,"
    " state TEXT NOT NULL, reported TEXT NOT NULL, labels TEXT NOT NULL,"
    " beat BIGINT NOT NULL DEFAULT 0, beat_at TEXT NOT NULL DEFAULT '')",
    "CREATE TABLE rollouts (number BIGINT PRIMARY KEY, spec TEXT NOT NULL,"
    " created_s DOUBLE PRECISION NOT NULL, status TEXT NOT NULL)",
    # `path`: the file that chunk servers read.
    "CREATE TABLE releases (sha256 TEXT PRIMARY KEY, spec TEXT NOT NULL, path TEXT NOT NULL)",
    "CREATE TABLE desired (device TEXT PRIMARY KEY, counter BIGINT NOT NULL,"
    " rollout BIGINT NOT NULL, undo BIGINT NOT NULL, sha256 TEXT NOT NULL,"
    " expires_s DOUBLE PRECISION NOT NULL, document TEXT NOT NULL)",
)

# Version -> what makes the next one of it.
MIGRATIONS: Mapping[int, tuple[str, ...]] = {
    1: (
        "ALTER TABLE devices ADD COLUMN beat BIGINT NOT NULL DEFAULT 0",
        "ALTER TABLE devices ADD COLUMN beat_at TEXT NOT NULL DEFAULT ''",
    ),
}
