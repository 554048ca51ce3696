"""Live changes: one poller looks at the store, each view is drawn once for all who look at it.

What is sent is a whole view as it is now. So nothing is lost with a connection: the next one gets
what differs from what its page shows.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import islice

import msgspec

from device.errors import TandemError
from toolkit.fleet.server.times import utc
from toolkit.fleet.server.views import device_view
from toolkit.fleet.store import log
from toolkit.fleet.store.changes import last_change
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.device_queries import changes_since
from toolkit.fleet.web.access import RefusedError
from toolkit.fleet.web.store_threads import StoreThreads

LOG = logging.getLogger("tandem.fleet")
POLL_S = 0.4  # a change is seen within it
AGE_S = 5.0  # ages on a page are drawn anew at least so often
KEEP_ALIVE_S = 15.0  # proxies close what is silent for longer
MAX_DRAWN = 256  # views that are kept
MAX_EVENTS = 1000  # that a program gets at once
_PLACE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})\Z")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A live view: the state of the store that it shows, and its HTML, which may still be drawn."""

    mark: str
    html: "asyncio.Future[str]"

    @property
    def has_failed(self) -> bool:
        """Whether it could not be drawn."""
        html = self.html
        return html.done() and (html.cancelled() or html.exception() is not None)


class Live:
    """Follows the store for all viewers."""

    def __init__(self, store: StoreThreads) -> None:
        self._store = store
        self._mark = ""
        self._changed = asyncio.Event()  # another one after each change
        self._drawn: dict[tuple[str, str], Drawn] = {}
        self.changed_s = time.time()  # when the store was last seen to change
        self.is_stale = (
            False  # the last look at the store failed: streams end, new ones are refused
        )
        self.is_ending = False  # set where the site stops: streams end within POLL_S

    async def mark(self) -> str:
        """Return the state of the store at present."""
        if not self._mark:
            self._mark = await self._store.run(_mark)
        return self._mark

    async def poll(self) -> None:
        """Look at the store again and again, until it is cancelled, whatever the store says."""
        while True:
            mark, was_stale = self._mark, self.is_stale
            try:
                mark, self.is_stale = await self._store.run(_mark), False
            except TandemError as error:
                self.is_stale = True
                LOG.warning("%s", error)
            if _place_in(mark) != _place_in(self._mark):
                self.changed_s = time.time()
            if mark != self._mark or self.is_ending or self.is_stale > was_stale:
                self._mark = mark
                self._changed.set()  # all who wait go on
                self._changed = asyncio.Event()
            await asyncio.sleep(POLL_S)

    async def draw(self, key: tuple[str, str], draw: Callable[[Database], str]) -> tuple[str, str]:
        """Return the state of the store, and a view as it is then; all who ask with one key get
        what was drawn once."""
        mark, known = await self.mark(), self._drawn.pop(key, None)
        if known is None or known.mark != mark or known.has_failed:
            known = Drawn(mark, asyncio.ensure_future(self._store.run(draw)))
        self._drawn[key] = known  # the youngest is last
        while len(self._drawn) > MAX_DRAWN:
            del self._drawn[next(iter(self._drawn))]
        return mark, await asyncio.shield(known.html)  # others may wait for it, too

    async def follow(
        self, key: tuple[str, str], draw: Callable[[Database], str], mark: str
    ) -> AsyncIterator[str]:
        """Yield a view as messages of server-sent events whenever it differs from the last;
        `mark`: the state that the viewer's page shows."""
        shown = ""
        while not (self.is_ending or self.is_stale):
            if await self.mark() == mark:
                yield await self.await_change()
                continue
            mark, html = await self.draw(key, draw)
            if html != shown:
                shown = html
                yield sse_message(shown, mark)

    async def await_change(self) -> str:
        """Wait until the store is in another state than now; return what is sent meanwhile."""
        changed = self._changed
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(changed.wait(), KEEP_ALIVE_S)
        return ": alive\n\n"


def sse_message(text: str, number: str, event: str = "") -> str:
    """Return a message of server-sent events with its id; `event`: its kind."""
    # Lines end as the protocol has it: `splitlines` would cut a device's text at U+2028, too.
    lines = "".join(f"data: {line}\n" for line in re.split("\r\n|\r|\n", text))
    kind = f"event: {event}\n" if event else ""
    return f"id: {number}\n{kind}{lines}\n"


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far a program is: the last row of the log, and the number of the last change."""

    seq: int
    change: int

    def __str__(self) -> str:
        return f"{self.seq}-{self.change}"


def read_place(database: Database, text: str) -> LogPosition:
    """Return the place in a `Last-Event-ID`, the present one without it. Raises RefusedError."""
    if not text:
        return LogPosition(log.head(database)[0], last_change(database))
    if not (match := _PLACE.match(text)):
        raise RefusedError(400, f"Last-Event-ID {text[:64]!r} is none of this fleet")
    return LogPosition(int(match[1]), int(match[2]))


def events_after(database: Database, place: LogPosition) -> tuple[list[str], LogPosition]:
    """Return what has happened after a place as messages, and the place that they lead to."""
    events = []
    rows = log.rows_after(database, place.seq)
    for row in islice(rows, MAX_EVENTS):
        place = LogPosition(row.seq, place.change)
        body = {"seq": row.seq, "at": utc(row.at_s), "who": row.who, "rollout": row.rollout,
            "kind": row.kind, "body": msgspec.Raw(row.body.encode())}  # fmt: skip
        events.append(sse_message(msgspec.json.encode(body).decode(), str(place), "log"))
    changes = changes_since(database, place.change, MAX_EVENTS)
    place = LogPosition(place.seq, changes.number)
    if changes.missed:
        place = LogPosition(place.seq, last_change(database))
        events.append(sse_message("{}", str(place), "missed"))
        return events, place
    for device in changes.devices:
        view = device_view(database, device)
        events.append(sse_message(msgspec.json.encode(view).decode(), str(place), "device"))
    return events, place


def _mark(database: Database) -> str:
    """Return what tells one state of the store from another: changes, and that time passes."""
    place = read_place(database, "")
    return f"{place}-{int(database.now_s() / AGE_S)}"


def _place_in(mark: str) -> str:
    return mark.rpartition("-")[0]
