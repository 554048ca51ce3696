"""The fleet's own certificate authority: certificates of the broker, of devices and of operators.

Every key is P-256. A device's certificate has its id as common name, which the broker takes as its
user name: the access list follows from it. A device makes its key itself and sends a request
(`sign_request`); `issue` also makes the key, for the broker, operators and benches.
"""

import datetime as dt
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from device.files import make_folder, write_file
from device.protocol.topics import DeviceId
from toolkit.errors import FleetError

CA_DAYS = 3650
DEVICE_DAYS = 730
CRL_DAYS = 365
CLOCK_SKEW = dt.timedelta(hours=1)  # a board without a battery starts in the past
SERVER = "fleet.server"  # no device has this name: a device's id has no dot
CLAIM = "fleet.claim"
OPERATOR = "fleet.operator"
BROKER = "fleet.broker"  # its names are in the extension: a common name has 64 letters at most
HOST = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,252}\Z")


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate that was issued: PEM, its serial number and its end."""

    name: str
    pem: bytes
    serial: int
    not_after: dt.datetime


class Authority:
    """The CA of a fleet in the folder `identity/`: ca.key, ca.crt, crl.pem, revoked.json."""

    def __init__(self, folder: Path) -> None:
        """Open the CA; FleetError if there is none or it cannot be read."""
        self.folder = folder
        self._key = _read_key(folder / "ca.key")
        self._certificate = read_certificate(folder / "ca.crt")

    @classmethod
    def create(cls, folder: Path, fleet: str) -> "Authority":
        """Make a new CA; FleetError if there is one already."""
        if (folder / "ca.key").exists():
            raise FleetError(f"{folder} has a CA already: its devices trust no other")
        make_folder(folder)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, fleet),
                x509.NameAttribute(NameOID.COMMON_NAME, "fleet CA"),
            ]
        )
        now = _now()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + dt.timedelta(days=CA_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .sign(key, hashes.SHA256())
        )
        write_private(folder / "ca.key", _key_pem(key))
        write_public(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))
        authority = cls(folder)
        authority.write_crl()
        return authority

    @property
    def ca_pem(self) -> bytes:
        """The CA's certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    # -- certificates

    def issue_server(self, hosts: Sequence[str]) -> tuple[bytes, Issued]:
        """Issue the broker's certificate for its names and addresses; return the key's PEM too."""
        names: list[x509.GeneralName] = []
        for host in hosts:
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                if not HOST.match(host):
                    raise FleetError(
                        f"{host!r} is neither an address nor a name of a host: use letters, digits "
                        "and . _ -"
                    ) from None
                names.append(x509.DNSName(host))
        key = ec.generate_private_key(ec.SECP256R1())
        san = x509.SubjectAlternativeName(names)
        issued = self._sign(key.public_key(), BROKER, ExtendedKeyUsageOID.SERVER_AUTH, san)
        return _key_pem(key), issued

    def issue(self, name: str) -> tuple[bytes, Issued]:
        """Issue a client certificate with a new key; return the key's PEM too."""
        _check_name(name)
        key = ec.generate_private_key(ec.SECP256R1())
        return _key_pem(key), self._sign(key.public_key(), name, ExtendedKeyUsageOID.CLIENT_AUTH)

    def sign_request(self, csr_pem: bytes, device: str) -> Issued:
        """Sign a device's request (PKCS #10); FleetError says why it is refused."""
        key = self.check_request(csr_pem, device)
        return self._sign(key, device, ExtendedKeyUsageOID.CLIENT_AUTH)

    def check_request(self, csr_pem: bytes, device: str) -> ec.EllipticCurvePublicKey:
        """Return the key of a device's request; FleetError says why it is refused.

        Its signature proves that the device has the key; its common name must be the device's id.
        """
        check_device(device)
        try:  # cryptography reads each part only as it is asked for
            request = x509.load_pem_x509_csr(csr_pem)
            is_signed, key = request.is_signature_valid, request.public_key()
            names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
            raise FleetError(f"the request of {device} is no PKCS #10 in PEM: {error}") from error
        if not is_signed:
            raise FleetError(f"the request of {device} is not signed by its own key")
        if [name.value for name in names] != [device]:
            requested = ", ".join(str(name.value) for name in names) or "nothing"
            raise FleetError(
                f"the request of {device} is for {requested}: a device enrols itself only"
            )
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
            raise FleetError(f"the key of {device} is not on the curve P-256: make one there")
        return key

    def renew(self, certificate: x509.Certificate) -> Issued:
        """Issue a certificate again: key, name, use and addresses stay. For our own P-256 ones."""
        key = certificate.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        name = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        try:
            san = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            san = None
        return self._sign(key, str(name), next(iter(usages)), san)

    def _sign(
        self,
        key: ec.EllipticCurvePublicKey,
        name: str,
        usage: x509.ObjectIdentifier,
        san: x509.SubjectAlternativeName | None = None,
    ) -> Issued:
        now = _now()
        not_after = min(now + dt.timedelta(days=DEVICE_DAYS), self._certificate.not_valid_after_utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(not_after)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False
            )
        )
        if san is not None:
            builder = builder.add_extension(san, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        return Issued(name, pem, certificate.serial_number, not_after)

    # -- revocation

    def revoked(self) -> dict[str, str]:
        """Return serial number (decimal) -> time of revocation (RFC 3339)."""
        return read_revoked(self.folder)

    def revoke(self, serials: Sequence[int]) -> None:
        """Add certificates to the revocation list, which the broker then refuses. The caller holds
        the lock."""
        now = _now().isoformat()
        revoked = {**{str(serial): now for serial in serials}, **self.revoked()}
        write_public(
            self.folder / "revoked.json", msgspec.json.format(msgspec.json.encode(revoked))
        )
        self.write_crl()

    def crl_end(self) -> dt.datetime:
        """When crl.pem ends: from then on a broker takes nobody."""
        path = self.folder / "crl.pem"
        try:
            end = x509.load_pem_x509_crl(path.read_bytes()).next_update_utc
        except (OSError, ValueError) as error:
            raise FleetError(f"cannot read the revocation list {path}: {error}") from error
        assert end is not None  # `write_crl` sets it
        return end

    def write_crl(self) -> None:
        """Write crl.pem anew; it is valid for CRL_DAYS."""
        now = _now()
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(now - CLOCK_SKEW)
            .next_update(now + dt.timedelta(days=CRL_DAYS))
        )
        for serial, at in self.revoked().items():
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder()
                .serial_number(int(serial))
                .revocation_date(dt.datetime.fromisoformat(at))
                .build()
            )
        crl = builder.sign(self._key, hashes.SHA256())
        write_public(self.folder / "crl.pem", crl.public_bytes(serialization.Encoding.PEM))


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate in PEM; FleetError says what is wrong with the file."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FleetError(f"cannot read the certificate {path}: {error}") from error


def read_revoked(folder: Path) -> dict[str, str]:
    """Return serial number (decimal) -> time of revocation (RFC 3339) of the CA in a folder;
    FleetError: its list cannot be read."""
    path = folder / "revoked.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise FleetError(f"cannot read {path}: {error}") from error


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise FleetError(f"cannot read the key {path}: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FleetError(f"the key {path} is not on the curve P-256")
    return key


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _key_usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        key_cert_sign=certificates,
        crl_sign=certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _check_name(name: str) -> None:
    if name not in (SERVER, CLAIM, OPERATOR):
        check_device(name)


def check_device(device: str) -> None:
    """Refuse what is no id of a device: it becomes a topic and the name of a file."""
    try:
        msgspec.convert(device, DeviceId)
    except msgspec.ValidationError as error:
        raise FleetError(
            f"{device!r} is not the id of a device: that has 1 to 64 letters, digits, - and _"
        ) from error


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner reads."""
    write_file(path, content, 0o600, FleetError)


def write_public(path: Path, content: bytes) -> None:
    """Write a file that all may read."""
    write_file(path, content, 0o666, FleetError)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.timezone.utc).replace(microsecond=0)
