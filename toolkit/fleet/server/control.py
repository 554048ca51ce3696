"""The rollouts of a fleet in memory and in the store, which change together.

One round takes what devices reported and what operators ordered, asks the machine, and keeps
events, new documents and how far the log was carried out in one transaction. Only then is anything
sent: after a kill at any moment the next server begins with what was kept, and sends it again.

Several servers share the devices. Each takes the reports of its own, and the events of all by the
log: the machine is pure, so all have the same states. Whoever is first to see what is to be done
keeps it, and a device's own server sends it.
"""

import datetime as dt
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain

import msgspec
from msgspec.structs import replace

from device.protocol.documents import DOCUMENT_FORMAT, Desired, ReleaseSpec, encode
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.liveness import ListeningPeriod
from toolkit.fleet.rollout.machine import due_s, step
from toolkit.fleet.rollout.policy import going_back
from toolkit.fleet.rollout.reports import event_of, request_of
from toolkit.fleet.rollout.routing import may_join, owners, taken_over
from toolkit.fleet.rollout.targets import unfit
from toolkit.fleet.server.device_cache import MAX_ROWS, DeviceCache
from toolkit.fleet.store import lease, log, rollouts
from toolkit.fleet.store.changes import touch
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.devices import (
    DeviceRow,
    is_heard,
    load_decommissioned,
    load_labels,
    readmit,
    save_devices,
)
from toolkit.fleet.store.rollouts import DesiredRow

DesiredSigner = Callable[[Sequence[Desired]], list[bytes]]  # a payload for each document
SERVER = "server"
COMMAND = "command"  # kind of the log's rows that say that a device was given a command
DECOMMISSION = "decommission"  # kind of the log's rows that say that a device left the fleet
ENROL = (
    "enrol"  # kind of the log's rows that say that a board may enrol under the id of one that left
)
LABEL = "label"  # kind of the log's rows that say that labels have changed
DOCUMENT = "desired"
_ROUTING = frozenset({v.Started, v.Joined, v.Begun})  # change which rollout has a device
EXPIRES_S = 30 * 86400.0  # documents are renewed when half of it is over


def encode_all(documents: Sequence[Desired]) -> list[bytes]:
    """Return desired documents as they are published on a bench: nothing is signed."""
    return [encode(document) for document in documents]


@dataclass(slots=True)
class _Round:
    """What one round has changed, before it is kept. `before`: the states as other servers have
    kept them; `sent_to`: devices that they have made documents for."""

    states: dict[int, v.RolloutState]
    before: dict[int, v.RolloutState] = field(default_factory=dict)
    sent_to: set[str] = field(default_factory=set)
    events: dict[int, list[v.Event]] = field(default_factory=dict)
    actions: list[tuple[int, v.Action]] = field(default_factory=list)


