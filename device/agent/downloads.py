"""Fetches the desired release and unpacks it into the idle slot, or refuses it for good."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from device.agent.config import AgentConfig
from device.agent.slot_state_cache import SlotStateCache
from device.agent.update_status import UpdateStatus
from device.errors import TandemError
from device.protocol.documents import BlobGet, Desired
from device.update.decisions import update_of
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
        order: UpdateStatus,
        put: Callable[[SourceEvent], None],
    ) -> None:
        self._config = config
        self._store = store
        self._kept = kept
        self._order = order
        self._fetching = Fetching(store.downloads, config.update.window_chunks, put)

    def wake_at_s(self, *, online: bool) -> float | None:
        """Return when `next_request` has something to do without a message."""
        return self._fetching.wake_at_s if online else self._fetching.wake_offline_at_s

    def begin(self, desired: Desired) -> None:
        """Begin or resume the download of the release."""
        release = desired.release
        try:
            self._store.adopt(release.blob.sha256, release.blob.bytes)
            bases = self._store.bundles(self._kept.state)
            options = fetch_options(desired, self._config.update, bases)
            self._fetching.begin(release.blob, options)
        except (TandemError, OSError) as error:
            self._order.refuse(desired, _reason(error))
            return
        received = self._fetching.received_bytes
        LOG.info(
            "fetching %s: %d of %d bytes are there", release.name, received, release.blob.bytes
        )
        self._order.update = update_of(desired, "downloading", received)

    def pause(self) -> None:
        """Stop; what is there is resumed until another download begins."""
        self._fetching.pause()

    def on_part(self, sha256: str, part: str, payload: bytes, now_s: float) -> None:
        """Take a part of a blob that arrived: "index" or "7", after a slash the peer's name."""
        try:
            self._fetching.take(sha256, part, payload, now_s)
        except (TandemError, OSError) as error:
            self._give_up(_reason(error))

    def on_source(self, event: SourceEvent, now_s: float) -> None:
        """Take what a source other than MQTT gave."""
        try:
            self._fetching.on_source(event, now_s)
        except (TandemError, OSError) as error:
            self._give_up(_reason(error))

    def on_reconnect(self) -> None:
        """Forget the requests of the old connection: they are not answered."""
        self._fetching.forget_requests()

    def next_request(self, now_s: float, *, online: bool = True) -> BlobGet | None:
        """Return the request to send now, or None; its chunks count as in flight from here on."""
        return self._fetching.next_request(now_s, online=online)

    def advance(self) -> bool:
        """Note the progress; return whether the whole bundle is on the disk."""
        if not self._fetching.running or self._order.desired is None:
            return False
        self._order.update = msgspec.structs.replace(
            self._order.update,
            received_bytes=self._fetching.received_bytes,
            reason=self._fetching.complaint,
        )
        failure = self._fetching.advance(time.monotonic())
        if self._fetching.complete:
            return True
        if failure:
            self._give_up(failure)
        return False

    def stage(self, desired: Desired) -> bool:
        """Check the whole bundle and unpack it into the idle slot; False: it is refused."""
        try:
            self._kept.stage(self._fetching.finish(), desired, self._config.profile)
        except (TandemError, OSError) as error:
            self._give_up(_reason(error))
            return False
        self._fetching.remove()
        return True

    def _give_up(self, reason: str) -> None:
        """Refuse this request for good: another download would end the same way."""
        desired = self._order.desired
        if not self._fetching.running or desired is None:
            return
        self._fetching.remove()
        self._kept.refuse(desired, reason)
        self._order.refuse(desired, reason)


def _reason(error: Exception) -> str:
    return f"the disk failed: {error}" if isinstance(error, OSError) else str(error)
