"""Rollouts end to end: a real mosquitto, the real server, real agents, all as processes."""

import contextlib
import json
import os
import random
import re
import shlex
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from fleet_process_fixtures import Fleet
from fleet_server_fixtures import ServerProcess, wait_until, write_fleet
from mqtt_fixtures import Watcher, make_bundle
from postgresql_fixtures import postgresql

from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.rollout.rates import default_rate
from toolkit.fleet.store import log, rollouts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, 3)
    yield fleet
    fleet.close()


def phases(fleet: Fleet, number: int) -> dict[str, str]:
    return {row["id"]: row["phase"] for row in fleet.json("devices", "--rollout", str(number))}


def test_releases_roll_out_stop_and_go_back_through_kills(fleet: Fleet) -> None:
    fleet.start()
    good, newer = (make_bundle(fleet.folder / "in", version=version) for version in ("1", "3"))
    bad = make_bundle(fleet.folder / "in", "fails", version="2")
    fleet.run("device", "label", "board-1", "group=canary")

    fleet.run("rollout", "start", "--bundle", str(good), "--groups", "canary,rest")
    wait_until(lambda: "board-1" in phases(fleet, 1), fleet.server.log)
    fleet.server.kill()  # in the middle: what was decided is kept
    fleet.server.start()
    view = fleet.wait_status(1, "finished")
    assert [group["phases"] for group in view["groups"]] == [{"live": 1}, {"live": 2}]

    fleet.run("rollout", "start", "--bundle", str(bad), "--groups", "canary,rest")
    view = fleet.wait_status(2, "paused")
    (failure,) = view["failures"]
    assert (failure["device"], failure["phase"]) == ("board-1", "failed")
    assert "camera /dev/video9 does not exist" in failure["reason"]
    assert phases(fleet, 2) == {"board-0": "pending", "board-1": "failed", "board-2": "pending"}
    running = {row["id"]: row["running"]["name"] for row in fleet.json("devices")}
    assert set(running.values()) == {"good"}  # the board went back by itself

    fleet.server.kill()
    fleet.run("rollback", "2")  # it waits in the store for a server
    fleet.server.start()
    view = fleet.wait_status(2, "rolled_back")
    assert {"undone", "skipped"} == {phase for g in view["groups"] for phase in g["phases"]}

    fleet.run("rollout", "start", "--bundle", str(newer))
    fleet.wait_status(3, "finished")
    with Watcher(fleet.broker.port, "board-0") as watcher:
        fleet.run("rollback")
        fleet.wait_status(3, "rolled_back")
        assert watcher.drain().requests == []  # from the other slot: no byte is sent again
    assert {row["running"]["version"] for row in fleet.json("devices")} == {"1"}
    assert fleet.json("audit", "verify")["rows"] > 10
    history = fleet.run("logs", "board-1")
    assert "rollout 1  runs the release" in history
    assert "rollout 2  does not run the release: camera" in history
    assert "rollout 3  runs the release before again" in history


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_second_server_takes_over_when_the_first_is_killed(fleet: Fleet, kind: str) -> None:
    """In SQLite it stands by, in PostgreSQL both have devices."""
    with contextlib.ExitStack() as stack:
        if kind == "postgresql":
            write_fleet(fleet.fleet, fleet.broker.port, stack.enter_context(postgresql()))
        fleet.start()
        second = ServerProcess(fleet.fleet)
        second.log_file = fleet.folder / "second.log"
        second.start()
        stack.callback(second.kill)
        if kind == "sqlite":
            wait_until(lambda: "stands by" in second.log(), second.log)
        else:
            wait_until(lambda: "shares the fleet with 1 other" in fleet.server.log(), second.log)
        bundle = make_bundle(fleet.folder / "in")
        fleet.run("rollout", "start", "--bundle", str(bundle), "--rate", "300/min")
        wait_until(lambda: "live" in phases(fleet, 1).values(), fleet.server.log)
        fleet.broker.kill()  # without persistence: all that it retained is lost
        fleet.broker.start()
        fleet.server.kill()
        view = fleet.wait_status(1, "finished")
        assert view["live"] == 3
        sent = [row for row in fleet.run("logs", "board-0").splitlines() if "is sent" in row]
        assert len(sent) == 1


