"""`tandem fleet serve`: watches all devices, carries rollouts out, serves what devices fetch.

One thread handles all events. What it decides is in the store before it is sent, so the process
may be killed at any moment. Of several servers on one store the one with the lease works, the
others stand by.
"""

import logging
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from device.errors import TrustError
from device.protocol.documents import Desired, Reported, StateDocument, decode, encode
from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkUp, Message, queue_putter
from device.protocol.signed import open_reported
from device.protocol.topics import PREFIX, Topics
from toolkit.fleet.admission import is_signed
from toolkit.fleet.answers import Answers
from toolkit.fleet.control import Control
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.folder import IDENTITY
from toolkit.fleet.identity import SERVER
from toolkit.fleet.refresher import Refresher
from toolkit.fleet.store import lease
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.devices import DeviceRow

LOG = logging.getLogger("tandem.fleet")
MAX_EVENTS = 4096
ROUND_S = 0.1  # events are gathered for so long, then carried out together
STANDBY_S = 1.0
SEND_AFTER = 64  # events
AWAY_S = 30.0  # a connection that was away for longer made devices late
AGAIN_S = 0.005  # until a message that the connection did not take is handed over again
_DEVICE = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


class Service(Protocol):
    """Something else that devices ask for: chunks, metadata."""

    def start(self) -> None:
        """Begin to serve, without waiting."""

    def close(self) -> None:
        """Stop."""


ReportReader = Callable[[str, bytes], Reported]
ServiceFactory = Callable[[Fleet], Service]


def signer_of(fleet: Fleet) -> Callable[[Desired], bytes]:
    """Return what signs desired documents: the director, or on a bench nobody."""
    if not is_signed(fleet.folder):
        return encode
    from toolkit.fleet.director import sign_desired
    from toolkit.fleet.repository import FleetRepository

    repository = FleetRepository(fleet.folder)
    # Read for each document: the key may be rotated while the server runs.
    return lambda desired: sign_desired(desired, repository.director_signer())


def reader_of(fleet: Fleet) -> ReportReader:
    """Return what reads a device's reports: by its certificate, where the fleet has a CA."""
    identity = fleet.folder / IDENTITY
    if not identity.is_dir():
        return lambda _device, payload: open_reported(payload)
    from toolkit.fleet.report_keys import ReportKeys

    return ReportKeys(identity).read


# What a server starts beside the rollouts.
SERVICES: tuple[ServiceFactory, ...] = (Answers, Refresher)


