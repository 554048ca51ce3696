"""Make a fleet, replace its keys, and sign releases."""

import tempfile
from pathlib import Path

import click
import msgspec

from device.files import replace_file
from toolkit.cli.actions.outputs import print_result
from toolkit.cli.actions.registry import open_registry
from toolkit.cli.commands.fleet import Init, Publish, Refresh, Rotate, Statement
from toolkit.cli.progress import progress_bar
from toolkit.fleet.brokers.software import SOFTWARE
from toolkit.fleet.folder import BROKER, make_fleet
from toolkit.fleet.registry.transfer import pull, resolve
from toolkit.fleet.rollout.gates import parse_gates
from toolkit.fleet.trust.publish import Published, publish_bundle
from toolkit.fleet.trust.repository import FleetRepository
from toolkit.fleet.trust.statement import make_statement

REGISTRY = "oci://"


def init(options: Init) -> None:
    """Make the folder of a fleet. Raises TandemError."""
    folder = options.folder
    settings = make_fleet(
        folder,
        name=options.name or folder.resolve().name,
        broker=options.broker,
        hosts=options.hosts,
        root_keys=options.root_keys,
        threshold=options.threshold,
    )
    run = SOFTWARE[settings.broker.software].run.format(folder=folder.resolve() / BROKER)
    text = (
        f"made the fleet {settings.name} in {folder}: copy {folder / 'trust'} to each board, beside"
        f" its agent.toml, and keep {folder / 'keys'} to yourself. The broker runs with `{run}`"
    )
    row = {"folder": str(folder), **msgspec.to_builtins(settings)}
    print_result(row, text, as_json=options.as_json)


def rotate(options: Rotate) -> None:
    """Replace the keys of a role. Raises TandemError."""
    role = options.role
    repository = FleetRepository(options.folder)
    repository.rotate(role)
    row = next(row for row in repository.expiries() if row.role == role)
    text = f"{role} has a new key, version {row.version}, until {row.expires:%Y-%m-%d} UTC"
    print_result(row, text, as_json=options.as_json)


def publish(options: Publish) -> None:
    """Sign a bundle and add it to the repository. Raises TandemError, click.BadParameter."""
    bundle = options.bundle
    if bundle.startswith(REGISTRY):
        published = _from_registry(options)
    elif not Path(bundle).is_file():
        raise click.BadParameter(f"there is no file {bundle}", param_hint="BUNDLE")
    else:
        published = publish_bundle(FleetRepository(options.folder), Path(bundle), "")
    text = f"published {published.target}, {published.bytes / 1e6:.1f} MB"
    text += f"\nit is {published.source}" if published.source else ""
    print_result(published, text, as_json=options.as_json)


def _from_registry(options: Publish) -> Published:
    with (
        tempfile.TemporaryDirectory(prefix="tandem-pull-") as place,
        open_registry(options.bundle, options.registry) as client,
    ):
        resolved = resolve(client)
        path = Path(place) / "pulled.bundle"
        with progress_bar(client.reference.name) as report:
            pull(client, resolved, path, report)
        source = str(client.reference.at(resolved.digest))
        return publish_bundle(FleetRepository(options.folder), path, source)


def statement(options: Statement) -> None:
    """Write the statement by which one device installs a bundle. Raises TandemError."""
    data = make_statement(
        options.bundle,
        options.device,
        options.folder,
        retry=options.retry,
        gates=parse_gates(options.gates),
    )
    replace_file(options.out, data)
    text = f"wrote {options.out}, {len(data) / 1e3:.1f} kB, for {options.device}"
    print_result({"out": str(options.out), "bytes": len(data)}, text, as_json=options.as_json)


def refresh(options: Refresh) -> None:
    """Sign the timestamp again, and print until when each signature holds. Raises TandemError."""
    repository = FleetRepository(options.folder)
    repository.refresh()
    rows = repository.expiries()
    lines = [
        f"{row.role:10} version {row.version:4}  until {row.expires:%Y-%m-%d %H:%M} UTC"
        for row in rows
    ]
    print_result(rows, "\n".join(lines), as_json=options.as_json)
