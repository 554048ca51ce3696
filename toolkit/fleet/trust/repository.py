"""The fleet's TUF repository: a folder with signed metadata and the released bundles.

    metadata/N.root.json N.targets.json N.snapshot.json timestamp.json
    targets/NAME/VERSION/HASH.PROFILE.bundle   HASH.director.json

Every change writes new files beside the old ones, synced, and takes effect when timestamp.json is
replaced. What an interrupted change left is not referred to, and is overwritten by the next one.
"""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
from securesystemslib.exceptions import StorageError
from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import (
    Metadata,
    MetaFile,
    Role,
    Root,
    Snapshot,
    T,
    TargetFile,
    Targets,
    Timestamp,
)
from tuf.api.serialization.json import JSONSerializer

from device.errors import TrustError
from device.files import locked, make_folder, replacing, write_file
from device.protocol.documents import encode
from device.protocol.signed import sign_text
from device.trust.director import DIRECTOR, DIRECTOR_FORMAT, DirectorDocument
from toolkit.fleet.trust.keys import load_keys, load_root_keys, make_key, retire_keys

ROLES = ("targets", "snapshot", "timestamp")  # that root delegates to; director is beside TUF
# For how many days a signature holds. A board that sees no newer timestamp for so long installs
# nothing, so the timestamp is what a server signs again while it runs.
LIFETIME_DAYS: Mapping[str, int] = {
    "root": 730, "targets": 730, "snapshot": 60, "timestamp": 14, "director": 730,
}  # fmt: skip
_SERIALIZER = JSONSerializer(compact=True)


@dataclass(frozen=True, slots=True)
class Expiry:
    """When the signature of a role ends."""

    role: str
    version: int
    expires: datetime


