"""The disk side of a download: a sparse part file and its index, both named by the blob's hash."""

import contextlib
import hashlib
import os
import re
from pathlib import Path

from device.errors import TransferError
from device.files import replacing, sync_folder
from device.protocol.documents import BlobSpec
from device.update.transfer import Download

SYNC_BYTES = 4 * 1024**2  # the most that a power cut loses
PEER = re.compile(r"[A-Za-z0-9_-]{0,32}")  # names are free to make up
SPARE_BYTES = 16 * 1024**2  # free space for logs and the rest of the system
_READ_BYTES = 1024**2


class PartFile:
    """Chunks on the disk. No journal: chunks that are present are found by their hashes."""

    def __init__(self, folder: Path, spec: BlobSpec) -> None:
        """Open the part file; unfinished downloads of other blobs are removed."""
        self.path = folder / f"{spec.sha256}.part"
        self._index_path = folder / f"{spec.sha256}.index"
        self._spec = spec
        self._unsynced_bytes = 0
        for leftover in folder.iterdir():
            if leftover not in (self.path, self._index_path):
                leftover.unlink()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _check_space(folder, spec, os.fstat(self._file).st_blocks * 512)
            os.ftruncate(self._file, spec.bytes)
        except (OSError, TransferError):
            os.close(self._file)
            raise

    def read_index(self) -> bytes:
        """Return the saved index, unchecked; empty if there is none."""
        try:
            return self._index_path.read_bytes()
        except FileNotFoundError:
            return b""

    def save_index(self, blob: bytes) -> None:
        """Store the index, so that a restart does not request it again."""
        with replacing(self._index_path) as file:
            file.write(blob)

    def present(self, index: bytes) -> list[int]:
        """Return the numbers of the chunks that are present, by their hashes."""
        if os.fstat(self._file).st_blocks == 0:
            return []
        chunk_bytes, numbers = self._spec.chunk_bytes, []
        for number in range(self._spec.chunks):
            data = os.pread(self._file, chunk_bytes, number * chunk_bytes)
            if hashlib.sha256(data).digest() == index[number * 32 : number * 32 + 32]:
                numbers.append(number)
        return numbers

    def write(self, number: int, payload: bytes) -> None:
        """Write a verified chunk at its offset."""
        written = os.pwrite(self._file, payload, number * self._spec.chunk_bytes)
        if written != len(payload):
            raise TransferError(f"the disk took {written} of {len(payload)} bytes of a chunk")
        self._unsynced_bytes += written
        if self._unsynced_bytes >= SYNC_BYTES:
            os.fdatasync(self._file)
            self._unsynced_bytes = 0

    def finish(self) -> None:
        """Sync the file and compare all of it with the hash in the desired document."""
        os.fsync(self._file)
        digest = hashlib.sha256()
        for offset in range(0, self._spec.bytes, _READ_BYTES):
            digest.update(os.pread(self._file, _READ_BYTES, offset))
        if digest.hexdigest() != self._spec.sha256:
            raise TransferError(
                f"the fetched bundle has the sha256 {digest.hexdigest()[:12]}..., announced was "
                f"{self._spec.sha256[:12]}...: the desired document does not fit it, deploy again"
            )
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Close the file; it can be resumed."""
        os.close(self._file)

    def remove(self) -> None:
        """Close and delete everything."""
        self.close()
        for path in (self.path, self._index_path):
            with contextlib.suppress(OSError):  # the next download tries again
                path.unlink()


class Fetch:
    """A download with its part file."""

    def __init__(self, folder: Path, spec: BlobSpec, window_chunks: int) -> None:
        self.download = Download(spec, window_chunks)
        self.file = PartFile(folder, spec)
        index = self.file.read_index()
        if self.download.index_fits(index):
            self.download.set_index(index, self.file.present(index))

    def on_part(self, part: str, payload: bytes, now_s: float) -> None:
        """Take a message on the topic of a part: "index" or a chunk number, after a slash the peer.

        A topic without a peer is that of a server which gives no name.
        """
        part, _, peer = part.partition("/")
        if not PEER.fullmatch(peer):
            return
        if part == "index":
            if self.download.on_index(payload, peer):
                self.file.save_index(payload)
                self.download.set_index(payload, self.file.present(payload))
        elif (
            part.isascii()
            and part.isdigit()
            and len(part) < 10
            and self.download.on_chunk(int(part), payload, now_s, peer)
        ):
            self.file.write(int(part), payload)


def _check_space(folder: Path, spec: BlobSpec, allocated_bytes: int) -> None:
    """Raise TransferError unless the part file and the unpacked slot both fit."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    needed = max(0, spec.bytes - allocated_bytes) + spec.bytes + SPARE_BYTES
    if free < needed:
        raise TransferError(
            f"the release needs {needed >> 20} MiB on the disk of {folder}, {free >> 20} MiB are "
            "free: make room and deploy again"
        )
