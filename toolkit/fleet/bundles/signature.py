"""Where a bundle is published, and whether signatures lead from a trusted root to its bytes."""

import json
import tempfile
from pathlib import Path

import msgspec

from device.errors import BundleError, TrustError
from device.trust import desired as rules
from device.trust.fetchers import FolderFetcher, HttpFetcher
from device.trust.journal import Journal
from device.trust.repository import TrustedRepository
from toolkit.fleet.bundles.release import release_of, target_path

METADATA, TARGETS, ROOT = "metadata", "targets", "root.json"


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """What signed metadata say of a bundle.

    `repository`: its folder or URL; `target`: the bundle's path there; `keys`: ids of the keys that
    signed the list of targets; `expires`: when that list does. `verified`: a trusted root led
    here; without one the metadata are only read.
    """

    repository: str
    target: str
    keys: tuple[str, ...]
    version: int
    expires: str
    verified: bool


class _Signed(msgspec.Struct):
    version: int
    expires: str
    targets: dict[str, dict[str, object]] = {}


class _Key(msgspec.Struct):
    keyid: str


class _Metadata(msgspec.Struct):
    signatures: tuple[_Key, ...]
    signed: _Signed


def repository_of(bundle: Path) -> Path | None:
    """Return the signed repository that a bundle lies in, None if it lies in none."""
    for folder in bundle.resolve().parents:
        if folder.name == TARGETS and (folder.parent / METADATA / "timestamp.json").exists():
            return folder.parent
    return None


def read_signature(bundle: Path, repository: Path) -> Signature | None:
    """Return what a repository says of a bundle without verifying it; None: it lists other bytes.

    Raises TrustError: the list of targets cannot be read.
    """
    release = release_of(bundle)
    target = target_path(release.name, release.version, release.profile)
    path = _newest_targets(repository / METADATA)
    try:
        metadata = msgspec.json.decode(path.read_bytes(), type=_Metadata)
    except (OSError, msgspec.MsgspecError) as error:
        raise TrustError(f"{path} cannot be read as signed metadata: {error}") from error
    listed = metadata.signed.targets.get(target)
    if listed is None or listed.get("hashes") != {rules.HASH: release.blob.sha256}:
        return None
    return Signature(
        repository=str(repository),
        target=target,
        keys=tuple(key.keyid for key in metadata.signatures),
        version=metadata.signed.version,
        expires=metadata.signed.expires,
        verified=False,
    )


def verify_signature(bundle: Path, trust: Path, repository: str) -> Signature:
    """Follow the signatures from a trusted root to the bundle.

    `trust`: a root.json, or a folder that has one, as boards get it. `repository`: its folder or
    URL. The check remembers nothing, so it sees no older repository in the place of a newer one, as
    a board does. Raises TrustError, BundleError.
    """
    release = release_of(bundle)
    name = target_path(release.name, release.version, release.profile)
    release = msgspec.structs.replace(release, target=name)
    root = trust / ROOT if trust.is_dir() else trust
    try:
        trusted = root.read_bytes()
    except OSError as error:
        raise TrustError(
            f"cannot read the trusted root {root}: {error.strerror}; give the folder `trust` of "
            "the fleet, or its root.json"
        ) from error
    remote = repository.startswith(("http://", "https://"))
    fetcher = HttpFetcher(repository) if remote else FolderFetcher(Path(repository))
    with tempfile.TemporaryDirectory(prefix="tandem-trust-") as place:
        folder = Path(place)
        verified = TrustedRepository(trusted, folder / METADATA, fetcher, Journal(folder))
        verified.refresh()
        target = verified.target(name)
        if target is None:
            raise TrustError(rules.not_published(release))
        rules.check_release(release, target)
        listed = json.loads((folder / METADATA / "targets.json").read_bytes())
    return Signature(
        repository=repository,
        target=name,
        keys=tuple(key["keyid"] for key in listed["signatures"]),
        version=listed["signed"]["version"],
        expires=listed["signed"]["expires"],
        verified=True,
    )


def _newest_targets(metadata: Path) -> Path:
    numbers = [
        int(path.name.split(".")[0])
        for path in metadata.glob("*.targets.json")
        if path.name.split(".")[0].isdecimal()
    ]
    if not numbers:
        raise BundleError(f"{metadata} has no list of targets: publish with `tandem fleet publish`")
    return metadata / f"{max(numbers)}.targets.json"
