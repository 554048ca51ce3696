"""The agent's control socket: a Unix socket in the state folder, for its owner alone.

Threads read requests and wait; the agent's one thread answers them (see
`device.protocol.control`).
"""

import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device.protocol.control import MAX_LINE_BYTES, Answer, Ask, SlotRow, listen, socket_address
from device.update.slots import SlotState

LOG = logging.getLogger("tandem.agent")
MAX_CONNECTIONS = 8
ANSWER_S = 120.0  # the agent's thread may unpack a bundle meanwhile
IDLE_S = 300.0  # a connection that says nothing for so long is closed


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """A request that waits for `reply`."""

    ask: Ask
    reply: Callable[[Answer], None]


class ControlSocket:
    """Takes connections until `close`. `put` takes requests, from other threads."""

    def __init__(self, folder: Path, put: Callable[[ControlRequest], None]) -> None:
        self._folder = folder
        self._put = put
        self._socket: socket.socket | None = None
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def open(self) -> None:
        """Listen. An agent without it works on, and says so in its log."""
        try:
            self._socket = listener = listen(self._folder, backlog=MAX_CONNECTIONS)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        except (OSError, RuntimeError) as error:
            self.close()
            LOG.error("`tandem-agent control` cannot reach this agent: %s", error)

    def close(self) -> None:
        """Take no more connections."""
        if self._socket is None:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._socket = None
        with contextlib.suppress(OSError), socket_address(self._folder) as address:
            os.unlink(address)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self._free.acquire()
            try:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # closed, or the limit of tasks is reached
                self._free.release()
                if listener.fileno() < 0:
                    return
                threading.Event().wait(1.0)

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection."""
        try:
            connection.settimeout(IDLE_S)
            with connection, connection.makefile("rb") as lines:
                while line := lines.readline(MAX_LINE_BYTES + 1):
                    connection.sendall(msgspec.json.encode(self._answer(line)) + b"\n")
        except OSError as error:
            LOG.debug("a control connection ended: %s", error)
        finally:
            self._free.release()

    def _answer(self, line: bytes) -> Answer:
        if len(line) > MAX_LINE_BYTES:
            return Answer(error=f"a request has more than {MAX_LINE_BYTES} bytes")
        try:
            ask = msgspec.json.decode(line, type=Ask)
        except (ValueError, RecursionError) as error:
            return Answer(error=f"the request is not understood: {error}")
        return ask_agent(self._put, ask)


def ask_agent(put: Callable[[ControlRequest], None], ask: Ask) -> Answer:
    """Ask from another thread than the agent's and wait for the answer."""
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    put(ControlRequest(ask, answers.put))
    try:
        return answers.get(timeout=ANSWER_S)
    except queue.Empty:
        return Answer(error=f"the agent did not answer within {ANSWER_S:g} s: try again")


def slot_rows(state: SlotState) -> tuple[SlotRow, ...]:
    """Return what is in the slots."""
    rows = []
    for slot, record in (("a", state.a), ("b", state.b)):
        if record is not None:
            role = "active" if slot == state.active else "trial" if slot == state.trial else "idle"
            rows.append(
                SlotRow(
                    slot=slot,
                    role=role,
                    sha256=record.sha256,
                    name=record.name,
                    version=record.version,
                    bytes=record.bytes,
                )
            )
    return tuple(rows)
