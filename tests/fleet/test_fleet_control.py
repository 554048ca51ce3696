"""Rollouts in memory and in the store: rounds, kills between them, several rollouts at once."""

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest
from fleet_server_fixtures import PROFILE, device_row, release, report, write_fleet
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from postgresql_fixtures import postgresql
from rich.console import Console
from store_fixtures import all_devices

from device.protocol.documents import AgentReport, Desired, DeviceFacts, InstallPolicy, Measured
from device.protocol.mqtt import LinkDown, LinkUp, Message
from device.update.agent_payload import AgentPayload
from toolkit.cli.actions.fleet.tables import device_table, rollout_table
from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.gates import parse_gates
from toolkit.fleet.rollout.targets import Target, parse_requirements, unfit
from toolkit.fleet.server import control as control_module
from toolkit.fleet.server.control import Control, encode_all
from toolkit.fleet.server.device_cache import DeviceCache
from toolkit.fleet.server.history import history_of
from toolkit.fleet.server.operations import (
    decommission,
    label_device,
    make_plan,
    order,
    start_rollout,
)
from toolkit.fleet.server.serve import FleetServer
from toolkit.fleet.server.views import device_views, rollout_views
from toolkit.fleet.store import lease, log, rollouts
from toolkit.fleet.store.database import Database, open_database
from toolkit.fleet.store.devices import save_devices


def test_a_rollout_is_kept_by_postgresql_too(tmp_path: Path) -> None:
    with postgresql() as url:
        store = open_database(url, tmp_path)
        test_a_rollout_goes_from_canary_to_rest(store)
        test_the_plan_says_whom_it_does_not_fit_before_anything_is_sent(open_empty(url, tmp_path))
        store.close()


