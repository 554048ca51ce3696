"""Fetching a blob in chunks, driven by the receiver: what to ask for next, and what to keep.

No disk and no network here: messages and the time go in, requests and verdicts come out
(`device.update.part_file` keeps the bytes, `device.agent.agent` sends the requests). First comes
the index, the SHA-256 of every chunk, itself checked against the hash in the desired document; then
each chunk is checked on its own, so that a garbled, late or repeated one is dropped and asked for
again, and a restart finds what it has by hashing.
"""

import hashlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from device.errors import TransferError
from device.protocol.documents import MAX_CHUNKS, BlobGet, BlobSpec

WINDOW_START = 4
WINDOW_MAX = 64  # of 64 KiB: 4 MiB in flight fill 100 Mbit/s at 300 ms
STALL_S = 1.0  # nothing came for so long: all that is in flight is taken as lost
STALL_MAX_S = 30.0
OVERTAKEN = 3  # a chunk that so many later ones overtook is taken as lost
BAD_IN_A_ROW = 64
HASH_BYTES = 32


@dataclass(slots=True)
class _Flight:
    """A chunk that was asked for: its place in the order of asking, and who overtook it."""

    order: int
    overtaken: int = 0


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
        self._window = min(WINDOW_START, window_max)
        self._index = b""
        self._have = bytearray(spec.chunks)
        self._todo: deque[int] = deque()
        self._flight: dict[int, _Flight] = {}  # in the order of asking
        self._asked = 0
        self._bad = 0
        self._stall_s = STALL_S
        self._quiet_since_s: float | None = None  # None: nothing is awaited

    @property
    def has_index(self) -> bool:
        """Whether the chunk hashes are known."""
        return bool(self._index)

    @property
    def complete(self) -> bool:
        """Whether every chunk was kept."""
        return self.received_bytes == self.spec.bytes

    @property
    def wake_at_s(self) -> float | None:
        """When `next_request` has to be asked again although nothing came."""
        if self.complete or self._quiet_since_s is None:
            return None
        return self._quiet_since_s + self._stall_s

    def index_fits(self, payload: bytes) -> bool:
        """Whether these are the chunk hashes that the desired document names."""
        return (
            len(payload) == self.spec.chunks * HASH_BYTES
            and hashlib.sha256(payload).hexdigest() == self.spec.index_sha256
        )

    def on_index(self, payload: bytes) -> bool:
        """Judge an index that came; True: keep it, then call `set_index`."""
        if self.has_index:
            return False
        if self.index_fits(payload):
            return True
        self._count_bad("index")
        return False

    def set_index(self, payload: bytes, present: Iterable[int] = ()) -> None:
        """Go on with a fitting index and the chunks that the disk already holds."""
        self._index = payload
        self._settle()
        for number in present:
            self._keep(number)
        self._todo = deque(n for n in range(self.spec.chunks) if not self._have[n])

    def chunk_fits(self, number: int, payload: bytes) -> bool:
        """Whether a payload is the chunk of this number."""
        start = number * HASH_BYTES
        return (
            len(payload) == self.spec.chunk_size(number)
            and hashlib.sha256(payload).digest() == self._index[start : start + HASH_BYTES]
        )

    def on_chunk(self, number: int, payload: bytes, now_s: float) -> bool:
        """Judge a chunk that came; True: write it at `number * chunk_bytes`."""
        if not self.has_index or not 0 <= number < self.spec.chunks or self._have[number]:
            return False
        flight = self._flight.pop(number, None)
        if not self.chunk_fits(number, payload):
            if flight is not None:
                self._todo.appendleft(number)
            self._count_bad(f"chunk {number}")
            return False
        self._keep(number)
        self._settle()
        self._quiet_since_s = now_s
        self._window = min(self._window_max, self._window + 1)
        if flight is not None:
            self._note_overtaken(flight.order)
        return True

    def next_request(self, now_s: float) -> BlobGet | None:
        """What to ask for now, or None; call it after every message and at `wake_at_s`."""
        if self.complete:
            return None
        stalled = self._quiet_since_s is not None and now_s >= self._quiet_since_s + self._stall_s
        if not self.has_index:
            if self._quiet_since_s is not None and not stalled:
                return None
            self._await_news(now_s, stalled)
            return BlobGet(sha256=self.spec.sha256, index=True)
        if stalled:
            self.forget_flight()
            self._await_news(now_s, stalled)
        return self._ask(now_s)

    def forget_flight(self) -> None:
        """The connection was lost or nothing comes: ask again for all that is in flight."""
        self._todo.extendleft(reversed(self._flight))
        self._flight.clear()
        self._window = min(WINDOW_START, self._window_max)
        self._quiet_since_s = None

    def _ask(self, now_s: float) -> BlobGet | None:
        free = self._window - len(self._flight)
        # A request for each chunk would cost as much as the chunk: wait for a quarter window.
        if self._flight and free < max(1, self._window // 4):
            return None
        chunks: list[int] = []
        while self._todo and len(chunks) < free:
            number = self._todo.popleft()
            if not self._have[number]:
                chunks.append(number)
                self._flight[number] = _Flight(self._asked)
                self._asked += 1
        if not chunks:
            return None
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        return BlobGet(sha256=self.spec.sha256, chunks=tuple(chunks))

    def _await_news(self, now_s: float, stalled: bool) -> None:
        """Wait from now on; after a silence twice as long, so that no server is flooded."""
        self._quiet_since_s = now_s
        if stalled:
            self._stall_s = min(STALL_MAX_S, self._stall_s * 2)

    def _settle(self) -> None:
        self._bad = 0
        self._stall_s = STALL_S
        self._quiet_since_s = None

    def _keep(self, number: int) -> None:
        if not self._have[number]:
            self._have[number] = 1
            self.received_bytes += self.spec.chunk_size(number)

    def _note_overtaken(self, order: int) -> None:
        """Chunks come in the order of asking; one that was overtaken often was dropped."""
        lost = []
        for number, flight in self._flight.items():
            if flight.order > order:
                break
            flight.overtaken += 1
            if flight.overtaken >= OVERTAKEN:
                lost.append(number)
        for number in lost:
            del self._flight[number]
        if lost:
            self._todo.extendleft(reversed(lost))
            self._window = max(min(WINDOW_START, self._window_max), self._window // 2)

    def _count_bad(self, what: str) -> None:
        self._bad += 1
        if self._bad >= BAD_IN_A_ROW:
            raise TransferError(
                f"{self._bad} parts in a row of the blob {self.spec.sha256[:12]}... did not match "
                f"their hashes (the last: {what}): the server holds another file, deploy it again"
            )
