"""The fleet's keys: Ed25519, one PEM file each, for their owner alone to read.

Which key counts is said by signed metadata, never by a file's name: a key is found by its id among
the files of its role, so that a rotation that is interrupted leaves nothing to repair.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from securesystemslib.signer import CryptoSigner

from device.errors import TrustError
from device.files import replacing, sync_folder

PASSPHRASE = "TANDEM_FLEET_PASSPHRASE"
RETIRED = "retired"  # folder of keys that were rotated away


def make_key(folder: Path, name: str) -> CryptoSigner:
    """Make a key and write it as `name`.pem, or `name`.2.pem and so on where that exists.

    With TANDEM_FLEET_PASSPHRASE in the environment the file is encrypted. The caller holds the
    fleet's lock.
    """
    private = Ed25519PrivateKey.generate()
    data = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, _encryption())
    names = (name, *(f"{name}.{number}" for number in range(2, 10_000)))
    path = next((path for one in names if not (path := folder / f"{one}.pem").exists()), None)
    if path is None:
        raise TrustError(f"{folder} has 9999 keys of {name}: take old ones away")
    try:
        with replacing(path, 0o600) as file:  # half a key would stop all signing
            file.write(data)
    except OSError as error:
        raise TrustError(f"cannot write the key {path}: {error.strerror}") from error
    return CryptoSigner(private)


def load_keys(folder: Path, name: str) -> dict[str, CryptoSigner]:
    """Return the keys of a role that are in the folder, by their ids; `name`.pem, `name`.2.pem."""
    paths = [folder / f"{name}.pem", *sorted(folder.glob(f"{name}.[0-9]*.pem"))]
    signers = [_load(path) for path in paths if path.exists()]
    return {signer.public_key.keyid: signer for signer in signers}


def load_root_keys(folder: Path) -> dict[str, CryptoSigner]:
    """Return root's keys that are in the folder, root-1.pem and so on, by their ids."""
    signers = [_load(path) for path in sorted(folder.glob("root-*.pem"))]
    return {signer.public_key.keyid: signer for signer in signers}


def retire_keys(folder: Path, keyids: Iterable[str], pattern: str) -> None:
    """Move the files of these keys into the folder `retired`."""
    retired = set(keyids)
    for path in sorted(folder.glob(pattern)):
        keyid = _load(path).public_key.keyid
        if keyid in retired:
            (folder / RETIRED).mkdir(mode=0o700, exist_ok=True)
            os.replace(path, folder / RETIRED / f"{path.stem}.{keyid[:8]}.pem")
    sync_folder(folder)


def _load(path: Path) -> CryptoSigner:
    passphrase = os.environ.get(PASSPHRASE)
    try:
        data = path.read_bytes()
        private = load_pem_private_key(data, passphrase.encode() if passphrase else None)
    except OSError as error:
        raise TrustError(f"cannot read the key {path}: {error.strerror}") from error
    except TypeError as error:  # a passphrase that is missing, or not needed
        if passphrase is None:
            raise TrustError(
                f"the key {path} is encrypted: give its passphrase as {PASSPHRASE}"
            ) from error
        private = load_pem_private_key(data, None)
    except ValueError as error:
        raise TrustError(
            f"the key {path} cannot be read: it is damaged, or {PASSPHRASE} is wrong"
        ) from error
    return CryptoSigner(private)


def _encryption() -> KeySerializationEncryption:
    passphrase = os.environ.get(PASSPHRASE)
    return BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
