"""The agent's one download at a time: begun, fed with messages, resumed, finished or given up."""

from pathlib import Path

from device.protocol.documents import BlobGet, BlobSpec
from device.update.part_file import Fetch


class Fetching:
    """Nothing, or a download with its part file in `folder`."""

    def __init__(self, folder: Path, window_chunks: int) -> None:
        self._folder = folder
        self._window_chunks = window_chunks
        self._fetch: Fetch | None = None

    @property
    def received_bytes(self) -> int:
        """The bytes that are on the disk."""
        return 0 if self._fetch is None else self._fetch.download.received_bytes

    @property
    def complete(self) -> bool:
        """Whether all chunks of a download are there."""
        return self._fetch is not None and self._fetch.download.complete

    @property
    def running(self) -> bool:
        """Whether there is a download."""
        return self._fetch is not None

    @property
    def wake_at_s(self) -> float | None:
        """When `next_request` has to be asked although nothing came."""
        return None if self._fetch is None else self._fetch.download.wake_at_s

    def begin(self, blob: BlobSpec) -> None:
        """Fetch this blob in place of any other; chunks that the disk holds are not asked for."""
        if self._fetch is not None and self._fetch.download.spec == blob:
            return
        self.pause()
        self._fetch = Fetch(self._folder, blob, self._window_chunks)

    def take(self, sha256: str, part: str, payload: bytes, now_s: float) -> None:
        """Take a part that came; what is late or of another blob is dropped."""
        fetch = self._fetch
        if fetch is None or sha256 != fetch.download.spec.sha256 or fetch.download.complete:
            return
        fetch.on_part(part, payload, now_s)

    def next_request(self, now_s: float) -> BlobGet | None:
        """What to ask for now."""
        return None if self._fetch is None else self._fetch.download.next_request(now_s)

    def forget_flight(self) -> None:
        """The connection was lost, and with it what was under way."""
        if self._fetch is not None:
            self._fetch.download.forget_flight()

    def finish(self) -> Path:
        """Compare the whole file with its hash and return where it lies."""
        if self._fetch is None or not self._fetch.download.complete:
            raise ValueError("there is no complete download")
        self._fetch.file.finish()
        return self._fetch.file.path

    def pause(self) -> None:
        """Stop; what is there stays for a resumption until something else is fetched."""
        if self._fetch is not None:
            self._fetch.file.close()
            self._fetch = None

    def remove(self) -> None:
        """Stop and delete what was fetched."""
        if self._fetch is not None:
            self._fetch.file.remove()
            self._fetch = None
