"""Stores the slots on the disk, so that after a power cut at any moment one slot starts.

    STATE_DIR/agent.lock               held with flock while an agent runs
    STATE_DIR/slots.0, slots.1         the state, written in turn: CRC-32 and JSON
    STATE_DIR/slots.N.unreadable-TIME  a state that could not be read
    STATE_DIR/slots/a, slots/b         unpacked bundles
    STATE_DIR/slots/a/seal.json        what the slot says of itself: SHA-256 and JSON
    STATE_DIR/slots/a/live-N-SHA256    empty: the release of this hash became live as number N
    STATE_DIR/reserve                  room for the state on a full disk
    STATE_DIR/download/                the bundle that is being fetched

Each write goes to a new name, is synced, renamed and the folder synced. The older copy of the
state stays as it is, so one torn or lost write never takes both. Where both are lost, the state is
made anew of the seals, and of the names of the empty files where those are lost, too. A slot is
overwritten by another release, and never removed otherwise.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from device.engine.checksums import verify_engine_file
from device.errors import (
    BundleError,
    BundleReadError,
    DamagedEngineError,
    EngineError,
    StateError,
)
from device.files import (
    FULL_DISK,
    UnfitFileError,
    make_folder,
    open_regular,
    read_regular,
    remove,
    replacing,
    sync_folder,
    write_synced,
)
from device.update.admission import Room
from device.update.bundle import INFO, BundleInfo, extract_bundle, hash_folder, verify_folder
from device.update.records import MAX_RECORD_BYTES, decode_record, encode_record
from device.update.slots import (
    SLOT_FORMAT,
    SLOTS,
    Slot,
    SlotRecord,
    SlotSeal,
    SlotState,
    agreeing,
    inconsistency,
    recovered,
)
from device.update.state_folder import (
    FILE_MODE,
    FOLDER_MODE,
    LOCK,
    put_lock_right,
    put_right,
    set_aside,
)

LOG = logging.getLogger("tandem.agent")
SEAL = "seal.json"
LIVE = "live-"  # then the number of the commit and the bundle's SHA-256
SIDELOADED = ("inbox", "smp/inbox")  # where bundles lie that came over SSH, or a serial line
RESERVE_BYTES = 1024 * 1024  # a state and two seals, each at its largest
READ_TRIES, READ_PAUSE_S = 3, 0.2  # of a copy of the state: a disk may fail for a moment


class SlotStore:
    """The state directory of one agent; two agents on the same one are refused.

    `unread`: the slots that the disk did not give when they were last verified, and why. `odd`:
    what was put aside in the folder as the store was opened, each a sentence. `populations`: how
    often a slot was overwritten.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unread: dict[Slot, str] = {}
        self.populations = 0
        self._slots = root / "slots"
        try:
            make_folder(root, FOLDER_MODE)
            put_lock_right(root)
            self._lock = open_regular(root / LOCK, os.O_RDONLY | os.O_CREAT, FILE_MODE)
        except OSError as error:
            raise _unusable(root, error) from error
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
        self.odd = put_right(root)
        try:
            for folder in (self._slots, self.downloads):
                make_folder(folder, FOLDER_MODE)
        except OSError as error:
            os.close(self._lock)
            raise _unusable(root, error) from error

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

    def bundles(self, state: SlotState) -> dict[str, Path]:
        """Return the folders of the unpacked releases by their SHA-256, the active one first."""
        return slot_folders(self.root, state)

    def room(self, state: SlotState) -> Room | None:
        """Return what a release may take on the disk, unfinished downloads counted as free. None:
        the disk does not say."""
        try:
            idle_bytes = _allocated(self.slot_folder(state.idle).rglob("*"))
            free_bytes = shutil.disk_usage(self.root).free + _allocated(self.downloads.iterdir())
        except OSError:
            return None
        return Room(free_bytes, idle_bytes)

    def sideloaded(self, sha256: str, size: int) -> Path | None:
        """Return the whole bundle that somebody has brought into the state folder, if it is there.

        It is compared with its hash before it is used.
        """
        for folder in SIDELOADED:
            path = self.root / folder / f"{sha256}.bundle"
            with contextlib.suppress(OSError):
                if path.stat().st_size == size:
                    return path
        return None

    def adopt(self, sha256: str, size: int) -> None:
        """Let a bundle that was brought be the download as well, without a second copy of it.

        Both names are of one file. Where the file system has no hard links it is copied later.
        """
        bundle, part = self.sideloaded(sha256, size), self.downloads / f"{sha256}.part"
        if bundle is None:
            return
        with contextlib.suppress(OSError):
            if part.exists() and not part.samefile(bundle):
                part.unlink()
            os.link(bundle, part)
            sync_folder(self.downloads)

    # -- the state

    def load(self) -> SlotState:
        """Return the newest state that is whole; a fresh one on a device without releases.

        A copy that cannot be read is kept aside. If none can be read, the state is made anew of
        what the slots say of themselves, stored, and says so in `recovery`.
        """
        copies = [self._read(number) for number in (0, 1)]
        problems = [copy for copy in copies if isinstance(copy, str)]
        states = [copy for copy in copies if isinstance(copy, SlotState)]
        if states:
            state = max(states, key=lambda state: state.generation)
            if problems:
                recovery = f"{problems[0]}. The other copy of the state is used"
                seals = {slot: seal for slot in SLOTS if (seal := self._read_seal(slot))}
                state = msgspec.structs.replace(agreeing(state, seals), recovery=recovery)
                return self._save_recovered(state)
            return state
        seals, unsealed = self._slots_by_themselves()
        if not problems and not seals and not unsealed:
            return SlotState()
        state = recovered(seals, unsealed, _recovery(problems, seals, unsealed))
        return self._save_recovered(state)

    def _save_recovered(self, state: SlotState) -> SlotState:
        """Store a state with its `recovery`, so that the report has that after a restart too."""
        LOG.error("%s", state.recovery)
        try:
            return self.save(state)
        except StateError as error:
            LOG.error("%s", error)
            return state

    def save(self, state: SlotState) -> SlotState:
        """Write the state and return it with its new generation; StateError if the disk fails.

        The seals and marks of the slots are written first.
        """
        state = msgspec.structs.replace(state, generation=state.generation + 1)
        path = self._copy(state.generation % 2)
        try:
            for slot in SLOTS:
                self._seal(slot, state)
                self._mark(slot, state)
            self._write(path, encode_record(state, _crc32))
        except OSError as error:
            raise StateError(
                f"cannot write the state of the slots to {path}: {error.strerror}; make room or "
                "give the agent the right to write there"
            ) from error
        return state

    def reserve(self) -> None:
        """Set the room aside that the next writes of the state need; StateError if there is none.

        Once `save` finds the disk full it uses this room.
        """
        path = self.root / "reserve"
        try:
            handle = open_regular(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
            try:
                os.posix_fallocate(handle, 0, RESERVE_BYTES)
            finally:
                os.close(handle)
        except OSError as error:
            with contextlib.suppress(OSError):  # a part of the room is of no use
                path.unlink()
            raise StateError(
                f"{self.root} has no room for the {RESERVE_BYTES >> 10} KiB that a trial must "
                f"have to record its result: {error.strerror}; make room and deploy again"
            ) from error

    # -- the slots

    def populate(self, slot: Slot, bundle: Path, record: SlotRecord | None = None) -> BundleInfo:
        """Unpack a bundle into a slot; the slot's folder is whole or absent at every moment.

        Its hashes say that it came as it was packed, the engines' checksums that they were packed
        as they were built.

        The state must have forgotten what was in the slot (`slots.clear`) before. With a `record`
        the slot is sealed from the beginning.
        """
        folder = self.slot_folder(slot)
        temporary = self._slots / f".{slot}.tmp"
        self.populations += 1
        remove(temporary)
        remove(folder)
        try:
            info = extract_bundle(bundle, temporary)
            _verify_engines(info, temporary)
            if record is not None:
                seal = encode_record(SlotSeal(record=record), _sha256)
                write_synced(temporary / SEAL, [seal], FILE_MODE)
                sync_folder(temporary)
            os.rename(temporary, folder)
            sync_folder(self._slots)
            self.unread.pop(slot, None)
        except (BundleError, OSError):
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return info

    def verify(self, slot: Slot) -> BundleInfo:
        """Compare every file of a slot with its hash; BundleError names what differs.

        Raises BundleReadError, and notes it in `unread`, where the disk does not give a file.
        """
        self.unread.pop(slot, None)
        try:
            return verify_folder(self.slot_folder(slot))
        except BundleReadError as error:
            self._note_unread(slot, error)
            raise

    def clean(self) -> None:
        """Remove the leftovers of an interrupted update or write."""
        for folder in (self.root, *(self.slot_folder(slot) for slot in SLOTS)):
            for leftover in folder.glob(".*.tmp"):
                with contextlib.suppress(OSError):  # it only takes space
                    remove(leftover)
        for slot in SLOTS:
            with contextlib.suppress(OSError):
                remove(self._slots / f".{slot}.tmp")

    # -- reading

    def _copy(self, number: int) -> Path:
        return self.root / f"slots.{number}"

    def _read(self, number: int) -> SlotState | str | None:
        """Return one copy of the state, None if there is none, or why it was kept aside."""
        path = self._copy(number)
        try:
            state = decode_record(_read_patiently(path), SlotState, _crc32)
            reason = inconsistency(state)
            if reason is None:
                newest = max(state.format, SLOT_FORMAT)
                return msgspec.structs.replace(state, format=newest)
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = error.strerror or type(error).__name__
        except ValueError as error:
            reason = str(error)
        problem = f"{path.name} could not be read ({reason})"
        aside = set_aside(path)
        return f"{problem} and is kept as {aside}" if aside else f"{problem} and stays as it is"

    def _slots_by_themselves(self) -> tuple[dict[Slot, SlotSeal], dict[Slot, SlotRecord]]:
        """Return the seals of the slots that are whole, and records of whole ones without a seal.

        The latter with the oldest first: the other one may have been on trial.
        """
        seals: dict[Slot, SlotSeal] = {}
        unsealed: dict[Slot, SlotRecord] = {}
        for slot in sorted(SLOTS, key=self._written_ns):
            seal = self._read_seal(slot)
            try:
                info, sha256, size = hash_folder(self.slot_folder(slot))
            except BundleReadError as error:  # kept, and judged before it runs
                self._note_unread(slot, error)
                if seal is not None:
                    seals[slot] = seal
                continue
            except BundleError:
                continue
            if seal is not None and seal.record.sha256 == sha256:
                seals[slot] = seal
            else:
                commit = self._marked_commit(slot, sha256)
                unsealed[slot] = SlotRecord(
                    sha256=sha256,
                    bytes=size,
                    name=info.name,
                    version=info.version,
                    request="",
                    good=commit > 0,
                    commit=commit,
                )
        return seals, unsealed

    def _note_unread(self, slot: Slot, error: BundleReadError) -> None:
        self.unread[slot] = f"slot {slot} cannot be judged and is read again: {error}"

    def _written_ns(self, slot: Slot) -> int:
        try:
            return (self.slot_folder(slot) / INFO).stat().st_mtime_ns
        except OSError:
            return 0

    def _read_seal(self, slot: Slot) -> SlotSeal | None:
        try:
            blob = read_regular(self.slot_folder(slot) / SEAL, MAX_RECORD_BYTES)
            return decode_record(blob, SlotSeal, _sha256)
        except (OSError, ValueError):
            return None

    def _marked_commit(self, slot: Slot, sha256: str) -> int:
        """Return the number with which a release became live by the slot's marks, 0 if it never
        was."""
        marks = self.slot_folder(slot).glob(f"{LIVE}*-{sha256}")
        commits = [mark.name.split("-")[1] for mark in marks]
        return max(
            (int(commit) for commit in commits if commit.isascii() and commit.isdigit()), default=0
        )

    # -- writing

    def _seal(self, slot: Slot, state: SlotState) -> None:
        """Let a slot's seal say what the state says of it. Raises OSError."""
        record, folder = state.record(slot), self.slot_folder(slot)
        if record is None or not folder.is_dir():
            return
        failure = state.failure_of(record.sha256)
        if failure is not None and failure.phase != "rolled_back":
            failure = None
        seal = self._read_seal(slot) or SlotSeal(record=record)
        current = msgspec.structs.replace(seal, record=record, failure=failure)
        blob = encode_record(current, _sha256)
        try:
            if read_regular(folder / SEAL, MAX_RECORD_BYTES) == blob:
                return
        except OSError:
            pass  # there is none, or none that can be read: it is written
        self._write(folder / SEAL, blob)

    def _mark(self, slot: Slot, state: SlotState) -> None:
        """Let the name of an empty file say that a slot's release was live: it has no content that
        could be damaged. Without room for it the seal alone says so."""
        record, folder = state.record(slot), self.slot_folder(slot)
        if record is None or not folder.is_dir():
            return
        marks = {f"{LIVE}{record.commit}-{record.sha256}"} if record.good else set()
        present = {path.name for path in folder.glob(f"{LIVE}*")}
        if marks == present:
            return
        try:
            for name in present - marks:
                remove(folder / name)
            for name in marks - present:
                os.close(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))
            sync_folder(folder)
        except OSError as error:
            LOG.warning("slot %s is not marked: %s", slot, error.strerror)

    def _write(self, path: Path, blob: bytes) -> None:
        """Replace a file; on a full disk the reserve is given up for it. Raises OSError."""
        try:
            with replacing(path, FILE_MODE) as file:
                file.write(blob)
        except OSError as error:
            reserve = self.root / "reserve"
            if error.errno not in FULL_DISK or not reserve.exists():
                raise
            reserve.unlink()
            with replacing(path, FILE_MODE) as file:
                file.write(blob)