def test_the_commands_of_the_page_on_fleets_run(tmp_path: Path) -> None:
    text = "".join((ROOT / "docs" / name).read_text() for name in ("fleet.md", "fleet_audit.md"))
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    fleet = Fleet(tmp_path, 3)
    bundles = {
        "robot.bundle": make_bundle(tmp_path / "in", version="1"),
        "robot-2.bundle": make_bundle(tmp_path / "in", version="2"),
    }
    try:
        fleet.start()
        lines = [line for block in blocks for line in block.splitlines()]
        assert lines.pop(0) == "export TANDEM_FLEET=fleet"
        outputs = []
        for line in lines:
            tandem, group, *words = shlex.split(line)
            assert (tandem, group) == ("tandem", "fleet")
            outputs.append(fleet.run(*(str(bundles.get(word, word)) for word in words)))
    finally:
        fleet.close()
    assert "rollout 1: good 1 is finished" in "".join(outputs)
    assert "rollout 2: good 2 is rolled back" in "".join(outputs)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_a_rollout_waits_for_holds_on_a_real_server(fleet: Fleet) -> None:
    """A start, a saved query, a soak, the default rate, a window, and who left the fleet."""
    fleet.start()
    first, second = (make_bundle(fleet.folder / "in", version=version) for version in ("1", "2"))
    fleet.run("device", "label", "board-1", "site=lab")
    fleet.run("query", "set", "lab", "label.site=lab")
    assert [row["id"] for row in fleet.json("devices", "--where", "@lab")] == ["board-1"]

    start = datetime.now(timezone.utc) + timedelta(seconds=20)
    fleet.run("rollout", "start", "--bundle", str(first), "--groups", "@lab,rest", "--soak", "15s",
        "--start-at", start.isoformat())  # fmt: skip
    view = fleet.json("rollout", "status", "1")
    assert view["start"] == start.strftime("%Y-%m-%dT%H:%M:%SZ")
    while datetime.now(timezone.utc) < start - timedelta(seconds=3):
        assert fleet.json("rollout", "status", "1")["status"] in ("running", "scheduled")
        assert set(phases(fleet, 1).values()) <= {"pending"}
        time.sleep(1.0)
    reasons = []

    def is_finished() -> bool:
        view = fleet.json("rollout", "status", "1")
        reasons.append(view["reason"])
        return bool(view["status"] == "finished")

    wait_until(is_finished, fleet.server.log, for_s=600.0)
    assert any("the group @lab has passed and is watched until" in reason for reason in reasons)
    with contextlib.closing(load_fleet(fleet.fleet).open_store()) as store:
        spec = rollouts.load_spec(store, 1)
        assert spec is not None
        assert spec.rate == default_rate(first.stat().st_size)
        sent = [row for row in log.rows_after(store, 0) if row.kind == "desired"]
    assert json.loads(sent[0].body)["device"] == "board-1"
    assert sent[0].at_s >= start.timestamp()
    assert sent[1].at_s - sent[0].at_s >= 15.0  # the group is watched after it is live

    away = datetime.now() + timedelta(hours=3)
    window = f"{away:%H:%M}-{away + timedelta(hours=1):%H:%M}"
    fleet.run("rollout", "start", "--bundle", str(second), "--window", window)
    assert fleet.json("rollout", "status", "2")["window"] == window
    assert window in fleet.run("rollout", "status", "2")
    wait_until(lambda: set(phases(fleet, 2).values()) == {"sent"}, fleet.server.log)
    time.sleep(10.0)
    assert {row["running"]["version"] for row in fleet.json("devices")} == {"1"}

    fleet.boards[2].kill()
    fleet.run("device", "decommission", "board-2")
    assert [row["id"] for row in fleet.json("devices")] == ["board-0", "board-1"]
    wait_until(lambda: phases(fleet, 2).keys() == {"board-0", "board-1"}, lambda: phases(fleet, 2))
    time.sleep(3.0)  # its will and what the broker has retained do not bring it back
    assert len(fleet.json("devices")) == 2
    fleet.boards[2].start()
    wait_until(lambda: len(fleet.json("devices")) == 3, fleet.server.log)


def agents_that_fit() -> int:
    """200 agents with their pipelines (30 MB each), or as many as half of the memory takes."""
    if requests := os.environ.get("TANDEM_TEST_AGENTS"):
        return int(requests)
    return min(200, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (60 * 1024**2))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_agents_of_which_some_are_killed_and_some_get_a_bad_model(tmp_path: Path) -> None:
    count = agents_that_fit()
    killed, unlucky = max(1, count // 20), max(1, count // 40)
    fleet = Fleet(tmp_path, count, trial_timeout_s=300.0)
    good = make_bundle(tmp_path / "in", version="1")
    bad = make_bundle(tmp_path / "in", "fails", version="2")
    chance = random.Random(7)
    try:
        fleet.start()
        fleet.run("rollout", "start", "--bundle", str(good), "--groups", "10%,rest",
            "--timeout", "120")  # fmt: skip
        wait_until(lambda: "live" in phases(fleet, 1).values(), fleet.server.log, for_s=1800.0)
        victims = chance.sample(fleet.boards, killed)
        for board in victims:
            board.kill()
        view = fleet.wait_status(1, "finished", for_s=1800.0)
        assert view["live"] >= count - killed
        assert all(row["phase"] == "timed_out" for row in view["failures"])

        alive = [board for board in fleet.boards if board.process is not None]
        for board in alive[:unlucky]:
            fleet.run("device", "label", board.device, "group=unlucky")
        fleet.run("rollout", "start", "--bundle", str(bad), "--groups", "unlucky,rest")
        view = fleet.wait_status(2, "paused", for_s=1800.0)
        # It pauses at the first that fail; the others of the group have begun.
        wait_until(
            lambda: set(phases(fleet, 2).values()) <= {"failed", "pending"},
            fleet.server.log,
            for_s=1800.0,
        )
        assert view["groups"][1]["phases"] == {"pending": count - unlucky}
        running = {row["id"]: row["running"] for row in fleet.json("devices")}
        assert {running[board.device]["name"] for board in alive} == {"good"}
    finally:
        fleet.close()
