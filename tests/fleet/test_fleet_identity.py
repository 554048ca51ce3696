"""Certificates, the broker's files and enrolment, against a real mosquitto with these files."""

import base64
import datetime as dt
import errno
import os
import queue
import re
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given, settings
from hypothesis import strategies as st
from mqtt_fixtures import WAIT_S, free_port, wait_for_port, write_profile

from device.enrol.__main__ import main as enrol_main
from device.enrol.request import EnrolRequest, fits_key, make_request, new_key
from device.errors import BrokerError
from device.protocol import mqtt_connection, topics
from device.protocol.documents import encode
from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkSettings, LinkUp, Message
from device.protocol.tls import TlsFiles
from toolkit.cli.commands.fleet import fleet as fleet_command
from toolkit.errors import FleetError
from toolkit.fleet import authority
from toolkit.fleet.authority import CLAIM, OPERATOR, SERVER, Authority
from toolkit.fleet.brokers import dynamic_security
from toolkit.fleet.brokers.dynamic_security import disconnect_device
from toolkit.fleet.brokers.mosquitto import DEVICE_RIGHTS, BrokerFiles, write_mosquitto
from toolkit.fleet.server.answers import Provisioning
from toolkit.fleet.trust import certificates


@dataclass
class FleetBroker:
    """A mosquitto that runs with the files of a fleet."""

    folder: Path
    authority: Authority
    files: BrokerFiles
    process: "subprocess.Popen[bytes]"

    def tls(self, name: str) -> TlsFiles:
        """Return the files of a client: a device's are made at its first use."""
        folder = self.folder / "clients"
        if name in (SERVER, CLAIM, OPERATOR):
            folder = self.authority.folder
        elif not (folder / f"{name}.crt").exists():
            certificates.issue_device(self.authority, name, folder)
        return TlsFiles(folder / "ca.crt", folder / f"{name}.crt", folder / f"{name}.key")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetBroker]:
    folder = tmp_path_factory.mktemp("fleet")
    authority = certificates.init_identity(
        folder / "identity", fleet="farm", hosts=("localhost", "127.0.0.1")
    )
    files = BrokerFiles(folder / "broker", folder / "identity", free_port())
    write_mosquitto(files)
    binary = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
    assert binary, "mosquitto is missing: apt-get install mosquitto"
    conf = files.folder / "mosquitto.conf"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([binary, "-c", conf], stdout=log, stderr=log)
    wait_for_port(files.port, process)
    yield FleetBroker(folder, authority, files, process)
    process.kill()
    process.wait()


class Client:
    """A link with its events."""

    def __init__(
        self, fleet: FleetBroker, tls: TlsFiles | None, *topics: str, name: str = ""
    ) -> None:
        self.events: queue.Queue[LinkEvent] = queue.Queue()
        subscriptions = tuple((topic, 1) for topic in topics)
        name = name or f"test-{time.monotonic_ns()}"
        self.link = Link(
            LinkSettings("127.0.0.1", fleet.files.port, name, subscriptions, tls=tls),
            self.events.put,
        )
        self.link.start()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def wait(self, kind: type) -> LinkEvent:
        until = time.monotonic() + WAIT_S
        while True:
            event = self.events.get(timeout=max(0.1, until - time.monotonic()))
            if isinstance(event, kind):
                return event
            assert time.monotonic() < until

    def messages(self, topic: str) -> list[bytes]:
        """What came so far, up to a message that the caller has sent to itself as a mark."""
        seen = []
        while True:
            event = self.wait(Message)
            assert isinstance(event, Message)
            if event.topic == topic:
                return seen
            seen.append(event.topic.encode() + b" " + event.payload)


