"""A bundle as a release: what a desired document says of it, and its path in a repository."""

import re
from pathlib import Path

from device.errors import TrustError
from device.protocol.documents import ReleaseSpec
from device.update.bundle import check_bundle
from toolkit.fleet.bundles.blob import Blob

NAME_PART = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]*\Z")


def release_of(bundle: Path) -> ReleaseSpec:
    """Return a bundle as a release; BundleError if it is damaged."""
    info, _ = check_bundle(bundle)
    blob = Blob(bundle)
    blob.close()
    return ReleaseSpec(name=info.name, version=info.version, profile=info.profile, blob=blob.spec)


def target_path(name: str, version: str, profile: str) -> str:
    """Return the target path of a release. Raises TrustError: a part of it is no file name."""
    for key, part in (("name", name), ("version", version), ("profile", profile)):
        if not NAME_PART.match(part):
            raise TrustError(
                f"the {key} {part!r} of the bundle cannot be part of a path: use letters, digits "
                "and . _ + - , and no dot at the start"
            )
    return f"{name}/{version}/{profile}.bundle"
