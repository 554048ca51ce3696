"""At most so many results a second."""


class RateLimit:
    """A rate limit of `max_hz` on average; a burst of two passes, so that jitter drops nothing."""

    def __init__(self, max_hz: float) -> None:
        self._hz = max_hz
        self._tokens = 2.0
        self._at: float | None = None

    def allows(self, now: float) -> bool:
        """Return whether one more may pass at `now`, in seconds."""
        if self._at is not None:
            self._tokens = min(2.0, self._tokens + (now - self._at) * self._hz)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
