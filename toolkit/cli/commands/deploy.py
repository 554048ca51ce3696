"""`tandem deploy`: send a bundle to devices and wait until it runs there."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from device.engine.manifest import UNCALIBRATED
from device.errors import DeployError, EngineError
from device.update.bundle import check_bundle, member_offsets
from toolkit.cli.log import progress_shown, warn
from toolkit.cli.options.finite import FiniteRange
from toolkit.cli.phases import PHASES
from toolkit.fleet.brokers.address import BrokerAddress, parse_broker
from toolkit.fleet.transports.deploy import deploy_to_devices
from toolkit.fleet.transports.deployment import DeployProgress, DeployResult

# Result other than "live" -> how it reads before the device.
FAILURES = {"rolled_back": "was rolled back on", "refused": "was refused by"}

EPILOG = (
    "Example: tandem deploy person.bundle --device board-1 --device board-2 "
    "--broker 192.168.1.10:1883"
)


@click.command(epilog=EPILOG)
@click.argument("bundle", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--device",
    "devices",
    required=True,
    multiple=True,
    metavar="ID",
    help="A device's id in agent.toml. Repeatable.",
)
@click.option("--broker", metavar="HOST:PORT", help="The MQTT broker.  [default: that of --fleet]")
@click.option(
    "--fleet",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Sign with the keys of this fleet's folder; publishes the bundle there.",
)
@click.option(
    "--earlier",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder with earlier bundles: a device that runs one of them gets the differences from "
    "it alone. Those of --fleet are found without.",
)
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
    help="Give a device up when it is silent for this many seconds.",
)
@click.option("--retry", is_flag=True, help="Try the release also where it was rolled back before.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each device.")
def deploy(
    bundle: Path,
    devices: tuple[str, ...],
    broker: str | None,
    fleet: Path | None,
    earlier: Path | None,
    username: str | None,
    password: str | None,
    timeout_s: float,
    retry: bool,
    as_json: bool,
) -> None:
    """Deploy BUNDLE to one or more devices and wait until it is live on all.

    Each device downloads what it lacks, starts the release on trial, and rolls back by itself if it
    fails. It remembers that, and takes the same bundle again only with --retry. Exit status 0 only
    if the release is live on every device.
    """
    address = _address(broker, fleet, username, password)
    _warn(bundle)
    if as_json:
        results = deploy_to_devices(
            bundle,
            devices,
            address,
            timeout_s=timeout_s,
            retry=retry,
            fleet=fleet,
            earlier=earlier,
        )
        for result in results:
            click.echo(msgspec.json.encode(result).decode())
        if not all(result.live for result in results):
            sys.exit(1)
        return
    with _progress() as progress:
        show = _shower(progress, devices)
        results = deploy_to_devices(
            bundle,
            devices,
            address,
            timeout_s=timeout_s,
            retry=retry,
            fleet=fleet,
            earlier=earlier,
            on_progress=show,
        )
    for result in results:
        if result.live:
            click.echo(_sentence(result))
    _raise_failures(results)


def _address(
    broker: str | None, fleet: Path | None, username: str | None, password: str | None
) -> BrokerAddress:
    """Return the broker of the command line, or of the fleet."""
    if broker is not None:
        return parse_broker(broker, username, password)
    if fleet is None:
        raise click.UsageError("name the broker with --broker, or a fleet with --fleet")
    from toolkit.fleet.folder import broker_address  # its libraries are not needed without a fleet

    return replace(broker_address(fleet), username=username, password=password)


def _warn(bundle: Path) -> None:
    """Check the bundle, and warn of engines whose INT8 ranges were never measured."""
    from device.engine.file import read_manifest  # numpy is not needed to show the help

    info, _ = check_bundle(bundle)
    offsets = member_offsets(info)
    sizes = {entry.name: entry.bytes for entry in info.files}
    for engine in dict.fromkeys(one.engine for one in info.runs):
        models = ", ".join(one.name for one in info.runs if one.engine == engine)
        try:
            uncalibrated = read_manifest(bundle, offsets[engine], sizes[engine]).uncalibrated
        except EngineError:
            continue  # perhaps of a newer version: the device checks it and reports why
        if uncalibrated:
            warn(f"{models}: {UNCALIBRATED}" if models else UNCALIBRATED, "red")


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        disable=not progress_shown(),
    )


def _shower(progress: Progress, devices: Sequence[str]) -> Callable[[DeployProgress], None]:
    """Return what shows a line for each device, from its first report on."""
    tasks = {device: progress.add_task("", total=None, visible=False) for device in devices}

    def show(state: DeployProgress) -> None:
        progress.update(
            tasks[state.device],
            description=f"{state.device}: {PHASES.get(state.phase, state.phase)}",
            completed=state.received_bytes,
            total=state.total_bytes,
            visible=True,
        )

    return show


def _sentence(result: DeployResult) -> str:
    """Return one line on a result."""
    what = f"{result.name} {result.version}"
    if not result.live:
        words = FAILURES.get(result.phase, "is not live on")
        return f"{what} {words} {result.device}: {result.reason}"
    return (
        f"{what} is live on {result.device} after {result.duration_s:.1f} s "
        f"({result.sent_bytes / 1e6:.1f} of {result.total_bytes / 1e6:.1f} MB sent)"
    )


def _raise_failures(results: Sequence[DeployResult]) -> None:
    """Raise DeployError with a line for each device on which the release is not live."""
    failures = [_sentence(result) for result in results if not result.live]
    if failures and len(results) > 1:
        failures.insert(0, f"{len(failures)} of {len(results)} devices failed")
    if failures:
        raise DeployError("\n  ".join(failures))
