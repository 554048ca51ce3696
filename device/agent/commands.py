"""Commands over MQTT: each is checked, written down, executed once, and answered in its place.

A command is a retained document at cmd/OP/ID with the status `init`. The agent replaces it by
`executing`, then `successful` or `failed` with a reason; whoever asked clears the topic. What is
not signed (but with dev = true), expired, for another device, or not newer than the last command
is not executed. Commands run one at a time, in the order of their counters.
"""

import logging
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone

import msgspec

from device.agent.command_journal import CommandJournal, boot_id
from device.agent.config import CommandsTable
from device.agent.farm_job import FarmJob
from device.agent.operations import (
    MAX_RESULT_BYTES,
    OPERATIONS,
    Board,
    Child,
    Denied,
    Done,
    Job,
    run_operation,
)
from device.agent.task_process import TaskEnded, start_task
from device.agent.verification import Verification, VerificationEvent
from device.errors import StateError
from device.protocol.documents import Command, CommandState, CommandStatus, decode, encode
from device.protocol.signed import open_command
from device.protocol.topics import Topics
from device.trust.exchange import Refused, Trusted, Unverified, Verdict

LOG = logging.getLogger("tandem.agent")
GATHER_S = 0.3  # retained commands arrive in the order of their topics: the oldest goes first
MAX_WAITING = 16
MAX_COMMAND_BYTES = 64 * 1024
MAX_FINISHED = 64  # that are remembered: what we publish comes back
REBOOT_S = 300.0
REBOOT = "reboot"
UNSIGNED = (
    "the command is not signed and this device takes only signed ones: give it with `tandem fleet "
    "device run` from a fleet that has keys, or set dev = true in agent.toml of a board on a bench"
)
INTERRUPTED = "the agent ended while it executed the command, which it does not do twice"


@dataclass(frozen=True, slots=True)
class CommandCheck:
    """An event of the child that checks a command's signatures."""

    event: VerificationEvent


CommandEvent = CommandCheck | TaskEnded


class _Status(msgspec.Struct, frozen=True, kw_only=True):
    """What all documents of a command have."""

    status: CommandStatus


@dataclass(frozen=True, slots=True)
class _PendingCommand:
    """A command that waits or is executed."""

    command: Command
    payload: bytes
    signed: bool
    arrived_s: float


