"""Several servers share a fleet: who has which device, and what holds when they come and go."""

import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest
from fleet_server_fixtures import device_row, release, report, wait_until, write_fleet
from hypothesis import given, settings
from hypothesis import strategies as st
from mqtt_fixtures import Mosquitto
from postgresql_fixtures import postgresql

from device.protocol.documents import Desired, Reported, StateDocument, encode
from device.protocol.mqtt import LinkEvent, LinkSettings, LinkUp, Message
from device.protocol.topics import Topics
from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.liveness import ListeningPeriod
from toolkit.fleet.server import answers, serve
from toolkit.fleet.server import control as control_module
from toolkit.fleet.server.answers import Answers
from toolkit.fleet.server.control import Control, owner_of
from toolkit.fleet.server.copy_guard import CopyGuard
from toolkit.fleet.server.device_cache import DeviceCache
from toolkit.fleet.server.operations import decommission, make_plan, order, start_rollout
from toolkit.fleet.server.same_folder import FILE, check_folder
from toolkit.fleet.server.serve import FleetServer
from toolkit.fleet.store import lease, log, rollouts
from toolkit.fleet.store.database import Database, open_database
from toolkit.fleet.store.devices import save_ear
from toolkit.fleet.store.dialects import SQLITE
from toolkit.fleet.store.rollouts import DesiredRow

DEVICES = tuple(f"d{number}" for number in range(5))


def test_devices_are_shared_evenly_and_only_those_of_a_lost_server_move() -> None:
    devices = [f"board-{number}" for number in range(3000)]
    before = {device: owner_of(("a", "b", "c"), device) for device in devices}
    assert all(900 < count < 1100 for count in Counter(before.values()).values())
    after = {device: owner_of(("a", "c"), device) for device in devices}
    assert {before[device] for device in devices if before[device] != after[device]} == {"b"}


def take_lease(store: Database, name: str) -> None:
    """A lease beside others, as PostgreSQL gives it."""
    with store.write():
        until_s = store.now_s() + 3600.0
        store.run("INSERT INTO lease VALUES (?, ?, ?)", name, name, until_s)


def test_a_killed_server_of_this_machine_loses_its_devices_though_nothing_is_heard(
    store: Database,
) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        place = lease.holder_name().rsplit(":", 2)[0]
        for name in ("a", killed_server := f"{place}:{process.pid}:b"):
            take_lease(store, name)
        control = Control(store, "a")
        control.advance({})
        assert control.servers == tuple(sorted(("a", killed_server)))
        process.kill()
    control.advance({})
    assert control.servers == ("a",)


def end_lease(store: Database, name: str) -> None:
    with store.write():
        store.run("UPDATE lease SET until_s = 0 WHERE name = ?", name)


class Fleet:
    """Servers on one store, and a broker that is a dictionary: what it retains of each device."""

    def __init__(self, store: Database) -> None:
        self.store = store
        self.servers: dict[str, Control] = {}
        self.inboxes: dict[str, dict[str, Reported]] = {}  # what a server has heard and not taken
        self.shares: dict[str, tuple[str, ...]] = {}
        self.reported: dict[str, Reported] = {}
        self.desired: dict[str, Desired] = {}

    def join(self, name: str) -> None:
        take_lease(self.store, name)
        self.servers[name] = Control(self.store, name)
        self.inboxes[name] = dict(self.reported)
        self.shares[name] = ()

    def kill(self, name: str) -> None:
        end_lease(self.store, name)
        del self.servers[name]

    def say(self, device: str, reported: Reported) -> None:
        self.reported[device] = reported
        for name in self.servers:
            self.inboxes[name][device] = reported

    def round(self, name: str) -> None:
        control, inbox = self.servers[name], self.inboxes[name]
        heard_rows = {d: device_row(d, inbox.pop(d)) for d in list(inbox) if control.owns(d)}
        self.publish(control, control.advance(heard_rows))
        if control.servers != self.shares[name]:
            inbox.update({d: row.reported for d, row in heard_rows.items() if not control.owns(d)})
            before, self.shares[name] = self.shares[name], control.servers
            rows = [r for r in control.documents_after("") if control.owns(r.device)]
            self.publish(control, [r for r in rows if not control.owned(r.device, before)])

    def publish(self, control: Control, rows: Sequence[DesiredRow]) -> None:
        for row in rows:
            assert control.owns(row.device)
            desired = msgspec.json.decode(row.document, type=Desired)
            known = self.desired.get(row.device)
            assert known is None or known.counter <= desired.counter
            self.desired[row.device] = desired

    def settle(self) -> None:
        for _ in range(3):
            for name, control in self.servers.items():
                with control.write():  # every few seconds in life, so that a killed one is seen
                    pass
                self.round(name)