def open_empty(url: str, folder: Path) -> Database:
    """A second, empty store on the same server."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE second")
    return open_database(f"{url.rpartition('/')[0]}/second", folder)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Database]:
    database = open_database("sqlite:///fleet.db", tmp_path)
    yield database
    database.close()


def spec_of(letter: str, groups: str = "rest", **changes: object) -> v.RolloutSpec:
    spec = v.RolloutSpec(key=f"k{letter}", release=release(letter), groups=tuple(groups.split(",")))
    return msgspec.structs.replace(spec, **changes)


class Bench:
    """A fleet without a broker: devices answer as they are told; the server can be killed."""

    def __init__(self, store: Database, devices: int, running: str = "") -> None:
        self.store = store
        self.sent: list[tuple[str, str]] = []  # device, letter of the release
        self.counters: dict[str, int] = {}
        self.desired: dict[str, Desired] = {}
        self.restart()
        if running:
            with store.write():
                rollouts.save_release(store, release(running), Path("/old"))
            self.restart()
        self.round(*(device_row(f"d{n}", report(running)) for n in range(devices)))

    def restart(self) -> None:
        assert lease.acquire(self.store, "me")
        self.control = Control(self.store, "me")

    def round(self, *rows: object) -> list[str]:
        """A round; return whom something was sent to."""
        documents = self.control.advance({row.id: row for row in rows})
        for row in documents:
            desired = msgspec.json.decode(row.document, type=Desired)
            assert desired.counter == row.counter > self.counters.get(row.device, 0)
            self.counters[row.device] = desired.counter
            self.desired[row.device] = desired
            self.sent.append((row.device, row.sha256[0]))
        return [row.device for row in documents]

    def start(self, spec: v.RolloutSpec) -> int:
        return start_rollout(self.store, spec, make_plan(self.store, spec), Path("/new"), "ana")

    def answer(self, device: str, phase: str = "live", **rest: object) -> list[str]:
        desired = self.desired[device]
        letter = desired.release.blob.sha256[0]
        reported = report(letter, phase, desired.request, **rest)
        return self.round(device_row(device, reported))


def test_a_rollout_goes_from_canary_to_rest(store: Database) -> None:
    bench = Bench(store, 4)
    label_device(store, "d2", ["group=canary"], "ana")
    number = bench.start(spec_of("a", "canary,rest"))
    assert bench.round() == ["d2"]
    assert bench.round() == []
    assert sorted(bench.answer("d2")) == ["d0", "d1", "d3"]
    for device in ("d0", "d1", "d3"):
        bench.answer(device)
    assert bench.control.states[number].status == "finished"
    assert (
        rollouts.load_state(store, number, rollouts.load_specs(store)[number])
        == (bench.control.states[number])
    )
    assert store.rows("SELECT status FROM rollouts") == [("finished",)]
    assert log.verify(store).rows > 0


def test_statements_and_keys_of_a_round_do_not_grow_with_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed: list[int] = []

    def sign(documents: Sequence[Desired]) -> list[bytes]:
        signed.append(len(documents))
        return encode_all(documents)

    def statements_of(count: int) -> int:
        (tmp_path / str(count)).mkdir()
        store = open_database("sqlite:///fleet.db", tmp_path / str(count))
        bench = Bench(store, count)
        bench.control = Control(store, "me", sign)
        bench.start(spec_of("a"))
        statements: list[str] = []
        for name in ("rows", "run", "run_many"):

            def noted(sql: str, *values: object, run: Callable[..., object]) -> object:
                statements.append(sql)
                return run(sql, *values)

            monkeypatch.setattr(store, name, partial(noted, run=getattr(store, name)))
        bench.round()
        live = [report("a", "live", bench.desired[f"d{n}"].request) for n in range(count)]
        bench.round(*(device_row(f"d{n}", report) for n, report in enumerate(live)))
        assert bench.control.states[1].groups[0].counts == {"live": count}
        store.close()
        return len(statements)

    assert statements_of(2) == statements_of(40) <= 45  # of two rounds
    assert signed == [2, 40]


def test_rows_that_stay_with_a_server_are_not_read_again_when_another_one_goes(
    store: Database,
) -> None:
    rows = {name: device_row(name) for name in ("before", "lost", "gained")}
    with store.write():
        save_devices(store, rows.values())
    cache = DeviceCache(store, lambda device: device != "gained")
    cache.fetch(["before", "lost"])
    after = DeviceCache(store, lambda device: device != "lost")
    after.inherit(cache)
    assert after["before"] is cache["before"]
    assert set(after) == {"before", "gained"}
    assert "lost" not in after
    assert after["gained"].id == "gained"


def test_what_was_kept_before_a_kill_is_sent_after_it(store: Database) -> None:
    bench = Bench(store, 3)
    bench.start(spec_of("a"))
    bench.control.advance({})  # kept, and killed before anything was sent
    bench.restart()
    assert sorted(row.device for row in bench.control.documents_after("")) == [
        "d0",
        "d1",
        "d2",
    ]  # which a new connection sends
    assert bench.round() == []  # and nothing is made a second time
    order(store, 1, "pause", "ana")
    bench.restart()
    bench.round()
    assert bench.control.states[1].status == "paused"


def test_an_order_that_no_server_saw_is_carried_out_by_the_next(store: Database) -> None:
    bench = Bench(store, 2, running="b")
    bench.start(spec_of("a"))
    bench.round()
    bench.answer("d0")
    order(store, 1, "rollback", "ana")
    bench.restart()  # killed before it looked
    assert sorted(bench.round()) == ["d0", "d1"]
    assert {bench.desired[d].release.blob.sha256[0] for d in ("d0", "d1")} == {"b"}
    bench.answer("d0")
    bench.answer("d1")
    assert bench.control.states[1].status == "rolled_back"
    with pytest.raises(RolloutError, match="rollout 1 is rolled back: pause means nothing to it"):
        order(store, 1, "pause", "ana")


def test_a_failed_release_pauses_with_the_devices_reason(store: Database) -> None:
    bench = Bench(store, 3)
    bench.start(spec_of("a"))
    bench.round()
    bench.answer("d1", "rolled_back", reason="the camera broke")
    state = bench.control.states[1]
    assert state.status == "paused"
    assert state.devices["d1"].reason == "the camera broke"
    assert "1 of 3 devices of the group rest failed" in state.reason


def test_only_figures_of_this_release_reach_the_gates(store: Database) -> None:
    bench = Bench(store, 1, running="b")
    bench.start(spec_of("a", gates=parse_gates("p95_latency_ms<30")))
    bench.round()
    old = Measured(sha256="b" * 64, frames=9, latency_p95_ms=1.0)
    bench.answer("d0", measured=old)
    assert "has not measured p95_latency_ms of d0" in bench.control.states[1].reason
    bench.answer("d0", measured=Measured(sha256="a" * 64, frames=9, latency_p95_ms=29.0))
    assert bench.control.states[1].status == "finished"


def test_a_rollout_of_the_agent_goes_back_to_what_each_device_ran(store: Database) -> None:
    bench, payload = Bench(store, 0), AgentPayload(min_l4t="36")
    facts = DeviceFacts(python="3.10.1", l4t="36.4")
    rows = {
        name: msgspec.structs.replace(
            report("m", facts=facts),
            versions=None if name == "old" else AgentReport(running=running),
        )
        for name, running in (("d0", ""), ("d1", "1-x"), ("old", ""))
    }
    bench.round(*(device_row(name, row) for name, row in rows.items()))
    spec = spec_of("a", agent=payload)
    plan = make_plan(store, spec)
    assert plan.before == {"d0": "installed", "d1": "1-x"}
    assert [row.device for row in plan.unfit] == ["old"]
    number = bench.start(spec)
    assert sorted(bench.round()) == ["d0", "d1"]
    for device in ("d0", "d1"):
        bench.answer(device)
    order(store, number, "rollback", "ana")
    assert sorted(bench.round()) == ["d0", "d1"]
    for device in ("d0", "d1"):
        desired = bench.desired[device]
        assert (desired.leave, desired.release) == (True, spec.release)
        bench.answer(device)
    assert bench.control.states[number].status == "rolled_back"


def test_a_newer_rollout_takes_over_and_the_older_never_comes_back(store: Database) -> None:
    bench = Bench(store, 3)
    bench.start(spec_of("a"))
    bench.round()
    bench.start(spec_of("b"))
    assert sorted(bench.round()) == ["d0", "d1", "d2"]
    assert {row.phase for row in bench.control.states[1].devices.values()} == {"superseded"}
    bench.restart()
    order(store, 2, "abort", "ana")
    assert bench.round() == []
    stale = report("a", "live", "ka-1")
    assert bench.round(device_row("d0", stale)) == []
    with pytest.raises(RolloutError, match="rollout 1 is finished"):
        order(store, 1, "resume", "ana")


def test_a_device_that_comes_late_gets_the_newest_release_that_fits_it(store: Database) -> None:
    bench = Bench(store, 1)
    bench.start(spec_of("a"))
    requires = parse_requirements("label.site=lab")
    label_device(store, "d0", ["site=lab"], "ana")
    bench.start(spec_of("b", requires=requires))
    bench.round()
    bench.answer("d0")
    assert bench.round(device_row("late")) == ["late"]
    assert bench.sent[-1] == ("late", "a")
    lab = device_row("lab", report(facts=DeviceFacts(labels={"site": "lab"})))
    assert bench.round(lab) == ["lab"]
    assert bench.sent[-1] == ("lab", "b")
    assert bench.round(device_row("other", report(profile="other"))) == []
    label_device(store, "late", ["site=lab"], "ana")
    assert bench.round(device_row("late")) == ["late"]  # it fits the newer one from now on
    assert bench.sent[-1] == ("late", "b")
    assert bench.control.states[1].devices["late"].phase == "superseded"


def test_a_label_is_taken_from_the_log_and_no_other_is_read(
    store: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(store, 3)
    monkeypatch.setattr(control_module, "load_labels", None)
    label_device(store, "d0", ["site=lab"], "ana")
    label_device(store, "d1", ["site=field"], "ana")
    bench.round()
    label_device(store, "d0", ["site="], "ana")
    bench.round()
    assert bench.control._labels == {"d0": {}, "d1": {"site": "field"}}
    decommission(store, "d1", "ana")
    bench.round()
    assert bench.control._labels == {"d0": {}}  # a new board of this id has none


def test_documents_are_renewed_before_they_expire(
    store: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(store, 1)
    monkeypatch.setattr(control_module, "EXPIRES_S", -10.0)
    bench.start(spec_of("a"))
    bench.round()
    first = bench.desired["d0"]
    monkeypatch.setattr(control_module, "EXPIRES_S", 1000.0)
    assert bench.round() == ["d0"]
    second = bench.desired["d0"]
    assert second.counter > first.counter
    assert second.expires > first.expires
    assert msgspec.structs.replace(second, counter=0, expires="") == msgspec.structs.replace(
        first, counter=0, expires=""
    )
    assert bench.round() == []


def test_more_documents_than_a_statement_has_are_renewed_and_said_again(
    store: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rollouts, "_BATCH", 2)
    bench = Bench(store, 5)
    monkeypatch.setattr(control_module, "EXPIRES_S", -10.0)
    bench.start(spec_of("a"))
    names = [f"d{n}" for n in range(5)]
    assert sorted(bench.round()) == names
    monkeypatch.setattr(control_module, "EXPIRES_S", 1000.0)
    assert sorted(name for _ in range(3) for name in bench.round()) == names
    assert bench.round() == []
    server = FleetServer(load_fleet(write_fleet(tmp_path / "fleet", 1883)), services=())
    link = Crowded(room=3)
    server._events.put(LinkUp(1, "5"))
    server._round(bench.control, link)
    assert list(link.taken) == names[:3]  # it has no room for more
    label_device(store, "d4", ["site=lab"], "ana")
    bench.start(spec_of("b"))
    link.room = 100
    server._round(bench.control, link)
    assert sorted(link.taken) == names
    assert link.taken == {row.device: row.document for name in ("", "d1", "d3")
        for row in bench.control.documents_after(name)}  # fmt: skip


class Crowded:
    """Takes so many messages, and keeps the last of each device."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken: dict[str, str] = {}

    def publish(self, topic: str, payload: bytes, **_rest: object) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        self.taken[topic.split("/")[-2]] = payload.decode()
        return True