def test_a_device_reads_and_writes_its_own_tree_alone(fleet: FleetBroker) -> None:
    with Client(fleet, fleet.tls(SERVER), "fleet/v1/#") as server:
        server.wait(LinkUp)
        with Client(fleet, fleet.tls("board-1"), "fleet/v1/#") as thief:
            thief.wait(LinkUp)
            for topic in (
                "fleet/v1/board-2/reported",
                "fleet/v1/board-2/desired",
                "fleet/v1/board-1/desired",  # not even its own: only the fleet decides
                "fleet/provision/v1/aa/response",
                "other",
            ):
                thief.link.publish(topic, b"stolen", qos=1)
            server.link.publish("fleet/v1/board-2/desired", b"secret of board-2", qos=1)
            server.link.publish("fleet/v1/board-1/desired", b"its own", qos=1)
            server.link.publish("fleet/v1/board-1/cmd/end/1", b"mark", qos=1)
            assert thief.messages("fleet/v1/board-1/cmd/end/1") == [
                b"fleet/v1/board-1/desired its own"
            ]
            thief.link.publish("fleet/v1/board-1/reported", b"mine", qos=1)
            thief.link.publish("fleet/v1/board-1/evt/end", b"mark", qos=1, wait_s=WAIT_S)
        seen = server.messages("fleet/v1/board-1/evt/end")
    desired = [b"fleet/v1/board-2/desired secret of board-2", b"fleet/v1/board-1/desired its own"]
    assert seen == [*desired, b"fleet/v1/board-1/cmd/end/1 mark", b"fleet/v1/board-1/reported mine"]


def test_the_operator_does_not_speak_for_a_server(fleet: FleetBroker) -> None:
    with Client(fleet, fleet.tls(SERVER), "fleet/v1/#") as server:
        server.wait(LinkUp)
        with Client(fleet, fleet.tls(OPERATOR)) as operator:
            operator.wait(LinkUp)
            operator.link.publish("fleet/v1/~server/claim/x", b"forged", qos=1)
            operator.link.publish("fleet/v1/board-1/cmd/end/1", b"mark", qos=1, wait_s=WAIT_S)
        assert server.messages("fleet/v1/board-1/cmd/end/1") == []


class OneConnection:
    """A client of paho's that connects once: a link that comes back would throw others off."""

    def __init__(self, fleet: FleetBroker, device: str, client_id: str, *, clean: bool) -> None:
        self.flags: queue.Queue[paho.ConnectFlags] = queue.Queue()
        self.topics: queue.Queue[str] = queue.Queue()
        self.ended = threading.Event()
        self.client = paho.Client(
            paho.CallbackAPIVersion.VERSION2, client_id, clean_session=clean,
            protocol=paho.MQTTv311,
        )  # fmt: skip
        self.client.on_connect = lambda _client, _data, flags, *_rest: self.flags.put(flags)
        self.client.on_message = lambda _client, _data, message: self.topics.put(message.topic)
        self.client.on_disconnect = lambda *_: self.ended.set()
        self.client.tls_set_context(fleet.tls(device).context())
        self.client.reconnect_delay_set(600, 600)
        self.client.connect("127.0.0.1", fleet.files.port)
        self.client.loop_start()

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


def test_who_takes_another_device_s_client_id_gets_nothing_of_that_device(
    fleet: FleetBroker,
) -> None:
    """MQTT ends the first of two connections with one client id. More does not come of it: the
    rights are those of the certificate, and there is no session that could be inherited."""
    desired_topic, stolen_id = "fleet/v1/board-1/desired", "tandem-agent-board-1"
    with Client(fleet, fleet.tls(SERVER), "fleet/v1/board-1/reported") as server:
        server.wait(LinkUp)
        board = OneConnection(fleet, "board-1", stolen_id, clean=True)  # as an agent connects
        board.flags.get(timeout=WAIT_S)
        board.client.subscribe(desired_topic, 1)
        # The thief asks for the session that the board may have left on the broker.
        thief = OneConnection(fleet, "board-2", stolen_id, clean=False)
        assert not thief.flags.get(timeout=WAIT_S).session_present
        assert board.ended.wait(WAIT_S)  # the harm, which an agent reports
        for topic in (desired_topic, "fleet/v1/board-1/cmd/#", "fleet/v1/board-2/desired"):
            thief.client.subscribe(topic, 1)
        stolen = thief.client.publish("fleet/v1/board-1/reported", b"stolen", qos=1)
        stolen.wait_for_publish(WAIT_S)
        assert stolen.is_published()  # after the subscriptions; the broker drops it without a word
        server.link.publish(desired_topic, b"secret", qos=1, wait_s=WAIT_S)
        server.link.publish("fleet/v1/board-2/desired", b"mark", qos=1, wait_s=WAIT_S)
        assert thief.topics.get(timeout=WAIT_S) == "fleet/v1/board-2/desired"
        thief.close()
        board.close()
        with Client(fleet, fleet.tls("board-1"), name=stolen_id) as back:
            back.wait(LinkUp)
            back.link.publish("fleet/v1/board-1/reported", b"mine", qos=1, wait_s=WAIT_S)
        message = server.wait(Message)
    assert message == Message("fleet/v1/board-1/reported", b"mine")


