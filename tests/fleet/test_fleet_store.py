"""The store of a fleet in SQLite and in a real PostgreSQL: the same tests on both."""

import math
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from process_lines import next_line
from store_fixtures import all_devices

from device.protocol.documents import (
    Beat,
    BlobSpec,
    DeviceFacts,
    PipelineReport,
    ReleaseSpec,
    Reported,
    Running,
    StateDocument,
    Update,
    decode,
)
from toolkit.errors import RolloutError
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.liveness import ListeningPeriod
from toolkit.fleet.store import devices, dialects, lease, log, rollouts
from toolkit.fleet.store.database import Database, open_database
from toolkit.fleet.store.dialects import ROWS_AT_ONCE, parse_url

SHA = "a" * 64
EAR = ListeningPeriod(0.0, 100.0)
BLOB = BlobSpec(sha256=SHA, bytes=10, chunk_bytes=65536, index_sha256="c" * 64)
RELEASE = ReleaseSpec(name="n", version="2", profile="p", blob=BLOB)
SPEC = v.RolloutSpec(key="k", release=RELEASE, groups=("rest",))


def note(store: Database, *bodies: str) -> None:
    with store.write():
        log.append(store, [log.Note("ana", "note", body) for body in bodies], 1.1)


def test_the_log_is_a_chain_and_cannot_be_changed(store: Database) -> None:
    note(store, "one", '{"t": "zwölf"}')
    noted = log.verify(store)
    note(store, "three")
    assert log.verify(store, noted.head).rows == 3
    assert log.verify(store) != noted
    for statement in ("UPDATE log SET body = 'x'", "DELETE FROM log"):
        with pytest.raises(RolloutError, match="append-only"), store.write():
            store.run(statement)
    assert log.verify(store).rows == 3


