"""A device's key and its request for a certificate, and the documents that carry them.

`cryptography` comes with the extra `fleet`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from device.errors import ConfigError
from device.install_advice import pip_install
from device.protocol.topics import PROVISION, DeviceId

MAX_PEM = 16 * 1024
Pem = Annotated[str, Meta(max_length=MAX_PEM)]


class EnrolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A device asks for a certificate: a PKCS #10 request in PEM."""

    device: DeviceId
    csr: Pem


class EnrolResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate and the CA's in PEM, or why there is none in `error`."""

    device: DeviceId
    certificate: Pem = ""
    ca: Pem = ""
    error: str = ""


def request_topic(request: str) -> str:
    """Return the topic of a request."""
    return f"{PROVISION}/{request}/request"


def response_topic(request: str) -> str:
    """Return the topic of its answer."""
    return f"{PROVISION}/{request}/response"


def new_key() -> bytes:
    """Make a key on the curve P-256; PEM."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigError(
            f"a key needs the package cryptography: {pip_install('fleet')}"
        ) from error
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def make_request(key_pem: bytes, device: str) -> bytes:
    """Return the request of a device for a certificate in its name, signed with its key; PEM.

    Raises ValueError or TypeError: the key is none on the curve P-256, or encrypted.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = serialization.load_pem_private_key(key_pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp256r1":
        raise ValueError("it is of another kind")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, device)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name)
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def fits_key(certificate_pem: bytes, key_pem: bytes, device: str) -> bool:
    """Whether a certificate is of this key and in the name of this device."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.x509.oid import NameOID

    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
    except ValueError:
        return False
    key = serialization.load_pem_private_key(key_pem, None)
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return [name.value for name in names] == [device] and (
        certificate.public_key() == key.public_key()
    )
