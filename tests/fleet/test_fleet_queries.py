"""Counts, pages and changes of a fleet's devices by SQL; stores of older versions; the archive of
the log."""

import dataclasses
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleet_server_fixtures import device_row, release, report, write_fleet
from msgspec.structs import replace
from store_fixtures import BEAT_S, EAR, NOW_S, all_devices, answer, fleet, served, spec_of

from device.protocol.documents import (
    Beat,
    DeviceFacts,
    InstallPolicy,
    StateDocument,
    encode,
)
from device.protocol.mqtt import LinkUp, Message
from device.protocol.topics import Topics
from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.groups import assign
from toolkit.fleet.rollout.liveness import ListeningPeriod
from toolkit.fleet.rollout.machine import replay
from toolkit.fleet.rollout.targets import fulfils, parse_requirements, unfit
from toolkit.fleet.server import operations
from toolkit.fleet.server.control import Control
from toolkit.fleet.server.history import history_of
from toolkit.fleet.server.serve import FleetServer
from toolkit.fleet.server.views import device_view, device_views, rollout_views
from toolkit.fleet.store import changes, devices, log, presence, rollouts
from toolkit.fleet.store import device_queries as queries
from toolkit.fleet.store.database import Database, open_database
from toolkit.fleet.store.device_queries import DeviceFilter
from toolkit.fleet.store.devices import DeviceRow
from toolkit.fleet.store.dialects import parse_url


@pytest.fixture
def filled(store: Database) -> Database:
    with store.write():
        devices.save_devices(store, fleet())
    with store.write():
        devices.set_labels(store, "d001", {"group": "canary", "100%": "_"})
    return store


def all_rows(store: Database, where: DeviceFilter = queries.EVERY) -> list[DeviceRow]:
    return list(queries.stream(store, where, EAR, page=7))


def presence_of(row: DeviceRow, ear: ListeningPeriod) -> str:
    """What the expression in SQL stands for, by the pure function."""
    if row.state is None:
        return "unknown"
    if row.state.state != "online":
        return row.state.state
    verdict = row.liveness(ear)
    is_late = verdict == "alive" and abs(ear.until_s - row.heard_s) > 0.9 * row.beat_s
    return {"alive": "late" if is_late else "online", "no_beat": "online"}.get(verdict, verdict)


def test_a_plan_sees_devices_as_their_documents_are(filled: Database) -> None:
    for ear in (EAR, ListeningPeriod(NOW_S - 10.0, NOW_S), ListeningPeriod(NOW_S, NOW_S)):
        expected = [target for row in all_rows(filled) if (target := row.target(ear))]
        assert queries.load_targets(filled, ear) == [
            msgspec.structs.replace(
                one, facts=msgspec.structs.replace(one.facts, labels={}, bundles=())
            )
            for one in expected
        ]


def test_a_plan_is_that_of_every_device_judged_by_its_documents(
    filled: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "load_ear", lambda _store: EAR)
    chance = random.Random(3)
    for number in range(80):
        large = msgspec.structs.replace(release("a").blob, bytes=chance.choice((1, 10**8, 10**11)))
        spec = spec_of(
            "a",
            key=f"k{number}",
            release=msgspec.structs.replace(release("a"), profile="p1", blob=large),
            requires=parse_requirements(
                ",".join(chance.sample(REQUIREMENTS, chance.choice((0, 1, 2))))
            ),
            groups=(*chance.sample(("20%", "30%", "@new", "group=canary"), 2), "rest"),
            queries={"new": parse_requirements(chance.choice(("jetpack>=6", "free_mb>=50")))},
        )
        check_plan(filled, spec)


def check_plan(filled: Database, spec: v.RolloutSpec) -> None:
    targets = [target for row in all_rows(filled) if (target := row.target(EAR))]
    reasons = {one.device: unfit(one, spec.release, spec.requires) for one in targets}
    fit = [one for one in targets if not reasons[one.device]]
    if not fit or (message := refusal(lambda: assign(spec.groups, fit, spec.key, spec.queries))):
        says = message if fit else "fits none of"
        assert says in refusal(lambda: operations.make_plan(filled, spec))
        return
    groups = assign(spec.groups, fit, spec.key, spec.queries)
    plan = operations.make_plan(filled, spec)
    assert [group.devices for group in plan.groups] == [
        tuple(one.device for one in group) for group in groups
    ]
    assert {row.device: row.reasons for row in plan.unfit} == {
        device: texts for device, texts in reasons.items() if texts
    }
    members = list(itertools.chain(*groups))
    assert plan.offline == tuple(one.device for one in members if not one.online)
    assert plan.unsigned == tuple(one.device for one in members if one.dev)


