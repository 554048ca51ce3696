"""Where the files of the signed repository come from.

A fetcher reads a file whole before it returns: what goes wrong later would escape python-tuf's own
handling. "Not found" is the HTTP status 404 everywhere, by which python-tuf knows the newest root.
"""

import queue
import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from tuf.api.exceptions import DownloadError, DownloadHTTPError, DownloadLengthMismatchError
from tuf.ngclient.fetcher import FetcherInterface
from tuf.ngclient.urllib3_fetcher import Urllib3Fetcher

from device.files import open_to_read
from device.protocol.documents import TufGet, TufReply
from device.trust.exchange import MAX_FILE_BYTES, MQTT_REPOSITORY, Line, Part, encode_line

METADATA = "metadata/"
TARGETS = "targets/"
BASE = "repository:/"  # the base URL where there is none; paths follow it
NOT_FOUND = 404
FIRST_WAIT_S = 3.0  # doubles with each request that is not answered
MAX_WAITING_PARTS = 16  # of up to 2 MiB; then the agent waits, and drops what does not fit
_HTTP_TIMEOUT_S = 20


class WholeFileFetcher(FetcherInterface):
    """Base of the fetchers. `last`: the path that was asked for last."""

    def __init__(self, base: str) -> None:
        self.base = base if base.endswith("/") else f"{base}/"
        self.last = ""

    def _fetch(self, url: str) -> Iterator[bytes]:
        self.last = url.removeprefix(self.base)
        return iter((self.read(self.last),))

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return a file; DownloadHTTPError 404 if there is none, DownloadError if unknown."""


class HttpFetcher(WholeFileFetcher):
    """Files of a web server."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._inner = Urllib3Fetcher(_HTTP_TIMEOUT_S, app_user_agent="tandem-agent")

    def read(self, path: str) -> bytes:
        """Download a file of at most MAX_FILE_BYTES."""
        data = bytearray()
        try:
            for part in self._inner.fetch(self.base + path):
                data += part
                if len(data) > MAX_FILE_BYTES:
                    raise _too_large(path)
        except (DownloadHTTPError, DownloadLengthMismatchError):
            raise
        except DownloadError as error:
            raise DownloadError(f"{self.base}{path}: {error.__cause__ or error}") from error
        return bytes(data)


class FolderFetcher(WholeFileFetcher):
    """Files of a folder: of a share or a USB stick."""

    def __init__(self, folder: Path) -> None:
        super().__init__(BASE)
        self._folder = folder

    def read(self, path: str) -> bytes:
        """Read a file of at most MAX_FILE_BYTES that lies in the folder."""
        if ".." in path.split("/"):
            raise DownloadHTTPError(f"{path} leaves the folder", NOT_FOUND)
        try:
            with open_to_read(self._folder / path, follow=True) as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self._folder.is_dir():
                raise DownloadError(f"the folder {self._folder} is not there") from error
            raise DownloadHTTPError(f"{self._folder} has no {path}", NOT_FOUND) from error
        except OSError as error:
            raise DownloadError(f"{self._folder / path}: {error.strerror}") from error
        if len(data) > MAX_FILE_BYTES:
            raise _too_large(path)
        return data


class RelayFetcher(WholeFileFetcher):
    """Files that the agent asks for over MQTT: requests go out as lines, parts come in."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO, deadline_s: float) -> None:
        """`deadline_s`: when `time.monotonic()` ends all waiting."""
        super().__init__(BASE)
        self._outgoing = outgoing
        self._deadline_s = deadline_s
        self._parts: queue.Queue[tuple[Part, bytes]] = queue.Queue(MAX_WAITING_PARTS)
        threading.Thread(target=self._take, args=(incoming,), daemon=True).start()

    def read(self, path: str) -> bytes:
        """Ask for a file until it has come whole; DownloadError at the deadline."""
        wait_s = FIRST_WAIT_S
        while (now_s := time.monotonic()) < self._deadline_s:
            answer = self._ask(path, min(now_s + wait_s, self._deadline_s))
            if answer is not None:
                return answer
            wait_s *= 2.0
        raise DownloadError(f"no server of the repository answered the request for {path}")

    def _ask(self, path: str, until_s: float) -> bytes | None:
        """Ask once; None if the answer was not complete in time."""
        get = TufGet(id=secrets.token_hex(8), path=path)
        self._outgoing.write(encode_line(Line(get=get)))
        self._outgoing.flush()
        parts: dict[int, bytes] = {}
        while (remaining_s := until_s - time.monotonic()) > 0.0:
            try:
                part, payload = self._parts.get(timeout=remaining_s)
            except queue.Empty:
                break
            if part.id != get.id:
                continue  # late, of an earlier request
            head, _, data = payload.partition(b"\n")
            try:
                reply = msgspec.json.decode(head, type=TufReply)
            except msgspec.MsgspecError:
                continue
            if reply.status != 200:
                raise DownloadHTTPError(f"the server does not give {path}", reply.status)
            parts[part.number] = data
            if sum(map(len, parts.values())) > MAX_FILE_BYTES:
                raise _too_large(path)
            if set(parts) == set(range(reply.parts)):
                return b"".join(parts[number] for number in range(reply.parts))
        return None

    def _take(self, incoming: BinaryIO) -> None:
        """Read parts until the agent closes the pipe."""
        while line := incoming.readline():
            part = msgspec.json.decode(line, type=Part)
            self._parts.put((part, incoming.read(part.bytes)))


def make_fetcher(
    repository: str, incoming: BinaryIO, outgoing: BinaryIO, deadline_s: float
) -> WholeFileFetcher:
    """Return the fetcher of a `repository` of agent.toml."""
    if repository == MQTT_REPOSITORY:
        return RelayFetcher(incoming, outgoing, deadline_s)
    if repository.startswith(("http://", "https://")):
        return HttpFetcher(repository)
    return FolderFetcher(Path(repository))


def _too_large(path: str) -> DownloadLengthMismatchError:
    return DownloadLengthMismatchError(f"{path} has more than {MAX_FILE_BYTES} bytes")
