"""`tandem fleet audit`: the log of everything that was ordered and sent."""

from pathlib import Path

import click

from toolkit.cli.options.fleet import fleet_option, json_option


@click.group(epilog="Example: tandem fleet audit verify --fleet fleet/")
def audit() -> None:
    """Check the audit log."""


@audit.command(epilog="Example: tandem fleet audit verify --fleet fleet/ --head 5f3a...")
@fleet_option
@click.option("--head", default="", metavar="HASH",
    help="A hash that was printed before: it must still be in the log.")  # fmt: skip
@json_option
def verify(folder: Path, head: str, as_json: bool) -> None:
    """Check that no row of the log was changed, taken out or put in.

    Each row holds the hash of the one before. Note the hash that is printed somewhere else: with
    --head it shows later that the end of the log was not cut off.
    """
    import msgspec

    from toolkit.fleet.fleet_folder import load_fleet
    from toolkit.fleet.store import log

    database = load_fleet(folder).open_store()
    try:
        verified = log.verify(database, head)
    finally:
        database.close()
    if as_json:
        click.echo(msgspec.json.encode(verified).decode())
    else:
        click.echo(f"The audit log holds: {verified.rows} rows, the last hash is {verified.head}")