def test_a_document_that_is_due_for_renewal_gives_way_to_a_new_release(
    store: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(store, 1)
    bench.start(spec_of("a"))
    bench.round()
    bench.answer("d0")
    bench.start(spec_of("b"))  # and no server runs for a month
    now_s = store.now_s()
    monkeypatch.setattr(Database, "now_s", lambda self: now_s + control_module.EXPIRES_S)
    bench.restart()
    assert bench.round() == ["d0"]
    assert bench.desired["d0"].release.blob.sha256[0] == "b"


def test_a_server_that_was_away_for_long_calls_no_device_late(
    store: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(store, 2, running="b")
    bench.start(spec_of("a", on_failure="rollback"))
    bench.round()
    now_s = store.now_s()
    monkeypatch.setattr(Database, "now_s", lambda self: now_s + 7200.0)  # the time-out is 3600 s
    bench.restart()
    assert bench.control.advance({}, reconnected=True) == []
    assert bench.control.states[1].status == "running"
    bench.answer("d0")
    bench.answer("d1")
    assert bench.control.states[1].status == "finished"


class NoLink:
    """A connection that takes everything."""

    def publish(self, *args: object, **rest: object) -> bool:
        return True


def test_a_server_without_its_broker_lets_no_time_pass(store: Database, tmp_path: Path) -> None:
    bench = Bench(store, 1)
    bench.start(spec_of("a"))
    (tmp_path / "fleet.toml").write_text('name = "f"\n[broker]\nhost = "127.0.0.1"\n')
    server = FleetServer(load_fleet(tmp_path), sign=encode_all, services=())
    server._round(bench.control, NoLink())
    assert bench.control.documents_after("") == []
    up = LinkUp(1, "5")
    server._events.put(up)
    server._round(bench.control, NoLink())
    assert [row.device for row in bench.control.documents_after("")] == ["d0"]
    kinds = [msgspec.json.decode(text)["event"] for text in log.events_of(store, 1)]
    assert kinds == ["started", "reconnected", "tick"]
    for event in (LinkDown("gone"), up):  # too short to make anybody late
        server._events.put(event)
    server._round(bench.control, NoLink())
    assert len(log.events_of(store, 1)) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"measured": {"sha256": "a" * 64, "frames": 10**400}},
        {"measured": {"sha256": "a" * 64, "frames": 1, "errors": -1}},
        {"facts": {"free_mb": 10**400}},
    ],
)
def test_a_report_whose_numbers_cannot_be_is_not_taken(
    store: Database, tmp_path: Path, fields: dict[str, object]
) -> None:
    bench = Bench(store, 1)
    bench.start(spec_of("a", gates=parse_gates("frames>1, errors<1%")))
    bench.round()
    (tmp_path / "fleet.toml").write_text('name = "f"\n[broker]\nhost = "127.0.0.1"\n')
    server = FleetServer(load_fleet(tmp_path), sign=encode_all, services=())
    answer = report("a", "live", bench.desired["d0"].request)
    payload = msgspec.json.encode({**msgspec.to_builtins(answer), **fields})
    for event in (LinkUp(1, "5"), Message("fleet/v1/d0/reported", payload)):
        server._events.put(event)
    server._round(bench.control, NoLink())
    assert bench.control.states[1].devices["d0"].phase == "sent"


