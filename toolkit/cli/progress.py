"""What long commands say while they work: a bar on a terminal, else a line now and then."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate

from toolkit.cli.log import lines_shown, progress_shown, say

LOG = logging.getLogger("tandem")
LINE_S = 10.0
"""Seconds between two lines where no bar is shown, as in the log of a CI job."""
_NO_SHARES: Mapping[str, float] = {}


@contextmanager
def progress_bar(
    title: str, shares: Mapping[str, float] = _NO_SHARES
) -> Iterator[Callable[[str, float], None]]:
    """Show the steps and the remaining time on standard error; log what each step took.

    `shares`: the steps in their order, each with its share of the time. The bar is one for all
    steps then, else one for each, and every step says that it has passed.
    """
    steps = _Steps(title, shares)
    on_terminal = progress_shown() and sys.stderr.isatty()
    with _bar(title) if on_terminal else _lines(steps) as (write, update):

        def say_passed(passed: str) -> None:
            if passed and shares and lines_shown():
                write(passed)

        def report(step: str, share: float) -> None:
            say_passed(steps.report(step, share))
            update(f"{title}: {step}", steps.completed)

        yield report
    say_passed(steps.end())


Display = tuple[Callable[[str], None], Callable[[str, float], None]]
"""Prints a line; shows (step, share)."""


@contextmanager
def _bar(title: str) -> Iterator[Display]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(title, total=1.0)
        yield (
            lambda line: console.print(line, highlight=False),
            lambda step, share: bar.update(task, description=step, completed=share),
        )


class _Steps:
    """The step that a command is in, and the time that each took: of a clock, and of processors."""

    def __init__(self, title: str, shares: Mapping[str, float]) -> None:
        self._title, self._shares = title, shares
        self._step, self._share = "", 0.0
        self._began, self._began_cpu = time.monotonic(), cpu_seconds()
        starts = accumulate(shares.values(), initial=0.0)
        self._starts = dict(zip(shares, starts, strict=False))
        self._started = self._began

    @property
    def completed(self) -> float:
        """The share that is done: of all steps, or of this one where theirs are not known."""
        if not self._shares or not self._step:
            return self._share
        return self._starts[self._step] + self._share * self._shares[self._step]

    def report(self, step: str, share: float) -> str:
        """Note the progress; return what the step before took, "" where it goes on."""
        passed = ""
        if step != self._step:
            passed = self.end()
            self._step = step
            self._began, self._began_cpu = time.monotonic(), cpu_seconds()
            LOG.info("%s: %s", self._title, step)
        self._share = share
        return passed

    def end(self) -> str:
        """Return what the step took, "" if there was none; log it."""
        if not self._step:
            return ""
        wall, cpu = time.monotonic() - self._began, cpu_seconds() - self._began_cpu
        LOG.info("%s: %s took %.1f s, %.1f s of processor time", self._title, self._step, wall, cpu)
        return f"{self._title}: {self._step}, {wall:.0f} s"

    def line(self) -> str:
        """Return the step, what is done of it, and the seconds that it will take still."""
        done = self.completed
        name = f"{self._title}: {self._step}" if self._step else self._title
        elapsed = time.monotonic() - (self._started if self._shares else self._began)
        if not done:
            return f"{name}, {elapsed:.0f} s so far"
        rest_s = elapsed * (1.0 - done) / done
        of = "" if self._shares else " of this step"
        return f"{name}, {100 * done:.0f} %{of}, about {rest_s:.0f} s left"


@contextmanager
def _lines(steps: _Steps) -> Iterator[Display]:
    """Print a line each `LINE_S` seconds, also while a step says nothing."""
    shown = lines_shown()
    ended = threading.Event()

    def print_lines() -> None:
        while not ended.wait(LINE_S):
            say(steps.line())

    thread = threading.Thread(target=print_lines, daemon=True)
    if shown:
        thread.start()
    try:
        yield say, lambda step, share: None
    finally:
        ended.set()
        if shown:
            thread.join()


def cpu_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