def test_the_access_list_names_every_topic_that_an_agent_and_its_pipeline_use() -> None:
    source = Path(topics.__file__).read_text()
    suffixes = re.findall(r'FixedTopic\("([a-z_/]+)"', source)
    assert {"reported", "tele/beat"} <= set(suffixes)
    for suffix in suffixes:
        assert any(paho.topic_matches_sub(named, suffix) for _, named in DEVICE_RIGHTS), suffix


def test_without_a_certificate_nobody_connects_and_the_reason_is_said(fleet: FleetBroker) -> None:
    with Client(fleet, TlsFiles(fleet.authority.folder / "ca.crt")) as nobody:
        down = nobody.wait(LinkDown)
    assert isinstance(down, LinkDown)
    assert "takes only clients with a certificate" in down.reason
    with Client(fleet, None) as plain:
        assert isinstance(plain.wait(LinkDown), LinkDown)


def test_a_broker_of_another_fleet_is_not_trusted(fleet: FleetBroker, tmp_path: Path) -> None:
    certificates.init_identity(tmp_path / "id", fleet="other", hosts=("localhost",))
    mine = fleet.tls("board-1")
    with Client(fleet, TlsFiles(tmp_path / "id" / "ca.crt", mine.certificate, mine.key)) as client:
        down = client.wait(LinkDown)
    assert isinstance(down, LinkDown)
    assert "does not vouch for the broker's certificate" in down.reason


def test_a_certificate_of_another_fleet_is_refused(fleet: FleetBroker, tmp_path: Path) -> None:
    second = certificates.init_identity(tmp_path / "id", fleet="other", hosts=("localhost",))
    certificates.issue_device(second, "board-1", tmp_path / "out")
    files = TlsFiles(
        fleet.authority.folder / "ca.crt",
        tmp_path / "out" / "board-1.crt",
        tmp_path / "out" / "board-1.key",
    )
    with Client(fleet, files) as client:
        down = client.wait(LinkDown)
    assert isinstance(down, LinkDown)
    assert re.search("does not know the CA|of another fleet", down.reason), down.reason


def test_a_revoked_device_is_shut_out_at_once_and_for_good(fleet: FleetBroker) -> None:
    tls = fleet.tls("lost-1")
    with (
        Client(fleet, fleet.tls(SERVER), "fleet/v1/lost-1/#") as server,
        Client(fleet, tls) as client,
    ):
        server.wait(LinkUp)
        client.wait(LinkUp)
        revocation = certificates.revoke_device(fleet.authority, "lost-1", fleet.files)
        assert revocation == certificates.Revocation(1, broker_told=True)
        until = time.monotonic() + WAIT_S
        while True:  # the broker reads its files again at the next turn of its loop
            server.link.publish("fleet/v1/lost-1/cmd/mark/1", b"mark", qos=1)
            client.link.publish("fleet/v1/lost-1/reported", b"stolen", qos=1, wait_s=1.0)
            server.link.publish("fleet/v1/lost-1/cmd/end/1", b"end", qos=1)
            if not [
                row for row in server.messages("fleet/v1/lost-1/cmd/end/1") if b"stolen" in row
            ]:
                break
            assert time.monotonic() < until, "a revoked device still writes"
    with Client(fleet, tls) as client:
        down = client.wait(LinkDown)
    assert isinstance(down, LinkDown)
    assert "revoked" in down.reason, down.reason
    states = {row.device: row.state for row in certificates.identities(fleet.authority)}
    assert states["lost-1"] == "revoked"


def test_revoking_ends_the_connections_of_that_device_alone(fleet: FleetBroker) -> None:
    clients = [
        Client(fleet, fleet.tls(name), f"fleet/v1/{name}/blob/+/#") for name in ("open-1", "open-2")
    ]
    settings = LinkSettings("127.0.0.1", fleet.files.port, "revoke", tls=fleet.tls(SERVER))
    with clients[0] as lost, clients[1] as unaffected:
        for client in clients:
            client.wait(LinkUp)
        certificates.revoke_device(fleet.authority, "open-1", fleet.files)
        assert disconnect_device(settings, "open-1") == ""
        down = lost.wait(LinkDown)
        assert isinstance(down, LinkDown)
        unaffected.link.publish("fleet/v1/open-2/reported", b"here", qos=1, wait_s=WAIT_S)
        assert unaffected.events.empty()
        assert disconnect_device(settings, "open-1") == ""  # again
    assert b'"open-1"' in (fleet.files.folder / "dynamic-security.json").read_bytes()


