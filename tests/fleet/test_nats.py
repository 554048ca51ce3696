"""NATS as the fleet's broker: its files, a real nats-server with them, a rollout over it."""

import queue
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_fixtures import output_of
from fleet_process_fixtures import enrolled, roll_out
from fleet_server_fixtures import ServerProcess
from mqtt_fixtures import free_port, wait_for_port

from device.protocol.mqtt import Link, LinkEvent, LinkSettings, LinkUp, Message, Will
from device.protocol.tls import TlsFiles
from toolkit.errors import FleetError
from toolkit.fleet.authority import OPERATOR, SERVER, Authority
from toolkit.fleet.brokers.mosquitto import BrokerFiles, DeviceAccess
from toolkit.fleet.brokers.nats import write_nats
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.trust import certificates

WAIT_S = 60.0


@contextmanager
def nats(folder: Path, port: int) -> Iterator[None]:
    """Run a nats-server with the files of a fleet."""
    binary = shutil.which("nats-server", path="/usr/sbin:/usr/bin")
    assert binary, "NATS is missing: apt-get install nats-server"
    with (folder / "nats.log").open("wb") as log:
        process = subprocess.Popen([binary, "-c", folder / "nats.conf"], stdout=log, stderr=log)
    try:
        wait_for_port(port, process)
        yield
    finally:
        process.kill()
        process.wait()


@dataclass
class Node:
    """A running nats-server, the folder of its fleet, and devices with certificates."""

    folder: Path
    files: BrokerFiles

    def connect(
        self, stack: ExitStack, client: str, name: str, *topics: str, will: str = ""
    ) -> "Client":
        """A client with the certificate of a name."""
        place = self.folder / ("identity" if name.startswith("fleet.") else name)
        ca = self.folder / "identity" / "ca.crt"
        tls = TlsFiles(ca, place / f"{name}.crt", place / f"{name}.key")
        client_of_test = Client(self.files.port, client, tls, topics, will)
        stack.callback(client_of_test.link.close)
        return client_of_test


class Client:
    """A link with its events."""

    def __init__(
        self, port: int, name: str, tls: TlsFiles, topics: tuple[str, ...], will: str
    ) -> None:
        self.events: queue.Queue[LinkEvent] = queue.Queue()
        settings = LinkSettings(
            "127.0.0.1", port, name, tuple((topic, 1) for topic in topics), tls=tls
        )
        make_will = (lambda _session: Will(will, b"lost")) if will else None
        self.link = Link(settings, self.events.put, make_will)
        self.link.start()

    def wait(self, kind: type) -> LinkEvent:
        until_s = time.monotonic() + WAIT_S
        while True:
            event = self.events.get(timeout=max(0.1, until_s - time.monotonic()))
            if isinstance(event, kind):
                return event


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder, port = tmp_path_factory.mktemp("nats") / "fleet", free_port()
    make_fleet(folder, name="farm", broker=f"nats@127.0.0.1:{port}")
    authority = Authority(folder / "identity")
    for device in ("board-1", "board-2"):
        certificates.issue_device(authority, device, folder / device)
    files = BrokerFiles(folder / "broker", folder / "identity", port, "nats")
    write_nats(files, DeviceAccess(("board-1", "board-2")))
    with nats(files.folder, port):
        yield Node(folder, files)


def test_a_device_keeps_to_its_own_tree_and_its_will_is_said(node: Node) -> None:
    tree = "fleet/v1/board-1"
    with ExitStack() as stack:
        server = node.connect(stack, "server", SERVER, "fleet/v1/+/reported", "fleet/v1/+/state")
        assert server.wait(LinkUp).mqtt_version == "3.1.1"
        assert server.link.publish(f"{tree}/desired", b"do", qos=1, retain=True, wait_s=WAIT_S)
        device = node.connect(
            stack, "tandem-agent-board-1", "board-1", f"{tree}/desired", will=f"{tree}/state"
        )
        device.wait(LinkUp)
        assert device.wait(Message) == Message(f"{tree}/desired", b"do", retained=True)
        device.link.publish("fleet/v1/board-2/reported", b"stolen", qos=1, wait_s=5.0)
        device.link.publish(f"{tree}/reported", b"mine", qos=1, retain=True, wait_s=WAIT_S)
        assert server.wait(Message) == Message(f"{tree}/reported", b"mine")
        device.link._current._client.socket().close()
        assert server.wait(Message) == Message(f"{tree}/state", b"lost")
        late = node.connect(stack, "late", SERVER, "fleet/v1/+/reported")
        assert late.wait(Message) == Message(f"{tree}/reported", b"mine", retained=True)


