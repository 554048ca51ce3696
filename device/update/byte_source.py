"""Bundles that are read at any offset: a file, or the files of a slot, which make up the same."""

import bisect
import os
from pathlib import Path
from typing import Protocol

from device.errors import BundleError, BundleReadError
from device.files import open_regular
from device.update.bundle import bundle_pieces, read_folder_info


class ByteSource(Protocol):
    """Bytes that are read at any offset. Raises OSError."""

    @property
    def size(self) -> int:
        """The number of bytes."""

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes from `offset` on, fewer at the end."""


class FileBytes:
    """An open file; `close` it."""

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path, os.O_RDONLY, follow=True)
        self.size = os.fstat(self._file).st_size

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes from `offset` on, fewer at the end."""
        return os.pread(self._file, length, offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class UnpackedBundle:
    """A bundle that was unpacked into a folder, read as if it were whole; `close` it.

    Its bytes are what the folder has now: nothing is compared with a hash. Raises BundleError if
    the folder holds no bundle, OSError if a member cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self._starts: list[int] = []
        self._pieces: list[bytes | int] = []  # bytes, or the handle of a member
        self.size = 0
        info = read_folder_info(folder)
        try:
            for piece in bundle_pieces(info):
                self._starts.append(self.size)
                if isinstance(piece, bytes):
                    self._pieces.append(piece)
                    self.size += len(piece)
                else:
                    self._pieces.append(open_regular(folder / piece.name, os.O_RDONLY))
                    self.size += piece.bytes
        except OSError:
            self.close()
            raise

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes from `offset` on, fewer at the end or where a member was cut off."""
        stop = min(offset + length, self.size)
        row = bisect.bisect_right(self._starts, offset) - 1
        parts: list[bytes] = []
        while offset < stop:
            start = self._starts[row]
            row_stop = self._starts[row + 1] if row + 1 < len(self._starts) else self.size
            size = min(stop, row_stop) - offset
            piece = self._pieces[row]
            if isinstance(piece, bytes):
                parts.append(piece[offset - start : offset - start + size])
            else:
                parts.append(os.pread(piece, size, offset - start))
            offset += size
            row += 1
        return b"".join(parts)

    def close(self) -> None:
        """Close the members."""
        for piece in self._pieces:
            if isinstance(piece, int):
                os.close(piece)
        self._pieces.clear()


def open_unpacked(folder: Path) -> UnpackedBundle | None:
    """Return the bundle in a folder, or None if none can be read there."""
    try:
        return UnpackedBundle(folder)
    except (BundleError, BundleReadError, OSError):
        return None
