"""The folder `identity/` of a fleet: who has a certificate, who may ask for one, who lost it.

ca.key ca.crt crl.pem revoked.json      the CA (see `toolkit.fleet.authority`)
server.crt server.key                   the broker
fleet.server.crt/.key fleet.claim.crt/.key fleet.operator.crt/.key   our clients
devices/ID/SERIAL.crt                   each certificate of a device
expected/ID                             a device that may enrol itself, once
"""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from device.files import locked, make_folder
from device.protocol.mqtt import LinkSettings
from toolkit.errors import FleetError
from toolkit.fleet.authority import (
    CLAIM,
    OPERATOR,
    SERVER,
    Authority,
    Issued,
    check_device,
    read_certificate,
    write_private,
    write_public,
)
from toolkit.fleet.brokers.mosquitto import BrokerFiles, DeviceAccess
from toolkit.fleet.brokers.software import reload_broker, why_not_readmitted, write_broker

RENEW_DAYS = 60  # a certificate that ends sooner is shown as due


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """A device in the identity folder. `not_after`: of its newest certificate, None without one."""

    device: str
    state: str  # expected | enrolled | revoked
    serials: tuple[int, ...] = ()
    not_after: dt.datetime | None = None


def init_identity(folder: Path, *, fleet: str, hosts: Sequence[str]) -> Authority:
    """Make the CA, the broker's certificate for `hosts`, and the clients of the operator."""
    authority = Authority.create(folder, fleet)
    key, server = authority.issue_server(hosts)
    write_private(folder / "server.key", key)
    write_public(folder / "server.crt", server.pem)
    for name in (SERVER, CLAIM, OPERATOR):
        key, issued = authority.issue(name)
        write_private(folder / f"{name}.key", key)
        write_public(folder / f"{name}.crt", issued.pem)
    for name in ("devices", "expected"):
        make_folder(folder / name)
    return authority


def issue_device(
    authority: Authority, device: str, out: Path, readmitted: Sequence[str] = ()
) -> Issued:
    """Make key and certificate of a device here and write them to `out`, beside the CA's.

    For benches: a key that was made on the device never leaves it. `readmitted`: for which
    `readmit` was done.
    """
    check_device(device)
    with locked(authority.folder):
        _check_not_revoked(authority, (device,), readmitted)
        key, issued = authority.issue(device)
        keep(authority, issued)
    write_private(out / f"{device}.key", key)
    write_public(out / f"{device}.crt", issued.pem)
    write_public(out / "ca.crt", authority.ca_pem)
    return issued


def keep(authority: Authority, issued: Issued) -> None:
    """Store a device's certificate, so that it can be revoked."""
    path = authority.folder / "devices" / issued.name / f"{issued.serial}.crt"
    write_public(path, issued.pem)


def expect(authority: Authority, devices: Sequence[str], readmitted: Sequence[str] = ()) -> None:
    """Let devices enrol themselves, once each; `readmitted`: for which `readmit` was done."""
    for device in devices:
        check_device(device)
    _check_not_revoked(authority, devices, readmitted)
    for device in devices:
        write_public(authority.folder / "expected" / device, b"")


def enrol(authority: Authority, device: str, csr_pem: bytes) -> Issued:
    """Sign the request of an expected device; FleetError if it is not expected.

    A request that was answered is answered again: the device may have missed it.
    """
    check_device(device)
    with locked(authority.folder):
        if not (authority.folder / "expected" / device).exists():
            earlier = _issued_for(authority, device, csr_pem)
            if earlier is not None:
                return earlier
            raise FleetError(
                f"the device {device} is not expected: allow it with "
                f"`tandem fleet identity expect {device}`"
            )
        issued = authority.sign_request(csr_pem, device)
        keep(authority, issued)
        (authority.folder / "expected" / device).unlink()
    return issued


@dataclass(frozen=True, slots=True)
class Revocation:
    """How many certificates were revoked, and whether the broker runs here and was told."""

    certificates: int
    broker_told: bool


def revoke_device(authority: Authority, device: str, broker: BrokerFiles) -> Revocation:
    """Revoke all certificates of a device and shut it out of the broker."""
    expected = authority.folder / "expected" / device
    with locked(authority.folder):
        serials = _serials(authority, device)
        if not serials and not expected.exists():
            raise FleetError(
                f"there is no certificate of {device}: `tandem fleet identity list` shows the "
                "devices"
            )
        expected.unlink(missing_ok=True)
        authority.revoke(serials)
        roster = _roster(authority)
        write_broker(broker, roster)
    return Revocation(len(serials), reload_broker(broker, roster))


