"""`tandem flash --all-found`: one bundle to every board that is found."""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from device.protocol.documents import InstallPolicy
from toolkit.cli.log import progress_shown
from toolkit.cli.options.search import search
from toolkit.cli.phases import phase_text
from toolkit.fleet.boards.discovery import FoundBoard, SearchOptions, no_boards
from toolkit.fleet.boards.many import INTERRUPTED, BoardResult, ManyFlasher, exit_status
from toolkit.fleet.transports.transport import Progress


def flash_all(
    bundle: Path,
    fleet: Path | None,
    options: SearchOptions,
    *,
    erase: bool,
    policy: InstallPolicy,
    as_json: bool,
) -> None:
    """Flash all found boards; exits with the status of the worst."""
    seen = search(options, as_json=as_json)
    if not seen.boards:
        raise no_boards(seen)
    with Bars(
        TextColumn("{task.fields[board]}"),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        disable=as_json or not progress_shown(),
    ) as bars:
        lines = _Lines(bars)
        flasher = ManyFlasher(bundle, fleet, erase=erase, policy=policy, on_progress=lines.show)
        try:
            results = flasher.flash(seen.boards)
        except KeyboardInterrupt:
            bars.stop()
            click.echo(
                "stopped: boards that were not live yet stay on their old release, and keep what "
                "has arrived",
                err=True,
            )
            sys.exit(INTERRUPTED)
    if as_json:
        click.echo(msgspec.json.encode(results).decode())
    else:
        Console().print(summary(results))
    sys.exit(exit_status(results))


class _Lines:
    """A line of progress for each board; called by their threads."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}

    def show(self, board: FoundBoard, state: Progress) -> None:
        """Show how far a board is."""
        with self._lock:
            task = self._tasks.get(board.way)
            if task is None:
                task = self._bars.add_task("", total=None, board=board.name)
                self._tasks[board.way] = task
        text = phase_text(state.phase)
        if state.phase == "failed":
            self._bars.update(task, description=text)
            return
        total, received = state.total_bytes, state.received_bytes
        self._bars.update(task, description=text, completed=received, total=total)


def summary(results: Sequence[BoardResult]) -> Table:
    """Return the table of how each board ended."""
    failed = sum(1 for result in results if result.status)
    title = f"{len(results) - failed} of {len(results)} boards run it"
    table = Table("device", "way", "state", "sent", "s", "reason", title=title, box=None)
    for row in results:
        sent = f"{row.sent_bytes / 1e6:.1f} MB"
        table.add_row(row.device, row.way, row.state, sent, f"{row.duration_s:.1f}", row.reason)
    return table
