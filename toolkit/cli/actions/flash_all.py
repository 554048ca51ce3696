"""`tandem flash --all-found`: one bundle to every board that is found."""

import sys
from collections.abc import Sequence
from typing import NoReturn

import click
import msgspec
from rich.console import Console
from rich.table import Table

from device.protocol.documents import InstallPolicy
from toolkit.cli.actions.board.search import search
from toolkit.cli.actions.transfer import transfer_lines
from toolkit.cli.commands.flash import Flash
from toolkit.fleet.boards.discovery import FoundBoard, no_boards
from toolkit.fleet.boards.many import INTERRUPTED, BoardResult, ManyFlasher, exit_status
from toolkit.fleet.transports.transport import Progress


def flash_all(options: Flash, policy: InstallPolicy) -> NoReturn:
    """Flash all found boards; exits with the status of the worst."""
    assert options.bundle is not None
    as_json = options.as_json
    seen = search(options.search, as_json=as_json)
    if not seen.boards:
        raise no_boards(seen)
    try:
        with transfer_lines(hidden=as_json) as lines:

            def show(board: FoundBoard, state: Progress) -> None:
                received, total = state.received_bytes, state.total_bytes
                lines.show(board.way, state.phase, received, total, board.name)

            flasher = ManyFlasher(
                options.bundle,
                options.fleet,
                erase=options.erase_cache,
                policy=policy,
                on_progress=show,
            )
            results = flasher.flash(seen.boards)
    except KeyboardInterrupt:
        click.echo(
            "stopped: boards that were not live yet stay on their old release, and keep what "
            "has arrived",
            err=True,
        )
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(msgspec.json.encode(results).decode())
    else:
        Console().print(_summary(results))
    sys.exit(exit_status(results))


def _summary(results: Sequence[BoardResult]) -> Table:
    """Return the table of how each board ended."""
    failed = sum(1 for result in results if result.status)
    title = f"{len(results) - failed} of {len(results)} boards run it"
    table = Table("device", "way", "state", "sent", "s", "reason", title=title, box=None)
    for row in results:
        sent = f"{row.sent_bytes / 1e6:.1f} MB"
        table.add_row(row.device, row.way, row.state, sent, f"{row.duration_s:.1f}", row.reason)
    return table
