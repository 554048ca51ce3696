"""`tandem fleet serve`: watches all devices, carries rollouts out, serves what devices fetch.

One thread handles all events. What it decides is in the store before it is sent, so the process
may be killed at any moment. Servers on one store in PostgreSQL share the devices by their ids, and
take over those of a server whose lease has run out; in SQLite one works, and the others stand by.
"""

import logging
import math
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import islice
from typing import Protocol

from device.errors import TrustError
from device.protocol.documents import Desired
from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkUp, Message, Will
from device.protocol.topics import PREFIX, SERVER_CLAIM, Topics
from toolkit.fleet.authority import SERVER
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.server.answers import Answers
from toolkit.fleet.server.control import Control, DesiredSigner, encode_all
from toolkit.fleet.server.copy_guard import Claim, CopyGuard, fleet_id
from toolkit.fleet.server.device_cache import voice_of
from toolkit.fleet.server.device_messages import is_back, is_birth, reader_of, row_after
from toolkit.fleet.server.inbox import Inbox
from toolkit.fleet.server.metrics import Meters, MetricsListener, ServerFigures
from toolkit.fleet.server.otlp import OtlpPush
from toolkit.fleet.server.refresher import Refresher
from toolkit.fleet.server.same_folder import check_folder
from toolkit.fleet.server.silence import Watch
from toolkit.fleet.store import lease
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.devices import DeviceRow, save_ear
from toolkit.fleet.store.presence import save_sample
from toolkit.fleet.trust.publish import is_signed
from toolkit.fleet.trust.repository import FleetRepository

LOG = logging.getLogger("tandem.fleet")
MAX_EVENTS = 4096
ROUND_S = 0.1  # events are gathered for so long, then carried out together
STANDBY_S = 1.0
SEND_AFTER = 64  # events
SENT_AT_ONCE = 256  # documents; the connection takes no more
AWAY_S = 30.0  # a connection that was away for longer made devices late
KEPT_S = 30.0  # for so long, what the devices of other servers said
AGAIN_S = 0.005  # until a message that the connection did not take is handed over again
_DEVICE = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


class Service(Protocol):
    """Something else that devices ask for: chunks, metadata."""

    def start(self) -> None:
        """Begin to serve, without waiting."""

    def close(self) -> None:
        """Stop."""


ServiceFactory = Callable[[Fleet, Callable[[str], bool]], Service]


def signer_of(fleet: Fleet) -> DesiredSigner:
    """Return what signs desired documents: the director, or on a bench nobody."""
    if not is_signed(fleet.folder):
        return encode_all
    from toolkit.fleet.trust.director import sign_desired

    repository = FleetRepository(fleet.folder)

    def sign(documents: Sequence[Desired]) -> list[bytes]:
        key = repository.director_signer()  # read anew: it may be rotated while the server runs
        return [sign_desired(document, key) for document in documents]

    return sign


# What a server starts beside the rollouts.
SERVICES: tuple[ServiceFactory, ...] = (Answers, lambda fleet, _owns: Refresher(fleet))


