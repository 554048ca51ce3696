"""The download of a blob in chunks, driven by the receiver, with flow control and retransmission.

No disk and no network here: messages and the time go in, requests and verdicts come out
(`device.update.part_file` stores the bytes, `device.agent.agent` sends the requests). First comes
the index, the SHA-256 of every chunk, itself checked against the hash in the desired document. Then
each chunk is checked by itself: a corrupt, late or repeated one is dropped and requested again, and
a restart finds the chunks on the disk by hashing.

Several peers may serve a blob. The first that answers is asked by its name from then on, until it
is silent or sends chunks that do not fit. Those cost its window, never the download.
"""

import hashlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from device.errors import TransferError
from device.protocol.documents import MAX_CHUNKS, BlobGet, BlobSpec

WINDOW_START = 4
WINDOW_MAX = 64  # of 64 KiB: 4 MiB in flight fill 100 Mbit/s at 300 ms
STALL_S = 1.0  # without a chunk for this long, all in flight are counted as lost
STALL_MAX_S = 30.0
MAX_OVERTAKEN = 3  # a chunk is counted as lost when so many later requests were answered
MAX_CORRUPT_IN_A_ROW = 64  # of one peer: it is not asked by its name any more
MAX_PEERS = 16
HASH_BYTES = 32
ANYONE = ""  # a request to all peers; also the peer that sends chunks without its name


@dataclass(slots=True)
class _InFlight:
    """A requested chunk: of whom, the order of its request, how many later ones were answered."""

    peer: str
    order: int
    overtaken: int = 0


@dataclass(slots=True)
class _Peer:
    """A server: how many chunks it is asked for at once, and how many in a row did not fit."""

    window: int
    corrupt: int = 0
    last_corrupt: str = ""

    @property
    def trusted(self) -> bool:
        """Whether it is asked by its name."""
        return self.corrupt < MAX_CORRUPT_IN_A_ROW


