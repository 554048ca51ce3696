"""Fetches the desired release and unpacks it into the idle slot, or refuses it for good."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from device.agent.config import AgentConfig
from device.agent.slot_state_cache import SlotStateCache
from device.errors import TandemError
from device.protocol.documents import BlobGet, Desired
from device.update.events import Event, Fetched, Notice
from device.update.fetching import Fetching, FetchOptions
from device.update.slot_store import SlotStore
from device.update.sources.reader import SourceEvent
from device.update.sources.source import file_names
from device.update.update_table import UpdateTable

LOG = logging.getLogger("tandem.agent")


def fetch_options(desired: Desired, config: UpdateTable, bases: Mapping[str, Path]) -> FetchOptions:
    """Return how to fetch a release: the smaller limit holds, its own sources come first.

    `bases`: folders of unpacked bundles, by the SHA-256 of the bundle.
    """
    release = desired.release
    limits = (config.max_bytes_per_s, desired.policy.max_bytes_per_s)
    return FetchOptions(
        bases=bases,
        bytes_per_s=min((limit for limit in limits if limit is not None), default=None),
        places=(*release.sources, *config.sources),
        names=file_names(release.blob.sha256, release.target),
        ca=None if config.ca is None else Path(config.ca),
    )


class Downloads:
    """At most one download at a time, for the desired release."""

    def __init__(
        self,
        config: AgentConfig,
        store: SlotStore,
        kept: SlotStateCache,
        put: Callable[[SourceEvent], None],
    ) -> None:
        self._config = config
        self._store = store
        self._kept = kept
        self._fetching = Fetching(store.downloads, config.update.window_chunks, put)
        self._problem = ""  # why another download would end the same way

    def wake_at_s(self, *, online: bool) -> float | None:
        """Return when `next_request` has something to do without a message."""
        return self._fetching.wake_at_s if online else self._fetching.wake_offline_at_s

    def begin(self, desired: Desired) -> Event:
        """Begin or resume the download of the release."""
        release = desired.release
        self._problem = ""
        try:
            self._store.adopt(release.blob.sha256, release.blob.bytes)
            bases = self._store.bundles(self._kept.state)
            options = fetch_options(desired, self._config.update, bases)
            self._fetching.begin(release.blob, options)
        except (TandemError, OSError) as error:
            return Notice("no_fetch", _reason(error))
        received = self._fetching.received_bytes
        LOG.info(
            "fetching %s: %d of %d bytes are there", release.name, received, release.blob.bytes
        )
        return Fetched(received)

    def pause(self) -> None:
        """Stop; what is there is resumed until another download begins."""
        self._fetching.pause()

    def on_part(self, sha256: str, part: str, payload: bytes, now_s: float) -> None:
        """Take a part of a blob that arrived: "index" or "7", after a slash the peer's name."""
        try:
            self._fetching.take(sha256, part, payload, now_s)
        except (TandemError, OSError) as error:
            self._problem = _reason(error)

    def on_source(self, event: SourceEvent, now_s: float) -> None:
        """Take what a source other than MQTT gave."""
        try:
            self._fetching.on_source(event, now_s)
        except (TandemError, OSError) as error:
            self._problem = _reason(error)

    def on_reconnect(self) -> None:
        """Forget the requests of the old connection: they are not answered."""
        self._fetching.forget_requests()

    def next_request(self, now_s: float, *, online: bool = True) -> BlobGet | None:
        """Return the request to send now, or None; its chunks count as in flight from here on."""
        return self._fetching.next_request(now_s, online=online)

    def advance(self) -> Event | None:
        """Return how far a download is, that the whole bundle is on the disk, or why it ended."""
        if not self._fetching.running:
            return None
        problem = self._problem or self._fetching.advance(time.monotonic())
        if problem:
            return self._give_up(problem)
        if self._fetching.complete:
            return Notice("complete")
        return Fetched(self._fetching.received_bytes, self._fetching.complaint)

    def unpack(self, desired: Desired) -> Event:
        """Check the whole bundle and unpack it into the idle slot."""
        try:
            self._kept.stage(self._fetching.finish(), desired, self._config.profile)
        except (TandemError, OSError) as error:
            return self._give_up(_reason(error))
        self._fetching.remove()
        return Notice("unpacked")

    def _give_up(self, problem: str) -> Event:
        self._fetching.remove()
        return Notice("fetch_failed", problem)


def _reason(error: Exception) -> str:
    return f"the disk failed: {error}" if isinstance(error, OSError) else str(error)
