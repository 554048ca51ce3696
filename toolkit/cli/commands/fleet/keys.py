"""`tandem fleet keys`: replace keys."""

from pathlib import Path

import click
import msgspec

from toolkit.cli.options.fleet import fleet_option, json_option

ROLES = ("root", "targets", "snapshot", "timestamp", "director")
EPILOG = "Example: tandem fleet keys rotate director --fleet fleet"


@click.group(epilog=EPILOG)
def keys() -> None:
    """Replace the fleet's keys."""


@keys.command(epilog=EPILOG)
@click.argument("role", type=click.Choice(ROLES))
@fleet_option
@json_option
def rotate(role: str, folder: Path, as_json: bool) -> None:
    """Make a new key for ROLE (for root: new keys, as many as before), signed by root's keys.

    Do this when a key may be known to others, and before the signature of root, targets or director
    ends. Boards follow by themselves. The old files go to keys/retired.
    """
    from toolkit.fleet.trust.repository import FleetRepository

    repository = FleetRepository(folder)
    repository.rotate(role)
    row = next(row for row in repository.expiries() if row.role == role)
    if as_json:
        click.echo(msgspec.json.encode(row))
        return
    click.echo(f"{role} has a new key, version {row.version}, until {row.expires:%Y-%m-%d} UTC")
