"""What is not young is not believed: devices, rollouts, views; the counters that end replays."""

import io
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fleet_server_fixtures import device_row, release, report, write_fleet
from mqtt_fixtures import AgentBox, Mosquitto, Watcher
from msgspec.structs import replace
from rich.console import Console
from store_fixtures import all_devices

from device.agent.reporter import COUNTERS_A_STRETCH, ReportCounter
from device.protocol import documents
from device.protocol.documents import (
    Beat,
    DeviceFacts,
    PipelineReport,
    Reported,
    StateDocument,
    decode,
    encode,
)
from device.protocol.fitting import fit
from device.protocol.mqtt import LinkUp, Message
from device.protocol.topics import Topics
from scripts import outage
from toolkit.cli.actions.fleet.tables import devices_table, rollout_table, rollouts_table
from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.groups import assign
from toolkit.fleet.rollout.liveness import LastHeard, ListeningPeriod, judge, outages, place_of
from toolkit.fleet.rollout.machine import replay, step
from toolkit.fleet.rollout.targets import Target
from toolkit.fleet.server import device_cache
from toolkit.fleet.server.control import Control
from toolkit.fleet.server.operations import make_plan, start_rollout
from toolkit.fleet.server.serve import FleetServer
from toolkit.fleet.server.silence import Watch, sentence
from toolkit.fleet.server.views import device_views, read_outages, rollout_views
from toolkit.fleet.store import lease
from toolkit.fleet.store.database import Database, open_database
from toolkit.fleet.store.devices import save_devices, save_ear

BEAT_S = 100.0
TOPICS = Topics("d0")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Database]:
    database = open_database("sqlite:///fleet.db", tmp_path)
    yield database
    database.close()


# -- the decision


@pytest.mark.parametrize(
    ("heard_s", "beat_s", "since_s", "verdict"),
    [
        (900.0, BEAT_S, 0.0, "alive"),  # at the limit
        (899.9, BEAT_S, 0.0, "silent"),
        (899.9, BEAT_S, 910.0, "unknown"),  # the server did not listen for long enough
        (899.9, BEAT_S, 909.9, "silent"),
        (1100.0, BEAT_S, 0.0, "alive"),
        (1100.1, BEAT_S, 0.0, "silent"),  # from the future: a clock was set
        (0.0, BEAT_S, 0.0, "silent"),  # never
        (0.0, 0.0, 0.0, "no_beat"),  # an older agent
        (999.0, 0.0, 0.0, "no_beat"),
    ],
)
def test_a_device_is_judged_by_its_age_and_by_what_could_be_heard(
    heard_s: float, beat_s: float, since_s: float, verdict: str
) -> None:
    assert judge(heard_s, beat_s, ListeningPeriod(since_s, 1000.0)) == verdict


def voices(*rows: tuple[str, float], **labels: str) -> list[LastHeard]:
    return [LastHeard(name, heard_s, BEAT_S, place_of(labels)) for name, heard_s in rows]


def test_a_site_that_falls_silent_is_one_event() -> None:
    site = [(f"s{n}", 10.0 + n) for n in range(60)]
    silent = [
        *voices(*site, site="lab", group="east"),
        *voices(("g0", 10.0), ("g1", 110.0), ("g2", 110.1), group="east"),
        *voices(("x", 50.0)),
    ]
    events = outages(silent, {"site=lab": 61, "group=east": 3, "": 2})
    assert [(e.place, len(e.devices), e.of, e.since_s) for e in events] == [
        ("group=east", 2, 3, 10.0),  # at the limit of one interval, and one beyond it
        ("site=lab", 60, 61, 10.0),
        ("", 1, 2, 50.0),
        ("group=east", 1, 3, 110.1),
    ]
    assert sentence(events[1]) == (
        "60 of 61 devices with site=lab fell silent together, from 1970-01-01T00:00:10Z: "
        "s0, s1, s2, s3, s4, ..."
    )
    assert sentence(events[2]) == "x is silent, last heard 1970-01-01T00:00:50Z"