class Commands:
    """The commands of one device. One thread uses it; times are of a steady clock."""

    def __init__(
        self,
        table: CommandsTable,
        topics: Topics,
        board: Board,
        *,
        dev: bool,
        journal: CommandJournal,
        verification: Verification,
        put: Callable[[CommandEvent], None],
        send: Callable[[str, bytes], bool],
        job: FarmJob,
    ) -> None:
        """`send` publishes a retained message; False: the connection does not take it now. `job`:
        the one of a farm."""
        self._table = table
        self._topics = topics
        self._board = board
        self._dev = dev
        self._journal = journal
        self._verification = verification
        self._put = put
        self._send = send
        self.job = job
        self._waiting: dict[str, _PendingCommand] = {}  # by topic
        self._current: _PendingCommand | None = None
        self._checking = False  # the signatures of the current one are being checked
        self._end_task: Callable[[], None] = lambda: None
        self._reboot_by_s: float | None = None
        self._unsent: dict[str, bytes] = {}
        self._finished: deque[str] = deque(maxlen=MAX_FINISHED)

    @property
    def due_s(self) -> float | None:
        """When `advance` has something to do without an event."""
        dues = [self._reboot_by_s, self._verification.due_s, self.job.due_s]
        if self._current is None and self._waiting:
            dues.append(self._begins_s())
        return min((due for due in dues if due is not None), default=None)

    def _begins_s(self) -> float:
        """When the next of the commands that wait begins."""
        return min(order.arrived_s for order in self._waiting.values()) + GATHER_S

    def on_link_up(self) -> None:
        """Say which operations are taken; one that is not allowed any more is cleared."""
        for row in OPERATIONS:
            allowed = row.name in self._table.allow
            self._unsent[self._topics.capability(row.name)] = b"{}" if allowed else b""
        self._flush()

    def on_message(self, topic: str, payload: bytes, now_s: float) -> None:
        """Take what is retained at a command's topic."""
        if not payload:
            self._waiting.pop(topic, None)  # cleared before it began
            self._take_back(topic)
            return
        op, command_id = topic.split("/")[-2:]
        if command_id in self._finished or len(payload) > MAX_COMMAND_BYTES:
            return
        if self._current is not None and self._current.command.id == command_id:
            return
        try:
            status = decode(payload, _Status).status
        except ValueError as error:
            LOG.error("a command at %s is not understood: %s", topic, error)
            return
        if status == "executing":
            self._on_left_behind(op, command_id)
        elif status == "init":
            self._take(topic, payload, now_s)

    def _take_back(self, topic: str) -> None:
        """End the job whose command was cleared; nobody waits for how it ended."""
        order = self._current
        if order is None or not self.job.running:
            return
        if topic == self._topics.command(order.command.op, order.command.id):
            self._finished.append(order.command.id)
            self._finish("it was taken back")

    def _take(self, topic: str, payload: bytes, now_s: float) -> None:
        op, command_id = topic.split("/")[-2:]
        try:
            command, signed = open_command(payload)
        except ValueError as error:
            LOG.error("a command at %s is not understood: %s", topic, error)
            return
        if (command.op, command.id) != (op, command_id):
            LOG.error("the command %s/%s was published at %s", command.op, command.id, topic)
            return
        order = _PendingCommand(command, payload, signed is not None, now_s)
        if len(self._waiting) >= MAX_WAITING and topic not in self._waiting:
            self._end(order, f"{MAX_WAITING} commands wait already: give it again later")
        else:
            self._waiting[topic] = order

    def _on_left_behind(self, op: str, command_id: str) -> None:
        """Tell how a command ended that an earlier agent has begun."""
        taken = self._journal.taken
        rebooted = (taken.op, taken.id) == (REBOOT, command_id) and taken.boot != boot_id()
        self._tell(
            "successful" if rebooted else "failed", op, command_id,
            "" if rebooted else INTERRUPTED, refused=not rebooted,
        )  # fmt: skip

    # -- time and events

    def advance(self, now_s: float) -> None:
        """Do what is due: publish, check, begin the next command."""
        self._flush()
        self._on_verdict(self._verification.advance(now_s), now_s)
        if self._reboot_by_s is not None and now_s >= self._reboot_by_s:
            self._finish(f"the board did not reboot within {REBOOT_S:g} s")
        order = self._current
        if order is not None and self._checking and (late := expired(order.command)):
            self._verification.forget()
            self._finish(late)
        if ended := self.job.advance(now_s, waited_for=bool(self._waiting)):
            self._finish(ended)
        if self._current is None and self._waiting and now_s >= self._begins_s():
            topic = min(self._waiting, key=lambda topic: self._waiting[topic].command.counter)
            self._begin(self._waiting.pop(topic), now_s)

    def on_event(self, event: CommandEvent, now_s: float) -> None:
        """Take the end of a child."""
        if isinstance(event, CommandCheck):
            self._on_verdict(self._verification.on_event(event.event, now_s), now_s)
        elif self._current is not None and event.id == self._current.command.id:
            self._finish(event.problem, event.result, refused=False)

    def on_reply(self, request: str, number: str, payload: bytes) -> None:
        """Pass a part of a metadata file on to the child that checks."""
        self._verification.on_reply(request, number, payload)

    def stop(self) -> None:
        """End what runs; a command that is executed is told as failed."""
        self._verification.stop()
        if self._current is not None and self._reboot_by_s is None and not self._checking:
            self._finish("the agent was stopped")

    # -- one command

    def _begin(self, order: _PendingCommand, now_s: float) -> None:
        self._current = order
        problem = self._refusal(order)
        if problem:
            self._finish(problem)
        elif order.signed:
            self._checking = True
            self._verification.forget()
            self._on_verdict(self._verification.take(order.payload, now_s), now_s)
        else:
            self._execute(order, now_s)

    def _refusal(self, order: _PendingCommand) -> str:
        """Return why a command is not executed, as far as that is known without its signatures."""
        command, taken = order.command, self._journal.taken
        if not order.signed and not self._dev:
            return UNSIGNED
        if command.device != self._topics.device:
            return f"the command is for the device {command.device}: somebody has copied it"
        if command.counter <= taken.counter:
            if (command.op, command.id, command.counter) == (taken.op, taken.id, taken.counter):
                self._on_left_behind(command.op, command.id)
                return INTERRUPTED
            return (
                f"the command has the counter {command.counter}, this device has taken "
                f"{taken.counter}: it is an old one, or the clock of who gave it is behind"
            )
        return expired(command)

    def _on_verdict(self, verdict: Verdict | None, now_s: float) -> None:
        order = self._current
        if verdict is None or order is None or not self._checking:
            return
        if isinstance(verdict, Trusted):
            self._verification.forget()
            self._execute(order, now_s)
        elif isinstance(verdict, Refused) and not verdict.again:
            self._verification.forget()
            self._finish(verdict.reason)
        elif isinstance(verdict, Unverified | Refused) and verdict.reason:
            LOG.info("the command %s waits: %s", order.command.id, verdict.reason)

    def _execute(self, order: _PendingCommand, now_s: float) -> None:
        """Write the command down, then do it."""
        self._checking = False
        command = order.command
        try:
            self._journal.note(command.counter, command.op, command.id)
        except StateError as error:
            self._finish(str(error))
            return
        LOG.info("the command %s (%s) is executed", command.op, command.id)
        self._tell("executing", command.op, command.id)
        outcome = run_operation(command.op, command.arguments, self._board, self._table.allow)
        if isinstance(outcome, Done):
            self._finish("", dict(outcome.result))
        elif isinstance(outcome, Denied):
            self._finish(outcome.reason, refused=outcome.refused)
        elif isinstance(outcome, Child):
            self._end_task = start_task(
                command.id, outcome.command, self._put, limit_s=outcome.limit_s,
                max_bytes=MAX_RESULT_BYTES,
            )  # fmt: skip
        elif isinstance(outcome, Job):
            self.job.begin(command.id, outcome)
        else:
            self._reboot(command.id, now_s)

    def _reboot(self, command_id: str, now_s: float) -> None:
        """Start what restarts the board. It must outlive this process, which a reboot ends, so it
        is no `ChildProcess`."""
        self._reboot_by_s = now_s + REBOOT_S
        try:
            child = subprocess.Popen(
                self._table.reboot_command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._finish(f"{self._table.reboot_command[0]} cannot be started: {error.strerror}")
            return

        def wait() -> None:
            _, stderr = child.communicate()
            if child.returncode:
                last = stderr.decode(errors="replace").strip()[-500:]
                problem = f"{self._table.reboot_command[0]}: status {child.returncode}: {last}"
                self._put(TaskEnded(command_id, None, problem))

        threading.Thread(target=wait, daemon=True).start()

    def _finish(
        self, problem: str, result: dict[str, object] | None = None, *, refused: bool = True
    ) -> None:
        """End the current command; it failed if there is a problem."""
        order, self._current = self._current, None
        self._end_task()
        self._end_task = lambda: None
        self.job.stop()
        self._checking, self._reboot_by_s = False, None
        if order is not None and order.command.id not in self._finished:
            self._end(order, problem, result, refused=refused)

    def _end(
        self,
        order: _PendingCommand,
        problem: str,
        result: dict[str, object] | None = None,
        *,
        refused: bool = True,
    ) -> None:
        if problem:
            LOG.warning(
                "the command %s (%s) failed: %s", order.command.op, order.command.id, problem
            )
        status: CommandStatus = "failed" if problem else "successful"
        self._tell(
            status, order.command.op, order.command.id, problem, result,
            refused=bool(problem) and refused,
        )  # fmt: skip

    def _tell(
        self,
        status: CommandStatus,
        op: str,
        command_id: str,
        reason: str = "",
        result: dict[str, object] | None = None,
        *,
        refused: bool = False,
    ) -> None:
        at = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
        state = CommandState(
            status=status, op=op, id=command_id, at=at, reason=reason, refused=refused,
            result=result or {},
        )  # fmt: skip
        if status in ("successful", "failed"):
            self._finished.append(command_id)
        self._unsent[self._topics.command(op, command_id)] = encode(state)
        self._flush()

    def _flush(self) -> None:
        """Publish what the connection takes; the rest waits for it."""
        for topic in list(self._unsent):
            if not self._send(topic, self._unsent[topic]):
                return
            del self._unsent[topic]


def expired(command: Command) -> str:
    """Return that the time of a command is over, "" if it is not."""
    try:
        expires = msgspec.convert(command.expires, datetime)
    except msgspec.ValidationError:
        return f"the command expires at {command.expires!r}, which is no time"
    now = datetime.now(timezone.utc)
    if expires.tzinfo is not None and expires > now:
        return ""
    return (
        f"the command has expired at {command.expires}, it is {now:%Y-%m-%dT%H:%M:%S}Z here: give "
        "it again, and compare the board's clock"
    )
