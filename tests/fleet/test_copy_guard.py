"""A second server whose folder is a copy, with a store of its own, is refused."""

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fleet_server_fixtures import LONG_S, ServerProcess, wait_until, write_fleet
from mqtt_fixtures import Mosquitto

from device.protocol.documents import encode
from device.protocol.mqtt import Message
from device.protocol.topics import SERVER_CLAIM
from toolkit.errors import RolloutError
from toolkit.fleet.server.copy_guard import (
    AHEAD_S,
    CLAIM_S,
    LISTEN_S,
    LIVE_S,
    SILENT_S,
    Claim,
    CopyGuard,
    fleet_id,
)


def claim(name: str, since_s: float = 0.0, fleet: str = "f", **rest: bool) -> Claim:
    return Claim(fleet, f"machine:1:{name:08}", name, f"/{name}", since_s, **rest)


def message(of: Claim, retained: bool = False) -> Message:
    return Message(f"{SERVER_CLAIM}/{of.holder[-8:]}", encode(of), retained)


def connected(own_claim: Claim, *retained: Claim) -> CopyGuard:
    """The guard of a server whose connection is up at 100 s, and has given back its own claim."""
    guard = CopyGuard(own_claim, lambda _holder: None)
    guard.connect(100.0)
    assert guard.advance(100.0) == [(guard.topic, encode(own_claim))]
    for second in retained:
        guard.take(message(second, retained=True), 100.1)
    assert not guard.is_alone
    guard.take(message(own_claim), 100.2)
    return guard


def heard_twice(guard: CopyGuard, second: Claim) -> None:
    guard.take(message(second), 101.0)
    guard.take(message(second), 101.1 + LIVE_S)


def test_a_server_alone_serves_once_its_claim_comes_back_or_never_does() -> None:
    guard = connected(claim("a"))
    assert guard.advance(100.3) == []
    assert guard.is_alone
    assert guard.advance(100.0 + CLAIM_S) == [(guard.topic, encode(claim("a", serves=True)))]
    deaf = CopyGuard(claim("a"), lambda _holder: None)
    deaf.connect(100.0)
    deaf.advance(100.0 + LISTEN_S - 0.1)
    assert not deaf.is_alone
    deaf.advance(100.0 + LISTEN_S)
    assert deaf.is_alone


def test_where_a_wildcard_gets_nothing_retained_a_server_listens_before_it_serves() -> None:
    """As behind RabbitMQ; one that has served already goes on at once after an outage."""
    for served, is_alone in ((False, False), (True, True)):
        guard = CopyGuard(claim("b", serves=served), lambda _holder: None)
        guard.connect(100.0, gets_retained=False)
        guard.take(message(claim("b")), 100.2)
        guard.advance(100.0 + LISTEN_S - 0.1)
        assert guard.is_alone == is_alone
        guard.advance(100.0 + LISTEN_S)
        assert guard.is_alone


def test_a_server_that_starts_on_a_copy_is_refused() -> None:
    guard = connected(claim("b", -9.0), claim("a", serves=True))
    guard.advance(100.3)
    assert not guard.is_alone
    with pytest.raises(
        RolloutError, match=r"on a with the folder /a, and has another store\. .*/b"
    ):
        heard_twice(guard, claim("a", serves=True))


@pytest.mark.parametrize("is_signed", [True, False])
def test_an_unsigned_fleet_may_only_have_the_name_of_another(is_signed: bool) -> None:
    guard = CopyGuard(claim("b"), lambda _holder: None, is_signed=is_signed)
    guard.connect(100.0)
    with pytest.raises(RolloutError) as error:
        heard_twice(guard, claim("a", serves=True))
    assert ("give one another `name` in its fleet.toml" in str(error.value)) != is_signed
    assert "/b is a copy" in str(error.value)


def test_a_server_that_serves_stays_and_is_not_held_up(caplog: pytest.LogCaptureFixture) -> None:
    guard = connected(claim("a"))
    guard.advance(100.3)
    heard_twice(guard, claim("b", -9.0))
    guard.advance(102.0)
    assert guard.is_alone
    assert "on a copy of this fleet has to stop: on b with the folder /b" in caplog.text


def test_of_two_that_were_apart_the_one_that_serves_longer_stays() -> None:
    guard = connected(claim("a", 1.0, serves=True), claim("b", 2.0, serves=True))
    heard_twice(guard, claim("b", 2.0, serves=True))
    guard.advance(103.0)
    assert not guard.is_alone  # until the other one has stopped
    guard.take(Message(f"{SERVER_CLAIM}/{claim('b').holder[-8:]}", b""), 104.0)
    guard.advance(104.0)
    assert guard.is_alone
    later = connected(claim("b", 2.0, serves=True), claim("a", 1.0, serves=True))
    with pytest.raises(RolloutError, match="has another store"):
        heard_twice(later, claim("a", 1.0, serves=True))


def test_who_replaces_a_copy_waits_for_its_end() -> None:
    serving, new = claim("a", 1.0, serves=True), claim("b", 2.0, replaces=True)
    with pytest.raises(RolloutError, match="b with the folder /b takes this fleet over"):
        heard_twice(connected(serving), new)
    guard = connected(new, serving)
    heard_twice(guard, serving)
    guard.advance(103.0)
    assert not guard.is_alone
    with pytest.raises(RolloutError, match="takes this fleet over"):  # the newest one counts
        heard_twice(connected(claim("b", 2.0, serves=True, replaces=True)), claim(
            "c", 3.0, replaces=True))  # fmt: skip