@pytest.mark.parametrize(
    "topic", ["fleet/v1/board-2/desired", "fleet/v1/#", "#", "$MQTT/sub/#", "$SYS/#", "$JS/#"]
)
def test_a_device_hears_nothing_of_others(node: Node, topic: str) -> None:
    own_topic, second_topic = "fleet/v1/board-1/desired", "fleet/v1/board-2/desired"
    with ExitStack() as stack:
        thief = node.connect(stack, "tandem-board-1-1", "board-1", topic, own_topic)
        server = node.connect(stack, "server", SERVER)
        thief.wait(LinkUp)
        server.wait(LinkUp)
        assert server.link.publish(second_topic, b"secret", qos=1, retain=True, wait_s=WAIT_S)
        assert server.link.publish(own_topic, b"last", qos=1, wait_s=WAIT_S)
        heard = []
        while not heard or heard[-1].payload != b"last":
            heard.append(thief.wait(Message))
        assert {message.topic for message in heard} == {own_topic}


def test_the_operator_does_not_speak_for_a_server(node: Node) -> None:
    forged, mark = "fleet/v1/~server/claim/x", "fleet/v1/board-1/cmd/end/1"
    with ExitStack() as stack:
        server = node.connect(stack, "server", SERVER, forged, mark)
        operator = node.connect(stack, "operator", OPERATOR)
        server.wait(LinkUp)
        operator.wait(LinkUp)
        operator.link.publish(forged, b"forged", qos=1, wait_s=5.0)
        assert operator.link.publish(mark, b"mark", qos=1, wait_s=WAIT_S)
        assert server.wait(Message) == Message(mark, b"mark")


def test_nobody_gets_in_by_the_protocol_of_nats(node: Node) -> None:
    """Users have no password: a name, and even a device's certificate, are not enough there."""
    log = (node.files.folder / "nats.log").read_text()
    port = int(re.findall(r"client connections on 127.0.0.1:(\d+)", log)[0])
    place = node.folder / "board-1"
    context = ssl.create_default_context(cafile=str(node.folder / "identity" / "ca.crt"))
    context.load_cert_chain(place / "board-1.crt", place / "board-1.key")
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as plain:
        assert plain.recv(65536).startswith(b"INFO")
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
            secure.sendall(b'CONNECT {"user": "CN=fleet.server", "pass": ""}\r\nPING\r\n')
            assert b"Authorization Violation" in secure.recv(65536)


def test_a_revoked_device_is_no_user_of_the_next_start(tmp_path: Path) -> None:
    make_fleet(tmp_path / "fleet", name="farm", broker="nats")
    place = ["--fleet", str(tmp_path / "fleet")]
    users = tmp_path / "fleet" / "broker" / "users.conf"
    issue = ["fleet", "identity", "issue", "board-1", "-o", str(tmp_path / "board"), *place]
    assert "start nats-server again" in output_of(*issue)
    assert '"CN=board-1"' in users.read_text()
    text = output_of("fleet", "identity", "revoke", "board-1", *place)
    assert (
        text.count("start nats-server again") == 2
    )  # for new connections, and for those there are
    assert '"CN=board-1"' not in users.read_text()
    settings = LinkSettings("127.0.0.1", 1, "s")
    files = BrokerFiles(users.parent, tmp_path / "fleet" / "identity", 1, "nats")
    with pytest.raises(FleetError, match="give the board another id"):
        certificates.readmit(Authority(files.identity), ["board-1"], files, settings)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_signed_releases_roll_out_to_real_agents_over_nats(tmp_path: Path) -> None:
    """The boards enrol over NATS; one is away while its first document is sent. Then NATS is killed
    and started again, with one more user."""
    fleet, port = tmp_path / "fleet", free_port()
    output_of("fleet", "init", str(fleet), "--broker", f"nats@127.0.0.1:{port}")
    names = [f"board-{number}" for number in range(2)]
    output_of("fleet", "identity", "expect", *names, "--fleet", str(fleet))
    with ExitStack() as stack:
        with nats(fleet / "broker", port):
            server = ServerProcess(fleet)
            server.start()
            stack.callback(server.kill)
            boards = [enrolled(tmp_path, fleet, number, port) for number in range(2)]
            for board in boards:
                board.start()
                stack.callback(board.close)
            roll_out(tmp_path, fleet, server, "1", late=boards[1])
            output_of("fleet", "identity", "expect", "board-9", "--fleet", str(fleet))
        stack.enter_context(nats(fleet / "broker", port))
        roll_out(tmp_path, fleet, server, "2")
