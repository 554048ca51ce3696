"""Set a fresh board up over SSH."""

import sys
import tempfile
from pathlib import Path

import click

from toolkit.cli.actions.board.shell import open_shell
from toolkit.cli.actions.outputs import print_result
from toolkit.cli.commands.board import Init, SetupOptions
from toolkit.cli.log import progress_shown
from toolkit.fleet.boards.init import InitSettings, StepResult, set_up
from toolkit.fleet.boards.request import InitRequest, check_request, parse_labels
from toolkit.fleet.boards.setup import PackagesFrom


def init(options: Init) -> None:
    """Set a board up and print each step. Raises TandemError, click.UsageError."""
    setup = options.setup
    request = InitRequest(
        options.device,
        setup.profile,
        setup.broker,
        setup.fleet,
        setup.dev,
        parse_labels(options.labels),
        setup.smp_device,
    )
    check_request(request)
    settings = init_settings(setup, setup.wheel)
    with open_shell(options.address) as shell, tempfile.TemporaryDirectory() as work:
        result = set_up(
            shell,
            request,
            settings,
            Path(work),
            dry_run=options.dry_run,
            on_step=(lambda _step: None) if options.as_json else _say_step,
            on_begin=_say_begin,
        )
    verb = "would be" if options.dry_run else "is"
    text = f"{result.board} {verb} set up as {result.device}"
    print_result(result, text, as_json=options.as_json)


def init_settings(setup: SetupOptions, wheel: Path | None) -> InitSettings:
    """Return what is installed. Raises click.UsageError: `--packages` is no folder."""
    return InitSettings(
        wheel,
        _packages_from(setup.packages),
        setup.extras,
        setup.user,
        setup.power_mode,
        setup.overwrite,
        setup.timeout_s,
    )


def _packages_from(text: str) -> PackagesFrom:
    """Return who downloads packages; UsageError if it is none and no folder."""
    if text == "host":
        return "host"
    if text == "board":
        return "board"
    folder = Path(text)
    if not folder.is_dir():
        raise click.UsageError(f"--packages {text}: write host, board, or a folder of wheels")
    return folder.resolve()


def _say_step(step: StepResult) -> None:
    click.echo(f"{step.step:<18} {step.outcome:<9} {step.detail}")


def _say_begin(step: str, detail: str) -> None:
    """Say on a terminal what takes a while now."""
    if progress_shown() and sys.stderr.isatty():
        click.secho(f"{step}: {detail} ...", dim=True, err=True)