def act(fleet: Fleet, data: st.DataObject, step: int) -> None:
    """One random thing that happens to a fleet."""
    what = data.draw(
        st.sampled_from(["start", "answer", "answer", "round", "kill", "join", "order"])
    )
    letter = "123456789abcdef"[step % 15]
    if what == "start":
        groups = data.draw(st.sampled_from([("rest",), ("d0", "rest"), ("50%", "rest")]))
        spec = v.RolloutSpec(key=f"k{letter}", release=release(letter), groups=groups)
        start_rollout(fleet.store, spec, make_plan(fleet.store, spec), Path("/new"), "ana")
    elif what == "answer" and fleet.desired:
        device = data.draw(st.sampled_from(sorted(fleet.desired)))
        desired = fleet.desired[device]
        phase = data.draw(st.sampled_from(["live", "refused", "downloading"]))
        fleet.say(device, report(desired.release.blob.sha256[0], phase, desired.request))
    elif what == "kill" and len(fleet.servers) > 1:
        fleet.kill(data.draw(st.sampled_from(sorted(fleet.servers))))
    elif what == "join" and len(fleet.servers) < 3:
        fleet.join(f"s{step}")
    elif what == "order" and (numbers := sorted(rollouts.load_specs(fleet.store))):
        word = data.draw(st.sampled_from(["pause", "resume", "abort", "rollback"]))
        with suppress(RolloutError):  # it means nothing now
            order(fleet.store, data.draw(st.sampled_from(numbers)), word, "")


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_no_order_is_lost_or_given_twice_whichever_servers_are_killed(data: st.DataObject) -> None:
    """Rollouts, answers, orders, kills and new servers in any order: each device has got the newest
    document that was made for it, by its own server, and each was made once; all servers, and the
    replayed log, have the same states."""
    store = Database(SQLITE, ":memory:", "memory")
    fleet = Fleet(store)
    fleet.join("a")
    fleet.join("b")
    for device in DEVICES:
        fleet.say(device, report())
    fleet.settle()
    for step in range(data.draw(st.integers(5, 20))):
        act(fleet, data, step)
        fleet.round(data.draw(st.sampled_from(sorted(fleet.servers))))
    fleet.settle()
    orders: dict[str, list[tuple[int, bool]]] = {}
    for row in log.rows_after(store, 0):
        if row.kind == control_module.DOCUMENT:
            body = msgspec.json.decode(row.body)
            orders.setdefault(body["device"], []).append((row.rollout, body["undo"]))
    assert all(len(set(rows)) == len(rows) for rows in orders.values()), orders
    assert {device: row.counter for device, row in fleet.desired.items()} == {
        row.device: row.counter for row in rollouts.desired_page(store)
    }
    for number, spec in rollouts.load_specs(store).items():
        state = rollouts.load_state(store, number, spec)
        assert all(control.states[number] == state for control in fleet.servers.values())
    log.verify(store)
    store.close()


class Sent:
    """A connection that takes what is published."""

    def __init__(self) -> None:
        self.topics: list[str] = []

    def publish(self, topic: str, *_words: object, **_rest: object) -> bool:
        self.topics.append(topic)
        return True


@pytest.fixture
def store() -> Iterator[Database]:
    database = Database(SQLITE, ":memory:", "memory")
    yield database
    database.close()