class FleetServer:
    """A server of one fleet."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        sign: DesiredSigner | None = None,
        services: Sequence[ServiceFactory] = SERVICES,
        metrics: tuple[str, int] | None = None,
        otlp: str | None = None,
        replace: bool = False,
    ) -> None:
        """`sign` makes the payloads of desired documents, by default as `signer_of` says;
        `metrics`: where Prometheus finds its figures, `otlp`: the collector that they are sent to,
        None: nowhere; `replace`: a server on a copy of the folder has to stop, and not this one."""
        self._fleet = fleet
        self._sign = sign or signer_of(fleet)
        self._reader = reader_of(fleet)
        self._services = services
        self._running: list[Service] = []  # once nobody else serves a copy
        self._holder = lease.holder_name()
        self._replaces = replace
        self._guard: CopyGuard | None = None  # while this server has a connection
        self._metrics = metrics
        self._otlp = otlp
        self._meters = Meters()
        self._events: Inbox[LinkEvent] = Inbox(MAX_EVENTS)
        self._batch: deque[LinkEvent] = deque()  # taken from it and not read yet
        self._taken_s = self._taken_at_s = 0.0  # when it was: the time of day, monotonic
        self._unsent: dict[str, bytes] = {}  # device -> its newest document
        # The device up to which all documents are published again, None: they are. Those of devices
        # that were ours among the servers `_republish_but` are not.
        self._republished_to: str | None = None
        self._republish_but: tuple[str, ...] = ()
        self._control: Control | None = None  # while this server has a lease
        self._servers: tuple[str, ...] = ()  # that share the devices
        self._sends_from_s = -math.inf  # on the monotonic clock
        # Device and kind -> when it came, and the newest message of a device of another server.
        self._foreign_messages: dict[tuple[str, str], tuple[float, Message]] = {}
        self._heard: dict[str, DeviceRow] = {}  # since the last round that was carried out
        self._is_connected = False
        self._republishes_at_birth = False
        self._down_since_s = 0.0
        self._away_since_s = -math.inf  # on the clock of `time.monotonic()`
        self._reconnected = False  # after a time in which devices were not heard
        self._unread: set[str] = set()  # devices whose report cannot be read, said once
        self._watch = Watch()

    def serve(self, stopped: threading.Event) -> None:
        """Work until `stopped` is set; RolloutError: the store, or another server took over."""
        with ExitStack() as stack:
            database = stack.enter_context(closing(self._fleet.open_store()))
            figures = ServerFigures(self._fleet, self._meters)
            tellers: list[MetricsListener | OtlpPush] = []
            if self._metrics is not None:
                tellers.append(MetricsListener(figures.read, self._metrics))
            if self._otlp is not None:
                tellers.append(OtlpPush(self._otlp, "tandem-fleet-server", figures.read))
            for teller in tellers:
                teller.start()
                stack.callback(teller.close)
            try:
                if (control := self._await_lease(database, stopped)) is not None:
                    self._work(database, control, stopped)
            finally:
                lease.release(database, self._holder)

    def _await_lease(self, database: Database, stopped: threading.Event) -> Control | None:
        """Wait until this server may work; None: stopped before."""
        warned = False
        while not stopped.is_set():
            if lease.is_free(database):
                with suppress(lease.LeaseLostError):  # another one was quicker
                    control = Control(database, self._holder, self._sign)
                    if database.dialect.shares:
                        check_folder(self._fleet.folder, database, len(control.servers))
                    return control
            if not warned:
                holders = ", ".join(row.holder for row in lease.read_leases(database))
                LOG.warning("stands by: %s has the lease", holders or "another server")
                warned = True
            stopped.wait(STANDBY_S)
        return None

    def _work(self, database: Database, control: Control, stopped: threading.Event) -> None:
        every = Topics("+")
        topics = (every.state, every.reported, every.beat, f"{SERVER_CLAIM}/+")
        subscriptions = tuple((topic, 1) for topic in topics)
        settings = self._fleet.link_settings(f"fleet-{self._holder[-8:]}", subscriptions, SERVER)
        guard = CopyGuard(
            self._own_claim(),
            partial(lease.lease_end, database),
            is_signed=is_signed(self._fleet.folder),
        )
        link = Link(settings, self._events.put, lambda _session: Will(guard.topic, b""))
        self._guard = guard
        try:
            link.start()
            self._down_since_s = time.monotonic()
            joined: Control | None = control
            while joined is not None and not stopped.is_set():
                self._meters.holds_lease = True
                try:
                    self._share(database, joined, link, stopped)
                except lease.LeaseLostError:
                    if not database.dialect.shares:
                        raise
                self._control, self._meters.holds_lease = None, False
                if not stopped.is_set():
                    LOG.warning("has left its devices to other servers, and comes back")
                    lease.release(database, self._holder)
                    self._await_broker(stopped)
                    joined = self._await_lease(database, stopped)
        finally:
            self._meters.holds_lease = False
            stopped.set()
            self._events.close()
            link.publish(guard.topic, b"", qos=1, retain=True, wait_s=1.0)
            link.close()
            for service in self._running:
                service.close()

    def _own_claim(self) -> Claim:
        folder, name = self._fleet.folder, self._fleet.file.name
        return Claim(
            fleet=fleet_id(folder, name),
            holder=self._holder,
            host=socket.gethostname(),
            folder=str(folder),
            since_s=time.time(),
            replaces=self._replaces,
        )

    def _share(
        self, database: Database, control: Control, link: Link, stopped: threading.Event
    ) -> None:
        """Work until `stopped` is set, or the broker is away and other servers are there."""
        self._control, self._servers, self._unsent = control, (), {}
        self._forget_foreign_messages(time.monotonic())
        self._rebalance(control)
        renewed_s = time.monotonic()
        # The others have noticed this one by then, and send nothing to its devices.
        self._sends_from_s = renewed_s + lease.LEASE_S if len(control.servers) > 1 else renewed_s
        LOG.info("serves the fleet %s", self._fleet.file.name)
        while not stopped.is_set() and not self._is_cut_off(control):
            self._round(control, link)
            asked_s = time.monotonic()
            if asked_s - renewed_s > lease.LEASE_S / 3:
                with control.write():
                    control.devices.save_beats()
                    # One server keeps it: all begin to listen anew when one comes or goes, and one
                    # that cannot hear leaves.
                    if self._is_connected and control.servers[0] == self._holder:
                        save_ear(database, self._watch.ear)
                        save_sample(database, self._watch.ear)
                renewed_s = asked_s
                self._forget_foreign_messages(asked_s)

    def _owns(self, device: str) -> bool:
        """Whether what a device asks is this server's to answer. Nothing is while a server on a
        copy may work, as after each reconnection."""
        is_alone = self._guard is None or self._guard.is_alone
        return is_alone and self._control is not None and self._control.owns(device)

    def _is_cut_off(self, control: Control) -> bool:
        is_away = not self._is_connected and len(control.servers) > 1
        return is_away and time.monotonic() - self._down_since_s > lease.LEASE_S

    def _await_broker(self, stopped: threading.Event) -> None:
        while not self._is_connected and not stopped.is_set():
            self._batch.extend(self._events.take(ROUND_S))
            while self._batch:
                if not isinstance(event := self._batch.popleft(), Message):
                    self._take_link(event)

    def _rebalance(self, control: Control) -> None:
        """Servers have come or gone: take what the devices said that are this one's now."""
        if len(control.servers) > 1 or self._servers:
            LOG.info("shares the fleet with %d other servers", len(control.servers) - 1)
        self._republish_but = self._servers if self._republished_to is None else ()
        self._republished_to, self._servers = "", control.servers
        voices = control.devices.voices
        self._heard = {
            name: row
            for name, row in self._heard.items()
            # Another server may have had the device meanwhile, and have heard more.
            if control.owns(name) and (name not in voices or voices[name].heard_s <= row.heard_s)
        }
        self._unsent = {name: sent for name, sent in self._unsent.items() if control.owns(name)}
        self._watch.begin(time.time())
        gained = [key for key in self._foreign_messages if control.owns(key[0])]
        control.devices.fetch({device for device, _kind in gained})
        for key in gained:
            _came_s, message = self._foreign_messages.pop(key)
            # Its server may have heard it: it proves as much as what the broker has retained.
            self._take_message(Message(message.topic, message.payload, True), control)

    def _forget_foreign_messages(self, now_s: float) -> None:
        for key, (came_s, _message) in list(self._foreign_messages.items()):
            if now_s - came_s < KEPT_S:
                return  # the oldest are first
            del self._foreign_messages[key]

    def _gather(self, control: Control, link: Link) -> int:
        """Take the events of a moment; return how many."""
        until_s = time.monotonic() + ROUND_S
        is_idle = not self._batch
        while is_idle and self._unsent and time.monotonic() < until_s:
            time.sleep(AGAIN_S)
            self._send(control, link)
            is_idle = not self._events.is_full()
        if not self._batch:
            self._batch.extend(self._events.take(until_s - time.monotonic()))
            self._taken_s, self._taken_at_s = time.time(), time.monotonic()
        number, until_s = 0, time.monotonic() + ROUND_S
        while self._batch and time.monotonic() < until_s:  # the lease is renewed between rounds
            self._take(self._batch.popleft(), control)
            number += 1
            if number % SEND_AFTER == 0:  # the connection has room again
                self._send(control, link)
        if not self._batch:  # under a flood, too, what came before was heard
            self._watch.caught_up(self._taken_s)
        return number

    def _round(self, control: Control, link: Link) -> None:
        """Gather events for a moment, carry them out, send what they ask for."""
        if self._servers and control.servers != self._servers:
            self._rebalance(control)
        self._servers = control.servers
        taken = self._gather(control, link)
        if not self._may_serve(control, link):
            return  # nobody can be heard: no device may count as late
        voices = control.devices.voices
        heard = (
            voice_of(self._heard[name]) if name in self._heard else voice
            for name, voice in voices.items()
        )
        silent, begun_s = self._watch.fallen_silent(heard), time.monotonic()
        known = set(control.decommissioned)
        for row in control.advance(self._heard, reconnected=self._reconnected, silent=silent):
            self._unsent[row.device] = row.document.encode()
        for device in filter(control.owns, control.decommissioned - known):
            self._unsent[device] = b""  # the broker forgets what it shall run
        self._heard, self._reconnected = {}, False
        self._meters.store.observe(time.monotonic() - begun_s)
        for sentence in self._watch.news(voices.values()):
            LOG.warning("%s", sentence)
        self._send(control, link)
        if taken:
            self._meters.delay.observe(time.monotonic() - self._taken_at_s, taken)

    def _may_serve(self, control: Control, link: Link) -> bool:
        """Say that this server works, and return whether it is connected and none on a copy of the
        fleet works; what devices ask for is answered from then on."""
        if self._guard is None or not self._is_connected:
            return self._is_connected
        now_s = time.monotonic()
        if now_s < control.leased_s + lease.LEASE_S:
            for topic, payload in self._guard.advance(now_s):
                link.publish(topic, payload, qos=1, retain=True)
        if self._guard.is_alone and not self._running:
            self._running = [make(self._fleet, self._owns) for make in self._services]
            for service in self._running:
                service.start()
        return self._guard.is_alone

    def _take(self, event: LinkEvent, control: Control) -> None:
        if not isinstance(event, Message):
            self._take_link(event)
        elif self._guard is not None and event.topic.startswith(SERVER_CLAIM):
            self._guard.take(event, time.monotonic())
        else:
            self._take_message(event, control)

    def _take_link(self, event: LinkUp | LinkDown) -> None:
        if isinstance(event, LinkUp):
            LOG.info("connected with MQTT %s", event.mqtt_version)
            self._is_connected = True
            self._watch.begin(time.time())
            # Without MQTT 5 it may be a cluster whose nodes keep retained messages each for itself:
            # a device at another node than ours gets only what is sent while it is there.
            self._republishes_at_birth = event.mqtt_version == "3.1.1"
            if self._guard is not None:
                now_s, gets_retained = time.monotonic(), event.mqtt_version != "3.1.1"
                self._guard.connect(now_s, gets_retained=gets_retained)
            self._reconnected |= time.monotonic() - self._away_since_s > AWAY_S
            # A broker may have lost what it retained: all is said again, which changes nothing.
            self._republished_to, self._republish_but, self._unsent = "", (), {}
            return
        LOG.warning("%s", event.reason)
        if self._is_connected:
            self._is_connected, self._away_since_s = False, time.monotonic()
            self._down_since_s = self._away_since_s

    def _take_message(self, message: Message, control: Control) -> None:
        device, _, kind = message.topic.removeprefix(f"{PREFIX}/").partition("/")
        if not message.payload or not _DEVICE.match(device):
            return
        if not control.owns(device):
            self._keep_foreign(device, kind, message)
            return
        row = self._heard.get(device) or control.devices.get(device)
        if row is None and device in control.decommissioned and not is_back(kind, message):
            return
        row = row or DeviceRow(device, 0.0, None, None, {})
        try:
            after = row_after(message, kind, row, self._reader, time.time())
        except (ValueError, TrustError) as error:
            self._meters.count("unreadable")
            if device not in self._unread:
                self._unread.add(device)
                LOG.warning("cannot read what %s says: %s", device, error)
            return
        if after is None:  # nobody has checked who signed it
            after = row
        else:
            self._unread.discard(device)
            self._meters.count(kind)
        self._apply(row, after, control)

    def _apply(self, row: DeviceRow, after: DeviceRow, control: Control) -> None:
        """Take over what a message changed: news with the round, signs of life with the lease."""
        device = row.id
        is_heard = after.heard_s != row.heard_s
        is_heard_again = (is_heard or device not in control.devices.voices) and self._watch.take(
            device, after.beat_s
        )
        says_news = (after.state, after.reported) != (row.state, row.reported)
        if self._republishes_at_birth and is_birth(row.state, after.state):
            desired = control.document_of(device)
            if desired is not None:
                self._unsent[device] = desired.document.encode()
        if says_news or is_heard_again or device in self._heard:
            self._heard[device] = after
        elif after != row:  # it lives: kept with the lease
            control.devices[device] = after

    def _keep_foreign(self, device: str, kind: str, message: Message) -> None:
        """Keep what a device of another server says now, until that server is sure to live."""
        if not message.retained:
            self._foreign_messages.pop((device, kind), None)
            self._foreign_messages[device, kind] = time.monotonic(), message

    def _send(self, control: Control, link: Link) -> None:
        """Publish documents as far as the connection takes them, while the lease is certain."""
        if self._guard is not None and not self._guard.is_alone:
            return
        while self._is_sending(control):
            for device, payload in list(islice(self._unsent.items(), SENT_AT_ONCE)):
                if not self._sends_from_s <= time.monotonic() < control.leased_s + lease.LEASE_S:
                    return
                if not link.publish(Topics(device).desired, payload, qos=1, retain=True):
                    return  # down, or its queue is full: later
                del self._unsent[device]

    def _is_sending(self, control: Control) -> bool:
        """Whether something is to be sent; after all that is new, more of what is said again."""
        if control.is_reloaded:
            control.is_reloaded = False
            self._republished_to, self._republish_but = "", ()
        if not self._unsent and self._republished_to is not None:
            rows = control.documents_after(self._republished_to)
            documents = {row.device: row.document.encode() for row in rows}
            if not self._republished_to:
                documents |= dict.fromkeys(control.decommissioned, b"")
            self._unsent = {
                device: payload
                for device, payload in documents.items()
                if control.owns(device) and not control.owned(device, self._republish_but)
            }
            self._republished_to = rows[-1].device if rows else None
        return bool(self._unsent)
