"""One board, from what it is to a release that is live there."""

import time
from collections.abc import Callable

from device.control.upload_request import BoardFacts
from toolkit.fleet.transports.checks import refusal, runs_already
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.transport import (
    Board,
    Delivered,
    Flashed,
    OnProgress,
    Phase,
    RefusedError,
)


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
    `Board.deliver`.
    """
    begun_s, blob = time.monotonic(), delivery.blob.spec
    facts = board.facts()
    delivered, same = Delivered(0), False
    if facts is not None:
        on_facts(facts)
        same = runs_already(facts, blob.sha256)
        reason = "" if same else refusal(facts, delivery.info, blob.bytes, delivery.options)
        if reason:
            raise RefusedError(reason)
    if not same:
        delivered = board.deliver(delivery, on_progress)
    live: Phase = "trial" if delivered.waits else "live"
    final: Phase = "same" if same else "written" if facts is None else live
    return Flashed(
        address=address,
        device="" if facts is None else facts.answer.device,
        name=delivery.info.name,
        version=delivery.info.version,
        sha256=blob.sha256,
        phase=final,
        sent_bytes=delivered.sent_bytes,
        total_bytes=blob.bytes,
        duration_s=round(time.monotonic() - begun_s, 3),
        measured=delivered.measured,
    )
