"""A run of a farm: leases in the fleet's store, signed commands and the kit over MQTT.

It does what `toolkit.fleet.farm.machine` decides. A job is the command `job` of a device: signed
by the director's key, with a counter and an expiry, and taken back by clearing its topic.
"""

import base64
import binascii
import contextlib
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from device.errors import TandemError
from device.protocol.documents import (
    BlobGet,
    BlobSpec,
    Command,
    CommandState,
    StateDocument,
    decode,
)
from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkUp, Message, queue_putter
from device.protocol.topics import Topics
from device.selftest.job import work_sha256
from toolkit.errors import FleetError
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.library import Library
from toolkit.fleet.farm import values as v
from toolkit.fleet.farm.machine import due_s, is_over, step, table
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.rollout.targets import Target, fulfils, parse_requirements
from toolkit.fleet.server.chunks import ChunkServer
from toolkit.fleet.server.commands import CONNECT_S, FINAL, make_command, payload_of
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.device_queries import load_targets
from toolkit.fleet.store.devices import load_ear
from toolkit.fleet.store.lease import lease_board, release_board

OPERATION = "job"
LABEL = "label.farm=yes"
BOARD_LEASE_S = 30.0  # a run that was killed leaves its boards to others so much later
RENEW_S = 10.0
FETCH_S = 180.0  # of a kit and the start of a job, beside its minutes
MAX_EVENTS = 4096
MAX_REPORT_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class Work:
    """A task as a board is asked for it: these items of the kit, by these steps of a selftest.

    `read`: the times in the bytes of a board's report; TandemError if they are not all there.
    """

    task: v.Task
    steps: tuple[str, ...]
    items: tuple[str, ...]
    read: Callable[[str, bytes], v.Times]


def boards_for(database: Database, requires: str) -> tuple[Target, ...]:
    """Return the boards of the farm that fulfil requirements and are online.

    Raises TandemError: there is none, or the requirements are none.
    """
    requirements = parse_requirements(",".join(filter(None, (LABEL, requires))))
    fit = [
        target
        for target in load_targets(database, load_ear(database))
        if fulfils(target, requirements)
    ]
    boards = tuple(one for one in fit if one.online)
    if not boards:
        away = f"{len(fit)} that fulfil it are not online" if fit else "none fulfils it"
        raise FleetError(
            f"no board of the farm can measure for {requires or 'anybody'!r}: {away}; boards of a "
            'farm have farm = "yes" in [labels] of agent.toml'
        )
    return boards