def test_a_device_commands_no_plugin(fleet: FleetBroker) -> None:
    settings = LinkSettings("127.0.0.1", fleet.files.port, "thief", tls=fleet.tls("board-7"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_security, "ANSWER_S", 2.0)
        assert "does not answer" in disconnect_device(settings, "board-8")
    with Client(fleet, fleet.tls("board-8")) as client:
        client.wait(LinkUp)


def test_a_renewed_certificate_is_used_without_a_restart(
    fleet: FleetBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt_connection, "RENEWAL_S", 0.1)
    certificates.issue_device(fleet.authority, "renews", tmp_path)
    tls = TlsFiles(tmp_path / "ca.crt", tmp_path / "renews.crt", tmp_path / "renews.key")
    with Client(fleet, tls) as client:
        client.wait(LinkUp)
        (tmp_path / "renews.key").write_text("half of it")  # nothing happens to the connection
        time.sleep(0.5)
        assert client.events.empty()
        certificates.issue_device(fleet.authority, "renews", tmp_path)
        down = client.wait(LinkDown)
        assert isinstance(down, LinkDown)
        assert down.reason == "the certificate was renewed"
        client.wait(LinkUp)


@pytest.mark.parametrize("missing", ["ca", "certificate", "key"])
def test_a_file_that_cannot_be_read_is_named(
    fleet: FleetBroker, tmp_path: Path, missing: str
) -> None:
    certificates.issue_device(fleet.authority, "files", tmp_path)
    paths = {
        "ca": tmp_path / "ca.crt",
        "certificate": tmp_path / "files.crt",
        "key": tmp_path / "files.key",
    }
    paths[missing].unlink()
    with pytest.raises(BrokerError, match=rf"\[broker.tls\] {missing}: cannot read"):
        TlsFiles(**paths).context()


def test_a_key_of_another_certificate_is_refused(fleet: FleetBroker, tmp_path: Path) -> None:
    for name in ("one", "two"):
        certificates.issue_device(fleet.authority, name, tmp_path)
    with pytest.raises(BrokerError, match="fit each other"):
        TlsFiles(tmp_path / "ca.crt", tmp_path / "one.crt", tmp_path / "two.key").context()


# -- enrolment


class Server:
    """A fleet server with the one service that is tested here."""

    def __init__(self, fleet: FleetBroker) -> None:
        self._service = Provisioning(fleet.authority)
        self._events: queue.Queue[LinkEvent | None] = queue.Queue()
        settings_ = LinkSettings(
            "127.0.0.1",
            fleet.files.port,
            "server",
            self._service.subscriptions,
            tls=fleet.tls(SERVER),
        )
        self._link = Link(settings_, self._events.put)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Server":
        self._link.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._events.put(None)
        self._thread.join()
        self._link.close()

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            if isinstance(event, Message):
                self._service.on_message(event, self._link)


def write_board(fleet: FleetBroker, folder: Path, device: str) -> list[str]:
    """Write agent.toml of a board without a certificate; return the command that enrols it."""
    write_profile(folder)
    (folder / "agent.toml").write_text(
        f'device = "{device}"\nprofile = "test-board.toml"\nstate_dir = "state"\n'
        f'[broker]\nhost = "127.0.0.1"\nport = {fleet.files.port}\n'
        f'[broker.tls]\nca = "{fleet.authority.folder}/ca.crt"\n'
        'certificate = "device.crt"\nkey = "device.key"\n'
    )
    claim = fleet.tls(CLAIM)
    command = [
        sys.executable,
        "-m",
        "device.agent",
        "enrol",
        "--config",
        str(folder / "agent.toml"),
    ]
    return [*command, "--claim", str(claim.certificate), "--claim-key", str(claim.key)]


def test_an_expected_device_enrols_itself_and_connects(fleet: FleetBroker, tmp_path: Path) -> None:
    command = write_board(fleet, tmp_path, "new-1")
    with Server(fleet):
        refused = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 1
        assert "tandem fleet identity expect new-1" in refused.stderr
        key = (tmp_path / "device.key").read_bytes()
        certificates.expect(fleet.authority, ["new-1"])
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "device.key").read_bytes() == key  # an enrolment goes on
        assert (tmp_path / "device.key").stat().st_mode & 0o777 == 0o600
        again = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert (again.returncode, "--again" in again.stderr) == (1, True)
    tls = TlsFiles(
        fleet.authority.folder / "ca.crt", tmp_path / "device.crt", tmp_path / "device.key"
    )
    with Client(fleet, tls) as client:
        client.wait(LinkUp)


