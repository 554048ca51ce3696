"""`tandem fleet`: the table of its subcommands."""

import click

from toolkit.cli.commands.fleet.audit import audit
from toolkit.cli.commands.fleet.devices import device, devices
from toolkit.cli.commands.fleet.identity import identity
from toolkit.cli.commands.fleet.init import init
from toolkit.cli.commands.fleet.keys import keys
from toolkit.cli.commands.fleet.logs import logs
from toolkit.cli.commands.fleet.publish import publish
from toolkit.cli.commands.fleet.refresh import refresh
from toolkit.cli.commands.fleet.rollout import rollback, rollout
from toolkit.cli.commands.fleet.serve import serve
from toolkit.cli.commands.fleet.statement import statement
from toolkit.cli.commands.fleet.status import status

SUBCOMMANDS: tuple[click.Command, ...] = (
    init,
    identity,
    keys,
    status,
    publish,
    statement,
    refresh,
    serve,
    rollout,
    rollback,
    devices,
    device,
    logs,
    audit,
)
EXAMPLES = """\b
Examples:
  tandem fleet init fleet --root-keys 3 --threshold 2
  tandem fleet publish person.bundle --fleet fleet
  tandem fleet devices --fleet fleet --watch
  tandem fleet refresh --fleet fleet
  tandem fleet status --fleet fleet
"""


@click.group(epilog=EXAMPLES)
def fleet() -> None:
    """Sign releases, enrol devices, and roll releases out, group by group."""


for _command in SUBCOMMANDS:
    fleet.add_command(_command)
