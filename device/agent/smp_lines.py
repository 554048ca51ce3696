"""The agent's SMP server: its lines, its inbox, and what passes between their threads and the
agent's own."""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from device.agent.config import AgentConfig, SmpTable, split_udp
from device.agent.control_socket import ControlRequest, ask_agent
from device.agent.log import PLAIN
from device.agent.log_lines import redacted
from device.protocol.documents import Update
from device.update.slot_store import slot_folders
from device.update.slots import SlotState

if TYPE_CHECKING:
    from device.smp.inbox import HandedIn

FOLDER = "smp"  # of the state folder


@dataclass(frozen=True, slots=True)
class SmpInstall:
    """A client asks for a release; the document is judged as one of the broker."""

    document: bytes
    repository: str


@dataclass(frozen=True, slots=True)
class SmpRestart:
    """A client asks the agent to start again."""


SmpEvent = SmpInstall | SmpRestart | ControlRequest
LOG_LINES = 400


class LogTail(logging.Handler):
    """Keeps the last lines of the agent's log for a client to download, without secrets."""

    def __init__(self, secrets: Iterable[str | None] = ()) -> None:
        """`secrets`: words that are never kept."""
        super().__init__()
        self._secrets = tuple(word for word in secrets if word)
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self.setFormatter(logging.Formatter(PLAIN))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line; what cannot be formatted is not."""
        with contextlib.suppress(TypeError, ValueError):
            self._lines.append(redacted(self.format(record), self._secrets))

    def read(self) -> bytes:
        """Return the lines."""
        return "".join(f"{line}\n" for line in tuple(self._lines)).encode()


class SmpLines:
    """The servers of [smp]. Their threads read `note`d values and put events on the queue."""

    def __init__(
        self, config: AgentConfig, table: SmpTable, put: Callable[[SmpEvent], None]
    ) -> None:
        # Most agents never need these.
        from device.smp.inbox import Inbox
        from device.smp.server import TtyServer, UdpServer, default_buffer
        from device.smp.service import BoardState, SmpService

        root = Path(config.state_dir)
        self._inbox = Inbox(root / FOLDER, lambda: slot_folders(root, self._state.slots))
        self._tail = LogTail((config.broker.password,))
        logging.getLogger("tandem").addHandler(self._tail)
        self._board_state = BoardState
        self._state = BoardState(SlotState(), Update(phase="idle"))
        service = SmpService(
            self._inbox,
            device=config.device,
            profile=config.profile,
            dev=config.dev,
            state=lambda: self._state,
            install=lambda handed_in: put(_install(handed_in)),
            restart=lambda: put(SmpRestart()),
            ask=lambda ask: ask_agent(put, ask),
            log=self._tail.read,
        )
        self._servers: list[TtyServer | UdpServer] = []
        if table.udp is not None:
            self._servers.append(UdpServer(*split_udp(table.udp), service.handle))
        if table.device is not None:
            buffer_bytes = table.buffer_bytes or default_buffer(table.device, table.baud)
            self._servers.append(
                TtyServer(
                    table.device,
                    service.handle,
                    framing=table.framing,
                    baud=table.baud,
                    buffer_bytes=buffer_bytes,
                )
            )

    @property
    def folder(self) -> str:
        """The folder of uploaded bundles, as a source of releases."""
        return str(self._inbox.folder)

    def start(self, state: SlotState, update: Update) -> SmpInstall | None:
        """Serve from now on; return what was handed in before the agent started."""
        self.note(state, update)
        for server in self._servers:
            server.start()
        earlier = self._inbox.handed_in()
        return None if earlier is None else _install(earlier)

    def note(self, state: SlotState, update: Update) -> None:
        """Let clients see this from now on."""
        if (state, update) != (self._state.slots, self._state.update):
            self._state = self._board_state(state, update)

    def overtaken(self) -> None:
        """A document of the broker holds now."""
        self._inbox.forget_handed_in()

    def stop(self) -> None:
        """End the threads."""
        logging.getLogger("tandem").removeHandler(self._tail)
        for server in self._servers:
            server.stop()


def _install(handed_in: "HandedIn") -> SmpInstall:
    return SmpInstall(handed_in.document, handed_in.repository)
