"""Signed releases end to end: a real broker, a real agent without `dev`, and its checks."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from deploy_fixtures import deploy
from mqtt_fixtures import DEVICE, WAIT_S, AgentBox, Mosquitto, make_bundle

from toolkit.cli.main import tandem
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.transports.deploy import DeployOptions
from toolkit.fleet.transports.device_deployment import DeployResult
from toolkit.fleet.trust.repository import FleetRepository, make_repository


@pytest.fixture
def fleet(tmp_path: Path, broker: Mosquitto) -> FleetRepository:
    folder, address = tmp_path / "fleet", f"127.0.0.1:{broker.port}"
    make_fleet(folder, name="robots", broker=address, root_keys=2, threshold=2)
    settings = folder / "fleet.toml"  # this broker has another CA
    settings.write_text(settings.read_text().replace("tls = true", "tls = false"))
    return FleetRepository(folder)


@pytest.fixture
def board(tmp_path: Path, broker: Mosquitto, fleet: FleetRepository) -> Iterator[AgentBox]:
    shutil.copytree(fleet.trust, tmp_path / "trust")
    box = AgentBox(tmp_path, broker.tls_port, dev=False, ca=broker.ca)
    box.start()
    yield box
    box.close()


def deploy_signed(broker: Mosquitto, bundle: Path, fleet: Path | None) -> DeployResult:
    return deploy(broker.port, bundle, DeployOptions(2 * WAIT_S, fleet=fleet))


def test_a_board_takes_signed_releases_follows_new_keys_and_refuses_the_rest(
    tmp_path: Path, broker: Mosquitto, fleet: FleetRepository, board: AgentBox
) -> None:
    first, second, third = (make_bundle(tmp_path / "in", version=text) for text in "123")
    assert deploy_signed(broker, first, fleet.fleet).live
    for role in ("timestamp", "director", "root"):
        fleet.rotate(role)
    assert deploy_signed(broker, second, fleet.fleet).live
    unsigned = deploy_signed(broker, third, None)
    assert (unsigned.phase, unsigned.sent_bytes) == ("refused", 0)
    assert "the release is not signed" in unsigned.reason
    stranger = make_repository(tmp_path / "stranger")
    foreign = deploy_signed(broker, third, stranger.fleet)
    assert (foreign.phase, foreign.sent_bytes) == ("refused", 0)
    assert "is not signed by enough of the keys that root trusts" in foreign.reason
    words = ("deploy", str(first), "--device", DEVICE, "--fleet", str(fleet.fleet), "--json")
    done = CliRunner().invoke(tandem, words)  # from the other slot
    assert done.exit_code == 0, done.output
    back = json.loads(done.stdout)
    assert (back["phase"], back["sent_bytes"]) == ("live", 0)
    assert [name for name, _pid in board.runs()] == ["good"] * 3


def test_deploy_asks_for_a_broker_or_a_fleet(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "in", engine_bytes=3000)
    done = CliRunner().invoke(tandem, ("deploy", str(bundle), "--device", DEVICE))
    assert done.exit_code == 2
    assert "name the broker with --broker, or a fleet with --fleet" in done.output
