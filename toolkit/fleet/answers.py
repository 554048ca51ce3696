"""Answers what devices ask of a fleet, over one connection: chunks, signed metadata, certificates.

It keeps nothing of a device, so several of them may run: a broker of MQTT 5 gives each request to
one by a shared subscription. With 3.1.1, which may have none, all answer, and the device asks the
first that did by its name from then on.
"""

import logging
import queue
import secrets
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

from paho.mqtt.enums import MQTTProtocolVersion

from device.errors import BrokerError
from device.protocol.mqtt import (
    Link,
    LinkDown,
    LinkEvent,
    LinkSettings,
    LinkUp,
    queue_putter,
)
from device.protocol.mqtt_version import FIXED_VERSIONS, probe_version
from device.protocol.topics import BLOB_GET_OF_ALL, PREFIX, SHARED_BLOB_GET
from toolkit.fleet.admission import BENCH_BUNDLES
from toolkit.fleet.chunk_server import SHARED_PEER, ChunkServer
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.folder import IDENTITY
from toolkit.fleet.identity import SERVER, Authority
from toolkit.fleet.library import Library
from toolkit.fleet.metadata_server import SHARED, MetadataServer
from toolkit.fleet.provisioning import Provisioning

LOG = logging.getLogger("tandem.fleet")
MAX_EVENTS = 4096
AGAIN_S = 2.0  # between two tries to find out what the broker speaks
BUNDLES = (Path("repository", "targets"), Path(BENCH_BUNDLES))


class Answers:
    """A connection of its own, in a thread of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._events: queue.Queue[LinkEvent] = queue.Queue(MAX_EVENTS)
        self._library = Library(*(fleet.folder / folder for folder in BUNDLES))
        self._metadata = MetadataServer(fleet.folder / "repository")
        identity = fleet.folder / IDENTITY
        self._provisioning = (
            Provisioning(Authority(identity)) if (identity / "ca.key").exists() else None
        )

    def start(self) -> None:
        """Begin to answer, without waiting for the broker."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and close the bundles."""
        self._stopped.set()
        self._thread.join(5.0)
        self._library.close()

    def _run(self) -> None:
        settings = self._fleet.link_settings(f"fleet-answers-{secrets.token_hex(4)}", (), SERVER)
        shared = self._is_shared(settings)
        if shared is None:
            return
        topics = [SHARED_BLOB_GET, SHARED] if shared else [BLOB_GET_OF_ALL, f"{PREFIX}/+/tuf/get"]
        subscriptions = [(topic, 0) for topic in topics]
        if self._provisioning is not None:
            subscriptions += self._provisioning.subscriptions
        settings = replace(settings, subscriptions=tuple(subscriptions))
        link = Link(settings, queue_putter(self._events, self._stopped))
        peer = SHARED_PEER if shared else settings.client_id[-8:]
        chunks = ChunkServer(self._library, partial(link.publish_bulk, qos=0), peer)
        link.start()
        try:
            while not self._stopped.is_set():
                try:
                    event = self._events.get(block=not chunks.pending, timeout=0.5)
                except queue.Empty:
                    if chunks.pending:
                        chunks.send_next()
                    continue
                self._take(event, chunks, link)
        finally:
            self._stopped.set()
            link.close()

    def _take(self, event: LinkEvent, chunks: ChunkServer, link: Link) -> None:
        if isinstance(event, LinkDown):
            LOG.warning("%s", event.reason)
            chunks.forget()
        elif isinstance(event, LinkUp):
            LOG.info("answers devices")
        elif self._provisioning is not None and self._provisioning.takes(event.topic):
            self._provisioning.on_message(event, link)
        elif not self._metadata.handle(link, event):
            chunks.on_message(event)

    def _is_shared(self, settings: LinkSettings) -> bool | None:
        """Return whether the broker has shared subscriptions; None: stopped before it was there."""
        fixed = FIXED_VERSIONS[settings.mqtt_version]
        if fixed is not None:
            return fixed == MQTTProtocolVersion.MQTTv5
        while not self._stopped.is_set():
            try:
                context = None if settings.tls is None else settings.tls.context()
                version = probe_version(settings.host, settings.port, context)
                return version == MQTTProtocolVersion.MQTTv5
            except (OSError, BrokerError):  # the link of the rollouts says why
                self._stopped.wait(AGAIN_S)
        return None
