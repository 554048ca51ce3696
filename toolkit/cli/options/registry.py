"""Options of commands that speak to a registry, and the client that they make."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from toolkit.fleet.registry.client import RegistryClient

F = TypeVar("F", bound=Callable[..., Any])


def registry_options(function: F) -> F:
    """Add --ca and --plain-http."""
    for option in (
        click.option("--plain-http", is_flag=True, help="oci://: the registry has no TLS."),
        click.option(
            "--ca",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            envvar="TANDEM_REGISTRY_CA",
            show_envvar=True,
            metavar="FILE",
            help="oci://: certificates to trust.  [default: the system's]",
        ),
    ):
        function = option(function)
    return function


@contextmanager
def registry_client(text: str, ca: Path | None, *, plain_http: bool) -> "Iterator[RegistryClient]":
    """Yield a client for a reference. Raises RegistryError."""
    from toolkit.fleet.registry.client import RegistryClient
    from toolkit.fleet.registry.credentials import find_credentials
    from toolkit.fleet.registry.reference import parse_reference

    reference = parse_reference(text)
    client = RegistryClient(
        reference, find_credentials(reference.host), ca=ca, plain_http=plain_http
    )
    try:
        yield client
    finally:
        client.close()