def test_an_outage_is_said_once_when_an_interval_is_over() -> None:
    watch = Watch()
    watch.begin(0.0)
    rows = [LastHeard(f"d{n}", float(n), 10.0, "") for n in range(8)]
    fallen: set[str] = set()
    messages = []
    for second in range(60):
        watch.caught_up(float(second))
        fallen |= watch.fallen_silent(rows)
        messages += [(second, text) for text in watch.news(rows)]
    assert len(fallen) == 8
    assert [(second, "8 of 8 devices" in text) for second, text in messages] == [(21, True)]
    assert watch.take("d3", BEAT_S)
    assert not watch.take("d3", BEAT_S)


def test_a_server_that_stood_still_listens_anew() -> None:
    watch = Watch()
    watch.begin(0.0)
    watch.caught_up(5.0)  # at the limit
    assert watch.ear == ListeningPeriod(0.0, 5.0)
    watch.caught_up(10.1)
    assert watch.ear == ListeningPeriod(10.1, 10.1)
    watch.caught_up(9.0)  # the clock was set back
    assert watch.ear == ListeningPeriod(9.0, 9.0)


# -- the counter


def test_the_counter_rises_over_restarts_and_wrong_clocks(tmp_path: Path) -> None:
    path, clock = tmp_path / "counter", [1_000_000.0]

    def counter() -> ReportCounter:
        return ReportCounter(path, lambda: clock[0])

    first = counter()
    numbers = [first.next(), first.next()]
    assert numbers[1] == numbers[0] + 1
    for moment_s in (1_000_000.0, 5.0, 1_000_000.0):  # at once; after a cut without a clock
        clock[0] = moment_s
        numbers += [counter().next()]
    long = counter()
    numbers += [long.next() for _ in range(3)]
    clock[0] += 90_000.0  # a day later
    numbers += [long.next()]
    assert numbers == sorted(set(numbers))
    path.unlink()  # the state is lost: the clock makes it rise
    clock[0] += 10.0
    lost = counter()
    assert lost.next() > numbers[-1]
    path.unlink()
    clock[0] = 5.0
    wrong = counter()
    assert wrong.next() < numbers[-1]
    clock[0] = 1_200_000.0  # and heals it once it is set
    assert wrong.next() > numbers[-1]


def test_a_stretch_that_is_used_up_is_followed_by_the_next(tmp_path: Path) -> None:
    counter = ReportCounter(tmp_path / "counter", lambda: 0.0)
    numbers = [counter.next() for _ in range(COUNTERS_A_STRETCH + 2)]
    assert numbers[-1] - numbers[0] == COUNTERS_A_STRETCH + 1
    assert ReportCounter(tmp_path / "counter", lambda: 0.0).next() > numbers[-1]


@pytest.mark.parametrize("what", ["fifo", "folder", "garbage", "huge"])
def test_a_counter_that_cannot_be_read_stops_nothing(tmp_path: Path, what: str) -> None:
    path = tmp_path / "counter"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"\xff\x00" if what == "garbage" else b"9" * 100_000)
    counter = ReportCounter(path, lambda: 1000.0)
    assert 0 < counter.next() < counter.next() < 2**62


# -- limits of reports


def test_a_report_at_its_limits_is_taken_and_one_beyond_is_refused() -> None:
    limits = {
        "labels": (documents.MAX_LABELS, lambda n: report_with({str(i): "" for i in range(n)})),
        "problems": (documents.MAX_SENTENCES, lambda n: changed(problems=("x",) * n)),
        "problem": (documents.MAX_SENTENCE, lambda n: changed(problems=("x" * n,))),
        "warning": (documents.MAX_SENTENCE, lambda n: changed(warning="x" * n)),
        "profile": (documents.MAX_WORDS, lambda n: changed(profile="x" * n)),
        "label": (documents.MAX_WORDS, lambda n: report_with({"k": "x" * n})),
        "degraded": (
            documents.MAX_SENTENCES,
            lambda n: changed(pipeline=PipelineReport(status="running", degraded=("x",) * n)),
        ),
    }
    for name, (limit, make) in limits.items():
        assert decode(encode(make(limit)), Reported) == make(limit), name
        with pytest.raises(ValueError, match="length <= "):
            decode(encode(make(limit + 1)), Reported)
        assert fit(make(limit)) is not None
        fitted = fit(make(limit + 1))
        assert decode(encode(fitted), Reported) == fitted, name
        assert "..." in encode(fitted).decode(), name
    whole = report_with({"site": "lab"})
    assert fit(whole) is whole


