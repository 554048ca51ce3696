"""The agent's one download at a time, with its part file."""

from collections.abc import Mapping
from pathlib import Path

from device.protocol.documents import BlobGet, BlobSpec
from device.update.part_file import Fetch
from device.update.window import RateLimit


class Fetching:
    """No download, or one with its part file in `folder`."""

    def __init__(self, folder: Path, window_chunks: int) -> None:
        self._folder = folder
        self._window_chunks = window_chunks
        self._fetch: Fetch | None = None

    @property
    def received_bytes(self) -> int:
        """The bytes on the disk."""
        return 0 if self._fetch is None else self._fetch.download.received_bytes

    @property
    def complaint(self) -> str:
        """Which servers send what does not fit."""
        return "" if self._fetch is None else self._fetch.download.complaint

    @property
    def complete(self) -> bool:
        """Whether all chunks are on the disk."""
        return self._fetch is not None and self._fetch.download.complete

    def failure(self, now_s: float) -> str:
        """Return why the download cannot go on; empty while it can."""
        return "" if self._fetch is None else self._fetch.download.failure(now_s)

    @property
    def running(self) -> bool:
        """Whether there is a download."""
        return self._fetch is not None

    @property
    def wake_at_s(self) -> float | None:
        """When `next_request` is due without a message."""
        return None if self._fetch is None else self._fetch.download.wake_at_s

    def begin(
        self,
        blob: BlobSpec,
        bases: Mapping[str, Path] | None = None,
        *,
        bytes_per_s: int | None = None,
        cast: bool = False,
    ) -> None:
        """Begin or resume this download in place of any other.

        `bases`: folders of unpacked bundles, by the SHA-256 of the bundle: chunks are copied from
        them. `bytes_per_s`: the most that is asked for; None: no limit. `cast`: wait for the
        broadcast first.
        """
        if self._fetch is not None and self._fetch.download.spec == blob:
            self._fetch.download.on_server_back()
            return
        self.pause()
        limit = RateLimit(bytes_per_s)
        self._fetch = Fetch(self._folder, blob, self._window_chunks, bases, limit, cast=cast)

    def take(self, sha256: str, part: str, payload: bytes, now_s: float) -> None:
        """Take a part that arrived, "7" or "7/peer"; late ones and other blobs' are dropped."""
        fetch = self._fetch
        if fetch is None or sha256 != fetch.download.spec.sha256 or fetch.download.complete:
            return
        fetch.on_part(part, payload, now_s)

    def next_request(self, now_s: float) -> BlobGet | None:
        """Return the request to send now; its chunks count as in flight."""
        return None if self._fetch is None else self._fetch.download.next_request(now_s)

    def forget_requests(self) -> None:
        """Count nothing as in flight: the connection was lost."""
        if self._fetch is not None:
            self._fetch.download.forget_requests()

    def finish(self) -> Path:
        """Compare the whole file with its hash and return its path."""
        if self._fetch is None or not self._fetch.download.complete:
            raise ValueError("there is no complete download")
        self._fetch.file.finish()
        return self._fetch.file.path

    def pause(self) -> None:
        """Stop; the part file stays and can be resumed until another download begins."""
        if self._fetch is not None:
            self._fetch.close()
            self._fetch = None

    def remove(self) -> None:
        """Stop and delete the part file."""
        if self._fetch is not None:
            self._fetch.remove()
            self._fetch = None
