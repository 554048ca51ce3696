"""The tables of a store. Documents are JSON in TEXT; times are seconds since 1970."""

SCHEMA_VERSION = 5

# What lists filter, count and sort by, derived from a device's last documents and labels.
# `agent`: its agent's state, empty before the first. `reported`: 1 after the first report. `dev`: 1
# where it takes releases that are not signed.
# `release`, `version`, `running`: the name, version and SHA-256 of what runs. `all_labels`: its own
# and the operator's, as `,"KEY":"VALUE",`. `place`: KEY=VALUE of the label that says where it is.
# `problems`: their kinds, as `,KIND,KIND,`. `request`, `received_bytes`: of its update.
# `measured`: the SHA-256 of the release that the figures are of.
DERIVED: tuple[tuple[str, str], ...] = (
    ("agent", "TEXT NOT NULL DEFAULT ''"),
    ("reported", "BIGINT NOT NULL DEFAULT 0"),
    ("beat_s", "DOUBLE PRECISION NOT NULL DEFAULT 0"),
    ("profile", "TEXT NOT NULL DEFAULT ''"),
    ("release", "TEXT NOT NULL DEFAULT ''"),
    ("version", "TEXT NOT NULL DEFAULT ''"),
    ("running", "TEXT NOT NULL DEFAULT ''"),
    ("module", "TEXT NOT NULL DEFAULT ''"),
    ("power_mode", "TEXT NOT NULL DEFAULT ''"),
    ("jetpack", "TEXT NOT NULL DEFAULT ''"),
    ("tensorrt", "TEXT NOT NULL DEFAULT ''"),
    ("dla_cores", "BIGINT NOT NULL DEFAULT 0"),
    ("memory_mb", "BIGINT NOT NULL DEFAULT 0"),
    ("free_mb", "BIGINT NOT NULL DEFAULT 0"),
    ("all_labels", "TEXT NOT NULL DEFAULT ','"),
    ("place", "TEXT NOT NULL DEFAULT ''"),
    ("problems", "TEXT NOT NULL DEFAULT ''"),
    ("temperature_c", "DOUBLE PRECISION"),
    ("fps", "DOUBLE PRECISION"),
    ("p95_ms", "DOUBLE PRECISION"),
    ("request", "TEXT NOT NULL DEFAULT ''"),
    ("received_bytes", "BIGINT NOT NULL DEFAULT 0"),
    ("measured", "TEXT NOT NULL DEFAULT ''"),
    ("shadow_agreement", "DOUBLE PRECISION"),
    ("shadow_frames", "BIGINT NOT NULL DEFAULT 0"),
    ("dev", "BIGINT NOT NULL DEFAULT 0"),
)

# `seen_s`: when it was last heard, 0: never. `beat`: the counter of its last beat, `beat_at`: its
# clock then. `labels`: the operator's. `changed`: the number of its last change, of one counter in
# `settings`. `rollout`, `grp`, `phase`, `reason`: the rollout that has it (0: none), its group by
# number, and its phase there. Rows are narrow, as counting reads all: documents are elsewhere.
_DEVICES = (
    "CREATE TABLE devices (id TEXT PRIMARY KEY, seen_s DOUBLE PRECISION NOT NULL,"
    " labels TEXT NOT NULL, beat BIGINT NOT NULL DEFAULT 0, beat_at TEXT NOT NULL DEFAULT '',"
    " changed BIGINT NOT NULL DEFAULT 0, rollout BIGINT NOT NULL DEFAULT 0,"
    " grp BIGINT NOT NULL DEFAULT 0, phase TEXT NOT NULL DEFAULT '',"
    " reason TEXT NOT NULL DEFAULT '', "
    + ", ".join(f"{name} {kind}" for name, kind in DERIVED)
    + ")",
    "CREATE INDEX devices_changed ON devices (changed)",
    "CREATE INDEX devices_of_rollout ON devices (rollout, phase)",
    # `state`, `reported`: a device's last documents, empty before the first.
    "CREATE TABLE documents (id TEXT PRIMARY KEY, state TEXT NOT NULL, reported TEXT NOT NULL)",
)
# Who may use the page and the API. Passwords are scrypt hashes; `id` is the SHA-256 of what the
# holder of a session or a token has.
_ACCOUNTS = (
    "CREATE TABLE accounts (name TEXT PRIMARY KEY, role TEXT NOT NULL, password TEXT NOT NULL)",
    "CREATE TABLE sessions (id TEXT PRIMARY KEY, name TEXT NOT NULL, csrf TEXT NOT NULL,"
    " until_s DOUBLE PRECISION NOT NULL)",
    "CREATE TABLE tokens (id TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL,"
    " until_s DOUBLE PRECISION NOT NULL)",
)
# Tables that version 3 brought.
_NEW_IN_3 = (
    *_ACCOUNTS,
    "INSERT INTO settings VALUES ('changed', 0)",
    # Requirements under a name, as they were written.
    "CREATE TABLE queries (name TEXT PRIMARY KEY, requires TEXT NOT NULL)",
    # Devices that left the fleet and were not heard since.
    "CREATE TABLE decommissioned (device TEXT PRIMARY KEY)",
    # Which rows of the log concern a device.
    "CREATE TABLE log_devices (device TEXT NOT NULL, seq BIGINT NOT NULL,"
    " PRIMARY KEY (device, seq))",
    # A rollout's state (`RolloutState`) after the row `seq` of the log.
    "CREATE TABLE snapshots (rollout BIGINT PRIMARY KEY, seq BIGINT NOT NULL, state TEXT NOT NULL)",
    # How many devices were in each state, once a minute; `counts`: an object.
    "CREATE TABLE presence (at_s BIGINT PRIMARY KEY, counts TEXT NOT NULL)",
)

