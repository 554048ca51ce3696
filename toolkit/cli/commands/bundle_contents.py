"""`tandem bundle inspect`, `verify`, `diff` and `sbom`: what bundles hold, and what changed."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from device.errors import TandemError
from toolkit.cli.options.fleet import json_option
from toolkit.errors import NotComparedError

BUNDLE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(epilog="Example: tandem bundle inspect robot.bundle")
@click.argument("bundle", type=BUNDLE)
@json_option
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what BUNDLE holds and says of itself; every hash is checked first.

    Of a bundle in a signed repository it says who has signed it; `tandem bundle verify` checks
    that.
    """
    from toolkit.cli.bundle_text import bundle_table
    from toolkit.fleet.bundles.inspection import describe
    from toolkit.fleet.bundles.unpacked import unpacked

    with unpacked(bundle) as opened:
        view = describe(opened)
    _print(view, None if as_json else bundle_table(view))


@click.command(
    epilog="Example: tandem bundle verify robot.bundle --trust fleet/trust "
    "--repository fleet/repository"
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--trust",
    type=click.Path(exists=True, path_type=Path),
    metavar="ROOT",
    help="Check the fleet's signature, too: by a root.json, or the folder with it.",
)
@click.option(
    "--repository",
    metavar="DIR|URL",
    help="Where the signed metadata are.  [default: where the bundle lies]",
)
@json_option
@click.pass_context
def verify(
    ctx: click.Context, bundle: Path, trust: Path | None, repository: str | None, as_json: bool
) -> None:
    """Check BUNDLE: every hash, its engines, pipeline and labels; with --trust the signature.

    Exit status: 0, or 1 if a check failed, or 2 if it could not be checked.
    """
    from toolkit.cli.bundle_text import checks_table
    from toolkit.fleet.bundles.signature import repository_of
    from toolkit.fleet.bundles.verify import check_signature, verify_contents

    with _status_2():
        _need_file(bundle)
        place = repository or repository_of(bundle)
        if repository is not None and trust is None:
            raise click.UsageError("--repository is where the signature is; give --trust, too.")
        if trust is not None and place is None:
            raise click.UsageError(
                f"{bundle} lies in no signed repository: name it with --repository."
            )
        with tempfile.TemporaryDirectory(prefix="tandem-bundle-") as folder:
            checks = verify_contents(bundle, Path(folder) / "bundle")
        if trust is not None:
            checks += (check_signature(bundle, trust, str(place)),)
    _print(checks, None if as_json else checks_table(checks))
    ctx.exit(0 if all(check.passed for check in checks) else 1)


@click.command(epilog="Example: tandem bundle diff robot-1.bundle robot-2.bundle")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="List equal parts, too.")
@json_option
@click.pass_context
def diff(ctx: click.Context, a: Path, b: Path, every: bool, as_json: bool) -> None:
    """Say what changed from bundle A to bundle B, and what a board that runs A fetches for B.

    Settings of the pipeline, labels, what is said of the release, and the engines tensor by
    tensor. Exit status: 0 if they are the same, 1 if not, or 2 if they could not be compared.
    """
    from toolkit.cli.bundle_text import difference_table
    from toolkit.fleet.bundles.diff import compare_bundles
    from toolkit.fleet.bundles.unpacked import unpacked

    with _status_2():
        for path in (a, b):
            _need_file(path)
        with unpacked(a) as before, unpacked(b) as after:
            difference = compare_bundles(before, after)
    _print(difference, None if as_json else difference_table(difference, every=every))
    ctx.exit(0 if difference.same else 1)


@click.command(epilog="Example: tandem bundle sbom robot.bundle")
@click.argument("bundle", type=BUNDLE)
def sbom(bundle: Path) -> None:
    """Print the bill of materials of BUNDLE: CycloneDX 1.6 in JSON.

    It is the one in the bundle; for a bundle of an earlier version one is made.
    """
    from device.update.bundle import BOM
    from toolkit.fleet.bundles.sbom import bill_of_materials
    from toolkit.fleet.bundles.unpacked import unpacked

    with unpacked(bundle) as opened:
        held = opened.folder / BOM
        if held.exists():
            text = held.read_bytes()
        else:
            manifests = {name: engine.manifest for name, engine in opened.engines.items()}
            text = bill_of_materials(opened.info, manifests)
    click.echo(text.decode(), nl=False)


@contextmanager
def _status_2() -> Iterator[None]:
    """End with status 2 where nothing can be said: 1 says that something differs or failed."""
    try:
        yield
    except TandemError as error:
        raise NotComparedError(str(error)) from error


def _need_file(path: Path) -> None:
    if not path.is_file():
        raise NotComparedError(f"there is no bundle {path}: `tandem bundle create` writes one")


def _print(value: object, shown: object) -> None:
    """Print a value as JSON, or what is shown of it."""
    if shown is None:
        click.echo(msgspec.json.encode(value).decode())
        return
    from rich.console import Console

    Console().print(shown)
