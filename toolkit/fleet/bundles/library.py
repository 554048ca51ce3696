"""The bundles of a folder by their SHA-256, and their differences from each other."""

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from device.errors import BundleError
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.delta import DeltaEncoder

LOG = logging.getLogger(__name__)
MAX_OPEN = 64  # bundles; each has a file and an index of at most 1 MiB open
MAX_ENCODERS = 16
MAX_DELTA_BYTES = 64 * 1024**2  # differences that are kept for the next device
ROW_BYTES = 512  # that each of them takes besides
ABSENT_S = 2.0  # a bundle that was not there is not looked for again for so long
MAX_ABSENT = 1024
SUFFIX = ".bundle"
_NAMED = re.compile(r"[0-9a-f]{64}\.")  # the name of a file begins with its SHA-256


class Library:
    """Bundles below folders, each opened when it is first asked for.

    A file whose name begins with its SHA-256 and a dot, as in a TUF repository, is found by it. All
    others that end in .bundle are hashed to find one, each once.
    """

    def __init__(self, *folders: Path, opened: Sequence[Blob] = ()) -> None:
        """`opened`: bundles that are open already, and are closed by who has opened them."""
        self._folders = folders
        self._opened = {blob.spec.sha256: blob for blob in opened}
        self._blobs: OrderedDict[str, Blob] = OrderedDict()
        self._absent: OrderedDict[str, float] = OrderedDict()
        self._hashed: dict[tuple[Path, int, int], str] = {}
        self._encoders: OrderedDict[tuple[str, str], DeltaEncoder] = OrderedDict()
        self._deltas: OrderedDict[tuple[str, str, int], bytes | None] = OrderedDict()
        self._delta_bytes = 0

    def knows(self, sha256: str) -> bool:
        """Whether a bundle is open, or known not to be there: `blob` need not look for it."""
        return (
            sha256 in self._opened
            or sha256 in self._blobs
            or time.monotonic() < self._absent.get(sha256, 0.0)
        )

    def holds(self, sha256: str) -> bool:
        """Whether a bundle is one of those that were open."""
        return sha256 in self._opened

    def blob(self, sha256: str) -> Blob | None:
        """Return a bundle, or None if the folder does not have it."""
        if (blob := self._opened.get(sha256)) is not None:
            return blob
        if (blob := self._blobs.get(sha256)) is not None:
            self._blobs.move_to_end(sha256)
            return blob
        now_s = time.monotonic()
        if now_s < self._absent.get(sha256, 0.0):
            return None
        blob = self._find(sha256)
        if blob is None:
            self._absent[sha256] = now_s + ABSENT_S
            if len(self._absent) > MAX_ABSENT:
                self._absent.popitem(last=False)
        return blob

    def delta(self, blob: Blob, number: int, bases: tuple[str, ...]) -> bytes | None:
        """Return a chunk as its difference from the first base that the folder has, or None."""
        for base_number, sha256 in enumerate(bases):
            base = self.blob(sha256)
            if base is not None and sha256 != blob.spec.sha256:
                try:
                    return self._delta(blob, number, base, base_number)
                except OSError as error:
                    LOG.error("no difference from %s: %s", base.path, error)
                    self.forget(sha256)
        return None

    def forget(self, sha256: str) -> None:
        """Look for a bundle anew when it is next asked for: its file was changed or is not read."""
        blob = self._blobs.pop(sha256, None)
        if blob is not None:
            self._close(blob)

    def close(self) -> None:
        """Close all files."""
        for blob in self._blobs.values():
            blob.close()
        self._blobs.clear()
        self._encoders.clear()

    def _find(self, sha256: str) -> Blob | None:
        for path in self._paths(f"{sha256}.*"):
            if self._open(path, sha256) == sha256:
                return self._blobs[sha256]
        for path in sorted(self._paths(f"*{SUFFIX}")):
            if _NAMED.match(path.name):
                continue
            try:
                facts = path.stat()
            except OSError:  # it was removed meanwhile, or is a link to nothing
                continue
            key = path, facts.st_size, facts.st_mtime_ns
            if self._hashed.get(key, sha256) == sha256:
                self._hashed[key] = self._open(path, sha256)
                if self._hashed[key] == sha256:
                    return self._blobs[sha256]
        return None

    def _paths(self, pattern: str) -> Iterator[Path]:
        for folder in self._folders:
            yield from folder.rglob(pattern)

    def _open(self, path: Path, sha256: str) -> str:
        """Return the SHA-256 of a file, "" if it cannot be read; keep it open if it is the one."""
        try:
            blob = Blob(path)
        except BundleError as error:
            LOG.error("%s", error)
            return ""
        if blob.spec.sha256 != sha256:
            blob.close()
            return blob.spec.sha256
        self._blobs[sha256] = blob
        if len(self._blobs) > MAX_OPEN:
            self._close(self._blobs.popitem(last=False)[1])
        return sha256

    def _close(self, blob: Blob) -> None:
        for key in [key for key in self._encoders if blob.spec.sha256 in key]:
            del self._encoders[key]
        blob.close()

    def _delta(self, blob: Blob, number: int, base: Blob, base_number: int) -> bytes | None:
        pair = blob.spec.sha256, base.spec.sha256
        key = (*pair, number * 2 + base_number)
        if key in self._deltas:
            self._deltas.move_to_end(key)
            return self._deltas[key]
        encoder = self._encoders.get(pair)
        if encoder is None or encoder.base_number != base_number:
            encoder = self._encoders[pair] = DeltaEncoder(blob.file, base.file, base_number)
            if len(self._encoders) > MAX_ENCODERS:
                self._encoders.popitem(last=False)
        table = blob.table
        payload = encoder.encode(table.starts[number], table.size(number))
        self._deltas[key] = payload
        self._delta_bytes += _kept_bytes(payload)
        while self._delta_bytes > MAX_DELTA_BYTES:
            self._delta_bytes -= _kept_bytes(self._deltas.popitem(last=False)[1])
        return payload


def _kept_bytes(payload: bytes | None) -> int:
    """Return about how much memory a difference takes that is kept; None: that there is none."""
    return ROW_BYTES + len(payload or b"")
