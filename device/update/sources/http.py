"""Bundles behind HTTP or HTTPS: Range requests over one connection that stays open."""

import contextlib
import http.client
import ssl
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import SplitResult, urljoin, urlsplit

from device.protocol.documents import MAX_INDEX_BYTES, BlobSpec
from device.update.chunk_table import index_fits
from device.update.sources.folder import INDEX_SUFFIX
from device.update.sources.source import SourceGoneError, SourceReadError

TIMEOUT_S = 20.0  # without a byte
LOWEST_BYTES_PER_S = 512  # over TRICKLE_S: a server that gives less would hold a device for days
TRICKLE_S = 30.0
READ_BYTES = 64 * 1024
MAX_REDIRECTS = 5
PLACEHOLDER = "{sha256}"
_GONE = (400, 401, 403, 404, 405, 410, 416, 451)
_REDIRECTS = (301, 302, 303, 307, 308)
_DRAIN_BYTES = 64 * 1024


class HttpSource:
    """A bundle at a URL with {sha256} in it, or below a URL by one of the names.

    Its index is at the same URL with `.index` behind it. Certificates are checked against the
    system's CAs and `ca`, a file in PEM.
    """

    def __init__(self, place: str, names: Sequence[str], ca: Path | None = None) -> None:
        self._place = place
        self._ca = ca
        self._names = names
        self._url = ""  # of the bundle, once it is known
        self._connection: http.client.HTTPConnection | None = None
        self._connected_to = ("", "")

    def index(self, blob: BlobSpec) -> bytes:
        """Return the index that lies beside the bundle; at the first URL that has one."""
        missing: SourceGoneError | None = None
        problem = ""
        for url in self._urls(blob):
            try:
                index = b"".join(self._get(url + INDEX_SUFFIX, None))
            except SourceGoneError as error:
                missing = missing or error
                continue
            if index_fits(index, blob):
                self._url = url
                return index
            problem = problem or f"{url}{INDEX_SUFFIX} is no index of the bundle: write it again"
        if problem:  # a proxy may have answered, so this is not for good
            raise SourceReadError(problem)
        assert missing is not None
        raise missing

    def fetch(self, blob: BlobSpec, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the bytes of each range; neighbours are asked for at once."""
        if not self._url:
            self._url = self._find(blob)
        row = 0
        while row < len(ranges):
            after = row + 1
            while after < len(ranges) and ranges[after][0] == sum(ranges[after - 1]):
                after += 1
            start, stop = ranges[row][0], sum(ranges[after - 1])
            yield from self._get(self._url, (start, stop), [size for _, size in ranges[row:after]])
            row = after

    def _find(self, blob: BlobSpec) -> str:
        """Return the first URL that has the bundle: its first byte is asked for."""
        missing: SourceGoneError | None = None
        for url in self._urls(blob):
            try:
                list(self._get(url, (0, 1), [1]))
            except SourceGoneError as error:
                missing = missing or error
                continue
            return url
        assert missing is not None
        raise missing

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _urls(self, blob: BlobSpec) -> tuple[str, ...]:
        if PLACEHOLDER in self._place:
            return (self._place.replace(PLACEHOLDER, blob.sha256),)
        return tuple(f"{self._place.rstrip('/')}/{name}" for name in self._names)

    def _get(
        self, url: str, span: tuple[int, int] | None, sizes: Sequence[int] = ()
    ) -> Iterator[bytes]:
        """Yield the bytes of a span in these sizes, or without one the body, which is an index."""
        try:
            response = self._response(url, span)
            if span is None:
                body = _read(response, MAX_INDEX_BYTES + 1)
                if len(body) > MAX_INDEX_BYTES:
                    self.close()
                    raise SourceGoneError(
                        f"{url} has more than the {MAX_INDEX_BYTES} bytes of an index"
                    )
                yield body
            for size in sizes:
                data = _read(response, size)
                if len(data) != size:
                    raise SourceReadError(f"{url} was cut off by its server")
                yield data
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.close()
            raise SourceReadError(f"cannot fetch {url}: {error or type(error).__name__}") from error
        except SourceReadError:
            self.close()
            raise

    def _response(self, url: str, span: tuple[int, int] | None) -> http.client.HTTPResponse:
        for _ in range(MAX_REDIRECTS):
            parts = urlsplit(url)
            response = self._ask(parts, span)
            if response.status in _REDIRECTS:
                url = urljoin(url, response.getheader("Location") or "")
                self.close()
                continue
            if response.status == (200 if span is None else 206):
                return response
            with contextlib.suppress(OSError, http.client.HTTPException):
                response.read(_DRAIN_BYTES)
            self.close()
            if response.status == 200:
                raise SourceGoneError(
                    f"{parts.netloc} does not answer requests for ranges, so that a download could "
                    "not be resumed: use a server that does, or another source"
                )
            kind = SourceGoneError if response.status in _GONE else SourceReadError
            raise kind(f"{url} answers {response.status} {response.reason[:80]}")
        raise SourceGoneError(f"{url} redirects more than {MAX_REDIRECTS} times")

    def _ask(self, parts: SplitResult, span: tuple[int, int] | None) -> http.client.HTTPResponse:
        headers = {} if span is None else {"Range": f"bytes={span[0]}-{span[1] - 1}"}
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        fresh = self._connection is None or self._connected_to != (parts.scheme, parts.netloc)
        if fresh:
            self._connect(parts)
        assert self._connection is not None
        try:
            self._connection.request("GET", path, headers=headers)
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException):
            if fresh:
                raise
        self._connect(parts)  # the server has ended a connection that stayed open
        self._connection.request("GET", path, headers=headers)
        return self._connection.getresponse()

    def _connect(self, parts: SplitResult) -> None:
        self.close()
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SourceGoneError(f"{parts.geturl()} is no HTTP address")
        host, port = parts.hostname, parts.port
        if parts.scheme == "http":
            self._connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        else:
            self._connection = http.client.HTTPSConnection(
                host, port, timeout=TIMEOUT_S, context=self._context()
            )
        self._connected_to = parts.scheme, parts.netloc

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if self._ca is not None:
            try:
                context.load_verify_locations(self._ca)
            except OSError as error:  # ssl.SSLError is one
                raise SourceReadError(
                    f"update.ca {self._ca} is no CA's certificate in PEM: {error}"
                ) from error
        return context


def _read(response: http.client.HTTPResponse, size: int) -> bytes:
    """Read so many bytes, fewer at the end of the answer; TimeoutError where they only trickle."""
    data = bytearray()
    begun_s, begun_bytes = time.monotonic(), 0
    while len(data) < size:
        waiting = len(response.peek(READ_BYTES))  # as `read1`, which leaves no connection open
        piece = response.read(min(waiting or READ_BYTES, size - len(data)))
        if not piece:
            break
        data += piece
        elapsed_s = time.monotonic() - begun_s
        if elapsed_s >= TRICKLE_S:
            rate = (len(data) - begun_bytes) / elapsed_s
            if rate < LOWEST_BYTES_PER_S:
                raise TimeoutError(
                    f"it gave {rate:.0f} bytes a second for {elapsed_s:.0f} s, below the "
                    f"{LOWEST_BYTES_PER_S} that a source must give"
                )
            begun_s, begun_bytes = time.monotonic(), len(data)
    return bytes(data)
