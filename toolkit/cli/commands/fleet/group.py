"""`tandem fleet`: the keys and signed releases of a fleet."""

import click

from toolkit.cli.commands.fleet.init import init
from toolkit.cli.commands.fleet.keys import keys
from toolkit.cli.commands.fleet.publish import publish
from toolkit.cli.commands.fleet.refresh import refresh

_EXAMPLES = """\b
Examples:
  tandem fleet init fleet --root-keys 3 --threshold 2
  tandem fleet publish person.bundle --fleet fleet
  tandem fleet refresh --fleet fleet
"""


@click.group(epilog=_EXAMPLES)
def fleet() -> None:
    """Make a fleet's keys, publish signed releases, and keep their signatures fresh."""


for _command in (init, publish, refresh, keys):
    fleet.add_command(_command)
