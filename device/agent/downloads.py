"""Downloads of the agent: what ends one is told in a sentence, whoever fetches.

`Downloads` fetches the desired release and unpacks it into the idle slot, or refuses it for good.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from device.agent.config import AgentConfig
from device.agent.slot_state_cache import SlotStateCache
from device.errors import BundleError, TandemError
from device.protocol.documents import Desired
from device.update import slots
from device.update.bundle import read_bundle_info
from device.update.events import Event, Fetched, Notice
from device.update.fetching import Fetching, FetchOptions
from device.update.slot_store import SlotStore
from device.update.slots import SlotRecord
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


class Download(Fetching):
    """At most one download at a time. What fails as it begins, or as parts come, ends it: `advance`
    tells it."""

    _problem = ""

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Let what fails within end the download."""
        try:
            yield
        except (TandemError, OSError) as error:
            self._problem = download_problem(error)

    def take(self, sha256: str, part: str, payload: bytes, now_s: float) -> None:
        """Take a part that arrived, "index", "7" or "7/peer"."""
        with self.failing():
            super().take(sha256, part, payload, now_s)

    def advance(self, now_s: float) -> str:
        """Take another source where one gives nothing; return why the download cannot go on."""
        return self._problem or super().advance(now_s)

    def pause(self) -> None:
        """Stop; the part file stays and can be resumed until another download begins."""
        self._problem = ""
        super().pause()


class Downloads(Download):
    """The downloads of desired releases; what ends one is told by `look`."""

    def __init__(
        self,
        config: AgentConfig,
        store: SlotStore,
        slot_states: SlotStateCache,
        put: Callable[[SourceEvent], None],
    ) -> None:
        super().__init__(store.downloads, config.update.window_chunks, put)
        self._config = config
        self._store = store
        self._slots = slot_states

    def fetch(self, desired: Desired) -> Event:
        """Begin or resume the download of the release."""
        blob = desired.release.blob
        self._problem = ""
        try:
            self._store.adopt(blob.sha256, blob.bytes)
            bases = self._store.bundles(self._slots.state)
            self.begin(blob, fetch_options(desired, self._config.update, bases))
        except (TandemError, OSError) as error:
            return Notice("no_fetch", download_problem(error))
        received = self.received_bytes
        LOG.info(
            "fetching %s: %d of %d bytes are there", desired.release.name, received, blob.bytes
        )
        return Fetched(received)

    def look(self) -> Event | None:
        """Return how far a download is, that the whole bundle is on the disk, or why it ended."""
        if not self.running:
            return None
        problem = self.advance(time.monotonic())
        if problem:
            return self._give_up(problem)
        if self.complete:
            return Notice("complete")
        return Fetched(self.received_bytes, self.complaint)

    def unpack(self, desired: Desired) -> Event:
        """Check the whole bundle and unpack it into the idle slot; what was there is lost."""
        blob, profile = desired.release.blob, self._config.profile
        try:
            bundle = self.finish()
            info = read_bundle_info(bundle)
            # The desired document names a profile too, but it is not what was built.
            if info.profile != profile:
                raise BundleError(
                    f"the engine in the bundle is built for {info.profile}, this device is "
                    f"{profile}: build an engine for {profile}"
                )
            record = SlotRecord(
                sha256=blob.sha256, bytes=blob.bytes, name=info.name, version=info.version,
                request=desired.request,
            )  # fmt: skip
            self._slots.save(slots.clear(self._slots.state))
            self._store.populate(self._slots.state.idle, bundle, record)
            self._slots.save(slots.stage(self._slots.state, record))
        except (TandemError, OSError) as error:
            return self._give_up(download_problem(error))
        self.remove()
        return Notice("unpacked")

    def _give_up(self, problem: str) -> Event:
        self.remove()
        return Notice("fetch_failed", problem)


def download_problem(error: Exception) -> str:
    """Return why bytes could not be fetched or kept."""
    return f"the disk failed: {error}" if isinstance(error, OSError) else str(error)