class FleetRepository:
    """The repository and keys of one fleet folder. Writers hold a lock on it."""

    def __init__(self, fleet: Path) -> None:
        self.fleet = fleet
        self.keys = fleet / "keys"
        self.metadata = fleet / "repository" / "metadata"
        self.targets = fleet / "repository" / "targets"
        self.trust = fleet / "trust"
        if not (self.metadata / "timestamp.json").exists():
            raise TrustError(f"{fleet} is not the folder of a fleet: `tandem fleet init` makes one")

    # -- reading

    @property
    def root(self) -> Root:
        """The newest root."""
        return self._load_root().signed

    def target(self, path: str) -> TargetFile | None:
        """Return what is published under a path, None if nothing is."""
        return self._load(Targets).signed.targets.get(path)

    def bundles(self) -> tuple[Path, ...]:
        """Return the files of all that is published; each name begins with its SHA-256."""
        listed = self._load(Targets).signed.targets.values()
        return tuple(self.targets / target.get_prefixed_paths()[0] for target in listed)

    def expiries(self) -> tuple[Expiry, ...]:
        """Return when each signature ends."""
        roles = (
            self.root,
            self._load(Targets).signed,
            self._load(Snapshot).signed,
            self._load(Timestamp).signed,
        )
        director = self._director()
        return (
            *(Expiry(role.type, role.version, role.expires) for role in roles),
            Expiry("director", director.version, director.expires),
        )

    def director_signer(self) -> CryptoSigner:
        """Return a key of the director; TrustError if it is not in the folder."""
        return _one_of(load_keys(self.keys, "director"), self._director().keys, "director")

    # -- changes

    def publish(self, bundle: Path, target: str, custom: Mapping[str, Any]) -> TargetFile:
        """Add a file under a target path; the same bytes once more change nothing.

        Raises TrustError: other bytes are published under that path, or a key is missing.
        """
        with locked(self.fleet):
            listed = self._load(Targets).signed
            released = TargetFile.from_file(target, str(bundle), ["sha256"])
            known = listed.targets.get(target)
            if known is not None and known.hashes != released.hashes:
                raise TrustError(
                    f"{target} is published with other bytes (SHA-256 "
                    f"{known.hashes['sha256'][:12]}...): give the bundle a new version"
                )
            if known is not None and known.custom == dict(custom):
                return known
            released.unrecognized_fields["custom"] = dict(custom)
            self._store(bundle, released)
            listed.targets[target] = released
            self._commit(listed)
        return released

    def refresh(self, *, due_only: bool = False) -> bool:
        """Sign timestamp, and snapshot where half of its time is over, again.

        `due_only`: only if half of the time of one of them is over. Returns whether it signed.
        """
        with locked(self.fleet):
            due = (_is_due(self._load(Timestamp).signed), _is_due(self._load(Snapshot).signed))
            if due_only and not any(due):
                return False
            self._commit(None)
        return True

    def rotate(self, role: str) -> None:
        """Make new keys for a role; boards follow at their next check.

        What the role signed is signed by the old and the new key before root names the new one, so
        that boards accept it before and after.
        """
        with locked(self.fleet):
            if role == "director":
                self._rotate_director()
            elif role == "root":
                self._rotate_root()
            else:
                self._rotate_role(role)
            self._fill_trust()

    def _rotate_role(self, role: str) -> None:
        root = self._load_root()
        old, root_signers = list(root.signed.roles[role].keyids), self._root_signers()
        new = make_key(self.keys, role)
        listed = self._load(Targets).signed if role == "targets" else None
        self._commit(listed, {role: new})
        for keyid in old:
            root.signed.revoke_key(keyid, role)
        root.signed.add_key(new.public_key, role)
        self._sign_root(root, root_signers)
        retire_keys(self.keys, old, f"{role}*.pem")

    def _rotate_root(self) -> None:
        root = self._load_root()
        old = list(root.signed.roles["root"].keyids)
        signers = self._root_signers()
        new = [make_key(self.keys, f"root-{number}") for number in range(1, len(old) + 1)]
        # The director's document holds under the old root and under the new one.
        self._write_director(self._director().keys, [*signers, *new])
        for keyid in old:
            root.signed.revoke_key(keyid, "root")
        for signer in new:
            root.signed.add_key(signer.public_key, "root")
        self._sign_root(root, [*signers, *new])
        retire_keys(self.keys, old, "root-*.pem")

    def _rotate_director(self) -> None:
        old, root_signers = self._director().keys, self._root_signers()
        new = make_key(self.keys, "director")
        self._write_director({new.public_key.keyid: new.public_key.to_dict()}, root_signers)
        retire_keys(self.keys, old, "director*.pem")

    def _root_signers(self) -> list[CryptoSigner]:
        """Return root's keys that are in the folder; TrustError if they are too few to sign."""
        role, signers = self.root.roles["root"], load_root_keys(self.keys)
        there = [signers[keyid] for keyid in role.keyids if keyid in signers]
        if len(there) < role.threshold:
            raise TrustError(
                f"{len(there)} of root's {len(role.keyids)} keys are in {self.keys}, a signature "
                f"needs {role.threshold}: put their files back there while you sign"
            )
        return there

    # -- files

    def _director(self) -> DirectorDocument:
        listed = self._load(Targets).signed.targets[DIRECTOR]
        data = (self.targets / listed.get_prefixed_paths()[0]).read_bytes()
        payload = msgspec.json.decode(data)["payload"]
        return msgspec.json.decode(payload, type=DirectorDocument)

    def _write_director(
        self, keys: dict[str, dict[str, Any]], root_signers: Iterable[CryptoSigner]
    ) -> None:
        """Publish the next director document."""
        document = make_director(keys, self._director().version + 1)
        data = encode(sign_text(msgspec.json.encode(document).decode(), root_signers))
        listed = self._load(Targets).signed
        listed.targets[DIRECTOR] = TargetFile.from_data(DIRECTOR, data, ["sha256"])
        _replace(self.targets / listed.targets[DIRECTOR].get_prefixed_paths()[0], data)
        self._commit(listed)

    def _store(self, bundle: Path, target: TargetFile) -> None:
        path = self.targets / target.get_prefixed_paths()[0]
        if path.exists():
            return
        make_folder(path.parent)
        try:
            with bundle.open("rb") as source, replacing(path) as file:
                shutil.copyfileobj(source, file)
        except OSError as error:
            raise TrustError(f"cannot copy {bundle} to {path}: {error.strerror}") from error

    def _commit(
        self, targets: Targets | None, also: Mapping[str, CryptoSigner] | None = None
    ) -> None:
        """Write what follows from new targets: their file, a snapshot and, at last, a timestamp.

        `also`: further keys that sign, by role.
        """
        more = also or {}
        snapshot, timestamp = self._load(Snapshot).signed, self._load(Timestamp).signed
        if targets is not None:
            _renew(targets)
            self._write(targets, f"{targets.version}.targets.json", more)
            snapshot.meta["targets.json"] = MetaFile(targets.version)
        if targets is not None or "snapshot" in more or _is_due(snapshot):
            _renew(snapshot)
            self._write(snapshot, f"{snapshot.version}.snapshot.json", more)
            timestamp.snapshot_meta = MetaFile(snapshot.version)
        _renew(timestamp)
        self._write(timestamp, "timestamp.json", more)

    def _write(self, signed: T, name: str, more: Mapping[str, CryptoSigner]) -> None:
        role = signed.type
        root = self.root
        keys = {keyid: root.keys[keyid] for keyid in root.roles[role].keyids}
        metadata = Metadata(signed)
        metadata.sign(_one_of(load_keys(self.keys, role), keys, role))
        if role in more:
            metadata.sign(more[role], append=True)
        _replace(self.metadata / name, metadata.to_bytes(_SERIALIZER))

    def _sign_root(self, root: Metadata[Root], signers: Iterable[CryptoSigner]) -> None:
        """Write the next root; it takes effect with its file."""
        before = self.root
        _renew(root.signed)
        root.signatures.clear()
        for signer in signers:
            root.sign(signer, append=True)
        for judge in (before, root.signed):
            judge.verify_delegate("root", root.signed_bytes, root.signatures)
        _replace(self.metadata / f"{root.signed.version}.root.json", root.to_bytes(_SERIALIZER))

    def _fill_trust(self) -> None:
        """Bring what boards get up to date. Boards that have the old files follow by themselves."""
        listed = self._load(Targets).signed.targets[DIRECTOR]
        root = self.metadata / f"{self.root.version}.root.json"
        for name, path in (
            ("root.json", root),
            (DIRECTOR, self.targets / listed.get_prefixed_paths()[0]),
        ):
            _replace(self.trust / name, path.read_bytes())

    def _load_root(self) -> Metadata[Root]:
        versions = [int(path.name.split(".")[0]) for path in self.metadata.glob("*.root.json")]
        return self._read(Root, f"{max(versions, default=1)}.root.json")

    def _load(self, role: type[T]) -> Metadata[T]:
        """Return the metadata that timestamp.json leads to."""
        name = "timestamp.json"
        if role is not Timestamp:
            timestamp = self._read(Timestamp, name)
            name = f"{timestamp.signed.snapshot_meta.version}.snapshot.json"
        if role is Targets:
            snapshot = self._read(Snapshot, name)
            name = f"{snapshot.signed.meta['targets.json'].version}.targets.json"
        return self._read(role, name)

    def _read(self, role: type[T], name: str) -> Metadata[T]:
        path = self.metadata / name
        try:
            metadata: Metadata[T] = Metadata.from_file(str(path))
        except (RepositoryError, StorageError) as error:
            raise TrustError(
                f"{path} is missing or damaged ({error}): bring the fleet's folder back from a "
                "backup"
            ) from error
        if not isinstance(metadata.signed, role):
            raise TrustError(f"{path} is {metadata.signed.type}: another file has its name")
        return metadata


