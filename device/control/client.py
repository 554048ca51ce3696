"""Asks the agent that runs on this board, and reads what the board is."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from device.agent.facts import jetpack_of
from device.board_files import power_mode_name, power_mode_number, read_text
from device.control.upload_request import BoardFacts, Chunks
from device.errors import StateError
from device.protocol.control import Answer, Ask, AskProgress, connect
from device.protocol.documents import DeviceFacts
from device.runtime.tensorrt.board import read_board
from device.update.byte_source import open_unpacked
from device.update.cuts import cut_bundle

ANSWER_S = 130.0  # above what the agent itself waits
LOOK_S = 0.2
MODEL = Path("/proc/device-tree/model")
_MEBIBYTE = 1024**2


class Client:
    """A connection to the agent whose state folder this is; `close` it."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        try:
            self._connection = connect(state_dir, ANSWER_S)
        except OSError as error:
            raise StateError(_unreachable(state_dir, error)) from error
        self._lines = self._connection.makefile("rb")

    def ask(self, ask: Ask) -> Answer:
        """Ask once. Raises StateError: the agent has ended, or says why it does not do it."""
        try:
            self._connection.sendall(msgspec.json.encode(ask) + b"\n")
            line = self._lines.readline()
            answer = msgspec.json.decode(line, type=Answer) if line else None
        except (OSError, ValueError) as error:
            raise StateError(f"the agent does not answer: {error}") from error
        if answer is None:
            raise StateError("the agent has ended: it is not known what it has done; ask again")
        if answer.error:
            raise StateError(answer.error)
        return answer

    def follow(self, request: str) -> Iterator[Answer]:
        """Yield each new answer until the update of this request has ended, or another began."""
        last: Answer | None = None
        while True:
            answer = self.ask(AskProgress())
            if answer != last:
                last = answer
                yield answer
            reported = answer.reported
            assert reported is not None
            update = reported.update
            ended = update.phase in ("live", "rolled_back", "refused") or update.waits_for_commit
            if update.request != request or ended:
                return
            time.sleep(LOOK_S)

    def close(self) -> None:
        """End the connection."""
        self._lines.close()
        self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def board_facts(client: Client) -> BoardFacts:
    """Return what this board is; what cannot be read stays empty or 0."""
    answer = client.ask(AskProgress())
    board = read_board()
    disk, mode = os.statvfs(client.state_dir), power_mode_number()
    return BoardFacts(
        facts=DeviceFacts(
            module=read_text(MODEL),
            jetpack=jetpack_of(board.l4t) or (f"L4T {board.l4t}" if board.l4t else ""),
            tensorrt=board.tensorrt,
            dla_cores=board.dla_cores,
            memory_mb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MEBIBYTE,
            free_mb=disk.f_bavail * disk.f_frsize // _MEBIBYTE,
            power_mode=power_mode_name(mode) or mode,
            bundles=tuple(row.sha256 for row in answer.slots),
        ),
        answer=answer,
    )


def inventory(client: Client) -> Iterator[Chunks]:
    """Yield the chunks of each slot; a slot that cannot be read has none."""
    for row in client.ask(AskProgress()).slots:
        source = open_unpacked(client.state_dir / "slots" / row.slot)
        if source is None:
            continue
        try:
            table, chunk_bytes = cut_bundle(source)
        except OSError:
            continue
        finally:
            source.close()
        chunks = tuple(table.digest(number).hex() for number in range(table.count))
        yield Chunks(slot=row.slot, sha256=row.sha256, chunk_bytes=chunk_bytes, chunks=chunks)


def _unreachable(state_dir: Path, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return (
            f"this user may not speak to the agent of {state_dir}: log in as the user whose agent "
            "it is"
        )
    return (
        f"no agent runs on {state_dir} ({error.strerror}): start it, `systemctl start "
        "tandem-agent`, or name its agent.toml with --config"
    )
