"""A fleet from its folder alone: init, the broker with its files, enrolment, a signed release."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from mqtt_fixtures import WAIT_S, AgentBox, free_port, make_bundle, wait_for_port

from device.errors import TrustError
from device.protocol.mqtt import Link, LinkEvent, LinkSettings, Message
from toolkit.cli.main import tandem
from toolkit.errors import FleetError
from toolkit.fleet.folder import broker_address, make_fleet
from toolkit.fleet.identity import CLAIM, SERVER, Authority
from toolkit.fleet.provisioning import Provisioning


def run(*words: str) -> str:
    done = CliRunner().invoke(tandem, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Path]:
    """A fleet made by the command, with its broker."""
    folder, port = tmp_path / "fleet", free_port()
    run("fleet", "init", str(folder), "--broker", f"127.0.0.1:{port}", "--root-keys", "2")
    conf = folder / "broker" / "mosquitto.conf"
    # Started by root it would become another user, who cannot look into this folder.
    conf.write_text(conf.read_text() + "user root\n")
    binary = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
    assert binary, "mosquitto is missing: apt-get install mosquitto"
    process = subprocess.Popen([binary, "-c", conf], stderr=subprocess.DEVNULL)
    wait_for_port(port, process)
    yield folder
    process.kill()
    process.wait()


@pytest.fixture
def enrolling(fleet: Path) -> Iterator[None]:
    """A server that enrols expected devices."""
    service, address = Provisioning(Authority(fleet / "identity")), broker_address(fleet, SERVER)

    def take(event: LinkEvent) -> None:
        if isinstance(event, Message):
            threading.Thread(target=service.on_message, args=(event, link)).start()

    settings = LinkSettings(
        address.host, address.port, "server", service.subscriptions, tls=address.tls
    )
    link = Link(settings, take)
    link.start()
    yield
    link.close()


def test_from_an_empty_folder_to_a_signed_release_on_a_board(
    tmp_path: Path, fleet: Path, enrolling: None
) -> None:
    bundle = make_bundle(tmp_path / "in")
    (tmp_path / "board").mkdir()
    address = broker_address(fleet)
    board = AgentBox(
        tmp_path / "board", address.port, dev=False, ca=tmp_path / "board" / "trust" / "ca.crt"
    )
    shutil.copytree(fleet / "trust", tmp_path / "board" / "trust")
    text = board.config.read_text()
    files = 'tls = {ca = "trust/ca.crt", certificate = "device.crt", key = "device.key"}'
    board.config.write_text(
        "\n".join(files if line.startswith("tls =") else line for line in text.splitlines())
    )
    run("fleet", "identity", "expect", board.device, "--fleet", str(fleet))
    claim = fleet / "identity" / CLAIM
    command = [sys.executable, "-m", "device.agent", "enrol", "--config", str(board.config)]
    keys = ["--claim", f"{claim}.crt", "--claim-key", f"{claim}.key"]
    subprocess.run([*command, *keys], check=True, timeout=60)
    board.start()
    try:
        said = run("deploy", str(bundle), "--device", board.device, "--fleet", str(fleet))
        assert "good 1 is live on board-1" in said
    finally:
        board.close()
    assert "enrolled" in run("fleet", "identity", "list", "--fleet", str(fleet))
    said = run("fleet", "identity", "revoke", board.device, "--fleet", str(fleet), "--json")
    assert '"broker_told":true' in said
    board.start()
    try:
        until = threading.Event()
        for _ in range(int(WAIT_S / 0.1)):
            if "may be revoked" in board.log() or "was revoked" in board.log():
                break
            until.wait(0.1)
        assert "revoked" in board.log()
    finally:
        board.close()


def test_a_fleet_is_made_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "fleet"
    with pytest.raises(TrustError, match="cannot sign"):
        make_fleet(folder, name="f", broker=None, root_keys=1, threshold=2)
    with monkeypatch.context() as patch:
        patch.setattr("toolkit.fleet.folder.init_identity", full_disk)
        with pytest.raises(OSError, match="full"):
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


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "the disk is full")
