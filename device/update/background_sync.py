"""Brings a file onto the disk and hashes it in a thread, while more of it comes."""

import hashlib
import os
import queue
import threading

_READ_BYTES = 1024**2


class Prefix:
    """Which bytes from the start of a file are all written."""

    def __init__(self) -> None:
        self.end = 0
        self._ahead: dict[int, int] = {}  # start of a written piece -> its end

    def add(self, start: int, end: int) -> None:
        """Note a piece that was written."""
        self._ahead[start] = end
        while self.end in self._ahead:
            self.end = self._ahead.pop(self.end)


class BackgroundSync:
    """A thread that syncs an open file and hashes what is whole from its start; `close` it.

    One call of `sync` may wait while another is carried out; a third waits for its turn, so that
    a slow disk slows down what writes.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._ends: queue.Queue[int | None] = queue.Queue(1)
        self._digest = hashlib.sha256()
        self._hashed = 0
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="part-file", daemon=True)
        self._thread.start()

    def sync(self, prefix_end: int) -> None:
        """Sync what was written before this call. Raises OSError if an earlier sync failed."""
        if self._error is not None:
            raise self._error
        self._ends.put(prefix_end)

    def digest(self, size: int) -> str:
        """End the thread; return the SHA-256 of the first `size` bytes, all of which are written.

        Raises OSError if a sync failed.
        """
        self.close()
        if self._error is not None:
            raise self._error
        self._hash_to(size)
        return self._digest.hexdigest()

    def close(self) -> None:
        """End the thread."""
        self._ends.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (end := self._ends.get()) is not None:
            if self._error is not None:
                continue  # nobody must wait for a thread that has ended
            try:
                os.fdatasync(self._file)
                self._hash_to(end)
            except OSError as error:
                self._error = error

    def _hash_to(self, end: int) -> None:
        while self._hashed < end:
            data = os.pread(self._file, min(_READ_BYTES, end - self._hashed), self._hashed)
            if not data:
                raise OSError("the part file is cut off")
            self._digest.update(data)
            self._hashed += len(data)
