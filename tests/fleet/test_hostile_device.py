"""A stolen device certificate stops nobody's updates, and revoking it ends what it has open."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hostile_device import CONNECTIONS, HostileDevice, unanswered
from mqtt_fixtures import free_port, wait_for_port

from device.protocol.mqtt import LinkDown, LinkUp
from device.protocol.tls import TlsFiles
from toolkit.fleet.authority import SERVER, Authority
from toolkit.fleet.brokers.dynamic_security import disconnect_device
from toolkit.fleet.brokers.mosquitto import BrokerFiles
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.server import answers, chunks
from toolkit.fleet.trust import certificates


class Stand:
    """A fleet's folder, and mosquitto that runs with its files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder / "fleet", free_port()
        make_fleet(self.folder, name="farm", broker=f"127.0.0.1:{self.port}")
        self.authority = Authority(self.folder / "identity")
        self.files = BrokerFiles(self.folder / "broker", self.folder / "identity", self.port)
        binary = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
        assert binary, "mosquitto is missing: apt-get install mosquitto"
        command = [binary, "-c", str(self.files.folder / "mosquitto.conf")]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for_port(self.port, self.process)

    def tls(self, device: str) -> TlsFiles:
        out = self.folder / device
        certificates.issue_device(self.authority, device, out)
        return TlsFiles(out / "ca.crt", out / f"{device}.crt", out / f"{device}.key")


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    new_stand = Stand(tmp_path)
    yield new_stand
    new_stand.process.kill()
    new_stand.process.wait()


def test_who_joins_every_shared_subscription_takes_no_request_away(stand: Stand) -> None:
    with closing(HostileDevice(stand.port, "board-2", stand.tls("board-2"))) as thief:
        assert not unanswered(stand.folder, stand.port, "board-1", stand.tls("board-1"))
        assert thief.stolen() == []
        certificates.revoke_device(stand.authority, "board-2", stand.files)
        server = load_fleet(stand.folder).link_settings("revoke", (), SERVER)
        assert disconnect_device(server, "board-2") == ""
        for _ in range(CONNECTIONS):
            thief.wait(LinkDown)
        time.sleep(3.0)  # they try again
        assert not [event for event in list(thief.events.queue) if isinstance(event, LinkUp)]


def test_the_thief_of_these_tests_would_stop_servers_that_share(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((answers, "TUF_GET_OF_ALL"), (chunks, "BLOB_GET_OF_ALL")):
        monkeypatch.setattr(module, name, f"$share/fleet/{getattr(module, name)}")
    with closing(HostileDevice(stand.port, "board-2", stand.tls("board-2"))):
        assert unanswered(stand.folder, stand.port, "board-1", stand.tls("board-1"))
