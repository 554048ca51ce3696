"""A farm over a real broker: simulated boards, and real agents that measure for a build."""

import json
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from click.testing import CliRunner
from fleet_server_fixtures import ServerProcess, wait_until, write_fleet
from model_fixtures import small_convnet
from mqtt_fixtures import AgentBox, Mosquitto

from device.protocol.documents import BlobSpec
from device.protocol.mqtt import Link
from device.selftest.report import read_report
from scripts.farm_boards import PROFILE, FarmBoard, farm_fleet, mosquitto, simulated, works
from toolkit.board_kit.make import KitRequest, make_kit
from toolkit.board_kit.own_model import own_model
from toolkit.cli.commands.build import build
from toolkit.cli.commands.fleet import fleet as fleet_command
from toolkit.errors import FleetError
from toolkit.fleet.farm.run import Run, boards_for
from toolkit.fleet.farm.values import Joined, Lost, Rules
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.store.lease import lease_board, release_board
from toolkit.fleet.store.log import rows_after

ITEMS = {f"part-{n}": {f"t{n}a": 10.0 * (n + 1), f"t{n}b": 7.0} for n in range(4)}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with mosquitto(tmp_path_factory.mktemp("broker")) as port:
        yield port


def test_boards_that_lie_die_or_answer_another_job_do_not_spoil_the_table(
    tmp_path: Path, broker: int
) -> None:
    boards = {f"b{n}": FarmBoard() for n in range(7)}
    boards["b1"].factor = 3.0
    boards["b2"].dies_at, boards["b2"].is_told = 1, True
    boards["b3"].says = "ab" * 32
    fleet = farm_fleet(tmp_path / "fleet", broker, list(boards))
    kit = tmp_path / "kit"
    kit.write_bytes(b"kit")
    with closing(fleet.open_store()) as database, simulated(broker, boards, ITEMS):
        chosen = [one.device for one in boards_for(database, f"profile={PROFILE}")]
        assert chosen == sorted(boards)
        lease_board(database, "b6", "another run", 1000.0)  # which keeps it
        rules = Rules(lease_s=600.0)
        run = Run(fleet, database, kit, works(ITEMS), minutes=1, who="me", rules=rules)
        chosen.remove("b6")
        table = run.measure(chosen)
        assert set(table.verdicts.values()) == {"agreed"}
        assert table.boards == ("b0", "b4", "b5")
        assert table.liars == {"b1": pytest.approx(3.0, rel=0.1)}
        assert table.out == {
            "b2": "its agent is lost",
            "b3": "it answered with the result of another job",
        }
        for item in ITEMS.values():
            for key, us in item.items():
                assert table.times[key] == pytest.approx(us, rel=table.error)
        # All leases but that of the other run are given back, and every job is in the audit log.
        assert database.rows("SELECT board FROM board_leases") == [("b6",)]
        jobs = [row for row in rows_after(database, 0) if '"op":"job"' in row.body]
        assert len(jobs) == sum(board.taken for board in boards.values())


def test_a_job_that_fails_on_every_board_is_given_up_and_the_boards_go_on(
    tmp_path: Path, broker: int
) -> None:
    boards = {f"f{n}": FarmBoard(fails=("part-2",)) for n in range(4)}
    boards["f0"].refuses = True
    fleet = farm_fleet(tmp_path / "fleet", broker, list(boards))
    kit = tmp_path / "kit"
    kit.write_bytes(b"kit")
    with closing(fleet.open_store()) as database, simulated(broker, boards, ITEMS):
        run = Run(fleet, database, kit, works(ITEMS), minutes=1, who="me")
        table = run.measure(sorted(boards))
    assert table.out == {"f0": "its pipeline is running"}
    assert table.boards == ("f1", "f2", "f3")
    assert table.reasons["part-2"].startswith("it failed on 3 boards; ")
    assert {name for name, one in table.verdicts.items() if one == "agreed"} == {
        "part-0", "part-1", "part-3",
    }  # fmt: skip


