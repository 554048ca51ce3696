"""`tandem fleet publish`: sign a bundle and add it to the repository."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from toolkit.cli.options.fleet import fleet_option, json_option
from toolkit.cli.options.progress import progress_bar
from toolkit.cli.options.registry import registry_client, registry_options

if TYPE_CHECKING:
    from toolkit.fleet.trust.publish import Published

REGISTRY = "oci://"


@click.command(
    epilog="Examples: tandem fleet publish person.bundle --fleet fleet; "
    "tandem fleet publish oci://registry.example.com/robots/person:1.0 --fleet fleet"
)
@click.argument("bundle", metavar="BUNDLE|oci://HOST/NAME:TAG")
@fleet_option
@registry_options
@json_option
def publish(bundle: str, folder: Path, ca: Path | None, plain_http: bool, as_json: bool) -> None:
    """Publish BUNDLE in the fleet's repository, signed by the targets key.

    A device installs only what is published. The same bundle once more changes nothing; other
    bytes need another version. The tag of a bundle in a registry is resolved once, now: what it
    names later changes nothing.
    """
    if bundle.startswith(REGISTRY):
        published = _from_registry(bundle, folder, ca, plain_http=plain_http)
    elif not Path(bundle).is_file():
        raise click.BadParameter(f"there is no file {bundle}", param_hint="BUNDLE")
    else:
        published = _publish(Path(bundle), folder)
    if as_json:
        click.echo(msgspec.json.encode(published))
        return
    click.echo(f"published {published.target}, {published.bytes / 1e6:.1f} MB")
    if published.source:
        click.echo(f"it is {published.source}")


def _from_registry(text: str, folder: Path, ca: Path | None, *, plain_http: bool) -> "Published":
    from toolkit.fleet.registry.transfer import pull, resolve

    with (
        tempfile.TemporaryDirectory(prefix="tandem-pull-") as place,
        registry_client(text, ca, plain_http=plain_http) as client,
    ):
        resolved = resolve(client)
        path = Path(place) / "pulled.bundle"
        with progress_bar(client.reference.name) as report:
            pull(client, resolved, path, report)
        return _publish(path, folder, str(client.reference.at(resolved.digest)))


def _publish(bundle: Path, folder: Path, source: str = "") -> "Published":
    from toolkit.fleet.trust.publish import publish_bundle
    from toolkit.fleet.trust.repository import FleetRepository

    return publish_bundle(FleetRepository(folder), bundle, source)
