"""Releases of the agent roll out: a real mosquitto, the real server, agents that start again."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from fleet_process_fixtures import Fleet
from self_update_fixtures import DIES, Board, packed, real_bundle
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
def test_agents_are_updated_and_one_that_is_broken_goes_back_and_is_reported(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wheel = tandem_wheel(tmp_path_factory)
    fleet = Fleet(tmp_path, 0)
    boards = [
        Board(tmp_path / name, fleet.broker.port, device=name) for name in ("board-0", "board-1")
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(fleet.close)
        fleet.boards = boards  # type: ignore[assignment]
        fleet.start()
        for version in ("1.1", "1.2"):
            bundle = real_bundle(tmp_path, wheel, version)
            fleet.run("rollout", "start", "--agent", str(bundle), "--groups", "board-0,rest")
            fleet.wait_status(1 if version == "1.1" else 2, "finished", for_s=600.0)
            assert running(fleet) == [version, version]

        broken = packed(tmp_path, "2.0", DIES)
        fleet.run("rollout", "start", "--agent", str(broken), "--groups", "board-0,rest")
        view = fleet.wait_status(3, "paused", for_s=600.0)
        (failure,) = view["failures"]
        assert (failure["device"], failure["phase"]) == ("board-0", "failed")
        assert "it ended, or did not bring back what ran before" in failure["reason"]
        assert running(fleet) == ["1.2", "1.2"]
        versions = show(fleet, "board-0")["versions"]
        assert versions["failed"].startswith("2.0-")
        assert "did not bring back" in versions["reason"]
        assert "did not bring back" in fleet.run("device", "show", "board-0")
        assert show(fleet, "board-1")["versions"]["failed"] == ""
        assert [name[:3] for name in boards[0].environments()] == ["1.1", "1.2"]

        fleet.run("rollback", "3")  # board-0 has left it by itself
        fleet.wait_status(3, "rolled_back")
        third = real_bundle(tmp_path, wheel, "1.3")
        fleet.run("rollout", "start", "--agent", str(third))
        fleet.wait_status(4, "finished", for_s=600.0)
        fleet.run("rollback")
        fleet.wait_status(4, "rolled_back", for_s=600.0)
        assert running(fleet) == ["1.2", "1.2"]


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
