"""Signs desired documents: what one device shall run, from when and until when."""

import time
from datetime import datetime, timedelta, timezone

import msgspec
from securesystemslib.signer import Signer

from device.protocol.documents import Desired
from device.protocol.signed import sign_document

LIFETIME = timedelta(days=30)  # of a desired document


def sign_desired(desired: Desired, key: Signer) -> bytes:
    """Return a desired document as it is published, signed by the director's key.

    `device`, `counter` and `expires` must be set; the counter is above every earlier one of the
    device (`next_counter`).
    """
    return sign_document(desired, (key,))


def addressed(desired: Desired, device: str, counter: int) -> Desired:
    """Return the document for one device, valid from now on for LIFETIME."""
    expires = datetime.now(timezone.utc) + LIFETIME
    return msgspec.structs.replace(
        desired,
        device=device,
        counter=counter,
        expires=expires.replace(microsecond=0, tzinfo=None).isoformat() + "Z",
    )


def next_counter(last: int = 0) -> int:
    """Return a counter above `last`: the milliseconds since 1970, unless a clock went back.

    By it one-off deployments and a server that keeps counters follow each other on one device.
    """
    return max(last + 1, time.time_ns() // 1_000_000)
