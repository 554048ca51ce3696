"""Keeps two servers with copies of one fleet, each with a store of its own, from serving together.

Each server says on a retained topic of its own that it works, and the broker clears that when the
connection breaks. Servers on one store know each other by their leases; one that says that it works
and has no lease there has another store: the fleet's folder was copied. Pure; times are those of
the monotonic clock, in seconds.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device.protocol.documents import decode, encode
from device.protocol.mqtt import Message
from device.protocol.topics import SERVER_CLAIM
from toolkit.errors import RolloutError
from toolkit.fleet.store.lease import LEASE_S

LOG = logging.getLogger("tandem.fleet")
CLAIM_S = LEASE_S / 3  # between two claims of a server
LIVE_S = CLAIM_S / 2  # two claims so far apart were not sent by a server that has ended since
SILENT_S = 2 * LEASE_S  # without a new claim for so long, its server is gone
# A broker that does not return a claim for so long never does, and one that gives what it retains
# to no wildcard (RabbitMQ) has passed on new claims of all servers.
LISTEN_S = LEASE_S
AHEAD_S = 300.0  # clocks of two machines differ by less


class Claim(msgspec.Struct, frozen=True):
    """A server that works. `fleet`: which, by its first root metadata; `host`, `folder`: where it
    runs, for people; `since_s`: when it started, in seconds since 1970; `serves`: no longer looks
    for others first; `replaces`: one on a copy has to stop."""

    fleet: str
    holder: str
    host: str
    folder: str
    since_s: float
    serves: bool = False
    replaces: bool = False

    @property
    def rank(self) -> tuple[bool, bool, float, str]:
        """The lowest one stays: the newest that replaces others, else who has served longest."""
        since_s = -self.since_s if self.replaces else self.since_s
        return (not self.replaces, not (self.serves or self.replaces), since_s, self.holder)


def fleet_id(folder: Path, name: str) -> str:
    """Return what a fleet and its copies have in common: a hash of the name and, where releases are
    signed, of the first root metadata, which never changes."""
    root = folder / "repository" / "metadata" / "1.root.json"
    content = root.read_bytes() if root.is_file() else b""
    return hashlib.sha256(name.encode() + b"\0" + content).hexdigest()


@dataclass(slots=True)
class _Other:
    """A server on another store. `heard_s`: when it was last heard, or what is retained of it came,
    but for the time without a connection; `live_s`: when it first said something that was not
    retained, None: never."""

    claim: Claim
    heard_s: float
    live_s: float | None = None


class CopyGuard:
    """What a server knows of others that work on another store."""

    def __init__(
        self, claim: Claim, lease_end: Callable[[str], float | None], *, is_signed: bool = True
    ) -> None:
        """`lease_end`: when a holder's lease ends by this server's store, None: it has none;
        `is_signed`: the fleet has more than its name to tell it from others."""
        self.topic = f"{SERVER_CLAIM}/{claim.holder[-8:]}"
        self.is_alone = False  # this server may send: nobody else is there, or has to stop
        self._claim = claim
        self._lease_end = lease_end
        self._is_signed = is_signed
        self._lease_ends: dict[str, float] = {}  # as first read, of those that are not known yet
        self._known = {claim.holder}  # holders on this store, also those that have ended
        self._others: dict[str, _Other] = {}
        self._silent_s: dict[str, float] = {}  # topic -> for so long before this connection
        self._connected_s = self._claimed_s = self._advanced_s = 0.0
        self._gets_retained = True
        self._is_heard = False  # own claim came back, and before it all that others had retained
        self._warned: set[str] = set()

    def connect(self, now_s: float, *, gets_retained: bool = True) -> None:
        """The connection is up: look for others anew. `gets_retained`: the broker has told what it
        retains before it returns the own claim."""
        self._gets_retained = gets_retained
        self.is_alone = self._is_heard = False
        # What was not heard while the connection was away says nothing.
        self._silent_s = {
            topic: max(self._advanced_s - row.heard_s, 0.0) for topic, row in self._others.items()
        }
        self._others.clear()
        self._connected_s, self._claimed_s = now_s, now_s - CLAIM_S
        self._advanced_s = now_s

    def take(self, message: Message, now_s: float) -> None:
        """Take a claim, or its end. RolloutError: another server stays, this one has to stop."""
        if not message.payload:
            self._others.pop(message.topic, None)
            return
        try:
            claim = decode(message.payload, Claim)
        except ValueError as error:
            LOG.warning("%s is not understood: %s", message.topic, error)
            return
        if claim.holder == self._claim.holder:
            self._is_heard = True
        is_on_this_store = self._is_on_this_store(claim.holder)
        if claim.fleet != self._claim.fleet or is_on_this_store:
            self._others.pop(message.topic, None)
            return
        claim = self._believed(claim)
        heard_s = now_s - self._silent_s.pop(message.topic, 0.0)
        rival = self._others.setdefault(message.topic, _Other(claim, heard_s))
        rival.claim = claim
        if message.retained:
            return
        is_live = rival.live_s is not None and now_s - rival.live_s >= LIVE_S
        if is_live and is_on_this_store is not None:
            self._judge(claim)
        rival.heard_s, rival.live_s = now_s, now_s if rival.live_s is None else rival.live_s

    def advance(self, now_s: float) -> list[tuple[str, bytes]]:
        """Return what is to be published now, retained: the own claim, and an empty message in the
        place of each claim whose server is gone."""
        self._advanced_s = now_s
        lost: list[str] = []
        knows_all = self._is_heard and (self._gets_retained or self._claim.serves)
        if not self.is_alone and (knows_all or now_s - self._connected_s >= LISTEN_S):
            lost = [topic for topic, row in self._others.items() if now_s - row.heard_s >= SILENT_S]
            for topic in lost:
                del self._others[topic]
            if not self._others:
                if not self._is_heard:
                    LOG.warning(
                        "the broker lets this server not read %s/+: it cannot see whether another "
                        "one runs on a copy of this fleet", SERVER_CLAIM,
                    )  # fmt: skip
                LOG.info("serves %s: no other store of the fleet does", self._claim.folder)
                self.is_alone, self._claim = True, msgspec.structs.replace(self._claim, serves=True)
        messages = [(topic, b"") for topic in lost]
        if now_s - self._claimed_s >= CLAIM_S:
            self._claimed_s = now_s
            messages.append((self.topic, encode(self._claim)))
        return messages

    def _believed(self, claim: Claim) -> Claim:
        """Return a claim of another server; one from the future replaces nobody."""
        ahead_s = claim.since_s - time.time()
        if not claim.replaces or ahead_s <= AHEAD_S:
            return claim
        if claim.holder not in self._warned:
            self._warned.add(claim.holder)
            LOG.warning(
                "a server on %s that takes this fleet over starts in %g s by its clock (limit %g "
                "s): set that clock, it replaces nobody", claim.host, ahead_s, AHEAD_S,
            )  # fmt: skip
        return msgspec.structs.replace(claim, replaces=False)

    def _is_on_this_store(self, holder: str) -> bool | None:
        """Whether a server works on this server's store: its lease is renewed there. None: that is
        not seen yet; a copy of a store has the leases of its time until they run out."""
        if holder in self._known:
            return True
        end_s = self._lease_end(holder)
        if end_s is None:
            return False
        if self._lease_ends.setdefault(holder, end_s) == end_s:
            return None
        self._known.add(holder)
        del self._lease_ends[holder]
        return True

    def _judge(self, rival: Claim) -> None:
        place = f"{rival.host} with the folder {rival.folder}"
        if self._claim.rank < rival.rank:
            if rival.holder not in self._warned:
                self._warned.add(rival.holder)
                LOG.warning("a server on a copy of this fleet has to stop: on %s", place)
            return
        if rival.replaces:
            raise RolloutError(
                f"the server on {place} takes this fleet over, from another store: this one stops"
            )
        both = f"That folder or {self._claim.folder} is a copy, and both would "
        if self._is_signed:
            both += "sign for the same devices"
        else:
            both += (
                "decide for the same devices; or both fleets have the same name and no signed "
                "releases: then give one another `name` in its fleet.toml, or a broker of its own. "
                "If one is a copy"
            )
        raise RolloutError(
            f"another server of this fleet is on this broker: on {place}, and has another store. "
            f"{both}: stop that server, or start this one with --replace, which makes it stop"
        )
