"""The rules of a desired document, as pure functions."""

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
from tuf.api.metadata import TargetFile

from device.errors import TrustError
from device.protocol.documents import Command, Desired, ReleaseSpec, Signed
from device.protocol.signed import count_valid
from device.trust.director import Director

HASH = "sha256"
DESIRED = "the desired document"
COMMAND = "the command"
# What a release says of itself must be what the repository says of it.
_NAMES = ("name", "version", "profile")


def check_signatures(signed: Signed, director: Director, what: str = DESIRED) -> None:
    """Raise TrustError unless enough of the director's keys have signed."""
    valid = count_valid(signed, director.keys)
    if valid < director.threshold:
        raise TrustError(
            f"{what} is signed by {valid} of the director's keys, it needs "
            f"{director.threshold}: whoever published it does not direct this fleet, or the "
            "director's key was rotated; deploy again from the fleet's folder"
        )


def check_address(
    desired: Desired | Command, device: str, now: datetime, what: str = DESIRED
) -> None:
    """Raise TrustError unless the document is for this device and its time is not over."""
    if desired.device != device:
        raise TrustError(
            f"{what} is for the device {desired.device or '(none)'}, this one is "
            f"{device}: somebody has copied it"
        )
    try:
        expires = msgspec.convert(desired.expires, datetime)
    except msgspec.ValidationError as error:
        raise TrustError(
            f"{what} expires at {desired.expires!r}, which is no time: sign it again"
        ) from error
    if expires.tzinfo is None or expires <= now:
        raise TrustError(
            f"{what} has expired at {desired.expires}, it is {now:%Y-%m-%dT%H:%M}Z "
            "here: deploy again, and compare the board's clock"
        )


def not_published(release: ReleaseSpec) -> str:
    """Return the sentence on a release that the repository does not list."""
    return (
        f"the repository has no release {release.target or '(none)'}: {release.name} "
        f"{release.version} was not published, or was taken back; use `tandem fleet publish`"
    )


def check_release(release: ReleaseSpec, target: TargetFile) -> None:
    """Raise TrustError unless the repository has signed these very bytes."""
    what, blob = f"{release.name} {release.version}", release.blob
    if (target.hashes.get(HASH), target.length) != (blob.sha256, blob.bytes):
        raise TrustError(
            f"the desired {what} has {blob.bytes} bytes and the SHA-256 {blob.sha256[:12]}..., the "
            f"repository has signed {target.length} bytes and "
            f"{target.hashes.get(HASH, 'none')[:12]}... as {release.target}: it is another file"
        )
    custom = custom_of(target)
    for key in _NAMES:
        if custom.get(key) != getattr(release, key):
            raise TrustError(
                f"the desired {what} has the {key} {getattr(release, key)!r}, the repository says "
                f"{custom.get(key)!r} of {release.target}: it is another release"
            )


def custom_of(target: TargetFile) -> dict[str, Any]:
    """Return what the signed metadata say of a release beside its hash."""
    custom = target.custom
    return dict(custom) if isinstance(custom, Mapping) else {}


def payload_hash(signed: Signed) -> str:
    """Return the SHA-256 of what is signed."""
    return hashlib.sha256(signed.payload.encode()).hexdigest()