def renew_due(authority: Authority, broker: BrokerFiles) -> tuple[str, ...]:
    """Make anew what of the fleet's own files ends soon, and let the broker read them.

    These are crl.pem and the certificates of the broker and of our clients, by the keys that they
    have. Returns the names of the files. Without it a broker would take nobody after CRL_DAYS.
    """
    soon = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=RENEW_DAYS)
    renewed = []
    if authority.crl_end() < soon:
        with locked(authority.folder):
            authority.write_crl()
        renewed.append("crl.pem")
    for name in ("server", SERVER, CLAIM, OPERATOR):
        path = authority.folder / f"{name}.crt"
        certificate = read_certificate(path)
        if certificate.not_valid_after_utc < soon:
            write_public(path, authority.renew(certificate).pem)
            renewed.append(path.name)
    if renewed:
        reload_broker(broker, _roster(authority))
    return tuple(renewed)


def update_broker(authority: Authority, broker: BrokerFiles) -> bool:
    """Write who may connect, and let the broker read it; whether it runs here and was told."""
    with locked(authority.folder):
        roster = _roster(authority)
        write_broker(broker, roster)
    return reload_broker(broker, roster)


def _roster(authority: Authority) -> DeviceAccess:
    rows = identities(authority)
    return DeviceAccess(
        admitted=tuple(row.device for row in rows if row.state != "revoked"),
        revoked=tuple(row.device for row in rows if row.state == "revoked"),
    )


def identities(authority: Authority) -> tuple[DeviceIdentity, ...]:
    """Return all devices, by name."""
    revoked = authority.revoked()
    folder = authority.folder
    enrolled = {path.name for path in (folder / "devices").iterdir() if path.is_dir()}
    expected = {path.name for path in (folder / "expected").iterdir()}
    rows = []
    for device in sorted(enrolled | expected):
        serials = [n for n in _serials(authority, device) if str(n) not in revoked]
        if not serials:
            state = "expected" if device in expected else "revoked"
            rows.append(DeviceIdentity(device, state))
            continue
        ends = [
            read_certificate(folder / "devices" / device / f"{serial}.crt").not_valid_after_utc
            for serial in serials
        ]
        rows.append(DeviceIdentity(device, "enrolled", tuple(serials), max(ends)))
    return tuple(rows)


def is_due(identity: DeviceIdentity) -> bool:
    """Whether the certificate of a device ends within RENEW_DAYS."""
    if identity.not_after is None:
        return False
    return identity.not_after - dt.datetime.now(dt.timezone.utc) < dt.timedelta(days=RENEW_DAYS)


def readmit(
    authority: Authority, devices: Sequence[str], broker: BrokerFiles, settings: LinkSettings
) -> None:
    """End what revoked devices have open at the broker: their ids may be given again, as their
    certificates stay refused. Raises FleetError: that cannot be done."""
    for device in devices:
        if why := why_not_readmitted(broker, settings, _roster(authority), device):
            raise FleetError(
                f"{device} was revoked, and its id is not given again before its connections are "
                f"ended ({why}): let the broker run, or give the board another id"
            )


def _check_not_revoked(
    authority: Authority, devices: Sequence[str], readmitted: Sequence[str]
) -> None:
    """Refuse the ids of revoked devices: the broker denies them by name, for as long as one that
    was stolen may hold a connection."""
    for device in revoked_among(authority, devices):
        if device not in readmitted:
            raise FleetError(
                f"the device {device} was revoked: `tandem fleet identity expect {device}` admits "
                "it again, or give the board another id"
            )


def revoked_among(authority: Authority, devices: Sequence[str]) -> tuple[str, ...]:
    """Return those of some devices that had certificates, of which none holds, and are not expected
    again."""
    revoked, expected = authority.revoked(), authority.folder / "expected"
    return tuple(
        device
        for device in devices
        if (serials := _serials(authority, device))
        and all(str(serial) in revoked for serial in serials)
        and not (expected / device).exists()
    )


def _issued_for(authority: Authority, device: str, csr_pem: bytes) -> Issued | None:
    """Return the certificate that was issued for the key of a request, unless it was revoked."""
    key = authority.check_request(csr_pem, device)
    revoked = authority.revoked()
    for serial in _serials(authority, device):
        certificate = read_certificate(authority.folder / "devices" / device / f"{serial}.crt")
        if certificate.public_key() == key and str(serial) not in revoked:
            pem = certificate.public_bytes(serialization.Encoding.PEM)
            return Issued(device, pem, serial, certificate.not_valid_after_utc)
    return None


def _serials(authority: Authority, device: str) -> list[int]:
    check_device(device)
    paths = (authority.folder / "devices" / device).glob("*.crt")
    return sorted(int(path.stem) for path in paths if path.stem.isdigit())