class Control:
    """The rollouts of one fleet. One thread uses it, and holds a lease.

    `servers`: that share the fleet; `leased_s`: when the lease was last renewed, on the monotonic
    clock; `is_reloaded`: documents may be new that no round has returned; who sends them sets it
    back.
    """

    def __init__(self, database: Database, holder: str, sign: DesiredSigner = encode_all) -> None:
        """Read the store, then take a lease, as reading may take longer than one lasts. `sign`
        makes the payloads of a round's desired documents. LeaseLostError: another server has the
        only one."""
        self._database = database
        self._holder = holder
        self._sign = sign
        self._quiet: dict[int, tuple[v.RolloutState, float]] = {}
        self.servers: tuple[str, ...] = ()
        self._known_owners: tuple[tuple[str, ...], dict[str, bool]] = ((), {})
        self.is_reloaded = False
        self._renews_s = -math.inf  # before then no document is to be renewed
        with database.snapshot():
            self._load()
        lease.acquire(database, holder)
        with self.write():
            pass

    @property
    def states(self) -> Mapping[int, v.RolloutState]:
        """The state of each rollout."""
        return self._states

    def advance(
        self,
        changed: Mapping[str, DeviceRow],
        *,
        reconnected: bool = False,
        silent: Set[str] = frozenset(),
    ) -> list[DesiredRow]:
        """Do a round; return the documents that are new. `changed`: devices that were heard;
        `reconnected`: the server heard nobody for a while, and does now; where no other one heard
        the devices either, all waits begin anew; `silent`: devices that fell silent since the last
        round.

        RolloutError: the store cannot be used, or another server has the lease.
        """
        if not (changed or reconnected or silent or self._is_due(self._database.now_s())):
            return []
        with self.write():
            at_s = self._database.now_s()  # no earlier than what another server has kept
            departed = set(self.decommissioned)
            this, rows = self._follow()
            self._take_orders(this, rows)
            # What a device said before it left does not bring it back.
            departed = self.decommissioned - departed
            changed = {
                name: row
                for name, row in changed.items()
                if name not in departed and self.owns(name)
            }
            silent = {device for device in silent if self.owns(device)}
            if reconnected and not is_heard(self._database):
                self._begin_waits_anew(this, at_s)
            self._take_reports(this, changed.values(), at_s)
            self._take_silence(this, silent, at_s)
            self._begin_scheduled(this, changed, at_s)
            self._tick(this, at_s)
            documents = self._documents(this, at_s)
            documents += self._renewed(at_s, but={row.device for row in documents})
            self._keep(this, changed, documents, at_s)
            touch(self._database, sorted(silent))
            others = this.sent_to - {row.device for row in documents}
            theirs = rollouts.find_desired(self._database, tuple(filter(self.owns, others)))
        self._states = this.states
        self.devices.take_saved(changed.values())
        return [*(row for row in documents if self.owns(row.device)), *theirs.values()]

    def documents_after(self, device: str) -> list[DesiredRow]:
        """Return the next documents by the ids of their devices; none after the last."""
        return rollouts.desired_page(self._database, device)

    def document_of(self, device: str) -> DesiredRow | None:
        """Return the document of a device."""
        return rollouts.find_desired(self._database, (device,)).get(device)

    @contextmanager
    def write(self) -> Iterator[None]:
        """A write transaction under the lease, which is renewed at its end; the devices are shared
        anew if a server has come or gone."""
        with self._database.write():
            servers = lease.check(self._database, self._holder)
            if servers != self.servers:
                before = self.devices if self.servers else None
                if before is not None:
                    before.save_beats()
                self.servers = servers
                self._load_devices()
                if before is not None:
                    self.devices.inherit(before)
            yield
            leased_s = time.monotonic()
            lease.renew(self._database, self._holder)
        self.leased_s = leased_s

    def owns(self, device: str) -> bool:
        """Whether a device is this server's; asked often, and by several threads."""
        servers, known = self._known_owners
        if servers is not self.servers or len(known) > MAX_ROWS:
            servers, known = self._known_owners = (self.servers, {})
        is_own = known.get(device)
        if is_own is None:
            is_own = known[device] = self.owned(device, servers)
        return is_own

    def owned(self, device: str, servers: Sequence[str]) -> bool:
        """Whether a device is this server's where some servers share them."""
        return bool(servers) and owner_of(servers, device) == self._holder

    # -- reading the store

    def _load(self) -> None:
        """Read all, as of what was carried out."""
        self._applied = rollouts.applied(self._database)
        self._head: tuple[int, str] | None = None  # number and hash of the last row of the log
        self._specs = rollouts.load_specs(self._database)
        self._states = self._replay()
        self._owners = owners(self._states)
        self._releases = rollouts.load_releases(self._database)
        self._labels = load_labels(self._database)

    def _load_devices(self) -> None:
        self.devices = DeviceCache(self._database, self.owns)
        self.decommissioned = load_decommissioned(self._database)

    def _replay(self) -> dict[int, v.RolloutState]:
        """Return the states as of what was carried out: later rows are taken as new ones."""
        return {
            number: rollouts.load_state(self._database, number, spec, self._applied)
            for number, spec in self._specs.items()
        }

    def _is_due(self, at_s: float) -> bool:
        """Whether a round would do something although no device was heard."""
        if any(map(lease.is_gone, self.servers)) or log.head(self._database)[0] != self._applied:
            return True
        if not self._renews_later(at_s):
            first_s = rollouts.first_expiry(self._database)
            if first_s < _renewed_until(at_s):
                return True
            self._renews_s = min(first_s, at_s + EXPIRES_S) - EXPIRES_S / 2
        return any(self._is_tick_due(number, at_s) for number in self._states)

    def _renews_later(self, at_s: float) -> bool:
        """Whether no document is to be renewed yet; asked again where the clock went back."""
        return self._renews_s - EXPIRES_S / 2 <= at_s < self._renews_s

    def _is_tick_due(self, number: int, at_s: float) -> bool:
        """Whether time alone changes a rollout now; until when it does not is remembered."""
        state = self._states[number]
        known, until_s = self._quiet.get(number, (None, 0.0))
        if not _is_open(state) or (known is state and at_s < until_s):
            return False
        if step(self._specs[number], state, [v.Tick(at_s=at_s)]) != (state, ()):
            return True
        self._quiet[number] = state, due_s(self._specs[number], state)
        return False

    # -- one round, inside its transaction

    def _follow(self) -> tuple[_Round, Iterator[log.LogRow]]:
        """Begin a round with what other servers have carried out since the last one; return also
        the later rows of the log."""
        carried, rows = rollouts.applied(self._database), self._later_rows()
        row = next(rows, None)
        if carried > self._applied and (row is None or row.seq != self._applied + 1):
            # They were archived meanwhile, and with them what was sent.
            self._load()
            self.devices.save_beats()
            self._load_devices()
            self.is_reloaded = True
            this = _Round(dict(self._states), dict(self._states))
            return this, self._later_rows()
        events: dict[int, list[v.Event]] = {}
        this = _Round(dict(self._states))
        while row is not None and row.seq <= carried:
            if row.kind == log.EVENT:
                events.setdefault(row.rollout, []).append(v.EVENTS.decode(row.body))
            elif row.kind == DOCUMENT:
                this.sent_to.add(msgspec.json.decode(row.body)["device"])
            elif row.kind == LABEL:
                self._take_label(row)
            elif row.kind == DECOMMISSION:
                self._forget(msgspec.json.decode(row.body)["device"])
            row = next(rows, None)
        self._meet(events)
        for number, batch in events.items():
            self._apply(this, number, batch)
            if not _ROUTING.isdisjoint(map(type, batch)) or _waits(self._states, number):
                self._owners = owners(this.states)
        this.actions.clear()  # their documents are made
        this.before = dict(this.states)
        self._applied = max(self._applied, carried)
        return this, rows if row is None else chain((row,), rows)

    def _later_rows(self) -> Iterator[log.LogRow]:
        """Yield the rows of the log after those that were carried out."""
        for row in log.rows_after(self._database, self._applied):
            self._head = row.seq, row.hash
            yield row

    def _meet(self, numbers: Iterable[int]) -> None:
        """Read the rollouts that are new, and the releases, which come with rollouts alone."""
        if not self._specs.keys() >= set(numbers):
            self._specs.update(rollouts.load_specs(self._database, max(self._specs, default=0)))
            self._releases = rollouts.load_releases(self._database)

    def _take_orders(self, this: _Round, rows: Iterable[log.LogRow]) -> None:
        """Take what operators have put into the log, and no server has carried out."""
        for row in rows:
            if row.kind == LABEL:
                self._take_label(row)
            if row.kind == DECOMMISSION:
                self._decommission(this, msgspec.json.decode(row.body)["device"], row.at_s)
            if row.kind == log.EVENT:
                event = v.EVENTS.decode(row.body)
                self._meet([row.rollout])
                self._apply(this, row.rollout, [event])
                if isinstance(event, v.Started) and not this.states[row.rollout].waits:
                    devices = [member.device for member in event.members]
                    self._take_over(this, row.rollout, devices, event.at_s)

    def _take_label(self, row: log.LogRow) -> None:
        body = msgspec.json.decode(row.body)
        self._labels[body["device"]] = body["labels"]

    def _forget(self, device: str) -> None:
        self.devices.pop(device, None)
        self._owners.pop(device, None)
        self._labels.pop(device, None)
        self.decommissioned.add(device)

    def _decommission(self, this: _Round, device: str, at_s: float) -> None:
        """A device has left the fleet: nothing is sent to it, and no rollout waits for it."""
        self._forget(device)
        for number, state in list(this.states.items()):
            known = state.devices.get(device)
            if known is not None and known.phase not in v.GONE:
                self._note(this, number, [v.Decommissioned(at_s=at_s, devices=(device,))])

    def _begin_waits_anew(self, this: _Round, at_s: float) -> None:
        for number, state in list(this.states.items()):
            if _is_open(state):
                self._note(this, number, [v.Reconnected(at_s=at_s)])

    def _apply(self, this: _Round, number: int, events: list[v.Event]) -> None:
        state = this.states.get(number, v.RolloutState())
        this.states[number], actions = step(self._specs[number], state, events)
        this.actions += [(number, action) for action in actions]

    def _note(self, this: _Round, number: int, events: list[v.Event]) -> None:
        """Apply events of the server's own, which the log does not have yet."""
        self._apply(this, number, events)
        this.events.setdefault(number, []).extend(events)

    def _take_over(self, this: _Round, number: int, devices: Iterable[str], at_s: float) -> None:
        devices = tuple(devices)
        for older, event in taken_over(this.states, number, devices, at_s).items():
            self._note(this, older, [event])
        self._owners.update(dict.fromkeys(devices, number))

    def _take_reports(self, this: _Round, rows: Iterable[DeviceRow], at_s: float) -> None:
        events: dict[int, list[v.Event]] = {}
        joined: dict[int, list[str]] = {}
        for heard in rows:
            labels = self._labels.get(heard.id, {})
            row = heard if heard.labels == labels else replace(heard, labels=labels)
            if row.reported is None:
                continue
            owner = self._owners.get(row.id)
            if owner is not None:
                state = this.states[owner]
                event = event_of(
                    self._specs[owner], state, owner, row.id, reported=row.reported, at_s=at_s
                )
                if event is not None:
                    events.setdefault(owner, []).append(event)
            number = self._joins(this, row, owner)
            if number is not None:
                event = v.Joined(at_s=at_s, device=row.id, previous=self._previous(row))
                events.setdefault(number, []).append(event)
                joined.setdefault(number, []).append(row.id)
        for number, taken in events.items():
            self._note(this, number, taken)
        for number, devices in joined.items():
            self._take_over(this, number, devices, at_s)

    def _take_silence(self, this: _Round, silent: Set[str], at_s: float) -> None:
        """Tell each rollout which of its live devices fell silent, as one event."""
        for number, state in list(this.states.items()):
            lost = tuple(
                device
                for device in sorted(silent)
                if self._owners.get(device) == number and state.devices[device].phase == "live"
            )
            if lost and state.status not in v.ENDED:
                heard_s = min(self.devices[device].heard_s for device in lost)
                self._note(this, number, [v.Silent(at_s=at_s, devices=lost, heard_s=heard_s)])

    def _joins(self, this: _Round, row: DeviceRow, owner: int | None) -> int | None:
        """Return the newest rollout that a device enters late, None if there is none."""
        for number in sorted(this.states, reverse=True):
            if owner is not None and number <= owner:
                return None
            spec, state = self._specs[number], this.states[number]
            if not may_join(number, spec, state, row.id, owner):
                continue
            target = row.target(ListeningPeriod(row.heard_s, row.heard_s))
            if target is not None and not unfit(target, spec.release, spec.requires):
                return number
        return None

    def _previous(self, row: DeviceRow) -> str:
        running = None if row.reported is None else row.reported.running
        return running.sha256 if running and running.sha256 in self._releases else ""

    def _begin_scheduled(self, this: _Round, changed: Mapping[str, DeviceRow], at_s: float) -> None:
        """Rollouts whose time has come take their devices from the older ones."""
        for number, state in list(this.states.items()):
            is_open = state.status in ("running", "scheduled")
            if not (state.waits and is_open and at_s >= self._specs[number].start_s):
                continue
            pending = {name: row for name, row in state.devices.items() if row.phase == "pending"}
            runs = {name: sha256 if sha256 in self._releases else "" for name, sha256 in
                self._database.rows("SELECT id, running FROM devices")}  # fmt: skip
            runs |= {name: self._previous(row) for name, row in changed.items()}
            changed_runs = {
                name: runs[name]
                for name, row in pending.items()
                if name in runs and runs[name] != row.previous
            }
            if changed_runs and self._specs[number].agent is None:  # an agent knows the one before
                self._note(this, number, [v.Begun(at_s=at_s, previous=changed_runs)])
            self._take_over(this, number, pending, at_s)

    def _tick(self, this: _Round, at_s: float) -> None:
        """Let time pass; ticks that change nothing are not noted."""
        for number, state in list(this.states.items()):
            if _is_open(state):
                tick = v.Tick(at_s=at_s)
                after, actions = step(self._specs[number], state, [tick])
                if after != state or actions:
                    this.states[number] = after
                    this.actions += [(number, action) for action in actions]
                    this.events.setdefault(number, []).append(tick)

    def _documents(self, this: _Round, at_s: float) -> list[DesiredRow]:
        """Return a document for each device that something is sent to: its last action counts."""
        last = {action.device: (number, action) for number, action in this.actions}
        known = rollouts.find_desired(self._database, tuple(last))
        return self._signed(
            [
                self._draft(number, action, known.get(device), at_s)
                for device, (number, action) in last.items()
            ]
        )

    def _renewed(self, at_s: float, but: Set[str]) -> list[DesiredRow]:
        """Return documents that would expire, anew: the device runs what it ran. `but`: devices
        that something else is sent to."""
        if self._renews_later(at_s):
            return []
        return self._signed(
            [
                self._draft(
                    row.rollout,
                    v.Revert(device=row.device, sha256=row.sha256)
                    if row.undo
                    else v.Send(device=row.device),
                    row,
                    at_s,
                )
                for row in rollouts.expiring(self._database, _renewed_until(at_s))
                if row.device not in but
            ]
        )

    def _signed(self, drafts: Sequence[tuple[DesiredRow, Desired]]) -> list[DesiredRow]:
        """Sign the documents of a round together: the key is read once."""
        if not drafts:
            return []
        payloads = self._sign([desired for _row, desired in drafts])
        return [
            replace(row, document=payload.decode())
            for (row, _desired), payload in zip(drafts, payloads, strict=True)
        ]

    def _draft(
        self, number: int, action: v.Action, last: DesiredRow | None, at_s: float
    ) -> tuple[DesiredRow, Desired]:
        """Return the row of an action without its payload, and the document to be signed, with a
        counter above all that the device has seen; `last`: the document that it has.

        Counters begin at the time in ms, as those of one-off deployments do, so that they also rise
        after a store was lost.
        """
        spec, undo = self._specs[number], isinstance(action, v.Revert)
        release: ReleaseSpec = spec.release
        leave = undo and spec.agent is not None  # the device has the version before
        if isinstance(action, v.Revert) and not leave:
            release = self._releases[action.sha256][0]
        counter = max(int(at_s * 1000), 0 if last is None else last.counter + 1)
        expires_s = at_s + EXPIRES_S
        desired = Desired(
            format=DOCUMENT_FORMAT,
            request=request_of(spec, number, undo=undo),
            release=release,
            retry=spec.retry or undo,
            device=action.device,
            counter=counter,
            expires=dt.datetime.fromtimestamp(int(expires_s), dt.timezone.utc).isoformat(),
            policy=going_back(spec.policy) if undo else spec.policy,
            leave=leave,
        )
        sha256 = release.blob.sha256
        row = DesiredRow(action.device, counter, number, undo, sha256, expires_s, document="")
        return row, desired

    def _keep(
        self,
        this: _Round,
        changed: Mapping[str, DeviceRow],
        documents: list[DesiredRow],
        at_s: float,
    ) -> None:
        database = self._database
        notes = [
            rollouts.event_note(event, number, SERVER)
            for number, events in this.events.items()
            for event in events
        ]
        notes += [
            log.Note(SERVER, DOCUMENT, _sent_text(row), row.rollout, (row.device,))
            for row in documents
        ]
        self._head = log.append(database, notes, at_s, self._head)
        self._applied = self._head[0]
        rollouts.set_applied(database, self._applied)
        rollouts.save_desired(database, documents)
        save_devices(database, changed.values())
        back = self.decommissioned & changed.keys()
        readmit(database, back)
        self.decommissioned -= back
        # A newer rollout takes devices from older ones, so the older ones are first.
        for number, state in sorted(this.states.items()):
            before = this.before.get(number, v.RolloutState())
            if before is not state:
                rollouts.keep_state(database, number, before, state)
                if _is_open(before) and not _is_open(state):
                    rollouts.save_snapshot(database, number, self._applied, state)


def _waits(states: Mapping[int, v.RolloutState], number: int) -> bool:
    return number in states and states[number].waits


def _renewed_until(at_s: float) -> float:
    """Return the end of documents that are renewed now."""
    return at_s + EXPIRES_S / 2


def _is_open(state: v.RolloutState) -> bool:
    """Whether time alone may change a rollout."""
    return state.status not in v.ENDED or any(group.open for group in state.groups)


def _sent_text(row: DesiredRow) -> str:
    values = {"device": row.device, "counter": row.counter, "sha256": row.sha256, "undo": row.undo}
    return msgspec.json.encode(values).decode()


def owner_of(servers: Sequence[str], device: str) -> str:
    """Return the server that has a device, by rendezvous hashing over those that live.

    When a server comes or goes, the devices that it gets or had change hands, and no others.
    """
    if len(servers) == 1:
        return servers[0]
    return max(servers, key=lambda server: blake2b(f"{server}/{device}".encode()).digest())