def test_boards_that_another_run_has_are_passed_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them costs a call within the call of the one before."""
    boards = [f"b{n:02}" for n in range(20)]
    fleet = farm_fleet(tmp_path / "fleet", 1, boards)
    depths: list[int] = []

    def refuse(*_: object) -> bool:
        depths.append(len(traceback.extract_stack()))
        return False

    link = cast(Link, SimpleNamespace(publish=lambda *_, **__: True))
    spec = BlobSpec(sha256="a" * 64, bytes=1, chunk_bytes=4096, index_sha256="b" * 64)
    with closing(fleet.open_store()) as database:
        rules = Rules(repeats=1)
        one = works({"part-0": ITEMS["part-0"]})
        run = Run(fleet, database, tmp_path, one, minutes=1, who="me", rules=rules)
        for board in boards:
            run._step(link, spec, Joined(board))
        monkeypatch.setattr("toolkit.fleet.farm.run.lease_board", refuse)
        run._step(link, spec, Lost("b00", "its agent is lost"))
    assert len(depths) == len(boards) - 1
    assert len(set(depths)) == 1


def test_a_board_is_leased_to_one_run_at_a_time(tmp_path: Path) -> None:
    with closing(load_fleet(write_fleet(tmp_path, 1)).open_store()) as database:
        assert lease_board(database, "b", "one", 1000.0)
        assert lease_board(database, "b", "one", 1000.0)
        assert not lease_board(database, "b", "two", 1000.0)
        release_board(database, "b", "two")  # not its own
        assert not lease_board(database, "b", "two", 1000.0)
        release_board(database, "b", "one")
        assert lease_board(database, "b", "two", -1.0)
        assert lease_board(database, "b", "one", 1000.0)  # a lease that has run out


def test_without_a_board_that_fits_it_is_said_why(tmp_path: Path) -> None:
    fleet = farm_fleet(tmp_path / "fleet", 1, ["b0"])
    with closing(fleet.open_store()) as database:
        with pytest.raises(FleetError, match="for 'profile=agx-orin-64gb': none fulfils it"):
            boards_for(database, "profile=agx-orin-64gb")
        with database.write():
            database.run("UPDATE devices SET agent = 'lost'")
        with pytest.raises(FleetError, match="1 that fulfil it are not online"):
            boards_for(database, "")


@pytest.mark.slow
def test_a_build_measures_on_real_agents_and_says_where(tmp_path: Path) -> None:
    """Three agents; the kit comes over MQTT, and each runs the selftest of one network."""
    broker = Mosquitto(tmp_path)
    fleet = write_fleet(tmp_path / "fleet", broker.port)
    server = ServerProcess(fleet)
    server.start()
    boxes = []
    for number in range(3):
        folder = tmp_path / f"board-{number}"
        folder.mkdir()
        boxes.append(AgentBox(folder, broker.port, device=f"board-{number}", profile="laptop"))
        with boxes[-1].config.open("a") as file:
            file.write('[labels]\nfarm = "yes"\n')
        boxes[-1].start()
    model = small_convnet(tmp_path / "m.onnx", np.random.default_rng(5))

    def online() -> bool:
        with closing(load_fleet(fleet).open_store()) as database:
            try:
                return len(boards_for(database, "")) == len(boxes)
            except FleetError:
                return False

    try:
        wait_until(online, lambda: (server.log(), [box.log() for box in boxes]))
        words = [
            str(model),
            "--profile",
            "laptop",
            "--measure-on",
            "fleet:profile=laptop",
            "--json",
        ]
        done = CliRunner().invoke(
            build, words, env={"TANDEM_FLEET": str(fleet)}, catch_exceptions=False
        )
        assert done.exit_code == 0, (done.output, [box.log() for box in boxes])
        notes = "\n".join(json.loads(done.stdout)["notes"])
        assert "measured on board-0, board-1, board-2 of the farm" in notes, notes
        assert "m-fp32-gpu: " in notes
        assert (tmp_path / "m.engine").exists()
        request = KitRequest(
            "laptop", networks=[own_model(model)], precisions=("fp32",), demo=False
        )
        make_kit(tmp_path / "kit", request, lambda _: None)
        words = ["farm", str(tmp_path / "kit"), "-o", str(tmp_path / "reports"), "--json"]
        done = CliRunner().invoke(
            fleet_command, words, env={"TANDEM_FLEET": str(fleet)}, catch_exceptions=False
        )
        assert done.exit_code == 0, (done.output, [box.log() for box in boxes])
        path = tmp_path / "reports" / "networks.tandem-report"
        assert list(json.loads(done.stdout)["reports"]) == [str(path)]
        (network,) = read_report(path).report.networks
        assert (network.item, network.problem) == ("m-fp32-gpu", "")
    finally:
        for box in boxes:
            box.close()
        server.stop()
        broker.close()
