"""Looks now and then at what a board falls back on: the disk of the state folder, and both slots.

A slot that nothing reads would rot unseen until a rollback needs it. A thread reads the slots, in a
fraction of its time: neither the first frame nor the live release waits for gigabytes.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from device.errors import BundleError
from device.update.bundle import verify_folder
from device.update.slot_store import SlotStore
from device.update.slots import SLOTS, Slot, SlotState
from device.update.state_folder import disk_problem

DISK_S = 10.0  # between two looks at the disk
SLOTS_S = 86400.0  # between two looks at the slots
AGAIN_S = 3600.0  # the same, while one is damaged
SHARE = 0.1  # of its time that the thread reads


class StoppedError(Exception):
    """The agent stops: the thread reads no more."""


class StateCheck:
    """What is wrong with the state folder of an agent, whose one thread uses this."""

    def __init__(self, store: SlotStore) -> None:
        self._store = store
        self._disk_due_s = self._slots_due_s = float("-inf")
        self._disk = ""
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._populations = -1  # of the store, when the slots were looked at
        self._damage: Mapping[Slot, str] = {}  # of the thread, replaced as a whole

    def problems(self, state: SlotState) -> tuple[str, ...]:
        """Return a sentence for each thing that is wrong; a slot is new once it is populated."""
        damage = self._damage if self._populations == self._store.populations else {}
        sentences = (_sentence(slot, state, reason) for slot, reason in damage.items())
        return tuple(filter(None, (self._disk, *sentences)))

    def advance(self, now_s: float, state: SlotState) -> None:
        """Look at what is due."""
        if now_s >= self._disk_due_s:
            self._disk_due_s = now_s + DISK_S
            self._disk = disk_problem(self._store.root)
        if self._thread is not None:
            if self._thread.is_alive():
                return
            self._thread = None
            self._slots_due_s = now_s + (AGAIN_S if self._damage else SLOTS_S)
        if now_s >= self._slots_due_s or self._populations != self._store.populations:
            self._look(now_s, state)

    def stop(self) -> None:
        """Look at nothing any more."""
        self._stopped.set()

    def _look(self, now_s: float, state: SlotState) -> None:
        slots = sorted(SLOTS, key=lambda slot: slot == state.active)  # that one was just verified
        folders = {slot: self._store.slot_folder(slot) for slot in slots if state.record(slot)}
        if self._populations != self._store.populations:
            self._populations, self._damage = self._store.populations, {}
        thread = threading.Thread(target=self._verify, args=(folders,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the limit of tasks is reached
            self._slots_due_s = now_s + AGAIN_S
        else:
            self._thread = thread

    def _verify(self, folders: Mapping[Slot, Path]) -> None:
        damage: dict[Slot, str] = {}
        with contextlib.suppress(StoppedError):
            for slot, folder in folders.items():
                try:
                    verify_folder(folder, between=paced(self._stopped))
                except BundleError as error:
                    damage[slot] = str(error)
            self._damage = damage


def paced(stopped: threading.Event) -> Callable[[], None]:
    """Return what a thread calls between two pieces of work: it waits. It raises StoppedError."""
    woken_s = time.monotonic()

    def pause() -> None:
        nonlocal woken_s
        if stopped.wait((time.monotonic() - woken_s) * (1 / SHARE - 1)):
            raise StoppedError
        woken_s = time.monotonic()

    return pause


def _sentence(slot: Slot, state: SlotState, reason: str) -> str:
    record = state.record(slot)
    if record is None:
        return ""
    what = f"slot {slot} with {record.name} {record.version}"
    if slot == state.active:
        return (
            f"{what}, which runs, is damaged ({reason}): start the agent anew, and it goes back to "
            "the other slot, if that is whole, and fetches this release again"
        )
    if not record.good:
        return f"{what} is damaged ({reason}): it is fetched again before it is tried"
    return (
        f"{what}, which a rollback needs, is damaged ({reason}): the board cannot go back until "
        "the next release is deployed, which takes this slot"
    )