def changed(**fields: object) -> Reported:
    return msgspec.structs.replace(report(), **fields)


def report_with(labels: dict[str, str]) -> Reported:
    return report(facts=DeviceFacts(labels=labels))


def test_a_device_with_ten_thousand_labels_floods_no_list(store: Database, tmp_path: Path) -> None:
    server, control = served(store, tmp_path)
    flood = report_with({f"label-{n}": "x" * 200 for n in range(10_000)})
    hear(server, control, Message(TOPICS.reported, encode(flood)))
    assert control.devices == {}
    hear(server, control, Message(TOPICS.reported, encode(fit(flood))))
    assert len(control.devices["d0"].reported.facts.labels) == documents.MAX_LABELS
    assert len(msgspec.json.encode(list(device_views(store)))) < 30_000
    assert "and 56 more" in shown(devices_table(list(device_views(store))))


def shown(what: object) -> str:
    console = Console(file=io.StringIO(), record=True, width=2000)
    console.print(what)
    return console.export_text()


# -- what the server hears


class NoLink:
    """Takes what is published."""

    def publish(self, *_words: object, **_rest: object) -> bool:
        return True


def served(store: Database, folder: Path) -> tuple[FleetServer, Control]:
    """A server that has connected, on a store."""
    write_fleet(folder, 1883)
    assert lease.acquire(store, "me")
    server, control = FleetServer(load_fleet(folder), services=()), Control(store, "me")
    hear(server, control, LinkUp(1, "5"))
    return server, control


def hear(server: FleetServer, control: Control, *events: object) -> None:
    for event in events:
        server._events.put(event)
    server._round(control, NoLink())


def reported_message(counter: int, *, retained: bool = False, phase: str = "idle") -> Message:
    document = report("a", phase, beat_s=BEAT_S, counter=counter)
    return Message(TOPICS.reported, encode(document), retained)


def test_what_is_retained_is_known_and_not_heard(store: Database, tmp_path: Path) -> None:
    server, control = served(store, tmp_path)
    online = encode(StateDocument(state="online", session=1))
    hear(server, control, Message(TOPICS.state, online, True), reported_message(5, retained=True))
    row = control.devices["d0"]
    assert (row.reported.counter, row.state.state, row.heard_s) == (5, "online", 0.0)
    (view,) = list(device_views(store))
    assert (view.state, view.last_heard, view.age_s) == ("unknown", "", None)
    before_s = time.time()
    hear(server, control, reported_message(6))
    assert before_s <= control.devices["d0"].heard_s <= time.time()
    assert next(device_views(store)).state == "online"


def test_a_restart_of_the_server_renews_nothing(store: Database, tmp_path: Path) -> None:
    server, control = served(store, tmp_path)
    hear(server, control, reported_message(5))
    heard_s = control.devices["d0"].heard_s
    server, control = served(store, tmp_path)
    hear(server, control, reported_message(5, retained=True))
    assert control.devices["d0"].heard_s == heard_s == all_devices(store)[0].heard_s


@pytest.mark.parametrize(
    ("message", "is_heard"),
    [
        (reported_message(6), True),
        (reported_message(5), False),  # the same once more
        (reported_message(4, phase="live"), False),  # an old one
        (reported_message(0, phase="live"), False),  # of before its agent counted
        (reported_message(4, phase="live", retained=True), False),
        (Message(TOPICS.beat, encode(Beat(counter=8))), True),
        (Message(TOPICS.beat, encode(Beat(counter=7))), False),
        (Message(TOPICS.beat, encode(Beat(counter=6))), False),
        (Message(TOPICS.beat, encode(Beat(counter=8)), True), False),  # nobody retains beats
        (Message(TOPICS.beat, b"{"), False),
        (Message(TOPICS.beat, b'{"counter":0}'), False),
    ],
)
def test_only_what_was_never_said_before_is_heard(
    store: Database, tmp_path: Path, message: Message, is_heard: bool
) -> None:
    server, control = served(store, tmp_path)
    hear(
        server,
        control,
        reported_message(5),
        Message(TOPICS.beat, encode(Beat(counter=7, at="then"))),
    )
    before = replace(control.devices["d0"], heard_s=1.0)
    control.devices["d0"] = before
    hear(server, control, message)
    after = control.devices["d0"]
    assert (after.heard_s > 1.0) == is_heard
    assert after.reported.update.phase == "idle"
    if not is_heard:
        assert after.reported == before.reported


