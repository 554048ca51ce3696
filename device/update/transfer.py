"""The download of a blob in chunks, driven by the receiver, with flow control and retransmission.

No disk and no network here: messages and the time go in, requests and verdicts come out
(`device.update.part_file` stores the bytes, `device.agent.agent` sends the requests). First comes
the index, the SHA-256 of every chunk, itself checked against the hash in the desired document. Then
each chunk is checked by itself: a corrupt, late or repeated one is dropped and requested again, and
a restart finds the chunks on the disk by hashing.
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
MAX_CORRUPT_IN_A_ROW = 64
HASH_BYTES = 32


@dataclass(slots=True)
class _InFlight:
    """A requested chunk: the order of its request, and how many later ones were answered."""

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
        self._present = bytearray(spec.chunks)
        self._missing: deque[int] = deque()
        self._in_flight: dict[int, _InFlight] = {}  # in the order of requests
        self._requested = 0
        self._corrupt = 0
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

    def on_index(self, payload: bytes) -> bool:
        """Check an index that arrived; True: store it, then call `set_index`."""
        if self.has_index:
            return False
        if self.index_fits(payload):
            return True
        self._count_corrupt("index")
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

    def on_chunk(self, number: int, payload: bytes, now_s: float) -> bool:
        """Check a chunk that arrived; True: write it at `number * chunk_bytes`."""
        if not self.has_index or not 0 <= number < self.spec.chunks or self._present[number]:
            return False
        flight = self._in_flight.pop(number, None)
        if not self.chunk_fits(number, payload):
            if flight is not None:
                self._missing.appendleft(number)
            self._count_corrupt(f"chunk {number}")
            return False
        self._mark_present(number)
        self._reset_stall()
        self._quiet_since_s = now_s
        self._window = min(self._window_max, self._window + 1)
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
        self._window = min(WINDOW_START, self._window_max)
        self._quiet_since_s = None

    def _request(self, now_s: float) -> BlobGet | None:
        free = self._window - len(self._in_flight)
        # A request for each chunk would cost as much as the chunk: wait for a quarter window.
        if self._in_flight and free < max(1, self._window // 4):
            return None
        chunks: list[int] = []
        while self._missing and len(chunks) < free:
            number = self._missing.popleft()
            if not self._present[number]:
                chunks.append(number)
                self._in_flight[number] = _InFlight(self._requested)
                self._requested += 1
        if not chunks:
            return None
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        return BlobGet(sha256=self.spec.sha256, chunks=tuple(chunks))

    def _await_reply(self, now_s: float, stalled: bool) -> None:
        """Restart the stall timer; back off after a stall, so that no server is flooded."""
        self._quiet_since_s = now_s
        if stalled:
            self._stall_s = min(STALL_MAX_S, self._stall_s * 2)

    def _reset_stall(self) -> None:
        self._corrupt = 0
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
            self._window = max(min(WINDOW_START, self._window_max), self._window // 2)

    def _count_corrupt(self, what: str) -> None:
        self._corrupt += 1
        if self._corrupt >= MAX_CORRUPT_IN_A_ROW:
            raise TransferError(
                f"{self._corrupt} parts in a row of the blob {self.spec.sha256[:12]}... did not "
                f"match their hashes (the last: {what}): the server holds another file, "
                "deploy it again"
            )
