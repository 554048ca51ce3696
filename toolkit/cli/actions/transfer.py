"""The phases and the progress of an update, as `tandem deploy` and `tandem flash` show them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)

from toolkit.cli.log import progress_shown

# Phase in the device's report -> text for the user.
PHASES = {
    "waiting": "waiting for the device",
    "idle": "waiting for the device",
    "verifying": "checking its signatures",
    "downloading": "downloading",
    "staging": "checking and unpacking",
    "trial": "on trial",
    "postponed": "postponed, its source gives nothing",
    "live": "live",
    "rolled_back": "rolled back",
    "refused": "refused",
    "superseded": "superseded",
    "timeout": "silent",
    # of `tandem flash` alone
    "comparing": "the board compares",
    "sending": "sending",
    "reconnecting": "connecting again",
    "withdrawing": "taking the release back",
}


class TransferLines:
    """A line of progress for each board, from its first report on; threads may call it."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}

    def show(
        self, key: str, phase: str, received_bytes: int, total_bytes: int | None, name: str = ""
    ) -> None:
        """Show how far a board is; `key` tells boards apart, `name` is written before the phase."""
        with self._lock:
            if key not in self._tasks:
                self._tasks[key] = self._bars.add_task("", total=None)
        text = PHASES.get(phase, phase)
        text = f"{name}: {text}" if name else text
        if phase == "failed":
            self._bars.update(self._tasks[key], description=text)
        else:
            self._bars.update(
                self._tasks[key], description=text, completed=received_bytes, total=total_bytes
            )


@contextmanager
def transfer_lines(*, hidden: bool = False) -> Iterator[TransferLines]:
    """Show lines of progress on standard error, unless -q, -v or `hidden`."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        disable=hidden or not progress_shown(),
    ) as bars:
        yield TransferLines(bars)