class Run:
    """One run; `messages`: those that it sent and took, without chunks of the kit."""

    def __init__(
        self,
        fleet: Fleet,
        database: Database,
        kit: Path,
        works: Sequence[Work],
        *,
        minutes: float,
        who: str,
        rules: v.Rules | None = None,
    ) -> None:
        """`kit`: one file; `minutes`: that a job may take. `rules`: without the lease."""
        self._fleet, self._database = fleet, database
        self._works = {work.task.name: work for work in works}
        self._minutes, self._who = minutes, who
        rules = rules or v.Rules(lease_s=60.0 * minutes + FETCH_S)
        self._farm = v.make_farm([work.task for work in works], rules)
        self._kit = kit
        self._holder = f"farm-{secrets.token_hex(4)}"
        self._state = v.State()
        self._commands: dict[str, tuple[v.Job, Command]] = {}  # by topic
        self._renew_s = 0.0
        self.messages = 0

    def measure(
        self, boards: Sequence[str], report: Callable[[int, int], None] = lambda *_: None
    ) -> v.Table:
        """Have boards do the work; `report` takes how many tasks are done, of how many.

        Raises TandemError: the broker or the kit cannot be used, or no board gave anything.
        """
        events: queue.Queue[LinkEvent] = queue.Queue(MAX_EVENTS)
        ended = threading.Event()
        topics = [
            topic
            for one in map(Topics, boards)
            for topic in (one.state, one.blob_get, one.command(OPERATION, "+"))
        ]
        settings = self._fleet.link_settings(self._holder, tuple((topic, 1) for topic in topics))
        blob = Blob(self._kit)
        link = Link(settings, queue_putter(events, ended))
        chunks = ChunkServer(Library(opened=(blob,)), link.publish_bulk)
        link.start()
        try:
            self._await_link(events)
            for board in boards:
                self._step(link, blob.spec, v.Joined(board))
            while not is_over(self._farm, self._state):
                report(self._done, len(self._works))
                self._renew()
                if chunks.pending:
                    chunks.send_next()
                with contextlib.suppress(queue.Empty):
                    event = events.get(timeout=0.0 if chunks.pending else self._wait_s())
                    self._on_event(link, blob.spec, chunks, event)
                self._step(link, blob.spec, v.Tick())
        finally:
            for topic, (job, _) in list(self._commands.items()):
                link.publish(topic, b"", qos=1, retain=True, wait_s=1.0)
                release_board(self._database, job.board, self._holder)
            ended.set()
            link.close()
            blob.close()
        result = table(self._farm, self._state)
        if not result.rows:
            raise FleetError(f"the farm measured nothing: {_why(result)}")
        return result

    @property
    def _done(self) -> int:
        judged = self._state.judged
        return sum(not boards for boards in judged.lacking.values())

    def _await_link(self, events: "queue.Queue[LinkEvent]") -> None:
        reason = f"no answer within {CONNECT_S:g} s"
        until_s = time.monotonic() + CONNECT_S
        while (left_s := until_s - time.monotonic()) > 0.0:
            with contextlib.suppress(queue.Empty):
                event = events.get(timeout=left_s)
                if isinstance(event, LinkUp):
                    return
                reason = event.reason if isinstance(event, LinkDown) else reason
        raise FleetError(f"the broker cannot be reached: {reason}")

    def _wait_s(self) -> float:
        now_s = time.monotonic()
        due = due_s(self._state)
        return max(0.0, min(self._renew_s, now_s + 1.0 if due is None else due) - now_s)

    def _renew(self) -> None:
        if time.monotonic() < self._renew_s:
            return
        self._renew_s = time.monotonic() + RENEW_S
        for job, _ in self._commands.values():
            lease_board(self._database, job.board, self._holder, BOARD_LEASE_S)

    # -- what comes

    def _on_event(self, link: Link, kit: BlobSpec, chunks: ChunkServer, event: LinkEvent) -> None:
        if isinstance(event, LinkDown):
            chunks.forget()
        if not isinstance(event, Message) or not event.payload:
            return
        if event.topic.endswith("/blob/get"):
            with contextlib.suppress(ValueError):
                if decode(event.payload, BlobGet).sha256 == kit.sha256:
                    chunks.on_message(event)
            return
        self.messages += 1
        with contextlib.suppress(ValueError):  # our own commands come back, too
            if event.topic.endswith("/state"):
                state = decode(event.payload, StateDocument).state
                if state != "online":
                    board = event.topic.split("/")[-2]
                    self._step(link, kit, v.Lost(board, f"its agent is {state}"))
            elif event.topic in self._commands:
                command_state = decode(event.payload, CommandState)
                if command_state.status in FINAL:
                    job, command = self._commands[event.topic]
                    self._step(link, kit, self._answer(job, command, command_state))

    def _answer(self, job: v.Job, command: Command, command_state: CommandState) -> v.Event:
        """Return what a board's answer means; it is checked against what was asked."""
        if command_state.status == "failed":
            return v.Failed(job.number, command_state.reason[:500], board=command_state.refused)
        work = self._works[job.task]
        if command_state.result.get("work") != _digest(command, work):
            return v.Failed(job.number, "it answered with the result of another job", board=True)
        try:
            encoded = str(command_state.result.get("report", ""))
            if len(encoded) > MAX_REPORT_BYTES:
                raise FleetError(f"its report has {len(encoded)} bytes in base64")
            report = base64.b64decode(encoded, validate=True)
            return v.Measured(job.number, work.read(job.board, report))
        except (TandemError, binascii.Error) as error:
            return v.Failed(job.number, str(error)[:500], board=False)

    # -- what is done

    def _step(self, link: Link, kit: BlobSpec, event: v.Event) -> None:
        events = deque[v.Event]((event,))
        while events:
            now_s = time.monotonic()
            self._state, effects = step(self._farm, self._state, events.popleft(), now_s)
            for effect in effects:
                if isinstance(effect, v.Release):
                    self._release(link, effect.board)
            for effect in effects:
                if isinstance(effect, v.Job) and not self._give(link, kit, effect):
                    events.append(v.Busy(effect.number))

    def _release(self, link: Link, board: str) -> None:
        """Clear a board's command, which ends a job that still runs, and give its lease back."""
        for topic in [t for t, (job, _) in self._commands.items() if job.board == board]:
            del self._commands[topic]
            self.messages += 1
            link.publish(topic, b"", qos=1, retain=True)
        release_board(self._database, board, self._holder)

    def _give(self, link: Link, kit: BlobSpec, job: v.Job) -> bool:
        """Lease a board and publish its job; False: another run has it, or the broker is away."""
        if not lease_board(self._database, job.board, self._holder, BOARD_LEASE_S):
            return False
        work = self._works[job.task]
        arguments = {
            "kit": kit.sha256, "bytes": kit.bytes, "chunk_bytes": kit.chunk_bytes,
            "index": kit.index_sha256, "chunk_format": kit.chunk_format,
            "steps": ",".join(work.steps), "items": ",".join(work.items),
            "minutes": self._minutes,
        }  # fmt: skip
        command = make_command(
            self._database, job.board, OPERATION,
            [f"{key}={value}" for key, value in arguments.items()],
            expires_s=max(1.0, job.until_s - time.monotonic()), who=self._who,
        )  # fmt: skip
        topic = Topics(job.board).command(OPERATION, command.id)
        self._commands[topic] = job, command
        self.messages += 1
        if link.publish(topic, payload_of(self._fleet, command), qos=1, retain=True):
            return True
        self._release(link, job.board)
        return False


def _digest(command: Command, work: Work) -> str:
    return work_sha256(str(command.arguments["kit"]), work.steps, work.items)


def _why(result: v.Table) -> str:
    reasons: Mapping[str, str] = {**result.out, **result.reasons}
    return "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:5])
