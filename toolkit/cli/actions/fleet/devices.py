"""Print who is in a fleet, label devices and have them do something."""

from collections.abc import Sequence

from toolkit.cli.actions.fleet.command_output import print_ended, print_given, write_result
from toolkit.cli.actions.fleet.tables import device_table, devices_table
from toolkit.cli.actions.fleet.views import open_store, operator, show
from toolkit.cli.commands.fleet import Clear, Devices, Label, RunCommand, ShowDevice
from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.rollout.targets import fulfils, parse_requirements
from toolkit.fleet.server.commands import clear_ended, give, make_command
from toolkit.fleet.server.operations import label_device, unknown_device
from toolkit.fleet.server.views import DeviceView, device_views
from toolkit.fleet.store.devices import load_devices, load_ear


def devices(options: Devices) -> None:
    """Print the devices that fulfil the options. Raises TandemError."""
    with open_store(options.folder) as database:
        requirements = parse_requirements(options.where)

        def read() -> Sequence[DeviceView]:
            ear = load_ear(database)
            targets = {row.id: row.target(ear) for row in load_devices(database)}
            return [
                view
                for view in device_views(database)
                if (not requirements or fulfils(targets[view.id], requirements))
                and options.state in (None, view.state)
                and options.phase in (None, view.phase)
                and options.number in (None, view.rollout)
            ]

        show(read, devices_table, as_json=options.as_json, watch=options.watch)


def show_device(options: ShowDevice) -> None:
    """Print one device. Raises RolloutError: it is not known."""
    with open_store(options.folder) as database:

        def read() -> DeviceView:
            for view in device_views(database):
                if view.id == options.device:
                    return view
            raise RolloutError(unknown_device(database, options.device))

        show(read, device_table, as_json=options.as_json, watch=options.watch)


def label(options: Label) -> None:
    """Change the labels of a device. Raises TandemError."""
    with open_store(options.folder) as database:
        label_device(database, options.device, options.labels, operator())


def run_command(options: RunCommand) -> None:
    """Give a command, and wait for its end; exits with 1 if it failed. Raises TandemError."""
    fleet, wait_s = load_fleet(options.folder), options.wait_s
    with open_store(options.folder) as database:
        command = make_command(
            database,
            options.device,
            options.op,
            options.words,
            expires_s=options.expires_s,
            who=operator(),
        )
    given = give(fleet, command, wait_s=wait_s)
    succeeded = given.state is not None and given.state.status == "successful"
    if options.output is not None and given.state is not None and succeeded:
        write_result(given.state, options.output)
    print_given(given, as_json=options.as_json, wait_s=wait_s)
    if wait_s and not succeeded:
        raise SystemExit(1)


def clear(options: Clear) -> None:
    """Print the commands that have ended, and clear them. Raises TandemError."""
    print_ended(clear_ended(load_fleet(options.folder), options.device), as_json=options.as_json)
