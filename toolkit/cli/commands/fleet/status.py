"""`tandem fleet status`: who is silent, and what of a fleet ends soon."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from toolkit.cli.options.fleet import fleet_option, json_option

if TYPE_CHECKING:
    from toolkit.fleet.rollout.liveness import Outage
    from toolkit.fleet.server.expiry import ExpiringItem

MAX_OUTAGES = 20  # that are listed
# Urgency -> exit status of --check.
STATUSES = {"fine": 0, "soon": 3, "urgent": 4, "over": 4}


@click.command(epilog="Example: tandem fleet status --fleet fleet --check --due")
@click.option("--check", is_flag=True,
    help="Exit with 3 if something ends soon (30 days), with 4 if in 7 days or over.")  # fmt: skip
@click.option("--due", is_flag=True, help="Show what needs attention alone.")
@fleet_option
@json_option
def status(check: bool, due: bool, folder: Path, as_json: bool) -> None:
    """Show which devices are silent, and when signatures and certificates end.

    Devices of one site that fell silent together are one row; they do not count for --check.
    What `tandem fleet serve` renews by itself needs attention only if it did not. By a timer, use
    --check --due: it prints nothing and exits with 0 while all is fine.
    """
    from toolkit.fleet.server.expiry import most_urgent, read_expiry, urgency, utc_now
    from toolkit.fleet.server.times import utc

    now = utc_now()
    endings, silent = read_expiry(folder), _silent(folder)

    def is_shown(row: "ExpiringItem") -> bool:
        # A fleet has thousands of devices: those whose certificate is fine are not listed.
        return urgency(row, now) != "fine" or not (due or row.kind == "device")

    shown = [row for row in endings if is_shown(row)]
    if as_json:
        rows = [
            {"kind": row.kind, "name": row.name, "ends": row.ends, "urgency": urgency(row, now),
                "remedy": row.remedy}
            for row in shown
        ]  # fmt: skip
        rows += [
            {"kind": "silent", "name": event.place, "devices": event.devices, "of": event.of,
                "since": utc(event.since_s)}
            for event in silent
        ]  # fmt: skip
        click.echo(msgspec.json.encode(rows))
    else:
        _print_silent(silent)
        if shown:
            _print(shown)
    if check:
        sys.exit(STATUSES[most_urgent(endings, now)])


def _silent(folder: Path) -> "Sequence[Outage]":
    """Return the outages of a fleet; one that was never served has none."""
    from toolkit.fleet.fleet_folder import load_fleet
    from toolkit.fleet.folder import SETTINGS
    from toolkit.fleet.server.views import read_outages

    if not (folder / SETTINGS).exists():
        return ()
    database = load_fleet(folder).open_store()
    try:
        return read_outages(database)
    finally:
        database.close()


def _print_silent(silent: "Sequence[Outage]") -> None:
    from toolkit.fleet.server.silence import sentence

    for event in silent[:MAX_OUTAGES]:
        click.echo(sentence(event))
    if len(silent) > MAX_OUTAGES:
        click.echo(f"and {len(silent) - MAX_OUTAGES} more: `tandem fleet devices --state silent`")


def _print(endings: "Sequence[ExpiringItem]") -> None:
    from rich.console import Console
    from rich.table import Table

    from toolkit.fleet.server.expiry import urgency, utc_now

    now = utc_now()
    table = Table("what", "", "ends (UTC)", "", "do", box=None)
    for row in endings:
        state = urgency(row, now)
        name = "" if row.name == row.kind else row.name
        remedy = "" if state == "fine" else row.remedy
        words = "" if state == "fine" else state
        style = {"soon": "yellow", "urgent": "red", "over": "red"}.get(state, "")
        table.add_row(row.kind, name, f"{row.ends:%Y-%m-%d}", words, remedy, style=style)
    Console().print(table)
