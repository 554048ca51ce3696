"""The highest versions that this board has seen: what is older is a replay.

TUF clients find old metadata by the files that they kept, which a power cut may empty. The journal
is replaced whole and synced before anything that it allows is done. A version may go down only
when root's keys have signed another set of keys for the role (TUF 5.3.11, fast-forward attacks).
"""

from pathlib import Path

import msgspec

from device.errors import TrustError
from device.files import make_folder, read_regular, replacing

JOURNAL = "journal.json"
MAX_BYTES = 1024 * 1024


class SeenVersion(msgspec.Struct, frozen=True):
    """A version, and the keys that it was signed with, as one text."""

    version: int = 0
    keys: str = ""


class Counter(msgspec.Struct, frozen=True):
    """The counter of the last desired document, the SHA-256 of its text and the director's keys."""

    value: int = 0
    payload: str = ""
    keys: str = ""


class Record(msgspec.Struct, frozen=True):
    """What the journal holds. `versions`: by the name of the metadata."""

    versions: dict[str, SeenVersion] = {}
    counter: Counter = Counter()


class Journal:
    """The journal of one folder."""

    def __init__(self, folder: Path) -> None:
        """Read it; TrustError if it is there and cannot be read: nothing is old any more then."""
        self._path = folder / JOURNAL
        self.record = Record()
        try:
            make_folder(folder, 0o700)
            for path in folder.glob(f".{JOURNAL}.*.tmp"):  # of a check that was killed
                path.unlink(missing_ok=True)
            self.record = msgspec.json.decode(read_regular(self._path, MAX_BYTES), type=Record)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            raise TrustError(
                f"the journal of the versions that this board has seen, {self._path}, cannot be "
                f"read ({error}): without it old releases could not be told from new ones; "
                "provision the board again"
            ) from error

    def check_version(self, name: str, version: int, keys: str) -> None:
        """Raise TrustError for a version below one that was seen under the same keys."""
        seen = self.record.versions.get(name, SeenVersion())
        if seen.keys == keys and version < seen.version:
            raise TrustError(
                f"the repository shows version {version} of {name}, this board has seen "
                f"{seen.version}: somebody shows it an old state, or the repository was restored "
                "from a backup; publish again until the version is higher"
            )

    def check_counter(self, value: int, payload: str, keys: str) -> None:
        """Raise TrustError for a document older than the last one, or another of its number."""
        last = self.record.counter
        if last.keys != keys or (value, payload) == (last.value, last.payload):
            return
        if value <= last.value:
            raise TrustError(
                f"the desired document has the counter {value}, this board has taken {last.value}:"
                " it is an old one; deploy again"
            )

    def note(
        self, versions: dict[str, SeenVersion] | None = None, counter: Counter | None = None
    ) -> None:
        """Bring versions and a counter onto the disk, if they are news."""
        record = Record(
            {**self.record.versions, **(versions or {})}, counter or self.record.counter
        )
        if record == self.record:
            return
        try:
            with replacing(self._path, 0o600) as file:
                file.write(msgspec.json.encode(record))
        except OSError as error:
            raise TrustError(
                f"{self._path} cannot be written ({error.strerror}): nothing is installed before "
                "the disk has recorded its version; make room"
            ) from error
        self.record = record
