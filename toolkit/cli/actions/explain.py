"""Explain the reasons in reports."""

import json
from dataclasses import asdict

import click

from toolkit.cli.commands.explain import Explain
from toolkit.engine.reasons import entries, entry_text, find, list_text


def explain(options: Explain) -> None:
    """Print one rule, or the list of all. Raises TandemError: there is none of that name."""
    shown = entries() if options.what is None else find(options.what)
    if options.as_json:
        click.echo(json.dumps([asdict(entry) for entry in shown]))
    elif options.what is None:
        click.echo(list_text())
    else:
        click.echo("\n\n".join(entry_text(entry) for entry in shown))
