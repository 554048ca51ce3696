"""`tandem doctor`: what this machine has for Tandem, and how to fix what it lacks."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import get_args

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolkit.cli.doctor import Job, Result, examine, job_of
from toolkit.machine import this_machine

_EPILOG = """\b
Examples:
  tandem doctor                          what this machine lacks for its job
  tandem doctor --job demo               for `tandem demo`
  tandem doctor --broker 10.0.0.2:1883   whether that broker accepts a client
"""
_COLOUR = {"ok": "green", "warning": "yellow", "missing": "dim"}


class _Address(click.ParamType[tuple[str, int]]):
    """HOST or HOST:PORT, with [brackets] around an IPv6 host."""

    name = "host:port"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        host, colon, port = str(value).rpartition(":")
        if not colon or str(value).endswith("]"):
            host, port = str(value), "1883"
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            self.fail(f"{value!r} is not HOST:PORT with a port from 1 to 65535", param, ctx)
        return host.strip("[]"), int(port)


@click.command(epilog=_EPILOG)
@click.option("--broker", type=_Address(), help="Also try an MQTT broker (default port 1883).")
@click.option(
    "--job",
    type=click.Choice(get_args(Job)),
    help="What the machine is for: builds, running on a board, or the demo.  "
    "[default: board on a Jetson, else host]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(broker: tuple[str, int] | None, job: Job | None, as_json: bool) -> None:
    """Check what this machine has for Tandem.

    Exit status 1 if something that the job needs is missing.
    """
    machine = this_machine()
    job = job or job_of(machine)
    results = examine(machine, job, broker)
    stopping = [result for result in results if result.stops(job)]
    if as_json:
        report = {"job": job, "ok": not stopping, "checks": [asdict(row) for row in results]}
        click.echo(json.dumps(report, indent=2))
    else:
        _print(results, job)
    if stopping:
        sys.exit(1)


def _print(results: Iterable[Result], job: Job) -> None:
    console = Console()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found")
    table.add_column("needed for")
    table.add_column("helps")
    for row in results:
        colour = "bold red" if row.stops(job) else _COLOUR[row.status]
        jobs = ["/".join(row.needed_for) or "-", "/".join(row.helps) or "-"]
        table.add_row(row.name, f"[{colour}]{row.status}[/]", escape(row.found), *jobs)
    console.print(table)
    stopping = [row for row in results if row.stops(job)]
    for title, rows in (
        (f"Needed for this machine's job ({job})", stopping),
        ("Would help", [row for row in results if row.slows(job)]),
    ):
        if rows:
            console.print(f"\n[bold]{title}[/]", highlight=False)
        for row in rows:
            console.print(f"- {row.name}: {escape(row.why)}.", highlight=False)
            console.print(f"    {escape(row.fix)}", highlight=False, soft_wrap=True)
    if not stopping:
        console.print(f"\nThis machine has what its job ({job}) needs.", highlight=False)
