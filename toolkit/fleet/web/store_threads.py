"""The threads that use the store, and how long somebody waits for them.

Each has a connection of its own. Those that read go on while a write waits for another one, and
what hangs in one is answered by a sentence while the others work.
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.store.database import Database
from toolkit.fleet.web.access import RefusedError

READERS = 4
WAIT_S = 20.0  # for an answer of the store
END_S = 2.0  # for what runs when the site stops

Result = TypeVar("Result")
Job = tuple["Future[Any]", Callable[..., Any], tuple[object, ...]]


class StoreThreads:
    """Threads for reading, and one for writing: writers of a store wait for each other anyway."""

    def __init__(self, fleet: Fleet) -> None:
        """Raises RolloutError: the store cannot be opened."""
        fleet.open_store().close()
        self._reads: SimpleQueue[Job | None] = SimpleQueue()
        self._writes: SimpleQueue[Job | None] = SimpleQueue()
        queues = (*(self._reads,) * READERS, self._writes)
        # Daemons: one that hangs keeps nobody from stopping the site.
        self._threads = [
            threading.Thread(target=_work, args=(fleet, jobs), name="store", daemon=True)
            for jobs in queues
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Return `function(database, *arguments)`, which reads. Raises RefusedError: the store does
        not answer."""
        return await self._ask(self._reads, function, arguments)

    async def write(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Return `function(database, *arguments)`, which writes. Raises RefusedError: the store
        does not answer."""
        return await self._ask(self._writes, function, arguments)

    async def _ask(
        self,
        jobs: "SimpleQueue[Job | None]",
        function: Callable[..., Result],
        arguments: tuple[object, ...],
    ) -> Result:
        future: Future[Result] = Future()
        jobs.put((future, function, arguments))
        answer = asyncio.wrap_future(future)
        try:  # `wait_for` of Python 3.11 loses a cancellation that comes with the answer
            await asyncio.wait({answer}, timeout=WAIT_S)
        finally:
            future.cancel()
            is_late = answer.cancel()
        if not is_late:
            return await answer
        reason = f"the fleet's store has not answered within {WAIT_S:g} s"
        if jobs is self._writes and not future.cancelled():
            reason += "; what was asked for may still be done: look before it is sent again"
        raise RefusedError(503, reason, math.ceil(WAIT_S))

    def close(self) -> None:
        """Close the connections, after what runs has ended or END_S."""
        for jobs, count in ((self._reads, READERS), (self._writes, 1)):
            for _ in range(count):
                jobs.put(None)
        for thread in self._threads:
            thread.join(END_S / len(self._threads))


def _work(fleet: Fleet, jobs: "SimpleQueue[Job | None]") -> None:
    """Do jobs one after another, until there is None."""
    database: Database | None = None
    while (job := jobs.get()) is not None:
        future, function, arguments = job
        if not future.set_running_or_notify_cancel():
            continue  # nobody waits any more
        try:
            database = database or fleet.open_store()
            result = function(database, *arguments)
        except BaseException as error:  # noqa: BLE001  (who has asked gets it)
            # A database that was started anew has ended the connection: the next job has another.
            if database is not None and isinstance(error.__cause__, database.dialect.errors()):
                with contextlib.suppress(Exception):
                    database.close()
                database = None
            future.set_exception(error)
        else:
            future.set_result(result)
    if database is not None:
        database.close()
