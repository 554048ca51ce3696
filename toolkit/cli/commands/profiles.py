"""`tandem profiles`: the known devices, and the source of each figure."""

from dataclasses import dataclass

import click

from toolkit.cli.command import argument, command, json_option
from toolkit.cli.options.choices import complete_profile


@dataclass(frozen=True, slots=True)
class Profiles:
    """List the device profiles that models can be built for.

    Rates are dense (no sparsity) and at the highest clock of the module.

    \b
    Examples:
      tandem profiles                      all profiles
      tandem profiles show orin-nx-16gb    every figure with its source
      tandem profiles --json               the same for a program
    """

    as_json: bool = json_option("Print JSON instead of a table.")


@dataclass(frozen=True, slots=True)
class Show:
    """Explain one profile: a shipped NAME, or the path of a TOML file.

    \b
    Examples:
      tandem profiles                      all profiles
      tandem profiles show orin-nx-16gb    every figure with its source
      tandem profiles --json               the same for a program
    """

    name: str = argument(complete=complete_profile)
    as_json: bool = json_option("Print the profile as JSON.")


_overview = command(Profiles, "profiles:overview")
profiles = click.Group(
    "profiles",
    {"show": command(Show, "profiles:show")},
    help=_overview.help,
    epilog=_overview.epilog,
    params=_overview.params,
    callback=_overview.callback,
    invoke_without_command=True,
)
