"""Make, list and remove the accounts of the fleet's page and API."""

import click

from toolkit.cli.actions.fleet.views import open_store
from toolkit.cli.actions.outputs import print_result
from toolkit.cli.commands.fleet import AddAccount, ListAccounts, RemoveAccount, Token
from toolkit.fleet.store import accounts

DAY_S = 86400.0


def add(options: AddAccount) -> None:
    """Add a person, or give one another role or password. Raises RolloutError."""
    password = (
        options.password_file.readline().rstrip("\r\n")
        if options.password_file is not None
        else click.prompt("Password", hide_input=True, confirmation_prompt=True)
    )
    with open_store(options.folder) as database:
        accounts.add_account(database, options.name, options.role, password)
    click.echo(f"{options.name} is {options.role}")


def token(options: Token) -> None:
    """Print the new token of a program. Raises RolloutError."""
    with open_store(options.folder) as database:
        text = accounts.add_token(
            database, options.name, options.role, lifetime_s=options.days * DAY_S
        )
    click.echo(text)


def list_accounts(options: ListAccounts) -> None:
    """Print people and tokens."""
    with open_store(options.folder) as database:
        rows = accounts.load_accounts(database)
    lines = [f"{row.name}  {row.role}  {row.kind}" for row in rows]
    text = "\n".join(lines) or "no accounts yet"
    print_result(rows, text, as_json=options.as_json)


def remove(options: RemoveAccount) -> None:
    """Remove a person or a token. Raises RolloutError: there is none."""
    with open_store(options.folder) as database:
        accounts.remove_account(database, options.name)
    click.echo(f"{options.name} is removed")
