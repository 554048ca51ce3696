"""The board's SMP server on a pair of streams."""

import hashlib
from pathlib import Path

import cbor2
from mqtt_fixtures import PROFILE
from smp_fixtures import Cable

from device.protocol.documents import Update
from device.smp.inbox import HandedIn, Inbox
from device.smp.message import HEADER, MAX_MESSAGE
from device.smp.server import TtyServer
from device.smp.service import BoardState, SmpService
from device.update.slots import SlotState


class Board:
    """A service with an inbox, and what it told the agent."""

    def __init__(self, folder: Path, *, dev: bool = True) -> None:
        self.inbox = Inbox(folder / "smp")
        self.state = BoardState(SlotState(), Update(phase="idle"))
        self.installs: list[HandedIn] = []
        self.restarts = 0
        self.service = SmpService(
            self.inbox,
            device="cam",
            profile=PROFILE,
            dev=dev,
            state=lambda: self.state,
            install=self.installs.append,
            restart=self._restart,
        )

    def _restart(self) -> None:
        self.restarts += 1

    def ask(
        self, operation: int, group: int, command: int, content: object, peer: object = "host"
    ) -> dict[str, object]:
        """Send a request; return the content of the answer."""
        body = cbor2.dumps(content)
        message = HEADER.pack(8 | operation, 0, len(body), group, 7, command) + body
        reply = self.service.handle(message, peer)
        assert reply is not None
        assert HEADER.unpack_from(reply)[0] == 8 | (operation + 1)
        assert HEADER.unpack_from(reply)[2:] == (len(reply) - HEADER.size, group, 7, command)
        return cbor2.loads(reply[HEADER.size :])

    def send(self, data: bytes, peer: object = "host", image: int = 0) -> dict[str, object]:
        """Upload bytes at once."""
        sha = hashlib.sha256(data).digest()
        request = {"off": 0, "len": len(data), "sha": sha, "image": image, "data": data}
        return self.ask(2, 1, 1, request, peer)


def serve(
    board: Board, one: Cable, framing: str = "console", buffer_bytes: int = MAX_MESSAGE
) -> TtyServer:
    server = TtyServer(
        one.board, board.service.handle, framing=framing, baud=115200, buffer_bytes=buffer_bytes
    )
    server.start()
    return server
