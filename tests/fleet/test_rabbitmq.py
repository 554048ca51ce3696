"""RabbitMQ as the fleet's broker: its files, a real node with them, a cluster that loses a node."""

import json
import queue
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_fixtures import output_of
from click.testing import CliRunner
from fleet_process_fixtures import enrolled, roll_out
from fleet_server_fixtures import ServerProcess
from hostile_device import CONNECTIONS, HostileDevice, unanswered
from mqtt_fixtures import AgentBox, free_port
from rabbitmq_fixtures import Balancer, RabbitNode, port_mapper

from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkSettings, LinkUp, Message
from device.protocol.tls import TlsFiles
from toolkit.cli.main import tandem
from toolkit.errors import FleetError
from toolkit.fleet.authority import CLAIM, OPERATOR, SERVER, Authority, read_certificate
from toolkit.fleet.brokers.mosquitto import DEVICE_RIGHTS, BrokerFiles, DeviceAccess
from toolkit.fleet.brokers.rabbitmq import definitions, subject_hash, write_rabbitmq
from toolkit.fleet.folder import load_settings, make_fleet
from toolkit.fleet.trust import certificates

WAIT_S = 60.0


def topic_rights(name: str, roster: DeviceAccess) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What RabbitMQ makes of the patterns of a user: (read, write)."""
    rows = json.loads(definitions(roster))["topic_permissions"]
    (row,) = [row for row in rows if row["user"] == name]
    read, write = (row[right].replace("{username}", name) for right in ("read", "write"))
    return re.compile(read), re.compile(write)


def routing_key(topic: str) -> str:
    return topic.replace("/", ".").replace("+", "*")


def test_a_device_has_the_rights_of_mosquitto_s_list_and_no_others() -> None:
    read, write = topic_rights("board-1", DeviceAccess(("board-1",)))
    for right, topic in DEVICE_RIGHTS:
        example = routing_key(f"fleet/v1/board-1/{topic.replace('+', 'x').replace('#', 'y')}")
        assert bool(read.search(example)) == ("read" in right), topic
        assert bool(write.search(example)) == ("write" in right), topic
    for stolen in ("fleet/v1/board-2/state", "fleet/v1/+/desired", "fleet/v1/#", "#",
                   "fleet/v1/board-1/#", "fleet/v1/board-11/desired"):  # fmt: skip
        assert not read.search(routing_key(stolen)), stolen
        assert not write.search(routing_key(stolen)), stolen
    # What the agent subscribes to.
    for subtopic in ("blob/+/+/#", "tuf/reply/+/+", "desired", "state"):
        assert read.search(routing_key(f"fleet/v1/board-1/{subtopic}")), subtopic


def test_the_operator_does_not_speak_for_a_server() -> None:
    read, write = topic_rights(OPERATOR, DeviceAccess())
    assert write.search("fleet.v1.board-1.cmd.end.1")
    assert read.search("fleet.v1.#")
    assert not write.search("fleet.v1.~server.claim.x")
    assert topic_rights(SERVER, DeviceAccess())[1].search("fleet.v1.~server.claim.x")


def test_a_revoked_device_keeps_no_right_at_all() -> None:
    document = json.loads(definitions(DeviceAccess(("board-1",), ("lost-1",))))
    rights = {row["user"]: row for row in document["permissions"]}
    for right in ("configure", "write", "read"):
        assert not re.search(rights["lost-1"][right], "amq.topic")
        assert not re.search(rights["lost-1"][right], "mqtt-subscription-xqos1")
    agent_queue = "mqtt-subscription-tandem-agent-board-1qos1"
    assert re.search(rights["board-1"]["configure"], agent_queue)
    assert not re.search(rights["board-1"]["read"], agent_queue.replace("board-1", "board-2"))
    pipeline = "mqtt-subscription-tandem-board-1-4711qos1"
    assert re.search(rights["board-1"]["read"], pipeline)
    read, write = topic_rights("lost-1", DeviceAccess((), ("lost-1",)))
    assert not read.search("fleet.v1.lost-1.desired")
    assert not write.search("fleet.v1.lost-1.reported")


def test_a_device_reads_no_queue_of_one_whose_name_begins_as_its_own() -> None:
    devices = ("board", "board-1", "agent-board")
    document = json.loads(definitions(DeviceAccess(devices)))
    rights = {row["user"]: row for row in document["permissions"]}
    for device in devices:
        queue_name = f"mqtt-subscription-tandem-agent-{device}qos1"
        for user in devices:
            for right in ("configure", "write", "read"):
                assert bool(re.search(rights[user][right], queue_name)) == (user == device), user
    (alone,) = json.loads(definitions(DeviceAccess(("agent-board",))))["permissions"][3:]
    assert re.search(alone["read"], "mqtt-subscription-tandem-agent-board-4711qos1")


def test_users_have_no_password_and_import_needs_no_other_file() -> None:
    document = json.loads(definitions(DeviceAccess(("board-1",))))
    assert {row["password_hash"] for row in document["users"]} == {""}
    assert {row["name"] for row in document["users"]} >= {SERVER, CLAIM, "board-1"}


@pytest.mark.parametrize("name", ["farm", "A" + "x" * 62, "Nord.2"])
def test_the_revocation_list_has_the_name_that_openssl_gives_it(tmp_path: Path, name: str) -> None:
    make_fleet(tmp_path / "fleet", name=name, broker="rabbitmq")
    ca = tmp_path / "fleet" / "identity" / "ca.crt"
    command = ["openssl", "x509", "-in", str(ca), "-noout", "-subject_hash"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert subject_hash(read_certificate(ca)) == done.stdout.strip()
    (link,) = (tmp_path / "fleet" / "broker" / "crl").iterdir()
    assert link.read_bytes() == (tmp_path / "fleet" / "identity" / "crl.pem").read_bytes()


@pytest.mark.parametrize(
    ("broker", "software", "host", "port"),
    [
        ("rabbitmq", "rabbitmq", "127.0.0.1", 8883),
        ("mosquitto", "mosquitto", "127.0.0.1", 8883),
        ("rabbitmq@10.0.0.7", "rabbitmq", "10.0.0.7", 8883),
        ("rabbitmq@broker.example:8884", "rabbitmq", "broker.example", 8884),
        ("10.0.0.7:8884", "mosquitto", "10.0.0.7", 8884),
        (None, "mosquitto", "127.0.0.1", 8883),
    ],
)
def test_the_broker_is_a_software_an_address_or_both(
    tmp_path: Path, broker: str | None, software: str, host: str, port: int
) -> None:
    settings = make_fleet(tmp_path / "fleet", name="f", broker=broker).broker
    assert (settings.software, settings.host, settings.port) == (software, host, port)
    assert load_settings(tmp_path / "fleet").broker == settings


@pytest.mark.parametrize(
    ("broker", "folder", "sentence"),
    [("emqx@10.0.0.7", "fleet", "is no broker that a fleet can have: use mosquitto or rabb"),
     ("rabbitmq", "a fleet", "takes no path with a space")],
)  # fmt: skip
def test_a_broker_that_cannot_be_set_up_is_refused(
    tmp_path: Path, broker: str, folder: str, sentence: str
) -> None:
    with pytest.raises(FleetError, match=sentence):
        make_fleet(tmp_path / folder, name="f", broker=broker)
    assert list(tmp_path.iterdir()) == []


# -- one real node


@dataclass
class Node:
    """A running node, the folder of its fleet, and two devices with certificates."""

    folder: Path
    rabbit: RabbitNode

    def tls(self, name: str) -> TlsFiles:
        place = self.folder / ("identity" if name.startswith("fleet.") else name)
        ca = self.folder / "identity" / "ca.crt"
        return TlsFiles(ca, place / f"{name}.crt", place / f"{name}.key")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    base = tmp_path_factory.mktemp("rabbit")
    folder, port = base / "fleet", free_port()
    make_fleet(folder, name="farm", broker=f"rabbitmq@127.0.0.1:{port}")
    authority = Authority(folder / "identity")
    for device in ("board-1", "board-2"):
        certificates.issue_device(authority, device, folder / device)
    files = BrokerFiles(folder / "broker", folder / "identity", port, "rabbitmq")
    with port_mapper(base / "home") as environment:
        rabbit = RabbitNode(files, "one@localhost", environment)
        rabbit.write(DeviceAccess(("board-1", "board-2")))
        try:
            rabbit.start()
            yield Node(folder, rabbit)
        finally:
            rabbit.kill()


class Client:
    """A link with its events."""

    def __init__(self, node: Node, name: str, tls: TlsFiles, *topics: str) -> None:
        self.events: queue.Queue[LinkEvent] = queue.Queue()
        port = node.rabbit.files.port
        subscriptions = tuple((topic, 1) for topic in topics)
        settings = LinkSettings("127.0.0.1", port, name, subscriptions, tls=tls)
        self.link = Link(settings, self.events.put)
        self.link.start()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def wait(self, kind: type) -> LinkEvent:
        until_s = time.monotonic() + WAIT_S
        while True:
            event = self.events.get(timeout=max(0.1, until_s - time.monotonic()))
            if isinstance(event, kind):
                return event
            assert time.monotonic() < until_s


def agent_of(node: Node, device: str, *topics: str) -> Client:
    return Client(node, f"tandem-agent-{device}", node.tls(device), *topics)


def test_a_device_keeps_to_its_own_tree(node: Node) -> None:
    desired_topic = "fleet/v1/board-1/desired"
    with Client(node, "server", node.tls(SERVER), "fleet/v1/+/reported") as server:
        up = server.wait(LinkUp)
        assert isinstance(up, LinkUp)
        assert up.mqtt_version == "3.1.1"
        with agent_of(node, "board-1", desired_topic) as device:
            device.wait(LinkUp)
            assert server.link.publish(
                desired_topic, b"for board-1", qos=1, retain=True, wait_s=WAIT_S
            )
            assert device.wait(Message) == Message(desired_topic, b"for board-1")
            device.link.publish("fleet/v1/board-2/reported", b"stolen", qos=1)
            device.wait(LinkDown)  # RabbitMQ ends the connection of who oversteps
            device.wait(LinkUp)
            device.link.publish("fleet/v1/board-1/reported", b"mine", qos=1)
            assert server.wait(Message) == Message("fleet/v1/board-1/reported", b"mine")
    for stolen in ("fleet/v1/board-2/desired", "fleet/v1/#", "fleet/provision/v1/+/request"):
        with agent_of(node, "board-1", stolen) as thief:
            thief.wait(LinkDown)
            assert not [e for e in list(thief.events.queue) if isinstance(e, Message)]


def test_another_device_s_client_id_gives_nothing_of_that_device(node: Node) -> None:
    desired_topic = "fleet/v1/board-1/desired"
    with Client(node, "server", node.tls(SERVER)) as server:
        server.wait(LinkUp)
        with Client(node, "tandem-agent-board-1", node.tls("board-2"), desired_topic) as thief:
            thief.wait(LinkDown)
            server.link.publish(desired_topic, b"secret", qos=1, retain=True, wait_s=WAIT_S)
            thief.wait(LinkDown)
            assert not [e for e in list(thief.events.queue) if isinstance(e, Message)]


def test_who_joins_every_shared_subscription_takes_no_request_away(node: Node) -> None:
    port = node.rabbit.files.port
    with closing(HostileDevice(port, "board-2", node.tls("board-2"))) as thief:
        assert not unanswered(node.folder, port, "board-1", node.tls("board-1"))
        assert thief.stolen() == []
        for _ in range(CONNECTIONS):  # RabbitMQ ends the connection of who oversteps
            thief.wait(LinkDown)


def test_nobody_connects_without_a_certificate_or_with_a_password(node: Node) -> None:
    ca = TlsFiles(node.folder / "identity" / "ca.crt")
    with Client(node, "nobody", ca) as nobody:
        down = nobody.wait(LinkDown)
    assert isinstance(down, LinkDown)
    assert "certificate" in down.reason
    events: queue.Queue[LinkEvent] = queue.Queue()
    settings = LinkSettings(
        "127.0.0.1", node.rabbit.files.port, "guest", tls=node.tls("board-1"), username="guest",
        password="guest",
    )  # fmt: skip
    link = Link(settings, events.put)
    link.start()
    assert isinstance(events.get(timeout=WAIT_S), LinkDown)
    link.close()


def test_a_revoked_device_is_shut_out_while_the_broker_runs(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in node.rabbit.variables().items():
        monkeypatch.setenv(name, value)
    authority = Authority(node.folder / "identity")
    certificates.issue_device(authority, "lost-1", node.folder / "lost-1")
    assert certificates.update_broker(authority, node.rabbit.files)
    with agent_of(node, "lost-1", "fleet/v1/lost-1/desired") as client:
        client.wait(LinkUp)
        revocation = certificates.revoke_device(authority, "lost-1", node.rabbit.files)
        assert revocation == certificates.Revocation(1, broker_told=True)
        client.wait(LinkDown)
        down = client.wait(LinkDown)
    assert isinstance(down, LinkDown)
    assert "revoked" in down.reason, down.reason
    with agent_of(node, "board-2", "fleet/v1/board-2/desired") as second:
        second.wait(LinkUp)
    server = LinkSettings("127.0.0.1", node.rabbit.files.port, "s", tls=node.tls(SERVER))
    certificates.readmit(authority, ["lost-1"], node.rabbit.files, server)
    certificates.issue_device(authority, "lost-1", node.folder / "lost-1", ("lost-1",))
    assert certificates.update_broker(authority, node.rabbit.files)
    with agent_of(node, "lost-1", "fleet/v1/lost-1/desired") as client:  # a new board of this id
        client.wait(LinkUp)


def test_a_broker_that_does_not_run_here_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fleet(tmp_path / "fleet", name="f", broker="rabbitmq")
    monkeypatch.setattr("toolkit.fleet.brokers.software.RABBITMQCTL", tmp_path / "missing")
    words = ["fleet", "identity", "expect", "board-1", "--fleet", str(tmp_path / "fleet")]
    done = CliRunner().invoke(tandem, words, catch_exceptions=False)
    assert "rabbitmqctl import_definitions definitions.json" in done.stdout
    done = CliRunner().invoke(tandem, [*words, "--json"], catch_exceptions=False)
    assert json.loads(done.stdout) == {"expected": ["board-1"]}
    assert "rabbitmqctl import_definitions definitions.json" in done.stderr
    users = json.loads((tmp_path / "fleet" / "broker" / "definitions.json").read_text())["users"]
    assert "board-1" in {row["name"] for row in users}
    files = BrokerFiles(tmp_path / "full" / "broker", tmp_path / "fleet" / "identity", 1)
    (tmp_path / "full").touch()
    with pytest.raises(FleetError, match="cannot write the files of the broker"):
        write_rabbitmq(files, DeviceAccess())


# -- a cluster


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_fleet_goes_on_at_the_other_node_when_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """Signed releases reach real agents through a real server, before and after.

    One board is at the other node than the server from the beginning, and away while its first
    document is sent: that is retained where the server is.
    """
    ports = (free_port(), free_port())
    order = ports if victim == 0 else ports[::-1]  # all are at the node that is killed
    balancer = Balancer(order)
    fleet = tmp_path / "fleet"
    output_of("fleet", "init", str(fleet), "--broker", f"rabbitmq@127.0.0.1:{balancer.port}")
    names = ("one@localhost", "two@localhost")
    server = ServerProcess(fleet)
    boards: list[AgentBox] = []
    with port_mapper(tmp_path / "home") as environment:
        nodes = [
            RabbitNode(BrokerFiles(tmp_path / name, fleet / "identity", port, "rabbitmq"), name,
                environment)
            for name, port in zip(names, ports, strict=True)
        ]  # fmt: skip
        try:
            for node in nodes:
                node.write(DeviceAccess(), names)
                node.start()
            for name, value in nodes[0].variables().items():
                monkeypatch.setenv(name, value)
            server.start()
            expected = ["board-0", "board-1", "--fleet", str(fleet)]
            output = output_of("fleet", "identity", "expect", *expected)
            assert "rabbitmqctl" not in output  # the broker was told
            boards = [
                enrolled(tmp_path, fleet, number, port)
                for number, port in enumerate((balancer.port, order[1]))
            ]
            for board in boards:
                board.start()
            roll_out(tmp_path, fleet, server, "1", late=boards[1])
            nodes[victim].kill()
            roll_out(tmp_path, fleet, server, "2")
            assert order[1] in balancer.passed
            nodes[victim].start()
            roll_out(tmp_path, fleet, server, "3")
        finally:
            for board in boards:
                board.close()
            if server.process is not None:
                server.kill()
            for node in nodes:
                node.kill()
            balancer.close()
