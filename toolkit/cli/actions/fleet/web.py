"""Run the page of a fleet."""

import signal
import sys

import click

from toolkit.cli.commands.fleet import Web
from toolkit.errors import FleetError
from toolkit.fleet.fleet_folder import load_fleet


def web(options: Web) -> None:
    """Serve until a signal stops it. Raises TandemError."""
    try:
        from toolkit.fleet.web.access import TrustedProxy
        from toolkit.fleet.web.serve import Listen, parse_listen, serve_site
    except ModuleNotFoundError as error:
        raise FleetError(
            f"the page needs {error.name}: {sys.executable} -m pip install 'tandem-edge[web]'"
        ) from error
    if (options.certificate is None) != (options.key is None):
        raise FleetError("a certificate needs its key, and a key its certificate: give both")
    fleet = load_fleet(options.folder)
    host, port = parse_listen(options.listen)
    proxy = None
    if options.trust_header is not None:
        proxy = TrustedProxy(options.trust_header, frozenset(options.trust_from))
    scheme = "http" if options.certificate is None else "https"
    for number in (signal.SIGTERM, signal.SIGINT):  # the server raises again what has stopped it
        signal.signal(number, lambda _number, _frame: None)
    click.echo(f"serves {fleet.file.name} at {scheme}://{host}:{port}/")
    listen = Listen(host, port, options.certificate, options.key)
    serve_site(fleet, listen, proxy, options.otlp)
