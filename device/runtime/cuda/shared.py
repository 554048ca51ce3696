"""Reference-counted values: created for the first user, destroyed with the last."""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    users: int


class Shared(Generic[K, V]):
    """Values by key with the number of their users; any thread may acquire and release."""

    def __init__(self, destroy: Callable[[V], None]) -> None:
        """Use `destroy` on a value that has no users left."""
        self._destroy = destroy
        self._entries: dict[K, _Entry[V]] = {}
        self._lock = threading.RLock()  # garbage collection may release inside an acquire

    def acquire(self, key: K, create: Callable[[], V]) -> V:
        """Return the value of a key, created for its first user; `release` it once.

        What `create` raises passes through, and nothing is acquired then.
        """
        with self._lock:
            if key not in self._entries:
                self._entries[key] = _Entry(create(), 0)
            entry = self._entries[key]
            entry.users += 1
            return entry.value

    def release(self, key: K) -> None:
        """Remove one user of the value."""
        with self._lock:
            entry = self._entries[key]
            entry.users -= 1
            if entry.users == 0:
                del self._entries[key]
                self._destroy(entry.value)

    def __len__(self) -> int:
        """Return the number of values with users."""
        with self._lock:
            return len(self._entries)
