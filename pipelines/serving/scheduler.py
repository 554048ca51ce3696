"""Queues and batches: the pure core, and threads that run them, one for each instance."""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

from pipelines.serving.protocol import Refusal, Status, refuse

CLOSE_S = 20.0  # what waits may run so long when a model ends; one that hangs never does


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Limits of one priority: `timeout_s` 0: none; `delays`: what is late waits behind the others
    and is not refused; `own_timeout`: a request may ask for a shorter one."""

    size: int = 0
    timeout_s: float = 0.0
    delays: bool = False
    own_timeout: bool = True


@dataclass(frozen=True, slots=True)
class Policy:
    """How requests of a model are queued and put together; `max_batch` 1: one at a time."""

    model: str
    max_batch: int = 1
    preferred: tuple[int, ...] = ()
    delay_s: float = 0.0
    levels: int = 0  # priorities 1 (first) to this
    default_level: int = 0
    queue: QueuePolicy = QueuePolicy()
    by_level: Mapping[int, QueuePolicy] = field(default_factory=dict)
    max_queue: int = 1024  # of all priorities

    def of(self, level: int) -> QueuePolicy:
        """Return the limits of a priority."""
        return self.by_level.get(level, self.queue)


@dataclass(slots=True, eq=False)
class Item:
    """A request that waits: `rows` of a batch. Those with the same `key` go together."""

    work: Any
    rows: int
    key: Hashable
    level: int = 0
    timeout_s: float = 0.0
    cancelled: bool = False
    queued_s: float = 0.0
    late: bool = False


class RequestQueue:
    """The requests of a model that wait; times are the caller's. Not for several threads."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._levels: dict[int, deque[Item]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def put(self, item: Item, now_s: float) -> None:
        """Queue a request. Raises Refusal: the queue is full, or there is no such priority."""
        policy = self.policy
        level = item.level or policy.default_level
        if level > policy.levels:
            refuse(
                f"priority {level} was asked for; model {policy.model!r} has priorities up to"
                f" {policy.levels}"
            )
        waiting, limits = self._levels.setdefault(level, deque()), policy.of(level)
        for count, limit in ((len(waiting), limits.size), (len(self), policy.max_queue)):
            if limit and count >= limit:
                refuse(
                    f"model {policy.model!r} exceeds its maximum queue size: {count} requests wait"
                    f" and {limit} may; try again later",
                    Status.UNAVAILABLE,
                )
        if limits.timeout_s and not (limits.own_timeout and item.timeout_s):
            item.timeout_s = limits.timeout_s
        elif limits.timeout_s:
            item.timeout_s = min(item.timeout_s, limits.timeout_s)
        item.level, item.queued_s = level, now_s
        waiting.append(item)

    def expire(self, now_s: float) -> list[Item]:
        """Take out what was cancelled, and return those that have waited too long."""
        expired = []
        for level, waiting in self._levels.items():
            if not any(one.cancelled or self._is_late(one, now_s) for one in waiting):
                continue
            in_time: deque[Item] = deque()
            delayed = []
            for item in waiting:
                if item.cancelled:
                    continue
                if not self._is_late(item, now_s):
                    in_time.append(item)
                elif self.policy.of(level).delays:
                    item.late = True
                    delayed.append(item)
                else:
                    expired.append(item)
            self._levels[level] = in_time
            in_time.extend(delayed)
        return expired

    def take(self, now_s: float) -> tuple[list[Item], float | None]:
        """Return the next batch, empty if it is worth to wait, and when to look again."""
        head, run, blocked = self._run()
        if not run:
            return [], None
        rows = list(accumulate(item.rows for item in run))
        preferred = [place for place, total in enumerate(rows) if total in self.policy.preferred]
        full = blocked or rows[-1] >= self.policy.max_batch
        due_s = head.queued_s + self.policy.delay_s
        if preferred:
            run = run[: preferred[-1] + 1]
        elif not full and now_s < due_s:
            return [], due_s
        for item in run:
            self._levels[item.level].remove(item)
        return run, None

    def _run(self) -> tuple[Item, list[Item], bool]:
        """Return the first request, those that go with it, and whether the next one does not."""
        order = chain.from_iterable(self._levels[level] for level in sorted(self._levels))
        run: list[Item] = []
        rows = 0
        for item in order:
            if run and (item.key != run[0].key or rows + item.rows > self.policy.max_batch):
                return run[0], run, True
            run.append(item)
            rows += item.rows
        return (run[0] if run else _NOBODY), run, False

    def _is_late(self, item: Item, now_s: float) -> bool:
        return bool(item.timeout_s) and not item.late and now_s >= item.queued_s + item.timeout_s


