"""Serves the chunks of a fleet's releases over one connection, to any device that asks.

It keeps nothing: what a device asks for is all that it needs to know.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from device.errors import BundleError
from device.protocol.documents import BlobGet, decode
from device.protocol.mqtt import Link, LinkEvent, LinkSettings, Message, queue_putter
from device.protocol.topics import PREFIX, Topics
from toolkit.fleet.blob import Blob

LOG = logging.getLogger(__name__)
REQUESTS = f"{PREFIX}/+/blob/get"
MAX_EVENTS = 1024
POLL_S = 0.5
_Part = tuple[str, str, int | str]  # device, SHA-256 of the blob, number of the chunk or "index"


class BundleService:
    """Answers requests in a thread of its own. `paths`: the file of each release by its SHA-256."""

    def __init__(
        self, settings: LinkSettings, paths: Callable[[], Mapping[str, Path]], peer: str
    ) -> None:
        """`peer`: the name by which a device may ask for this server."""
        self._paths = paths
        self._peer = peer
        self._blobs: dict[str, Blob] = {}
        self._events: queue.Queue[LinkEvent] = queue.Queue(MAX_EVENTS)
        self._stopped = threading.Event()
        self._link = Link(settings, queue_putter(self._events, self._stopped))
        self._parts: deque[_Part] = deque()
        self._waiting: set[_Part] = set()  # the same: a part that is asked for again is sent once
        self._thread = threading.Thread(target=self._run, name="bundles", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._link.start()
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._stopped.set()
        self._link.close()
        self._thread.join(5.0)
        for blob in self._blobs.values():
            blob.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                event = self._events.get(timeout=0.0 if self._parts else POLL_S)
            except queue.Empty:
                self._send()
                continue
            if isinstance(event, Message):
                self._take(event)
            else:
                self._parts.clear()  # devices ask again
                self._waiting.clear()

    def _take(self, message: Message) -> None:
        device = message.topic.removeprefix(f"{PREFIX}/").partition("/")[0]
        try:
            request = decode(message.payload, BlobGet)
            blob = self._blob(request.sha256) if request.peer in ("", self._peer) else None
        except (ValueError, BundleError) as error:
            LOG.warning("cannot serve %s: %s", device, error)
            return
        if blob is not None:
            for part in blob.parts_of(request):
                row = (device, request.sha256, part)
                if row not in self._waiting:
                    self._waiting.add(row)
                    self._parts.append(row)

    def _blob(self, sha256: str) -> Blob | None:
        """Return the file of a release, None if it is not one of this fleet."""
        if sha256 not in self._blobs:
            path = self._paths().get(sha256)
            if path is None:
                return None
            blob = Blob(path)
            if blob.spec.sha256 != sha256:
                raise BundleError(f"{path} is not the bundle that was rolled out any more")
            self._blobs[sha256] = blob
        return self._blobs[sha256]

    def _send(self) -> None:
        if not self._parts:
            return
        row = self._parts.popleft()
        self._waiting.discard(row)
        device, sha256, part = row
        topic = Topics(device).chunk(sha256, part, self._peer)
        try:
            self._link.publish_bulk(topic, self._blobs[sha256].read(part))
        except BundleError as error:
            LOG.error("%s", error)
