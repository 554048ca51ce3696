"""Options that the commands of `tandem fleet` share."""

from pathlib import Path

import click

fleet_option = click.option(
    "--fleet",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    show_default="this folder",
    envvar="TANDEM_FLEET",
    show_envvar=True,
    help="The fleet's folder.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
