"""One board, from what it is to a release that is live there: the same over every transport."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from device.control.upload_request import BoardFacts
from device.protocol.documents import Update
from toolkit.fleet.transports.checks import check_result, refusal, runs_already
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.transport import (
    Board,
    Flashed,
    OnProgress,
    Phase,
    Progress,
    RefusedError,
    TransportError,
)

RESUMES = "the board keeps what has arrived: flash again, it goes on there"


def flash_board(
    board: Board,
    address: str,
    delivery: Delivery,
    *,
    on_facts: Callable[[BoardFacts], None],
    on_progress: OnProgress,
) -> Flashed:
    """Bring a bundle to a board; one that runs it already is left alone.

    Raises RefusedError before anything is sent where the board would refuse it, otherwise as
    `deliver`.
    """
    begun_s, blob = time.monotonic(), delivery.blob.spec
    facts = board.facts()
    phase: Phase = "written"
    if facts is not None:
        on_facts(facts)
    if facts is not None and runs_already(facts, blob.sha256):
        phase = "same"
    else:
        reason = "" if facts is None else refusal(facts, delivery)
        if reason:
            raise RefusedError(reason)
        update = deliver(board, delivery, on_progress, installs=facts is not None)
        if update is not None:
            phase = "trial" if update.waits_for_commit else "live"
    return Flashed(
        address=address,
        device="" if facts is None else facts.answer.device,
        name=delivery.info.name,
        version=delivery.info.version,
        sha256=blob.sha256,
        phase=phase,
        sent_bytes=board.sent_bytes,
        total_bytes=blob.bytes,
        duration_s=round(time.monotonic() - begun_s, 3),
        measured=board.measured,
    )


def deliver(
    board: Board, delivery: Delivery, on_progress: OnProgress, *, installs: bool = True
) -> Update | None:
    """Send a release to a board whose facts were read; return how it ended there.

    `installs`: somebody there installs it, else it is only sent. Raises as `Board`;
    KeyboardInterrupt leaves the board on its old release, or its text says what the board does.
    """
    board.send(delivery, on_progress)
    if not installs:
        return None
    try:
        return board.install(delivery, on_progress)
    except KeyboardInterrupt:
        board.cancel(delivery.request)
        raise


class Attempt(Protocol):
    """One connection that brings what the board lacks. `received_bytes`: on the board, as far as
    it said so; -1: nothing was said."""

    sent_bytes: int
    received_bytes: int

    def run(self) -> None:
        """Send; TransportError: the connection broke."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How often, and for how long, a connection may break without a new byte on the board.

    `reconnect`: called before each try but the first, with the number of those in vain.
    """

    reconnect: Callable[[int], None]
    max_tries: float = float("inf")
    max_silent_s: float = float("inf")


def send_patiently(
    board: Board,
    attempt: Callable[[], Attempt],
    patience: Patience,
    total_bytes: int,
    on_progress: OnProgress,
) -> None:
    """Send; a connection that breaks is made again, as long as each brings something."""
    most_bytes, tries, silent_s = -1, 0, float("inf")
    while True:
        connection = attempt()
        try:
            connection.run()
            return
        except TransportError as error:
            now_s = time.monotonic()
            is_new = connection.received_bytes > most_bytes
            tries, silent_s = (1, now_s) if is_new else (tries + 1, min(silent_s, now_s))
            most_bytes = max(most_bytes, connection.received_bytes)
            if tries >= patience.max_tries or now_s - silent_s > patience.max_silent_s:
                raise TransportError(f"{error}; {RESUMES}") from error
            on_progress(Progress("reconnecting", max(0, most_bytes), total_bytes, str(error)))
        finally:
            board.sent_bytes += connection.sent_bytes
        patience.reconnect(tries)


def await_result(
    updates: Iterable[Update], board: Board, delivery: Delivery, on_progress: OnProgress
) -> Update:
    """Follow the updates of a board to their end; return the last. Raises as `check_result`."""
    total, last = delivery.blob.spec.bytes, None
    for last in updates:
        if last.request == delivery.request:
            on_progress(Progress(last.phase, total, total, last.reason))
    return check_result(last, board.name, delivery)