def _unusable(root: Path, error: OSError) -> StateError:
    return StateError(
        f"cannot use state_dir {root}: {error.strerror}; name a folder that the agent may write"
    )


def _verify_engines(info: BundleInfo, folder: Path) -> None:
    """Raise BundleError if an engine is not as it was built.

    What is no engine at all is left to the pipeline, which says so when it starts.
    """
    for name in dict.fromkeys(run.engine for run in info.runs):
        try:
            verify_engine_file(folder / name, name)
        except DamagedEngineError as error:
            raise BundleError(f"the bundle was packed with a damaged engine: {error}") from error
        except EngineError:
            continue


def slot_folders(root: Path, state: SlotState) -> dict[str, Path]:
    """Return the folders of the unpacked releases by their SHA-256, the active one first."""
    slots = sorted(SLOTS, key=lambda slot: slot != state.active)
    records = ((slot, state.record(slot)) for slot in slots)
    return {record.sha256: root / "slots" / slot for slot, record in records if record}


def _read_patiently(path: Path) -> bytes:
    for _ in range(READ_TRIES - 1):
        try:
            return read_regular(path, MAX_RECORD_BYTES)
        except (FileNotFoundError, UnfitFileError):
            break
        except OSError as error:
            LOG.warning("cannot read %s: %s; it is read again", path, error.strerror)
            time.sleep(READ_PAUSE_S)
    return read_regular(path, MAX_RECORD_BYTES)


def _crc32(body: bytes) -> str:
    return f"{zlib.crc32(body):08x}"


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _recovery(
    problems: list[str], seals: Mapping[Slot, SlotSeal], unsealed: Mapping[Slot, SlotRecord]
) -> str:
    """Return the sentence that the report has after the loss of the state."""
    lost = "; ".join(problems) or "the state of the slots is gone"
    rows = []
    for slot in SLOTS:
        if slot in seals:
            record = seals[slot].record
            proof = f"live since {record.committed_at}" if record.good else "never live"
            rows.append(f"slot {slot}: {record.name} {record.version}, {proof}")
        elif slot in unsealed:
            record = unsealed[slot]
            proof = "marked as live" if record.good else "not marked as live"
            rows.append(f"slot {slot}: {record.name} {record.version}, without a seal, {proof}")
        else:
            rows.append(f"slot {slot}: no whole release")
    return f"{lost}. The slots were read instead: {'; '.join(rows)}"


def _allocated(paths: Iterable[Path]) -> int:
    """Return the bytes that come free with files; one with another name stays."""
    files = [path.stat() for path in paths]
    return sum(file.st_blocks * 512 for file in files if file.st_nlink == 1)
