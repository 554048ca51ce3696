"""`tandem board init`: set a fresh board up over SSH."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from toolkit.cli.log import progress_shown
from toolkit.cli.options.board import open_shell
from toolkit.cli.options.finite import FiniteRange
from toolkit.cli.options.fleet import json_option

if TYPE_CHECKING:
    from toolkit.fleet.boards.init import StepResult
    from toolkit.fleet.boards.setup import PackagesFrom

F = TypeVar("F", bound=Callable[..., Any])
OPTIONS = (
    click.option("--profile", default="", metavar="NAME",
        help="The board's profile; by default the one with its part number."),
    click.option("--broker", default="", metavar="HOST[:PORT]",
        help="The broker; by default the one of fleet.toml."),
    click.option("--fleet", type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="The fleet's folder: its trust goes to the board, its CA certifies the board's key."),
    click.option("--dev", is_flag=True, help="A bench: take releases that nobody signed."),
    click.option("--serial", "smp_device", default="", metavar="TTY",
        help="Take releases over this line of the board too: /dev/ttyGS0 is its USB."),
    click.option("--power-mode", default="", metavar="MODE",
        help="Set nvpmodel's mode, by name or number; by default it is kept."),
    click.option("--packages", default="host", show_default=True, metavar="host|board|DIR",
        help="Who downloads what the board lacks: this host, which sends it; the board; or "
        "nobody, and it is in this folder of wheels."),
    click.option("--wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Tandem's wheel; by default it is built of the checkout."),
    click.option("--extra", "extras", multiple=True, default=("fleet", "serial"),
        show_default=True, metavar="NAME",
        help="Extras of tandem-edge, such as portable (onnxruntime). Repeatable."),
    click.option("--user", default="tandem", show_default=True,
        help="As whom the agent runs; made if there is none."),
    click.option("--overwrite", is_flag=True,
        help="Replace an agent.toml that was changed on the board."),
    click.option("--timeout", "timeout_s", type=FiniteRange(min=1.0), default=60.0,
        show_default=True, help="Seconds until the agent has to answer."),
)  # fmt: skip


def init_options(command: F) -> F:
    """Add the options that `init` and `provision` share."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command(epilog="Example: tandem board init ssh://robot@192.168.55.1 --fleet robots")
@click.argument("address", metavar="ssh://USER@HOST")
@click.option("--device", default="", metavar="ID", help="By default the board's host name.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE",
    help="What rollouts may choose the board by. Repeatable.")  # fmt: skip
@init_options
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@json_option
def init(
    address: str,
    device: str,
    labels: tuple[str, ...],
    profile: str,
    broker: str,
    fleet: Path | None,
    dev: bool,
    smp_device: str,
    power_mode: str,
    packages: str,
    wheel: Path | None,
    extras: tuple[str, ...],
    user: str,
    overwrite: bool,
    timeout_s: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Install the agent on a board over SSH, give it an identity, start it, wait for its answer.

    It gets a Python environment of its own beside JetPack's packages; OpenCV, NumPy and TensorRT
    of the system stay as they are, which is compared at the end. Steps that are done already are
    left alone: run it again after a fault, or for a newer Tandem. sudo's password is asked for
    once, or taken from TANDEM_SUDO_PASSWORD. Exit status 1: a step failed; those before it stay.
    """
    from toolkit.fleet.boards.init import InitSettings, set_up
    from toolkit.fleet.boards.request import InitRequest, check_request, parse_labels

    request = InitRequest(device, profile, broker, fleet, dev, parse_labels(labels), smp_device)
    check_request(request)
    settings = InitSettings(
        wheel, packages_from(packages), extras, user, power_mode, overwrite, timeout_s
    )
    with open_shell(address) as shell, tempfile.TemporaryDirectory() as work:
        result = set_up(
            shell,
            request,
            settings,
            Path(work),
            dry_run=dry_run,
            on_step=(lambda _step: None) if as_json else _say_step,
            on_begin=_say_begin,
        )
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
        return
    verb = "would be" if dry_run else "is"
    click.echo(f"{result.board} {verb} set up as {result.device}")


def packages_from(text: str) -> "PackagesFrom":
    """Return who downloads packages; UsageError if it is none and no folder."""
    if text == "host":
        return "host"
    if text == "board":
        return "board"
    folder = Path(text)
    if not folder.is_dir():
        raise click.UsageError(f"--packages {text}: write host, board, or a folder of wheels")
    return folder.resolve()


def _say_step(step: "StepResult") -> None:
    click.echo(f"{step.step:<18} {step.outcome:<9} {step.detail}")


def _say_begin(step: str, detail: str) -> None:
    """Say on a terminal what takes a while now."""
    if progress_shown() and sys.stderr.isatty():
        click.secho(f"{step}: {detail} ...", dim=True, err=True)
