"""TLS to the broker: which files it takes, and what its errors mean.

Each connection reads the files anew, so a renewed certificate needs no restart.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from device.errors import BrokerError

# Reason of an `ssl.SSLError`, without the version of TLS before it -> the sentence of it.
REASONS: dict[str, str] = {
    "ALERT_CERTIFICATE_REQUIRED": "the broker takes only clients with a certificate: set "
    "certificate and key of [broker.tls]",
    "ALERT_UNKNOWN_CA": "the broker does not know the CA of our certificate {certificate}: enrol "
    "this device with the fleet of that broker",
    "ALERT_CERTIFICATE_EXPIRED": "our certificate {certificate} has expired: renew it",
    "ALERT_CERTIFICATE_REVOKED": "our certificate {certificate} was revoked",
    "ALERT_BAD_CERTIFICATE": "the broker does not take our certificate {certificate}",
    "ALERT_CERTIFICATE_UNKNOWN": "the broker does not take our certificate {certificate}: it may "
    "be revoked",
    "WRONG_VERSION_NUMBER": "it speaks no TLS on this port: the one for TLS is usually 8883",
    "HANDSHAKE_FAILURE": "it takes none of the ciphers of this machine",
}


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the CA that vouches for the broker, and our certificate with its key."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files; BrokerError names the one that cannot be used."""
        for name, path in (("ca", self.ca), ("certificate", self.certificate), ("key", self.key)):
            if path is not None:
                _check_readable(name, path)
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
            if self.certificate is not None:
                # Without a password an encrypted key would ask on the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise BrokerError(
                f"[broker.tls]: {self.ca}, {self.certificate} and {self.key} are no CA, certificate"
                f" and unencrypted key that fit each other: {error}"
            ) from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return what changes when a file is written anew: inode, time in ns and bytes of each."""
        files = [path for path in (self.ca, self.certificate, self.key) if path is not None]
        return tuple(
            (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            for stat in (path.stat() for path in files if path.exists())
        )


def explain(error: OSError, tls: TlsFiles | None) -> str:
    """Return why a connection failed, in the words of `REASONS` where TLS is to blame."""
    if isinstance(error, ssl.SSLCertVerificationError) and tls is not None:
        return (
            f"the CA {tls.ca} does not vouch for the broker's certificate: {error.verify_message}"
        )
    if isinstance(error, ssl.SSLEOFError):  # mosquitto may hang up before its alert is read
        if tls is None or tls.certificate is None:
            return f"it hung up in the handshake: {REASONS['ALERT_CERTIFICATE_REQUIRED']}"
        return (
            f"it hung up in the handshake: our certificate {tls.certificate} may be revoked, "
            "expired or of another fleet; the broker's log says which"
        )
    if isinstance(error, ssl.SSLError):
        for reason, sentence in REASONS.items():
            if (error.reason or "").endswith(reason):
                return sentence.format(certificate=None if tls is None else tls.certificate)
    return error.strerror or str(error) or "no answer"


def _check_readable(name: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise BrokerError(f"[broker.tls] {name}: cannot read {path}: {error.strerror}") from error
