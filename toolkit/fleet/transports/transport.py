"""The interface of a transport to a board, and what it says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from device.control.upload_request import BoardFacts
from device.errors import TandemError
from device.protocol.control import Answer
from device.protocol.documents import Measured, Update
from toolkit.fleet.transports.delivery import Delivery

Phase = Literal["live", "same", "written", "trial"]


class TransportError(TandemError):
    """The board cannot be reached, or the connection was lost: the next try may go well."""


class RefusedError(TandemError):
    """The board does not take the release; nothing has changed on it."""

    exit_status = 3


class RolledBackError(TandemError):
    """The release was tried, failed, and the board runs the one before."""

    exit_status = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """`phase`: "sending" and then those of the board's report; bytes are those on the board."""

    phase: str
    received_bytes: int
    total_bytes: int
    reason: str = ""


class Flashed(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended. `phase`: "same": the board ran the release before; "written": onto a stick;
    "trial": it works, and stays once it is committed."""

    address: str
    device: str
    name: str
    version: str
    sha256: str
    phase: Phase
    sent_bytes: int
    total_bytes: int
    duration_s: float
    measured: Measured | None = None


OnProgress = Callable[[Progress], None]


class Board(Protocol):
    """One board behind one transport. All raise TransportError; `close` it.

    `name`: for sentences. `sent_bytes`: over the transport by now; `measured`: by the board, of the
    release that was installed. `shared`: another connection may cancel at the same time.
    """

    name: str
    sent_bytes: int
    measured: Measured | None
    shared: bool

    def facts(self) -> BoardFacts | None:
        """Return what the board is; None: nobody answers there, as on a stick."""

    def send(self, delivery: Delivery, on_progress: OnProgress) -> None:
        """Offer the release, send what is missing, and have it verified. Raises RefusedError."""

    def install(self, delivery: Delivery, on_progress: OnProgress) -> Update:
        """Activate the release; watch until it is live, or works and waits to be committed.

        Raises RefusedError or RolledBackError. The text of KeyboardInterrupt may say what has
        become of the release.
        """

    def cancel(self, request: str) -> None:
        """End the update of this request, unless it is live."""

    def commit(self) -> Answer:
        """Keep the release on trial; return what the board said then. Raises RefusedError."""

    def close(self) -> None:
        """End the connection."""
