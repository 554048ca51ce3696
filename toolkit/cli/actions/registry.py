"""The client of a registry, for `tandem bundle` and `tandem fleet publish`."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from toolkit.cli.options.fleet import RegistryOptions
from toolkit.fleet.registry.client import RegistryClient
from toolkit.fleet.registry.credentials import find_credentials
from toolkit.fleet.registry.reference import parse_reference


@contextmanager
def open_registry(text: str, options: RegistryOptions) -> Iterator[RegistryClient]:
    """Yield a client for a reference. Raises RegistryError."""
    reference = parse_reference(text)
    credentials = find_credentials(reference.host)
    client = RegistryClient(reference, credentials, ca=options.ca, plain_http=options.plain_http)
    with closing(client):
        yield client