class Download:
    """The state of one download. Times are seconds of any steady clock."""

    def __init__(self, spec: BlobSpec, window_max: int = WINDOW_MAX) -> None:
        if spec.chunks > MAX_CHUNKS:
            raise TransferError(
                f"the blob {spec.sha256[:12]}... has {spec.chunks} chunks, the limit is "
                f"{MAX_CHUNKS}: use larger chunks"
            )
        self.spec = spec
        self.received_bytes = 0
        self._window_max = window_max
        self._peers = {ANYONE: _Peer(min(WINDOW_START, window_max))}
        self._asked = ANYONE
        self._index = b""
        self._present = bytearray(spec.chunks)
        self._missing: deque[int] = deque()
        self._in_flight: dict[int, _InFlight] = {}  # in the order of requests
        self._requested = 0
        self._stall_s = STALL_S
        self._quiet_since_s: float | None = None  # None: no reply is due

    @property
    def has_index(self) -> bool:
        """Whether the chunk hashes are known."""
        return bool(self._index)

    @property
    def complete(self) -> bool:
        """Whether every chunk is present."""
        return self.received_bytes == self.spec.bytes

    @property
    def complaint(self) -> str:
        """Which peers send what does not fit, empty if none does."""
        return "; ".join(
            f"{f'the server {name}' if name else 'a server'} sent {peer.corrupt} parts in a row "
            f"that do not match their hashes (the last: {peer.last_corrupt}): it holds another "
            "file, deploy again"
            for name, peer in self._peers.items()
            if not peer.trusted
        )

    @property
    def wake_at_s(self) -> float | None:
        """When `next_request` is due without a message."""
        if self.complete or self._quiet_since_s is None:
            return None
        return self._quiet_since_s + self._stall_s

    def index_fits(self, payload: bytes) -> bool:
        """Whether these are the chunk hashes that the desired document names."""
        return (
            len(payload) == self.spec.chunks * HASH_BYTES
            and hashlib.sha256(payload).hexdigest() == self.spec.index_sha256
        )

    def on_index(self, payload: bytes, peer: str = ANYONE) -> bool:
        """Check an index that arrived; True: store it, then call `set_index`."""
        if self.has_index:
            return False
        if self.index_fits(payload):
            self._count_good(peer)
            return True
        self._count_corrupt(peer, "index")
        return False

    def set_index(self, payload: bytes, present: Iterable[int] = ()) -> None:
        """Continue with an index that fits and the chunks that are on the disk."""
        self._index = payload
        self._reset_stall()
        for number in present:
            self._mark_present(number)
        self._missing = deque(n for n in range(self.spec.chunks) if not self._present[n])

    def chunk_fits(self, number: int, payload: bytes) -> bool:
        """Whether a payload is the chunk of this number."""
        start = number * HASH_BYTES
        return (
            len(payload) == self.spec.chunk_size(number)
            and hashlib.sha256(payload).digest() == self._index[start : start + HASH_BYTES]
        )

    def on_chunk(self, number: int, payload: bytes, now_s: float, peer: str = ANYONE) -> bool:
        """Check a chunk that arrived; True: write it at `number * chunk_bytes`."""
        if not self.has_index or not 0 <= number < self.spec.chunks or self._present[number]:
            return False
        flight = self._in_flight.get(number)
        if not self.chunk_fits(number, payload):
            trusted = self._count_corrupt(peer, f"chunk {number}")
            # Only the peer that was asked may cost a request, and only while it is trusted: after
            # that its answer counts as silence.
            if flight is not None and trusted and flight.peer in (ANYONE, peer):
                del self._in_flight[number]
                self._missing.appendleft(number)
            return False
        self._in_flight.pop(number, None)
        self._mark_present(number)
        self._reset_stall()
        self._quiet_since_s = now_s
        self._count_good(peer)
        if flight is not None:
            self._note_overtaken(flight.order)
        return True

    def next_request(self, now_s: float) -> BlobGet | None:
        """Return the request to send now, or None; its chunks count as in flight.

        Call it after every message and at `wake_at_s`.
        """
        if self.complete:
            return None
        stalled = self._quiet_since_s is not None and now_s >= self._quiet_since_s + self._stall_s
        if not self.has_index:
            if self._quiet_since_s is not None and not stalled:
                return None
            self._await_reply(now_s, stalled)
            return BlobGet(sha256=self.spec.sha256, index=True)
        if stalled:
            self.forget_requests()
            self._await_reply(now_s, stalled)
        return self._request(now_s)

    def on_server_back(self) -> None:
        """Ask at once: the server was away, and has announced the blob again."""
        self.forget_requests()
        self._stall_s = STALL_S

    def forget_requests(self) -> None:
        """Request all chunks in flight again, with the smallest window."""
        self._missing.extendleft(reversed(self._in_flight))
        self._in_flight.clear()
        self._ask_anyone()
        self._quiet_since_s = None

    def _request(self, now_s: float) -> BlobGet | None:
        asked = self._peers[self._asked]
        free = asked.window - len(self._in_flight)
        # A request for each chunk would cost as much as the chunk: wait for a quarter window.
        if self._in_flight and free < max(1, asked.window // 4):
            return None
        chunks: list[int] = []
        while self._missing and len(chunks) < free:
            number = self._missing.popleft()
            if not self._present[number]:
                chunks.append(number)
                self._in_flight[number] = _InFlight(self._asked, self._requested)
                self._requested += 1
        if not chunks:
            return None
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        return BlobGet(sha256=self.spec.sha256, chunks=tuple(chunks), peer=self._asked)

    def _await_reply(self, now_s: float, stalled: bool) -> None:
        """Restart the stall timer; back off after a stall, so that no server is flooded."""
        self._quiet_since_s = now_s
        if stalled:
            self._stall_s = min(STALL_MAX_S, self._stall_s * 2)

    def _reset_stall(self) -> None:
        self._stall_s = STALL_S
        self._quiet_since_s = None

    def _mark_present(self, number: int) -> None:
        if not self._present[number]:
            self._present[number] = 1
            self.received_bytes += self.spec.chunk_size(number)

    def _note_overtaken(self, order: int) -> None:
        """Count chunks as lost whose later requests were answered; halve the window then."""
        lost = []
        for number, flight in self._in_flight.items():
            if flight.order > order:
                break
            flight.overtaken += 1
            if flight.overtaken >= MAX_OVERTAKEN:
                lost.append(number)
        for number in lost:
            del self._in_flight[number]
        if lost:
            self._missing.extendleft(reversed(lost))
            asked = self._peers[self._asked]
            asked.window = max(min(WINDOW_START, asked.window), asked.window // 2)

    # -- peers

    def _ask_anyone(self) -> None:
        self._asked = ANYONE
        self._peers[ANYONE].window = min(WINDOW_START, self._window_max)

    def _count_good(self, name: str) -> None:
        """Widen the window of a peer that sent what fits; ask it by its name if none is asked."""
        peer = self._peer(name)
        if peer is None:
            return
        peer.corrupt = 0
        peer.window = min(self._window_max, peer.window + 1)
        if self._asked == ANYONE:
            self._asked = name

    def _count_corrupt(self, name: str, what: str) -> bool:
        """Halve the window of a peer; ask others once too many in a row did not fit.

        Return whether it is still trusted.
        """
        peer = self._peer(name)
        if peer is None:
            return False
        peer.corrupt += 1
        peer.last_corrupt = what
        peer.window = max(1, peer.window // 2)
        if not peer.trusted and self._asked == name:
            others = {other: one.window for other, one in self._peers.items() if one.trusted}
            others.pop(ANYONE, None)
            self._asked = max(others, key=lambda other: others[other], default=ANYONE)
        return peer.trusted

    def _peer(self, name: str) -> _Peer | None:
        """Return a peer, None for one too many: names are free to make up."""
        if name not in self._peers and len(self._peers) >= MAX_PEERS:
            return None
        return self._peers.setdefault(name, _Peer(min(WINDOW_START, self._window_max)))
