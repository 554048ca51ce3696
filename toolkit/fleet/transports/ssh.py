"""A board behind the system's ssh, with its configuration, its agent and its known hosts."""

import contextlib
import itertools
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TypeVar

import msgspec

from device.control.upload_request import BoardFacts, Missing, Reply, Taken, UploadRequest
from device.errors import TransferError
from device.protocol.control import Answer
from device.protocol.documents import Measured, Update
from toolkit.fleet.transports.addresses import Address
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.flash_board import Patience, await_result, send_patiently
from toolkit.fleet.transports.transport import (
    Board,
    OnProgress,
    Progress,
    RefusedError,
    TransportError,
)

AGENT = "tandem-agent"
SSH_PORT = 22
CONFIG = "/etc/tandem/agent.toml"
# No question is asked: a host that is not known is refused. A dead connection ends after 30 s.
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
MAX_TRIES = 4  # one after another without a new byte on the board
LAST_WORDS_S = 5.0  # a board that takes no more bytes may still say why
PAUSE_S = 1.0  # before the second try; doubles
AGENT_MISSING = (
    "install the agent, or name it: `tandem board init ssh://{place}`, or "
    "ssh://{place}?agent=/path/tandem-agent"
)
# What ssh, or the shell of the board, says -> what to do. The first that fits counts: ssh says of a
# changed or revoked key what it is, and then that its verification failed, as of an unknown one.
CAUSES = (
    (
        "REVOKED HOST KEY DETECTED",
        "its host key is marked as revoked on this host: whoever answers may have stolen it (an "
        "attack). Accept it in no case: give the board another host key, and compare that one at "
        "the board: `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`",
    ),
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one that this host knows. Another machine may answer in its place "
        "(an attack), or the board was installed anew. Compare at the board: `ssh-keygen -lf "
        "/etc/ssh/ssh_host_ed25519_key.pub`. Only if the new key is its own: `{forget}`, then "
        "`{login}`",
    ),
    ("Host key verification failed", "compare and accept its key once with `{login}`"),
    ("Permission denied", "put your key there with `ssh-copy-id {words}`, or load it: `ssh-add`"),
    ("Connection refused", "no SSH server runs there: is the board up?"),
    ("No route to host", "is the board up, and on this network?"),
    ("timed out", "is the board up, and on this network?"),
    ("Could not resolve hostname", "compare the name, or write the address"),
    ("not found", AGENT_MISSING),
    ("No such file", AGENT_MISSING),
)
# ssh says where the key stands that does not fit; `-f` names that file.
_OFFENDING = re.compile(r"^Offending \S+ key in (.+):\d+\s*$", re.MULTILINE)


def destination_of(address: Address) -> str:
    """Return what ssh calls the board: user@host."""
    return f"{address.user}@{address.host}" if address.user else address.host


def ssh_arguments(address: Address) -> tuple[str, ...]:
    """Return the arguments of ssh for the options of an address."""
    config = address.options.get("ssh_config")
    port = () if address.port is None else ("-p", str(address.port))
    return (*(() if config is None else ("-F", config)), *port)


def advice_for(address: Address, stderr: str) -> str:
    """Return what to do about what ssh said, "" where nothing is known of it."""
    advice = next((advice for words, advice in CAUSES if words in stderr), "")
    destination, port = destination_of(address), address.port
    words = shlex.join((*ssh_arguments(address), destination))
    known = address.host if port in (None, SSH_PORT) else f"[{address.host}]:{port}"
    offending = _OFFENDING.search(stderr)
    file = () if offending is None else ("-f", offending[1])
    return advice.format(
        place=destination if port is None else f"{destination}:{port}",
        words=words,
        login=f"ssh {words}",
        forget=shlex.join(("ssh-keygen", *file, "-R", known)),
    )


