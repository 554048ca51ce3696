"""The state of the slots in memory, and what of it the disk has."""

import logging
import time

import msgspec

from device.errors import StateError
from device.update.boot import boot_state
from device.update.machine import RETRY_S
from device.update.slot_store import SlotStore
from device.update.slots import SlotState

LOG = logging.getLogger("tandem.agent")


class SlotStateCache:
    """The state that is in force. What has happened is in force even if the disk is full."""

    def __init__(self, store: SlotStore) -> None:
        self.state = SlotState()
        self._store = store
        self._unsaved = ""  # why the disk lacks the state
        self._retry_at_s = 0.0

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences on the state that an operator should know."""
        texts = (self.state.recovery, self._unsaved, *self._store.unread.values(), *self._store.odd)
        return tuple(text for text in texts if text)

    @property
    def retry_at_s(self) -> float | None:
        """When `retry` is due."""
        return self._retry_at_s if self._unsaved else None

    def boot(self) -> None:
        """Take the state from which the agent starts."""
        self.state, saved = boot_state(self._store, utc_now())
        if not saved:
            self.note(self.state)

    def save(self, state: SlotState) -> None:
        """Change the state only if the disk keeps it; StateError otherwise."""
        state = msgspec.structs.replace(state, generation=self.state.generation)
        self.state = self._store.save(state)
        self._unsaved = ""

    def note(self, state: SlotState) -> None:
        """Change the state, which has happened already; the disk gets it when it has room."""
        try:
            self.save(state)
        except StateError as error:
            if not self._unsaved:
                LOG.error("%s", error)
            self.state = state
            self._unsaved = str(error)
            self._retry_at_s = time.monotonic() + RETRY_S

    def retry(self, now_s: float) -> None:
        """Write a state that the disk lacks, if that is due."""
        if self._unsaved and now_s >= self._retry_at_s:
            self.note(self.state)


def utc_now() -> str:
    """Return the time as the records have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
