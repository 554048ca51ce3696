"""Takes a bundle into a fleet's folder before it is rolled out: signed, or copied on a bench."""

import shutil
from pathlib import Path

import msgspec

from device.files import make_folder, replacing
from device.protocol.documents import ReleaseSpec
from device.update.bundle import check_bundle
from toolkit.fleet.blob import Blob

BENCH_BUNDLES = "bundles"  # of a fleet without keys
KEYS = "keys"


def is_signed(fleet: Path) -> bool:
    """Whether a fleet has keys; one without is a bench, whose devices have dev = true."""
    return (fleet / KEYS).is_dir()


def release_of(bundle: Path) -> ReleaseSpec:
    """Return a bundle as a release; BundleError if it is damaged."""
    info, _ = check_bundle(bundle)
    blob = Blob(bundle)
    blob.close()
    return ReleaseSpec(name=info.name, version=info.version, profile=info.profile, blob=blob.spec)


def admit(fleet: Path, bundle: Path) -> ReleaseSpec:
    """Publish a bundle, or copy it on a bench; once more changes nothing.

    Raises BundleError: it is damaged; TrustError: its version is published with other bytes, or a
    key is missing.
    """
    release = release_of(bundle)
    if is_signed(fleet):
        from toolkit.fleet.publish import publish_bundle
        from toolkit.fleet.repository import FleetRepository

        published = publish_bundle(FleetRepository(fleet), bundle)
        return msgspec.structs.replace(release, target=published.target)
    copy = fleet / BENCH_BUNDLES / f"{release.blob.sha256}.bundle"
    if not copy.exists():
        make_folder(copy.parent)
        with bundle.open("rb") as source, replacing(copy) as file:
            shutil.copyfileobj(source, file)
    return release
