"""Reports are signed by the device's key, and the server believes no others of enrolled devices."""

import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from fleet_server_fixtures import ServerProcess, report, wait_until
from mqtt_fixtures import DEVICE, WAIT_S, AgentBox, free_port, wait_for_port
from securesystemslib.signer import CryptoSigner, SSlibKey

from device.enrol.request import new_key
from device.errors import TrustError
from device.protocol.device_key import DeviceKey, ReportSigner, keyid_of
from device.protocol.documents import Beat, Reported, Signed, decode, encode
from device.protocol.mqtt import Link, LinkEvent, LinkUp, Message, queue_putter
from device.protocol.signed import count_valid, open_reported, sign_text
from device.protocol.topics import Topics
from toolkit.cli.commands.fleet import fleet as fleet_command
from toolkit.fleet.authority import SERVER, Authority
from toolkit.fleet.brokers.mosquitto import BrokerFiles
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.server.control import Control
from toolkit.fleet.server.device_messages import reader_of, row_after
from toolkit.fleet.server.serve import FleetServer
from toolkit.fleet.store.devices import DeviceRow
from toolkit.fleet.store.lease import holder_name
from toolkit.fleet.trust.certificates import issue_device, revoke_device
from toolkit.fleet.trust.report_keys import ReportKeys, _DeviceKey

TOPICS = Topics(DEVICE)


def key_at(path: Path) -> tuple[DeviceKey, SSlibKey]:
    """A new key of a device, and its public half as the host has it."""
    path.write_bytes(new_key())
    private = serialization.load_pem_private_key(path.read_bytes(), None)
    return DeviceKey(path), SSlibKey.from_crypto(private.public_key())


def test_what_the_device_signs_the_host_verifies(tmp_path: Path) -> None:
    for number in range(20):  # DER of several lengths
        key, public = key_at(tmp_path / f"{number}.key")
        assert key.keyid == public.keyid
        text = encode(report("a")).decode() + "é" * number
        signed = key.sign(text)
        assert signed.payload == text
        assert count_valid(signed, {public.keyid: public}) == 1
        changed = Signed(payload=text + " ", signatures=signed.signatures)
        assert count_valid(changed, {public.keyid: public}) == 0


def test_the_id_of_a_key_is_that_of_the_library() -> None:
    key = CryptoSigner.generate_ecdsa().public_key
    public = serialization.load_pem_public_key(key.keyval["public"].encode())
    der = public.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert keyid_of(der) == key.keyid


def test_a_key_that_cannot_sign_is_named(tmp_path: Path) -> None:
    path = tmp_path / "device.key"
    form = serialization.PrivateFormat.PKCS8
    p256, p384 = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP384R1())
    secret = serialization.BestAvailableEncryption(b"secret")
    rows = {
        "no PEM": b"hello",
        "empty": b"",
        "encrypted": p256.private_bytes(serialization.Encoding.PEM, form, secret),
        "another curve": p384.private_bytes(
            serialization.Encoding.PEM, form, serialization.NoEncryption()
        ),
        "RSA": rsa.generate_private_key(65537, 2048).private_bytes(
            serialization.Encoding.PEM, form, serialization.NoEncryption()
        ),
    }
    for pem in rows.values():
        path.write_bytes(pem)
        with pytest.raises(TrustError, match="is encrypted, or not on the curve P-256"):
            DeviceKey(path)
    signer = ReportSigner(path)
    assert signer.sign(b"{}") == b"{}"
    assert "reports are not signed: the device's key" in signer.problem
    _, public = key_at(path)  # a new one is taken without a restart
    signed = decode(signer.sign(b"{}"), Signed)
    assert count_valid(signed, {public.keyid: public}) == 1
    assert not signer.problem
    with pytest.raises(TrustError, match="cannot be read: No such file"):
        DeviceKey(tmp_path / "none")