def test_what_a_device_says_steers_no_terminal(store: Database) -> None:
    bench = Bench(store, 1)
    bench.start(spec_of("a"))
    bench.round()
    bench.answer("d0", "refused", reason="no \x1b]0;room\x07\n\x1b[2J")
    texts = [row.text for row in history_of(store, "d0")]
    assert texts[-1] == "does not run the release: no  ]0;room   [2J"
    console = Console(file=io.StringIO(), record=True)
    console.print(rollout_table(rollout_views(store)[0]), device_table(next(device_views(store))))
    assert "[2J" in (shown := console.export_text())
    assert "\x1b" not in shown


def test_a_version_of_any_length_is_compared() -> None:
    target = Target("d", PROFILE, DeviceFacts(jetpack="9" * 5000))
    assert unfit(target, release("a"), parse_requirements("jetpack>=6")) == ()


def test_a_release_goes_back_at_once_and_whatever_the_gates_of_the_other_ask(
    store: Database,
) -> None:
    bench = Bench(store, 1, running="b")
    policy = InstallPolicy(
        max_latency_p95_ms=30.0, shadow_s=60.0, min_shadow_agreement=0.9, max_bytes_per_s=5000,
        not_before="22:00", not_after="23:00",
    )  # fmt: skip
    bench.start(spec_of("a", policy=policy))
    bench.round()
    assert bench.desired["d0"].policy == policy
    bench.answer("d0")
    order(store, 1, "rollback", "ana")
    bench.round()
    assert bench.desired["d0"].policy == InstallPolicy(max_bytes_per_s=5000)