def test_statements_of_many_rows_change_each_row(store: Database) -> None:
    """More rows than a statement of PostgreSQL takes; texts with all that JSON and SQL escape;
    numbers that are whole in some rows and missing in others."""
    text = "'\"\\ \n\t% ? \\u0000 zwölf 😀 $1 {} []"
    rows = [
        (f"d{number:04}", 0.1 * number if number % 2 else number, text, None if number % 3 else 2.5)
        for number in range(2 * ROWS_AT_ONCE + 1)
    ]
    known = "SELECT id, seen_s, labels, fps, p95_ms FROM devices ORDER BY id"
    insert = "INSERT INTO devices (id, seen_s, labels, fps, p95_ms) VALUES (?, ?, ?, ?, ?)"
    update = " ON CONFLICT (id) DO UPDATE SET seen_s = excluded.seen_s"
    with store.write():
        store.run_many(insert + update, [(*row, None) for row in rows])
        store.run_many(insert + update, [("d0000", 7, "not kept", None, None)])
        store.run_many(insert + update, [])
    assert store.rows(known) == [("d0000", 7.0, text, 2.5, None), *((*r, None) for r in rows[1:])]
    changes = [(label, 0.5, id_) for id_, _seen_s, label, fps in rows[:20] if fps is None]
    with store.write():
        store.run_many("UPDATE devices SET labels = ?, fps = ? WHERE id = ? AND fps IS NULL", [
            (f"{label}!", fps, id_) for label, fps, id_ in changes
        ])  # fmt: skip
        store.run_many("DELETE FROM devices WHERE id = ?", [(row[0],) for row in rows[20:]])
    assert store.rows("SELECT labels, fps, id FROM devices ORDER BY id") == [
        (f"{text}!", 0.5, row[0]) if row[3] is None else (text, 2.5, row[0]) for row in rows[:20]
    ]


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)  # SQLite has no NaN
def test_figures_that_are_no_numbers_are_kept_as_they_are(store: Database) -> None:
    figures = [math.inf, -math.inf, math.nan, 0.5, None]
    with store.write():
        store.run_many(
            "INSERT INTO devices (id, seen_s, labels, fps) VALUES (?, ?, ?, ?)",
            [(f"d{number}", 1.0, "null", fps) for number, fps in enumerate(figures)],
        )
    rows = store.rows("SELECT fps, labels FROM devices ORDER BY id")
    assert repr(rows) == repr([(fps, "null") for fps in figures])


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_text_that_holds_null_is_written_as_it_is(
    store: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most reports of devices do, and looking at each value costs more than the statement."""
    monkeypatch.setattr(dialects, "_in_json", lambda _value: pytest.fail("each value is looked at"))
    text = '{"dla":null,"a":[1,null],"b":[null]}'
    with store.write():
        store.run_many("INSERT INTO documents VALUES (?, ?, ?)", [("d", '{"a":null}', "null")])
        store.run_many(
            "INSERT INTO devices (id, seen_s, labels, fps) VALUES (?, ?, ?, ?)",
            [("without", 1.0, "{}", None), ("with", 1.0, "{}", 0.5)],
        )
        monkeypatch.undo()
        store.run_many("INSERT INTO documents VALUES (?, ?, ?)", [("e", text, "null")])
    assert store.rows("SELECT * FROM documents ORDER BY id") == [
        ("d", '{"a":null}', "null"), ("e", text, "null"),
    ]  # fmt: skip


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_statement_of_many_rows_has_a_limit_in_bytes(
    store: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialects, "BYTES_AT_ONCE", 1000)
    rows = [(f"d{number}", 1.0, "x" * 300) for number in range(9)] + [("e", 1.0, "y" * 2000)]
    counted = store._connection = Counted(store._connection)  # type: ignore[assignment]
    try:
        with store.write():
            before = counted.statements
            store.run_many("INSERT INTO devices (id, seen_s, labels) VALUES (?, ?, ?)", rows)
            assert counted.statements - before == 6  # of 2, 3, 2, 1, 1 and 1 rows
    finally:
        store._connection = counted._connection
    assert store.rows("SELECT id, seen_s, labels FROM devices ORDER BY id") == rows


def test_a_nul_that_a_device_says_ends_no_server(store: Database) -> None:
    """PostgreSQL keeps it in no text: there it is left out."""
    beat = decode(b'{"counter": 5, "at": "20\\u000026 \\\\u0000"}', Beat)
    row = devices.DeviceRow("d1", 1.0, None, None, {}, beat=beat.counter, beat_at=beat.at)
    reported = Reported(
        agent="1", profile="p", dev=True, warning="", session=3,
        running=None, pipeline=PipelineReport(status="running"),
        update=Update(phase="rolled_back", reason="a\0b"), facts=DeviceFacts(jetpack="6\0"),
    )  # fmt: skip
    with store.write():
        devices.save_devices(store, [replace(row, reported=reported)])
        devices.save_beats(store, [row])
        store.run("UPDATE devices SET reason = ? WHERE id = ?", reported.update.reason, "d1")
    stored = [beat.at, "6\0", "a\0b"]
    if store.dialect.name == "postgresql":
        stored = [text.replace("\0", "") for text in stored]
    assert store.rows("SELECT beat_at, jetpack, reason FROM devices") == [tuple(stored)]
    loaded = devices.load_device(store, "d1\0" if store.dialect.name == "postgresql" else "d1")
    assert loaded is not None
    assert loaded.reported == reported


class Counted:
    """A connection that counts the statements that it is given, those of `executemany` by rows."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.statements = 0

    def execute(self, sql: str, values: Sequence[object] = ()) -> Any:
        self.statements += 1
        return self._connection.execute(sql, values)

    def cursor(self) -> Any:
        return self

    def executemany(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        self.statements += len(rows)
        self._connection.cursor().executemany(sql, rows)


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_postgresql_gets_no_statement_for_each_device(store: Database) -> None:
    known = all_devices(store)
    rows = [devices.DeviceRow(f"d{number}", 1.0, None, None, {}) for number in range(300)]
    counted = store._connection = Counted(store._connection)  # type: ignore[assignment]
    try:
        with store.write():
            devices.save_devices(store, rows)
            notes = [log.Note("server", "desired", "{}", 1, (row.id,)) for row in rows]
            log.append(store, notes, 2.0)
    finally:
        store._connection = counted._connection
    assert len(all_devices(store)) == len(known) + 300
    assert counted.statements < 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE log SET body = 'x' WHERE seq = 2", "was changed at row 2 (note by ana)"),
        ("UPDATE log SET at_s = 1.2 WHERE seq = 3", "was changed at row 3"),
        ("DELETE FROM log WHERE seq = 2", "has no row 2: rows 2 to 2 were taken out"),
        ("DELETE FROM log WHERE seq = 4", "its end was cut off"),
        ("UPDATE log SET hash = '0' WHERE seq = 4", "was changed at row 4"),
    ],
)
def test_a_log_that_was_changed_from_outside_is_found(
    tmp_path: Path, change: str, message: str
) -> None:
    store = open_database("sqlite:///fleet.db", tmp_path)
    note(store, "1", "2", "3", "4")
    head = log.verify(store).head
    with sqlite3.connect(tmp_path / "fleet.db") as thief:
        for trigger in ("log_no_update", "log_no_delete"):
            thief.execute(f"DROP TRIGGER {trigger}")
        thief.execute(change)
    with pytest.raises(RolloutError) as error:
        log.verify(store, head)
    assert message in str(error.value)


