"""Values that several users hold at once, made for the first and given up with the last."""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class _Held(Generic[V]):
    value: V
    users: int


class Shared(Generic[K, V]):
    """Values by key, with the number of their users; any thread may borrow and give back."""

    def __init__(self, give_up: Callable[[V], None]) -> None:
        """Remember what ends a value that nobody uses any more."""
        self._give_up = give_up
        self._held: dict[K, _Held[V]] = {}
        self._lock = threading.RLock()  # a collected user may give back inside a borrow

    def borrow(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, made now if nobody holds it; `give_back` it once.

        What `make` raises passes through, and nothing is held then.
        """
        with self._lock:
            if key not in self._held:
                self._held[key] = _Held(make(), 0)
            entry = self._held[key]
            entry.users += 1
            return entry.value

    def give_back(self, key: K) -> None:
        """Say that one user needs the value no more."""
        with self._lock:
            entry = self._held[key]
            entry.users -= 1
            if entry.users == 0:
                del self._held[key]
                self._give_up(entry.value)

    def __len__(self) -> int:
        """Return how many values are held."""
        with self._lock:
            return len(self._held)
