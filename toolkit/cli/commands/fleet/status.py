"""`tandem fleet status`: what of a fleet ends soon."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from toolkit.cli.options.fleet import fleet_option, json_option

if TYPE_CHECKING:
    from toolkit.fleet.endings import Ending

# Urgency -> exit status of --check.
STATUSES = {"fine": 0, "soon": 3, "urgent": 4, "over": 4}


@click.command(epilog="Example: tandem fleet status --fleet fleet --check --due")
@click.option("--check", is_flag=True,
    help="Exit with 3 if something ends soon (30 days), with 4 if in 7 days or over.")  # fmt: skip
@click.option("--due", is_flag=True, help="Show what needs attention alone.")
@fleet_option
@json_option
def status(check: bool, due: bool, folder: Path, as_json: bool) -> None:
    """Show when signatures and certificates end, and what to do before.

    What `tandem fleet serve` renews by itself needs attention only if it did not. By a timer, use
    --check --due: it prints nothing and exits with 0 while all is fine.
    """
    from toolkit.fleet.endings import most_urgent, read_endings, urgency, utc_now

    now = utc_now()
    endings = read_endings(folder)

    def is_shown(row: "Ending") -> bool:
        # A fleet has thousands of devices: those whose certificate is fine are not listed.
        return urgency(row, now) != "fine" or not (due or row.kind == "device")

    shown = [row for row in endings if is_shown(row)]
    if as_json:
        rows = [
            {"kind": row.kind, "name": row.name, "ends": row.ends, "urgency": urgency(row, now),
                "remedy": row.remedy}
            for row in shown
        ]  # fmt: skip
        click.echo(msgspec.json.encode(rows))
    elif shown:
        _print(shown)
    if check:
        sys.exit(STATUSES[most_urgent(endings, now)])


def _print(endings: "Sequence[Ending]") -> None:
    from rich.console import Console
    from rich.table import Table

    from toolkit.fleet.endings import urgency, utc_now

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