def make_repository(fleet: Path, *, root_keys: int = 1, threshold: int = 1) -> FleetRepository:
    """Make keys, metadata without releases, and the folder that every board gets.

    Raises TrustError: the folder has one already, or the threshold cannot be met.
    """
    if not 1 <= threshold <= root_keys <= 16:
        raise TrustError(
            f"{threshold} of {root_keys} root keys cannot sign: use 1 to 16 keys and a threshold "
            "of at most as many"
        )
    if (fleet / "repository" / "metadata" / "timestamp.json").exists():
        raise TrustError(f"{fleet} holds a fleet already: choose another folder")
    for name in ("keys", "repository/metadata", "repository/targets", "trust"):
        make_folder(fleet / name)
    (fleet / "keys").chmod(0o700)
    keys, metadata, trust = fleet / "keys", fleet / "repository" / "metadata", fleet / "trust"
    root_signers = [make_key(keys, f"root-{number}") for number in range(1, root_keys + 1)]
    signers = {role: make_key(keys, role) for role in ROLES}
    director_key = make_key(keys, "director").public_key
    document = make_director({director_key.keyid: director_key.to_dict()}, 1)
    director = encode(sign_text(msgspec.json.encode(document).decode(), root_signers))
    listed = TargetFile.from_data(DIRECTOR, director, ["sha256"])
    root = Root(
        expires=_expiry("root"),
        keys={one.public_key.keyid: one.public_key for one in [*root_signers, *signers.values()]},
        roles={
            "root": Role([root_signer.public_key.keyid for root_signer in root_signers], threshold),
            **{role: Role([signers[role].public_key.keyid], 1) for role in ROLES},
        },
    )
    _replace(fleet / "repository/targets" / listed.get_prefixed_paths()[0], director)
    targets = Targets(expires=_expiry("targets"), targets={DIRECTOR: listed})
    root_data = _signed(root, root_signers)
    timestamp = _signed(Timestamp(expires=_expiry("timestamp")), [signers["timestamp"]])
    for path, data in (
        (metadata / "1.root.json", root_data),
        (metadata / "1.targets.json", _signed(targets, [signers["targets"]])),
        (
            metadata / "1.snapshot.json",
            _signed(Snapshot(expires=_expiry("snapshot")), [signers["snapshot"]]),
        ),
        (trust / "root.json", root_data),
        (trust / DIRECTOR, director),
        (metadata / "timestamp.json", timestamp),  # with it the folder is that of a fleet
    ):
        _replace(path, data)
    return FleetRepository(fleet)