@pytest.mark.parametrize(
    ("message", "is_heard"),
    [
        (Message(TOPICS.beat, encode(Beat(counter=9))), False),  # older than the report
        (Message(TOPICS.beat, encode(Beat(counter=11))), True),
        (Message(TOPICS.state, encode(StateDocument(state="lost", session=1))), False),  # a will
        (Message(TOPICS.state, encode(StateDocument(state="online", session=2))), True),
    ],
)
def test_neither_old_beats_nor_wills_are_words_of_the_device(
    store: Database, tmp_path: Path, message: Message, is_heard: bool
) -> None:
    server, control = served(store, tmp_path)
    hear(server, control, reported_message(10))
    control.devices["d0"] = replace(control.devices["d0"], heard_s=1.0)
    hear(server, control, message)
    assert (control.devices["d0"].heard_s > 1.0) == is_heard


def test_a_flood_of_one_device_does_not_hide_that_others_are_silent(
    store: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, control = served(store, tmp_path)
    monkeypatch.setattr("toolkit.fleet.server.serve.ROUND_S", 0.02)
    monkeypatch.setattr(server, "_take", lambda event, _control: server._events.put(event))
    before = server._watch.ear
    for _ in range(5):  # the queue is never empty
        hear(server, control, reported_message(1))
    assert server._events
    assert server._watch.ear.since_s == before.since_s
    assert server._watch.ear.until_s > before.until_s


def test_beats_are_kept_with_the_lease_and_cost_no_round(store: Database, tmp_path: Path) -> None:
    server, control = served(store, tmp_path)
    hear(server, control, reported_message(5))
    device = all_devices(store)[0]
    hear(server, control, Message(TOPICS.beat, encode(Beat(counter=9))))
    assert all_devices(store)[0] == device  # no transaction of its own
    assert set(control.devices.unsaved) == {"d0"}
    assert control.devices["d0"].beat == 9


def test_a_server_reads_the_documents_of_those_it_hears_alone(
    store: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, control = served(store, tmp_path)
    monkeypatch.setattr(device_cache, "MAX_ROWS", 2)
    with store.write():
        save_devices(
            store, [device_row(f"d{n}", report(beat_s=BEAT_S, counter=3)) for n in range(9)]
        )
    read = Counter[str]()
    load = device_cache.load_device
    monkeypatch.setattr(
        device_cache, "load_device",
        lambda database, device: (read.update([device]), load(database, device))[1],
    )  # fmt: skip
    control = Control(store, "me")
    assert (set(control.devices), read) == ({f"d{n}" for n in range(9)}, Counter())
    hear(server, control, LinkUp(1, "5"))
    for number, name in enumerate(("d0", "d1", "d2", "d3", "d3"), 5):
        hear(server, control, Message(Topics(name).beat, encode(Beat(counter=number))))
    assert read == {"d0": 1, "d1": 1, "d2": 1, "d3": 1}
    with store.write():
        control.devices.save_beats()
    assert [control.devices[f"d{n}"].beat for n in range(4)] == [5, 6, 7, 9]  # none was forgotten
    assert len(control.devices._rows) == 2
    hear(server, control, Message(Topics("d1").beat, encode(Beat(counter=6))))
    assert "d1" not in control.devices.unsaved  # it was said before, which the store tells


def test_a_silent_device_is_no_live_one_until_it_is_heard(store: Database, tmp_path: Path) -> None:
    server, control = served(store, tmp_path)
    hear(server, control, reported_message(5))
    spec = v.RolloutSpec(key="k", release=release("a"), groups=("rest",), timeout_s=1000.0)
    number = start_rollout(store, spec, make_plan(store, spec), Path("/new"), "ana")
    hear(server, control)
    answer = report("a", "live", f"k-{number}", beat_s=BEAT_S, counter=6)
    second = Message(Topics("d1").reported, encode(report(beat_s=BEAT_S, counter=1)))
    hear(server, control, second)
    hear(server, control, Message(TOPICS.reported, encode(answer)))
    phases = {name: row.phase for name, row in control.states[number].devices.items()}
    assert phases == {"d0": "live", "d1": "sent"}
    now_s = time.time()
    for name in ("d0", "d1"):
        control.devices[name] = replace(control.devices[name], heard_s=now_s - BEAT_S - 1)
    server._watch = Watch()  # which has not looked a moment ago
    server._watch.ear = ListeningPeriod(now_s - BEAT_S, time.time())
    hear(server, control)
    assert control.states[number].devices["d0"].phase == "silent"
    assert control.states[number].groups[0].counts == {"silent": 1, "sent": 1}
    hear(server, control, Message(TOPICS.beat, encode(Beat(counter=10))))
    assert control.states[number].devices["d0"].phase == "live"


# -- rollouts


def started(spec: v.RolloutSpec, *sizes: int) -> v.RolloutState:
    members = [
        v.Member(device=f"d{group}{n}", group=group)
        for group, size in enumerate(sizes)
        for n in range(size)
    ]
    begin = v.Started(at_s=0.0, members=tuple(members))
    return step(spec, v.RolloutState(), [begin, v.Tick(at_s=0.0)])[0]


SPEC = v.RolloutSpec(key="k", release=release("a"), groups=("canary", "rest"), timeout_s=100.0)


def live(*devices: str, at_s: float = 1.0) -> list[v.Event]:
    return [v.Answered(at_s=at_s, device=device, live=True) for device in devices]


def silent(*devices: str, at_s: float) -> v.Silent:
    return v.Silent(at_s=at_s, devices=devices, heard_s=0.0)


def test_a_canary_that_fell_silent_lets_no_group_begin_and_blocks_not_for_ever() -> None:
    begun = started(SPEC, 2, 2)
    events = [*live("d00"), silent("d00", at_s=2.0), *live("d01"), v.Tick(at_s=3.0)]
    state, actions = step(SPEC, begun, events)
    assert (state.group, actions) == (0, ())
    back, actions = step(SPEC, state, [*live("d00", at_s=4.0), v.Tick(at_s=4.0)])
    assert (back.group, len(actions)) == (1, 2)
    late = step(SPEC, state, [v.Tick(at_s=101.9)])[0]  # at its limit
    assert late.devices["d00"].phase == "silent"
    late = step(SPEC, state, [v.Tick(at_s=102.0)])[0]
    assert late.devices["d00"] == msgspec.structs.replace(
        late.devices["d00"], phase="timed_out", reason="not heard for 100 s"
    )
    assert late.status == "paused"


def test_silence_after_the_end_changes_no_figures() -> None:
    ended = step(SPEC, started(SPEC, 1, 1), [*live("d00"), v.Tick(at_s=1.0)])[0]
    ended = step(SPEC, ended, [*live("d10", at_s=2.0), v.Tick(at_s=2.0)])[0]
    assert ended.status == "finished"
    assert step(SPEC, ended, [silent("d00", "d10", at_s=3.0)])[0] == ended


def test_a_device_that_is_away_is_no_canary() -> None:
    targets = [Target(f"d{n}", "p", online=n % 2 == 0) for n in range(8)]
    away = {f"d{n}" for n in range(1, 8, 2)}
    half, rest = assign(("50%", "rest"), targets, "k")
    assert {one.device for one in half}.isdisjoint(away)
    assert {one.device for one in rest} == away
    first, second = assign(("50%", "50%"), targets, "k")
    assert {one.device for one in second} == away  # nobody else would take them: they come last
    assert len(first) == 4
    with pytest.raises(RolloutError, match=r"no device that is there \(1 are away or silent"):
        assign(("d1", "rest"), targets, "k")
    assert [one.device for one in assign(("d1",), targets, "k")[0]] == ["d1"]


def test_a_plan_takes_a_silent_device_for_one_that_is_away(store: Database) -> None:
    now_s = time.time()
    rows = [
        replace(device_row("there", report(beat_s=BEAT_S)), heard_s=now_s),
        replace(device_row("dead", report(beat_s=BEAT_S)), heard_s=now_s - BEAT_S - 1.0),
    ]
    with store.write():
        save_devices(store, rows)
        save_ear(store, ListeningPeriod(now_s - 1000.0, now_s))
    assert make_plan(store, SPEC_50).offline == ("dead",)
    assert make_plan(store, SPEC_50).groups[0].devices == ("there",)
    assert [(e.place, e.devices) for e in read_outages(store)] == [("", ("dead",))]
    dead, there = list(device_views(store))
    assert (dead.state, there.state) == ("silent", "online")
    assert dead.silent_since == dead.last_heard
    assert there.silent_since == ""
    assert dead.age_s == pytest.approx(BEAT_S + 1.0, abs=0.2)
    assert "2 devices: 1 online, 1 silent" in shown(devices_table([dead, there]))


SPEC_50 = msgspec.structs.replace(SPEC, groups=("50%", "rest"))


def test_an_ended_rollout_keeps_its_figures_when_a_newer_one_takes_its_devices(
    store: Database,
) -> None:
    assert lease.acquire(store, "me")
    control = Control(store, "me")
    names = ("d0", "d1", "d2")
    control.advance({name: device_row(name) for name in names})
    for letter in "ab":
        spec = v.RolloutSpec(key=f"k{letter}", release=release(letter), groups=("rest",))
        if letter == "b":
            spec = msgspec.structs.replace(spec, groups=("d0+d1",))
        number = start_rollout(store, spec, make_plan(store, spec), Path("/new"), "ana")
        control.advance({})
        if letter == "a":
            answer = report("a", "live", f"ka-{number}")
            control.advance({name: device_row(name, answer) for name in names})
            assert control.states[1].status == "finished"
    older, newer = rollout_views(store)
    assert (older.status, older.live, older.devices, older.taken_by) == ("finished", 3, 3, {2: 2})
    assert older.groups[0].phases == {"live": 3}
    assert (newer.devices, newer.taken_by) == (2, {})
    assert "3 of 3 (then taken by 2)" in shown(rollouts_table([older, newer]))
    assert "rollout 2 has taken 2 of its devices since it ended" in shown(rollout_table(older))
    texts = store.rows("SELECT body FROM log WHERE rollout = 1 AND kind = 'event' ORDER BY seq")
    events = [v.EVENTS.decode(text) for (text,) in texts]
    state = replay(control._specs[1], events)
    undone, actions = step(
        control._specs[1], state, [v.Ordered(at_s=1e10, order="rollback"), v.Tick(at_s=1e10)]
    )
    assert {name: row.phase for name, row in undone.devices.items()}["d0"] == "superseded"
    assert undone.groups[0].taken == {}
    assert all(action.device == "d2" for action in actions)


# -- the store


# -- all of it, with real processes


def test_after_a_crash_of_the_broker_the_dead_are_silent_and_the_others_online() -> None:
    outcome = outage.measure(agents=3, killed=1, beat_s=6.0)
    assert outcome.true_after_s is not None
    assert outcome.false_online_s < 12.0 + outcome.true_after_s
    assert outcome.outages == (("site=dark", 1, 1),)


def test_over_mqtt_3_1_1_a_beat_is_state_and_report_again(tmp_path: Path) -> None:
    """RabbitMQ gives nothing that it retained to who subscribes with a wildcard: a server that
    comes later than the agent knows what it hears."""
    broker = Mosquitto(tmp_path)
    agent = AgentBox(tmp_path, broker.port)
    quick = '[broker]\nbeat_s = 5.0\nmqtt_version = "3.1.1"'
    agent.config.write_text(agent.config.read_text().replace("[broker]", quick))
    try:
        with Watcher(broker.port, agent.device) as watcher:
            agent.start()
            first = watcher.wait_report("idle")
            watcher.drain().states.clear()
            until_s = time.monotonic() + 10.0
            while not watcher.seen.states and time.monotonic() < until_s:
                watcher.take(1.0)
            again = watcher.wait_report("idle", counter=first.counter + 1)
    finally:
        agent.kill()
        broker.close()
    assert [b"online" in state for state in watcher.seen.states] == [True]
    assert msgspec.structs.replace(again, counter=first.counter) == first
