"""`tandem explain`: what a reason in a report means, where it comes from and what to do."""

import json
from dataclasses import asdict

import click


@click.command(
    epilog="Examples: tandem explain G6; tandem explain shuffle.rank; tandem explain Resize"
)
@click.argument("what", required=False, metavar="[RULE]")
@click.option("--json", "as_json", is_flag=True, help="Print the entries as JSON.")
def explain(what: str | None, as_json: bool) -> None:
    """Explain a RULE: the id in a report such as P2 or shuffle.rank; without one, list all.

    An operator such as Resize gives all rules that bind it; the text of a reason that a build
    gives for the GPU works too. `tandem plan --explain NODE` applies the rules to a node.
    """
    from toolkit.engine.reasons import entries, entry_text, find, list_text

    shown = entries() if what is None else find(what)
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in shown]))
    elif what is None:
        click.echo(list_text())
    else:
        click.echo("\n\n".join(entry_text(entry) for entry in shown))
