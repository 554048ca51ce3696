"""Releases of the agent roll out: a real mosquitto, the real server, agents that start again."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from fleet_process_fixtures import Fleet, SignedFleet
from self_update_fixtures import DIES, SIGNED, SelfUpdateBoard, packed, real_bundle
from wheel_fixtures import agent_wheel, tandem_wheel

from toolkit.errors import RolloutError
from toolkit.fleet.bundles.agent import pack_agent


def running(fleet: Fleet) -> list[str]:
    """The version of each agent, without the hash."""
    return [row["versions"]["running"].partition("-")[0] for row in fleet.json("devices")]


def show(fleet: Fleet, device: str) -> Any:
    return fleet.json("device", "show", device)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_signed_agents_are_updated_and_one_that_is_broken_goes_back_and_is_reported(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wheel = tandem_wheel(tmp_path_factory)
    fleet = SignedFleet(tmp_path, 2)
    boards = [
        SelfUpdateBoard(tmp_path / name, fleet.broker.port) for name in ("board-0", "board-1")
    ]

    def roll_out(bundle: Path, number: int, status: str) -> Any:
        fleet.run("rollout", "start", "--agent", str(bundle), "--groups", "board-0,rest")
        return fleet.wait_status(number, status, for_s=600.0)

    with contextlib.ExitStack() as stack:
        stack.callback(fleet.close)
        fleet.boards = boards  # type: ignore[assignment]
        fleet.start()
        roll_out(real_bundle(tmp_path, wheel, "1.1", SIGNED), 1, "finished")
        assert running(fleet) == ["1.1", "1.1"]
        assert not (boards[0].state_dir / "agent-download").exists()

        (failure,) = roll_out(packed(tmp_path, "2.0", DIES, SIGNED), 2, "paused")["failures"]
        assert (failure["device"], failure["phase"]) == ("board-0", "failed")
        assert "it ended, or did not bring back what ran before" in failure["reason"]
        assert running(fleet) == ["1.1", "1.1"]
        versions = show(fleet, "board-0")["versions"]
        assert versions["failed"].startswith("2.0-")
        assert "did not bring back" in versions["reason"]
        assert "did not bring back" in fleet.run("device", "show", "board-0")
        assert show(fleet, "board-1")["versions"]["failed"] == ""
        assert [name[:3] for name in boards[0].environments()] == ["1.1"]

        fleet.run("rollback", "2")  # board-0 has left it by itself
        fleet.wait_status(2, "rolled_back")
        roll_out(real_bundle(tmp_path, wheel, "1.2", SIGNED), 3, "finished")
        assert running(fleet) == ["1.2", "1.2"]
        fleet.run("rollback")
        fleet.wait_status(3, "rolled_back", for_s=600.0)
        assert running(fleet) == ["1.1", "1.1"]


def test_a_release_that_fits_no_board_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1)
    try:
        fleet.start()
        bundle = tmp_path / "l4t.bundle"
        pack_agent(bundle, agent_wheel(tmp_path / "wheels", "2.0"), "", min_l4t="99.1")
        with pytest.raises(RolloutError, match=r"board-0: it needs L4T 99\.1 or newer, this board"):
            fleet.run("rollout", "start", "--agent", str(bundle))
        with pytest.raises(RolloutError, match="name it by --agent"):
            fleet.run("rollout", "start", "--bundle", str(bundle))
        with pytest.raises(RolloutError, match="either --bundle FILE or --agent FILE"):
            fleet.run("rollout", "start")
        assert fleet.json("rollout", "status") == []
    finally:
        fleet.close()
