"""Print what this machine has for Tandem, and how to fix what it lacks."""

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from device.board_files import tandem_version
from device.errors import TandemError
from device.files import replacing
from device.selftest.private import scrub
from toolkit.cli.commands.doctor import Doctor, Job
from toolkit.cli.doctor import Result, examine, job_of
from toolkit.machine import this_machine

_COLOUR = {"ok": "green", "warning": "yellow", "missing": "dim"}


def doctor(options: Doctor) -> None:
    """Examine this machine; exits with 1 if something that the job needs is missing."""
    machine = this_machine()
    job = options.job or job_of(machine)
    results = examine(machine, job, options.broker)
    stopping = [result for result in results if result.stops(job)]
    if options.report is not None:
        write_report(options.report, job, results)
    if options.as_json:
        report = {"job": job, "ok": not stopping, "checks": [asdict(row) for row in results]}
        click.echo(json.dumps(report, indent=2))
    else:
        _print(results, job)
    if options.report is not None:
        click.echo(f"{options.report}: look through it, and attach it to the report", err=True)
    if stopping:
        raise click.exceptions.Exit(1)


def write_report(path: Path, job: Job, results: Iterable[Result]) -> None:
    """Write what a bug report needs, free of private names; raises TandemError."""
    document = {
        "tandem": tandem_version(),
        "python": platform.python_version(),
        "system": " ".join(platform.uname()[index] for index in (0, 2, 4)),
        "cores": os.cpu_count(),
        "job": job,
        "checks": [asdict(row) for row in results],
        "packages": {row.name: row.version for row in metadata.distributions()},
        "settings": sorted(name for name in os.environ if name.startswith("TANDEM_")),
    }
    text = json.dumps(_scrubbed(document), indent=2, sort_keys=True)
    try:
        with replacing(path) as file:
            file.write(f"{text}\n".encode())
    except OSError as error:
        raise TandemError(f"{path} cannot be written: {error}; give another file") from error


def _scrubbed(value: object) -> object:
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, list | tuple):
        return [_scrubbed(item) for item in value]
    if isinstance(value, dict):
        return {key: _scrubbed(item) for key, item in value.items()}
    return value


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
