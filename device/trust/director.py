"""The director document: whose signatures a desired document needs.

It is signed by a threshold of root's keys and listed in the repository like a release, so that
neither a stolen director key nor a stolen targets key can put another one in its place, and nobody
can hide a newer one for longer than the timestamp lives.
"""

import hashlib
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from securesystemslib.signer import Key
from securesystemslib.signer import Signature as KeySignature
from tuf.api.exceptions import LengthOrHashMismatchError, UnsignedMetadataError
from tuf.api.metadata import Root, TargetFile

from device.errors import TrustError
from device.files import open_to_read
from device.protocol.documents import Signed, decode
from device.trust.journal import Journal, SeenVersion
from device.trust.repository import TrustedRepository

DIRECTOR = "director.json"  # the target, and its file in a board's folder
DIRECTOR_FORMAT = 1


class DirectorDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of the director, by their ids, and how many of them must sign.

    `type` tells it from everything else that root's keys sign. `expires`: RFC 3339, UTC.
    """

    type: str = "director"
    format: int
    version: Annotated[int, Meta(ge=1)]
    expires: datetime
    threshold: Annotated[int, Meta(ge=1)]
    keys: Annotated[dict[str, dict[str, Any]], Meta(min_length=1, max_length=32)]


class Director(msgspec.Struct, frozen=True):
    """The director's keys as they are used."""

    version: int
    threshold: int
    keys: dict[str, Key]

    @property
    def keys_text(self) -> str:
        """A text that changes with the keys or the threshold."""
        named = f"{self.threshold} {' '.join(sorted(self.keys))}"
        return hashlib.sha256(named.encode()).hexdigest()


def load_director(
    repository: TrustedRepository, journal: Journal, cached: Path, provisioned: Path
) -> Director:
    """Return the director's keys by the document that the repository lists.

    `cached` is replaced where the document is a new one. Raises TrustError: it is not listed, not
    signed by root's threshold, expired, or older than one that was seen.
    """
    target = repository.target(DIRECTOR)
    if target is None:
        raise TrustError(
            f"the repository lists no {DIRECTOR}: it was not made by `tandem fleet init`, or "
            "somebody has taken it out"
        )
    path = next((path for path in (cached, provisioned) if _is_target(path, target)), None)
    if path is None:
        repository.fetch(target, cached)
        path = cached
    director = open_director(path.read_bytes(), repository.root, datetime.now(timezone.utc))
    journal.check_version("director", director.version, "")
    journal.note({"director": SeenVersion(director.version)})
    return director


def open_director(data: bytes, root: Root, now: datetime) -> Director:
    """Verify a director document against root's keys."""
    try:
        signed = decode(data, Signed)
        document = msgspec.json.decode(signed.payload, type=DirectorDocument)
        keys = {keyid: Key.from_dict(keyid, dict(key)) for keyid, key in document.keys.items()}
    except (ValueError, KeyError, TypeError) as error:  # of securesystemslib, of any JSON
        raise TrustError(f"{DIRECTOR} is not a director document: {error}") from error
    signatures = {
        signature.keyid: KeySignature(signature.keyid, signature.sig)
        for signature in signed.signatures
    }
    try:
        root.verify_delegate("root", signed.payload.encode(), signatures)
    except UnsignedMetadataError as error:
        raise TrustError(
            f"{DIRECTOR} is not signed by enough of root's keys ({error}): nothing that it names "
            "may direct this board"
        ) from error
    if document.type != "director" or document.format != DIRECTOR_FORMAT:
        raise TrustError(
            f"{DIRECTOR} has the type {document.type} and the format {document.format}, this agent "
            f"reads director {DIRECTOR_FORMAT}: update the agent"
        )
    if document.expires <= now:
        raise TrustError(
            f"{DIRECTOR} has expired at {document.expires:%Y-%m-%d %H:%M} UTC: sign it again with "
            "`tandem fleet keys rotate director`, and compare the board's clock"
        )
    return Director(document.version, document.threshold, keys)


def _is_target(path: Path, target: TargetFile) -> bool:
    try:
        with open_to_read(path, follow=True) as file:
            target.verify_length_and_hashes(file)
    except (OSError, LengthOrHashMismatchError):
        return False
    return True
