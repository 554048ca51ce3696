"""How much is asked of a server at once, and how much a second in all."""

from dataclasses import dataclass, field

WINDOW_START = 4  # chunks
WINDOW_MAX = 64
WINDOW_MAX_BYTES = 4 * 1024**2  # in flight: they fill 100 Mbit/s at 300 ms
RISE = 1.25  # goodput that rises by less has not risen
FLAT_ROUNDS = 3  # rounds without a rise, until the window stops growing
PROBE_ROUNDS = 16  # rounds until a window that stopped growing is tried at its double
BURST_S = 0.1


@dataclass(slots=True)
class Window:
    """Bytes in flight to one server. A round is the time in which one window arrives.

    The window grows by what arrives, so it doubles with each round, while goodput rises. It stops
    at twice the one with which it last rose, which keeps the line full; now and then it is tried at
    its double.
    """

    chunk_bytes: int
    most_bytes: int
    bytes: int = field(init=False)
    _round_s: float | None = None  # when the round began; None: with the next request
    _round_bytes: int = 0
    _round_window: int = 0  # when the round began
    _best_rate: float = 0.0  # bytes a second
    _best_bytes: int = 0  # the window that gave it
    _flat: int = 0

    def __post_init__(self) -> None:
        self.bytes = self._least_bytes

    @property
    def _least_bytes(self) -> int:
        return min(WINDOW_START * self.chunk_bytes, self.most_bytes)

    def on_request(self, now_s: float) -> None:
        """Begin a round, unless one runs."""
        if self._round_s is None:
            self._begin_round(now_s)

    def on_received(self, size: int, now_s: float) -> None:
        """Count bytes that fit; at the end of a round, choose the next window."""
        self._round_bytes += size
        if self._flat < FLAT_ROUNDS or self._flat % PROBE_ROUNDS == 0:
            self._resize(self.bytes + size)
        if self._round_s is None or self._round_bytes < self._round_window:
            return
        rate = self._round_bytes / max(now_s - self._round_s, 1e-6)
        if rate > self._best_rate * RISE:
            self._best_rate, self._best_bytes, self._flat = rate, self._round_window, 0
        else:
            self._best_rate, self._flat = max(rate, self._best_rate), self._flat + 1
        if self._flat >= FLAT_ROUNDS:
            self._resize(self._best_bytes * 2)
        self._begin_round(now_s)

    def _begin_round(self, now_s: float) -> None:
        self._round_s, self._round_bytes, self._round_window = now_s, 0, self.bytes

    def on_loss(self) -> None:
        """Halve the window, and stop growing: parts were lost."""
        self._resize(self.bytes // 2)
        self._best_bytes, self._flat = self.bytes // 2, FLAT_ROUNDS

    def on_corrupt(self) -> None:
        """Halve the window, down to one chunk: what came did not fit."""
        self.bytes = max(1, self.bytes // 2)
        self._best_rate, self._flat = 0.0, 0

    def restart(self, *, silent: bool) -> None:
        """Begin anew; `silent`: with one chunk, as nothing came for long."""
        self.bytes = min(self.chunk_bytes, self.most_bytes) if silent else self._least_bytes
        self._round_s, self._best_rate, self._flat = None, 0.0, 0

    def _resize(self, size: int) -> None:
        self.bytes = max(self._least_bytes, min(self.most_bytes, size))


class RateLimit:
    """A token bucket: bytes that may be asked for. None: as many as one likes.

    One request may overdraw it, so that it takes chunks of any size; then it waits.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        self._rate = bytes_per_s
        self._tokens = 0.0
        self._filled_s: float | None = None

    def allows(self, now_s: float) -> bool:
        """Whether something may be asked for now."""
        return self.free_at_s(now_s) is None

    def spend(self, size: int) -> None:
        """Count bytes that are asked for; negative: fewer came than were asked for."""
        self._tokens -= size

    def free_at_s(self, now_s: float) -> float | None:
        """Return when something may be asked for, None: now."""
        if self._rate is None:
            return None
        if self._filled_s is None:
            self._filled_s, self._tokens = now_s, self._rate * BURST_S
        else:
            filled = self._tokens + (now_s - self._filled_s) * self._rate
            self._filled_s, self._tokens = now_s, min(filled, self._rate * BURST_S)
        return None if self._tokens > 0 else now_s - self._tokens / self._rate + 0.001
