"""Print who is silent, and what of a fleet ends soon."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from toolkit.cli.actions.fleet.views import open_store
from toolkit.cli.commands.fleet import Status
from toolkit.fleet.folder import SETTINGS
from toolkit.fleet.rollout.liveness import Outage
from toolkit.fleet.server import expiry
from toolkit.fleet.server.silence import sentence
from toolkit.fleet.server.times import utc
from toolkit.fleet.server.views import read_outages

MAX_OUTAGES = 20  # that are listed
# Urgency -> exit status of --check.
STATUSES = {"fine": 0, "soon": 3, "urgent": 4, "over": 4}


def status(options: Status) -> None:
    """Print the outages and what ends; exits with 3 or 4 with --check. Raises TandemError."""
    now = expiry.utc_now()
    items, silent = expiry.read_expiry(options.folder), _silent(options.folder)

    def is_shown(row: expiry.ExpiringItem) -> bool:
        # A fleet has thousands of devices: those whose certificate is fine are not listed.
        return expiry.urgency(row, now) != "fine" or not (options.due or row.kind == "device")

    shown = [row for row in items if is_shown(row)]
    if options.as_json:
        rows = [
            {"kind": row.kind, "name": row.name, "ends": row.ends,
                "urgency": expiry.urgency(row, now), "remedy": row.remedy}
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
    if options.check:
        sys.exit(STATUSES[expiry.most_urgent(items, now)])


def _silent(folder: Path) -> Sequence[Outage]:
    """Return the outages of a fleet; one that was never served has none."""
    if not (folder / SETTINGS).exists():
        return ()
    with open_store(folder) as database:
        return read_outages(database)


def _print_silent(silent: Sequence[Outage]) -> None:
    for event in silent[:MAX_OUTAGES]:
        click.echo(sentence(event))
    if len(silent) > MAX_OUTAGES:
        click.echo(f"and {len(silent) - MAX_OUTAGES} more: `tandem fleet devices --state silent`")


def _print(items: Sequence[expiry.ExpiringItem]) -> None:
    now = expiry.utc_now()
    table = Table("what", "", "ends (UTC)", "", "do", box=None)
    for row in items:
        state = expiry.urgency(row, now)
        name = "" if row.name == row.kind else row.name
        remedy = "" if state == "fine" else row.remedy
        words = "" if state == "fine" else state
        style = {"soon": "yellow", "urgent": "red", "over": "red"}.get(state, "")
        table.add_row(row.kind, name, f"{row.ends:%Y-%m-%d}", words, remedy, style=style)
    Console().print(table)
