"""A shell of a board: its address, the login, and the password of sudo."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from toolkit.errors import BoardError
from toolkit.fleet.boards.shell import Shell
from toolkit.fleet.transports.addresses import Address, parse_address

SUDO_PASSWORD = "TANDEM_SUDO_PASSWORD"  # the name of a variable


def ask_password(login: str, refused: str | None = None) -> str:
    """Return the password of a login for sudo: of the environment, or asked for without echo.

    `refused`: the one that sudo has just not taken, None at first. Raises BoardError: nobody can be
    asked, or the environment has no other.
    """
    password = os.environ.get(SUDO_PASSWORD)
    if password is not None:
        if password == refused:
            raise BoardError(
                f"sudo does not take the password in {SUDO_PASSWORD} for {login}: set that of an "
                "administrator of the board"
            )
        return password
    if not sys.stdin.isatty():
        raise BoardError(
            f"sudo asks for the password of {login}, and there is no terminal to ask you: set "
            f"{SUDO_PASSWORD}, or log in as root"
        )
    if refused is not None:
        click.echo(f"sudo did not take this password of {login}: type it again", err=True)
    text: str = click.prompt(f"password of {login} for sudo", hide_input=True, err=True)
    return text


def ssh_address(text: str) -> Address:
    """Return the parts of an address of ssh://; UsageError for another way."""
    address = parse_address(text if "://" in text else f"ssh://{text}")
    if not address.text.startswith("ssh:") or not address.host:
        raise click.UsageError(f"{text}: this goes over SSH alone: write ssh://user@host")
    return address


@contextmanager
def open_shell(text: str) -> Iterator[Shell]:
    """Yield a shell of the board at an address of ssh://."""
    shell = Shell(ssh_address(text), ask_password)
    try:
        yield shell
    finally:
        shell.close()