@pytest.mark.parametrize("replaces", [False, True])
def test_a_claim_from_the_future_replaces_nobody(
    replaces: bool, caplog: pytest.LogCaptureFixture
) -> None:
    guard = connected(claim("a", time.time(), serves=True, replaces=replaces))
    guard.advance(100.3)
    heard_twice(guard, claim("b", 1e300, serves=True, replaces=True))
    assert guard.is_alone
    assert "starts in 1e+300 s by its clock (limit 300 s)" in caplog.text
    with pytest.raises(RolloutError, match="takes this fleet over"):  # clocks are never the same
        heard_twice(guard, claim("c", time.time() + AHEAD_S / 2, replaces=True))


def test_a_claim_whose_server_is_gone_holds_up_for_a_while_and_is_cleared() -> None:
    """It died together with the broker, which kept it."""
    guard = connected(claim("b"), claim("a", serves=True))
    guard.advance(100.0 + SILENT_S)
    assert not guard.is_alone
    removed = (f"{SERVER_CLAIM}/{claim('a').holder[-8:]}", b"")
    assert removed in guard.advance(100.1 + SILENT_S)
    assert guard.is_alone


@pytest.mark.parametrize("is_live", [False, True])
def test_a_connection_that_breaks_often_forgets_no_silence(is_live: bool) -> None:
    """A claim of nobody ends after SILENT_S of all connections; the time between is not counted."""
    guard, removed = connected(claim("b"), claim("a", serves=True)), claim("a", serves=True)
    guard.advance(100.1 + 0.6 * SILENT_S)
    guard.connect(200.0)
    guard.take(message(removed, retained=True), 200.0)
    guard.take(message(claim("b")), 200.1)
    guard.advance(200.2)
    assert not guard.is_alone
    if is_live:
        guard.take(message(removed), 200.2)
    guard.advance(200.0 + 0.5 * SILENT_S)
    assert guard.is_alone != is_live


@pytest.mark.parametrize(
    ("second_claim", "on_this_store"),
    [(claim("a", serves=True), claim("a").holder), (claim("a", fleet="g", serves=True), "")],
)
def test_servers_on_the_same_store_and_of_other_fleets_are_no_copies(
    second_claim: Claim, on_this_store: str
) -> None:
    ends = {on_this_store: 105.0}
    guard = CopyGuard(claim("b"), ends.get)
    guard.connect(100.0)
    guard.take(message(second_claim, retained=True), 100.1)
    guard.take(message(claim("b")), 100.2)
    ends[on_this_store] = 106.7  # renewed
    guard.take(message(second_claim), 101.7)
    guard.advance(101.8)
    assert guard.is_alone
    ends.clear()  # its lease has ended, and something that it said comes late
    heard_twice(guard, second_claim)


def test_a_lease_that_a_copied_store_has_of_before_is_not_believed() -> None:
    """A fresh dump of PostgreSQL has the lease of the server that works on the other store."""
    serving = claim("a", serves=True)
    ends: dict[str, float] = {serving.holder: 104.0}
    guard = CopyGuard(claim("b"), ends.get)
    guard.connect(100.0)
    guard.take(message(serving, retained=True), 100.1)
    guard.take(message(claim("b")), 100.2)
    for now_s in (101.0, 102.7, 104.4):
        guard.take(message(serving), now_s)
        guard.advance(now_s)
        assert not guard.is_alone
    ends.clear()  # it has run out, and this server has ended it
    with pytest.raises(RolloutError, match="has another store"):
        guard.take(message(serving), 106.1)


def test_copies_of_a_fleet_have_its_id_and_other_fleets_have_others(tmp_path: Path) -> None:
    metadata = tmp_path / "a" / "repository" / "metadata"
    metadata.mkdir(parents=True)
    (metadata / "1.root.json").write_text("{}")
    (metadata / "2.root.json").write_text("{}")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "repository" / "metadata" / "2.root.json").write_text("{ }")
    known = fleet_id(tmp_path / "a", "test")
    assert fleet_id(tmp_path / "b", "test") == known
    assert len({known, fleet_id(tmp_path / "a", "other"), fleet_id(tmp_path, "test")}) == 3


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """A server that serves, and one with a copy of its folder that was not started."""
    with closing(Mosquitto(tmp_path)) as broker:
        first = ServerProcess(write_fleet(tmp_path / "fleet", broker.port))
        first.start()
        wait_serves(first)
        shutil.copytree(first.folder, tmp_path / "copy")
        copy = ServerProcess(tmp_path / "copy")
        copy.log_file.write_text("")
        try:
            yield first, copy
        finally:
            for server in (first, copy):
                if server.process is not None:
                    server.kill()


def wait_serves(server: ServerProcess) -> None:
    wait_until(lambda: "no other store" in server.log(), server.log, for_s=2 * LONG_S)


def wait_end(server: ServerProcess) -> None:
    """Wait until a server stops by itself, with an error."""
    assert server.process is not None
    assert server.process.wait(2 * LONG_S) == 1, server.log()
    server.process = None


def test_a_copied_folder_is_refused_while_its_server_works(
    servers: tuple[ServerProcess, ServerProcess],
) -> None:
    first, copy = servers
    copy.start()
    wait_end(copy)
    assert f"with the folder {first.folder}, and has another store" in copy.log()
    assert "no other store" not in copy.log()
    assert first.process is not None
    assert first.process.poll() is None
    first.kill()  # the broker clears what it said
    copy.start()
    wait_serves(copy)


def test_a_restored_backup_takes_the_place_of_a_server_on_purpose(
    servers: tuple[ServerProcess, ServerProcess],
) -> None:
    first, copy = servers
    copy.start("--replace")
    wait_end(first)
    assert f"with the folder {copy.folder} takes this fleet over" in first.log()
    wait_serves(copy)
    first.start()
    wait_end(first)
    assert copy.stop() == 0
