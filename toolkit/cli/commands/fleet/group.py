"""`tandem fleet`: the table of its subcommands."""

import click

from toolkit.cli.commands.fleet.audit import audit
from toolkit.cli.commands.fleet.devices import device, devices
from toolkit.cli.commands.fleet.logs import logs
from toolkit.cli.commands.fleet.rollout import rollback, rollout
from toolkit.cli.commands.fleet.serve import serve

SUBCOMMANDS: tuple[click.Command, ...] = (
    serve,
    rollout,
    rollback,
    devices,
    device,
    logs,
    audit,
)


@click.group(epilog="Example: tandem fleet devices --fleet fleet/ --watch")
def fleet() -> None:
    """Roll releases out to many devices, group by group."""


for _command in SUBCOMMANDS:
    fleet.add_command(_command)
