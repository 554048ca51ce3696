"""Answers what devices ask of a fleet: signed metadata, chunks, certificates.

Each kind has a connection and a thread of its own: a file of metadata never waits behind chunks of
others, nor behind who floods the server with requests for certificates.
"""

import logging
import queue
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from device.enrol.request import EnrolRequest, EnrolResponse, response_topic
from device.protocol.documents import decode, encode
from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkSettings, Message, queue_putter
from device.protocol.topics import PROVISION, TUF_GET_OF_ALL
from toolkit.errors import FleetError
from toolkit.fleet.authority import SERVER, Authority
from toolkit.fleet.bundles.library import Library
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.folder import IDENTITY
from toolkit.fleet.server import chunks
from toolkit.fleet.server.metadata import MetadataServer
from toolkit.fleet.server.request_gate import RequestGate, gated
from toolkit.fleet.trust.certificates import enrol
from toolkit.fleet.trust.publish import BENCH_BUNDLES

LOG = logging.getLogger("tandem.fleet")
MAX_EVENTS = 4096
FILES_PER_S, MAX_FILES = 20.0, 200.0  # of metadata, for one device: a check asks for about ten
BUNDLES = (Path("repository", "targets"), Path(BENCH_BUNDLES))

SUBSCRIPTION = f"{PROVISION}/+/request"
ID_LETTERS = frozenset("0123456789abcdef")


class Provisioning:
    """A service on a server's link: it signs the requests of expected devices."""

    subscriptions = ((SUBSCRIPTION, 1),)

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    def on_message(self, message: Message, link: Link) -> None:
        """Answer a request; what is none is dropped."""
        request_id = message.topic.removeprefix(f"{PROVISION}/").removesuffix("/request")
        if len(request_id) != 32 or not ID_LETTERS.issuperset(request_id):
            return
        response = self.answer(message.payload)
        if response is not None:
            link.publish(response_topic(request_id), encode(response), qos=1)

    def answer(self, payload: bytes) -> EnrolResponse | None:
        """Return the answer to a request, None if it is not one."""
        try:
            request = decode(payload, EnrolRequest)
        except ValueError as error:
            LOG.warning("a request for a certificate is not understood: %s", error)
            return None
        try:
            issued = enrol(self._authority, request.device, request.csr.encode())
        except (FleetError, OSError) as error:
            LOG.warning("%s", error)
            return EnrolResponse(device=request.device, error=str(error))
        LOG.info("enrolled %s until %s", issued.name, issued.not_after.date())
        return EnrolResponse(
            device=request.device,
            certificate=issued.pem.decode(),
            ca=self._authority.ca_pem.decode(),
        )


class Answers:
    """A thread for each kind of request."""

    def __init__(self, fleet: Fleet, owns: Callable[[str], bool]) -> None:
        """`owns`: whether a device, or a request of a certificate by its id, is this server's."""
        self._fleet = fleet
        self._owns = owns
        self._stopped = threading.Event()
        self._library = Library(*(fleet.folder / folder for folder in BUNDLES))
        self._metadata = MetadataServer(fleet.folder / "repository")
        identity = fleet.folder / IDENTITY
        runs: list[tuple[str, Callable[[], None]]] = [
            ("metadata", self._answer_metadata),
            ("chunks", self._answer_chunks),
        ]
        if (identity / "ca.key").exists():
            self._provisioning = Provisioning(Authority(identity))
            runs.append(("certificates", self._answer_provisioning))
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in runs]

    def start(self) -> None:
        """Begin to answer, without waiting for the broker."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop, and close the bundles."""
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive():  # what is before it may not have started
                thread.join(5.0)
        self._library.close()

    def _answer_chunks(self) -> None:
        chunks.serve(self._settings("chunks"), self._library, self._stopped)

    def _answer_metadata(self) -> None:
        self._hold(self._settings("tuf", (TUF_GET_OF_ALL, 0)), self._metadata.handle)

    def _answer_provisioning(self) -> None:
        settings = self._settings("certificates", *self._provisioning.subscriptions)
        self._hold(settings, lambda link, message: self._provisioning.on_message(message, link))

    def _settings(self, kind: str, *subscriptions: tuple[str, int]) -> LinkSettings:
        name = f"fleet-{kind}-{secrets.token_hex(4)}"
        return self._fleet.link_settings(name, subscriptions, SERVER)

    def _hold(self, settings: LinkSettings, handle: Callable[[Link, Message], object]) -> None:
        """Keep a connection, and handle each message in this thread."""
        events: queue.Queue[LinkEvent] = queue.Queue(MAX_EVENTS)
        link = Link(
            settings,
            gated(queue_putter(events, self._stopped), RequestGate(FILES_PER_S, MAX_FILES)),
        )
        asker = settings.subscriptions[0][0].split("/").index("+")  # level of who asks
        link.start()
        try:
            while not self._stopped.is_set():
                try:
                    event = events.get(timeout=0.5)
                except queue.Empty:
                    continue
                if isinstance(event, LinkDown):
                    LOG.warning("%s", event.reason)
                elif isinstance(event, Message) and self._owns(event.topic.split("/")[asker]):
                    handle(link, event)
        finally:
            link.close()
