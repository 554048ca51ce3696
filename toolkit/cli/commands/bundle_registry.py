"""`tandem bundle push` and `pull`: bundles in OCI registries."""

from pathlib import Path

import click
import msgspec

from toolkit.cli.options.fleet import json_option
from toolkit.cli.options.progress import progress_bar
from toolkit.cli.options.registry import registry_client, registry_options


@click.command(
    epilog="Example: tandem bundle push robot.bundle oci://registry.example.com/robots/robot:1.0.0"
)
@click.argument("bundle", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("reference", metavar="oci://HOST/NAME:TAG")
@registry_options
@json_option
def push(bundle: Path, reference: str, ca: Path | None, plain_http: bool, as_json: bool) -> None:
    """Push BUNDLE to a registry. It is sent in pieces; those that are there already are not.

    User and password come from TANDEM_REGISTRY_USER and TANDEM_REGISTRY_PASSWORD, or from what
    `docker login` has stored.
    """
    from toolkit.fleet.registry.transfer import push as push_bundle

    with (
        registry_client(reference, ca, plain_http=plain_http) as client,
        progress_bar(bundle.name) as report,
    ):
        pushed = push_bundle(client, bundle, report)
    if as_json:
        click.echo(msgspec.json.encode(pushed).decode())
        return
    sent = f"{pushed.sent_bytes / 1e6:.1f} MB" if pushed.sent_bytes else "nothing, it was there"
    click.echo(f"pushed {pushed.reference}\n{pushed.digest}\nsent {sent}")


@click.command(
    epilog="Example: tandem bundle pull oci://registry.example.com/robots/robot:1.0.0 "
    "-o robot.bundle"
)
@click.argument("reference", metavar="oci://HOST/NAME:TAG|@DIGEST")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The bundle to write.",
)
@registry_options
@json_option
def pull(reference: str, output: Path, ca: Path | None, plain_http: bool, as_json: bool) -> None:
    """Pull a bundle from a registry, and check every byte of it.

    What has come stays in a file beside OUTPUT that ends in .part; the next pull goes on with it.
    """
    from toolkit.fleet.bundles.inspection import sha256_of
    from toolkit.fleet.registry.transfer import pull as pull_bundle
    from toolkit.fleet.registry.transfer import resolve

    with (
        registry_client(reference, ca, plain_http=plain_http) as client,
        progress_bar(output.name) as report,
    ):
        resolved = resolve(client)
        pull_bundle(client, resolved, output, report)
        named = client.reference.at(resolved.digest)
    if as_json:
        document = {
            "reference": str(named),
            "sha256": sha256_of(output),
            "bytes": resolved.bytes,
        }
        click.echo(msgspec.json.encode(document).decode())
        return
    click.echo(f"wrote {output}, {resolved.bytes / 1e6:.1f} MB, from {named}")
