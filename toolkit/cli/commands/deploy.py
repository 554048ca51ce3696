"""`tandem deploy`: send a bundle to a device and wait until it runs there."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from device.engine.manifest import UNCALIBRATED
from device.errors import DeployError, EngineError
from device.update.bundle import ENGINE, extract_bundle
from toolkit.cli.log import progress_shown
from toolkit.cli.options.finite import FiniteRange
from toolkit.fleet.deploy import DeployProgress, DeployResult, deploy_bundle, parse_broker

# Phase in the device's report -> text for the user.
PHASES = {
    "waiting": "waiting for the device",
    "idle": "waiting for the device",
    "downloading": "downloading",
    "staging": "checking and unpacking",
    "trial": "on trial",
    "live": "live",
    "rolled_back": "rolled back",
    "refused": "refused",
}

EPILOG = "Example: tandem deploy person.bundle --device board-1 --broker 192.168.1.10:1883"


@click.command(epilog=EPILOG)
@click.argument("bundle", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--device", required=True, metavar="ID", help="The device's id in agent.toml.")
@click.option("--broker", required=True, metavar="HOST:PORT", help="The MQTT broker.")
@click.option("--username", help="User name for the broker.")
@click.option(
    "--password",
    envvar="TANDEM_MQTT_PASSWORD",
    show_envvar=True,
    help="Password for the broker; prefer the environment variable.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0.1),
    default=120.0,
    show_default=True,
    help="Give up when the device is silent for this many seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def deploy(
    bundle: Path,
    device: str,
    broker: str,
    username: str | None,
    password: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Deploy BUNDLE to a device and wait until it is live.

    The device downloads what it lacks, starts the release on trial, and rolls back by itself if it
    gives no result. Exit status 0 only if the release is live.
    """
    address = parse_broker(broker, username, password)
    _warn(bundle)
    if as_json:
        result = deploy_bundle(bundle, device, address, timeout_s=timeout_s)
        click.echo(msgspec.json.encode(result).decode())
        if not result.live:
            sys.exit(1)
        return
    with _progress() as progress:
        show = _shower(progress)
        result = deploy_bundle(bundle, device, address, timeout_s=timeout_s, on_progress=show)
    click.echo(_sentence(result))


def _warn(bundle: Path) -> None:
    """Warn if the engine's INT8 ranges were never measured."""
    from device.engine.file import open_engine  # numpy is not needed to show the help

    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "bundle"
        extract_bundle(bundle, into)
        try:
            with open_engine(into / ENGINE) as opened:
                uncalibrated = opened.manifest.uncalibrated
        except EngineError:
            return  # perhaps of a newer version: the device checks it and reports why
        if uncalibrated:
            click.secho(UNCALIBRATED, fg="red", err=True)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        disable=not progress_shown(),
    )


def _shower(progress: Progress) -> Callable[[DeployProgress], None]:
    task = progress.add_task("", total=None, visible=False)  # shown with the first report

    def show(state: DeployProgress) -> None:
        progress.update(
            task,
            description=PHASES.get(state.phase, state.phase),
            completed=state.received_bytes,
            total=state.total_bytes,
            visible=True,
        )

    return show


def _sentence(result: DeployResult) -> str:
    """Return one line for a live release; raise DeployError with the reason for any other."""
    what = f"{result.name} {result.version}"
    if not result.live:
        word = {"rolled_back": "was rolled back on", "refused": "was refused by"}.get(
            result.phase, "is not live on"
        )
        raise DeployError(f"{what} {word} {result.device}: {result.reason}")
    return (
        f"{what} is live on {result.device} after {result.duration_s:.1f} s "
        f"({result.sent_bytes / 1e6:.1f} of {result.total_bytes / 1e6:.1f} MB sent)"
    )
