"""`tandem fleet devices` and `tandem fleet device`: who is in the fleet, and what they run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.options.fleet import fleet_option, json_option, operator, show, watch_option

if TYPE_CHECKING:
    from toolkit.fleet.views import DeviceView


@click.command(epilog="Example: tandem fleet devices --fleet fleet/ --where label.site=lab --watch")
@fleet_option
@click.option("--where", default="", metavar="LIST",
    help="Only devices that fulfil all of it, such as jetpack>=6,label.site=lab.")  # fmt: skip
@click.option("--state", metavar="STATE", help="Only devices that are online, stopped, lost...")
@click.option("--phase", metavar="PHASE",
    help="Only devices in this phase of their rollout: live, failed, ...")  # fmt: skip
@click.option("--rollout", "number", type=click.IntRange(min=1), metavar="N",
    help="Only devices of this rollout.")  # fmt: skip
@json_option
@watch_option
def devices(
    folder: Path,
    where: str,
    state: str | None,
    phase: str | None,
    number: int | None,
    as_json: bool,
    watch: bool,
) -> None:
    """List the devices of the fleet: what they run, and how far an update is."""
    from toolkit.cli.commands.fleet.tables import devices_table
    from toolkit.fleet.fleet_folder import load_fleet
    from toolkit.fleet.rollout.targets import fulfils, parse_requirements
    from toolkit.fleet.store.devices import load_devices
    from toolkit.fleet.views import device_views

    database = load_fleet(folder).open_store()
    requirements = parse_requirements(where)

    def read() -> "Sequence[DeviceView]":
        targets = {row.id: row.target() for row in load_devices(database)}
        return [
            view
            for view in device_views(database)
            if (not requirements or fulfils(targets[view.id], requirements))
            and state in (None, view.state)
            and phase in (None, view.phase)
            and number in (None, view.rollout)
        ]

    try:
        show(read, devices_table, as_json=as_json, watch=watch)
    finally:
        database.close()


@click.group(epilog="Example: tandem fleet device show board-1 --fleet fleet/")
def device() -> None:
    """Show and label one device."""


@device.command("show", epilog="Example: tandem fleet device show board-1 --fleet fleet/ --watch")
@click.argument("device_id", metavar="ID")
@fleet_option
@json_option
@watch_option
def show_device(device_id: str, folder: Path, as_json: bool, watch: bool) -> None:
    """Show all that is known of the device ID."""
    from toolkit.cli.commands.fleet.tables import device_table
    from toolkit.errors import RolloutError
    from toolkit.fleet.fleet_folder import load_fleet
    from toolkit.fleet.operations import unknown_device
    from toolkit.fleet.views import device_views

    database = load_fleet(folder).open_store()

    def read() -> "DeviceView":
        for view in device_views(database):
            if view.id == device_id:
                return view
        raise RolloutError(unknown_device(database, device_id))

    try:
        show(read, device_table, as_json=as_json, watch=watch)
    finally:
        database.close()


@device.command(epilog="Example: tandem fleet device label board-1 group=canary --fleet fleet/")
@click.argument("device_id", metavar="ID")
@click.argument("labels", nargs=-1, required=True, metavar="KEY=VALUE...")
@fleet_option
def label(device_id: str, labels: tuple[str, ...], folder: Path) -> None:
    """Give the device ID labels, or take them away (KEY=).

    They are above those that the device has of itself. Groups of rollouts are chosen by them.
    """
    from toolkit.fleet.fleet_folder import load_fleet
    from toolkit.fleet.operations import label_device

    database = load_fleet(folder).open_store()
    try:
        label_device(database, device_id, labels, operator())
    finally:
        database.close()
