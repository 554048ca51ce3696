"""Runs the site on an address, over TLS where the fleet has certificates for it."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from device.errors import ConfigError
from toolkit.errors import FleetError
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.server.otlp import OtlpPush
from toolkit.fleet.web.access import TrustedProxy, is_loopback
from toolkit.fleet.web.app import Site, SiteSettings
from toolkit.fleet.web.connection import MAX_CONNECTIONS, BoundedConnection


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the site is served: address and port; certificate and key in PEM, None: plain HTTP."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None


def parse_listen(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"{text!r} is no address to listen at: write HOST:PORT, 127.0.0.1:8080")
    return host.strip("[]"), int(port)


class SiteServer(uvicorn.Server):
    """Ends streams first where a signal stops it: it waits for requests that have begun."""

    def __init__(self, config: uvicorn.Config, site: Site) -> None:
        super().__init__(config)
        self.site = site

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called with the signal."""
        self.site.end()
        super().handle_exit(sig, frame)


def site_server(fleet: Fleet, listen: Listen, proxy: TrustedProxy | None = None) -> SiteServer:
    """Return what serves the site. Raises RolloutError: the store cannot be opened."""
    site = Site(fleet, SiteSettings(tls=listen.certificate is not None, proxy=proxy))
    config = uvicorn.Config(
        site.application(),
        host=listen.host,
        port=listen.port,
        ssl_certfile=listen.certificate,
        ssl_keyfile=listen.key,
        proxy_headers=False,
        server_header=False,
        http=BoundedConnection,
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        log_level="warning",
        timeout_graceful_shutdown=5,  # connections end before it
        h11_max_incomplete_event_size=64 << 10,
    )
    return SiteServer(config, site)


def serve_site(
    fleet: Fleet, listen: Listen, proxy: TrustedProxy | None = None, otlp: str | None = None
) -> None:
    """Serve until a signal stops it. `otlp`: the collector that its figures are sent to.

    Raises FleetError: passwords would cross a network in the clear, or the address is taken.
    """
    if listen.certificate is None and not is_loopback(listen.host):
        raise FleetError(
            f"{listen.host} is reached from other machines, and passwords would go there in the "
            "clear: give a certificate with its key, or listen at 127.0.0.1 behind a proxy"
        )
    try:
        server = site_server(fleet, listen, proxy)
        with ExitStack() as stack:
            if otlp is not None:
                push = OtlpPush(otlp, "tandem-fleet-web", server.site.figures)
                push.start()
                stack.callback(push.close)
            server.run()
    except OSError as error:
        raise FleetError(
            f"cannot listen at {listen.host}:{listen.port}: {error.strerror}"
        ) from error
