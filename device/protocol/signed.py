"""Signatures over documents, and one way to read a document that may be signed.

What is signed are the UTF-8 bytes of `Signed.payload`, as they are: nothing is parsed before its
signature is checked, and nothing has to be written in a canonical form. The cryptography is
securesystemslib's, imported when a signature is made or checked.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from device.errors import TrustError
from device.protocol.documents import (
    Beat,
    Command,
    Desired,
    Reported,
    Signature,
    Signed,
    SignedCommand,
    decode,
    encode,
)

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer

Told = TypeVar("Told", Reported, Beat)
Ordered = TypeVar("Ordered", Desired, Command)
MAX_SIGNATURES = 32  # each costs a verification


def sign_text(text: str, signers: "Iterable[Signer]") -> Signed:
    """Sign a document's JSON text with each of the keys."""
    data = text.encode()
    signatures = [signer.sign(data) for signer in signers]
    return Signed(
        payload=text,
        signatures=tuple(
            Signature(keyid=signature.keyid, sig=signature.signature) for signature in signatures
        ),
    )


def count_valid(signed: Signed, keys: "Mapping[str, Key]") -> int:
    """Return how many of the keys (by their ids) have signed the payload."""
    from securesystemslib.exceptions import UnverifiedSignatureError, VerificationError
    from securesystemslib.signer import Signature as KeySignature

    data, valid = signed.payload.encode(), set()
    for signature in signed.signatures[:MAX_SIGNATURES]:
        key = keys.get(signature.keyid)
        if key is None:
            continue
        try:
            key.verify_signature(KeySignature(signature.keyid, signature.sig), data)
        except (UnverifiedSignatureError, VerificationError):
            continue
        valid.add(signature.keyid)
    return len(valid)


def open_desired(payload: bytes) -> tuple[Desired, Signed | None]:
    """Return a desired document and its signatures, None if it has none. Nothing is verified.

    Raises ValueError: it is not understood.
    """
    return _opened(payload, Desired)


def open_command(payload: bytes) -> tuple[Command, Signed | None]:
    """Return a command as `open_desired` does."""
    return _opened(payload, Command)


def _opened(payload: bytes, kind: type[Ordered]) -> tuple[Ordered, Signed | None]:
    signed = _signed(payload)
    return decode(payload if signed is None else signed.payload.encode(), kind), signed


def sign_command(command: Command, signers: "Iterable[Signer]") -> bytes:
    """Return a command with its signatures, as it is published."""
    signed = sign_text(encode(command).decode(), signers)
    return encode(SignedCommand(payload=signed.payload, signatures=signed.signatures))


def open_reported(payload: bytes, keys: "Mapping[str, Key] | None" = None) -> Reported:
    """Return a report, as `open_told` does."""
    return open_told(payload, Reported, keys)


def open_told(payload: bytes, kind: type[Told], keys: "Mapping[str, Key] | None" = None) -> Told:
    """Return what a device says, signed or not; with the device's public keys, by their ids, only
    what one of them has signed is taken.

    Raises ValueError: it is not understood. Raises TrustError: none of the keys has signed it.
    """
    signed = _signed(payload)
    if keys is not None and (signed is None or not count_valid(signed, keys)):
        names = ", ".join(f"{keyid[:12]}..." for keyid in keys) or "none, it was revoked"
        raise TrustError(
            f"its {kind.__name__} is not signed by a key of the device ({names}): somebody else "
            "published it, or its agent is older than the fleet"
        )
    return decode(payload if signed is None else signed.payload.encode(), kind)


def sign_document(document: Desired | Reported, signers: "Iterable[Signer]") -> bytes:
    """Return a document with its signatures, as it is published."""
    return encode(sign_text(encode(document).decode(), signers))


def _signed(payload: bytes) -> Signed | None:
    """Return the envelope of a payload, None if it has none."""
    try:
        return decode(payload, Signed)
    except ValueError:
        return None
