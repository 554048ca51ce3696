"""Events between two threads: one puts them, another takes all that are there at once. A queue
would wake the other thread for each, and take a lock twice."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

E = TypeVar("E")


class Inbox(Generic[E]):
    """What was put and is not taken yet, about `limit` events at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[E] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._events)

    def is_full(self) -> bool:
        """Return whether whoever puts an event waits now."""
        return len(self._events) >= self._limit

    def put(self, event: E) -> None:
        """Put an event; wait while it is full, so that TCP slows the sender."""
        if self._is_closed:
            return
        self._events.append(event)
        if self.is_full():
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed or not self.is_full())

    def take(self, after_s: float = 0.0) -> Sequence[E]:
        """Return what is there after so many seconds, or once it is full."""
        with self._changed:
            self._changed.wait_for(self.is_full, after_s)
            events = [self._events.popleft() for _ in range(len(self._events))]
            self._changed.notify_all()
        return events

    def close(self) -> None:
        """Nobody takes events any more: those that come are dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
