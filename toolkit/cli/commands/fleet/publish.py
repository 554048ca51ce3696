"""`tandem fleet publish`: sign a bundle and add it to the repository."""

from pathlib import Path

import click
import msgspec

from toolkit.cli.options.fleet import fleet_option, json_option


@click.command(epilog="Example: tandem fleet publish person.bundle --fleet fleet")
@click.argument("bundle", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@fleet_option
@json_option
def publish(bundle: Path, folder: Path, as_json: bool) -> None:
    """Publish BUNDLE in the fleet's repository, signed by the targets key.

    A device installs only what is published. The same bundle once more changes nothing; other
    bytes need another version.
    """
    from toolkit.fleet.publish import publish_bundle
    from toolkit.fleet.repository import FleetRepository

    published = publish_bundle(FleetRepository(folder), bundle)
    if as_json:
        click.echo(msgspec.json.encode(published))
        return
    click.echo(f"published {published.target}, {published.bytes / 1e6:.1f} MB")