def test_counters_rise_also_after_the_store_was_lost(store: Database, tmp_path: Path) -> None:
    bench = Bench(store, 1)
    bench.start(spec_of("a"))
    bench.round()
    (tmp_path / "new").mkdir()
    fresh = Bench(open_database("sqlite:///fleet.db", tmp_path / "new"), 1)
    fresh.start(spec_of("b"))
    fresh.round()
    assert fresh.counters["d0"] >= bench.counters["d0"]


def test_a_server_whose_lease_was_taken_keeps_and_sends_nothing(store: Database) -> None:
    bench = Bench(store, 1)
    bench.start(spec_of("a"))
    with store.write():
        store.run("UPDATE lease SET holder = 'another'")
    rows = log.verify(store).rows
    with pytest.raises(RolloutError, match="another server has taken over"):
        bench.round()
    assert log.verify(store).rows == rows
    assert rollouts.desired_page(store) == []


def test_the_plan_says_whom_it_does_not_fit_before_anything_is_sent(store: Database) -> None:
    bench = Bench(store, 2, running="b")
    facts = DeviceFacts(jetpack="5.1")
    bench.round(device_row("old", report(facts=facts)), device_row("q", report(profile="q")))
    bench.round(replace(device_row("away", report("b")), state=None))
    spec = spec_of("a", "d0,rest", requires=parse_requirements("jetpack>=6"))
    with pytest.raises(RolloutError, match="app-a 1 fits none of 5 devices; away: it has not said"):
        make_plan(store, spec)
    plan = make_plan(store, spec_of("a", "d0"))
    assert [group.devices for group in plan.groups] == [("d0",)]
    assert set(plan.ungrouped) == {"d1", "old", "away"}
    assert plan.before == {"d0": "b" * 64}
    assert [(row.device, row.reasons) for row in plan.unfit] == [
        ("q", (f"it is q, the release is for {PROFILE}",))
    ]
    assert make_plan(store, spec_of("a")).offline == ("away",)
    assert bench.sent == []
    with pytest.raises(RolloutError, match="does not say its map50"):
        make_plan(store, spec_of("a", gates=parse_gates("bundle.map50>0.4")))
    stated = msgspec.structs.replace(
        spec_of("a", "d0", gates=parse_gates("task_score>=0.9, licence in [MIT]")),
        metrics={"task_score": 0.89}, texts={"licence": "AGPL-3.0-only"},
    )  # fmt: skip
    with pytest.raises(RolloutError) as caught:
        make_plan(store, stated)
    assert "the bundle's task_score is 0.89, the gate is bundle.task_score>=0.9" in str(
        caught.value
    )
    assert "the bundle's licence is 'AGPL-3.0-only'" in str(caught.value)
    passing = {"metrics": {"task_score": 0.9}, "texts": {"licence": "MIT"}}
    assert make_plan(store, msgspec.structs.replace(stated, **passing)).groups
    assert rollouts.load_specs(store) == {}


