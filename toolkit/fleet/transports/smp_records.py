"""The stream of a bundle: a record for each chunk that a board lacks (`device.smp.intake`)."""

from collections.abc import Callable, Iterator

from device.smp.intake import DELTA, PLAIN, RECORD
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.transports.transport import TransportError

MAX_REJECTED = 20  # times that one record may be damaged
Differ = Callable[[int], bytes | None]  # the number of a chunk -> its difference from a base


class Records:
    """Makes records when they are sent, and keeps those that may have to be sent again."""

    def __init__(self, blob: Blob, missing: tuple[int, ...], row: int, start: int) -> None:
        """`missing`: the chunks in order. The record of `missing[row]` begins at `start`.

        `missing_bytes` counts the chunks that the board lacks still.
        """
        self.differ: Differ = lambda _number: None
        self._blob = blob
        self._missing = missing
        self._unacknowledged: list[tuple[int, int, bytes]] = []  # start, row, record
        self._next = start, row
        self._rejected: dict[int, int] = {}
        self.missing_bytes = sum(blob.table.size(number) for number in missing[row:])

    def read(self, offset: int, size: int) -> bytes:
        """Return the bytes from an offset on, none at the end."""
        parts, stop = [], offset + size
        for start, record in self._records():
            if start >= stop:
                break
            if start + len(record) > offset:
                parts.append(record[max(0, offset - start) : stop - start])
        return b"".join(parts)

    def acknowledged(self, offset: int) -> None:
        """Forget the records before an offset."""
        while (
            self._unacknowledged
            and self._unacknowledged[0][0] + len(self._unacknowledged[0][2]) <= offset
        ):
            _, row, _ = self._unacknowledged.pop(0)
            self.missing_bytes -= self._blob.table.size(self._missing[row])

    def rejected(self, offset: int) -> None:
        """Make the record at an offset anew, without a difference."""
        for at, (start, row, _) in enumerate(self._unacknowledged):
            if start == offset:
                count = self._rejected[row] = self._rejected.get(row, 0) + 1
                if count > MAX_REJECTED:
                    raise TransportError(
                        f"chunk {self._missing[row]} arrived damaged {count} times: take console "
                        "framing, a shorter cable or a lower rate"
                    )
                del self._unacknowledged[at:]
                self._next = start, row
                return

    def _records(self) -> Iterator[tuple[int, bytes]]:
        """Yield the records from the first that is kept on, with their starts."""
        for start, _row, record in tuple(self._unacknowledged):
            yield start, record
        while self._next[1] < len(self._missing):
            start, row = self._next
            record = self._make(row)
            self._unacknowledged.append((start, row, record))
            self._next = start + len(record), row + 1
            yield start, record

    def _make(self, row: int) -> bytes:
        number = self._missing[row]
        difference = None if row in self._rejected else self.differ(number)
        if difference is not None:
            return RECORD.pack(DELTA, len(difference)) + difference
        chunk = self._blob.read(number)
        return RECORD.pack(PLAIN, len(chunk)) + chunk


def numbers_of(bitmap: bytes) -> tuple[int, ...]:
    """Return the numbers of the bits that are set, the lowest bit of a byte first."""
    return tuple(
        8 * place + bit for place, byte in enumerate(bitmap) for bit in range(8) if byte >> bit & 1
    )
