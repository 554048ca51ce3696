"""The agent's one download at a time: its part file, and the source that it comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from device.protocol.documents import BlobGet, BlobSpec
from device.update.part_file import Fetch
from device.update.source_choice import SourceChoice
from device.update.sources.reader import MQTT, SourceEnded, SourceEvent, SourceReader
from device.update.window import RateLimit

MQTT_SILENT_S = 20.0  # without a chunk for so long another source is asked, if there is one
SOURCE_SILENT_S = 300.0  # the same for a source other than MQTT, which says itself what fails


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """How a blob is fetched.

    `bases`: folders of unpacked bundles, by the SHA-256 of the bundle: chunks are copied from them.
    `bytes_per_s`: the most that is asked for; None: no limit.
    `places`: the sources in order; `names`: what the bundle may be called there; `ca`: a CA of
    HTTPS besides the system's.
    """

    bases: Mapping[str, Path]
    bytes_per_s: int | None = None
    places: tuple[str, ...] = (MQTT,)
    names: tuple[str, ...] = ()
    ca: Path | None = None


class Fetching:
    """No download, or one with its part file in `folder`."""

    def __init__(
        self,
        folder: Path,
        window_chunks: int,
        put: Callable[[SourceEvent], None] = lambda _event: None,
    ) -> None:
        """`put` takes what sources other than MQTT give, from threads; pass it to `on_source`."""
        self._folder = folder
        self._window_chunks = window_chunks
        self._put = put
        self._fetch: Fetch | None = None
        self._options = FetchOptions({})
        self._choice = SourceChoice((MQTT,))
        self._reader: SourceReader | None = None
        self._readers = 0
        self._progress: tuple[int, float | None] = (0, None)  # bytes, and since when no more

    @property
    def received_bytes(self) -> int:
        """The bytes on the disk."""
        return 0 if self._fetch is None else self._fetch.download.received_bytes

    @property
    def complaint(self) -> str:
        """Which servers send what does not fit, and which sources give nothing."""
        if self._fetch is None:
            return ""
        return "; ".join(filter(None, (self._fetch.download.complaint, self._choice.problem)))

    @property
    def complete(self) -> bool:
        """Whether all chunks are on the disk."""
        return self._fetch is not None and self._fetch.download.complete

    @property
    def running(self) -> bool:
        """Whether there is a download."""
        return self._fetch is not None

    @property
    def wake_at_s(self) -> float | None:
        """When `next_request` is due without a message."""
        if self._fetch is None or self.complete:
            return None
        if self._choice.wait_until_s is not None:
            return self._choice.wait_until_s
        moments = [self._rival_at_s, self._fetch.download.wake_at_s]
        return min((moment for moment in moments if moment is not None), default=None)

    @property
    def wake_offline_at_s(self) -> float | None:
        """The same while the broker is away: nothing is asked for over MQTT."""
        if self._choice.place != MQTT:
            return self.wake_at_s
        return None if self._fetch is None or self.complete else self._rival_at_s

    @property
    def _rival_at_s(self) -> float | None:
        """When another source is asked if the one in use stays silent, None: never."""
        since_s = self._progress[1]
        return since_s + self._silent_s if self._choice.count > 1 and since_s is not None else None

    @property
    def _silent_s(self) -> float:
        """How long the source in use may give no whole chunk while there is another one."""
        if self._choice.place == MQTT:
            return MQTT_SILENT_S
        limit, fetch = self._options.bytes_per_s, self._fetch
        if limit is None or fetch is None:
            return SOURCE_SILENT_S
        return max(SOURCE_SILENT_S, 4.0 * fetch.download.spec.chunk_bytes / limit)

    def begin(self, blob: BlobSpec, options: FetchOptions | None = None) -> None:
        """Begin or resume this download in place of any other."""
        options = FetchOptions({}) if options is None else options
        if self._fetch is not None and self._fetch.download.spec == blob:
            self._options = options
            self._fetch.download.limit_to(RateLimit(options.bytes_per_s))
            self._choose(options.places)
            return
        self.pause()
        self._options = options
        limit = RateLimit(options.bytes_per_s)
        self._fetch = Fetch(
            self._folder,
            blob,
            self._window_chunks,
            options.bases,
            limit,
            in_background=True,
        )
        self._choose(options.places)

    def take(self, sha256: str, part: str, payload: bytes, now_s: float) -> None:
        """Take a part that arrived, "7" or "7/peer"; late ones and other blobs' are dropped."""
        fetch = self._fetch
        if fetch is None or sha256 != fetch.download.spec.sha256 or fetch.download.complete:
            return
        if self._reader is not None and part.partition("/")[0] == "none":
            return  # a late answer over MQTT: the source in use says for itself what it lacks
        fetch.on_part(part, payload, now_s)

    def on_source(self, event: SourceEvent, now_s: float) -> None:
        """Take what a source other than MQTT gave."""
        fetch, reader = self._fetch, self._reader
        if fetch is None or reader is None or event.peer != reader.peer:
            return
        if isinstance(event, SourceEnded):
            self._end_source(event.reason, now_s, permanent=event.permanent)
        else:
            self.take(event.sha256, f"{event.part}/{event.peer}", event.payload, now_s)

    def advance(self, now_s: float) -> str:
        """Take another source where one gives nothing; return why the download cannot go on."""
        fetch = self._fetch
        if fetch is None or fetch.download.complete:
            return ""
        received_bytes, since_s = self._progress
        if self._choice.waits(now_s):
            pass  # nobody is asked, so nobody is silent
        elif since_s is None or fetch.download.received_bytes > received_bytes:
            if fetch.download.received_bytes > received_bytes:
                self._choice.on_good()
            self._progress = fetch.download.received_bytes, now_s
        elif self._choice.count > 1 and now_s - since_s >= self._silent_s:
            is_mqtt = self._choice.place == MQTT
            silence = f"{self._choice.place} gave no chunk for {self._silent_s:.0f} s"
            self._end_source(
                "nobody answered over MQTT" if is_mqtt else silence, now_s, permanent=False
            )
        failure = fetch.download.failure(now_s)
        if failure:
            self._end_source(failure, now_s, permanent=True)
        if self._reader is not None:
            complaint = fetch.download.complaint_of(self._reader.peer)
            if complaint:
                self._end_source(complaint, now_s, permanent=True)
        return "" if self._choice.current >= 0 else self._choice.problem

    def next_request(self, now_s: float, *, online: bool = True) -> BlobGet | None:
        """Return the request to send over MQTT now; its chunks count as in flight.

        What another source shall give is asked for here.
        """
        fetch = self._fetch
        if fetch is None or self._choice.current < 0 or self._choice.waits(now_s):
            return None
        if self._reader is None:
            return fetch.download.next_request(now_s) if online else None
        request = fetch.download.next_request(now_s)
        if request is not None:
            self._reader.ask(fetch.download.spec, request, fetch.download.table)
        return None

    def forget_requests(self) -> None:
        """Count nothing as in flight: the connection to the broker was lost."""
        if self._fetch is not None and self._reader is None:
            self._fetch.download.forget_requests()

    def finish(self) -> Path:
        """Compare the whole file with its hash and return its path."""
        if self._fetch is None or not self._fetch.download.complete:
            raise ValueError("there is no complete download")
        self._fetch.file.finish()
        return self._fetch.file.path

    def pause(self) -> None:
        """Stop; the part file stays and can be resumed until another download begins."""
        self._close_reader()
        if self._fetch is not None:
            self._fetch.close()
            self._fetch = None

    def remove(self) -> None:
        """Stop and delete the part file."""
        self._close_reader()
        if self._fetch is not None:
            self._fetch.remove()
            self._fetch = None

    # -- sources

    def _choose(self, places: tuple[str, ...]) -> None:
        self._choice = SourceChoice(places)
        self._progress = self.received_bytes, None
        self._open_reader()

    def _end_source(self, reason: str, now_s: float, *, permanent: bool) -> None:
        self._choice.on_ended(reason, now_s, permanent=permanent)
        self._progress = self.received_bytes, None
        self._open_reader()

    def _open_reader(self) -> None:
        """Read from the source in use from now on."""
        self._close_reader()
        if self._fetch is None:
            return
        download, place = self._fetch.download, self._choice.place
        download.change_source(patient=place != MQTT)
        if place not in ("", MQTT):
            self._readers += 1
            peer = f"source-{self._readers}"
            names, ca = self._options.names, self._options.ca
            self._reader = SourceReader(place, names, peer, self._put, ca)

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