def refusal(plan: Callable[[], object]) -> str:
    """Return why a plan is refused, empty if it is not."""
    try:
        plan()
    except RolloutError as error:
        return str(error)
    return ""


def test_a_plan_reads_the_documents_of_full_devices_alone(
    filled: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two full devices has the release in a slot, so that it needs no room."""
    full = DeviceFacts(free_mb=1, bundles=("c" * 64,))
    large = msgspec.structs.replace(
        release("c"), blob=msgspec.structs.replace(release("c").blob, bytes=10**9)
    )
    rows = [
        device_row("x0", report(facts=full)),
        device_row("x1", report(facts=DeviceFacts(free_mb=1))),
    ]
    with filled.write():
        devices.save_devices(filled, rows)
    read: list[str] = []
    load = queries.load_rows
    monkeypatch.setattr(
        queries, "load_rows", lambda store, ids: (read.extend(ids), load(store, ids))[1]
    )
    plan = operations.make_plan(filled, spec_of("c", release=large))
    assert [group.devices for group in plan.groups] == [("x0",)]
    assert plan.unsigned == ("x0",)
    assert next(row for row in plan.unfit if row.device == "x1").reasons == (
        "it has 1 MB free, the release takes 1908 MB to install",
    )
    assert {"x0", "x1"} <= set(read) < {row.id for row in all_devices(filled)}


def test_presence_is_judged_as_the_pure_function_does(filled: Database) -> None:
    for ear in (EAR, ListeningPeriod(NOW_S - 10.0, NOW_S), ListeningPeriod(NOW_S, NOW_S)):
        check_presence(filled, ear)


def check_presence(filled: Database, ear: ListeningPeriod) -> None:
    rows = all_rows(filled)
    expected = Counter(presence_of(row, ear) for row in rows)
    assert queries.count_devices(filled, queries.EVERY, ear) == dict(expected)
    for kind in queries.PRESENCES:
        ids = [row.id for row in queries.stream(filled, DeviceFilter(presence=kind), ear)]
        kinds = ("online", "late") if kind == "online" else (kind,)
        assert ids == [row.id for row in rows if presence_of(row, ear) in kinds]


def test_pages_have_each_device_once_in_their_order(filled: Database) -> None:
    for sort, down in itertools.product(queries.SORTS, (False, True)):
        check_pages(filled, sort, down=down)


def check_pages(filled: Database, sort: str, *, down: bool) -> None:
    after, pages = "", []
    for _ in range(40):
        page = queries.read_page(
            filled, queries.EVERY, EAR, sort=sort, down=down, after=after, limit=9
        )
        pages.append([row.id for row in page.rows])
        if not (after := page.after):
            break
    ids = list(itertools.chain(*pages))
    assert len(pages) == 14
    assert sorted(ids) == [row.id for row in fleet()]
    if sort == "id":
        assert ids == sorted(ids, reverse=down)
    if sort == "heard":
        heard = {row.id: row.heard_s for row in fleet()}
        ages = [heard[one] for one in ids]
        assert ages == sorted(ages, reverse=down)


def test_a_place_in_a_list_is_right_while_devices_come_and_go(filled: Database) -> None:
    page = queries.read_page(filled, queries.EVERY, EAR, limit=3)
    assert [row.id for row in page.rows] == ["d000", "d001", "d002"]
    with filled.write():
        devices.save_devices(filled, [device_row("a"), device_row("d002x")])
    rows = queries.read_page(filled, queries.EVERY, EAR, after=page.after, limit=2).rows
    assert [row.id for row in rows] == ["d002x", "d003"]
    for place in ("nonsense", page.after[:-2], "W10"):
        with pytest.raises(RolloutError, match="is no place in a list"):
            queries.read_page(filled, queries.EVERY, EAR, after=place)
    with pytest.raises(RolloutError, match="in a list by id, not by heard"):
        queries.read_page(filled, queries.EVERY, EAR, sort="heard", after=page.after)
    with pytest.raises(RolloutError, match="not sorted by 'colour'"):
        queries.read_page(filled, queries.EVERY, EAR, sort="colour")


REQUIREMENTS = (
    "jetpack>=6", "jetpack!=6.0", "jetpack<6", "dla_cores>=1", "dla_cores=0", "memory_mb<9000",
    "memory_mb!=8000", "free_mb>=100", "profile=p1", "profile!=p1", "label.site=lab",
    "label.site!=lab", "label.group!=canary", "label.group=canary", "power_mode=MAXN",
    "jetpack>=6,free_mb>=9000,label.site=field",
)  # fmt: skip


def test_requirements_choose_the_same_devices_by_sql(filled: Database) -> None:
    rows = all_rows(filled)
    for text in REQUIREMENTS:
        requires = parse_requirements(text)
        chosen = [row.id for row in all_rows(filled, DeviceFilter(requires=requires))]
        assert chosen == [row.id for row in rows if fulfils(row.target(EAR), requires)], text


def test_labels_and_texts_are_found_as_they_are(filled: Database) -> None:
    def ids(**words: object) -> list[str]:
        return [row.id for row in all_rows(filled, DeviceFilter(**words))]

    assert ids(labels=(("100%", "_"),)) == ids(labels=(("group", "canary"),)) == ["d001"]
    assert ids(search="CANARY") == ["d001"]
    assert ids(labels=(("site", "a"),)) == ids(labels=(("ite", "lab"),)) == []
    assert len(ids(labels=(("site", 'a",b"'),))) > 5
    assert ids(search="D01") == [f"d01{n}" for n in range(10)]
    assert ids(search="' OR 1=1 --") == []
    assert ids(ids=("d003", "d001", "none")) == ["d001", "d003"]
    assert set(ids(version="1", profile="p1")) < set(ids(version="1"))


def test_the_figures_of_a_fleet_are_those_of_its_devices(filled: Database) -> None:
    counts, rows = queries.fleet_counts(filled, EAR), all_rows(filled)
    reports = [row.reported for row in rows if row.reported is not None]
    assert counts.devices == sum(counts.presence.values()) == len(rows)
    assert counts.problems["pipeline"] == sum(r.pipeline.status == "stalled" for r in reports)
    assert counts.problems["hot"] == sum(r.measured.temperature_c == 90.0 for r in reports)
    assert counts.problems["fallback"] == sum(bool(r.pipeline.degraded) for r in reports)
    assert counts.problems["update"] == sum(r.update.phase == "refused" for r in reports)
    for kind in counts.problems:
        assert counts.problems[kind] == len(all_rows(filled, DeviceFilter(problem=kind)))
    running = Counter((r.running.name, r.running.version, r.profile) for r in reports)
    assert {(c.release, c.version, c.profile): c.devices for c in counts.running} == dict(running)


def test_every_change_of_a_device_has_a_number_above_all_before(filled: Database) -> None:
    seen = queries.changes_since(filled, 0)
    assert (len(seen.devices), seen.missed) == (120, False)
    assert seen.number == changes.last_change(filled)
    assert queries.changes_since(filled, seen.number) == dataclasses.replace(seen, devices=())
    row = all_rows(filled)[7]
    with filled.write():
        devices.save_devices(filled, [row])
        devices.set_labels(filled, "d003", {"group": "x"})
        changes.touch(filled, ["d009"])
    with filled.write():
        devices.save_beats(filled, [replace(row, heard_s=NOW_S)])  # it lives: nothing new
    after = queries.changes_since(filled, seen.number)
    assert (after.devices, after.missed) == (("d007", "d003", "d009"), False)
    first = queries.changes_since(filled, seen.number, limit=2)
    assert (first.devices, first.missed) == (("d007", "d003"), True)
    assert queries.changes_since(filled, first.number).devices == ("d009",)


def test_a_change_that_is_rolled_back_gives_its_number_back(filled: Database) -> None:
    before = changes.last_change(filled)

    def fail() -> None:
        with filled.write():
            changes.touch(filled, ["d001"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert changes.last_change(filled) == before


def test_a_fleet_has_a_sample_a_minute(filled: Database) -> None:
    for second in range(0, 301, 10):
        with filled.write():
            presence.save_sample(filled, ListeningPeriod(0.0, NOW_S + second))
    samples = presence.load_samples(filled, NOW_S)
    assert [sample.at_s for sample in samples] == [10_020 + 60 * n for n in range(5)]
    assert samples[0].counts["silent"] < samples[-1].counts["silent"]
    assert sum(samples[0].counts.values()) == 120
    assert len(presence.load_samples(filled, NOW_S, most=2)) == 3
    with filled.write():
        presence.save_sample(filled, ListeningPeriod(0.0, NOW_S + presence.KEPT_S + 121.0))
    assert presence.load_samples(filled, 0.0)[0].at_s == 10_080


# -- rollouts as lists read them


def test_lists_show_what_a_replay_of_the_log_gives(store: Database) -> None:
    control = served(store)
    for letter, groups in (("a", ("rest",)), ("b", ("d0+d1",))):
        spec = spec_of(letter, groups=groups)
        plan = operations.make_plan(store, spec)
        number = operations.start_rollout(store, spec, plan, Path("/new"), "ana")
        assert rollout_views(store, [number])[0].groups[0].phases == {"pending": len(plan.before)
            or len(plan.groups[0].devices)}  # fmt: skip
        control.advance({})
        answer(control, number, letter, "d0", phase="refused")
        answer(control, number, letter, "d1", "d2")
    for number, spec in rollouts.load_specs(store).items():
        texts = store.rows(
            "SELECT body FROM log WHERE rollout = ? AND kind = 'event' ORDER BY seq", number
        )
        state = replay(spec, rollouts.decode_events(text for (text,) in texts))
        assert state == rollouts.load_state(store, number, spec) == control.states[number]
        groups = tuple(msgspec.structs.replace(g, queue=()) for g in state.groups)
        without = msgspec.structs.replace(state, devices={}, groups=groups)
        assert rollouts.load_summary(store, number) == without
    older, newer = rollout_views(store)
    assert [(f.device, f.reason) for f in newer.failures] == [("d0", "no room")]
    assert older.failures == ()
    phases = {view.id: (view.rollout, view.phase) for view in device_views(store)}
    assert phases == {"d0": (2, "failed"), "d1": (2, "live"), "d2": (1, "live")}
    assert Control(store, "me").states == control.states  # from snapshots and what came later
    operations.order(store, 2, "rollback", "ana")
    assert rollout_views(store, [2])[0].status == "rolling_back"
    with pytest.raises(RolloutError, match="rollout 2 is rolling back: pause means nothing"):
        operations.order(store, 2, "pause", "ana")
    control.advance({})
    assert device_view(store, "d1").phase == "undoing"
    assert rollouts.load_state(store, 2, rollouts.load_spec(store, 2)) == control.states[2]


def test_an_ended_rollout_has_a_snapshot_and_is_not_replayed(store: Database) -> None:
    control = served(store)
    spec = spec_of("a")
    number = operations.start_rollout(
        store, spec, operations.make_plan(store, spec), Path("/new"), "ana"
    )
    control.advance({})
    assert store.rows("SELECT seq FROM snapshots") == []
    answer(control, number, "a", "d0", "d1", "d2")
    ((seq,),) = store.rows("SELECT seq FROM snapshots WHERE rollout = ?", number)
    assert log.events_of(store, number, seq) == []
    assert rollouts.load_state(store, number, spec) == control.states[number]


def test_a_saved_query_is_kept_and_names_what_it_asks_for(store: Database) -> None:
    served(store)
    operations.label_device(store, "d1", ["site=lab"], "ana")
    operations.save_query(store, "lab", "label.site=lab", "ana")
    operations.save_query(store, "other", "label.site!=lab", "ana")
    assert list(operations.load_queries(store)) == ["lab", "other"]
    requires = operations.requirements_of(store, "@lab")
    assert requires == operations.requirements_of(store, "label.site=lab")
    assert [view.id for view in device_views(store, DeviceFilter(requires=requires))] == ["d1"]
    spec = spec_of("a", groups=("@lab", "rest"), queries={"lab": requires})
    plan = operations.make_plan(store, spec)
    assert plan.groups[0].devices == ("d1",)
    number = operations.start_rollout(store, spec, plan, Path("/new"), "ana")
    operations.save_query(store, "lab", "", "ana")  # what has begun keeps what it began with
    assert rollouts.load_spec(store, number) == spec
    with pytest.raises(RolloutError, match="no saved query 'lab': there are other"):
        operations.requirements_of(store, "@lab")
    for name, text, message in (
        ("lab", "", "no saved query 'lab'"), ("a b", "profile=p", "is no name of a query"),
        ("x", "colour=red", "devices say no 'colour'"),
    ):  # fmt: skip
        with pytest.raises(RolloutError, match=message):
            operations.save_query(store, name, text, "ana")
    kinds = Counter(row.kind for row in log.rows_after(store, 0))
    assert kinds["query"] == 3


def test_a_list_says_when_a_rollout_begins_and_its_window(store: Database) -> None:
    control = served(store)
    policy = InstallPolicy(not_before="22:00", not_after="04:30")
    spec = spec_of("a", policy=policy, start_s=4e9)
    plan = operations.make_plan(store, spec)
    number = operations.start_rollout(store, spec, plan, Path("/new"), "ana")
    assert control.advance({}) == []
    (view,) = rollout_views(store)
    assert (view.status, view.window) == ("scheduled", "22:00-04:30")
    assert view.start == "2096-10-02T07:06:40Z"
    assert view.reason == "it begins at 2096-10-02 07:06 UTC"
    operations.order(store, number, "abort", "ana")
    control.advance({})
    assert rollout_views(store)[0].groups[0].phases == {"skipped": 3}


def test_a_scheduled_rollout_has_its_devices_from_its_start_on(
    store: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = served(store)
    first, second = spec_of("a"), spec_of("b", start_s=4e9)
    for spec in (first, second):
        operations.start_rollout(store, spec, operations.make_plan(store, spec), Path("/n"), "ana")
    sent = control.advance({})
    assert {row.rollout for row in sent} == {1}
    answer(control, 1, "a", "d0")
    control = Control(store, "me")  # and after a restart
    answer(control, 1, "a", "d1")
    control.advance({"d9": device_row("d9")})  # it appears meanwhile
    views = {view.number: view for view in rollout_views(store)}
    assert views[1].groups[0].phases == {"live": 2, "sent": 2}
    assert (views[2].status, views[2].groups[0].phases) == ("scheduled", {"pending": 3})
    assert [(row.rollout, row.phase) for row in device_views(store)] == [
        (1, "live"), (1, "live"), (1, "sent"), (1, "sent")
    ]  # fmt: skip
    monkeypatch.setattr(store, "now_s", lambda: 4e9)
    sent = control.advance({})  # and what is old by then is renewed
    assert {row.device for row in sent if row.rollout == 2} == {"d0", "d1", "d2"}
    views = {view.number: view for view in rollout_views(store)}
    assert views[1].groups[0].phases == {"timed_out": 1, "superseded": 3}
    assert [row.rollout for row in device_views(store)] == [2, 2, 2, 1]
    assert control.states[2].devices["d0"].previous == "a" * 64  # what it runs by now
    again = Control(store, "me")
    assert again.states == control.states
    operations.order(store, 2, "rollback", "ana")
    undone = {row.device: row.sha256 for row in control.advance({})}
    assert undone["d0"] == "a" * 64


def test_a_device_leaves_the_fleet_and_comes_again_under_its_id(
    store: Database, tmp_path: Path
) -> None:
    control = served(store)
    spec = spec_of("a")
    plan = operations.make_plan(store, spec)
    number = operations.start_rollout(store, spec, plan, Path("/new"), "ana")
    control.advance({})
    answer(control, number, "a", "d0", "d1")
    write_fleet(tmp_path, 1883)
    server = FleetServer(load_fleet(tmp_path), services=())
    published: list[tuple[str, bytes]] = []

    class Broker:
        def publish(self, topic: str, payload: bytes, **_rest: object) -> bool:
            published.append((topic, payload))
            return True

    def hear(*events: object) -> list[str]:
        published.clear()
        for event in events:
            server._events.put(event)
        server._round(control, Broker())
        return [view.id for view in device_views(store)]

    hear(LinkUp(1, "5"))
    operations.decommission(store, "d2", "ana")
    topics = Topics("d2")
    # What it said before the server knew of it does not bring it back.
    assert hear(Message(topics.state, encode(StateDocument(state="lost", session=1)), False)) == [
        "d0", "d1",
    ]  # fmt: skip
    assert published == [(topics.desired, b"")]
    assert rollout_views(store)[0].groups[0].phases == {"decommissioned": 1, "live": 2}
    assert control.states[number].status == "finished"
    payload, online = encode(report(counter=9)), encode(StateDocument(state="online", session=1))
    lost = encode(StateDocument(state="lost", session=1))
    stale = (
        Message(topics.reported, payload, True), Message(topics.state, online, True),
        Message(topics.state, lost, False),
        Message(topics.beat, encode(Beat(counter=10, at="")), False),
    )  # fmt: skip
    assert hear(*stale) == ["d0", "d1"]
    control = Control(store, "me")  # a restart
    assert hear(*stale) == ["d0", "d1"]
    assert hear(Message(topics.state, online, False), Message(topics.reported, payload, False)) == [
        "d0", "d1", "d2",
    ]  # fmt: skip
    assert device_view(store, "d2").phase == "sent"
    assert control.states[number].status == "running"
    assert devices.load_decommissioned(store) == set()
    texts = [entry.text for entry in history_of(store, "d2")]
    assert "decommissioned by ana" in texts
    assert "left the fleet" in texts
    with pytest.raises(RolloutError, match="no device 'd9'"):
        operations.decommission(store, "d9", "ana")


# -- the archive of the log


def test_the_archived_log_keeps_its_chain_and_its_rollouts(store: Database, tmp_path: Path) -> None:
    control = served(store)
    spec = spec_of("a")
    number = operations.start_rollout(
        store, spec, operations.make_plan(store, spec), Path("/new"), "ana"
    )
    control.advance({})
    answer(control, number, "a", "d0", "d1")  # d2 has not answered: the rollout is open
    before = log.verify(store)
    archive = tmp_path / "log.jsonl"
    archived = operations.archive_log(store, archive, keep_s=-1.0, who="ana")
    assert archived == before.rows
    verified = log.verify(store, before.head)
    assert (verified.rows, verified.checkpoint) == (before.rows + 1, before.rows)
    rows = [json.loads(line) for line in archive.read_text().splitlines()]
    assert [row["seq"] for row in rows] == list(range(1, archived + 1))
    assert rows[-1]["hash"] == before.head
    assert archive.stat().st_mode & 0o077 == 0
    again = Control(store, "me")
    assert again.states == control.states
    answer(control, number, "a", "d2")
    assert control.states[number].status == "finished"
    assert Control(store, "me").states == control.states
    texts = [entry.text for entry in history_of(store, "d2")]
    assert texts == ["runs the release"]
    assert rollouts.started_by(store, number) == "ana"  # who may not approve it
    with pytest.raises(RolloutError, match=r"log\.jsonl is there"):
        operations.archive_log(store, archive, keep_s=-1.0, who="ana")
    second = operations.archive_log(store, tmp_path / "2.jsonl", keep_s=-1.0, who="ana")
    assert second == log.verify(store).checkpoint - archived
    assert operations.archive_log(store, tmp_path / "3.jsonl", keep_s=3600.0, who="ana") == 0


def test_an_archive_that_fails_leaves_no_file_and_loses_no_row(
    store: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = served(store)
    operations.label_device(store, "d0", ["a=b"], "ana")
    control.advance({})
    before = log.verify(store)
    rows = log.archive_until

    def broken(*arguments: Any) -> Iterator[log.LogRow]:
        yield next(iter(rows(*arguments)))
        raise OSError("No space left on device")

    monkeypatch.setattr(log, "archive_until", broken)
    with pytest.raises(RolloutError, match="cannot be written: No space left"):
        operations.archive_log(store, tmp_path / "log.jsonl", keep_s=-1.0, who="ana")
    assert list(tmp_path.glob("*log*")) == []
    assert log.verify(store) == before


def test_what_no_checkpoint_covers_cannot_be_deleted(store: Database, tmp_path: Path) -> None:
    control = served(store)
    operations.label_device(store, "d0", ["a=b"], "ana")
    control.advance({})
    operations.archive_log(store, tmp_path / "log.jsonl", keep_s=-1.0, who="ana")
    operations.label_device(store, "d0", ["a=c"], "ana")
    with pytest.raises(RolloutError, match="append-only"), store.write():
        store.run("DELETE FROM log")
    assert log.verify(store).rows == 3
    with store.write():
        store.run("UPDATE settings SET value = 2 WHERE name = 'checkpoint'")
        store.run("DELETE FROM log WHERE seq = 2")  # the row that tells the checkpoint
    with pytest.raises(RolloutError, match="has no checkpoint for the rows 1 to 2"):
        log.verify(store)


# -- stores of older versions

TABLES_OF_2 = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
    "CREATE TABLE lease (name TEXT PRIMARY KEY, holder TEXT NOT NULL,"
    " until_s DOUBLE PRECISION NOT NULL)",
    "CREATE TABLE log (seq BIGINT PRIMARY KEY, at_s DOUBLE PRECISION NOT NULL, who TEXT NOT NULL,"
    " rollout BIGINT NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL, hash TEXT NOT NULL)",
    "CREATE INDEX log_of_rollout ON log (rollout, seq)",
    "CREATE TABLE devices (id TEXT PRIMARY KEY, seen_s DOUBLE PRECISION NOT NULL,"
    " state TEXT NOT NULL, reported TEXT NOT NULL, labels TEXT NOT NULL,"
    " beat BIGINT NOT NULL DEFAULT 0, beat_at TEXT NOT NULL DEFAULT '')",
    "CREATE TABLE rollouts (number BIGINT PRIMARY KEY, spec TEXT NOT NULL,"
    " created_s DOUBLE PRECISION NOT NULL, status TEXT NOT NULL)",
    "CREATE TABLE releases (sha256 TEXT PRIMARY KEY, spec TEXT NOT NULL, path TEXT NOT NULL)",
    "CREATE TABLE desired (device TEXT PRIMARY KEY, counter BIGINT NOT NULL,"
    " rollout BIGINT NOT NULL, undo BIGINT NOT NULL, sha256 TEXT NOT NULL,"
    " expires_s DOUBLE PRECISION NOT NULL, document TEXT NOT NULL)",
)
TRIGGERS_OF_2 = {
    "sqlite": (
        "CREATE TRIGGER log_no_update BEFORE UPDATE ON log"
        " BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END",
        "CREATE TRIGGER log_no_delete BEFORE DELETE ON log"
        " BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END",
    ),
    "postgresql": (
        "CREATE FUNCTION log_is_append_only() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'the log is append-only'; END $$",
        "CREATE TRIGGER log_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON log"
        " EXECUTE FUNCTION log_is_append_only()",
    ),
}


def write_old_store(url: str, folder: Path, version: int) -> None:
    """Write a store of an older version: two devices, and a rollout that one has finished."""
    dialect, address = parse_url(url, folder)
    old = dialect.connect(address)

    def run(sql: str, *values: object) -> None:
        old.execute(sql.replace("?", dialect.placeholder), values)

    for statement in (*TABLES_OF_2, *TRIGGERS_OF_2[dialect.name]):
        run(statement)
    if version == 1:
        run("ALTER TABLE devices DROP COLUMN beat")
        run("ALTER TABLE devices DROP COLUMN beat_at")
    run("INSERT INTO settings VALUES ('schema', ?)", version)
    reported = encode(report("a", "live", "ka-1", beat_s=BEAT_S)).decode()
    columns = "INSERT INTO devices (id, seen_s, state, reported, labels) VALUES (?, ?, ?, ?, ?)"
    online = encode(StateDocument(state="online", session=1)).decode()
    run(columns, "d0", 5.0, online, reported, '{"group":"canary"}')
    too_long = {str(number): "" for number in range(65)}  # of an agent of before there were limits
    flood = report(facts=DeviceFacts(labels=too_long))
    run(columns, "d1", 6.0, "", encode(flood).decode(), "{}")
    spec = spec_of("a", groups=("canary",))
    run("INSERT INTO rollouts VALUES (1, ?, 1.0, 'finished')", msgspec.json.encode(spec).decode())
    run("INSERT INTO settings VALUES ('applied', 4)")
    head = log.GENESIS
    events: tuple[v.Event, ...] = (
        v.Started(at_s=1.0, members=(v.Member(device="d0", group=0),)),
        v.Tick(at_s=2.0),
        v.Answered(at_s=3.0, device="d0", live=True),
        v.Tick(at_s=4.0),
    )
    for seq, event in enumerate(events, 1):
        body = msgspec.json.encode(event).decode()
        row = log.LogRow(seq, event.at_s, "server", 1, log.EVENT, body, "")
        head = row.hash_after(head)
        run("INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?)",
            seq, event.at_s, "server", 1, log.EVENT, body, head)  # fmt: skip
    old.close()


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_store_is_brought_up_to_date(url: str, tmp_path: Path, version: int) -> None:
    write_old_store(url, tmp_path, version)
    store = open_database(url, tmp_path)
    first, second = all_devices(store)
    assert (first.id, first.heard_s, first.labels) == ("d0", 5.0, {"group": "canary"})
    assert (second.id, second.reported) == ("d1", None)
    view = device_view(store, "d0")
    assert (view.rollout, view.phase, view.profile) == (1, "live", "test-board")
    assert [row.id for row in all_rows(store, DeviceFilter(labels=(("group", "canary"),)))] == [
        "d0"
    ]
    assert queries.changes_since(store, 0).number == changes.last_change(store) > 0
    assert rollout_views(store)[0].groups[0].phases == {"live": 1}
    assert store.rows("SELECT rollout, seq FROM snapshots") == [(1, 4)]
    assert [entry.text for entry in history_of(store, "d0")] == [
        "is in this rollout", "runs the release",
    ]  # fmt: skip
    assert log.verify(store).rows == 4
    with pytest.raises(RolloutError, match="append-only"), store.write():
        store.run("DELETE FROM log WHERE seq = 1")
    served(store, ("d0",))
    store.close()
    open_database(url, tmp_path).close()  # and once more


def test_a_store_of_version_3_is_told_who_takes_unsigned_releases(url: str, tmp_path: Path) -> None:
    store = open_database(url, tmp_path)
    signed = msgspec.structs.replace(report(facts=DeviceFacts(module='"dev":true')), dev=False)
    with store.write():
        devices.save_devices(store, [device_row("d0", report()), device_row("d1", signed)])
        store.run("ALTER TABLE devices DROP COLUMN dev")
        store.run("DROP INDEX desired_expires")
        store.run("DROP TABLE board_leases")
        store.run("UPDATE settings SET value = 3 WHERE name = 'schema'")
    store.close()
    store = open_database(url, tmp_path)
    assert store.rows("SELECT id, dev FROM devices ORDER BY id") == [("d0", 1), ("d1", 0)]
    assert rollouts.first_expiry(store) == float("inf")
    with store.write():
        store.run("DROP TABLE board_leases")
        store.run("UPDATE settings SET value = 4 WHERE name = 'schema'")
    store.close()
    store = open_database(url, tmp_path)
    assert store.rows("SELECT board FROM board_leases") == []
    store.close()


def test_a_migration_that_fails_leaves_the_older_store(tmp_path: Path) -> None:
    url = "sqlite:///fleet.db"
    write_old_store(url, tmp_path, 2)
    dialect, address = parse_url(url, tmp_path)
    old = dialect.connect(address)
    old.execute("UPDATE devices SET labels = 'no JSON' WHERE id = 'd1'")
    with pytest.raises(msgspec.DecodeError):
        open_database(url, tmp_path)
    assert old.execute("SELECT value FROM settings WHERE name = 'schema'").fetchall() == [(2,)]
    assert len(old.execute("SELECT state FROM devices").fetchall()) == 2
    old.execute("UPDATE devices SET labels = '{}'")
    old.close()
    open_database(url, tmp_path).close()
