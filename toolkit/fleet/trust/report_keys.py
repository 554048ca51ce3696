"""Whose signature a report needs: that of a certificate that the fleet issued to its device."""

from pathlib import Path

from securesystemslib.signer import Key, SSlibKey

from device.errors import TrustError
from device.protocol.documents import Reported
from device.protocol.signed import Told, open_told
from toolkit.errors import FleetError
from toolkit.fleet.authority import Authority, read_certificate

DEVICES = "devices"  # of the CA's folder: a folder of certificates for each device


class ReportKeys:
    """Reads reports by the certificates in the CA's folder, as they are now."""

    def __init__(self, identity: Path) -> None:
        self._folder = identity
        self._known: dict[str, tuple[tuple[int, int], dict[str, Key]]] = {}

    def read(self, device: str, payload: bytes) -> Reported:
        """Return a report, as `open` does."""
        return self.open(device, payload, Reported)

    def knows(self, device: str) -> bool:
        """Whether a device was enrolled, so that it signs what it says."""
        return (self._folder / DEVICES / device).is_dir()

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
        folder = self._folder / DEVICES / device
        try:
            changed = (folder.stat().st_mtime_ns, _changed_ns(self._folder / "revoked.json"))
        except FileNotFoundError:
            return None
        known = self._known.get(device)
        if known is None or known[0] != changed:
            known = self._known[device] = (changed, self._read_keys(folder))
        return known[1]

    def _read_keys(self, folder: Path) -> dict[str, Key]:
        revoked = Authority(self._folder).revoked()
        keys: dict[str, Key] = {}
        for path in sorted(folder.glob("*.crt")):
            if path.stem in revoked:
                continue
            try:
                key = SSlibKey.from_crypto(read_certificate(path).public_key())
            except (FleetError, ValueError):  # not one of ours
                continue
            keys[key.keyid] = key
        return keys


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
