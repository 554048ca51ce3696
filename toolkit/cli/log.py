"""What the command line says beside its results: -v, -q and --log, for every command.

    (default)   warnings, and progress: bars on a terminal, else a line each ten seconds
    -v, -vv     also each step; also details and where an error came from
    -q          errors and results alone
    --log FILE  everything, with times, whatever the others say

Modules log with `logging.getLogger(__name__)`; only this one adds handlers.
"""

import logging
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

PACKAGES = ("tandem", "toolkit", "calibration", "device", "pipelines")
"""Loggers whose details are shown; those of libraries show warnings."""

LOG = logging.getLogger("tandem")
_KEY = "tandem.log"


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is shown: `level` on standard error, everything in `file`."""

    verbose: int = 0
    quiet: bool = False
    file: Path | None = None

    @property
    def level(self) -> int:
        """The level on standard error; the last of -v and -q on the command line does not win."""
        if self.quiet:
            return logging.ERROR
        return (logging.WARNING, logging.INFO, logging.DEBUG)[min(self.verbose, 2)]


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[Any]
else:
    _StreamHandler = logging.StreamHandler  # takes no parameter before Python 3.11


class _Stderr(_StreamHandler):
    """A handler of ours on standard error."""


class _File(logging.FileHandler):
    """A handler of ours into the file of --log."""


def start(ctx: click.Context) -> None:
    """Begin a command line with the default settings."""
    _apply(ctx.find_root().meta.setdefault(_KEY, LogSettings()))


def progress_shown() -> bool:
    """Whether progress bars are: with -q nothing moves, and with -v lines tell the steps."""
    return _settings().level == logging.WARNING


def lines_shown() -> bool:
    """Whether lines of progress are: unless -q, so with -v too, where no bar is."""
    return not _settings().quiet


def say(text: str) -> None:
    """Print a line of progress on standard error; the caller asks `lines_shown`."""
    LOG.debug("said: %s", text)
    click.echo(text, err=True)


def warn(text: str, colour: str = "yellow") -> None:
    """Print a warning in colour on standard error, unless -q; it goes to the log in any case."""
    LOG.debug("warned: %s", text)
    if not _settings().quiet:
        click.secho(text, fg=colour, err=True)


def _settings() -> LogSettings:
    ctx = click.get_current_context(silent=True)
    settings = LogSettings() if ctx is None else ctx.find_root().meta.get(_KEY, LogSettings())
    assert isinstance(settings, LogSettings)
    return settings


def add_log_options(command: click.Command) -> None:
    """Let a command, and those below it, take -v, -q and --log. Once or more often."""
    if isinstance(command, click.Group):
        for below in command.commands.values():
            add_log_options(below)
    if not any(parameter.name == "verbose" for parameter in command.params):
        command.params += log_options()


def log_options() -> list[click.Parameter]:
    """Return the three options."""
    return [
        click.Option(["-v", "--verbose"], count=True, expose_value=False,
            callback=_setter("verbose"), help="Show each step; -vv: details."),
        click.Option(["-q", "--quiet"], is_flag=True, expose_value=False,
            callback=_setter("quiet"), help="Print only errors and results."),
        click.Option(["--log"], type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
            expose_value=False, callback=_setter("file"), help="Write a log with all details."),
    ]  # fmt: skip


def _setter(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def set_value(ctx: click.Context, param: click.Parameter, value: Any) -> None:  # noqa: ANN401  (click's)
        if not value or ctx.resilient_parsing:
            return
        meta = ctx.find_root().meta
        meta[_KEY] = replace(meta.get(_KEY, LogSettings()), **{name: value})
        try:
            _apply(meta[_KEY])
        except OSError as err:
            raise click.BadParameter(f"cannot write {value}: {err.strerror}") from err
        if name == "file":
            LOG.debug("tandem %s: %s", version("tandem-edge"), shlex.join(sys.argv[1:]))

    return set_value


def _apply(settings: LogSettings) -> None:
    """Put our handlers in the place of those that are there."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, (_Stderr, _File))]:
        root.removeHandler(handler)
        handler.close()
    screen = _Stderr()
    screen.setLevel(settings.level)
    screen.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root.addHandler(screen)
    if settings.file is not None:
        file = _File(settings.file, encoding="utf-8")
        formatter = logging.Formatter(
            "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
        formatter.converter = time.gmtime
        file.setFormatter(formatter)
        root.addHandler(file)
    details = logging.DEBUG if settings.file is not None else settings.level
    for name in PACKAGES:
        logging.getLogger(name).setLevel(details)
