"""One bundle to many boards at once; one that fails does not hold up the others."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from device.errors import TandemError
from device.protocol.documents import InstallPolicy
from toolkit.fleet.boards.discovery import FoundBoard
from toolkit.fleet.transports.addresses import open_board, parse_address
from toolkit.fleet.transports.delivery import DEFAULT_POLICY, Delivery
from toolkit.fleet.transports.flash_board import flash_board
from toolkit.fleet.transports.transport import Flashed, Progress

MAX_AT_ONCE = 16
INTERRUPTED = 130
FlashState = Literal["live", "same", "written", "trial", "failed"]
OnBoardProgress = Callable[[FoundBoard, Progress], None]


class BoardResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one board ended. `status`: the exit status that it alone would give."""

    device: str
    address: str
    state: FlashState
    status: int = 0
    reason: str = ""
    sent_bytes: int = 0
    duration_s: float = 0.0
    flashed: Flashed | None = None


class ManyFlasher:
    """Brings one bundle to boards, a thread for each."""

    def __init__(
        self,
        bundle: Path,
        fleet: Path | None,
        *,
        erase: bool,
        policy: InstallPolicy = DEFAULT_POLICY,
        on_progress: OnBoardProgress,
    ) -> None:
        self._bundle = bundle
        self._fleet = fleet
        self._erase, self._policy = erase, policy
        self._on_progress = on_progress
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # one at a time writes into the fleet's folder
        self._requests: dict[
            str, str
        ] = {}  # of the boards that are flashed now, by their addresses

    def flash(self, boards: Sequence[FoundBoard]) -> tuple[BoardResult, ...]:
        """Return how each board ended, in their order.

        Raises BundleError or FleetError: nothing was sent to any. KeyboardInterrupt: each board
        stays on its old release, unless the new one was live by then.
        """
        with contextlib.closing(Delivery(self._bundle, self._fleet)) as delivery:
            delivery.metadata()
        pool = ThreadPoolExecutor(MAX_AT_ONCE)
        try:
            return tuple(pool.map(self._flash, boards))
        except KeyboardInterrupt:
            self._cancel()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _flash(self, board: FoundBoard) -> BoardResult:
        begun_s = time.monotonic()
        if board.facts is None:
            return _failed(board, board.error, 1, begun_s)
        try:
            flashed = self._flash_one(board)
        except TandemError as error:
            self._on_progress(board, Progress("failed", 0, 0, str(error)))
            return _failed(board, str(error), error.exit_status, begun_s)
        except KeyboardInterrupt:  # raised by _show
            return _failed(board, "stopped: it stays on its old release", INTERRUPTED, begun_s)
        return BoardResult(
            device=board.name,
            address=board.address,
            state=flashed.phase,
            sent_bytes=flashed.sent_bytes,
            duration_s=round(time.monotonic() - begun_s, 3),
            flashed=flashed,
        )

    def _flash_one(self, board: FoundBoard) -> Flashed:
        # Each has its own request, by which it alone is cancelled.
        with (
            contextlib.closing(
                Delivery(self._bundle, self._fleet, erase=self._erase, policy=self._policy)
            ) as delivery,
            contextlib.closing(open_board(parse_address(board.address))) as connection,
        ):
            with self._lock:
                delivery.metadata()
            self._requests[board.address] = delivery.request
            try:
                return flash_board(
                    connection,
                    board.address,
                    delivery,
                    on_facts=lambda _facts: None,
                    on_progress=lambda state: self._show(board, state),
                )
            finally:
                del self._requests[board.address]

    def _show(self, board: FoundBoard, state: Progress) -> None:
        # A transport that only one may use, such as a serial port, ends its update by itself.
        if self._stopped.is_set() and state.phase != "live":
            raise KeyboardInterrupt
        self._on_progress(board, state)

    def _cancel(self) -> None:
        """End transfers and trials: over a second connection where the board takes one, which
        wakes the thread that waits for it; otherwise by that thread."""
        self._stopped.set()
        for address, request in dict(self._requests).items():
            with contextlib.closing(open_board(parse_address(address))) as board:
                if board.shared:
                    with contextlib.suppress(TandemError):  # the thread says how it ended
                        board.cancel(request)


def exit_status(results: Sequence[BoardResult]) -> int:
    """Return 0 if all boards run the release, else the status of the worst."""
    return max((result.status for result in results), default=1)


def _failed(board: FoundBoard, reason: str, status: int, begun_s: float) -> BoardResult:
    return BoardResult(
        device=board.name,
        address=board.address,
        state="failed",
        status=status,
        reason=reason,
        duration_s=round(time.monotonic() - begun_s, 3),
    )
