"""Whose signature a report needs: that of a certificate that the fleet issued to its device."""

import os
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from securesystemslib.exceptions import UnverifiedSignatureError, VerificationError
from securesystemslib.signer import Key, Signature, SSlibKey

from device.errors import TrustError
from device.protocol.device_key import SCHEME, keyid_of_pem
from device.protocol.documents import Reported
from device.protocol.signed import Told, open_told
from toolkit.errors import FleetError
from toolkit.fleet.authority import read_revoked

_SIGNED_WITH = ec.ECDSA(SHA256())
DEVICES = "devices"  # of the CA's folder: a folder of certificates for each device


class _DeviceKey(SSlibKey):
    """A device's key, on P-256, parsed once: securesystemslib parses its PEM for each signature."""

    def __init__(self, parsed: ec.EllipticCurvePublicKey) -> None:
        """Raises ValueError: it is on another curve."""
        if not isinstance(parsed.curve, ec.SECP256R1):
            raise ValueError(f"the curve {parsed.curve.name} is not P-256")
        public = parsed.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
        # As `SSlibKey.from_crypto` does, which tries each kind of key.
        super().__init__(keyid_of_pem(public), "ecdsa", SCHEME, {"public": public})
        self._parsed = parsed

    def verify_signature(self, signature: Signature, data: bytes) -> None:
        """As securesystemslib does for such a key, without its search for the kind of the key."""
        if signature.keyid != self.keyid:
            raise VerificationError(f"a signature of {signature.keyid}, not of {self.keyid}")
        try:
            self._parsed.verify(bytes.fromhex(signature.signature), data, _SIGNED_WITH)
        except ValueError as error:
            raise VerificationError(f"the signature of {self.keyid} is not in hex") from error
        except InvalidSignature as error:
            raise UnverifiedSignatureError(f"not signed by {self.keyid}") from error


class ReportKeys:
    """Reads reports by the certificates in the CA's folder, as they are now."""

    def __init__(self, identity: Path) -> None:
        self._folder = identity
        self._known: dict[str, tuple[tuple[int, int], dict[str, Key]]] = {}
        self._revoked: tuple[int, frozenset[str]] = (-1, frozenset())

    def read(self, device: str, payload: bytes) -> Reported:
        """Return a report, as `open` does."""
        return self.open(device, payload, Reported)

    def knows(self, device: str) -> bool:
        """Whether a device was enrolled, so that it signs what it says."""
        return os.path.isdir(f"{self._folder}/{DEVICES}/{device}")

    def open(self, device: str, payload: bytes, kind: type[Told]) -> Told:
        """Return what a device says; of one that was enrolled only what it has signed.

        Raises ValueError: it is not understood. Raises TrustError: the device did not sign it, or
        the CA's folder cannot be read.
        """
        try:
            keys = self._keys(device)
        except (FleetError, OSError) as error:
            raise TrustError(
                f"whether {device} signed a report cannot be checked: {error}"
            ) from error
        return open_told(payload, kind, keys)

    def _keys(self, device: str) -> dict[str, Key] | None:
        """Return the keys of a device that are not revoked; None: it was never enrolled."""
        # Paths as texts: two looks at files are taken for each message.
        folder = f"{self._folder}/{DEVICES}/{device}"
        revoked_ns = _changed_ns(f"{self._folder}/revoked.json")
        try:
            changed = (os.stat(folder).st_mtime_ns, revoked_ns)
        except FileNotFoundError:
            return None
        known = self._known.get(device)
        if known is None or known[0] != changed:
            if self._revoked[0] != revoked_ns:
                self._revoked = (revoked_ns, frozenset(read_revoked(self._folder)))
            known = self._known[device] = (changed, self._read_keys(folder))
        return known[1]

    def _read_keys(self, folder: str) -> dict[str, Key]:
        revoked = self._revoked[1]
        keys: dict[str, Key] = {}
        for name in sorted(os.listdir(folder)):
            if not name.endswith(".crt") or name[: -len(".crt")] in revoked:
                continue
            try:
                with open(f"{folder}/{name}", "rb", buffering=0) as file:
                    parsed = x509.load_pem_x509_certificate(file.read()).public_key()
                if not isinstance(parsed, ec.EllipticCurvePublicKey):
                    continue
                key = _DeviceKey(parsed)
            except (OSError, ValueError):  # not one of ours
                continue
            keys[key.keyid] = key
        return keys


def _changed_ns(path: str) -> int:
    """Return when a file was changed, 0: it does not exist."""
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return 0
