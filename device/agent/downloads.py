"""Fetches the desired release and unpacks it into the idle slot, or refuses it for good."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from device.agent.config import AgentConfig
from device.agent.slot_state_cache import SlotStateCache
from device.errors import TandemError
from device.protocol.documents import Desired
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


class Downloads(Fetching):
    """At most one download at a time, for the desired release; what fails is told by `look`."""

    def __init__(
        self,
        config: AgentConfig,
        store: SlotStore,
        kept: SlotStateCache,
        put: Callable[[SourceEvent], None],
    ) -> None:
        super().__init__(store.downloads, config.update.window_chunks, put)
        self._config = config
        self._store = store
        self._kept = kept
        self._problem = ""  # why another download would end the same way

    def fetch(self, desired: Desired) -> Event:
        """Begin or resume the download of the release."""
        blob = desired.release.blob
        self._problem = ""
        try:
            self._store.adopt(blob.sha256, blob.bytes)
            bases = self._store.bundles(self._kept.state)
            self.begin(blob, fetch_options(desired, self._config.update, bases))
        except (TandemError, OSError) as error:
            return Notice("no_fetch", _reason(error))
        received = self.received_bytes
        LOG.info(
            "fetching %s: %d of %d bytes are there", desired.release.name, received, blob.bytes
        )
        return Fetched(received)

    def take(self, sha256: str, part: str, payload: bytes, now_s: float) -> None:
        """Take a part that arrived, "index", "7" or "7/peer"."""
        try:
            super().take(sha256, part, payload, now_s)
        except (TandemError, OSError) as error:
            self._problem = _reason(error)

    def look(self) -> Event | None:
        """Return how far a download is, that the whole bundle is on the disk, or why it ended."""
        if not self.running:
            return None
        problem = self._problem or self.advance(time.monotonic())
        if problem:
            return self._give_up(problem)
        if self.complete:
            return Notice("complete")
        return Fetched(self.received_bytes, self.complaint)

    def unpack(self, desired: Desired) -> Event:
        """Check the whole bundle and unpack it into the idle slot."""
        try:
            self._kept.stage(self.finish(), desired, self._config.profile)
        except (TandemError, OSError) as error:
            return self._give_up(_reason(error))
        self.remove()
        return Notice("unpacked")

    def _give_up(self, problem: str) -> Event:
        self.remove()
        return Notice("fetch_failed", problem)


def _reason(error: Exception) -> str:
    return f"the disk failed: {error}" if isinstance(error, OSError) else str(error)