class Fleet:
    """A fleet with a CA and its broker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "fleet"
        port = free_port()
        make_fleet(self.folder, name="farm", broker=f"127.0.0.1:{port}")
        self.authority = Authority(self.folder / "identity")
        self.files = BrokerFiles(self.folder / "broker", self.folder / "identity", port)
        self.port = port
        binary = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
        assert binary, "mosquitto is missing: apt-get install mosquitto"
        conf = self.folder / "broker" / "mosquitto.conf"
        with (folder / "broker.log").open("wb") as log:
            self.process = subprocess.Popen([binary, "-c", conf], stdout=log, stderr=log)
        wait_for_port(port, self.process)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    new_fleet = Fleet(tmp_path)
    yield new_fleet
    new_fleet.close()


def test_only_a_certificate_that_holds_makes_a_report_believed(fleet: Fleet) -> None:
    identity = fleet.folder / "identity"
    keys, bare = ReportKeys(identity), encode(report("a"))
    assert keys.read(DEVICE, bare) == report("a")  # it was never enrolled
    issue_device(fleet.authority, DEVICE, fleet.folder / "board")
    key = DeviceKey(fleet.folder / "board" / f"{DEVICE}.key")
    signed = encode(key.sign(bare.decode()))
    assert keys.read(DEVICE, signed) == report("a")
    with pytest.raises(TrustError, match="is not signed by a key of the device"):
        keys.read(DEVICE, bare)
    issue_device(fleet.authority, "board-2", fleet.folder / "board")
    with pytest.raises(TrustError, match="somebody else published it"):
        keys.read("board-2", signed)  # one device in the place of another
    revoke_device(fleet.authority, DEVICE, fleet.files)
    with pytest.raises(TrustError, match="none, it was revoked"):
        keys.read(DEVICE, signed)
    (identity / "revoked.json").write_text("{")  # a server goes on, and believes nothing
    with pytest.raises(TrustError, match=f"whether {DEVICE} signed a report cannot be checked"):
        keys.read(DEVICE, signed)


def test_a_signature_is_checked_only_of_what_could_be_news(fleet: Fleet) -> None:
    issue_device(fleet.authority, DEVICE, fleet.folder / "board")
    reader = reader_of(load_fleet(fleet.folder))
    row = DeviceRow(DEVICE, 7.0, None, report("a", counter=5), {}, beat=6)

    def row_of(kind: str, document: Reported | Beat, *, retained: bool) -> DeviceRow | None:
        message = Message(getattr(TOPICS, kind), encode(document), retained)
        return row_after(message, kind, row, reader, received_s=8.0)

    for kind, old, new in (
        ("reported", report("b", counter=5), report("b", counter=6)),
        ("beat", Beat(counter=6, at="2026-01-01"), Beat(counter=7, at="2026-01-01")),
    ):
        assert row_of(kind, old, retained=True) is None
        for document, is_retained in ((new, True), (old, False), (new, False)):
            with pytest.raises(TrustError, match="is not signed by a key of the device"):
                row_of(kind, document, retained=is_retained)


def test_what_is_known_and_not_checked_does_not_count_as_read(fleet: Fleet) -> None:
    issue_device(fleet.authority, DEVICE, fleet.folder / "board")
    settings = load_fleet(fleet.folder)
    server = FleetServer(settings)
    forged = Message(TOPICS.reported, encode(report("b", counter=5)), retained=True)
    with closing(settings.open_store()) as database:
        control = Control(database, holder_name())
        control.devices[DEVICE] = DeviceRow(DEVICE, 7.0, None, report("a", counter=4), {})
        server._take_message(forged, control)  # it could be news
        control.devices[DEVICE] = DeviceRow(DEVICE, 7.0, None, report("a", counter=5), {})
        server._take_message(forged, control)
    counts = {kind: count for kind, count in server._meters.events().items() if count}
    assert counts == {"unreadable": 1}
    assert server._unread == {DEVICE}  # said once


def test_a_key_of_a_certificate_is_that_of_securesystemslib() -> None:
    signer = CryptoSigner.generate_ecdsa()
    parsed = serialization.load_pem_public_key(signer.public_key.keyval["public"].encode())
    assert isinstance(parsed, ec.EllipticCurvePublicKey)
    key, signed = _DeviceKey(parsed), sign_text("text", (signer,))
    assert key.to_dict() == signer.public_key.to_dict()
    assert key.keyid == signer.public_key.keyid
    keys = {key.keyid: key}
    assert count_valid(signed, keys) == 1
    (signature,) = signed.signatures
    for sig in (
        signature.sig[:-2] + "00",
        "zz",
        "",
        sign_text("other", (signer,)).signatures[0].sig,
    ):
        false = msgspec.structs.replace(signature, sig=sig)
        assert count_valid(msgspec.structs.replace(signed, signatures=(false,)), keys) == 0
    with pytest.raises(ValueError, match="secp384r1 is not P-256"):
        _DeviceKey(ec.generate_private_key(ec.SECP384R1()).public_key())


def test_the_server_believes_only_what_an_enrolled_device_has_signed(
    fleet: Fleet, tmp_path: Path
) -> None:
    issue_device(fleet.authority, DEVICE, tmp_path / "certificates")
    shutil.copytree(fleet.folder / "trust", tmp_path / "trust")
    ca, certificate, key = (
        tmp_path / "certificates" / name for name in ("ca.crt", f"{DEVICE}.crt", f"{DEVICE}.key")
    )
    box = AgentBox(tmp_path, fleet.port, dev=False, ca=ca)
    box.config.write_text(
        box.config.read_text().replace(
            f'tls = {{ca = "{ca}"}}',
            f'tls = {{ca = "{ca}", certificate = "{certificate}", key = "{key}"}}',
        )
    )
    server = ServerProcess(fleet.folder)
    server.start()
    box.start()

    def view() -> dict[str, object]:
        done = CliRunner().invoke(
            fleet_command, ("devices", "--json"), env={"TANDEM_FLEET": str(fleet.folder)}
        )
        rows = json.loads(done.stdout) if done.exit_code == 0 else []
        return rows[0] if rows else {}

    events: queue.Queue[LinkEvent] = queue.Queue()
    ended = threading.Event()
    settings = load_fleet(fleet.folder).link_settings("thief", ((TOPICS.reported, 1),), SERVER)
    link = Link(settings, queue_putter(events, ended))
    try:
        wait_until(lambda: view().get("profile") == "test-board", lambda: (server.log(), box.log()))
        # A broker that was stolen says what it likes.
        link.start()
        assert isinstance(events.get(timeout=WAIT_S), LinkUp)
        broker_message = events.get(timeout=WAIT_S)
        assert isinstance(broker_message, Message)
        assert decode(broker_message.payload, Signed).signatures
        forged = encode(
            Reported(**{**fields_of(open_reported(broker_message.payload)), "profile": "forged"})
        )
        stranger = CryptoSigner.generate_ecdsa()
        # A good one in between, or the server would say it once for both.
        for payload in (
            forged,
            broker_message.payload,
            encode(sign_text(forged.decode(), [stranger])),
        ):
            assert link.publish(TOPICS.reported, payload, qos=1, retain=True, wait_s=WAIT_S)
        message = "is not signed by a key of the device"
        wait_until(lambda: server.log().count(message) == 2, server.log)
        assert view()["profile"] == "test-board"
        assert open_reported(broker_message.payload).warning == ""
    finally:
        ended.set()
        link.close()
        box.close()
        server.stop()


def fields_of(reported: Reported) -> dict[str, object]:
    return {name: getattr(reported, name) for name in reported.__struct_fields__}
