"""Which server has a device: rendezvous hashing over those that live.

When a server comes or goes, the devices that it gets or had change hands, and no others.
"""

from collections.abc import Sequence
from hashlib import blake2b


def owner_of(servers: Sequence[str], device: str) -> str:
    """Return the server that has a device; there is one at least."""
    if len(servers) == 1:
        return servers[0]
    return max(servers, key=lambda server: blake2b(f"{server}/{device}".encode()).digest())