_NEW_IN_4 = ("CREATE INDEX desired_expires ON desired (expires_s)",)
# Which run of a farm has a board, and until when.
TO_5 = (
    "CREATE TABLE board_leases (board TEXT PRIMARY KEY, holder TEXT NOT NULL,"
    " until_s DOUBLE PRECISION NOT NULL)",
)

TABLES = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
    # One row for each server that works.
    "CREATE TABLE lease (name TEXT PRIMARY KEY, holder TEXT NOT NULL,"
    " until_s DOUBLE PRECISION NOT NULL)",
    # `hash`: SHA-256 of the hash before and this row. `rollout`: 0 for what concerns none.
    "CREATE TABLE log (seq BIGINT PRIMARY KEY, at_s DOUBLE PRECISION NOT NULL, who TEXT NOT NULL,"
    " rollout BIGINT NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL, hash TEXT NOT NULL)",
    "CREATE INDEX log_of_rollout ON log (rollout, seq)",
    *_DEVICES,
    # `summary`: the rollout's state without its devices (`RolloutState`).
    "CREATE TABLE rollouts (number BIGINT PRIMARY KEY, spec TEXT NOT NULL,"
    " created_s DOUBLE PRECISION NOT NULL, status TEXT NOT NULL,"
    " summary TEXT NOT NULL DEFAULT '{}')",
    # `path`: the file that chunk servers read.
    "CREATE TABLE releases (sha256 TEXT PRIMARY KEY, spec TEXT NOT NULL, path TEXT NOT NULL)",
    "CREATE TABLE desired (device TEXT PRIMARY KEY, counter BIGINT NOT NULL,"
    " rollout BIGINT NOT NULL, undo BIGINT NOT NULL, sha256 TEXT NOT NULL,"
    " expires_s DOUBLE PRECISION NOT NULL, document TEXT NOT NULL)",
    *_NEW_IN_3,
    *_NEW_IN_4,
    *TO_5,
)

# What makes version 2 of version 1, the tables of version 4 of those of version 2, and version 4 of
# version 3; what the new columns hold is derived by `toolkit.fleet.store.migrations`.
TO_2 = (
    "ALTER TABLE devices ADD COLUMN beat BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE devices ADD COLUMN beat_at TEXT NOT NULL DEFAULT ''",
)
TO_3 = (
    "ALTER TABLE devices RENAME TO devices_of_2",
    *_DEVICES,
    "ALTER TABLE rollouts ADD COLUMN summary TEXT NOT NULL DEFAULT '{}'",
    *_NEW_IN_3,
    *_NEW_IN_4,
)
TO_4 = ("ALTER TABLE devices ADD COLUMN dev BIGINT NOT NULL DEFAULT 0", *_NEW_IN_4)
