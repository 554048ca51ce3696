"""Stores the slots on the disk, so that after a power cut at any moment one slot starts.

    STATE_DIR/agent.lock               held with flock while an agent runs
    STATE_DIR/slots.0, slots.1         the state, written in turn: CRC-32 and JSON
    STATE_DIR/slots/a, slots/b         unpacked bundles
    STATE_DIR/download/                the bundle that is being fetched

Each write goes to a new name, is synced, renamed and the folder synced. The older copy of the
state stays as it is, so one torn or lost write never takes both.
"""

import contextlib
import fcntl
import os
import shutil
import zlib
from pathlib import Path

import msgspec

from device.errors import BundleError, StateError
from device.files import replacing, sync_folder
from device.update.bundle import BundleInfo, extract_bundle, verify_folder
from device.update.slots import SLOT_FORMAT, SLOTS, Slot, SlotState

_MAX_STATE_BYTES = 64 * 1024


class SlotStore:
    """The state directory of one agent; two agents on the same one are refused."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._slots = root / "slots"
        try:
            self._slots.mkdir(parents=True, exist_ok=True)
            self.downloads.mkdir(exist_ok=True)
            self._lock = os.open(root / "agent.lock", os.O_RDONLY | os.O_CREAT, 0o644)
        except OSError as error:
            raise StateError(
                f"cannot use state_dir {root}: {error.strerror}; name a folder that the agent "
                "may write"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise StateError(
                f"another agent already uses state_dir {root}: stop it, or give each agent its "
                "own folder"
            ) from error
        except OSError as error:
            os.close(self._lock)
            raise StateError(
                f"state_dir {root} cannot be locked: {error.strerror}; name a folder on a local "
                "disk"
            ) from error

    @property
    def downloads(self) -> Path:
        """The folder of unfinished downloads."""
        return self.root / "download"

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def slot_folder(self, slot: Slot) -> Path:
        """Return the folder of a slot's unpacked bundle."""
        return self._slots / slot

    def load(self) -> SlotState:
        """Return the newest state that is whole, a fresh one where there is none."""
        states = [state for copy in (0, 1) if (state := self._read(copy)) is not None]
        return max(states, key=lambda state: state.generation, default=SlotState())

    def save(self, state: SlotState) -> SlotState:
        """Write the state and return it with its new generation; StateError if the disk fails."""
        state = msgspec.structs.replace(state, generation=state.generation + 1)
        body = msgspec.json.encode(state)
        path = self._copy(state.generation % 2)
        try:
            with replacing(path) as file:
                file.write(b"%08x\n" % zlib.crc32(body) + body)
        except OSError as error:
            raise StateError(
                f"cannot write the state of the slots to {path}: {error.strerror}; make room or "
                "give the agent the right to write there"
            ) from error
        return state

    def populate(self, slot: Slot, bundle: Path) -> BundleInfo:
        """Unpack a bundle into a slot; the slot's folder is whole or absent at every moment.

        The state must have forgotten what was in the slot (`slots.clear`) before.
        """
        folder = self.slot_folder(slot)
        temporary = self._slots / f".{slot}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(folder)
        try:
            info = extract_bundle(bundle, temporary)
            os.rename(temporary, folder)
            sync_folder(self._slots)
        except BundleError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return info

    def verify(self, slot: Slot) -> BundleInfo:
        """Compare every file of a slot with its hash; BundleError names what differs."""
        return verify_folder(self.slot_folder(slot))

    def clean(self, state: SlotState) -> None:
        """Remove the leftovers of an interrupted update or write."""
        for leftover in self.root.glob(".slots.?.*.tmp"):
            with contextlib.suppress(OSError):  # like the folders, it only takes space
                leftover.unlink()
        for slot in SLOTS:
            shutil.rmtree(self._slots / f".{slot}.tmp", ignore_errors=True)
            if state.record(slot) is None:
                shutil.rmtree(self.slot_folder(slot), ignore_errors=True)

    def _copy(self, number: int) -> Path:
        return self.root / f"slots.{number}"

    def _read(self, copy: int) -> SlotState | None:
        """Return one copy of the state; None if it is unreadable, torn or of an unknown format."""
        try:
            with self._copy(copy).open("rb") as file:
                blob = file.read(_MAX_STATE_BYTES)
        except OSError:
            return None
        crc, _, body = blob.partition(b"\n")
        if crc != b"%08x" % zlib.crc32(body):
            return None
        try:
            state = msgspec.json.decode(body, type=SlotState)
        except msgspec.DecodeError:
            return None
        return state if state.format == SLOT_FORMAT else None