@pytest.mark.parametrize("text", ["site", "=lab", "a=b,c", "a=\x1b[2J"])
def test_labels_that_cannot_be_read_are_refused(store: Database, text: str) -> None:
    Bench(store, 1)
    with pytest.raises(RolloutError, match="is no label"):
        label_device(store, "d0", [text], "ana")
    with pytest.raises(RolloutError, match="the fleet has no device 'd9'; it has d0"):
        label_device(store, "d9", ["a=b"], "ana")


def test_two_operators_at_once_lose_no_labels(store: Database, tmp_path: Path) -> None:
    Bench(store, 1)

    def label(who: str) -> None:
        database = open_database("sqlite:///fleet.db", tmp_path)
        for number in range(20):
            label_device(database, "d0", [f"{who}{number}=x"], who)
        database.close()

    with ThreadPoolExecutor(2) as operators:
        list(operators.map(label, ["ana", "ben"]))
    assert len(all_devices(store)[0].labels) == 40


def test_labels_are_set_and_taken_away(store: Database) -> None:
    Bench(store, 1)
    label_device(store, "d0", ["site=lab", "group=canary"], "ana")
    label_device(store, "d0", ["site="], "ana")
    assert all_devices(store)[0].labels == {"group": "canary"}


def act(bench: Bench, data: st.DataObject, letter: str) -> None:
    """One random thing that happens to a fleet."""
    what = data.draw(st.sampled_from(["start", "answer", "answer", "round", "kill", "order"]))
    if what == "start":
        groups = data.draw(st.sampled_from(["rest", "d0,rest", "50%,rest", "d1+d2", "25%"]))
        bench.start(spec_of(letter, groups))
    elif what == "answer" and bench.desired:
        device = data.draw(st.sampled_from(sorted(bench.desired)))
        bench.answer(device, data.draw(st.sampled_from(["live", "refused", "downloading"])))
    elif what == "kill":
        bench.restart()
    elif what == "order" and bench.control.states:
        number = data.draw(st.sampled_from(sorted(bench.control.states)))
        with contextlib.suppress(RolloutError):  # it means nothing now
            order(bench.store, number, data.draw(st.sampled_from(["pause", "resume", "abort"])), "")


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_no_device_gets_releases_out_of_order_whenever_the_server_is_killed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random rollouts, answers, orders and kills: the releases of each device only get newer, and
    every rollout's state is that of its replayed log."""
    store = open_database("sqlite:///fleet.db", tmp_path_factory.mktemp("fleet"))
    bench = Bench(store, 4)
    for step in range(data.draw(st.integers(5, 25))):
        act(bench, data, "0123456789abcdef"[step % 16])
        bench.round()
    sent: dict[str, list[int]] = {}
    for row in log.rows_after(store, 0):
        if row.kind == control_module.DOCUMENT:
            sent.setdefault(msgspec.json.decode(row.body)["device"], []).append(row.rollout)
    assert all(numbers == sorted(set(numbers)) for numbers in sent.values()), sent
    for number, spec in rollouts.load_specs(store).items():
        assert rollouts.load_state(store, number, spec) == bench.control.states[number]
    assert log.verify(store).rows == log.head(store)[0]
    store.close()