def test_what_devices_said_while_their_server_died_is_taken_by_the_next(
    store: Database, tmp_path: Path
) -> None:
    """A report came after the other server was killed, and before anybody knew that it was."""
    for name in ("a", "b"):
        take_lease(store, name)
    control, link = Control(store, "a"), Sent()
    server = FleetServer(load_fleet(write_fleet(tmp_path / "fleet", 1883)), services=())
    server._events.put(LinkUp(1, "5"))
    for device in DEVICES:
        topics = Topics(device)
        online = encode(StateDocument(state="online", session=1))
        server._events.put(Message(topics.state, online))
        server._events.put(Message(topics.reported, encode(report("a"))))
    server._round(control, link)
    own_devices = {device for device in DEVICES if owner_of(("a", "b"), device) == "a"}
    assert set(control.devices) == own_devices != set(DEVICES)
    end_lease(store, "b")
    with control.write():
        pass  # the lease is renewed
    server._round(control, link)
    assert set(control.devices) == set(DEVICES)
    assert all(control.devices[device].reported is not None for device in DEVICES)
    assert {row[0] for row in store.rows("SELECT id FROM devices WHERE reported = 1")} == set(
        DEVICES
    )


def test_a_server_whose_lease_may_have_ended_sends_nothing(
    store: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for a while: another server may have sent something newer."""
    assert lease.acquire(store, "me")
    server = FleetServer(load_fleet(write_fleet(tmp_path / "fleet", 1883)), services=())
    control, link = Control(store, "me"), Sent()
    server._events.put(LinkUp(1, "5"))
    server._events.put(Message(Topics("d0").reported, encode(report())))
    server._round(control, link)
    spec = v.RolloutSpec(key="k", release=release("a"), groups=("rest",))
    start_rollout(store, spec, make_plan(store, spec), Path("/new"), "ana")
    monkeypatch.setattr(lease, "LEASE_S", -1.0)
    server._round(control, link)
    assert link.topics == []
    monkeypatch.undo()  # it was renewed
    server._round(control, link)
    assert link.topics == [Topics("d0").desired]


class Asked:
    """A double of what answers devices: `owns` is what it was made with."""

    def __init__(self, owns: Callable[[str], bool]) -> None:
        self.owns = owns

    def start(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class NoLink:
    """A double of a connection: it takes everything."""

    def publish(self, *_: object, **__: object) -> bool:
        return True


def test_no_device_is_answered_until_a_reconnection_has_shown_no_copy(
    tmp_path: Path,
) -> None:
    requests: list[Asked] = []

    def make(_fleet: object, owns: Callable[[str], bool]) -> Asked:
        requests.append(Asked(owns))
        return requests[-1]

    fleet = load_fleet(write_fleet(tmp_path / "fleet", 1))
    server = FleetServer(fleet, services=(make,))
    with closing(fleet.open_store()) as store:
        assert lease.acquire(store, server._holder)
        server._control = control = Control(store, server._holder)
        own_claim = server._own_claim()
        server._guard = guard = CopyGuard(own_claim, lambda _holder: None)
        for _ in range(2):
            server._take_link(LinkUp(1, "5"))
            server._may_serve(control, NoLink())  # type: ignore[arg-type]
            assert not any(service.owns("d0") for service in requests)
            guard.take(Message(guard.topic, encode(own_claim)), time.monotonic())
            server._may_serve(control, NoLink())  # type: ignore[arg-type]
            assert [service.owns("d0") for service in requests] == [True]


def test_answers_that_did_not_start_are_closed(tmp_path: Path) -> None:
    fleet = load_fleet(write_fleet(tmp_path / "fleet", 1))
    Answers(fleet, lambda _device: True).close()


def test_a_thread_of_answers_that_fails_closes_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the broker does not hold messages for one that is gone."""
    links: list[FailingLink] = []

    def connect(_settings: LinkSettings, on_event: Callable[[LinkEvent], None]) -> FailingLink:
        links.append(FailingLink(on_event))
        return links[-1]

    monkeypatch.setattr(answers, "Link", connect)
    fleet = load_fleet(write_fleet(tmp_path / "fleet", 1))
    with closing(Answers(fleet, lambda _device: True)) as service:
        monkeypatch.setattr(service._metadata, "handle", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            service._answer_metadata()
    assert [link.is_closed for link in links] == [True]


class FailingLink:
    """A connection with one message, which the test's handler fails at."""

    is_closed = False

    def __init__(self, on_event: Callable[[LinkEvent], None]) -> None:
        self._on_event = on_event

    def start(self) -> None:
        self._on_event(Message(Topics("d0").tuf_get, b""))

    def close(self) -> None:
        self.is_closed = True


def test_a_server_that_was_put_out_takes_a_new_lease(tmp_path: Path) -> None:
    """It stood still for longer than its lease, and the others ended that."""
    with postgresql() as url, closing(Mosquitto(tmp_path)) as broker:
        fleet = load_fleet(write_fleet(tmp_path / "fleet", broker.port, url))
        stopped, server = threading.Event(), FleetServer(fleet, services=())
        thread = threading.Thread(target=server.serve, args=(stopped,))
        thread.start()
        with closing(fleet.open_store()) as database:
            wait_until(lambda: bool(lease.read_leases(database)), lambda: "no lease")
            with database.write():
                assert database.run("DELETE FROM lease") == 1
            wait_until(lambda: bool(lease.read_leases(database)), lambda: "no new lease")
            stopped.set()
            thread.join()
            assert lease.read_leases(database) == []


def test_waits_begin_anew_only_where_no_server_heard_the_devices(store: Database) -> None:
    """A server that joins restarts no wait."""
    take_lease(store, "a")
    control = Control(store, "a")
    control.advance({"d0": device_row("d0", report())})
    spec = v.RolloutSpec(key="k", release=release("a"), groups=("rest",))
    start_rollout(store, spec, make_plan(store, spec), Path("/new"), "ana")
    with control.write():
        save_ear(store, ListeningPeriod(time.time() - 60.0, time.time()))
    control.advance({}, reconnected=True)
    assert "reconnected" not in event_kinds(store)
    with control.write():
        save_ear(store, ListeningPeriod(time.time() - 120.0, time.time() - 60.0))
    control.advance({}, reconnected=True)
    assert event_kinds(store)[-1] == "reconnected"


def event_kinds(store: Database) -> list[str]:
    return [msgspec.json.decode(text)["event"] for text in log.events_of(store, 1)]


def test_a_lease_that_could_not_be_renewed_while_another_server_wrote_stays(
    store: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ran out while this server waited for the store; one that ran out before is ended."""
    for name in ("a", "b"):
        take_lease(store, name)
    control = Control(store, "a")
    with store.write():
        store.run("UPDATE lease SET until_s = ? WHERE name = 'b'", store.now_s() - 6.0)
        monkeypatch.setattr(Database, "writing_s", lambda self: 8.0)
        assert lease.check(store, "a") == ("a", "b")
        monkeypatch.setattr(Database, "writing_s", lambda self: 4.0)
        assert lease.check(store, "a") == ("a",)
    end_lease(store, "a")
    with control.write():
        store.run("UPDATE lease SET until_s = 0 WHERE name = 'a'")  # a long transaction
    assert [row.remaining_s > 4.0 for row in lease.read_leases(store)] == [True]


def test_a_store_is_read_without_its_lock_and_before_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        closing(open_database("sqlite:///fleet.db", tmp_path)) as store,
        closing(open_database("sqlite:///fleet.db", tmp_path)) as second,
    ):
        leases = []

        def replay(control: Control) -> dict[int, v.RolloutState]:
            with second.write():  # waits for nobody
                leases.append(lease.read_leases(second))
            return {}

        monkeypatch.setattr(Control, "_replay", replay)
        assert Control(store, "a").servers == ("a",)
        assert leases == [[]]


def test_a_server_that_comes_back_has_what_it_heard_and_not_kept(
    store: Database, tmp_path: Path
) -> None:
    """Its lease was ended while it had taken reports of its own devices, and of others."""
    server = FleetServer(load_fleet(write_fleet(tmp_path / "fleet", 1883)), services=())
    for name in ("a", "b"):
        take_lease(store, name)
    control = Control(store, "a")
    server._events.put(LinkUp(1, "5"))
    server._round(control, Sent())
    for device in DEVICES:
        server._take_message(Message(Topics(device).reported, encode(report("a"))), control)
    with store.write():
        store.run("DELETE FROM lease")
    with pytest.raises(lease.LeaseLostError):
        server._round(control, Sent())
    stopped, link = threading.Event(), Sent()
    stopped.set()
    again = Control(store, "a")
    server._share(store, again, link, stopped)
    server._round(again, link)
    assert set(again.devices) == set(DEVICES)


def test_a_flood_ends_no_lease(
    store: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round ends and renews it, though messages wait; they are taken in order in the next."""
    server = FleetServer(load_fleet(write_fleet(tmp_path / "fleet", 1883)), services=())
    control, order_taken = Control(store, "a"), list[str]()

    def read_slowly(event: Message, _control: Control) -> None:
        order_taken.append(event.topic)
        time.sleep(serve.ROUND_S / 4)

    monkeypatch.setattr(server, "_take", read_slowly)
    topics = [str(number) for number in range(12)]
    for topic in topics:
        server._events.put(Message(topic, b""))
    counts = []
    while sum(counts) < len(topics):
        counts.append(server._gather(control, Sent()))
    assert max(counts) <= 5
    assert order_taken == topics


def test_the_broker_is_told_again_what_devices_that_left_shall_not_run(
    store: Database, tmp_path: Path
) -> None:
    control, link = Control(store, "a"), Sent()
    control.advance({"d0": device_row("d0", report())})
    decommission(store, "d0", "ana")
    control.advance({})  # and the server was killed before it sent anything
    server = FleetServer(load_fleet(write_fleet(tmp_path / "fleet", 1883)), services=())
    server._events.put(LinkUp(1, "5"))
    server._round(Control(store, "a"), link)
    assert link.topics == [Topics("d0").desired]


def test_all_is_said_again_where_the_log_that_other_servers_wrote_was_archived(
    store: Database, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        take_lease(store, name)
    control, second = Control(store, "a"), Control(store, "b")
    link = Sent()
    server = FleetServer(load_fleet(write_fleet(tmp_path / "fleet", 1883)), services=())
    server._events.put(LinkUp(1, "5"))
    server._round(control, link)
    own_device = next(device for device in DEVICES if control.owns(device))
    control.advance({own_device: device_row(own_device, report())})
    spec = v.RolloutSpec(key="k", release=release("a"), groups=("rest",))
    start_rollout(store, spec, make_plan(store, spec), Path("/new"), "ana")
    second.advance({})  # it makes the document, and `a` has to send it
    with store.write():
        rollouts.save_snapshot(store, 1, rollouts.applied(store), second.states[1])
        store.run("DROP TRIGGER log_no_delete")
        store.run("DELETE FROM log WHERE seq <= ?", control._applied + 2)
    server._round(control, link)
    assert link.topics == [Topics(own_device).desired]


def test_one_of_the_servers_keeps_since_when_devices_are_heard(
    store: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 0.0)  # it is renewed after each round
    for name in ("a", "b"):
        take_lease(store, name)
    writers = []
    for name in ("a", "b"):
        with store.write():
            store.run("UPDATE lease SET until_s = ?", store.now_s() + 3600.0)
        server = FleetServer(load_fleet(write_fleet(tmp_path / name, 1883)), services=())
        server._holder, server._is_connected = name, True
        stopped = threading.Event()
        monkeypatch.setattr(DeviceCache, "save_beats", lambda _cache, end=stopped: end.set())
        monkeypatch.setattr(serve, "save_ear", lambda *_args, name=name: writers.append(name))
        server._share(store, Control(store, name), Sent(), stopped)
    assert writers == ["a"]


def test_a_server_with_a_copy_of_the_folder_is_refused(store: Database, tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    folder.mkdir()
    check_folder(folder, store, 1)
    copy = shutil.copytree(folder, tmp_path / "copy")
    check_folder(folder, store, 1)  # the first one after all were stopped
    check_folder(folder, store, 2)
    with pytest.raises(RolloutError, match="give all the same folder"):
        check_folder(copy, store, 2)
    (copy / FILE).unlink()
    with pytest.raises(RolloutError, match="has nothing"):
        check_folder(copy, store, 2)
