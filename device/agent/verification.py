"""Checks signed desired documents in a child, and passes on what that asks of the repository.

The child is `python -m device.trust`: what it needs of the signed repository it asks for through
this process's connection, so that there is no second one, and no password leaves the agent.
"""

import contextlib
import hashlib
import logging
import math
import queue
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device.agent.config import TrustTable
from device.protocol.documents import TufGet
from device.start.child_process import ChildExit, ChildProcess
from device.start.command import module_command
from device.trust.exchange import (
    MAX_DESIRED_BYTES,
    DocumentKind,
    Line,
    Part,
    Refused,
    Request,
    Trusted,
    Unverified,
    Verdict,
    encode_line,
)

LOG = logging.getLogger("tandem.agent")
FOLDER = "trust"  # of the state folder
CHECKING = Unverified(reason="its signatures are being checked")
AGAIN_S = (5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)  # between two checks that found no answer
MIN_BETWEEN_S = 1.0  # between the starts of two children, whoever publishes how fast
END_S = 15.0  # a child that is still there so long after its own limit of time is killed
MAX_WAITING_PARTS = 256
_COMMAND = module_command("device.trust")


@dataclass(frozen=True, slots=True)
class MetadataAsked:
    """The child asks for a file of the signed repository."""

    run: int
    get: TufGet


@dataclass(frozen=True, slots=True)
class VerificationEnded:
    """The child has ended with a verdict."""

    run: int
    verdict: Verdict


VerificationEvent = MetadataAsked | VerificationEnded


class Verification:
    """What is known of the newest signed document. At most one child at a time.

    Start children from the main thread (see `device.start.guard`). Times are of a steady clock.
    """

    def __init__(
        self,
        put: Callable[[VerificationEvent], None],
        ask: Callable[[TufGet], None],
        *,
        device: str,
        trust: TrustTable,
        state_dir: Path,
        kind: DocumentKind = "desired",
        command: tuple[str, ...] = _COMMAND,
    ) -> None:
        """`put` takes the events, from another thread; `ask` sends a request to the repository;
        `kind` of the documents."""
        self._kind = kind
        self._put = put
        self._ask = ask
        self._device = device
        self._trust = trust
        self._state_dir = state_dir / FOLDER
        self._command = command
        self._child: ChildProcess | None = None
        self._parts: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING_PARTS)
        self._run = 0
        self._document = b""
        self._repository = ""  # of this document; empty: that of agent.toml
        self._digest = b""
        self._verdict: Verdict = CHECKING
        self._tries = 0
        self._started_s = -math.inf
        self._due_s: float | None = None  # when a child is started, or the one that runs is killed

    @property
    def due_s(self) -> float | None:
        """When `advance` has something to do."""
        return self._due_s

    def take(self, document: bytes, now_s: float, repository: str = "") -> Verdict:
        """Return what is known of a document; a new one is checked from the next `advance` on.

        `repository`: where the signed metadata come from; empty: as agent.toml says.
        """
        digest = hashlib.sha256(document).digest()
        if digest == self._digest:
            self.look_again(now_s)  # a server publishes it again when it is back
            return self._verdict
        self.forget()
        if len(document) > MAX_DESIRED_BYTES:
            return Refused(
                reason=f"the desired document has {len(document)} bytes, the limit is "
                f"{MAX_DESIRED_BYTES}"
            )
        self._document, self._digest, self._repository = document, digest, repository
        self._due_s = max(now_s, self._started_s + MIN_BETWEEN_S)
        return self._verdict

    def forget(self) -> None:
        """Stop checking; the next document is checked, whichever it is."""
        self.stop()
        self._document = self._digest = b""
        self._verdict, self._tries = CHECKING, 0

    def stop(self) -> None:
        """End the child; what it has on the disk is whole."""
        if self._child is not None:
            self._child.stop()
            self._end_child()
        self._due_s = None

    def look_again(self, now_s: float) -> None:
        """End a long pause between two checks: something has changed."""
        if self._child is None and self._due_s is not None:
            self._due_s = min(self._due_s, max(now_s, self._started_s + AGAIN_S[0]))

    def advance(self, now_s: float) -> Verdict | None:
        """Start a child that is due, or kill one that takes too long; return a new verdict."""
        if self._due_s is None or now_s < self._due_s:
            return None
        if self._child is None:
            problem = self._start(now_s)
        else:
            self.stop()
            problem = f"the check of its signatures took longer than {self._trust.timeout_s:g} s"
        return None if problem is None else self._conclude(Unverified(reason=problem), now_s)

    def on_reply(self, request: str, number: str, payload: bytes) -> None:
        """Pass a part of an answer on to the child; without room it is dropped and asked again."""
        if self._child is None:
            return
        with contextlib.suppress(ValueError, msgspec.ValidationError, queue.Full):
            part = msgspec.convert(
                {"id": request, "number": int(number), "bytes": len(payload)}, Part
            )
            self._parts.put_nowait(encode_line(part) + payload)

    def on_event(self, event: VerificationEvent, now_s: float) -> Verdict | None:
        """Take an event of the child that runs; return its verdict at its end."""
        if self._child is None or event.run != self._run:
            return None
        if isinstance(event, MetadataAsked):
            self._ask(event.get)
            return None
        self._end_child()
        return self._conclude(event.verdict, now_s)

    def _conclude(self, verdict: Verdict, now_s: float) -> Verdict:
        self._verdict, self._due_s = verdict, None
        if isinstance(verdict, Unverified) or (isinstance(verdict, Refused) and verdict.again):
            self._due_s = now_s + AGAIN_S[min(self._tries, len(AGAIN_S) - 1)]
            self._tries += 1
        if not isinstance(verdict, Trusted):
            what = "command" if self._kind == "command" else "desired document"
            LOG.warning("the %s is not followed: %s", what, verdict.reason)
        return verdict

    def _end_child(self) -> None:
        with contextlib.suppress(queue.Full):  # then its writer ends by the closed pipe
            self._parts.put_nowait(None)
        self._child = None
        self._run += 1

    def _start(self, now_s: float) -> str | None:
        """Start a child; return why it could not be."""
        request = Request(
            device=self._device,
            desired=self._document.decode(errors="replace"),
            trust_dir=self._trust.dir,
            state_dir=str(self._state_dir),
            repository=self._repository or self._trust.repository,
            timeout_s=self._trust.timeout_s,
            kind=self._kind,
        )
        self._parts, self._started_s = queue.Queue(MAX_WAITING_PARTS), now_s
        self._parts.put_nowait(encode_line(request))
        self._due_s = now_s + self._trust.timeout_s + END_S
        run, verdict = self._run, None

        def on_line(text: bytes) -> None:
            nonlocal verdict
            try:
                line = msgspec.json.decode(text, type=Line)
            except (ValueError, RecursionError):  # a stray print
                return
            verdict = line.verdict or verdict
            if line.get is not None:
                self._put(MetadataAsked(run, line.get))

        def on_exit(exit_: ChildExit) -> None:
            what = f"the check of its signatures ended without a result: {exit_.reason}"
            self._put(VerificationEnded(run, verdict or Unverified(reason=what)))

        try:
            self._child = ChildProcess(self._command, on_line, on_exit, written=self._parts)
        except OSError as error:
            return f"its signatures cannot be checked: {error.strerror}"
        return None
