"""Publishes a bundle in the fleet's repository: from then on a device may install it.

A bench, a fleet without keys, keeps a copy of the bundle instead."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tuf.api.metadata import TargetFile

from device.errors import BundleError
from device.files import make_folder, replacing
from device.protocol.documents import ReleaseSpec
from device.update.admission import FLOOR, REQUIRES
from device.update.bundle import check_bundle, read_bundle_info
from toolkit.errors import FleetError
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.release import release_of, target_path
from toolkit.fleet.trust.repository import FleetRepository

BENCH_BUNDLES = "bundles"  # of a fleet without keys
KEYS = "keys"
CHUNK_FORMAT = "fixed"  # all chunks but the last have the same size


@dataclass(frozen=True, slots=True)
class Published:
    """A release in the repository; `target` is its path there, `source` where it was pulled."""

    target: str
    name: str
    version: str
    profile: str
    sha256: str
    bytes: int
    source: str = ""


def publish_bundle(repository: FleetRepository, bundle: Path, source: str = "") -> Published:
    """Check a bundle and publish it; once more it changes nothing.

    `source`: the reference by digest in the registry that it comes from; what was noted before
    stays. Raises BundleError: it is damaged. Raises TrustError: its version is published with other
    bytes, its names cannot be a path, or a key is missing.
    """
    info, _ = check_bundle(bundle)
    target = target_path(info.name, info.version, info.profile)
    blob = Blob(bundle)
    blob.close()
    source = source or _known_source(repository.target(target), blob.spec.sha256)
    custom: dict[str, Any] = {
        "name": info.name,
        "version": info.version,
        "profile": info.profile,
        "index_sha256": blob.spec.index_sha256,
        "chunk_format": CHUNK_FORMAT,
    }
    statements = {
        # Canonical JSON, which is signed, has no numbers with a fraction.
        "metrics": {key: repr(value) for key, value in info.metrics.items()},
        REQUIRES: info.requires,
        FLOOR: info.min_version_floor,
        "hashes": info.hashes,
        "licence": info.licence,
        "source": source,
    }
    custom |= {key: value for key, value in statements.items() if value}
    repository.publish(bundle, target, custom)
    return Published(
        target, info.name, info.version, info.profile, blob.spec.sha256, blob.spec.bytes, source
    )


def _known_source(known: TargetFile | None, sha256: str) -> str:
    """Return the source that is noted of these very bytes."""
    if known is None or known.hashes.get("sha256") != sha256 or known.custom is None:
        return ""
    return str(known.custom.get("source", ""))


def is_signed(fleet: Path) -> bool:
    """Whether a fleet has keys; one without is a bench, whose devices have dev = true."""
    return (fleet / KEYS).is_dir()


def admit(fleet: Path, bundle: Path) -> ReleaseSpec:
    """Publish a bundle, or copy it on a bench; once more changes nothing.

    Raises BundleError: it is damaged; TrustError: its version is published with other bytes, or a
    key is missing.
    """
    release = release_of(bundle)
    if is_signed(fleet):
        published = publish_bundle(FleetRepository(fleet), bundle)
        return msgspec.structs.replace(release, target=published.target)
    copy = fleet / BENCH_BUNDLES / f"{release.blob.sha256}.bundle"
    if not copy.exists():
        make_folder(copy.parent)
        with bundle.open("rb") as source, replacing(copy) as file:
            shutil.copyfileobj(source, file)
    return release


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """A bundle that the fleet's folder has: of its repository, or the copy of a bench."""

    name: str
    version: str
    profile: str
    sha256: str
    bytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class Stored:
    """The bundles of a fleet's folder; `unreadable`: why some cannot be rolled out."""

    bundles: tuple[StoredBundle, ...]
    unreadable: tuple[str, ...] = ()


def list_stored(fleet: Path) -> Stored:
    """Return the bundles that can be rolled out without their files at hand, by name; of one name
    the one that was written last is first."""
    if is_signed(fleet):
        paths = FleetRepository(fleet).bundles()
    else:
        paths = tuple((fleet / BENCH_BUNDLES).glob("*.bundle"))
    rows: list[tuple[str, float, StoredBundle]] = []
    unreadable = []
    for path in paths:
        try:
            facts, info = path.stat(), read_bundle_info(path)
        except (BundleError, OSError) as error:
            unreadable.append(f"{path.name}: {getattr(error, 'strerror', None) or error}")
            continue
        sha256 = path.name.partition(".")[0]
        row = StoredBundle(info.name, info.version, info.profile, sha256, facts.st_size, path)
        rows.append((info.name, -facts.st_mtime, row))
    ordered = sorted(rows, key=lambda row: row[:2])
    return Stored(tuple(row for _, _, row in ordered), tuple(unreadable))


def find_stored(fleet: Path, sha256: str) -> StoredBundle:
    """Return a bundle of the fleet's folder. Raises FleetError: there is none."""
    for bundle in list_stored(fleet).bundles:
        if bundle.sha256 == sha256:
            return bundle
    raise FleetError(f"the fleet has no bundle {sha256[:12]!r}: `tandem fleet publish` adds one")
