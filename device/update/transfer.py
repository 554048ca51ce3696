"""The download of a blob in chunks, driven by the receiver, with flow control and retransmission.

No disk and no network here: messages and the time go in, requests and verdicts come out
(`device.update.part_file` stores the bytes, `device.agent.agent` sends the requests). First comes
the index, the SHA-256 of every chunk, itself checked against the hash in the desired document. Then
each chunk is checked by itself: a corrupt, late or repeated one is dropped and requested again, and
a restart finds the chunks on the disk by hashing.

Several peers may serve a blob. The first that answers is asked by its name from then on, until it
is silent or sends chunks that do not fit. Those cost its window, never the download. A peer may
also say that it does not have the blob: once that is all that is heard, the download has failed.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from device.errors import TransferError
from device.protocol.documents import MAX_CHUNKS_A_REQUEST, BlobGet, BlobSpec
from device.update.chunk_table import MAX_CHUNKS_OF, ChunkTable, index_fits
from device.update.peers import ANYONE, Peers
from device.update.window import WINDOW_MAX, WINDOW_MAX_BYTES, RateLimit, Window

STALL_S = 1.0  # without a chunk for this long, all in flight are counted as lost
STALL_MAX_S = 30.0
GAP_MAX_S = 10.0  # a longer silence is an outage, not a slow line
MAX_OVERTAKEN = 3  # a chunk is counted as lost when so many later requests were answered
GONE_S = 2.0  # so long another peer may have the blob that one does not


@dataclass(slots=True)
class _InFlight:
    """A requested chunk: of whom, the order of its request, how many later ones were answered."""

    peer: str
    order: int
    size: int
    overtaken: int = 0


class Download:
    """The state of one download. Times are seconds of any steady clock."""

    def __init__(
        self,
        spec: BlobSpec,
        window_chunks: int = WINDOW_MAX,
        limit: RateLimit | None = None,
    ) -> None:
        """`window_chunks`: the most in flight."""
        most = MAX_CHUNKS_OF[spec.chunk_format]
        if spec.bytes > most * spec.chunk_bytes:
            chunks = -(-spec.bytes // spec.chunk_bytes)
            raise TransferError(
                f"the blob {spec.sha256[:12]}... has {chunks} chunks, the limit is {most}: use "
                "larger chunks"
            )
        self.spec = spec
        self.received_bytes = 0
        self.bases: tuple[str, ...] = ()  # SHA-256 of bundles from which differences may be sent
        self.table: ChunkTable | None = None
        self._window_bytes = min(window_chunks * spec.chunk_bytes, WINDOW_MAX_BYTES)
        self._limit = RateLimit(None) if limit is None else limit
        self._peers = Peers(self._new_window)
        self._present = bytearray()
        self._missing: deque[int] = deque()
        self._in_flight: dict[int, _InFlight] = {}  # in the order of requests
        self._in_flight_bytes = 0
        self._requested = 0
        self._stall_s = STALL_S
        self._gap_s = 0.0  # the longest time between two chunks lately
        self._heard_s: float | None = None  # when the last one came, or the first was asked for
        self._quiet_since_s: float | None = None  # None: no reply is due
        self._gone_s: float | None = None  # when a peer said so, and nothing good came since
        self._patient = False
        self._free_at_s: float | None = None  # when the rate limit lets something be asked for

    @property
    def has_index(self) -> bool:
        """Whether the chunk hashes are known."""
        return self.table is not None

    @property
    def complete(self) -> bool:
        """Whether every chunk is present."""
        return self.table is not None and self.received_bytes == self.spec.bytes

    @property
    def complaint(self) -> str:
        """Which peers send what does not fit, empty if none does."""
        return self._peers.complaint

    def complaint_of(self, name: str) -> str:
        """Return what a peer sends that does not fit; empty while it is trusted."""
        return self._peers.complaint_of(name)

    @property
    def wake_at_s(self) -> float | None:
        """When `next_request` or `failure` is due without a message."""
        if self.complete:
            return None
        quiet_s = self._quiet_since_s
        moments = (
            None if quiet_s is None else quiet_s + self._stall_s,
            None if self._gone_s is None else self._gone_s + GONE_S,
            self._free_at_s,
        )
        return min((moment for moment in moments if moment is not None), default=None)

    def failure(self, now_s: float) -> str:
        """Return why the download cannot go on: all that is heard is that the blob is gone."""
        if self._gone_s is None or now_s < self._gone_s + GONE_S:
            return ""
        return self._peers.refusals

    def on_index(self, payload: bytes, peer: str = ANYONE) -> bool:
        """Check an index that arrived; True: store it, then call `set_index`."""
        if self.has_index:
            return False
        if index_fits(payload, self.spec):
            self._count_good(peer)
            return True
        self._peers.count_corrupt(peer, "index")
        return False

    def set_index(
        self, table: ChunkTable, present: Iterable[int] = (), repeats: Collection[int] = ()
    ) -> None:
        """Continue with the chunks of the blob and those that are on the disk.

        `repeats`: chunks that are not asked for, as they come with `take_copied`.
        """
        self.table = table
        self._present = bytearray(table.count)
        self._reset_stall()
        for number in present:
            self._mark_present(number)
        self._missing = deque(
            n for n in range(table.count) if not self._present[n] and n not in repeats
        )

    @property
    def missing(self) -> tuple[int, ...]:
        """The chunks that are not present."""
        return tuple(n for n, present in enumerate(self._present) if not present)

    def wants(self, number: int) -> bool:
        """Whether this is a chunk that exists and is missing."""
        return 0 <= number < len(self._present) and not self._present[number]

    def on_chunk(
        self,
        number: int,
        payload: bytes,
        now_s: float,
        peer: str = ANYONE,
        *,
        sent_bytes: int | None = None,
    ) -> bool:
        """Check a chunk that arrived; True: write it at its place.

        `sent_bytes`: what came over the network for it, if that was not the chunk itself.
        """
        if self.table is None or not self.wants(number):
            self._note_repeated(number, payload, now_s)
            return False
        flight = self._in_flight.get(number)
        if not self.table.fits(number, payload):
            self._drop(number, f"chunk {number}", peer)
            return False
        if flight is not None:
            self._land(number)
            self._limit.spend((len(payload) if sent_bytes is None else sent_bytes) - flight.size)
        self._mark_present(number)
        if self._heard_s is not None:
            self._gap_s = min(GAP_MAX_S, max(now_s - self._heard_s, self._gap_s * 0.9))
        self._reset_stall()
        self._quiet_since_s = self._heard_s = now_s
        self._count_good(peer)
        if flight is not None:
            self._peers.window_of(flight.peer).on_received(flight.size, now_s)
            if not self._patient:
                self._note_overtaken(flight.order)
        return True

    def _note_repeated(self, number: int, payload: bytes, now_s: float) -> None:
        """A chunk that came twice shows that the line is slow, not silent."""
        table = self.table
        if table is None or not self._in_flight or not 0 <= number < table.count:
            return
        if table.fits(number, payload):
            self._quiet_since_s = self._heard_s = now_s

    def take_copied(self, number: int, payload: bytes) -> bool:
        """Check a chunk that another bundle on the disk, or this one, has; True: write it at its
        place."""
        if self.table is None or not self.wants(number) or not self.table.fits(number, payload):
            return False
        if number in self._in_flight:
            self._land(number)
        self._mark_present(number)
        return True

    def on_bad_delta(self, number: int, peer: str) -> None:
        """A difference did not make its chunk: from now on ask for the chunks themselves."""
        self.bases = ()
        if self.wants(number):
            self._drop(number, f"the difference for chunk {number}", peer)

    def on_gone(self, peer: str, reason: str, now_s: float) -> None:
        """A peer says that it does not have the blob; it is not asked by its name again."""
        if self.complete or not self._peers.note_refusal(peer, reason):
            return
        if self._gone_s is None:
            self._gone_s = now_s
        if self._peers.current == peer:
            self.forget_requests()
            self._quiet_since_s = now_s

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
            self.forget_requests(silent=True)
            self._await_reply(now_s, stalled)
        return self._request(now_s)

    def limit_to(self, limit: RateLimit) -> None:
        """Ask for no more than this from now on."""
        self._limit = limit

    def change_source(self, *, patient: bool) -> None:
        """Ask another source; a `patient` one keeps no order, and says itself what it lacks."""
        self._patient = patient
        self.on_server_back()

    def on_server_back(self) -> None:
        """Ask at once: the server was away, and has announced the blob again."""
        self.forget_requests()
        self._reset_stall()
        self._gone_s = None
        self._peers.forgive()

    def forget_requests(self, *, silent: bool = False) -> None:
        """Request all chunks in flight again, of anyone; `silent`: nothing came for long."""
        self._missing.extendleft(reversed(self._in_flight))
        self._limit.spend(-self._in_flight_bytes)
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self._peers.ask_anyone(silent=silent)
        self._quiet_since_s = None

    def _request(self, now_s: float) -> BlobGet | None:
        assert self.table is not None
        window = self._peers.window
        self._free_at_s = None
        # A request for each chunk would cost as much as the chunk: wait for a quarter window.
        if self._in_flight and self._in_flight_bytes > window.bytes * 3 // 4:
            return None
        chunks: list[int] = []
        while self._missing and len(chunks) < MAX_CHUNKS_A_REQUEST:
            number = self._missing[0]
            size = self.table.size(number)
            fits = self._in_flight_bytes + size <= window.bytes or not self._in_flight
            if self._present[number]:
                self._missing.popleft()
                continue
            if not fits:
                break
            self._free_at_s = self._limit.free_at_s(now_s)
            if self._free_at_s is not None:
                break
            self._missing.popleft()
            chunks.append(number)
            self._limit.spend(size)
            self._in_flight[number] = _InFlight(self._peers.current, self._requested, size)
            self._in_flight_bytes += size
            self._requested += 1
        if not chunks:
            if not self._in_flight:  # the rate limit is silent, not the server
                self._quiet_since_s = self._heard_s = None
            return None
        window.on_request(now_s)
        if self._heard_s is None:
            self._heard_s = now_s
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        sha256, peer = self.spec.sha256, self._peers.current
        return BlobGet(sha256=sha256, chunks=tuple(chunks), peer=peer, bases=self.bases)

    def _land(self, number: int) -> None:
        """Take a chunk out of those in flight."""
        flight = self._in_flight.pop(number)
        self._in_flight_bytes -= flight.size

    def _drop(self, number: int, what: str, peer: str) -> None:
        """Count what did not fit. Only the peer that was asked may cost a request, and only while
        it is trusted: after that its answer counts as silence."""
        flight = self._in_flight.get(number)
        trusted = self._peers.count_corrupt(peer, what)
        if flight is not None and trusted and flight.peer in (ANYONE, peer):
            self._land(number)
            self._missing.appendleft(number)

    def _await_reply(self, now_s: float, stalled: bool) -> None:
        """Restart the stall timer; back off after a stall, so that no server is flooded."""
        self._quiet_since_s = now_s
        if stalled:
            self._stall_s = min(STALL_MAX_S, self._stall_s * 2)

    def _reset_stall(self) -> None:
        least_s = STALL_MAX_S if self._patient else STALL_S
        self._stall_s = min(STALL_MAX_S, max(least_s, 3.0 * self._gap_s))  # a slow line is no loss
        self._quiet_since_s = None

    def _mark_present(self, number: int) -> None:
        assert self.table is not None
        if not self._present[number]:
            self._present[number] = 1
            self.received_bytes += self.table.size(number)

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
            self._limit.spend(-self._in_flight[number].size)
            self._land(number)
        if lost:
            self._missing.extendleft(reversed(lost))
            self._peers.window.on_loss()

    def _count_good(self, name: str) -> None:
        self._gone_s = None
        self._peers.count_good(name)

    def _new_window(self) -> Window:
        return Window(self.spec.chunk_bytes, self._window_bytes)