def test_a_request_is_signed_elsewhere_and_no_other_certificate_is_taken(
    fleet: FleetBroker, tmp_path: Path
) -> None:
    command = write_board(fleet, tmp_path, "by-ssh")[:6]

    def enrol(*words: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(
            [*command, *words], input=stdin, check=False, capture_output=True, timeout=60
        )

    request = enrol("--request")
    assert request.returncode == 0, request.stderr
    key = (tmp_path / "device.key").read_bytes()
    assert enrol("--request").returncode == 0
    assert (tmp_path / "device.key").read_bytes() == key
    certificates.expect(fleet.authority, ["by-ssh", "stranger"])
    issued = certificates.enrol(fleet.authority, "by-ssh", request.stdout)
    stranger = make_request(new_key(), "stranger")
    foreign = certificates.enrol(fleet.authority, "stranger", stranger)
    for wrong in (foreign.pem, b"", b"no certificate"):
        refused = enrol("--accept", stdin=wrong)
        assert refused.returncode == 1
        assert b"this is no certificate for the key of by-ssh" in refused.stderr
        assert not (tmp_path / "device.crt").exists()
    assert enrol("--accept", stdin=issued.pem).returncode == 0
    assert (tmp_path / "device.crt").read_bytes() == issued.pem
    assert b"name --claim and --claim-key" in enrol().stderr
    both = enrol("--request", "--accept", stdin=issued.pem)
    assert (both.returncode, both.stdout) == (2, b"")
    assert b"not allowed with argument --request" in both.stderr


def test_an_answer_that_was_missed_is_given_again_but_no_other_key_is_signed(
    fleet: FleetBroker,
) -> None:
    certificates.expect(fleet.authority, ["twice"])
    key = new_key()
    first = certificates.enrol(fleet.authority, "twice", make_request(key, "twice"))
    again = certificates.enrol(fleet.authority, "twice", make_request(key, "twice"))
    assert (first.pem, first.serial) == (again.pem, again.serial)
    with pytest.raises(FleetError, match="is not expected"):
        certificates.enrol(fleet.authority, "twice", make_request(new_key(), "twice"))


def test_requests_that_are_not_the_device_s_own_are_refused(fleet: FleetBroker) -> None:
    certificates.expect(fleet.authority, ["mine"])
    with pytest.raises(FleetError, match="a device enrols itself only"):
        certificates.enrol(fleet.authority, "mine", make_request(new_key(), "other"))
    request = bytearray(make_request(new_key(), "mine"))
    with pytest.raises(FleetError, match=r"no PKCS #10|not signed"):
        certificates.enrol(fleet.authority, "mine", bytes(request[:-80]) + bytes(request[-60:]))
    with pytest.raises(FleetError, match="is not the id of a device"):
        certificates.enrol(fleet.authority, "../ca", make_request(new_key(), "../ca"))
    with pytest.raises(FleetError, match="is not the id of a device"):
        certificates.expect(fleet.authority, ["fine", SERVER])


@settings(max_examples=50, deadline=None)
@given(payload=st.binary(max_size=200))
def test_garbage_is_no_request(fleet: FleetBroker, payload: bytes) -> None:
    response = Provisioning(fleet.authority).answer(payload)
    assert response is None or response.error


def test_a_certificate_in_a_request_gets_an_answer_with_the_reason(fleet: FleetBroker) -> None:
    request = encode(EnrolRequest(device="board-1", csr="nonsense"))
    response = Provisioning(fleet.authority).answer(request)
    assert response is not None
    assert "no PKCS #10" in response.error or "not expected" in response.error


def test_certificates_say_what_they_are_for(fleet: FleetBroker, tmp_path: Path) -> None:
    issued = certificates.issue_device(fleet.authority, "board-9", tmp_path)
    leaf = x509.load_pem_x509_certificate(issued.pem)
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    days = (leaf.not_valid_after_utc - dt.datetime.now(dt.timezone.utc)).days
    assert 725 <= days <= 730
    key = (tmp_path / "board-9.key").read_bytes()
    assert fits_key(issued.pem, key, "board-9")
    assert not fits_key(issued.pem, key, "board-8")
    assert not fits_key(issued.pem, new_key(), "board-9")
    with pytest.raises(FleetError, match="has a CA already"):
        Authority.create(fleet.authority.folder, "again")


def test_the_broker_reads_its_files_again_only_if_it_runs_here(
    fleet: FleetBroker, tmp_path: Path
) -> None:
    assert certificates.reload_broker(fleet.files)
    assert fleet.process.poll() is None
    (tmp_path / "mosquitto.pid").write_text(str(os.getpid()))  # another program has that number
    assert not certificates.reload_broker(BrokerFiles(tmp_path, tmp_path, 1))


def test_old_versions_of_tls_are_refused(fleet: FleetBroker) -> None:
    context = fleet.tls("board-1").context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.check_hostname


def test_a_damaged_request_gets_an_answer_and_nothing_else(fleet: FleetBroker) -> None:
    """cryptography reads a request part by part: each may fail, in a way of its own."""
    pem = make_request(new_key(), "board-1")
    request = bytearray(x509.load_pem_x509_csr(pem).public_bytes(serialization.Encoding.DER))
    service, damaged = Provisioning(fleet.authority), 0
    for place in range(len(request)):
        request[place] ^= 1
        body = base64.encodebytes(request).decode()
        request[place] ^= 1
        csr = f"-----BEGIN CERTIFICATE REQUEST-----\n{body}-----END CERTIFICATE REQUEST-----\n"
        response = service.answer(encode(EnrolRequest(device="board-1", csr=csr)))
        assert response is not None
        assert response.error
        damaged += "no PKCS #10" in response.error
    assert damaged > 100


def test_a_disk_that_takes_nothing_refuses_a_device_and_leaves_it_expected(
    fleet: FleetBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates.expect(fleet.authority, ["full-1"])
    request = make_request(new_key(), "full-1")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    payload = encode(EnrolRequest(device="full-1", csr=request.decode()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        response = Provisioning(fleet.authority).answer(payload)
    assert response is not None
    assert "No space left" in response.error
    response = Provisioning(fleet.authority).answer(payload)
    assert response is not None
    assert response.certificate


@pytest.mark.parametrize("step", ["lock", "unlink"])
def test_a_folder_that_cannot_be_changed_refuses_a_device(
    step: str, fleet: FleetBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates.expect(fleet.authority, [f"{step}-1"])
    csr = make_request(new_key(), f"{step}-1").decode()

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(*((certificates, "locked") if step == "lock" else (Path, "unlink")), fail)
        payload = encode(EnrolRequest(device=f"{step}-1", csr=csr))
        response = Provisioning(fleet.authority).answer(payload)
    assert response is not None
    assert "Read-only file system" in response.error
    response = Provisioning(fleet.authority).answer(payload)
    assert response is not None
    assert response.certificate


def test_the_claim_certificate_asks_for_certificates_and_nothing_else(fleet: FleetBroker) -> None:
    claim_tree = f"fleet/v1/{CLAIM}"
    with Client(fleet, fleet.tls(SERVER), "fleet/v1/#") as server:
        server.wait(LinkUp)
        claim = fleet.tls(CLAIM)
        with Client(fleet, claim, f"{claim_tree}/#", "fleet/provision/v1/+/response") as thief:
            thief.wait(LinkUp)
            for topic in ("blob/get", "tuf/get", "reported", "state"):
                thief.link.publish(f"{claim_tree}/{topic}", b"stolen", qos=1, wait_s=WAIT_S)
            server.link.publish(f"{claim_tree}/blob/aa/0", b"a chunk", qos=1)
            server.link.publish("fleet/provision/v1/ff/response", b"mark", qos=1)
            assert thief.messages("fleet/provision/v1/ff/response") == []
        server.link.publish("fleet/v1/end", b"mark", qos=1)
        seen = server.messages("fleet/v1/end")
    assert not [row for row in seen if b"stolen" in row]


def test_a_revoked_id_is_given_again_once_what_is_open_has_ended(
    fleet: FleetBroker, tmp_path: Path
) -> None:
    """The new board works under the id; the thief's connection ends, and does not come back."""
    old = fleet.tls("gone-1")
    admit = ["identity", "expect", "fine-1", "gone-1", "--fleet", str(tmp_path / "fleet")]
    write_fleet_of(fleet, tmp_path / "fleet")
    command = write_board(fleet, tmp_path, "gone-1")
    with Client(fleet, old) as thief:
        thief.wait(LinkUp)
        certificates.revoke_device(fleet.authority, "gone-1", fleet.files)
        with pytest.raises(FleetError, match=r"gone-1 was revoked: .*identity expect gone-1"):
            certificates.issue_device(fleet.authority, "gone-1", tmp_path)
        done = CliRunner().invoke(fleet_command, admit, catch_exceptions=False)
        assert done.output == "2 devices may enrol themselves, once each\n"
        thief.wait(LinkDown)
        with Server(fleet):
            enrolled = subprocess.run(command, check=False, capture_output=True, text=True)
            assert enrolled.returncode == 0, enrolled.stderr
        new = TlsFiles(old.ca, tmp_path / "device.crt", tmp_path / "device.key")
        topic = "fleet/v1/gone-1/reported"
        with (
            Client(fleet, fleet.tls(SERVER), topic, "fleet/v1/gone-1/cmd/end/1") as server,
            Client(fleet, new) as board,
        ):
            server.wait(LinkUp)
            board.wait(LinkUp)
            thief.link.publish(topic, b"stolen", qos=1)
            board.link.publish(topic, b"mine", qos=1, wait_s=WAIT_S)
            server.link.publish("fleet/v1/gone-1/cmd/end/1", b"end", qos=1)
            assert server.messages("fleet/v1/gone-1/cmd/end/1") == [f"{topic} mine".encode()]
    with Client(fleet, old) as thief:
        down = thief.wait(LinkDown)
    assert isinstance(down, LinkDown)
    assert "revoked" in down.reason, down.reason
    states = {row.device: row.state for row in certificates.identities(fleet.authority)}
    assert (states["gone-1"], states["fine-1"]) == ("enrolled", "expected")


def test_a_revoked_id_is_not_given_again_while_the_broker_is_away(
    fleet: FleetBroker, tmp_path: Path
) -> None:
    fleet.tls("away-1")
    certificates.revoke_device(fleet.authority, "away-1", fleet.files)
    write_fleet_of(fleet, tmp_path / "fleet", port=free_port())
    admit = ["identity", "expect", "away-1", "--fleet", str(tmp_path / "fleet")]
    with pytest.raises(FleetError, match="away-1 was revoked, and its id is not given again"):
        CliRunner().invoke(fleet_command, admit, catch_exceptions=False)
    states = {row.device: row.state for row in certificates.identities(fleet.authority)}
    assert states["away-1"] == "revoked"
    assert "user away-1\n" in (fleet.files.folder / "acl").read_text()


def test_a_revoked_id_is_not_given_again_where_the_broker_may_not_know_of_the_revocation(
    fleet: FleetBroker, tmp_path: Path
) -> None:
    """With a broker on another machine the denial of the name may be all that keeps a thief out."""
    fleet.tls("far-1")
    certificates.revoke_device(fleet.authority, "far-1", fleet.files)
    write_fleet_of(fleet, tmp_path / "fleet")
    (tmp_path / "fleet/broker").unlink()
    shutil.copytree(fleet.files.folder, tmp_path / "fleet/broker")
    (tmp_path / "fleet/broker/mosquitto.pid").unlink()
    admit = ["identity", "expect", "far-1", "--fleet", str(tmp_path / "fleet")]
    with pytest.raises(FleetError, match="may not have the newest list of revoked certificates"):
        CliRunner().invoke(fleet_command, admit, catch_exceptions=False)


def write_fleet_of(fleet: FleetBroker, folder: Path, port: int = 0) -> None:
    """Write the folder of a fleet that has this broker, as the command line reads it."""
    folder.mkdir()
    (folder / "identity").symlink_to(fleet.authority.folder)
    (folder / "broker").symlink_to(fleet.files.folder)
    (folder / "fleet.toml").write_text(
        f'name = "farm"\n[broker]\nhost = "127.0.0.1"\nport = {port or fleet.files.port}\n'
    )


def test_a_broker_of_another_account_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet: FleetBroker
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "kill", refuse)
    assert not certificates.reload_broker(fleet.files)


def is_up(fleet: FleetBroker) -> bool:
    with Client(fleet, fleet.tls("board-1")) as client:
        return isinstance(client.events.get(timeout=WAIT_S), LinkUp)


def test_a_revocation_list_that_ended_shuts_all_out_until_it_is_renewed(
    fleet: FleetBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert certificates.renew_due(fleet.authority, fleet.files) == ()
    with monkeypatch.context() as patch:
        patch.setattr(authority, "CRL_DAYS", 0)
        fleet.authority.write_crl()
    certificates.reload_broker(fleet.files)
    until = time.monotonic() + WAIT_S
    while is_up(fleet):  # the broker reads its files again at the next turn of its loop
        assert time.monotonic() < until
    with Client(fleet, fleet.tls("board-1")) as client:
        assert certificates.renew_due(fleet.authority, fleet.files) == ("crl.pem",)
        client.wait(LinkUp)
    assert certificates.renew_due(fleet.authority, fleet.files) == ()


def test_certificates_of_the_fleet_are_renewed_by_their_keys(
    fleet: FleetBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("server.crt", f"{SERVER}.crt", f"{CLAIM}.crt", f"{OPERATOR}.crt")
    before = [authority.read_certificate(fleet.authority.folder / name) for name in names]
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "RENEW_DAYS", 731)
        assert set(names) <= set(certificates.renew_due(fleet.authority, fleet.files))
    for old, name in zip(before, names, strict=True):
        new = authority.read_certificate(fleet.authority.folder / name)
        assert new.serial_number != old.serial_number
        assert (new.public_key(), new.subject) == (old.public_key(), old.subject)
        for kind in (x509.ExtendedKeyUsage, x509.SubjectAlternativeName):
            for one, two in zip(old.extensions, new.extensions, strict=True):
                assert one.oid == two.oid
                assert not isinstance(one.value, kind) or one.value == two.value
    with Client(fleet, fleet.tls(SERVER)) as client:
        client.wait(LinkUp)


@pytest.mark.parametrize("content", [b"", b"half of a k", "rsa"])
def test_a_key_that_cannot_be_used_is_named_before_anything_is_asked(
    fleet: FleetBroker, tmp_path: Path, content: bytes | str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = write_board(fleet, tmp_path, "new-2")[4:]
    if content == "rsa":
        content = rsa.generate_private_key(65537, 2048).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    assert isinstance(content, bytes)
    (tmp_path / "device.key").write_bytes(content)
    assert enrol_main(options) == 1
    assert "device.key is no unencrypted key on the curve P-256" in capsys.readouterr().err
    assert (tmp_path / "device.key").read_bytes() == content


def test_a_full_disk_of_a_new_device_is_said(
    fleet: FleetBroker,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    options = write_board(fleet, tmp_path, "new-3")[4:]
    monkeypatch.setattr(os, "fsync", full)
    assert enrol_main(options) == 1
    assert "device.key: No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "device.key").exists()


def test_revocations_at_the_same_time_lose_none(fleet: FleetBroker, tmp_path: Path) -> None:
    names = [f"many-{number}" for number in range(12)]
    for name in names:
        certificates.issue_device(fleet.authority, name, tmp_path)
    with ThreadPoolExecutor(12) as pool:
        list(
            pool.map(
                lambda name: certificates.revoke_device(fleet.authority, name, fleet.files), names
            )
        )
    states = {row.device: row.state for row in certificates.identities(fleet.authority)}
    assert {states[name] for name in names} == {"revoked"}
    acl = (fleet.files.folder / "acl").read_text()
    assert all(f"user {name}\n" in acl for name in names)


def test_a_revocation_that_the_disk_cut_off_is_done_by_the_next_try(
    fleet: FleetBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates.issue_device(fleet.authority, "cut-1", tmp_path)
    sync = os.fsync
    for place in range(4):  # revoked.json, crl.pem and the two files of the broker

        def fail_at(handle: int, place: int = place, files: Iterator[int] = count()) -> None:  # noqa: B008
            if Path(f"/proc/self/fd/{handle}").resolve().suffix == ".tmp" and next(files) == place:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(handle)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail_at)
            with pytest.raises(FleetError, match="No space left"):
                certificates.revoke_device(fleet.authority, "cut-1", fleet.files)
    assert certificates.revoke_device(fleet.authority, "cut-1", fleet.files).certificates == 1
    assert "user cut-1\n" in (fleet.files.folder / "acl").read_text()
    serials = {
        row.serial_number
        for row in x509.load_pem_x509_crl((fleet.authority.folder / "crl.pem").read_bytes())
    }
    assert authority.read_certificate(tmp_path / "cut-1.crt").serial_number in serials