def ssh_board(address: Address) -> "ControlBoard":
    """Return the board at an address of ssh://."""
    destination, options = destination_of(address), address.options
    command = ("ssh", *OPTIONS, *ssh_arguments(address), destination)
    agent, config = options.get("agent", AGENT), options.get("config", CONFIG)
    return ControlBoard(command, address, (agent, "control", "--config", config))


class ControlBoard:
    """A board whose `tandem-agent control` is run through a command such as ssh."""

    sent_bytes = 0
    measured: Measured | None = None
    shared = True

    def __init__(self, prefix: Sequence[str], address: Address, control: Sequence[str]) -> None:
        """`prefix` takes the line of the board's shell as its last word."""
        self.name = destination_of(address)
        self._address = address
        self._prefix = tuple(prefix)
        self._control = tuple(control)
        self._device = ""
        self._folder = ""  # on the board, with what was sent

    def facts(self) -> BoardFacts:
        """Return what the board is."""
        with self._running("facts") as child:
            line = _stdout(child).readline()
            if not line:
                raise TransportError(self._cause(child))
        facts = _decoded(line, BoardFacts)
        self._device = facts.answer.device
        return facts

    def send(self, delivery: Delivery, on_progress: OnProgress) -> None:
        """Send what the board lacks, and the small files."""
        spec = delivery.blob.spec
        request = UploadRequest(
            blob=spec,
            index_bytes=len(delivery.blob.index),
            files=delivery.files(self._device),
            erase=delivery.erase,
        )

        def attempt() -> _Transfer:
            nonlocal request
            transfer = _Transfer(self, delivery, request, on_progress)
            request = msgspec.structs.replace(request, erase=False)
            return transfer

        patience = Patience(lambda tries: time.sleep(PAUSE_S * 2 ** (tries - 1)), MAX_TRIES)
        send_patiently(self, attempt, patience, spec.bytes, on_progress)

    def install(self, delivery: Delivery, on_progress: OnProgress) -> Update:
        """Hand over and follow until it is live."""
        with self._running("install", self._folder) as child:
            lines = iter(_stdout(child).readline, b"")
            first = next(lines, b"")
            if not first:
                raise TransportError(self._cause(child))
            updates = updates_in(itertools.chain((first,), lines), self)
            return await_result(updates, self, delivery, on_progress)

    def receive(self, transfer: "_Transfer") -> None:
        """Have one transfer received; TransportError: the connection broke."""
        with self._running("receive") as child:
            self._folder = transfer.over(child)
            if not self._folder:
                raise TransportError(self._cause(child))

    def commit(self) -> Answer:
        """Keep the release on trial; the board commits it as soon as it works."""
        with self._running("commit") as child:
            line = _stdout(child).readline()
            if not line:
                raise RefusedError(self._cause(child))
        return _decoded(line, Answer)

    def cancel(self, request: str) -> None:
        """End the update of this request, unless it is live."""
        with self._running("cancel", request) as child:
            _stdout(child).read()

    def close(self) -> None:
        """Every action has its own connection: there is nothing to end."""

    # -- the child

    @contextmanager
    def _running(self, *action: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Run one action; a session of its own, so that Ctrl-C does not end it first."""
        line = shlex.join((*self._control, *action))
        pipe = subprocess.PIPE
        try:
            child = subprocess.Popen(
                (*self._prefix, line), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise TransportError(f"cannot start {self._prefix[0]}: {error.strerror}") from error
        errors: list[bytes] = []
        assert child.stderr is not None
        drain = threading.Thread(target=_drain, args=(child.stderr, errors), daemon=True)
        drain.start()
        self._errors, self._drain = errors, drain
        try:
            yield child
        finally:
            for stream in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    if stream is not None:
                        stream.close()
            if child.poll() is None:
                child.terminate()
            child.wait()

    def _cause(self, child: "subprocess.Popen[bytes]") -> str:
        """Return why an action gave no result."""
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
        status = child.wait()
        self._drain.join()
        lines = b"".join(self._errors).decode(errors="replace").strip().splitlines()
        last_line = lines[-1].removeprefix("tandem-agent: ") if lines else f"exit status {status}"
        of_the_agent = bool(lines) and lines[-1].startswith("tandem-agent:")
        advice = "" if of_the_agent else advice_for(self._address, "\n".join(lines))
        if advice:
            return f"{self.name} cannot be reached: {last_line}; {advice}"
        return f"{self.name}: {last_line}"


def updates_in(lines: Iterable[bytes], board: Board) -> Iterator[Update]:
    """Yield the updates in what `tandem-agent control install` says; note what was measured."""
    for line in lines:
        reported = _decoded(line, Answer).reported
        assert reported is not None
        board.measured = reported.measured
        yield reported.update


class _Transfer:
    """One connection that sends what the board lacks."""

    def __init__(
        self,
        board: ControlBoard,
        delivery: Delivery,
        request: UploadRequest,
        on_progress: OnProgress,
    ) -> None:
        self.sent_bytes = 0
        self.received_bytes = -1
        self._board = board
        self._blob = delivery.blob
        self._request = request
        self._on_progress = on_progress
        self._folder = ""
        self._error = ""

    def run(self) -> None:
        """Send over a connection of its own."""
        self._board.receive(self)

    def over(self, child: "subprocess.Popen[bytes]") -> str:
        """Return the folder on the board, empty if the connection broke.

        Raises RefusedError: the board says why it does not take it.
        """
        stdin, stdout = child.stdin, _stdout(child)
        assert stdin is not None
        total = self._request.blob.bytes
        with contextlib.suppress(BrokenPipeError):
            stdin.write(msgspec.json.encode(self._request) + b"\n" + self._blob.index)
            stdin.flush()
            first = self._reply(stdout.readline())
            if not isinstance(first, Missing):
                return self._ended()
            self.received_bytes = on_board = first.present_bytes
            self._on_progress(Progress("sending", on_board, total))
            reader = threading.Thread(target=self._read, args=(stdout,), daemon=True)
            reader.start()
            try:
                for number in first.missing:
                    chunk = self._chunk(number)
                    stdin.write(chunk)
                    self.sent_bytes += len(chunk)
                    self._on_progress(Progress("sending", on_board + self.sent_bytes, total))
                stdin.flush()
            except BrokenPipeError:
                reader.join(LAST_WORDS_S)
            else:
                reader.join()
        return self._ended()

    def _chunk(self, number: int) -> bytes:
        if number >= self._blob.table.count:
            raise TransferError(f"the board asks for chunk {number}, which does not exist")
        return self._blob.read(number)

    def _read(self, stdout: IO[bytes]) -> None:
        """Note what the board says until the connection ends."""
        with contextlib.suppress(OSError, ValueError, TransportError):  # it was closed
            for line in stdout:
                self._reply(line)

    def _reply(self, line: bytes) -> Missing | Taken | None:
        if not line:
            return None
        reply: Missing | Taken = _decoded(line, Reply)  # type: ignore[arg-type]
        if isinstance(reply, Taken):
            self.received_bytes = max(self.received_bytes, reply.received_bytes)
            self._folder = reply.folder or self._folder
            self._error = reply.error or self._error
        return reply

    def _ended(self) -> str:
        if self._error and "was cut off" not in self._error:
            raise RefusedError(f"the board does not take the bundle: {self._error}")
        return self._folder


def _stdout(child: "subprocess.Popen[bytes]") -> IO[bytes]:
    assert child.stdout is not None
    return child.stdout


def _drain(stream: IO[bytes], into: list[bytes]) -> None:
    with stream, contextlib.suppress(OSError, ValueError):
        into.append(stream.read())


R = TypeVar("R")


def _decoded(line: bytes, kind: type[R]) -> R:
    """Return what a line of the board says; TransportError if that is not understood."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (ValueError, RecursionError) as error:
        raise TransportError(
            f"the board answers {line[:80]!r}, which is not understood: its shell must print "
            "nothing of its own, and its agent must be of this version"
        ) from error