def test_a_transaction_is_kept_whole_or_not_at_all(store: Database) -> None:
    def fail() -> None:
        with store.write():
            log.append(store, [log.Note("ana", "note", "lost")], 1.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert log.head(store) == (0, log.GENESIS)
    with pytest.raises(RolloutError, match="the fleet's store"):
        store.rows("SELECT nothing FROM nowhere")
    note(store, "kept")  # the connection still works
    assert [row.body for row in log.rows_after(store, 0)] == ["kept"]


def test_a_transaction_that_ends_badly_says_why_and_leaves_the_store_usable(tmp_path: Path) -> None:
    store = open_database("sqlite:///fleet.db", tmp_path)

    def fail() -> None:
        with store.write():
            store.rows("ROLLBACK")  # as SQLite does itself, for example where the disk is full
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    store.rows("PRAGMA foreign_keys = ON")
    with store.write():
        store.run("CREATE TABLE parent (id BIGINT PRIMARY KEY)")
        store.run("CREATE TABLE child (id BIGINT REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(RolloutError, match="FOREIGN KEY"), store.write():
        store.run("INSERT INTO child VALUES (1)")  # which the commit refuses
    with store.write():
        store.run("INSERT INTO parent VALUES (1)")
    assert store.rows("SELECT * FROM child") == []
    store.close()


def test_devices_keep_the_operators_labels_when_they_report(store: Database) -> None:
    reported = Reported(
        agent="1", profile="p", dev=True, warning="", session=3,
        running=Running(slot="a", sha256=SHA, name="n", version="1"),
        pipeline=PipelineReport(status="running"), update=Update(phase="live"),
        facts=DeviceFacts(labels={"site": "lab", "zone": "a"}),
    )  # fmt: skip
    state = StateDocument(state="online", session=3)
    row = devices.DeviceRow("d1", 5.0, state, reported, {})
    silent = devices.DeviceRow("d0", 4.0, None, None, {})
    with store.write():
        devices.save_devices(store, [row, silent])
        devices.set_labels(store, "d1", {"site": "field"})
    with store.write():
        devices.save_devices(store, [replace(row, heard_s=6.0)])
    (first, second) = all_devices(store)
    assert (first.id, first.target(EAR)) == ("d0", None)
    target = second.target(EAR)
    assert target is not None
    assert target.labels == {"site": "field", "zone": "a"}
    assert (target.running, target.online, second.heard_s) == (SHA, True, 6.0)
    assert devices.load_device(store, "d1") == second
    assert devices.load_device(store, "d2") is None
    assert devices.load_labels(store) == {"d1": {"site": "field"}}


def test_rollouts_come_back_by_replay(store: Database) -> None:
    started = v.Started(at_s=1.0, members=(v.Member(device="d0", group=0, previous="b" * 64),))
    with store.write():
        number = rollouts.create_rollout(store, SPEC, started, Path("/b"), "ana")
        rollouts.note_events(
            store, number,
            [v.Tick(at_s=2.0), v.Answered(at_s=3.0, device="d0", live=True), v.Tick(at_s=3.5)],
            3.5, "server",
        )  # fmt: skip
        rollouts.set_applied(store, 4)
    assert number == 1
    assert rollouts.load_specs(store) == {1: SPEC}
    assert rollouts.load_specs(store, after=1) == {}
    state = rollouts.load_state(store, 1, SPEC)
    assert (state.status, state.devices["d0"].phase) == ("finished", "live")
    assert rollouts.applied(store) == 4
    assert rollouts.load_releases(store) == {SHA: (RELEASE, Path("/b"))}


def test_rows_are_read_by_whatever_their_ids_are(store: Database) -> None:
    names = ['a"b', "a\\b", "a,b", "ü?%s", "']", "d0"]
    with store.write():
        devices.save_devices(
            store, [devices.DeviceRow(name, 1.0, None, None, {}) for name in names]
        )
        rollouts.save_desired(
            store, [rollouts.DesiredRow(name, 7, 1, False, SHA, 9.5, "{}") for name in names]
        )
    assert {row.id for row in devices.load_devices(store, [*names, "nobody"])} == {*names}
    assert rollouts.find_desired(store, [*names, "nobody"]).keys() == {*names}
    assert devices.load_devices(store, []) == []


def test_desired_documents_are_one_a_device(store: Database) -> None:
    row = rollouts.DesiredRow("d0", 7, 1, False, SHA, 9.5, "{}")
    for counter in (7, 8):
        with store.write():
            newer = msgspec.structs.replace(row, counter=counter, undo=counter == 8)
            rollouts.save_desired(store, [newer])
    assert rollouts.desired_page(store) == [newer]


def test_a_server_without_a_lease_keeps_nothing(
    store: Database, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = open_database(url, tmp_path)
    shares = url.startswith("postgresql")  # SQLite has one server at a time
    monkeypatch.setattr(lease, "LEASE_S", 30.0)
    assert lease.acquire(store, "a")
    assert lease.acquire(second, "b") == shares
    rows = lease.read_leases(second)
    assert [row.holder for row in rows] == ["a", "b"][: 1 + shares]
    assert all(20.0 < row.remaining_s <= 30.0 for row in rows)
    monkeypatch.setattr(lease, "LEASE_S", -1.0)  # it runs out at once, as after a kill
    assert lease.acquire(store, "a")
    monkeypatch.setattr(lease, "LEASE_S", 30.0)
    assert lease.acquire(second, "b")
    with pytest.raises(RolloutError, match="another server has taken over"), store.write():
        lease.check(store, "a")
    with second.write():
        assert lease.check(second, "b") == ("b",)
    lease.release(second, "b")
    assert lease.acquire(store, "a")
    second.close()


def test_a_server_that_was_killed_here_is_not_waited_for(store: Database) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    place, _pid, chance = lease.holder_name().rsplit(":", 2)
    holder, me = f"{place}:{child.pid}:{chance}", lease.holder_name()
    assert lease.acquire(store, holder)
    assert lease.acquire(store, me) == store.dialect.shares  # it lives
    child.kill()
    child.communicate()
    assert lease.acquire(store, me)
    with store.write():
        assert lease.check(store, me) == (me,)


WRITER = """
import sys
from pathlib import Path
from toolkit.fleet.store import log
from toolkit.fleet.store.database import open_database

store = open_database(sys.argv[1], Path(sys.argv[2]))
for number in range(int(sys.argv[3])):
    with store.write():
        log.append(store, [log.Note("w", "note", str(number))] * 3, 1.0)
        print(number, flush=True)
"""


def start_writer(url: str, folder: Path, count: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, url, str(folder), str(count)], text=True,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def test_writers_at_the_same_time_keep_one_chain(store: Database, url: str, tmp_path: Path) -> None:
    writers = [start_writer(url, tmp_path, 20) for _ in range(2)]
    for number in range(20):
        note(store, str(number))
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    assert log.verify(store).rows == 2 * 3 * 20 + 20


def test_a_killed_writer_leaves_whole_transactions(
    store: Database, url: str, tmp_path: Path
) -> None:
    writer = start_writer(url, tmp_path, 100_000)
    for _ in range(10):
        next_line(writer)
    writer.send_signal(signal.SIGKILL)
    writer.communicate(timeout=60)
    with store.write():  # a COMMIT that PostgreSQL had received is through by now
        rows = log.head(store)[0]
        log.append(store, [log.Note("ana", "note", "the next")], 1.0)
    assert rows >= 27
    assert rows % 3 == 0
    assert log.verify(store).rows == rows + 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://x/y", "neither sqlite:///fleet.db nor"),
        ("fleet.db", "neither"),
        ("sqlite://fleet.db", "names no file"),
    ],
)
def test_urls_of_other_stores_are_refused(url: str, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        parse_url(url, Path("/f"))


def test_a_password_is_in_no_message(tmp_path: Path) -> None:
    with pytest.raises(RolloutError) as error:
        open_database("postgresql://ana:secret@127.0.0.1:1/x", tmp_path)
    assert "postgresql://ana@127.0.0.1:1/x" in str(error.value)
    assert "secret" not in str(error.value)


def test_a_store_of_another_tandem_is_refused(tmp_path: Path) -> None:
    open_database("sqlite:///fleet.db", tmp_path).close()
    with sqlite3.connect(tmp_path / "fleet.db") as connection:
        connection.execute("UPDATE settings SET value = 99 WHERE name = 'schema'")
    with pytest.raises(RolloutError, match="has the schema 99, this Tandem reads 5"):
        open_database("sqlite:///fleet.db", tmp_path)


def test_events_are_kept_as_readable_json(store: Database) -> None:
    with store.write():
        rollouts.note_events(store, 1, [v.Ordered(at_s=1.5, order="pause", by="ana")], 1.5, "ana")
    (row,) = log.rows_after(store, 0)
    assert msgspec.json.decode(row.body) == {
        "event": "ordered", "at_s": 1.5, "order": "pause", "by": "ana",
    }  # fmt: skip