_NOBODY = Item(None, 0, None)


Run = Callable[[list[Item]], Sequence[Any]]


class Scheduler:
    """The queue of a model and a thread for each of its instances."""

    def __init__(
        self,
        policy: Policy,
        runs: Sequence[Run],
        deliver: Callable[[Sequence[Item], Sequence[Any]], None],
    ) -> None:
        """`runs`: what each instance does with a batch, and returns for each request; it raises
        nothing. `deliver` gives a request that, or a Refusal where it waited too long."""
        self._queue = RequestQueue(policy)
        self._deliver = deliver
        self._free = list(runs)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # to enter the lock itself costs less
        self._closing = False
        self._threads = [
            threading.Thread(target=self._loop, name=f"serve-{policy.model}-{number}")
            for number in range(len(runs))
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def submit(self, item: Item) -> None:
        """Queue a request. Raises Refusal."""
        with self._changed:
            self._put(item)
            self._changed.notify()

    def run_here(self, item: Item) -> Sequence[Any]:
        """Run a request in the thread of the caller, which costs less than to wake another; queue
        it, and return nothing, if it may go together with others, or if the only instance is not
        free. Raises Refusal."""
        policy = self._queue.policy
        with self._lock:
            if (
                policy.max_batch == 1
                and len(self._threads) == 1
                and self._free
                and not self._queue
                and item.level <= policy.levels
            ):
                self._check_open()
                item.queued_s = time.monotonic()
                run = self._free.pop()
            else:
                self._put(item)
                self._changed.notify()
                return ()
        return self._run(run, [item])

    def _put(self, item: Item) -> None:
        self._check_open()
        self._queue.put(item, time.monotonic())

    def _check_open(self) -> None:
        if self._closing:
            refuse(f"model {self._queue.policy.model!r} is being unloaded", Status.UNAVAILABLE)

    def _run(self, run: Run, batch: list[Item]) -> Sequence[Any]:
        try:
            return run(batch)
        finally:
            with self._lock:
                self._free.append(run)
                if self._queue:
                    self._changed.notify()

    def close(self) -> bool:
        """Run what waits, then end the threads. Return whether all ended within the limit."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        ends_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self) -> None:
        while (work := self._next()) is not None:
            run, batch = work
            self._deliver(batch, self._run(run, batch))
            del work, batch  # this thread may wait for long, and tensors are not to

    def expire(self) -> None:
        """Refuse what has waited too long."""
        with self._changed:
            self._expire(time.monotonic())

    def _expire(self, now_s: float) -> None:
        for item in self._queue.expire(now_s):
            waited_ms = (now_s - item.queued_s) * 1e3
            sentence = (
                f"request timeout expired: it waited {waited_ms:.1f} ms for model"
                f" {self._queue.policy.model!r} and may wait {item.timeout_s * 1e3:.1f} ms"
            )
            self._deliver([item], [Refusal(Status.UNAVAILABLE, sentence)])

    def _next(self) -> tuple[Run, list[Item]] | None:
        """Wait for the next batch and an instance that is free; None: there are no more."""
        with self._changed:
            while True:
                now_s = time.monotonic()
                self._expire(now_s)
                batch: list[Item] = []
                again_s = None
                if self._free:
                    batch, again_s = self._queue.take(now_s if not self._closing else float("inf"))
                if batch:
                    return self._free.pop(), batch
                if self._closing and not self._queue:
                    return None
                self._changed.wait(None if again_s is None else max(0.0, again_s - now_s))
