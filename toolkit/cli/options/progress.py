"""The bar of long commands."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from toolkit.cli.log import progress_shown

LOG = logging.getLogger("tandem")


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """Show the steps and the remaining time on standard error; log each step."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not progress_shown(),
    ) as bar:
        task = bar.add_task(title, total=1.0)
        last_step = ""

        def report(step: str, share: float) -> None:
            nonlocal last_step
            if step != last_step:
                LOG.info("%s: %s", title, step)
                last_step = step
            bar.update(task, description=f"{title}: {step}", completed=share)

        yield report
