"""Send a bundle to devices over MQTT and wait until it runs there."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import msgspec

from device.engine.file import read_manifest
from device.engine.manifest import UNCALIBRATED
from device.errors import DeployError, EngineError
from device.update.bundle import check_bundle, member_offsets
from toolkit.cli.actions.transfer import transfer_lines
from toolkit.cli.commands.deploy import Deploy
from toolkit.cli.log import warn
from toolkit.fleet.brokers.address import BrokerAddress, parse_broker
from toolkit.fleet.folder import broker_address
from toolkit.fleet.transports.deploy import DeployOptions, deploy_bundle
from toolkit.fleet.transports.device_deployment import DeployProgress, DeployResult

# Result other than "live" -> how it reads before the device.
FAILURES = {"rolled_back": "was rolled back on", "refused": "was refused by"}


def deploy(options: Deploy) -> None:
    """Deploy a bundle and print a line for each device.

    Exits with 1 where it is not live, with `--json`. Raises TandemError, click.UsageError.
    """
    address = _address(options)
    _check_bundle(options.bundle)
    how = DeployOptions(options.timeout_s, options.retry, options.fleet, options.earlier)
    send = partial(deploy_bundle, options.bundle, options.devices, address, how)
    if options.as_json:
        results = send()
        for result in results:
            click.echo(msgspec.json.encode(result).decode())
        raise click.exceptions.Exit(0 if all(result.live for result in results) else 1)
    with transfer_lines() as lines:

        def show(state: DeployProgress) -> None:
            received, total = state.received_bytes, state.total_bytes
            lines.show(state.device, state.phase, received, total, state.device)

        results = send(on_progress=show)
    for result in results:
        if result.live:
            click.echo(_sentence(result))
    _raise_failures(results)


def _address(options: Deploy) -> BrokerAddress:
    """Return the broker of the command line, or of the fleet."""
    username, password = options.login.username, options.login.password
    if options.broker is not None:
        return parse_broker(options.broker, username, password)
    if options.fleet is None:
        raise click.UsageError("name the broker with --broker, or a fleet with --fleet")
    return replace(broker_address(options.fleet), username=username, password=password)


def _check_bundle(bundle: Path) -> None:
    """Check the bundle, and warn of engines whose INT8 ranges were never measured."""
    info, _ = check_bundle(bundle)
    offsets = member_offsets(info)
    sizes = {entry.name: entry.bytes for entry in info.files}
    for engine in dict.fromkeys(run.engine for run in info.runs):
        models = ", ".join(run.name for run in info.runs if run.engine == engine)
        try:
            uncalibrated = read_manifest(bundle, offsets[engine], sizes[engine]).uncalibrated
        except EngineError:
            continue  # perhaps of a newer version: the device checks it and reports why
        if uncalibrated:
            warn(f"{models}: {UNCALIBRATED}" if models else UNCALIBRATED, "red")


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
