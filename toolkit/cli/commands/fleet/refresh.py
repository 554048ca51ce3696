"""`tandem fleet refresh`: sign what says that the repository is fresh again."""

from pathlib import Path

import click
import msgspec

from toolkit.cli.options.fleet import fleet_option, json_option


@click.command(epilog="Example: tandem fleet refresh --fleet fleet")
@fleet_option
@json_option
def refresh(folder: Path, as_json: bool) -> None:
    """Sign the timestamp of the repository again, and the snapshot where it is due.

    A device that finds no fresh timestamp installs nothing: run this from time to time, for
    example by a timer. Prints until when each signature holds.
    """
    from toolkit.fleet.trust.repository import FleetRepository

    repository = FleetRepository(folder)
    repository.refresh()
    rows = repository.expiries()
    if as_json:
        click.echo(msgspec.json.encode(rows))
        return
    for row in rows:
        click.echo(f"{row.role:10} version {row.version:4}  until {row.expires:%Y-%m-%d %H:%M} UTC")
