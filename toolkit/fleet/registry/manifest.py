"""A bundle as an OCI artifact: an image manifest with bundle.json as its config.

Its layers are the pieces of the bundle in order, whole MiB each but the last: a registry keeps or
loses a layer as a whole, so a cut connection costs one piece at most.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from device.update.bundle import BundleInfo
from toolkit.errors import RegistryError
from toolkit.fleet.registry.reference import Reference

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
BUNDLE_TYPE = "application/vnd.tandem.bundle.v1+tar"
CONFIG_TYPE = "application/vnd.tandem.bundle.config.v1+json"
MAX_BUNDLE_BYTES = 8 * 1024**3
ANNOTATION = "org.opencontainers.image."


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A blob: what it is, its digest and its bytes; annotations are for other clients."""

    media_type: str
    digest: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
    size: int
    annotations: dict[str, str] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What a registry keeps under a tag."""

    schema_version: int
    media_type: str = ""
    artifact_type: str = ""
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = ()
    annotations: dict[str, str] = {}


def describe_blob(media_type: str, data: bytes) -> Descriptor:
    """Return the descriptor of bytes."""
    return Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))


def digest_of(data: bytes) -> str:
    """Return the digest of bytes, as registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def encode_manifest(info: BundleInfo, config: Descriptor, pieces: Sequence[Descriptor]) -> bytes:
    """Return the manifest of a bundle; the same bundle gives the same bytes."""
    annotations = {f"{ANNOTATION}title": info.name, f"{ANNOTATION}version": info.version}
    if info.licence:
        annotations[f"{ANNOTATION}licenses"] = info.licence
    manifest = Manifest(
        schema_version=2,
        media_type=MANIFEST_TYPE,
        artifact_type=BUNDLE_TYPE,
        config=config,
        layers=tuple(
            msgspec.structs.replace(piece, annotations={f"{ANNOTATION}title": title})
            for piece, title in zip(pieces, piece_names(info, len(pieces)), strict=True)
        ),
        annotations=annotations,
    )
    return msgspec.json.encode(manifest)


def piece_names(info: BundleInfo, count: int) -> tuple[str, ...]:
    """Return the file names of a bundle's pieces; their order is that of the pieces.

    Clients that know nothing of Tandem, such as ORAS, show them and write files under them.
    """
    # A name of a bundle may hold any character, and is to be no path on somebody's disk.
    whole = re.sub(r"[^\w.+-]", "_", f"{info.name}-{info.version}.bundle").lstrip(".-")
    if count == 1:
        return (whole,)
    digits = max(3, len(str(count - 1)))
    return tuple(f"{whole}.{number:0{digits}}" for number in range(count))


def pieces_in(data: bytes, reference: Reference) -> tuple[Descriptor, ...]:
    """Return the pieces of the bundle in a manifest. Raises RegistryError: it is none of one."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RegistryError(f"the manifest of {reference} cannot be read: {error}") from error
    pieces = manifest.layers
    if not pieces or any(piece.media_type != BUNDLE_TYPE for piece in pieces):
        kind = manifest.artifact_type or manifest.media_type or "something else"
        raise RegistryError(
            f"{reference} is no bundle, but {kind!r} with {len(pieces)} layers: push one with "
            "`tandem bundle push`"
        )
    total = sum(piece.size for piece in pieces)
    if min(piece.size for piece in pieces) < 1 or total > MAX_BUNDLE_BYTES:
        raise RegistryError(
            f"{reference} says that its bundle has {total} bytes in {len(pieces)} pieces, allowed "
            f"are 1 to {MAX_BUNDLE_BYTES}, and no empty piece"
        )
    return pieces