def make_director(keys: dict[str, dict[str, Any]], version: int) -> DirectorDocument:
    """Return a director document, to be signed by root's keys. One of the keys must sign."""
    return DirectorDocument(
        format=DIRECTOR_FORMAT,
        version=version,
        expires=_expiry("director"),
        threshold=1,
        keys=keys,
    )


def _one_of(
    signers: Mapping[str, CryptoSigner], keys: Mapping[str, Any], role: str
) -> CryptoSigner:
    """Return a key that signed metadata name."""
    for keyid, signer in signers.items():
        if keyid in keys:
            return signer
    raise TrustError(
        f"none of the keys in the fleet's folder may sign for {role}: put the file of the key "
        f"{', '.join(key[:12] for key in keys)}... back as keys/{role}.pem"
    )


def _signed(signed: T, signers: Iterable[CryptoSigner]) -> bytes:
    metadata = Metadata(signed)
    for signer in signers:
        metadata.sign(signer, append=True)
    return metadata.to_bytes(_SERIALIZER)


def _expiry(role: str) -> datetime:
    now = datetime.now(timezone.utc).replace(microsecond=0)
    return now + timedelta(days=LIFETIME_DAYS[role])


def _renew(signed: Root | Targets | Snapshot | Timestamp) -> None:
    signed.version += 1
    signed.expires = _expiry(signed.type)


def _is_due(signed: Snapshot | Timestamp) -> bool:
    """Whether half of its time is over."""
    remaining = signed.expires - datetime.now(timezone.utc)
    return remaining < timedelta(days=LIFETIME_DAYS[signed.type]) / 2


def _replace(path: Path, data: bytes) -> None:
    write_file(path, data, 0o666, TrustError)
