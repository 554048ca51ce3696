"""`tandem board`: the table of its subcommands."""

import click

from toolkit.cli.commands.board.care import info, logs, power_mode, reboot, shell
from toolkit.cli.commands.board.find import find
from toolkit.cli.commands.board.init import init
from toolkit.cli.commands.board.provision import provision
from toolkit.cli.failures import JsonErrorsGroup

SUBCOMMANDS: tuple[click.Command, ...] = (
    find,
    init,
    info,
    logs,
    shell,
    reboot,
    power_mode,
    provision,
)
EXAMPLES = """\b
Examples:
  tandem board init ssh://robot@192.168.55.1 --device board-1 --fleet robots
  tandem board find
  tandem board info ssh://robot@192.168.55.1
  tandem board logs -f ssh://robot@192.168.55.1
"""


@click.group(cls=JsonErrorsGroup, epilog=EXAMPLES)
def board() -> None:
    """Set a board up over SSH, look after it, and provision many at the line."""


for _command in SUBCOMMANDS:
    board.add_command(_command)
