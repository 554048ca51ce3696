"""A fleet from its folder alone: init, the broker with its files, enrolment, a signed release."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_fixtures import output_of
from fleet_server_fixtures import ServerProcess, wait_until
from mqtt_fixtures import AgentBox, free_port, make_bundle, wait_for_port

from device.errors import TrustError
from device.update.bundle import verify_folder
from toolkit.errors import FleetError
from toolkit.fleet.authority import CLAIM
from toolkit.fleet.folder import broker_address, load_settings, make_fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Path]:
    """A fleet made by the command, with its broker."""
    folder, port = tmp_path / "fleet", free_port()
    output_of("fleet", "init", str(folder), "--broker", f"127.0.0.1:{port}", "--root-keys", "2")
    conf = folder / "broker" / "mosquitto.conf"
    binary = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
    assert binary, "mosquitto is missing: apt-get install mosquitto"
    process = subprocess.Popen([binary, "-c", conf], stderr=subprocess.DEVNULL)
    wait_for_port(port, process)
    yield folder
    process.kill()
    process.wait()


@pytest.fixture
def server(fleet: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(fleet)
    process.start()
    yield process
    if process.process is not None:
        process.stop()


@pytest.fixture
def board(tmp_path: Path, fleet: Path, server: ServerProcess) -> Iterator[AgentBox]:
    """A board that has enrolled itself with the claim certificate, and takes signed releases."""
    folder = tmp_path / "board"
    folder.mkdir()
    box = AgentBox(folder, broker_address(fleet).port, dev=False, ca=folder / "unused")
    shutil.copytree(fleet / "trust", folder / "trust")
    files = 'tls = {ca = "trust/ca.crt", certificate = "device.crt", key = "device.key"}'
    lines = box.config.read_text().splitlines()
    box.config.write_text("\n".join(files if "tls =" in line else line for line in lines))
    output_of("fleet", "identity", "expect", box.device, "--fleet", str(fleet))
    claim = fleet / "identity" / CLAIM
    command = [sys.executable, "-m", "device.agent", "enrol", "--config", str(box.config)]
    keys = ["--claim", f"{claim}.crt", "--claim-key", f"{claim}.key"]
    subprocess.run([*command, *keys], check=True, timeout=60)
    box.start()
    yield box
    box.close()


def roll_out(fleet: Path, bundle: Path) -> None:
    """Roll a bundle out to all devices and wait until it is everywhere."""
    options = ["--groups", "50%,rest", "--fleet", str(fleet)]
    output_of("fleet", "rollout", "start", "--bundle", str(bundle), *options)
    status = ["fleet", "rollout", "status", "--fleet", str(fleet), "--json"]
    wait_until(
        lambda: {row["status"] for row in json.loads(output_of(*status))} == {"finished"},
        lambda: output_of(*status),
    )


def test_from_an_empty_folder_to_signed_rollouts_and_back(
    tmp_path: Path, fleet: Path, server: ServerProcess, board: AgentBox
) -> None:
    devices = ["fleet", "devices", "--fleet", str(fleet), "--json"]
    wait_until(lambda: "test-board" in output_of(*devices), server.log)  # it has reported
    for version in ("1", "2"):
        roll_out(fleet, make_bundle(tmp_path / "in", version=version))
    assert verify_folder(board.state_dir / "slots" / "b").version == "2"
    output = output_of("fleet", "rollback", "--fleet", str(fleet))
    wait_until(lambda: len(board.runs()) == 3, lambda: (output, board.log()))
    assert "enrolled" in output_of("fleet", "identity", "list", "--fleet", str(fleet))


def test_a_signed_release_goes_to_one_board_without_a_server(
    tmp_path: Path, fleet: Path, server: ServerProcess, board: AgentBox
) -> None:
    server.stop()
    bundle = make_bundle(tmp_path / "in")
    output = output_of("deploy", str(bundle), "--device", board.device, "--fleet", str(fleet))
    assert "good 1 is live on board-1" in output
    board.terminate()
    output = output_of("fleet", "identity", "revoke", board.device, "--fleet", str(fleet), "--json")
    assert '"broker_told":true,"connections_ended":true' in output
    board.start()
    wait_until(lambda: "revoked" in board.log(), board.log)


def test_a_fleet_is_made_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "fleet"
    with pytest.raises(TrustError, match="cannot sign"):
        make_fleet(folder, name="f", broker=None, root_keys=1, threshold=2)
    with monkeypatch.context() as patch:
        patch.setattr("toolkit.fleet.folder.init_identity", full_disk)
        with pytest.raises(FleetError, match="full"):
            make_fleet(folder, name="f", broker=None)
    assert list(tmp_path.iterdir()) == []
    make_fleet(folder, name="f", broker=None)
    with pytest.raises(TrustError, match="holds a fleet already"):
        make_fleet(folder, name="f", broker=None)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(FleetError, match="is not empty"):
        make_fleet(tmp_path / "other", name="f", broker=None)
    private = [path for path in folder.rglob("*") if path.suffix in {".key", ".pem"}]
    modes = {path.stat().st_mode & 0o77 for path in private if path.name != "crl.pem"}
    assert modes == {0}


@pytest.mark.parametrize(
    ("name", "host", "sentence"),
    [
        ("n" * 64, "h" * 70, ""),
        ("n", "b\u00fccher.example", "neither an address nor a name"),
        ("n", 'a"b', "neither an address nor a name"),
        ("n", "a b", "neither an address nor a name"),
    ],
)
def test_names_of_a_broker_are_those_of_hosts(
    tmp_path: Path, name: str, host: str, sentence: str
) -> None:
    folder, broker = tmp_path / "fleet", f"{host}:8883"
    if not sentence:
        make_fleet(folder, name=name, broker=broker)
        assert load_settings(folder).broker.host == host
        return
    with pytest.raises(FleetError, match=sentence):
        make_fleet(folder, name=name, broker=broker)
    with pytest.raises(FleetError, match=sentence):
        make_fleet(folder, name=name, broker=None, hosts=[host])
    assert not folder.exists()


def test_the_folder_that_one_is_in_cannot_be_replaced_by_a_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FleetError, match="that you are in"):
        make_fleet(Path("."), name="n", broker=None)


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "the disk is full")
