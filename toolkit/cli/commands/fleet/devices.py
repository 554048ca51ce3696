"""`tandem fleet devices` and `tandem fleet device`: who is in the fleet, and what they run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.options.finite import FiniteRange
from toolkit.cli.options.fleet import fleet_option, json_option, operator, show, watch_option

if TYPE_CHECKING:
    from toolkit.fleet.server.views import DeviceView


@click.command(epilog="Example: tandem fleet devices --fleet fleet/ --where label.site=lab --watch")
@fleet_option
@click.option("--where", default="", metavar="LIST",
    help="Only devices that fulfil all of it, such as jetpack>=6,label.site=lab.")  # fmt: skip
@click.option(
    "--state", metavar="STATE", help="Only devices that are online, silent, stopped, lost..."
)
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
    from toolkit.fleet.server.views import device_views
    from toolkit.fleet.store.devices import load_devices, load_ear

    database = load_fleet(folder).open_store()
    requirements = parse_requirements(where)

    def read() -> "Sequence[DeviceView]":
        ear = load_ear(database)
        targets = {row.id: row.target(ear) for row in load_devices(database)}
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
    from toolkit.fleet.server.operations import unknown_device
    from toolkit.fleet.server.views import device_views

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
    from toolkit.fleet.server.operations import label_device

    database = load_fleet(folder).open_store()
    try:
        label_device(database, device_id, labels, operator())
    finally:
        database.close()


@device.command(
    "run", epilog="Example: tandem fleet device run board-1 log lines=50 --fleet fleet/"
)
@click.argument("device_id", metavar="ID")
@click.argument("op", metavar="OP")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE...]")
@fleet_option
@click.option("--wait", "wait_s", type=FiniteRange(min=0.0), default=60.0, show_default=True,
    metavar="S", help="So long for its end; 0: give the command and go.")  # fmt: skip
@click.option("--expires", "expires_s", type=FiniteRange(min=1.0, max=30 * 86400.0), default=300.0,
    show_default=True, metavar="S",
    help="A device that hears of it later does not execute it.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write the picture of a snapshot, or the result in JSON, to this file.")  # fmt: skip
@json_option
def run_command(
    device_id: str,
    op: str,
    words: tuple[str, ...],
    folder: Path,
    wait_s: float,
    expires_s: float,
    output: Path | None,
    as_json: bool,
) -> None:
    """Have the device ID do the operation OP once.

    Operations: restart; pipeline state=running|stopped; snapshot [camera= width= quality=];
    log [lines= source=all|agent|pipeline]; logs [seconds=], for `tandem fleet logs -f` to follow
    its lines; report; reboot, where agent.toml allows it.
    """
    from toolkit.cli.commands.fleet.command_output import print_given, write_result
    from toolkit.fleet.fleet_folder import load_fleet
    from toolkit.fleet.server.commands import give, make_command

    fleet = load_fleet(folder)
    database = fleet.open_store()
    try:
        command = make_command(database, device_id, op, words, expires_s=expires_s, who=operator())
    finally:
        database.close()
    given = give(fleet, command, wait_s=wait_s)
    if output is not None and given.state is not None and given.state.status == "successful":
        write_result(given.state, output)
    print_given(given, as_json=as_json, wait_s=wait_s)
    if wait_s and (given.state is None or given.state.status != "successful"):
        raise SystemExit(1)


@device.command("clear", epilog="Example: tandem fleet device clear board-1 --fleet fleet/")
@click.argument("device_id", metavar="ID")
@fleet_option
@json_option
def clear(device_id: str, folder: Path, as_json: bool) -> None:
    """Show the commands of the device ID that have ended, and clear them from the broker.

    `tandem fleet device run` clears those for whose end it has waited.
    """
    from toolkit.cli.commands.fleet.command_output import print_ended
    from toolkit.fleet.fleet_folder import load_fleet
    from toolkit.fleet.server.commands import clear_ended

    print_ended(clear_ended(load_fleet(folder), device_id), as_json=as_json)