class FleetServer:
    """The server of one fleet."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        sign: Callable[[Desired], bytes] | None = None,
        read_report: ReportReader | None = None,
        services: Sequence[ServiceFactory] = SERVICES,
    ) -> None:
        """`sign` makes the payload of a desired document, by default as `signer_of` says;
        `read_report` reads a reported one, by default as `reader_of` says."""
        self._fleet = fleet
        self._sign = sign or signer_of(fleet)
        self._read_report = read_report or reader_of(fleet)
        self._services = services
        self._holder = lease.holder_name()
        self._events: queue.Queue[LinkEvent] = queue.Queue(MAX_EVENTS)
        self._unsent: dict[str, bytes] = {}  # device -> its newest document
        self._heard: dict[str, DeviceRow] = {}  # since the last round that was carried out
        self._is_connected = False
        self._says_again = False  # to each device that connects
        self._away_since_s = -math.inf  # on the clock of `time.monotonic()`
        self._reconnected = False  # after a time in which devices were not heard
        self._unread: set[str] = set()  # devices whose report cannot be read, said once

    def serve(self, stopped: threading.Event) -> None:
        """Work until `stopped` is set; RolloutError: the store, or another server took over."""
        database = self._fleet.open_store()
        try:
            if not self._await_lease(database, stopped):
                return
            try:
                self._work(database, stopped)
            finally:
                lease.release(database, self._holder)
        finally:
            database.close()

    def _await_lease(self, database: Database, stopped: threading.Event) -> bool:
        """Wait until no other server works; False: stopped before."""
        warned = False
        while not stopped.is_set():
            if lease.acquire(database, self._holder):
                return True
            if not warned:
                row = lease.read_lease(database)
                LOG.warning("stands by: %s has the lease", row.holder if row else "another server")
                warned = True
            stopped.wait(STANDBY_S)
        return False

    def _work(self, database: Database, stopped: threading.Event) -> None:
        control = Control(database, self._holder, self._sign)
        subscriptions = ((f"{PREFIX}/+/state", 1), (f"{PREFIX}/+/reported", 1))
        settings = self._fleet.link_settings(f"fleet-{self._holder[-8:]}", subscriptions, SERVER)
        link = Link(settings, queue_putter(self._events, stopped))
        services = [make(self._fleet) for make in self._services]
        try:
            link.start()
            for service in services:
                service.start()
            LOG.info("serves the fleet %s", self._fleet.file.name)
            renewed_s = time.monotonic()
            while not stopped.is_set():
                self._round(control, link)
                if time.monotonic() - renewed_s > lease.LEASE_S / 3:
                    with database.write():
                        lease.check(database, self._holder)
                    renewed_s = time.monotonic()
        finally:
            stopped.set()  # nobody takes events any more
            link.close()
            for service in services:
                service.close()

    def _round(self, control: Control, link: Link) -> None:
        """Gather events for a moment, carry them out, send what they ask for."""
        taken, until_s = 0, time.monotonic() + ROUND_S
        while (wait_s := until_s - time.monotonic()) > 0.0:
            try:
                event = self._events.get(timeout=min(wait_s, AGAIN_S) if self._unsent else wait_s)
            except queue.Empty:
                self._send(link)
                continue
            self._take(event, control)
            taken += 1
            if taken % SEND_AFTER == 0:  # the connection has room again
                self._send(link)
        if not self._is_connected:
            return  # nobody can be heard: no device may count as late
        for row in control.advance(self._heard, reconnected=self._reconnected):
            self._unsent[row.device] = row.document.encode()
        self._heard, self._reconnected = {}, False
        self._send(link)

    def _take(self, event: LinkEvent, control: Control) -> None:
        if isinstance(event, LinkUp):
            LOG.info("connected with MQTT %s", event.mqtt_version)
            self._is_connected = True
            # Without MQTT 5 it may be a cluster whose nodes keep retained messages each for itself:
            # a device at another node than ours gets only what is sent while it is there.
            self._says_again = event.mqtt_version == "3.1.1"
            self._reconnected |= time.monotonic() - self._away_since_s > AWAY_S
            # A broker may have lost what it retained: all is said again, which changes nothing.
            self._unsent = {row.device: row.document.encode() for row in control.desired.values()}
        elif isinstance(event, LinkDown):
            LOG.warning("%s", event.reason)
            if self._is_connected:
                self._is_connected, self._away_since_s = False, time.monotonic()
        else:
            self._take_message(event, control)

    def _take_message(self, message: Message, control: Control) -> None:
        device, _, kind = message.topic.removeprefix(f"{PREFIX}/").partition("/")
        if not message.payload or not _DEVICE.match(device):
            return
        row = self._heard.get(device) or control.devices.get(device)
        row = row or DeviceRow(device, 0.0, None, None, {})
        state, reported = row.state, row.reported
        try:
            if kind == "state":
                state = _newer(state, decode(message.payload, StateDocument))
                if self._says_again and _is_birth(row.state, state) and device in control.desired:
                    self._unsent[device] = control.desired[device].document.encode()
            else:
                reported = self._read_report(device, message.payload)
        except (ValueError, TrustError) as error:
            if device not in self._unread:
                self._unread.add(device)
                LOG.warning("cannot read what %s says: %s", device, error)
            return
        self._unread.discard(device)
        self._heard[device] = DeviceRow(device, time.time(), state, reported, row.labels)

    def _send(self, link: Link) -> None:
        """Publish documents as far as the connection takes them."""
        for device in list(self._unsent):
            payload = self._unsent[device]
            if not link.publish(Topics(device).desired, payload, qos=1, retain=True):
                return  # down, or its queue is full: later
            del self._unsent[device]


def _is_birth(known: StateDocument | None, state: StateDocument) -> bool:
    """Whether a device has connected anew."""
    return state.state == "online" and (known is None or known.session < state.session)


def _newer(known: StateDocument | None, state: StateDocument) -> StateDocument:
    """Return a device's state; the will of an older session than the last is stale."""
    if state.state == "lost" and known is not None and state.session < known.session:
        return known
    return state
